#include "tests/relay_simulation.h"

#include <cstdlib>
#include <iostream>

#include "tests/check.h"

namespace resilient::test {
namespace {

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// The line to paste.
std::string again(uint64_t seed) {
  return "\n  replay: RESILIENT_SIM_SEED=" + std::to_string(seed) +
      " RESILIENT_SIM_TRACE=1 core_tests relay_simulation_holds";
}

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
  std::function<void(const std::string&)> trace;
  if (setting("RESILIENT_SIM_TRACE") != nullptr) {
    trace = [](const std::string& line) { std::cerr << line << "\n"; };
  }
  RelaySimulationResult sum;
  const auto one = [&](uint64_t seed) {
    const RelaySimulationResult r = simulateRelays(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error + again(seed));
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
  };
  if (const char* seed = setting("RESILIENT_SIM_SEED")) {
    one(std::strtoull(seed, nullptr, 10));
    return;
  }
  if (runState().forcedSeed) {
    one(*runState().forcedSeed);
    return;
  }
#ifdef __SANITIZE_ADDRESS__
  uint64_t networks = 200;
#else
  uint64_t networks = 1000;
#endif
  if (const char* count = setting("RESILIENT_SIM_SCHEDULES")) {
    networks = std::strtoull(count, nullptr, 10);
    CHECK(networks > 0);
  }
  for (uint64_t seed = 1; seed <= networks; ++seed) {
    noteSeed(seed);
    one(seed);
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
