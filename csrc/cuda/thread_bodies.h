#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "loss/magnitude.h"

// The work of one thread of each kernel of loss_kernels.cu, apart from CUDA:
// csrc/tests/cuda_loss_test.cpp runs all threads of a grid on the host, one
// after the other. Pointers are to elements, aligned as their type is.
namespace resilient::cuda {

// 16 bytes, which a thread loads and stores at once.
struct alignas(16) Word16 {
  uint64_t low = 0;
  uint64_t high = 0;
  constexpr Word16& operator^=(const Word16& other) {
    low ^= other.low;
    high ^= other.high;
    return *this;
  }
};

// ---- Means of packets (Paper: SMART §3.1, Equation 1) ----------------------

inline constexpr size_t kWarpThreads = 32;
static_assert(2 * kWarpThreads == magnitude::kSums);

// A warp for each packet.
// Each thread adds its own sums in the order of magnitude.h; foldSums() then
// adds those of the warp. The order, and with it every bit, equals that of the
// CPU.
template <typename Type>
struct PacketMeans {
  using Sum = typename Type::Sum;
  const typename Type::Storage* data;
  size_t count;
  size_t elementsPerPacket;
  size_t firstPacketElements;
  size_t packets;
  float* out;

  // The sums `thread` and `thread` + 32 of the order in magnitude.h.
  struct Partial {
    Sum low = 0;
    Sum high = 0;
  };
  constexpr Partial partial(size_t packet, size_t thread) const {
    const magnitude::PacketRange range = rangeOf(packet);
    const typename Type::Storage* from = data + range.begin;
    const size_t rounds = range.count / magnitude::kSums * magnitude::kSums;
    Partial sums;
    for (size_t i = thread; i < rounds; i += magnitude::kSums) {
      sums.low += Type::of(from[i]);
      sums.high += Type::of(from[i + kWarpThreads]);
    }
    if (thread < magnitude::kLanes) {
      for (size_t i = rounds + thread; i < range.count;
           i += magnitude::kLanes) {
        sums.low += Type::of(from[i]);
      }
    }
    return sums;
  }
  constexpr void put(size_t packet, Sum sum) const {
    out[packet] = magnitude::meanOf(sum, rangeOf(packet).count);
  }

 private:
  constexpr magnitude::PacketRange rangeOf(size_t packet) const {
    return magnitude::packetRange(
        packet, count, elementsPerPacket, firstPacketElements);
  }
};

// The warp's sum, in its thread 0. down(value, n) is what the thread n places
// further has; of what lies beyond the warp nothing reaches thread 0.
template <typename Sum, typename Down>
constexpr Sum foldSums(Sum low, Sum high, Down down) {
  low = low + down(low, 16);
  high = high + down(high, 16);
  Sum sum = low + high;
  for (unsigned half = magnitude::kLanes / 2; half > 0; half /= 2) {
    sum = sum + down(sum, half);
  }
  return sum;
}

// ---- The sample for the threshold ------------------------------------------

// A thread for each element of the sample.
template <typename Type>
struct ThresholdSample {
  const typename Type::Storage* data;
  size_t count;
  uint64_t seed;
  double* sample;
  size_t size;

  constexpr size_t threads() const {
    return size;
  }
  constexpr void operator()(size_t thread) const {
    sample[thread] = magnitude::sampleValue<Type>(
        data[magnitude::samplePlace(thread, count, seed)]);
  }
};

// ---- Whether all is finite --------------------------------------------------

// A thread for each 16 aligned bytes of memory with elements.
// Bytes of the first and the last 16 that belong to no element are not read.
template <typename Type>
struct AllFinite {
  using Storage = typename Type::Storage;
  static constexpr size_t kEach = 16 / sizeof(Storage);
  struct alignas(16) Chunk {
    Storage codes[kEach];
  };
  const Chunk* chunks;
  size_t begin; // of the elements, counted from the first chunk's begin
  size_t end;
  int32_t* finite; // becomes 0 if something is not

