#include "collectives/reduce.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/small_float.h"
#include "base/status.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// Never contract a*b+c: a CPU with fused multiply-add would round differently
// from one without.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

// Kernels are vectorised whatever the build's level of optimisation.
#if defined(__GNUC__) && !defined(__clang__)
#define RESILIENT_KERNEL \
  __attribute__((optimize("O3", "no-trapping-math", "fp-contract=off")))
#else
#define RESILIENT_KERNEL
#endif

// gcc's vectoriser makes a fused addsub of a complex product even so (seen with
// gcc 12 and -march=native). If the build allows fused instructions at all, the
// products pass through a register that is opaque to it.
#if defined(__GNUC__) && !defined(__clang__) && defined(__FMA__)
#define RESILIENT_ROUNDED(x) __asm__("" : "+x"(x))
#elif defined(__GNUC__) && !defined(__clang__) && defined(__aarch64__)
#define RESILIENT_ROUNDED(x) __asm__("" : "+w"(x))
#else
#define RESILIENT_ROUNDED(x) (void)(x)
#endif

// Says that iterations are independent. True also if out is one of the
// inputs, which is all the aliasing we allow; without it gcc's overlap check
// sends the in-place case down the scalar road.
#if defined(__clang__)
#define RESILIENT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RESILIENT_INDEPENDENT _Pragma("GCC ivdep")
#endif

// AVX2 doubles to quadruples the speed of the narrow types. Wider ones would
// gain nothing: float32 is at the memory's speed already. "fma" is left out
// on purpose.
#if defined(__x86_64__)
#define RESILIENT_AVX2 __attribute__((target("avx2")))
#endif

