#include "collectives/reduce.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "base/small_float.h"
#include "base/status.h"
#include "tests/check.h"

namespace resilient {
namespace {

// The dumb twins: formats decoded by the textbook formula, in double, and
// encoded by searching all codes for the nearest.
struct FormatSpec {
  int exponentBits, mantissaBits, bias;
  bool hasInfinity, fnuz, saturates;
  int bits() const {
    return 1 + exponentBits + mantissaBits;
  }
};

const FormatSpec kHalf{5, 10, 15, true, false, false};
const FormatSpec kE5M2{5, 2, 15, true, false, false};
const FormatSpec kE4M3FN{4, 3, 7, false, false, true};
const FormatSpec kE4M3FNUZ{4, 3, 8, false, true, false};
const FormatSpec kE5M2FNUZ{5, 2, 16, false, true, false};

double twinDecode(const FormatSpec& f, uint32_t code) {
  const uint32_t mantissa = code & ((1u << f.mantissaBits) - 1);
  const uint32_t top = (1u << f.exponentBits) - 1;
  const uint32_t exponent = (code >> f.mantissaBits) & top;
  const bool negative = (code >> (f.bits() - 1)) != 0;
  double value;
  if (f.fnuz && negative && exponent == 0 && mantissa == 0) {
    return std::nan("");
  }
  if (f.hasInfinity && exponent == top) {
    value = mantissa == 0 ? INFINITY : std::nan("");
  } else if (
      !f.hasInfinity && !f.fnuz && exponent == top &&
      mantissa == (1u << f.mantissaBits) - 1) {
    value = std::nan("");
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - f.bias - f.mantissaBits);
  } else {
    value = std::ldexp(
        mantissa + (1u << f.mantissaBits),
        static_cast<int>(exponent) - f.bias - f.mantissaBits);
  }
  return negative ? -value : value;
}

// All finite magnitudes in order of their codes, and one more: where the next
// would be, so that overflow is a question of nearest, too.
uint32_t twinEncode(const FormatSpec& f, float input, uint32_t nanCode) {
  if (std::isnan(input)) {
    return nanCode;
  }
  const uint32_t signBit = 1u << (f.bits() - 1);
  const bool negative = std::signbit(input);
  const double magnitude = std::fabs(static_cast<double>(input));
  uint32_t count = 0; // finite non-negative codes
  while (count < signBit && std::isfinite(twinDecode(f, count))) {
    ++count;
  }
  const double largest = twinDecode(f, count - 1);
  const double next =
      largest + (largest - twinDecode(f, count - 2)); // same binade here
  uint32_t code = count;
  if (std::isfinite(magnitude) && magnitude < next) {
    uint32_t low = 0;
    while (low + 1 < count && twinDecode(f, low + 1) <= magnitude) {
      ++low;
    }
    const double below = twinDecode(f, low);
    const double above = low + 1 < count ? twinDecode(f, low + 1) : next;
    const double toBelow = magnitude - below;
    const double toAbove = above - magnitude;
    code = toBelow < toAbove || (toBelow == toAbove && low % 2 == 0) ? low
                                                                     : low + 1;
  }
  if (code >= count) {
    if (f.fnuz) {
      return nanCode;
    }
    code = f.saturates ? count - 1 : count; // the next code is infinity
  }
  if (f.fnuz && code == 0) {
    return 0;
  }
  return code | (negative ? signBit : 0);
}

template <typename Format>
void checkFormat(const FormatSpec& f) {
  const uint32_t codes = 1u << f.bits();
  std::vector<float> interesting;
  for (uint32_t code = 0; code < codes; ++code) {
    const float got =
        decodeSmallFloat<Format>(static_cast<typename Format::Storage>(code));
    const double want = twinDecode(f, code);
    if (std::isnan(want)) {
      CHECK(std::isnan(got));
      CHECK_EQ(uint32_t{encodeSmallFloat<Format>(got)}, Format::kNan);
      continue;
    }
    CHECK_EQ(static_cast<double>(got), want);
    CHECK_EQ(std::signbit(got), std::signbit(want));
    CHECK_EQ(
        uint32_t{encodeSmallFloat<Format>(got)},
        f.saturates && std::isinf(want) ? code - 1 : code);
  }
  // Between neighbours: exactly half way, and one float to each side. All of
  // them for 8 bits, every 37th for 16.
  const uint32_t stride = f.bits() > 8 ? 37 : 1;
  for (uint32_t code = 0; code + 1 < codes / 2; code += stride) {
    const double a = twinDecode(f, code);
    const double b = twinDecode(f, code + 1);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      continue;
    }
    const float middle = static_cast<float>((a + b) / 2);
    interesting.push_back(middle);
    interesting.push_back(std::nextafterf(middle, 0));
    interesting.push_back(std::nextafterf(middle, INFINITY));
  }
  for (float edge : {0.0f,     1e-45f,
                     1e-20f,   240.f,
                     247.9f,   248.f,
                     255.f,    256.f,
                     448.f,    463.9f,
                     464.f,    464.1f,
                     479.f,    480.f,
                     500.f,    57344.f,
                     61439.f,  61440.f,
                     61441.f,  65504.f,
                     65519.f,  65520.f,
                     65535.f,  65536.f,
                     1e30f,    std::numeric_limits<float>::max(),
                     INFINITY, NAN}) {
    interesting.push_back(edge);
  }
  for (float x : interesting) {
    for (float value : {x, -x}) {
      CHECK_EQ(
          uint32_t{encodeSmallFloat<Format>(value)},
          twinEncode(f, value, Format::kNan));
    }
  }
}

