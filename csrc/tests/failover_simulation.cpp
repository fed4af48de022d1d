#include "tests/failover_simulation.h"

#include <algorithm>
#include <initializer_list>

#include "tests/failover_process.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kEventLimit = 3'000'000;

enum class Scenario {
  kAnything, // all kinds of faults; later all is well again
  kOneRouteWorks, // all kinds, on the other routes: traffic must go on
  kOnlyPauses, // of processes: nothing may be doubted
  kKill, // of a process, after some faults: the other one must notice
  kCrossing, // at last only a pair of NICs of different routes works
};

class Simulation {
 public:
  Simulation(
      uint64_t seed,
      const std::function<void(const std::string&)>& trace)
      : chance_(mixBits(seed ^ 0xfa110e)),
        world_(
            seed,
            oneOf<Nanos>(
                {std::chrono::microseconds(100),
                 milliseconds(1),
                 milliseconds(5),
                 milliseconds(20)}),
            oneOf<uint64_t>({20'000'000, 100'000'000})) {
    world_.trace = trace;
  }

  FailoverSimulationResult run() {
    plan();
    runUntil(healAt_);
    if (ok()) {
      after();
    }
    world_.result.events = world_.net.events();
    return world_.result;
  }

 private:
  // --- chance
  uint64_t below(uint64_t n) {
    return chance_.below(n);
  }
  Nanos between(Nanos min, Nanos max) {
    return min +
        Nanos(static_cast<int64_t>(
            below(static_cast<uint64_t>((max - min).count()) + 1)));
  }
  template <typename T>
  T oneOf(std::initializer_list<T> list) {
    return list.begin()[below(list.size())];
  }

  bool ok() const {
    return world_.result.error.empty();
  }
  void runUntil(TimePoint when) {
    while (ok() && net().now() < when && net().step()) {
      if (net().events() > kEventLimit) {
        world_.fail("it does not come to rest");
      }
    }
  }
  SimulatedTcp& net() {
    return world_.net;
  }
  FailoverProcess& process(int side) {
    return *processes_[static_cast<size_t>(side)];
  }
  void at(TimePoint when, std::function<void()> what) {
    net().at(when, std::move(what));
  }
  size_t routes() const {
    return world_.setup.nics;
  }

  void plan();
  void planSetup();
  void planTraffic();
  void planFaults(TimePoint from, TimePoint until, size_t count);
  void planFault(TimePoint when, Nanos longest);
  void planOtherPath(TimePoint when, Nanos lasts);
  void planPause(TimePoint when, Nanos lasts);
  void planFirewall(TimePoint when, size_t route, Nanos lasts);
  void flap(size_t route, int side, int times, TimePoint when);
  void cutOne(size_t route);
  void nicDown(size_t route, int side, bool news, Nanos lasts);
  void toggleOtherPath(std::optional<size_t> route, bool use);
  void traffic();

  void after();
  void heal();
  void awaitHealing();
  void awaitDeath();
  void cross();
  Nanos pauseLimit() const;
  Nanos healLimit() const;
  Nanos deathLimit() const;
  Nanos crossLimit() const;

  Prng chance_;
  FailoverWorld world_;
  Scenario scenario_ = Scenario::kAnything;
  size_t works_ = SIZE_MAX; // the route without faults
  std::vector<std::unique_ptr<FailoverProcess>> processes_;
  TimePoint healAt_{};
  TimePoint trafficUntil_ = kNever;
  Nanos messagePause_{};
  uint64_t maxBytes_ = 0;
  Nanos longestFault_{};
  TimePoint pausesFrom_{};
};

// --- the plan

void Simulation::planSetup() {
  FailoverSetup& s = world_.setup;
  const uint64_t kind = below(10);
  scenario_ = kind < 4 ? Scenario::kAnything
      : kind < 7       ? Scenario::kOneRouteWorks
      : kind == 7      ? Scenario::kOnlyPauses
      : kind == 8      ? Scenario::kKill
                       : Scenario::kCrossing;
  const bool several =
      scenario_ == Scenario::kOneRouteWorks || scenario_ == Scenario::kCrossing;
  s.nics = several ? oneOf<size_t>({2, 2, 3}) : oneOf<size_t>({1, 2, 2, 3});
  s.lanes =
      s.nics == 3 ? oneOf<size_t>({1, 1, 2}) : oneOf<size_t>({1, 1, 2, 4});
  s.chunkBytes = oneOf<uint32_t>({4 << 10, 16 << 10});
  s.besideUpTo = oneOf<uint64_t>({0, 8 << 10, 64 << 10, UINT64_MAX});
  s.config.suspectAfter =
      oneOf<Nanos>({milliseconds(30), milliseconds(50), milliseconds(100)});
  s.config.stallTimeout = oneOf<Nanos>({seconds(2), seconds(5)});
  s.config.reconnectMax = oneOf<Nanos>({milliseconds(500), seconds(2)});
  s.config.holdDownMax = oneOf<Nanos>({milliseconds(600), seconds(3)});
  s.config.handshakeTimeout = oneOf<Nanos>({seconds(2), seconds(4)});
  for (size_t nic = 0; nic < s.nics; ++nic) {
    s.policy.nics.push_back("eth" + std::to_string(nic));
  }
  s.policy.standby = below(3) == 0;
  if (below(3) == 0) {
    for (std::string& nic : s.policy.preferred) {
      if (below(2) == 0) {
        nic = s.policy.nics[below(s.nics)];
      }
    }
  }
  if (scenario_ == Scenario::kOneRouteWorks) {
    works_ = below(s.nics);
  }
}

