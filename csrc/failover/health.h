#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"
#include "failover/path_state.h"

namespace resilient {

// The evidence about one path at one moment.
struct PathEvidence {
  // Something was sent that has not been answered.
  bool owes = false;
  // Since when, if known; later if answers to earlier things have come.
  TimePoint owesSince{};
  // Any number that changes whenever the far end shows life on this path.
  uint64_t progress = 0;
  // Not even the far kernel has answered. If not, the path
  // works, and only the process at its end is slow.
  bool kernelOwes = false;
  // When another path to the same process last showed life.
  TimePoint othersAt{};
  // When another connection between the same two NICs last had something
  // acknowledged: then the way works, and only this connection waits, for a
  // packet that was lost. TCP sees to that, soon if no outage was before.
  TimePoint neighboursAt{};
  Nanos roundTrip{}; // smoothed, with four deviations; 0 if unknown
  // Our own doing, such as an injected delay.
  bool heldOnPurpose = false;
};

enum class PathVerdict : uint8_t {
  kGood,
  // Silent for half the time that makes it suspect; or for all of it, and
  // nobody knows whether the process is silent, too: ask it elsewhere.
  kUncertain,
  // Nothing new should depend on it.
  kSuspect,
  // Suspect for so long that it should be given up if there is another way.
  kStalled,
};

// Doubt about one path comes in degrees. Suspicion is cheap (what is in flight
// goes over the other paths once more), so it comes early; giving up a path
// costs a connection, so it comes late.
// Paper: SHIFT §4.4 leaves silent failures to other tools; this finds them.
//
// Call observe() at each look, even if nothing has happened, or answered(): a
// look at which nothing is owed restarts the silence. Its order matters. Signs
// of life come first, since they end a doubt and show whether it was an outage.
// The verdict then begins with the longest silence, which no answer on a
// neighbour excuses.
class PathHealth {
 public:
  struct Limits {
    Nanos suspectAfter{};
    Nanos stalledAfter{};
  };

  explicit PathHealth(TimePoint now)
      : progressAt_(now), observedAt_(now), owesSince_(now) {}

  PathVerdict
  observe(const PathEvidence& e, const Limits& limits, TimePoint now) {
    if (!e.owes || e.heldOnPurpose) {
      owesSince_ = now;
    }
    owesSince_ = std::max(owesSince_, e.owesSince);
    // Late answers also come in longer intervals.
    const Nanos suspectAfter = suspectAfter_ =
        patience_ * std::max(limits.suspectAfter, e.roundTrip);
    // The kernel beginning to owe is no sign of life, only another measure.
    const bool begins = e.kernelOwes && !kernelOwed_;
    if (e.progress != progress_ && !begins) {
      // Incoming bytes prove nothing about the way out.
      provenAt_ = kernelOwed_ ? now : provenAt_;
      wasOutage_ = doubted_ && now - progressAt_ >= kFalseAlarm * suspectAfter;
      if (doubted_ && !wasOutage_) {
        // It was only slow, and what it had went over the others in vain:
        // next time with more patience.
        patience_ = std::min(patience_ * 2, kMaxPatience);
        calmAt_ = now;
      }
      doubted_ = false;
    }
    if (begins) {
      // When we looked last it did not owe: its silence is no longer than that.
      progress_ = e.progress;
      progressAt_ = std::max(progressAt_, observedAt_);
    }
    observedAt_ = now;
    kernelOwed_ = e.kernelOwes;
    becomeCalm(now);
    if (e.progress != progress_ || !e.owes || e.heldOnPurpose) {
      progress_ = e.progress;
      progressAt_ = now;
      return PathVerdict::kGood;
    }
    const TimePoint silentSince = std::max(progressAt_, e.owesSince);
    const Nanos silent = now - silentSince;
    if (silent >= std::max(limits.stalledAfter, 3 * e.roundTrip)) {
      return PathVerdict::kStalled;
    }
    // A process that is slow is slow on all paths.
    const bool pathAlone =
        e.kernelOwes || e.othersAt >= silentSince + suspectAfter / 2;
    // The first answer takes a round trip, however good the path.
    const bool due = now - owesSince_ >= suspectAfter + e.roundTrip;
    // One that has fallen silent as well, and owes nothing, vouches no longer.
    // None ends a doubt: if the way comes back after an outage, this connection
    // still waits for its next retransmission, as long as the outage was.
    const bool vouched =
        e.neighboursAt > progressAt_ && now - e.neighboursAt < suspectAfter;
    if (vouched && !doubted_) {
      return PathVerdict::kGood;
    }
    if (!due || silent < suspectAfter) {
      // Answers that are asked for now come before it is suspect.
      const bool half = 2 * silent >= suspectAfter &&
          2 * (now - owesSince_) >= suspectAfter + e.roundTrip;
      return half ? PathVerdict::kUncertain : PathVerdict::kGood;
    }
    if (!pathAlone) {
      return PathVerdict::kUncertain;
    }
    doubted_ = true;
    return PathVerdict::kSuspect;
  }

