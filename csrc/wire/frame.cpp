#include "wire/frame.h"

#include <bit>
#include <cstring>

namespace resilient {
namespace {

static_assert(
    std::endian::native == std::endian::little,
    "the wire is little-endian and so must the host be");

// Byte offsets of the fields. docs/wire_format.md shows the same table.
enum Offset : size_t {
  kMagicAt = 0, // u32
  kTypeAt = 4, // u8
  kClassAt = 5, // u8
  kFlagsAt = 6, // u16
  kPayloadBytesAt = 8, // u32
  kChunkBytesAt = 12, // u32
  kAckAt = 16, // u64
  kMessageAt = 24, // u64
  kTotalBytesAt = 32, // u64
  kOffsetAt = 40, // u64
  kGroupAt = 48, // u64
  kStreamAt = 56, // u64
  kOrderAt = 64, // u64
  kSignatureKindAt = 72, // u8
  kSignatureDtypeAt = 73, // u8
  kSignatureReduceAt = 74, // u8
  kSignatureTensorsAt = 75, // u8
  kSignatureRootAt = 76, // i32
  kSignatureCountAt = 80, // u64
  kSourceRankAt = 88, // i32
  kChecksumAt = 92, // u32 over the 92 bytes before it
};

template <typename T>
void put(FrameBytes& out, size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof(T));
}

template <typename T>
T get(const std::byte* in, size_t at) {
  T value;
  std::memcpy(&value, in + at, sizeof(T));
  return value;
}

// Finds a stream that has lost its place and bits that flipped on the way
// past TCP's weak checksum. Not a defence against an attacker: that is the
// handshake's.
//
// Every step maps `h` one to one, so a change within one word always changes
// the 64-bit state; only the last cut to 32 bits can hide it.
// docs/wire_format.md specifies it, and frame_test.cpp pins it.
uint32_t checksum(const std::byte* in) {
  uint64_t h = 0x9e3779b97f4a7c15;
  for (size_t at = 0; at + 8 <= kChecksumAt; at += 8) {
    h = (h ^ get<uint64_t>(in, at)) * 0xff51afd7ed558ccd;
    h ^= h >> 32;
  }
  h = (h ^ get<uint32_t>(in, kSourceRankAt)) * 0xc4ceb9fe1a85ec53;
  return static_cast<uint32_t>(h ^ (h >> 32));
}

Status malformed(const char* what, uint64_t value) {
  return Status(
      StatusCode::kProtocol,
      std::string("malformed frame: ") + what + ' ' + std::to_string(value));
}

// The order keeps the arithmetic safe. Upper bounds come first. chunkBytes is
// known to be above 0 before anything is divided by it, and offset to be at
// most totalBytes before the rest is computed. The last check is an equality:
// the sender has no freedom in the size of a chunk.
Status checkData(const FrameHeader& h) {
  if (h.totalBytes > kMaxMessageBytes) {
    return malformed("message bytes", h.totalBytes);
  }
  if (h.chunkBytes == 0 || h.chunkBytes > kMaxChunkBytes) {
    return malformed("chunk bytes", h.chunkBytes);
  }
  if (h.totalBytes / h.chunkBytes >= kMaxChunksPerMessage) {
    return malformed("too many chunks of bytes", h.chunkBytes);
  }
  if (h.chunkBytes < kMinChunkBytes && h.totalBytes > h.chunkBytes) {
    return malformed("small chunks of bytes", h.chunkBytes);
  }
  if (h.offset % h.chunkBytes != 0 || h.offset > h.totalBytes) {
    return malformed("offset", h.offset);
  }
  const uint64_t rest = h.totalBytes - h.offset;
  if (rest == 0 && h.totalBytes != 0) {
    return malformed("offset at the end", h.offset);
  }
  const uint64_t expected = (h.flags & kFlagOffer) != 0
      ? 0
      : (rest < h.chunkBytes ? rest : h.chunkBytes);
  if (h.payloadBytes != expected) {
    return malformed("payload bytes", h.payloadBytes);
  }
  return Status();
}

} // namespace

