#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "channel/channel.h"
#include "wire/relay.h"

// The private structures of Channel, shared by its three source files.

namespace resilient {

// The cost of a chunk in the receiver's budget beyond its bytes: the records
// that describe it and its message. Both ends must agree, it is part of the
// protocol. Less, and a peer could fill the memory with records of tiny chunks.
inline constexpr uint64_t kChunkOverheadBytes = 256;

// Messages announced without credit, per channel. Only descriptions travel;
// this bounds the receiver's records of them (about 16 MiB).
inline constexpr size_t kMaxOffers = 64 << 10;

// Gaps in the numbers of the peer's finished messages: each is a message that
// waits while later ones went through. Sane peers have few; this bounds the
// record of them (about 64 MiB).
inline constexpr size_t kMaxGaps = 1u << 20;

// Acknowledge at the latest after this much...
inline constexpr uint64_t kAckEveryBytes = 1u << 20;
inline constexpr uint32_t kAckEveryFrames = 64;
// ...or this long. No operation waits for such an acknowledgement; it only
// frees records at the sender. Shorter costs wake-ups, longer memory.
inline constexpr Nanos kAckDelay = std::chrono::milliseconds(5);
// A path that carries data has its round trip measured at least this often:
// several times in an iteration of a pipeline, for an acknowledgement each.
inline constexpr Nanos kMeasureEvery = std::chrono::milliseconds(10);

// Grants that no sender waits for go out together, at most this many.
inline constexpr size_t kGrantBatch = 64;

// If more than this of a message is not acknowledged, it is not copied to let a
// send complete early.
inline constexpr uint64_t kMaxStagedBytes = 16u << 20;

// A point-to-point message above copyBytes and up to this is copied as soon as
// it has been written, while the far end reads it: that takes less time than
// an acknowledgement, which also would delay the far end.
inline constexpr uint64_t kCopyWrittenBytes = 256u << 10;
// In shared memory the far end has taken what is larger than this about as soon
// as it is written.
inline constexpr uint64_t kCopySharedBytes = 64u << 10;

// A new connection carries this much before its first acknowledgement (and the
// chunk that goes beyond it); each acknowledgement lets that much more out, so
// it doubles every round trip, ahead of TCP's own slow start. Without it a
// connection that breaks soon, again and again, would each time lose all it was
// given, and nothing would ever be acknowledged.
inline constexpr uint64_t kFirstWindowBytes = 64u << 10;
// From here on a path takes what its transport takes.
inline constexpr uint64_t kOpenWindowBytes = 4u << 20;

// In place of a chunk's number: the frame is an offer.
inline constexpr uint32_t kOfferChunk = UINT32_MAX;

inline constexpr uint8_t kAllClasses = (1u << kTrafficClassCount) - 1;

// A chunk should hold up a path no longer than this: what is more urgent waits
// behind it, and so does the end of its message if the path is the slower one.
inline constexpr Nanos kChunkTime = std::chrono::milliseconds(20);
// A relay passes on whole chunks only, and little waits there (RelayWindow). On
// a long way this part of the round trip, up to kChunkTime: a wait of that
// length matters less there, and larger chunks have fewer headers.
inline constexpr Nanos kRelayedChunkTime = std::chrono::milliseconds(4);
inline constexpr double kRelayedChunkPart = 1.0 / 32;
// Below, headers and system calls begin to count.
inline constexpr uint32_t kMinSplitBytes = 16u << 10;
// A path that left a chunk to others is asked again, should they be late.
inline constexpr Nanos kAskAgain = std::chrono::milliseconds(5);
// A path that has been passed over this long is tried with one chunk: it may
// have become better since it was measured.
inline constexpr Nanos kExploreAfter = std::chrono::seconds(1);
inline constexpr uint64_t kWorthExploring = 1u << 20;

// A message on its way out. Its life: chunks are handed out (nextChunk), come
// back from paths that fail (retransmits), and are acknowledged. When all are,
// the send ends, if a copy did not end it before. The record stays until the
// receiver has granted the message, too: until then its bytes count against the
// peer's budget. An abandoned message stays until its kCancel is acknowledged.
// eraseIfDone() has the whole rule.
struct Channel::OutMessage {
  FrameHeader header; // of every chunk, except offset and payload
  SendOp* op = nullptr; // null once its owner has been told
  // The bytes from dataFrom on, in the owner's buffer or in `copy`; null once
  // nothing can be sent from there.
  const std::byte* data = nullptr;
  uint64_t dataFrom = 0;
  uint64_t available = 0; // of its bytes, the first that may be read
  // The bytes from copyFrom on, of which copiedBytes are there. While it is
  // not whole, chunks still come from the owner's buffer.
  StagingMemory::Block copy;
  uint64_t copyFrom = 0;
  uint64_t copiedBytes = 0;
  bool lent = false; // in lent_
  uint32_t chunks = 1;
  uint32_t nextChunk = 0; // the first that was never handed to a path
  // Taken back from dead or suspect paths; the back goes first.
  std::vector<uint32_t> retransmits;
  uint32_t acknowledged = 0; // chunks
  // The record must not be erased while this is above 0: paths name it by
  // number and count it down.
  uint32_t inFlight = 0; // frames on paths, offers included
  bool queued = false; // in ready_ or blocked_
  bool offered = false;
  bool granted = false;
  bool abandoned = false;
  bool cancelPending = false; // kCancel not yet acknowledged
  // A chunk of it is in flight more than once, so acknowledgements may repeat:
  // these have come. Before, `acknowledged` alone is enough: every chunk is in
  // flight once at most.
  bool tracked = false;
  bool pointToPoint = false;
  // The receiver says what was missing, before the send ends.
  bool tolerant = false;
  bool awaitsReceive = false;
  // The far end may read the owner's buffer until the message ends: so a copy
  // cannot end it earlier.
  bool referred = false;
  std::map<uint64_t, uint64_t> zeroFilled; // bytes by offset
  NumberSet acknowledgedChunks;
  // Its bytes, and those of the messages before it that were not acknowledged
  // when it was posted: what decides over which kind of path it goes.
  uint64_t burstBytes = 0;
  // The part of chargedBytes_ that it holds; 0 once it is granted.
  uint64_t charged = 0;
  TimePoint postedAt{};
  TimePoint pulledAt{}; // last time a chunk went to a path

