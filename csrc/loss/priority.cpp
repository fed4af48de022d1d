#include "loss/priority.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/random.h"
#include "base/small_float.h"
#include "loss/priority_internal.h"

namespace resilient {
namespace {

using kernels::Kernel;

// 16 lanes, in one register of AVX-512, two of AVX2, four of anything else.
// All kernels add the same numbers in the same order and so agree to the bit.
constexpr size_t kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// How an element type is read: the bits of its magnitude as float32, in vectors
// (by reference: vectors as arguments would depend on the processor) and one
// by one; and what the bits of finite ones stay below.
struct OfFloat32 {
  using Storage = uint32_t;
  using Vector = Words;
  static constexpr uint32_t kMagnitude = 0x7fffffff;
  static constexpr uint32_t kInfinity = 0x7f800000;
  [[gnu::always_inline]] static void toFloat32(const Words& code, Words& bits) {
    bits = code & kMagnitude;
  }
  static float toFloat32(uint32_t code) {
    return std::bit_cast<float>(code & kMagnitude);
  }
};

struct OfBFloat16 {
  using Storage = uint16_t;
  using Vector = Halves;
  static constexpr uint16_t kMagnitude = 0x7fff;
  static constexpr uint16_t kInfinity = 0x7f80;
  [[gnu::always_inline]] static void toFloat32(
      const Halves& code,
      Words& bits) {
    bits = __builtin_convertvector(code & kMagnitude, Words) << 16;
  }
  static float toFloat32(uint16_t code) {
    return decodeBFloat16(code & kMagnitude);
  }
};

struct OfFloat16 {
  using Storage = uint16_t;
  using Vector = Halves;
  static constexpr uint16_t kMagnitude = 0x7fff;
  static constexpr uint16_t kInfinity = 0x7c00;
  // As decodeSmallFloat.
  [[gnu::always_inline]] static void toFloat32(
      const Halves& code,
      Words& bits) {
    using Format = Float16Format;
    const Words magnitude = __builtin_convertvector(code & kMagnitude, Words);
    const Words shifted = magnitude << Format::kShift;
    const Words normal = (shifted + Format::kRebias) |
        ((Words)(magnitude >= 0x7c00u) & 0x7f800000u);
    const Words subnormal = (Words)((Floats)(shifted + Format::kMinNormal) -
                                    std::bit_cast<float>(Format::kMinNormal));
    const Words small = (Words)(magnitude < (1u << Format::kMantissa));
    bits = (subnormal & small) | (normal & ~small);
  }
  static float toFloat32(uint16_t code) {
    return decodeSmallFloat<Float16Format>(code & kMagnitude);
  }
};

template <typename Type>
[[gnu::always_inline]] inline double sumBody(
    const std::byte* data,
    size_t count) {
  using Storage = typename Type::Storage;
  constexpr size_t kStep = kLanes * sizeof(Storage);
  // Four sums, since each addition waits for the one before in its sum.
  Floats sums[4] = {};
  size_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) {
      typename Type::Vector code;
      std::memcpy(&code, data + i * sizeof(Storage) + k * kStep, kStep);
      Words bits;
      Type::toFloat32(code, bits);
      sums[k] += (Floats)bits;
    }
  }
  // A packet of 1376 bytes is five such rounds; so its rest matters.
  for (; i < count; i += kLanes) {
    typename Type::Vector code = {}; // beyond the end: zeros
    std::memcpy(
        &code,
        data + i * sizeof(Storage),
        std::min(kLanes, count - i) * sizeof(Storage));
    Words bits;
    Type::toFloat32(code, bits);
    sums[0] += (Floats)bits;
  }
  sums[0] += sums[1];
  sums[2] += sums[3];
  sums[0] += sums[2];
  float lanes[kLanes];
  std::memcpy(lanes, &sums[0], sizeof(lanes));
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

template <typename Type>
[[gnu::always_inline]] inline bool finiteBody(
    const std::byte* data,
    size_t count) {
  using Storage = typename Type::Storage;
  using Vector = typename Type::Vector;
  constexpr size_t kStep = kLanes * sizeof(Storage);
  constexpr Storage kMagnitude = Type::kMagnitude;
  constexpr Storage kInfinity = Type::kInfinity;
  // Looked at every so often only: what is sought is not there, usually.
  constexpr size_t kBetweenLooks = 64 * kLanes;
  size_t i = 0;
  while (i + kLanes <= count) {
    Vector found = {};
    const size_t end = std::min(count, i + kBetweenLooks);
    for (; i + kLanes <= end; i += kLanes) {
      Vector code;
      std::memcpy(&code, data + i * sizeof(Storage), kStep);
      found |= (Vector)((code & kMagnitude) >= kInfinity);
    }
    Storage any = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      any |= found[lane];
    }
    if (any != 0) {
      return false;
    }
  }
  for (; i < count; ++i) {
    Storage code;
    std::memcpy(&code, data + i * sizeof(Storage), sizeof(Storage));
    if ((code & kMagnitude) >= kInfinity) {
      return false;
    }
  }
  return true;
}

