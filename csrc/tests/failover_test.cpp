#include "failover/failover.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using namespace std::chrono_literals;

// How attempts to connect end.
enum class Way { kConnects, kRefuses, kSilent, kSaysNo };

// A link whose network is this script, in virtual time. It keeps the promises
// of FailoverHost, calls onTimer() as the connector does, and checks what the
// Failover promises after every step.
class Bed final : public FailoverHost {
 public:
  struct Attempt {
    TimePoint at;
    size_t connection;
    AttemptPlan plan;
  };
  // One connection, as network and channel see it.
  struct Wire {
    bool open = false;
    bool works = true; // answers
    bool sends = true; // has something to send whenever the link is busy
    bool suspect = false, proving = false; // as the host was told
    ConnectionFacts last; // while nothing flows
    TimePoint silentSince = kNever;
    TimePoint provingSince = kNever;
    uint64_t generation = 0; // of connections
    bool attempting = false;
    uint64_t attempt = 0; // their number
    std::optional<TimePoint> standsSince; // the attempt's connection
    int pings = 0;
    Way way = Way::kConnects;
  };
  // A path beside the connections of a route.
  struct Beside {
    bool works = true, sends = true; // as of a Wire
    bool silent = false; // as the host was told
    TimePoint answeredAt{}; // before it broke
    TimePoint owesSince = kNever;
  };

  explicit Bed(size_t connections, FailoverConfig config = {})
      : config_(config), failover(config, *this), wires(connections) {
    failover.addConnections(connections);
  }

  // All connections up, after the first moment.
  Bed& up(size_t routes, RolePolicy policy = {}) {
    failover.setRoutes(routes, std::move(policy));
    failover.setNeeded(true, now);
    run(10ms);
    CHECK_EQ(failover.live(), wires.size());
    return *this;
  }

  // --- time
  void at(Nanos in, std::function<void()> what) {
    events_.emplace(now + in, std::move(what));
  }
  void run(Nanos time) {
    const TimePoint end = now + time;
    for (;;) {
      const TimePoint event = events_.empty() ? kNever : events_.begin()->first;
      const TimePoint next = std::min(event, armed_);
      if (next > end) {
        now = end;
        return;
      }
      now = std::max(now, next);
      if (event <= armed_) {
        const auto what = std::move(events_.begin()->second);
        events_.erase(events_.begin());
        what();
      } else {
        timer();
      }
      check();
    }
  }
  void until(const std::function<bool()>& met, Nanos limit = 100s) {
    const TimePoint end = now + limit;
    while (!met() && now < end) {
      run(1ms);
    }
    CHECK(met());
  }
  uint64_t timers() const {
    return timers_;
  }

  // --- the network
  // It swallows everything, silently.
  void breakWire(size_t c) {
    Wire& w = wires[c];
    w.last = facts(c);
    w.works = false;
    w.silentSince = now;
  }
  void breakRoute(size_t route) {
    for (size_t c = route; c < wires.size(); c += failover.routes()) {
      breakWire(c);
    }
    Beside& b = beside[route];
    b.works = false;
    b.answeredAt = now;
    b.owesSince = flows(b) ? now : kNever;
  }
  // Frames on their way arrive now, and are answered.
  void heal(size_t c) {
    Wire& w = wires[c];
    w.works = true;
    w.silentSince = kNever;
    w.last.heardAt = w.last.answeredUpTo = now;
    w.last.pingsAnswered += w.proving ? 1 : 0;
  }
  // The transport reports an error.
  void lose(size_t c) {
    close(c);
    failover.onClosed(c, roundTrip, false, now);
    check();
  }
  void connectFrom(size_t c, bool ours, const AttemptPlan& plan) {
    Wire& w = wires[c];
    if (w.open) {
      close(c);
      failover.onClosed(c, roundTrip, false, now);
    }
    ++w.generation;
    w.attempting = false;
    w.standsSince.reset();
    w.open = true;
    w.works = true;
    w.suspect = w.proving = false;
    w.last = {};
    w.last.heardAt = w.last.answeredUpTo = now;
    failover.onConnected(c, now, !plan.offRoute, ours, true);
    check();
  }
  // The attempts for this connection since the last call.
  std::vector<Attempt> takeAttempts(size_t c) {
    std::vector<Attempt> found;
    for (const Attempt& a : attempts) {
      if (a.connection == c) {
        found.push_back(a);
      }
    }
    std::erase_if(
        attempts, [c](const Attempt& a) { return a.connection == c; });
    return found;
  }

