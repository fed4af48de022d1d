#include "path/congestion_choice.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// After how long it changes; Nanos::max() if it does not within a minute.
Nanos changesAfter(
    double segmentsPerS,
    double loss,
    Nanos roundTrip,
    Nanos min,
    bool busy = true) {
  CongestionChoice choice;
  CongestionChoice::Sample s;
  TimePoint now{seconds(100)};
  const TimePoint begin = now;
  double delivered = 0;
  s.roundTrip = roundTrip;
  s.minRoundTrip = min;
  s.busy = busy;
  for (; now - begin < seconds(60); now += milliseconds(20)) {
    delivered += segmentsPerS * 0.02;
    s.delivered = static_cast<uint32_t>(delivered);
    s.retransmits = static_cast<uint32_t>(delivered * loss);
    if (choice.observe(s, now)) {
      return now - begin;
    }
  }
  return Nanos::max();
}

constexpr Nanos kMin = milliseconds(40);

// CUBIC at 1 % of loss and 40 ms: about 260 segments a second.
TEST(congestion_choice_changes_where_loss_comes_without_a_queue) {
  CHECK(changesAfter(260, 0.01, milliseconds(41), kMin) <= seconds(5));
  CHECK(changesAfter(1000, 0.002, milliseconds(42), kMin) <= seconds(6));
}

TEST(congestion_choice_stays_where_a_queue_explains_the_loss) {
  CHECK(changesAfter(260, 0.01, milliseconds(60), kMin) == Nanos::max());
  CHECK(changesAfter(8000, 0.01, milliseconds(120), kMin) == Nanos::max());
}

TEST(congestion_choice_stays_where_little_is_lost) {
  CHECK(changesAfter(260, 0, milliseconds(41), kMin) == Nanos::max());
  CHECK(changesAfter(80000, 1e-5, milliseconds(41), kMin) == Nanos::max());
}

TEST(congestion_choice_says_nothing_of_an_idle_connection) {
  CHECK(changesAfter(260, 0.01, milliseconds(41), kMin, false) == Nanos::max());
  // Nor where the kernel does not tell the round trip.
  CHECK(changesAfter(260, 0.01, milliseconds(41), Nanos(0)) == Nanos::max());
}

TEST(congestion_choice_is_made_once) {
  CongestionChoice choice;
  CongestionChoice::Sample s;
  s.busy = true;
  s.roundTrip = s.minRoundTrip = kMin;
  int changes = 0;
  for (TimePoint now{seconds(1)}; now < TimePoint{seconds(60)};
       now += milliseconds(10)) {
    s.delivered += 10;
    s.retransmits += 1;
    changes += choice.observe(s, now);
  }
  CHECK_EQ(changes, 1);
}

} // namespace
} // namespace resilient::test
