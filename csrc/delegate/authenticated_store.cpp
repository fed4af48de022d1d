#include "delegate/authenticated_store.h"

#include <charconv>
#include <utility>

#include "base/text.h"
#include "delegate/membership.h"

namespace resilient {
namespace {

constexpr std::string_view kSalt = "torch_resilient store";
constexpr std::string_view kLabel = "record";
constexpr size_t kMacDigits = 2 * sizeof(Digest);

std::string_view textOf(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string hexOf(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// With its length in front, so that no two lists of parts look alike.
void updatePart(HmacSha256& mac, std::string_view part) {
  mac.update(std::to_string(part.size()) + ':').update(part);
}

} // namespace

RecordSeal::RecordSeal(
    const std::vector<std::string>& secrets,
    StoreContext context,
    std::string scope)
    : context_(std::move(context)), scope_(std::move(scope)) {
  for (const std::string& secret : secrets) {
    keys_.push_back(hkdf(kSalt, secret, kLabel));
  }
}

std::string RecordSeal::mac(
    const Digest& key,
    std::string_view name,
    std::string_view writer,
    std::string_view value) const {
  HmacSha256 mac(textOf(key));
  updatePart(mac, std::string(name) + scope_);
  updatePart(mac, std::to_string(context_.size));
  for (const uint64_t rank : context_.globalRanks) {
    updatePart(mac, std::to_string(rank));
  }
  updatePart(mac, writer);
  updatePart(mac, value);
  return hexOf(mac.finish());
}

std::string RecordSeal::protect(
    const std::string& key,
    const std::string& value) const {
  const std::string writer = std::to_string(context_.rank);
  return mac(keys_.front(), key, writer, value) + ' ' + writer + ' ' + value;
}

Status RecordSeal::open(
    const std::string& key,
    const std::string& record,
    std::string& value) const {
  const size_t writerEnd = record.size() > kMacDigits
      ? record.find(' ', kMacDigits + 1)
      : std::string::npos;
  std::string by;
  if (writerEnd != std::string::npos && record[kMacDigits] == ' ') {
    const std::string writer =
        record.substr(kMacDigits + 1, writerEnd - kMacDigits - 1);
    const std::string content = record.substr(writerEnd + 1);
    for (const Digest& each : keys_) {
      const std::string expected = mac(each, key, writer, content);
      if (equalConstantTime(expected.data(), record.data(), kMacDigits)) {
        value = content;
        return Status();
      }
    }
    // Only a claim: it helps to find a rank with another secret.
    int rank = 0;
    const char* const end = writer.data() + writer.size();
    if (std::from_chars(writer.data(), end, rank).ptr == end) {
      by = ", by its own words of rank " + std::to_string(rank) + ',';
    }
  }
  return Status(
      StatusCode::kInvalidArgument,
      "the record " + key + scope_ + " in the store" + by +
          " is not authentic under the secret of rank " +
          std::to_string(context_.rank) +
          ": its writer has another one or none, or somebody else has changed "
          "it. Either all ranks are given the same TORCH_RESILIENT_SECRET_FILE "
          "(or _SECRET) or none is; let only hosts of the job reach the store");
}

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
