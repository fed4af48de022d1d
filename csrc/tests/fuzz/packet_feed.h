#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "datagram/packet_receiver.h"
#include "datagram/packet_sender.h"
#include "tests/fuzz/fuzz_input.h"
#include "wire/packet.h"

namespace resilient::test {

// Feeds packets that a peer may have sealed, decided by arbitrary bytes, to
// both halves of one end of a datagram path. Nothing may crash, run for long,
// exceed the memory limit, or give a hole outside its object; an error ends
// the path, as DatagramPath does.
//
// First byte: even: the rest is a series of packets, as they are. Odd: a
// program of steps, among them packets that are nearly right, which chance
// would not find.
class PacketFeed : private FuzzInput {
 public:
  explicit PacketFeed(std::span<const uint8_t> input)
      : FuzzInput("packet feed", input),
        sender_(
            schemes(),
            RateControl(std::chrono::milliseconds(1), 1e9, 0),
            [this](uint64_t object) {
              require(done_.insert(object).second, "an object is done twice");
              require(object <= added_, "an object is done that nobody sent");
            }),
        receiver_(
            kMaxBytes,
            [this](std::span<const std::byte> o, std::span<const Hole> h) {
              delivered(o, h);
            }) {}

  void run() {
    const bool raw = byte() % 2 == 0;
    send(900, {});
    while (!input_.empty() && !failed_) {
      if (raw) {
        rawPacket();
      } else {
        step();
      }
      serve();
      check();
    }
  }
  bool failed() const {
    return failed_;
  }
  uint64_t delivered() const {
    return delivered_;
  }

 private:
  static constexpr uint64_t kMaxBytes = 1u << 20;

  static RecoverySchemes schemes() {
    RecoverySchemes s;
    s[1].code = ParityKind::kXor;
    s[3].kind = RecoveryKind::kUniformFec;
    return s;
  }

  uint64_t number() {
    return numberOr([](uint64_t b) { return uint64_t(UINT16_MAX) - b; });
  }

  // As DatagramPath does with what it has opened.
  void give(std::span<const std::byte> packet) {
    // Mostly one after the other; a faulty peer may skip any count.
    const uint8_t skip = byte();
    number_ += skip < 250 ? 1 : number();
    if (failed_ || !receiver_.onNumber(number_, packet.size() + 60, now_)) {
      return;
    }
    PacketType type{};
    Status status = packetType(packet, type);
    if (status.ok() && type == PacketType::kReport) {
      PacketReport report;
      status = decodePacketReport(packet, report);
      if (status.ok()) {
        status = sender_.onReport(report, now_);
      }
    } else if (status.ok() && type <= PacketType::kEnd) {
      SymbolHeader header;
      std::span<const std::byte> symbol;
      status = decodeSymbol(packet, header, symbol);
      if (status.ok()) {
        status = receiver_.onSymbol(header, symbol, number_, now_);
      }
    } else if (status.ok()) {
      PacketProbe probe;
      status = decodeProbe(packet, probe);
    }
    failed_ = !status.ok();
  }

  void rawPacket() {
    size_t n = byte() * 8u;
    n += byte();
    n = std::min(n, input_.size());
    const auto bytes = std::as_bytes(input_.first(n));
    std::vector<std::byte> packet(bytes.begin(), bytes.end());
    input_ = input_.subspan(n);
    give(packet);
  }

  // No count below has the factor 7.
  static uint16_t positionOf(const SymbolHeader& h, uint32_t index) {
    return static_cast<uint16_t>(
        h.permuted ? (index * 7 + 1) % std::max<uint32_t>(h.count, 1) : index);
  }

