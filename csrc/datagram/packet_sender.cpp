#include "datagram/packet_sender.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "datagram/symbol_order.h"
#include "loss/priority.h"

namespace resilient {
namespace {

// Headers of IP and UDP, number and seal: what a packet takes of the link
// beyond what next() gives.
constexpr size_t kWireOverheadBytes = 60;
// Packets leave in bursts: a system call and a wake-up serve several. A burst
// is a little less than one system call can take, within these times. While
// more than that waits, the next burst begins when its first packet is due, and
// not whenever a report comes. A late sender makes up for at most kLateness
// beyond it.
constexpr double kBurstBytes = 56 << 10;
constexpr Nanos kMinBurst = std::chrono::microseconds(250);
constexpr Nanos kMaxBurst = std::chrono::microseconds(500);
constexpr Nanos kLateness = std::chrono::milliseconds(1);
// A rate is measured over no less: reports and interrupts come in bursts. A
// burst that is shorter as a whole counts if it was sent over so long.
constexpr uint32_t kMeasureMicros = 3000;
constexpr uint32_t kBurstMicros = 1000;
// And over no more: there was a rest in between.
constexpr Nanos kMeasureMax = std::chrono::seconds(10);
// LoWAR's size of a block. Larger ones need less parity, as long as the code
// has room for it, and cost more to encode and decode.
constexpr size_t kBlockSymbols = 100;
constexpr size_t kLargeBlockSymbols = 200;
// The chance that a block is not repaired. A message of 4 MiB has up to thirty
// blocks: its 99th percentile is then that without loss, and there is a margin
// for a loss that is worse than measured.
constexpr double kRepairTarget = 1e-4;
// For activations with a tolerance: late layers, by the bounds of their stages.
// Paper: SMART §3.2, lower redundancy for activations of low priority.
constexpr double kRelaxedTarget = 1e-3;
// The chance that an object of a gradient loses more than may be missing, from
// which on all of it is coded. A message of some objects then waits about as
// often as a 99th percentile leaves out; less would be parity for nothing.
constexpr double kMissTarget = 5e-3;
// So much parity is always allowed: a small message costs little.
constexpr double kMinMaxRatio = 2;
// A shape chosen for a size holds this long; it is not chosen for each object.
constexpr Nanos kShapesFor = std::chrono::milliseconds(20);
// Time between the first two descriptions of the end, as a part of the round
// trip that an answer takes; then it doubles each time, and a burst of losses
// takes only a few of them. The receiver answers each.
constexpr int kEndAgainPart = 64;
constexpr Nanos kEndAgainMin = std::chrono::microseconds(250);
constexpr int kEndDoublings = 16;
constexpr double kMaxEndsInARow = 8;
// The least time that a packet takes is that of the last one or two of these.
// The clocks of two hosts drift apart by 0.1 ms in a second at the worst.
constexpr Nanos kTransitFor = std::chrono::seconds(5);
// The overhead is that of about the last so many bytes, in objects of at least
// so many pieces: fewer are parity for the most part, and no large burst.
constexpr double kOverheadBytes = 1 << 20;
constexpr size_t kSeveralPieces = 4;
// In one report: as many as PacketNumbers can tell apart.
constexpr uint64_t kMaxBursts = 1u << 14;
constexpr Nanos kPatienceMin = std::chrono::milliseconds(10);
constexpr Nanos kPatienceMax = std::chrono::seconds(1);
// Late in a run hardly any packet reaches the threshold of its tensor; these
// then count as important by rank (project measurements: the top 1 % of the
// packets hold 90 % of a gradient's energy).
constexpr double kLeastImportant = 0.01;

uint32_t microsOf(TimePoint t) {
  return static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(
          t.time_since_epoch())
          .count());
}

size_t blocksOf(size_t coded, size_t max) {
  return (coded + max - 1) / max;
}

// The data symbols of a block, at most `max` of `coded` ones.
int dataOf(size_t coded, size_t max) {
  const size_t blocks = blocksOf(coded, max);
  return static_cast<int>((coded + blocks - 1) / blocks);
}

// The parity of all blocks.
size_t parityOf(const BlockShape& shape, size_t coded) {
  return static_cast<size_t>(shape.parity) *
      blocksOf(coded, static_cast<size_t>(shape.data));
}

// Some of its packets are as long as packets become.
bool hasFullSymbols(const SymbolHeader& h) {
  return h.count > 1 || symbolBytes(h) == h.pieceBytes;
}

bool isActivation(TrafficClass c) {
  return c == TrafficClass::kActivation ||
      c == TrafficClass::kActivationGradient;
}

} // namespace

