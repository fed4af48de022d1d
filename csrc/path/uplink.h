#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "base/time.h"
#include "path/rate_limit.h"

namespace resilient {

// All that this process sends to another site, and the declared limit on it.
//
// Frames wait here for their turn if there is a limit, and the most urgent goes
// first: the site serves one pipeline after the other. Without one, they would
// wait in a queue of the network, which serves all alike. A measured limit does
// not do: the arrivals tell what a way carries only while it is full, and
// pipelines keep it full for too short a time. So a process without a limit is
// no relay for others' activations while it sends its own.
//
// Paper: ATLAS §4.3, temporal bandwidth sharing, which plans what this does
// message by message.
//
// Pure. A user is a link, by the number of its channel.
class Uplink {
 public:
  Uplink(std::optional<double> declared, uint64_t starvationBytes) {
    if (declared) {
      const auto most =
          static_cast<uint64_t>(*declared * toSeconds(kWaitsAtMost));
      limit_ = std::make_unique<RateLimit>(
          *declared, std::min(starvationBytes, most));
    }
  }

  // What the way carries in our turn; 0: unknown.
  double bytesPerS() const {
    return limit_ ? limit_->bytesPerS() : 0;
  }
  // Null without a limit.
  RateLimit* limit() {
    return limit_.get();
  }

  // Before a user sends: activations of its own wait for this way, or for
  // others.
  void
  onWaiting(RateLimit::User user, bool own, bool forOthers, TimePoint now) {
    if (own || forOthers) {
      Use& use = users_[user];
      use.activeAt = now;
      use.forOthersAt = forOthers ? now : use.forOthersAt;
      ownAt_ = own ? now : ownAt_;
    }
  }
  void leave(RateLimit::User user) {
    if (limit_) {
      limit_->leave(user);
    }
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
  // Others' activations would only delay our own.
  bool needsItself(TimePoint now) const {
    return !limit_ && now - ownAt_ < kOwnMemory;
  }

 private:
  struct Use {
    TimePoint activeAt{}; // the last time that activations waited
    TimePoint forOthersAt{}; // and such as are for others
  };
  // Several times the time between microbatches.
  static constexpr Nanos kMemory = std::chrono::seconds(1);
  // An iteration, with the part of it in which nothing is sent.
  static constexpr Nanos kOwnMemory = std::chrono::seconds(5);
  // Others may go first for so long. Any longer, and a path over a relay would
  // count as silent.
  static constexpr Nanos kWaitsAtMost = std::chrono::milliseconds(100);

  std::unique_ptr<RateLimit> limit_;
  std::map<RateLimit::User, Use> users_;
  TimePoint ownAt_ = TimePoint() - 2 * kOwnMemory;
};

} // namespace resilient
