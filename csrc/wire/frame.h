#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/signature.h"
#include "base/status.h"
#include "base/traffic_class.h"

namespace resilient {

// Every byte on an established path is a frame: a header of one fixed size,
// then `payloadBytes` of payload. This file and hello.h are the only code
// that reads or writes wire bytes; docs/wire_format.md is the same table in
// prose, and frame_test.cpp pins the bytes.

inline constexpr size_t kFrameHeaderBytes = 96;
inline constexpr uint32_t kFrameMagic = 0x31465254; // "TRF1" in memory

// The numbers are wire values. isReliable() and decodeFrame() compare them by
// order, so a new type must be entered there too.
enum class FrameType : uint8_t {
  kData = 1, // one chunk of a message, or (kFlagOffer) only its description
  kGrant = 2, // payload: message numbers (u64 each) the receiver has matched
  kReject = 3, // receiver will not take `message`; payload: reason, text
  kCancel = 4, // sender gave up `message`; payload: reason, text
  kControl = 5, // engine to engine; payload: see wire/control.h
  kBye = 6, // the sender of this frame will send nothing more, ever
  kAck = 7, // carries only the `ack` field
  kPing = 8, // `message` = time stamp of the sender, returned in kPong
  kPong = 9,
  kResidual = 10, // what of `message` the receiver had to fill with zeros
};

// Frames the receiver acknowledges and the sender repeats on another path if
// this one dies. The others are worth only their moment.
inline bool isReliable(FrameType t) {
  return t <= FrameType::kBye || t == FrameType::kResidual;
}

// Flags that are not known are ignored.
inline constexpr uint16_t kFlagOffer = 1; // no payload: a description only
inline constexpr uint16_t kFlagAckNow = 2; // the sender waits for this ack
// Parts of it may be missing; once it is whole, kResidual tells which were.
inline constexpr uint16_t kFlagTolerant = 4;
// On RDMA paths: no payload follows, but where the far end may read it.
inline constexpr uint16_t kFlagReference = 8;

// Upper bounds for what a header may claim. A peer that exceeds one is faulty,
// and its connection is closed. The limit on chunks bounds how long urgent data
// waits behind a chunk that has begun.
inline constexpr uint32_t kMaxChunkBytes = 64u << 20;
// Only for messages of several chunks: the receiver keeps about 100 bytes per
// chunk, which tiny ones would make many times the message.
inline constexpr uint32_t kMinChunkBytes = 64;
inline constexpr uint32_t kMaxControlBytes = 64u << 10;
inline constexpr uint64_t kMaxMessageBytes = uint64_t(1) << 46; // 64 TiB
// Keeps a chunk index in 32 bits and bounds the receiver's records of one
// message.
inline constexpr uint64_t kMaxChunksPerMessage = uint64_t(1) << 24;

// The fields that a frame type does not use are 0, and decodeFrame() insists on
// it for the sizes. docs/wire_format.md says which type uses which field.
struct FrameHeader {
  FrameType type = FrameType::kAck;
  TrafficClass trafficClass = TrafficClass::kActivation;
  uint16_t flags = 0;
  uint32_t payloadBytes = 0;
  // Size of every chunk of this message but the last.
  uint32_t chunkBytes = 0;
  // Rank of the sender in `group`; for messages to people only.
  int32_t sourceRank = -1;
  // Reliable frames received so far on this path, in the other direction. Every
  // frame carries it, so data in one direction acknowledges the other.
  uint64_t ack = 0;
  uint64_t message = 0; // number given by the sender, from 1
  // Every chunk repeats the size of its message, and the first one to arrive
  // announces the message.
  uint64_t totalBytes = 0;
  uint64_t offset = 0;
  uint64_t group = 0;
  uint64_t stream = 0; // tag or collective sequence, see mailbox.h
  uint64_t order = 0; // position in the stream
  OpSignature signature;

  // Only for a header that decodeFrame() has accepted, or one of our own:
  // otherwise the result may not fit.
  uint32_t chunkIndex() const {
    return chunkBytes == 0 ? 0 : static_cast<uint32_t>(offset / chunkBytes);
  }
};

using FrameBytes = std::array<std::byte, kFrameHeaderBytes>;

// Checks nothing: the channel makes sound headers. The checksum covers the
// header alone; the payload has only the transport's.
void encodeFrame(const FrameHeader& header, FrameBytes& out);

// The same header with kFlagReference.
FrameBytes asReference(const FrameBytes& header);
// Whether the header has that flag. Checks nothing: decodeFrame() follows.
bool isReference(std::span<const std::byte, kFrameHeaderBytes> header);

// Checks everything a header alone can tell: magic, checksum, types, sizes
// and offsets. On error `header` is unspecified.
//
// It keeps no state, so it cannot tell whether the message exists, is known by
// another size, or was granted: Channel::onHeader does. Afterwards the payload
// has exactly the length that its place in the message gives it
// (frame_claims_are_checked).
Status decodeFrame(
    std::span<const std::byte, kFrameHeaderBytes> bytes,
    FrameHeader& header);

} // namespace resilient
