#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace resilient::test {

// What feeds have in common: arbitrary bytes that decide what is done.
class FuzzInput {
 protected:
  // `name` is that of the feed, for what it finds.
  FuzzInput(const char* name, std::span<const uint8_t> input)
      : input_(input), name_(name) {}

  void require(bool holds, const char* what) const {
    if (!holds) {
      std::fprintf(stderr, "%s: %s\n", name_, what);
      std::abort();
    }
  }

  uint8_t byte() {
    if (input_.empty()) {
      return 0;
    }
    const uint8_t b = input_.front();
    input_ = input_.subspan(1);
    return b;
  }
  // Mostly small numbers, sometimes those at which arithmetic goes wrong:
  // `special` are those of the feed, for a byte.
  template <class Special>
  uint64_t numberOr(Special special) {
    const uint8_t b = byte();
    if (b < 240) {
      return b;
    }
    if (b < 248) {
      return (uint64_t(1) << (8 * (b - 240))) * byte();
    }
    return b < 252 ? UINT64_MAX - byte() : special(byte());
  }

  std::span<const uint8_t> input_;

 private:
  const char* name_;
};

} // namespace resilient::test
