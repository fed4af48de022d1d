#include "delegate/authenticated_store.h"

#include <utility>

#include "delegate/membership.h"

namespace resilient {

AuthenticatedStore::AuthenticatedStore(
    std::unique_ptr<KeyValue> store,
    std::shared_ptr<const RecordSeal> seal)
    : store_(std::move(store)), seal_(std::move(seal)) {}

std::string AuthenticatedStore::protect(
    const std::string& key,
    const std::string& value) const {
  return Membership::refusal(value) ? value : seal_->protect(key, value);
}

Status AuthenticatedStore::open(
    const std::string& key,
    const std::string& record,
    std::string& value) const {
  if (Membership::refusal(record)) {
    value = record;
    return Status();
  }
  return seal_->open(key, record, value);
}

void AuthenticatedStore::set(const std::string& key, const std::string& value) {
  store_->set(key, protect(key, value));
}

bool AuthenticatedStore::tryGet(const std::string& key, std::string& value) {
  std::string record;
  if (!store_->tryGet(key, record)) {
    return false;
  }
  if (const Status status = open(key, record, value); !status.ok()) {
    value = Membership::refusalOf(status);
  }
  return true;
}

int64_t AuthenticatedStore::add(const std::string& key, int64_t delta) {
  return store_->add(key, delta);
}

std::string AuthenticatedStore::setIfAbsent(
    const std::string& key,
    const std::string& desired) {
  std::string value;
  const Status status =
      open(key, store_->setIfAbsent(key, protect(key, desired)), value);
  if (!status.ok()) {
    throw StatusError(status);
  }
  return value;
}

std::vector<std::string> AuthenticatedStore::getAll(
    const std::vector<std::string>& keys) {
  std::vector<std::string> values = store_->getAll(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string record = std::move(values.at(i));
    if (const Status status = open(keys[i], record, values[i]); !status.ok()) {
      throw StatusError(status);
    }
  }
  return values;
}

std::unique_ptr<KeyValue> AuthenticatedStore::clone() {
  return std::make_unique<AuthenticatedStore>(store_->clone(), seal_);
}

} // namespace resilient
