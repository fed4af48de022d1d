#include "tests/fuzz/packet_feed.h"

#include <vector>

#include "base/random.h"
#include "tests/check.h"

// The fuzzer's target on seeded random input, and what a hostile peer would
// try first: none of it may crash, run for long, or take more memory than it
// may. A failure of the feed aborts; sanitizers see more.

namespace resilient::test {
namespace {

using std::chrono::milliseconds;

TEST(packet_feed_random_packets) {
  forSeeds(3000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<uint8_t> input(1 + prng.below(800));
    for (uint8_t& b : input) {
      b = static_cast<uint8_t>(prng.chance(0.7) ? prng.below(4) : prng.next());
    }
    input[0] = 0;
    PacketFeed(input).run();
  });
}

TEST(packet_feed_random_programs) {
  uint64_t delivered = 0, failed = 0, all = 0;
  forSeeds(5000, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<uint8_t> program(1 + prng.below(2500));
    for (uint8_t& b : program) {
      // Without the largest, nothing is a lie.
      b = static_cast<uint8_t>(
          prng.chance(0.99) ? prng.below(240) : prng.next());
    }
    program[0] = 1;
    PacketFeed feed(program);
    feed.run();
    delivered += feed.delivered();
    failed += feed.failed();
    ++all;
  });
  // The programs do reach something, both ends of it.
  CHECK(all < 100 || (delivered > all && failed > 0 && failed < all));
}

// --- what a hostile peer would try first

struct Receiving {
  explicit Receiving(uint64_t max)
      : receiver(
            max,
            [this](std::span<const std::byte> o, std::span<const Hole> h) {
              bytes += o.size();
              holes.emplace_back(h.begin(), h.end());
            }) {}
  Status give(const SymbolHeader& h) {
    const std::vector<std::byte> symbol(symbolBytes(h), std::byte(7));
    CHECK(receiver.onNumber(++packet, symbol.size() + 100, now));
    return receiver.onSymbol(h, symbol, packet, now);
  }
  PacketReceiver receiver;
  uint64_t packet = 0, bytes = 0;
  std::vector<std::vector<Hole>> holes;
  TimePoint now{std::chrono::seconds(5)};
};

SymbolHeader describe(uint64_t object, uint16_t count) {
  SymbolHeader h;
  h.object = object;
  h.count = count;
  h.pieceBytes = 256;
  h.objectBytes = uint32_t(count) * 256;
  h.must = count;
  return h;
}

TEST(packet_receiver_keeps_to_its_memory) {
  constexpr uint64_t kMax = 120 * 256;
  Receiving r(kMax);
  // Objects that do not end, and parity that repairs nothing: two symbols are
  // missing for each. The first object has room, and some of its parity.
  const auto symbol = [](uint64_t object, bool repair, uint16_t index) {
    SymbolHeader h = describe(object, 90);
    h.coded = 90;
    h.blocks = 1;
    h.parityKind = 1;
    h.parityPerBlock = 45;
    h.repair = repair;
    h.index = h.position = index;
    return h;
  };
  for (uint64_t object = 1; object <= 40; ++object) {
    for (uint16_t i = 0; i < 45; ++i) {
      CHECK_EQ(r.give(symbol(object, true, i)).toString(), "ok");
      CHECK(r.receiver.heldBytes() <= kMax);
    }
  }
  CHECK_EQ(r.receiver.heldBytes(), kMax);
  CHECK_EQ(r.bytes, 0u);
  // It goes on all the same: the first object comes whole, with what is kept.
  for (uint16_t i = 0; i < 90 && r.bytes == 0; ++i) {
    CHECK_EQ(r.give(symbol(1, false, i)).toString(), "ok");
  }
  CHECK_EQ(r.bytes, 90u * 256);
  CHECK_EQ(r.receiver.heldBytes(), 0u);
}

TEST(packet_receiver_refuses_objects_far_ahead) {
  Receiving r(1u << 30);
  CHECK(r.give(describe(1u << 20, 1)).ok());
  CHECK(r.give(describe(UINT64_MAX, 1)).ok());
  CHECK_EQ(r.receiver.heldBytes(), 0u);
  CHECK_EQ(r.bytes, 0u);
  CHECK(r.give(describe(1, 1)).ok());
  CHECK_EQ(r.bytes, 256u);
}

