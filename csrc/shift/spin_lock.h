#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace resilient::shift {

// Held for a few instructions by both the data path and the control thread. A
// thread that polls without end holds it most of the time, and would take it
// again and again before the control thread: so that one comes first. Threads
// of the data path have no order: to wait for one that has lost its processor
// would take as long as a slice of time.
//
// An atomic exchange takes longer than all else in an empty poll, and most
// queues have one thread. So the first thread of the data path owns the lock,
// and takes it with two plain accesses: it says that it is inside, and sees
// whether others are about. Those say that they are, and let the kernel put a
// barrier into every thread (membarrier): after it, either the owner has seen
// them, or they see it inside. A second thread of the data path ends the
// ownership for good. Without membarrier there is none.
class SpinLock {
 public:
  // Before all threads of the data path.
  void lock() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    others_.fetch_add(1, std::memory_order_seq_cst);
    if (!shared_.load(std::memory_order_acquire)) {
      awaitOwner(); // who waits for us: the barrier takes its time
    }
    take();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() {
    taken_.store(false, std::memory_order_release);
    others_.fetch_sub(1, std::memory_order_release);
  }

 private:
  friend class DataGuard;
  // Differs between the threads that live at a time.
  static const void* self() {
    return __builtin_thread_pointer();
  }
  static bool canBeOwned(); // the kernel has membarrier
  static void barrierInAllThreads();

  // For the data path. True: as the owner.
  bool enter() {
    if (owner_.load(std::memory_order_relaxed) == self()) {
      inside_.store(true, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
      // In one order with those who have found no owner yet (awaitOwner).
      if (others_.load(std::memory_order_seq_cst) == 0) {
        return true;
      }
      inside_.store(false, std::memory_order_release);
    } else if (!shared_.load(std::memory_order_acquire) && beOwner()) {
      return enter();
    }
    while (waiting_.load(std::memory_order_relaxed) != 0 ||
           taken_.exchange(true, std::memory_order_acquire)) {
      sched_yield();
    }
    return false;
  }
  void leave(bool asOwner) {
    (asOwner ? inside_ : taken_).store(false, std::memory_order_release);
  }

  void take() {
    while (taken_.exchange(true, std::memory_order_acquire)) {
      sched_yield();
    }
  }
  void awaitOwner();
  bool beOwner(); // or share the lock for good

  std::atomic<bool> taken_{false}; // by anybody but the owner
  std::atomic<bool> inside_{false}; // the owner
  std::atomic<bool> shared_{!canBeOwned()}; // it has no owner any more
  std::atomic<uint32_t> others_{0}; // they hold it, or want to
  std::atomic<uint32_t> waiting_{0}; // callers of lock()
  std::atomic<const void*> owner_{nullptr};
};

// For the data path.
class DataGuard {
 public:
  explicit DataGuard(SpinLock& lock) : lock_(&lock), asOwner_(lock.enter()) {}
  ~DataGuard() {
    unlock();
  }
  DataGuard(const DataGuard&) = delete;
  DataGuard& operator=(const DataGuard&) = delete;
  // Sooner than by the destructor.
  void unlock() {
    if (lock_ != nullptr) {
      lock_->leave(asOwner_);
      lock_ = nullptr;
    }
  }

 private:
  SpinLock* lock_;
  const bool asOwner_;
};

} // namespace resilient::shift
