#include "transport/event_loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <utility>

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441 // the same number on every architecture
#endif

namespace resilient {

namespace {

// Events fetched at a time. More only makes a turn longer; fewer costs more
// calls of epoll_wait under load, nothing else.
constexpr int kEventsPerTurn = 128;

// A look takes some hundred nanoseconds, and so does to yield in vain.
constexpr unsigned kLooksUntilYield = 8;

// The generation that marks our own descriptors; others start at 1.
constexpr uint64_t kWakeMark = 0;

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

uint64_t packEvent(int fd, uint32_t generation) {
  return uint64_t{generation} << 32 | static_cast<uint32_t>(fd);
}

} // namespace

void checkInLoop(bool inLoop, const char* file, int line) {
  if (!inLoop) {
    std::fprintf(
        stderr, "%s:%d: called outside the loop's thread\n", file, line);
    std::abort();
  }
}

EventLoop::EventLoop()
    : epoll_(checkSyscall("epoll_create1", ::epoll_create1(EPOLL_CLOEXEC))),
      wake_(checkSyscall("eventfd", ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))),
      now_(std::chrono::steady_clock::now()),
      // The clock of std::chrono::steady_clock. Blocking: see parkWhileHelped.
      wakeTimer_(checkSyscall(
          "timerfd_create",
          ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC))),
      wakeTimerAt_(kNever) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeMark;
  checkSyscall(
      "watch the eventfd",
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event));
  checkSyscall(
      "watch the timerfd",
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeTimer_.get(), &event));
}

EventLoop::~EventLoop() = default;

// The floating-point state of a thread changes results (flush-to-zero), and
// reductions run in turns: a turn has the default state whoever takes it.
class EventLoop::Turn {
 public:
  explicit Turn(EventLoop& loop) : loop_(loop) {
    loop_.runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
#if defined(__SSE2__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
#endif
  }
  ~Turn() {
#if defined(__SSE2__)
    _mm_setcsr(saved_);
#endif
    loop_.runner_.store(std::thread::id(), std::memory_order_relaxed);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  EventLoop& loop_;
  unsigned saved_ = 0;
};

bool EventLoop::inLoop() const {
  return !running_.load(std::memory_order_relaxed) ||
      runner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

bool EventLoop::post(std::function<void()> run) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    if (ended_) {
      return false;
    }
    posted_.push_back(std::move(run));
    // Whoever is in a turn looks here before it sleeps or goes away.
    wake =
        runner_.load(std::memory_order_relaxed) != std::this_thread::get_id() &&
        std::exchange(maySleep_, false);
  }
  if (wake) {
    wakeUp();
  }
  return true;
}

bool EventLoop::postQuietly(std::function<void()> run) {
  std::lock_guard lock(mutex_);
  if (ended_) {
    return false;
  }
  posted_.push_back(std::move(run));
  return true;
}

