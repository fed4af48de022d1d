#include "delegate/membership.h"

#include <map>
#include <string>

#include "delegate/member_list.h"
#include "tests/check.h"

namespace resilient {
namespace {

// Counts requests, each of which is a round trip to the store.
class CountingStore final : public KeyValue {
 public:
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    values[key] = value;
  }
  bool tryGet(const std::string& key, std::string& value) override {
    ++requests;
    const auto found = values.find(key);
    if (found != values.end()) {
      value = found->second;
    }
    return found != values.end();
  }
  int64_t add(const std::string& key, int64_t delta) override {
    ++requests;
    std::string& text = values[key];
    const int64_t sum = (text.empty() ? 0 : std::stoll(text)) + delta;
    text = std::to_string(sum);
    return sum;
  }
  std::string setIfAbsent(const std::string& key, const std::string& desired)
      override {
    ++requests;
    return values.emplace(key, desired).first->second;
  }
  std::vector<std::string> getAll(
      const std::vector<std::string>& keys) override {
    ++requests;
    std::vector<std::string> found;
    for (const std::string& key : keys) {
      found.push_back(values.at(key));
    }
    return found;
  }
  std::unique_ptr<KeyValue> clone() override {
    ++clones;
    return nullptr;
  }
  std::string serverHost() const override {
    return "";
  }
  int requests = 0;
  int clones = 0;
  std::map<std::string, std::string> values;
};

PeerAddress addressOf(int rank, int ranksPerHost, int64_t pid) {
  PeerAddress address;
  address.uid[0] = static_cast<uint8_t>(rank);
  address.uid[1] = static_cast<uint8_t>(rank >> 8);
  address.uid[2] = static_cast<uint8_t>(pid);
  const int host = rank / ranksPerHost;
  char id[33];
  std::snprintf(id, sizeof(id), "%032x", static_cast<unsigned>(host));
  address.hostId = id;
  address.hostName = "node-" + std::to_string(host);
  address.pid = pid;
  for (int nic = 0; nic < 2; ++nic) {
    const std::string ip = "10." + std::to_string(nic) + '.' +
        std::to_string(host / 256) + '.' + std::to_string(host % 256);
    address.addresses.push_back(
        {"eth" + std::to_string(nic),
         *SocketAddress::parse(ip, static_cast<uint16_t>(20000 + rank)),
         16});
  }
  return address;
}

TEST(ranks_of_a_large_group_join_with_four_requests_and_read_one_list) {
  const int ranks = 1024;
  const auto store = std::make_shared<CountingStore>();
  const EngineOptions options;
  std::vector<Membership> members;
  std::string group;
  for (int r = 0; r < ranks; ++r) {
    members.emplace_back(store, "", r, ranks);
  }
  std::string list;
  for (int r = 0; r < ranks; ++r) {
    store->requests = 0;
    const PeerAddress self = addressOf(r, 8, 1000 + r);
    const auto terms = members[size_t(r)].agree(self, options);
    const std::string agreed = std::to_string(terms.group) + terms.secret;
    group = r == 0 ? agreed : group;
    CHECK_EQ(agreed, group);
    list = members[size_t(r)].publish(self.toString());
    CHECK_EQ(store->requests, r < ranks - 1 ? 4 : 6);
    CHECK_EQ(list.empty(), r < ranks - 1);
  }
  for (int r = 0; r < ranks; ++r) {
    store->requests = 0;
    std::string text;
    CHECK(store->tryGet(members[size_t(r)].listKey(), text));
    CHECK_EQ(store->requests, 1);
    CHECK(text == list);
  }
  CHECK_EQ(store->clones, 0);
  std::vector<PeerAddress> read;
  CHECK(parseMemberList(list, ranks, read).ok());
  CHECK_EQ(hostsOf(read).back(), 127);
  // The process that serves the store sends it to every rank.
  CHECK(list.size() < size_t(ranks) * 256);
}

TEST(rank_that_was_replaced_finds_the_generation_of_the_others) {
  const auto store = std::make_shared<CountingStore>();
  const EngineOptions options;
  const auto join = [&](int rank, int64_t pid) {
    Membership member(store, "", rank, 3);
    const PeerAddress self = addressOf(rank, 1, pid);
    const uint64_t group = member.agree(self, options).group;
    return std::pair(group, member.publish(self.toString()));
  };
  // Rank 2 never came as far in the first life.
  const uint64_t first = join(0, 10).first;
  CHECK_EQ(join(1, 11).first, first);
  const uint64_t second = join(0, 20).first;
  CHECK(second != first);
  CHECK_EQ(join(2, 22).first, second);
  const auto [group, list] = join(1, 21);
  CHECK_EQ(group, second);
  std::vector<PeerAddress> members;
  CHECK(parseMemberList(list, 3, members).ok());
  for (size_t r = 0; r < 3; ++r) {
    CHECK_EQ(members[r].pid, static_cast<int64_t>(20 + r));
  }
}

std::string publishError(Membership& member, const PeerAddress& address) {
  try {
    member.publish(address.toString());
  } catch (const StatusError& error) {
    return error.what();
  }
  return "";
}

TEST(group_with_two_ranks_in_one_process_is_refused_by_the_last_to_join) {
  const auto store = std::make_shared<CountingStore>();
  const PeerAddress self = addressOf(0, 1, 10);
  Membership first(store, "", 0, 2);
  first.agree(self, EngineOptions());
  CHECK_EQ(first.publish(self.toString()), "");
  Membership second(store, "", 1, 2);
  second.agree(self, EngineOptions());
  const std::string error = publishError(second, self);
  CHECK_CONTAINS(error, "ranks 0 and 1 are in one process");
  std::string text;
  CHECK(store->tryGet(first.listKey(), text));
  CHECK_EQ(Membership::refusal(text).value_or(""), error);
}

// Somebody who writes to the store may have put it there.
TEST(refusal_in_place_of_an_address_is_passed_on_to_all) {
  const auto store = std::make_shared<CountingStore>();
  Membership first(store, "", 0, 2), second(store, "", 1, 2);
  const PeerAddress self = addressOf(0, 1, 10);
  first.agree(self, EngineOptions());
  CHECK_EQ(first.publish(self.toString()), "");
  store->set(
      first.addressKey(0),
      Membership::refusalOf(Status(StatusCode::kInvalidArgument, "a reason")));
  second.agree(self, EngineOptions());
  const std::string error = publishError(second, self);
  CHECK_EQ(error, "rank 0 could not join: a reason");
  std::string text;
  CHECK(store->tryGet(first.listKey(), text));
  CHECK_EQ(Membership::refusal(text).value_or(""), error);
}

} // namespace
} // namespace resilient
