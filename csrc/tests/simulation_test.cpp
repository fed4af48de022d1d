#include "tests/simulation.h"

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
      " RESILIENT_SIM_TRACE=1 core_tests simulation_holds_its_promises";
}

TEST(simulation_holds_its_promises) {
  std::function<void(const std::string&)> trace;
  if (setting("RESILIENT_SIM_TRACE") != nullptr) {
    trace = [](const std::string& line) { std::cerr << line << "\n"; };
  }
  SimulationResult sum;
  uint64_t faulty = 0;
  const auto one = [&](uint64_t seed) {
    const SimulationResult r = simulate(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error + again(seed));
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
  };
  if (const char* seed = setting("RESILIENT_SIM_SEED")) {
    one(std::strtoull(seed, nullptr, 10));
    return;
  }
  if (runState().forcedSeed) {
    one(*runState().forcedSeed);
    return;
  }
#ifdef __SANITIZE_THREAD__
  uint64_t schedules = 200; // it has one thread only
#else
  uint64_t schedules = 2000;
#endif
  if (const char* count = setting("RESILIENT_SIM_SCHEDULES")) {
    schedules = std::strtoull(count, nullptr, 10);
    CHECK(schedules > 0);
  }
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    noteSeed(seed);
    one(seed);
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
