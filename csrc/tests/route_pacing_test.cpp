#include "path/route_pacing.h"

#include <cmath>

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;

constexpr double kRate = 125e6;

// A link of `bytesPerS` and 40 ms that is given bursts: the limit afterwards.
struct Link {
  double bytesPerS = kRate;
  double queued = 0; // bytes
  double acknowledged = 0;
  TimePoint now{std::chrono::seconds(100)};
  RoutePacing pacing;
  uint64_t limit = 0;

  // Looks every 5 ms. `sends`: bytes per second if there is no limit.
  void burst(double bytes, double sends) {
    constexpr double kStepS = 0.005;
    double left = bytes, way = 0;
    for (int step = 0; step < 1000; ++step) {
      const double rate =
          limit == 0 ? sends : std::min(sends, static_cast<double>(limit));
      const double sent = std::min(left, rate * kStepS);
      left -= sent;
      queued += sent;
      const double carried = std::min(queued, bytesPerS * kStepS);
      queued -= carried;
      way += kStepS;
      acknowledged += way > 0.04 ? carried : 0; // the first comes later
      now += milliseconds(5);
      look(static_cast<uint64_t>(queued + carried * 0.04 / kStepS));
      if (left <= 0 && queued <= 0) {
        break;
      }
    }
    now += milliseconds(1500); // idle
    look();
  }
  void look(uint64_t inFlight = 0) {
    RoutePacing::Sample s;
    s.now = now;
    s.acknowledged = static_cast<uint64_t>(acknowledged);
    s.inFlight = inFlight;
    s.minRoundTrip = milliseconds(40);
    s.roundTrip = s.minRoundTrip + fromSeconds(queued / bytesPerS);
    limit = pacing.observe(s);
  }
};

TEST(route_pacing_waits_for_a_queue) {
  Link link;
  link.burst(16e6, 0.9 * kRate);
  CHECK_EQ(link.limit, 0u);
  link.burst(16e6, 2.5 * kRate); // four connections, say
  CHECK(std::abs(static_cast<double>(link.limit) / kRate - 1.25) < 0.1);
  // The queue has gone, the link is the same.
  link.burst(16e6, 0.9 * kRate);
  CHECK(std::abs(static_cast<double>(link.limit) / kRate - 1.25) < 0.1);
}

TEST(route_pacing_follows_the_link) {
  Link link;
  link.burst(32e6, 3 * kRate);
  link.bytesPerS = 8 * kRate;
  for (int i = 0; i < 12; ++i) {
    link.burst(64e6, 20 * kRate);
  }
  // A burst has to last for two round trips to show more.
  CHECK(static_cast<double>(link.limit) > 7 * kRate);
  link.bytesPerS = kRate / 4;
  for (int i = 0; i < 4; ++i) {
    link.burst(32e6, 20 * kRate);
  }
  CHECK(static_cast<double>(link.limit) < 1.5 * kRate / 4);
}

// Short bursts fill nothing, and the next long one is not held up.
TEST(route_pacing_does_not_take_small_bursts_for_a_slow_link) {
  Link link;
  for (int i = 0; i < 10; ++i) {
    link.burst(64e3, 3 * kRate);
  }
  CHECK_EQ(link.limit, 0u);
  link.burst(32e6, 3 * kRate);
  const auto limit = static_cast<double>(link.limit);
  for (int i = 0; i < 10; ++i) {
    link.burst(64e3, 3 * kRate);
  }
  CHECK_EQ(static_cast<double>(link.limit), limit);
}

// The queue is that of others.
TEST(route_pacing_leaves_new_connections_alone) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.minRoundTrip = milliseconds(40);
  s.roundTrip = milliseconds(80);
  s.inFlight = 80'000;
  for (int i = 0; i < 20; ++i) {
    s.now += milliseconds(5);
    s.acknowledged += 14'480;
    CHECK_EQ(pacing.observe(s), 0u);
  }
}

// BBR keeps four segments in flight for 200 ms now and then, and the smoothed
// round trip stays as it was for some time.
TEST(route_pacing_keeps_its_rate_while_bbr_measures_the_round_trip) {
  Link link;
  link.burst(32e6, 3 * kRate);
  const uint64_t limit = link.limit;
  link.queued = 2e6;
  for (int i = 0; i < 40; ++i) {
    link.now += milliseconds(5);
    link.acknowledged += 700;
    link.look(5792);
  }
  CHECK_EQ(link.limit, limit);
}

// A connection is replaced, and its bytes are no longer in the sum.
TEST(route_pacing_survives_other_connections) {
  Link link;
  link.burst(32e6, 3 * kRate);
  const uint64_t limit = link.limit;
  link.acknowledged /= 2;
  link.look();
  link.burst(32e6, 3 * kRate);
  CHECK(
      std::abs(
          static_cast<double>(link.limit) / static_cast<double>(limit) - 1) <
      0.2);
}

} // namespace
} // namespace resilient::test
