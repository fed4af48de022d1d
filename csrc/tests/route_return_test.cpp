#include "failover/route_return.h"

#include "base/random.h"
#include "tests/check.h"

namespace resilient {

using namespace std::chrono_literals;

namespace {

constexpr Nanos kLongest = 60s, kSuspectAfter = 40ms;
const TimePoint kBegin{100s};

// A network that is down and up in turns, and a path over it in virtual time.
struct Flapping {
  Nanos down = 200ms, up = 200ms;
  // The device tells of each change. Otherwise the path falls silent, and its
  // device tries again after this time.
  bool isTold = false;
  Nanos retry = 268ms;
  Nanos connect = 20ms; // to make a path

  bool works(TimePoint at) const {
    return (at - kBegin) % (down + up) >= down;
  }
  TimePoint nextChange(TimePoint at) const {
    const Nanos into = (at - kBegin) % (down + up);
    return at + (into < down ? down - into : down + up - into);
  }

  // Losses of the path within this time, from the first outage on.
  int losses(Nanos duration) const {
    RouteReturn route(kLongest, kSuspectAfter, 2);
    route.onUp(kBegin - 1000s);
    int count = 0;
    TimePoint now = kBegin; // the network has just failed
    while (now < kBegin + duration) {
      ++count;
      now = isTold ? returnAfterClose(route, now)
                   : returnAfterSilence(route, now);
      route.onUp(now);
      // It carries until the network fails, if it works at all.
      now = works(now) ? nextChange(now) : now;
    }
    return count;
  }
  TimePoint returnAfterClose(RouteReturn& route, TimePoint now) const {
    route.onClosed(now);
    TimePoint at = std::max(now + connect, route.notBefore());
    while (!works(at)) { // offered when the port is back
      at = nextChange(at) + connect;
    }
    return at;
  }
  TimePoint returnAfterSilence(RouteReturn& route, TimePoint now) const {
    route.onSilent(now + kSuspectAfter);
    TimePoint heard = now + retry;
    while (!works(heard)) {
      heard += retry;
    }
    return route.onHeard(heard);
  }
};

} // namespace

TEST(route_return_follows_a_single_failure_at_once) {
  RouteReturn route(kLongest, kSuspectAfter, 2);
  route.onUp(kBegin);
  const TimePoint lost = kBegin + 100s;
  route.onClosed(lost);
  CHECK(route.notBefore() == lost + 150ms);
  // Of a path that falls silent, the time of the silence counts.
  RouteReturn silent(kLongest, kSuspectAfter, 2);
  silent.onUp(kBegin);
  silent.onSilent(lost);
  CHECK(silent.onHeard(lost + 100ms) == lost + 150ms);
  silent.onUp(lost + 150ms);
  silent.onSilent(lost + 100s);
  CHECK(silent.onHeard(lost + 101s) == lost + 101s); // has waited already
}

TEST(route_return_leaves_a_flapping_path_five_times_in_thirty_seconds) {
  for (const bool isTold : {true, false}) {
    Flapping flapping;
    flapping.isTold = isTold;
    const int losses = flapping.losses(30s);
    CHECK(losses >= 4); // it does come back
    CHECK(losses <= 5);
  }
  // Whatever the periods.
  test::forSeeds(200, [](uint64_t seed) {
    Prng prng(seed);
    Flapping flapping;
    flapping.isTold = prng.chance(0.5);
    flapping.down = Nanos(20ms) + Nanos(prng.below(400)) * 1'000'000;
    flapping.up = Nanos(40ms) + Nanos(prng.below(400)) * 1'000'000;
    if (!flapping.isTold) {
      flapping.down += 3 * kSuspectAfter; // shorter ones are late answers
    }
    CHECK(flapping.losses(30s) <= 5);
  });
}

TEST(route_return_ignores_late_answers) {
  RouteReturn route(kLongest, kSuspectAfter, 2);
  TimePoint now = kBegin;
  route.onUp(now);
  for (int i = 0; i < 100; ++i) {
    now += 300ms;
    route.onSilent(now);
    now += 70ms;
    CHECK(route.onHeard(now) == now);
    route.onUp(now);
  }
  route.onClosed(now + 100s);
  CHECK(route.notBefore() == now + 100s + 150ms);
}

TEST(route_return_counts_an_outage_once) {
  RouteReturn route(kLongest, kSuspectAfter, 2);
  route.onUp(kBegin);
  TimePoint now = kBegin + 1s; // soon after a return
  route.onSilent(now);
  CHECK(route.onHeard(now + 1s) == now + 1s);
  CHECK(route.notBefore() == now + 600ms);
  route.onClosed(now + 2s); // while it waited
  CHECK(route.notBefore() == now + 600ms);
}

} // namespace resilient
