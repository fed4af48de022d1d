#include "loss/kernels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "loss/galois.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define RESILIENT_AVX2 __attribute__((target("avx2")))
#define RESILIENT_AVX512 __attribute__((target("avx512f,avx512bw,gfni")))
// For loops over registers, which must not become loops over the stack.
#define RESILIENT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace resilient::kernels {
namespace {

// Products of a factor with the 16 values of each half of a byte: x * f is
// low[x & 15] ^ high[x >> 4].
//
// Multiplication by a constant distributes over XOR, so two tables of 16
// entries replace one of 256: AVX2 has a shuffle instruction that looks up 32
// bytes at a time.
struct HalfProducts {
  alignas(32) std::array<uint8_t, 16> low{};
  std::array<uint8_t, 16> high{};
};

constexpr std::array<HalfProducts, 256> makeHalfProducts() {
  std::array<HalfProducts, 256> tables;
  for (int factor = 0; factor < 256; ++factor) {
    for (int half = 0; half < 16; ++half) {
      const auto f = static_cast<uint8_t>(factor);
      tables[factor].low[half] =
          galois::multiply(f, static_cast<uint8_t>(half));
      tables[factor].high[half] =
          galois::multiply(f, static_cast<uint8_t>(half << 4));
    }
  }
  return tables;
}

constexpr std::array<HalfProducts, 256> kHalfProducts = makeHalfProducts();

// One 64-bit word at a time.
void xorOfScalar(
    const std::byte* const* sources,
    size_t count,
    size_t stride,
    std::byte* to,
    size_t bytes) {
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) {
      uint64_t word;
      std::memcpy(&word, sources[i * stride] + at, 8);
      sum ^= word;
    }
    std::memcpy(to + at, &sum, 8);
  }
  for (; at < bytes; ++at) {
    std::byte sum{};
    for (size_t i = 0; i < count; ++i) {
      sum ^= sources[i * stride][at];
    }
    to[at] = sum;
  }
}

// The definition in its plainest form, which the tests compare every other
// kernel with (parity_code_kernels_agree). It is not tuned.
void multiplySumScalar(
    const uint8_t* factors,
    const std::byte* const* sources,
    size_t count,
    std::byte* const* to,
    size_t rows,
    size_t bytes,
    bool accumulate) {
  for (size_t r = 0; r < rows; ++r) {
    if (!accumulate) {
      std::memset(to[r], 0, bytes);
    }
    for (size_t i = 0; i < count; ++i) {
      const HalfProducts& products = kHalfProducts[factors[r * count + i]];
      for (size_t at = 0; at < bytes; ++at) {
        const auto value = static_cast<uint8_t>(sources[i][at]);
        to[r][at] ^=
            std::byte(products.low[value & 15] ^ products.high[value >> 4]);
      }
    }
  }
}

#if defined(__x86_64__)

// Many sources at a time would be more streams than a processor's prefetcher
// can follow. So few are read at a time, and the sums kept in the destinations,
// which the nearest caches hold, until the next few are added. With 8 a block
// in the cache takes a tenth longer, with 32 one in memory a fifth.
constexpr size_t kSourcesAtOnce = 16;

// A few sources, added to a few destinations.
struct Pass {
  const uint8_t* factors; // of the first destination and source
  size_t factorsPerRow;
  const std::byte* const* sources;
  size_t count; // at most kSourcesAtOnce
  // As many, which are fetched into the cache meanwhile; nullptr: none.
  const std::byte* const* next;
  std::byte* const* to;
  size_t bytes;
  bool accumulate;
};

