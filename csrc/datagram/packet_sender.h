#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "base/signature.h"
#include "base/time.h"
#include "datagram/rate_control.h"
#include "datagram/recovery.h"
#include "loss/redundancy.h"
#include "wire/packet.h"

namespace resilient {

// A frame, sent as one object.
struct ObjectToSend {
  std::span<const std::byte> header; // of the frame
  std::span<const std::byte> payload; // copied
  uint64_t offset = 0; // of the payload in its message, which is tolerant
  TrafficClass trafficClass = TrafficClass::kActivation;
  Tolerance tolerance;
  DType dtype = DType::kUInt8; // of the payload, if anything is tolerated
};

// One packet of an object: a header, and a piece that is not copied. An END has
// none.
struct PacketToSend {
  std::array<std::byte, kSymbolHeaderBytes> header;
  std::span<const std::byte> piece;

  size_t bytes() const {
    return header.size() + piece.size();
  }
};

struct SenderCounters {
  uint64_t packets = 0; // handed out, of any type
  uint64_t bytes = 0;
  uint64_t dataSymbols = 0; // for the first time
  uint64_t repairSymbols = 0;
  uint64_t retransmitted = 0; // data symbols, not for the first time
  uint64_t lost = 0; // packets, as the receiver says
  // Packets reported while there was no queue: all, the lost ones, and how many
  // bursts of losses.
  uint64_t unqueued = 0, unqueuedLost = 0, unqueuedBursts = 0;
};

// The sending half of a datagram path: cuts objects into packets, adds
// parity, paces them, and sends again what the receiver asks for. No I/O, no
// clock.
//
// Objects go out strictly one after the other, each with its repair symbols
// last or among them. So any packet of a later object tells the receiver that
// the earlier ones have been sent, and it need not wait for their end. Repeated
// symbols go first.
//
// Paper: SMART §3.2. The symbols that must arrive have the first numbers in
// their object, so two numbers define the ones that parity covers. They leave
// evenly among the others.
//
// A dropped packet is never repeated as such. The receiver asks for symbols,
// and each repeat has a new packet number, so a drop of a repeat is noticed
// like any other.
//
// Thread: the path's. Time never goes back from call to call. The caller
// numbers the packets of all types in one sequence, and reports the others by
// sentOther().
class PacketSender {
 public:
  // `done(object)`: the receiver has it. Called from onReport(), in any order;
  // must not call back.
  PacketSender(
      const RecoverySchemes& schemes,
      const RateControl& rate,
      std::function<void(uint64_t object)> done);

  // The size of the pieces of later objects. A multiple of kPieceUnit.
  void setPieceBytes(size_t bytes) {
    pieceBytes_ = bytes;
  }

  // Its number: 1, 2, 3... The bytes are copied. They fill at most kMaxPieces
  // pieces (asserted), and the frame's header must fit into the first. The
  // parity is computed only when it is first sent.
  uint64_t add(const ObjectToSend& object, TimePoint now);

  // When next() should be called again; kNever if there is nothing to send.
  // May be in the past. Unlike next(), does not look at the clock.
  TimePoint nextAt() const;
  // The next packet; false: none may leave now. `packet` is its number on this
  // path, from 1. The piece is valid until any other call.
  bool next(TimePoint now, uint64_t packet, PacketToSend& out);
  // A packet that is not of this class has left: no report covers it.
  void sentOther(uint64_t packet) {
    lastPacketSent_ = packet;
  }

  // Takes a report that the peer has sealed. Reports may come late or twice:
  // only a newer one counts. Not ok: it speaks of packets or objects that were
  // never sent.
  Status onReport(const PacketReport& report, TimePoint now);

  bool idle() const { // everything is known to have arrived
    return objects_.empty();
  }
  // Bytes of objects that have not been sent for the first time yet.
  uint64_t waitingBytes() const {
    return waitingBytes_;
  }
  // Bytes of objects that are not done.
  uint64_t heldBytes() const {
    return heldBytes_;
  }
  // Since when nothing has been heard of what was sent; kNever: of nothing.
  TimePoint waitingSince() const {
    return busySince_;
  }
  // Since when no symbol of full length has arrived, whatever else has; kNever:
  // there is none to wait for.
  TimePoint stuckSince() const {
    return stuckSince_;
  }
  // Bytes on the link for a byte of an object, with headers and parity: of what
  // was added lately, but for small objects, and without what is sent again.
  // 0: not known.
  double overhead() const {
    return addedBytes_ > 0 ? addedWireBytes_ / addedBytes_ : 0;
  }
  // How long an answer may take.
  Nanos patience() const;
  const SenderCounters& counters() const {
    return counters_;
  }
  const LossMeter& loss() const {
    return loss_;
  }
  RateControl& rate() {
    return rate_;
  }
  const RateControl& rate() const {
    return rate_;
  }

 private:
  struct Object {
    SymbolHeader header; // of every packet, except the fields that differ
    std::unique_ptr<std::byte[]> pieces;
    std::vector<uint16_t> positions; // by index; empty: not permuted
    std::vector<std::byte> repair; // symbols one after the other
    std::vector<uint16_t> repairPositions; // parity of the positions
    // The order of the symbols; empty: data, and then repair.
    std::vector<uint32_t> order;
    uint32_t sent = 0; // symbols
    std::vector<uint64_t> lastPacket; // by index: that carried it last
    std::vector<bool> queued; // by index: to be sent again