TEST(packet_receiver_refuses_another_description) {
  const auto refused = [](auto change) {
    Receiving r(1u << 20);
    SymbolHeader h = describe(1, 10);
    h.must = 5;
    CHECK(r.give(h).ok());
    change(h);
    CHECK_EQ(r.give(h).code(), StatusCode::kProtocol);
    CHECK_EQ(r.bytes, 0u);
  };
  refused([](SymbolHeader& h) { h.objectBytes -= 1; });
  refused([](SymbolHeader& h) { h.must = 6; });
  refused([](SymbolHeader& h) { h.mayMiss = 1; });
  refused([](SymbolHeader& h) { h.permuted = true; });
  refused([](SymbolHeader& h) {
    h.type = PacketType::kEnd;
    h.count = 9;
    h.objectBytes = 9 * 256;
  });
  // Two symbols of one piece.
  Receiving r(1u << 20);
  SymbolHeader h = describe(1, 10);
  h.permuted = true;
  CHECK(r.give(h).ok());
  h.index = 1;
  CHECK_EQ(r.give(h).code(), StatusCode::kProtocol);
}

// Nothing but the first symbol of a large object that may lack all others.
TEST(packet_receiver_gives_holes_within_the_object) {
  Receiving r(64u << 20);
  SymbolHeader h = describe(1, 60000);
  h.objectBytes -= 255; // one byte of the last piece
  h.must = 0;
  h.mayMiss = 60000;
  h.index = h.position = 1;
  CHECK(r.give(h).ok());
  h.type = PacketType::kEnd;
  CHECK(r.give(h).ok());
  r.now += milliseconds(100);
  r.receiver.onTimer(r.now);
  CHECK_EQ(r.bytes, h.objectBytes);
  const std::vector<Hole> expected = {{0, 256}, {512, h.objectBytes - 512}};
  CHECK(r.holes.at(0) == expected);
  CHECK_EQ(r.receiver.heldBytes(), 0u);
}

// A path whose socket is full waits for verdicts only, and each once.
TEST(packet_receiver_names_the_next_verdict_apart_from_reports) {
  Receiving r(1u << 20);
  SymbolHeader exact = describe(1, 10), tolerant = describe(2, 10);
  exact.must = 10;
  tolerant.must = 1;
  tolerant.mayMiss = 9;
  CHECK(r.give(exact).ok());
  CHECK(r.give(tolerant).ok());
  CHECK(r.receiver.nextVerdict() > r.now);
  tolerant.type = PacketType::kEnd;
  CHECK(r.give(tolerant).ok());
  CHECK(r.receiver.deadline() <= r.now); // a report is due, and does not leave
  const TimePoint verdict = r.receiver.nextVerdict();
  CHECK(verdict > r.now && verdict != kNever);
  r.now = verdict;
  r.receiver.onTimer(r.now);
  CHECK_EQ(r.bytes, tolerant.objectBytes);
  CHECK(r.receiver.deadline() <= r.now); // the exact one needs a report
  CHECK_EQ(r.receiver.nextVerdict(), kNever);
}

// One object that takes long, at 1 Gbit/s. A report for every 64 packets would
// wake the sender without need where the round trip is long.
TEST(packet_receiver_reports_some_times_in_a_round_trip) {
  constexpr uint16_t kCount = 12'800;
  struct Case {
    Nanos roundTrip;
    size_t least, most;
  };
  for (const Case& c :
       {Case{Nanos(0), 199, 201},
        Case{milliseconds(1), 199, 201},
        Case{milliseconds(40), 55, 65}, // each 2.5 ms
        Case{milliseconds(200), 28, 33}}) {
    Receiving r(64u << 20);
    SymbolHeader h = describe(1, kCount);
    h.roundTripMicros =
        static_cast<uint32_t>(c.roundTrip / std::chrono::microseconds(1));
    size_t reports = 0;
    TimePoint last = r.now;
    for (h.index = 0; h.index + 1 < kCount; ++h.index) {
      h.position = h.index;
      r.now += std::chrono::microseconds(12);
      CHECK(r.give(h).ok());
      if (r.receiver.reportDue(r.now)) {
        ++reports;
        CHECK(r.now - last < milliseconds(6));
        last = r.now;
        (void)r.receiver.takeReport(r.now);
      }
    }
    CHECK(reports >= c.least);
    CHECK(reports <= c.most);
  }
}

