#include "delegate/site_inference.h"

#include <chrono>

#include "tests/check.h"

namespace resilient {
namespace {

// Ranks by host and round trip in milliseconds.
std::vector<PeerAddress> at(
    const std::vector<std::pair<std::string, double>>& hostAndRoundTrip) {
  std::vector<PeerAddress> members;
  for (const auto& [host, milliseconds] : hostAndRoundTrip) {
    PeerAddress member;
    member.hostId = host;
    member.storeRoundTrip = Nanos(static_cast<int64_t>(milliseconds * 1e6));
    members.push_back(member);
  }
  return members;
}

// "0 2 | 1 3"; empty for no sites.
std::string ranksOf(const std::vector<PeerAddress>& members) {
  std::string text;
  for (const InferredSite& site : inferSites(members)) {
    text += text.empty() ? "" : "| ";
    for (const int rank : site.ranks) {
      text += std::to_string(rank) + ' ';
    }
  }
  return text;
}

TEST(a_clear_gap_makes_two_sites) {
  CHECK_EQ(
      ranksOf(at({{"a", 1}, {"b", 1.2}, {"c", 20}, {"d", 23}})), "0 1 | 2 3 ");
  // In any order of ranks, and with the store at the larger site.
  CHECK_EQ(
      ranksOf(at({{"c", 20}, {"a", 0.02}, {"d", 23}, {"b", 0.3}})),
      "0 2 | 1 3 ");
  // Two hosts are enough.
  CHECK_EQ(ranksOf(at({{"a", 0.02}, {"b", 40}})), "0 | 1 ");
}

TEST(several_gaps_make_several_sites) {
  CHECK_EQ(
      ranksOf(at({{"a", 0.1}, {"b", 10}, {"c", 0.2}, {"d", 80}, {"e", 12}})),
      "0 2 | 1 4 | 3 ");
}

TEST(what_is_no_clear_gap_makes_no_site) {
  CHECK_EQ(ranksOf({}), "");
  CHECK_EQ(ranksOf(at({{"a", 40}})), "");
  CHECK_EQ(ranksOf(at({{"a", 40}, {"b", 41}, {"c", 45}})), ""); // far, alike
  CHECK_EQ(ranksOf(at({{"a", 0.01}, {"b", 0.2}, {"c", 2}})), ""); // near
  CHECK_EQ(ranksOf(at({{"a", 10}, {"b", 30}})), ""); // not five times as far
  // At the threshold, and just past it.
  CHECK_EQ(ranksOf(at({{"a", 1}, {"b", 5.999}})), "");
  CHECK_EQ(ranksOf(at({{"a", 1}, {"b", 6}})), "0 | 1 ");
  CHECK_EQ(ranksOf(at({{"a", 2}, {"b", 9.999}})), "");
  CHECK_EQ(ranksOf(at({{"a", 2}, {"b", 10}})), "0 | 1 ");
}

TEST(a_slow_rank_does_not_take_its_host_to_another_site) {
  CHECK_EQ(ranksOf(at({{"a", 0.1}, {"b", 0.2}, {"b", 30}, {"a", 50}})), "");
  CHECK_EQ(
      ranksOf(at({{"a", 0.1}, {"b", 200}, {"b", 30}, {"a", 50}})),
      "0 3 | 1 2 ");
}

TEST(sites_are_not_inferred_with_an_unknown_distance_or_a_declared_site) {
  CHECK_EQ(ranksOf(at({{"a", 0.1}, {"b", 20}, {"c", 0}})), "");
  auto members = at({{"a", 0.1}, {"b", 20}});
  members[1].site = "east";
  CHECK_EQ(ranksOf(members), "");
}

TEST(inferred_sites_are_described_with_ranks_and_distances) {
  std::vector<std::pair<std::string, double>> hosts(10, {"a", 0.25});
  hosts.emplace_back("b", 40.04);
  const std::string text = describeSites(inferSites(at(hosts)));
  CHECK_CONTAINS(
      text, "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (0.25 ms); rank 10 (40 ms)");
  CHECK_CONTAINS(text, "TORCH_RESILIENT_SITE");
}

} // namespace
} // namespace resilient
