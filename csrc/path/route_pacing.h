#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/time.h"
#include "path/congestion_choice.h"

namespace resilient {

// Bytes. Questions how much has arrived are always in flight, and arrive, too.
inline constexpr uint64_t kQuestions = 4096;

// How fast the connections of one route may send together, where BBR paces
// them. Each of them believes that it may send as fast as it once did alone,
// and nearly three times as fast while it starts up, which ends only after
// rounds in which there was always more to send. Bursts have none. So each
// burst would leave several times as fast as the link carries it, and what the
// queue of the link cannot hold would be lost.
//
// How it works. Windows of a part of a round trip show how fast data arrives.
// Once a queue, or what a burst has lost, shows that the link is full, the
// connections together may send a little faster than what has arrived in one of
// these: so they still find out if the link is faster than that. A window with
// a queue all the time is the rate of the link; one without only shows that it
// carries as much.
//
// In a burst of many round trips, that little faster would fill any queue. BBR
// keeps it short, except while it starts up, and bursts may never end that.
// Then the connections send as fast as data arrives once the queue is long, and
// a little faster in one round trip of several only, as BBR does later.
//
// If both ends send, acknowledgements wait in the queue of the other direction
// and come in a clump when that drains: for a round trip, more than twice as
// fast as the data has arrived. So what counts is what the far end says of the
// time of arrival; acknowledgements, as long as it says nothing. It reads what
// has come behind a loss only once that has been sent again, and then all at
// once: such a window may show no more than BBR has measured, and the ones
// before it nothing.
class RoutePacing {
 public:
  struct Sample {
    TimePoint now{};
    uint64_t acknowledged = 0; // bytes, of all connections, total
    uint64_t inFlight = 0; // the same, sent and not acknowledged
    Nanos roundTrip{}; // of the connection that has the longest queue
    Nanos minRoundTrip{};
    // Segments of all connections, total; `lost` are those sent again.
    uint64_t delivered = 0, lost = 0;
    uint64_t rate = 0; // that BBR has measured, bytes per second, their sum
    // In all, at that time by the clock of the far end, as it has said last.
    uint64_t arrived = 0; // bytes
    TimePoint arrivedAt{}; // TimePoint(): it has said nothing
    bool startingUp = false; // BBR, of a connection that carries
  };

  // Called every now and then, several times in a round trip while data is
  // under way. In bytes per second; 0: no limit.
  uint64_t observe(const Sample& s) {
    const bool told = s.arrivedAt != TimePoint{};
    if (s.roundTrip > Nanos(0)) {
      roundTrip_ = s.roundTrip;
    }
    if (std::exchange(lostBefore_, s.lost) < s.lost) {
      repairUntil_ =
          s.now + kRepairRoundTrips * std::max(roundTrip_, s.minRoundTrip);
    }
    // With less in flight than the link holds, a long round trip is an old one:
    // BBR keeps nearly nothing in flight now and then.
    const bool queue = s.minRoundTrip > Nanos(0) &&
        inQueue(s.roundTrip, s.minRoundTrip) &&
        static_cast<double>(s.inFlight) >=
            measured_ * toSeconds(s.minRoundTrip);
    if (told && !told_) {
      *this = RoutePacing(); // what acknowledgements have shown counts no more
      told_ = true;
    }
    const TimePoint at = told ? s.arrivedAt : s.now;
    const uint64_t bytes = told ? s.arrived : s.acknowledged;
    const Nanos elapsed = at - since_;
    // Bursts soon take less than a round trip. Data that is not lost comes in
    // smaller clumps than acknowledgements.
    const Nanos window =
        std::max(told ? s.minRoundTrip / 2 : s.minRoundTrip, kShortestWindow);
    // The burst is over for the far end, whose last acknowledgements may still
    // be on their way.
    const bool over = told && at > at_ && bytes - bytes_ < kQuestions;
    if (bytes < from_ || elapsed > kLongestWindow || over ||
        (idle_ && elapsed > Nanos(0))) {
      begin(at, bytes); // other connections, or a new burst
      silent_ = over;
      idle_ = false;
    } else if (silent_ ? at > at_ : elapsed >= window) {
      double rate = static_cast<double>(bytes - from_) / toSeconds(elapsed);
      const bool repairs = s.now < repairUntil_;
      if (repairs) {
        rate = std::min(rate, static_cast<double>(s.rate));
      }
      // A burst that began between the last two answers was faster than this.
      // While it is short, its data is ahead of all further questions.
      const bool atLeast = std::exchange(silent_, false);
      if (!repairs && !atLeast) {
        measure(rate);
      } else if (elapsed >= window) {
        measured_ = std::max(measured_, rate);
      }
      begin(at, bytes);
    }
    at_ = at;
    bytes_ = bytes;
    idle_ = idle_ || s.inFlight == 0;
    queueAllTheTime_ = queueAllTheTime_ && queue;
    full_ = full_ || (queue && measuredEnough(s));
    watchLoss(s);
    return full_ ? static_cast<uint64_t>(gain(s) * measured_) : 0;
  }

