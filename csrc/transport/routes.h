#pragma once

#include <cstddef>
#include <vector>

#include "transport/address.h"

namespace resilient {

// Without loopback addresses: that of another host is not ours.
std::vector<NicAddress> outward(std::vector<NicAddress> nics);

// A pair of NICs, one of ours and one of the peer's, by their places in the
// two lists of addresses.
struct Route {
  size_t mine = 0;
  size_t theirs = 0;
  bool sameSubnet = false;
};

// Pairs the NICs; at least one route unless a list is empty. Both ends find the
// same routes in the same order (with mine and theirs exchanged) from the same
// two lists, so a route has one number. `mineFirst`: our list counts first; it
// must differ at the two ends.
//
// NICs in one subnet belong together; the rest are paired in their order, and
// if one side has more of them, several share one of the other side: an unused
// NIC could not replace another.
//
// Paper: SHIFT §4.1 pairs a default NIC with one backup; here every pair
// carries, and any may fail.
//
// The order is part of the protocol between the two ends: connection index c
// belongs to route c modulo the number of routes (TcpConnector::anyOf), so ends
// with different orders would use the wrong NICs
// (routes_are_the_same_at_both_ends). An address that both lists contain is
// left out, and so are pairs of different families unless no other pair exists.
std::vector<Route> pairNics(
    const std::vector<NicAddress>& mine,
    const std::vector<NicAddress>& theirs,
    bool mineFirst);

// All other pairs that may lead from here to the peer, when no route does: from
// the given one on, each once.
//
// Pairs of different families are included. The order starts at `than`, so two
// routes that fail together do not try the same pair first.
std::vector<Route> otherPairs(
    const std::vector<NicAddress>& mine,
    const std::vector<NicAddress>& theirs,
    const Route& than);

} // namespace resilient