// The same bodies, compiled for each kind of processor.
template <typename Type>
struct ForScalar {
  static double sum(const std::byte* data, size_t count) {
    return sumBody<Type>(data, count);
  }
  static bool finite(const std::byte* data, size_t count) {
    return finiteBody<Type>(data, count);
  }
};

#if defined(__x86_64__)
template <typename Type>
struct ForAvx2 {
  __attribute__((target("avx2"))) static double sum(
      const std::byte* data,
      size_t count) {
    return sumBody<Type>(data, count);
  }
  __attribute__((target("avx2"))) static bool finite(
      const std::byte* data,
      size_t count) {
    return finiteBody<Type>(data, count);
  }
};

template <typename Type>
struct ForAvx512 {
  __attribute__((target("avx512f,avx512bw"))) static double sum(
      const std::byte* data,
      size_t count) {
    return sumBody<Type>(data, count);
  }
  __attribute__((target("avx512f,avx512bw"))) static bool finite(
      const std::byte* data,
      size_t count) {
    return finiteBody<Type>(data, count);
  }
};
#endif

template <typename Type>
double sumOf(Kernel kernel, const std::byte* data, size_t count) {
#if defined(__x86_64__)
  if (kernel == Kernel::kAvx512) {
    return ForAvx512<Type>::sum(data, count);
  }
  if (kernel == Kernel::kAvx2) {
    return ForAvx2<Type>::sum(data, count);
  }
#endif
  return ForScalar<Type>::sum(data, count);
}

template <typename Type>
bool finiteOf(Kernel kernel, const std::byte* data, size_t count) {
#if defined(__x86_64__)
  if (kernel == Kernel::kAvx512) {
    return ForAvx512<Type>::finite(data, count);
  }
  if (kernel == Kernel::kAvx2) {
    return ForAvx2<Type>::finite(data, count);
  }
#endif
  return ForScalar<Type>::finite(data, count);
}

double float64At(const std::byte* data, size_t i) {
  double value;
  std::memcpy(&value, data + 8 * i, 8);
  return std::abs(value);
}

template <typename Type>
double magnitudeAt(const std::byte* data, size_t i) {
  typename Type::Storage code;
  std::memcpy(&code, data + i * sizeof(code), sizeof(code));
  return Type::toFloat32(code);
}

double magnitudeAt(DType dtype, const std::byte* data, size_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return magnitudeAt<OfFloat32>(data, i);
    case DType::kBFloat16:
      return magnitudeAt<OfBFloat16>(data, i);
    case DType::kFloat16:
      return magnitudeAt<OfFloat16>(data, i);
    default:
      return float64At(data, i);
  }
}

void checkType(DType dtype) {
  if (!hasMagnitude(dtype)) {
    throw std::invalid_argument(
        std::string("dtype ") + dtypeName(dtype) +
        ": priorities by magnitude need float32, bfloat16, float16 or float64");
  }
}

void checkFraction(const char* name, double value, bool zero) {
  if (!(value <= 1 && (zero ? value >= 0 : value > 0))) {
    throw std::invalid_argument(
        std::string(name) + ": expected a fraction " +
        (zero ? "from 0 to 1" : "above 0, at most 1") + ", got " +
        std::to_string(value));
  }
}

} // namespace

namespace kernels {

double
magnitudeSum(Kernel kernel, DType dtype, const std::byte* data, size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return sumOf<OfFloat32>(kernel, data, count);
    case DType::kBFloat16:
      return sumOf<OfBFloat16>(kernel, data, count);
    case DType::kFloat16:
      return sumOf<OfFloat16>(kernel, data, count);
    default:
      break;
  }
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    sum += float64At(data, i);
  }
  return sum;
}

