#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/syscall.h"
#include "base/time.h"
#include "transport/caller_help.h"
#include "transport/poller_set.h"
#include "transport/spin_time.h"
#include "transport/timer_queue.h"

struct epoll_event;

namespace resilient {

// The owner of a watched descriptor. `events` are EPOLLIN, EPOLLOUT, EPOLLERR,
// EPOLLHUP. onEvents() is called in the loop and may remove or destroy any
// handler, itself included.
//
// It may also be called in vain. The thread in run() and a helper can fetch the
// same level-triggered event, and the second one finds nothing left.
// Descriptors must therefore be non-blocking, and EAGAIN is no error.
struct Handler {
  virtual ~Handler() = default;
  virtual void onEvents(uint32_t events) = 0;
};

// Waits for descriptors (level-triggered epoll), timers and posted functions,
// and runs them one after the other. With nothing to do it sleeps without
// waking up.
//
// One turn: sleep, read the clock, descriptors, pollers, posted functions, due
// timers, end-of-turn functions. Functions that one of them starts (post, at
// with a time in the past) run in the next turn, so none can starve the others.
//
// Threads. One thread at a time is in a turn: usually the one in run(), but a
// caller may take a turn of its own (runPosted, help) instead of waking that
// one up and waiting for it. This saves two thread switches, which cost more
// than a small message itself. event_loop.cpp has the turn, and
// event_loop_turns.cpp decides who takes it and how the thread waits before.
// "In the loop" means: in a turn. post(), runPosted(), help(), wakeHelper() and
// stop() may be called from any thread; all else in the loop. While no thread
// is in run() (setting up, tearing down) the owner lets only one thread use the
// loop. No function given to the loop may throw; an exception ends the process.
//
// After stop(), run() runs every function posted before it returns; post()
// returns false from then on.
class EventLoop {
 public:
  EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  ~EventLoop();

  // Until stop(), and once only. At the end it runs all posted functions, in
  // turns that leave descriptors alone. Timers that are due then run as well.
  void run();
  // May be called in a turn, and more than once. The present turn still ends.
  void stop();
  // For tearing down the handlers, once run() has returned: calls `run` while
  // no caller that was helping is in a turn, or about to end one.
  void afterEnd(const std::function<void()>& run);
  // For simulations, in place of run() and from one thread: a turn at a time of
  // their own, which never goes back, without descriptors and pollers.
  void turnAt(TimePoint now);
  // When the next turn has something to do; kNever: nothing is to come.
  TimePoint dueAt();
  // True in the thread that is in a turn; in any thread while none is in run().
  // Setting up and tearing down count as the loop, by one thread at a time.
  bool inLoop() const;

  // Calls `run` in the loop, in order of posting. If the loop has ended, `run`
  // never runs: it is destroyed here, and the result is false. A burst of posts
  // wakes a sleeping loop with one eventfd write. Captured objects are
  // destroyed in the same turn, right after the call. May be called in a turn:
  // the function then runs in the next one.
  bool post(std::function<void()> run);
  // As post(), but wakes no thread: runPosted() must follow. Without
  // runPosted() the function waits until something else wakes the loop. The two
  // calls are separate: a caller can post under a lock of its own and take the
  // turn after it has released that lock (GroupImpl::submit).
  bool postQuietly(std::function<void()> run);
  // Starts the posted functions. `here`, for short work: in the caller's thread
  // if no other one is in a turn; else soon, in the helper or the thread in
  // run().
  void runPosted(bool here);
  // Takes turns in the caller's thread until `done` or `until`, or until the
  // loop stops. False if the caller cannot help (another thread does, or this
  // is the loop) and has to wait in its own way. A thread that makes `done`
  // true outside of the loop must call wakeHelper().
  //
  // `done` is called often and never within a turn: it may read only what is
  // safe to read in any thread. The call may return one turn later than
  // `until`. It also returns when the loop stops, so look at `done` afterwards.
  bool help(const std::function<bool()>& done, TimePoint until);
  // Costs nothing but an atomic read if no other thread helps.
  void wakeHelper();

  // The loop does not own `handler`: remove it first, then close `fd`.
  // Events for it that are already at hand are dropped. EPOLLET may be among
  // `events`. A descriptor has one handler. A failure throws StatusError, which
  // ends the process in a turn: epoll refuses only for want of memory or
  // watches, or because of a mistake of ours.
  void add(int fd, uint32_t events, Handler* handler);
  // Events that this turn has fetched already still arrive after a modify().
  // With `events` 0 the descriptor stays watched, for errors and the end only.
  void modify(int fd, uint32_t events);
  // Close the descriptor only after this call. In the other order its number
  // may belong to another file by then.
  void remove(int fd);

  // Not owned. A poller may remove itself or others while it is called.
  //
  // While there is one, a thread that waits polls before it sleeps (spin()).
  void add(Poller* poller);
  void remove(Poller* poller);

