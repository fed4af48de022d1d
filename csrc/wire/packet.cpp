#include "wire/packet.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace resilient {
namespace {

enum Flag : uint8_t { kRepair = 1, kRetransmitted = 2, kPermuted = 4 };

// Byte offsets. docs/wire_format.md shows the same tables.
enum SymbolOffset : size_t {
  kTypeAt = 0, // u8
  kFlagsAt = 1, // u8
  kParityKindAt = 2, // u8
  kParityPerBlockAt = 3, // u8
  kIndexAt = 4, // u16
  kCountAt = 6, // u16
  kCodedAt = 8, // u16
  kBlocksAt = 10, // u16
  kMustAt = 12, // u16
  kMayMissAt = 14, // u16
  kPieceBytesAt = 16, // u16
  kPositionAt = 18, // u16
  kObjectBytesAt = 20, // u32
  kObjectAt = 24, // u64
  kSentMicrosAt = 32, // u32
  kRoundTripMicrosAt = 36, // u32
  // 40: u32, zero
};

enum ReportOffset : size_t {
  // 0: type
  kCompleteRangesAt = 2, // u16
  kWantedObjectsAt = 4, // u16
  // 6: u16, zero
  kNumberAt = 8, // u64
  kLargestAt = 16, // u64
  kPacketsAt = 24, // u64
  kBytesAt = 32, // u64
  kLostAt = 40, // u64
  kBurstsAt = 48, // u64
  kReceivedMicrosAt = 56, // u32
  kHeldMicrosAt = 60, // u32
  kEchoMicrosAt = 64, // u32
  // 68: u32, zero
  kCompleteUpToAt = 72, // u64
  kSymbolsAt = 80, // u64
  // 88: u32, zero
};

enum ProbeOffset : size_t {
  // 0: type
  kProbeSizeAt = 4, // u32
  kTokenAt = 8, // u64
  // 16: u32, zero
};

constexpr size_t kObjectRangeBytes = 16;
constexpr size_t kWantedBytes = 12; // object, and how many ranges
constexpr size_t kIndexRangeBytes = 4;

template <typename T>
void put(std::byte* out, size_t at, T value) {
  std::memcpy(out + at, &value, sizeof(T));
}

template <typename T>
T get(const std::byte* in, size_t at) {
  T value;
  std::memcpy(&value, in + at, sizeof(T));
  return value;
}

Status malformed(const char* what, uint64_t value) {
  return Status(
      StatusCode::kProtocol,
      std::string("malformed packet: ") + what + ' ' + std::to_string(value));
}

// The rules that tie the fields of a symbol together, outer to inner: the piece
// size, the number of pieces of the object, the protected part, the parity
// blocks, and last the place of this symbol in them. A peer is authentic but
// may be faulty, and the receiver allocates memory by these numbers.
Status checkSymbol(const SymbolHeader& h) {
  if (h.pieceBytes % kPieceUnit != 0 || h.pieceBytes < kMinPieceBytes ||
      h.pieceBytes > kMaxPieceBytes) {
    return malformed("piece bytes", h.pieceBytes);
  }
  if (h.object == 0) {
    return malformed("object", h.object);
  }
  const uint64_t pieces =
      (uint64_t(h.objectBytes) + h.pieceBytes - 1) / h.pieceBytes;
  if (pieces == 0 || pieces > kMaxPieces || h.count != pieces) {
    return malformed("number of pieces", h.count);
  }
  if (h.coded > h.count || h.must > h.count || h.mayMiss > h.count - h.must) {
    return malformed("protected pieces", h.coded);
  }
  if (h.parityPerBlock == 0) {
    if (h.coded != 0 || h.blocks != 0 || h.repair) {
      return malformed("repair symbols without parity", h.coded);
    }
  } else if (
      h.parityKind < 1 || h.parityKind > 2 || h.blocks == 0 ||
      h.blocks > h.coded ||
      uint32_t(h.blocks) * h.parityPerBlock > kMaxRepairSymbols ||
      (h.coded + h.blocks - 1) / h.blocks + h.parityPerBlock > 255) {
    return malformed("blocks", h.blocks);
  }
  const uint32_t symbols =
      h.repair ? uint32_t(h.blocks) * h.parityPerBlock : h.count;
  if (h.type == PacketType::kSymbol && h.index >= symbols) {
    return malformed("symbol", h.index);
  }
  if (h.type == PacketType::kSymbol && !h.repair &&
      (h.position >= h.count || (!h.permuted && h.position != h.index))) {
    return malformed("position", h.position);
  }
  return Status();
}

} // namespace

size_t symbolBytes(const SymbolHeader& h) {
  if (h.type == PacketType::kEnd) {
    return 0;
  }
  const bool last = h.count == 1 ? h.objectBytes <= kShortBytes
                                 : !h.repair && h.position == h.count - 1;
  return last ? h.objectBytes - (h.count - size_t(1)) * h.pieceBytes
              : h.pieceBytes;
}

