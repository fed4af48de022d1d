#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/time.h"

namespace resilient {

// The content of one report, as differences to the report before.
struct DeliverySample {
  Nanos roundTrip{}; // of the newest packet; zero: nothing new
  uint64_t bytes = 0; // that the link has taken
  Nanos
      interval{}; // in which they have arrived, or were sent if that is longer
  bool brief = false; // the interval is short: a burst
  bool stretched = false; // arrived over twice the time of sending, or more
  double sentBytesPerS = 0; // how fast they left; 0: unknown
  uint64_t packets = 0; // delivered
  uint64_t lost = 0; // packets
  // The sender had nothing to send some of the time: the rate says how much
  // there was, not how much the link carries.
  bool limitedBySender = false;
  uint64_t inFlightBytes = 0; // after these
  // How many of as many packets the link loses when there is no queue: mean
  // and variance.
  double usuallyLost = 0, usualVariance = 0;
};

// How fast packets leave: paced at the rate at which they arrive, with at most
// two round trips' worth in flight; now and then a little faster, to find out
// whether there is more. (The model of BBR: most recent rates, least round
// trip.)
//
// Loss alone is no sign of a full link here, or a lossy one would never be
// filled. More loss than usual while the round trip has grown is: then the rate
// is cut, as TCP does, and congested() tells whoever adds parity to add less.
// Paper: SMART §4.3, "Congestion-related loss".
//
// States. kStartup doubles the rate each round trip until it stops growing or a
// queue shows. kDrain sends at half the rate until that queue is gone. kSteady
// follows kGains. A cut can happen in any state: it sets `ceiling_`, an upper
// limit of the rate that then grows along CUBIC's curve and disappears when it
// is twice the measured rate. It is deep where far less arrives than before:
// the link has become slow, or had a pause. Without a queue and losses,
// kStartup then finds out which, below the ceiling of an ordinary cut.
//
// Time is divided into rounds of about a round trip. Congestion, growth and the
// phase are decided at the end of a round, by sums over it.
class RateControl {
 public:
  // `firstBytesPerS`: what other paths know of the link, 0: nothing.
  // `maxBytesPerS`: a limit from outside, 0: none. The limit bounds bytesPerS()
  // only.
  RateControl(Nanos firstRoundTrip, double firstBytesPerS, double maxBytesPerS);

  void onSample(const DeliverySample& sample, TimePoint now);

  // Packets leave again after a rest. Short bursts may show more than before
  // only if they are sent a little faster.
  void onRestart(TimePoint now);
  // Other paths have measured so much on the link. Until this one has filled it
  // itself, it begins there.
  void expect(double bytesPerS);
  // Enough has arrived to tell the capacity, also if that was little at a time.
  // Reports and small messages, which leave slowly, never tell alone.
  bool known() const {
    return state_ != State::kStartup || pacedRounds_ >= kRoundsToKnow;
  }
  double bytesPerS() const { // to send at
    return limited(gain());
  }
  // At which a burst would be sent, whatever the present round is for: one that
  // drains a queue is over soon.
  double burstBytesPerS() const {
    return limited(std::max(gain(), 1.0));
  }
  uint64_t windowBytes() const; // in flight, at most
  bool congested() const {
    return congestedRounds_ > 0;
  }
  // The last round trip had a queue in it: what is lost now may have been too
  // much for it.
  bool queueing() const {
    return queueing_;
  }
  // With a queue in it.
  bool isQueued(Nanos roundTrip) const {
    return roundTrip > queueMark();
  }
  // The estimated capacity of the link.
  double capacityBytesPerS() const;
  Nanos minRoundTrip() const {
    return min_;
  }
  Nanos roundTrip() const { // smoothed
    return smoothed_;
  }
  Nanos roundTripVariation() const {
    return variation_;
  }

 private:
  enum class State { kStartup, kDrain, kSteady };
  struct Losses {
    uint64_t packets = 0, lost = 0;
    double usual = 0, variance = 0; // of those lost
  };
  static constexpr size_t kRounds = 10; // that a measured rate counts
  // The rate may grow by kStartupGain in each: a hundredfold.
  static constexpr int kRoundsToKnow = 4;

  void onRoundTrip(Nanos sample, TimePoint now);
  void onMin(Nanos sample, TimePoint now);
  void onRoundEnd(TimePoint now);
  bool judgeLosses(bool queue, TimePoint now);
  void cut(TimePoint now);
  void cutFrom(double bytesPerS, TimePoint now);
  void grow(TimePoint now);
  Nanos queueMark() const;
  double gain() const;
  double limited(double gain) const; // of the capacity, in bytes per second
  double measuredBytesPerS() const;
  bool roundShowsLink() const; // its rate was that of the link, not the sender

  const double max_;
  State state_ = State::kStartup;
  std::array<double, kRounds> rates_{}; // best of each of the last rounds
  double expected_ = 0; // in kStartup only
  size_t round_ = 0;
  TimePoint roundStart_{};
  bool started_ = false;

  // of this round
  bool roundFull_ = true; // the sender always had something
  uint64_t roundPackets_ = 0;
  double roundRate_ = 0; // the best measurement
  bool roundStretched_ = false; // by some measurement
  bool roundAtPace_ = false; // packets left at the pace
  bool roundSlower_ = false; // and arrived more slowly
  Nanos roundMin_ = Nanos::max(), roundMax_{};
  int queuedInRow_ = 0; // the last round trips had a queue in them
  bool roundQueued_ = false; // two in a row: no process that has paused

  Nanos min_, smoothed_, variation_;
  TimePoint minAt_{};
  Nanos latelyMin_ = Nanos::max(); // since then, or since it probes
  TimePoint probesUntil_ = kNever; // to see the round trip below a queue
  TimePoint thinUntil_{}; // what arrives was sent then
  TimePoint notBriefAt_{}; // the last measurement that was not
  double briefRate_ = 0; // the best since then
  bool measured_ = false;

  double startupRate_ = 0;
  int startupRounds_ = 0; // without growth
  int pacedRounds_ = 0; // in which packets left at the pace
  // In the round before, packets left at the pace, or faster than they arrived.
  bool filledBefore_ = false;
  size_t phase_ = 0; // of the steady state's cycle
  TimePoint noQueueAt_{}; // the last round without
  Losses losses_; // of this round, and of those since then with few packets
  double ceiling_ = 0; // after congestion; 0: none
  TimePoint cutAt_{};
  double maxSegments_ = 0, cutSegments_ = 0; // in flight, before and after it
  double returnTo_ = 0; // the rate before a deep cut; 0: there was none
  bool queueing_ = false;
  int roundsSinceCut_ = 1 << 20;
  int congestedRounds_ = 0; // still to count as congested
};

} // namespace resilient
