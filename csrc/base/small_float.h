#pragma once

#include <bit>
#include <cstdint>

namespace resilient {

// Both values exist before the choice, which keeps compilers from making it a
// branch: a loop with one no longer vectorises.
[[gnu::always_inline]] constexpr uint32_t
chooseBits(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return no ^ ((yes ^ no) & mask);
}

// The floating-point formats narrower than float32, as conversions to and from
// it. They have no branches and no tables, so a loop over them vectorises, and
// use only integer and exact float operations, so every CPU gives the same
// bits. Rounding is to nearest, ties to even. Numbers that do not fit become
// what they become in torch: infinity (float16, float8_e5m2), the largest
// finite number (float8_e4m3fn, infinities too) or NaN (the fnuz formats, which
// have neither infinity nor a negative zero). Every NaN becomes the one
// canonical NaN of its format: which of two NaNs an addition returns depends on
// how the compiler orders its operands.
//
// A format is a layout and five constants. Magnitudes from kOverflow on, as
// float32 bits, become kOverflowCode. Rounding can carry a smaller one into the
// next code. The result is infinity or NaN and right as it is, except with
// kSaturates, which clamps it. kUnsignedZero marks the fnuz formats.
template <typename Bits, int kMantissaBits, int kBias>
struct SmallFloatLayout {
  using Storage = Bits;
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Bits));
  // Added to a number's exponent, in place, it makes a float32.
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  // The least normal number, as float32 bits.
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias)
      << 23;
  // Adding this number to a subnormal leaves its rounded mantissa in the
  // lowest bits of the sum: the float unit does the rounding.
  static constexpr uint32_t kSubnormalMagic =
      static_cast<uint32_t>(127 - kBias + kShift + 1) << 23;
};

struct Float16Format : SmallFloatLayout<uint16_t, 10, 15> {
  static constexpr uint32_t kOverflow = 143u << 23; // 65536 and above
  static constexpr uint32_t kOverflowCode = 0x7c00;
  static constexpr uint32_t kNan = 0x7e00;
  static constexpr bool kSaturates = false;
  static constexpr bool kUnsignedZero = false;
  [[gnu::always_inline]] static constexpr uint32_t special(
      uint32_t bits,
      uint32_t magnitude) {
    return chooseBits(magnitude >= 0x7c00, bits | 0x7f800000u, bits);
  }
};

struct Float8E5M2Format : SmallFloatLayout<uint8_t, 2, 15> {
  static constexpr uint32_t kOverflow = 143u << 23;
  static constexpr uint32_t kOverflowCode = 0x7c;
  static constexpr uint32_t kNan = 0x7f;
  static constexpr bool kSaturates = false;
  static constexpr bool kUnsignedZero = false;
  [[gnu::always_inline]] static constexpr uint32_t special(
      uint32_t bits,
      uint32_t magnitude) {
    return chooseBits(magnitude >= 0x7c, bits | 0x7f800000u, bits);
  }
};

struct Float8E4M3FNFormat : SmallFloatLayout<uint8_t, 3, 7> {
  static constexpr uint32_t kOverflow = 0x43f00000; // 480; the maximum is 448
  static constexpr uint32_t kOverflowCode = 0x7e;
  static constexpr uint32_t kNan = 0x7f;
  static constexpr bool kSaturates = true;
  static constexpr bool kUnsignedZero = false;
  [[gnu::always_inline]] static constexpr uint32_t special(
      uint32_t bits,
      uint32_t magnitude) {
    return chooseBits(magnitude == 0x7f, 0x7fc00000u, bits);
  }
};

// In the fnuz formats the code of a negative zero is the only NaN.
struct Float8E4M3FNUZFormat : SmallFloatLayout<uint8_t, 3, 8> {
  static constexpr uint32_t kOverflow = 0x87u << 23; // 256; the maximum is 240
  static constexpr uint32_t kOverflowCode = 0x80;
  static constexpr uint32_t kNan = 0x80;
  static constexpr bool kSaturates = false;
  static constexpr bool kUnsignedZero = true;
};