  // Of few objects, so that packets meet; described alike, mostly.
  void symbol(uint8_t how) {
    SymbolHeader h;
    h.type = how % 8 == 7 ? PacketType::kEnd : PacketType::kSymbol;
    h.object = 1 + number() % (how >= 240 ? UINT64_MAX : 6);
    h.count = static_cast<uint16_t>(1 + h.object * 7 % 40);
    h.pieceBytes = h.object % 3 == 0 ? 512 : 256;
    h.must = static_cast<uint16_t>(h.object % 2 == 0 ? 0 : h.count / 2);
    h.mayMiss = static_cast<uint16_t>((h.count - h.must) / 2);
    h.permuted = h.object % 2 == 1;
    if (h.object % 4 != 3) {
      h.parityKind = static_cast<uint8_t>(2 - h.object % 2);
      h.coded = static_cast<uint16_t>(
          h.permuted ? std::max<uint16_t>(h.must, 1) : h.count);
      h.blocks = static_cast<uint16_t>(1 + h.coded / 10);
      h.parityPerBlock = 4;
    }
    const uint8_t what = byte();
    h.repair = what % 2 == 1 && h.parityPerBlock > 0;
    h.retransmitted = what % 8 >= 6;
    if (what >= 250) { // something of it is a lie
      h.count = static_cast<uint16_t>(number());
      h.must = static_cast<uint16_t>(number());
      h.coded = static_cast<uint16_t>(number());
      h.blocks = static_cast<uint16_t>(number());
      h.parityPerBlock = static_cast<uint8_t>(number());
      h.mayMiss = static_cast<uint16_t>(number());
    }
    h.objectBytes =
        static_cast<uint32_t>(h.count * h.pieceBytes - h.object % 200);
    h.index = static_cast<uint16_t>(number());
    if (what < 250) {
      h.index %= h.repair ? h.blocks * h.parityPerBlock : h.count;
    }
    h.position = positionOf(h, h.index);
    if (h.repair && h.permuted && h.blocks > 0 && h.parityPerBlock > 0) {
      // XOR of what it covers, or a piece would be in two places.
      h.position = 0;
      const uint32_t block = h.index / h.parityPerBlock;
      const uint32_t step = uint32_t(h.blocks) * h.parityPerBlock;
      for (uint32_t i = block + h.index % h.parityPerBlock * h.blocks;
           i < h.coded;
           i += step) {
        h.position ^= positionOf(h, i);
      }
    }
    h.sentMicros = static_cast<uint32_t>(number());
    h.roundTripMicros = static_cast<uint32_t>(number());
    const bool sound = what < 250 || h.type == PacketType::kEnd;
    std::vector<std::byte> packet(
        kSymbolHeaderBytes + (sound ? symbolBytes(h) : h.pieceBytes),
        static_cast<std::byte>(what));
    encodeSymbolHeader(h, packet.data());
    give(packet);
  }

  void report() {
    PacketReport r;
    const bool lie = byte() % 64 == 0;
    const auto counted = [&](uint64_t right) { return lie ? number() : right; };
    r.number = counted(++reports_);
    r.largest = counted(sentPackets_);
    r.packets = counted(sentPackets_ / 2);
    r.bytes = counted(sentPackets_ * 500);
    r.symbols = counted(sentPackets_ / 3);
    r.lost = counted(sentPackets_ / 4);
    r.bursts = counted(sentPackets_ / 8);
    r.receivedMicros = static_cast<uint32_t>(number());
    r.heldMicros = static_cast<uint32_t>(number());
    r.echoMicros = static_cast<uint32_t>(number());
    r.completeUpTo = counted(byte() % (added_ + 1));
    uint64_t object = r.completeUpTo;
    for (int n = byte() % 4; n > 0; --n) {
      const uint64_t first = object + 1 + byte() % 3;
      object = first + (lie ? number() : 0);
      if (lie || object <= added_) {
        r.complete.emplace_back(first, object);
      }
    }
    object = 0;
    for (int n = byte() % 6; n > 0; --n) {
      WantedSymbols& w = r.wanted.emplace_back();
      w.object = object += 1 + byte() % 3;
      uint32_t index = byte() % 8;
      for (int m = byte() % 4; m >= 0; --m) {
        const auto last = static_cast<uint32_t>(index + number() % 65536);
        w.indices.emplace_back(index, last);
        index = last + 1;
      }
    }
    give(encodePacketReport(r, 1200));
  }