template <typename T>
std::vector<T>
apply(std::vector<T> a, const std::vector<T>& b, DType dtype, ReduceOp op) {
  reduceInto(
      a.data(), b.data(), a.size() * sizeof(T) / dtypeBytes(dtype), dtype, op);
  return a;
}

const DType kAllTypes[] = {
#define X(name, bytes, text) DType::name,
    RESILIENT_DTYPES(X)
#undef X
};
const ReduceOp kAllOps[] = {
#define X(name, text) ReduceOp::name,
    RESILIENT_REDUCE_OPS(X)
#undef X
};

std::vector<unsigned char> randomBytes(Prng& random, size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (unsigned char& x : data) {
    x = static_cast<unsigned char>(random.next());
  }
  return data;
}

} // namespace

TEST(reduce_small_float_formats_match_the_textbook) {
  checkFormat<Float16Format>(kHalf);
  checkFormat<Float8E5M2Format>(kE5M2);
  checkFormat<Float8E4M3FNFormat>(kE4M3FN);
  checkFormat<Float8E4M3FNUZFormat>(kE4M3FNUZ);
  checkFormat<Float8E5M2FNUZFormat>(kE5M2FNUZ);
}

TEST(reduce_bfloat16_rounds_to_nearest_even) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = decodeBFloat16(static_cast<uint16_t>(code));
    const uint16_t back = encodeBFloat16(value);
    CHECK_EQ(back, std::isnan(value) ? 0x7fc0u : code);
  }
  const auto encoded = [](uint32_t bits) {
    return uint32_t{encodeBFloat16(std::bit_cast<float>(bits))};
  };
  CHECK_EQ(encoded(0x3f807fff), 0x3f80u);
  CHECK_EQ(encoded(0x3f808000), 0x3f80u); // a tie, to even
  CHECK_EQ(encoded(0x3f818000), 0x3f82u); // a tie, to even
  CHECK_EQ(encoded(0x3f808001), 0x3f81u);
  CHECK_EQ(encoded(0x7f7fffff), 0x7f80u); // overflows to infinity
  CHECK_EQ(encoded(0xff800001), 0x7fc0u); // any NaN is the one
}