void Simulation::plan() {
  planSetup();
  for (const int side : {0, 1}) {
    processes_.push_back(std::make_unique<FailoverProcess>(world_, side));
  }
  process(0).setPeer(process(1));
  process(1).setPeer(process(0));
  const TimePoint start = net().now();
  for (const int side : {0, 1}) {
    at(start + between(Nanos(0), milliseconds(30)),
       [this, side] { process(side).begin(); });
  }
  planTraffic();
  // Connections first, so that faults have something to break.
  const TimePoint from = start + milliseconds(700);
  healAt_ = from + between(seconds(1), seconds(5));
  // Before, both sides connect at once, and may replace what they have made.
  at(from, [this] { world_.onlyPauses = scenario_ == Scenario::kOnlyPauses; });
  // The promises of these two hold with datagrams, too.
  const bool isChecked = scenario_ == Scenario::kOneRouteWorks ||
      scenario_ == Scenario::kOnlyPauses;
  if (isChecked && below(2) == 0) {
    for (size_t route = 0; route < routes(); ++route) {
      at(from - milliseconds(100),
         [this, route] { toggleOtherPath(route, true); });
    }
  }
  planFaults(from, healAt_, 1 + below(6));
}

void Simulation::planTraffic() {
  messagePause_ =
      oneOf<Nanos>({milliseconds(4), milliseconds(15), milliseconds(60)});
  maxBytes_ = oneOf<uint64_t>({300, 5'000, 60'000});
  at(net().now() + milliseconds(500), [this] {
    if (scenario_ == Scenario::kOneRouteWorks) {
      process(0).limitDelivery(pauseLimit());
      process(1).limitDelivery(pauseLimit());
    }
    traffic();
  });
}

void Simulation::traffic() {
  if (net().now() >= trafficUntil_) {
    return;
  }
  for (const int side : {0, 1}) {
    if (below(4) != 0) {
      process(side).send(
          1 + below(maxBytes_),
          static_cast<TrafficClass>(below(kTrafficClassCount)));
    }
  }
  at(net().now() + between(messagePause_ / 2, messagePause_ * 3 / 2),
     [this] { traffic(); });
}

void Simulation::planFaults(TimePoint from, TimePoint until, size_t count) {
  const Nanos longest =
      oneOf<Nanos>({milliseconds(300), seconds(1), seconds(3)});
  longestFault_ = longest;
  for (size_t i = 0; i < count; ++i) {
    const TimePoint when = from + between(Nanos(0), until - from);
    at(when, [this, when, longest] { planFault(when, longest); });
  }
}

void Simulation::planFault(TimePoint when, Nanos longest) {
  const Nanos lasts = between(milliseconds(20), longest);
  if (scenario_ == Scenario::kOnlyPauses) {
    planPause(when, lasts);
    return;
  }
  size_t route = below(routes());
  if (route == works_) {
    route = (route + 1) % routes();
  }
  const auto side = static_cast<int>(below(2));
  const bool anything = works_ == SIZE_MAX;
  switch (below(anything ? 12 : 8)) {
    case 0:
      cutOne(route);
      break;
    case 1:
    case 2: // nothing passes, one way or both
      ++world_.result.blackHoles;
      net().block(side, route, route, when + lasts);
      if (below(2) == 0) {
        net().block(1 - side, route, route, when + lasts);
      }
      break;
    case 3:
    case 4:
      nicDown(route, side, /*news=*/true, lasts);
      break;
    case 5:
      nicDown(route, side, /*news=*/false, lasts);
      break;
    case 6:
      flap(route, side, 3 + static_cast<int>(below(6)), when);
      break;
    case 7: { // one connection too many, for a while
      const size_t count = 1 + below(world_.setup.lanes);
      for (const int each : {0, 1}) {
        at(when + between(Nanos(0), milliseconds(20)),
           [=, this] { process(each).setWanted(route, count); });
      }
      break;
    }
    case 8:
      planPause(when, lasts);
      break;
    case 9: // everywhere
      ++world_.result.blackHoles;
      for (size_t r = 0; r < routes(); ++r) {
        const TimePoint until = when + lasts;
        net().block(side, r, r, until);
        net().block(1 - side, r, r, until);
      }
      break;
    case 10:
      planOtherPath(when, lasts);
      break;
    default:
      planFirewall(when, route, lasts);
  }
}

