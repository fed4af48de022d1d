#include "tests/simulation.h"

#include <iostream>

#include "tests/check.h"
#include "tests/simulation_seeds.h"

namespace resilient::test {
namespace {

TEST(simulation_holds_its_promises) {
  const auto trace = simulationTrace();
  SimulationResult sum;
  uint64_t faulty = 0;
  const uint64_t schedules = simulateSeeds(2000, [&](uint64_t seed) {
    const SimulationResult r = simulate(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error +
          replayLine(seed, "simulation_holds_its_promises"));
    }
    sum.delivered += r.delivered;
    sum.failed += r.failed;
    sum.cancelled += r.cancelled;
    sum.cuts += r.cuts;
    sum.stalls += r.stalls;
    sum.suspicions += r.suspicions;
    sum.roles += r.roles;
    sum.losses += r.losses;
    faulty += r.faults() > 0;
    sum.duplicates += r.duplicates;
    sum.zeroFilled += r.zeroFilled;
    sum.events += r.events;
  });
  if (schedules == 0) {
    return;
  }
  std::cout << "simulation: " << schedules << " schedules, " << sum.faults()
            << " faults (" << sum.cuts << " cuts, " << sum.stalls << " stalls, "
            << sum.suspicions << " suspicions, " << sum.roles
            << " changes of roles, " << sum.losses
            << " lost channels and groups) in " << faulty << " of them, "
            << sum.events << " events, " << sum.delivered << " messages, "
            << sum.failed << " failed and " << sum.cancelled
            << " cancelled operations, " << sum.duplicates
            << " duplicate chunks\n";
  // A simulation in which nothing happens shows nothing.
  if (schedules >= 200) {
    CHECK(sum.delivered > schedules * 5);
    CHECK(sum.cuts > schedules / 2);
    CHECK(sum.suspicions > schedules / 2);
    CHECK(sum.stalls > schedules / 2);
    CHECK(sum.roles > schedules / 10);
    CHECK(sum.losses > schedules / 10);
    // So many simulated schedules are more simulated faults.
    CHECK(sum.faults() > schedules);
    CHECK(sum.cancelled > schedules / 2);
    CHECK(sum.failed > schedules / 10);
    CHECK(sum.duplicates > schedules / 50);
    CHECK(sum.zeroFilled > schedules);
  }
}

TEST(simulation_is_decided_by_its_seed) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    CHECK_EQ(simulate(seed).traceHash, simulate(seed).traceHash);
  }
  CHECK(simulate(1).traceHash != simulate(2).traceHash);
}

} // namespace
} // namespace resilient::test
