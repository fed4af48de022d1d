#include "path/route_pacing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;

constexpr double kRate = 125e6;

// A link of `bytesPerS` and 40 ms, with a queue in either direction. Its
// two ends send bursts; acknowledgements wait in the queues like data.
struct Link {
  double bytesPerS = kRate;
  double room = 5e6; // bytes, of the queue
  bool tells = true; // the far end says when data arrives
  double bbrTakes = 1.3; // of the true rate
  bool smoothed = false; // the queue has gone before the round trip shows it
  TimePoint now{std::chrono::seconds(100)};
  struct Parcel {
    double bytes;
    TimePoint sentAt;
    TimePoint at; // where it is next
    double arrived = 0; // in all
  };
  struct End {
    double left = 0, queued = 0, underWay = 0, acknowledged = 0; // bytes
    double lost = 0; // bytes, of all bursts
    double arrived = 0; // bytes, of all bursts
    std::deque<Parcel> data, answers, questions, told;
    TimePoint arrivedAt{}; // as the other end has said
    double saysArrived = 0;
    Nanos roundTrip = milliseconds(40);
    RoutePacing pacing;
    uint64_t limit = 0;
  };
  std::array<End, 2> ends;
  uint64_t limit() const {
    return ends[0].limit;
  }

  // `sends`: bytes per second of an end that has no limit. `back`: what the
  // other end sends meanwhile.
  void burst(double bytes, double sends, double back = 0) {
    ends[0].left = bytes;
    ends[1].left = back;
    for (int step = 0; step < 10'000; ++step) {
      send(ends[0], sends);
      send(ends[1], sends);
      now += milliseconds(1);
      answer(ends[0], ends[1]);
      answer(ends[1], ends[0]);
      if (step % 5 == 4) {
        look(ends[0]);
        look(ends[1]);
        if (ends[0].underWay == 0 && ends[1].underWay == 0) {
          break;
        }
      }
    }
    now += milliseconds(1500); // idle
  }

 private:
  static constexpr double kStepS = 0.001;

  void send(End& end, double sends) const {
    const double rate = end.limit == 0
        ? sends
        : std::min(sends, static_cast<double>(end.limit));
    const double sent = std::min(end.left, rate * kStepS);
    // The rest is dropped, and sent once more.
    const double fits = std::min(sent, room - end.queued);
    end.lost += sent - fits;
    end.left -= fits;
    end.queued += fits;
    if (fits > 0) {
      end.underWay += fits;
      end.data.push_back({fits, now, arrival(end)});
    }
  }
  TimePoint arrival(const End& end) const {
    return now + fromSeconds(end.queued / bytesPerS) + milliseconds(20);
  }
  void answer(End& end, End& other) const {
    end.queued = std::max(0.0, end.queued - bytesPerS * kStepS);
    while (!end.data.empty() && end.data.front().at <= now) {
      Parcel p = end.data.front();
      end.data.pop_front();
      p.at = arrival(other);
      end.arrived += p.bytes;
      end.answers.push_back(p);
    }
    while (!end.questions.empty() && end.questions.front().at <= now) {
      end.questions.pop_front();
      end.told.push_back({0, now, arrival(other), end.arrived});
    }
    while (!end.told.empty() && end.told.front().at <= now) {
      end.arrivedAt = end.told.front().sentAt;
      end.saysArrived = end.told.front().arrived;
      end.told.pop_front();
    }
    while (!end.answers.empty() && end.answers.front().at <= now) {
      const Parcel& p = end.answers.front();
      end.acknowledged += p.bytes;
      end.underWay = std::max(0.0, end.underWay - p.bytes);
      end.roundTrip = now - p.sentAt;
      end.answers.pop_front();
    }
    if (end.left <= 0 && end.data.empty() && end.answers.empty()) {
      end.underWay = 0;
    }
  }
  void look(End& end) const {
    if (tells && end.underWay > 0) {
      end.questions.push_back({0, now, arrival(end)});
    }
    RoutePacing::Sample s;
    s.now = now;
    s.arrivedAt = end.arrivedAt;
    s.arrived = static_cast<uint64_t>(end.saysArrived);
    s.acknowledged = static_cast<uint64_t>(end.acknowledged);
    s.inFlight = static_cast<uint64_t>(end.underWay);
    s.minRoundTrip = milliseconds(40);
    s.roundTrip = smoothed ? milliseconds(40) : end.roundTrip;
    s.delivered = static_cast<uint64_t>(end.acknowledged) / 1448;
    s.lost = static_cast<uint64_t>(end.lost) / 1448;
    s.startingUp = true; // bursts do not end it
    // Acknowledgements have waited.
    s.rate = static_cast<uint64_t>(bbrTakes * bytesPerS);
    end.limit = end.pacing.observe(s);
  }
};

