#include "path/striping.h"

#include <deque>
#include <vector>

#include "base/random.h"
#include "path/link_statistics.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

PathLoad load(double bytesPerS, double oneWayS, uint64_t inFlight = 0) {
  PathLoad l;
  l.bytesPerS = bytesPerS;
  l.oneWayS = oneWayS;
  l.inFlightBytes = inFlight;
  return l;
}

bool takes(
    const PathLoad& mine,
    const std::vector<PathLoad>& others,
    uint64_t chunk,
    uint64_t backlog) {
  ArrivalOrder order(mine, chunk);
  for (const PathLoad& other : others) {
    order.addOther(other);
  }
  return order.mayTake(backlog);
}

TEST(striping_slow_path_leaves_the_end_to_the_fast_one) {
  const PathLoad fast = load(12.5e6, 0.001);
  const PathLoad slow = load(3.1e6, 0.001);
  // 64 KiB take 21 ms on the slow one, and everything 84 ms on the fast one.
  CHECK(takes(slow, {fast}, 64 << 10, 1 << 20));
  CHECK(takes(fast, {slow}, 64 << 10, 1 << 20));
  // Here the fast one has done it all in 10 ms.
  CHECK(!takes(slow, {fast}, 64 << 10, 128 << 10));
  CHECK(takes(fast, {slow}, 64 << 10, 128 << 10));
  // Unless it has much to do.
  CHECK(takes(slow, {load(12.5e6, 0.001, 1 << 20)}, 64 << 10, 128 << 10));
}

TEST(striping_round_trip_counts_for_small_messages) {
  const PathLoad near = load(1e6, 0.001);
  const PathLoad far = load(100e6, 0.040);
  CHECK(!takes(far, {near}, 1000, 1000));
  CHECK(takes(near, {far}, 1000, 1000));
  CHECK(takes(far, {near}, 256 << 10, 1 << 20));
}

TEST(striping_gives_equal_paths_equal_shares_over_a_long_way) {
  // 4 ms for a chunk, over a way of 80 ms.
  const PathLoad less = load(8e6, 0.080, 480 << 10);
  const auto lead = [](uint64_t chunks) {
    return load(8e6, 0.080, (480 << 10) + chunks * (32 << 10));
  };
  CHECK(takes(lead(0), {less, less}, 32 << 10, 64 << 10));
  CHECK(!takes(lead(1), {less, less}, 32 << 10, 64 << 10));
  CHECK(takes(less, {lead(1), lead(1)}, 32 << 10, 64 << 10));
}

TEST(striping_unknown_paths_get_a_first_share) {
  const PathLoad unknown = load(0, 0);
  CHECK(takes(unknown, {unknown}, 1000, 1000));
  CHECK(takes(unknown, {load(1e6, 0.01)}, 64 << 10, 1 << 20));
  CHECK(!takes(load(0, 0, 64 << 10), {load(1e6, 0.01)}, 64 << 10, 1 << 20));
}

TEST(striping_silent_path_is_as_late_as_it_is_silent) {
  PathLoad silent = load(100e6, 0.001, 1000);
  const PathLoad other = load(10e6, 0.001);
  CHECK(!takes(other, {silent}, 64 << 10, 64 << 10));
  silent.silentS = 0.03;
  CHECK(takes(other, {silent}, 64 << 10, 64 << 10));
}

