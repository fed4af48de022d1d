#include "tests/fuzz/hello_feed.h"

#include "base/random.h"
#include "tests/check.h"

// The fuzzer's target on seeded random input: what a network may do to a
// handshake. A failure of the feed aborts; sanitizers see more.

namespace resilient::test {
namespace {

TEST(hello_feed_random_bytes) {
  forSeeds(2000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<uint8_t> input(2 + prng.below(400));
    for (uint8_t& b : input) {
      b = static_cast<uint8_t>(prng.next());
    }
    input[0] = static_cast<uint8_t>(seed % 2);
    HelloFeed(input).run();
  });
}

TEST(hello_feed_random_programs) {
  uint64_t done = 0, failed = 0, all = 0;
  forSeeds(4000, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<uint8_t> program(1 + prng.below(60));
    for (uint8_t& b : program) {
      b = static_cast<uint8_t>(prng.next());
      if (seed % 4 < 3 && prng.chance(0.97)) { // mostly undisturbed
        b = static_cast<uint8_t>(b / 16 * 16 + b % 8);
      }
    }
    program[0] = static_cast<uint8_t>(2 + seed % 3);
    HelloFeed feed(program);
    feed.run();
    done += feed.done();
    failed += feed.failed();
    ++all;
  });
  // The programs do reach something.
  CHECK(all < 100 || (done > all / 10 && failed > all / 10));
}

} // namespace
} // namespace resilient::test
