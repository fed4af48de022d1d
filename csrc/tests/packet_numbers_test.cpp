#include "datagram/packet_numbers.h"

#include <algorithm>
#include <vector>

#include "base/random.h"
#include "datagram/symbol_order.h"
#include "tests/check.h"
#include "tests/datagram_pair.h"

namespace resilient::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr TimePoint kStart{std::chrono::seconds(9)};

TEST(packet_numbers_count_what_comes) {
  PacketNumbers numbers;
  CHECK(!numbers.insert(0, 100, kStart));
  for (const uint64_t n : {1, 2, 5, 6, 4}) {
    CHECK(numbers.insert(n, 100, kStart));
  }
  for (const uint64_t n : {1, 2, 4, 5, 6}) {
    CHECK(!numbers.insert(n, 100, kStart));
  }
  CHECK_EQ(numbers.largest(), 6u);
  CHECK_EQ(numbers.packets(), 5u);
  CHECK_EQ(numbers.bytes(), 500u);
  // What is missing is lost only after its time.
  numbers.advance(kStart + numbers.reorderTime() - microseconds(1));
  CHECK_EQ(numbers.lost(), 0u);
  CHECK_EQ(
      (numbers.deadline() - kStart).count(), numbers.reorderTime().count());
  numbers.advance(numbers.deadline());
  CHECK_EQ(numbers.lost(), 1u);
  CHECK_EQ(numbers.bursts(), 1u);
  CHECK_EQ(numbers.deadline(), kNever);
}

TEST(packet_numbers_count_bursts) {
  PacketNumbers numbers;
  TimePoint now = kStart;
  // Lost: 2; 4 and 5; 8, 9 and 10, told in two parts.
  for (const uint64_t n : {1, 3, 6, 7}) {
    CHECK(numbers.insert(n, 1, now));
  }
  now += milliseconds(10);
  numbers.advance(now);
  CHECK_EQ(numbers.lost(), 3u);
  CHECK_EQ(numbers.bursts(), 2u);
  CHECK(numbers.insert(11, 1, now));
  numbers.advance(now + milliseconds(10));
  CHECK_EQ(numbers.lost(), 6u);
  CHECK_EQ(numbers.bursts(), 3u);
}

TEST(packet_numbers_that_come_late_raise_the_reorder_time) {
  PacketNumbers numbers;
  numbers.setRoundTrip(milliseconds(40));
  const Nanos before = numbers.reorderTime();
  TimePoint now = kStart;
  CHECK(numbers.insert(1, 1, now));
  CHECK(numbers.insert(3, 1, now));
  // Within its time it changes nothing.
  CHECK(numbers.insert(2, 1, now + before / 2));
  CHECK_EQ(numbers.reorderTime().count(), before.count());
  CHECK(numbers.insert(5, 1, now));
  numbers.advance(now += milliseconds(100));
  CHECK_EQ(numbers.lost(), 1u);
  CHECK(numbers.insert(4, 1, now)); // not lost, but late
  CHECK_EQ(numbers.lost(), 0u);
  CHECK_EQ(numbers.packets(), 5u);
  CHECK_EQ(numbers.reorderTime().count(), 2 * before.count());
  CHECK(!numbers.insert(4, 1, now));
  // Half a round trip at most.
  for (uint64_t n = 6; n < 60; n += 2) {
    CHECK(numbers.insert(n + 1, 1, now));
    numbers.advance(now += milliseconds(100));
    CHECK(numbers.insert(n, 1, now));
  }
  CHECK_EQ(numbers.lost(), 0u);
  CHECK_EQ(numbers.reorderTime().count(), Nanos(milliseconds(20)).count());
}

TEST(packet_numbers_far_apart) {
  PacketNumbers numbers;
  CHECK(numbers.insert(1, 1, kStart));
  // All between are lost, and counting them takes no time: this once counted
  // one by one.
  const uint64_t far = uint64_t(1) << 62;
  CHECK(numbers.insert(far, 1, kStart));
  CHECK(!numbers.insert(1, 1, kStart)); // so old that nobody knows
  CHECK(!numbers.insert(2, 1, kStart));
  CHECK(!numbers.insert(far, 1, kStart));
  CHECK(numbers.insert(far - 1, 1, kStart)); // not old
  CHECK(!numbers.insert(far - 1, 1, kStart));
  numbers.advance(kStart + milliseconds(100));
  CHECK_EQ(numbers.lost(), far - 3);
  CHECK_EQ(numbers.bursts(), 1u);
  CHECK_EQ(numbers.packets(), 3u);
  CHECK(!numbers.insert(UINT64_MAX, 1, kStart));
}