void EventLoop::runPosted(bool here) {
  if (runner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
    return; // in a turn: the next one runs it
  }
  if (here && running_.load(std::memory_order_relaxed) && turn_.try_lock()) {
    std::lock_guard lock(turn_, std::adopt_lock);
    takeTurn(nullptr, 0);
    if (helped_.load()) {
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
    left_ = true;
    if (!std::exchange(maySleep_, false)) {
      return;
    }
    delay = leftInARow_ == kTrusted ? kLinger : kSoon;
  }
  if (helped_.load()) {
    wakeUp();
  } else {
    wakeBy(std::chrono::steady_clock::now() + delay);
  }
}

// The caller has taken turns and goes: sees to it that the thread in run()
// wakes up in time for what is left. In a turn, or rather just after it.
void EventLoop::leave() {
  const TimePoint now = std::chrono::steady_clock::now();
  const bool parked = parked_.load();
  if (parked) {
    // Before we look: who posts something after that moves it forward again.
    std::lock_guard lock(wakeTimerMutex_);
    parkedUntil_ = socketsSeenAt_.load() + linger_;
    setWakeTimer(parkedUntil_);
  } else if (!anyNews()) {
    putPollersToSleep();
  }
  TimePoint by = timers_.next();
  {
    std::lock_guard lock(mutex_);
    if (!endOfTurn_.empty() || !posted_.empty() || stopping_) {
      by = std::min(by, now + kSoon);
    }
  }
  if (anyNews()) { // of which the other thread may not have been told
    by = std::min(by, now + kLinger);
  }
  if (parked || by < sleepsUntil_) { // else it wakes up by itself
    wakeBy(by);
  }
}

void EventLoop::wakeBy(TimePoint when) {
  std::lock_guard lock(wakeTimerMutex_);
  parkedUntil_ = std::min(parkedUntil_, when);
  setWakeTimer(when);
}

// Whoever slept is awake: a timer that has gone off has served its purpose.
void EventLoop::wakeTimerNoticed() {
  std::lock_guard lock(wakeTimerMutex_);
  if (wakeTimerAt_ <= std::chrono::steady_clock::now()) {
    wakeTimerAt_ = kNever;
  }
}

// Only ever to an earlier time. To set it costs microseconds, above all on a
// virtual machine: so it is not moved on with each operation.
void EventLoop::setWakeTimer(TimePoint when) {
  if (when >= wakeTimerAt_) {
    return;
  }
  wakeTimerAt_ = when;
  wakeTimersSet_.fetch_add(1, std::memory_order_relaxed);
  // In the past: at once. 0 would disarm it.
  const int64_t ns = std::max<int64_t>(when.time_since_epoch().count(), 1);
  itimerspec value{};
  value.it_value.tv_sec = ns / 1000000000;
  value.it_value.tv_nsec = ns % 1000000000;
  checkSyscall(
      "timerfd_settime",
      ::timerfd_settime(wakeTimer_.get(), TFD_TIMER_ABSTIME, &value, nullptr));
}

bool EventLoop::help(const std::function<bool()>& done, TimePoint until) {
  if (inLoop() || !helper_.try_lock()) {
    return false;
  }
  std::lock_guard helper(helper_, std::adopt_lock);
  helperThread_.store(std::this_thread::get_id());
  helped_.store(true);
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
  helped_.store(false);
  wakeTimerNoticed();
  // The thread in run() may sleep as it did before we came: nothing that has
  // come up since must be slept through.
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
  if (helped_.load() && helperThread_.load() != std::this_thread::get_id()) {
    wakeUp();
  }
}

// The thread in run() was woken although somebody helps: it must not take the
// next event away. The wake-up may have been meant for the helper.
void EventLoop::parkWhileHelped() {
  if (!helped_.load()) {
    return;
  }
  wakeUp();
  parked_.store(true);
  // If the helper goes now, it sees parked_ and sets the timer.
  while (!unparked()) {
    uint64_t expirations = 0;
    (void)!::read(wakeTimer_.get(), &expirations, sizeof(expirations));
  }
  wakeTimerNoticed();
}

// Whether the parked thread is to look for itself from now on.
bool EventLoop::unparked() {
  std::lock_guard lock(wakeTimerMutex_);
  const TimePoint now = std::chrono::steady_clock::now();
  const bool helped = helped_.load();
  if (!helped && parkedUntil_ <= now) {
    linger_ = kLinger;
    parked_.store(false);
    return true;
  }
  if (wakeTimerAt_ <= now) { // it has gone off, but callers keep coming
    wakeTimerAt_ = kNever;
    linger_ = std::min(2 * linger_, kLingerMost);
  }
  if (!helped) { // else the helper sets it when it goes
    setWakeTimer(parkedUntil_);
  }
  return false;
}

void EventLoop::stop() {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake = std::exchange(maySleep_, false);
  }
  if (wake) {
    wakeUp();
  }
}

void EventLoop::afterEnd(const std::function<void()>& run) {
  std::lock_guard turn(turn_);
  run();
}

void EventLoop::wakeUp() {
  uint64_t one = 1;
  // Fails only with EAGAIN, at 2^64 - 2 unread wake-ups: awake anyway.
  (void)!retryInterrupted(
      [&] { return ::write(wake_.get(), &one, sizeof(one)); });
  // A helper reads the eventfd's event before it goes, or comes back here.
  if (parked_.load() && !helped_.load()) {
    wakeBy(TimePoint::min());
  }
}

void EventLoop::add(int fd, uint32_t events, Handler* handler) {
  RESILIENT_IN_LOOP(*this);
  auto index = static_cast<size_t>(fd);
  if (index >= registrations_.size()) {
    registrations_.resize(std::max(index + 1, 2 * registrations_.size()));
  }
  Registration& r = registrations_[index];
  if (++r.generation == kWakeMark) {
    ++r.generation;
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = packEvent(fd, r.generation);
  checkSyscall(
      "watch descriptor " + std::to_string(fd),
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event));
  r.handler = handler;
}