RESILIENT_AVX2 inline __m256i load256(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

RESILIENT_AVX2 inline void store256(std::byte* to, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}

// AVX2 has no masked loads of bytes, so the end of a symbol goes through a
// copy: a whole load might touch memory behind the symbol.
RESILIENT_AVX2 inline __m256i loadPart256(const std::byte* from, size_t bytes) {
  std::byte whole[32] = {};
  std::memcpy(whole, from, bytes);
  return load256(whole);
}

RESILIENT_AVX2 inline void
storePart256(std::byte* to, __m256i value, size_t bytes) {
  std::byte whole[32];
  store256(whole, value);
  std::memcpy(to, whole, bytes);
}

RESILIENT_AVX2 void xorOfAvx2(
    const std::byte* const* sources,
    size_t count,
    size_t stride,
    size_t ahead,
    std::byte* to,
    size_t bytes) {
  size_t at = 0;
  for (; at + 128 <= bytes; at += 128) {
    __m256i a = _mm256_setzero_si256();
    __m256i b = a;
    __m256i c = a;
    __m256i d = a;
    for (size_t i = 0; i < count; ++i) {
      const std::byte* from = sources[i * stride] + at;
      a = _mm256_xor_si256(a, load256(from));
      b = _mm256_xor_si256(b, load256(from + 32));
      c = _mm256_xor_si256(c, load256(from + 64));
      d = _mm256_xor_si256(d, load256(from + 96));
      if (ahead != 0) {
        const std::byte* soon = sources[i * stride + ahead] + at;
        _mm_prefetch(soon, _MM_HINT_T0);
        _mm_prefetch(soon + 64, _MM_HINT_T0);
      }
    }
    store256(to + at, a);
    store256(to + at + 32, b);
    store256(to + at + 64, c);
    store256(to + at + 96, d);
  }
  for (; at < bytes; at += 32) {
    const size_t part = std::min<size_t>(32, bytes - at);
    __m256i sum = _mm256_setzero_si256();
    for (size_t i = 0; i < count; ++i) {
      const std::byte* from = sources[i * stride] + at;
      sum = _mm256_xor_si256(
          sum, part == 32 ? load256(from) : loadPart256(from, part));
    }
    if (part == 32) {
      store256(to + at, sum);
    } else {
      storePart256(to + at, sum, part);
    }
  }
}

RESILIENT_AVX2 inline __m256i bothHalves(const std::array<uint8_t, 16>& table) {
  return _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(table.data())));
}

// The sums of kRows destinations stay in registers. From byte `begin` on;
// returns where less than kColumns vectors are left. Two columns share the
// loads of the tables; the second call, with one column, takes the vectors that
// are left.
template <size_t kRows, size_t kColumns>
RESILIENT_AVX2 size_t multiplyColumnsAvx2(const Pass& p, size_t begin) {
  constexpr size_t kStep = 32 * kColumns;
  const __m256i mask = _mm256_set1_epi8(15);
  const HalfProducts* products[kSourcesAtOnce][kRows];
  for (size_t i = 0; i < p.count; ++i) {
    for (size_t r = 0; r < kRows; ++r) {
      products[i][r] = &kHalfProducts[p.factors[r * p.factorsPerRow + i]];
    }
  }
  size_t at = begin;
  for (; at + kStep <= p.bytes; at += kStep) {
    __m256i sum[kRows][kColumns];
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      RESILIENT_UNROLL
      for (size_t c = 0; c < kColumns; ++c) {
        sum[r][c] = p.accumulate ? load256(p.to[r] + at + 32 * c)
                                 : _mm256_setzero_si256();
      }
    }
    for (size_t i = 0; i < p.count; ++i) {
      const std::byte* from = p.sources[i] + at;
      if (p.next != nullptr) {
        _mm_prefetch(p.next[i] + at, _MM_HINT_T0);
      }
      __m256i low[kColumns];
      __m256i high[kColumns];
      RESILIENT_UNROLL
      for (size_t c = 0; c < kColumns; ++c) {
        const __m256i value = load256(from + 32 * c);
        low[c] = _mm256_and_si256(value, mask);
        high[c] = _mm256_and_si256(_mm256_srli_epi64(value, 4), mask);
      }
      RESILIENT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        const __m256i ofLow = bothHalves(products[i][r]->low);
        const __m256i ofHigh = bothHalves(products[i][r]->high);
        RESILIENT_UNROLL
        for (size_t c = 0; c < kColumns; ++c) {
          sum[r][c] = _mm256_xor_si256(
              sum[r][c],
              _mm256_xor_si256(
                  _mm256_shuffle_epi8(ofLow, low[c]),
                  _mm256_shuffle_epi8(ofHigh, high[c])));
        }
      }
    }
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      RESILIENT_UNROLL
      for (size_t c = 0; c < kColumns; ++c) {
        store256(p.to[r] + at + 32 * c, sum[r][c]);
      }
    }
  }
  return at;
}