  // --- FailoverHost
  ConnectionFacts facts(size_t c) const override {
    const Wire& w = wires[c];
    CHECK(w.open);
    ConnectionFacts f = w.last;
    f.roundTrip = roundTrip;
    if (flows(c) && w.works) {
      f.heardAt = f.answeredUpTo = f.waitingSince = now;
    } else if (flows(c)) {
      f.waitingSince = w.silentSince;
    }
    return f;
  }
  PathEvidence evidence(size_t c) const override {
    ++evidenceAsked;
    PathEvidence e;
    e.progress =
        static_cast<uint64_t>(facts(c).heardAt.time_since_epoch().count());
    e.kernelOwes = !wires[c].works;
    e.roundTrip = roundTrip;
    return e;
  }
  std::optional<RoutePathFacts> routePath(size_t route) const override {
    if (route >= beside.size()) {
      return {};
    }
    const Beside& b = beside[route];
    RoutePathFacts f;
    f.silent = b.silent;
    f.roundTrip = f.evidence.roundTrip = roundTrip;
    const bool answers = b.works && flows(b);
    f.heardAt = f.answeredUpTo = answers ? now : b.answeredAt;
    f.evidence.owes = answers || b.owesSince != kNever;
    f.evidence.owesSince = answers ? now
        : f.evidence.owes          ? b.owesSince
                                   : TimePoint{};
    f.evidence.progress =
        static_cast<uint64_t>(f.heardAt.time_since_epoch().count());
    return f;
  }
  void askRoutePath(size_t route) override {
    ++asked;
    Beside& b = beside[route];
    b.owesSince = std::min(b.owesSince, now);
    at(roundTrip, [this, route] {
      Beside& b = beside[route];
      if (b.works) {
        b.answeredAt = now;
        b.owesSince = kNever;
        b.silent = false;
      }
    });
  }
  void doubtRoutePath(size_t route) override {
    CHECK(!beside[route].silent);
    beside[route].silent = true;
    askRoutePath(route);
  }
  bool busy() const override {
    return sending;
  }
  void wakeAt(TimePoint when) override {
    ++asked;
    armed_ = std::min(armed_, when);
  }
  void attempt(size_t c, const AttemptPlan& plan) override {
    ++asked;
    Wire& w = wires[c];
    CHECK(!w.attempting);
    w.attempting = true;
    attempts.push_back({now, c, plan});
    const Way way = plan.offRoute ? offRouteWay : w.way;
    const uint64_t number = ++w.attempt;
    const Nanos after =
        way == Way::kSilent ? std::min(plan.timeout, plan.synTimeout) : 1ms;
    at(after, [this, c, plan, way, number] {
      if (wires[c].attempt != number || !wires[c].attempting) {
        return;
      }
      if (way == Way::kConnects) {
        connectFrom(c, true, plan);
        return;
      }
      wires[c].attempting = false;
      AttemptFailure how;
      how.refused = way == Way::kRefuses;
      how.answered = way == Way::kSaysNo;
      failover.onAttemptFailed(c, how, now);
    });
  }
  void giveUpAttempt(size_t c) override {
    ++asked;
    CHECK(wires[c].attempting);
    wires[c].attempting = false;
    wires[c].standsSince.reset();
  }
  std::optional<TimePoint> attemptConnectedAt(size_t c) const override {
    return wires[c].standsSince;
  }
  size_t otherPairs(size_t) const override {
    return pairs;
  }
  void ping(size_t c) override {
    ++asked;
    ++wires[c].pings;
    answerLater(c);
  }
  void putOnProbation(size_t c) override {
    ++asked;
    CHECK(!wires[c].proving);
    wires[c].proving = true;
    wires[c].provingSince = now;
    wires[c].last.pingsAnswered = 0;
    answerLater(c); // the channel pings at once
  }
  void trust(size_t c) override {
    ++asked;
    CHECK(wires[c].proving);
    wires[c].proving = false;
  }
  void setSuspect(size_t c, bool suspect) override {
    ++asked;
    CHECK_EQ(wires[c].suspect, !suspect);
    wires[c].suspect = suspect;
  }
  void reset(size_t c, const std::string& why) override {
    ++asked;
    CHECK(wires[c].open);
    resets.push_back(std::to_string(c) + ": " + why);
    close(c);
    failover.onClosed(c, roundTrip, false, now);
  }
  void tellLost(const std::vector<size_t>& lost, const std::string& nic)
      override {
    ++asked;
    for (const size_t c : lost) {
      told.push_back(nic + " " + std::to_string(c));
    }
  }
  void rolesAssigned(const Roles& assigned) override {
    ++asked;
    CHECK_EQ(assigned.connections.size(), wires.size());
    roles = assigned;
  }
  void onPeerGone(const AttemptFailure&) override {
    ++asked;
    ++gone;
    failover.end();
  }
  void note(size_t, ConnectionNote) override {}

 private:
  // Declared first: the Failover takes a copy when it is made.
  const FailoverConfig config_;

 public:
  TimePoint now{1000s};
  bool sending = false; // the link has data for all connections
  Nanos roundTrip = 1ms;
  size_t pairs = 0;
  Way offRouteWay = Way::kConnects;
  Failover failover;
  std::vector<Wire> wires;
  std::vector<Beside> beside; // by route
  std::vector<Attempt> attempts;
  std::vector<std::string> resets, told;
  Roles roles;
  int gone = 0;
  uint64_t asked = 0; // calls that ask something of the host
  mutable uint64_t evidenceAsked = 0;

 private:
  bool flows(size_t c) const {
    const Wire& w = wires[c];
    return sending && w.sends && !w.proving;
  }
  bool flows(const Beside& b) const {
    return sending && b.sends && !b.silent;
  }
  void close(size_t c) {
    ++wires[c].generation;
    wires[c].open = wires[c].suspect = wires[c].proving = false;
  }
  void answerLater(size_t c) {
    const uint64_t generation = wires[c].generation;
    const TimePoint sent = now;
    at(roundTrip, [this, c, generation, sent] {
      Wire& w = wires[c];
      if (w.open && w.works && w.generation == generation) {
        w.last.heardAt = now;
        w.last.answeredUpTo = std::max(w.last.answeredUpTo, sent);
        ++w.last.pingsAnswered;
      }
    });
  }
  void timer() {
    armed_ = kNever;
    ++timers_;
    // A timer that never ends would stop the time.
    timersNow_ = timerAt_ == now ? timersNow_ + 1 : 0;
    timerAt_ = now;
    CHECK(timersNow_ < 20);
    (void)failover.onTimer(now);
    armed_ = std::min(armed_, failover.deadline());
  }
  void check() const {
    CHECK(armed_ <= failover.deadline());
    size_t live = 0;
    for (size_t c = 0; c < wires.size(); ++c) {
      const PathState& s = failover.state(c);
      live += wires[c].open;
      CHECK_EQ(s.connected, wires[c].open);
      CHECK_EQ(s.suspect(), wires[c].suspect);
      CHECK_EQ(s.connected && s.proving(), wires[c].proving);
    }
    CHECK_EQ(failover.live(), live);
  }

