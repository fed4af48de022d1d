#include "delegate/member_list.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "delegate/site_inference.h"

namespace resilient {
namespace {

Status checkProcesses(const std::vector<PeerAddress>& members) {
  std::map<Uid, size_t> first;
  for (size_t r = 0; r < members.size(); ++r) {
    const auto [found, isNew] = first.emplace(members[r].uid, r);
    if (!isNew) {
      return inOneProcess(
          static_cast<int>(found->second), static_cast<int>(r), members[r]);
    }
  }
  return Status();
}

Status checkSites(const std::vector<PeerAddress>& members) {
  std::vector<int> with;
  std::vector<int> without;
  for (size_t r = 0; r < members.size(); ++r) {
    (members[r].site.empty() ? without : with).push_back(static_cast<int>(r));
  }
  if (with.empty() || without.empty()) {
    return Status();
  }
  const PeerAddress& first = members[static_cast<size_t>(with.front())];
  const PeerAddress& other = members[static_cast<size_t>(without.front())];
  return Status(
      StatusCode::kInvalidArgument,
      listOf(with) + " declared a site (rank " + std::to_string(with.front()) +
          " on " + first.hostName + ": \"" + first.site + "\"), " +
          listOf(without) + " did not (rank " +
          std::to_string(without.front()) + " on " + other.hostName +
          "): set TORCH_RESILIENT_SITE on all ranks or on none");
}

// RDMA is used between hosts of one declared site (VerbsConnector::wanted()).
Status checkRdma(const std::vector<PeerAddress>& members) {
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].rdma != RdmaUse::kRequired) {
      continue;
    }
    std::vector<int> without;
    for (size_t other = 0; other < members.size(); ++other) {
      const PeerAddress& m = members[other];
      if (m.rdma < RdmaUse::kPossible && m.hostId != members[r].hostId &&
          m.site == members[r].site) {
        without.push_back(static_cast<int>(other));
      }
    }
    if (without.empty()) {
      continue;
    }
    const PeerAddress& first = members[static_cast<size_t>(without.front())];
    const std::string at =
        "rank " + std::to_string(without.front()) + " on " + first.hostName;
    return Status(
        StatusCode::kInvalidArgument,
        "rank " + std::to_string(r) + " on " + members[r].hostName +
            " has TORCH_RESILIENT_RDMA=required, but " + listOf(without) +
            " on other hosts cannot use RDMA (" + at +
            (first.rdma == RdmaUse::kOff
                 ? " has TORCH_RESILIENT_RDMA=off): set it to auto there"
                 : " has no RDMA device on its interfaces): run "
                   "`torch-resilient doctor` there, which says what is "
                   "missing") +
            ", or set TORCH_RESILIENT_RDMA=auto on all ranks");
  }
  return Status();
}

} // namespace

Status inOneProcess(int rank, int otherRank, const PeerAddress& process) {
  return Status(
      StatusCode::kInvalidArgument,
      "ranks " + std::to_string(rank) + " and " + std::to_string(otherRank) +
          " are in one process (host " + process.hostName + ", pid " +
          std::to_string(process.pid) +
          "): the \"resilient\" backend needs a process for each rank. Start "
          "them with torchrun or torch.multiprocessing, not as threads");
}

Status checkMembers(const std::vector<PeerAddress>& members) {
  for (const auto& check : {checkProcesses, checkSites, checkRdma}) {
    if (const Status status = check(members); !status.ok()) {
      return status;
    }
  }
  return Status();
}

std::string memberListText(const std::vector<PeerAddress>& members) {
  std::string text;
  for (const PeerAddress& member : members) {
    text += member.toString() + '\n';
  }
  return text;
}

// The store may hold text of any process, so nothing is taken for granted: not
// the number of lines, nor the line end after the last one.
Status parseMemberList(
    const std::string& text,
    int ranks,
    std::vector<PeerAddress>& members) {
  const auto bad = [](const std::string& why) {
    return Status(
        StatusCode::kProtocol,
        "read the members of the group from the store: " + why +
            "; do all ranks run the same version of torch_resilient, and does "
            "this store belong to this job alone?");
  };
  const size_t n = static_cast<size_t>(ranks);
  std::vector<PeerAddress> parsed;
  std::string_view rest(text);
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    if (end == std::string_view::npos || parsed.size() == n) {
      return bad("it does not end after " + std::to_string(n) + " ranks");
    }
    const Status status = PeerAddress::parse(
        std::string(rest.substr(0, end)), parsed.emplace_back());
    if (!status.ok()) {
      return bad(
          "rank " + std::to_string(parsed.size() - 1) + ": " +
          status.message());
    }
    rest.remove_prefix(end + 1);
  }
  if (parsed.size() != n) {
    return bad(
        "it has " + std::to_string(parsed.size()) + " of " + std::to_string(n) +
        " ranks");
  }
  members = std::move(parsed);
  return Status();
}

std::vector<std::string> sitesOf(const std::vector<PeerAddress>& members) {
  std::vector<std::string> sites;
  for (const PeerAddress& member : members) {
    sites.push_back(member.site);
  }
  for (const InferredSite& site : inferSites(members)) {
    for (const int r : site.ranks) {
      sites[static_cast<size_t>(r)] = site.name;
    }
  }
  return sites;
}

double siteRoundTripS(const std::vector<PeerAddress>& members) {
  Nanos farthest{};
  for (const InferredSite& site : inferSites(members)) {
    farthest = std::max(farthest, site.roundTrip);
  }
  return toSeconds(farthest);
}

std::vector<int> hostsOf(const std::vector<PeerAddress>& members) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const PeerAddress& member : members) {
    const int next = static_cast<int>(numbers.size());
    hosts.push_back(numbers.emplace(member.hostId, next).first->second);
  }
  return hosts;
}

} // namespace resilient