namespace resilient {
namespace {

template <typename T>
[[gnu::always_inline]] inline T load(const void* base, size_t i) {
  T value;
  std::memcpy(
      &value,
      static_cast<const unsigned char*>(base) + i * sizeof(T),
      sizeof(T));
  return value;
}

template <typename T>
[[gnu::always_inline]] inline void store(void* base, size_t i, T value) {
  std::memcpy(
      static_cast<unsigned char*>(base) + i * sizeof(T), &value, sizeof(T));
}

// A codec defines the storage of one element and the type of its computation.
// encode() rounds and replaces every NaN by the canonical one, because
// processors differ in the NaN that an operation returns. A complex element is
// two components, each with its own codec call.

template <typename T>
struct NativeCodec {
  using Storage = T;
  using Compute = T;
  [[gnu::always_inline]] static Compute decode(Storage x) {
    return x;
  }
  [[gnu::always_inline]] static Storage encode(Compute x) {
    if constexpr (std::is_floating_point_v<T>) {
      return x != x ? std::numeric_limits<T>::quiet_NaN() : x;
    } else {
      return x;
    }
  }
};

template <typename Format>
struct SmallFloatCodec {
  using Storage = typename Format::Storage;
  using Compute = float;
  [[gnu::always_inline]] static Compute decode(Storage x) {
    return decodeSmallFloat<Format>(x);
  }
  [[gnu::always_inline]] static Storage encode(Compute x) {
    return encodeSmallFloat<Format>(x);
  }
};

struct BFloat16Codec {
  using Storage = uint16_t;
  using Compute = float;
  [[gnu::always_inline]] static Compute decode(Storage x) {
    return decodeBFloat16(x);
  }
  [[gnu::always_inline]] static Storage encode(Compute x) {
    return encodeBFloat16(x);
  }
};

// Any byte but 0 is true; results are 0 or 1.
struct BoolCodec {
  using Storage = uint8_t;
  using Compute = uint8_t;
  [[gnu::always_inline]] static Compute decode(Storage x) {
    return x != 0 ? 1 : 0;
  }
  [[gnu::always_inline]] static Storage encode(Compute x) {
    return x;
  }
};

// Integers wrap: computed unsigned and at least 32 bits wide, since the sum
// of two int, and the product of two promoted uint16, may overflow.
template <typename T>
using Wrapping = std::conditional_t<
    (sizeof(T) < 4),
    uint32_t,
    std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

struct Sum {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(
          static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(
          static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    T min = b < a ? b : a;
    if constexpr (std::is_floating_point_v<T>) {
      min = b != b ? b : min; // a NaN in `a` stays: no comparison holds
    }
    return min;
  }
};

struct Max {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    T greatest = a < b ? b : a;
    if constexpr (std::is_floating_point_v<T>) {
      greatest = b != b ? b : greatest;
    }
    return greatest;
  }
};

struct Band {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Bor {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Bxor {
  template <typename T>
  [[gnu::always_inline]] static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Codec, typename Op>
struct BinaryLoop {
  [[gnu::always_inline]] static inline void
  run(void* out, const void* a, const void* b, size_t count) {
    using S = typename Codec::Storage;
    RESILIENT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      store<S>(
          out,
          i,
          Codec::encode(
              Op::template apply<typename Codec::Compute>(
                  Codec::decode(load<S>(a, i)), Codec::decode(load<S>(b, i)))));
    }
  }
};

template <typename Codec>
struct ComplexProductLoop {
  [[gnu::always_inline]] static inline void
  run(void* out, const void* a, const void* b, size_t count) {
    using S = typename Codec::Storage;
    using C = typename Codec::Compute;
    RESILIENT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      const C ar = Codec::decode(load<S>(a, 2 * i));
      const C ai = Codec::decode(load<S>(a, 2 * i + 1));
      const C br = Codec::decode(load<S>(b, 2 * i));
      const C bi = Codec::decode(load<S>(b, 2 * i + 1));
      C rr = ar * br;
      C ii = ai * bi;
      C ri = ar * bi;
      C ir = ai * br;
      RESILIENT_ROUNDED(rr);
      RESILIENT_ROUNDED(ii);
      RESILIENT_ROUNDED(ri);
      RESILIENT_ROUNDED(ir);
      store<S>(out, 2 * i, Codec::encode(rr - ii));
      store<S>(out, 2 * i + 1, Codec::encode(ri + ir));
    }
  }
};

template <typename Codec>
struct ScaleLoop {
  [[gnu::always_inline]] static inline void
  run(void* out, const void* in, double factor, size_t count) {
    using S = typename Codec::Storage;
    const auto by = static_cast<typename Codec::Compute>(factor);
    RESILIENT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      store<S>(out, i, Codec::encode(Codec::decode(load<S>(in, i)) * by));
    }
  }
};

template <typename Codec>
struct DivideLoop {
  [[gnu::always_inline]] static inline void
  run(void* data, uint64_t divisor, size_t count) {
    using S = typename Codec::Storage;
    using C = typename Codec::Compute;
    // Integers divide at 64 bits: 200 ranks do not fit into an int8.
    using D = std::conditional_t<
        std::is_floating_point_v<C>,
        C,
        std::conditional_t<std::is_signed_v<C>, int64_t, uint64_t>>;
    const auto by = static_cast<D>(divisor);
    RESILIENT_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      const D quotient = static_cast<D>(Codec::decode(load<S>(data, i))) / by;
      store<S>(data, i, Codec::encode(static_cast<C>(quotient)));
    }
  }
};

// One loop compiled twice, the faster one taken where the CPU has it. (gcc's
// target_clones does the same, but not for templates, and through ifunc: its
// resolver runs before the sanitizers are ready.)
// Both variants give the same bits: a loop has no operation that depends on the
// width of the vectors (reduce_gives_the_same_bits_one_by_one_and_at_once).
template <typename Loop, typename... Args>
RESILIENT_KERNEL void runBaseline(Args... args) {
  Loop::run(args...);
}

#ifdef RESILIENT_AVX2
template <typename Loop, typename... Args>
RESILIENT_KERNEL RESILIENT_AVX2 void runAvx2(Args... args) {
  Loop::run(args...);
}
#endif

template <typename Loop, typename... Args>
void dispatch(Args... args) {
#ifdef RESILIENT_AVX2
  static const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
  if (kHasAvx2) {
    runAvx2<Loop>(args...);
    return;
  }
#endif
  runBaseline<Loop>(args...);
}

template <typename T>
struct Is {
  using Codec = T;
};

// Calls f(Is<Codec>) for the type of one component (complex types have two
// per element); false if the type has no arithmetic.
template <typename F>
bool withCodec(DType dtype, F f) {
  switch (dtype) {
    case DType::kUInt8:
      return f(Is<NativeCodec<uint8_t>>());
    case DType::kInt8:
      return f(Is<NativeCodec<int8_t>>());
    case DType::kInt16:
      return f(Is<NativeCodec<int16_t>>());
    case DType::kInt32:
      return f(Is<NativeCodec<int32_t>>());
    case DType::kInt64:
      return f(Is<NativeCodec<int64_t>>());
    case DType::kUInt16:
      return f(Is<NativeCodec<uint16_t>>());
    case DType::kUInt32:
      return f(Is<NativeCodec<uint32_t>>());
    case DType::kUInt64:
      return f(Is<NativeCodec<uint64_t>>());
    case DType::kBool:
      return f(Is<BoolCodec>());
    case DType::kFloat16:
    case DType::kComplex32:
      return f(Is<SmallFloatCodec<Float16Format>>());
    case DType::kBFloat16:
      return f(Is<BFloat16Codec>());
    case DType::kFloat32:
    case DType::kComplex64:
      return f(Is<NativeCodec<float>>());
    case DType::kFloat64:
    case DType::kComplex128:
      return f(Is<NativeCodec<double>>());
    case DType::kFloat8E4M3FN:
      return f(Is<SmallFloatCodec<Float8E4M3FNFormat>>());
    case DType::kFloat8E5M2:
      return f(Is<SmallFloatCodec<Float8E5M2Format>>());
    case DType::kFloat8E4M3FNUZ:
      return f(Is<SmallFloatCodec<Float8E4M3FNUZFormat>>());
    case DType::kFloat8E5M2FNUZ:
      return f(Is<SmallFloatCodec<Float8E5M2FNUZFormat>>());
    case DType::kOpaque1:
    case DType::kOpaque2:
    case DType::kOpaque4:
    case DType::kOpaque8:
    case DType::kOpaque16:
      return false;
  }
  return false;
}

bool isComplex(DType t) {
  return t == DType::kComplex32 || t == DType::kComplex64 ||
      t == DType::kComplex128;
}

bool isOpaque(DType t) {
  return t >= DType::kOpaque1;
}

bool isFloating(DType t) {
  switch (t) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
      return true;
    default:
      return false;
  }
}