void encodeSymbolHeader(const SymbolHeader& h, std::byte* out) {
  std::memset(out, 0, kSymbolHeaderBytes);
  put(out, kTypeAt, static_cast<uint8_t>(h.type));
  put(out,
      kFlagsAt,
      static_cast<uint8_t>(
          (h.repair ? kRepair : 0) | (h.retransmitted ? kRetransmitted : 0) |
          (h.permuted ? kPermuted : 0)));
  put(out, kParityKindAt, h.parityKind);
  put(out, kParityPerBlockAt, h.parityPerBlock);
  put(out, kIndexAt, h.index);
  put(out, kCountAt, h.count);
  put(out, kCodedAt, h.coded);
  put(out, kBlocksAt, h.blocks);
  put(out, kMustAt, h.must);
  put(out, kMayMissAt, h.mayMiss);
  put(out, kPieceBytesAt, h.pieceBytes);
  put(out, kPositionAt, h.position);
  put(out, kObjectBytesAt, h.objectBytes);
  put(out, kObjectAt, h.object);
  put(out, kSentMicrosAt, h.sentMicros);
  put(out, kRoundTripMicrosAt, h.roundTripMicros);
}

// The upper bound is the last type: move it with a new one.
Status packetType(std::span<const std::byte> packet, PacketType& type) {
  if (packet.empty()) {
    return malformed("bytes", 0);
  }
  const auto t = get<uint8_t>(packet.data(), kTypeAt);
  if (t < static_cast<uint8_t>(PacketType::kSymbol) ||
      t > static_cast<uint8_t>(PacketType::kProbeReply)) {
    return malformed("type", t);
  }
  type = static_cast<PacketType>(t);
  return Status();
}

Status decodeSymbol(
    std::span<const std::byte> packet,
    SymbolHeader& h,
    std::span<const std::byte>& symbol) {
  Status status = packetType(packet, h.type);
  if (!status.ok()) {
    return status;
  }
  if ((h.type != PacketType::kSymbol && h.type != PacketType::kEnd) ||
      packet.size() < kSymbolHeaderBytes) {
    return malformed("symbol of bytes", packet.size());
  }
  const std::byte* in = packet.data();
  const auto flags = get<uint8_t>(in, kFlagsAt);
  if (flags > (kRepair | kRetransmitted | kPermuted)) {
    return malformed("flags", flags);
  }
  h.repair = (flags & kRepair) != 0;
  h.retransmitted = (flags & kRetransmitted) != 0;
  h.permuted = (flags & kPermuted) != 0;
  h.parityKind = get<uint8_t>(in, kParityKindAt);
  h.parityPerBlock = get<uint8_t>(in, kParityPerBlockAt);
  h.index = get<uint16_t>(in, kIndexAt);
  h.count = get<uint16_t>(in, kCountAt);
  h.coded = get<uint16_t>(in, kCodedAt);
  h.blocks = get<uint16_t>(in, kBlocksAt);
  h.must = get<uint16_t>(in, kMustAt);
  h.mayMiss = get<uint16_t>(in, kMayMissAt);
  h.pieceBytes = get<uint16_t>(in, kPieceBytesAt);
  h.position = get<uint16_t>(in, kPositionAt);
  h.objectBytes = get<uint32_t>(in, kObjectBytesAt);
  h.object = get<uint64_t>(in, kObjectAt);
  h.sentMicros = get<uint32_t>(in, kSentMicrosAt);
  h.roundTripMicros = get<uint32_t>(in, kRoundTripMicrosAt);
  status = checkSymbol(h);
  if (!status.ok()) {
    return status;
  }
  symbol = packet.subspan(kSymbolHeaderBytes);
  if (symbol.size() != symbolBytes(h)) {
    return malformed("symbol bytes", symbol.size());
  }
  return Status();
}

// Fills the packet in two steps and writes the counts last, when it is known
// how many entries fit. Entries that are left out stay true and come with a
// later report.
std::vector<std::byte> encodePacketReport(const PacketReport& r, size_t max) {
  std::vector<std::byte> out(kReportHeaderBytes);
  uint16_t ranges = 0, objects = 0;
  // A few of the finished ones; then all that is wanted, which matters more.
  constexpr size_t kMaxComplete = 16;
  for (const auto& [first, last] : r.complete) {
    const size_t at = out.size();
    if (ranges == kMaxComplete || at + kObjectRangeBytes > max) {
      break;
    }
    out.resize(at + kObjectRangeBytes);
    put(out.data(), at, first);
    put(out.data(), at + 8, last);
    ++ranges;
  }
  for (const WantedSymbols& w : r.wanted) {
    const size_t at = out.size();
    if (at + kWantedBytes + kIndexRangeBytes > max) {
      break;
    }
    const size_t fits = std::min(
        w.indices.size(), (max - at - kWantedBytes) / kIndexRangeBytes);
    out.resize(at + kWantedBytes + fits * kIndexRangeBytes);
    put(out.data(), at, w.object);
    put(out.data(), at + 8, static_cast<uint32_t>(fits));
    for (size_t i = 0; i < fits; ++i) {
      const size_t to = at + kWantedBytes + i * kIndexRangeBytes;
      put(out.data(), to, w.indices[i].first);
      put(out.data(), to + 2, w.indices[i].second);
    }
    ++objects;
  }
  std::byte* const o = out.data();
  put(o, kTypeAt, static_cast<uint8_t>(PacketType::kReport));
  put(o, kCompleteRangesAt, ranges);
  put(o, kWantedObjectsAt, objects);
  put(o, kNumberAt, r.number);
  put(o, kLargestAt, r.largest);
  put(o, kPacketsAt, r.packets);
  put(o, kBytesAt, r.bytes);
  put(o, kLostAt, r.lost);
  put(o, kBurstsAt, r.bursts);
  put(o, kReceivedMicrosAt, r.receivedMicros);
  put(o, kHeldMicrosAt, r.heldMicros);
  put(o, kEchoMicrosAt, r.echoMicros);
  put(o, kCompleteUpToAt, r.completeUpTo);
  put(o, kSymbolsAt, r.symbols);
  return out;
}

