#include "backend/store_adapter.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace resilient {

namespace {

class StoreAdapter : public KeyValue {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, value);
  }

  bool tryGet(const std::string& key, std::string& value) override {
    // get() alone would block until somebody sets the key.
    if (!store_->check({key})) {
      return false;
    }
    value = store_->get_to_str(key);
    return true;
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
    return std::make_unique<StoreAdapter>(store_->clone());
  }

  std::string serverHost() const override {
    c10d::Store* store = store_.get();
    c10::intrusive_ptr<c10d::Store> inner;
    if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) {
      inner = prefixed->getUnderlyingNonPrefixStore();
      store = inner.get();
    }
    if (auto* tcp = dynamic_cast<c10d::TCPStore*>(store)) {
      return tcp->getHost();
    }
    return ""; // a file or a hash table has no server
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace

std::unique_ptr<KeyValue> makeStoreAdapter(
    c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<StoreAdapter>(std::move(store));
}

} // namespace resilient
