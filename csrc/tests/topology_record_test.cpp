#include "delegate/topology_record.h"

#include "tests/check.h"

namespace resilient {
namespace {

std::vector<PeerAddress> members(
    const std::vector<std::pair<std::string, std::string>>& siteAndHost) {
  std::vector<PeerAddress> result;
  for (const auto& [site, host] : siteAndHost) {
    PeerAddress member;
    member.site = site;
    member.hostId = host;
    member.hostName = "node-" + host;
    result.push_back(member);
  }
  return result;
}

TEST(a_topology_survives_the_store) {
  std::string text;
  CHECK(
      topologyText(members({{"east", "x"}, {"west", "y"}, {"east", "x"}}), text)
          .ok());
  CHECK_EQ(text, std::string("sites=east,west,east hosts=0,1,0"));
  std::vector<std::string> sites;
  std::vector<int> hosts;
  CHECK(parseTopology(text, 3, sites, hosts).ok());
  CHECK_EQ(sites, (std::vector<std::string>{"east", "west", "east"}));
  CHECK_EQ(hosts, (std::vector<int>{0, 1, 0}));
  CHECK(topologyText(members({{"", "x"}, {"", "y"}}), text).ok());
  CHECK_EQ(text, std::string("sites= hosts=0,1"));
  CHECK(parseTopology(text, 2, sites, hosts).ok());
  CHECK_EQ(sites, std::vector<std::string>(2));
}

TEST(sites_of_some_ranks_only_are_refused) {
  std::string text;
  const Status status = topologyText(
      members({{"east", "x"}, {"", "y"}, {"", "z"}, {"east", "x"}}), text);
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_CONTAINS(status.message(), "ranks 0, 3 declared a site (rank 0 on ");
  CHECK_CONTAINS(status.message(), "ranks 1, 2 did not (rank 1 on node-y)");
  CHECK_CONTAINS(status.message(), "TORCH_RESILIENT_SITE on all ranks");
}

TEST(what_is_no_topology_is_refused) {
  for (const std::string text :
       {"",
        "sites=",
        "hosts=0,1,0",
        "sites=a,b hosts=0,1,0",
        "sites=a,b,c,d hosts=0,1,0",
        "sites=a,,c hosts=0,1,0",
        "sites=a,b c,d hosts=0,1,0",
        "sites=a,b,c hosts=0,1",
        "sites=a,b,c hosts=0,1,0,0",
        "sites=a,b,c hosts=0,-1,0",
        "sites=a,b,c hosts=0,x,0",
        "sites=a,b,c hosts=0,1,99999999999",
        "sites=a,b,c hosts=0,1,0 "}) {
    std::vector<std::string> sites = {"before"};
    std::vector<int> hosts = {7};
    const Status status = parseTopology(text, 3, sites, hosts);
    CHECK(status.code() == StatusCode::kProtocol);
    CHECK_EQ(hosts, std::vector<int>{7}); // untouched
  }
}

} // namespace
} // namespace resilient
