#include "tests/relay_simulation.h"

#include <iostream>

#include "tests/check.h"
#include "tests/simulation_seeds.h"

namespace resilient::test {
namespace {

void print(const RelaySimulationResult& sum, uint64_t networks) {
  std::cout << "relay simulation: " << networks << " networks, " << sum.events
            << " events, " << sum.messages << " messages (" << sum.excused
            << " more with an end that was lost), " << sum.relayed
            << " frames (" << (sum.relayedBytes >> 20) << " MiB) over "
            << sum.relayFlows << " paths, " << sum.silentRelays
            << " times silent, " << sum.relayFailures << " lost, "
            << sum.refusals << " refusals, " << sum.passedNotes
            << " notes of what has passed, " << sum.busyNotes
            << " of them busy; " << sum.limits << " with a limit, "
            << sum.gateways << " pairs with relays only, " << sum.uplinkSilences
            << " silent and " << sum.uplinkLosses << " lost uplinks, "
            << sum.cuts << " cuts, " << sum.kills << " kills, " << sum.stops
            << " stops, " << sum.leaves << " leaves; the fullest relay "
            << sum.fullest << " of its memory\n";
}

TEST(relay_simulation_holds_its_promises) {
  const auto trace = simulationTrace();
  RelaySimulationResult sum;
  const uint64_t networks = simulateSeeds(1000, [&](uint64_t seed) {
    const RelaySimulationResult r = simulateRelays(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error +
          replayLine(seed, "relay_simulation_holds"));
    }
    using R = RelaySimulationResult;
    for (uint64_t R::* count :
         {&R::events,
          &R::messages,
          &R::excused,
          &R::relayed,
          &R::relayedBytes,
          &R::relayFlows,
          &R::relayFailures,
          &R::silentRelays,
          &R::refusals,
          &R::passedNotes,
          &R::busyNotes,
          &R::limits,
          &R::uplinkSilences,
          &R::uplinkLosses,
          &R::cuts,
          &R::kills,
          &R::stops,
          &R::leaves,
          &R::gateways}) {
      sum.*count += r.*count;
    }
    sum.fullest = std::max(sum.fullest, r.fullest);
  });
  if (networks == 0) {
    return;
  }
  print(sum, networks);
  // A simulation in which nothing happens shows nothing.
  if (networks >= 200) {
    CHECK(sum.messages > networks * 10);
    CHECK(sum.relayed > networks * 20);
    CHECK(sum.relayFlows > networks);
    CHECK(sum.relayFailures > networks / 4);
    CHECK(sum.silentRelays > networks / 4);
    CHECK(sum.refusals > networks / 10);
    CHECK(sum.passedNotes > networks * 10);
    CHECK(sum.busyNotes > networks);
    CHECK(sum.limits > networks / 10);
    CHECK(sum.uplinkSilences > networks / 4);
    CHECK(sum.uplinkLosses > networks / 4);
    CHECK(sum.cuts > networks / 4);
    CHECK(sum.kills > networks / 10);
    CHECK(sum.stops > networks / 10);
    CHECK(sum.leaves > networks / 10);
    CHECK(sum.gateways > networks / 10);
    CHECK(sum.fullest > 0.5);
  }
}

TEST(relay_simulation_is_decided_by_its_seed) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK_EQ(simulateRelays(seed).traceHash, simulateRelays(seed).traceHash);
  }
  CHECK(simulateRelays(1).traceHash != simulateRelays(2).traceHash);
}

} // namespace
} // namespace resilient::test