TEST(route_pacing_waits_for_a_queue) {
  Link link;
  link.burst(16e6, 0.9 * kRate);
  CHECK_EQ(link.limit(), 0u);
  link.burst(16e6, 2.5 * kRate); // four connections, say
  CHECK(std::abs(static_cast<double>(link.limit()) / kRate - 1.25) < 0.1);
  // The queue has gone, the link is the same.
  link.burst(16e6, 0.9 * kRate);
  CHECK(std::abs(static_cast<double>(link.limit()) / kRate - 1.25) < 0.1);
}

TEST(route_pacing_follows_the_link) {
  Link link;
  link.room = 64e6;
  link.burst(32e6, 3 * kRate);
  link.bytesPerS = 8 * kRate;
  for (int i = 0; i < 12; ++i) {
    link.burst(64e6, 20 * kRate);
  }
  CHECK(static_cast<double>(link.limit()) > 7 * kRate);
  link.bytesPerS = kRate / 4;
  for (int i = 0; i < 4; ++i) {
    link.burst(64e6, 20 * kRate);
  }
  CHECK(static_cast<double>(link.limit()) < 1.5 * kRate / 4);
}

// Once its queue has shown, the link gets faster, or what was believed was
// wrong. Bursts of 4 MiB take less than a round trip, and the time before their
// first byte is no part of what they show.
TEST(route_pacing_follows_the_link_by_short_bursts) {
  Link link;
  link.bytesPerS = kRate / 2;
  link.burst(16e6, 3 * kRate);
  CHECK(static_cast<double>(link.limit()) < 0.7 * kRate);
  link.bytesPerS = kRate;
  for (int i = 0; i < 10; ++i) {
    link.burst(4 << 20, 3 * kRate);
  }
  CHECK(static_cast<double>(link.limit()) > kRate);
  CHECK(static_cast<double>(link.limit()) < 1.4 * kRate);
}

// Short bursts fill nothing, and the next long one is not held up.
TEST(route_pacing_does_not_take_small_bursts_for_a_slow_link) {
  Link link;
  for (int i = 0; i < 10; ++i) {
    link.burst(64e3, 3 * kRate);
  }
  CHECK_EQ(link.limit(), 0u);
  link.burst(32e6, 3 * kRate);
  const auto limit = static_cast<double>(link.limit());
  for (int i = 0; i < 10; ++i) {
    link.burst(64e3, 3 * kRate);
  }
  CHECK_EQ(static_cast<double>(link.limit()), limit);
}

// The queue is that of others.
TEST(route_pacing_leaves_new_connections_alone) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.minRoundTrip = milliseconds(40);
  s.roundTrip = milliseconds(80);
  s.inFlight = 80'000;
  for (int i = 0; i < 20; ++i) {
    s.now += milliseconds(5);
    s.acknowledged += 14'480;
    CHECK_EQ(pacing.observe(s), 0u);
  }
}

// BBR keeps four segments in flight for 200 ms now and then, and the smoothed
// round trip stays as it was for some time.
TEST(route_pacing_keeps_its_rate_while_bbr_measures_the_round_trip) {
  Link link;
  link.tells = false;
  link.burst(32e6, 3 * kRate);
  RoutePacing& pacing = link.ends[0].pacing;
  RoutePacing::Sample s;
  s.now = link.now;
  s.minRoundTrip = milliseconds(40);
  s.roundTrip = milliseconds(80);
  s.inFlight = 5792;
  s.acknowledged = static_cast<uint64_t>(link.ends[0].acknowledged);
  for (int i = 0; i < 100; ++i) {
    s.now += milliseconds(5);
    s.acknowledged += 700;
    CHECK_EQ(pacing.observe(s), link.limit());
  }
}