EventLoop::Registration& EventLoop::registration(int fd, const char* attempt) {
  auto index = static_cast<size_t>(fd);
  if (fd < 0 || index >= registrations_.size() ||
      registrations_[index].handler == nullptr) {
    throw StatusError(Status(
        StatusCode::kInternal,
        std::string(attempt) + " descriptor " + std::to_string(fd) +
            ": it is not watched"));
  }
  return registrations_[index];
}

void EventLoop::modify(int fd, uint32_t events) {
  RESILIENT_IN_LOOP(*this);
  Registration& r = registration(fd, "change the events of");
  epoll_event event{};
  event.events = events;
  event.data.u64 = packEvent(fd, r.generation);
  checkSyscall(
      "change the events of descriptor " + std::to_string(fd),
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event));
}

void EventLoop::remove(int fd) {
  RESILIENT_IN_LOOP(*this);
  registration(fd, "stop watching").handler = nullptr;
  checkSyscall(
      "stop watching descriptor " + std::to_string(fd),
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr));
}

TimerId EventLoop::at(TimePoint when, std::function<void()> run) {
  RESILIENT_IN_LOOP(*this);
  // Not before now: a timer that re-arms itself in the past would otherwise
  // stay ahead of one that has waited its time.
  return timers_.add(std::max(when, now_), std::move(run));
}

int EventLoop::wait(epoll_event* events, int capacity, Nanos timeout) {
  if (finePrecision_) {
    timespec limit{};
    if (timeout.count() >= 0) {
      limit.tv_sec = timeout.count() / 1000000000;
      limit.tv_nsec = timeout.count() % 1000000000;
    }
    long n = ::syscall(
        SYS_epoll_pwait2,
        epoll_.get(),
        events,
        capacity,
        timeout.count() < 0 ? nullptr : &limit,
        nullptr,
        0);
    // Before Linux 5.11 it does not exist; old sandboxes answer EPERM.
    if (n >= 0 || (errno != ENOSYS && errno != EPERM)) {
      return static_cast<int>(n);
    }
    finePrecision_ = false;
  }
  int milliseconds = -1;
  if (timeout.count() >= 0) {
    // Rounded up: waking before the time would spin until it has come.
    int64_t up = (timeout.count() + 999999) / 1000000;
    milliseconds = static_cast<int>(std::min<int64_t>(up, INT_MAX));
  }
  return ::epoll_wait(epoll_.get(), events, capacity, milliseconds);
}

void EventLoop::dispatch(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWakeMark) {
      continue; // edge-triggered: nobody reads it
    }
    auto index = static_cast<uint32_t>(events[i].data.u64);
    const Registration& r = registrations_[index];
    if (r.handler != nullptr && r.generation == events[i].data.u64 >> 32) {
      r.handler->onEvents(events[i].events);
    }
  }
}

void EventLoop::runAll(std::vector<std::function<void()>>& functions) {
  for (auto& run : functions) {
    run();
    run = nullptr; // what it holds lives no longer than its turn
  }
  functions.clear();
}

void EventLoop::add(Poller* poller) {
  RESILIENT_IN_LOOP(*this);
  poller->setAsleep(pollersAsleep_);
  pollers_.push_back(poller);
}

void EventLoop::remove(Poller* poller) {
  RESILIENT_IN_LOOP(*this);
  std::replace(
      pollers_.begin(),
      pollers_.end(),
      poller,
      static_cast<Poller*>(nullptr)); // takeTurn may be going through them
}

bool EventLoop::anyNews() const {
  return std::any_of(pollers_.begin(), pollers_.end(), [](const Poller* p) {
    return p != nullptr && p->hasNews();
  });
}

void EventLoop::wakePollers() {
  if (std::exchange(pollersAsleep_, false)) {
    for (Poller* p : pollers_) {
      if (p != nullptr) {
        p->setAsleep(false);
      }
    }
  }
}

// Again even if they sleep: one that has been woken since is awake.
void EventLoop::putPollersToSleep() {
  pollersAsleep_ = true;
  for (Poller* p : pollers_) {
    if (p != nullptr) {
      p->setAsleep(true);
    }
  }
}

// Whether a process we wait for wants this very processor. As long as none
// sleeps the kernel leaves both here, even if another one is idle; who is woken
// is put there.
bool EventLoop::isInTheWay() {
  const int here = ::sched_getcpu();
  std::lock_guard turn(turn_);
  return std::any_of(pollers_.begin(), pollers_.end(), [&](const Poller* p) {
    return p != nullptr && p->writerIsOn(here);
  });
}

