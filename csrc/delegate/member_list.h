#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "transport/address.h"

namespace resilient {

// The members of a group as one text in the store. The last rank to join
// writes it once, so all ranks read the same: every address, and from the
// addresses the same topology.

// Whether these processes, by rank, can form a group. kInvalidArgument, with
// the remedy, if two ranks are in one process, some ranks declare a site and
// others do not, or a rank requires RDMA that another one cannot use.
Status checkMembers(const std::vector<PeerAddress>& members);

Status inOneProcess(int rank, int otherRank, const PeerAddress& process);

// One line for each rank.
std::string memberListText(const std::vector<PeerAddress>& members);

// Reads the text for a group of `ranks`. kProtocol with the reason if it is
// malformed; `members` is unchanged then.
Status parseMemberList(
    const std::string& text,
    int ranks,
    std::vector<PeerAddress>& members);

// For Topology, by rank: the sites, as declared or else as inferSites() finds
// them, and a number for each host, in order of first appearance.
std::vector<std::string> sitesOf(const std::vector<PeerAddress>& members);
std::vector<int> hostsOf(const std::vector<PeerAddress>& members);
// For Topology: from the store's site to the farthest; 0 for declared sites.
double siteRoundTripS(const std::vector<PeerAddress>& members);

} // namespace resilient
