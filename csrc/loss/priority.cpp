#include "loss/priority.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/small_float.h"
#include "loss/magnitude.h"
#include "loss/priority_internal.h"

namespace resilient {
namespace {

using kernels::Kernel;
using magnitude::kLanes;
using magnitude::kSums;
using magnitude::OfBFloat16;
using magnitude::OfFloat16;
using magnitude::OfFloat32;
using magnitude::OfFloat64;

// 64 bytes of sums: one register of AVX-512, two of AVX2, four of anything
// else.
typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));

// Type::of() for a vector of elements (by reference: vectors as arguments would
// depend on the processor).
template <typename Type>
struct VectorOf;

template <>
struct VectorOf<OfFloat32> {
  using Codes = Words;
  using Sums = Floats;
  [[gnu::always_inline]] static void of(const Codes& codes, Sums& values) {
    values = (Sums)(codes & OfFloat32::kMagnitude);
  }
};

template <>
struct VectorOf<OfBFloat16> {
  using Codes = Halves;
  using Sums = Floats;
  [[gnu::always_inline]] static void of(const Codes& codes, Sums& values) {
    values =
        (Sums)(__builtin_convertvector(codes & OfBFloat16::kMagnitude, Words)
               << 16);
  }
};

template <>
struct VectorOf<OfFloat16> {
  using Codes = Halves;
  using Sums = Floats;
  // As decodeSmallFloat.
  [[gnu::always_inline]] static void of(const Codes& codes, Sums& values) {
    using Format = Float16Format;
    const Words magnitude =
        __builtin_convertvector(codes & OfFloat16::kMagnitude, Words);
    const Words shifted = magnitude << Format::kShift;
    const Words normal = (shifted + Format::kRebias) |
        ((Words)(magnitude >= 0x7c00u) & 0x7f800000u);
    const Words subnormal = (Words)((Floats)(shifted + Format::kMinNormal) -
                                    std::bit_cast<float>(Format::kMinNormal));
    const Words small = (Words)(magnitude < (1u << Format::kMantissa));
    values = (Sums)((subnormal & small) | (normal & ~small));
  }
};

template <>
struct VectorOf<OfFloat64> {
  using Codes = Longs;
  using Sums = Doubles;
  [[gnu::always_inline]] static void of(const Codes& codes, Sums& values) {
    values = (Sums)(codes & OfFloat64::kMagnitude);
  }
};

// In the order of magnitude.h. How it works. A vector is a part of a row, so
// each of its lanes is one of the kSums sums. Full rounds fill four rows; the
// rest goes to the first row, filled up with zeros, which change no sum of
// magnitudes. Rows, and then halves of a row, are added in the given order.
// Each kernel compiles this body with vectors of its own width, but the
// additions and their order stay the same, and so do the bits
// (priority_kernels_agree_to_the_bit).
template <typename Type>
[[gnu::always_inline]] inline double sumBody(
    const std::byte* data,
    size_t count) {
  using Storage = typename Type::Storage;
  using Vector = VectorOf<Type>;
  constexpr size_t kWidth = sizeof(typename Vector::Codes) / sizeof(Storage);
  constexpr size_t kParts = kLanes / kWidth; // vectors in a row
  // Four rows, since each addition waits for the one before in its sum.
  typename Vector::Sums sums[4 * kParts] = {};
  typename Vector::Sums values;
  size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
#pragma GCC unroll 8
    for (size_t k = 0; k < 4 * kParts; ++k) {
      typename Vector::Codes codes;
      std::memcpy(
          &codes, data + (i + k * kWidth) * sizeof(Storage), sizeof(codes));
      Vector::of(codes, values);
      sums[k] += values;
    }
  }
  // A packet of 1376 bytes is five such rounds; so its rest matters.
  for (; i < count; i += kLanes) {
#pragma GCC unroll 2
    for (size_t part = 0; part < kParts; ++part) {
      const size_t at = std::min(count, i + part * kWidth);
      typename Vector::Codes codes = {}; // beyond the end: zeros
      std::memcpy(
          &codes,
          data + at * sizeof(Storage),
          std::min(kWidth, count - at) * sizeof(Storage));
      Vector::of(codes, values);
      sums[part] += values;
    }
  }