// A connection is replaced, and its bytes are no longer in the sum.
TEST(route_pacing_survives_other_connections) {
  Link link;
  link.burst(32e6, 3 * kRate);
  const uint64_t limit = link.limit();
  link.ends[0].acknowledged /= 2;
  link.burst(32e6, 3 * kRate);
  CHECK(
      std::abs(
          static_cast<double>(link.limit()) / static_cast<double>(limit) - 1) <
      0.2);
}

// Both ends send at once: acknowledgements wait, and come faster than the link
// carries data.
TEST(route_pacing_is_not_misled_by_acknowledgements_that_have_waited) {
  for (const double back : {64e6, 16e6, 8e6, 4e6}) {
    Link link;
    for (int i = 0; i < 8; ++i) {
      link.burst(16e6, 3 * kRate, back);
      CHECK(static_cast<double>(link.limit()) < 1.4 * kRate);
      CHECK(static_cast<double>(link.limit()) > 1.1 * kRate);
      // Short bursts are not held up.
      const auto other = static_cast<double>(link.ends[1].limit);
      CHECK(other == 0 || other > kRate);
    }
  }
}

// An older peer does not say when data has arrived.
TEST(route_pacing_makes_do_with_acknowledgements) {
  Link link;
  link.tells = false;
  for (int i = 0; i < 8; ++i) {
    link.burst(16e6, 3 * kRate);
    CHECK(std::abs(static_cast<double>(link.limit()) / kRate - 1.25) < 0.1);
  }
}

// A burst overflows the queue before the smoothed round trip shows that one.
TEST(route_pacing_learns_from_what_a_burst_loses) {
  Link link;
  link.smoothed = true;
  link.tells = false;
  link.bbrTakes = 1.7;
  link.room = 1.3e6;
  for (int i = 0; i < 12; ++i) {
    link.burst(8e6, 10 * kRate);
  }
  CHECK(static_cast<double>(link.limit()) > kRate);
  CHECK(static_cast<double>(link.limit()) < 1.7 * kRate);
  const double lost = link.ends[0].lost;
  for (int i = 0; i < 12; ++i) {
    link.burst(8e6, 10 * kRate);
  }
  CHECK(link.ends[0].lost - lost < 0.07 * 12 * 8e6);
}

// The far end reads what has come behind a loss in a clump, once that has been
// sent again. Another connection has lost nothing.
TEST(route_pacing_does_not_take_a_clump_behind_a_loss_for_a_fast_link) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.now = TimePoint{std::chrono::seconds(100)};
  s.minRoundTrip = milliseconds(40);
  s.roundTrip = milliseconds(60);
  s.inFlight = 8 << 20;
  s.rate = static_cast<uint64_t>(1.1 * kRate);
  double sent = 0, limit = 0;
  for (int i = 0; i < 400; ++i) {
    s.now += milliseconds(5);
    s.arrivedAt = s.now - milliseconds(20);
    sent += 0.005 * kRate;
    s.delivered = static_cast<uint64_t>(sent) / 1448;
    s.lost += i % 50 == 0 ? 10 : 0;
    s.arrived = i % 50 >= 8 // a round trip later
        ? static_cast<uint64_t>(sent)
        : s.arrived + static_cast<uint64_t>(0.001 * kRate);
    limit = static_cast<double>(pacing.observe(s));
    CHECK(limit < 1.5 * kRate);
  }
  CHECK(limit > kRate);
}

// The answers have waited in a long queue, too.
TEST(route_pacing_takes_no_clump_for_fast_that_a_long_queue_has_held_back) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.now = TimePoint{std::chrono::seconds(100)};
  s.minRoundTrip = milliseconds(40);
  s.roundTrip = milliseconds(110);
  s.inFlight = 15 << 20;
  s.rate = static_cast<uint64_t>(1.05 * kRate);
  double sent = 0, limit = 0;
  for (int i = 0; i < 800; ++i) {
    s.now += milliseconds(5);
    s.arrivedAt = s.now - milliseconds(90);
    sent += 0.005 * kRate;
    s.delivered = static_cast<uint64_t>(sent) / 1448;
    s.lost += i % 100 == 40 ? 10 : 0;
    // Lost bytes have come again after two round trips.
    s.arrived = i >= 100 && i % 100 >= 44 && i % 100 < 88
        ? s.arrived + static_cast<uint64_t>(0.001 * kRate)
        : static_cast<uint64_t>(sent);
    limit = static_cast<double>(pacing.observe(s));
    CHECK(limit < 1.35 * kRate);
    CHECK(i < 100 || limit > 1.2 * kRate); // nor for slow, before it
  }
}

