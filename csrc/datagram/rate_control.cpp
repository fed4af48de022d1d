#include "datagram/rate_control.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace resilient {
namespace {

// The rate doubles with each round trip, as in TCP's slow start, and the pace
// with it: 2 / ln 2.
constexpr double kStartupGain = 2.89;
// No growth by this in kStartupRounds rounds: the link is full.
constexpr double kStartupGrowth = 1.25;
constexpr int kStartupRounds = 3;
constexpr double kDrainGain = 0.5;
// Fewer say little about the rate at which they arrive.
constexpr uint64_t kPacketsForRate = 16;
// Packets that leave at this part of the pace are a burst, or a part of one.
constexpr double kAtPace = 0.7;
// One round asks for more, the next gives back what queued, six rest.
constexpr std::array<double, 8> kGains{1.25, 0.75, 1, 1, 1, 1, 1, 1};

constexpr double kWindowGain = 2;
// Less than the link holds, even if its rate is believed too high.
constexpr double kThinGain = 0.5;
// Reports come that late, and whatever is sent leaves in bursts.
constexpr double kReportDelayS = 0.005;
constexpr uint64_t kMinWindow = 64u << 10;
constexpr double kMinRate = 64e3;
// No link is faster; a peer may say anything.
constexpr double kMaxRate = 125e9;

constexpr Nanos kMinRound = std::chrono::milliseconds(4);
// The least round trip is believed this long: the route may have changed. Then
// the least of that time is, unless it has a queue, which may be our own: that
// drains first. (BBR's ProbeRTT, but only where there is a queue.)
constexpr Nanos kMinRoundTripFor = std::chrono::seconds(10);

// After so long without other measurements, a brief one counts although it saw
// a queue.
constexpr Nanos kBriefAfter = std::chrono::seconds(10);

// A round trip longer than the least by this is a queue: a part of it, and
// more than timers and schedulers add.
constexpr double kQueuePart = 0.125;
constexpr Nanos kQueueMin = std::chrono::milliseconds(3);
// After a cut the rate follows the curve of CUBIC (RFC 9438): it grows as the
// rate of a competing TCP connection does. Equal growth in absolute terms makes
// the shares equal in the end.
constexpr double kCut = 0.6; // CUBIC's is 0.7; a paced sender loses less often
constexpr double kCubic = 0.4; // segments per second cubed
constexpr double kSegmentBytes = 1448;
// A round has lost more than usual by this many standard deviations. There are
// a thousand rounds in a minute, and a cut takes seconds to grow back.
constexpr double kUnusual = 4;
// Fewer say little about losses, unless several of them are lost.
constexpr uint64_t kPacketsForLoss = 300;
// The longer there has been a queue, the less is what was lost before it a
// measure: half of it counts after so long, which is enough for a new route to
// be believed.
constexpr Nanos kUsualFor = std::chrono::seconds(20);
// A cut shows its effect only after a round trip, and the losses of one queue
// are reported over two.
constexpr int kRoundsPerCut = 3;
// Parity stays low for a while after it.
constexpr int kCongestedFor = 8;

// More losses than this are not chance. They come at random, in rows of about
// `variance / mean`: where few are expected, their distribution is far from
// normal, and its skew counts (Cornish and Fisher, 1938). One loss of the last
// few packets of a burst says nothing.
double mostUsual(double mean, double variance) {
  const double row = mean > 0 ? std::max(variance / mean, 1.0) : 1;
  return mean + kUnusual * std::sqrt(variance) +
      row * (kUnusual * kUnusual - 1) / 6;
}

double rateOf(const DeliverySample& s) {
  return std::min(
      static_cast<double>(s.bytes) / toSeconds(s.interval), kMaxRate);
}

} // namespace

RateControl::RateControl(
    Nanos firstRoundTrip,
    double firstBytesPerS,
    double maxBytesPerS)
    : max_(maxBytesPerS),
      min_(std::max(firstRoundTrip, Nanos(std::chrono::microseconds(50)))),
      smoothed_(min_),
      variation_(min_ / 2) {
  rates_[0] = static_cast<double>(kMinWindow) / toSeconds(min_) / kStartupGain;
  expect(firstBytesPerS);
}