// A burst fits into one system call, unless the link is so fast that it would
// last less than a quarter of a millisecond.
TEST(packet_sender_sends_in_bursts) {
  constexpr double kCall = 60 << 10;
  for (const double first : {1.25e6, 60e6, 125e6}) {
    PacketSender sender(
        RecoverySchemes(),
        RateControl(milliseconds(20), first, 0),
        [](uint64_t) {});
    sender.setPieceBytes(1376);
    const std::vector<std::byte> header(96), bytes(1u << 20);
    ObjectToSend what;
    what.header = header;
    what.payload = bytes;
    TimePoint now{std::chrono::seconds(5)};
    for (int i = 0; i < 4; ++i) {
      sender.add(what, now);
    }
    uint64_t packets = 0;
    PacketToSend out;
    const auto burst = [&] {
      double sent = 0;
      while (sender.next(now, packets + 1, out)) {
        ++packets;
        sent += static_cast<double>(out.bytes() + 28); // sealed
      }
      return sent;
    };
    burst(); // makes up for a late beginning
    const double rate = sender.rate().bytesPerS();
    for (int i = 0; i < 3; ++i) {
      now = sender.nextAt();
      const double sent = burst();
      CHECK(sent <= std::max(kCall, rate * 260e-6));
      CHECK(sent >= 0.9 * std::min(50e3, rate * 500e-6));
    }
  }
}

struct Sending {
  explicit Sending(size_t payload)
      : sender(
            RecoverySchemes(),
            RateControl(milliseconds(1), 1e9, 0),
            [this](uint64_t) { ++done; }) {
    const std::vector<std::byte> header(96), bytes(payload);
    ObjectToSend what;
    what.header = header;
    what.payload = bytes;
    sender.add(what, now);
    send();
  }
  uint64_t send() { // packets
    PacketToSend out;
    uint64_t n = 0;
    while (sender.next(now, packets + 1, out)) {
      ++packets;
      ++n;
    }
    return n;
  }
  PacketSender sender;
  uint64_t packets = 0, done = 0;
  TimePoint now{std::chrono::seconds(5)};
};

// Each packet by itself would be a system call, and a wake-up at both ends.
TEST(packet_sender_waits_for_a_burst_while_much_is_to_be_sent) {
  TimePoint now{std::chrono::seconds(5)};
  PacketSender sender(
      RecoverySchemes{},
      RateControl(std::chrono::milliseconds(20), 100e6, 0),
      [](uint64_t) {});
  const std::vector<std::byte> header(96), large(360'000), small(10'000);
  ObjectToSend what;
  what.header = header;
  uint64_t packets = 0;
  PacketToSend out;
  const auto sendAt = [&](TimePoint at) {
    const uint64_t before = packets;
    while (sender.next(at, packets + 1, out)) {
      ++packets;
    }
    return packets - before;
  };
  sender.setPieceBytes(1376);
  what.payload = large;
  for (int i = 0; i < 3; ++i) {
    sender.add(what, now);
  }
  uint64_t burst = sendAt(now);
  for (int i = 0; i < 4; ++i) {
    CHECK(burst >= 30);
    const Nanos wait = sender.nextAt() - now;
    CHECK_EQ(sendAt(now + wait / 2), 0u); // a report comes
    burst = sendAt(now += wait);
  }
  now += std::chrono::seconds(1);
  what.payload = small;
  while (sender.nextAt() < kNever && sendAt(now) > 0) {
    now += std::chrono::milliseconds(1);
  }
  sender.add(what, now);
  CHECK(sendAt(now) >= 8);
  sender.add(what, now); // does not wait, and neither does the end of much
  CHECK(sendAt(now) >= 8);
}

