#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace resilient::test {

struct FailoverSimulationResult {
  std::string error; // empty: everything was as it must be
  uint64_t traceHash = 0;
  uint64_t events = 0;
  // Counts, by which a test shows that it tests something.
  uint64_t messages = 0; // delivered
  uint64_t cuts = 0; // connections reset by the network
  uint64_t blackHoles = 0; // ways on which nothing passes, also one way
  uint64_t nicNews = 0; // a NIC down, with the news of it
  uint64_t nicSilences = 0; // without
  uint64_t pauses = 0; // of a process
  uint64_t firewalls = 0;
  uint64_t kills = 0; // of a process, each noticed by the other
  uint64_t crossings = 0; // no route works, another pair of NICs does
  uint64_t reconnects = 0;
  uint64_t duplicateAttempts = 0; // both sides connect at once
  uint64_t offRoute = 0; // connections between NICs of different routes
  uint64_t suspicions = 0;
  uint64_t tainted = 0; // of these, for a silent neighbour
  uint64_t proved = 0; // probations that ended with the hold-down
  uint64_t needed = 0; // probations that ended since nothing else worked
  uint64_t longHoldDowns = 0; // of at least 4 times the shortest
  uint64_t standbyTakeovers = 0; // a route other than the first is active
  uint64_t classMoves = 0; // a class leaves its NIC
  uint64_t sharedMemory = 0; // times it took over
  uint64_t datagrams = 0, beside = 0; // the latter along with connections
  uint64_t silentDatagrams = 0; // doubted
  uint64_t datagramsAgain = 0; // after that
  uint64_t healed = 0; // networks in which all came back
  uint64_t limited = 0; // messages whose delivery had a limit
  double worstPause = 0; // as a part of the limit
  double worstHealing = 0;
};

// Two processes, each with a real Channel and a real Failover, joined by
// SimulatedTcp over several NICs. The seed decides the network, the options and
// the faults: NICs that fail with and without news, black holes in one or both
// directions, flapping, resets, firewalls, paused and killed processes. Checks
// the promises of failover; see docs/testing.md.
FailoverSimulationResult simulateFailover(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace = {});

} // namespace resilient::test