#pragma GCC unroll 2
  for (size_t part = 0; part < kParts; ++part) {
    sums[part] += sums[kParts + part];
    sums[2 * kParts + part] += sums[3 * kParts + part];
    sums[part] += sums[2 * kParts + part];
  }
  typename Type::Sum lanes[kLanes];
  std::memcpy(lanes, &sums, sizeof(lanes));
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Compares bits, so NaN needs no case of its own: its magnitude lies above that
// of infinity.
template <typename Type>
[[gnu::always_inline]] inline bool finiteBody(
    const std::byte* data,
    size_t count) {
  using Storage = typename Type::Storage;
  using Codes = typename VectorOf<Type>::Codes;
  constexpr size_t kWidth = sizeof(Codes) / sizeof(Storage);
  constexpr Storage kMagnitude = Type::kMagnitude;
  constexpr Storage kInfinity = Type::kInfinity;
  // Looked at every so often only: what is sought is not there, usually.
  constexpr size_t kBetweenLooks = 64 * kWidth;
  size_t i = 0;
  while (i + kWidth <= count) {
    Codes found = {};
    const size_t end = std::min(count, i + kBetweenLooks);
    for (; i + kWidth <= end; i += kWidth) {
      Codes codes;
      std::memcpy(&codes, data + i * sizeof(Storage), sizeof(codes));
      found |= (Codes)((codes & kMagnitude) >= kInfinity);
    }
    Storage any = 0;
    for (size_t lane = 0; lane < kWidth; ++lane) {
      any |= found[lane];
    }
    if (any != 0) {
      return false;
    }
  }
  for (; i < count; ++i) {
    Storage code;
    std::memcpy(&code, data + i * sizeof(Storage), sizeof(Storage));
    if (!magnitude::isFinite<Type>(code)) {
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

// Calls function(Type{}) with what reads elements of `dtype`, which has
// magnitudes.
template <typename Function>
auto withType(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(OfFloat32{});
    case DType::kBFloat16:
      return function(OfBFloat16{});
    case DType::kFloat16:
      return function(OfFloat16{});
    default:
      return function(OfFloat64{});
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
  return withType(dtype, [&]<typename Type>(Type) {
    return sumOf<Type>(kernel, data, count);
  });
}

bool allFinite(
    Kernel kernel,
    DType dtype,
    const std::byte* data,
    size_t count) {
  return withType(dtype, [&]<typename Type>(Type) {
    return finiteOf<Type>(kernel, data, count);
  });
}

} // namespace kernels

bool hasMagnitude(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
      dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

DType magnitudeType(std::string_view name) {
  for (DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (name == dtypeName(dtype)) {
      return dtype;
    }
  }
  throw std::invalid_argument(
      "dtype: expected 'float32', 'bfloat16', 'float16' or 'float64', got '" +
      std::string(name) + "'");
}

double thresholdOf(std::span<double> sample, double topFraction) {
  checkFraction("top_fraction", topFraction, false);
  const auto top = static_cast<size_t>(
      std::ceil(topFraction * static_cast<double>(sample.size())));
  const auto place = sample.begin() +
      static_cast<ptrdiff_t>(std::clamp<size_t>(top, 1, sample.size()) - 1);
  std::nth_element(sample.begin(), place, sample.end(), std::greater<>());
  return *place;
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
  std::vector<double> sample(std::min(count, magnitude::kThresholdSample));
  withType(dtype, [&]<typename Type>(Type) {
    for (size_t i = 0; i < sample.size(); ++i) {
      typename Type::Storage code;
      const size_t place = magnitude::samplePlace(i, count, seed);
      std::memcpy(&code, data + place * sizeof(code), sizeof(code));
      sample[i] = magnitude::sampleValue<Type>(code);
    }
  });
  return thresholdOf(sample, topFraction);
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

// Packets are independent: each mean depends on its own elements only, wherever
// the packet begins. The CUDA kernel relies on that, with a warp for each
// packet.
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
  for (size_t p = 0; p < packets; ++p) {
    const auto [begin, some] = magnitude::packetRange(
        p, count, elementsPerPacket, firstPacketElements);
    // Paper: SMART §3.1, Equation 1.
    out[p] = magnitude::meanOf(
        kernels::magnitudeSum(kernel, dtype, data + begin * bytes, some), some);
  }
}

size_t packetsOfTopFraction(
    std::span<const float> means,
    double threshold,
    double minFraction,
    std::vector<uint8_t>& high) {
  checkFraction("min_fraction", minFraction, true);
  high.assign(means.size(), 0);
  size_t found = 0;
  for (size_t p = 0; p < means.size(); ++p) {
    if (!std::isfinite(means[p]) ||
        (means[p] > 0 && static_cast<double>(means[p]) >= threshold)) {
      high[p] = 1;
      ++found;
    }
  }
  const auto min = static_cast<size_t>(
      std::ceil(minFraction * static_cast<double>(means.size())));
  if (found >= min) {
    return found;
  }
  std::vector<size_t> others;
  for (size_t p = 0; p < means.size(); ++p) {
    if (high[p] == 0 && means[p] > 0) {
      others.push_back(p);
    }
  }
  const size_t wanted = std::min(min - found, others.size());
  // The first of equal ones: the choice must not depend on the library.
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