PacketSender::PacketSender(
    const RecoverySchemes& schemes,
    const RateControl& rate,
    std::function<void(uint64_t)> done)
    : schemes_(schemes), rate_(rate), done_(std::move(done)) {}

// Whether losses hardly ever take more than may be missing: then only what must
// arrive is coded.
// Paper: SMART §3.2 tolerates them without a limit.
bool PacketSender::mayMissEnough(const Object& o, TrafficClass cls) {
  const SymbolHeader& h = o.header;
  const auto kind = schemes_[static_cast<size_t>(cls)].kind;
  if (kind != RecoveryKind::kSemantic || rate_.congested()) {
    return true; // more parity would be none, or make it worse
  }
  const auto [at, unknown] =
      missEnough_.try_emplace(std::pair(h.count, h.mayMiss), true);
  if (unknown) {
    at->second =
        chanceOfMoreLost(h.count, h.mayMiss, loss_.estimate()) <= kMissTarget;
  }
  return at->second;
}

// The shape of the blocks of `coded` symbols.
//
// No parity where the scheme has none, and for exact bulk data. If only the
// important part of a gradient is coded, nothing of that part may be missing.
BlockShape
PacketSender::shapeFor(const Object& o, size_t coded, TrafficClass cls) {
  const RecoveryScheme& scheme = schemes_[static_cast<size_t>(cls)];
  BlockShape shape;
  shape.data = dataOf(coded, kBlockSymbols);
  switch (scheme.kind) {
    case RecoveryKind::kSelectiveRepeat:
      return shape;
    case RecoveryKind::kUniformFec:
      shape.kind = scheme.code;
      shape.parity = static_cast<int>(std::ceil(
          static_cast<double>(shape.data) * scheme.parity / scheme.data));
      return shape;
    case RecoveryKind::kSemantic:
      break;
  }
  if (cls == TrafficClass::kBulk && o.header.mayMiss == 0) {
    return shape; // no operation waits for it
  }
  shape = semanticShape(o, coded, shape.data, cls);
  if (scheme.code == ParityKind::kReedSolomon) {
    const BlockShape large =
        semanticShape(o, coded, dataOf(coded, kLargeBlockSymbols), cls);
    // Else the code has cut the parity short.
    const bool hasRoom = large.data + large.parity < kMaxBlockSymbols;
    if (hasRoom && parityOf(large, coded) < parityOf(shape, coded)) {
      return large;
    }
  }
  return shape;
}

BlockShape PacketSender::semanticShape(
    const Object& o,
    size_t coded,
    int dataSymbols,
    TrafficClass cls) {
  if (o.header.permuted) {
    const uint16_t mayMiss = coded == o.header.must ? 0 : o.header.mayMiss;
    return chosenShape(o, coded, dataSymbols, cls, mayMiss);
  }
  // A block that is not repaired lacks more symbols than it has parity: less
  // parity pays only where this many may be missing.
  const BlockShape whole = chosenShape(o, coded, dataSymbols, cls, 0);
  return o.header.mayMiss > whole.parity
      ? chosenShape(o, coded, dataSymbols, cls, o.header.mayMiss)
      : whole;
}

// The shape by what was measured, remembered for a while.
BlockShape PacketSender::chosenShape(
    const Object& o,
    size_t coded,
    int dataSymbols,
    TrafficClass cls,
    uint16_t mayMiss) {
  const size_t blocks = blocksOf(coded, static_cast<size_t>(dataSymbols));
  const RecoveryScheme& scheme = schemes_[static_cast<size_t>(cls)];
  const bool important = o.header.permuted && coded == o.header.must;
  RedundancyLimits limits;
  limits.target = mayMiss > 0 ? kRelaxedTarget : kRepairTarget;
  limits.maxRatio = std::max(scheme.maxRatio, kMinMaxRatio / dataSymbols);
  const bool activation = isActivation(cls);
  const double least = important ? scheme.importantRatio
      : activation               ? scheme.activationRatio * loss_.doubt()
                                 : scheme.minRatio;
  // A tolerated part protects as well against a sudden loss. On a link that has
  // long lost nothing, one symbol of a block remains, against a first one.
  limits.minRatio = std::max(
      {scheme.minRatio,
       least - static_cast<double>(mayMiss) / o.header.count,
       activation && scheme.activationRatio > 0 ? 1.0 / dataSymbols : 0.0});
  limits.congested = rate_.congested();
  // They leave among the others: see spreadOrder().
  limits.interleavedBlocks =
      static_cast<int>(blocks * (o.header.count / coded));
  const auto key = std::tuple(
      cls, dataSymbols, limits.interleavedBlocks, important, mayMiss);
  const auto known = shapes_.find(key);
  if (known != shapes_.end()) {
    return known->second;
  }
  const BlockShape chosen =
      chooseShape(scheme.code, dataSymbols, loss_.cautious(), limits);
  shapes_.emplace(key, chosen);
  return chosen;
}