 private:
  static constexpr double kGain = 1.25;
  // In what the link holds without a queue: what is in flight with a long one,
  // and with one that need not grow to find out more.
  static constexpr double kLongQueue = 1.5, kLongestQueue = 2.5;
  static constexpr int kProbeOneIn = 8; // round trips
  // The rate of connections that have carried little is not known: the queue is
  // that of others.
  static constexpr double kEnoughBytes = 256 << 10;
  // More than drops at random: that many segments, and one in kOneIn.
  static constexpr uint64_t kMuchLost = 20, kOneIn = 15;
  // BBR's rate is up to 1.4 times the true one if acknowledgements have waited.
  static constexpr double kLess = 0.9, kLeast = 0.7;
  // Until the last answer of a window that a repair has stretched.
  static constexpr int kRepairRoundTrips = 3;
  static constexpr Nanos kShortestWindow = std::chrono::milliseconds(10);
  static constexpr Nanos kLongestWindow = std::chrono::seconds(1);

  void begin(TimePoint since, uint64_t from) {
    since_ = since;
    from_ = from;
    queueAllTheTime_ = true;
  }
  double gain(const Sample& s) const {
    const double holds = measured_ * toSeconds(s.minRoundTrip);
    const auto inFlight = static_cast<double>(s.inFlight);
    if (!s.startingUp || holds == 0 || inFlight < kLongQueue * holds) {
      return kGain;
    }
    const auto roundTrips = s.now.time_since_epoch() / s.minRoundTrip;
    const bool probes = roundTrips % kProbeOneIn == 0;
    return probes && inFlight < kLongestQueue * holds ? kGain : 1;
  }
  bool measuredEnough(const Sample& s) const {
    return measured_ * toSeconds(s.minRoundTrip) >= kEnoughBytes;
  }
  // A burst that the queue could not hold is over before it shows in the round
  // trip, and the answers wait for what was lost. A lower pace does not help
  // where so much is lost at random: it goes no lower than to kLeast of what it
  // was when much was carried without.
  void watchLoss(const Sample& s) {
    const uint64_t lost = s.lost - lost_;
    const uint64_t delivered = s.delivered - delivered_;
    const bool other = lossSince_ == TimePoint{} || s.lost < lost_ ||
        s.delivered < delivered_; // other connections
    if (!other && s.inFlight > 0 && s.now - lossSince_ < s.minRoundTrip) {
      return;
    }
    lossSince_ = s.now;
    lost_ = s.lost;
    delivered_ = s.delivered;
    if (other) {
      return;
    }
    if (lost < kMuchLost || lost * kOneIn < delivered) {
      if (delivered >= kMuchLost * kOneIn) {
        leastMeasured_ = kLeast * measured_;
      }
    } else if (full_) {
      measured_ = std::max(kLess * measured_, leastMeasured_);
    } else {
      full_ = true;
      if (!measuredEnough(s)) {
        measured_ = std::max(measured_, static_cast<double>(s.rate) / kGain);
      }
      leastMeasured_ = kLeast * measured_;
    }
  }
  void measure(double rate) {
    measured_ = queueAllTheTime_ && rate > 0 && rate < measured_
        ? (measured_ + rate) / 2
        : std::max(measured_, rate);
  }

  TimePoint since_{};
  uint64_t from_ = UINT64_MAX;
  bool queueAllTheTime_ = true;
  TimePoint at_{}; // the last look
  uint64_t bytes_ = 0;
  bool idle_ = true; // everything has arrived since
  bool silent_ = false; // nothing had arrived when the window began
  bool told_ = false; // since_ and from_ are the far end's
  bool full_ = false;
  double measured_ = 0; // bytes per second
  uint64_t lostBefore_ = 0;
  Nanos roundTrip_{}; // as it was last
  TimePoint repairUntil_{}; // of the last loss
  TimePoint lossSince_{};
  uint64_t delivered_ = 0, lost_ = 0; // then
  double leastMeasured_ = 0; // whatever is lost
};

// A connection of a route, as its BBR sees it.
struct PacedConnection {
  uint64_t arrives = 0; // bytes per second, while it last carried much
  uint64_t inFlightBytes = 0;
  uint64_t messageBytes = 0; // that the peer's channel has not acknowledged
};

// While the other direction carries much, acknowledgements of its frames are
// more than a few questions.
inline bool carries(const PacedConnection& connection) {
  return connection.inFlightBytes > kQuestions && connection.messageBytes > 0;
}

// The part of their route's pace that connections may use, from 0 to 1. They
// have shared the link in proportion to what each has carried. Idle ones leave
// theirs to the others, so one that carries alone may use all. Until the next
// look an idle one has the part that it would have if all carried.
inline std::vector<double> paceShares(
    const std::vector<PacedConnection>& connections) {
  uint64_t all = 0, carrying = 0;
  size_t carry = 0;
  for (const PacedConnection& c : connections) {
    all += c.arrives;
    if (carries(c)) {
      carrying += c.arrives;
      ++carry;
    }
  }
  std::vector<double> shares;
  for (const PacedConnection& c : connections) {
    const auto sum = static_cast<double>(carries(c) ? carrying : all);
    const auto count =
        static_cast<double>(carries(c) ? carry : connections.size());
    shares.push_back(
        sum == 0 ? 1 / count : static_cast<double>(c.arrives) / sum);
  }
  return shares;
}

} // namespace resilient