// Whatever the paths are like, somebody takes the chunk: else it would wait
// for ever.
TEST(striping_somebody_always_takes_the_chunk) {
  Prng prng(7);
  for (int run = 0; run < 20'000; ++run) {
    std::vector<PathLoad> paths;
    for (uint64_t n = 1 + prng.below(6); n > 0; --n) {
      PathLoad l = load(
          prng.below(4) == 0 ? 0 : 1e3 + static_cast<double>(prng.below(1e8)),
          1e-6 * static_cast<double>(prng.below(100'000)),
          prng.below(1 << 22));
      l.silentS = l.inFlightBytes == 0
          ? 0
          : 1e-3 * static_cast<double>(prng.below(2) * prng.below(500));
      paths.push_back(l);
    }
    const uint64_t chunk = 1 + prng.below(1 << 19);
    const uint64_t backlog = chunk + prng.below(1 << 20);
    bool any = false;
    for (size_t i = 0; i < paths.size(); ++i) {
      auto others = paths;
      others.erase(others.begin() + static_cast<ptrdiff_t>(i));
      any = any || takes(paths[i], others, chunk, backlog);
    }
    CHECK(any);
  }
}

// Random pairs of links in exact time: a message is never later than over the
// better link alone, and long ones get what both carry together.
TEST(striping_unequal_links_add_up) {
  Prng prng(11);
  for (int run = 0; run < 200; ++run) {
    struct Link {
      double rate, oneWay, freeAt = 0;
      std::deque<std::pair<double, uint64_t>> flights; // acknowledged at
    };
    std::vector<Link> links;
    double sum = 0, best = 0;
    for (int i = 0; i < 2; ++i) {
      const double rate = 1e6 * static_cast<double>(1 + prng.below(30));
      const double oneWay = 1e-3 * static_cast<double>(1 + prng.below(20));
      links.push_back({rate, oneWay, 0, {}});
      sum += rate;
      best = std::max(best, rate);
    }
    const uint64_t chunk = 16 << 10;
    const uint64_t total = 16 << 20;
    uint64_t left = total;
    double now = 0, done = 0;
    while (left > 0) {
      bool taken = false;
      for (size_t i = 0; i < 2 && left > 0; ++i) {
        const auto view = [&](const Link& l) {
          uint64_t inFlight = 0;
          for (const auto& f : l.flights) {
            inFlight += f.first > now ? f.second : 0;
          }
          return load(l.rate, l.oneWay, inFlight);
        };
        if (takes(view(links[i]), {view(links[1 - i])}, chunk, left)) {
          Link& l = links[i];
          l.freeAt =
              std::max(l.freeAt, now) + static_cast<double>(chunk) / l.rate;
          l.flights.emplace_back(l.freeAt + 2 * l.oneWay, chunk);
          done = std::max(done, l.freeAt + l.oneWay);
          left -= std::min(left, chunk);
          taken = true;
        }
      }
      if (!taken) {
        now += 1e-4;
      }
    }
    // As fast as both together but for a round trip and a chunk on each.
    const double slack = 2 * (links[0].oneWay + links[1].oneWay) +
        2 * static_cast<double>(chunk) / 1e6;
    CHECK(done <= static_cast<double>(total) / sum * 1.06 + slack);
    CHECK(done <= static_cast<double>(total) / best + slack);
  }
}

TEST(hedge_waits_as_long_as_the_holder_may_need) {
  const uint64_t chunk = 64 << 10;
  const auto worthIt = [&](double helperRate, PathLoad holder, uint64_t ahead) {
    return Hedge(load(helperRate, 0.02, 0), holder).worthIt(ahead, chunk);
  };
  // Two paths alike, at the end of a message: nobody is late.
  CHECK(!worthIt(1e7, load(1e7, 0.02, chunk), chunk));
  CHECK(!worthIt(1e7, load(1e7, 0.02, 2 * chunk), 2 * chunk));
  // The holder is known to be slow, and has much to do.
  CHECK(worthIt(1e7, load(1e5, 0.02, chunk), chunk));
  CHECK(!worthIt(1e5, load(1e5, 0.02, chunk), chunk));
  CHECK(!worthIt(0, load(1e5, 0.02, chunk), chunk)); // who knows the helper?
  // It was fast, and is silent: for longer than a chunk and a round trip.
  PathLoad silent = load(1e7, 0.02, chunk);
  silent.silentS = 0.05;
  CHECK(!worthIt(1e7, silent, chunk));
  silent.silentS = Hedge(load(1e7, 0.02, 0), silent).nextLookS(chunk);
  CHECK(silent.silentS < 0.15);
  CHECK(worthIt(1e7, silent, chunk));
}

TEST(link_capacity_does_not_fall_with_use) {
  LinkStatistics s;
  TimePoint t(std::chrono::seconds(1));
  s.onRoundTrip(std::chrono::milliseconds(10), t);
  const TimePoint busy = t;
  for (int i = 0; i < 100; ++i) { // 10 MB/s, the pipe full
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(100'000, busy, t, 300'000);
  }
  CHECK(s.capacityBytesPerS() > 9e6 && s.capacityBytesPerS() < 11e6);
  for (int i = 0; i < 100; ++i) { // one small thing at a time
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(1000, busy, t, 0);
  }
  CHECK(s.capacityBytesPerS() > 9e6);
  CHECK(s.goodputBytesPerS() < 1e6);
  for (int i = 0; i < 60; ++i) { // the pipe full again, and slow
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(20'000, busy, t, 300'000);
  }
  CHECK(s.capacityBytesPerS() < 3e6);
  for (int i = 0; i < 60; ++i) { // faster, though not full
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(200'000, busy, t, 0);
  }
  CHECK(s.capacityBytesPerS() > 15e6);
}

// Bytes that come later have not waited for the link.
TEST(link_statistics_know_bursts_that_were_there_at_once) {
  LinkStatistics s;
  const TimePoint start{std::chrono::seconds(1)};
  using std::chrono::milliseconds;
  const auto after = [&](int ms) { return start + milliseconds(ms); };
  s.onAcknowledged(1000, start, after(40), 500, start);
  CHECK_EQ(s.lastBurst().number, 0u);
  s.onAcknowledged(500, start, after(42), 0, start);
  CHECK_EQ(s.lastBurst().number, 1u);
  CHECK_EQ(s.lastBurst().bytes, 1500u);
  CHECK(s.lastBurst().took == milliseconds(42));
  s.onAcknowledged(700, after(100), after(140), 0, after(120));
  CHECK_EQ(s.lastBurst().number, 1u);
  s.onAcknowledged(700, after(200), after(240), 0, after(190));
  CHECK_EQ(s.lastBurst().number, 2u);
  CHECK_EQ(s.lastBurst().bytes, 700u);
}

// Each burst is answered late, behind what the far end sends, and then as fast
// as the link is. Once the estimate fell by half with each of them.
TEST(link_capacity_does_not_fall_with_bursts) {
  LinkStatistics s;
  TimePoint t(std::chrono::seconds(1));
  s.onRoundTrip(std::chrono::milliseconds(40), t);
  s.expectCapacity(16e6);
  constexpr uint64_t kBurst = 8 << 20, kAck = 1 << 20;
  double before = s.capacityBytesPerS();
  for (int i = 0; i < 5; ++i) {
    const TimePoint busy = t;
    t += std::chrono::milliseconds(110);
    s.onRoundTrip(t - busy, t);
    for (uint64_t left = kBurst; left != 0; t += fromSeconds(kAck / 125e6)) {
      left -= kAck;
      s.onAcknowledged(kAck, busy, t, left);
    }
    CHECK(s.capacityBytesPerS() > before);
    before = s.capacityBytesPerS();
    t += std::chrono::seconds(1);
  }
  CHECK(s.capacityBytesPerS() > 100e6 && s.capacityBytesPerS() < 126e6);
}

TEST(link_capacity_of_the_path_before_is_believed_until_it_shows_wrong) {
  LinkStatistics s;
  TimePoint t(std::chrono::seconds(1));
  s.expectCapacity(10e6);
  s.onRoundTrip(std::chrono::milliseconds(10), t);
  const TimePoint busy = t;
  for (int i = 0; i < 100; ++i) { // one small thing at a time
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(1000, busy, t, 0);
  }
  CHECK_EQ(s.capacityBytesPerS(), 10e6);
  for (int i = 0; i < 60; ++i) { // the pipe full, and slow
    t += std::chrono::milliseconds(10);
    s.onAcknowledged(20'000, busy, t, 300'000);
  }
  CHECK(s.capacityBytesPerS() < 3e6);
}

// The window of a path that is back holds little at first: never full, by what
// it carried once.
TEST(link_that_is_back_slower_than_it_was_is_soon_known) {
  for (const bool late : {false, true}) {
    LinkStatistics s;
    TimePoint t(std::chrono::seconds(1));
    s.expectCapacity(50e6);
    s.onRoundTrip(std::chrono::milliseconds(5), t);
    const TimePoint busy = t;
    for (int i = 0; i < 15; ++i) {
      t += std::chrono::milliseconds(10);
      s.onRoundTrip(std::chrono::milliseconds(late ? 37 : 6), t);
      s.onAcknowledged(20'000, busy, t, 44'000);
    }
    CHECK_EQ(s.capacityBytesPerS() < 3e6, late);
    CHECK_EQ(s.capacityBytesPerS() == 50e6, !late);
  }
}

} // namespace
} // namespace resilient::test