  void send(size_t bytes, Tolerance tolerance) {
    if (added_ >= 60) {
      return;
    }
    std::vector<std::byte> payload(bytes / 4 * 4);
    for (size_t i = 0; i < payload.size(); ++i) {
      payload[i] = static_cast<std::byte>(i % 251 < 60 ? i : 0);
    }
    const std::vector<std::byte> header(96, std::byte(1));
    ObjectToSend what;
    what.header = header;
    what.payload = payload;
    what.trafficClass = static_cast<TrafficClass>(added_ % 4);
    what.tolerance = tolerance;
    what.dtype = DType::kFloat32;
    ++added_;
    require(sender_.add(what, now_) == added_, "a number is left out");
  }

  void step() {
    const uint8_t what = byte();
    switch (what % 16) {
      default:
        symbol(what);
        break;
      case 9:
        report();
        break;
      case 10:
        now_ += std::chrono::microseconds(50) * byte();
        break;
      case 11:
        now_ += std::chrono::milliseconds(20) * byte();
        break;
      case 12:
        send(
            size_t(byte()) * 100,
            what >= 128 ? Tolerance{0.1f, 0.3f} : Tolerance());
        break;
      case 13:
        if (what < 240) {
          symbol(what);
        } else if (byte() % 2 == 0) {
          rawPacket();
        } else if (!last_.empty()) { // something of our own comes back
          std::vector<std::byte> packet = last_;
          packet[byte() % packet.size()] ^= static_cast<std::byte>(byte());
          give(packet);
        }
        break;
    }
  }

  // As DatagramPath does after whatever has happened.
  void serve() {
    if (failed_) {
      return;
    }
    if (receiver_.deadline() <= now_) {
      receiver_.onTimer(now_);
    }
    if (receiver_.reportDue(now_)) {
      const PacketReport r = receiver_.takeReport(now_);
      const auto packet = encodePacketReport(r, 1200);
      PacketReport back;
      require(packet.size() <= 1200, "a report is too large");
      require(
          decodePacketReport(packet, back).ok(),
          "our own report cannot be read");
      require(back.lost <= back.largest, "more is lost than was sent");
      sender_.sentOther(++sentPackets_);
    }
    // Else the timer would come at once, for ever.
    require(receiver_.deadline() > now_, "the receiver does not rest");
    PacketToSend packet;
    uint64_t turns = 0;
    while (sender_.next(now_, sentPackets_ + 1, packet)) {
      ++sentPackets_;
      last_.assign(packet.header.begin(), packet.header.end());
      last_.insert(last_.end(), packet.piece.begin(), packet.piece.end());
      SymbolHeader h;
      std::span<const std::byte> symbol;
      require(
          decodeSymbol(last_, h, symbol).ok(), "our own packet cannot be read");
      require(++turns < 100'000, "the sender does not rest");
    }
  }

  void delivered(
      std::span<const std::byte> object,
      std::span<const Hole> holes) {
    ++delivered_;
    size_t end = 0;
    for (const Hole& h : holes) {
      require(
          h.bytes > 0 && h.offset >= end && h.offset <= object.size() &&
              h.bytes <= object.size() - h.offset,
          "a hole outside of its object");
      end = h.offset + h.bytes;
      for (size_t i = h.offset; i < end; ++i) {
        require(object[i] == std::byte(0), "a hole is not zero");
      }
    }
    for (const std::byte b : object) {
      sum_ += static_cast<unsigned>(b); // a sanitizer sees what is not there
    }
  }

  void check() {
    require(receiver_.heldBytes() <= kMaxBytes, "the memory limit is exceeded");
    require(sender_.heldBytes() < (16u << 20), "the sender holds too much");
    require(sender_.waitingBytes() < (64u << 20), "waiting bytes are wrong");
    require(
        sender_.idle() == (done_.size() == added_), "objects are not counted");
  }

  TimePoint now_{std::chrono::seconds(1000)};
  std::set<uint64_t> done_;
  uint64_t added_ = 0, sentPackets_ = 0, reports_ = 0;
  uint64_t number_ = 0; // of the last packet from the peer
  uint64_t delivered_ = 0, sum_ = 0;
  bool failed_ = false;
  std::vector<std::byte> last_; // packet of ours
  PacketSender sender_;
  PacketReceiver receiver_;
};

} // namespace resilient::test
