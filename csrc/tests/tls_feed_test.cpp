#include "tests/fuzz/tls_feed.h"

#include <vector>

#include "base/random.h"
#include "tests/check.h"
#include "tests/tls_pair.h"

// The fuzzer's target on seeded random input: what a network may do to an
// encrypted connection. A failure of the feed aborts; sanitizers see more.

namespace resilient::test {
namespace {

std::vector<uint8_t> randomInput(Prng& prng, size_t most, uint8_t mode) {
  std::vector<uint8_t> input(2 + prng.below(most));
  for (uint8_t& b : input) {
    b = static_cast<uint8_t>(prng.next());
  }
  input[0] = mode;
  return input;
}

TEST(tls_feed_random_bytes) {
  if (!tlsAvailable()) {
    return;
  }
  forSeeds(500, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    auto input = randomInput(prng, 2000, static_cast<uint8_t>(seed % 2));
    if (input.size() > 8 && prng.chance(0.7)) { // the beginning of a record
      const std::array<uint8_t, 6> head{
          255, uint8_t(20 + prng.below(4)), 3, 3, 0, uint8_t(prng.next())};
      std::copy(head.begin(), head.end(), input.begin() + 1);
    }
    TlsFeed(input).run();
  });
}

TEST(tls_feed_random_programs) {
  if (!tlsAvailable()) {
    return;
  }
  uint64_t opened = 0, failed = 0, all = 0;
  forSeeds(500, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    auto program = randomInput(prng, 400, 2);
    if (seed % 2 == 0) { // most of it is left undisturbed
      for (size_t i = 1; i < program.size(); ++i) {
        program[i] %= program[i] / 2 % 10 > 4 ? 10 : 256;
      }
    }
    TlsFeed feed(program);
    feed.run();
    opened += feed.opened() != 0;
    failed += feed.failed();
    ++all;
  });
  // The programs do reach something.
  CHECK(all < 100 || (opened > all / 4 && failed > all / 4));
}

} // namespace
} // namespace resilient::test
