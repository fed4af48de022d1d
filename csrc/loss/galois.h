#pragma once

#include <array>
#include <cstdint>

namespace resilient::galois {

// Arithmetic in GF(256). The elements are polynomials over GF(2) of degree
// below 8, modulo x^8 + x^4 + x^3 + x^2 + 1. Sum and difference are XOR. Other
// implementations of Reed-Solomon over bytes (Intel's ISA-L among them) use the
// same polynomial, so results can be compared.
inline constexpr unsigned kPolynomial = 0x11d;

// Bit by bit, for tables at compile time. The kernels look products up.
constexpr uint8_t multiply(uint8_t a, uint8_t b) {
  unsigned product = 0;
  unsigned shifted = a;
  for (unsigned bits = b; bits != 0; bits >>= 1) {
    if (bits & 1) {
      product ^= shifted;
    }
    shifted <<= 1;
    if (shifted & 0x100) {
      shifted ^= kPolynomial;
    }
  }
  return static_cast<uint8_t>(product);
}

struct LogarithmTables {
  std::array<uint8_t, 256> log{};
  // Twice the 255 powers: a sum of two logarithms is an index.
  std::array<uint8_t, 510> power{};
  std::array<uint8_t, 256> inverse{};
};

constexpr LogarithmTables makeLogarithmTables() {
  LogarithmTables tables;
  uint8_t value = 1; // 2 generates the multiplicative group
  for (int i = 0; i < 255; ++i) {
    tables.power[i] = tables.power[i + 255] = value;
    tables.log[value] = static_cast<uint8_t>(i);
    value = multiply(value, 2);
  }
  for (int i = 1; i < 256; ++i) {
    tables.inverse[i] = tables.power[255 - tables.log[i]];
  }
  return tables;
}

inline constexpr LogarithmTables kLogarithms = makeLogarithmTables();

// The inverse of a number other than 0.
constexpr uint8_t inverse(uint8_t a) {
  return kLogarithms.inverse[a];
}

// The product of numbers other than 0, as a sum of logarithms. A division costs
// the same as a multiplication.
class LogProduct {
 public:
  void multiplyBy(uint8_t a) {
    log_ += kLogarithms.log[a];
  }
  void divideBy(uint8_t a) {
    log_ += 255u - kLogarithms.log[a];
  }
  uint8_t value() const {
    return kLogarithms.power[log_ % 255];
  }

 private:
  uint32_t log_ = 0;
};

} // namespace resilient::galois
