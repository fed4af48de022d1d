#include "delegate/membership.h"

#include <charconv>
#include <iterator>
#include <sstream>

#include "base/random.h"
#include "base/text.h"
#include "delegate/member_list.h"
#include "wire/relay.h"

namespace resilient {
namespace {

constexpr size_t kSecretBytes = 32;

// In place of an address or the list, before the reason.
const std::string kRefused = "failed: ";
const std::string kOver = "over";

std::string randomHex(size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::vector<uint8_t> raw(bytes);
  fillRandom(raw.data(), raw.size());
  std::string text;
  for (const uint8_t byte : raw) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::vector<std::string> wordsOf(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    words.push_back(std::move(word));
  }
  return words;
}

} // namespace

std::vector<std::string> KeyValue::getAll(
    const std::vector<std::string>& keys) {
  std::vector<std::string> values(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!tryGet(keys[i], values[i])) {
      throw StatusError(Status(
          StatusCode::kInternal, "the store has lost the key " + keys[i]));
    }
  }
  return values;
}

Membership::Membership(
    std::shared_ptr<KeyValue> store,
    std::string groupName,
    int rank,
    int size)
    : store_(std::move(store)),
      groupName_(std::move(groupName)),
      rank_(rank),
      size_(size) {}

std::string Membership::key(const char* what, int rank) const {
  return std::string("resilient/") + what + '/' + std::to_string(generation_) +
      '/' + std::to_string(rank);
}

std::string Membership::addressKey(int rank) const {
  return key("at", rank);
}

std::string Membership::listKey() const {
  return key("members", 0);
}

std::optional<std::string> Membership::refusal(const std::string& text) {
  if (!text.starts_with(kRefused)) {
    return std::nullopt;
  }
  return withoutControls(text.substr(kRefused.size()));
}

// The first rank's proposal becomes the terms of all. The others compare it
// with their own options and refuse a difference.
Membership::Terms Membership::agree(
    const PeerAddress& self,
    const EngineOptions& options) {
  startGeneration(self);
  const std::string& given = options.secret;
  // Values of options that must be alike, in the order of the words.
  struct Alike {
    const char* name;
    const char* variable;
    std::string value;
  };
  const Alike alike[] = {
      {"collective_algorithm",
       "TORCH_RESILIENT_COLLECTIVE_ALGORITHM",
       options.collective_algorithm},
      {"encryption",
       "TORCH_RESILIENT_ENCRYPTION",
       options.effectiveEncryption()},
      {"tls_cert",
       "TORCH_RESILIENT_TLS_CERT, _KEY and _CA",
       options.tls_cert.empty() ? "unset" : "set"}};
  std::string proposal = randomHex(8);
  for (const Alike& option : alike) {
    proposal += ' ' + option.value;
  }
  if (given.empty()) {
    proposal += ' ' + randomHex(kSecretBytes);
  }
  std::string agreed = proposeTerms(proposal);
  // When a job is restarted, not all ranks may have come as far before.
  while (agreed == kOver) {
    generation_ =
        store_->add("resilient/generation/" + std::to_string(rank_), 1);
    agreed = proposeTerms(proposal);
  }
  const std::vector<std::string> words = wordsOf(agreed);
  Terms terms;
  const bool numbered = !words.empty() && words[0].size() == 16 &&
      std::from_chars(words[0].data(), words[0].data() + 16, terms.group, 16)
              .ptr == words[0].data() + 16 &&
      terms.group != kRelayGroup;
  const size_t shared = 1 + std::size(alike);
  if (!numbered || words.size() != shared + (given.empty() ? 1 : 0) ||
      (given.empty() && words[shared].size() != 2 * kSecretBytes)) {
    refuse(Status(
        StatusCode::kInvalidArgument,
        "group " + groupName_ +
            ": the store holds a key of the group that this rank cannot use. "
            "Either all ranks are given TORCH_RESILIENT_SECRET (or "
            "_SECRET_FILE) or none, and all run the same version"));
  }
  for (size_t i = 0; i < std::size(alike); ++i) {
    if (words[1 + i] != alike[i].value) {
      refuse(Status(
          StatusCode::kInvalidArgument,
          "group " + groupName_ + ": " + alike[i].name + " is \"" +
              alike[i].value + "\" on rank " + std::to_string(rank_) +
              " (host " + self.hostName + ") and \"" +
              withoutControls(words[1 + i]) +
              "\" on the rank that came first. Set " + alike[i].variable +
              " alike on all ranks"));
    }
  }
  terms.secret = given.empty() ? words[shared] : given;
  return terms;
}

std::string Membership::proposeTerms(const std::string& proposal) {
  try {
    return store_->setIfAbsent(key("job", 0), proposal);
  } catch (const StatusError& error) { // not authentic
    refuse(error.status());
  }
}

// If another process wrote this rank's last address, this one replaces it.
// Ranks that have joined that generation do not come back to it, so it is
// marked as over: a rank that is behind skips it. Guarded by
// rank_that_was_replaced_finds_the_generation_of_the_others.
void Membership::startGeneration(const PeerAddress& self) {
  const int64_t count =
      store_->add("resilient/generation/" + std::to_string(rank_), 1);
  generation_ = count - 1;
  std::string last;
  PeerAddress before;
  if (generation_ > 0 && store_->tryGet(addressKey(rank_), last) &&
      PeerAddress::parse(last, before).ok() &&
      (before.hostId != self.hostId || before.pid != self.pid)) {
    store_->set(key("job", 0), kOver);
  }
  generation_ = count;
}

Status Membership::couldNotJoin(int rank, const std::string& why) {
  return Status(
      StatusCode::kInvalidArgument,
      "rank " + std::to_string(rank) + " could not join: " + why);
}

std::string Membership::refusalOf(const Status& status) {
  return kRefused + status.message();
}

// Tells the others, so that they need not wait for their timeouts.
void Membership::refuse(const Status& status) {
  const std::string text = refusalOf(status);
  store_->set(addressKey(rank_), text);
  store_->set(listKey(), text);
  throw StatusError(status);
}

// The address is written before the rank is counted. The rank that counts
// `size` then finds all addresses, without asking again.
std::string Membership::publish(const std::string& address) {
  store_->set(addressKey(rank_), address);
  if (size_ == 1) {
    return address + '\n';
  }
  return store_->add(key("joined", 0), 1) == size_ ? writeList() : "";
}

std::string Membership::writeList() {
  std::vector<std::string> keys;
  for (int r = 0; r < size_; ++r) {
    keys.push_back(addressKey(r));
  }
  std::vector<PeerAddress> members(keys.size());
  std::vector<std::string> texts;
  try {
    texts = store_->getAll(keys);
  } catch (const StatusError& error) { // not authentic
    refuse(error.status());
  }
  for (size_t r = 0; r < texts.size(); ++r) {
    if (const auto why = refusal(texts[r])) {
      refuse(couldNotJoin(static_cast<int>(r), *why));
    }
    const Status status = PeerAddress::parse(texts[r], members[r]);
    if (!status.ok()) {
      refuse(status);
    }
  }
  const Status status = checkMembers(members);
  if (!status.ok()) {
    refuse(status);
  }
  const std::string text = memberListText(members);
  store_->set(listKey(), text);
  return text;
}

} // namespace resilient
