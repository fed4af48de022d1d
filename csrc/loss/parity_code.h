#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace resilient {

// Repair symbols for a block of packets of equal length. Pure arithmetic: any
// thread may call anything here at any time.
//
// The values are part of the protocol (docs/wire_format.md).
enum class ParityKind : uint8_t {
  kNone = 0,
  // Paper: SMART §3.2. Data symbol i belongs to sequence i mod `parity`, and
  // each sequence has one repair symbol, the XOR of its data. So any one loss
  // in each sequence is repaired, and any burst of up to `parity` symbols.
  kXor = 1,
  // Any `parity` losses are repaired. The code is systematic, over GF(256),
  // with the Cauchy matrix 1 / ((data + j) ^ i) for repair symbol j and data
  // symbol i.
  kReedSolomon = 2,
};

struct BlockShape {
  ParityKind kind = ParityKind::kNone;
  int data = 0; // symbols
  int parity = 0; // symbols; with kNone always 0
};

// The maximum of data and parity together, with Reed-Solomon: elements of the
// field.
inline constexpr int kMaxBlockSymbols = 255;

// nullptr, or what is wrong with the shape (one from a peer, say). The text is
// a constant. With XOR, `parity` may exceed `data`; the sequences beyond it are
// empty.
const char* faultOfShape(const BlockShape& shape);

// All below throw std::invalid_argument if the shape is wrong or a span has
// not one element for each symbol that it stands for.

// Computes parity[j] from data[i], each `bytes` long, which may be any number.
//
// Every data[i] is read, and every parity[j] is written whole. They must not
// overlap. With no parity it does nothing.
void encodeParity(
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes);

// have[i]: data[i] has arrived. parity[j] == nullptr: that repair symbol has
// not. Writes those missing data symbols that can be repaired, sets their
// have[i], and returns how many. The data[i] of the others is not touched.
//
// data[i] must point to room for a symbol even if it is missing. XOR repairs
// each sequence for itself. Reed-Solomon repairs all that is missing or
// nothing: with fewer repair symbols than missing data it returns 0 and has
// written nothing.
int recoverData(
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes);

// Whether recoverData would leave nothing missing. Looks at no data.
bool recoverable(
    const BlockShape& shape,
    std::span<const bool> have,
    std::span<const bool> parityHere);

} // namespace resilient
