#include "path/number_set.h"

#include <set>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

// The dumb twin: a set of every number.
TEST(number_set_is_a_set) {
  forSeeds(300, [](uint64_t seed) {
    Prng prng(seed);
    NumberSet numbers;
    std::set<uint64_t> twin;
    const uint64_t span = 1 + prng.below(100);
    for (int i = 0; i < 200; ++i) {
      const uint64_t n = prng.below(span);
      CHECK_EQ(numbers.insert(n), twin.insert(n).second);
      for (uint64_t k = 0; k <= span; ++k) {
        CHECK_EQ(numbers.contains(k), twin.contains(k));
      }
      size_t ranges = 0;
      for (uint64_t k : twin) {
        ranges += !twin.contains(k - 1);
      }
      CHECK_EQ(numbers.ranges(), ranges);
    }
  });
}

TEST(number_set_holds_the_extremes) {
  NumberSet numbers;
  CHECK(numbers.insert(UINT64_MAX));
  CHECK(numbers.insert(0));
  CHECK(!numbers.insert(UINT64_MAX));
  CHECK(!numbers.insert(0));
  CHECK_EQ(numbers.ranges(), 2u);
  CHECK(numbers.insert(UINT64_MAX - 1));
  CHECK_EQ(numbers.ranges(), 2u);
  CHECK(numbers.contains(UINT64_MAX));
  CHECK(!numbers.contains(1));
}

TEST(number_set_in_order_is_one_range) {
  NumberSet numbers;
  for (uint64_t n = 1; n <= 100'000; ++n) {
    numbers.insert(n);
  }
  CHECK_EQ(numbers.ranges(), 1u);
}

} // namespace
} // namespace resilient::test