bool allFinite(
    Kernel kernel,
    DType dtype,
    const std::byte* data,
    size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return finiteOf<OfFloat32>(kernel, data, count);
    case DType::kBFloat16:
      return finiteOf<OfBFloat16>(kernel, data, count);
    case DType::kFloat16:
      return finiteOf<OfFloat16>(kernel, data, count);
    default:
      break;
  }
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(float64At(data, i))) {
      return false;
    }
  }
  return true;
}

} // namespace kernels

bool hasMagnitude(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
      dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

double sampledThreshold(
    DType dtype,
    const std::byte* data,
    size_t count,
    double topFraction,
    uint64_t seed) {
  checkType(dtype);
  checkFraction("top_fraction", topFraction, false);
  if (count == 0) {
    return 0;
  }
  const bool all = count <= kThresholdSample;
  std::vector<double> sample(all ? count : kThresholdSample);
  Prng random(seed);
  for (size_t i = 0; i < sample.size(); ++i) {
    const double value =
        magnitudeAt(dtype, data, all ? i : random.below(count));
    // Also in place of what cannot be ordered.
    sample[i] =
        std::isfinite(value) ? value : std::numeric_limits<double>::infinity();
  }
  const auto top = static_cast<size_t>(
      std::ceil(topFraction * static_cast<double>(sample.size())));
  const auto place = sample.begin() +
      static_cast<ptrdiff_t>(std::clamp<size_t>(top, 1, sample.size()) - 1);
  std::nth_element(sample.begin(), place, sample.end(), std::greater<>());
  return *place;
}

size_t packetCount(
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements) {
  if (elementsPerPacket == 0) {
    throw std::invalid_argument(
        "elements_per_packet: expected at least 1, got 0");
  }
  const size_t first = std::min(count, firstPacketElements);
  const size_t rest = count - first;
  return (first > 0 ? 1 : 0) + rest / elementsPerPacket +
      (rest % elementsPerPacket > 0 ? 1 : 0);
}

void meanMagnitudes(
    DType dtype,
    const std::byte* data,
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements,
    float* out) {
  checkType(dtype);
  const size_t packets =
      packetCount(count, elementsPerPacket, firstPacketElements);
  const Kernel kernel = kernels::fastest();
  const size_t bytes = dtypeBytes(dtype);
  size_t begin = 0;
  for (size_t p = 0; p < packets; ++p) {
    const size_t most = p == 0 && firstPacketElements > 0 ? firstPacketElements
                                                          : elementsPerPacket;
    const size_t some = std::min(most, count - begin);
    // Paper: SMART §3.1, Equation 1.
    out[p] = static_cast<float>(
        kernels::magnitudeSum(kernel, dtype, data + begin * bytes, some) /
        static_cast<double>(some));
    begin += some;
  }
}

size_t packetsOfTopFraction(
    std::span<const float> means,
    double threshold,
    double leastFraction,
    std::vector<uint8_t>& high) {
  checkFraction("least_fraction", leastFraction, true);
  high.assign(means.size(), 0);
  size_t found = 0;
  for (size_t p = 0; p < means.size(); ++p) {
    if (!std::isfinite(means[p]) ||
        (means[p] > 0 && static_cast<double>(means[p]) >= threshold)) {
      high[p] = 1;
      ++found;
    }
  }
  const auto least = static_cast<size_t>(
      std::ceil(leastFraction * static_cast<double>(means.size())));
  if (found >= least) {
    return found;
  }
  std::vector<size_t> others;
  for (size_t p = 0; p < means.size(); ++p) {
    if (high[p] == 0 && means[p] > 0) {
      others.push_back(p);
    }
  }
  const size_t wanted = std::min(least - found, others.size());
  // Of equal ones the first, so that the choice does not depend on the library.
  std::nth_element(
      others.begin(),
      others.begin() + static_cast<ptrdiff_t>(wanted),
      others.end(),
      [&](size_t a, size_t b) {
        return means[a] != means[b] ? means[a] > means[b] : a < b;
      });
  for (size_t i = 0; i < wanted; ++i) {
    high[others[i]] = 1;
  }
  return found + wanted;
}

bool allFinite(DType dtype, const std::byte* data, size_t count) {
  checkType(dtype);
  return kernels::allFinite(kernels::fastest(), dtype, data, count);
}

} // namespace resilient
