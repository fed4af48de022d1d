#include "backend/staging_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/fork_check.h"
#include "base/log.h"

namespace resilient {

namespace {

// How often an unfinished copy is asked about. A query costs about 1 us; a
// copy of 64 KiB over PCIe takes 5 us, of 64 MiB 3 ms. Longer adds latency to
// each staged operation, shorter burns a core.
constexpr auto kPollInterval = std::chrono::microseconds(20);

void report(const char* what, const std::exception& e) {
  logMessage(
      LogLevel::kError,
      std::string(what) + " failed on the staging thread: " + e.what());
}

// Threads do not survive fork(): a child finds another generation and makes a
// new object. The old one is left alone, since its mutex may be locked forever.
class Thread {
 public:
  static Thread& instance() {
    static std::mutex mutex;
    static Thread* current = nullptr;
    static int generation = -1;
    std::lock_guard<std::mutex> lock(mutex);
    if (generation != forkGeneration()) {
      generation = forkGeneration();
      current = new Thread(); // never destroyed: the thread may outlive us
    }
    return *current;
  }

  void post(std::function<void()> task) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) {
      lock.unlock();
      return; // `task` dies outside the lock
    }
    tasks_.push_back(std::move(task));
    startAndWake();
  }

  void pollUntil(std::function<bool()> poll) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) {
      lock.unlock();
      return;
    }
    newPolls_.push_back(std::move(poll));
    startAndWake();
  }

  bool stop(Nanos limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    wake_.notify_one();
    return idle_.wait_for(lock, limit, [this] { return !busy_; });
  }

 private:
  void startAndWake() {
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    wake_.notify_one();
  }

  // Other operations go on whatever becomes of one. A task that throws is
  // not asked again: it would throw again.
  static bool guarded(const std::function<bool()>& run) {
    try {
      return run();
    } catch (const std::exception& e) {
      report("a task", e);
      return true;
    }
  }

  // The thread runs tasks and polls without the lock. While there are polls it
  // wakes every kPollInterval, otherwise only for new work. A task that is
  // posted meanwhile waits for the current round only. `busy_` spans a round,
  // so stop() can wait for its end.
  void run() {
    pthread_setname_np(pthread_self(), "resilient-stage");
    std::list<std::function<bool()>> polls;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto work = [&] {
        return stopped_ || !tasks_.empty() || !newPolls_.empty();
      };
      if (polls.empty()) {
        wake_.wait(lock, work);
      } else {
        wake_.wait_for(lock, kPollInterval, work);
      }
      if (stopped_) {
        // The rest is leaked with the thread's stack: destructors may want an
        // interpreter that is gone.
        busy_ = false;
        idle_.notify_all();
        never_.wait(lock, [] { return false; });
      }
      busy_ = true;
      polls.splice(polls.end(), newPolls_);
      std::deque<std::function<void()>> tasks;
      tasks.swap(tasks_);
      lock.unlock();
      while (!tasks.empty()) {
        guarded([&] {
          tasks.front()();
          return true;
        });
        tasks.pop_front();
      }
      for (auto it = polls.begin(); it != polls.end();) {
        it = guarded(*it) ? polls.erase(it) : std::next(it);
      }
      lock.lock();
      busy_ = false;
      idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::condition_variable never_;
  std::deque<std::function<void()>> tasks_;
  std::list<std::function<bool()>> newPolls_;
  bool started_ = false;
  bool stopped_ = false;
  bool busy_ = false;
};

} // namespace

void StagingThread::post(std::function<void()> task) {
  Thread::instance().post(std::move(task));
}

void StagingThread::pollUntil(std::function<bool()> poll) {
  Thread::instance().pollUntil(std::move(poll));
}

bool StagingThread::stop(Nanos limit) {
  return Thread::instance().stop(limit);
}

struct SubmitQueue::State {
  struct Entry {
    std::function<bool()> ready;
    TimePoint deadline;
    Submit submit;

    bool isReady() const {
      return !ready || ready();
    }
  };

  // An entry whose `submit` throws counts as handed over. Those behind it go
  // on.
  static void handOver(const Entry& entry, Handover how) {
    try {
      entry.submit(how);
    } catch (const std::exception& e) {
      report("handing over an operation", e);
    }
  }

  // Hands over the entries at the head of each key that are ready or late.
  // Returns true if nothing is left.
  // An entry that is not ready holds up its own key only. Call with the mutex
  // held.
  bool advance() {
    const TimePoint now = std::chrono::steady_clock::now();
    for (auto it = waiting.begin(); it != waiting.end();) {
      auto& entries = it->second;
      while (!entries.empty()) {
        const bool ready = entries.front().isReady();
        if (!ready && now < entries.front().deadline) {
          break;
        }
        // submit first, then pop: a push from another thread must not
        // overtake (it is locked out anyway, but waiting() must not miss it).
        handOver(entries.front(), ready ? Handover::kReady : Handover::kLate);
        done.push_back(std::move(entries.front()));
        entries.pop_front();
      }
      it = entries.empty() ? waiting.erase(it) : std::next(it);
    }
    if (waiting.empty()) {
      drained.notify_all();
    }
    return waiting.empty();
  }

  std::mutex mutex;
  std::condition_variable drained;
  std::map<uint64_t, std::deque<Entry>> waiting;
  std::vector<Entry> done; // destroyed outside the lock
  bool polled = false; // the staging thread asks advance()
  bool closed = false;
};

SubmitQueue::SubmitQueue() : state_(std::make_shared<State>()) {}

SubmitQueue::~SubmitQueue() {
  close();
}

// An operation may go at once only if nothing waits under its key; otherwise it
// would overtake. Queued entries are polled together by one function on the
// staging thread, which ends when nothing is left; `polled` says whether it
// exists.
void SubmitQueue::push(
    uint64_t key,
    std::function<bool()> ready,
    TimePoint deadline,
    Submit submit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  State& s = *state_;
  if (s.closed) {
    submit(!ready || ready() ? Handover::kReady : Handover::kClosed);
    return;
  }
  if (s.waiting.find(key) == s.waiting.end() && (!ready || ready())) {
    submit(Handover::kReady);
    return;
  }
  s.waiting[key].push_back({std::move(ready), deadline, std::move(submit)});
  if (s.polled) {
    return;
  }
  s.polled = true;
  // The state outlives the queue if need be.
  StagingThread::pollUntil([state = state_] {
    std::vector<State::Entry> done;
    std::lock_guard<std::mutex> guard(state->mutex);
    const bool empty = state->advance();
    done.swap(state->done);
    state->polled = !empty;
    return empty;
  });
}

size_t SubmitQueue::waiting(uint64_t key) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto it = state_->waiting.find(key);
  return it == state_->waiting.end() ? 0 : it->second.size();
}

bool SubmitQueue::drain(Nanos limit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->drained.wait_for(
      lock, limit, [this] { return state_->waiting.empty(); });
}

// `left` is declared before the lock: its entries are destroyed when the mutex
// is free again.
void SubmitQueue::close() {
  std::map<uint64_t, std::deque<State::Entry>> left;
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->closed = true;
  for (auto& [key, entries] : state_->waiting) {
    for (auto& entry : entries) {
      entry.submit(entry.isReady() ? Handover::kReady : Handover::kClosed);
    }
  }
  left.swap(state_->waiting);
  state_->drained.notify_all();
}

} // namespace resilient
