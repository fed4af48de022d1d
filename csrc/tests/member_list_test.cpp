#include "delegate/member_list.h"

#include "tests/check.h"

namespace resilient {
namespace {

// By rank: its site and its host.
std::vector<PeerAddress> members(
    const std::vector<std::pair<std::string, std::string>>& siteAndHost) {
  std::vector<PeerAddress> result;
  for (const auto& [site, host] : siteAndHost) {
    PeerAddress& member = result.emplace_back();
    member.uid[0] = static_cast<uint8_t>(result.size());
    member.site = site;
    member.hostId = std::string(32, host[0]);
    member.hostName = "node-" + host;
    member.pid = 7;
    NicAddress nic{"eth0", *SocketAddress::parse("10.0.0.1", 29511), 24};
    member.addresses.push_back(nic);
  }
  return result;
}

TEST(member_list_survives_the_store) {
  const auto sent =
      members({{"east", "a"}, {"west", "b"}, {"east", "a"}, {"", "c"}});
  std::vector<PeerAddress> read;
  CHECK(parseMemberList(memberListText(sent), 4, read).ok());
  CHECK_EQ(memberListText(read), memberListText(sent));
  CHECK_EQ(
      sitesOf(read), (std::vector<std::string>{"east", "west", "east", ""}));
  CHECK_EQ(hostsOf(read), (std::vector<int>{0, 1, 0, 2}));
}

TEST(sites_of_some_ranks_only_are_refused) {
  const Status status = checkMembers(
      members({{"east", "a"}, {"", "b"}, {"", "c"}, {"east", "a"}}));
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_CONTAINS(status.message(), "ranks 0, 3 declared a site (rank 0 on ");
  CHECK_CONTAINS(status.message(), "ranks 1, 2 did not (rank 1 on node-b)");
  CHECK_CONTAINS(status.message(), "TORCH_RESILIENT_SITE on all ranks");
  CHECK(checkMembers(members({{"east", "a"}, {"west", "b"}})).ok());
  CHECK(checkMembers(members({{"", "a"}, {"", "b"}})).ok());
}

TEST(members_without_declared_sites_are_at_the_inferred_ones) {
  auto three = members({{"", "a"}, {"", "b"}, {"", "a"}});
  three[0].storeRoundTrip = three[2].storeRoundTrip =
      std::chrono::milliseconds(1);
  three[1].storeRoundTrip = std::chrono::milliseconds(20);
  std::vector<PeerAddress> read;
  CHECK(parseMemberList(memberListText(three), 3, read).ok());
  CHECK_EQ(
      sitesOf(read), (std::vector<std::string>{"site0", "site1", "site0"}));
}

TEST(rdma_that_one_rank_requires_and_another_lacks_is_refused) {
  auto four = members({{"", "a"}, {"", "b"}, {"", "a"}, {"", "c"}});
  const auto why = [&four] { return checkMembers(four).message(); };
  four[0].rdma = four[1].rdma = RdmaUse::kRequired;
  four[2].rdma = RdmaUse::kNone; // on the host of rank 0
  four[3].rdma = RdmaUse::kPossible;
  CHECK_EQ(
      why(),
      "rank 1 on node-b has TORCH_RESILIENT_RDMA=required, but rank 2 on other "
      "hosts cannot use RDMA (rank 2 on node-a has no RDMA device on its "
      "interfaces): run `torch-resilient doctor` there, which says what is "
      "missing, or set TORCH_RESILIENT_RDMA=auto on all ranks");
  four[1].rdma = RdmaUse::kPossible;
  CHECK_EQ(why(), "");
  four[3].rdma = four[1].rdma = RdmaUse::kOff;
  CHECK_CONTAINS(
      why(),
      "rank 0 on node-a has TORCH_RESILIENT_RDMA=required, but ranks 1, 3 on "
      "other hosts cannot use RDMA (rank 1 on node-b has "
      "TORCH_RESILIENT_RDMA=off): set it to auto there");
  CHECK(checkMembers(four).code() == StatusCode::kInvalidArgument);
  for (PeerAddress& member : four) {
    member.site = member.hostName; // no RDMA between sites
  }
  CHECK_EQ(why(), "");
  std::vector<PeerAddress> read;
  CHECK(parseMemberList(memberListText(four), 4, read).ok());
  CHECK(read[0].rdma == RdmaUse::kRequired);
  CHECK(read[2].rdma == RdmaUse::kNone);
}

TEST(two_ranks_in_one_process_are_refused) {
  auto three = members({{"", "a"}, {"", "b"}, {"", "b"}});
  three[2].uid = three[1].uid;
  const Status status = checkMembers(three);
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_CONTAINS(status.message(), "ranks 1 and 2 are in one process");
  CHECK_CONTAINS(status.message(), "torchrun");
}

TEST(malformed_member_list_is_refused) {
  const auto three = members({{"", "a"}, {"", "b"}, {"", "c"}});
  const std::string text = memberListText(three);
  const std::string line = three[0].toString() + '\n';
  for (const std::string& bad :
       {std::string(),
        std::string("\n"),
        text.substr(0, text.size() - 1),
        text + line,
        text.substr(line.size()),
        text + "\n",
        line + "resilient/2 nonsense\n" + line,
        "x" + text}) {
    std::vector<PeerAddress> read(7);
    const Status status = parseMemberList(bad, 3, read);
    CHECK(status.code() == StatusCode::kProtocol);
    CHECK_EQ(read.size(), size_t(7)); // unchanged
  }
}

} // namespace
} // namespace resilient