  std::multimap<TimePoint, std::function<void()>> events_;
  TimePoint armed_ = kNever;
  TimePoint timerAt_{};
  int timersNow_ = 0;
  uint64_t timers_ = 0;
};

std::vector<int64_t> pausesMs(const std::vector<Bed::Attempt>& attempts) {
  std::vector<int64_t> pauses;
  for (size_t i = 1; i < attempts.size(); ++i) {
    const Nanos pause = attempts[i].at - attempts[i - 1].at;
    pauses.push_back(pause / 1ms);
  }
  return pauses;
}

RolePolicy twoNics() {
  RolePolicy policy;
  policy.nics = {"eth0", "eth1"};
  return policy;
}

// --- connecting

TEST(failover_waits_longer_after_every_failed_attempt) {
  Bed bed(1);
  bed.wires[0].way = Way::kSaysNo;
  bed.failover.setRoutes(1, {});
  bed.failover.setNeeded(true, bed.now);
  bed.run(9s);
  CHECK_EQ(
      pausesMs(bed.takeAttempts(0)),
      std::vector<int64_t>({100, 200, 400, 800, 1600, 2000, 2000}));
  bed.failover.retryAll(bed.now); // without the rest of the pause
  bed.run(350ms);
  CHECK_EQ(pausesMs(bed.takeAttempts(0)), std::vector<int64_t>({100, 200}));
}

TEST(failover_connects_only_if_needed_and_once_it_knows_the_way) {
  Bed bed(2);
  bed.failover.setNeeded(true, bed.now);
  bed.run(10s);
  CHECK(bed.attempts.empty());
  bed.failover.setRoutes(2, {});
  bed.failover.setNeeded(false, bed.now);
  bed.failover.connectAll(bed.now);
  bed.run(10s);
  CHECK(bed.attempts.empty());
  bed.failover.setWanted(1, 0);
  bed.failover.setNeeded(true, bed.now);
  bed.run(10s);
  CHECK_EQ(bed.attempts.size(), 1u);
  CHECK(bed.failover.state(0).connected);
  CHECK_EQ(bed.failover.stateName(1, 0), "unused");
}

// The network may heal at any moment; a SYN into a black hole is given up soon.
TEST(failover_tries_a_silent_route_often_for_an_eighth_of_the_time) {
  Bed bed(2);
  bed.up(2);
  bed.takeAttempts(0);
  bed.wires[0].way = Way::kSilent;
  bed.lose(0);
  bed.run(200ms);
  for (const int64_t pause : pausesMs(bed.takeAttempts(0))) {
    CHECK(pause >= 40 && pause <= 42);
  }
  bed.run(20s);
  bed.takeAttempts(0);
  bed.run(5s);
  for (const int64_t pause : pausesMs(bed.takeAttempts(0))) {
    CHECK(pause >= 600 && pause <= 602);
  }
}

TEST(failover_second_initiator_leaves_the_first_attempt_to_the_peer) {
  for (const bool preferred : {true, false}) {
    FailoverConfig config;
    config.preferredInitiator = preferred;
    Bed bed(2, config);
    bed.up(2);
    bed.takeAttempts(0);
    const TimePoint lost = bed.now;
    bed.lose(0);
    bed.run(100ms);
    const auto attempts = bed.takeAttempts(0);
    CHECK_EQ(attempts.size(), 1u);
    CHECK_EQ((attempts[0].at - lost) / 1ms, preferred ? 0 : 60);
  }
}

TEST(failover_attempt_of_the_preferred_initiator_goes_first) {
  for (const bool preferred : {true, false}) {
    FailoverConfig config;
    config.preferredInitiator = preferred;
    Bed bed(1, config);
    bed.wires[0].way = Way::kSilent;
    bed.failover.setRoutes(1, {});
    bed.failover.setNeeded(true, bed.now);
    // Its TCP connection does not stand: our SYN may be lost. With both, each
    // end would replace the other's: ours is given up for the caller.
    CHECK(bed.failover.reserve(0, bed.now));
    CHECK_EQ(bed.wires[0].attempting, !preferred);
    bed.failover.onCallerLost(0, bed.now);
    CHECK(bed.wires[0].attempting);
    bed.wires[0].standsSince = bed.now;
    CHECK_EQ(bed.failover.reserve(0, bed.now), !preferred);
    bed.run(999ms);
    CHECK_EQ(bed.failover.reserve(0, bed.now), !preferred);
    bed.run(1ms); // too long for a handshake: the route may have failed since
    CHECK(bed.failover.reserve(0, bed.now));
  }
}

