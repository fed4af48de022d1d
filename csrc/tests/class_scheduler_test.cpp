#include "path/class_scheduler.h"

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

TEST(class_scheduler_serves_the_most_urgent) {
  ClassScheduler scheduler(1 << 20);
  CHECK_EQ(scheduler.pick(0), kQueueCount);
  for (QueueSet waiting = 1; waiting < QueueSet{1} << kQueueCount; ++waiting) {
    size_t first = 0;
    while ((waiting >> first & 1) == 0) {
      ++first;
    }
    CHECK_EQ(scheduler.pick(waiting), first);
  }
}

// With everything waiting, bulk gets one chunk for `starvationBytes` of the
// others, no less and not much more.
TEST(class_scheduler_lets_nobody_starve) {
  constexpr uint64_t kStarvation = 10'000;
  constexpr uint64_t kChunk = 1000;
  ClassScheduler scheduler(kStarvation);
  constexpr QueueSet waiting = 0b1001;
  uint64_t bulk = 0, urgent = 0;
  for (int i = 0; i < 11'000; ++i) {
    const size_t c = scheduler.pick(waiting);
    (c == 3 ? bulk : urgent) += kChunk;
    CHECK(c == 0 || c == 3);
    scheduler.served(c, kChunk, waiting);
  }
  CHECK_EQ(bulk, 1'000'000u);
  CHECK_EQ(urgent, 10'000'000u);
}

// Any load, any chunk: no waiting class is passed over for more than the
// bound, one chunk over it, and few turns of the others, starved like it.
TEST(class_scheduler_bounds_every_wait) {
  forSeeds(200, [](uint64_t seed) {
    Prng prng(seed);
    const uint64_t starvation = 1 + prng.below(5000);
    const uint64_t chunk = 1 + prng.below(1000);
    ClassScheduler scheduler(starvation);
    std::array<uint64_t, kQueueCount> passed{};
    for (int i = 0; i < 2000; ++i) {
      QueueSet waiting = 0;
      for (size_t c = 0; c < kQueueCount; ++c) {
        if (c == 3 || prng.chance(0.7)) {
          waiting |= QueueSet{1} << c;
        }
      }
      const size_t c = scheduler.pick(waiting);
      CHECK(c < kQueueCount && (waiting >> c & 1) != 0);
      const uint64_t bytes = 1 + prng.below(chunk);
      scheduler.served(c, bytes, waiting);
      for (size_t k = 0; k < kQueueCount; ++k) {
        passed[k] = k == c || (waiting >> k & 1) == 0 ? 0 : passed[k] + bytes;
        CHECK(passed[k] <= starvation + 2 * kQueueCount * chunk);
      }
    }
  });
}

// Time in which a class had nothing to send earns it nothing.
TEST(class_scheduler_forgets_what_did_not_wait) {
  ClassScheduler scheduler(100);
  for (int i = 0; i < 100; ++i) {
    scheduler.served(0, 1000, 0b0001);
  }
  CHECK_EQ(scheduler.pick(0b1001), 0u);
}

} // namespace
} // namespace resilient::test
