#include "backend/future_threads.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "backend/fork_check.h"

namespace resilient {

namespace {

// Callbacks in callbacks in callbacks. Deeper nesting shares the last thread,
// where waiting for a future of one's own would hang.
constexpr int kMaxLevels = 8;

thread_local int currentLevel = -1;

struct Level {
  std::deque<std::function<void()>> tasks;
  std::condition_variable wake;
  bool started = false;
};

// One per process (and a fresh one per forked child), never destroyed: its
// threads may outlive static destruction.
//
// One mutex guards all levels: tasks are few and it is never held while one
// runs. A level that has started once waits forever, even after stop().
class Threads {
 public:
  static Threads& instance() {
    static std::mutex mutex;
    static Threads* current = nullptr;
    static int generation = -1;
    std::lock_guard<std::mutex> lock(mutex);
    if (generation != forkGeneration()) {
      generation = forkGeneration();
      current = new Threads();
    }
    return *current;
  }

  void post(int level, std::function<void()> task) {
    level = std::min(level, kMaxLevels - 1);
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) {
      lock.unlock();
      return; // `task` dies here, outside the lock
    }
    Level& l = levels_[level];
    l.tasks.push_back(std::move(task));
    if (!l.started) {
      l.started = true;
      std::thread([this, level] { run(level); }).detach();
    }
    l.wake.notify_one();
  }

  bool stop(Nanos limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    return idle_.wait_for(lock, limit, [this] { return running_ == 0; });
  }

 private:
  // Tasks run without the lock. `running_` counts those that run on all levels,
  // which stop() waits for.
  void run(int level) {
    pthread_setname_np(pthread_self(), "resilient-done");
    currentLevel = level;
    Level& l = levels_[level];
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // A stopped queue keeps its tasks: their destructors may want a Python
      // that is no more.
      l.wake.wait(lock, [&] { return !l.tasks.empty() && !stopped_; });
      auto task = std::move(l.tasks.front());
      l.tasks.pop_front();
      ++running_;
      lock.unlock();
      task();
      task = nullptr; // what it captured dies before we say we are idle
      lock.lock();
      if (--running_ == 0) {
        idle_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable idle_;
  std::array<Level, kMaxLevels> levels_;
  int running_ = 0;
  bool stopped_ = false;
};

} // namespace

int FutureThreads::levelForCaller() {
  return currentLevel + 1;
}

void FutureThreads::post(int level, std::function<void()> task) {
  Threads::instance().post(level, std::move(task));
}

bool FutureThreads::stop(Nanos limit) {
  return Threads::instance().stop(limit);
}

} // namespace resilient