void RateControl::expect(double bytesPerS) {
  if (state_ == State::kStartup && bytesPerS > 0) {
    expected_ = std::min(bytesPerS, kMaxRate);
  }
}

void RateControl::onRestart(TimePoint now) {
  if (state_ == State::kSteady) {
    phase_ = 0;
  }
  roundStart_ = now;
}

double RateControl::measuredBytesPerS() const {
  const double rate = *std::max_element(rates_.begin(), rates_.end());
  return std::max({rate, briefRate_, kMinRate});
}

bool RateControl::roundShowsLink() const {
  return roundStretched_ && roundPackets_ >= kPacketsForRate;
}

double RateControl::capacityBytesPerS() const {
  return std::max(measuredBytesPerS(), expected_);
}

// A round trip longer than this has a queue in it.
Nanos RateControl::queueMark() const {
  return min_ + std::max(kQueueMin, fromSeconds(kQueuePart * toSeconds(min_)));
}

double RateControl::gain() const {
  switch (state_) {
    case State::kStartup:
      return kStartupGain;
    case State::kDrain:
      return kDrainGain;
    case State::kSteady:
      return kGains[phase_];
  }
  return 1;
}

double RateControl::limited(double gain) const {
  double rate = gain * capacityBytesPerS();
  if (ceiling_ > 0) {
    rate = std::min(rate, ceiling_);
  }
  if (max_ > 0) {
    rate = std::min(rate, max_);
  }
  return std::max(rate, kMinRate);
}

uint64_t RateControl::windowBytes() const {
  double rate = capacityBytesPerS();
  if (ceiling_ > 0) {
    rate = std::min(rate, ceiling_);
  }
  const double gain = probesUntil_ != kNever ? kThinGain
      : state_ == State::kStartup            ? kStartupGain
                                             : kWindowGain;
  const double bytes = gain * rate * (toSeconds(min_) + kReportDelayS);
  return std::max(kMinWindow, static_cast<uint64_t>(bytes));
}

// Keeps `min_`. A smaller sample counts at once. After kMinRoundTripFor without
// one, the least of that time takes its place, if that has no queue in it.
// Otherwise it probes first: the window is thin for some round trips, and the
// least of these counts. rate_control_takes_no_standing_queue_for_the_way has
// the reason: our own queue would be taken for a longer way, which allows a
// longer queue.
void RateControl::onMin(Nanos sample, TimePoint now) {
  latelyMin_ = std::min(latelyMin_, sample);
  const bool probes = probesUntil_ != kNever;
  const bool expired = !probes && now - minAt_ > kMinRoundTripFor;
  if (expired && latelyMin_ > queueMark()) {
    // Time for the packets in flight to leave, and for the reports on later
    // ones to come back.
    probesUntil_ = now + smoothed_ + 2 * min_ + fromSeconds(kReportDelayS);
    latelyMin_ = Nanos::max();
  } else if (sample <= min_ || expired || now >= probesUntil_) {
    if (probes) {
      probesUntil_ = kNever;
      thinUntil_ = now + smoothed_;
    }
    min_ = latelyMin_;
    minAt_ = now;
    latelyMin_ = Nanos::max();
  }
}

void RateControl::onRoundTrip(Nanos sample, TimePoint now) {
  if (!measured_) {
    measured_ = true;
    smoothed_ = sample;
    variation_ = sample / 2;
  } else {
    const Nanos off =
        sample > smoothed_ ? sample - smoothed_ : smoothed_ - sample;
    variation_ += (off - variation_) / 4;
    smoothed_ += (sample - smoothed_) / 8;
  }
  onMin(sample, now);
  roundMin_ = std::min(roundMin_, sample);
  roundMax_ = std::max(roundMax_, sample);
  queueing_ = isQueued(sample);
  queuedInRow_ = queueing_ ? queuedInRow_ + 1 : 0;
  roundQueued_ = roundQueued_ || queuedInRow_ > 1;
}