// The peer accepts our attempt and gives up its own one, whose proof is on its
// way: let in, it would replace the connection by one that is closed already.
TEST(failover_keeps_a_new_connection_against_a_call_from_before_it) {
  for (const bool preferred : {true, false}) {
    for (const bool ours : {true, false}) {
      FailoverConfig config;
      config.preferredInitiator = preferred;
      Bed bed(1, config);
      bed.failover.setRoutes(1, {});
      bed.failover.setNeeded(true, bed.now);
      bed.connectFrom(0, ours, {});
      const bool keeps = preferred && ours;
      bed.run(999ms);
      CHECK_EQ(bed.failover.reserve(0, bed.now), !keeps);
      bed.run(1ms); // by now, the peer has lost its end
      CHECK(bed.failover.reserve(0, bed.now));

      bed.connectFrom(0, ours, {});
      CHECK_EQ(bed.failover.reserve(0, bed.now), !keeps);
      bed.lose(0);
      bed.failover.giveUpAttempts();
      CHECK(bed.failover.reserve(0, bed.now));
    }
  }
}

TEST(failover_keeps_a_connection_for_a_caller_that_was_let_in) {
  Bed bed(2);
  bed.up(2);
  bed.takeAttempts(0);
  bed.run(2s);
  CHECK(bed.failover.reserve(0, bed.now));
  bed.lose(0);
  bed.run(5s);
  CHECK(bed.takeAttempts(0).empty());
  bed.failover.onCallerLost(0, bed.now);
  CHECK_EQ(bed.takeAttempts(0).size(), 1u);
  bed.run(2s);
  CHECK(bed.failover.state(0).connected);

  // A caller that says nothing keeps it for as long as a handshake may take.
  CHECK(bed.failover.reserve(0, bed.now));
  bed.lose(0);
  bed.run(20s);
  CHECK(bed.takeAttempts(0).empty());
  bed.failover.retryNow(0, bed.now);
  CHECK_EQ(bed.takeAttempts(0).size(), 1u);
}

TEST(failover_waits_for_the_peers_own_attempt) {
  Bed bed(1);
  bed.wires[0].way = Way::kSilent;
  bed.failover.setRoutes(1, {});
  bed.failover.setNeeded(true, bed.now);
  bed.run(5ms);
  bed.wires[0].attempting = false;
  AttemptFailure how;
  how.answered = how.duplicate = true;
  bed.failover.onAttemptFailed(0, how, bed.now);
  bed.run(1005ms);
  CHECK_EQ(pausesMs(bed.takeAttempts(0)), std::vector<int64_t>({1005}));
}

// --- off-route

TEST(failover_tries_all_pairs_of_nics_while_nothing_works) {
  Bed bed(2);
  bed.pairs = 2;
  bed.up(2);
  bed.takeAttempts(0);
  bed.offRouteWay = Way::kSilent;
  for (const size_t c : {0, 1}) {
    bed.wires[c].way = Way::kSilent;
    bed.lose(c);
  }
  bed.run(20s);
  const auto attempts = bed.takeAttempts(0);
  CHECK(attempts.size() >= 8);
  for (size_t i = 0; i < attempts.size(); ++i) {
    // Its own route, the first pair, its own route, the second pair, ...
    CHECK_EQ(attempts[i].plan.offRoute.has_value(), i % 2 == 1);
    CHECK_EQ(attempts[i].plan.offRoute.value_or(0), i % 4 == 3 ? 1u : 0u);
  }

  // One of them works. Its own route is tried again and again.
  bed.offRouteWay = Way::kConnects;
  bed.until([&] { return bed.failover.state(0).connected; });
  CHECK(bed.failover.offRoute(0));
  CHECK(!bed.failover.carried(0));
  bed.takeAttempts(0);
  bed.run(10s);
  const auto again = bed.takeAttempts(0);
  CHECK(!again.empty());
  for (const Bed::Attempt& a : again) {
    CHECK(!a.plan.offRoute);
  }
  CHECK(bed.failover.offRoute(0));
  bed.wires[0].way = Way::kConnects;
  bed.until([&] { return !bed.failover.offRoute(0); }, 5s);
  CHECK(bed.failover.carried(0));
  bed.takeAttempts(0);
  bed.run(10s);
  CHECK(bed.takeAttempts(0).empty());
}

// It falls silent, an attempt on its own route is made, and it answers again:
// the attempt is dropped, but not the wish to be on the route.
TEST(failover_returns_to_the_route_after_a_silence_off_it) {
  Bed bed(2);
  bed.pairs = 2;
  bed.up(2);
  for (const size_t c : {0, 1}) {
    bed.wires[c].way = Way::kSilent;
    bed.lose(c);
  }
  bed.until([&] { return bed.failover.live() == 2; });
  CHECK(bed.failover.offRoute(0));
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  bed.breakWire(0);
  bed.until([&] { return bed.wires[0].suspect && bed.wires[0].attempting; });
  bed.run(1s);
  bed.heal(0);
  bed.until([&] { return !bed.wires[0].suspect && !bed.wires[0].attempting; });
  CHECK(bed.failover.offRoute(0));
  bed.wires[0].way = bed.wires[1].way = Way::kConnects;
  bed.until([&] { return !bed.failover.offRoute(0); }, 5s);
}

TEST(failover_stays_on_the_route_while_another_one_works) {
  Bed bed(2);
  bed.pairs = 2;
  bed.up(2);
  bed.wires[0].way = Way::kSilent;
  bed.lose(0);
  bed.run(10s);
  const auto attempts = bed.takeAttempts(0);
  CHECK(attempts.size() > 5);
  for (const Bed::Attempt& a : attempts) {
    CHECK(!a.plan.offRoute);
  }
}

