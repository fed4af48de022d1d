#include "transport/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// The generation that marks our own eventfd; descriptors start at 1.
constexpr uint64_t kWakeMark = 0;

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
      now_(std::chrono::steady_clock::now()) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeMark;
  checkSyscall(
      "watch the eventfd",
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event));
}

EventLoop::~EventLoop() = default;

bool EventLoop::inLoop() const {
  auto runner = runner_.load(std::memory_order_relaxed);
  return runner == std::thread::id() || runner == std::this_thread::get_id();
}

bool EventLoop::post(std::function<void()> run) {
  bool wake;
  {
    std::lock_guard lock(mutex_);
    if (ended_) {
      return false;
    }
    posted_.push_back(std::move(run));
    wake = std::exchange(maySleep_, false);
  }
  if (wake) {
    wakeUp();
  }
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

void EventLoop::wakeUp() {
  uint64_t one = 1;
  // Fails only with EAGAIN, at 2^64 - 2 unread wake-ups: awake anyway.
  (void)!retryInterrupted(
      [&] { return ::write(wake_.get(), &one, sizeof(one)); });
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

EventLoop::Registration& EventLoop::registration(
    int fd,
    const char* attempt) {
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
      uint64_t wakes;
      (void)!::read(wake_.get(), &wakes, sizeof(wakes));
      continue;
    }
    auto index = static_cast<uint32_t>(events[i].data.u64);
    const Registration& r = registrations_[index];
    if (r.handler != nullptr && r.generation == events[i].data.u64 >> 32) {
      r.handler->onEvents(events[i].events);
    }
  }
}

void EventLoop::runPosted(std::vector<std::function<void()>>& posted) {
  for (auto& run : posted) {
    run();
    run = nullptr; // what it holds lives no longer than its turn
  }
  posted.clear();
}

void EventLoop::run() {
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::vector<std::function<void()>> posted;
  epoll_event events[kEventsPerTurn];
  // noexcept: see the class comment, nothing may throw out of a turn.
  auto turn = [&]() noexcept {
    bool idle = endOfTurn_.empty();
    {
      std::lock_guard lock(mutex_);
      if (stopping_) {
        return false;
      }
      idle = idle && posted_.empty();
      // From here on a poster writes to the eventfd, so that a post between
      // this line and the wait is not slept through.
      maySleep_ = idle;
    }
    Nanos timeout{0};
    if (idle) {
      TimePoint next = timers_.next();
      timeout = next == kNever
          ? Nanos(-1)
          : std::max(Nanos(0), next - std::chrono::steady_clock::now());
    }
    int count = wait(events, kEventsPerTurn, timeout);
    if (count < 0 && errno != EINTR) {
      checkSyscall("epoll_wait", count);
    }
    turns_.fetch_add(1, std::memory_order_relaxed);
    now_ = std::chrono::steady_clock::now();
    {
      std::lock_guard lock(mutex_);
      maySleep_ = false;
      posted.swap(posted_);
    }
    uint64_t mark = timers_.added();
    dispatch(events, count);
    runPosted(posted);
    while (auto run = timers_.popDue(now_, mark)) {
      run();
    }
    endOfTurnRunning_.swap(endOfTurn_);
    runPosted(endOfTurnRunning_);
    return true;
  };
  while (turn()) {
  }
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      posted.swap(posted_);
      if (posted.empty()) {
        ended_ = true;
        break;
      }
    }
    [&]() noexcept { runPosted(posted); }();
  }
  runner_.store(std::thread::id(), std::memory_order_relaxed);
}

void EventLoop::closeInForkedChild() {
  for (size_t fd = 0; fd < registrations_.size(); ++fd) {
    if (registrations_[fd].handler != nullptr) {
      ::close(static_cast<int>(fd));
    }
  }
  ::close(epoll_.get());
  ::close(wake_.get());
}

} // namespace resilient
