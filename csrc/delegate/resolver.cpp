#include "delegate/resolver.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/log.h"

namespace resilient {
namespace {

// First pause between two looks, and the limit to which it grows. Short at
// first, since ranks usually start together; long later, to be kind to the
// store.
constexpr Nanos kFirstPause = std::chrono::milliseconds(1);
constexpr Nanos kMaxPause = std::chrono::milliseconds(100);
// In a large group the limit is higher: 5,000 requests a second from all ranks
// together leave a TCPStore, which serves some 50,000, free for its users.
constexpr Nanos kMaxPausePerRank = std::chrono::microseconds(200);
// The limit for a store that fails. c10d writes a backtrace into the log at
// each try.
constexpr Nanos kMaxPauseInTrouble = std::chrono::seconds(1);
// The store's connection serves the application as well, one request at a
// time: we leave it free for two thirds of the time.
constexpr int kPauseToRequest = 2;

TimePoint now() {
  return std::chrono::steady_clock::now();
}

std::string firstLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

} // namespace

struct Resolver::Wanted {
  std::shared_ptr<KeyValue> store;
  std::string key;
  Callbacks callbacks; // none: to be set
  std::string value;
  Nanos maxPause = kMaxPause;
  uint64_t id = 0;
  TimePoint since{};
  bool answered = false; // the store has answered at least once
  std::optional<TimePoint> failingSince{}; // all requests since then failed
  std::string error{}; // of the last request
};

struct Resolver::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::vector<Wanted> wanted;
  uint64_t lastId = 0;
  // The thread that serves: threads of an earlier turn end as soon as their
  // request returns.
  uint64_t turn = 0;
  bool running = false;
  bool ownConnection = false; // of the running thread
  std::optional<TimePoint> requestSince; // of the running thread
  bool stopped = false;
  bool fresh = false; // something new is wanted: look again soon

  // Removes an entry, and returns its callbacks; nothing if it is gone.
  std::optional<Callbacks> take(uint64_t id) {
    const auto found = std::ranges::find(wanted, id, &Wanted::id);
    if (found == wanted.end()) {
      return std::nullopt;
    }
    std::optional<Callbacks> callbacks(std::move(found->callbacks));
    wanted.erase(found);
    return callbacks;
  }
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
    int ranks,
    Callbacks callbacks) {
  add(
      {std::move(store),
       std::move(key),
       std::move(callbacks),
       {},
       std::max(kMaxPause, ranks * kMaxPausePerRank)});
}

void Resolver::tell(
    std::shared_ptr<KeyValue> store,
    std::string key,
    std::string value) {
  add({std::move(store), std::move(key), {}, std::move(value)});
}

void Resolver::add(Wanted wanted) {
  std::lock_guard lock(shared_->mutex);
  if (shared_->stopped) {
    return;
  }
  if (!wanted.callbacks.found) {
    std::erase_if(shared_->wanted, [&](const Wanted& w) {
      return w.store == wanted.store && w.key == wanted.key &&
          !w.callbacks.found;
    });
  }
  wanted.id = ++shared_->lastId;
  wanted.since = now();
  shared_->wanted.push_back(std::move(wanted));
  shared_->fresh = true;
  if (!shared_->running) {
    start(shared_, false);
  } else {
    shared_->changed.notify_all();
  }
}

void Resolver::hurry() {
  std::lock_guard lock(shared_->mutex);
  if (shared_->stopped || shared_->wanted.empty()) {
    return;
  }
  shared_->fresh = true;
  if (shared_->running && !shared_->ownConnection && shared_->requestSince &&
      now() - *shared_->requestSince > kBusyAfter) {
    start(shared_, true);
  } else {
    shared_->changed.notify_all();
  }
}

// With the mutex held.
void Resolver::start(
    const std::shared_ptr<Shared>& shared,
    bool ownConnection) {
  shared->running = true;
  shared->ownConnection = ownConnection;
  shared->requestSince.reset();
  // Detached: a store that hangs must not hang the end of the process. The
  // thread owns all it touches.
  std::thread(&Resolver::run, shared, ++shared->turn, ownConnection).detach();
}

void Resolver::forget(const std::shared_ptr<KeyValue>& store) {
  std::vector<Wanted> forgotten; // dies outside the lock
  std::lock_guard lock(shared_->mutex);
  // Not std::ranges::partition: clang 14 cannot compile its result.
  auto& wanted = shared_->wanted;
  const auto gone =
      std::partition(wanted.begin(), wanted.end(), [&](const Wanted& w) {
        return w.store != store;
      });
  std::move(gone, wanted.end(), std::back_inserter(forgotten));
  wanted.erase(gone, wanted.end());
  shared_->changed.notify_all();
}