// --- doubt

TEST(failover_suspects_a_silent_connection_that_another_one_replaces) {
  Bed bed(2);
  bed.up(2);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  const TimePoint broken = bed.now;
  bed.breakWire(0);
  bed.until([&] { return bed.wires[0].suspect; }, 100ms);
  CHECK(bed.now - broken >= 50ms);
  CHECK(bed.now - broken <= 60ms);
  CHECK(!bed.failover.answers(0));
  CHECK(bed.failover.answers(1));
  CHECK_EQ(bed.failover.stateName(0, 0), "suspect");
  // It was only slow: nothing has to prove itself.
  bed.heal(0);
  bed.until([&] { return !bed.wires[0].suspect; }, 20ms);
  CHECK_EQ(bed.failover.stateName(0, kAllClasses), "up");
}

// An outage that lasts is no delay: what comes back is on probation.
TEST(failover_puts_what_comes_back_after_an_outage_on_probation) {
  Bed bed(2);
  bed.up(2);
  bed.wires[0].way = Way::kSilent;
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  bed.breakWire(0);
  bed.run(1s);
  CHECK(bed.wires[0].suspect);
  bed.heal(0);
  bed.until([&] { return !bed.wires[0].suspect; }, 20ms);
  CHECK(bed.wires[0].proving);
  bed.until([&] { return !bed.wires[0].proving; }, 1s);
}

// Connections 0 and 2 have lost their way, and 2 has it again: its answers say
// nothing of when the kernel sends once more what was lost on 0.
TEST(failover_doubts_a_connection_until_it_answers_itself) {
  Bed bed(4);
  bed.up(2, twoNics());
  for (const size_t c : {0, 2}) {
    bed.wires[c].way = Way::kSilent;
  }
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  bed.breakWire(0);
  bed.breakWire(2);
  bed.until([&] { return bed.wires[0].suspect && bed.wires[2].suspect; });
  bed.heal(2);
  bed.until([&] { return !bed.wires[2].suspect; }, 20ms);
  bed.run(20ms); // some looks
  CHECK(bed.wires[0].suspect);
  bed.heal(0);
  bed.until([&] { return !bed.wires[0].suspect; }, 20ms);
}

// A stalled connection is closed while the others make progress, and made
// again.
TEST(failover_gives_up_a_connection_that_stays_silent) {
  Bed bed(2);
  bed.up(2);
  bed.wires[0].way = Way::kSilent; // so that no new one replaces it before
  bed.sending = true;
  bed.failover.onSent(bed.now);
  const TimePoint broken = bed.now;
  bed.breakWire(0);
  bed.until([&] { return !bed.resets.empty(); }, 10s);
  CHECK_EQ(bed.resets[0], "0: stalled while other paths made progress");
  CHECK(bed.now - broken >= 5s);
  CHECK(bed.now - broken < 5100ms);
  bed.wires[0].way = Way::kConnects;
  bed.until([&] { return bed.wires[0].open && !bed.wires[0].proving; });
}

// All are silent: the peer may be stopped, and all may simply go on.
TEST(failover_suspects_nothing_while_nothing_takes_over) {
  Bed bed(3);
  bed.up(3);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  for (const size_t c : {0, 1, 2}) {
    bed.wires[c].way = Way::kSilent;
    bed.breakWire(c);
  }
  bed.run(4s);
  for (const size_t c : {0, 1, 2}) {
    CHECK_EQ(toString(bed.failover.state(c)), "up");
  }
  bed.run(4s);
  for (const size_t c : {0, 1, 2}) {
    CHECK_EQ(toString(bed.failover.state(c)), "up, alone");
  }
  CHECK(bed.resets.empty());
  for (const size_t c : {0, 1, 2}) {
    bed.heal(c);
  }
  bed.run(200ms);
  for (const size_t c : {0, 1, 2}) {
    CHECK_EQ(toString(bed.failover.state(c)), "up");
  }
}

// Connection 2 has nothing to do. It may have failed together with 0, so it
// gets nothing until it answers; 1 answers, and takes over.
TEST(failover_suspects_by_association_what_has_not_answered_lately) {
  Bed bed(3);
  bed.wires[2].sends = false;
  bed.up(3);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  bed.breakWire(0);
  bed.breakWire(2);
  const int pings = bed.wires[2].pings;
  bed.until([&] { return bed.wires[0].suspect; }, 100ms);
  CHECK(bed.wires[2].suspect);
  CHECK(bed.wires[2].pings > pings);
  CHECK(!bed.wires[1].suspect);
  bed.heal(2);
  bed.until([&] { return !bed.wires[2].suspect; }, 20ms);
  CHECK(bed.wires[0].suspect);
}

// The same, but 2 works: it has been asked in time, and is not suspected.
TEST(failover_asks_the_others_before_it_suspects) {
  Bed bed(3);
  bed.wires[2].sends = false;
  bed.up(3);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  bed.breakWire(0);
  bed.until([&] { return bed.wires[0].suspect; }, 100ms);
  CHECK(!bed.wires[2].suspect);
  bed.run(100ms);
  CHECK(!bed.wires[2].suspect);
}

