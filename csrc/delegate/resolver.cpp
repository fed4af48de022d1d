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
// The same for a store that fails: its server is gone, and c10d writes a
// backtrace into the log at each try. Longer would delay what is looked for in
// another store.
constexpr Nanos kLongestPauseInTrouble = std::chrono::seconds(1);

std::string firstLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

} // namespace

struct Resolver::Wanted {
  std::shared_ptr<KeyValue> store;
  std::string key;
  std::function<void(const std::string&)> found; // none: to be set
  std::string value;
  uint64_t id = 0;
  std::string error{}; // of the last try
};

struct Resolver::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::vector<Wanted> wanted;
  uint64_t lastId = 0;
  bool running = false;
  bool stopped = false;
  bool fresh = false; // something new is wanted: look again soon
};

Resolver::Resolver() : shared_(std::make_shared<Shared>()) {}

Resolver::~Resolver() {
  stop();
}

void Resolver::stop() {
  std::vector<Wanted> forgotten; // dies outside the lock
  std::lock_guard lock(shared_->mutex);
  shared_->stopped = true;
  forgotten.swap(shared_->wanted);
  shared_->changed.notify_all();
}

void Resolver::seek(
    std::shared_ptr<KeyValue> store,
    std::string key,
    std::function<void(const std::string&)> found) {
  add({std::move(store), std::move(key), std::move(found), {}});
}

void Resolver::tell(
    std::shared_ptr<KeyValue> store,
    std::string key,
    std::string value) {
  add({std::move(store), std::move(key), nullptr, std::move(value)});
}

void Resolver::add(Wanted wanted) {
  std::lock_guard lock(shared_->mutex);
  if (shared_->stopped) {
    return;
  }
  if (!wanted.found) {
    std::erase_if(shared_->wanted, [&](const Wanted& w) {
      return w.store == wanted.store && w.key == wanted.key && !w.found;
    });
  }
  wanted.id = ++shared_->lastId;
  shared_->wanted.push_back(std::move(wanted));
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
  std::erase_if(
      shared_->wanted, [&](const Wanted& w) { return w.store == store; });
  shared_->changed.notify_all();
}

std::string Resolver::trouble(const std::shared_ptr<KeyValue>& store) const {
  std::lock_guard lock(shared_->mutex);
  for (const Wanted& w : shared_->wanted) {
    if (w.store == store && !w.error.empty()) {
      return w.error;
    }
  }
  return "";
}

// Whether it has been done; `value` is what was found. `error` is empty if the
// store has answered.
bool Resolver::tryOnce(
    const Wanted& wanted,
    std::string& value,
    std::string& error) {
  try {
    if (wanted.found) {
      return wanted.store->tryGet(wanted.key, value);
    }
    wanted.store->set(wanted.key, wanted.value);
    return true;
  } catch (const std::exception& e) {
    // The store may come back, or the job is ending: the operation's own
    // time-out decides.
    error = firstLine(e.what());
    logMessage(
        LogLevel::kDebug,
        std::string("store: ") + (wanted.found ? "get" : "set") + " of " +
            wanted.key + ": " + e.what());
    return false;
  }
}

void Resolver::run(const std::shared_ptr<Shared>& shared) {
  Nanos pause = kFirstPause;
  std::unique_lock lock(shared->mutex);
  while (!shared->stopped && !shared->wanted.empty()) {
    if (shared->fresh) {
      shared->fresh = false;
      pause = kFirstPause;
    }
    std::vector<Wanted> round = shared->wanted;
    bool inTrouble = false;
    lock.unlock();
    for (const Wanted& w : round) {
      std::string value, error;
      const bool done = tryOnce(w, value, error);
      inTrouble = inTrouble || !error.empty();
      std::function<void(const std::string&)> found;
      lock.lock();
      for (auto it = shared->wanted.begin(); it != shared->wanted.end(); ++it) {
        if (it->id == w.id) {
          it->error = std::move(error);
          if (done) {
            found = std::move(it->found);
            shared->wanted.erase(it);
          }
          break;
        }
      }
      lock.unlock();
      if (found) {
        found(value);
      }
    }
    // Not under the lock: if all was forgotten meanwhile, the last reference
    // to the engine may die here, and with it the Resolver, which locks.
    round.clear();
    lock.lock();
    if (!shared->stopped && !shared->wanted.empty()) {
      shared->changed.wait_for(lock, pause);
      pause = std::min(
          pause * 2, inTrouble ? kLongestPauseInTrouble : kLongestPause);
    }
  }
  shared->running = false;
}

} // namespace resilient
