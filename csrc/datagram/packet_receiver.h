#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/time.h"
#include "datagram/packet_numbers.h"
#include "loss/parity_code.h"
#include "path/number_set.h"
#include "wire/packet.h"

namespace resilient {

// Bytes of an object that have not come and are zero.
struct Hole {
  size_t offset = 0;
  size_t bytes = 0;
  bool operator==(const Hole&) const = default;
};

struct ReceiverCounters {
  uint64_t objects = 0; // complete
  uint64_t recovered = 0; // data symbols, from parity
  uint64_t zeroFilled = 0; // data symbols
  uint64_t duplicates = 0; // packets and symbols that were known
};

// The receiving half of a datagram path: puts objects together, repairs them
// by parity, decides what is done about the rest, and reports to the sender.
// No I/O, no clock.
//
// The verdict about an object falls when all of it has been sent (see
// PacketSender) and what is merely late has had its time: if what is missing
// may be missing, there are zeros in its place; else it is asked for.
//
// Paper: SMART §3.2, "Error correction decode".
//
// The headers must come from decodeSymbol(): every index and count is trusted
// to be within its limits. A Status that is not ok means that the peer
// contradicts itself; the caller closes the path.
//
// Thread: the path's. Time never goes back from call to call.
class PacketReceiver {
 public:
  // Each object once, in the order of completion; `holes` ascending, disjoint.
  // Called from within onSymbol() and onTimer(); must not call back. The bytes
  // are valid during the call only.
  using Deliver = std::function<
      void(std::span<const std::byte> object, std::span<const Hole> holes)>;

  // `maxBytes`: of objects that are not complete; packets that would need
  // more are dropped, and are asked for later.
  PacketReceiver(uint64_t maxBytes, Deliver deliver);

  // A packet of any type, by its number. False: it has been here before, and
  // must be ignored. Otherwise onSymbol() gets it, if it is a symbol or an END.
  // Reports and probes have numbers, too. Without these calls they would count
  // as lost.
  bool onNumber(uint64_t packet, size_t bytes, TimePoint now);
  Status onSymbol(
      const SymbolHeader& header,
      std::span<const std::byte> symbol,
      uint64_t packet,
      TimePoint now);
  void onTimer(TimePoint now);

  // When onTimer() or takeReport() has something to do.
  TimePoint deadline() const;
  // The part of deadline() that needs no report: onTimer() may deliver an
  // object then. Later than the last call of onTimer().
  TimePoint nextVerdict() const;
  bool reportDue(TimePoint now) const {
    return reportAt_ <= now;
  }
  PacketReport takeReport(TimePoint now);

  // The bytes of incomplete objects; never more than `maxBytes`.
  uint64_t heldBytes() const {
    return heldBytes_;
  }
  const ReceiverCounters& counters() const {
    return counters_;
  }
  const PacketNumbers& numbers() const {
    return numbers_;
  }

 private:
  // An object that is not complete. A piece has two numbers: its index, in the
  // order of importance, and its position in the object. They differ if the
  // object is permuted; a symbol brings both.
  struct Object {
    SymbolHeader header; // of the first packet that came
    std::unique_ptr<std::byte[]> pieces;
    std::vector<bool> have; // by index
    std::vector<bool> filled; // by position
    std::vector<uint16_t> positions; // by index, if permuted
    uint32_t haveCount = 0;
    uint32_t haveMust = 0;
    struct Repair {
      std::unique_ptr<std::byte[]> symbol;
      uint16_t position = 0;
    };
    std::map<uint16_t, Repair> repair; // by index
    uint64_t bytes = 0; // of memory
    // Since when it is known that all of it has been sent; kNever: not yet.
    TimePoint overAt = kNever;
    // How far the sending had come, and when; oldest first.
    std::deque<std::pair<TimePoint, uint32_t>> progress;
    uint32_t reached = 0; // symbols, in the order of sending
    std::vector<uint32_t> slots; // that order, by symbol; empty: as numbered
    bool asked = false; // for what is missing
  };

  Status create(const SymbolHeader& h, TimePoint now, Object*& object);
  Status put(
      Object& o,
      uint16_t index,
      uint16_t position,
      std::span<const std::byte> from);
  Status repair(Object& o, uint32_t block);
  void note(Object& o, uint32_t reached, TimePoint now);
  void over(uint64_t upTo, TimePoint now);
  bool acceptable(const Object& o) const;
  // judge() and complete() may remove the object: `at` and all references to it
  // are invalid then.
  bool judge(std::map<uint64_t, Object>::iterator at, TimePoint now);
  void complete(std::map<uint64_t, Object>::iterator at, TimePoint now);
  void reportSoon(TimePoint at);
  TimePoint verdictAt(const Object& o) const;
  Nanos askAgain() const;
  TimePoint unknownAt() const;
  void listWanted(const Object& o, TimePoint now, WantedSymbols& w) const;
  static uint32_t reachedBy(const Object& o, const SymbolHeader& h);
  static size_t dataInBlock(const SymbolHeader& h, uint32_t block);

  const uint64_t maxBytes_;
  const Deliver deliver_;
  PacketNumbers numbers_;
  std::map<uint64_t, Object> objects_; // not complete
  NumberSet complete_;
  uint64_t heldBytes_ = 0;

  uint64_t reports_ = 0;
  TimePoint reportAt_ = kNever;
  TimePoint reportedAt_{};
  uint32_t unreported_ = 0; // packets
  uint64_t symbols_ = 0; // that have come
  uint32_t echoMicros_ = 0; // of the latest symbol, which came
  TimePoint echoAt_{};
  uint64_t sentUpTo_ = 0; // all these objects have been sent; so it was said
  TimePoint sentUpToAt_{};
  ReceiverCounters counters_;
};

} // namespace resilient
