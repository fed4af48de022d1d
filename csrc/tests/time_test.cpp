#include "base/time.h"
#include "tests/check.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

TEST(durations_are_told_in_the_unit_that_suits) {
  CHECK_EQ(durationText(0ns), "0 us");
  CHECK_EQ(durationText(97700ns), "97.7 us");
  CHECK_EQ(durationText(999600ns), "1 ms");
  CHECK_EQ(durationText(12345us), "12.3 ms");
  CHECK_EQ(durationText(999700us), "1 s");
  CHECK_EQ(durationText(3020ms), "3.02 s");
  CHECK_EQ(durationText(100s), "100 s");
  CHECK_EQ(durationText(25min), "25 min");
  CHECK_EQ(durationText(36h), "36 h");
  CHECK_EQ(durationText(24h * 365), "8760 h");
}

} // namespace
} // namespace resilient