// One pass for all bytes. With kRows known at compile time, the sums are
// registers: a loop with a variable number of rows would keep them in memory.
template <size_t kRows>
RESILIENT_AVX2 void multiplyAvx2(const Pass& p) {
  size_t at = multiplyColumnsAvx2<kRows, 2>(p, 0);
  at = multiplyColumnsAvx2<kRows, 1>(p, at);
  if (at == p.bytes) {
    return;
  }
  // The rest in copies of whole vectors.
  const size_t rest = p.bytes - at;
  std::byte sources[kSourcesAtOnce][32] = {};
  std::byte sums[kRows][32] = {};
  const std::byte* from[kSourcesAtOnce];
  std::byte* to[kRows];
  for (size_t i = 0; i < p.count; ++i) {
    std::memcpy(sources[i], p.sources[i] + at, rest);
    from[i] = sources[i];
  }
  for (size_t r = 0; r < kRows; ++r) {
    std::memcpy(sums[r], p.to[r] + at, rest);
    to[r] = sums[r];
  }
  Pass last = p;
  last.sources = from;
  last.next = nullptr;
  last.to = to;
  last.bytes = 32;
  multiplyColumnsAvx2<kRows, 1>(last, 0);
  for (size_t r = 0; r < kRows; ++r) {
    std::memcpy(p.to[r] + at, sums[r], rest);
  }
}

RESILIENT_AVX512 void xorOfAvx512(
    const std::byte* const* sources,
    size_t count,
    size_t stride,
    size_t ahead,
    std::byte* to,
    size_t bytes) {
  size_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    __m512i a = _mm512_setzero_si512();
    __m512i b = a;
    __m512i c = a;
    __m512i d = a;
    for (size_t i = 0; i < count; ++i) {
      const std::byte* from = sources[i * stride] + at;
      a = _mm512_xor_si512(a, _mm512_loadu_si512(from));
      b = _mm512_xor_si512(b, _mm512_loadu_si512(from + 64));
      c = _mm512_xor_si512(c, _mm512_loadu_si512(from + 128));
      d = _mm512_xor_si512(d, _mm512_loadu_si512(from + 192));
      if (ahead != 0) {
        const std::byte* soon = sources[i * stride + ahead] + at;
        _mm_prefetch(soon, _MM_HINT_T0);
        _mm_prefetch(soon + 64, _MM_HINT_T0);
        _mm_prefetch(soon + 128, _MM_HINT_T0);
        _mm_prefetch(soon + 192, _MM_HINT_T0);
      }
    }
    _mm512_storeu_si512(to + at, a);
    _mm512_storeu_si512(to + at + 64, b);
    _mm512_storeu_si512(to + at + 128, c);
    _mm512_storeu_si512(to + at + 192, d);
  }
  for (; at < bytes; at += 64) {
    const __mmask64 mask =
        bytes - at >= 64 ? ~0ull : (1ull << (bytes - at)) - 1;
    __m512i sum = _mm512_setzero_si512();
    for (size_t i = 0; i < count; ++i) {
      sum = _mm512_xor_si512(
          sum, _mm512_maskz_loadu_epi8(mask, sources[i * stride] + at));
      if (ahead != 0) {
        _mm_prefetch(sources[i * stride + ahead] + at, _MM_HINT_T0);
      }
    }
    _mm512_mask_storeu_epi8(to + at, mask, sum);
  }
}

// The product with a factor is linear in the bits of the other number: as
// gf2p8affineqb wants it, byte 7 - i has the bits with the parity that is bit i
// of the product.
constexpr std::array<uint64_t, 256> makeMatrices() {
  std::array<uint64_t, 256> matrices{};
  for (int factor = 0; factor < 256; ++factor) {
    for (int bit = 0; bit < 8; ++bit) {
      const uint8_t product = galois::multiply(
          static_cast<uint8_t>(factor), static_cast<uint8_t>(1 << bit));
      for (int i = 0; i < 8; ++i) {
        if ((product >> i) & 1) {
          matrices[factor] |= uint64_t{1} << (8 * (7 - i) + bit);
        }
      }
    }
  }
  return matrices;
}