TEST(reduce_half_is_rounded_after_each_operation) {
  // 2048 + 1 is 2048 in float16, a tie rounded to even; so is adding 1 again.
  const std::vector<uint16_t> big{encodeSmallFloat<Float16Format>(2048)};
  const std::vector<uint16_t> one{encodeSmallFloat<Float16Format>(1)};
  const void* operands[] = {big.data(), one.data(), one.data()};
  uint16_t out = 0;
  reduceOrdered(&out, operands, 3, 1, DType::kFloat16, ReduceOp::kSum);
  CHECK_EQ(decodeSmallFloat<Float16Format>(out), 2048.0f);
}

TEST(reduce_integers_wrap_and_compare_by_sign) {
  using std::vector;
  CHECK_EQ(
      int(apply<int8_t>({127, -128}, {1, -1}, DType::kInt8, ReduceOp::kSum)[0]),
      -128);
  CHECK(
      apply<int32_t>({INT32_MAX}, {1}, DType::kInt32, ReduceOp::kSum)[0] ==
      INT32_MIN);
  CHECK(
      apply<int64_t>({INT64_MIN}, {-1}, DType::kInt64, ReduceOp::kSum)[0] ==
      INT64_MAX);
  CHECK_EQ(
      apply<uint16_t>({65535}, {65535}, DType::kUInt16, ReduceOp::kProduct)[0],
      uint16_t(65535u * 65535u));
  CHECK_EQ(apply<int32_t>({-5}, {3}, DType::kInt32, ReduceOp::kMin)[0], -5);
  CHECK_EQ(
      apply<uint32_t>({0xfffffffb}, {3}, DType::kUInt32, ReduceOp::kMin)[0],
      3u);
  CHECK_EQ(
      apply<uint64_t>({~0ull}, {3}, DType::kUInt64, ReduceOp::kMax)[0], ~0ull);
  CHECK_EQ(
      apply<int16_t>({0x0ff0}, {0x00ff}, DType::kInt16, ReduceOp::kBxor)[0],
      0x0f0f);
  CHECK_EQ(
      apply<int16_t>({0x0ff0}, {0x00ff}, DType::kInt16, ReduceOp::kBand)[0],
      0x00f0);
  CHECK_EQ(
      apply<int16_t>({0x0ff0}, {0x00ff}, DType::kInt16, ReduceOp::kBor)[0],
      0x0fff);
}

TEST(reduce_bool_is_logic) {
  const std::vector<uint8_t> a{0, 0, 1, 1, 255};
  const std::vector<uint8_t> b{0, 1, 0, 1, 2};
  const std::vector<uint8_t> either{0, 1, 1, 1, 1};
  const std::vector<uint8_t> both{0, 0, 0, 1, 1};
  const std::vector<uint8_t> one{0, 1, 1, 0, 0};
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    CHECK(apply(a, b, DType::kBool, op) == either);
  }
  for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    CHECK(apply(a, b, DType::kBool, op) == both);
  }
  CHECK(apply(a, b, DType::kBool, ReduceOp::kBxor) == one);
}

TEST(reduce_min_and_max_pass_nan_on_from_either_side) {
  const float nan = std::bit_cast<float>(0xffc12345u);
  for (ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum, ReduceOp::kProduct}) {
    const std::vector<float> a{nan, 1, nan};
    const std::vector<float> b{1, nan, std::bit_cast<float>(0x7f800001u)};
    for (const auto& result :
         {apply(a, b, DType::kFloat32, op), apply(b, a, DType::kFloat32, op)}) {
      for (float x : result) {
        CHECK_EQ(std::bit_cast<uint32_t>(x), 0x7fc00000u);
      }
    }
  }
}

