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
class SpinLock {
 public:
  // Before all threads of the data path.
  void lock() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    while (taken_.exchange(true, std::memory_order_acquire)) {
      sched_yield();
    }
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void lockAfterControl() {
    while (waiting_.load(std::memory_order_relaxed) != 0 ||
           taken_.exchange(true, std::memory_order_acquire)) {
      sched_yield();
    }
  }
  void unlock() {
    taken_.store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool> taken_{false};
  std::atomic<uint32_t> waiting_{0}; // callers of lock()
};

// For the data path.
class DataGuard {
 public:
  explicit DataGuard(SpinLock& lock) : lock_(&lock) {
    lock.lockAfterControl();
  }
  ~DataGuard() {
    unlock();
  }
  DataGuard(const DataGuard&) = delete;
  DataGuard& operator=(const DataGuard&) = delete;
  // Sooner than by the destructor.
  void unlock() {
    if (lock_ != nullptr) {
      lock_->unlock();
      lock_ = nullptr;
    }
  }

 private:
  SpinLock* lock_;
};

} // namespace resilient::shift
