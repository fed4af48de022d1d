#include "loss/parity_code.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "loss/galois.h"
#include "loss/parity_code_internal.h"

namespace resilient {
namespace {

using kernels::Kernel;

void check(const BlockShape& shape, size_t data, size_t parity) {
  if (const char* fault = faultOfShape(shape)) {
    throw std::invalid_argument(fault);
  }
  if (data != static_cast<size_t>(shape.data) ||
      parity != static_cast<size_t>(shape.parity)) {
    throw std::invalid_argument(
        "block of " + std::to_string(shape.data) + " data and " +
        std::to_string(shape.parity) + " parity symbols: got " +
        std::to_string(data) + " and " + std::to_string(parity) +
        " buffers; give one for each symbol");
  }
}

// How many data symbols sequence j has.
size_t sequenceLength(const BlockShape& shape, int j) {
  return j < shape.data
      ? static_cast<size_t>((shape.data - 1 - j) / shape.parity) + 1
      : 0;
}

// One sum for each sequence. The symbols of a sequence are `parity` places
// apart in the span, so no list of pointers is built.
void encodeXor(
    Kernel kernel,
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes) {
  const auto stride = static_cast<size_t>(shape.parity);
  for (int j = 0; j < shape.parity; ++j) {
    const size_t count = sequenceLength(shape, j);
    if (count == 0) { // more repair symbols than data
      std::fill_n(parity[j], bytes, std::byte{0});
      continue;
    }
    // The next sequence's symbols are adjacent to these, if it has as many.
    const bool nextIsBeside =
        j + 1 < shape.parity && sequenceLength(shape, j + 1) == count;
    kernels::xorOf(
        kernel,
        &data[j],
        count,
        stride,
        nextIsBeside ? 1 : 0,
        parity[j],
        bytes);
  }
}

// A sequence with exactly one missing symbol and its repair symbol gives that
// symbol back: it is the XOR of all others. With two missing, nothing can be
// said.
int recoverXor(
    Kernel kernel,
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes) {
  std::vector<const std::byte*> sources;
  int filled = 0;
  for (int j = 0; j < shape.parity; ++j) {
    int missing = 0;
    int lost = 0;
    for (int i = j; i < shape.data; i += shape.parity) {
      if (!have[i]) {
        ++missing;
        lost = i;
      }
    }
    if (missing != 1 || parity[j] == nullptr) {
      continue;
    }
    sources.assign(1, parity[j]);
    for (int i = j; i < shape.data; i += shape.parity) {
      if (i != lost) {
        sources.push_back(data[i]);
      }
    }
    kernels::xorOf(
        kernel, sources.data(), sources.size(), 1, 0, data[lost], bytes);
    have[lost] = true;
    ++filled;
  }
  return filled;
}

// The Cauchy matrix of the code: its rows are numbers from `data` on, its
// columns those below; all are different, so no sum is 0.
uint8_t rowNumber(const BlockShape& shape, int j) {
  return static_cast<uint8_t>(shape.data + j);
}

uint8_t factorOf(const BlockShape& shape, int j, int i) {
  return galois::inverse(
      static_cast<uint8_t>(rowNumber(shape, j) ^ static_cast<uint8_t>(i)));
}

// On the stack, 16 KiB: data * parity is at most that for 255 symbols together.
using Factors = std::array<uint8_t, kMaxBlockSymbols * kMaxBlockSymbols / 4>;

void encodeReedSolomon(
    Kernel kernel,
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes) {
  Factors factors; // data * parity is largest where both are half of all
  uint8_t* next = factors.data();
  for (int j = 0; j < shape.parity; ++j) {
    for (int i = 0; i < shape.data; ++i) {
      *next++ = factorOf(shape, j, i);
    }
  }
  kernels::multiplySum(
      kernel,
      factors.data(),
      data.data(),
      data.size(),
      parity.data(),
      parity.size(),
      bytes,
      false);
}

// The inverse of the square part of the Cauchy matrix with these rows and
// columns, in closed form: with x for rows and y for columns,
//
//   inverse[i][j] = f[j] g[i] / (x[j] + y[i])
//   f[j] = product over t of (x[j] + y[t])
//          / product over t != j of (x[j] + x[t])
//   g[i] = product over t of (x[t] + y[i])
//          / product over t != i of (y[i] + y[t])
//
// Costs size^2 products, where Gaussian elimination costs size^3. Every factor
// is a sum of two different elements, so none is zero.
void invertCauchy(
    std::span<const uint8_t> x,
    std::span<const uint8_t> y,
    uint8_t* inverse) {
  const size_t size = x.size();
  const auto weights = [size](
                           std::span<const uint8_t> own,
                           std::span<const uint8_t> other,
                           std::array<galois::LogProduct, 256>& result) {
    for (size_t a = 0; a < size; ++a) {
      for (size_t t = 0; t < size; ++t) {
        result[a].multiplyBy(own[a] ^ other[t]);
        if (t != a) {
          result[a].divideBy(own[a] ^ own[t]);
        }
      }
    }
  };
  std::array<galois::LogProduct, 256> f;
  std::array<galois::LogProduct, 256> g;
  weights(x, y, f);
  weights(y, x, g);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j) {
      galois::LogProduct element = f[j];
      element.multiplyBy(g[i].value());
      element.divideBy(x[j] ^ y[i]);
      *inverse++ = element.value();
    }
  }
}

