#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "collectives/topology.h"
#include "transport/address.h"

namespace resilient {

// Where all ranks of a group are, as one text in the store: written once, by
// the rank that joins last, so that all ranks go by the same.

// "sites=east,east,west hosts=0,0,1", by rank; "sites=" if none is declared.
// kInvalidArgument, with what to do, if some ranks declare a site and others
// do not.
Status topologyText(const std::vector<PeerAddress>& members, std::string& text);

// The opposite, for a group of `ranks`; kProtocol with the reason if `text` is
// no such text.
Status parseTopology(
    const std::string& text,
    int ranks,
    std::vector<std::string>& sites,
    std::vector<int>& hosts);

} // namespace resilient