// Chooses the symbols that must arrive, and the order of sending.
// Paper: SMART §3.1.
//
// Three outcomes. Everything must arrive: the object is exact, or its values
// cannot be judged. An activation: all packets are alike, and only the first,
// which holds the frame's header, must arrive. A gradient: the packets with
// large means get the first indices and must arrive.
void PacketSender::order(Object& o, const ObjectToSend& what) {
  SymbolHeader& h = o.header;
  h.must = h.count;
  const auto cls = static_cast<size_t>(what.trafficClass);
  if (schemes_[cls].kind != RecoveryKind::kSemantic || what.tolerance.exact()) {
    return;
  }
  const size_t width = dtypeBytes(what.dtype);
  if (!isActivation(what.trafficClass) &&
      (!hasMagnitude(what.dtype) || what.payload.size() % width != 0)) {
    return;
  }
  // The bound is the message's: rounded down for each object, nothing would be
  // left of it on a slow link with its small objects.
  const double perByte =
      std::min(1.0, double(what.tolerance.maxLost)) / h.pieceBytes;
  const auto upTo = [perByte](uint64_t bytes) {
    return static_cast<uint64_t>(perByte * static_cast<double>(bytes));
  };
  const auto mayMiss = static_cast<uint16_t>(
      upTo(what.offset + what.payload.size()) - upTo(what.offset));
  if (isActivation(what.trafficClass)) {
    if (hasMagnitude(what.dtype) && what.payload.size() % width == 0 &&
        !allFinite(
            what.dtype, what.payload.data(), what.payload.size() / width)) {
      return; // zeros would hide that the training diverges
    }
    h.must = 1; // which holds the frame's header
    h.mayMiss = std::min<uint16_t>(mayMiss, h.count - h.must);
    return;
  }
  std::vector<float> means(h.count);
  meanMagnitudes(
      what.dtype,
      what.payload.data(),
      what.payload.size() / width,
      h.pieceBytes / width,
      (h.pieceBytes - what.header.size()) / width,
      means.data());
  std::vector<uint8_t> high;
  packetsOfTopFraction(means, what.tolerance.threshold, kLeastImportant, high);
  high[0] = 1;
  o.positions.reserve(h.count);
  for (const uint8_t wanted : {1, 0}) {
    for (size_t i = 0; i < h.count; ++i) {
      if (high[i] == wanted) {
        o.positions.push_back(static_cast<uint16_t>(i));
      }
    }
    if (wanted == 1) {
      h.must = static_cast<uint16_t>(o.positions.size());
    }
  }
  h.permuted = true;
  h.mayMiss = std::min<uint16_t>(mayMiss, h.count - h.must);
}