  // In place of observe(), where something has been answered since the last
  // look: that shows that the path works, and no evidence need be gathered.
  // False before the first observe(), and if there was a doubt, which only that
  // can end. The next silence may count from one look later than its last sign
  // of life.
  bool answered(TimePoint now) {
    if (doubted_ || suspectAfter_ == Nanos(0)) {
      return false;
    }
    provenAt_ = progressAt_ = observedAt_ = now;
    becomeCalm(now);
    return true;
  }

  // The silence that the last sign of life ended was no false alarm.
  bool wasOutage() const {
    return wasOutage_;
  }
  // How soon to look again while it owes something: an eighth of the silence
  // that makes it suspect. A look may make system calls for each connection,
  // and long links have the most.
  Nanos lookAfter() const {
    return std::clamp(suspectAfter_ / 8, kCloseLook, kIdleLook);
  }
  // When something was last acknowledged on it.
  TimePoint provenAt() const {
    return provenAt_;
  }

 private:
  static constexpr int kMaxPatience = 4;
  // Silence that ends before so many times the limit was no outage.
  static constexpr int kFalseAlarm = 3;
  static constexpr Nanos kForgetAfter = std::chrono::seconds(10);

  void becomeCalm(TimePoint now) {
    if (patience_ > 1 && now - calmAt_ >= kForgetAfter) {
      patience_ /= 2;
      calmAt_ = now;
    }
  }

  Nanos suspectAfter_{}; // as of the last look
  uint64_t progress_ = 0;
  TimePoint progressAt_;
  TimePoint observedAt_;
  TimePoint owesSince_;
  TimePoint provenAt_{};
  bool kernelOwed_ = false;
  bool doubted_ = false;
  bool wasOutage_ = false;
  int patience_ = 1;
  TimePoint calmAt_{};
};

// How long a path that has come back must prove itself before it carries
// anything that matters. Each loss soon after a return doubles it, so a link
// that flaps comes to rest on the others; quiet halves it again. Where others
// carry as well, it may be doubled several times for each.
class FlapDamping {
 public:
  explicit FlapDamping(Nanos longest, int doublings = 1)
      : longest_(longest), doublings_(doublings) {}

  void onUp(TimePoint now) {
    upAt_ = now;
  }
  void onLost(TimePoint now) {
    // Long enough up, for as many halvings: the past is forgotten.
    for (Nanos quiet = kQuiet; now - upAt_ >= quiet && level_ > 0;
         quiet += kQuiet) {
      --level_;
    }
    if (now - upAt_ < kQuiet + holdDown()) {
      level_ = std::min(level_ + 1, 16);
    }
  }
  Nanos holdDown() const {
    return std::min(kMin * (int64_t{1} << (doublings_ * level_)), longest_);
  }

 private:
  static constexpr Nanos kMin = std::chrono::milliseconds(150);
  static constexpr Nanos kQuiet = std::chrono::seconds(5);
  Nanos longest_;
  int doublings_;
  int level_ = 0;
  TimePoint upAt_{};
};

} // namespace resilient