TEST(reduce_complex_product_and_sum) {
  const std::vector<float> a{1, 2, 0, 1};
  const std::vector<float> b{3, 4, 0, 1};
  CHECK(
      apply(a, b, DType::kComplex64, ReduceOp::kProduct) ==
      (std::vector<float>{-5, 10, -1, 0}));
  CHECK(
      apply(a, b, DType::kComplex64, ReduceOp::kSum) ==
      (std::vector<float>{4, 6, 0, 2}));
  const std::vector<double> c{1, 2};
  const std::vector<double> d{3, 4};
  CHECK(
      apply(c, d, DType::kComplex128, ReduceOp::kProduct) ==
      (std::vector<double>{-5, 10}));
  std::vector<uint16_t> h, k;
  for (float x : {1.f, 2.f}) {
    h.push_back(encodeSmallFloat<Float16Format>(x));
  }
  for (float x : {3.f, 4.f}) {
    k.push_back(encodeSmallFloat<Float16Format>(x));
  }
  const auto product = apply(h, k, DType::kComplex32, ReduceOp::kProduct);
  CHECK_EQ(decodeSmallFloat<Float16Format>(product[0]), -5.f);
  CHECK_EQ(decodeSmallFloat<Float16Format>(product[1]), 10.f);
}

TEST(reduce_never_fuses_a_product_and_a_sum) {
  // (1 + e)^2 - 1 * (1 + 2e): the products round to the same float, so the
  // difference is 0; fused it would be e^2.
  const float e = std::ldexp(1.0f, -12);
  const size_t n = 33;
  std::vector<float> a, b;
  for (size_t i = 0; i < n; ++i) {
    a.insert(a.end(), {1 + e, 1});
    b.insert(b.end(), {1 + e, 1 + 2 * e});
  }
  const auto product = apply(a, b, DType::kComplex64, ReduceOp::kProduct);
  for (size_t i = 0; i < n; ++i) {
    CHECK_EQ(product[2 * i], 0.0f);
  }
}

TEST(reduce_average_divides_toward_zero) {
  std::vector<int32_t> ints{7, -7, 6, -1};
  divideBy(ints.data(), 4, DType::kInt32, 2);
  CHECK(ints == (std::vector<int32_t>{3, -3, 3, 0}));
  std::vector<int8_t> bytes{-128, 127, 100};
  divideBy(bytes.data(), 3, DType::kInt8, 200); // more ranks than an int8 holds
  CHECK(bytes == (std::vector<int8_t>{0, 0, 0}));
  std::vector<uint64_t> large{~0ull};
  divideBy(large.data(), 1, DType::kUInt64, 2);
  CHECK_EQ(large[0], ~0ull / 2);
  std::vector<float> floats{1, -10};
  divideBy(floats.data(), 2, DType::kFloat32, 3);
  CHECK_EQ(floats[0], 1.0f / 3.0f);
  CHECK_EQ(floats[1], -10.0f / 3.0f);
  std::vector<double> complex{1, 2};
  divideBy(complex.data(), 1, DType::kComplex128, 4);
  CHECK(complex == (std::vector<double>{0.25, 0.5}));
  std::vector<uint16_t> half{encodeBFloat16(3)};
  divideBy(half.data(), 1, DType::kBFloat16, 2);
  CHECK_EQ(decodeBFloat16(half[0]), 1.5f);
}

TEST(reduce_scales_in_place_and_out_of_place) {
  const std::vector<double> in{1, -2, 3};
  std::vector<double> out(3);
  scaleOut(out.data(), in.data(), 3, DType::kFloat64, 0.5);
  CHECK(out == (std::vector<double>{0.5, -1, 1.5}));
  scaleOut(out.data(), out.data(), 1, DType::kComplex128, 2);
  CHECK(out == (std::vector<double>{1, -2, 1.5}));
}