// bool's SUM, MAX and BOR are one function, and so are its PRODUCT, MIN and
// BAND.
ReduceOp boolOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return ReduceOp::kBor;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return ReduceOp::kBand;
    default:
      return op;
  }
}

// False if the codec has no kernel for the operation. kAvg and kPreMulSum add
// here. BAND, BOR and BXOR exist for integers only, MIN and MAX of complex
// types are excluded by reductionSupported(): the loop would compare
// components.
template <typename Codec>
bool reduceWith(
    void* out,
    const void* a,
    const void* b,
    size_t count,
    bool complex,
    ReduceOp op) {
  const size_t components = complex ? 2 * count : count;
  using C = typename Codec::Compute;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPreMulSum:
      dispatch<BinaryLoop<Codec, Sum>>(out, a, b, components);
      return true;
    case ReduceOp::kProduct:
      if constexpr (std::is_floating_point_v<C>) {
        if (complex) {
          dispatch<ComplexProductLoop<Codec>>(out, a, b, count);
          return true;
        }
      }
      dispatch<BinaryLoop<Codec, Product>>(out, a, b, count);
      return true;
    case ReduceOp::kMin:
      dispatch<BinaryLoop<Codec, Min>>(out, a, b, count);
      return true;
    case ReduceOp::kMax:
      dispatch<BinaryLoop<Codec, Max>>(out, a, b, count);
      return true;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if constexpr (std::is_integral_v<C>) {
        if (op == ReduceOp::kBand) {
          dispatch<BinaryLoop<Codec, Band>>(out, a, b, count);
        } else if (op == ReduceOp::kBor) {
          dispatch<BinaryLoop<Codec, Bor>>(out, a, b, count);
        } else {
          dispatch<BinaryLoop<Codec, Bxor>>(out, a, b, count);
        }
        return true;
      }
      return false;
    case ReduceOp::kNone:
      return false;
  }
  return false;
}

