#include "lab/emulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/lab_packets.h"

namespace resilient::lab {
namespace {

using namespace std::chrono_literals;
using namespace test;

const TimePoint kStart = TimePoint(1000s);
constexpr uint32_t kHeader = 40; // IPv4 and TCP

struct Arrival {
  Nanos at; // since kStart
  size_t pipe;
  Parsed parsed;
  uint32_t wirePackets;
};

// An emulator with its own time.
struct Bench {
  std::vector<Arrival> arrivals;
  TimePoint now = kStart;
  bool accept = true;
  Emulator emulator{[this](size_t pipe, const Packet& packet) {
    if (accept) {
      arrivals.push_back(
          {now - kStart, pipe, parse(packet), packet.wirePackets()});
    }
    return accept;
  }};

  size_t pipe(const PipeSettings& settings, uint64_t seed = 1) {
    const size_t made = emulator.addPipe(seed);
    emulator.setPipe(now, made, settings);
    return made;
  }
  void until(TimePoint end) {
    while (emulator.nextEvent() <= end) {
      now = std::max(now, emulator.nextEvent());
      emulator.advance(now);
    }
    now = std::max(now, end);
  }
  void untilQuiet() {
    while (emulator.nextEvent() != kNever) {
      until(emulator.nextEvent());
    }
  }
  // A packet of `wireBytes`, numbered.
  void send(size_t pipe, uint32_t wireBytes, uint32_t number = 0) {
    emulator.offer(
        now,
        pipe,
        makePacket({.payloadBytes = wireBytes - kHeader, .sequence = number}));
  }
  // A super-packet of `count` wire packets of 1040 bytes. Their numbers are
  // first, first + 1000 and so on.
  void sendSuper(size_t pipe, uint32_t count, uint32_t first = 0) {
    emulator.offer(
        now,
        pipe,
        makePacket(
            {.payloadBytes = count * 1000,
             .segmentBytes = 1000,
             .sequence = first,
             .patternStart = first}));
  }
  // Numbers of the wire packets that have arrived, in order.
  std::vector<uint32_t> numbers() const {
    std::vector<uint32_t> all;
    for (const Arrival& each : arrivals) {
      for (uint32_t i = 0; i < each.wirePackets; ++i) {
        all.push_back(each.parsed.sequence + i * 1000);
      }
    }
    return all;
  }
};

void checkNothingVanished(const Emulator& emulator, size_t pipe) {
  const PipeCounters& c = emulator.counters(pipe);
  CHECK_EQ(
      c.entered.packets + c.duplicated.packets,
      c.delivered.packets + c.lost.packets + c.queueFull.packets +
          c.outage.packets + c.overrun.packets + c.refused.packets);
  CHECK_EQ(
      c.entered.bytes + c.duplicated.bytes,
      c.delivered.bytes + c.lost.bytes + c.queueFull.bytes + c.outage.bytes +
          c.overrun.bytes + c.refused.bytes);
  CHECK_EQ(emulator.inFlightBytes(pipe), 0);
}

TEST(lab_without_settings_packets_arrive_at_once) {
  Bench bench;
  const size_t pipe = bench.pipe({});
  bench.sendSuper(pipe, 20, 5000);
  CHECK_EQ(bench.arrivals.size(), 1);
  CHECK_EQ(bench.arrivals[0].wirePackets, 20);
  CHECK(bench.arrivals[0].parsed.payload == payloadPattern(5000, 25000));
  CHECK(bench.emulator.nextEvent() == kNever);
}

TEST(lab_asks_for_a_timer_only_when_a_packet_has_to_arrive) {
  Bench bench;
  const size_t pipe =
      bench.pipe({.delay = 20ms, .rateBytesPerS = 1e6, .queueBytes = 1 << 20});
  for (uint32_t i = 0; i < 20; ++i) {
    bench.send(pipe, 100, i); // each takes 100 us
  }
  size_t wakes = 0;
  while (bench.emulator.wakeBy() != kNever) {
    CHECK(bench.emulator.wakeBy() > bench.now);
    bench.now = bench.emulator.wakeBy();
    bench.emulator.advance(bench.now);
    ++wakes;
  }
  CHECK_EQ(bench.arrivals.size(), 20);
  for (size_t i = 0; i < bench.arrivals.size(); ++i) {
    const Nanos due = 20ms + 100us * (i + 1);
    CHECK(bench.arrivals[i].at >= due);
    CHECK(bench.arrivals[i].at <= due + Nanos(20ms) / kLatePart);
  }
  CHECK(wakes <= 15); // one for the first limiter, then one per 156 us
}

TEST(lab_a_shorter_delay_is_in_time_for_what_a_limiter_sends) {
  Bench bench;
  PipeSettings settings{
      .delay = 100ms, .rateBytesPerS = 1e6, .queueBytes = 1 << 20};
  const size_t pipe = bench.pipe(settings);
  bench.send(pipe, 1000);
  settings.delay = 2ms;
  bench.emulator.setPipe(bench.now, pipe, settings);
  while (bench.emulator.wakeBy() != kNever) {
    bench.now = bench.emulator.wakeBy();
    bench.emulator.advance(bench.now);
  }
  CHECK_EQ(bench.arrivals.size(), 1);
  CHECK(bench.arrivals[0].at >= 3ms);
  CHECK(bench.arrivals[0].at <= 3ms + Nanos(2ms) / kLatePart);
}

TEST(lab_a_delay_is_exact_and_says_when_to_ask_again) {
  Bench bench;
  const size_t pipe = bench.pipe({.delay = 20ms});
  bench.send(pipe, 1000, 1);
  bench.now += 3ms;
  bench.send(pipe, 1000, 2);
  CHECK(bench.emulator.nextEvent() == kStart + 20ms);
  bench.until(kStart + 20ms - 1ns);
  CHECK(bench.arrivals.empty());
  bench.untilQuiet();
  CHECK_EQ(bench.arrivals.size(), 2);
  CHECK(bench.arrivals[0].at == 20ms);
  CHECK(bench.arrivals[1].at == 23ms);
}

TEST(lab_a_new_delay_holds_for_packets_on_their_way) {
  Bench bench;
  const size_t pipe = bench.pipe({.delay = 20ms});
  bench.send(pipe, 1000, 1);
  bench.now += 5ms;
  bench.send(pipe, 1000, 2);
  bench.emulator.setPipe(bench.now, pipe, {.delay = 8ms});
  bench.send(pipe, 1000, 3);
  bench.now += 1ms;
  bench.emulator.setPipe(bench.now, pipe, {.delay = 2ms});
  bench.untilQuiet();
  CHECK(bench.numbers() == (std::vector<uint32_t>{1, 2, 3}));
  CHECK(bench.arrivals[0].at == 6ms); // would have been at 2 ms
  CHECK(bench.arrivals[1].at == 7ms);
  CHECK(bench.arrivals[2].at == 7ms);
}

TEST(lab_jitter_varies_within_its_bound_and_keeps_the_order) {
  Bench bench;
  const size_t pipe = bench.pipe({.delay = 5ms, .jitter = 2ms});
  std::set<Nanos> delays;
  for (uint32_t i = 0; i < 200; ++i) {
    bench.send(pipe, 100, i);
    bench.until(bench.now + 10ms);
    CHECK_EQ(bench.arrivals.size(), i + 1);
    const Nanos delay = bench.arrivals.back().at - 10ms * i;
    CHECK(delay >= 5ms);
    CHECK(delay <= 7ms);
    delays.insert(delay);
  }
  CHECK(delays.size() > 150);
  CHECK(*delays.begin() < 5200us);
  CHECK(*delays.rbegin() > 6800us);
  bench.arrivals.clear();
  for (uint32_t i = 0; i < 200; ++i) {
    bench.send(pipe, 100, i);
    bench.until(bench.now + 10us);
  }
  bench.untilQuiet();
  const std::vector<uint32_t> numbers = bench.numbers();
  CHECK(std::is_sorted(numbers.begin(), numbers.end()));
}

TEST(lab_a_rate_is_exact_and_super_packets_come_in_pieces) {
  Bench bench;
  // 1.04 MB/s: a wire packet takes 1 ms.
  const size_t pipe = bench.pipe(
      {.delay = 7ms, .rateBytesPerS = 1.04e6, .queueBytes = 1 << 20});
  bench.sendSuper(pipe, 30);
  bench.untilQuiet();
  CHECK_EQ(bench.arrivals.size(), 30);
  for (uint32_t i = 0; i < 30; ++i) {
    CHECK(bench.arrivals[i].at == 8ms + i * 1ms);
    CHECK_EQ(bench.arrivals[i].parsed.sequence, i * 1000);
  }
  // Ten times as fast: pieces of 500 us, 5 packets.
  bench.emulator.setPipe(
      bench.now, pipe, {.rateBytesPerS = 1.04e7, .queueBytes = 1 << 20});
  bench.arrivals.clear();
  const Nanos begin = bench.now - kStart;
  bench.sendSuper(pipe, 30);
  bench.untilQuiet();
  CHECK_EQ(bench.arrivals.size(), 6);
  CHECK_EQ(bench.arrivals[0].wirePackets, 5);
  CHECK(bench.arrivals[0].at == begin + 500us);
  CHECK(bench.arrivals[5].at == begin + 3ms);
}

TEST(lab_an_idle_link_gives_no_credit) {
  Bench bench;
  const size_t pipe = bench.pipe({.rateBytesPerS = 1e6, .queueBytes = 1 << 20});
  bench.until(kStart + 10s);
  bench.send(pipe, 1000);
  bench.send(pipe, 1000);
  bench.untilQuiet();
  CHECK(bench.arrivals[0].at == 10s + 1ms);
  CHECK(bench.arrivals[1].at == 10s + 2ms);
}

TEST(lab_a_full_queue_drops_the_tail) {
  Bench bench;
  const size_t pipe = bench.pipe({.rateBytesPerS = 1e6, .queueBytes = 10400});
  bench.sendSuper(pipe, 30); // 10 fit
  bench.send(pipe, 1000, 77000); // none
  CHECK_EQ(bench.emulator.counters(pipe).queueFull.packets, 21);
  bench.untilQuiet();
  CHECK_EQ(bench.numbers().size(), 10);
  CHECK_EQ(bench.numbers().back(), 9000);
  checkNothingVanished(bench.emulator, pipe);
  // A packet larger than the queue still passes when nothing is before it.
  bench.emulator.setPipe(
      bench.now, pipe, {.rateBytesPerS = 1e6, .queueBytes = 100});
  bench.send(pipe, 1000, 1);
  bench.send(pipe, 1000, 2);
  bench.untilQuiet();
  CHECK_EQ(bench.numbers().back(), 1);
  checkNothingVanished(bench.emulator, pipe);
}

// 32 KiB at once, then the rate, whatever the kernels group; TCP passes.
TEST(lab_a_policer_drops_udp_beyond_its_rate) {
  Bench bench;
  const size_t pipe = bench.pipe({.udpRateBytesPerS = 1e6});
  const auto udp = [&](uint32_t segments) {
    bench.emulator.offer(
        bench.now,
        pipe,
        makePacket(
            {.udp = true,
             .payloadBytes = segments * 972,
             .segmentBytes = segments > 1 ? 972u : 0u})); // 1000 with headers
  };
  const auto passed = [&] {
    return bench.emulator.counters(pipe).delivered.packets;
  };
  udp(40);
  CHECK_EQ(passed(), 32);
  bench.until(kStart + 300us);
  udp(1);
  CHECK_EQ(passed(), 33);
  udp(1);
  CHECK_EQ(passed(), 33);
  bench.until(kStart + 5ms);
  udp(1);
  udp(10);
  CHECK_EQ(passed(), 37);
  bench.until(kStart + 10s);
  udp(50);
  CHECK_EQ(passed(), 37 + 32);
  bench.sendSuper(pipe, 50);
  CHECK_EQ(passed(), 37 + 32 + 50);
  checkNothingVanished(bench.emulator, pipe);
}

TEST(lab_a_new_rate_holds_for_what_is_queued) {
  Bench bench;
  PipeSettings settings{.rateBytesPerS = 1000, .queueBytes = 1 << 20};
  const size_t pipe = bench.pipe(settings);
  for (uint32_t i = 0; i < 10; ++i) {
    bench.send(pipe, 1000, i); // a second each
  }
  bench.until(kStart + 1500ms);
  CHECK_EQ(bench.arrivals.size(), 1);
  settings.rateBytesPerS = 1e6;
  bench.emulator.setPipe(bench.now, pipe, settings);
  bench.untilQuiet();
  CHECK(bench.arrivals[1].at == 1500ms + 500us); // half of it was sent
  CHECK(bench.arrivals[9].at == 1500ms + 8500us);
  // And without a limit at once.
  settings.rateBytesPerS = 1;
  bench.emulator.setPipe(bench.now, pipe, settings);
  bench.send(pipe, 1000, 20);
  bench.send(pipe, 1000, 21);
  settings.rateBytesPerS = 0;
  bench.emulator.setPipe(bench.now, pipe, settings);
  bench.send(pipe, 1000, 22);
  bench.until(bench.now);
  CHECK_EQ(bench.numbers().back(), 22);
  checkNothingVanished(bench.emulator, pipe);
}

// The share lost, and with Gilbert's model the mean length of a run.
TEST(lab_losses_are_as_many_and_as_long_as_asked) {
  forSeeds(4, [](uint64_t seed) {
    for (const auto& [loss, burst] : std::vector<std::pair<double, double>>{
             {0.05, 0}, {0.05, 1}, {0.05, 4}, {0.05, 20}, {0.4, 0}, {0.4, 4}}) {
      Bench bench;
      const size_t pipe =
          bench.pipe({.loss = loss, .burstPackets = burst}, seed);
      const uint32_t count = 40000;
      std::vector<bool> arrived(count);
      const Packet packet =
          makePacket({.payloadBytes = 50 * 10, .segmentBytes = 10});
      for (uint32_t i = 0; i < count / 50; ++i) {
        bench.arrivals.clear();
        bench.emulator.offer(bench.now, pipe, packet.copy());
        for (const Arrival& each : bench.arrivals) {
          const uint32_t first = (each.parsed.sequence - 1) / 10;
          for (uint32_t k = 0; k < each.wirePackets; ++k) {
            arrived[i * 50 + first + k] = true;
          }
        }
      }
      double lost = 0;
      double runs = 0;
      for (uint32_t i = 0; i < count; ++i) {
        lost += !arrived[i];
        runs += !arrived[i] && (i == 0 || arrived[i - 1]);
      }
      CHECK_EQ(lost, bench.emulator.counters(pipe).lost.packets);
      // Six standard deviations; runs make the losses fewer and larger.
      const double length = burst == 0 ? 1 / (1 - loss) : burst;
      const double deviation = std::sqrt(count * loss * 2 * length);
      CHECK(std::abs(lost - count * loss) < 6 * deviation);
      CHECK(std::abs(lost / runs / length - 1) < 6 / std::sqrt(runs));
      checkNothingVanished(bench.emulator, pipe);
    }
  });
}

TEST(lab_the_seed_decides_whatever_the_packets_look_like) {
  const auto fates = [](uint64_t seed, uint32_t together) {
    Bench bench;
    const size_t pipe = bench.pipe({.loss = 0.3, .burstPackets = 3}, seed);
    for (uint32_t i = 0; i < 600; i += together) {
      bench.sendSuper(pipe, together, i * 1000);
    }
    return bench.numbers();
  };
  CHECK(fates(7, 1) == fates(7, 20));
  CHECK(fates(7, 20) == fates(7, 60));
  CHECK(fates(7, 20) != fates(8, 20));
}

TEST(lab_lost_packets_use_the_links_time) {
  Bench bench;
  const size_t pipe =
      bench.pipe({.rateBytesPerS = 1.04e6, .queueBytes = 1 << 20, .loss = 0.5});
  bench.sendSuper(pipe, 60);
  bench.untilQuiet();
  CHECK(bench.arrivals.size() < 50);
  for (const Arrival& each : bench.arrivals) {
    CHECK(each.at == 1ms * (each.parsed.sequence / 1000 + 1));
  }
}

TEST(lab_total_loss_loses_everything) {
  for (const double burst : {0.0, 10.0}) {
    Bench bench;
    const size_t pipe = bench.pipe({.loss = 1, .burstPackets = burst});
    bench.sendSuper(pipe, 60);
    CHECK(bench.arrivals.empty());
    CHECK_EQ(bench.emulator.counters(pipe).lost.packets, 60);
  }
}

TEST(lab_duplicates_and_corrupted_packets) {
  Bench bench;
  const size_t pipe = bench.pipe({.duplicate = 0.2, .corrupt = 0.1}, 3);
  for (uint32_t i = 0; i < 40; ++i) {
    bench.sendSuper(pipe, 50, i * 50000);
  }
  const PipeCounters& c = bench.emulator.counters(pipe);
  CHECK(c.duplicated.packets > 300 && c.duplicated.packets < 500);
  CHECK(c.corrupted.packets > 130 && c.corrupted.packets < 270);
  CHECK_EQ(c.delivered.packets, 2000 + c.duplicated.packets);
  uint64_t damaged = 0;
  for (const Arrival& each : bench.arrivals) {
    damaged += !each.parsed.partialChecksumRight;
    CHECK(!each.parsed.fullChecksumRight);
  }
  // A damaged packet may be duplicated, too.
  CHECK(damaged >= c.corrupted.packets);
  CHECK(damaged < c.corrupted.packets * 2);
  checkNothingVanished(bench.emulator, pipe);
}

TEST(lab_reordered_packets_come_late_by_what_was_asked) {
  Bench bench;
  const size_t pipe =
      bench.pipe({.delay = 10ms, .reorder = 0.2, .reorderDelay = 3ms}, 4);
  for (uint32_t i = 0; i < 500; ++i) {
    bench.send(pipe, 100, i * 1000);
    bench.until(bench.now + 1ms);
  }
  bench.untilQuiet();
  uint64_t late = 0;
  for (const Arrival& each : bench.arrivals) {
    const Nanos sent = 1ms * (each.parsed.sequence / 1000);
    CHECK(each.at == sent + 10ms || each.at == sent + 13ms);
    late += each.at == sent + 13ms;
  }
  CHECK_EQ(late, bench.emulator.counters(pipe).reordered.packets);
  CHECK(late > 60 && late < 140);
  CHECK(
      !std::is_sorted(bench.numbers().begin(), bench.numbers().end()) ||
      bench.numbers().empty());
  checkNothingVanished(bench.emulator, pipe);
}

// Wherever packets are when the outage begins, none arrives, and none is left
// over when it ends.
TEST(lab_an_outage_takes_what_is_on_its_way) {
  Bench bench;
  const size_t shared = bench.emulator.addLimiter();
  bench.emulator.setLimiter(kStart, shared, 1e5, 1 << 20);
  PipeSettings settings{
      .delay = 20ms,
      .rateBytesPerS = 2e5,
      .queueBytes = 1 << 20,
      .reorder = 0.3,
      .reorderDelay = 30ms,
      .sharedRates = {shared}};
  const size_t pipe = bench.pipe(settings);
  bench.sendSuper(pipe, 60);
  bench.until(kStart + 100ms);
  const size_t before = bench.arrivals.size();
  CHECK(before > 3);
  settings.down = true;
  bench.emulator.setPipe(bench.now, pipe, settings);
  bench.send(pipe, 1000, 1);
  bench.until(bench.now + 1ms);
  settings.down = false;
  bench.emulator.setPipe(bench.now, pipe, settings);
  bench.send(pipe, 1000, 4242);
  bench.untilQuiet();
  CHECK_EQ(bench.arrivals.size(), before + 1);
  CHECK_EQ(bench.numbers().back(), 4242);
  checkNothingVanished(bench.emulator, pipe);
}

TEST(lab_a_shared_rate_is_shared_and_holds_up_nobody_else) {
  Bench bench;
  const size_t shared = bench.emulator.addLimiter();
  bench.emulator.setLimiter(kStart, shared, 1.04e6, 1 << 20);
  const PipeSettings settings{.sharedRates = {shared}};
  const size_t one = bench.pipe(settings, 1);
  const size_t two = bench.pipe(settings, 2);
  const size_t alone = bench.pipe({}, 3);
  // Its own rate is the narrower one: what waits there takes no place in the
  // shared queue.
  const size_t slow = bench.pipe(
      {.rateBytesPerS = 1.04e5, .queueBytes = 1 << 20, .sharedRates = {shared}},
      4);
  bench.sendSuper(slow, 10);
  bench.sendSuper(alone, 10);
  CHECK_EQ(bench.arrivals.size(), 1);
  bench.arrivals.clear();
  for (uint32_t i = 0; i < 20; ++i) {
    bench.sendSuper(i % 2 == 0 ? one : two, 1, i * 1000);
  }
  bench.until(kStart + 20ms);
  size_t fast = 0;
  for (size_t i = 0; i < bench.arrivals.size(); ++i) {
    fast += bench.arrivals[i].pipe != slow;
    CHECK(bench.arrivals[i].at >= 1ms * (i + 1));
  }
  CHECK(fast >= 18); // at most two of `slow` have come between
  bench.untilQuiet();
  CHECK_EQ(bench.arrivals.size(), 30);
  CHECK(bench.arrivals.back().at < 102ms);
  for (const size_t pipe : {one, two, alone, slow}) {
    checkNothingVanished(bench.emulator, pipe);
  }
}

TEST(lab_two_shared_rates_stand_one_behind_the_other) {
  for (const bool narrowFirst : {true, false}) {
    Bench bench;
    const size_t one = bench.emulator.addLimiter();
    const size_t two = bench.emulator.addLimiter();
    bench.emulator.setLimiter(
        kStart, one, narrowFirst ? 1.04e6 : 2.08e6, 1 << 20);
    bench.emulator.setLimiter(
        kStart, two, narrowFirst ? 2.08e6 : 1.04e6, 1 << 20);
    const size_t pipe = bench.pipe({.sharedRates = {one, two}});
    for (uint32_t i = 0; i < 10; ++i) {
      bench.sendSuper(pipe, 1, i * 1000);
    }
    bench.untilQuiet();
    CHECK_EQ(bench.arrivals.size(), 10);
    CHECK(bench.arrivals[0].at == 1500us);
    CHECK(bench.arrivals[9].at == 10500us);
    checkNothingVanished(bench.emulator, pipe);
  }
}

TEST(lab_memory_is_bounded) {
  Bench bench;
  const size_t pipe = bench.pipe({.delay = 1h});
  const Packet packet =
      makePacket({.payloadBytes = 64000, .segmentBytes = 1000});
  for (int i = 0; i < 5000; ++i) {
    bench.emulator.offer(bench.now, pipe, packet.copy());
  }
  CHECK(bench.emulator.inFlightBytes(pipe) <= kInFlightBytesMax);
  CHECK(bench.emulator.counters(pipe).overrun.packets > 0);
  bench.untilQuiet();
  checkNothingVanished(bench.emulator, pipe);
}

TEST(lab_what_the_nic_refuses_is_counted) {
  Bench bench;
  const size_t pipe = bench.pipe({});
  bench.accept = false;
  bench.sendSuper(pipe, 5);
  CHECK_EQ(bench.emulator.counters(pipe).refused.packets, 5);
  checkNothingVanished(bench.emulator, pipe);
}

// Against a dumb twin: one packet after the other through a pipe of a rate
// and a delay that change at random times.
TEST(lab_random_traffic_arrives_when_a_dumb_twin_says) {
  forSeeds(50, [](uint64_t seed) {
    Prng prng(seed);
    Bench bench;
    const double rate = 1e5 * static_cast<double>(1 + prng.below(100));
    const Nanos delay = 1us * prng.below(20000);
    const size_t pipe = bench.pipe(
        {.delay = delay, .rateBytesPerS = rate, .queueBytes = 1 << 30});
    TimePoint free = kStart;
    std::vector<std::pair<uint32_t, Nanos>> expected;
    for (uint32_t i = 0; i < 100; ++i) {
      bench.until(bench.now + 1us * prng.below(3000));
      const uint32_t bytes = 100 + static_cast<uint32_t>(prng.below(1400));
      bench.send(pipe, bytes, i);
      free = std::max(free, bench.now) + fromSeconds(bytes / rate);
      expected.emplace_back(i, free + delay - kStart);
    }
    bench.untilQuiet();
    CHECK_EQ(bench.arrivals.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK_EQ(bench.arrivals[i].parsed.sequence, expected[i].first);
      const Nanos difference = bench.arrivals[i].at - expected[i].second;
      CHECK(std::abs(difference.count()) < 200); // rounding
    }
  });
}

// Everything at once, changing all the time: nothing vanishes, nothing is
// made up, what arrives undamaged is what was sent.
TEST(lab_random_networks_lose_no_account) {
  forSeeds(30, [](uint64_t seed) {
    Prng prng(seed);
    Bench bench;
    const size_t shared = bench.emulator.addLimiter();
    std::vector<size_t> pipes;
    const auto randomSettings = [&] {
      const auto maybe = [&](double max) {
        return prng.chance(0.5) ? 0 : prng.uniform() * max;
      };
      PipeSettings s;
      s.delay = 1us * static_cast<int64_t>(maybe(20000));
      s.jitter = 1us * static_cast<int64_t>(maybe(3000));
      s.rateBytesPerS = prng.chance(0.3) ? 0 : 1e5 + maybe(1e7);
      s.queueBytes = 1000 + prng.below(100000);
      s.udpRateBytesPerS = maybe(1e7);
      s.loss = maybe(0.4);
      s.burstPackets = prng.chance(0.5) ? 0 : 1 + maybe(10);
      s.duplicate = maybe(0.2);
      s.corrupt = maybe(0.2);
      s.reorder = maybe(0.3);
      s.reorderDelay = 1us * static_cast<int64_t>(maybe(9000));
      s.down = prng.chance(0.1);
      if (prng.chance(0.5)) {
        s.sharedRates = {shared};
      }
      return s;
    };
    for (uint64_t i = 0; i < 4; ++i) {
      pipes.push_back(bench.pipe(randomSettings(), seed + i));
    }
    for (uint32_t i = 0; i < 400; ++i) {
      bench.until(bench.now + 1us * prng.below(2000));
      const size_t pipe = pipes[prng.below(pipes.size())];
      if (prng.chance(0.1)) {
        bench.emulator.setPipe(bench.now, pipe, randomSettings());
      } else if (prng.chance(0.03)) {
        bench.emulator.setLimiter(
            bench.now,
            shared,
            prng.chance(0.3) ? 0 : 1e5 + prng.uniform() * 1e7,
            1000 + prng.below(100000));
      } else {
        bench.sendSuper(
            pipe, 1 + static_cast<uint32_t>(prng.below(40)), i * 40000);
        bench.emulator.offer(
            bench.now, pipe, makePacket({.udp = true, .payloadBytes = 1000}));
      }
    }
    bench.untilQuiet();
    for (const size_t pipe : pipes) {
      checkNothingVanished(bench.emulator, pipe);
    }
    for (const Arrival& each : bench.arrivals) {
      if (each.parsed.partialChecksumRight) {
        const uint32_t begin = each.parsed.sequence;
        CHECK(
            each.parsed.payload ==
            payloadPattern(begin, begin + each.wirePackets * 1000));
      }
    }
  });
}

} // namespace
} // namespace resilient::lab
