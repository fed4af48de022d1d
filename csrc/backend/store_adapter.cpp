#include "backend/store_adapter.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "transport/socket.h"

namespace resilient {

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// torchrun's agent serves one store for all lives of its ranks. Keys of one
// life would confuse the next one if not all ranks had set them. The number of
// restarts keeps them apart where one agent has all ranks; several do not count
// alike. Empty: no need.
std::string lifePrefix(c10d::Store* store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) {
    return lifePrefix(prefixed->getUnderlyingNonPrefixStore().get());
  }
  auto* tcp = dynamic_cast<c10d::TCPStore*>(store);
  if (tcp == nullptr || variable("TORCHELASTIC_USE_AGENT_STORE") != "True" ||
      variable("GROUP_WORLD_SIZE") != "1" ||
      tcp->getHost() != variable("MASTER_ADDR") ||
      std::to_string(tcp->getPort()) != variable("MASTER_PORT")) {
    return "";
  }
  return "restart " + variable("TORCHELASTIC_RESTART_COUNT");
}

// c10d gives out what a PrefixStore wraps, but not its prefix.
struct PrefixOf : c10d::PrefixStore {
  static const std::string& of(const c10d::PrefixStore& store) {
    return store.*(&PrefixOf::prefix_);
  }
};

// The same store over another connection. Groups with stores on one connection
// share the other one, too: at 1,024 ranks with six groups each, a connection
// for each group would be 6,144 in the process that serves them.
c10::intrusive_ptr<c10d::Store> secondConnection(
    const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return c10::make_intrusive<c10d::PrefixStore>(
        PrefixOf::of(*prefixed),
        secondConnection(prefixed->getUnderlyingStore()));
  }
  static std::mutex mutex;
  // Leaked: threads of the resolver may outlive static destruction.
  static auto* made =
      new std::map<c10d::Store*, c10::weak_intrusive_ptr<c10d::Store>>;
  std::lock_guard lock(mutex);
  std::erase_if(*made, [](const auto& one) { return one.second.expired(); });
  if (const auto found = made->find(store.get()); found != made->end()) {
    if (auto other = found->second.lock()) {
      return other;
    }
  }
  auto other = store->clone();
  made->insert_or_assign(
      store.get(), c10::weak_intrusive_ptr<c10d::Store>(other));
  return other;
}

// KeyValue over a c10d store. The comments below name the properties of c10d
// stores that it relies on; tests/test_store.py checks the comparison with an
// absent key for each kind of store.
class StoreAdapter : public KeyValue {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, value);
  }

  bool tryGet(const std::string& key, std::string& value) override {
    // get() would block until a rank sets the key, and check() with get() takes
    // three round trips. Every c10d store compares an absent key as equal to ""
    // only, and answers with the expected value otherwise.
    static const std::string kAbsent = "absent";
    value = store_->compareSet(key, kAbsent, kAbsent);
    return value != kAbsent;
  }

  int64_t add(const std::string& key, int64_t delta) override {
    return store_->add(key, delta);
  }

  std::string setIfAbsent(const std::string& key, const std::string& desired)
      override {
    // An absent key compares equal to the empty string in every c10d store.
    return store_->compareSet(key, "", desired);
  }

  std::vector<std::string> getAll(
      const std::vector<std::string>& keys) override {
    if (!store_->hasExtendedApi()) {
      return KeyValue::getAll(keys);
    }
    std::vector<std::string> values; // in one round trip
    for (const std::vector<uint8_t>& value : store_->multiGet(keys)) {
      values.emplace_back(value.begin(), value.end());
    }
    return values;
  }

  std::unique_ptr<KeyValue> clone() override {
    return std::make_unique<StoreAdapter>(secondConnection(store_));
  }

  std::string serverHost() const override {
    const auto tcp = server();
    return tcp ? tcp->getHost() : "";
  }

  // c10d does not hand out its socket, so the process's sockets are searched.
  Nanos roundTrip() const override {
    const auto tcp = server();
    return tcp ? minRoundTripTo(tcp->getPort()) : Nanos(0);
  }

 private:
  // Null: a file or a hash table has no server.
  c10::intrusive_ptr<c10d::TCPStore> server() const {
    c10::intrusive_ptr<c10d::Store> store = store_;
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      store = prefixed->getUnderlyingNonPrefixStore();
    }
    return c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(store);
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace

std::unique_ptr<KeyValue> makeStoreAdapter(
    c10::intrusive_ptr<c10d::Store> store) {
  const std::string prefix = lifePrefix(store.get());
  if (!prefix.empty()) {
    store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  }
  return std::make_unique<StoreAdapter>(std::move(store));
}

} // namespace resilient
