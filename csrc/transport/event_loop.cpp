#include "transport/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
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

// The generation that marks our own descriptors; others start at 1.
constexpr uint64_t kWakeMark = 0;

uint64_t packEvent(int fd, uint32_t generation) {
  return uint64_t{generation} << 32 | static_cast<uint32_t>(fd);
}

// How long a look at the sockets takes, when nothing interrupts it.
Nanos timeOfCall(int epoll) {
  constexpr int kTries = 5;
  Nanos least = Nanos::max();
  for (int i = 0; i < kTries; ++i) {
    epoll_event event;
    const TimePoint start = std::chrono::steady_clock::now();
    (void)::epoll_wait(epoll, &event, 1, 0);
    least = std::min(
        least,
        std::chrono::duration_cast<Nanos>(
            std::chrono::steady_clock::now() - start));
  }
  return least;
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
      call_(timeOfCall(epoll_.get())),
      help_(call_),
      helperSpin_(call_),
      runSpin_(call_),
      now_(std::chrono::steady_clock::now()) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeMark;
  checkSyscall(
      "watch the eventfd",
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event));
  checkSyscall(
      "watch the timerfd",
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, help_.timer(), &event));
}

EventLoop::~EventLoop() = default;

// The floating-point state of a thread changes results (flush-to-zero), and
// reductions run in turns: a turn has the default state in every thread.
//
// 0x1f80 is the reset value of MXCSR: round to nearest, all exceptions masked,
// no flush-to-zero. On processors without SSE2 the state of the thread stays.
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

// runner_ may be read without turn_: a thread can only find its own id there if
// it has written it itself.
bool EventLoop::inLoop() const {
  return !running_.load(std::memory_order_relaxed) ||
      runner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

// A post from within a turn needs no wake-up: the thread in the turn looks at
// posted_ before it sleeps or leaves. Neither does a post while maySleep_ is
// clear: then a thread is awake, or an earlier poster has written already.
bool EventLoop::post(std::function<void()> run) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    if (ended_) {
      return false;
    }
    posted_.push_back(std::move(run));
    // A thread in a turn looks at posted_ before it sleeps or leaves.
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
  help_.wakeParked();
}

// The generation changes with every add(). Events carry it, so one that was
// fetched for a closed descriptor does not reach a new one with the same number
// (a_stale_event_does_not_reach_the_successor_of_a_descriptor).
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

// As epoll_wait(), with a timeout in nanoseconds; a negative one never ends.
// Both threads that wait may be in here at a time, without a lock. Falls back
// to milliseconds for good when epoll_pwait2 turns out not to work.
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

// Handlers may remove or destroy each other, so each event is checked just
// before its call. registrations_ may grow in a call: no reference is kept
// across it. `count` is -1 after an interrupted wait.
void EventLoop::dispatch(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kWakeMark) {
      continue; // edge-triggered: it need not be read
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
  pollers_.add(poller);
}

void EventLoop::remove(Poller* poller) {
  RESILIENT_IN_LOOP(*this);
  pollers_.remove(poller);
}

// noexcept: see the class comment, nothing may throw out of a turn.
//
// How it works. The turn takes its work at the start: posted functions are
// swapped out, and `mark` separates the timers that exist now from later ones.
// Work that the turn itself creates waits for the next turn. A function that
// posts itself over and over, or a timer in the past, therefore starves nothing
// (a_timer_that_rearms_itself_in_the_past_starves_nobody). Functions at the end
// of the turn come last, since they write what all others have gathered.
void EventLoop::takeTurn(
    const epoll_event* events,
    int count,
    TimePoint now) noexcept {
  Turn turn(*this);
  turns_.fetch_add(1, std::memory_order_relaxed);
  now_ = now;
  {
    std::lock_guard lock(mutex_);
    postedRunning_.swap(posted_);
    left_.onTurn();
  }
  uint64_t mark = timers_.added();
  dispatch(events, count);
  pollers_.runNews();
  runAll(postedRunning_);
  while (auto run = timers_.popDue(now_, mark)) {
    run();
  }
  endOfTurnRunning_.swap(endOfTurn_);
  runAll(endOfTurnRunning_);
}

void EventLoop::turnAt(TimePoint now) {
  std::lock_guard turn(turn_);
  takeTurn(nullptr, 0, now);
}

TimePoint EventLoop::dueAt() {
  std::lock_guard turn(turn_);
  std::lock_guard lock(mutex_);
  return posted_.empty() && endOfTurn_.empty() ? timers_.next() : now_;
}

void EventLoop::closeInForkedChild() {
  for (size_t fd = 0; fd < registrations_.size(); ++fd) {
    if (registrations_[fd].handler != nullptr) {
      ::close(static_cast<int>(fd));
    }
  }
  ::close(epoll_.get());
  ::close(wake_.get());
  ::close(help_.timer());
}

} // namespace resilient