// The object is complete after this: what must arrive, which part is coded, and
// the shape of the blocks are decided once, since each packet describes them
// and must not contradict an earlier one.
uint64_t PacketSender::add(const ObjectToSend& what, TimePoint now) {
  const size_t bytes = what.header.size() + what.payload.size();
  Object o;
  SymbolHeader& h = o.header;
  h.object = ++lastObject_;
  h.objectBytes = static_cast<uint32_t>(bytes);
  h.pieceBytes = static_cast<uint16_t>(pieceBytes_);
  const size_t count = (bytes + pieceBytes_ - 1) / pieceBytes_;
  assert(count <= kMaxPieces);
  h.count = static_cast<uint16_t>(count);
  o.pieces = std::make_unique_for_overwrite<std::byte[]>(count * pieceBytes_);
  std::memcpy(o.pieces.get(), what.header.data(), what.header.size());
  if (!what.payload.empty()) {
    std::memcpy(
        o.pieces.get() + what.header.size(),
        what.payload.data(),
        what.payload.size());
  }
  std::memset(o.pieces.get() + bytes, 0, count * pieceBytes_ - bytes);
  order(o, what);
  // Activations are coded whole, also if some of them may be missing.
  const bool part = h.permuted && mayMissEnough(o, what.trafficClass);
  const size_t coded = part ? h.must : h.count;
  const BlockShape shape = shapeFor(o, coded, what.trafficClass);
  if (shape.parity > 0 && shape.kind != ParityKind::kNone) {
    h.parityKind = static_cast<uint8_t>(shape.kind);
    h.parityPerBlock = static_cast<uint8_t>(shape.parity);
    h.coded = static_cast<uint16_t>(coded);
    h.blocks = static_cast<uint16_t>((coded + shape.data - 1) / shape.data);
  }
  if (h.permuted) {
    o.order = spreadOrder(h.count, h.must, o.repairSymbols());
  }
  o.lastPacket.assign(count, 0);
  o.queued.assign(count, false);
  waitingBytes_ += o.symbols() * uint64_t(h.pieceBytes);
  heldBytes_ += count * uint64_t(h.pieceBytes);
  if (count >= kSeveralPieces) {
    const double kept = std::exp(-static_cast<double>(bytes) / kOverheadBytes);
    addedBytes_ = addedBytes_ * kept + static_cast<double>(bytes);
    addedWireBytes_ =
        addedWireBytes_ * kept +
        static_cast<double>(
            bytes + o.repairSymbols() * uint64_t(h.pieceBytes) +
            o.symbols() * (kSymbolHeaderBytes + kWireOverheadBytes));
  }
  if (hasFullSymbols(h) && ++fullObjects_ == 1) {
    stuckSince_ = now;
  }
  objects_.emplace(h.object, std::move(o));
  endsSent_ = 0;
  if (busySince_ == kNever) {
    busySince_ = now;
    planEnds(now);
  }
  return lastObject_;
}

// Parity of the pieces and, if they are permuted, of their positions: a
// repaired piece would otherwise have no place. Symbol i belongs to block i
// modulo `blocks`, so neighbours are in different blocks.
void PacketSender::makeRepair(Object& o) {
  const SymbolHeader& h = o.header;
  o.repair.resize(size_t(o.repairSymbols()) * h.pieceBytes);
  o.repairPositions.assign(o.repairSymbols(), 0);
  std::vector<uint16_t> positions(h.count);
  for (uint16_t i = 0; i < h.count; ++i) {
    positions[i] = o.positionOf(i);
  }
  std::vector<const std::byte*> data, ofPositions;
  std::vector<std::byte*> repair, repairOfPositions;
  for (uint32_t b = 0; b < h.blocks; ++b) {
    data.clear();
    ofPositions.clear();
    repair.clear();
    repairOfPositions.clear();
    for (uint32_t i = b; i < h.coded; i += h.blocks) {
      data.push_back(o.piece(static_cast<uint16_t>(i)));
      ofPositions.push_back(reinterpret_cast<std::byte*>(&positions[i]));
    }
    for (uint32_t j = 0; j < h.parityPerBlock; ++j) {
      const size_t number = size_t(b) * h.parityPerBlock + j;
      repair.push_back(o.repair.data() + number * h.pieceBytes);
      repairOfPositions.push_back(
          reinterpret_cast<std::byte*>(&o.repairPositions[number]));
    }
    const BlockShape shape{
        static_cast<ParityKind>(h.parityKind),
        static_cast<int>(data.size()),
        h.parityPerBlock};
    encodeParity(shape, data, repair, h.pieceBytes);
    if (h.permuted) {
      encodeParity(shape, ofPositions, repairOfPositions, sizeof(uint16_t));
    }
  }
}

void PacketSender::stamp(SymbolHeader& h, TimePoint now) const {
  h.sentMicros = microsOf(now);
  h.roundTripMicros = static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(rate_.roundTrip())
          .count());
}

