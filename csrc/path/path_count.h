#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/time.h"

namespace resilient {

// Finds how many paths of one kind carry the most: uses more while the goodput
// grows, and puts those in reserve that do not help. These are connections
// between two NICs, or relays of one peer. One connection is enough where its
// window covers the round trip; on a long link with small windows, or with
// random loss, each adds its share. A relay adds its uplink, unless that is
// ours as well. Paper: ATLAS §4.1, which takes a fixed number.
//
// How it works. kBase waits until the goodput has stopped growing by itself and
// a trial is due. A trial doubles the count while each step gains (kUp), or
// takes a quarter away while hardly anything is lost (kDown), and returns to
// the best count; fewer are tried only if the link queues or more did not help.
// If fewer carried less, the base is measured once more (kAgain).
// Then it rests, each time twice as long (up to kLongestPause). The goodput is
// only measured while there is always more to send. After a change of the
// count, a window begins only when new paths have had time to speed up.
//
// Pure: no clock, no thread.
class PathCount {
 public:
  struct Config {
    int min = 1;
    int max = 16;
    // The window of a connection: the system's limit of its buffers.
    uint64_t windowBytes = 4u << 20;
    // The assumed capacity before anything is measured. ATLAS §3 finds
    // about 5 Gbit/s for each node between data centres.
    double assumedBytesPerS = 5e9 / 8;
    // Fewer may carry this much less: what a path must add to be worth it.
    double mayCost = 1.02;
    // The goodput is that of so much time, or of four round trips.
    Nanos leastWindow = std::chrono::milliseconds(200);
  };

  explicit PathCount(const Config& config)
      : config_(config), count_(config.min) {}

  // Begins with what was found before; call it first. 0: nothing was.
  void beginWith(int count) {
    if (count > 0) {
      begun_ = true;
      count_ = std::clamp(count, config_.min, config_.max);
    }
  }
  // No trial before that time.
  void restUntil(TimePoint when) {
    nextTrial_ = when;
  }
  // The window of a connection turned out to be this.
  void setWindowBytes(uint64_t bytes) {
    config_.windowBytes = bytes;
  }
  // For this round trip; of one connection that fills the assumed link.
  uint64_t neededWindowBytes(Nanos roundTrip) const {
    return static_cast<uint64_t>(
        config_.assumedBytesPerS * toSeconds(roundTrip));
  }

  // The first measurement of the way: as many as fill the assumed link.
  void onRoundTrip(Nanos roundTrip) {
    roundTrip_ = roundTrip;
    if (!begun_) {
      begun_ = true;
      const double need = config_.assumedBytesPerS * toSeconds(roundTrip) /
          static_cast<double>(config_.windowBytes);
      count_ = std::clamp(
          static_cast<int>(std::ceil(need)), config_.min, config_.max);
    }
  }

  int count() const {
    return count_;
  }
  // The number worth remembering, not one on trial.
  int found() const {
    return !begun_ ? 0 : step_ == Step::kBase ? count_ : kept_;
  }

  struct View {
    // Since the beginning, over all paths that the count may help or hinder.
    uint64_t ackedBytes = 0;
    // All the time since the last view there was more to send.
    bool busy = false;
    // Packets wait in front of the link, so it is full, and more paths could
    // only take from each other.
    bool queueing = false;
    // A path still looks for the link's rate.
    bool startingUp = false;
  };
  // Called every now and then. Returns whether count() has changed.
  bool observe(const View& seen, TimePoint now) {
    if (config_.min == config_.max) {
      return false;
    }
    if (!seen.busy || windowAt_ == TimePoint{}) {
      // A rate that was limited by what there was to send tells nothing.
      lastRate_ = 0;
      restart(seen.ackedBytes, now, settleTime());
      return false;
    }
    if (now < windowAt_) {
      windowBytes_ = seen.ackedBytes; // new paths speed up
      return false;
    }
    if (now - windowAt_ < windowTime()) {
      return false;
    }
    if (seen.startingUp && ++startUpWindows_ <= kMaxStartUpWindows) {
      restart(seen.ackedBytes, now, Nanos(0));
      return false;
    }
    startUpWindows_ = 0;
    const double rate = static_cast<double>(seen.ackedBytes - windowBytes_) /
        toSeconds(now - windowAt_);
    const int before = count_;
    judge(rate, seen.queueing, now);
    restart(seen.ackedBytes, now, count_ == before ? Nanos(0) : settleTime());
    return count_ != before;
  }