// With L symbols missing: L repair symbols, less what the present data
// contributed to them, are an L x L system for the missing ones. Any square
// part of a Cauchy matrix has an inverse, so it does not matter which symbols
// are missing and which repair symbols are used: the first L are.
//
// How it works. All factors are found before a byte of data is touched. Then,
// for one stretch of all symbols after the other: copy the repair symbols
// aside, subtract the data that is here (`known`; a difference is an XOR), and
// multiply by the inverse.
int recoverReedSolomon(
    Kernel kernel,
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes) {
  // Pointers are to where the next stretch begins; the counts are at most 255.
  std::array<std::byte*, 256> missing;
  std::array<const std::byte*, 256> present;
  std::array<const std::byte*, 256> repair;
  std::array<uint8_t, 256> columns; // of what is missing
  std::array<uint8_t, 256> rows; // of the repair symbols that are used
  std::array<int, 256> presentIndex;
  size_t lost = 0;
  size_t here = 0;
  for (int i = 0; i < shape.data; ++i) {
    if (have[i]) {
      presentIndex[here] = i;
      present[here++] = data[i];
    } else {
      columns[lost] = static_cast<uint8_t>(i);
      missing[lost++] = data[i];
    }
  }
  size_t used = 0;
  std::array<int, 256> usedIndex;
  for (int j = 0; j < shape.parity && used < lost; ++j) {
    if (parity[j] != nullptr) {
      usedIndex[used] = j;
      rows[used] = rowNumber(shape, j);
      repair[used++] = parity[j];
    }
  }
  if (lost == 0 || used < lost) {
    return 0;
  }
  Factors known;
  uint8_t* next = known.data();
  for (size_t j = 0; j < lost; ++j) {
    for (size_t i = 0; i < here; ++i) {
      *next++ = factorOf(shape, usedIndex[j], presentIndex[i]);
    }
  }
  Factors inverse;
  invertCauchy({rows.data(), lost}, {columns.data(), lost}, inverse.data());

  // The rest of the repair symbols, a stretch of each at a time: all of them
  // stay in the nearest caches. At least 64 bytes for each of the 127 that can
  // be missing and repaired.
  alignas(64) std::array<std::byte, 16384> room;
  const size_t stretch = room.size() / lost / 64 * 64;
  std::array<std::byte*, 256> rest;
  for (size_t j = 0; j < lost; ++j) {
    rest[j] = room.data() + j * stretch;
  }
  for (size_t at = 0; at < bytes; at += stretch) {
    const size_t some = std::min(stretch, bytes - at);
    for (size_t j = 0; j < lost; ++j) {
      std::copy_n(repair[j], some, rest[j]);
    }
    kernels::multiplySum(
        kernel,
        known.data(),
        present.data(),
        here,
        rest.data(),
        lost,
        some,
        true);
    kernels::multiplySum(
        kernel,
        inverse.data(),
        rest.data(),
        lost,
        missing.data(),
        lost,
        some,
        false);
    for (size_t j = 0; j < lost; ++j) {
      repair[j] += some;
      missing[j] += some;
    }
    for (size_t i = 0; i < here; ++i) {
      present[i] += some;
    }
  }
  for (size_t i = 0; i < lost; ++i) {
    have[columns[i]] = true;
  }
  return static_cast<int>(lost);
}

} // namespace

const char* faultOfShape(const BlockShape& shape) {
  if (shape.kind != ParityKind::kNone && shape.kind != ParityKind::kXor &&
      shape.kind != ParityKind::kReedSolomon) {
    return "block shape: unknown kind of parity; use none, xor or reed_solomon";
  }
  if (shape.data < 1 || shape.parity < 0) {
    return "block shape: at least 1 data symbol and 0 parity symbols are "
           "needed";
  }
  if (shape.kind == ParityKind::kNone && shape.parity != 0) {
    return "block shape: parity symbols, but no kind of parity; choose xor or "
           "reed_solomon, or 0 symbols";
  }
  if (shape.kind == ParityKind::kReedSolomon &&
      (shape.data > kMaxBlockSymbols ||
       shape.parity > kMaxBlockSymbols - shape.data)) {
    return "block shape: Reed-Solomon has at most 255 symbols, data and parity "
           "together; use smaller blocks";
  }
  return nullptr;
}

namespace kernels {

void encodeParity(
    Kernel kernel,
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes) {
  check(shape, data.size(), parity.size());
  if (shape.parity == 0) {
    return;
  }
  if (shape.kind == ParityKind::kXor) {
    encodeXor(kernel, shape, data, parity, bytes);
  } else {
    encodeReedSolomon(kernel, shape, data, parity, bytes);
  }
}

int recoverData(
    Kernel kernel,
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes) {
  check(shape, data.size(), parity.size());
  check(shape, have.size(), parity.size());
  if (shape.parity == 0) {
    return 0;
  }
  return shape.kind == ParityKind::kXor
      ? recoverXor(kernel, shape, data, have, parity, bytes)
      : recoverReedSolomon(kernel, shape, data, have, parity, bytes);
}

} // namespace kernels

void encodeParity(
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes) {
  kernels::encodeParity(kernels::fastest(), shape, data, parity, bytes);
}

int recoverData(
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes) {
  return kernels::recoverData(
      kernels::fastest(), shape, data, have, parity, bytes);
}

bool recoverable(
    const BlockShape& shape,
    std::span<const bool> have,
    std::span<const bool> parityHere) {
  check(shape, have.size(), parityHere.size());
  if (shape.kind != ParityKind::kXor) {
    return std::count(have.begin(), have.end(), false) <=
        std::count(parityHere.begin(), parityHere.end(), true);
  }
  if (shape.parity == 0) {
    return std::find(have.begin(), have.end(), false) == have.end();
  }
  for (int j = 0; j < shape.parity; ++j) {
    int missing = 0;
    for (int i = j; i < shape.data; i += shape.parity) {
      missing += !have[i];
    }
    if (missing > (parityHere[j] ? 1 : 0)) {
      return false;
    }
  }
  return true;
}

} // namespace resilient