// Something else carried on route 0, and is silent: its connections 0 and 2 had
// nothing to do. 0 works, and answers.
TEST(failover_asks_the_connections_of_a_silent_route_first) {
  Bed bed(4);
  bed.up(2, twoNics());
  bed.run(500ms);
  bed.breakWire(2);
  bed.failover.onRouteSilent(0, bed.now);
  for (const size_t c : {0, 1, 2, 3}) {
    CHECK_EQ(bed.wires[c].suspect, c % 2 == 0);
  }
  bed.until([&] { return !bed.wires[0].suspect; }, 20ms);
  CHECK(!bed.wires[0].proving);
  bed.run(100ms);
  CHECK(bed.wires[2].suspect);
}

// Two routes with a connection each, and datagrams beside it. One of the two
// kinds carries, the other one has nothing to do.
Bed besideConnections(bool datagramsCarry) {
  Bed bed(2);
  bed.beside.resize(2);
  for (size_t route = 0; route < 2; ++route) {
    bed.wires[route].sends = !datagramsCarry;
    bed.beside[route].sends = datagramsCarry;
  }
  return bed;
}

// The connection of the route may have failed with the datagrams: it is asked
// in time, and has not answered when they are doubted.
TEST(failover_doubts_silent_datagrams_as_soon_as_a_connection) {
  Bed bed = besideConnections(/*datagramsCarry=*/true);
  bed.up(2, twoNics());
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  const TimePoint broken = bed.now;
  bed.breakRoute(0);
  bed.until([&] { return bed.beside[0].silent; }, 100ms);
  CHECK(bed.now - broken >= 50ms);
  CHECK(bed.now - broken <= 60ms);
  CHECK(bed.wires[0].suspect);
  bed.run(100ms);
  CHECK(!bed.wires[1].suspect && !bed.beside[1].silent);
}

TEST(failover_doubts_idle_datagrams_beside_a_silent_connection) {
  Bed bed = besideConnections(/*datagramsCarry=*/false);
  bed.up(2, twoNics());
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  bed.breakRoute(0);
  bed.until([&] { return bed.wires[0].suspect; }, 60ms);
  CHECK(bed.beside[0].silent);
  CHECK(!bed.wires[1].suspect && !bed.beside[1].silent);
}

TEST(failover_doubts_no_datagrams_while_nothing_takes_over) {
  Bed bed = besideConnections(/*datagramsCarry=*/true);
  bed.up(2, twoNics());
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  bed.breakRoute(0);
  bed.breakRoute(1);
  bed.run(4s);
  for (size_t route = 0; route < 2; ++route) {
    CHECK(!bed.beside[route].silent && !bed.wires[route].suspect);
  }
}

// The NIC works, says the connection: it is the datagrams that are filtered, or
// some of them that are lost. Their path finds out by itself.
TEST(failover_leaves_datagrams_alone_whose_connection_answers) {
  Bed bed = besideConnections(/*datagramsCarry=*/true);
  bed.wires[0].sends = true;
  bed.up(2, twoNics());
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(500ms);
  bed.breakRoute(0);
  bed.heal(0);
  bed.run(1s);
  CHECK(!bed.beside[0].silent);
}

TEST(failover_doubts_no_silent_route_that_nothing_replaces) {
  Bed bed(2);
  bed.up(1);
  bed.run(500ms);
  bed.failover.onRouteSilent(0, bed.now);
  CHECK(!bed.wires[0].suspect && !bed.wires[1].suspect);
}

// --- probation

// How long the connection is on probation after it is lost once more.
Nanos probationAfterLoss(Bed& bed, size_t c) {
  bed.lose(c);
  bed.until([&] { return bed.wires[c].proving; }, 1s);
  const TimePoint since = bed.now;
  bed.until([&] { return !bed.wires[c].proving; }, 200s);
  return bed.now - since;
}

TEST(failover_holds_a_flapping_connection_down_for_longer_each_time) {
  FailoverConfig config;
  config.holdDownMax = 2s;
  Bed bed(2, config);
  bed.up(2);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  Nanos expected = 300ms; // 150 ms doubled by the loss
  for (int i = 0; i < 5; ++i) {
    const Nanos held = probationAfterLoss(bed, 0);
    CHECK(held >= expected - 2ms);
    CHECK(held <= expected + 50ms); // and until the next look
    CHECK_EQ(bed.roles.connections[0], kAllClasses);
    expected = std::min<Nanos>(2 * expected, 2s);
  }
  bed.run(200s); // quiet: the past is forgotten
  const Nanos held = probationAfterLoss(bed, 0);
  CHECK(held < 350ms);
}

TEST(failover_gives_nothing_to_a_connection_on_probation) {
  Bed bed(2);
  bed.up(2);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.lose(0);
  bed.until([&] { return bed.wires[0].proving; }, 1s);
  CHECK_EQ(bed.failover.stateName(0, 0), "proving");
  bed.wires[0].way = Way::kSilent;
  bed.wires[0].works = false; // it answers no ping: the time is not enough
  bed.wires[0].silentSince = bed.now;
  bed.run(2s);
  CHECK(bed.wires[0].proving || !bed.wires[0].open);
}

TEST(failover_needs_the_only_connection_at_once) {
  Bed bed(1);
  bed.up(1);
  bed.lose(0);
  bed.run(5ms);
  CHECK(bed.wires[0].open);
  CHECK(!bed.wires[0].proving);
  CHECK_EQ(bed.roles.connections[0], kAllClasses);
}

// A connection on probation must carry when the good one is lost.
TEST(failover_trusts_early_when_nothing_else_works) {
  Bed bed(2);
  bed.up(2);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.lose(0);
  bed.until([&] { return bed.wires[0].proving; }, 1s);
  bed.wires[1].way = Way::kSilent;
  bed.lose(1);
  CHECK(!bed.wires[0].proving);
  CHECK_EQ(bed.roles.connections[0], kAllClasses);
}

