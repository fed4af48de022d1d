#include "delegate/resolver.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/time.h"

namespace resilient {
namespace {

// First and longest pause between two looks. Short at first, since ranks
// usually start together; long later, to be kind to the store of a large job.
constexpr Nanos kFirstPause = std::chrono::milliseconds(1);
constexpr Nanos kLongestPause = std::chrono::milliseconds(100);

} // namespace

struct Resolver::Shared {
  struct Wanted {
    std::shared_ptr<KeyValue> store;
    std::string key;
    std::function<void(const std::string&)> found;
  };
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::vector<Wanted> wanted;
  bool running = false;
  bool stopped = false;
  bool fresh = false; // something new is wanted: look again soon
};

Resolver::Resolver() : shared_(std::make_shared<Shared>()) {}

Resolver::~Resolver() {
  stop();
}

void Resolver::stop() {
  std::vector<Shared::Wanted> forgotten; // dies outside the lock
  std::lock_guard lock(shared_->mutex);
  shared_->stopped = true;
  forgotten.swap(shared_->wanted);
  shared_->changed.notify_all();
}

void Resolver::seek(
    std::shared_ptr<KeyValue> store,
    std::string key,
    std::function<void(const std::string&)> found) {
  std::lock_guard lock(shared_->mutex);
  if (shared_->stopped) {
    return;
  }
  shared_->wanted.push_back(
      {std::move(store), std::move(key), std::move(found)});
  shared_->fresh = true;
  if (!shared_->running) {
    shared_->running = true;
    // Detached: a store that hangs must not hang the end of the process. The
    // thread owns all it touches.
    std::thread(&Resolver::run, shared_).detach();
  } else {
    shared_->changed.notify_all();
  }
}

void Resolver::forget(const std::shared_ptr<KeyValue>& store) {
  std::lock_guard lock(shared_->mutex);
  std::erase_if(shared_->wanted, [&](const Shared::Wanted& w) {
    return w.store == store;
  });
  shared_->changed.notify_all();
}

void Resolver::run(const std::shared_ptr<Shared>& shared) {
  Nanos pause = kFirstPause;
  std::unique_lock lock(shared->mutex);
  while (!shared->stopped && !shared->wanted.empty()) {
    if (shared->fresh) {
      shared->fresh = false;
      pause = kFirstPause;
    }
    const std::vector<Shared::Wanted> round = shared->wanted;
    lock.unlock();
    for (const Shared::Wanted& w : round) {
      std::string value;
      bool there = false;
      try {
        there = w.store->tryGet(w.key, value);
      } catch (const std::exception& e) {
        // The store may come back, or the job is ending: the operation's own
        // time-out decides.
        logMessage(
            LogLevel::kDebug,
            "store: get of " + w.key + ": " + std::string(e.what()));
      }
      if (!there) {
        continue;
      }
      std::function<void(const std::string&)> found;
      lock.lock();
      for (auto it = shared->wanted.begin(); it != shared->wanted.end(); ++it) {
        if (it->store == w.store && it->key == w.key) {
          found = std::move(it->found);
          shared->wanted.erase(it);
          break;
        }
      }
      lock.unlock();
      if (found) {
        found(value);
      }
    }
    lock.lock();
    if (!shared->stopped && !shared->wanted.empty()) {
      shared->changed.wait_for(lock, pause);
      pause = std::min(pause * 2, kLongestPause);
    }
  }
  shared->running = false;
}

} // namespace resilient
