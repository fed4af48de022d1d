#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace resilient::test {

struct RelaySimulationResult {
  std::string error; // empty: everything was as it must be
  uint64_t traceHash = 0;
  uint64_t events = 0;
  // Counts, by which a test shows that it tests something.
  uint64_t messages = 0; // received
  uint64_t excused = 0; // with an end that was killed, stopped or left
  uint64_t relayed = 0; // messages that relays have passed on
  uint64_t relayedBytes = 0;
  uint64_t relayFlows = 0; // paths over relays that were open
  uint64_t relayFailures = 0; // of these, closed before the end
  uint64_t silentRelays = 0; // times that such a path was silent
  uint64_t refusals = 0; // by relays
  uint64_t passedNotes = 0; // of relays, about what they have passed on
  uint64_t busyNotes = 0; // of these, that they need their uplink
  uint64_t limits = 0; // networks with a declared limit
  uint64_t uplinkSilences = 0; // nothing passes between a rank and a site
  uint64_t uplinkLosses = 0; // its connections are reset, too
  uint64_t cuts = 0; // of one connection
  uint64_t kills = 0;
  uint64_t stops = 0;
  uint64_t leaves = 0;
  uint64_t gateways = 0; // pairs that only relays ever join, in the end
  double fullest = 0; // the most that a relay has held, of what it may hold
};

// Two sites of one to three processes, each process on a host of its own, with
// real PeerLinks, RelayConnectors, RelayPaths and RelayServices in loops that
// run in virtual time. Only the direct connections are simulated, and when they
// are doubted and made anew: they carry whole frames in order, as TCP does.
// (What Failover does with real connections has a simulation of its own.)
//
// The seed decides the network, the options, the messages and the faults:
// uplinks that fall silent or break, processes that are killed, stopped or
// leave, and such as have no direct way to the other site from the start. Then
// the network heals, in part, and everything must end: each message once, in
// order and with equal bits; no relay has ever held more than it may, or holds
// anything at the end.
RelaySimulationResult simulateRelays(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace = {});

} // namespace resilient::test
