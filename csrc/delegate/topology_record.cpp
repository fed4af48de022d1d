#include "delegate/topology_record.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/options.h"

namespace resilient {
namespace {

constexpr std::string_view kSites = "sites=";
constexpr std::string_view kHosts = " hosts=";

std::string listOf(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text + (ranks.size() > 8 ? ", ..." : "");
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t comma = text.find(',');
    parts.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(comma + 1);
  }
}

} // namespace

Status topologyText(
    const std::vector<PeerAddress>& members,
    std::string& text) {
  std::vector<int> with;
  std::vector<int> without;
  std::vector<std::string> hostIds;
  std::string sites;
  std::string hosts;
  for (size_t r = 0; r < members.size(); ++r) {
    const PeerAddress& member = members[r];
    (member.site.empty() ? without : with).push_back(static_cast<int>(r));
    const auto found = std::find(hostIds.begin(), hostIds.end(), member.hostId);
    const auto host = found - hostIds.begin();
    if (found == hostIds.end()) {
      hostIds.push_back(member.hostId);
    }
    sites += (r == 0 ? "" : ",") + member.site;
    hosts += (r == 0 ? "" : ",") + std::to_string(host);
  }
  if (!with.empty() && !without.empty()) {
    const PeerAddress& first = members[static_cast<size_t>(with.front())];
    const PeerAddress& other = members[static_cast<size_t>(without.front())];
    return Status(
        StatusCode::kInvalidArgument,
        listOf(with) + " declared a site (rank " +
            std::to_string(with.front()) + " on " + first.hostName + ": \"" +
            first.site + "\"), " + listOf(without) + " did not (rank " +
            std::to_string(without.front()) + " on " + other.hostName +
            "): set TORCH_RESILIENT_SITE on all ranks or on none");
  }
  text = std::string(kSites) + (with.empty() ? "" : sites) +
      std::string(kHosts) + hosts;
  return Status();
}

Status parseTopology(
    const std::string& text,
    int ranks,
    std::vector<std::string>& sites,
    std::vector<int>& hosts) {
  const auto bad = [](const std::string& why) {
    return Status(
        StatusCode::kProtocol,
        "read the group's topology from the store: " + why +
            "; do all ranks run the same version of torch_resilient, and does "
            "this store belong to this job alone?");
  };
  const std::string_view all(text);
  const size_t middle = all.find(kHosts);
  if (!all.starts_with(kSites) || middle == std::string_view::npos) {
    return bad("not of the form sites=... hosts=...");
  }
  const size_t n = static_cast<size_t>(ranks);
  const std::string_view named =
      all.substr(kSites.size(), middle - kSites.size());
  std::vector<std::string> siteNames(n);
  if (!named.empty()) {
    const auto parts = split(named);
    if (parts.size() != n) {
      return bad("it has " + std::to_string(parts.size()) + " sites");
    }
    for (size_t r = 0; r < n; ++r) {
      if (!isSiteName(parts[r])) {
        return bad("rank " + std::to_string(r) + " has no site");
      }
      siteNames[r] = parts[r];
    }
  }
  const auto parts = split(all.substr(middle + kHosts.size()));
  if (parts.size() != n) {
    return bad("it has " + std::to_string(parts.size()) + " hosts");
  }
  std::vector<int> numbers(n);
  for (size_t r = 0; r < n; ++r) {
    const char* end = parts[r].data() + parts[r].size();
    const auto parsed = std::from_chars(parts[r].data(), end, numbers[r]);
    if (parsed.ec != std::errc() || parsed.ptr != end || numbers[r] < 0) {
      return bad("rank " + std::to_string(r) + " has no host");
    }
  }
  sites = std::move(siteNames);
  hosts = std::move(numbers);
  return Status();
}

} // namespace resilient