// All parity of an object, which was not needed, is lost; meanwhile the link
// has become slow, and the window smaller than what was in flight.
TEST(packet_sender_asks_about_a_window_of_parity) {
  RecoverySchemes schemes;
  for (RecoveryScheme& s : schemes) {
    s.kind = RecoveryKind::kUniformFec;
    s.parity = s.data;
  }
  TimePoint now{std::chrono::seconds(5)};
  PacketSender sender(
      schemes,
      RateControl(std::chrono::milliseconds(20), 10e6, 0),
      [](uint64_t) {});
  const std::vector<std::byte> header(96), bytes(360'000);
  ObjectToSend what;
  what.header = header;
  what.payload = bytes;
  uint64_t packets = 0;
  PacketToSend out;
  const auto sendFor = [&](Nanos time) {
    const uint64_t before = packets;
    for (const TimePoint end = now + time; now < end;
         now += std::chrono::milliseconds(1)) {
      while (sender.next(now, packets + 1, out)) {
        ++packets;
      }
    }
    return packets - before;
  };
  sender.setPieceBytes(1376);
  sender.add(what, now);
  sender.add(what, now);
  sendFor(std::chrono::milliseconds(100));
  const uint64_t pieces = 262; // and as many of parity, but not all in flight
  CHECK(packets > pieces + 100);
  CHECK(packets < 2 * pieces);
  PacketReport r;
  const auto report = [&] {
    ++r.number;
    r.packets = r.largest;
    r.bytes = r.largest * 1500;
    r.receivedMicros += 100'000;
    CHECK(sender.onReport(r, now).ok());
  };
  for (int i = 0; i < 20; ++i) { // one packet each, in 100 ms
    ++r.largest;
    report();
    sendFor(std::chrono::milliseconds(100));
  }
  r.completeUpTo = 1;
  r.largest = pieces;
  report();
  CHECK(!sender.idle());
  CHECK(sendFor(std::chrono::seconds(2)) > 0);
}

TEST(packet_sender_bears_wild_reports) {
  Sending s(100'000);
  CHECK(s.packets > 1);
  PacketReport r;
  r.number = 1;
  CHECK(s.sender.onReport(r, s.now).ok());
  // Counts that nobody could count after, and a rate that no link has.
  r.number = 2;
  r.largest = s.packets;
  r.packets = r.bytes = r.symbols = r.lost = r.bursts = UINT64_MAX;
  r.receivedMicros = 3000;
  CHECK(s.sender.onReport(r, s.now).ok());
  CHECK(s.sender.rate().bytesPerS() <= 1e12);
  CHECK(s.sender.rate().windowBytes() < uint64_t(1) << 50);
  r.number = 3;
  r.packets = r.bytes = r.symbols = r.lost = r.bursts = 0;
  r.wanted = {{1, {{0, UINT16_MAX}}}, {2, {{0, UINT16_MAX}}}};
  CHECK(s.sender.onReport(r, s.now).ok());
  // Each once, however often it is asked for.
  const uint64_t count = (100'096 + kMinPieceBytes - 1) / kMinPieceBytes;
  for (int i = 0; i < 100; ++i) {
    ++r.number;
    CHECK(s.sender.onReport(r, s.now).ok());
  }
  s.now += milliseconds(50);
  s.send();
  CHECK(s.sender.counters().retransmitted > 0);
  CHECK(s.sender.counters().retransmitted <= count);
  CHECK_EQ(s.done, 0u);
}

TEST(packet_sender_refuses_reports_of_what_it_never_sent) {
  const auto refused = [](auto change) {
    Sending s(1000);
    PacketReport r;
    r.number = 1;
    change(r);
    CHECK_EQ(s.sender.onReport(r, s.now).code(), StatusCode::kProtocol);
    CHECK_EQ(s.done, 0u);
  };
  refused([](PacketReport& r) { r.largest = 1000; });
  refused([](PacketReport& r) { r.largest = UINT64_MAX; });
  refused([](PacketReport& r) { r.completeUpTo = 2; });
  refused([](PacketReport& r) { r.completeUpTo = UINT64_MAX; });
  refused([](PacketReport& r) { r.complete = {{1, 2}}; });
  refused([](PacketReport& r) { r.complete = {{1, UINT64_MAX}}; });
  // An older report changes nothing.
  Sending s(1000);
  PacketReport r;
  r.number = 5;
  CHECK(s.sender.onReport(r, s.now).ok());
  r.number = 4;
  r.completeUpTo = 1;
  CHECK(s.sender.onReport(r, s.now).ok());
  CHECK_EQ(s.done, 0u);
  r.number = 6;
  CHECK(s.sender.onReport(r, s.now).ok());
  CHECK_EQ(s.done, 1u);
  CHECK(s.sender.idle());
  CHECK_EQ(s.sender.heldBytes(), 0u);
  CHECK_EQ(s.sender.waitingBytes(), 0u);
}

} // namespace
} // namespace resilient::test