// --- our NICs

TEST(failover_leaves_a_nic_that_is_down_at_once) {
  Bed bed(4);
  bed.up(2, twoNics());
  bed.wires[0].way = bed.wires[2].way = Way::kSilent;
  bed.failover.onNic("eth0", false, bed.now);
  CHECK_EQ(
      bed.resets,
      std::vector<std::string>(
          {"0: our NIC eth0 went down", "2: our NIC eth0 went down"}));
  CHECK_EQ(bed.told, std::vector<std::string>({"eth0 0", "eth0 2"}));
  CHECK_EQ(bed.failover.live(), 2u);
  // It comes back: no pause, whatever had failed before.
  bed.run(5s);
  bed.wires[0].way = bed.wires[2].way = Way::kConnects;
  bed.failover.onNic("eth0", true, bed.now);
  bed.run(2ms);
  CHECK_EQ(bed.failover.live(), 4u);
}

TEST(failover_keeps_a_nic_that_is_down_until_another_takes_over) {
  Bed bed(2);
  bed.up(2, twoNics());
  bed.wires[1].way = Way::kSilent;
  bed.lose(1);
  bed.failover.onNic("eth0", false, bed.now);
  bed.run(1s);
  CHECK_EQ(toString(bed.failover.state(0)), "up, NIC down");
  CHECK_EQ(bed.failover.stateName(0, 0), "stalled");
  CHECK(bed.resets.empty());
  CHECK(bed.told.empty());
  bed.wires[0].way = Way::kSilent;
  bed.wires[1].way = Way::kConnects;
  bed.until([&] { return bed.wires[1].open; }, 2s);
  CHECK_EQ(bed.resets, std::vector<std::string>({"0: our NIC eth0 went down"}));
  CHECK_EQ(bed.told, std::vector<std::string>({"eth0 0"}));
}

TEST(failover_goes_on_if_the_nic_comes_back_in_time) {
  Bed bed(1);
  RolePolicy policy;
  policy.nics = {"eth0"};
  bed.up(1, policy);
  bed.takeAttempts(0);
  bed.failover.onNic("eth0", false, bed.now);
  bed.failover.onNic("eth7", false, bed.now); // none of this link's
  bed.run(100ms);
  CHECK_EQ(bed.failover.stateName(0, 0), "stalled");
  bed.failover.onNic("eth0", true, bed.now);
  CHECK_EQ(toString(bed.failover.state(0)), "up");
  CHECK(bed.resets.empty());
}

// --- whether the peer is there

TEST(failover_takes_refusals_of_all_routes_for_the_end_of_the_peer) {
  Bed bed(2);
  bed.up(2);
  for (const size_t c : {0, 1}) {
    bed.wires[c].way = Way::kRefuses;
  }
  const TimePoint lost = bed.now;
  bed.lose(0);
  bed.run(3s); // a live connection says that it is there
  CHECK_EQ(bed.gone, 0);
  bed.lose(1);
  bed.until([&] { return bed.gone != 0; }, 5s);
  CHECK(bed.now - lost >= Refusals::kSpan);
  const uint64_t asked = bed.asked;
  bed.run(10s);
  CHECK_EQ(bed.gone, 1);
  CHECK_EQ(bed.asked, asked);
}

TEST(failover_does_not_give_the_peer_up_while_one_route_is_silent) {
  Bed bed(2);
  bed.up(2);
  bed.wires[0].way = Way::kRefuses;
  bed.wires[1].way = Way::kSilent;
  bed.lose(0);
  bed.lose(1);
  bed.run(50s);
  CHECK_EQ(bed.gone, 0);
  bed.wires[1].way = Way::kRefuses;
  bed.until([&] { return bed.gone != 0; }, 10s);
}

// --- time

TEST(failover_of_an_idle_job_has_no_timers) {
  Bed bed(4);
  bed.up(2);
  bed.failover.setNeeded(false, bed.now);
  bed.run(5s);
  CHECK(bed.failover.deadline() == kNever);
  const uint64_t timers = bed.timers();
  bed.run(1000s);
  CHECK_EQ(bed.timers(), timers);
}

TEST(failover_looks_closely_only_where_another_one_could_take_over) {
  struct Case {
    size_t connections;
    Nanos roundTrip;
    uint64_t looks; // in a second
  };
  for (const Case& each :
       {Case{1, 1ms, 10}, // every 100 ms
        Case{2, 1ms, 160}, // an eighth of suspectAfter
        Case{2, 200ms, 40}}) { // an eighth of the round trip
    Bed bed(each.connections);
    bed.roundTrip = each.roundTrip;
    bed.up(1);
    bed.sending = true;
    bed.failover.onSent(bed.now);
    bed.run(1s);
    const uint64_t timers = bed.timers();
    bed.run(1s);
    CHECK_EQ(bed.timers() - timers, each.looks);
  }
}

// Evidence costs system calls.
TEST(failover_gathers_no_evidence_of_connections_that_answer) {
  Bed bed(2);
  bed.up(1);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(100ms);
  const uint64_t asked = bed.evidenceAsked;
  bed.run(1s);
  CHECK_EQ(bed.evidenceAsked, asked);
  bed.breakWire(0);
  bed.run(70ms);
  CHECK(bed.evidenceAsked > asked);
  CHECK(bed.wires[0].suspect);
}

