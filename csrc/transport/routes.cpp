#include "transport/routes.h"

#include <algorithm>
#include <utility>

namespace resilient {
namespace {

// An address that both hosts have is no way from one to the other: a bridge
// that each host has for itself.
bool shared(const NicAddress& nic, const std::vector<NicAddress>& others) {
  return std::any_of(others.begin(), others.end(), [&](const auto& o) {
    return o.address.ip() == nic.address.ip();
  });
}

} // namespace

// k counts through all pairs but the given one. The peer's NIC changes with
// every step, ours after each full round.
std::vector<Route> otherPairs(
    const std::vector<NicAddress>& mine,
    const std::vector<NicAddress>& theirs,
    const Route& than) {
  std::vector<Route> pairs;
  for (size_t k = 1; k < mine.size() * theirs.size(); ++k) {
    Route pair;
    pair.mine = (than.mine + k / theirs.size()) % mine.size();
    pair.theirs = (than.theirs + k) % theirs.size();
    const NicAddress& from = mine[pair.mine];
    const NicAddress& to = theirs[pair.theirs];
    if (!shared(from, theirs) && !shared(to, mine)) {
      pair.sameSubnet = from.inSubnet(to.address);
      pairs.push_back(pair);
    }
  }
  return pairs;
}

std::vector<NicAddress> outward(std::vector<NicAddress> nics) {
  std::erase_if(
      nics, [](const NicAddress& n) { return n.address.isLoopback(); });
  return nics;
}

// How it works. All steps go through `first`, the list of one particular end,
// so both ends make the same choices. First, each NIC takes the first free NIC
// of the other side in its own subnet; both prefixes must agree. Then the NICs
// left on both sides are paired in order. If one side has more, its remaining
// NICs share those of the other side. Last, if nothing fits, one route is kept
// on purpose: the attempt to connect fails with a reason, where an empty list
// would be silent.
std::vector<Route> pairNics(
    const std::vector<NicAddress>& mine,
    const std::vector<NicAddress>& theirs,
    bool mineFirst) {
  const std::vector<NicAddress>& first = mineFirst ? mine : theirs;
  const std::vector<NicAddress>& second = mineFirst ? theirs : mine;
  std::vector<size_t> firstLeft, secondLeft;
  for (size_t i = 0; i < first.size(); ++i) {
    if (!shared(first[i], second)) {
      firstLeft.push_back(i);
    }
  }
  for (size_t j = 0; j < second.size(); ++j) {
    if (!shared(second[j], first)) {
      secondLeft.push_back(j);
    }
  }
  const std::vector<size_t> firstAll = firstLeft, secondAll = secondLeft;
  std::vector<Route> routes;
  const auto add = [&](size_t i, size_t j, bool sameSubnet) {
    routes.push_back(
        mineFirst ? Route{i, j, sameSubnet} : Route{j, i, sameSubnet});
  };
  for (size_t i : firstAll) {
    const auto j =
        std::find_if(secondLeft.begin(), secondLeft.end(), [&](size_t k) {
          return first[i].inSubnet(second[k].address) &&
              second[k].inSubnet(first[i].address);
        });
    if (j != secondLeft.end()) {
      add(i, *j, true);
      secondLeft.erase(j);
      std::erase(firstLeft, i);
    }
  }
  const auto sameFamily = [&](size_t i, size_t j) {
    return first[i].address.family() == second[j].address.family();
  };
  // The NICs left over on both sides, in order; then those left on one side,
  // with NICs that have a route already.
  for (size_t k = 0; k < std::max(firstLeft.size(), secondLeft.size()); ++k) {
    if (firstAll.empty() || secondAll.empty()) {
      break;
    }
    const size_t i =
        k < firstLeft.size() ? firstLeft[k] : firstAll[k % firstAll.size()];
    const size_t j =
        k < secondLeft.size() ? secondLeft[k] : secondAll[k % secondAll.size()];
    if (sameFamily(i, j)) {
      add(i, j, false);
    }
  }
  if (routes.empty() && !firstAll.empty() && !secondAll.empty()) {
    add(firstAll.front(), secondAll.front(), false); // fails, and says why
  }
  return routes;
}

} // namespace resilient