    uint32_t repairSymbols() const {
      return uint32_t(header.blocks) * header.parityPerBlock;
    }
    uint32_t symbols() const {
      return header.count + repairSymbols();
    }
    uint16_t positionOf(uint16_t index) const {
      return positions.empty() ? index : positions[index];
    }
    const std::byte* piece(uint16_t index) const {
      return pieces.get() + size_t(positionOf(index)) * header.pieceBytes;
    }
  };
  struct Sent {
    uint64_t packet = 0;
    size_t bytes = 0;
  };

  bool mayMissEnough(const Object& o, TrafficClass cls);
  BlockShape shapeFor(const Object& o, size_t coded, TrafficClass cls);
  BlockShape semanticShape(
      const Object& o,
      size_t coded,
      int dataSymbols,
      TrafficClass cls);
  BlockShape chosenShape(
      const Object& o,
      size_t coded,
      int dataSymbols,
      TrafficClass cls,
      uint16_t mayMiss);
  void order(Object& o, const ObjectToSend& what);
  void makeRepair(Object& o);
  void writeSymbol(
      Object& o,
      uint16_t index,
      bool retransmitted,
      TimePoint now,
      PacketToSend& out);
  void
  writeRepair(Object& o, uint32_t number, TimePoint now, PacketToSend& out);
  bool writeEnd(TimePoint now, PacketToSend& out);
  void sent(uint64_t packet, size_t bytes, TimePoint now);
  void stamp(SymbolHeader& h, TimePoint now) const;
  void planEnds(TimePoint now);
  void want(Object& o, uint16_t index, uint64_t largest);
  void finish(std::map<uint64_t, Object>::iterator at);
  void beginAt(const PacketReport& r, TimePoint now);
  void beginAfterRest();
  uint64_t carried(const PacketReport& r, double usualLoss) const;
  void measure(const PacketReport& report, TimePoint now);

  const RecoverySchemes schemes_;
  RateControl rate_;
  const std::function<void(uint64_t)> done_;
  size_t pieceBytes_ = kMinPieceBytes;

  std::map<uint64_t, Object> objects_; // not done, by number
  uint64_t lastObject_ = 0;
  uint64_t sending_ = 1; // the first that has not been sent whole
  std::deque<std::pair<uint64_t, uint16_t>> again_; // (object, index)
  uint64_t waitingBytes_ = 0, heldBytes_ = 0;
  double addedBytes_ = 0, addedWireBytes_ = 0; // older ones count less
  std::vector<std::byte> spent_; // repair symbols, the last of which leaves now

  // pacing and flight
  TimePoint paceAt_{}; // when the next packet may leave
  TimePoint burstAt_{}; // the time of next() in the last burst
  // Packets above the `largest` of the last report. A dropped packet leaves the
  // flight with the first later one that is reported, or when all objects are
  // complete.
  std::deque<Sent> inFlight_;
  uint64_t inFlightBytes_ = 0;
  uint64_t lastPacketSent_ = 0;
  TimePoint busySince_ = kNever; // not idle since, or heard of since
  TimePoint stuckSince_ = kNever;
  size_t fullObjects_ = 0; // that have symbols of full length
  // Descriptions that tell the receiver that all has been sent.
  TimePoint endAt_ = kNever;
  int endsSent_ = 0; // times
  int endsInARow_ = 0;
  // Until then, what arrives may have been sent when there was little to send.
  TimePoint limitedUntil_{};
  TimePoint sentAt_{}; // the last packet
  // The first after a rest, until a report tells of it; 0: none.
  uint64_t firstAfterRest_ = 0;
  TimePoint queuedUntil_{}; // reports tell of a queue
  // The first one after a rest behind which nothing waited, until a report
  // tells of it; 0: none.
  uint64_t lastOfBurst_ = 0;
  TimePoint restEndedAt_{};
  uint64_t bytesBeforeRest_ = 0; // sent before its end

  // The least time that a packet has taken lately, in microseconds between the
  // clocks of the two ends: their difference is unknown, and changes slowly.
  class LeastTransit {
   public:
    void onPacket(uint32_t micros, TimePoint now);
    uint32_t micros() const {
      return isLess(now_, before_) ? now_ : before_;
    }

   private:
    static bool isLess(uint32_t a, uint32_t b) {
      return static_cast<int32_t>(a - b) < 0;
    }
    TimePoint since_ = kNever; // now_ counts
    uint32_t now_ = 0, before_ = 0;
  };

  LeastTransit leastTransit_;
  PacketReport last_, base_; // the latest, and the one that rates count from
  TimePoint baseAt_{};
  bool baseIsRest_ = false; // base_ stands for the end of a rest
  LossMeter loss_;
  // By class, data symbols of a block, blocks, whether only what is important
  // is coded, and how many may be missing.
  std::map<std::tuple<TrafficClass, int, int, bool, uint16_t>, BlockShape>
      shapes_;
  // By symbols and how many of them may be missing.
  std::map<std::pair<uint16_t, uint16_t>, bool> missEnough_;
  TimePoint chosenAt_{}; // these
  SenderCounters counters_;
};

} // namespace resilient
