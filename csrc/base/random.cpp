#include "base/random.h"

#include <sys/random.h>

#include <bit>

#include "base/syscall.h"

namespace resilient {

void fillRandom(void* data, size_t bytes) {
  auto* p = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    ssize_t n = retryInterrupted([&] { return ::getrandom(p, bytes, 0); });
    if (n < 0) {
      throw StatusError(errnoStatus(StatusCode::kInternal, "getrandom", errno));
    }
    p += n;
    bytes -= static_cast<size_t>(n);
  }
}

Prng::Prng(uint64_t seed) {
  for (uint64_t& word : state_) {
    word = mixBits(seed);
    seed += 0x9e3779b97f4a7c15;
  }
}

uint64_t Prng::next() {
  uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

uint64_t Prng::below(uint64_t bound) {
  // Values below 2^64 mod bound would make the small results more likely.
  uint64_t threshold = (0 - bound) % bound;
  for (;;) {
    uint64_t x = next();
    if (x >= threshold) {
      return x % bound;
    }
  }
}

} // namespace resilient
