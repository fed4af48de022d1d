#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace resilient {

// Bytes from the kernel: unpredictable, for nonces, uids and secrets. The only
// source of chance in the project that does not replay from a seed; delegate/
// and transport/ call it, the core never does. Blocks at most until the
// kernel's pool is ready at boot.
void fillRandom(void* data, size_t bytes);

// One step of splitmix64: turns any number, also 0, 1, 2..., into a well mixed
// one. A pure function, so `mix(seed ^ k)` is a random access stream.
constexpr uint64_t mixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A small seeded generator (xoshiro256**) for simulation and faults: the same
// seed gives the same stream on every machine. Not for secrets. Usable with
// the distributions of <random>, though those differ between libraries.
//
// An object belongs to one thread at a time. The constants and the stream are
// pinned by a test (seeded_streams_are_pinned_and_even).
class Prng {
 public:
  using result_type = uint64_t;

  explicit Prng(uint64_t seed);
  uint64_t next();
  // Uniform in [0, bound), without bias; bound > 0.
  uint64_t below(uint64_t bound);
  // Uniform in [0, 1), 53 bits.
  double uniform() {
    return static_cast<double>(next() >> 11) * 0x1p-53;
  }
  bool chance(double probability) {
    return uniform() < probability;
  }

  uint64_t operator()() {
    return next();
  }
  static constexpr uint64_t min() {
    return 0;
  }
  static constexpr uint64_t max() {
    return UINT64_MAX;
  }

 private:
  std::array<uint64_t, 4> state_;
};

} // namespace resilient
