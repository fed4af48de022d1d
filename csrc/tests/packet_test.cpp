#include "wire/packet.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  std::string s;
  char two[3];
  for (std::byte b : bytes) {
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(b));
    s += two;
  }
  return s;
}

// Repair symbol 5 of an object of 2500 pieces, of which 250 must arrive.
SymbolHeader exampleSymbol() {
  SymbolHeader h;
  h.repair = true;
  h.permuted = true;
  h.parityKind = 2;
  h.parityPerBlock = 10;
  h.index = 5;
  h.count = 2500;
  h.coded = 250;
  h.blocks = 3;
  h.must = 250;
  h.mayMiss = 100;
  h.pieceBytes = 256;
  h.position = 0xabcd; // parity
  h.objectBytes = 2500 * 256 - 7;
  h.object = 0x0102030405060708;
  h.sentMicros = 0x11223344;
  h.roundTripMicros = 40'000;
  return h;
}

PacketReport exampleReport() {
  PacketReport r;
  r.number = 7;
  r.largest = 1000;
  r.packets = 990;
  r.bytes = 1'234'567;
  r.symbols = 980;
  r.lost = 10;
  r.bursts = 4;
  r.receivedMicros = 0x01020304;
  r.heldMicros = 250;
  r.echoMicros = 0x11223344;
  r.completeUpTo = 41;
  r.complete = {{43, 44}};
  r.wanted = {{42, {{0, 0}, {7, 9}}}, {45, {{0, UINT16_MAX}}}};
  return r;
}

std::vector<std::byte> encoded(const SymbolHeader& h) {
  std::vector<std::byte> packet(
      kSymbolHeaderBytes + symbolBytes(h), std::byte(0x5a));
  encodeSymbolHeader(h, packet.data());
  return packet;
}

Status decode(const std::vector<std::byte>& packet) {
  SymbolHeader h;
  std::span<const std::byte> symbol;
  return decodeSymbol(packet, h, symbol);
}

void checkSame(const PacketReport& a, const PacketReport& b) {
  CHECK_EQ(a.number, b.number);
  CHECK_EQ(a.largest, b.largest);
  CHECK_EQ(a.packets, b.packets);
  CHECK_EQ(a.bytes, b.bytes);
  CHECK_EQ(a.symbols, b.symbols);
  CHECK_EQ(a.lost, b.lost);
  CHECK_EQ(a.bursts, b.bursts);
  CHECK_EQ(a.receivedMicros, b.receivedMicros);
  CHECK_EQ(a.heldMicros, b.heldMicros);
  CHECK_EQ(a.echoMicros, b.echoMicros);
  CHECK_EQ(a.completeUpTo, b.completeUpTo);
  CHECK(a.complete == b.complete);
  CHECK_EQ(a.wanted.size(), b.wanted.size());
  for (size_t i = 0; i < a.wanted.size(); ++i) {
    CHECK_EQ(a.wanted[i].object, b.wanted[i].object);
    CHECK(a.wanted[i].indices == b.wanted[i].indices);
  }
}

TEST(packet_bytes_are_what_the_document_says) {
  const std::string repair =
      "01" // type
      "05" // flags: repair, permuted
      "02" // parity kind
      "0a" // parity per block
      "0500" // index
      "c409" // count
      "fa00" // coded
      "0300" // blocks
      "fa00" // must
      "6400" // may miss
      "0001" // piece bytes
      "cdab" // position
      "f9c30900" // object bytes
      "0807060504030201" // object
      "44332211" // sent
      "409c0000" // round trip
      "00000000";
  auto packet = encoded(exampleSymbol());
  CHECK_EQ(hex(std::span(packet).first(kSymbolHeaderBytes)), repair);
  CHECK_EQ(decode(packet).toString(), "ok");

  SymbolHeader h = exampleSymbol();
  h.type = PacketType::kEnd;
  h.repair = false;
  h.retransmitted = true;
  h.index = h.position = 0;
  packet = encoded(h);
  CHECK_EQ(
      hex(packet),
      "0206020a"
      "0000c409fa000300fa0064000001"
      "0000"
      "f9c30900"
      "0807060504030201"
      "44332211409c000000000000");
  CHECK_EQ(decode(packet).toString(), "ok");

  packet = encodePacketReport(exampleReport(), 1200);
  CHECK_EQ(
      hex(packet),
      "0300" // type
      "0100" // complete ranges
      "0200" // wanted objects
      "0000"
      "0700000000000000" // number
      "e803000000000000" // largest
      "de03000000000000" // packets
      "87d6120000000000" // bytes
      "0a00000000000000" // lost
      "0400000000000000" // bursts
      "04030201" // received
      "fa000000" // held
      "44332211" // echo
      "00000000"
      "2900000000000000" // complete up to
      "d403000000000000" // symbols
      "00000000"
      "2b00000000000000" // first
      "2c00000000000000" // last
      "2a00000000000000" // object
      "02000000" // ranges
      "00000000"
      "07000900"
      "2d00000000000000"
      "01000000"
      "0000ffff");

  PacketProbe probe;
  probe.bytes = 1452;
  probe.token = 0x1122334455667788;
  packet.resize(kProbeBytes);
  encodeProbe(probe, packet.data());
  CHECK_EQ(hex(packet), "04000000ac050000887766554433221100000000");
  probe.type = PacketType::kProbeReply;
  encodeProbe(probe, packet.data());
  CHECK_EQ(hex(packet), "05000000ac050000887766554433221100000000");
}