// An unanswered ping does not make looks more frequent than its answer needs.
TEST(failover_looks_at_pings_as_seldom_as_the_round_trip_lets_it) {
  Bed bed(2);
  bed.roundTrip = 400ms;
  bed.up(1);
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.run(1s);
  bed.breakWire(0);
  bed.breakWire(1);
  bed.run(500ms); // each is asked, because the other one is silent
  const uint64_t timers = bed.timers();
  bed.run(200ms);
  CHECK(bed.timers() - timers <= 5);
}

// Random faults. Two runs of one seed: in one of them onTimer() is also called
// when nothing is due. It must do nothing then.
std::string randomRun(uint64_t seed, bool early) {
  Prng prng(mixBits(seed));
  const size_t routes = 1 + prng.below(3);
  Bed bed(routes * (1 + prng.below(2)));
  RolePolicy policy;
  policy.standby = prng.chance(0.3);
  for (size_t r = 0; r < routes; ++r) {
    policy.nics.push_back("eth" + std::to_string(r));
  }
  bed.pairs = routes * (routes - 1);
  bed.offRouteWay = prng.chance(0.5) ? Way::kConnects : Way::kSilent;
  bed.up(routes, policy);
  bed.sending = prng.chance(0.8);
  bed.failover.onSent(bed.now);
  std::vector<bool> down(routes, false);
  std::string story;
  for (int i = 0; i < 60; ++i) {
    const size_t c = prng.below(bed.wires.size());
    const size_t route = prng.below(routes);
    switch (prng.below(8)) {
      case 0:
        if (bed.wires[c].open) {
          bed.lose(c);
        }
        break;
      case 1:
      case 2:
        if (bed.wires[c].open && bed.wires[c].works) {
          bed.breakWire(c);
        }
        break;
      case 3:
        if (bed.wires[c].open && !bed.wires[c].works) {
          bed.heal(c);
        }
        break;
      case 4:
        bed.wires[c].way = prng.chance(0.5) ? Way::kSilent : Way::kConnects;
        break;
      case 5:
        down[route] = !down[route];
        bed.failover.onNic(policy.nics[route], !down[route], bed.now);
        break;
      case 6: // the peer connects
        if (bed.failover.reserve(c, bed.now)) {
          bed.wires[c].attempting = false;
          bed.connectFrom(c, false, {});
        }
        break;
      default:
        bed.failover.setWanted(route, 1 + prng.below(2));
        bed.failover.connectAll(bed.now);
        break;
    }
    for (uint64_t steps = prng.below(300); steps > 0; --steps) {
      if (early && bed.failover.deadline() > bed.now) {
        const uint64_t asked = bed.asked;
        CHECK(!bed.failover.onTimer(bed.now));
        CHECK_EQ(bed.asked, asked);
      }
      bed.run(1ms);
    }
    for (size_t w = 0; w < bed.wires.size(); ++w) {
      story += toString(bed.failover.state(w)) + "; ";
    }
    story += std::to_string(bed.attempts.size()) + "\n";
  }
  // The network heals.
  for (size_t r = 0; r < routes; ++r) {
    bed.failover.onNic(policy.nics[r], true, bed.now);
    bed.failover.setWanted(r, SIZE_MAX);
  }
  for (size_t c = 0; c < bed.wires.size(); ++c) {
    bed.wires[c].way = Way::kConnects;
    if (bed.wires[c].open && !bed.wires[c].works) {
      bed.heal(c);
    }
  }
  // Probation is for those who have something to send: an idle link rests.
  bed.sending = true;
  bed.failover.connectAll(bed.now);
  bed.failover.onSent(bed.now);
  bed.until(
      [&] {
        for (size_t c = 0; c < bed.wires.size(); ++c) {
          if (toString(bed.failover.state(c)) != "up" ||
              bed.failover.offRoute(c)) {
            return false;
          }
        }
        return true;
      },
      200s);
  CHECK_EQ(bed.gone, 0);
  uint8_t carried = 0;
  for (const uint8_t classes : bed.roles.connections) {
    carried |= classes;
  }
  CHECK_EQ(carried, kAllClasses);
  return story;
}

TEST(failover_comes_back_from_any_faults) {
  forSeeds(200, [](uint64_t seed) {
    CHECK_EQ(randomRun(seed, false), randomRun(seed, true));
  });
}

TEST(failover_asks_nothing_after_its_end) {
  Bed bed(2);
  bed.up(2, twoNics());
  bed.sending = true;
  bed.failover.onSent(bed.now);
  bed.wires[0].way = Way::kSilent;
  bed.lose(0);
  bed.run(5ms);
  bed.failover.end();
  const uint64_t asked = bed.asked;
  Failover& f = bed.failover;
  CHECK(f.deadline() == kNever);
  f.setNeeded(true, bed.now);
  f.connectAll(bed.now);
  f.retryAll(bed.now);
  f.retryNow(0, bed.now);
  f.onAttemptFailed(0, {}, bed.now);
  f.onNic("eth0", false, bed.now);
  f.onNic("eth1", false, bed.now);
  f.onSent(bed.now);
  f.watch(bed.now);
  f.onCallerLost(0, bed.now);
  f.assignRoles(bed.now);
  bed.lose(1);
  bed.run(20s);
  CHECK(!f.onTimer(bed.now));
  CHECK(f.deadline() == kNever);
  CHECK_EQ(bed.asked, asked);
}

} // namespace
} // namespace resilient::test
