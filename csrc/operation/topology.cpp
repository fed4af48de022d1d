#include "operation/topology.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace resilient {
namespace {

Place single(int rank) {
  Place place;
  place.ranks = {rank};
  return place;
}

// A place of these children; a single child is returned as it is.
Place group(std::vector<Place> children) {
  if (children.size() == 1) {
    return std::move(children.front());
  }
  Place place;
  for (const Place& child : children) {
    place.ranks.insert(
        place.ranks.end(), child.ranks.begin(), child.ranks.end());
  }
  std::sort(place.ranks.begin(), place.ranks.end());
  place.children = std::move(children);
  return place;
}

// The ranks in parts that agree in `keyOf`, in the order of first appearance.
template <typename KeyOf>
std::vector<std::vector<int>> partsBy(
    const std::vector<int>& ranks,
    KeyOf keyOf) {
  std::vector<std::vector<int>> parts;
  for (int rank : ranks) {
    const auto found =
        std::find_if(parts.begin(), parts.end(), [&](const auto& part) {
          return keyOf(part.front()) == keyOf(rank);
        });
    if (found == parts.end()) {
      parts.push_back({rank});
    } else {
      found->push_back(rank);
    }
  }
  return parts;
}

} // namespace

AlgorithmChoice algorithmChoiceFrom(const std::string& name) {
  return name == "flat"        ? AlgorithmChoice::kFlat
      : name == "hierarchical" ? AlgorithmChoice::kHierarchical
                               : AlgorithmChoice::kAuto;
}

const char* nameOf(AlgorithmChoice choice) {
  switch (choice) {
    case AlgorithmChoice::kFlat:
      return "flat";
    case AlgorithmChoice::kHierarchical:
      return "hierarchical";
    default:
      return "auto";
  }
}

bool Place::contains(int rank) const {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

size_t Place::childOf(int rank) const {
  size_t i = 0;
  while (!children[i].contains(rank)) {
    ++i;
  }
  return i;
}

size_t Place::height() const {
  size_t max = 0;
  for (const Place& child : children) {
    max = std::max(max, child.height() + 1);
  }
  return max;
}

Topology::Topology(int ranks)
    : Topology(
          std::vector<std::string>(static_cast<size_t>(ranks)),
          std::vector<int>(static_cast<size_t>(ranks), 0),
          AlgorithmChoice::kAuto) {}

// Groups in two steps, by site and then by host within each site. A host number
// that occurs at two sites therefore becomes two hosts. group() drops every
// level with a single child, so the tree has no place that only repeats another
// one.
Topology::Topology(
    std::vector<std::string> sites,
    std::vector<int> hosts,
    AlgorithmChoice choice,
    double siteRoundTripS)
    : sites_(std::move(sites)),
      hosts_(std::move(hosts)),
      choice_(choice),
      siteRoundTripS_(siteRoundTripS) {
  std::vector<int> all(sites_.size());
  for (size_t r = 0; r < all.size(); ++r) {
    all[r] = static_cast<int>(r);
  }
  const auto siteOf = [this](int r) -> const std::string& {
    return sites_[static_cast<size_t>(r)];
  };
  const auto hostOf = [this](int r) { return hosts_[static_cast<size_t>(r)]; };
  std::vector<Place> sitePlaces;
  for (const std::vector<int>& site : partsBy(all, siteOf)) {
    std::vector<Place> hostPlaces;
    for (const std::vector<int>& host : partsBy(site, hostOf)) {
      std::vector<Place> rankPlaces;
      for (int rank : host) {
        rankPlaces.push_back(single(rank));
      }
      hostPlaces.push_back(group(std::move(rankPlaces)));
    }
    sitePlaces.push_back(group(std::move(hostPlaces)));
  }
  hasSites_ = sitePlaces.size() > 1;
  hasHosts_ =
      hasSites_ || std::any_of(hosts_.begin(), hosts_.end(), [this](int host) {
        return host != hosts_.front();
      });
  root_ = group(std::move(sitePlaces));
  height_ = root_.height();
}

} // namespace resilient
