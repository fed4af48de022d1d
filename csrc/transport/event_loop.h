#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/syscall.h"
#include "base/time.h"
#include "transport/spin_time.h"
#include "transport/timer_queue.h"

struct epoll_event;

namespace resilient {

// What a descriptor's owner gives the loop. `events` are EPOLLIN, EPOLLOUT,
// EPOLLERR, EPOLLHUP. It may remove or destroy any handler, itself included.
struct Handler {
  virtual ~Handler() = default;
  virtual void onEvents(uint32_t events) = 0;
};

// Something whose news come through memory that another process writes to.
// Called in the loop only, or with the turn's lock held.
struct Poller {
  virtual ~Poller() = default;
  // Whether onNews() has something to do. Asked over and over by a thread that
  // waits, so it must be as cheap as reading a word.
  virtual bool hasNews() const = 0;
  virtual void onNews() = 0;
  // Whether more is about to come, so that it is not worth falling asleep.
  virtual bool inMidst() const = 0;
  // Whether whoever writes there was last seen awake on this processor.
  virtual bool writerIsOn(int processor) const = 0;
  // true: nobody asks any more, so news have to come by a descriptor too. The
  // loop asks once more after this call, so none is lost in between.
  virtual void setAsleep(bool asleep) = 0;
};

// Waits for descriptors (level-triggered epoll), timers and posted functions,
// and runs them one after the other. With nothing to do it sleeps without
// waking up.
//
// One turn: sleep, read the clock, descriptors, posted functions, due timers,
// end-of-turn functions. What one of them starts (post, at with a time in the
// past) runs in the next turn, so none can starve the others.
//
// Threads. One thread at a time is in a turn: usually the one in run(), but a
// caller may take a turn of its own (runPosted, help) instead of waking
// that one up and waiting for it; this saves the two thread switches that cost
// more than a small message itself. "In the loop" means: in a turn.
// post(), runPosted(), help(), wakeHelper() and stop() from any thread; all
// else in the loop. While no thread is in run() (setting up, tearing down) the
// caller sees to it that only one thread uses the loop.
// No function given to the loop may throw; what throws ends the process.
class EventLoop {
 public:
  EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  ~EventLoop();

  // Until stop(), and once only. Functions posted before run() returns are
  // run, timers and descriptors are left alone.
  void run();
  void stop();
  // For who tears down what the loop watches, once run() has returned: calls
  // `run` while no caller who was helping takes a turn, or ends one.
  void afterEnd(const std::function<void()>& run);
  // True in the thread that is in a turn; in any thread while none is in run().
  bool inLoop() const;

  // `run` is called in the loop in order of posting. False, and `run` is
  // destroyed here, if the loop has ended: then it never runs. One eventfd
  // write wakes the loop, only if it may sleep, and only once per burst.
  bool post(std::function<void()> run);
  // As post(), but wakes nobody: runPosted() must follow.
  bool postQuietly(std::function<void()> run);
  // Sees to it that what is posted runs. `here`: in the caller's thread if no
  // turn is being taken, for work that is short; else soon, in a thread that
  // helps or in the one in run().
  void runPosted(bool here);
  // Takes turns in the caller's thread until `done` or `until`. False if the
  // caller cannot help (another thread does, or this is the loop): then it has
  // to wait in its own way. Whoever makes `done` true from elsewhere must call
  // wakeHelper().
  bool help(const std::function<bool()>& done, TimePoint until);
  void wakeHelper();

  // The loop does not own `handler`: remove it first, then close `fd`.
  // Events for it that are already at hand are dropped.
  void add(int fd, uint32_t events, Handler* handler);
  void modify(int fd, uint32_t events);
  void remove(int fd);

  // Not owned. A poller may remove itself or others while it is called.
  void add(Poller* poller);
  void remove(Poller* poller);

  TimerId at(TimePoint when, std::function<void()> run);
  TimerId after(Nanos delay, std::function<void()> run) {
    return at(now_ + delay, std::move(run));
  }
  // A timer that has fired or was cancelled already is no mistake, nor is 0.
  void cancel(TimerId id) {
    timers_.cancel(id);
  }

  // The time at which this turn began.
  TimePoint now() const {
    return now_;
  }
  // Once, when all events of this turn have been handled and before the loop
  // may sleep: the place to write what the turn has gathered.
  void atEndOfTurn(std::function<void()> run) {
    endOfTurn_.push_back(std::move(run));
  }

  // In the child of a fork, where no thread runs the loop: closes every
  // descriptor it watches, and its own. Only system calls.
  void closeInForkedChild();

