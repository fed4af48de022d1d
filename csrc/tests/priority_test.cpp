#include "loss/priority.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "base/random.h"
#include "base/small_float.h"
#include "loss/priority_internal.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using kernels::Kernel;

constexpr DType kTypes[] = {
    DType::kFloat32,
    DType::kBFloat16,
    DType::kFloat16,
    DType::kFloat64};

// Elements of any type, at an odd address, from numbers of many magnitudes.
class Elements {
 public:
  Elements(DType dtype, size_t count)
      : dtype_(dtype), memory_(count * dtypeBytes(dtype) + 1) {}
  Elements(DType dtype, size_t count, Prng& random) : Elements(dtype, count) {
    for (size_t i = 0; i < count; ++i) {
      const double size = std::exp2(-20.0 + 24.0 * random.uniform());
      set(i, (random.uniform() - 0.5) * size);
    }
  }
  const std::byte* data() const {
    return memory_.data() + 1;
  }
  void set(size_t i, double value) {
    const auto narrow = static_cast<float>(value);
    switch (dtype_) {
      case DType::kFloat32:
        return put(i, narrow);
      case DType::kBFloat16:
        return put(i, encodeBFloat16(narrow));
      case DType::kFloat16:
        return put(i, encodeSmallFloat<Float16Format>(narrow));
      default:
        return put(i, value);
    }
  }
  double at(size_t i) const {
    switch (dtype_) {
      case DType::kFloat32:
        return get<float>(i);
      case DType::kBFloat16:
        return decodeBFloat16(get<uint16_t>(i));
      case DType::kFloat16:
        return decodeSmallFloat<Float16Format>(get<uint16_t>(i));
      default:
        return get<double>(i);
    }
  }
  // Equation 1, as it stands.
  double mean(size_t begin, size_t end) const {
    double sum = 0;
    for (size_t i = begin; i < end; ++i) {
      sum += std::abs(at(i));
    }
    return sum / static_cast<double>(end - begin);
  }

 private:
  template <typename T>
  void put(size_t i, T value) {
    std::memcpy(memory_.data() + 1 + i * sizeof(T), &value, sizeof(T));
  }
  template <typename T>
  T get(size_t i) const {
    T value;
    std::memcpy(&value, memory_.data() + 1 + i * sizeof(T), sizeof(T));
    return value;
  }
  DType dtype_;
  std::vector<std::byte> memory_;
};

TEST(priority_means_are_those_of_equation_1) {
  forSeeds(150, [](uint64_t seed) {
    Prng random(seed);
    for (DType dtype : kTypes) {
      const size_t count = random.below(3000);
      const size_t each = 1 + random.below(700);
      const size_t first = random.below(each + 1);
      const Elements elements(dtype, count, random);
      std::vector<float> means(packetCount(count, each, first), -1);
      meanMagnitudes(dtype, elements.data(), count, each, first, means.data());
      size_t begin = 0;
      size_t packets = 0;
      while (begin < count) {
        const size_t end =
            std::min(count, begin + (begin == 0 && first > 0 ? first : each));
        const double expected = elements.mean(begin, end);
        CHECK(packets < means.size());
        CHECK(std::abs(means[packets] - expected) <= 1e-5 * expected);
        begin = end;
        ++packets;
      }
      CHECK_EQ(packets, means.size());
    }
  });
}

// Every code of the narrow formats, alone in its packet.
TEST(priority_reads_every_float16_and_bfloat16) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    // 64 times the same: what goes through the vectors.
    std::vector<uint16_t> same(64);
    for (uint32_t code = 0; code < 65536; ++code) {
      std::fill(same.begin(), same.end(), static_cast<uint16_t>(code));
      const auto* data = reinterpret_cast<const std::byte*>(same.data());
      const double expected = std::abs(
          dtype == DType::kFloat16 ? decodeSmallFloat<Float16Format>(same[0])
                                   : decodeBFloat16(same[0]));
      float mean = -1;
      meanMagnitudes(dtype, data, 64, 64, 0, &mean);
      CHECK_EQ(std::isnan(mean), std::isnan(expected));
      // 64 of the largest bfloat16 do not fit into a float32.
      if (std::isfinite(expected) && expected < 1e36) {
        CHECK_EQ(mean, static_cast<float>(expected));
      }
      CHECK_EQ(allFinite(dtype, data, 64), std::isfinite(expected));
    }
  }
}