// Against a set that remembers all.
TEST(packet_numbers_of_a_random_network) {
  forSeeds(200, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    PacketNumbers numbers;
    const uint64_t count = 1 + prng.below(3000);
    std::vector<bool> seen(count + 1);
    TimePoint now = kStart;
    uint64_t packets = 0, largest = 0;
    const double loss = prng.uniform() / 2;
    for (uint64_t sent = 1; sent <= count; ++sent) {
      now += microseconds(prng.below(200));
      numbers.advance(now);
      if (prng.chance(loss)) {
        continue;
      }
      const uint64_t n = prng.chance(0.1) ? 1 + prng.below(sent) : sent;
      CHECK_EQ(numbers.insert(n, 1, now), !seen[n]);
      packets += !seen[n];
      seen[n] = true;
      largest = std::max(largest, n);
      CHECK(numbers.lost() + numbers.packets() <= numbers.largest());
    }
    numbers.advance(now + std::chrono::seconds(10));
    CHECK_EQ(numbers.largest(), largest);
    CHECK_EQ(numbers.packets(), packets);
    CHECK_EQ(numbers.lost(), largest - packets);
  });
}

TEST(symbol_order_holds_each_symbol_once) {
  forSeeds(500, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    const auto count = static_cast<uint32_t>(1 + prng.below(500));
    const auto must = static_cast<uint32_t>(prng.below(count + 1));
    const auto repair =
        static_cast<uint32_t>(prng.chance(0.3) ? 0 : prng.below(100));
    const auto order = spreadOrder(count, must, repair);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    CHECK_EQ(sorted.size(), count + repair);
    for (uint32_t i = 0; i < sorted.size(); ++i) {
      CHECK_EQ(sorted[i], i);
    }
    // Those that matter leave in their order, repair symbols last, and evenly:
    // of any part of the slots they have their share, but for one.
    const double share =
        double(must + repair) / static_cast<double>(order.size());
    uint32_t important = 0, last = 0;
    for (size_t slot = 0; slot < order.size(); ++slot) {
      const uint32_t symbol = order[slot];
      if (symbol < must || symbol >= count) {
        const uint32_t place = symbol < must ? symbol : symbol - count + must;
        CHECK_EQ(place, important);
        ++important;
      } else {
        CHECK(symbol > last || last == 0);
        last = symbol;
      }
      const double due = share * static_cast<double>(slot + 1);
      CHECK(important <= due + 1e-6 && important >= due - 1 - 1e-6);
    }
  });
}

// Every packet is seen twice, the second time much later, and nothing changes:
// neither is delivered again, nor counted.
TEST(packet_receiver_ignores_replayed_packets) {
  int delivered = 0;
  PacketReceiver receiver(
      1u << 20, [&](auto, std::span<const Hole>) { ++delivered; });
  TimePoint now = kStart;
  SymbolHeader h;
  h.object = 1;
  h.count = h.must = 3;
  h.pieceBytes = 256;
  h.objectBytes = 700;
  const std::vector<std::byte> piece(256);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t n = 1; n <= 3; ++n) {
      const bool fresh = receiver.onNumber(n, 300, now);
      CHECK_EQ(fresh, round == 0);
      if (fresh) {
        h.index = h.position = static_cast<uint16_t>(n - 1);
        CHECK(receiver.onSymbol(h, piece, n, now).ok());
      }
    }
    now += milliseconds(300);
  }
  CHECK_EQ(delivered, 1);
  CHECK_EQ(receiver.counters().duplicates, 6u);
  const PacketReport r = receiver.takeReport(now);
  CHECK_EQ(r.packets, 3u);
  CHECK_EQ(r.lost, 0u);
  CHECK_EQ(r.completeUpTo, 1u);
}

// A report asks for objects in their order, those of which nothing has come
// among the others.
TEST(packet_receiver_asks_in_order) {
  PacketReceiver receiver(1u << 20, [](auto, std::span<const Hole>) {});
  SymbolHeader h;
  h.count = h.must = 2;
  h.pieceBytes = 256;
  h.objectBytes = 512;
  const std::vector<std::byte> piece(256);
  TimePoint now = kStart;
  uint64_t packet = 0;
  for (const uint64_t object : {2, 4, 6}) {
    h.object = object;
    CHECK(receiver.onNumber(++packet, 300, now));
    CHECK(receiver.onSymbol(h, piece, packet, now).ok());
  }
  now += milliseconds(50);
  receiver.onTimer(now);
  const PacketReport r = receiver.takeReport(now);
  CHECK_EQ(r.wanted.size(), 5u);
  for (uint64_t i = 0; i < 5; ++i) {
    CHECK_EQ(r.wanted[i].object, i + 1);
    const IndexRange expected =
        i % 2 == 0 ? IndexRange(0, UINT16_MAX) : IndexRange(1, 1);
    CHECK(r.wanted[i].indices == std::vector{expected});
  }
  PacketReport back;
  CHECK_EQ(
      decodePacketReport(encodePacketReport(r, 1200), back).toString(), "ok");
}

} // namespace
} // namespace resilient::test
