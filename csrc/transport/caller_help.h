#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

#include "base/syscall.h"
#include "base/time.h"

namespace resilient {

// How long the thread in run() leaves a posted function to the caller that
// posted it. Most callers wait for their own posts and take a turn themselves;
// to wake the other thread as well would cost two thread switches. Guarded by
// EventLoop::mutex_.
//
// The class learns from the past: a caller that came back each of the last
// kTrusted times is expected to come back once more. One failure resets that.
class LeftWork {
 public:
  // The patience if callers have not come back every time of late.
  static constexpr Nanos kSoon = std::chrono::microseconds(30);
  // The patience once callers have come back kTrusted times in a row. Work that
  // no caller waits for is delayed by this much at most. A shorter time than a
  // Python program needs between two operations would be of no use.
  static constexpr Nanos kLinger = std::chrono::microseconds(200);
  static constexpr int kTrusted = 4;

  // A caller has posted a function and takes no turn now.
  void leave() {
    left_ = true;
  }
  Nanos patience() const {
    return inARow_ == kTrusted ? kLinger : kSoon;
  }
  // A turn runs what was left: a caller came for it, or a helper did.
  void onTurn() {
    if (std::exchange(left_, false)) {
      inARow_ = std::min(inARow_ + 1, kTrusted);
    }
  }
  // The thread in run() came first.
  void onNobodyCame() {
    if (std::exchange(left_, false)) {
      inARow_ = 0;
    }
  }

 private:
  bool left_ = false; // posted without a turn, and not run yet
  int inARow_ = 0; // how often a caller has come, up to kTrusted
};

// The state of callers that take the loop's turns, and of the thread in run()
// that leaves them alone meanwhile. EventLoop defines a turn; this class
// coordinates its two kinds of threads.
//
// The helper is a caller that takes turns until what it waits for is done: one
// at a time. The thread in run() sleeps in epoll_wait as well. Of several
// sleepers the kernel wakes the one that went to sleep last, which is the
// helper. While the helper is in a turn it wakes the other one, which then must
// not take the next event away. So that thread parks: it sleeps on the timer
// instead, until `linger` after a helper has last looked at the sockets or
// until something is due. A caller that waits for one message after the other
// has the loop to itself.
//
// Rejected: to move the timer on with every operation. Setting it costs
// microseconds, above all on a virtual machine, more than all else that a small
// message needs. It only ever moves to an earlier time; if it goes off too
// early, the parked thread finds that it may sleep on.
//
// Invariant: a parked thread implies a helper, or that the timer is set.
//
// Any thread, except where said otherwise. Nothing here calls back.
//
// The flags are sequentially consistent on purpose. park() stores parked_ and
// then reads helped_; a helper that goes clears helped_ and its caller then
// reads parked_ (EventLoop::leave). One of the two sees the other, so no parked
// thread is left without a timer.
class CallerHelp {
 public:
  // `call`: how long a system call takes.
  explicit CallerHelp(Nanos call = Nanos(0));
  CallerHelp(const CallerHelp&) = delete;
  CallerHelp& operator=(const CallerHelp&) = delete;

  // The timer's descriptor. It wakes the thread in run() in epoll_wait, so the
  // loop watches it, edge-triggered; parked, that thread reads it.
  int timer() const {
    return timer_.get();
  }

  // Makes the caller the helper, until this is destroyed. False if another
  // thread is. Its lock, helper_, comes before the locks of the loop.
  //
  // The constructor never waits: it tries the lock. Construct and destroy it in
  // the same thread.
  class Helper {
   public:
    explicit Helper(CallerHelp& help);
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;
    ~Helper() {
      end();
    }
    explicit operator bool() const {
      return lock_.owns_lock();
    }
    // The helper takes no further turn, and still no other caller may help: the
    // time to wake the thread in run() for the work that is left. It may be
    // called twice; the destructor calls it too.
    void end();

   private:
    CallerHelp& help_;
    std::unique_lock<std::mutex> lock_;
    bool helping_;
  };

  // The answer is a snapshot: by the time it is used, the helper may have gone.
  bool helped() const {
    return helped_.load();
  }
  // A thread other than the calling one helps.
  bool helpedByOther() const {
    return helped_.load() && helperThread_.load() != std::this_thread::get_id();
  }
  bool parked() const {
    return parked_.load();
  }

  // Thread in run(), which was woken while a caller helps: sleeps until no
  // caller has helped for a while, or until wakeBy(). The wake-up may have been
  // meant for the helper, so the loop passes it on first. Call it without any
  // lock: it blocks in read() on the timer, and the threads that wake it need
  // timerMutex_.
  void park();
  // After a write to the eventfd, which a parked thread does not see: wakes it
  // up at once if no caller helps. (A helper sees the event before it goes, or
  // comes back here.)
  void wakeParked() {
    if (parked_.load() && !helped_.load()) {
      wakeBy(TimePoint::min());
    }
  }
  // A caller goes after its turns and leaves a parked thread behind, which
  // looks for itself `linger` after the sockets were last seen. Overwrites the
  // time that an earlier wakeBy() has set for the parked thread, so the caller
  // must look for due work after this call, not before.
  void lingerFrom(TimePoint socketsSeenAt);
  // Wakes the thread in run(), asleep or parked, at `when` at the latest. A
  // time in the past means at once. It makes a system call only if `when` is
  // earlier than the time already set.
  void wakeBy(TimePoint when);
  // A thread that slept is awake: a timer that has gone off has served its
  // purpose, and the next wakeBy() sets it anew.
  void timerNoticed();

  // How often the timer was set, for tests and statistics.
  uint64_t timersSet() const {
    return timersSet_.load(std::memory_order_relaxed);
  }

 private:
  // The maximum that a parked thread sleeps after the last helper, once callers
  // have come back in time again and again. Each time that it looks costs about
  // ten system calls: that may take a fortieth of the time.
  static constexpr Nanos kLingerMax = std::chrono::milliseconds(1);
  static constexpr Nanos kLingerMaxSlow = std::chrono::milliseconds(5);
  static constexpr int kCallsOfALinger = 400;

  bool unparked();
  void setTimer(TimePoint when); // with timerMutex_ held

  std::mutex helper_; // held by the helper while it helps
  std::atomic<bool> helped_{false};
  std::atomic<std::thread::id> helperThread_{};
  std::atomic<bool> parked_{false};

  const Nanos lingerMax_;
  FileDescriptor timer_; // timerfd
  std::atomic<uint64_t> timersSet_{0};
  std::mutex timerMutex_;
  // All guarded by timerMutex_.
  TimePoint timerAt_ = kNever; // in the past: gone off, perhaps unnoticed yet
  // How long a parked thread sleeps if nobody helps; the timer may go off
  // before.
  TimePoint parkedUntil_;
  bool lingers_ = true; // until then; false: until something else is due
  Nanos linger_ = LeftWork::kLinger; // from kLinger to lingerMax_
};

} // namespace resilient