TEST(priority_kernels_agree_to_the_bit) {
  forSeeds(100, [](uint64_t seed) {
    Prng random(seed);
    for (DType dtype : kTypes) {
      const size_t count = random.below(500);
      const Elements elements(dtype, count, random);
      const double expected =
          kernels::magnitudeSum(Kernel::kScalar, dtype, elements.data(), count);
      for (Kernel kernel : kernels::kKernels) {
        if (kernels::supported(kernel)) {
          CHECK_EQ(
              kernels::magnitudeSum(kernel, dtype, elements.data(), count),
              expected);
        }
      }
    }
  });
}

TEST(priority_finds_what_is_not_finite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  forSeeds(100, [&](uint64_t seed) {
    Prng random(seed);
    for (DType dtype : kTypes) {
      const size_t count = 1 + random.below(5000);
      Elements elements(dtype, count, random);
      elements.set(random.below(count), 65000.0); // large, but finite
      const size_t place = random.below(count);
      const double before = elements.at(place);
      for (Kernel kernel : kernels::kKernels) {
        if (!kernels::supported(kernel)) {
          continue;
        }
        CHECK(kernels::allFinite(kernel, dtype, elements.data(), count));
        for (double bad : {kInfinity, -kInfinity, kNan}) {
          elements.set(place, bad);
          CHECK(!kernels::allFinite(kernel, dtype, elements.data(), count));
        }
        elements.set(place, before);
      }
    }
  });
}

TEST(priority_threshold_cuts_off_the_top_fraction) {
  for (DType dtype : kTypes) {
    Prng random(7);
    constexpr size_t kCount = 200'000;
    Elements elements(dtype, kCount);
    for (size_t i = 0; i < kCount; ++i) {
      // About normal, as the sum of twelve.
      double sum = -6;
      for (int k = 0; k < 12; ++k) {
        sum += random.uniform();
      }
      elements.set(i, 0.01 * sum);
    }
    const auto share = [&](double fraction, uint64_t seed) {
      const double tau =
          sampledThreshold(dtype, elements.data(), kCount, fraction, seed);
      size_t above = 0;
      for (size_t i = 0; i < kCount; ++i) {
        above += std::abs(elements.at(i)) >= tau;
      }
      return static_cast<double>(above) / kCount;
    };
    forSeeds(5, [&](uint64_t seed) {
      // Of 4096, 41 are the top 1 %: four standard deviations are 0.006.
      const double found = share(0.01, seed);
      CHECK(found > 0.004 && found < 0.017);
      const double half = share(0.5, seed);
      CHECK(half > 0.46 && half < 0.54);
    });
    // Whoever asks twice hears the same; another seed looks elsewhere.
    const auto tau = [&](uint64_t seed) {
      return sampledThreshold(dtype, elements.data(), kCount, 0.3, seed);
    };
    CHECK_EQ(tau(5), tau(5));
    CHECK(tau(1) != tau(2) || tau(1) != tau(3));
  }
}

TEST(priority_threshold_of_few_is_exact) {
  Elements elements(DType::kFloat32, 200);
  for (size_t i = 0; i < 200; ++i) {
    elements.set(i, i % 2 == 0 ? 1.0 + i : -1.0 - i);
  }
  const auto tau = [&](size_t count, double fraction) {
    return sampledThreshold(
        DType::kFloat32, elements.data(), count, fraction, 1);
  };
  CHECK_EQ(tau(200, 0.01), 199.0); // the second largest of 1 to 200
  CHECK_EQ(tau(200, 1.0), 1.0);
  CHECK_EQ(tau(1, 0.01), 1.0);
  CHECK_EQ(tau(0, 0.01), 0.0);
  elements.set(3, std::numeric_limits<double>::quiet_NaN());
  CHECK_EQ(tau(200, 0.01), 200.0); // what is no number counts as largest
}

