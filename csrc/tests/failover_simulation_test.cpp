#include "tests/failover_simulation.h"

#include <iostream>

#include "tests/check.h"
#include "tests/simulation_seeds.h"

namespace resilient::test {
namespace {

TEST(failover_simulation_holds_its_promises) {
  const auto trace = simulationTrace();
  FailoverSimulationResult sum;
  const uint64_t networks = simulateSeeds(1000, [&](uint64_t seed) {
    const FailoverSimulationResult r = simulateFailover(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error +
          replayLine(seed, "failover_simulation_holds"));
    }
    using R = FailoverSimulationResult;
    for (uint64_t R::* count :
         {&R::events,           &R::messages,        &R::cuts,
          &R::blackHoles,       &R::nicNews,         &R::nicSilences,
          &R::pauses,           &R::firewalls,       &R::kills,
          &R::crossings,        &R::reconnects,      &R::duplicateAttempts,
          &R::offRoute,         &R::suspicions,      &R::tainted,
          &R::proved,           &R::needed,          &R::longHoldDowns,
          &R::classMoves,       &R::sharedMemory,    &R::datagrams,
          &R::beside,           &R::healed,          &R::limited,
          &R::standbyTakeovers, &R::silentDatagrams, &R::datagramsAgain}) {
      sum.*count += r.*count;
    }
    sum.worstPause = std::max(sum.worstPause, r.worstPause);
    sum.worstHealing = std::max(sum.worstHealing, r.worstHealing);
  });
  if (networks == 0) {
    return;
  }
  std::cout << "failover simulation: " << networks << " networks, "
            << sum.events << " events, " << sum.messages << " messages, "
            << sum.cuts << " cuts, " << sum.blackHoles << " black holes, "
            << sum.nicNews << " NICs down and " << sum.nicSilences
            << " without news, " << sum.pauses << " pauses, " << sum.firewalls
            << " firewalls, " << sum.kills << " kills, " << sum.crossings
            << " crossings; " << sum.reconnects << " reconnects ("
            << sum.offRoute << " off their route, " << sum.duplicateAttempts
            << " at once from both sides), " << sum.suspicions
            << " suspicions (" << sum.tainted << " of neighbours), "
            << sum.proved << " proved, " << sum.needed << " trusted early, "
            << sum.longHoldDowns << " long hold-downs, " << sum.standbyTakeovers
            << " standby takeovers, " << sum.classMoves
            << " classes off their NIC, " << sum.sharedMemory
            << " times shared memory, " << sum.datagrams << " times datagrams ("
            << sum.beside << " beside connections, " << sum.silentDatagrams
            << " silent, " << sum.datagramsAgain << " again), " << sum.healed
            << " healed; longest pause " << sum.worstPause << " of its limit ("
            << sum.limited << " messages), longest healing " << sum.worstHealing
            << "\n";
  // A simulation in which nothing happens shows nothing.
  if (networks >= 200) {
    CHECK(sum.messages > networks * 50);
    CHECK(sum.limited > networks * 20);
    CHECK(sum.healed > networks * 8 / 10);
    CHECK(sum.cuts > networks / 4);
    CHECK(sum.blackHoles > networks / 4);
    CHECK(sum.nicNews > networks / 4);
    CHECK(sum.nicSilences > networks / 10);
    CHECK(sum.pauses > networks / 10);
    CHECK(sum.firewalls > networks / 100);
    CHECK(sum.kills > networks / 20);
    CHECK(sum.crossings > networks / 20);
    CHECK(sum.reconnects > networks);
    CHECK(sum.duplicateAttempts > networks / 100);
    CHECK(sum.offRoute > networks / 50);
    CHECK(sum.suspicions > networks / 4);
    CHECK(sum.tainted > networks / 50);
    CHECK(sum.proved > networks / 2);
    CHECK(sum.needed > networks / 10);
    CHECK(sum.longHoldDowns > networks / 20);
    CHECK(sum.standbyTakeovers > networks / 20);
    CHECK(sum.classMoves > networks / 50);
    CHECK(sum.sharedMemory > networks / 50);
    CHECK(sum.datagrams > networks / 50);
    CHECK(sum.beside > networks / 50);
    CHECK(sum.silentDatagrams > networks / 50);
    CHECK(sum.datagramsAgain > networks / 50);
  }
}

TEST(failover_simulation_is_decided_by_its_seed) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK_EQ(
        simulateFailover(seed).traceHash, simulateFailover(seed).traceHash);
  }
  CHECK(simulateFailover(1).traceHash != simulateFailover(2).traceHash);
}

} // namespace
} // namespace resilient::test