#ifdef RESILIENT_AVX2
// float16 through the CPU's own conversions, three times as fast as the
// portable ones and equal to them bit for bit, NaN included: the float32
// kernels between the two leave the canonical NaN only.
constexpr size_t kHalfBlock = 1024; // elements; the floats fit into 8 KiB

bool hasHalfConversion() {
  // AVX2 implies that the system saves its registers. clang 14 does not know
  // "f16c" here, so the processor is asked itself.
  static const bool kHas = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") != 0 &&
        __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return kHas;
}

__attribute__((target("avx2,f16c"))) void
decodeHalf(float* out, const unsigned char* in, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i codes =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(codes));
  }
  for (; i < count; ++i) {
    out[i] = decodeSmallFloat<Float16Format>(load<uint16_t>(in, i));
  }
}

__attribute__((target("avx2,f16c"))) void
encodeHalf(unsigned char* out, const float* in, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(out + 2 * i),
        _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) {
    store<uint16_t>(out, i, encodeSmallFloat<Float16Format>(in[i]));
  }
}

// Works block by block: it decodes both operands to float32, reduces there and
// encodes the result. `out` may be an operand, because a block is read before
// it is written.
void reduceHalf(
    void* out,
    const void* a,
    const void* b,
    size_t count,
    bool complex,
    ReduceOp op) {
  alignas(64) float left[kHalfBlock];
  alignas(64) float right[kHalfBlock];
  const size_t components = complex ? 2 * count : count;
  for (size_t at = 0; at < components; at += kHalfBlock) {
    const size_t n = std::min(kHalfBlock, components - at);
    decodeHalf(left, static_cast<const unsigned char*>(a) + 2 * at, n);
    decodeHalf(right, static_cast<const unsigned char*>(b) + 2 * at, n);
    reduceWith<NativeCodec<float>>(
        left, left, right, complex ? n / 2 : n, complex, op);
    encodeHalf(static_cast<unsigned char*>(out) + 2 * at, left, n);
  }
}
#endif

[[noreturn]] void throwUnsupported(
    const char* attempt,
    const std::string& why) {
  throw StatusError(Status(
      StatusCode::kInternal,
      std::string(attempt) + ": " + why +
          "; reductionSupported() should have been asked first"));
}

// The working block of reduceOrdered, a quarter of a first-level cache.
constexpr size_t kBlockBytes = 8192;

} // namespace

bool reductionSupported(DType dtype, ReduceOp op, std::string* why) {
  const char* reason = nullptr;
  const bool bitwise =
      op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  if (op == ReduceOp::kNone) {
    reason = "is no reduction";
  } else if (isOpaque(dtype)) {
    reason = "is not defined for a type without arithmetic";
  } else if (bitwise && (isFloating(dtype) || isComplex(dtype))) {
    reason = "is defined for integers and bool only";
  } else if (
      isComplex(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax)) {
    reason = "is not defined for complex numbers: they have no order";
  } else if (op == ReduceOp::kAvg && dtype == DType::kBool) {
    reason = "is not defined for bool";
  } else if (
      op == ReduceOp::kPreMulSum && !isFloating(dtype) && !isComplex(dtype)) {
    reason = "is defined for floating-point and complex types only";
  }
  if (reason == nullptr) {
    return true;
  }
  if (why != nullptr) {
    *why = std::string(reduceOpName(op)) + " of " + dtypeName(dtype) + " " +
        reason;
  }
  return false;
}