 private:
  // kAgain: fewer carried less; do as many as before still carry more?
  enum class Step { kBase, kUp, kDown, kAgain };

  Nanos settleTime() const {
    return std::max<Nanos>(std::chrono::milliseconds(100), 5 * roundTrip_);
  }
  Nanos windowTime() const {
    return std::max(config_.leastWindow, 4 * roundTrip_);
  }
  void restart(uint64_t ackedBytes, TimePoint now, Nanos settle) {
    windowBytes_ = ackedBytes;
    windowAt_ = now + settle;
  }

  // `rate` is that of count_ connections.
  void judge(double rate, bool queueing, TimePoint now) {
    switch (step_) {
      case Step::kBase:
        if (const double before = lastRate_;
            now >= nextTrial_ && !speedsUp(rate)) {
          base_ = std::max(rate, before); // a moment's dip is no base
          roseOnce_ = again_ = false;
          if (queueing) {
            tryFewer(now);
          } else {
            tryMore(now);
          }
        }
        return;
      case Step::kUp:
        if (rate > kGain * base_) {
          base_ = rate;
          roseOnce_ = true;
          if (queueing) {
            rest(now);
          } else {
            tryMore(now);
          }
        } else {
          count_ = kept_;
          upIsNoUse(now);
        }
        return;
      case Step::kDown:
        if (rate * config_.mayCost >= base_) {
          tryFewer(now);
        } else {
          count_ = kept_;
          fewer_ = rate;
          step_ = Step::kAgain;
        }
        return;
      case Step::kAgain:
        if (fewer_ * config_.mayCost >= rate && !std::exchange(again_, true)) {
          base_ = rate; // it was a moment's luck
          tryFewer(now);
        } else {
          rest(now);
        }
        return;
    }
  }
  // Whether the paths that there are still carry more from one look to the
  // next, by themselves: what is tried meanwhile would seem to be the
  // cause.
  bool speedsUp(double rate) {
    const bool faster = lastRate_ <= 0 || rate > kGain * lastRate_;
    lastRate_ = rate;
    return faster;
  }
  void tryMore(TimePoint now) {
    if (count_ == config_.max) {
      upIsNoUse(now);
      return;
    }
    kept_ = count_;
    count_ = std::min(std::max(count_ * 2, 1), config_.max);
    step_ = Step::kUp;
  }
  void upIsNoUse(TimePoint now) {
    if (roseOnce_) {
      rest(now);
    } else {
      tryFewer(now);
    }
  }
  void tryFewer(TimePoint now) {
    if (count_ == config_.min) {
      rest(now);
      return;
    }
    kept_ = count_;
    // In small steps: if they were needed after all, the trial costs as much.
    count_ = std::max(count_ - std::max(count_ / 4, 1), config_.min);
    step_ = Step::kDown;
  }
  // Found, for now. The next look later, and ever later.
  void rest(TimePoint now) {
    step_ = Step::kBase;
    lastRate_ = 0;
    nextTrial_ = now + pause_;
    pause_ = std::min<Nanos>(pause_ * 2, kLongestPause);
  }

  // More paths must earn this much more.
  static constexpr double kGain = 1.08;
  // Some paths never find a rate: small buffers limit them.
  static constexpr int kMaxStartUpWindows = 4;
  static constexpr Nanos kFirstPause = std::chrono::seconds(10);
  static constexpr Nanos kLongestPause = std::chrono::seconds(300);

  Config config_;
  int count_;
  bool begun_ = false;
  Nanos roundTrip_{};
  Step step_ = Step::kBase;
  double base_ = 0; // the rate to beat, or to keep
  int kept_ = 1; // the count that had it
  double lastRate_ = 0; // at the look before, if there is to be a trial
  double fewer_ = 0; // the rate of fewer than kept_
  int startUpWindows_ = 0; // in a row
  bool roseOnce_ = false; // more was better, in this trial
  bool again_ = false; // the base was measured again, in this trial
  Nanos pause_ = kFirstPause;
  TimePoint nextTrial_{};
  TimePoint windowAt_{}; // begins then
  uint64_t windowBytes_ = 0;
};

} // namespace resilient
