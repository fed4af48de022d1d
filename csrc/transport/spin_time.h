#pragma once

#include <algorithm>

#include "base/time.h"

namespace resilient {

// How long a thread that waits should look for news before it falls asleep. To
// be woken costs some microseconds, on a virtual machine some tens: so it pays
// for answers that come at once, and is wasted on those that take long. The
// last wait predicts which it is. At most about half of a wait is spent
// looking, and next to nothing of a long one.
//
// A system call takes a microsecond or less on most machines, but some tens on
// some virtual ones, where looking therefore pays longer.
//
// EventLoop has one for the helper and one for the thread in run(): they wait
// for different things. Guarded by EventLoop::turn_.
class SpinTime {
 public:
  static constexpr Nanos kMax = std::chrono::microseconds(60);
  static constexpr Nanos kMin = std::chrono::microseconds(2);
  static constexpr Nanos kMaxSlow = std::chrono::milliseconds(1);
  // To fall asleep and be woken takes as long as so many system calls.
  static constexpr int kCallsOfASleep = 25;

  // `call`: how long a system call takes.
  explicit SpinTime(Nanos call = Nanos(0))
      : max_(std::clamp(call * kCallsOfASleep, kMax, kMaxSlow)),
        budget_(max_) {}

  Nanos budget() const {
    return budget_;
  }
  // News came this long after the thread began to wait, in its sleep or not.
  void onNews(Nanos waited) {
    // If both ends sleep, each waits for the other one's awakening as well as
    // its own: they would never find out how fast they are without.
    if (waited <= 2 * max_) {
      budget_ = max_;
    } else {
      onOther();
    }
  }
  // It slept, and was woken by something else.
  void onOther() {
    budget_ = std::max(budget_ / 2, kMin);
  }

 private:
  const Nanos max_;
  Nanos budget_;
};

} // namespace resilient
