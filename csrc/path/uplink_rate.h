#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/time.h"

namespace resilient {

// The rate of a way that several senders share, measured by what arrives over
// it. A sample is what arrived in an interval that begins and ends with an
// arrival. It is full if somebody had more to send all the while, and then says
// what the way carries. Until the first full one, any other counts as a lower
// bound. Acknowledgements come in bunches, so the highest samples exaggerate
// and are left out.
//
// A sender that keeps to the measured rate measures no more than that.
// allowed() is therefore above the rate for one interval in kLook, and stays
// above it while more arrives. Otherwise it is a little below, so that no queue
// stays in the network.
class UplinkRate {
 public:
  // 0 while unknown.
  double bytesPerS() const {
    return rate_;
  }
  double allowed() const {
    return rate_ * (looks_ ? kMore : kLess);
  }
  // `backlogged`: somebody has had more to send.
  void onArrived(uint64_t bytes, bool backlogged, TimePoint now) {
    const bool gap = now - lastAt_ > kGap;
    lastAt_ = now;
    if (gap) {
      begin(now);
      return; // when it was sent is not known
    }
    bytes_ += bytes;
    isFull_ = isFull_ && backlogged;
    const Nanos took = now - beganAt_;
    if (took < kInterval) {
      return;
    }
    const double rate = static_cast<double>(bytes_) / toSeconds(took);
    if (isFull_) {
      addFull(rate);
    } else if (fullSamples_ == 0) {
      rate_ = std::max(rate_, rate);
    }
    begin(now);
  }

 private:
  // Long against the delay of acknowledgements (5 ms), short against a message
  // that is worth a relay.
  static constexpr Nanos kInterval = std::chrono::milliseconds(40);
  // Arrivals over a busy way are closer together: the sender has paused.
  static constexpr Nanos kGap = std::chrono::milliseconds(100);
  // About a second of sending: a fault that passes must not stay known longer.
  static constexpr size_t kSamples = 32;
  // Of so many samples, the highest is left out.
  static constexpr size_t kSkip = 16;
  // What BBR does: one interval in eight with a quarter more.
  static constexpr size_t kLook = 8;
  static constexpr double kMore = 1.25;
  // Below what the samples' noise adds.
  static constexpr double kLess = 0.96;
  // So much of what was allowed has arrived: there is more.
  static constexpr double kEffect = 0.95;

  void begin(TimePoint now) {
    beganAt_ = now;
    bytes_ = 0;
    isFull_ = true;
  }
  void addFull(double rate) {
    const bool more = looks_ && rate >= kEffect * rate_ * kMore;
    full_[fullSamples_++ % full_.size()] = rate;
    auto sorted = full_;
    const size_t skipped = std::min(fullSamples_, full_.size()) / kSkip;
    std::ranges::nth_element(sorted, sorted.begin() + skipped, std::greater());
    rate_ = more ? std::max(rate, sorted[skipped]) : sorted[skipped];
    looks_ = more || fullSamples_ % kLook == 0;
  }

  double rate_ = 0;
  std::array<double, kSamples> full_{};
  size_t fullSamples_ = 0;
  TimePoint beganAt_{};
  TimePoint lastAt_{};
  uint64_t bytes_ = 0;
  bool isFull_ = false;
  bool looks_ = false;
};

} // namespace resilient
