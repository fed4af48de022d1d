#include "wire/record_seal.h"

#include <charconv>
#include <utility>

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

} // namespace resilient