  AllFinite(const Storage* data, size_t count, int32_t* result)
      : begin(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(Storage)),
        end(begin + count),
        finite(result) {
    chunks = reinterpret_cast<const Chunk*>(
        reinterpret_cast<uintptr_t>(data) / 16 * 16);
  }
  constexpr size_t threads() const {
    return begin == end ? 0 : (end + kEach - 1) / kEach;
  }
  constexpr void operator()(size_t thread) const {
    const size_t first = thread * kEach;
    bool good = true;
    if (begin <= first && first + kEach <= end) {
      const Chunk chunk = chunks[thread];
      for (const Storage code : chunk.codes) {
        good &= magnitude::isFinite<Type>(code);
      }
    } else {
      for (size_t i = std::max(begin, first); i < std::min(end, first + kEach);
           ++i) {
        good &= magnitude::isFinite<Type>(chunks[thread].codes[i - first]);
      }
    }
    if (!good) {
      *finite = 0; // by any number of threads
    }
  }
};

// ---- XOR parity (Paper: SMART §3.2) -----------------------------------------

// Blocks one after the other, and in each its symbols.
struct XorShape {
  size_t blocks;
  size_t data; // symbols in a block
  size_t parity; // symbols in a block, at least 1
  size_t words; // in a symbol
};

// A thread for each word of each parity symbol.
template <typename Word>
struct EncodeXor {
  XorShape shape;
  const Word* data;
  Word* parity;

  constexpr size_t threads() const {
    return shape.blocks * shape.parity * shape.words;
  }
  constexpr void operator()(size_t thread) const {
    const size_t at = thread % shape.words;
    const size_t row = thread / shape.words;
    const size_t block = row / shape.parity;
    const Word* from = data + block * shape.data * shape.words + at;
    Word sum{};
    for (size_t i = row % shape.parity; i < shape.data; i += shape.parity) {
      sum ^= from[i * shape.words];
    }
    parity[thread] = sum;
  }
};

// The flags of all data and parity symbols: whether they are here.
struct XorFlags {
  XorShape shape;
  bool* have;
  const bool* parityHere;

  // Which data symbol of its block the parity symbol `row` (of all) repairs;
  // shape.data: none.
  constexpr size_t repairs(size_t row) const {
    const size_t block = row / shape.parity;
    size_t lost = shape.data;
    if (!parityHere[row]) {
      return lost;
    }
    for (size_t i = row % shape.parity; i < shape.data; i += shape.parity) {
      if (!have[block * shape.data + i]) {
        if (lost != shape.data) {
          return shape.data;
        }
        lost = i;
      }
    }
    return lost;
  }
};

// A thread for each word of each parity symbol. Leaves the flags as they are,
// for the other threads of a symbol.
template <typename Word>
struct RecoverXor {
  XorFlags flags;
  Word* data;
  const Word* parity;

  constexpr size_t threads() const {
    return flags.shape.blocks * flags.shape.parity * flags.shape.words;
  }
  constexpr void operator()(size_t thread) const {
    const XorShape& shape = flags.shape;
    const size_t at = thread % shape.words;
    const size_t row = thread / shape.words;
    const size_t lost = flags.repairs(row);
    if (lost == shape.data) {
      return;
    }
    Word* symbols = data + row / shape.parity * shape.data * shape.words + at;
    Word sum = parity[thread];
    for (size_t i = row % shape.parity; i < shape.data; i += shape.parity) {
      if (i != lost) {
        sum ^= symbols[i * shape.words];
      }
    }
    symbols[lost * shape.words] = sum;
  }
};

// After it: a thread for each parity symbol.
// Each data symbol belongs to one parity symbol, so no two threads write the
// same flag.
struct MarkRecovered {
  XorFlags flags;

  constexpr size_t threads() const {
    return flags.shape.blocks * flags.shape.parity;
  }
  // Whether a symbol was repaired.
  constexpr bool operator()(size_t row) const {
    const size_t lost = flags.repairs(row);
    if (lost == flags.shape.data) {
      return false;
    }
    flags.have[row / flags.shape.parity * flags.shape.data + lost] = true;
    return true;
  }
};

} // namespace resilient::cuda