// The fixed part, then lists of ranges. Every count is checked against the rest
// of the packet before it is used, and the ranges must ascend: a short report
// could ask for the same symbols many times otherwise.
Status decodePacketReport(std::span<const std::byte> packet, PacketReport& r) {
  if (packet.size() < kReportHeaderBytes) {
    return malformed("report of bytes", packet.size());
  }
  const std::byte* const in = packet.data();
  r.number = get<uint64_t>(in, kNumberAt);
  r.largest = get<uint64_t>(in, kLargestAt);
  r.packets = get<uint64_t>(in, kPacketsAt);
  r.bytes = get<uint64_t>(in, kBytesAt);
  r.lost = get<uint64_t>(in, kLostAt);
  r.bursts = get<uint64_t>(in, kBurstsAt);
  r.receivedMicros = get<uint32_t>(in, kReceivedMicrosAt);
  r.heldMicros = get<uint32_t>(in, kHeldMicrosAt);
  r.echoMicros = get<uint32_t>(in, kEchoMicrosAt);
  r.completeUpTo = get<uint64_t>(in, kCompleteUpToAt);
  r.symbols = get<uint64_t>(in, kSymbolsAt);
  r.complete.clear();
  r.wanted.clear();
  size_t at = kReportHeaderBytes;
  uint64_t above = r.completeUpTo;
  for (int n = get<uint16_t>(in, kCompleteRangesAt); n > 0; --n) {
    if (packet.size() - at < kObjectRangeBytes) {
      return malformed("report of bytes", packet.size());
    }
    const auto first = get<uint64_t>(in, at), last = get<uint64_t>(in, at + 8);
    if (first <= above || last < first) {
      return malformed("range of objects from", first);
    }
    above = last;
    r.complete.emplace_back(first, last);
    at += kObjectRangeBytes;
  }
  uint64_t lastWanted = 0;
  for (int n = get<uint16_t>(in, kWantedObjectsAt); n > 0; --n) {
    if (packet.size() - at < kWantedBytes) {
      return malformed("report of bytes", packet.size());
    }
    WantedSymbols& w = r.wanted.emplace_back();
    w.object = get<uint64_t>(in, at);
    const auto ranges = get<uint32_t>(in, at + 8);
    at += kWantedBytes;
    // Else a short report could ask for all symbols a thousand times.
    if (w.object <= lastWanted) {
      return malformed("wanted object", w.object);
    }
    lastWanted = w.object;
    if (ranges > (packet.size() - at) / kIndexRangeBytes) {
      return malformed("ranges of symbols", ranges);
    }
    int aboveIndex = -1;
    for (uint32_t i = 0; i < ranges; ++i, at += kIndexRangeBytes) {
      const auto first = get<uint16_t>(in, at),
                 last = get<uint16_t>(in, at + 2);
      if (first <= aboveIndex || last < first) {
        return malformed("range of symbols from", first);
      }
      aboveIndex = last;
      w.indices.emplace_back(first, last);
    }
  }
  if (at != packet.size()) {
    return malformed("bytes behind a report", packet.size() - at);
  }
  return Status();
}

void encodeProbe(const PacketProbe& probe, std::byte* out) {
  std::memset(out, 0, kProbeBytes);
  put(out, kTypeAt, static_cast<uint8_t>(probe.type));
  put(out, kProbeSizeAt, probe.bytes);
  put(out, kTokenAt, probe.token);
}

Status decodeProbe(std::span<const std::byte> packet, PacketProbe& probe) {
  Status status = packetType(packet, probe.type);
  if (!status.ok()) {
    return status;
  }
  if ((probe.type != PacketType::kProbe &&
       probe.type != PacketType::kProbeReply) ||
      packet.size() < kProbeBytes) {
    return malformed("probe of bytes", packet.size());
  }
  probe.bytes = get<uint32_t>(packet.data(), kProbeSizeAt);
  probe.token = get<uint64_t>(packet.data(), kTokenAt);
  return Status();
}

} // namespace resilient
