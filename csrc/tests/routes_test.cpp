#include "transport/routes.h"

#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

NicAddress nic(const char* name, const char* ip, int bits = 24) {
  return {name, *SocketAddress::parse(ip, 29511), bits};
}

std::string text(const std::vector<Route>& routes) {
  std::string s;
  for (const Route& r : routes) {
    s += std::to_string(r.mine) + (r.sameSubnet ? "=" : "-") +
        std::to_string(r.theirs) + " ";
  }
  return s;
}

TEST(routes_join_nics_of_one_subnet) {
  // In another order at the other end.
  const std::vector<NicAddress> a = {
      nic("eth0", "10.0.0.1"), nic("eth1", "10.1.0.1")};
  const std::vector<NicAddress> b = {
      nic("eth0", "10.1.0.2"), nic("eth1", "10.0.0.2")};
  CHECK_EQ(text(pairNics(a, b, true)), "0=1 1=0 ");
  CHECK_EQ(text(pairNics(b, a, false)), "1=0 0=1 ");
}

TEST(routes_across_a_router_follow_the_order) {
  const std::vector<NicAddress> a = {
      nic("eth0", "10.0.0.1"), nic("eth1", "10.1.0.1")};
  const std::vector<NicAddress> b = {
      nic("eth0", "10.2.0.1"), nic("eth1", "10.3.0.1")};
  CHECK_EQ(text(pairNics(a, b, true)), "0-0 1-1 ");
}

TEST(routes_leave_no_nic_without_use) {
  const std::vector<NicAddress> one = {nic("eth0", "10.2.0.1")};
  const std::vector<NicAddress> two = {
      nic("eth0", "10.0.0.1"), nic("eth1", "10.1.0.1")};
  CHECK_EQ(text(pairNics(two, one, true)), "0-0 1-0 ");
  CHECK_EQ(text(pairNics(one, two, true)), "0-0 0-1 ");
}

TEST(routes_avoid_what_leads_back_home) {
  const std::vector<NicAddress> a = {
      nic("bridge", "172.17.0.1", 16), nic("eth0", "10.0.0.1")};
  const std::vector<NicAddress> b = {
      nic("bridge", "172.17.0.1", 16), nic("eth0", "10.0.0.2")};
  CHECK_EQ(text(pairNics(a, b, true)), "1=1 ");
}

TEST(routes_have_all_other_pairs_beside_them) {
  const std::vector<NicAddress> a = {
      nic("bridge", "172.17.0.1", 16),
      nic("eth0", "10.0.0.1"),
      nic("eth1", "10.1.0.1")};
  const std::vector<NicAddress> b = {
      nic("eth0", "10.0.0.2"),
      nic("bridge", "172.17.0.1", 16),
      nic("eth1", "10.1.0.2")};
  // Without the bridges: 10.0.0.1 and 10.1.0.2 know each other's subnet not.
  CHECK_EQ(text(otherPairs(a, b, {1, 0, true})), "1-2 2-0 2=2 ");
  CHECK_EQ(text(otherPairs(a, b, {2, 0, false})), "2=2 1=0 1-2 ");
  CHECK(otherPairs({a[1]}, {b[0]}, {0, 0, true}).empty());
}

TEST(routes_join_one_family) {
  const std::vector<NicAddress> a = {
      nic("eth0", "fd00::1", 64), nic("eth1", "10.1.0.1")};
  const std::vector<NicAddress> b = {nic("eth0", "10.2.0.1")};
  CHECK_EQ(text(pairNics(a, b, true)), "1-0 ");
  // Nothing fits: one attempt that fails tells why.
  CHECK_EQ(text(pairNics({a[0]}, b, true)), "0-0 ");
  CHECK(pairNics({}, b, true).empty());
}

// Both ends must give each route the same number.
TEST(routes_are_the_same_at_both_ends) {
  forSeeds(2000, [](uint64_t seed) {
    Prng prng(seed);
    const auto some = [&prng] {
      std::vector<NicAddress> nics;
      for (uint64_t n = 1 + prng.below(4); n > 0; --n) {
        const std::string ip = "10." + std::to_string(prng.below(4)) + ".0." +
            std::to_string(1 + prng.below(4));
        nics.push_back(
            prng.below(5) == 0
                ? nic("eth6",
                      ("fd00::" + std::to_string(prng.below(9))).c_str(),
                      64)
                : nic("eth4", ip.c_str(), 24));
      }
      return nics;
    };
    const auto a = some(), b = some();
    const auto from = pairNics(a, b, true), to = pairNics(b, a, false);
    CHECK_EQ(from.size(), to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      CHECK_EQ(from[i].mine, to[i].theirs);
      CHECK_EQ(from[i].theirs, to[i].mine);
      CHECK_EQ(from[i].sameSubnet, to[i].sameSubnet);
    }
  });
}

} // namespace
} // namespace resilient::test
