#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "tests/check.h"
#include "tests/datagram_pair.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kHeader = 96;

// What was sent, to be compared with what comes.
struct Message {
  std::vector<std::byte> header, payload;
  ObjectToSend what;
};

std::vector<std::byte> randomBytes(Prng& prng, size_t n) {
  std::vector<std::byte> bytes(n);
  for (auto& b : bytes) {
    b = static_cast<std::byte>(prng.next());
  }
  return bytes;
}

// Gradients: a few packets hold what matters.
std::vector<std::byte> gradient(Prng& prng, size_t count, float small) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const bool large = i / 400 % 37 == 5;
    values[i] = static_cast<float>(prng.uniform() + 0.01) * (large ? 1 : small);
  }
  std::vector<std::byte> bytes(count * sizeof(float));
  if (count != 0) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

std::unique_ptr<Message> makeMessage(Prng& prng, uint64_t id) {
  auto m = std::make_unique<Message>();
  m->header = randomBytes(prng, kHeader);
  std::memcpy(m->header.data(), &id, sizeof(id));
  static constexpr size_t kSizes[] = {
      0, 8, 1280, 1376, 20'000, 140'000, 600'000};
  const size_t max = kSizes[prng.below(std::size(kSizes))];
  const size_t bytes = max < 2000 ? max : prng.below(max) / 8 * 8;
  m->what.trafficClass = static_cast<TrafficClass>(prng.below(4));
  const bool tolerant = prng.chance(0.4);
  if (tolerant) {
    m->what.tolerance = {0.05f, prng.chance(0.5) ? 0.1f : 0.02f};
    m->what.dtype = DType::kFloat32;
    m->payload = gradient(prng, bytes / 4, 0.02f);
  } else {
    m->payload = randomBytes(prng, bytes);
  }
  m->what.header = m->header;
  m->what.payload = m->payload;
  return m;
}

void checkDelivery(
    const Message& m,
    const DatagramPair::Delivery& d,
    size_t pieceBytes) {
  std::vector<std::byte> expected = m.header;
  expected.insert(expected.end(), m.payload.begin(), m.payload.end());
  CHECK_EQ(d.bytes.size(), expected.size());
  size_t missing = 0;
  for (const Hole& h : d.holes) {
    CHECK(h.offset + h.bytes <= expected.size());
    CHECK(h.offset >= kHeader);
    std::memset(expected.data() + h.offset, 0, h.bytes);
    missing += (h.bytes + pieceBytes - 1) / pieceBytes;
    if (m.what.trafficClass >= TrafficClass::kGradient) {
      // What is missing is small.
      const size_t count = h.bytes / sizeof(float);
      for (size_t p = 0; p < count; p += pieceBytes / sizeof(float)) {
        const size_t n = std::min(pieceBytes / sizeof(float), count - p);
        double sum = 0;
        for (size_t i = 0; i < n; ++i) {
          float v = 0;
          std::memcpy(
              &v,
              m.payload.data() + h.offset - kHeader + (p + i) * sizeof(v),
              sizeof(v));
          sum += std::abs(v);
        }
        CHECK(sum / static_cast<double>(n) < m.what.tolerance.threshold);
      }
    }
  }
  CHECK(d.bytes == expected);
  const size_t pieces = (expected.size() + pieceBytes - 1) / pieceBytes;
  CHECK(
      static_cast<double>(missing) <=
      double(m.what.tolerance.maxLost) * static_cast<double>(pieces));
}

RecoverySchemes randomSchemes(Prng& prng) {
  RecoverySchemes schemes;
  for (RecoveryScheme& s : schemes) {
    s.kind = static_cast<RecoveryKind>(prng.below(3));
    s.code = prng.chance(0.5) ? ParityKind::kXor : ParityKind::kReedSolomon;
  }
  return schemes;
}

// Random objects both ways over a random network; all must come, once, and be
// what was sent, but for what was said that might be missing.
void runSeed(uint64_t seed) {
  Prng prng(mixBits(seed));
  DatagramLink link;
  link.bytesPerS = 1e6 * static_cast<double>(1 + prng.below(200));
  link.oneWay = std::chrono::microseconds(50 + prng.below(30'000));
  link.queueBytes = 20'000 + prng.below(4u << 20);
  static constexpr double kLosses[] = {0, 0.001, 0.01, 0.05, 0.3};
  link.loss = kLosses[prng.below(std::size(kLosses))];
  link.burst = prng.chance(0.5) ? 1 : 6;
  link.duplicate = prng.chance(0.3) ? 0.02 : 0;
  link.reorder = prng.chance(0.3) ? 0.05 : 0;
  DatagramLink back = link;
  if (prng.chance(0.2)) {
    back.loss = 0.5; // reports get lost
    back.burst = 3;
  }
  const size_t piece = prng.chance(0.5) ? 1376 : 1184;
  DatagramPair pair(
      seed, randomSchemes(prng), link, back, prng.chance(0.5) ? 1e6 : 0, piece);
  std::map<uint64_t, std::unique_ptr<Message>> sent[2];
  const int count = 3 + static_cast<int>(prng.below(20));
  TimePoint at = pair.now();
  for (int i = 0; i < count; ++i) {
    at += std::chrono::microseconds(prng.chance(0.5) ? 0 : prng.below(50'000));
    pair.at(at, [&pair, &sent, &prng] {
      const int side = prng.chance(0.8) ? 0 : 1;
      const uint64_t id = sent[side].size();
      auto m = makeMessage(prng, id);
      const ObjectToSend what = m->what;
      sent[side].emplace(id, std::move(m));
      pair.send(side, what);
    });
  }
  const bool over = pair.run(
      [&] {
        return pair.now() > at && pair.sender(0).idle() &&
            pair.sender(1).idle();
      },
      seconds(600));
  CHECK(pair.error().ok());
  CHECK(over);
  for (int side = 0; side < 2; ++side) {
    const auto& received = pair.received(1 - side);
    CHECK_EQ(received.size(), sent[side].size());
    CHECK_EQ(pair.done(side).size(), sent[side].size());
    for (const auto& d : received) {
      uint64_t id = 0;
      std::memcpy(&id, d.bytes.data(), sizeof(id));
      const auto found = sent[side].find(id);
      CHECK(found != sent[side].end());
      checkDelivery(*found->second, d, piece);
      sent[side].erase(found);
    }
  }
}

// A header and a payload that outlive what is sent of them.
struct RandomObject {
  explicit RandomObject(size_t bytes) {
    Prng prng(1);
    header = randomBytes(prng, kHeader);
    payload = randomBytes(prng, bytes);
  }
  ObjectToSend toSend() const {
    ObjectToSend what;
    what.header = header;
    what.payload = payload;
    return what;
  }

  std::vector<std::byte> header, payload;
};

TEST(datagram_delivers_exactly) {
  forSeeds(150, runSeed);
}

// Completion times of flows one after the other, in seconds, sorted.
// Paper: SMART §4.1, "sequential point-to-point flows".
struct Flows {
  RecoverySchemes schemes{};
  TrafficClass trafficClass = TrafficClass::kActivation;
  Tolerance tolerance;
  size_t bytes = 1u << 20;
  DatagramLink link;
  int count = 150;
  double spent = 0; // bytes on the wire per byte of payload
};

std::vector<double> completionTimes(Flows& f, uint64_t seed) {
  Prng prng(mixBits(seed));
  DatagramLink back = f.link;
  DatagramPair pair(seed, f.schemes, f.link, back, f.link.bytesPerS);
  const auto header = randomBytes(prng, kHeader);
  const auto payload = gradient(prng, f.bytes / sizeof(float), 0.02f);
  ObjectToSend what;
  what.header = header;
  what.trafficClass = f.trafficClass;
  what.tolerance = f.tolerance;
  what.dtype = DType::kFloat32;
  std::vector<double> times;
  // Chunks as a channel makes them.
  constexpr size_t kChunk = 512u << 10;
  uint64_t before = 0;
  const int warm = 30; // until the loss is known
  for (int i = 0; i < f.count + warm; ++i) {
    if (i == warm) {
      before = pair.wireBytes(0);
    }
    const size_t had = pair.received(1).size();
    const TimePoint begun = pair.now();
    size_t chunks = 0;
    for (size_t at = 0; at < payload.size(); at += kChunk, ++chunks) {
      what.payload =
          std::span(payload).subspan(at, std::min(kChunk, payload.size() - at));
      pair.send(0, what);
    }
    CHECK(pair.run(
        [&] { return pair.received(1).size() == had + chunks; }, seconds(60)));
    if (i >= warm) {
      times.push_back(toSeconds(pair.now() - begun));
    }
    CHECK(pair.runUntilIdle(seconds(60)));
    pair.received(1).clear();
  }
  f.spent = static_cast<double>(pair.wireBytes(0) - before) /
      static_cast<double>(payload.size()) / f.count;
  std::sort(times.begin(), times.end());
  return times;
}

double p99(Flows f, uint64_t seed) {
  const auto times = completionTimes(f, seed);
  return times[times.size() * 99 / 100];
}

// 1 MiB over 1 Gbit/s and 20 ms, random loss and bursts: what tolerates losses
// takes hardly longer than without, and so does what is exact, by parity.
// Paper: SMART §4.1, Figures 3 and 4.
TEST(datagram_loss_costs_little_time) {
  Flows exact;
  exact.trafficClass = TrafficClass::kGradient;
  Flows activation;
  activation.tolerance = {0, 0.01f};
  Flows gradients;
  gradients.trafficClass = TrafficClass::kGradient;
  gradients.tolerance = {0.05f, 0.2f};
  Flows repeat;
  for (RecoveryScheme& s : repeat.schemes) {
    s.kind = RecoveryKind::kSelectiveRepeat;
  }
  const double lossless = p99(repeat, 1);
  for (const double loss : {0.01, 0.02}) {
    for (const double burst : {1.0, 6.0}) {
      for (Flows* f : {&exact, &activation, &gradients, &repeat}) {
        f->link.loss = loss;
        f->link.burst = burst;
      }
      CHECK(p99(activation, 2) < 1.2 * lossless);
      CHECK(p99(gradients, 2) < 1.2 * lossless);
      if (burst == 1) {
        CHECK(p99(exact, 2) < 1.2 * lossless);
      }
      CHECK(p99(repeat, 2) > 2 * lossless);
    }
  }
}

// What may be missing must not make anybody wait longer: where bursts take more
// of a short message than may be missing, it has the parity of an exact one.
TEST(datagram_tolerance_never_costs_time) {
  for (const size_t bytes : {256u << 10, 1u << 20}) {
    for (const double loss : {0.01, 0.02, 0.05}) {
      Flows exact;
      exact.trafficClass = TrafficClass::kGradient;
      exact.bytes = bytes;
      exact.link.loss = loss;
      exact.link.burst = 6;
      Flows tolerant = exact;
      tolerant.tolerance = {0.05f, 0.1f};
      CHECK(p99(tolerant, 3) < 1.1 * p99(exact, 3));
      completionTimes(exact, 4);
      completionTimes(tolerant, 4);
      CHECK(tolerant.spent < exact.spent);
    }
  }
}

// Over a new path, whose loss is not known yet: some of these objects of
// activations come with holes, if they may.
size_t objectsWithHoles(Tolerance tolerance, float value) {
  DatagramLink link;
  link.loss = 0.1;
  DatagramPair pair(7, RecoverySchemes{}, link, link);
  Prng prng(7);
  const auto header = randomBytes(prng, kHeader);
  std::vector<float> values(50'000, 1);
  values[12'345] = value;
  ObjectToSend what;
  what.header = header;
  what.payload = std::as_bytes(std::span(values));
  what.trafficClass = TrafficClass::kActivation;
  what.tolerance = tolerance;
  what.dtype = DType::kFloat32;
  for (int i = 0; i < 20; ++i) {
    pair.send(0, what);
  }
  CHECK(pair.runUntilIdle(seconds(60)));
  CHECK_EQ(pair.received(1).size(), size_t(20));
  return static_cast<size_t>(std::count_if(
      pair.received(1).begin(),
      pair.received(1).end(),
      [](const DatagramPair::Delivery& d) { return !d.holes.empty(); }));
}

// On a slow link a message is many small objects, of which the bound of each
// alone is less than a packet.
TEST(datagram_bound_is_that_of_the_whole_message) {
  DatagramLink link;
  link.loss = 0.1;
  DatagramPair pair(7, RecoverySchemes{}, link, link);
  Prng prng(7);
  const auto header = randomBytes(prng, kHeader);
  const std::vector<float> values(400'000, 1);
  constexpr size_t kObject = 20u << 10;
  constexpr float kBound = 0.02f;
  ObjectToSend what;
  what.header = header;
  what.trafficClass = TrafficClass::kGradient;
  what.tolerance = {2, kBound};
  what.dtype = DType::kFloat32;
  const auto message = std::as_bytes(std::span(values));
  for (size_t at = 0; at < message.size(); at += kObject) {
    what.offset = at;
    what.payload = message.subspan(at, std::min(kObject, message.size() - at));
    pair.send(0, what);
  }
  CHECK(pair.runUntilIdle(seconds(60)));
  size_t missing = 0;
  for (const DatagramPair::Delivery& d : pair.received(1)) {
    for (const Hole& hole : d.holes) {
      missing += hole.bytes;
    }
  }
  CHECK(missing > 0);
  CHECK(static_cast<double>(missing) <= kBound * double(message.size()));
}

// Zeros must not hide from the next stage that the training diverges.
TEST(datagram_activations_that_are_not_finite_are_exact) {
  CHECK(objectsWithHoles({0, 0.2f}, 1) > 0);
  CHECK_EQ(objectsWithHoles({}, 1), size_t(0));
  CHECK_EQ(objectsWithHoles({0, 0.2f}, std::nanf("")), size_t(0));
  CHECK_EQ(objectsWithHoles({0, 0.2f}, HUGE_VALF), size_t(0));
}

// Paper: SMART §3.2: early layers, which are exact, get more parity than late
// ones, of which a part may be missing.
TEST(datagram_parity_is_less_where_some_may_be_missing) {
  Flows exact;
  exact.link.loss = 0.005;
  exact.count = 30;
  Flows late = exact;
  late.tolerance = {0, 0.05f};
  completionTimes(exact, 3);
  completionTimes(late, 3);
  CHECK(late.spent < exact.spent - 0.02);
}

// The parity of one block of 200 symbols protects them as well as that of two
// blocks of 100, which is more.
TEST(datagram_blocks_are_large_where_that_is_less_parity) {
  Flows flows;
  flows.link.loss = 0.05;
  flows.bytes = 8u << 20;
  flows.count = 20;
  completionTimes(flows, 3);
  CHECK(flows.spent < 1.235); // 1.26 with blocks of 100
}

// On a link that loses nothing, activations pay for a first loss only: one
// symbol of a block, which repairs it without a repeat. After losses they have
// their usual share again.
TEST(datagram_parity_of_activations_fades_where_nothing_is_lost) {
  const DatagramLink link;
  DatagramPair pair(3, RecoverySchemes{}, link, link, link.bytesPerS);
  Prng prng(3);
  const auto header = randomBytes(prng, kHeader);
  const auto payload = randomBytes(prng, 512u << 10);
  ObjectToSend what;
  what.header = header;
  what.payload = payload;
  // Repair symbols for each data symbol of some messages.
  const auto ratio = [&](int messages) {
    const SenderCounters before = pair.sender(0).counters();
    for (int i = 0; i < messages; ++i) {
      pair.send(0, what);
      CHECK(pair.runUntilIdle(seconds(10)));
    }
    const SenderCounters& after = pair.sender(0).counters();
    return static_cast<double>(after.repairSymbols - before.repairSymbols) /
        static_cast<double>(after.dataSymbols - before.dataSymbols);
  };
  CHECK(ratio(5) > 0.09);
  ratio(500); // the doubt is 0 then
  const double clean = ratio(20);
  CHECK(clean > 0.004 && clean < 0.025);
  pair.link(0).loss = 0.002;
  ratio(5);
  CHECK(pair.receiver(1).counters().recovered > 0);
  CHECK(ratio(20) > 0.08);
}

// How long a sender is stuck at most behind a silence of five seconds.
Nanos stuckBehindASilence(uint64_t seed) {
  DatagramLink link;
  link.loss = 0.3;
  DatagramPair pair(seed, RecoverySchemes{}, link, link);
  PacketSender& sender = pair.sender(0);
  const RandomObject object(512u << 10);
  ObjectToSend what = object.toSend();
  Nanos longest{};
  // Of a path that is not silent.
  const auto stuckFor = [&] {
    return sender.idle() ||
            pair.now() - sender.waitingSince() > milliseconds(200)
        ? Nanos(0)
        : pair.now() - sender.stuckSince();
  };
  const auto transfer = [&] {
    longest = Nanos(0);
    for (int i = 0; i < 10; ++i) {
      pair.send(0, what);
    }
    return pair.run(
        [&] {
          longest = std::max(longest, stuckFor());
          return sender.idle();
        },
        seconds(60));
  };
  CHECK(transfer());
  CHECK(longest < milliseconds(500)); // much loss is something else
  pair.link(0).mtu = 1000;
  CHECK(!transfer());
  CHECK(longest > seconds(58));
  // As is a silence.
  pair.link(0).mtu = SIZE_MAX;
  CHECK(pair.runUntilIdle(seconds(60)));
  for (const auto& [after, mtu] :
       {std::pair(milliseconds(30), size_t(0)),
        std::pair(milliseconds(5000), SIZE_MAX)}) {
    pair.at(pair.now() + after, [&pair, mtu = mtu] {
      pair.link(0).mtu = pair.link(1).mtu = mtu;
    });
  }
  CHECK(transfer());
  return longest;
}

// Small packets pass, and are answered: only the pieces tell that the network
// does not carry them any more.
TEST(datagram_sender_notices_that_only_small_packets_pass) {
  int late = 0; // with 1 of 24 seeds
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    late += stuckBehindASilence(seed) >= milliseconds(500);
  }
  CHECK(late <= 1);
}

// Nothing but small packets passes for some time, and many of those are lost:
// the window is full of lost pieces. The reports go on to ask for pieces, which
// must not keep the sender from asking in turn what has come.
TEST(datagram_goes_on_when_large_packets_pass_again) {
  forSeeds(40, [](uint64_t seed) {
    DatagramLink link;
    link.loss = 0.3;
    DatagramPair pair(seed, RecoverySchemes{}, link, link);
    const RandomObject object(512u << 10);
    ObjectToSend what = object.toSend();
    const auto send = [&] {
      for (int i = 0; i < 10; ++i) {
        pair.send(0, what);
      }
    };
    send();
    CHECK(pair.runUntilIdle(seconds(60)));
    pair.link(0).mtu = 1000;
    send();
    CHECK(!pair.runUntilIdle(seconds(20)));
    pair.link(0).mtu = SIZE_MAX;
    CHECK(pair.runUntilIdle(seconds(20)));
  });
}

// Nor do the reports about what comes the other way pass for pieces, large as
// they are when they ask for much.
TEST(datagram_reports_do_not_hide_that_no_piece_arrives) {
  DatagramLink link;
  DatagramPair pair(1, RecoverySchemes{}, link, link);
  const RandomObject object(40u << 10);
  ObjectToSend what = object.toSend();
  const auto sendBothWays = [&] {
    for (int i = 0; i < 100; ++i) {
      pair.send(0, what);
      pair.send(1, what);
    }
  };
  sendBothWays();
  CHECK(pair.runUntilIdle(seconds(60)));
  pair.link(0).mtu = pair.link(1).mtu = 1000;
  const TimePoint begun = pair.now();
  sendBothWays();
  CHECK(!pair.runUntilIdle(seconds(10)));
  for (const int side : {0, 1}) {
    CHECK(pair.sender(side).stuckSince() - begun < milliseconds(100));
    CHECK(pair.now() - pair.sender(side).waitingSince() < milliseconds(200));
  }
}

// Nor do short objects, which pass, nor the end of a long one.
TEST(datagram_short_objects_do_not_hide_that_no_long_packet_arrives) {
  DatagramPair pair(1, RecoverySchemes{}, {}, {});
  const RandomObject large(4 * 1376 + 100), small(200);
  ObjectToSend much = large.toSend(), little = small.toSend();
  const auto send = [&](int i) {
    pair.send(0, little);
    if (i % 10 == 0) {
      pair.send(0, much);
    }
  };
  const auto sendForASecond = [&] {
    for (int i = 0; i < 1000; ++i) {
      pair.at(pair.now() + milliseconds(i), [&, i] { send(i); });
    }
  };
  PacketSender& sender = pair.sender(0);
  sendForASecond();
  CHECK(pair.run([&] { return pair.done(0).size() == 1100; }, seconds(60)));
  CHECK(sender.stuckSince() == kNever);
  pair.link(0).mtu = 1000;
  const TimePoint begun = pair.now();
  sendForASecond();
  CHECK(!pair.run([&] { return pair.done(0).size() == 2200; }, seconds(2)));
  CHECK(pair.done(0).size() > 1110); // short ones
  CHECK(sender.stuckSince() - begun < milliseconds(100));
  CHECK(pair.now() - sender.waitingSince() < milliseconds(200));
}

// And as long as only short objects wait, no long packet is expected.
TEST(datagram_sender_of_short_objects_waits_for_no_long_packet) {
  DatagramPair pair(1, RecoverySchemes{}, {}, {});
  const RandomObject object(200);
  ObjectToSend what = object.toSend();
  for (int i = 0; i < 1000; ++i) {
    pair.at(pair.now() + milliseconds(i), [&] { pair.send(0, what); });
  }
  CHECK(pair.run(
      [&] {
        CHECK(pair.sender(0).stuckSince() == kNever);
        return pair.done(0).size() == 1000;
      },
      seconds(60)));
}

// The zeros behind the last piece are not sent. A single long piece is sent
// whole, so that its length is that of others.
TEST(datagram_padding_is_not_sent) {
  constexpr size_t kPiece = 1376;
  constexpr size_t kOnWire = kSymbolHeaderBytes + 60; // beside the symbol
  struct Case {
    size_t bytes, ofData, ofParity; // the object, and what its symbols have
  };
  for (const Case& c :
       {Case{kHeader + 8, kHeader + 8, kHeader + 8},
        Case{kShortBytes, kShortBytes, kShortBytes},
        Case{kShortBytes + 8, kPiece, kPiece},
        Case{kPiece, kPiece, kPiece},
        Case{kPiece + 8, kPiece + 8, kPiece},
        Case{3 * kPiece, 3 * kPiece, kPiece}}) {
    DatagramPair pair(1, RecoverySchemes{}, {}, {}, 0, kPiece);
    const RandomObject object(c.bytes - kHeader);
    ObjectToSend what = object.toSend();
    what.trafficClass = TrafficClass::kActivation;
    pair.send(0, what);
    CHECK(pair.runUntilIdle(seconds(5)));
    const SenderCounters& sent = pair.sender(0).counters();
    CHECK(sent.repairSymbols > 0 && sent.retransmitted == 0);
    CHECK_EQ(
        sent.bytes,
        sent.packets * kOnWire + c.ofData + sent.repairSymbols * c.ofParity);
  }
}

// Without a loss, what is predicted is what is sent, ENDs aside.
TEST(datagram_sender_knows_what_its_objects_cost) {
  DatagramPair pair(1, RecoverySchemes{}, {}, {});
  PacketSender& sender = pair.sender(0);
  CHECK_EQ(sender.overhead(), 0);
  const RandomObject small(100), large(100'000);
  ObjectToSend little = small.toSend(), much = large.toSend();
  pair.send(0, little);
  CHECK(pair.runUntilIdle(seconds(5)));
  CHECK_EQ(sender.overhead(), 0);
  const uint64_t before = sender.counters().bytes;
  for (int i = 0; i < 20; ++i) {
    pair.send(0, much);
  }
  CHECK(pair.runUntilIdle(seconds(5)));
  const double sent = static_cast<double>(sender.counters().bytes - before);
  const double bytes = 20 * (100'000 + kHeader);
  CHECK(sender.overhead() > 1.07);
  CHECK(std::abs(sender.overhead() - sent / bytes) < 0.02);
}

// A second without anything to send.
void rest(DatagramPair& pair) {
  pair.at(pair.now() + seconds(1), [] {});
  CHECK(!pair.run([] { return false; }, seconds(1)));
}

// A host hands over what has arrived four times as fast as the link carries it,
// again and again. The link is not faster for that.
TEST(datagram_clumps_are_not_taken_for_a_fast_link) {
  DatagramLink there, back;
  there.clump = milliseconds(20);
  DatagramPair pair(1, RecoverySchemes{}, there, back, there.bytesPerS);
  const RandomObject object(512u << 10);
  ObjectToSend what = object.toSend();
  double most = 0;
  for (int burst = 0; burst < 20; ++burst) {
    for (int i = 0; i < 32; ++i) {
      pair.send(0, what);
    }
    CHECK(pair.runUntilIdle(seconds(10)));
    most = std::max(most, pair.sender(0).rate().capacityBytesPerS());
    rest(pair);
  }
  CHECK(most < 1.6 * there.bytesPerS);
  CHECK(most > 0.9 * there.bytesPerS);
}

// A provider polices UDP: the link carries a hundredth of what is expected of
// it, or of what it carried before. All of the message is soon on its way, and
// most of it is lost. Retransmissions then leave at the rate of the link.
TEST(datagram_retransmissions_follow_the_rate_of_the_link) {
  DatagramLink policed;
  policed.bytesPerS = 1.25e6;
  policed.queueBytes = 1u << 20;
  for (const bool expected : {true, false}) {
    DatagramPair pair(
        1,
        RecoverySchemes{},
        expected ? policed : DatagramLink(),
        DatagramLink(),
        expected ? 125e6 : 0);
    const RandomObject object(512u << 10);
    ObjectToSend what = object.toSend();
    const auto transfer = [&] {
      for (int i = 0; i < 8; ++i) {
        pair.send(0, what);
      }
      CHECK(pair.runUntilIdle(seconds(60)));
      rest(pair);
    };
    for (int i = 0; i < 8 && !expected; ++i) {
      transfer();
    }
    pair.link(0) = policed;
    const TimePoint begun = pair.now();
    const uint64_t before = pair.wireBytes(0);
    transfer();
    const double bytes = 8.0 * (512 << 10);
    // Once for all that was on its way at first, once at the rate of the link.
    const double most = expected ? 2.3 : 2.7;
    CHECK(static_cast<double>(pair.wireBytes(0) - before) < most * bytes);
    CHECK(toSeconds(pair.now() - begun) < 2 * bytes / policed.bytesPerS);
  }
}

// The last packet before a rest has waited behind those of others. The burst
// after it shows the rate of the link all the same.
TEST(datagram_queue_before_a_rest_makes_no_link_faster) {
  DatagramLink link;
  link.oneWay = milliseconds(5);
  DatagramPair pair(1, RecoverySchemes{}, link, link);
  const RandomObject object(512u << 10), small(1000);
  double most = 0;
  for (int burst = 0; burst < 20; ++burst) {
    for (int i = 0; i < 8; ++i) {
      pair.send(0, object.toSend());
    }
    CHECK(pair.runUntilIdle(seconds(10)));
    most = std::max(most, pair.sender(0).rate().capacityBytesPerS());
    rest(pair);
    pair.link(0).oneWay = milliseconds(burst % 2 == 0 ? 13 : 5);
    pair.send(0, small.toSend());
    CHECK(pair.runUntilIdle(seconds(10)));
    pair.link(0).oneWay = milliseconds(5);
    rest(pair);
  }
  CHECK(most < 1.08 * link.bytesPerS);
}

// Nothing but small bursts with rests between them: each shows that the link
// carries as much as it was given.
TEST(datagram_path_learns_from_small_bursts) {
  const DatagramLink link;
  DatagramPair pair(1, RecoverySchemes{}, link, link);
  const RandomObject object(64u << 10);
  ObjectToSend what = object.toSend();
  double tookS = 0;
  for (int burst = 0; burst < 8; ++burst) {
    const TimePoint begun = pair.now();
    pair.send(0, what);
    CHECK(pair.runUntilIdle(seconds(10)));
    tookS = toSeconds(pair.received(1).back().at - begun);
    rest(pair);
  }
  CHECK(tookS < 0.025); // 0.0205 at the rate of the link
}

// The peer's burst comes at the same time, as in an all_reduce, and the answer
// to it leaves before the first report is back: the rate of the burst does not
// count to that answer, half a round trip later.
TEST(datagram_path_learns_from_bursts_that_are_answered) {
  const DatagramLink link;
  DatagramPair pair(1, RecoverySchemes{}, link, link);
  const RandomObject object(64u << 10), answer(2u << 10);
  double tookS = 0;
  for (int burst = 0; burst < 8; ++burst) {
    const TimePoint begun = pair.now();
    const size_t before = pair.received(1).size();
    pair.send(0, object.toSend());
    pair.at(begun + milliseconds(25), [&] { pair.send(0, answer.toSend()); });
    CHECK(pair.runUntilIdle(seconds(10)));
    tookS = toSeconds(pair.received(1)[before].at - begun);
    rest(pair);
  }
  CHECK(tookS < 0.022); // 0.0205 at the rate of the link
}

// The peer has counted them among the packets that have arrived, but has not
// told before the burst.
TEST(datagram_reports_count_to_no_burst) {
  const auto learns = [](bool reports) {
    const DatagramLink link;
    DatagramPair pair(1, RecoverySchemes{}, link, link);
    const RandomObject object(64u << 10);
    ObjectToSend what = object.toSend();
    const auto transfer = [&](int side, int count) {
      for (int i = 0; i < count; ++i) {
        pair.send(side, what);
      }
      CHECK(pair.runUntilIdle(seconds(60)));
      rest(pair);
    };
    transfer(0, 1);
    transfer(1, reports ? 400 : 0);
    transfer(0, 1);
    return pair.sender(0).rate().capacityBytesPerS();
  };
  CHECK(learns(true) < 1.1 * learns(false));
}

// On a long way, as at a relay: an answer takes so long that each message would
// be followed by more descriptions of its end than it has packets.
TEST(datagram_stream_of_small_messages_has_few_ends) {
  DatagramLink link;
  link.oneWay = milliseconds(320);
  DatagramPair pair(1, RecoverySchemes{}, link, link, link.bytesPerS);
  const RandomObject object(4u << 10);
  constexpr int kCount = 100;
  const TimePoint begun = pair.now();
  for (int i = 0; i < kCount; ++i) {
    pair.at(
        begun + milliseconds(4 * i), [&] { pair.send(0, object.toSend()); });
  }
  CHECK(pair.run(
      [&] { return pair.received(1).size() == size_t{kCount}; }, seconds(60)));
  CHECK(pair.runUntilIdle(seconds(60)));
  const SenderCounters& sent = pair.sender(0).counters();
  const uint64_t ends = sent.packets - sent.dataSymbols - sent.repairSymbols;
  CHECK(ends >= kCount);
  CHECK(ends < 2 * kCount);
}

// The first bursts find out the rate, and drop some packets in doing so. These
// drops are no reason for parity. Both ends send: reports of drops come behind
// the queue of the other direction, all at once, the last of them as soon as
// there was none.
TEST(datagram_drops_of_a_queue_ask_for_no_parity) {
  test::forSeeds(20, [](uint64_t seed) {
    DatagramLink link;
    link.bytesPerS = 12.5e6;
    link.queueBytes = (200u << 10) + 20'000 * seed;
    DatagramPair pair(seed, RecoverySchemes{}, link, link);
    const RandomObject object(128u << 10);
    ObjectToSend what = object.toSend();
    for (int burst = 0; burst < 4; ++burst) {
      for (int i = 0; i < 8; ++i) {
        pair.send(0, what);
        pair.send(1, what);
      }
      CHECK(pair.runUntilIdle(seconds(10)));
      rest(pair);
    }
    const SenderCounters& counters = pair.sender(0).counters();
    CHECK(counters.lost > 100);
    CHECK_EQ(counters.unqueuedLost, 0u);
  });
}

// A path that rests for long, as during an evaluation, is as fast afterwards:
// no clock that wraps and no old measurement slows it.
TEST(datagram_path_is_fast_after_a_rest) {
  DatagramLink link;
  link.bytesPerS = 25e6;
  DatagramPair pair(1, RecoverySchemes{}, link, link);
  const RandomObject object(512u << 10);
  ObjectToSend what = object.toSend();
  what.trafficClass = TrafficClass::kBulk;
  const auto transfer = [&] {
    const TimePoint begun = pair.now();
    for (int i = 0; i < 40; ++i) {
      pair.send(0, what);
    }
    CHECK(pair.runUntilIdle(seconds(600)));
    return toSeconds(pair.now() - begun);
  };
  transfer();
  const double before = transfer();
  for (const auto rest : {seconds(61), seconds(4295)}) {
    pair.at(pair.now() + rest, [] {});
    CHECK(!pair.run([] { return false; }, rest + seconds(1)));
    CHECK(transfer() < 1.3 * before);
  }
}

} // namespace
} // namespace resilient::test