struct Float8E5M2FNUZFormat : SmallFloatLayout<uint8_t, 2, 16> {
  static constexpr uint32_t kOverflow = 0x8fu << 23; // 65536; maximum 57344
  static constexpr uint32_t kOverflowCode = 0x80;
  static constexpr uint32_t kNan = 0x80;
  static constexpr bool kSaturates = false;
  static constexpr bool kUnsignedZero = true;
};

// The conversion is exact: every value of a narrow format is a float32. Both
// candidates, normal and subnormal, are computed, and the code decides.
template <typename Format>
[[gnu::always_inline]] constexpr float decodeSmallFloat(
    typename Format::Storage code) {
  const uint32_t wide = code;
  const uint32_t magnitude = wide & (Format::kSign - 1);
  const uint32_t sign = (wide & Format::kSign) << Format::kSignShift;
  const uint32_t shifted = magnitude << Format::kShift;
  const uint32_t normal = shifted + Format::kRebias;
  // A subnormal m is (1 + m) - 1, scaled: exact, and no float32 subnormal
  // appears that a flush-to-zero mode could drop.
  const float one = std::bit_cast<float>(Format::kMinNormal);
  const uint32_t subnormal = std::bit_cast<uint32_t>(
      std::bit_cast<float>(shifted + Format::kMinNormal) - one);
  uint32_t bits =
      chooseBits(magnitude < (1u << Format::kMantissa), subnormal, normal);
  if constexpr (Format::kUnsignedZero) {
    bits = chooseBits(wide == Format::kNan, 0x7fc00000u, bits | sign);
  } else {
    bits = Format::special(bits, magnitude) | sign;
  }
  return std::bit_cast<float>(bits);
}

// How it works. A normal result comes from integer arithmetic: rebias the
// exponent, add just under half of the last place, plus one if the last kept
// bit is odd, and cut. A carry out of the mantissa raises the exponent, which
// is the right result. A subnormal result comes from one float addition: at the
// magnitude of kSubnormalMagic the last place of a float32 is the smallest
// subnormal of the format, so the float unit rounds to it. This needs the
// default floating-point state (EventLoop::Turn). NaN comes last and overrides
// the rest.
template <typename Format>
[[gnu::always_inline]] inline typename Format::Storage encodeSmallFloat(
    float value) {
  constexpr uint32_t kInfinity = 0x7f800000;
  const uint32_t all = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = all & 0x7fffffffu;
  const uint32_t sign = (all & 0x80000000u) >> Format::kSignShift;
  const uint32_t odd = (magnitude >> Format::kShift) & 1;
  const uint32_t normal = (magnitude - Format::kRebias +
                           ((1u << (Format::kShift - 1)) - 1) + odd) >>
      Format::kShift;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(
          std::bit_cast<float>(magnitude) +
          std::bit_cast<float>(Format::kSubnormalMagic)) -
      Format::kSubnormalMagic;
  uint32_t code = chooseBits(magnitude < Format::kMinNormal, subnormal, normal);
  code =
      chooseBits(magnitude >= Format::kOverflow, Format::kOverflowCode, code);
  if constexpr (Format::kSaturates) {
    code =
        chooseBits(code > Format::kOverflowCode, Format::kOverflowCode, code);
  }
  if constexpr (Format::kUnsignedZero) {
    code = chooseBits(code == 0, 0, code | sign);
  } else {
    code |= sign;
  }
  code = chooseBits(magnitude > kInfinity, Format::kNan, code);
  return static_cast<typename Format::Storage>(code);
}

// bfloat16 is the upper half of a float32.
[[gnu::always_inline]] constexpr float decodeBFloat16(uint16_t code) {
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
}

[[gnu::always_inline]] inline uint16_t encodeBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(chooseBits(nan, 0x7fc0u, rounded));
}

} // namespace resilient
