#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/random.h"
#include "base/small_float.h"

// The common part of priority.cpp and the kernels in cuda/: they decide alike,
// to the bit. All of it is constexpr, which nvcc compiles for the device, too
// (with --expt-relaxed-constexpr).
//
// No magnitude, sum or mean depends on the processor: there are only integer
// operations, float additions in a fixed order, one division and one rounding.
// For sums that are not a number, meanOf() gives the same one.
namespace resilient::magnitude {

// How an element type is read: its magnitude, exactly, in the type of the sums;
// and the bound that the bits of finite ones stay below.
struct OfFloat32 {
  using Storage = uint32_t;
  using Sum = float;
  static constexpr Storage kMagnitude = 0x7fffffff;
  static constexpr Storage kInfinity = 0x7f800000;
  static constexpr Sum of(Storage code) {
    return std::bit_cast<float>(code & kMagnitude);
  }
};

struct OfBFloat16 {
  using Storage = uint16_t;
  using Sum = float;
  static constexpr Storage kMagnitude = 0x7fff;
  static constexpr Storage kInfinity = 0x7f80;
  static constexpr Sum of(Storage code) {
    return decodeBFloat16(code & kMagnitude);
  }
};

struct OfFloat16 {
  using Storage = uint16_t;
  using Sum = float;
  static constexpr Storage kMagnitude = 0x7fff;
  static constexpr Storage kInfinity = 0x7c00;
  static constexpr Sum of(Storage code) {
    return decodeSmallFloat<Float16Format>(code & kMagnitude);
  }
};

struct OfFloat64 {
  using Storage = uint64_t;
  using Sum = double;
  static constexpr Storage kMagnitude = 0x7fffffffffffffff;
  static constexpr Storage kInfinity = 0x7ff0000000000000;
  static constexpr Sum of(Storage code) {
    return std::bit_cast<double>(code & kMagnitude);
  }
};

template <typename Type>
constexpr bool isFinite(typename Type::Storage code) {
  return (code & Type::kMagnitude) < Type::kInfinity;
}

// The order of every sum. There are kSums of them, in rows of kLanes: element i
// is added to sum i % kSums, but what does not fill the last round goes to the
// first row, element by element. Then the second row is added to the first, the
// fourth to the third, the third to the first; then of this row the second half
// to the first, and so on. Rows are what vectors of a CPU hold; two rows are
// the threads of a warp.
//
// A change of this order changes results: tests/test_cuda_loss.py and
// csrc/tests/cuda_loss_test.cpp compare the two implementations bit for bit.
inline constexpr size_t kLanes = 16;
inline constexpr size_t kSums = 4 * kLanes;

// Equation 1, from the sum of `count` > 0 magnitudes.
constexpr float meanOf(double sum, size_t count) {
  return sum == sum ? static_cast<float>(sum / static_cast<double>(count))
                    : std::numeric_limits<float>::quiet_NaN();
}

// The elements [begin, begin + count) of one packet.
struct PacketRange {
  size_t begin;
  size_t count;
};

// Packet `packet` of those that packetCount() counts.
//
// A packet without elements does not occur: `packet` must be below
// packetCount().
constexpr PacketRange packetRange(
    size_t packet,
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements) {
  const size_t first = std::min(count, firstPacketElements);
  if (packet == 0 && first > 0) {
    return {0, first};
  }
  const size_t begin = first + (packet - (first > 0)) * elementsPerPacket;
  return {begin, std::min(elementsPerPacket, count - begin)};
}

// Elements that sampledThreshold looks at: with 4096 the largest 1 % are 41,
// so the share of elements above the threshold comes out within about 16 % of
// what was asked for (a standard deviation). More would cost a cache miss each.
inline constexpr size_t kThresholdSample = 4096;

// The place of element `i` of the sample of `count` elements: uniform, with a
// bias below count / 2^64; or all of them, if they are few. Each place is
// independent, so many threads can draw them.
constexpr size_t samplePlace(size_t i, size_t count, uint64_t seed) {
  if (count <= kThresholdSample) {
    return i;
  }
  const uint64_t bits = mixBits(mixBits(seed) + i);
  return static_cast<size_t>(
      (static_cast<unsigned __int128>(bits) * count) >> 64);
}

// The value of an element in the sample. Values that are not finite become
// infinity, as NaN cannot be ordered.
template <typename Type>
constexpr double sampleValue(typename Type::Storage code) {
  return isFinite<Type>(code) ? static_cast<double>(Type::of(code))
                              : std::numeric_limits<double>::infinity();
}

} // namespace resilient::magnitude
