#pragma once

#include <algorithm>
#include <utility>

#include "base/time.h"

namespace resilient {

// When a connection's BBR should begin anew.
//
// Ten seconds after it has last measured the shortest round trip, BBR measures
// it again: for 200 ms it sends next to nothing. A burst that meets this takes
// half as long again, or several times as long. A pause is as good a time: with
// the first segment behind a pause, BBR measures without sending less. But a
// few small frames in the pause may begin a measurement that goes on in the
// burst. So what matters is that the ten seconds are over neither in a burst
// nor shortly before.
//
// To begin anew in a pause starts the ten seconds again, but has its price: BBR
// starts up again, and a long burst has to wait while it empties the queue that
// this makes. It pays if the next burst would meet the measurement. Bursts of a
// training come at regular intervals, so the last ones tell when that is. If
// they do not, it begins anew every few seconds: also in a pause that is
// already longer than the last ones, as between the iterations of a pipeline.
//
// Thread: one. No clock: `now` never goes back.
class BbrRestart {
 public:
  explicit BbrRestart(TimePoint now)
      : earliest_(now), latest_(now), beganAt_(now), endedAt_(now) {}

  // Several times in a round trip while the connection carries data, and once
  // when it no longer does. `queue`: its round trips are longer than they were.
  void observe(TimePoint now, bool carries, bool queue) {
    while (now - earliest_ >= kMeasuresEvery) { // several in a long pause
      earliest_ += kMeasuresEvery;
      latest_ = now;
      knowsRoundTrip_ = true;
    }
    knowsRoundTrip_ = knowsRoundTrip_ || !queue;
    if (carries && !carries_ && now - endedAt_ >= kShortestPause) {
      pauseBefore_ = std::exchange(pause_, now - endedAt_);
      beganAt_ = now;
    }
    if (!carries && carries_) {
      endedAt_ = now;
      burst_ = endedAt_ - beganAt_;
    }
    carries_ = carries;
  }

  // In a pause. Never before BBR has seen the round trip since the last time:
  // it begins with an old one, and the route may be longer now.
  bool due(TimePoint now) const {
    if (carries_ || !knowsRoundTrip_) {
      return false;
    }
    if (!regular(now)) {
      return now - earliest_ >= kOtherwiseEvery;
    }
    return meets(earliest_, latest_) && !meets(now, now);
  }
  void restarted(TimePoint now) {
    earliest_ = latest_ = now;
    knowsRoundTrip_ = false;
  }

 private:
  static constexpr Nanos kMeasuresEvery = std::chrono::seconds(10);
  static constexpr Nanos kTakes =
      std::chrono::milliseconds(300); // 200, a round trip
  static constexpr Nanos kOtherwiseEvery = std::chrono::seconds(3);
  static constexpr Nanos kShortestPause = std::chrono::milliseconds(100);
  static constexpr int kPart = 4; // by which regular intervals may differ

  // The next burst meets the next measurement, if the last one was between.
  bool meets(TimePoint earliest, TimePoint latest) const {
    const Nanos unsure = pause_ / kPart;
    const TimePoint begins = endedAt_ + pause_ - unsure;
    const TimePoint ends = endedAt_ + pause_ + unsure + burst_ + burst_ / kPart;
    return begins <= latest + kMeasuresEvery + kTakes &&
        earliest + kMeasuresEvery <= ends;
  }
  bool regular(TimePoint now) const {
    return pauseBefore_ > Nanos(0) &&
        now - endedAt_ <= pause_ + pause_ / kPart &&
        std::max(pause_, pauseBefore_) - std::min(pause_, pauseBefore_) <=
        std::min(pause_, pauseBefore_) / kPart;
  }

  // When BBR has last measured the round trip: at some time between. In a pause
  // it does as soon as there is a frame, which is not known here.
  TimePoint earliest_, latest_;
  bool knowsRoundTrip_ = true; // it has seen it since it began anew
  bool carries_ = false;
  TimePoint beganAt_, endedAt_; // the last burst
  Nanos burst_{}, pause_{}, pauseBefore_{}; // the last ones
};

} // namespace resilient