void PacketSender::writeSymbol(
    Object& o,
    uint16_t index,
    bool retransmitted,
    TimePoint now,
    PacketToSend& out) {
  SymbolHeader h = o.header;
  h.index = index;
  h.position = o.positionOf(index);
  h.retransmitted = retransmitted;
  stamp(h, now);
  encodeSymbolHeader(h, out.header.data());
  out.piece = {o.piece(index), symbolBytes(h)};
}

// `number`: in the order of sending. It takes one of each block in turn, so a
// burst takes few of each.
void PacketSender::writeRepair(
    Object& o,
    uint32_t number,
    TimePoint now,
    PacketToSend& out) {
  if (o.repair.empty()) {
    makeRepair(o);
  }
  SymbolHeader h = o.header;
  const uint32_t block = number % h.blocks;
  const uint32_t symbol = block * h.parityPerBlock + number / h.blocks;
  h.repair = true;
  h.index = static_cast<uint16_t>(symbol);
  h.position = o.repairPositions[symbol];
  stamp(h, now);
  encodeSymbolHeader(h, out.header.data());
  out.piece = {o.repair.data() + size_t(symbol) * h.pieceBytes, symbolBytes(h)};
}

// A description without a symbol. It makes the receiver report, even if all
// symbols after some packet were dropped.
bool PacketSender::writeEnd(TimePoint now, PacketToSend& out) {
  // The last object that has been sent whole, or is being sent: the receiver
  // reports on all before it.
  auto at = objects_.lower_bound(sending_);
  bool whole = at == objects_.end() || at->second.sent == 0;
  if (whole && at != objects_.begin()) {
    --at;
  } else if (whole && inFlight_.empty()) {
    return false; // nothing has been sent
  } else {
    // Also if only parity of what is done was sent: it may be lost, and fill
    // the window.
    whole = false;
  }
  SymbolHeader h = at->second.header;
  h.type = PacketType::kEnd;
  h.retransmitted = !whole; // its sending is not over
  stamp(h, now);
  encodeSymbolHeader(h, out.header.data());
  out.piece = {};
  return true;
}

Nanos PacketSender::patience() const {
  const Nanos p =
      rate_.roundTrip() + 4 * rate_.roundTripVariation() + kPatienceMin;
  return std::min(p, kPatienceMax);
}

// When all has been sent, tells the receiver so: at once, again soon in case
// that is lost, and from then on ever more rarely. While there is more to send,
// only after a silence, for what was sent may be lost to the last packet.
void PacketSender::planEnds(TimePoint now) {
  if (objects_.empty()) {
    endAt_ = kNever;
    return;
  }
  const bool all = waitingBytes_ == 0 && again_.empty();
  if (all && endsSent_ == 0) {
    endAt_ = now;
  } else if (all) {
    const int doublings = std::min(endsSent_ - 1, kEndDoublings);
    const Nanos again =
        std::max(kEndAgainMin, rate_.roundTrip() / kEndAgainPart);
    endAt_ = now + std::min(again * (1 << doublings), kPatienceMax);
  } else {
    endAt_ = now + patience();
  }
}

TimePoint PacketSender::nextAt() const {
  const bool more = waitingBytes_ > 0 || !again_.empty();
  if (more && inFlightBytes_ < rate_.windowBytes()) {
    return std::min(paceAt_, endAt_);
  }
  return endAt_;
}

