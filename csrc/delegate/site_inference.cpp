#include "delegate/site_inference.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace resilient {
namespace {

// A gap is clear if the farther host is at least this much farther away ...
// Within a data centre a round trip takes less than 1 ms. Lower, and a queue
// in a switch could make a site; higher, and neighbouring cities are one.
constexpr Nanos kGapMin = std::chrono::milliseconds(5);
// ... and this many times as far. Hosts of one distant site differ by less:
// by their last mile, or by the routes that their packets take.
constexpr int kGapRatio = 5;

bool clearGap(Nanos near, Nanos far) {
  return far - near >= kGapMin && far >= near * kGapRatio;
}

std::string milliseconds(Nanos time) {
  char text[32];
  std::snprintf(
      text, sizeof(text), "%.3g ms", static_cast<double>(time.count()) / 1e6);
  return text;
}

} // namespace

// Hosts are sorted by their distance and cut at clear gaps. Subnets are not
// used: a VPN puts hosts of several sites into one. Every rank computes this
// from the same list, so all get the same sites.
std::vector<InferredSite> inferSites(const std::vector<PeerAddress>& members) {
  // A busy host only makes a measurement longer, so the minimum of its ranks
  // is the best one.
  std::map<std::string, Nanos> ofHost;
  for (const PeerAddress& member : members) {
    if (!member.site.empty() || member.storeRoundTrip <= Nanos(0)) {
      return {};
    }
    Nanos& min =
        ofHost.try_emplace(member.hostId, member.storeRoundTrip).first->second;
    min = std::min(min, member.storeRoundTrip);
  }
  std::vector<Nanos> sorted;
  for (const auto& [host, roundTrip] : ofHost) {
    sorted.push_back(roundTrip);
  }
  std::sort(sorted.begin(), sorted.end());
  std::vector<Nanos> begins; // the least round trip of each site
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i == 0 || clearGap(sorted[i - 1], sorted[i])) {
      begins.push_back(sorted[i]);
    }
  }
  if (begins.size() < 2) {
    return {};
  }
  std::vector<InferredSite> sites;
  for (size_t r = 0; r < members.size(); ++r) {
    const Nanos begin = *std::prev(
        std::upper_bound(
            begins.begin(), begins.end(), ofHost[members[r].hostId]));
    auto at = std::ranges::find(sites, begin, &InferredSite::roundTrip);
    if (at == sites.end()) {
      sites.push_back({"site" + std::to_string(sites.size()), {}, begin});
      at = std::prev(sites.end());
    }
    at->ranks.push_back(static_cast<int>(r));
  }
  return sites;
}

std::string describeSites(const std::vector<InferredSite>& sites) {
  std::string text =
      "no rank declares a site, but their round trips to the "
      "store differ by far. Collectives treat as sites:";
  for (const InferredSite& site : sites) {
    text += (&site == &sites.front() ? " " : "; ") + listOf(site.ranks) + " (" +
        milliseconds(site.roundTrip) + ")";
  }
  return text +
      ". Declare sites with TORCH_RESILIENT_SITE on all ranks, or set it to "
      "nothing to have none";
}

std::string listOf(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text + (ranks.size() > 8 ? ", ..." : "");
}

} // namespace resilient