SymbolHeader randomSymbol(Prng& prng) {
  SymbolHeader h;
  h.type = prng.chance(0.9) ? PacketType::kSymbol : PacketType::kEnd;
  h.retransmitted = prng.chance(0.2);
  h.permuted = prng.chance(0.5);
  h.pieceBytes = static_cast<uint16_t>(
      kPieceUnit *
      (kMinPieceBytes / kPieceUnit +
       prng.below((kMaxPieceBytes - kMinPieceBytes) / kPieceUnit + 1)));
  const uint64_t max = prng.chance(0.5) ? 20 : kMaxPieces;
  h.count = static_cast<uint16_t>(1 + prng.below(max));
  h.objectBytes = static_cast<uint32_t>(
      uint64_t(h.count - 1) * h.pieceBytes + 1 + prng.below(h.pieceBytes));
  h.must = static_cast<uint16_t>(prng.below(h.count + 1u));
  h.mayMiss = static_cast<uint16_t>(prng.below(h.count - h.must + 1u));
  h.object = std::max<uint64_t>(prng.next(), 1);
  h.sentMicros = static_cast<uint32_t>(prng.next());
  h.roundTripMicros = static_cast<uint32_t>(prng.next());
  if (prng.chance(0.7)) {
    h.parityKind = static_cast<uint8_t>(1 + prng.below(2));
    h.coded = static_cast<uint16_t>(1 + prng.below(h.count));
    const uint32_t min = (h.coded + 199u) / 200;
    h.blocks = static_cast<uint16_t>(
        min + prng.below(std::min(h.coded - min, 100u) + 1u));
    const uint32_t largest = (h.coded + h.blocks - 1u) / h.blocks;
    h.parityPerBlock = static_cast<uint8_t>(
        1 + prng.below(std::min(255 - largest, 65536u / h.blocks)));
    h.repair = prng.chance(0.5);
  }
  const uint32_t symbols =
      h.repair ? uint32_t(h.blocks) * h.parityPerBlock : h.count;
  h.index = static_cast<uint16_t>(prng.below(symbols));
  h.position = static_cast<uint16_t>(
      h.repair         ? prng.next()
          : h.permuted ? prng.below(h.count)
                       : h.index);
  return h;
}

TEST(packet_round_trip_of_random_symbols) {
  Prng prng(7);
  for (int i = 0; i < 20'000; ++i) {
    const SymbolHeader h = randomSymbol(prng);
    const auto packet = encoded(h);
    SymbolHeader back;
    std::span<const std::byte> symbol;
    CHECK_EQ(decodeSymbol(packet, back, symbol).toString(), "ok");
    CHECK(encoded(back) == packet);
    CHECK_EQ(symbol.size(), packet.size() - kSymbolHeaderBytes);
    CHECK(symbol.data() == packet.data() + kSymbolHeaderBytes);
  }
}

