#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "base/time.h"
#include "path/rate_limit.h"

namespace resilient {

// The rate of a way that several senders share, by what arrives over it. A
// sample is what arrived in an interval that begins and ends with an arrival.
// One in which somebody had more to send all the while is full: it says what
// the way carries. Any other says that it carries so much at least. Of the
// latest full samples some of the highest are taken for exaggerated, since
// acknowledgements come in bunches.
//
// Who sends no faster than a rate measures no more than that, so allowed() is
// above it for one interval in kLook, and for as long as that brings more, and
// else a little below, so that no queue stays in the network.
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
      const bool more = looks_ && rate >= kEffect * rate_ * kMore;
      full_[fullSamples_++ % full_.size()] = rate;
      auto highest = full_;
      const size_t skipped = std::min(fullSamples_, full_.size()) / kSkip;
      std::ranges::nth_element(
          highest, highest.begin() + skipped, std::greater());
      rate_ = more ? std::max(rate, highest[skipped]) : highest[skipped];
      looks_ = more || fullSamples_ % kLook == 0;
    } else if (fullSamples_ == 0) {
      rate_ = std::max(rate_, rate);
    }
    begin(now);
  }

 private:
  // Long against the delay of acknowledgements, short against a message that
  // is worth a relay.
  static constexpr Nanos kInterval = std::chrono::milliseconds(40);
  static constexpr Nanos kGap = std::chrono::milliseconds(100);
  static constexpr size_t kSamples = 32;
  static constexpr size_t kSkip = 16; // of so many, the highest
  static constexpr size_t kLook = 8;
  static constexpr double kMore = 1.25, kLess = 0.96;
  static constexpr double kEffect = 0.95; // of what was allowed

  void begin(TimePoint now) {
    beganAt_ = now;
    bytes_ = 0;
    isFull_ = true;
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

// All that this process sends to another site, and the limit on it: the one
// that is declared, or else, while activations of several pipelines meet here,
// what the way has been measured to carry. Without that limit they would meet
// in a queue of the network, which serves all alike; so they wait here, and the
// most urgent one goes first.
//
// Paper: ATLAS §4.3, temporal bandwidth sharing, which plans what this does
// message by message.
//
// Pure. A user is a link, by the number of its channel.
class Uplink {
 public:
  Uplink(std::optional<double> declared, uint64_t starvationBytes)
      : declared_(declared),
        starvationBytes_(starvationBytes),
        limit_(kUnlimited, starvationBytes) {
    if (declared) {
      limitTo(*declared);
    }
  }

  // What is sent there should be in pieces that are short at this rate; 0:
  // there is no limit.
  double pacedBytesPerS() const {
    return limit_.bytesPerS() < kUnlimited ? limit_.bytesPerS() : 0;
  }
  bool declared() const {
    return declared_.has_value();
  }
  RateLimit& limit() {
    return limit_;
  }
  // The limit at this moment, or null. Who waits for its turn has to get it, so
  // the limit stays until nobody does.
  RateLimit* limitNow(TimePoint now) {
    if (declared_) {
      return &limit_;
    }
    if (rate_.bytesPerS() > kLeastBytesPerS && contended(now)) {
      limitTo(rate_.allowed());
      return &limit_;
    }
    limit_.set(kUnlimited, starvationBytes_);
    return limit_.waiting() ? &limit_ : nullptr;
  }

  // Before a user sends: activations of its own wait for this way, or for
  // others.
  void
  onWaiting(RateLimit::User user, bool own, bool forOthers, TimePoint now) {
    if (own) {
      ownAt_[user] = now;
    }
    if (forOthers) {
      forOthersAt_[user] = now;
    }
  }
  // After it has sent what it may: so much has arrived since it was asked last,
  // and more waits or not.
  void onSent(
      RateLimit::User user,
      uint64_t arrivedBytes,
      bool backlogged,
      TimePoint now) {
    if (arrivedBytes != 0) {
      rate_.onArrived(arrivedBytes, backlogged_ != 0, now);
    }
    bool& before = backloggedUsers_[user];
    backlogged_ += backlogged - before;
    before = backlogged;
  }
  void leave(RateLimit::User user) {
    limit_.leave(user);
    onSent(user, 0, false, TimePoint());
    backloggedUsers_.erase(user);
    ownAt_.erase(user);
    forOthersAt_.erase(user);
  }
  // Activations for others have come lately, and any of another user.
  bool contended(TimePoint now) const {
    const auto recent = [&](const Times::value_type& each) {
      return now - each.second < kMemory;
    };
    for (const auto& [user, at] : forOthersAt_) {
      const auto another = [&, u = user](const Times::value_type& each) {
        return each.first != u && recent(each);
      };
      if (now - at < kMemory &&
          (std::ranges::any_of(ownAt_, another) ||
           std::ranges::any_of(forOthersAt_, another))) {
        return true;
      }
    }
    return false;
  }

 private:
  using Times = std::map<RateLimit::User, TimePoint>;
  static constexpr double kUnlimited = 1e15;
  // A way that is slower than this has other troubles than the order.
  static constexpr double kLeastBytesPerS = 500e3;
  // Several times the time between microbatches.
  static constexpr Nanos kMemory = std::chrono::seconds(1);
  // So long may others go first. Beyond, a path over a relay would count as
  // silent.
  static constexpr Nanos kWaitsAtMost = std::chrono::milliseconds(100);

  void limitTo(double bytesPerS) {
    const auto most =
        static_cast<uint64_t>(bytesPerS * toSeconds(kWaitsAtMost));
    limit_.set(bytesPerS, std::min(starvationBytes_, most));
  }

  const std::optional<double> declared_;
  const uint64_t starvationBytes_;
  RateLimit limit_;
  UplinkRate rate_;
  Times ownAt_, forOthersAt_;
  std::map<RateLimit::User, bool> backloggedUsers_;
  int backlogged_ = 0; // users
};

} // namespace resilient