  uint64_t number() const {
    return header.message;
  }
  size_t queue() const {
    return queueOf(header.trafficClass, header.group == kRelayGroup);
  }
  const std::byte* at(uint64_t offset) const {
    return data + (offset - dataFrom);
  }
  bool allHandedOut() const {
    return nextChunk == chunks && retransmits.empty();
  }
  bool copiedWhenWritten(bool shared) const {
    return op != nullptr && pointToPoint && !tolerant && !referred &&
        chunks == 1 &&
        header.totalBytes <= (shared ? kCopySharedBytes : kCopyWrittenBytes);
  }
  // An upper estimate: a repeated chunk counts as a full one.
  uint64_t unsentBytes() const {
    const uint64_t begun = uint64_t(nextChunk) * header.chunkBytes;
    return (header.totalBytes > begun ? header.totalBytes - begun : 0) +
        retransmits.size() * uint64_t(header.chunkBytes);
  }
  bool availableWhole() const {
    return available >= header.totalBytes;
  }
  // Something can be sent now. A message whose next chunk is not there yet
  // leaves its queue until sourceGrew().
  bool hasUnsent() const {
    return !abandoned &&
        (!retransmits.empty() ||
         (nextChunk < chunks && chunkAvailable(nextChunk)));
  }
  bool chunkAvailable(uint32_t chunk) const {
    return RESILIENT_PLANTED(sendEarly) ||
        uint64_t(chunk) * header.chunkBytes + chunkPayload(chunk) <= available;
  }
  uint32_t chunkPayload(uint32_t chunk) const {
    const uint64_t offset = uint64_t(chunk) * header.chunkBytes;
    const uint64_t rest = header.totalBytes - offset;
    return static_cast<uint32_t>(
        rest < header.chunkBytes ? rest : header.chunkBytes);
  }
};

struct Channel::Control {
  FrameHeader header;
  std::vector<std::byte> payload;
  // Not behind what this path acknowledges: it leaves there, if it still can.
  std::optional<PathId> via;
  bool direct = false; // not over a relay
};

// A frame handed to a path and not acknowledged: a chunk, or a control frame.
struct Channel::InFlight {
  uint64_t message = 0;
  uint32_t chunk = 0;
  uint32_t bytes = 0;
  bool ackNow = false;
  // It was taken back while the path was suspect: whatever becomes of this
  // copy, another one counts. If it is acknowledged first, so much the better.
  bool superseded = false;
  TimePoint at{};
  std::unique_ptr<Control> control;
};

// Several paths share it: they have the same NIC at either end.
struct Channel::SharedLink {
  LinkStatistics statistics; // of all of them together
  uint64_t inFlightBytes = 0;
  TimePoint busySince{}; // there are bytes in flight since
};

// Invariants: acknowledged <= written <= handedOut, all in reliable frames.
// inFlight holds the frames that were handed out and are not acknowledged, in
// the order of pull(). The peer counts the same frames, so its count alone says
// which of them it has.
struct Channel::PathState {
  // sending
  std::deque<InFlight> inFlight;
  uint64_t inFlightBytes = 0;
  uint64_t window = kFirstWindowBytes; // of inFlightBytes
  uint64_t acknowledged = 0; // frames
  uint64_t handedOut = 0; // frames
  uint64_t written = 0; // of these, whole: the peer can know no more
  TimePoint busySince{}; // there are bytes in flight since
  TimePoint progressAt{}; // last acknowledgement, or since inFlight has frames
  std::deque<OutFrame> unwritten;

