// Which thread takes the next turn of the loop, and how it waits for it. State
// of its own is in CallerHelp (who helps, who is parked), PollerSet (messages
// without a descriptor) and SpinTime (how long spinning has paid).
//
// run() and help() repeat sleepAndTakeTurn():
//   spin            look at the pollers and posted_ for a while, if that has
//                   found something lately
//   prepareToSleep  under the locks: announce to pollers and posters that they
//                   have to wake us, then look once more
//   wait            epoll
//   takeTurn
// A caller that goes (runPosted, help) leaves the loop to the thread in run(),
// which may sleep or be parked: leave() sees to it that it wakes up in time.

#include <sched.h>
#include <sys/epoll.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <utility>

#include "transport/event_loop.h"

namespace resilient {

namespace {

// Events fetched at a time. More only makes a turn longer; fewer costs more
// calls of epoll_wait under load, nothing else.
constexpr int kEventsPerTurn = 128;

// A look takes some hundred nanoseconds, and so does to yield in vain, where
// system calls are fast.
constexpr unsigned kLooksUntilYield = 8;
// To yield takes at most this share of the time.
constexpr int kYieldsShare = 10;

// Processors that this process may use.
size_t processors() {
  static const size_t count = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return ::sched_getaffinity(0, sizeof(set), &set) == 0
        ? static_cast<size_t>(CPU_COUNT(&set))
        : size_t{1};
  }();
  return count;
}

void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace

// After stop() the second part runs what is still posted, without a look at
// descriptors. Only then ended_ is set, under both locks, and post() refuses
// from that moment. A function that keeps posting itself would never let run()
// return.
void EventLoop::run() {
  running_.store(true);
  epoll_event events[kEventsPerTurn];
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) {
        break;
      }
    }
    sleepAndTakeTurn(events, kNever, nullptr);
    if (help_.helped()) {
      // Woken although a caller helps: the wake-up may be meant for it.
      wakeUp();
      help_.park();
    }
  }
  for (;;) {
    std::lock_guard turn(turn_);
    {
      std::lock_guard lock(mutex_);
      if (posted_.empty()) {
        ended_ = true;
        break;
      }
    }
    takeTurn(nullptr, 0);
  }
  running_.store(false);
}

// The call has three outcomes. In a turn: nothing to do. With `here` and a free
// turn lock: the caller runs the turn, and the helper or the thread in run()
// learns what is left. Otherwise the work is left to another thread, and the
// timer wakes the thread in run() only after a while: most callers come back in
// help() before that.
//
// It only tries the lock: a caller must not wait for a turn of another thread,
// which may copy 16 MiB or compute.
void EventLoop::runPosted(bool here) {
  if (runner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    return; // in a turn: the next one runs it
  }
  if (here && running_.load(std::memory_order_relaxed) && turn_.try_lock()) {
    std::lock_guard lock(turn_, std::adopt_lock);
    takeTurn(nullptr, 0);
    if (help_.helped()) {
      // Not by the timer: a parked thread might take that away. The helper
      // sees for itself what is due.
      wakeUp();
    } else {
      leave();
    }
    return;
  }
  Nanos delay;
  {
    std::lock_guard posted(mutex_);
    left_.leave();
    if (!std::exchange(maySleep_, false)) {
      return;
    }
    delay = left_.patience();
  }
  if (help_.helped()) {
    wakeUp();
  } else {
    help_.wakeBy(std::chrono::steady_clock::now() + delay);
  }
}

// The caller has taken turns and goes: wakes the thread in run() in time for
// the work that is left. With turn_ held, after the turn.
//
// That thread can be woken in two ways. A parked thread does not see epoll, so
// its timer must be set. A thread that sleeps in epoll wakes up by itself at
// sleepsUntil_, and for descriptors; it needs the timer only for something
// earlier.
void EventLoop::leave() {
  const TimePoint now = std::chrono::steady_clock::now();
  const bool parked = help_.parked();
  if (parked) {
    // Before we look: a post after that moves the time forward again.
    help_.lingerFrom(socketsSeenAt_.load());
  } else if (!pollers_.hasNews()) {
    pollers_.putToSleep();
  }
  TimePoint by = timers_.next();
  {
    std::lock_guard lock(mutex_);
    if (!endOfTurn_.empty() || !posted_.empty() || stopping_) {
      by = std::min(by, now + LeftWork::kSoon);
    }
  }
  if (pollers_.hasNews()) { // the other thread may have got no signal
    by = std::min(by, now + LeftWork::kLinger);
  }
  if (parked || by < sleepsUntil_) { // else it wakes up by itself
    help_.wakeBy(by);
  }
}

// Each pass is the same as in run(), except that it ends with `done`. The end
// has an order. First helped_ is cleared, so the thread in run() may work
// again. Then, under the turn lock, maySleep_ is set, so the next poster writes
// to the eventfd. Last comes leave(), for work that is due now.
bool EventLoop::help(const std::function<bool()>& done, TimePoint until) {
  if (inLoop()) {
    return false;
  }
  CallerHelp::Helper helper(help_);
  if (!helper) {
    return false;
  }
  epoll_event events[kEventsPerTurn];
  while (!done() && std::chrono::steady_clock::now() < until) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_ || ended_) {
        break;
      }
    }
    sleepAndTakeTurn(events, until, &done);
  }
  helper.end();
  // The thread in run() may sleep as it did before we came. It must wake up for
  // everything that has come up since.
  std::lock_guard turn(turn_);
  {
    std::lock_guard lock(mutex_);
    maySleep_ = true;
  }
  leave();
  return true;
}