constexpr std::array<uint64_t, 256> kMatrices = makeMatrices();

RESILIENT_AVX512 inline __m512i everywhere512(uint64_t word) {
  __m512i all = _mm512_set1_epi64(static_cast<long long>(word));
#if defined(__clang__) && __clang_major__ < 15
  // Keeps it in a register: clang 14 gives gf2p8affineqb a wrong address where
  // that broadcasts a word from memory itself.
  __asm__("" : "+v"(all));
#endif
  return all;
}

// As multiplyAvx2, but one instruction multiplies 64 bytes by a matrix of bits,
// and masks take the end of a symbol without a copy.
template <size_t kRows>
RESILIENT_AVX512 void multiplyAvx512(const Pass& p) {
  uint64_t matrices[kSourcesAtOnce][kRows];
  for (size_t i = 0; i < p.count; ++i) {
    for (size_t r = 0; r < kRows; ++r) {
      matrices[i][r] = kMatrices[p.factors[r * p.factorsPerRow + i]];
    }
  }
  size_t at = 0;
  for (; at + 128 <= p.bytes; at += 128) {
    __m512i left[kRows];
    __m512i right[kRows];
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      left[r] = right[r] = _mm512_setzero_si512();
    }
    if (p.accumulate) {
      RESILIENT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        left[r] = _mm512_loadu_si512(p.to[r] + at);
        right[r] = _mm512_loadu_si512(p.to[r] + at + 64);
      }
    }
    for (size_t i = 0; i < p.count; ++i) {
      const __m512i a = _mm512_loadu_si512(p.sources[i] + at);
      const __m512i b = _mm512_loadu_si512(p.sources[i] + at + 64);
      if (p.next != nullptr) {
        _mm_prefetch(p.next[i] + at, _MM_HINT_T0);
        _mm_prefetch(p.next[i] + at + 64, _MM_HINT_T0);
      }
      RESILIENT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        const __m512i matrix = everywhere512(matrices[i][r]);
        left[r] = _mm512_xor_si512(
            left[r], _mm512_gf2p8affine_epi64_epi8(a, matrix, 0));
        right[r] = _mm512_xor_si512(
            right[r], _mm512_gf2p8affine_epi64_epi8(b, matrix, 0));
      }
    }
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      _mm512_storeu_si512(p.to[r] + at, left[r]);
      _mm512_storeu_si512(p.to[r] + at + 64, right[r]);
    }
  }
  for (; at < p.bytes; at += 64) {
    const size_t rest = std::min<size_t>(64, p.bytes - at);
    const __mmask64 mask = ~0ull >> (64 - rest);
    __m512i sum[kRows];
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      sum[r] = _mm512_setzero_si512();
    }
    for (size_t i = 0; i < p.count; ++i) {
      const __m512i a = _mm512_maskz_loadu_epi8(mask, p.sources[i] + at);
      RESILIENT_UNROLL
      for (size_t r = 0; r < kRows; ++r) {
        const __m512i matrix = everywhere512(matrices[i][r]);
        sum[r] = _mm512_xor_si512(
            sum[r], _mm512_gf2p8affine_epi64_epi8(a, matrix, 0));
      }
    }
    RESILIENT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      if (p.accumulate) {
        sum[r] = _mm512_xor_si512(
            sum[r], _mm512_maskz_loadu_epi8(mask, p.to[r] + at));
      }
      _mm512_mask_storeu_epi8(p.to[r] + at, mask, sum[r]);
    }
  }
}

// The rows that fit into 16 registers of AVX2 and 32 of AVX-512.
constexpr size_t kRowsAvx2 = 4;
constexpr size_t kRowsAvx512 = 12;

using RunPass = void (*)(const Pass&);

template <size_t... kIndex>
constexpr std::array<RunPass, sizeof...(kIndex)> makeAvx2(
    std::index_sequence<kIndex...>) {
  return {&multiplyAvx2<kIndex + 1>...};
}

template <size_t... kIndex>
constexpr std::array<RunPass, sizeof...(kIndex)> makeAvx512(
    std::index_sequence<kIndex...>) {
  return {&multiplyAvx512<kIndex + 1>...};
}