PacketReport randomReport(Prng& prng) {
  PacketReport r;
  r.number = prng.next();
  r.largest = prng.next();
  r.packets = prng.next();
  r.bytes = prng.next();
  r.symbols = prng.next();
  r.lost = prng.next();
  r.bursts = prng.next();
  r.receivedMicros = static_cast<uint32_t>(prng.next());
  r.heldMicros = static_cast<uint32_t>(prng.next());
  r.echoMicros = static_cast<uint32_t>(prng.next());
  r.completeUpTo = prng.below(1u << 30);
  uint64_t object = r.completeUpTo;
  for (uint64_t n = prng.below(17); n > 0; --n) {
    const uint64_t first = object + 1 + prng.below(5);
    object = first + prng.below(5);
    r.complete.emplace_back(first, object);
  }
  object = prng.below(100);
  for (uint64_t n = prng.below(33); n > 0; --n) {
    WantedSymbols& w = r.wanted.emplace_back();
    w.object = object += 1 + prng.below(3);
    uint64_t index = prng.below(10);
    for (uint64_t m = 1 + prng.below(8); m > 0; --m) {
      const uint64_t last = index + prng.below(1000);
      w.indices.emplace_back(index, last);
      index = last + 1 + prng.below(1000);
    }
  }
  return r;
}

TEST(packet_round_trip_of_random_reports) {
  Prng prng(8);
  for (int i = 0; i < 5000; ++i) {
    const PacketReport r = randomReport(prng);
    const auto packet = encodePacketReport(r, 1u << 16);
    PacketReport back;
    CHECK_EQ(decodePacketReport(packet, back).toString(), "ok");
    checkSame(r, back);
    PacketProbe probe, again;
    probe.type =
        prng.chance(0.5) ? PacketType::kProbe : PacketType::kProbeReply;
    probe.token = prng.next();
    probe.bytes = static_cast<uint32_t>(prng.next());
    std::vector<std::byte> bytes(kProbeBytes + prng.below(50));
    encodeProbe(probe, bytes.data());
    CHECK(decodeProbe(bytes, again).ok());
    CHECK_EQ(again.type, probe.type);
    CHECK_EQ(again.token, probe.token);
    CHECK_EQ(again.bytes, probe.bytes);
  }
}

// What does not fit is left out, and the rest is a report still: its first
// objects, and of each its first ranges.
TEST(packet_report_keeps_to_its_size) {
  Prng prng(9);
  for (int i = 0; i < 3000; ++i) {
    const PacketReport r = randomReport(prng);
    const size_t max = kReportHeaderBytes + prng.below(600);
    const auto packet = encodePacketReport(r, max);
    CHECK(packet.size() <= max);
    PacketReport back;
    CHECK_EQ(decodePacketReport(packet, back).toString(), "ok");
    CHECK(back.complete.size() <= r.complete.size());
    CHECK(
        std::equal(
            back.complete.begin(), back.complete.end(), r.complete.begin()));
    CHECK(back.wanted.size() <= r.wanted.size());
    for (size_t k = 0; k < back.wanted.size(); ++k) {
      const auto& part = back.wanted[k].indices;
      const auto& all = r.wanted[k].indices;
      CHECK_EQ(back.wanted[k].object, r.wanted[k].object);
      CHECK(!part.empty() && part.size() <= all.size());
      CHECK(std::equal(part.begin(), part.end(), all.begin()));
    }
    // Nothing more would have fitted.
    const bool cut = back.wanted.size() < r.wanted.size() ||
        (!r.wanted.empty() &&
         back.wanted.back().indices.size() < r.wanted.back().indices.size());
    CHECK(!cut || packet.size() + 16 > max);
  }
}

