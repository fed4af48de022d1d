#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/time.h"

namespace resilient {

// The numbers of the packets that have come: which come twice, which do not
// come, and how long to wait for those that are merely late.
//
// How it works. A ring of kWindow bits says which of the latest numbers have
// come. `marks_` notes when the largest number grew. Once a mark is older than
// the reorder time, every number up to it that is missing counts as lost
// (`judged_`). A number that comes after that verdict takes its loss back and
// doubles the reorder time: the path reorders more than was thought. The round
// trip bounds that time.
class PacketNumbers {
 public:
  PacketNumbers() : seen_(kWindow, false) {}

  // False: a duplicate, or too old to tell. A packet counts only once, so a
  // replayed copy changes nothing (packet_receiver_ignores_replayed_packets).
  // The seal must have been checked: `n` may jump by any amount.
  bool insert(uint64_t n, size_t bytes, TimePoint now) {
    if (n == 0 || n + kWindow <= largest_) {
      return false;
    }
    if (n > largest_) {
      const uint64_t first =
          std::max(largest_ + 1, n - std::min(n, kWindow - 1));
      // Numbers that fall out of the window without a verdict are lost.
      judge(n >= kWindow ? n - kWindow : 0);
      for (uint64_t i = first; i < n; ++i) {
        seen_[i % kWindow] = false;
      }
      largest_ = n;
      if (marks_.empty() || now - marks_.back().first >= reorder_ / 4) {
        marks_.emplace_back(now, n);
      } else {
        marks_.back().second = n;
      }
    } else if (seen_[n % kWindow]) {
      return false;
    } else if (n <= judged_) {
      late();
    }
    seen_[n % kWindow] = true;
    lastAt_ = now;
    ++packets_;
    bytes_ += bytes;
    return true;
  }

  // Numbers that are still missing after their time are lost. An early call
  // does nothing.
  void advance(TimePoint now) {
    uint64_t upTo = judged_;
    while (!marks_.empty() && marks_.front().first + reorder_ <= now) {
      upTo = marks_.front().second;
      marks_.pop_front();
    }
    judge(upTo);
  }
  // When advance() has something to do.
  TimePoint deadline() const {
    return marks_.empty() ? kNever : marks_.front().first + reorder_;
  }

  // The round trip, as the sender knows it, bounds what waiting costs.
  void setRoundTrip(Nanos roundTrip) {
    roundTrip_ = roundTrip;
    reorder_ = std::min(std::max(reorder_, min()), max());
  }
  // How long a packet may come later than one that left after it.
  Nanos reorderTime() const {
    return reorder_;
  }
  uint64_t largest() const {
    return largest_;
  }
  TimePoint lastAt() const { // any packet
    return lastAt_;
  }
  Nanos roundTrip() const {
    return roundTrip_;
  }
  uint64_t packets() const {
    return packets_;
  }
  uint64_t bytes() const {
    return bytes_;
  }
  // Falls again when a packet that counted as lost comes after all.
  uint64_t lost() const {
    return lost_;
  }
  uint64_t bursts() const {
    return bursts_;
  }

 private:
  static constexpr uint64_t kWindow = 1u << 15;
  // Interrupts and offloads reorder within this, also where routers do not.
  static constexpr Nanos kMin = std::chrono::microseconds(500);

  Nanos min() const {
    return std::max(kMin, roundTrip_ / 32);
  }
  Nanos max() const {
    return std::max(kMin, roundTrip_ / 2);
  }

  void judge(uint64_t upTo) {
    for (; judged_ < std::min(upTo, largest_); ++judged_) {
      const bool missing = !seen_[(judged_ + 1) % kWindow];
      lost_ += missing;
      bursts_ += missing && !lastMissing_;
      lastMissing_ = missing;
    }
    if (judged_ < upTo) { // one burst: the peer may skip any count of numbers
      lost_ += upTo - judged_;
      bursts_ += !lastMissing_;
      lastMissing_ = true;
      judged_ = upTo;
    }
  }
  // The path reorders more than was thought.
  void late() {
    lost_ -= lost_ > 0;
    reorder_ = std::min(2 * reorder_, max());
  }

  std::vector<bool> seen_; // by number modulo kWindow
  uint64_t largest_ = 0;
  TimePoint lastAt_{};
  uint64_t packets_ = 0, bytes_ = 0;
  uint64_t judged_ = 0; // up to here, what is missing is lost
  bool lastMissing_ = false;
  uint64_t lost_ = 0, bursts_ = 0;
  Nanos roundTrip_{};
  Nanos reorder_ = kMin;
  std::deque<std::pair<TimePoint, uint64_t>> marks_; // when which was largest
};

} // namespace resilient
