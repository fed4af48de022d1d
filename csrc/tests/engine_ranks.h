#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/collectives.h"
#include "delegate/engine.h"
#include "delegate/group_impl.h"

namespace resilient::test {

// Ranks with engines of their own in one process, over real sockets, and the
// store that they meet in.

struct MapStore {
  std::atomic<bool> gone{false}; // its server is
  // Rank 0 does not find the others: it is behind them.
  std::atomic<bool> behind{false};
  std::mutex mutex;
  // Guarded by mutex.
  bool holdsLists = false; // lists of members cannot be read yet
  int addressesRead = 0;
  std::map<std::string, std::string> values;
  // A writer to the store can move ranks: `moved` is read as `to`.
  std::string moved, to;
};

class MapKeyValue final : public KeyValue {
 public:
  MapKeyValue(std::shared_ptr<MapStore> map, int rank)
      : map_(std::move(map)), rank_(rank) {}
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(map_->mutex);
    map_->values[key] = value;
  }
  bool tryGet(const std::string& key, std::string& value) override {
    if (map_->gone.load()) {
      throw std::runtime_error("Broken pipe\nand a backtrace");
    }
    if (map_->behind.load() && rank_ == 0) {
      return false;
    }
    std::lock_guard lock(map_->mutex);
    auto it = map_->values.find(key);
    if (it == map_->values.end() ||
        (map_->holdsLists && key.find("/members/") != std::string::npos)) {
      return false;
    }
    map_->addressesRead += key.find("/at/") != std::string::npos;
    value = it->second;
    for (size_t at = 0; !map_->moved.empty() &&
         (at = value.find(map_->moved, at)) != std::string::npos;
         at += map_->to.size()) {
      value.replace(at, map_->moved.size(), map_->to);
    }
    return true;
  }
  int64_t add(const std::string& key, int64_t delta) override {
    std::lock_guard lock(map_->mutex);
    std::string& text = map_->values[key];
    const int64_t sum = (text.empty() ? 0 : std::stoll(text)) + delta;
    text = std::to_string(sum);
    return sum;
  }
  std::string setIfAbsent(const std::string& key, const std::string& desired)
      override {
    std::lock_guard lock(map_->mutex);
    return map_->values.emplace(key, desired).first->second;
  }
  std::unique_ptr<KeyValue> clone() override {
    return std::make_unique<MapKeyValue>(map_, rank_);
  }
  std::string serverHost() const override {
    return "127.0.0.1";
  }

 private:
  std::shared_ptr<MapStore> map_;
  int rank_;
};

// Waits for the end of one operation, as a Work does: inside the engine.
class Waiter {
 public:
  explicit Waiter(Engine& engine) : engine_(engine) {}
  void end(const Status& status) {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
      status_ = status;
    }
    ended_.notify_all();
    engine_.loop().wakeHelper();
  }
  Status wait() {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!isDone() && std::chrono::steady_clock::now() < deadline) {
      if (!engine_.loop().help([this] { return isDone(); }, deadline)) {
        std::unique_lock lock(mutex_);
        ended_.wait_for(
            lock, std::chrono::milliseconds(100), [this] { return done_; });
      }
    }
    std::lock_guard lock(mutex_);
    return done_ ? status_ : Status(StatusCode::kInternal, "never ended");
  }

 private:
  bool isDone() {
    std::lock_guard lock(mutex_);
    return done_;
  }
  Engine& engine_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  Status status_;
};

struct Rank {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<GroupImpl> group;

  Status allReduce(std::vector<float>& data, Nanos timeout) {
    auto waiter = std::make_shared<Waiter>(*engine);
    CollectiveSpec spec;
    spec.signature.kind = OpKind::kAllReduce;
    spec.signature.dtype = DType::kFloat32;
    spec.signature.reduceOp = ReduceOp::kSum;
    spec.signature.count = data.size();
    spec.timeout = timeout;
    spec.body = [&data](Communicator& comm) {
      return resilient::allReduce(comm, data.data(), data.size(), Reduction{});
    };
    spec.done = [waiter](const Status& status) { waiter->end(status); };
    group->submit(std::move(spec));
    return waiter->wait();
  }

  Status message(
      bool isSend,
      int peer,
      uint64_t tag,
      std::vector<float>& data,
      Nanos timeout) {
    auto waiter = std::make_shared<Waiter>(*engine);
    auto spec = std::make_shared<PointToPointSpec>();
    spec->isSend = isSend;
    spec->peer = peer;
    spec->tag = tag;
    spec->signature.dtype = DType::kFloat32;
    spec->signature.count = data.size();
    spec->timeout = timeout;
    spec->data = data.data();
    spec->bytes = data.size() * sizeof(float);
    spec->done = [waiter](const Status& status, int) { waiter->end(status); };
    group->submit(std::move(spec));
    return waiter->wait();
  }
};

inline constexpr Nanos kLong = std::chrono::seconds(60);

inline std::vector<Rank> startRanks(
    int size,
    const std::function<EngineOptions(int rank)>& options,
    const std::shared_ptr<MapStore>& map = std::make_shared<MapStore>(),
    int joining = INT_MAX,
    const std::function<void(std::vector<Rank>&)>& beforeJoining = {}) {
  std::vector<Rank> ranks(static_cast<size_t>(std::min(size, joining)));
  for (int r = 0; r < std::min(size, joining); ++r) {
    ranks[static_cast<size_t>(r)].engine =
        Engine::start(options(r), "127.0.0.1", r);
  }
  if (beforeJoining) {
    beforeJoining(ranks);
  }
  for (int r = 0; r < std::min(size, joining); ++r) {
    GroupConfig config;
    config.name = "test";
    config.rank = r;
    config.size = size;
    config.store = std::make_unique<MapKeyValue>(map, r);
    Rank& rank = ranks[static_cast<size_t>(r)];
    rank.group = std::make_shared<GroupImpl>(std::move(config), rank.engine);
    rank.group->join();
  }
  return ranks;
}

inline std::vector<Rank> startRanks(
    int size,
    const EngineOptions& options,
    const std::shared_ptr<MapStore>& map = std::make_shared<MapStore>(),
    int joining = INT_MAX,
    const std::function<void(std::vector<Rank>&)>& beforeJoining = {}) {
  return startRanks(
      size, [&](int) { return options; }, map, joining, beforeJoining);
}

inline void onEach(
    std::vector<Rank>& ranks,
    const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { body(static_cast<int>(r)); });
  }
  for (std::thread& t : threads) {
    t.join();
  }
}

inline void leave(std::vector<Rank>& ranks) {
  onEach(ranks, [&](int r) {
    ranks[static_cast<size_t>(r)].group->shutdown(std::chrono::seconds(10));
  });
}

} // namespace resilient::test