// A sample that was limited by the sender, or taken while the window is thin,
// may raise the rate but never lowers it: it says how much there was to send.
void RateControl::onSample(const DeliverySample& s, TimePoint now) {
  if (!started_) {
    started_ = true;
    roundStart_ = now;
    minAt_ = now;
    noQueueAt_ = now;
  }
  if (s.roundTrip > Nanos(0)) {
    onRoundTrip(s.roundTrip, now);
  }
  roundPackets_ += s.packets;
  losses_.packets += s.packets;
  losses_.lost += s.lost;
  losses_.usual += s.usuallyLost;
  losses_.variance += s.usualVariance;
  const bool limited =
      s.limitedBySender || probesUntil_ != kNever || now < thinUntil_;
  roundFull_ = roundFull_ && !limited;
  if (s.interval > Nanos(0) && s.sentBytesPerS >= kAtPace * bytesPerS()) {
    roundAtPace_ = true; // so half of that says that the link is slower
    roundSlower_ = roundSlower_ || rateOf(s) < s.sentBytesPerS / 2;
  }
  if (s.interval > Nanos(0) && s.brief) {
    // Short bursts have to raise the rate, too. A rate above that of the link
    // makes a queue.
    if (now - notBriefAt_ > kBriefAfter || !queueing_) {
      briefRate_ = std::max(briefRate_, rateOf(s));
    }
  } else if (s.interval > Nanos(0)) {
    if (!limited) {
      notBriefAt_ = now;
      briefRate_ = 0;
    }
    const double rate = rateOf(s);
    if (!limited || rate > measuredBytesPerS()) {
      rates_[round_ % kRounds] = std::max(rates_[round_ % kRounds], rate);
    }
  }
  if (s.interval > Nanos(0)) {
    roundRate_ = std::max(roundRate_, rateOf(s));
    roundStretched_ = roundStretched_ || s.stretched;
  }
  const double pipe = capacityBytesPerS() * toSeconds(min_);
  if (state_ == State::kDrain && static_cast<double>(s.inFlightBytes) <= pipe) {
    state_ = State::kSteady;
    phase_ = 2;
  }
  if (now - roundStart_ >= std::max(smoothed_, kMinRound) &&
      roundPackets_ > 0) {
    onRoundEnd(now);
  }
}

void RateControl::cut(TimePoint now) {
  // The link carries what has arrived in this round, or more if a process
  // paused. The rates of earlier rounds may be a hundred times that.
  constexpr double kNoMoreThan = 2;
  double rate = capacityBytesPerS();
  if (ceiling_ > 0) {
    rate = std::min(rate, ceiling_);
  }
  const double before = std::max(returnTo_, rate);
  if (roundShowsLink()) {
    rate = std::min(rate, kNoMoreThan * roundRate_);
  }
  // Congestion in kStartup is no pause: the link is slower now.
  const bool deep = rate < kCut * before && state_ != State::kStartup;
  returnTo_ = deep ? before : 0;
  roundsSinceCut_ = 0;
  cutFrom(rate, now);
}

void RateControl::cutFrom(double bytesPerS, TimePoint now) {
  const double segments = bytesPerS * toSeconds(smoothed_) / kSegmentBytes;
  // Less than last time: another sender has come, and gets room.
  maxSegments_ = segments < maxSegments_ ? segments * (1 + kCut) / 2 : segments;
  cutSegments_ = kCut * segments;
  cutAt_ = now;
}

// RFC 9438 in segments: `cubic` passes maxSegments_ again after `back` seconds;
// `reno` is the estimate of a classic TCP, so the growth is not slower than
// that on short links.
void RateControl::grow(TimePoint now) {
  const double t = toSeconds(now - cutAt_);
  const double roundTrip = toSeconds(smoothed_);
  const double back = std::cbrt(maxSegments_ * (1 - kCut) / kCubic);
  const double cubic =
      kCubic * (t - back) * (t - back) * (t - back) + maxSegments_;
  const double reno =
      cutSegments_ + 3 * (1 - kCut) / (1 + kCut) * t / roundTrip;
  const double segments = std::max({cubic, reno, cutSegments_});
  ceiling_ = std::max(kMinRate, segments * kSegmentBytes / roundTrip);
  if (ceiling_ > 2 * capacityBytesPerS()) {
    ceiling_ = maxSegments_ = cutSegments_ = 0;
  }
}