  // How often the loop has woken up, for tests and statistics.
  uint64_t turns() const {
    return turns_.load(std::memory_order_relaxed);
  }
  // How often it has set the timer that wakes the thread in run(), likewise.
  uint64_t wakeTimersSet() const {
    return wakeTimersSet_.load(std::memory_order_relaxed);
  }

 private:
  struct Registration {
    Handler* handler = nullptr;
    // Counts the uses of this descriptor number: events carry it, so that one
    // meant for a closed descriptor does not reach its successor.
    uint32_t generation = 0;
  };

  // What is posted without a turn in the caller's thread starts this much
  // later, unless the caller waits for it: it does so within that time.
  static constexpr Nanos kSoon = std::chrono::microseconds(30);
  // Or kLinger later, if callers have come for it so many times in a row: they
  // do so again, most likely.
  static constexpr int kTrusted = 4;
  // What nobody waits for is delayed by this much at most. Shorter than what a
  // Python program needs between two operations, it would be of no use.
  static constexpr Nanos kLinger = std::chrono::microseconds(200);
  // By this much where callers have come back in time again and again.
  static constexpr Nanos kLingerMost = std::chrono::milliseconds(1);

  // While news are found without sleeping, sockets are looked at this often.
  static constexpr Nanos kSocketsAtLeast = std::chrono::microseconds(100);

  class Turn;
  void wakeUp();
  bool
  spin(TimePoint begunAt, TimePoint limit, const std::function<bool()>* done);
  bool anyNews() const;
  bool isInTheWay();
  void wakePollers();
  void putPollersToSleep();
  bool prepareToSleep(TimePoint& until, bool helper);
  // `done`: of the helper; null in run().
  void sleepAndTakeTurn(
      epoll_event* events,
      TimePoint limit,
      const std::function<bool()>* done);
  void takeTurn(const epoll_event* events, int count) noexcept;
  void parkWhileHelped();
  bool unparked();
  void leave();
  void wakeBy(TimePoint when);
  void wakeTimerNoticed();
  void setWakeTimer(TimePoint when); // with wakeTimerMutex_ held
  int wait(epoll_event* events, int capacity, Nanos timeout);
  void dispatch(const epoll_event* events, int count);
  void runAll(std::vector<std::function<void()>>& functions);
  Registration& registration(int fd, const char* attempt);

  FileDescriptor epoll_, wake_;
  std::atomic<bool> finePrecision_{true}; // epoll_pwait2 works
  std::atomic<uint64_t> turns_{0}, wakeTimersSet_{0};
  std::atomic<TimePoint> socketsSeenAt_{TimePoint{}};
  std::atomic<bool> running_{false}; // a thread is in run()

  // Held during a turn. Guards everything up to runner_.
  std::mutex turn_;
  std::vector<Registration> registrations_; // by descriptor number
  TimerQueue timers_;
  std::vector<std::function<void()>> endOfTurn_, endOfTurnRunning_;
  std::vector<std::function<void()>> postedRunning_;
  std::vector<Poller*> pollers_; // null: removed
  bool pollersAsleep_ = false;
  SpinTime helperSpin_, runSpin_;
  TimePoint now_;
  // When the thread in run(), if it sleeps, wakes up by itself.
  TimePoint sleepsUntil_ = TimePoint::min();
  std::atomic<std::thread::id> runner_{}; // in a turn; written under turn_

  // Who helps; held for as long as it does. The thread in run() then sleeps in
  // epoll_wait too. The kernel wakes the last one that went to sleep first,
  // which is the helper. While the helper is in a turn it wakes the other one,
  // which is in the way then: it steps aside and sleeps on wakeTimer_, until
  // linger_ after a helper has last looked at the sockets, or until something
  // is due: a caller that waits for one message after the other has the loop to
  // itself.
  // Invariant: parked_ implies helped_ or that wakeTimer_ is set.
  std::mutex helper_;
  std::atomic<bool> helped_{false};
  std::atomic<std::thread::id> helperThread_{};
  std::atomic<bool> parked_{false};

  // Wakes the thread in run() where that need not be at once: in epoll_wait,
  // or parked. A caller mostly waits for what it has posted, and then nobody
  // has to be woken.
  FileDescriptor wakeTimer_; // timerfd
  std::mutex wakeTimerMutex_;
  // By wakeTimerMutex_. In the past: it may have gone off, unnoticed as yet.
  TimePoint wakeTimerAt_;
  // By wakeTimerMutex_. How long a parked thread sleeps, if nobody helps: the
  // timer may go off before that.
  TimePoint parkedUntil_;
  Nanos linger_ = kLinger; // by the same; from kLinger to kLingerMost

  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::function<void()>> posted_;
  bool maySleep_ = false; // the next poster must wake the loop
  bool left_ = false; // something was posted without a turn, and not run yet
  int leftInARow_ = 0; // so many times a caller has run it
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