void Simulation::cutOne(size_t route) {
  const size_t c = route + routes() * below(world_.setup.lanes);
  ++world_.result.cuts;
  process(static_cast<int>(below(2))).breakConnection(c);
}

void Simulation::nicDown(size_t route, int side, bool news, Nanos lasts) {
  ++(news ? world_.result.nicNews : world_.result.nicSilences);
  net().setNic(side, route, false);
  if (news) {
    process(side).onNicNews(route, false);
  }
  at(net().now() + lasts, [this, route, side, news] {
    net().setNic(side, route, true);
    if (news) {
      process(side).onNicNews(route, true);
    }
  });
}

// Lost again as soon as it has come back.
void Simulation::flap(size_t route, int side, int times, TimePoint when) {
  if (times == 0 || when >= healAt_) {
    return;
  }
  if (below(2) == 0) {
    cutOne(route);
  } else {
    nicDown(
        route,
        side,
        below(2) == 0,
        between(milliseconds(10), milliseconds(100)));
  }
  const TimePoint next = when + between(milliseconds(150), milliseconds(900));
  at(next,
     [this, route, side, times, next] { flap(route, side, times - 1, next); });
}

void Simulation::planPause(TimePoint when, Nanos lasts) {
  if (scenario_ == Scenario::kOnlyPauses) {
    // For longer, or one after the other, and a new connection may be tried.
    if (when < pausesFrom_) {
      return;
    }
    lasts = std::min<Nanos>(
        lasts, world_.setup.config.stallTimeout - milliseconds(500));
    pausesFrom_ = when + lasts + milliseconds(300);
  }
  ++world_.result.pauses;
  process(static_cast<int>(below(2))).pause(when + lasts);
}

void Simulation::planOtherPath(TimePoint when, Nanos lasts) {
  const auto route =
      below(2) == 0 ? std::nullopt : std::optional(below(routes()));
  toggleOtherPath(route, true);
  at(when + lasts, [this, route] { toggleOtherPath(route, false); });
}

void Simulation::toggleOtherPath(std::optional<size_t> route, bool use) {
  if (use) {
    const size_t socket = net().connectAtOnce(route.value_or(kInsideHost));
    process(0).addOtherPath(route, socket);
    process(1).addOtherPath(route, socket);
  } else {
    process(static_cast<int>(below(2))).removeOtherPath(route);
  }
}

// Something refuses connections on one route, nothing passes on the others: no
// proof that the process is gone, unless there is no other route.
void Simulation::planFirewall(TimePoint when, size_t route, Nanos lasts) {
  for (size_t r = 0; r < routes(); ++r) {
    if (routes() == 1 || scenario_ == Scenario::kKill ||
        !process(0).failover().carried(r) ||
        !process(1).failover().carried(r)) {
      return; // a way by which it was never reached proves nothing
    }
  }
  ++world_.result.firewalls;
  net().refuse(route, route, when + lasts);
  // Longer than the refusals, so that their count starts anew.
  const TimePoint until = when + lasts + milliseconds(100);
  for (size_t r = 0; r < routes(); ++r) {
    if (r != route) {
      net().block(0, r, r, until);
      net().block(1, r, r, until);
    }
  }
  for (size_t lane = 0; lane < world_.setup.lanes; ++lane) {
    process(0).breakConnection(route + routes() * lane);
    process(1).breakConnection(route + routes() * lane);
  }
}

// --- the end

// Waits, detection and answers together; see Failover and PathHealth. Patience
// grows to 4 times suspect_after_s, or to 4 times the round trip with its
// variance. The next route may fail, too. What was held up then takes its time;
// see messageArrived().
Nanos Simulation::pauseLimit() const {
  const Nanos roundTrip = world_.net.roundTrip();
  const Nanos detect =
      4 * std::max(world_.setup.config.suspectAfter, roundTrip * 5 / 4) +
      2 * roundTrip + 2 * kCloseLook;
  return static_cast<int>(routes()) * (detect + kIdleLook) + 4 * roundTrip +
      milliseconds(50);
}