// How it works. If window and pace allow a packet, it is the first
// retransmission that is still wanted, otherwise the next symbol of the oldest
// object that has not been sent whole. If neither exists, or neither may leave,
// an END is sent when it is due: it is small, and it is the way out when the
// window is filled by packets that were all dropped.
bool PacketSender::next(TimePoint now, uint64_t packet, PacketToSend& out) {
  bool found = false;
  spent_ = {};
  const bool window = inFlightBytes_ < rate_.windowBytes();
  const Nanos burst = std::clamp(
      fromSeconds(kBurstBytes / rate_.bytesPerS()), kMinBurst, kMaxBurst);
  if (paceAt_ <= now || static_cast<double>(waitingBytes_) < kBurstBytes) {
    burstAt_ = now;
  }
  if (window && paceAt_ <= now + (burstAt_ == now ? burst : Nanos(0))) {
    while (!found && !again_.empty()) {
      const auto [number, index] = again_.front();
      again_.pop_front();
      const auto at = objects_.find(number);
      if (at == objects_.end()) {
        continue;
      }
      Object& o = at->second;
      o.queued[index] = false;
      o.lastPacket[index] = packet;
      ++counters_.retransmitted;
      writeSymbol(o, index, true, now, out);
      found = true;
    }
    if (!found && waitingBytes_ > 0) {
      Object& o = objects_.lower_bound(sending_)->second;
      const uint32_t symbol = o.order.empty() ? o.sent : o.order[o.sent];
      if (symbol < o.header.count) {
        const auto index = static_cast<uint16_t>(symbol);
        o.lastPacket[index] = packet;
        ++counters_.dataSymbols;
        writeSymbol(o, index, false, now, out);
      } else {
        ++counters_.repairSymbols;
        writeRepair(o, symbol - o.header.count, now, out);
      }
      found = true;
      waitingBytes_ -= o.header.pieceBytes;
      if (++o.sent == o.symbols()) {
        sending_ = o.header.object + 1;
        spent_ = std::exchange(o.repair, {}); // the packet may refer to it
        o.repairPositions = {};
      }
    }
    if (found) {
      endsSent_ = 0;
    }
  }
  if (waitingBytes_ == 0) {
    limitedUntil_ = now + rate_.roundTrip();
  }
  if (!found && endAt_ <= now) {
    found = writeEnd(now, out);
    // As many at a time as are lost in a row.
    const double row = std::min(loss_.estimate().burstPackets, kMaxEndsInARow);
    if (found && ++endsInARow_ < row) {
      sent(packet, out.bytes(), now);
      return true;
    }
    endsInARow_ = 0;
    ++endsSent_;
  }
  if (found) {
    sent(packet, out.bytes(), now);
    if (waitingBytes_ == 0 && firstAfterRest_ != 0 && lastOfBurst_ == 0) {
      lastOfBurst_ = packet;
    }
  }
  if (found || endAt_ <= now) {
    planEnds(now);
  }
  return found;
}

// A caller that comes late may catch up, but only by kLateness: more would be a
// burst at the speed of the interface.
void PacketSender::sent(uint64_t packet, size_t bytes, TimePoint now) {
  const size_t onWire = bytes + kWireOverheadBytes;
  ++counters_.packets;
  counters_.bytes += onWire;
  if (inFlight_.empty() && now - sentAt_ > rate_.roundTrip()) {
    rate_.onRestart(now);
    firstAfterRest_ = packet;
    lastOfBurst_ = 0;
    bytesBeforeRest_ = counters_.bytes - onWire;
    restEndedAt_ = now;
  }
  sentAt_ = now;
  inFlight_.push_back({packet, onWire});
  inFlightBytes_ += onWire;
  lastPacketSent_ = packet;
  paceAt_ = std::max(paceAt_, now - kLateness) +
      fromSeconds(static_cast<double>(onWire) / rate_.bytesPerS());
}

// Asked for. Not repeated while the last copy may still be on its way: the
// receiver has seen no packet that left after it.
void PacketSender::want(Object& o, uint16_t index, uint64_t largest) {
  const uint64_t last = o.lastPacket[index];
  if (last != 0 && last < largest && !o.queued[index]) {
    o.queued[index] = true;
    again_.emplace_back(o.header.object, index);
  }
}

// The object is complete at the receiver, perhaps before all of its parity has
// left; the rest of that is not sent.
void PacketSender::finish(std::map<uint64_t, Object>::iterator at) {
  Object& o = at->second;
  const uint64_t number = o.header.object;
  waitingBytes_ -= (o.symbols() - o.sent) * uint64_t(o.header.pieceBytes);
  heldBytes_ -= o.header.count * uint64_t(o.header.pieceBytes);
  fullObjects_ -= hasFullSymbols(o.header);
  objects_.erase(at);
  done_(number);
}

// The bytes that the link has taken since the last measurement. Those that it
// loses whatever the rate took as much of it; others show that it was too much.
uint64_t PacketSender::carried(const PacketReport& r, double usualLoss) const {
  const auto bytes =
      static_cast<double>(r.bytes - std::min(r.bytes, base_.bytes));
  const auto arrived =
      static_cast<double>(r.packets - std::min(r.packets, base_.packets));
  const auto lost = static_cast<double>(r.lost - std::min(r.lost, base_.lost));
  if (arrived == 0) {
    return 0;
  }
  const double usual = std::min({lost, usualLoss * (arrived + lost), arrived});
  // A peer may say anything.
  constexpr double kMost = 1e18;
  return static_cast<uint64_t>(
      std::min(kMost, bytes * (arrived + usual) / arrived));
}