  // A time in the past means the next turn. Timers never fire early. A parked
  // thread counts as asleep: it wakes up for the next timer too.
  TimerId at(TimePoint when, std::function<void()> run);
  TimerId after(Nanos delay, std::function<void()> run) {
    return at(now_ + delay, std::move(run));
  }
  // Cancelling a fired or cancelled timer, or 0, is a no-op.
  void cancel(TimerId id) {
    timers_.cancel(id);
  }

  // The time at which this turn began. It does not advance within a turn. Code
  // that stamps what it sends reads the clock itself (DatagramPath::sendDue).
  TimePoint now() const {
    return now_;
  }
  // Runs once, after all events of this turn and before the loop may sleep: the
  // place to write what the turn has gathered. A function that is added by one
  // of them runs at the end of the next turn, which comes without sleeping.
  void atEndOfTurn(std::function<void()> run) {
    endOfTurn_.push_back(std::move(run));
  }

  // In the child of a fork, where no thread runs the loop: closes every
  // descriptor it watches, and its own. Only system calls. Takes no lock:
  // another thread of the parent may have held any of them.
  void closeInForkedChild();

  // How often the loop has woken up, for tests and statistics.
  uint64_t turns() const {
    return turns_.load(std::memory_order_relaxed);
  }
  // How often it has set the timer that wakes the thread in run(), for the
  // same.
  uint64_t wakeTimersSet() const {
    return help_.timersSet();
  }

 private:
  // Stays in its place when the descriptor is removed, to keep the generation.
  struct Registration {
    Handler* handler = nullptr;
    // Counts the uses of this descriptor number: events carry it, and one meant
    // for a closed descriptor does not reach its successor.
    uint32_t generation = 0;
  };

  // A thread that finds work without sleeping still looks at the sockets this
  // often, if system calls are fast.
  static constexpr Nanos kMinSockets = std::chrono::microseconds(100);
  // Looks at the sockets take at most this share of the time.
  static constexpr int kSocketsShare = 10;

  // event_loop.cpp: one turn.
  class Turn;
  // Writes to the eventfd, and then wakes a thread that is parked and does not
  // see it. The caller must not hold mutex_.
  void wakeUp();
  int wait(epoll_event* events, int capacity, Nanos timeout);
  void takeTurn(
      const epoll_event* events,
      int count,
      TimePoint now = std::chrono::steady_clock::now()) noexcept;
  void dispatch(const epoll_event* events, int count);
  void runAll(std::vector<std::function<void()>>& functions);
  Registration& registration(int fd, const char* attempt);

  // event_loop_turns.cpp: which thread takes a turn, and when. `done` is the
  // helper's, and null in run().
  bool
  spin(TimePoint begunAt, TimePoint limit, const std::function<bool()>* done);
  bool isInTheWay();
  bool prepareToSleep(TimePoint& until, bool helper);
  void sleepAndTakeTurn(
      epoll_event* events,
      TimePoint limit,
      const std::function<bool()>* done);
  void leave();

  FileDescriptor epoll_, wake_;
  const Nanos call_; // how long a system call takes
  std::atomic<bool> finePrecision_{true}; // epoll_pwait2 works
  std::atomic<uint64_t> turns_{0};
  // When a thread has last come back from epoll.
  std::atomic<TimePoint> socketsSeenAt_{TimePoint{}};
  std::atomic<bool> running_{false}; // a thread is in run()
  CallerHelp help_;

  // Held during a turn. Guards everything up to runner_. Lock order:
  // CallerHelp::helper_, turn_, then mutex_ or the timer's mutex. No thread
  // sleeps in epoll while it holds turn_ or mutex_.
  std::mutex turn_;
  std::vector<Registration> registrations_; // by descriptor number
  TimerQueue timers_;
  std::vector<std::function<void()>> endOfTurn_, endOfTurnRunning_;
  std::vector<std::function<void()>> postedRunning_;
  PollerSet pollers_;
  SpinTime helperSpin_, runSpin_;
  TimePoint now_;
  // When the thread in run(), if it sleeps, wakes up by itself. Stale while it
  // is awake, since it then looks at everything before it sleeps again.
  TimePoint sleepsUntil_ = TimePoint::min();
  std::atomic<std::thread::id> runner_{}; // in a turn; written under turn_

  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::function<void()>> posted_;
  // Set by a thread before it sleeps; the first poster clears it and writes to
  // the eventfd. A burst of posts therefore costs one write
  // (a_burst_wakes_the_loop_once).
  bool maySleep_ = false; // the next poster must wake the loop
  LeftWork left_;
  // stop() sets stopping_. run() sets ended_ when no posted function is left,
  // in the same critical section, so post() never accepts a function that will
  // not run.
  bool stopping_ = false;
  bool ended_ = false;
};

#ifdef NDEBUG
#define RESILIENT_IN_LOOP(loop) ((void)0)
#else
// First line of every method that belongs to the loop's thread.
#define RESILIENT_IN_LOOP(loop) \
  ::resilient::checkInLoop((loop).inLoop(), __FILE__, __LINE__)
#endif

void checkInLoop(bool inLoop, const char* file, int line);

} // namespace resilient