void reduceOut(
    void* out,
    const void* a,
    const void* b,
    size_t count,
    DType dtype,
    ReduceOp op) {
  std::string why;
  if (!reductionSupported(dtype, op, &why)) {
    throwUnsupported("reduce", why);
  }
  if (dtype == DType::kBool) {
    op = boolOp(op);
  }
#ifdef RESILIENT_AVX2
  if ((dtype == DType::kFloat16 || dtype == DType::kComplex32) &&
      hasHalfConversion()) {
    reduceHalf(out, a, b, count, dtype == DType::kComplex32, op);
    return;
  }
#endif
  const bool done = withCodec(dtype, [&](auto is) {
    return reduceWith<typename decltype(is)::Codec>(
        out, a, b, count, isComplex(dtype), op);
  });
  if (!done) {
    throwUnsupported("reduce", "no kernel");
  }
}

void reduceOrdered(
    void* out,
    const void* const* operands,
    size_t operandCount,
    size_t count,
    DType dtype,
    ReduceOp op) {
  const size_t elementBytes = dtypeBytes(dtype);
  if (operandCount == 0 || count == 0) {
    return;
  }
  if (operandCount == 1) {
    if (out != operands[0]) {
      std::memcpy(out, operands[0], count * elementBytes);
    }
    return;
  }
  if (operandCount == 2) {
    reduceOut(out, operands[0], operands[1], count, dtype, op);
    return;
  }
  // The partial result stays in a block of its own until the last operand:
  // `out` may be an operand that is still to be read.
  alignas(64) unsigned char partial[kBlockBytes];
  const size_t blockCount = kBlockBytes / elementBytes;
  for (size_t at = 0; at < count; at += blockCount) {
    const size_t n = std::min(blockCount, count - at);
    const size_t offset = at * elementBytes;
    const auto operand = [&](size_t i) {
      return static_cast<const unsigned char*>(operands[i]) + offset;
    };
    reduceOut(partial, operand(0), operand(1), n, dtype, op);
    for (size_t i = 2; i + 1 < operandCount; ++i) {
      reduceOut(partial, partial, operand(i), n, dtype, op);
    }
    reduceOut(
        static_cast<unsigned char*>(out) + offset,
        partial,
        operand(operandCount - 1),
        n,
        dtype,
        op);
  }
}

void scaleOut(
    void* out,
    const void* in,
    size_t count,
    DType dtype,
    double factor) {
  std::string why;
  if (!reductionSupported(dtype, ReduceOp::kPreMulSum, &why)) {
    throwUnsupported("scale", why);
  }
  const size_t components = isComplex(dtype) ? 2 * count : count;
  withCodec(dtype, [&](auto is) {
    using Codec = typename decltype(is)::Codec;
    if constexpr (std::is_floating_point_v<typename Codec::Compute>) {
      dispatch<ScaleLoop<Codec>>(out, in, factor, components);
    }
    return true;
  });
}

void divideBy(void* data, size_t count, DType dtype, uint64_t divisor) {
  std::string why;
  if (!reductionSupported(dtype, ReduceOp::kAvg, &why)) {
    throwUnsupported("divide", why);
  }
  const size_t components = isComplex(dtype) ? 2 * count : count;
  withCodec(dtype, [&](auto is) {
    using Codec = typename decltype(is)::Codec;
    dispatch<DivideLoop<Codec>>(data, divisor, components);
    return true;
  });
}

} // namespace resilient
