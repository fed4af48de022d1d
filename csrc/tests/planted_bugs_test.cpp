// Shows that the simulations find mistakes: each of a list is switched on, and
// it must be found within a number of schedules. Only in a build with
// RESILIENT_PLANTED_BUGS (make VARIANT=planted); the others have no trace of
// the mistakes, so there is nothing to test.
#ifdef RESILIENT_PLANTED_BUGS

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <new>

#include "base/planted_bugs.h"
#include "tests/check.h"
#include "tests/failover_simulation.h"
#include "tests/relay_simulation.h"
#include "tests/simulation.h"

namespace resilient::test {
namespace {

// Written by the child, read by the parent, also if the child has crashed.
struct Report {
  std::atomic<uint64_t> seed{0};
  char error[200] = "";
};

// Some mistakes show once in several hundred schedules only, and a change of
// the code moves the seeds at which they do.
constexpr uint64_t kSchedules = 3000;
constexpr uint64_t kSchedulesWithoutMistake = 500;

using Simulate = std::string (*)(uint64_t seed); // returns the error

std::string channels(uint64_t seed) {
  return simulate(seed).error;
}

std::string failover(uint64_t seed) {
  return simulateFailover(seed).error;
}

std::string relays(uint64_t seed) {
  return simulateRelays(seed).error;
}

// In a process of its own: some of the mistakes write to memory that was given
// back, so a crash counts as found, and must not reach the other tests.
void mustBeFound(
    const char* name,
    bool PlantedBugs::* bug,
    Simulate simulation) {
  void* shared = mmap(
      nullptr,
      sizeof(Report),
      PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_ANONYMOUS,
      -1,
      0);
  CHECK(shared != MAP_FAILED);
  auto* report = new (shared) Report;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (bug != nullptr) {
      plantedBugs.*bug = true;
    }
    const uint64_t most = bug ? kSchedules : kSchedulesWithoutMistake;
    for (uint64_t seed = 1; seed <= most; ++seed) {
      report->seed = seed;
      alarm(60); // a mistake may also make it run for ever
      const std::string error = simulation(seed);
      if (!error.empty()) {
        std::strncpy(report->error, error.c_str(), sizeof(report->error) - 1);
        _exit(1);
      }
    }
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  const uint64_t seed = report->seed;
  std::string how = report->error;
  if (WIFSIGNALED(status)) {
    how = std::string("signal ") + strsignal(WTERMSIG(status));
  }
  munmap(shared, sizeof(Report));
  if (bug == nullptr) {
    // The switches alone must change nothing.
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    return;
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    throw Failure(
        std::string(name) + " was not found in " + std::to_string(kSchedules) +
        " schedules");
  }
  std::cout << name << ": found at seed " << seed << ": " << how << "\n";
}

TEST(planted_bugs_none_is_none) {
  mustBeFound("none", nullptr, channels);
  mustBeFound("none", nullptr, failover);
  mustBeFound("none", nullptr, relays);
}

#define PLANTED(simulation, name)                       \
  TEST(planted_bugs_##name) {                           \
    mustBeFound(#name, &PlantedBugs::name, simulation); \
  }

PLANTED(channels, noDuplicateCheck)
PLANTED(channels, acknowledgeEarly)
PLANTED(channels, noRequeue)
PLANTED(channels, noDetach)
PLANTED(channels, countRepeats)
PLANTED(channels, ignoreCredit)
PLANTED(channels, forgetCredit)
PLANTED(channels, matchByArrival)
PLANTED(channels, keepDestination)
PLANTED(channels, sendEarly)
PLANTED(channels, copyToPinned)
PLANTED(channels, deliverPinned)
PLANTED(channels, endPinsEarly)
PLANTED(channels, copyReferred)
PLANTED(channels, copyTooLittle)
PLANTED(channels, forgetSettled)
PLANTED(channels, keepToKindOfPath)

PLANTED(failover, noProbation)
PLANTED(failover, noHoldDown)
PLANTED(failover, noReconnect)
PLANTED(failover, neverSuspect)
PLANTED(failover, trustDatagrams)
PLANTED(failover, suspectAll)
PLANTED(failover, forgetTaint)
PLANTED(failover, neverOffRoute)
PLANTED(failover, ignoreNicDown)
PLANTED(failover, reserveWhenNothingWorks)
PLANTED(failover, standbyFirstRouteOnly)
PLANTED(failover, keepClassOnDeadNic)

PLANTED(relays, relayAcknowledges)
PLANTED(relays, acknowledgeOverGaps)
PLANTED(relays, noRelayRequeue)
PLANTED(relays, anyFlowNumber)
PLANTED(relays, neverSilentRelay)
PLANTED(relays, forgetRelayLimit)
PLANTED(relays, uncountedForwards)
PLANTED(relays, keepRelayCredit)
PLANTED(relays, neverTellPassed)
PLANTED(relays, ignoreBusy)

} // namespace
} // namespace resilient::test

#endif // RESILIENT_PLANTED_BUGS
