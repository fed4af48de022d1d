#include "datagram/packet_receiver.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "datagram/symbol_order.h"

namespace resilient {
namespace {

// A report is sent after this many packets, but no more often than so many
// times in a round trip, and at the latest after kReportDelay. A complete
// object and an END cause one as well.
constexpr uint32_t kReportEvery = 64;
constexpr int kReportsPerRoundTrip = 16;
constexpr Nanos kReportDelay = std::chrono::milliseconds(5);
// And no more often than this, whatever happens.
constexpr Nanos kReportMin = std::chrono::microseconds(100);
// A request is repeated after this long, in case the report was lost.
constexpr Nanos kAskAgain = std::chrono::milliseconds(5);
// Objects that the sender may be ahead of the first incomplete one.
constexpr uint64_t kMaxAhead = 1u << 14;
// Objects that one report asks for.
constexpr size_t kMaxWanted = 32;

Status malformed(const char* what, uint64_t object) {
  return Status(
      StatusCode::kProtocol,
      std::string("malformed packet: ") + what + " object " +
          std::to_string(object));
}

bool sameObject(const SymbolHeader& a, const SymbolHeader& b) {
  return a.objectBytes == b.objectBytes && a.count == b.count &&
      a.coded == b.coded && a.blocks == b.blocks && a.must == b.must &&
      a.mayMiss == b.mayMiss && a.pieceBytes == b.pieceBytes &&
      a.permuted == b.permuted && a.parityKind == b.parityKind &&
      a.parityPerBlock == b.parityPerBlock;
}

uint32_t symbolsOf(const SymbolHeader& h) {
  return h.count + uint32_t(h.blocks) * h.parityPerBlock;
}

void copyPadded(std::span<const std::byte> from, std::byte* to, size_t bytes) {
  std::memcpy(to, from.data(), from.size());
  std::memset(to + from.size(), 0, bytes - from.size());
}

} // namespace

PacketReceiver::PacketReceiver(uint64_t maxBytes, Deliver deliver)
    : maxBytes_(maxBytes), deliver_(std::move(deliver)) {}

size_t PacketReceiver::dataInBlock(const SymbolHeader& h, uint32_t block) {
  return (h.coded - block + h.blocks - 1) / h.blocks;
}

// How many symbols had left when this one did.
uint32_t PacketReceiver::reachedBy(const Object& o, const SymbolHeader& h) {
  uint32_t symbol = h.index;
  if (h.repair) {
    const uint32_t block = h.index / h.parityPerBlock;
    symbol = h.count + h.index % h.parityPerBlock * h.blocks + block;
  }
  return (o.slots.empty() ? symbol : o.slots[symbol]) + 1;
}

void PacketReceiver::reportSoon(TimePoint at) {
  reportAt_ = std::min(reportAt_, std::max(at, reportedAt_ + kReportMin));
}

bool PacketReceiver::onNumber(uint64_t packet, size_t bytes, TimePoint now) {
  if (!numbers_.insert(packet, bytes, now)) {
    ++counters_.duplicates;
    return false;
  }
  return true;
}

// A new record for an object, from any of its packets. It stays null, without
// an error, if there is no room or the object is too far ahead: the packet is
// then dropped, and takeReport() asks for the whole object later.
Status
PacketReceiver::create(const SymbolHeader& h, TimePoint now, Object*& object) {
  const uint64_t bytes = uint64_t(h.count) * h.pieceBytes;
  object = nullptr;
  if (heldBytes_ + bytes > maxBytes_ ||
      h.object > complete_.firstGap(1) + kMaxAhead) {
    return Status();
  }
  Object& o = objects_[h.object];
  o.header = h;
  o.pieces = std::make_unique_for_overwrite<std::byte[]>(bytes);
  o.have.assign(h.count, false);
  o.filled.assign(h.count, false);
  if (h.permuted) {
    o.positions.assign(h.count, 0);
    const auto order = spreadOrder(h.count, h.must, symbolsOf(h) - h.count);
    o.slots.resize(order.size());
    for (uint32_t slot = 0; slot < order.size(); ++slot) {
      o.slots[order[slot]] = slot;
    }
  }
  o.bytes = bytes;
  heldBytes_ += bytes;
  if (h.object <= sentUpTo_) { // all that came of it before was lost
    o.overAt = now;
  }
  object = &o;
  return Status();
}

// Keeps a data symbol. The pieces lie in the order of positions, so the object
// needs no copy when it is complete.
Status PacketReceiver::put(
    Object& o,
    uint16_t index,
    uint16_t position,
    std::span<const std::byte> from) {
  if (position >= o.header.count || o.filled[position]) {
    return malformed("position taken twice in", o.header.object);
  }
  std::byte* const to = o.pieces.get() + size_t(position) * o.header.pieceBytes;
  if (from.data() != to) {
    copyPadded(from, to, o.header.pieceBytes);
  }
  o.have[index] = true;
  o.filled[position] = true;
  if (o.header.permuted) {
    o.positions[index] = position;
  }
  ++o.haveCount;
  o.haveMust += index < o.header.must;
  return Status();
}

// Repairs the pieces that the block's repair symbols here suffice for.
//
// How it works. Runs after each symbol that may help. Reed-Solomon repairs all
// of a block or nothing, so it is not tried with too few symbols; XOR may
// repair a part. Lost pieces of a permuted object are decoded to memory aside.
// Their positions are then decoded from the parity of the positions, with the
// same code on symbols of two bytes, and put() moves the pieces to their
// places. A position that is taken shows a faulty peer.
Status PacketReceiver::repair(Object& o, uint32_t block) {
  const SymbolHeader& h = o.header;
  const size_t n = dataInBlock(h, block);
  size_t missing = 0;
  for (size_t i = 0; i < n; ++i) {
    missing += !o.have[block + i * h.blocks];
  }
  const auto first =
      o.repair.lower_bound(static_cast<uint16_t>(block * h.parityPerBlock));
  std::vector<const std::byte*> parity(h.parityPerBlock, nullptr);
  std::vector<const std::byte*> parityOfPositions(h.parityPerBlock, nullptr);
  size_t here = 0;
  for (auto at = first;
       at != o.repair.end() && at->first < (block + 1) * h.parityPerBlock;
       ++at) {
    const size_t j = at->first % h.parityPerBlock;
    parity[j] = at->second.symbol.get();
    parityOfPositions[j] =
        reinterpret_cast<const std::byte*>(&at->second.position);
    ++here;
  }
  const auto kind = static_cast<ParityKind>(h.parityKind);
  if (missing == 0 || here == 0 ||
      (kind == ParityKind::kReedSolomon && missing > here)) {
    return Status();
  }
  std::vector<std::byte*> data(n), ofPositions(n);
  std::vector<uint16_t> positions(n);
  const auto have = std::make_unique<bool[]>(n);
  const auto havePositions = std::make_unique<bool[]>(n);
  // The place of a lost piece is known only once it is repaired.
  std::vector<std::byte> aside(h.permuted ? missing * h.pieceBytes : 0);
  size_t used = 0;
  for (size_t i = 0; i < n; ++i) {
    const size_t index = block + i * h.blocks;
    have[i] = havePositions[i] = o.have[index];
    positions[i] =
        h.permuted ? o.positions[index] : static_cast<uint16_t>(index);
    data[i] = o.have[index] || !h.permuted
        ? o.pieces.get() + size_t(positions[i]) * h.pieceBytes
        : aside.data() + used++ * h.pieceBytes;
    ofPositions[i] = reinterpret_cast<std::byte*>(&positions[i]);
  }
  const BlockShape shape{kind, static_cast<int>(n), h.parityPerBlock};
  if (recoverData(shape, data, {have.get(), n}, parity, h.pieceBytes) == 0) {
    return Status();
  }
  if (h.permuted) {
    recoverData(
        shape,
        ofPositions,
        {havePositions.get(), n},
        parityOfPositions,
        sizeof(uint16_t));
  }
  for (size_t i = 0; i < n; ++i) {
    const auto index = static_cast<uint16_t>(block + i * h.blocks);
    if (have[i] && !o.have[index]) {
      ++counters_.recovered;
      Status status = put(o, index, positions[i], {data[i], h.pieceBytes});
      if (!status.ok()) {
        return status;
      }
    }
  }
  return Status();
}

// The sending of an object has come this far. Marks are kept a quarter of the
// reorder time apart, so their number is bounded by time, not by packets.
void PacketReceiver::note(Object& o, uint32_t reached, TimePoint now) {
  if (reached <= o.reached) {
    return;
  }
  o.reached = reached;
  if (o.progress.empty() ||
      now - o.progress.back().first >= numbers_.reorderTime() / 4) {
    o.progress.emplace_back(now, reached);
  } else {
    o.progress.back().second = reached;
  }
  if (reached == symbolsOf(o.header) && o.overAt == kNever) {
    o.overAt = now;
  }
}

// All objects up to this one have been sent.
void PacketReceiver::over(uint64_t upTo, TimePoint now) {
  if (upTo <= sentUpTo_) {
    return;
  }
  sentUpTo_ = upTo;
  sentUpToAt_ = now;
  for (auto& [number, o] : objects_) {
    if (number > upTo) {
      break;
    }
    if (o.overAt == kNever) {
      o.overAt = now;
    }
  }
}

// How it works. The first part is for the whole path: the echo, the report that
// is now due, and earlier objects that are known to be sent. It also runs for
// packets of complete objects. The second part finds the object, or makes it,
// and checks the description. Only then the symbol is kept, blocks are
// repaired, and the object is judged. An END has no symbol: its object is only
// judged.
Status PacketReceiver::onSymbol(
    const SymbolHeader& h,
    std::span<const std::byte> symbol,
    uint64_t packet,
    TimePoint now) {
  if (packet == numbers_.largest()) {
    echoMicros_ = h.sentMicros;
    echoAt_ = now;
  }
  numbers_.setRoundTrip(std::chrono::microseconds(h.roundTripMicros));
  const bool end = h.type == PacketType::kEnd;
  symbols_ += !end && symbol.size() == h.pieceBytes;
  if (end) {
    reportSoon(now);
  } else if (++unreported_ >= kReportEvery) {
    reportSoon(
        reportedAt_ +
        std::min(kReportDelay, numbers_.roundTrip() / kReportsPerRoundTrip));
  } else {
    reportSoon(now + kReportDelay);
  }
  if (!h.retransmitted) {
    over(end ? h.object : h.object - 1, now);
  }
  auto found = objects_.find(h.object);
  if (found == objects_.end() && !complete_.contains(h.object)) {
    Object* made = nullptr;
    Status status = create(h, now, made);
    if (!status.ok() || made == nullptr) {
      return status;
    }
    found = objects_.find(h.object);
  }
  if (found == objects_.end()) {
    counters_.duplicates += !end;
    return Status();
  }
  Object& o = found->second;
  if (!sameObject(o.header, h)) {
    return malformed("another description of", h.object);
  }
  if (end) {
    judge(found, now);
    return Status();
  }
  Status status;
  if (h.repair) {
    note(o, reachedBy(o, h), now);
    if (o.repair.count(h.index) != 0) {
      ++counters_.duplicates;
      return Status();
    }
    if (heldBytes_ + h.pieceBytes > maxBytes_) {
      return Status(); // what it might have repaired is asked for
    }
    auto& r = o.repair[h.index];
    r.symbol = std::make_unique_for_overwrite<std::byte[]>(h.pieceBytes);
    copyPadded(symbol, r.symbol.get(), h.pieceBytes);
    r.position = h.position;
    heldBytes_ += h.pieceBytes;
    o.bytes += h.pieceBytes;
    status = repair(o, h.index / h.parityPerBlock);
  } else {
    if (!h.retransmitted) {
      note(o, reachedBy(o, h), now);
    }
    if (o.have[h.index]) {
      ++counters_.duplicates;
      return Status();
    }
    status = put(o, h.index, h.position, symbol);
    if (status.ok() && h.index < o.header.coded && !o.repair.empty()) {
      status = repair(o, h.index % o.header.blocks);
    }
  }
  if (status.ok()) {
    judge(found, now);
  }
  return status;
}

bool PacketReceiver::acceptable(const Object& o) const {
  return o.haveMust == o.header.must &&
      o.header.count - o.haveCount <= o.header.mayMiss;
}

// The moment from which missing symbols of the object count as dropped.
TimePoint PacketReceiver::verdictAt(const Object& o) const {
  return o.overAt == kNever ? kNever : o.overAt + numbers_.reorderTime();
}

// True if the object is done with, and gone.
//
// Complete objects are delivered at once, others only after the verdict: what
// is late should not become zeros.
bool PacketReceiver::judge(
    std::map<uint64_t, Object>::iterator at,
    TimePoint now) {
  Object& o = at->second;
  if (o.haveCount == o.header.count || (verdictAt(o) <= now && acceptable(o))) {
    complete(at, now);
    return true;
  }
  return false;
}

void PacketReceiver::complete(
    std::map<uint64_t, Object>::iterator at,
    TimePoint now) {
  // It must be gone before the callback runs.
  const auto node = objects_.extract(at);
  const Object& o = node.mapped();
  const SymbolHeader& h = o.header;
  std::vector<Hole> holes;
  for (size_t p = 0; p < h.count && o.haveCount < h.count; ++p) {
    if (o.filled[p]) {
      continue;
    }
    const size_t offset = p * h.pieceBytes;
    const size_t bytes = std::min<size_t>(h.pieceBytes, h.objectBytes - offset);
    std::memset(o.pieces.get() + offset, 0, bytes);
    if (!holes.empty() && holes.back().offset + holes.back().bytes == offset) {
      holes.back().bytes += bytes;
    } else {
      holes.push_back({offset, bytes});
    }
    ++counters_.zeroFilled;
  }
  complete_.insert(h.object);
  heldBytes_ -= o.bytes;
  ++counters_.objects;
  reportSoon(now);
  deliver_({o.pieces.get(), h.objectBytes}, holes);
}

// Objects that the verdict leaves incomplete are asked for in the next report,
// and then every askAgain(), in case the report or the answer is lost.
void PacketReceiver::onTimer(TimePoint now) {
  numbers_.advance(now);
  for (auto at = objects_.begin(); at != objects_.end();) {
    const auto next = std::next(at);
    Object& o = at->second;
    if (!judge(at, now) && verdictAt(o) <= now) {
      reportSoon(o.asked ? reportedAt_ + askAgain() : now);
      o.asked = true;
    }
    at = next;
  }
  if (unknownAt() <= now) {
    reportSoon(reportedAt_ + askAgain());
  }
}

Nanos PacketReceiver::askAgain() const {
  return std::max(kAskAgain, numbers_.roundTrip() / 8);
}

// The time when sent objects without any packet here are surely lost; kNever:
// there are none.
TimePoint PacketReceiver::unknownAt() const {
  // Incomplete ones are known, so a count is enough.
  const uint64_t from = complete_.firstGap(1);
  if (from > sentUpTo_) {
    return kNever;
  }
  uint64_t known = 0;
  for (const auto& [number, o] : objects_) {
    known += number <= sentUpTo_;
  }
  for (const auto& [first, last] : complete_.rangesAbove(from)) {
    known += std::min(last, sentUpTo_) - std::min(first, sentUpTo_ + 1) + 1;
  }
  return known == sentUpTo_ - from + 1 ? kNever
                                       : sentUpToAt_ + numbers_.reorderTime();
}

// Looks at all incomplete objects, as onTimer() does.
TimePoint PacketReceiver::deadline() const {
  TimePoint at = std::min(reportAt_, numbers_.deadline());
  for (const auto& [number, o] : objects_) {
    // The verdict of one that was asked for may be later than it was: then
    // more has turned out to be reordered.
    const TimePoint verdict = verdictAt(o);
    at = std::min(
        at, o.asked ? std::max(verdict, reportedAt_ + askAgain()) : verdict);
  }
  if (const TimePoint unknown = unknownAt(); unknown != kNever) {
    at = std::min(at, std::max(unknown, reportedAt_ + askAgain()));
  }
  return at;
}

TimePoint PacketReceiver::nextVerdict() const {
  TimePoint at = kNever;
  for (const auto& [number, o] : objects_) {
    if (!o.asked) {
      at = std::min(at, verdictAt(o));
    }
  }
  return at;
}

// The data symbols of `o` to ask for. After the verdict these are all that must
// arrive, and the others only if more than `mayMiss` of them are missing.
// Parity is never asked for.
void PacketReceiver::listWanted(
    const Object& o,
    TimePoint now,
    WantedSymbols& w) const {
  const SymbolHeader& h = o.header;
  const bool over = verdictAt(o) <= now;
  // Before its verdict: only what no parity may bring, and is surely late.
  uint32_t upTo = over ? h.count : 0;
  if (!over && h.coded == 0 && !h.permuted) {
    for (const auto& [when, reached] : o.progress) {
      if (when + numbers_.reorderTime() > now) {
        break;
      }
      upTo = std::min<uint32_t>(reached, h.must);
    }
  }
  const bool tooMany =
      h.count - o.haveCount > uint32_t(h.mayMiss) + (h.must - o.haveMust);
  w.object = h.object;
  for (uint32_t i = 0; i < upTo; ++i) {
    if (o.have[i] || (i >= h.must && !tooMany)) {
      continue;
    }
    const auto index = static_cast<uint16_t>(i);
    if (!w.indices.empty() && w.indices.back().second + 1 == index) {
      w.indices.back().second = index;
    } else {
      w.indices.emplace_back(index, index);
    }
  }
}

// All counts are totals since the beginning, so a report that is lost needs no
// repeat. The caller may cut off its end to fit a packet: what is still wanted
// comes in a later one.
PacketReport PacketReceiver::takeReport(TimePoint now) {
  numbers_.advance(now);
  PacketReport r;
  r.number = ++reports_;
  r.largest = numbers_.largest();
  r.packets = numbers_.packets();
  r.bytes = numbers_.bytes();
  r.symbols = symbols_;
  r.lost = numbers_.lost();
  r.bursts = numbers_.bursts();
  const auto micros = [](auto d) {
    return static_cast<uint32_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(d).count());
  };
  r.receivedMicros = micros(numbers_.lastAt().time_since_epoch());
  r.heldMicros = micros(now - echoAt_);
  r.echoMicros = echoMicros_;
  r.completeUpTo = complete_.firstGap(1) - 1;
  r.complete = complete_.rangesAbove(r.completeUpTo);
  for (const auto& [number, o] : objects_) {
    if (r.wanted.size() == kMaxWanted) {
      break;
    }
    WantedSymbols w;
    listWanted(o, now, w);
    if (!w.indices.empty()) {
      r.wanted.push_back(std::move(w));
    }
  }
  if (unknownAt() <= now) {
    uint64_t number = r.completeUpTo + 1;
    for (; number <= sentUpTo_ && r.wanted.size() < kMaxWanted; ++number) {
      if (!complete_.contains(number) && objects_.count(number) == 0) {
        r.wanted.push_back({number, {{0, UINT16_MAX}}});
      }
    }
  }
  std::sort(
      r.wanted.begin(),
      r.wanted.end(),
      [](const WantedSymbols& a, const WantedSymbols& b) {
        return a.object < b.object;
      });
  reportAt_ = kNever;
  reportedAt_ = now;
  unreported_ = 0;
  return r;
}

} // namespace resilient