TEST(reduce_says_what_it_does_not_support) {
  std::string why;
  CHECK(!reductionSupported(DType::kFloat32, ReduceOp::kBand, &why));
  CHECK_CONTAINS(why, "BAND of float32");
  CHECK(!reductionSupported(DType::kComplex64, ReduceOp::kMax, &why));
  CHECK_CONTAINS(why, "no order");
  CHECK(!reductionSupported(DType::kOpaque4, ReduceOp::kSum, &why));
  CHECK(!reductionSupported(DType::kBool, ReduceOp::kAvg, &why));
  CHECK(!reductionSupported(DType::kInt32, ReduceOp::kPreMulSum, &why));
  CHECK(!reductionSupported(DType::kInt32, ReduceOp::kNone, nullptr));
  // What is not supported throws, what is does not.
  for (DType t : kAllTypes) {
    for (ReduceOp op : kAllOps) {
      unsigned char a[16] = {}, b[16] = {};
      bool thrown = false;
      try {
        reduceInto(a, b, 1, t, op);
      } catch (const StatusError& e) {
        CHECK(e.status().code() == StatusCode::kInternal);
        thrown = true;
      }
      CHECK_EQ(thrown, !reductionSupported(t, op, nullptr));
    }
  }
}

// The vector loop, its remainder, the conversion instructions and the portable
// code agree bit for bit, at any alignment, in place or not.
TEST(reduce_gives_the_same_bits_one_by_one_and_at_once) {
  test::forSeeds(3, [](uint64_t seed) {
    Prng random(seed);
    for (DType t : kAllTypes) {
      for (ReduceOp op : kAllOps) {
        if (!reductionSupported(t, op, nullptr)) {
          continue;
        }
        const size_t size = dtypeBytes(t);
        const size_t count = 1 + random.below(3000);
        const size_t shift = random.below(3);
        const auto a = randomBytes(random, count * size + shift);
        const auto b = randomBytes(random, count * size + shift);
        std::vector<unsigned char> whole(count * size + shift);
        reduceOut(
            whole.data() + shift,
            a.data() + shift,
            b.data() + shift,
            count,
            t,
            op);
        std::vector<unsigned char> single(count * size);
        for (size_t i = 0; i < count; ++i) {
          reduceOut(
              single.data() + i * size,
              a.data() + shift + i * size,
              b.data() + shift + i * size,
              1,
              t,
              op);
        }
        CHECK_EQ(
            std::memcmp(single.data(), whole.data() + shift, count * size), 0);
        auto onA = a;
        reduceInto(onA.data() + shift, b.data() + shift, count, t, op);
        CHECK_EQ(
            std::memcmp(onA.data() + shift, single.data(), count * size), 0);
        auto onB = b;
        reduceOut(
            onB.data() + shift,
            a.data() + shift,
            onB.data() + shift,
            count,
            t,
            op);
        CHECK_EQ(
            std::memcmp(onB.data() + shift, single.data(), count * size), 0);
      }
    }
  });
}

TEST(reduce_ordered_is_a_left_fold_wherever_it_writes) {
  test::forSeeds(60, [](uint64_t seed) {
    Prng random(seed);
    const DType t = kAllTypes[random.below(std::size(kAllTypes))];
    const ReduceOp op = kAllOps[random.below(std::size(kAllOps))];
    if (!reductionSupported(t, op, nullptr)) {
      return;
    }
    const size_t size = dtypeBytes(t);
    const size_t count = random.below(20000);
    const size_t n = 1 + random.below(6);
    std::vector<std::vector<unsigned char>> inputs;
    std::vector<const void*> operands;
    for (size_t i = 0; i < n; ++i) {
      inputs.push_back(randomBytes(random, count * size));
    }
    auto expected = inputs[0];
    for (size_t i = 1; i < n; ++i) {
      reduceInto(expected.data(), inputs[i].data(), count, t, op);
    }
    for (size_t i = 0; i < n; ++i) {
      operands.push_back(inputs[i].data());
    }
    const size_t target = random.below(n + 1);
    std::vector<unsigned char> apart(count * size);
    unsigned char* out = target < n ? inputs[target].data() : apart.data();
    reduceOrdered(out, operands.data(), n, count, t, op);
    CHECK(count == 0 || std::memcmp(out, expected.data(), count * size) == 0);
  });
}

} // namespace resilient
