#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"

namespace resilient {

// How fast the connections of one route may send together, where BBR paces
// them. Each of them believes that it may send as fast as it once did alone,
// and nearly three times as fast while it starts up, which ends only after
// rounds in which there was always more to send. Bursts have none. So each
// burst would leave several times as fast as the link carries it, and what the
// queue of the link cannot hold would be lost.
//
// How it works. Windows of a round trip show how fast data arrives. Once
// a queue shows that the link is full, the connections together may send
// a little faster than what has arrived in one of these: so they still find out
// if the link is faster than that. A window with a queue all the time is the
// rate of the link; one without only shows that it carries as much.
class RoutePacing {
 public:
  struct Sample {
    TimePoint now{};
    uint64_t acknowledged = 0; // bytes, of all connections, total
    uint64_t inFlight = 0; // the same, sent and not acknowledged
    Nanos roundTrip{}; // of the connection that has the longest queue
    Nanos minRoundTrip{};
  };

  // Called every now and then, several times in a round trip while data is
  // under way. In bytes per second; 0: no limit.
  uint64_t observe(const Sample& s) {
    // With less in flight than the link holds, a long round trip is an old one:
    // BBR keeps nearly nothing in flight now and then.
    const bool queue = s.minRoundTrip > Nanos(0) &&
        s.roundTrip > s.minRoundTrip * 5 / 4 + kShortQueue &&
        static_cast<double>(s.inFlight) >=
            measured_ * toSeconds(s.minRoundTrip);
    const Nanos elapsed = s.now - since_;
    const Nanos window = std::max(s.minRoundTrip, kShortestWindow);
    if (s.acknowledged < from_ || elapsed > kLongestWindow) {
      begin(s); // other connections, or an idle time
    } else if (elapsed >= window) {
      measure(static_cast<double>(s.acknowledged - from_) / toSeconds(elapsed));
      begin(s);
    }
    queueAllTheTime_ = queueAllTheTime_ && queue;
    full_ = full_ ||
        (queue && measured_ * toSeconds(s.minRoundTrip) >= kEnoughBytes);
    return full_ ? static_cast<uint64_t>(kGain * measured_) : 0;
  }

 private:
  static constexpr double kGain = 1.25;
  // Other traffic and kernel timers add this to a round trip.
  static constexpr Nanos kShortQueue = std::chrono::milliseconds(2);
  // The rate of connections that have carried little is not known: the queue is
  // that of others.
  static constexpr double kEnoughBytes = 256 << 10;
  static constexpr Nanos kShortestWindow = std::chrono::milliseconds(10);
  static constexpr Nanos kLongestWindow = std::chrono::seconds(1);

  void begin(const Sample& s) {
    since_ = s.now;
    from_ = s.acknowledged;
    queueAllTheTime_ = true;
  }
  void measure(double rate) {
    measured_ = queueAllTheTime_ && rate > 0 && rate < measured_
        ? (measured_ + rate) / 2
        : std::max(measured_, rate);
  }

  TimePoint since_{};
  uint64_t from_ = UINT64_MAX;
  bool queueAllTheTime_ = true;
  bool full_ = false;
  double measured_ = 0; // bytes per second
};

} // namespace resilient
