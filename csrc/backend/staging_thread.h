#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/time.h"

namespace resilient {

// The process's one thread for waiting on device copies and for copying
// results to where the user wants them. Neither the caller nor the engine's
// loop ever waits for a device.
//
// Any thread may call these functions; none but stop() blocks. Functions that
// are given to the thread must not throw and must not take the GIL. A forked
// child gets a thread of its own, without the tasks of the parent.
class StagingThread {
 public:
  // Runs `task` on the thread, in order of posting, once it is idle. Dropped
  // after stop(). An exception of a task or poll is logged, and ends it.
  static void post(std::function<void()> task);
  // Asks `poll` again and again until it returns true (then it is finished
  // with). Polls do not hold up each other nor posted tasks.
  static void pollUntil(std::function<bool()> poll);
  // No task starts afterwards; waits at most `limit` for a running one.
  // False if it is still running then. Tasks that have not started are not
  // destroyed.
  static bool stop(Nanos limit);
};

// Keeps operations of one process group in call order although some must wait
// for a copy from a device before the engine can have them. Operations with
// the same key go in order; an operation that is ready with nothing in front
// of it goes at once, on the caller's thread.
//
// Thread-safe. Lock order: the queue's lock is the outermost of the backend,
// because `submit` enters the engine while it is held (docs/threads.md). It is
// not held while entries are destroyed: they hold tensors, which may take the
// GIL.
class SubmitQueue {
 public:
  SubmitQueue();
  ~SubmitQueue(); // hands over all that still waits

  // How an operation is handed over. If it is not ready, its memory is not
  // valid: it must fail.
  enum class Handover {
    kReady,
    kLate, // its deadline has passed
    kClosed, // the queue was closed
  };
  // `ready` empty: ready from the start. `submit` is called exactly once, with
  // the queue locked, so it must be quick and must not come back here. An
  // operation behind another one waits until that one is handed over, whatever
  // its own deadline.
  using Submit = std::function<void(Handover)>;
  // `ready` is asked with the queue locked, often and from any thread, until it
  // is true. It must not throw.
  void push(
      uint64_t key,
      std::function<bool()> ready,
      TimePoint deadline,
      Submit submit);

  // How many wait under the key.
  // Operations that were submitted already do not count.
  size_t waiting(uint64_t key) const;
  // Waits until nothing is left, at most `limit`; false if something is.
  bool drain(Nanos limit);
  // Hands over what is left, and everything later at once.
  void close();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

} // namespace resilient