// True: more was lost than is usual, in this round, or in the last ones with
// a queue if a round has few packets. The usual loss counts less the longer
// there has been a queue, since it was measured before that.
bool RateControl::judgeLosses(bool queue, TimePoint now) {
  if (!queue) {
    noQueueAt_ = now;
  }
  const double still =
      std::exp2(-toSeconds(now - noQueueAt_) / toSeconds(kUsualFor));
  const bool unusual = static_cast<double>(losses_.lost) >
      mostUsual(still * losses_.usual, still * losses_.variance);
  if (!queue || unusual || losses_.packets >= kPacketsForLoss) {
    losses_ = Losses();
  }
  return unusual;
}

// Congestion takes two signs: even the shortest round trip of the round had a
// queue in it, and more was lost than is usual. Each of them alone is common on
// a good link.
void RateControl::onRoundEnd(TimePoint now) {
  const Nanos mark = queueMark();
  const bool queue = roundMin_ != Nanos::max() && roundMin_ > mark;
  congestedRounds_ -= congestedRounds_ > 0;
  if (roundAtPace_ && roundPackets_ >= kPacketsForRate) {
    pacedRounds_ = roundSlower_ ? kRoundsToKnow
                                : std::min(pacedRounds_ + 1, kRoundsToKnow);
  }
  ++roundsSinceCut_;
  const bool unusual = judgeLosses(queue, now);
  if (queue && unusual) {
    if (roundsSinceCut_ >= kRoundsPerCut) {
      cut(now);
    }
    congestedRounds_ = kCongestedFor;
  }
  if (returnTo_ > 0 && !queue && !unusual && roundPackets_ >= kPacketsForRate) {
    cutFrom(std::exchange(returnTo_, 0), now);
    state_ = State::kStartup;
    startupRate_ = 0;
    startupRounds_ = 0;
  }
  if (cutSegments_ > 0) {
    grow(now);
  }
  if (state_ == State::kStartup) {
    const double rate = capacityBytesPerS();
    const bool growth = rate >= kStartupGrowth * startupRate_;
    if (growth) {
      startupRate_ = rate;
      startupRounds_ = 0;
    } else if (roundFull_) {
      ++startupRounds_;
    }
    // A sender that has little to send fills the link in bursts only: the end
    // of a burst queues, though its beginning did not. A few small messages
    // make no queue.
    const bool burstQueued = !growth && roundMax_ > mark;
    const bool filled = roundFull_ || roundAtPace_ || roundShowsLink();
    const bool ours = filled || filledBefore_;
    filledBefore_ = filled;
    if (startupRounds_ >= kStartupRounds ||
        (roundQueued_ && ours && (queue || burstQueued))) {
      state_ = State::kDrain;
      if (!roundShowsLink()) { // the queue may be that of others
        double& latest = rates_[round_ % kRounds];
        latest = std::max(latest, expected_);
      }
      expected_ = 0;
    }
  } else if (state_ == State::kSteady) {
    phase_ = (phase_ + 1) % kGains.size();
  }
  // A round with little to send says nothing about the link, and neither does
  // one without a measurement: the earlier ones continue to count.
  if (roundFull_ && rates_[round_ % kRounds] > 0) {
    ++round_;
    rates_[round_ % kRounds] = 0;
  }
  roundStart_ = now;
  roundFull_ = true;
  roundPackets_ = 0;
  roundRate_ = 0;
  roundStretched_ = roundAtPace_ = roundSlower_ = false;
  roundMin_ = Nanos::max();
  roundMax_ = Nanos(0);
  roundQueued_ = false;
}

} // namespace resilient