std::string Resolver::trouble(const std::shared_ptr<KeyValue>& store) const {
  std::lock_guard lock(shared_->mutex);
  for (const Wanted& w : shared_->wanted) {
    if (w.store != store) {
      continue;
    }
    if (!w.error.empty()) {
      return w.error;
    }
    if (!w.answered && now() - w.since > kBusyAfter) {
      return "no answer within " +
          std::to_string(
                 std::chrono::duration_cast<std::chrono::seconds>(
                     now() - w.since + std::chrono::milliseconds(500))
                     .count()) +
          " s";
    }
  }
  return "";
}

// The request runs without the lock, on a copy of the entry. The entry is then
// looked for by its number: it may have been forgotten, or another thread may
// have served it. take() removes it under the lock, so a callback is called
// once.
void Resolver::tryOnce(
    const std::shared_ptr<Shared>& shared,
    const Wanted& wanted,
    KeyValue& store) {
  std::string value, error;
  bool done = false;
  try {
    if (wanted.callbacks.found) {
      done = store.tryGet(wanted.key, value);
    } else {
      store.set(wanted.key, wanted.value);
      done = true;
    }
  } catch (const std::exception& e) {
    error = firstLine(e.what());
    logMessage(
        LogLevel::kDebug,
        std::string("store: ") + (wanted.callbacks.found ? "get" : "set") +
            " of " + wanted.key + ": " + e.what());
  }
  std::optional<Callbacks> ended;
  {
    std::lock_guard lock(shared->mutex);
    const auto found =
        std::ranges::find(shared->wanted, wanted.id, &Wanted::id);
    if (found == shared->wanted.end()) {
      return; // forgotten, or done by another thread
    }
    found->error = error;
    if (error.empty()) {
      found->answered = true;
      found->failingSince.reset();
    } else if (!found->failingSince) {
      found->failingSince = now();
    }
    const bool lost = found->callbacks.lost && found->failingSince &&
        now() - *found->failingSince >= kLostAfter;
    if (done || lost) {
      ended = shared->take(wanted.id);
    }
  }
  if (!ended) {
    return;
  }
  if (!done) {
    ended->lost(error);
  } else if (ended->found) {
    ended->found(value);
  }
}

// How it works. The thread makes one request for each entry, in rounds. The
// pause between two rounds doubles, up to the limit of the least patient entry
// that does not fail, and begins anew when something is added or hurried. It is
// at least twice the longest request, unless the connection is the resolver's
// own.
//
// A request may block for minutes in a store that another thread uses. hurry()
// then starts a second thread with a connection of its own, and `turn` moves
// on: the first thread sees that as soon as its request returns, and ends.
// Results of both count, since tryOnce() does not look at the turn.
//
// The thread ends when nothing is wanted; add() starts the next one.
void Resolver::run(
    const std::shared_ptr<Shared>& shared,
    uint64_t turn,
    bool ownConnection) {
  std::map<std::shared_ptr<KeyValue>, std::shared_ptr<KeyValue>> clones;
  Nanos pause = kFirstPause;
  std::unique_lock lock(shared->mutex);
  const auto serves = [&] {
    return shared->turn == turn && !shared->stopped && !shared->wanted.empty();
  };
  while (serves()) {
    if (shared->fresh) {
      shared->fresh = false;
      pause = kFirstPause;
    }
    std::vector<Wanted> round = shared->wanted;
    Nanos maxPause = kMaxPauseInTrouble;
    Nanos maxRequest{};
    for (const Wanted& w : round) {
      if (shared->turn != turn) {
        break;
      }
      const TimePoint begun = now();
      shared->requestSince = begun;
      lock.unlock();
      std::shared_ptr<KeyValue> store = w.store;
      try {
        if (ownConnection) {
          std::shared_ptr<KeyValue>& clone = clones[w.store];
          if (!clone) {
            clone = w.store->clone();
          }
          store = clone;
        }
      } catch (const std::exception&) {
        // The next request fails likewise, and says why.
      }
      tryOnce(shared, w, *store);
      maxRequest = std::max(maxRequest, now() - begun);
      lock.lock();
      if (shared->turn == turn) {
        shared->requestSince.reset();
      }
    }
    // Not under the lock: if all was forgotten meanwhile, the last reference
    // to the engine may die here, and with it the Resolver, which locks.
    lock.unlock();
    round.clear();
    lock.lock();
    if (!serves()) {
      break;
    }
    for (const Wanted& w : shared->wanted) {
      if (w.error.empty()) {
        maxPause = std::min(maxPause, w.maxPause);
      }
    }
    shared->changed.wait_for(
        lock,
        std::max(
            pause, ownConnection ? Nanos(0) : kPauseToRequest * maxRequest));
    pause = std::min(pause * 2, maxPause);
  }
  if (shared->turn == turn) {
    shared->running = false;
  }
  lock.unlock();
  clones.clear();
}

} // namespace resilient