  // receiving
  // Paper: SHIFT §4.3.1, the counter of what is complete.
  uint64_t received = 0; // reliable frames, whole
  uint64_t ackedBack = 0; // of these, told to the sender
  uint64_t bytesSinceAck = 0;
  TimePoint ackDue = kNever;
  bool ackUrgent = false;
  TimePoint ackAskedAt{}; // when we last asked for one at once
  FrameHeader header; // of the frame being read
  // forget() resets this when the message ends: no path may write to its memory
  // afterwards.
  InMessage* message = nullptr; // its message, if it is a wanted chunk
  std::deque<Pin> pins; // in the order of the frames
  std::vector<std::byte> control;

  bool selfAcknowledging = false;
  double knownBytesPerS = 0; // by its transport; 0: only by acknowledgements
  double paceBytesPerS = 0; // its transport sends no faster; 0: not known
  bool ordered = true;
  bool overRelay = false;
  bool onProbation = false;
  uint32_t pingsAnswered = 0; // while on probation
  bool suspect = false;
  double capacityBefore = 0; // it was suspect
  uint8_t classes = kAllClasses;
  BurstRange bursts;
  SharedLink* link = nullptr; // null: it shares none
  TimePoint chunkAt{}; // last time it took one
  bool pingDue = false;
  std::optional<TimePoint> pingSent; // not answered yet
  TimePoint lastPing{}; // handed out, answered or not
  TimePoint answeredUpTo{};
  bool pongDue = false;
  uint64_t pongStamp = 0;

  LinkStatistics statistics;
  PathCounters counters;

  // The capacity, as far as its transport makes use of it; 0 while unknown. A
  // new connection begins slowly, and would do so for ever if others took all
  // that arrives sooner there: what is expected of it counts instead.
  double ownBytesPerS() const {
    const double measured = statistics.capacityBytesPerS();
    return paceBytesPerS > 0 && !statistics.onlyExpected()
        ? std::min(measured, paceBytesPerS)
        : measured;
  }
  // Shared memory.
  bool inMemory() const {
    return selfAcknowledging && ordered;
  }
  bool carries(size_t queue) const {
    return (classes >> classOf(queue) & 1) != 0 &&
        !(overRelay && isForOthers(queue));
  }
  // Nothing is known against it, and it may carry messages of the queue.
  bool isGood(size_t queue) const {
    return !suspect && !onProbation && carries(queue);
  }
};

} // namespace resilient
