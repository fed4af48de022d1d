#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"

namespace resilient {

// How fast a connection with BBR may send while it starts up. BBR ends its
// start-up only after rounds in which there was always more to send. Bursts
// have none, so each of them would leave nearly three times as fast as the link
// carries it, and what the queue of the link cannot hold would be lost. Once
// a queue has shown that the link is full, the rest of the start-up goes on
// a little faster than what has arrived: it still finds out if the link is
// faster than that.
class StartUpPacing {
 public:
  struct Sample {
    bool startingUp = false;
    uint64_t bytesPerS = 0; // the highest at which data has arrived lately
    Nanos roundTrip{};
    Nanos minRoundTrip{};
  };

  // Called every now and then. In bytes per second; 0: no limit.
  uint64_t observe(const Sample& s) {
    if (!s.startingUp) {
      limit_ = 0;
      return limit_;
    }
    const double onTheWire =
        static_cast<double>(s.bytesPerS) * toSeconds(s.minRoundTrip);
    const bool full = onTheWire >= kEnough && s.minRoundTrip > Nanos(0) &&
        s.roundTrip > s.minRoundTrip * 5 / 4 + kShortQueue;
    const uint64_t faster = s.bytesPerS + s.bytesPerS / 4;
    limit_ = full || limit_ != 0 ? std::max(limit_, faster) : 0;
    return limit_;
  }

 private:
  // Other traffic and kernel timers add this to a round trip.
  static constexpr Nanos kShortQueue = std::chrono::milliseconds(2);
  // The rate of a connection that has carried little is not known: the queue is
  // that of others.
  static constexpr double kEnough = 256 << 10;

  uint64_t limit_ = 0;
};

} // namespace resilient