// A peer may seal anything; each claim is checked.
TEST(packet_claims_of_symbols_are_checked) {
  const auto refused = [](const char* what, auto change) {
    SymbolHeader h = exampleSymbol();
    change(h);
    auto packet = encoded(h);
    packet.resize(kSymbolHeaderBytes + exampleSymbol().pieceBytes);
    const Status status = decode(packet);
    CHECK_EQ(status.code(), StatusCode::kProtocol);
    CHECK_CONTAINS(status.message(), what);
  };
  const auto data = [](SymbolHeader& h) {
    h.repair = false;
    h.position = 17;
  };
  SymbolHeader good = exampleSymbol();
  data(good);
  CHECK_EQ(decode(encoded(good)).toString(), "ok");
  using H = SymbolHeader;
  refused("type", [](H& h) { h.type = PacketType(0); });
  refused("type", [](H& h) { h.type = PacketType(6); });
  refused("symbol of", [](H& h) { h.type = PacketType::kReport; });
  refused("symbol of", [](H& h) { h.type = PacketType::kProbe; });
  refused("symbol bytes", [](H& h) { h.type = PacketType::kEnd; });
  refused("piece bytes", [](H& h) { h.pieceBytes = 0; });
  refused("piece bytes", [](H& h) { h.pieceBytes = 224; });
  refused("piece bytes", [](H& h) { h.pieceBytes = 257; });
  refused("piece bytes", [](H& h) { h.pieceBytes = 9216; });
  refused("object", [](H& h) { h.object = 0; });
  refused("number of pieces", [](H& h) { h.objectBytes = 0; });
  refused("number of pieces", [](H& h) { h.objectBytes += 7 + 1; });
  refused("number of pieces", [](H& h) { h.objectBytes -= 249; });
  refused("number of pieces", [](H& h) { h.count = 0; });
  refused("number of pieces", [](H& h) { h.count = 2499; });
  refused("number of pieces", [](H& h) { h.objectBytes = UINT32_MAX; });
  refused("number of pieces", [](H& h) {
    h.count = kMaxPieces + 1;
    h.objectBytes = (kMaxPieces + 1) * 256;
  });
  refused("protected pieces", [](H& h) { h.coded = 2501; });
  refused("protected pieces", [](H& h) { h.must = 2501; });
  refused("protected pieces", [](H& h) { h.mayMiss = 2251; });
  refused("without parity", [](H& h) { h.parityPerBlock = 0; });
  refused("without parity", [](H& h) {
    h.parityPerBlock = 0;
    h.coded = h.blocks = 0; // but a repair symbol
  });
  refused("without parity", [&](H& h) {
    data(h);
    h.parityPerBlock = 0;
    h.coded = 0; // but blocks
  });
  refused("blocks", [](H& h) { h.parityKind = 0; });
  refused("blocks", [](H& h) { h.parityKind = 3; });
  refused("blocks", [](H& h) { h.blocks = 0; });
  refused("blocks", [](H& h) { h.blocks = 251; });
  refused("blocks", [](H& h) { h.parityPerBlock = 255 - 84 + 1; });
  // 84 + 171 symbols of the largest block are as many as there may be.
  SymbolHeader largest = exampleSymbol();
  largest.parityPerBlock = 255 - 84;
  CHECK_EQ(decode(encoded(largest)).toString(), "ok");
  // More repair symbols than 16 bits can number: they once met in one block.
  refused("blocks", [](H& h) {
    h.coded = h.blocks = 2000;
    h.parityPerBlock = 33;
  });
  refused("symbol", [](H& h) { h.index = 30; });
  refused("symbol", [&](H& h) {
    data(h);
    h.index = 2500;
  });
  refused("position", [&](H& h) {
    data(h);
    h.position = 2500;
  });
  refused("position", [&](H& h) {
    data(h);
    h.permuted = false;
  });
  // An end has no index, but its description is checked.
  refused("number of pieces", [](H& h) {
    h.type = PacketType::kEnd;
    h.count = 1;
  });
  // Flags that nobody knows, and lengths.
  auto packet = encoded(exampleSymbol());
  packet[1] = std::byte(8);
  CHECK_CONTAINS(decode(packet).message(), "flags");
  packet = encoded(exampleSymbol());
  packet.push_back(std::byte(0));
  CHECK_CONTAINS(decode(packet).message(), "symbol bytes");
  for (size_t n = 0; n < packet.size() - 1; ++n) {
    CHECK_EQ(
        decode({packet.begin(), packet.begin() + static_cast<ptrdiff_t>(n)})
            .code(),
        StatusCode::kProtocol);
  }
}

TEST(packet_claims_of_reports_are_checked) {
  const auto refused = [](const char* what, auto change) {
    PacketReport r = exampleReport(), back;
    change(r);
    const Status status = decodePacketReport(encodePacketReport(r, 1200), back);
    CHECK_EQ(status.code(), StatusCode::kProtocol);
    CHECK_CONTAINS(status.message(), what);
  };
  using R = PacketReport;
  refused("range of objects", [](R& r) { r.complete[0] = {41, 44}; });
  refused("range of objects", [](R& r) { r.complete[0] = {44, 43}; });
  refused("range of objects", [](R& r) { r.complete.push_back({44, 50}); });
  refused("range of symbols", [](R& r) { r.wanted[0].indices[0] = {1, 0}; });
  refused("range of symbols", [](R& r) { r.wanted[0].indices[0] = {0, 7}; });
  // A thousand times all symbols of one object would keep us busy.
  refused("wanted object", [](R& r) { r.wanted[1].object = 42; });
  refused("wanted object", [](R& r) { r.wanted[1].object = 41; });
  refused("wanted object", [](R& r) { r.wanted[0].object = 0; });
  const auto good = encodePacketReport(exampleReport(), 1200);
  PacketReport back;
  for (size_t n = 0; n < good.size(); ++n) {
    CHECK(!decodePacketReport(std::span(good).first(n), back).ok());
  }
  auto longer = good;
  longer.push_back(std::byte(0));
  CHECK_CONTAINS(decodePacketReport(longer, back).message(), "behind");
  // More ranges than the packet has bytes.
  auto many = good;
  many[kReportHeaderBytes + 16 + 8] = std::byte(200);
  CHECK_CONTAINS(decodePacketReport(many, back).message(), "ranges");
  std::vector<std::byte> probe(kProbeBytes);
  PacketProbe p;
  encodeProbe(p, probe.data());
  CHECK(decodeProbe(probe, p).ok());
  CHECK(!decodeProbe(std::span(probe).first(kProbeBytes - 1), p).ok());
  CHECK(!decodeProbe({}, p).ok());
  probe[0] = std::byte(3);
  CHECK(!decodeProbe(probe, p).ok());
  PacketType type{};
  CHECK(!packetType({}, type).ok());
}

