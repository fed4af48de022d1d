#include "path/uplink.h"

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kStarvation = 8u << 20;

// A way that carries so much; what arrives there is told in bunches.
struct Way {
  UplinkRate rate;
  double bytesPerS = 15e6;
  TimePoint now{seconds(100)};
  Prng prng{1};

  // Sends no faster than allowed, if anything is known.
  void send(Nanos duration) {
    const TimePoint end = now + duration;
    while (now < end) {
      const Nanos bunch = milliseconds(1 + prng.below(10));
      now += bunch;
      const double allowed = rate.bytesPerS() > 0 ? rate.allowed() : bytesPerS;
      const double bytes = std::min(allowed, bytesPerS) * toSeconds(bunch);
      rate.onArrived(static_cast<uint64_t>(bytes), true, now);
    }
  }
  void isKnown(double most) const {
    CHECK(rate.bytesPerS() >= 0.9 * bytesPerS);
    CHECK(rate.bytesPerS() <= most * bytesPerS);
  }
};

TEST(uplink_rate_is_what_arrives) {
  Way way;
  CHECK_EQ(way.rate.bytesPerS(), 0.0);
  way.send(milliseconds(200));
  way.isKnown(1.2);
  way.send(seconds(5));
  way.isKnown(1.2);
  // All that a lost packet held up is acknowledged at once.
  way.rate.onArrived(2'000'000, true, way.now + milliseconds(5));
  way.now += milliseconds(10);
  way.send(seconds(1));
  way.isKnown(1.2);
  // Whoever sends little tells nothing.
  for (int i = 0; i < 1000; ++i) {
    way.now += milliseconds(10);
    way.rate.onArrived(1000, false, way.now);
  }
  way.isKnown(1.2);
}

TEST(uplink_rate_follows_the_way) {
  Way way;
  way.send(seconds(2));
  way.bytesPerS = 60e6;
  way.send(seconds(6));
  way.isKnown(1.3);
  way.bytesPerS = 5e6;
  way.send(seconds(3));
  way.isKnown(1.3);
  // Nearly dead, and back: the low rate does not keep itself up.
  way.bytesPerS = 1e5;
  way.send(seconds(3));
  way.bytesPerS = 60e6;
  way.send(seconds(4));
  way.isKnown(1.3);
}

// Two users that have sent as much as the way carries.
struct Site {
  Uplink uplink{std::nullopt, kStarvation};
  TimePoint now{seconds(100)};

  Site() {
    for (int i = 0; i < 100; ++i) {
      uplink.onSent(1, 50'000, true, now);
      uplink.onSent(2, 50'000, true, now);
      now += milliseconds(10);
    }
    uplink.onSent(1, 0, false, now);
    uplink.onSent(2, 0, false, now);
  }
};

TEST(uplink_has_a_limit_while_pipelines_meet) {
  Site s;
  const auto limited = [&] { return s.uplink.limitNow(s.now) != nullptr; };
  CHECK(!limited());
  // Our own activations to two peers, and none for others.
  s.uplink.onWaiting(1, true, false, s.now);
  s.uplink.onWaiting(2, true, false, s.now);
  CHECK(!limited());
  s.now += seconds(2);
  // For others, but to one peer only.
  s.uplink.onWaiting(1, true, true, s.now);
  CHECK(!limited());
  s.uplink.onWaiting(2, true, false, s.now);
  CHECK(limited());
  CHECK(s.uplink.pacedBytesPerS() > 9e6 && s.uplink.pacedBytesPerS() < 13e6);
  s.now += milliseconds(900);
  CHECK(limited());
  s.now += milliseconds(200);
  CHECK(!limited());
  CHECK_EQ(s.uplink.pacedBytesPerS(), 0.0);
  // Others' activations meet others'.
  s.uplink.onWaiting(1, false, true, s.now);
  s.uplink.onWaiting(2, false, true, s.now);
  CHECK(limited());
  s.uplink.leave(2);
  CHECK(!limited());
}

TEST(uplink_has_no_limit_before_anything_is_measured) {
  Uplink uplink(std::nullopt, kStarvation);
  const TimePoint now{seconds(1)};
  uplink.onWaiting(1, true, true, now);
  uplink.onWaiting(2, true, true, now);
  CHECK(uplink.contended(now));
  CHECK(uplink.limitNow(now) == nullptr);
}

// Nobody is left waiting for a turn when the limit ends.
TEST(uplink_lets_all_go_when_its_limit_ends) {
  Site s;
  s.uplink.onWaiting(1, true, true, s.now);
  s.uplink.onWaiting(2, true, false, s.now);
  RateLimit* limit = s.uplink.limitNow(s.now);
  CHECK(limit != nullptr);
  CHECK(limit->mayTake(1, s.now));
  limit->took(1, 5'000'000, s.now); // half a second of it
  CHECK(!limit->mayTake(1, s.now));
  CHECK(!limit->mayTake(2, s.now));
  CHECK(limit->readyAt() > s.now + milliseconds(300));
  s.now += seconds(2);
  for (RateLimit::User user : {1, 2}) {
    limit = s.uplink.limitNow(s.now);
    CHECK(limit != nullptr && limit->idleTurn());
    CHECK(limit->readyAt() <= s.now);
    CHECK_EQ(limit->nextTurn([](RateLimit::User) { return 0; }), user);
    CHECK(limit->mayTake(user, s.now));
    limit->took(user, 1'000'000, s.now);
  }
  CHECK(s.uplink.limitNow(s.now) == nullptr);
}

TEST(uplink_keeps_to_a_declared_limit) {
  Uplink uplink(2e6, kStarvation);
  CHECK(uplink.declared());
  CHECK(uplink.limitNow(TimePoint{seconds(1)}) == &uplink.limit());
  CHECK_EQ(uplink.pacedBytesPerS(), 2e6);
}

} // namespace
} // namespace resilient::test
