#include "failover/refusals.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr TimePoint kStart{seconds(1000)};

// Refusals of this route, one each 50 ms; how many until the peer is dead, or
// 0 if it is not.
int refusedUntilDead(Refusals& refusals, size_t route, TimePoint from) {
  for (int i = 0; i < 20; ++i) {
    if (refusals.onRefused(route, from + i * milliseconds(50))) {
      return i + 1;
    }
  }
  return 0;
}

TEST(refusals_of_the_only_way_mean_death) {
  Refusals refusals;
  refusals.onCarried(0, kStart);
  CHECK_EQ(refusedUntilDead(refusals, 0, kStart), 4);
}

TEST(refusals_must_last) {
  Refusals refusals;
  refusals.onCarried(0, kStart);
  CHECK(!refusals.undecided(0));
  for (int i = 0; i < 100; ++i) {
    CHECK(!refusals.onRefused(0, kStart + i * milliseconds(1)));
    CHECK_EQ(refusals.undecided(0), i < 3);
  }
  CHECK(refusals.onRefused(0, kStart + Refusals::kSpan));
}

TEST(refusals_of_one_way_mean_nothing_while_another_is_silent) {
  Refusals refusals;
  refusals.setRoutes(2);
  refusals.onCarried(0, kStart);
  refusals.onCarried(1, kStart);
  CHECK_EQ(refusedUntilDead(refusals, 1, kStart), 0);
  refusals.onOther(0); // no answer in 5 s
  CHECK_EQ(refusedUntilDead(refusals, 1, kStart + seconds(5)), 0);
  // Now both say so; and once more, after one of them did not.
  CHECK(refusals.onRefused(0, kStart + seconds(10)));
  refusals.onOther(1);
  CHECK(!refusals.onRefused(0, kStart + seconds(11)));
  CHECK_EQ(refusedUntilDead(refusals, 1, kStart + seconds(12)), 2);
}

TEST(refusals_count_by_ways_that_have_carried) {
  Refusals refusals;
  refusals.setRoutes(3);
  refusals.onCarried(0, kStart);
  // It has always been refused there, by a firewall.
  CHECK_EQ(refusedUntilDead(refusals, 2, kStart), 0);
  CHECK_EQ(refusedUntilDead(refusals, 0, kStart), 4);
}

TEST(refusals_before_any_connection_must_come_from_everywhere) {
  Refusals refusals;
  refusals.setRoutes(2);
  CHECK_EQ(refusedUntilDead(refusals, 0, kStart), 0);
  CHECK(refusals.onRefused(1, kStart + seconds(1)));
}

TEST(refusals_end_with_a_connection) {
  Refusals refusals;
  refusals.onCarried(0, kStart);
  for (int i = 0; i < 3; ++i) {
    CHECK(!refusals.onRefused(0, kStart + i * milliseconds(100)));
  }
  refusals.onConnected();
  CHECK(!refusals.onRefused(0, kStart + seconds(1)));
}

// A cable that was cut an hour ago does not hide a death now.
TEST(refusals_do_not_wait_for_a_way_that_was_lost_long_before) {
  Refusals refusals;
  refusals.onCarried(1, kStart);
  refusals.onCarried(0, kStart + Refusals::kLately);
  CHECK_EQ(refusedUntilDead(refusals, 0, kStart), 0);
  refusals.onConnected();
  refusals.onCarried(0, kStart + Refusals::kLately + milliseconds(1));
  CHECK_EQ(refusedUntilDead(refusals, 0, kStart), 4);
}

} // namespace
} // namespace resilient::test