// Looks for something to do without falling asleep; false: there is nothing,
// and it is time to sleep.
bool EventLoop::spin(
    TimePoint begunAt,
    TimePoint limit,
    const std::function<bool()>* done) {
  Nanos budget;
  bool crowded;
  {
    std::lock_guard turn(turn_);
    const bool worthIt = done != nullptr ? !pollers_.empty()
                                         : !helped_.load() &&
            std::any_of(pollers_.begin(), pollers_.end(), [](const Poller* p) {
              return p != nullptr && p->inMidst();
            });
    if (!worthIt) {
      return false;
    }
    wakePollers();
    limit = std::min(limit, timers_.next());
    budget = (done != nullptr ? helperSpin_ : runSpin_).budget();
    // One for each peer on this host, and ours.
    crowded = pollers_.size() + 1 > processors();
  }
  for (unsigned looks = 0;;) {
    {
      std::lock_guard turn(turn_);
      if (!endOfTurn_.empty() || anyNews()) {
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
        now >= limit || (done == nullptr && helped_.load())) {
      return false;
    }
    if (!crowded && isInTheWay()) {
      return false;
    }
    if (crowded || ++looks % kLooksUntilYield == 0) {
      ::sched_yield();
    } else {
      for (int i = 0; i < 8; ++i) {
        relax();
      }
    }
  }
}

// Called before a thread sleeps: false if there is something to do at once,
// else until when it may sleep at most.
bool EventLoop::prepareToSleep(TimePoint& until, bool helper) {
  std::lock_guard turn(turn_);
  bool idle = endOfTurn_.empty();
  if (helper || !helped_.load()) { // else the helper looks
    putPollersToSleep();
    idle = idle && !anyNews();
  }
  std::lock_guard lock(mutex_);
  // Whoever stops the loop wakes nobody who may not sleep.
  idle = idle && posted_.empty() && !stopping_;
  // From here on a poster writes to the eventfd, so that a post between this
  // line and the wait is not slept through.
  maySleep_ = idle;
  until = timers_.next();
  if (!helper) {
    sleepsUntil_ = idle ? until : TimePoint::min();
  }
  return idle;
}

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
  const bool look =
      !awake || begunAt - socketsSeenAt_.load() >= kSocketsAtLeast;
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
      wakeTimerNoticed();
    }
    socketsSeenAt_.store(std::chrono::steady_clock::now());
  }
  std::lock_guard turn(turn_);
  if (!helper && !helped_.load()) {
    std::lock_guard lock(mutex_);
    if (std::exchange(left_, false)) {
      leftInARow_ = 0; // the caller has better things to do
    }
  }
  SpinTime& spinTime = helper ? helperSpin_ : runSpin_;
  if (anyNews()) {
    spinTime.onNews(std::chrono::steady_clock::now() - begunAt);
  } else if (!awake) {
    spinTime.onOther();
  }
  takeTurn(events, count);
}

// noexcept: see the class comment, nothing may throw out of a turn.
void EventLoop::takeTurn(const epoll_event* events, int count) noexcept {
  Turn turn(*this);
  turns_.fetch_add(1, std::memory_order_relaxed);
  now_ = std::chrono::steady_clock::now();
  {
    std::lock_guard lock(mutex_);
    postedRunning_.swap(posted_);
    if (std::exchange(left_, false)) {
      leftInARow_ = std::min(leftInARow_ + 1, kTrusted);
    }
  }
  uint64_t mark = timers_.added();
  dispatch(events, count);
  for (size_t i = 0; i < pollers_.size(); ++i) {
    if (pollers_[i] != nullptr && pollers_[i]->hasNews()) {
      pollers_[i]->onNews();
    }
  }
  std::erase(pollers_, nullptr);
  runAll(postedRunning_);
  while (auto run = timers_.popDue(now_, mark)) {
    run();
  }
  endOfTurnRunning_.swap(endOfTurn_);
  runAll(endOfTurnRunning_);
}

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
    parkWhileHelped();
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

void EventLoop::closeInForkedChild() {
  for (size_t fd = 0; fd < registrations_.size(); ++fd) {
    if (registrations_[fd].handler != nullptr) {
      ::close(static_cast<int>(fd));
    }
  }
  ::close(epoll_.get());
  ::close(wake_.get());
  ::close(wakeTimer_.get());
}

} // namespace resilient
