#include "path/start_up_pacing.h"

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kRate = 125'000'000;

StartUpPacing::Sample sample(uint64_t bytesPerS, Nanos roundTrip) {
  StartUpPacing::Sample s;
  s.startingUp = true;
  s.bytesPerS = bytesPerS;
  s.roundTrip = roundTrip;
  s.minRoundTrip = milliseconds(40);
  return s;
}

TEST(start_up_pacing_waits_for_a_queue) {
  StartUpPacing pacing;
  CHECK_EQ(pacing.observe(sample(kRate / 10, milliseconds(41))), 0u);
  CHECK_EQ(pacing.observe(sample(kRate, milliseconds(45))), 0u);
  CHECK_EQ(pacing.observe(sample(kRate, milliseconds(63))), kRate / 4 * 5);
  // The queue has gone, the link is the same.
  CHECK_EQ(pacing.observe(sample(kRate, milliseconds(41))), kRate / 4 * 5);
}

TEST(start_up_pacing_follows_a_faster_link) {
  StartUpPacing pacing;
  uint64_t limit = pacing.observe(sample(kRate, milliseconds(63)));
  for (int i = 0; i < 10; ++i) { // it carries all that it gets
    const uint64_t next = pacing.observe(sample(limit, milliseconds(41)));
    CHECK(next >= limit / 5 * 6);
    limit = next;
  }
  CHECK(limit > 8 * kRate);
  // An idle time, after which little has been measured.
  CHECK_EQ(pacing.observe(sample(1000, milliseconds(41))), limit);
}

TEST(start_up_pacing_ends_with_the_start_up) {
  StartUpPacing pacing;
  CHECK(pacing.observe(sample(kRate, milliseconds(63))) > 0);
  StartUpPacing::Sample over = sample(kRate, milliseconds(63));
  over.startingUp = false;
  CHECK_EQ(pacing.observe(over), 0u);
  CHECK_EQ(pacing.observe(sample(kRate, milliseconds(41))), 0u);
}

// The queue is that of others.
TEST(start_up_pacing_leaves_a_new_connection_alone) {
  StartUpPacing pacing;
  CHECK_EQ(pacing.observe(sample(14'480 * 25, milliseconds(80))), 0u);
}

} // namespace
} // namespace resilient::test
