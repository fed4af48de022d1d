#pragma once

#include <algorithm>

#include "base/time.h"
#include "failover/health.h"

namespace resilient {

// When a path that stands beside the connections of a route (RDMA, datagrams)
// carries again after a failure. The connections carry meanwhile, so the first
// return is fast, and each loss soon after a return makes the next one wait
// longer. Datagrams wait twice as long each time, as a connection does. RDMA,
// which cost a registration, a queue pair and the reads under way, waits four
// times as long: 0.15 s, 0.6 s, 2.4 s, ... If it flaps without end, it is
// therefore lost five times within 30 s, whether its device tells of each
// outage or the path only falls silent.
//
// Pure. Thread: any, one at a time.
class RouteReturn {
 public:
  // `longest` wait, which each loss doubles `doublings` times; `suspectAfter`:
  // silence that makes a path suspect.
  RouteReturn(Nanos longest, Nanos suspectAfter, int doublings)
      : damping_(longest, doublings), suspectAfter_(suspectAfter) {}

  // The path carries, for the first time or after a failure.
  void onUp(TimePoint now) {
    if (state_ != State::kUp) {
      state_ = State::kUp;
      damping_.onUp(now);
    }
  }
  // Nothing answers on it any more.
  void onSilent(TimePoint now) {
    if (state_ == State::kUp) {
      state_ = State::kSilent;
      silentAt_ = now;
    }
  }
  // It answers again. Returns when it may carry; onUp() follows then. A silence
  // that was hardly longer than the limit was a late answer, and no failure.
  TimePoint onHeard(TimePoint now) {
    if (state_ == State::kSilent && now - silentAt_ < kLate * suspectAfter_) {
      state_ = State::kUp;
      return now;
    }
    countLoss(now);
    return std::max(now, notBefore());
  }
  // It is closed. Without effect if it has never carried.
  void onClosed(TimePoint now) {
    countLoss(now);
    state_ = State::kDown;
  }
  // Before this time, it should not be made again.
  TimePoint notBefore() const {
    return lostAt_ + damping_.holdDown();
  }

 private:
  // kDown: closed, or waiting for its return.
  enum class State { kDown, kUp, kSilent };
  // More than so many times the limit, after the limit itself, is an outage.
  static constexpr int kLate = 2;

  void countLoss(TimePoint now) {
    if (state_ != State::kDown) {
      lostAt_ = state_ == State::kSilent ? silentAt_ : now;
      damping_.onLost(lostAt_);
      state_ = State::kDown;
    }
  }

  FlapDamping damping_;
  Nanos suspectAfter_;
  State state_ = State::kDown;
  TimePoint silentAt_{}, lostAt_{};
};

} // namespace resilient