void PacketSender::LeastTransit::onPacket(uint32_t micros, TimePoint now) {
  if (since_ == kNever) {
    now_ = before_ = micros;
    since_ = now;
  } else if (now - since_ > kTransitFor) {
    before_ = std::exchange(now_, micros);
    since_ = now;
  } else if (isLess(micros, now_)) {
    now_ = micros;
  }
}

// The rate counts from the first packet of the burst. It would have arrived
// after the least time that a packet takes. The last packet before the rest
// does not tell it: it may have waited behind those of others, and the rate
// would seem higher by that.
void PacketSender::beginAfterRest() {
  firstAfterRest_ = 0;
  baseIsRest_ = true;
  base_ = last_;
  base_.echoMicros = microsOf(restEndedAt_);
  base_.receivedMicros = base_.echoMicros + leastTransit_.micros();
  baseAt_ = restEndedAt_;
}

void PacketSender::beginAt(const PacketReport& r, TimePoint now) {
  base_ = r;
  baseAt_ = now;
  baseIsRest_ = false;
}

// Turns the totals of two reports into one sample for the rate, and into runs
// for the loss meter. The round trip comes from the echo, less the time for
// which the receiver held it. The rate is measured over half a round trip, by
// the receiver's clock; shorter intervals are joined, unless all has arrived.
void PacketSender::measure(const PacketReport& r, TimePoint now) {
  DeliverySample s;
  if (r.echoMicros != last_.echoMicros) {
    leastTransit_.onPacket(r.receivedMicros - r.echoMicros, now);
    const uint32_t micros = microsOf(now) - r.echoMicros - r.heldMicros;
    // A peer with a strange clock must not make it negative.
    if (micros < 60'000'000) {
      s.roundTrip = std::chrono::microseconds(std::max(micros, 1u));
    }
  }
  const auto since = [](uint64_t now, uint64_t before) {
    return now > before ? now - before : 0;
  };
  s.packets = since(r.packets, last_.packets);
  s.lost = since(r.lost, last_.lost);
  // The limit is for a peer that counts wrongly: we must not count after it.
  const uint64_t bursts =
      std::min({since(r.bursts, last_.bursts), s.lost, kMaxBursts});
  counters_.lost = r.lost;
  // Drops of a full link are no reason for parity. A report does not say when
  // exactly the others were lost, and that of a drop may come when the queue is
  // gone.
  const bool queued = rate_.isQueued(s.roundTrip);
  if (!rate_.queueing() && now >= queuedUntil_) {
    // The queue may have come since, by others, while this path was idle.
    if (!queued) {
      counters_.unqueued += s.packets + s.lost;
      counters_.unqueuedLost += s.lost;
      counters_.unqueuedBursts += bursts;
    }
    for (uint64_t i = 0; i < bursts; ++i) {
      loss_.onPackets(s.packets / bursts, (s.lost + bursts - 1 - i) / bursts);
    }
    loss_.onPackets(bursts == 0 ? s.packets : s.packets % bursts, 0);
  }
  if (queued) {
    queuedUntil_ = now + rate_.minRoundTrip() / 2;
  }
  // A link that stands still now and then has queues and losses without being
  // full. A burst loses all packets if it loses one.
  const LossEstimate usual = loss_.cautious();
  s.usuallyLost = usual.rate * static_cast<double>(s.packets + s.lost);
  s.usualVariance = s.usuallyLost * (2 * usual.burstPackets - 1);
  // The first report of all has none before it that it could be compared with.
  if (firstAfterRest_ != 0 && r.largest >= firstAfterRest_ &&
      last_.number != 0) {
    beginAfterRest();
  }
  const uint32_t micros = r.receivedMicros - base_.receivedMicros;
  // A clump was sent over a longer time than it took to arrive.
  const uint32_t sentMicros = r.echoMicros - base_.echoMicros;
  const bool sentKnown =
      sentMicros < kMeasureMax / std::chrono::microseconds(1);
  // An END, or an answer to what has come meanwhile, is no part of the burst.
  const bool lastCame = lastOfBurst_ != 0 && r.largest >= lastOfBurst_;
  const bool burstOver = inFlightBytes_ == 0 || lastCame;
  const bool longEnough = micros >= kMeasureMicros;
  const bool sentLongEnough = sentKnown && sentMicros >= kBurstMicros;
  const bool half =
      std::chrono::microseconds(micros) >= rate_.minRoundTrip() / 2;
  if (now - baseAt_ > kMeasureMax) {
    s.limitedBySender = true; // the first report, or the first after a rest
    beginAt(r, now);
  } else if (burstOver ? longEnough || sentLongEnough : longEnough && half) {
    s.interval = std::chrono::microseconds(
        sentKnown ? std::max(micros, sentMicros) : micros);
    s.brief = s.interval < rate_.minRoundTrip() / 2;
    s.stretched = sentKnown && micros / 2 > sentMicros;
    s.bytes = carried(r, usual.rate);
    uint64_t sent = carried(r, /*usualLoss=*/1);
    if (baseIsRest_) {
      // Our reports of the time of rest have arrived as well.
      const uint64_t most = counters_.bytes - bytesBeforeRest_;
      s.bytes = std::min(s.bytes, most);
      sent = std::min(sent, most);
    }
    if (sentKnown && sentMicros > 0) {
      s.sentBytesPerS = static_cast<double>(sent) / (1e-6 * sentMicros);
    }
    s.limitedBySender = now < limitedUntil_;
    beginAt(r, now);
  } else {
    s.limitedBySender = waitingBytes_ == 0;
  }
  if (lastCame) {
    lastOfBurst_ = 0;
  }
  if (now - chosenAt_ >= kShapesFor) {
    chosenAt_ = now;
    shapes_.clear();
    missEnough_.clear();
  }
  s.inFlightBytes = inFlightBytes_;
  rate_.onSample(s, now);
}

