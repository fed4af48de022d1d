#include "transport/caller_help.h"

#include <sys/timerfd.h>
#include <unistd.h>

namespace resilient {

CallerHelp::CallerHelp(Nanos call)
    : lingerMax_(
          std::clamp(call * kCallsOfALinger, kLingerMax, kLingerMaxSlow)),
      // The clock of std::chrono::steady_clock. Blocking: see park().
      timer_(checkSyscall(
          "timerfd_create",
          ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC))) {}

CallerHelp::Helper::Helper(CallerHelp& help)
    : help_(help),
      lock_(help.helper_, std::try_to_lock),
      helping_(lock_.owns_lock()) {
  if (helping_) {
    help_.helperThread_.store(std::this_thread::get_id());
    help_.helped_.store(true);
  }
}

void CallerHelp::Helper::end() {
  if (std::exchange(helping_, false)) {
    help_.helped_.store(false);
    help_.timerNoticed();
  }
}

void CallerHelp::park() {
  parked_.store(true);
  // A helper that goes from here on sees parked_ and sets the timer.
  while (!unparked()) {
    uint64_t expirations = 0;
    (void)!::read(timer_.get(), &expirations, sizeof(expirations));
  }
  timerNoticed();
}

// Whether the parked thread is to look for itself from now on.
//
// Each call finds one of four cases. The linger time is over: the thread
// returns, and the next park starts with the short linger time. Something else
// is due: it returns, which says nothing about callers. The timer went
// off, but callers have come meanwhile: the linger time doubles. Or a stale
// expiration was left in the timerfd, which epoll never reads: nothing changes.
// In the last two cases the thread sleeps on, and the timer must be set unless
// a helper will set it when it goes.
bool CallerHelp::unparked() {
  std::lock_guard lock(timerMutex_);
  const TimePoint now = std::chrono::steady_clock::now();
  const bool helped = helped_.load();
  if (!helped && parkedUntil_ <= now) {
    if (lingers_) {
      linger_ = LeftWork::kLinger;
    }
    parked_.store(false);
    return true;
  }
  if (timerAt_ <= now) { // it has gone off, but callers keep coming
    timerAt_ = kNever;
    linger_ = std::min(2 * linger_, lingerMax_);
  }
  if (!helped) { // else the helper sets it when it goes
    setTimer(parkedUntil_);
  }
  return false;
}

void CallerHelp::lingerFrom(TimePoint socketsSeenAt) {
  std::lock_guard lock(timerMutex_);
  parkedUntil_ = socketsSeenAt + linger_;
  lingers_ = true;
  setTimer(parkedUntil_);
}

void CallerHelp::wakeBy(TimePoint when) {
  std::lock_guard lock(timerMutex_);
  if (when < parkedUntil_) {
    parkedUntil_ = when;
    lingers_ = false;
  }
  setTimer(when);
}

void CallerHelp::timerNoticed() {
  std::lock_guard lock(timerMutex_);
  if (timerAt_ <= std::chrono::steady_clock::now()) {
    timerAt_ = kNever;
  }
}

// Only ever to an earlier time: see the class comment.
void CallerHelp::setTimer(TimePoint when) {
  if (when >= timerAt_) {
    return;
  }
  timerAt_ = when;
  timersSet_.fetch_add(1, std::memory_order_relaxed);
  // In the past: at once. 0 would disarm it.
  const int64_t ns = std::max<int64_t>(when.time_since_epoch().count(), 1);
  itimerspec value{};
  value.it_value.tv_sec = ns / 1000000000;
  value.it_value.tv_nsec = ns % 1000000000;
  checkSyscall(
      "timerfd_settime",
      ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &value, nullptr));
}

} // namespace resilient
