#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"

namespace resilient {

// The packets that travel in the datagrams of a path. Each datagram is sealed
// as a whole (transport/packet_seal.h), so a decoder gets authentic bytes, of a
// peer that may be faulty nevertheless. docs/wire_format.md shows the same
// tables in prose, and packet_test.cpp pins the bytes.
//
// An *object* is one frame, header and payload, cut into *pieces* of one size
// (the last is filled up with zeros). A piece travels as a *data symbol*;
// *repair symbols* are computed from them.

enum class PacketType : uint8_t {
  kSymbol = 1,
  kEnd = 2, // a description only: all up to this object has been sent
  kReport = 3, // what the receiver has, and what it wants
  kProbe = 4, // does the peer answer; do packets of this size arrive?
  kProbeReply = 5,
};

inline constexpr size_t kSymbolHeaderBytes = 44;
inline constexpr size_t kReportHeaderBytes = 92;
inline constexpr size_t kProbeBytes = 20;

// A piece is a multiple of this: no element is cut.
inline constexpr size_t kPieceUnit = 32;
inline constexpr size_t kMinPieceBytes = 256;
inline constexpr size_t kMaxPieceBytes = 9184;
inline constexpr size_t kMaxPieces = 65000;
// An object of at most this size is sent without padding. It arrives wherever
// UDP with an IPv6 packet of the least MTU does: that it does says nothing
// about longer packets.
inline constexpr size_t kShortBytes = 1024;
// The limit of one object: their numbers have 16 bits.
inline constexpr uint32_t kMaxRepairSymbols = 65536;

// The description of an object stands in each of its packets: any of them is
// enough to begin with.
//
// All packets of an object must agree on the fields that describe it; the
// receiver takes a contradiction for a protocol error. The fields of one packet
// are `type`, `repair`, `retransmitted`, `index`, `position` and the two times.
struct SymbolHeader {
  PacketType type = PacketType::kSymbol;
  bool repair = false; // parity
  bool retransmitted = false; // not for the first time
  bool permuted = false; // data symbols come in another order than the pieces
  uint8_t parityKind = 0; // ParityKind
  uint8_t parityPerBlock = 0;
  // A data symbol's place in the order of sending. A repair symbol: block *
  // parityPerBlock + its number in the block.
  uint16_t index = 0;
  uint16_t count = 0; // of data symbols
  // Paper: SMART §3.2, "base sequence number and bitmap" of what a repair
  // packet covers. Here what is covered comes first, so two numbers tell:
  // of the symbols before `coded`, symbol i is in block i modulo `blocks`.
  uint16_t coded = 0;
  uint16_t blocks = 0;
  uint16_t must = 0; // symbols before this one must arrive,
  uint16_t mayMiss = 0; // and this many of the others may be missing
  uint16_t pieceBytes = 0;
  // The piece that a data symbol is. In a repair symbol: its parity.
  uint16_t position = 0;
  uint32_t objectBytes = 0;
  uint64_t object = 0; // from 1
  // The clock counts modulo 2^32, about 71 minutes: only differences of recent
  // values mean anything.
  uint32_t sentMicros = 0; // the sender's clock
  uint32_t roundTripMicros = 0; // as the sender knows it; 0: not yet
};

// Bytes behind this header. The zeros that fill the last piece are not sent,
// except where the object is a single piece of more than kShortBytes: whoever
// looks for a smaller MTU goes by symbols of full length.
size_t symbolBytes(const SymbolHeader& header);

// Ranges of numbers, first and last included.
using IndexRange = std::pair<uint16_t, uint16_t>;
using ObjectRange = std::pair<uint64_t, uint64_t>;

// If no packet of the object has come, its count is unknown, and the range is 0
// to 65,535.
struct WantedSymbols {
  uint64_t object = 0;
  std::vector<IndexRange> indices; // ascending, disjoint
};

// Everything since the beginning: a report that is lost costs nothing but time.
//
// Reports have numbers of their own because datagrams arrive in any order: an
// older report than the last is dropped.
struct PacketReport {
  uint64_t number = 0; // of the report, from 1
  uint64_t largest = 0; // packet number received
  uint64_t packets = 0; // received, without duplicates
  uint64_t bytes = 0; // of these
  uint64_t symbols = 0; // of these packets, those as long as a piece
  uint64_t lost = 0; // packets
  uint64_t bursts = 0; // of lost packets
  uint32_t receivedMicros = 0; // when the last came, by the receiver's clock
  uint32_t echoMicros = 0; // sentMicros of the latest symbol
  uint32_t heldMicros = 0; // since that came
  uint64_t completeUpTo = 0; // all objects up to this one are complete,
  std::vector<ObjectRange> complete; // and these; ascending, disjoint
  std::vector<WantedSymbols> wanted; // each object once, ascending
};

// The answer is short, whatever the size of the probe: only the way there is
// tested.
struct PacketProbe {
  PacketType type = PacketType::kProbe;
  uint64_t token = 0; // returned as it is
  uint32_t bytes = 0; // of the probe, its filling included; in replies too
};

// Writes exactly kSymbolHeaderBytes, the piece comes behind it. Checks nothing;
// the sender makes sound headers.
void encodeSymbolHeader(const SymbolHeader& header, std::byte* out);
// At most `max` bytes: entries that do not fit are left out, and come next
// time. `max` must be at least kReportHeaderBytes.
std::vector<std::byte> encodePacketReport(
    const PacketReport& report,
    size_t max);
void encodeProbe(const PacketProbe& probe, std::byte* out); // kProbeBytes

// The type, if there is a byte and it is one.
Status packetType(std::span<const std::byte> packet, PacketType& type);
// These check everything that one packet can tell: lengths, counts, order.
// On error the result is unspecified. `symbol` is the piece behind the header.
//
// An END has the description of its object and no symbol. The result borrows
// from `packet`. Whether the description fits earlier packets of the object is
// for PacketReceiver to check.
Status decodeSymbol(
    std::span<const std::byte> packet,
    SymbolHeader& header,
    std::span<const std::byte>& symbol);
Status decodePacketReport(
    std::span<const std::byte> packet,
    PacketReport& report);
Status decodeProbe(std::span<const std::byte> packet, PacketProbe& probe);

} // namespace resilient
