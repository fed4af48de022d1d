#pragma once

#include <string>
#include <vector>

#include "base/time.h"
#include "transport/address.h"

namespace resilient {

// A site of ranks that is seen from a distance: no rank has declared one.
struct InferredSite {
  std::string name; // "site0", "site1", ...
  std::vector<int> ranks; // ascending
  Nanos roundTrip{}; // of its nearest host to the store
};

// Groups hosts by their distance to the store (PeerAddress::storeRoundTrip).
// Two groups are apart only if a clear gap is between them. Empty if all hosts
// belong together, if some rank declares a site, or if the distance of some
// rank is unknown. Sites stand in the order of their lowest ranks. Two sites at
// the same distance from the store count as one.
std::vector<InferredSite> inferSites(const std::vector<PeerAddress>& members);

// The sites, with ranks and distances, and what the user can do about them: one
// line for the log.
std::string describeSites(const std::vector<InferredSite>& sites);

// "rank 3", "ranks 0, 1"; the first 8 of them.
std::string listOf(const std::vector<int>& ranks);

} // namespace resilient
