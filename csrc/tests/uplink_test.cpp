#include "path/uplink.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kStarvation = 8u << 20;

TEST(uplink_has_the_declared_limit_or_none) {
  Uplink limited(2e6, kStarvation);
  CHECK(limited.limit() != nullptr);
  CHECK_EQ(limited.bytesPerS(), 2e6);
  Uplink unlimited(std::nullopt, kStarvation);
  CHECK(unlimited.limit() == nullptr);
  CHECK_EQ(unlimited.bytesPerS(), 0.0);
  unlimited.leave(1);
}

TEST(uplink_is_contended_while_pipelines_meet) {
  Uplink uplink(2e6, kStarvation);
  TimePoint now{seconds(100)};
  CHECK(!uplink.contended(now));
  // Our own activations to two peers, and none for others.
  uplink.onWaiting(1, true, false, now);
  uplink.onWaiting(2, true, false, now);
  CHECK(!uplink.contended(now));
  now += seconds(2);
  // For others, but to one peer only.
  uplink.onWaiting(1, true, true, now);
  CHECK(!uplink.contended(now));
  uplink.onWaiting(2, true, false, now);
  CHECK(uplink.contended(now));
  now += milliseconds(900);
  CHECK(uplink.contended(now));
  now += milliseconds(200);
  CHECK(!uplink.contended(now));
  // Others' activations meet others'.
  uplink.onWaiting(1, false, true, now);
  uplink.onWaiting(2, false, true, now);
  CHECK(uplink.contended(now));
  uplink.leave(2);
  CHECK(!uplink.contended(now));
}

TEST(uplink_without_a_limit_is_for_our_own_while_we_send) {
  TimePoint now{};
  Uplink uplink(std::nullopt, kStarvation);
  CHECK(!uplink.needsItself(now));
  now += seconds(100);
  uplink.onWaiting(1, false, true, now); // for others
  uplink.onWaiting(2, false, false, now);
  CHECK(!uplink.needsItself(now));
  uplink.onWaiting(1, true, true, now);
  CHECK(uplink.needsItself(now));
  uplink.onWaiting(1, false, true, now + seconds(2));
  CHECK(uplink.needsItself(now + seconds(4)));
  CHECK(!uplink.needsItself(now + seconds(6)));
  // With a limit there is an order instead.
  Uplink limited(2e6, kStarvation);
  limited.onWaiting(1, true, false, now);
  CHECK(!limited.needsItself(now));
}

} // namespace
} // namespace resilient::test