// The order matters. Packets leave the flight before measure() uses what is
// left of it. Complete objects go before the wanted list is read, so nothing of
// them is queued again.
Status PacketSender::onReport(const PacketReport& r, TimePoint now) {
  if (r.largest > lastPacketSent_ || r.completeUpTo > lastObject_ ||
      (!r.complete.empty() && r.complete.back().second > lastObject_)) {
    return Status(
        StatusCode::kProtocol,
        "report of packet " + std::to_string(r.largest) + " of " +
            std::to_string(lastPacketSent_));
  }
  if (r.number <= last_.number) {
    return Status(); // older than what is known
  }
  while (!inFlight_.empty() && inFlight_.front().packet <= r.largest) {
    inFlightBytes_ -= inFlight_.front().bytes;
    inFlight_.pop_front();
  }
  measure(r, now);
  const size_t fullBefore = fullObjects_;
  while (!objects_.empty() && objects_.begin()->first <= r.completeUpTo) {
    finish(objects_.begin());
  }
  for (const auto& [first, last] : r.complete) {
    for (auto at = objects_.lower_bound(first);
         at != objects_.end() && at->first <= last;) {
      finish(at++);
    }
  }
  for (const WantedSymbols& w : r.wanted) {
    const auto found = objects_.find(w.object);
    if (found == objects_.end()) {
      continue;
    }
    Object& o = found->second;
    for (const auto& [first, last] : w.indices) {
      for (uint32_t i = first; i <= last && i < o.header.count; ++i) {
        want(o, static_cast<uint16_t>(i), r.largest);
      }
    }
  }
  if (objects_.empty()) {
    // No object is open: clears the in-flight accounting, since no further
    // report will cover these packets.
    inFlight_.clear();
    inFlightBytes_ = 0;
  }
  const bool progress = r.largest > last_.largest;
  // A network may lose what is large, and deliver the rest.
  const bool pieces = r.symbols > last_.symbols;
  last_ = r;
  // After a silence, what is small arrives first.
  const bool silent = now - busySince_ > kPatienceMax;
  busySince_ = objects_.empty() ? kNever : now;
  if (fullObjects_ == 0) {
    stuckSince_ = kNever;
  } else if (silent || fullObjects_ < fullBefore || pieces) {
    stuckSince_ = now;
  }
  // Without progress, the last packets may be lost without either end knowing.
  // Those may be all that the window holds: only an END can show that.
  const bool sends = !again_.empty() && inFlightBytes_ < rate_.windowBytes();
  if (progress || objects_.empty() || sends) {
    planEnds(now);
  }
  return Status();
}

} // namespace resilient