// By the number of rows, less 1.
constexpr auto kAvx2Passes = makeAvx2(std::make_index_sequence<kRowsAvx2>{});
constexpr auto kAvx512Passes =
    makeAvx512(std::make_index_sequence<kRowsAvx512>{});

// Cuts a product into passes: kSourcesAtOnce sources and as many rows as
// registers allow. From the second group of sources on, a pass adds to what the
// first one wrote. The loop runs once even without sources, since the
// destinations still have to become zero. Only the first group of rows
// prefetches the next sources: the others would fetch the same ones.
template <size_t kMaxRows>
void multiplySumVector(
    const std::array<RunPass, kMaxRows>& passes,
    const uint8_t* factors,
    const std::byte* const* sources,
    size_t count,
    std::byte* const* to,
    size_t rows,
    size_t bytes,
    bool accumulate) {
  // Groups of about the same size: 6 + 5 rather than 10 + 1.
  const size_t groups = (rows + kMaxRows - 1) / kMaxRows;
  for (size_t first = 0; first == 0 || first < count; first += kSourcesAtOnce) {
    const size_t some = std::min(kSourcesAtOnce, count - first);
    // The last pass may have fewer; then some are asked for again.
    const std::byte* const* next =
        sources + std::min(first + some, count - some);
    for (size_t g = 0; g < groups; ++g) {
      const size_t begin = rows * g / groups;
      const size_t end = rows * (g + 1) / groups;
      const Pass pass{
          .factors = factors + begin * count + first,
          .factorsPerRow = count,
          .sources = sources + first,
          .count = some,
          .next = g == 0 && first + some < count ? next : nullptr,
          .to = to + begin,
          .bytes = bytes,
          .accumulate = accumulate || first > 0};
      passes[end - begin - 1](pass);
    }
  }
}

#endif

} // namespace

const char* kernelName(Kernel kernel) {
  switch (kernel) {
    case Kernel::kScalar:
      return "scalar";
    case Kernel::kAvx2:
      return "avx2";
    case Kernel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool supported(Kernel kernel) {
  switch (kernel) {
    case Kernel::kScalar:
      return true;
#if defined(__x86_64__)
    case Kernel::kAvx2:
      return __builtin_cpu_supports("avx2") != 0;
    case Kernel::kAvx512:
      return __builtin_cpu_supports("avx512f") != 0 &&
          __builtin_cpu_supports("avx512bw") != 0 &&
          __builtin_cpu_supports("gfni") != 0;
#else
    default:
      break;
#endif
  }
  return false;
}

Kernel fastest() {
  static const Kernel kFastest = supported(Kernel::kAvx512) ? Kernel::kAvx512
      : supported(Kernel::kAvx2)                            ? Kernel::kAvx2
                                                            : Kernel::kScalar;
  return kFastest;
}

void xorOf(
    Kernel kernel,
    const std::byte* const* sources,
    size_t count,
    size_t stride,
    [[maybe_unused]] size_t ahead,
    std::byte* to,
    size_t bytes) {
#if defined(__x86_64__)
  if (kernel == Kernel::kAvx512) {
    return xorOfAvx512(sources, count, stride, ahead, to, bytes);
  }
  if (kernel == Kernel::kAvx2) {
    return xorOfAvx2(sources, count, stride, ahead, to, bytes);
  }
#endif
  xorOfScalar(sources, count, stride, to, bytes);
}

void multiplySum(
    Kernel kernel,
    const uint8_t* factors,
    const std::byte* const* sources,
    size_t count,
    std::byte* const* to,
    size_t rows,
    size_t bytes,
    bool accumulate) {
#if defined(__x86_64__)
  if (kernel == Kernel::kAvx512) {
    return multiplySumVector(
        kAvx512Passes, factors, sources, count, to, rows, bytes, accumulate);
  }
  if (kernel == Kernel::kAvx2) {
    return multiplySumVector(
        kAvx2Passes, factors, sources, count, to, rows, bytes, accumulate);
  }
#endif
  multiplySumScalar(factors, sources, count, to, rows, bytes, accumulate);
}

} // namespace resilient::kernels