// A silent connection stalls; an attempt under way ends at its time-out; after
// the pause another one succeeds and proves itself.
Nanos Simulation::healLimit() const {
  const FailoverConfig& c = world_.setup.config;
  return c.stallTimeout + 2 * (c.handshakeTimeout + c.reconnectMax) +
      c.holdDownMax + c.heartbeat + longestFault_ + seconds(2);
}

// The kernel's answer comes at the next retransmission, which waits as long as
// the outage before it was.
Nanos Simulation::deathLimit() const {
  const FailoverConfig& c = world_.setup.config;
  return c.stallTimeout + 2 * c.handshakeTimeout + 8 * c.reconnectMax +
      2 * longestFault_ + c.heartbeat + seconds(2);
}

// All pairs are tried in turn, at every second attempt.
Nanos Simulation::crossLimit() const {
  const FailoverConfig& c = world_.setup.config;
  const auto attempts = static_cast<int>(2 * routes() * routes());
  return c.stallTimeout + c.handshakeTimeout + longestFault_ +
      attempts *
      (std::max<Nanos>(c.reconnectMax, milliseconds(600)) +
       world_.net.roundTrip()) +
      seconds(2);
}

void Simulation::after() {
  if (scenario_ == Scenario::kKill) {
    heal();
    awaitDeath();
    return;
  }
  if (scenario_ == Scenario::kCrossing) {
    cross();
    if (!ok()) {
      return;
    }
  }
  heal();
  awaitHealing();
}

void Simulation::heal() {
  healAt_ = net().now();
  world_.note(2, "all is well from here", 0);
  net().heal();
  for (const int side : {0, 1}) {
    for (size_t r = 0; r < routes(); ++r) {
      process(side).onNicNews(r, true);
      process(side).setWanted(r, world_.setup.lanes);
    }
  }
}

void Simulation::awaitHealing() {
  const TimePoint begin = net().now();
  const TimePoint limit = begin + healLimit();
  // Traffic must also flow on what has come back.
  trafficUntil_ = begin + milliseconds(400);
  std::string missing;
  do {
    runUntil(net().now() + milliseconds(50));
    missing = process(0).notHealed();
    if (missing.empty()) {
      missing = process(1).notHealed();
    }
    if (ok() && missing.empty() && net().now() > trafficUntil_) {
      ++world_.result.healed;
      world_.result.worstHealing =
          toSeconds(net().now() - begin) / toSeconds(healLimit());
      return;
    }
  } while (ok() && net().now() < limit);
  world_.fail("not healed after " + durationText(healLimit()) + ": " + missing);
}

void Simulation::awaitDeath() {
  const auto victim = static_cast<int>(below(2));
  world_.expectDeath = true;
  process(victim).kill();
  world_.note(2, "killed", static_cast<uint64_t>(victim));
  ++world_.result.kills;
  const TimePoint limit = net().now() + deathLimit();
  while (ok() && !process(1 - victim).dead() && net().now() < limit) {
    runUntil(net().now() + milliseconds(50));
  }
  if (!process(1 - victim).dead()) {
    world_.fail("a killed process is not noticed");
  }
}

// Only NIC a of process 0 and NIC b of process 1 still work.
void Simulation::cross() {
  const size_t a = below(routes());
  const size_t b = (a + 1 + below(routes() - 1)) % routes();
  ++world_.result.crossings;
  net().heal();
  const bool news = below(2) == 0;
  for (size_t nic = 0; nic < routes(); ++nic) {
    for (const int side : {0, 1}) {
      const bool works = nic == (side == 0 ? a : b);
      // A NIC that an earlier fault brings back stays blocked.
      for (size_t to = 0; to < routes() && !works; ++to) {
        net().block(0, side == 0 ? nic : to, side == 0 ? to : nic, kNever);
        net().block(1, side == 1 ? nic : to, side == 1 ? to : nic, kNever);
      }
      if (news) {
        process(side).onNicNews(nic, works);
      }
    }
  }
  world_.note(2, "only a pair of different routes works", a, b);
  const TimePoint limit = net().now() + crossLimit();
  const uint64_t before[2] = {process(0).received(), process(1).received()};
  const auto flows = [&] {
    return process(0).received() > before[0] + 3 &&
        process(1).received() > before[1] + 3;
  };
  while (ok() && !flows() && net().now() < limit) {
    runUntil(net().now() + milliseconds(50));
  }
  if (!flows()) {
    world_.fail("nothing flows although a pair of NICs works");
  }
}

} // namespace

FailoverSimulationResult simulateFailover(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace) {
  return Simulation(seed, trace).run();
}

} // namespace resilient::test