void EventLoop::wakeHelper() {
  // A helper that has done it itself sees it when its turn is over.
  if (help_.helpedByOther()) {
    wakeUp();
  }
}

// One pass looks, sleeps and takes a turn. The wait itself runs without the
// turn lock, or no caller could take a turn while this thread sleeps. By the
// time the lock is taken another thread may have handled the events. dispatch()
// then calls handlers in vain, or not at all if the descriptor was removed.
//
// A thread that found work by spinning asks epoll without a timeout, and only
// every kMinSockets: the system call costs more than a message in shared
// memory.
void EventLoop::sleepAndTakeTurn(
    epoll_event* events,
    TimePoint limit,
    const std::function<bool()>* done) {
  const bool helper = done != nullptr;
  const TimePoint begunAt = std::chrono::steady_clock::now();
  const bool awake = spin(begunAt, limit, done);
  if (helper && !awake && (*done)()) {
    return;
  }
  const bool look = !awake ||
      begunAt - socketsSeenAt_.load() >=
          std::max(kMinSockets, call_ * kSocketsShare);
  int count = 0;
  Nanos timeout{0};
  TimePoint until;
  if (!awake && prepareToSleep(until, helper)) {
    until = std::min(until, limit);
    timeout = until == kNever
        ? Nanos(-1)
        : std::max(Nanos(0), until - std::chrono::steady_clock::now());
  }
  if (look) {
    count = wait(events, kEventsPerTurn, timeout);
    if (count < 0 && errno != EINTR) {
      checkSyscall("epoll_wait", count);
    }
    if (!helper) {
      help_.timerNoticed();
    }
    socketsSeenAt_.store(std::chrono::steady_clock::now());
  }
  std::lock_guard turn(turn_);
  if (!helper && !help_.helped()) {
    std::lock_guard lock(mutex_);
    left_.onNobodyCame();
  }
  SpinTime& spinTime = helper ? helperSpin_ : runSpin_;
  if (pollers_.hasNews()) {
    spinTime.onNews(std::chrono::steady_clock::now() - begunAt);
  } else if (!awake) {
    spinTime.onOther();
  }
  takeTurn(events, count);
}

// Looks for something to do without falling asleep; false: there is nothing,
// and it is time to sleep. The locks are released between two looks, for
// posters and other callers.
bool EventLoop::spin(
    TimePoint begunAt,
    TimePoint limit,
    const std::function<bool()>* done) {
  Nanos budget;
  size_t writers;
  {
    std::lock_guard turn(turn_);
    const bool worthIt = done != nullptr
        ? !pollers_.empty()
        : !help_.helped() && pollers_.inMidst();
    if (!worthIt) {
      return false;
    }
    pollers_.wake();
    limit = std::min(limit, timers_.next());
    budget = (done != nullptr ? helperSpin_ : runSpin_).budget();
    writers = pollers_.writersHere();
  }
  // One for each peer on this host, and ours.
  const bool crowded = writers != 0 && writers + 1 > processors();
  TimePoint yieldAt = begunAt + call_ * kYieldsShare;
  for (unsigned looks = 0;;) {
    {
      std::lock_guard turn(turn_);
      if (!endOfTurn_.empty() || pollers_.hasNews()) {
        return true;
      }
      std::lock_guard lock(mutex_);
      maySleep_ = false; // posters need not wake us
      if (!posted_.empty() || stopping_) {
        return true;
      }
    }
    const TimePoint now = std::chrono::steady_clock::now();
    if ((done != nullptr && (*done)()) || now - begunAt >= budget ||
        now >= limit || (done == nullptr && help_.helped())) {
      return false;
    }
    if (!crowded && writers != 0 && isInTheWay()) {
      return false;
    }
    if (crowded || (++looks % kLooksUntilYield == 0 && now >= yieldAt)) {
      ::sched_yield();
      yieldAt = now + call_ * kYieldsShare;
    } else {
      for (int i = 0; i < 8; ++i) {
        relax();
      }
    }
  }
}

// Whether a process we wait for wants this very processor. While neither of the
// two sleeps, the kernel leaves both here, even if another processor is idle.
// It puts a process that it wakes on the idle one.
bool EventLoop::isInTheWay() {
  const int here = ::sched_getcpu();
  std::lock_guard turn(turn_);
  return pollers_.writerIsOn(here);
}

// Called before a thread sleeps: false if there is something to do at once,
// else until when it may sleep at most.
//
// The order is the protocol with the writers: announce first, then look once
// more. A writer publishes first and then looks for the announcement. In
// whatever order the two meet, one of them sees the other. The other order
// would lose a wake-up.
bool EventLoop::prepareToSleep(TimePoint& until, bool helper) {
  std::lock_guard turn(turn_);
  bool idle = endOfTurn_.empty();
  if (helper || !help_.helped()) { // else the helper looks
    pollers_.putToSleep();
    idle = idle && !pollers_.hasNews();
  }
  std::lock_guard lock(mutex_);
  // stop() wakes only a thread that may sleep.
  idle = idle && posted_.empty() && !stopping_;
  // From here on a poster writes to the eventfd: a post between this line and
  // the wait ends the wait.
  maySleep_ = idle;
  until = timers_.next();
  if (!helper) {
    sleepsUntil_ = idle ? until : TimePoint::min();
  }
  return idle;
}

} // namespace resilient
