#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

#include "base/time.h"
#include "path/rate_limit.h"
#include "path/uplink_rate.h"

namespace resilient {

// All that this process sends to another site, and the limit on it. The limit
// is the declared one. Without one, it is what the way has been measured to
// carry, but only while activations of several pipelines meet here. They would
// otherwise meet in a queue of the network, which serves all alike. So they
// wait here, and the most urgent one goes first.
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

  // The rate that decides how large a chunk may be; 0: there is no limit.
  double pacedBytesPerS() const {
    return limit_.bytesPerS() < kUnlimited ? limit_.bytesPerS() : 0;
  }
  bool declared() const {
    return declared_.has_value();
  }
  RateLimit& limit() {
    return limit_;
  }
  // Updates the limit; null if there is none now. It stays until nobody waits
  // for a turn any more.
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
    if (own || forOthers) {
      Use& use = users_[user];
      use.activeAt = now;
      use.forOthersAt = forOthers ? now : use.forOthersAt;
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
      rate_.onArrived(arrivedBytes, anyBacklogged(), now);
    }
    users_[user].backlogged = backlogged;
  }
  void leave(RateLimit::User user) {
    limit_.leave(user);
    users_.erase(user);
  }
  // Of at least two users with activations lately, one had some for others.
  bool contended(TimePoint now) const {
    int active = 0;
    bool forOthers = false;
    for (const auto& [user, use] : users_) {
      active += now - use.activeAt < kMemory;
      forOthers = forOthers || now - use.forOthersAt < kMemory;
    }
    return active >= 2 && forOthers;
  }

 private:
  struct Use {
    TimePoint activeAt{}; // the last time that activations waited
    TimePoint forOthersAt{}; // and such as are for others
    bool backlogged = false;
  };
  static constexpr double kUnlimited = 1e15;
  // A way that is slower than this has other troubles than the order.
  static constexpr double kLeastBytesPerS = 500e3;
  // Several times the time between microbatches.
  static constexpr Nanos kMemory = std::chrono::seconds(1);
  // Others may go first for so long. Any longer, and a path over a relay would
  // count as silent.
  static constexpr Nanos kWaitsAtMost = std::chrono::milliseconds(100);

  bool anyBacklogged() const {
    return std::ranges::any_of(
        users_, [](const auto& each) { return each.second.backlogged; });
  }
  void limitTo(double bytesPerS) {
    const auto most =
        static_cast<uint64_t>(bytesPerS * toSeconds(kWaitsAtMost));
    limit_.set(bytesPerS, std::min(starvationBytes_, most));
  }

  const std::optional<double> declared_;
  const uint64_t starvationBytes_;
  RateLimit limit_;
  UplinkRate rate_;
  std::map<RateLimit::User, Use> users_;
};

} // namespace resilient