void encodeFrame(const FrameHeader& h, FrameBytes& out) {
  put(out, kMagicAt, kFrameMagic);
  put(out, kTypeAt, static_cast<uint8_t>(h.type));
  put(out, kClassAt, static_cast<uint8_t>(h.trafficClass));
  put(out, kFlagsAt, h.flags);
  put(out, kPayloadBytesAt, h.payloadBytes);
  put(out, kChunkBytesAt, h.chunkBytes);
  put(out, kAckAt, h.ack);
  put(out, kMessageAt, h.message);
  put(out, kTotalBytesAt, h.totalBytes);
  put(out, kOffsetAt, h.offset);
  put(out, kGroupAt, h.group);
  put(out, kStreamAt, h.stream);
  put(out, kOrderAt, h.order);
  put(out, kSignatureKindAt, static_cast<uint8_t>(h.signature.kind));
  put(out, kSignatureDtypeAt, static_cast<uint8_t>(h.signature.dtype));
  put(out, kSignatureReduceAt, static_cast<uint8_t>(h.signature.reduceOp));
  put(out, kSignatureTensorsAt, h.signature.tensors);
  put(out, kSignatureRootAt, h.signature.root);
  put(out, kSignatureCountAt, h.signature.count);
  put(out, kSourceRankAt, h.sourceRank);
  put(out, kChecksumAt, checksum(out.data()));
}

FrameBytes asReference(const FrameBytes& header) {
  FrameBytes out = header;
  const auto flags = get<uint16_t>(header.data(), kFlagsAt);
  put(out, kFlagsAt, static_cast<uint16_t>(flags | kFlagReference));
  put(out, kChecksumAt, checksum(out.data()));
  return out;
}

bool isReference(std::span<const std::byte, kFrameHeaderBytes> header) {
  return (get<uint16_t>(header.data(), kFlagsAt) & kFlagReference) != 0;
}

// The magic comes before the checksum, since a wrong one says more: the stream
// is not ours or is out of step. Enumerators are checked as numbers before they
// are cast.
Status decodeFrame(
    std::span<const std::byte, kFrameHeaderBytes> bytes,
    FrameHeader& h) {
  const std::byte* in = bytes.data();
  if (get<uint32_t>(in, kMagicAt) != kFrameMagic) {
    return malformed("magic", get<uint32_t>(in, kMagicAt));
  }
  if (get<uint32_t>(in, kChecksumAt) != checksum(in)) {
    return malformed("header checksum", get<uint32_t>(in, kChecksumAt));
  }
  const auto type = get<uint8_t>(in, kTypeAt);
  if (type < static_cast<uint8_t>(FrameType::kData) ||
      type > static_cast<uint8_t>(FrameType::kResidual)) {
    return malformed("type", type);
  }
  const auto cls = get<uint8_t>(in, kClassAt);
  if (cls >= kTrafficClassCount) {
    return malformed("traffic class", cls);
  }
  const auto kind = get<uint8_t>(in, kSignatureKindAt);
  const auto dtype = get<uint8_t>(in, kSignatureDtypeAt);
  const auto reduce = get<uint8_t>(in, kSignatureReduceAt);
  if (!validSignatureBytes(kind, dtype, reduce)) {
    return malformed("operation", kind);
  }
  h.type = static_cast<FrameType>(type);
  h.trafficClass = static_cast<TrafficClass>(cls);
  h.flags = get<uint16_t>(in, kFlagsAt);
  h.payloadBytes = get<uint32_t>(in, kPayloadBytesAt);
  h.chunkBytes = get<uint32_t>(in, kChunkBytesAt);
  h.sourceRank = get<int32_t>(in, kSourceRankAt);
  h.ack = get<uint64_t>(in, kAckAt);
  h.message = get<uint64_t>(in, kMessageAt);
  h.totalBytes = get<uint64_t>(in, kTotalBytesAt);
  h.offset = get<uint64_t>(in, kOffsetAt);
  h.group = get<uint64_t>(in, kGroupAt);
  h.stream = get<uint64_t>(in, kStreamAt);
  h.order = get<uint64_t>(in, kOrderAt);
  h.signature.kind = static_cast<OpKind>(kind);
  h.signature.dtype = static_cast<DType>(dtype);
  h.signature.reduceOp = static_cast<ReduceOp>(reduce);
  h.signature.tensors = get<uint8_t>(in, kSignatureTensorsAt);
  h.signature.root = get<int32_t>(in, kSignatureRootAt);
  h.signature.count = get<uint64_t>(in, kSignatureCountAt);
  if (h.type == FrameType::kData) {
    return checkData(h);
  }
  if (h.totalBytes != 0 || h.chunkBytes != 0 || h.offset != 0) {
    return malformed("sizes of a message in a frame of type", type);
  }
  const bool described =
      h.type <= FrameType::kBye || h.type == FrameType::kResidual;
  const uint32_t limit = described ? kMaxControlBytes : 0;
  if (h.payloadBytes > limit) {
    return malformed("control bytes", h.payloadBytes);
  }
  if (h.type == FrameType::kGrant && h.payloadBytes % 8 != 0) {
    return malformed("grant bytes", h.payloadBytes);
  }
  return Status();
}

} // namespace resilient