TEST(priority_ranks_where_the_threshold_finds_too_few) {
  std::vector<uint8_t> high;
  const std::vector<float> means{0.1f, 0.5f, 0.3f, 0.5f, 0.2f, 0, 0, 0, 0, 0};
  using Flags = std::vector<uint8_t>;
  // By the threshold, which is met by what is equal to it.
  CHECK_EQ(packetsOfTopFraction(means, 0.5, 0.1, high), 2u);
  CHECK_EQ(high, (Flags{0, 1, 0, 1, 0, 0, 0, 0, 0, 0}));
  // None reaches it: one of ten, the first of equal ones.
  CHECK_EQ(packetsOfTopFraction(means, 9, 0.1, high), 1u);
  CHECK_EQ(high, (Flags{0, 1, 0, 0, 0, 0, 0, 0, 0, 0}));
  CHECK_EQ(packetsOfTopFraction(means, 0.5, 0.3, high), 3u);
  CHECK_EQ(high, (Flags{0, 1, 1, 1, 0, 0, 0, 0, 0, 0}));
  // Zeros need no protection, whatever is asked for.
  CHECK_EQ(packetsOfTopFraction(means, 0, 1, high), 5u);
  CHECK_EQ(high, (Flags{1, 1, 1, 1, 1, 0, 0, 0, 0, 0}));
  CHECK_EQ(packetsOfTopFraction(means, 9, 0, high), 0u);
  CHECK_EQ(packetsOfTopFraction({}, 9, 0.5, high), 0u);
  CHECK(high.empty());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> bad{1, kNan, kInfinity, 2};
  CHECK_EQ(packetsOfTopFraction(bad, 9, 0.75, high), 3u);
  CHECK_EQ(high, (Flags{0, 1, 1, 1}));
}

// Rank fallback against sorting.
TEST(priority_ranks_as_sorting_does) {
  forSeeds(200, [](uint64_t seed) {
    Prng random(seed);
    std::vector<float> means(random.below(60));
    for (float& mean : means) {
      mean = static_cast<float>(random.below(20));
    }
    const double min = random.uniform();
    const double threshold = random.below(30);
    std::vector<uint8_t> high;
    const size_t found = packetsOfTopFraction(means, threshold, min, high);
    std::vector<float> sorted = means;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    size_t expected = 0;
    const double wanted = min * static_cast<double>(means.size());
    for (size_t i = 0; i < sorted.size(); ++i) {
      expected += sorted[i] > 0 &&
          (sorted[i] >= threshold || static_cast<double>(i) < wanted);
    }
    CHECK_EQ(found, expected);
    float minHigh = 100;
    float maxLow = 0;
    size_t marked = 0;
    for (size_t p = 0; p < means.size(); ++p) {
      marked += high[p];
      (high[p] ? minHigh : maxLow) =
          high[p] ? std::min(minHigh, means[p]) : std::max(maxLow, means[p]);
    }
    CHECK_EQ(marked, found);
    CHECK(maxLow <= minHigh);
  });
}

TEST(priority_refuses_what_has_no_magnitude) {
  float out;
  CHECK_THROWS(
      std::invalid_argument,
      "dtype int32",
      meanMagnitudes(DType::kInt32, nullptr, 0, 1, 0, &out));
  CHECK_THROWS(
      std::invalid_argument,
      "dtype bool",
      sampledThreshold(DType::kBool, nullptr, 0, 0.5, 0));
  CHECK_THROWS(
      std::invalid_argument,
      "dtype complex64",
      allFinite(DType::kComplex64, nullptr, 0));
  CHECK_THROWS(
      std::invalid_argument,
      "top_fraction",
      sampledThreshold(DType::kFloat32, nullptr, 0, 0, 0));
  CHECK_THROWS(
      std::invalid_argument, "elements_per_packet", packetCount(5, 0, 0));
}

} // namespace
} // namespace resilient::test