// A burst of many round trips keeps its queue short.
TEST(route_pacing_does_not_fill_the_queue_by_a_long_burst) {
  Link link;
  for (int i = 0; i < 8; ++i) {
    link.burst(16e6, 3 * kRate);
  }
  const double lost = link.ends[0].lost;
  link.burst(128e6, 3 * kRate, 128e6);
  CHECK(link.ends[0].lost - lost < 0.005 * 128e6);
  // It still finds out that the link is faster.
  link.bytesPerS = 2 * kRate;
  link.room *= 2;
  link.burst(256e6, 6 * kRate);
  CHECK(static_cast<double>(link.limit()) > 1.8 * kRate);
}

// Drops at random are no queue.
TEST(route_pacing_ignores_a_few_drops) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.minRoundTrip = s.roundTrip = milliseconds(40);
  s.inFlight = 1 << 20;
  for (int i = 0; i < 1000; ++i) {
    s.now += milliseconds(5);
    s.acknowledged += 144'800;
    s.delivered += 100;
    s.lost += i % 2 == 0 ? 5 : 4;
    CHECK_EQ(pacing.observe(s), 0u);
  }
}

// All questions after the first wait behind the burst itself.
TEST(route_pacing_measures_a_burst_between_two_answers) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.now = TimePoint(std::chrono::seconds(100));
  s.minRoundTrip = s.roundTrip = milliseconds(40);
  s.inFlight = 100;
  const auto answered = [&](Nanos after, uint64_t bytes) {
    s.now += after;
    s.arrivedAt = s.now - milliseconds(20);
    s.arrived += bytes;
    return pacing.observe(s);
  };
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(answered(milliseconds(10), 100), 0u);
  }
  s.inFlight = 5 << 20;
  s.roundTrip = milliseconds(60);
  const auto limit = static_cast<double>(answered(milliseconds(40), 4'000'000));
  CHECK(std::abs(limit / (1.25 * 100e6) - 1) < 0.01);
}

// They go on whatever the pace is.
TEST(route_pacing_does_not_stop_for_many_drops) {
  RoutePacing pacing;
  RoutePacing::Sample s;
  s.minRoundTrip = s.roundTrip = milliseconds(40);
  s.inFlight = 1 << 20;
  s.rate = static_cast<uint64_t>(kRate);
  for (int i = 0; i < 1000; ++i) {
    s.now += milliseconds(5);
    s.acknowledged += 100;
    s.delivered += 100;
    s.lost += 20;
    const auto limit = static_cast<double>(pacing.observe(s));
    CHECK(i < 10 ? limit == 0 || limit > 0.6 * kRate : limit > 0.6 * kRate);
    if (i % 100 == 99) { // a pause
      s.inFlight = 0;
      s.now += milliseconds(500);
      pacing.observe(s);
      s.inFlight = 1 << 20;
    }
  }
}

TEST(connections_that_carry_share_the_pace_of_their_route) {
  constexpr uint64_t kMuch = 64 << 10;
  using Shares = std::vector<double>;
  CHECK(paceShares({}).empty());
  // All carry, or none: by what each has carried before.
  CHECK(paceShares({{30, kMuch, 1}, {10, kMuch, 1}}) == Shares({0.75, 0.25}));
  CHECK(paceShares({{30, 0}, {10, 100}}) == Shares({0.75, 0.25}));
  CHECK(
      paceShares({{0, kMuch, 1}, {0, kMuch, 1}, {0, 0}}) ==
      Shares({0.5, 0.5, 1.0 / 3}));
  // One that had carried little, beside idle ones that had carried much.
  CHECK(
      paceShares({{50, 0}, {1, kMuch, 1}, {49, 100}}) ==
      Shares({0.5, 1, 0.49}));
}

// A training receives at full rate in pauses of its own bursts.
TEST(acknowledgements_of_the_other_direction_are_no_burst) {
  CHECK(!carries({.inFlightBytes = 20'000}));
  CHECK(!carries({.inFlightBytes = 100, .messageBytes = 100}));
  CHECK(carries({.inFlightBytes = 20'000, .messageBytes = 100}));
}

} // namespace
} // namespace resilient::test