// What the receiver indexes by must be in range whenever decode is content.
void checkRanges(std::span<const std::byte> packet) {
  SymbolHeader h;
  std::span<const std::byte> symbol;
  if (decodeSymbol(packet, h, symbol).ok()) {
    CHECK(h.count >= 1 && h.count <= kMaxPieces);
    CHECK(h.pieceBytes >= kMinPieceBytes && h.pieceBytes <= kMaxPieceBytes);
    CHECK_EQ(h.pieceBytes % kPieceUnit, 0u);
    CHECK(uint64_t(h.count) * h.pieceBytes >= h.objectBytes);
    CHECK(uint64_t(h.count - 1) * h.pieceBytes < h.objectBytes);
    CHECK(h.coded <= h.count);
    CHECK(h.must + h.mayMiss <= h.count);
    const uint32_t repair = uint32_t(h.blocks) * h.parityPerBlock;
    CHECK(repair <= kMaxRepairSymbols);
    if (h.parityPerBlock > 0) {
      CHECK(h.blocks >= 1 && h.blocks <= h.coded);
      const uint32_t data = (h.coded + h.blocks - 1u) / h.blocks;
      CHECK(data + h.parityPerBlock <= 255);
    } else {
      CHECK(!h.repair && h.blocks == 0 && h.coded == 0);
    }
    if (h.type == PacketType::kSymbol) {
      CHECK_EQ(symbol.size(), symbolBytes(h));
      CHECK(symbol.size() >= 1 && symbol.size() <= h.pieceBytes);
      CHECK(h.index < (h.repair ? repair : h.count));
      CHECK(h.repair || h.position < h.count);
    } else {
      CHECK(symbol.empty());
    }
  }
  PacketReport r;
  if (decodePacketReport(packet, r).ok()) {
    uint64_t object = r.completeUpTo;
    for (const auto& [first, last] : r.complete) {
      CHECK(first > object && last >= first);
      object = last;
    }
    uint64_t wanted = 0;
    for (const WantedSymbols& w : r.wanted) {
      CHECK(w.object > wanted);
      wanted = w.object;
      int index = -1;
      for (const auto& [first, last] : w.indices) {
        CHECK(first > index && last >= first);
        index = last;
      }
    }
  }
  PacketProbe p;
  (void)decodeProbe(packet, p);
}

TEST(packet_random_bytes_give_nothing_out_of_range) {
  forSeeds(20'000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<std::byte> packet(prng.below(400));
    for (auto& b : packet) { // small numbers fit more often
      b = static_cast<std::byte>(
          prng.chance(0.7) ? prng.below(3) : prng.next());
    }
    checkRanges(packet);
  });
}

TEST(packet_flipped_bits_give_nothing_out_of_range) {
  forSeeds(500, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    const auto good = prng.chance(0.6)
        ? encoded(randomSymbol(prng))
        : encodePacketReport(randomReport(prng), 1200);
    checkRanges(good);
    const size_t head = std::min<size_t>(good.size(), 150);
    for (size_t bit = 0; bit < 8 * head; ++bit) {
      auto bad = good;
      bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      checkRanges(bad);
      const size_t other = prng.below(8 * head);
      bad[other / 8] ^= static_cast<std::byte>(1 << (other % 8));
      checkRanges(bad);
    }
  });
}

} // namespace
} // namespace resilient::test
