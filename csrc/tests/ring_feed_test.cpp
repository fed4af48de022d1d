#include "tests/fuzz/ring_feed.h"

#include <vector>

#include "base/random.h"
#include "tests/check.h"

// The fuzzer's target on seeded random input: what a peer may write into shared
// rings. A failure of the feed aborts; sanitizers see more.

namespace resilient::test {
namespace {

TEST(ring_feed_random_programs) {
  SharedMemory memory;
  FileDescriptor descriptor;
  CHECK(SharedMemory::make(0, memory, descriptor).ok());
  uint64_t refused = 0, taken = 0, all = 0;
  forSeeds(20'000, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<uint8_t> program(1 + prng.below(300));
    for (uint8_t& b : program) {
      b = static_cast<uint8_t>(
          prng.chance(0.8) ? prng.below(seed % 2 == 0 ? 8 : 10) : prng.next());
    }
    RingFeed feed(program, memory);
    feed.run();
    refused += feed.refused();
    taken += feed.taken() != 0;
    ++all;
  });
  // The programs do reach something.
  CHECK(all < 100 || (refused > all / 10 && taken > all / 10));
}

} // namespace
} // namespace resilient::test
