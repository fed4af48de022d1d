#include "path/transport_choice.h"

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

constexpr double kGigabit = 125e6;
constexpr uint64_t kKiB = 1u << 10, kMiB = 1u << 20;

bool near(double value, double expected, double within) {
  return std::abs(value - expected) <= within;
}

StreamView cold() {
  StreamView s;
  s.roundTripS = 0.04;
  s.firstBytes = 14480;
  return s;
}

DatagramView datagrams() {
  DatagramView d;
  d.roundTripS = 0.04;
  d.bytesPerS = kGigabit;
  return d;
}

// 64 KiB are three flights from ten segments on, and 4 MiB eight: measured, 101
// and 203 ms for a collective that also waits for acknowledgements.
TEST(transport_choice_counts_the_flights_of_a_slow_start) {
  CHECK(near(streamArrivalS(cold(), kGigabit, 14e3), 0.020, 0.001));
  CHECK(near(streamArrivalS(cold(), kGigabit, 64e3), 0.100, 0.002));
  CHECK(near(datagramArrivalS(datagrams(), kGigabit, 64e3), 0.0225, 0.001));
  StreamView warm = cold();
  warm.firstBytes = 8e6;
  CHECK(near(streamArrivalS(warm, kGigabit, 4e6), 0.052, 0.001));
}

// BBR after bursts of 64 KiB: it sends 2.89 times that in a round trip, evenly.
TEST(transport_choice_counts_the_pace_of_bbr) {
  StreamView s = cold();
  s.paced = true;
  s.firstBytes = 2.89 * 65536;
  CHECK(near(streamArrivalS(s, kGigabit, 65536), 0.0338, 0.001));
}

TEST(transport_choice_prefers_datagrams_to_a_slow_start) {
  CHECK(datagramsUpTo(cold(), datagrams(), kGigabit) >= 4 * kMiB);
  // At first nothing is known of the link.
  DatagramView unknown = datagrams();
  unknown.bytesPerS = INFINITY;
  CHECK(datagramsUpTo(cold(), unknown, INFINITY) >= 4 * kMiB);
}

TEST(transport_choice_prefers_connections_that_have_got_going) {
  StreamView warm = cold();
  warm.firstBytes = 8e6;
  CHECK_EQ(datagramsUpTo(warm, datagrams(), kGigabit), 0u);
  warm.paced = true;
  CHECK_EQ(datagramsUpTo(warm, datagrams(), kGigabit), 0u);
}

// 10 Mbit/s of UDP on a link of 1 Gbit/s.
TEST(transport_choice_leaves_datagrams_that_are_policed) {
  DatagramView policed = datagrams();
  policed.bytesPerS = 1.25e6;
  CHECK(datagramsUpTo(cold(), policed, kGigabit) <= 128 * kKiB);
  StreamView paced = cold();
  paced.paced = true;
  paced.firstBytes = 2.89 * 65536;
  CHECK_EQ(datagramsUpTo(paced, policed, kGigabit), 0u);
}

TEST(transport_choice_takes_datagrams_for_everything_where_segments_are_lost) {
  StreamView lossy = cold();
  lossy.firstBytes = 8e6;
  lossy.lossRate = 0.01;
  lossy.mostBytesPerS = 12e6;
  CHECK_EQ(datagramsUpTo(lossy, datagrams(), kGigabit), UINT64_MAX);
  // Rare losses delay large messages only, which datagrams do at a price.
  lossy.lossRate = 1e-6;
  lossy.mostBytesPerS = INFINITY;
  CHECK_EQ(datagramsUpTo(lossy, datagrams(), kGigabit), 0u);
}

TEST(transport_choice_needs_a_round_trip) {
  CHECK_EQ(datagramsUpTo(StreamView(), datagrams(), kGigabit), 0u);
}

// Both arrivals are finite, and later for more bytes, for random measurements.
// A worse connection never gets more messages.
TEST(transport_choice_is_monotonic) {
  forSeeds(2000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    StreamView s;
    s.roundTripS = 1e-3 + prng.uniform() * 0.3;
    s.firstBytes = 1000 + prng.uniform() * 1e7;
    s.paced = prng.chance(0.5);
    s.lossRate = prng.chance(0.5) ? 0 : prng.uniform() * 0.2;
    const double link = 1e5 + prng.uniform() * 1e9;
    DatagramView d;
    d.roundTripS = s.roundTripS;
    d.bytesPerS = prng.chance(0.2) ? INFINITY : 1e5 + prng.uniform() * 1e9;
    double before = 0, otherBefore = 0;
    for (double bytes = 1000; bytes < 1e9; bytes *= 3) {
      const double stream = streamArrivalS(s, link, bytes);
      const double datagram = datagramArrivalS(d, link, bytes);
      CHECK(std::isfinite(stream) && std::isfinite(datagram));
      CHECK(stream >= before && datagram >= otherBefore);
      before = stream;
      otherBefore = datagram;
    }
    StreamView worse = s;
    worse.lossRate = s.lossRate + 0.01;
    CHECK(datagramsUpTo(worse, d, link) >= datagramsUpTo(s, d, link));
  });
}

TEST(recent_loss_counts_none_of_a_full_queue) {
  RecentLoss loss;
  loss.observe(100, 50, false); // too few to tell
  CHECK_EQ(loss.rate(), 0.0);
  loss.observe(1000, 500, true);
  CHECK_EQ(loss.rate(), 0.0);
  loss.observe(2000, 550, false);
  CHECK(near(loss.rate(), 100.0 / 1100, 0.005));
  loss.observe(10, 0, false); // the connections are others
  loss.observe(30'010, 0, false);
  CHECK(loss.rate() < 0.001);
  RecentLoss all;
  all.observe(1000, 1000, false);
  CHECK(near(all.rate(), 1, 0.01));
  RecentLoss one;
  one.observe(1000, 1, false);
  CHECK_EQ(one.rate(), 0.0);
}

// As they are seen: a few at a time.
TEST(recent_loss_takes_no_chance_for_another_link) {
  forSeeds(200, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    const double rate = seed % 2 == 0 ? 0.01 : 0.001;
    RecentLoss loss;
    uint64_t packets = 0, lost = 0;
    while (packets < 60'000) {
      for (uint64_t i = prng.below(60) + 1; i > 0; --i) {
        ++packets;
        lost += prng.chance(rate) ? 1 : 0;
      }
      loss.observe(packets, lost, false);
      CHECK(loss.rate() < 0.01 + 3 * rate);
      CHECK(packets < 30'000 || loss.rate() > rate / 20);
    }
  });
}

// The connections of a policed link lose nothing; those of a lossy one lose as
// much as its datagrams, also in bursts.
TEST(loss_comparison_tells_policed_datagrams_from_a_lossy_link) {
  using Verdict = LossComparison::Verdict;
  LossComparison policed;
  policed.observe(0.4, 1, 0, 0);
  CHECK(policed.verdict() == Verdict::kUnknown);
  policed.observe(0.4, 1, 100, 1);
  CHECK(policed.verdict() == Verdict::kOneAlone);
  policed.forget();
  CHECK(policed.verdict() == Verdict::kUnknown);
  policed.observe(0.4, 1, 10, 0); // other connections
  policed.observe(0.4, 1, 20, 0);
  CHECK(policed.verdict() == Verdict::kUnknown);
  int wrong = 0, undecided = 0;
  forSeeds(500, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    const double rate = 0.05 + prng.uniform() * 0.45;
    const double burst = 1 + prng.uniform() * 9;
    LossComparison lossy;
    uint64_t lost = 0;
    bool inBurst = false;
    for (uint64_t i = 1; i <= 3000; ++i) {
      const double begins = rate / (burst * (1 - rate));
      inBurst = prng.chance(inBurst ? 1 - 1 / burst : begins);
      lost += inBurst ? 1 : 0;
      lossy.observe(rate, burst, i, lost);
      wrong += lossy.verdict() == Verdict::kOneAlone ? 1 : 0;
    }
    undecided += lossy.verdict() == Verdict::kUnknown ? 1 : 0;
  });
  CHECK_EQ(undecided, 0);
  CHECK(wrong <= 500 * 3000 / 200);
}

TEST(lateness_takes_no_pause_for_a_slow_way) {
  Lateness lateness;
  lateness.observe(1, 0.1);
  CHECK(!lateness.known());
  CHECK_EQ(lateness.factor(), 1.0);
  lateness.observe(0.2, 0.1); // 10, 2
  CHECK(near(lateness.factor(), 2, 1e-9));
  lateness.observe(1, 0.1); // 2, 10
  CHECK(near(lateness.factor(), 2, 1e-9));
  lateness.observe(0.5, 0.1); // 10, 5
  CHECK(near(lateness.factor(), 5, 1e-9));
}

// A host that is busy for once drops what its socket cannot hold.
TEST(transport_choice_takes_one_gap_for_one_loss) {
  RouteEvidence e;
  e.stream.roundTripS = e.datagrams.roundTripS = 0.04;
  e.stream.firstBytes = 16e6;
  e.streamBytesPerS = e.datagramBytesPerS = e.datagrams.bytesPerS = 125e6;
  e.packets = 20'000;
  e.segments = 500; // too few to compare
  e.packetsLost = 220;
  e.lossBursts = 1;
  TransportChoice gap, lossy;
  const TimePoint now(std::chrono::hours(1));
  CHECK(gap.choose(e, now).upTo <= 4u << 20);
  e.lossBursts = 200;
  CHECK(lossy.choose(e, now).upTo > 4u << 20);
}

// A route whose connections would have to get going.
RouteEvidence coldRoute() {
  RouteEvidence e;
  e.stream.roundTripS = e.datagrams.roundTripS = 0.04;
  e.stream.firstBytes = 16e3;
  e.streamBytesPerS = e.datagramBytesPerS = e.datagrams.bytesPerS = 125e6;
  return e;
}

// UDP was blocked for a moment. A policer drops again and again.
TEST(transport_choice_takes_an_outage_for_no_policer) {
  for (const uint64_t bursts : {2, 40}) {
    RouteEvidence e = coldRoute();
    TransportChoice choice;
    const TimePoint now(std::chrono::hours(1));
    CHECK(choice.choose(e, now).upTo > 0);
    e.packets = 500;
    e.packetsLost = 350;
    e.lossBursts = bursts;
    e.lossBurstPackets = 350.0 / static_cast<double>(bursts);
    (void)choice.choose(e, now);
    e.segments += 1000; // none is lost
    CHECK_EQ(choice.choose(e, now).upTo > 0, bursts == 2);
  }
}

// Before it is known whether connections lose as many, a loss that parity can
// bear leaves bursts to datagrams: a connection would take three times as long.
TEST(transport_choice_keeps_datagrams_that_parity_makes_up_for) {
  for (const uint64_t perMille : {70, 150}) {
    RouteEvidence e = coldRoute();
    e.packets = 1000;
    e.packetsLost = e.lossBursts = perMille;
    TransportChoice choice;
    const TimePoint now(std::chrono::hours(1));
    CHECK_EQ(choice.choose(e, now).upTo > 0, perMille < 100);
    e.segments += 1000; // none is lost: UDP is policed
    (void)choice.choose(e, now);
    CHECK_EQ(choice.choose(e, now).upTo, 0u);
  }
}

// Connections began too fast, and lost what the queue could not hold. The link
// loses nothing, as datagrams show; or as much as they do.
TEST(transport_choice_forgets_what_only_connections_have_lost) {
  for (const double rate : {0.0, 0.1}) {
    RouteEvidence e;
    e.stream.roundTripS = e.datagrams.roundTripS = 0.01;
    e.stream.firstBytes = 3e6;
    e.streamBytesPerS = 125e6;
    e.datagramBytesPerS = e.datagrams.bytesPerS = 250e6;
    e.segments = 12'000;
    e.segmentsLost = 1'700;
    TransportChoice choice;
    TimePoint now(std::chrono::hours(1));
    CHECK_EQ(choice.choose(e, now).upTo, UINT64_MAX);
    uint64_t upTo = 0;
    for (int i = 0; i < 200; ++i) { // 1.4 MB, and heartbeats
      e.packets += 5;
      e.packetsLost = e.lossBursts =
          static_cast<uint64_t>(rate * static_cast<double>(e.packets));
      e.segments += i % 10 == 0;
      upTo = choice.choose(e, now += std::chrono::milliseconds(5)).upTo;
    }
    CHECK_EQ(upTo > 4 * kMiB, rate > 0);
  }
}

// Headers and parity are measured. They take time where the rate is
// known, also if it is only declared.
TEST(transport_choice_counts_what_datagrams_cost_the_link) {
  RouteEvidence e = coldRoute();
  e.streamBytesPerS = e.datagramBytesPerS = 0;
  e.datagrams.bytesPerS = INFINITY;
  const TimePoint now(std::chrono::hours(1));
  const auto upTo = [&] { return TransportChoice().choose(e, now).upTo; };
  e.datagrams.overhead = 1.7;
  CHECK_EQ(upTo(), 4 * kMiB);
  e.limitBytesPerS = 5e6;
  CHECK_EQ(upTo(), 512 * kKiB);
  e.datagrams.overhead = 1.06;
  CHECK_EQ(upTo(), 4 * kMiB);
}

// Connections never stop where all that a limit allows is sent, and need fewer
// bytes.
TEST(transport_choice_leaves_a_busy_limit_to_the_connections) {
  RouteEvidence e = coldRoute();
  e.limitBytesPerS = kGigabit;
  TransportChoice choice;
  TimePoint now(std::chrono::hours(1));
  const auto at = [&](double use) {
    e.limitUse = use;
    return choice.choose(e, now += std::chrono::milliseconds(5)).upTo;
  };
  CHECK(at(0.25) > 0);
  CHECK_EQ(at(0.35), 0u);
  CHECK_EQ(at(0.25), 0u); // as much with fewer bytes
  CHECK(at(0.15) > 0);
  CHECK(at(0.25) > 0);
  e.segments = 10'000;
  e.segmentsLost = 100;
  CHECK_EQ(at(0.9), UINT64_MAX);
}

// The provider may police no longer, so what was lost before does not count.
TEST(transport_choice_tries_datagrams_anew_that_were_policed) {
  RouteEvidence e = coldRoute();
  TransportChoice choice;
  TimePoint now(std::chrono::hours(1));
  e.packets = 1000;
  e.packetsLost = e.lossBursts = 400;
  (void)choice.choose(e, now);
  e.segments += 1000; // none is lost
  CHECK_CONTAINS(choice.choose(e, now).news, "for the next 60 s");
  CHECK_EQ(choice.choose(e, now += std::chrono::seconds(59)).upTo, 0u);
  now += std::chrono::seconds(1);
  for (int i = 0; i < 100; ++i) {
    CHECK(choice.choose(e, now += std::chrono::milliseconds(5)).upTo > 0);
    e.packets += 50;
  }
}

// A route of 40 ms with cold connections, on which a burst of 64 KiB is sent
// each 300 ms. One that goes by the predictions takes 43 ms as datagrams, and
// 120 over connections.
class Bursts {
 public:
  static constexpr Nanos kEvery = std::chrono::milliseconds(300);

  Bursts() {
    e.stream = cold();
    e.datagrams = datagrams();
    e.streamBytesPerS = e.datagramBytesPerS = kGigabit;
    e.segments = e.packets = 100'000;
  }
  // Returns the choice after a burst that took so many times as long.
  TransportChoice::Choice
  burst(bool asDatagrams, double times, uint64_t bytes = 65536) {
    (void)choice.choose(e, now); // it begins
    const auto b = static_cast<double>(bytes);
    const double predicted = asDatagrams
        ? datagramAnswerS(e.datagrams, kGigabit, b)
        : streamAnswerS(e.stream, kGigabit, b);
    auto& last = asDatagrams ? e.datagramBurst : e.streamBurst;
    last = {last.number + 1, bytes, fromSeconds(times * predicted)};
    e.streamBurst.number += streamsBeside;
    now += kEvery;
    auto made = choice.choose(e, now);
    if (!made.news.empty()) {
      news = made.news;
    }
    return made;
  }

  RouteEvidence e;
  TransportChoice choice;
  TimePoint now{std::chrono::hours(1)};
  std::string news; // the last
  bool streamsBeside = false; // in each burst
};

TEST(transport_choice_leaves_datagrams_that_are_late) {
  Bursts bursts;
  for (int i = 0; i < 20; ++i) {
    CHECK(bursts.burst(true, i % 3 == 0 ? 9 : 1.2).upTo > 0); // hiccups
  }
  int late = 1;
  while (bursts.burst(true, 4).upTo > 0) {
    CHECK(++late < 3); // below a second
  }
  CHECK_CONTAINS(bursts.news, "no messages as datagrams for the next 60 s");
  CHECK_CONTAINS(bursts.news, "they take 4.0 times as long");
  TimePoint since = bursts.now;
  while (bursts.burst(false, 1).upTo == 0) {
  }
  CHECK(bursts.now - since >= std::chrono::minutes(1));
  CHECK(bursts.now - since < std::chrono::minutes(1) + 2 * Bursts::kEvery);
  while (bursts.burst(true, 4).upTo > 0) {
  }
  since = bursts.now;
  while (bursts.burst(false, 1).upTo == 0) {
  }
  CHECK(bursts.now - since >= std::chrono::minutes(2));
}

// The predictions may be wrong for both, each in its way: by their model, these
// datagrams are hardly late, and connections would be far slower.
TEST(transport_choice_goes_by_what_both_kinds_took) {
  Bursts bursts;
  CHECK(bursts.burst(true, 1.4).upTo > 0);
  CHECK(bursts.burst(true, 1.4).upTo > 0);
  CHECK(bursts.burst(false, 0.3).upTo > 0);
  CHECK_EQ(bursts.burst(false, 0.3).upTo, 0u);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(bursts.burst(false, 0.3).upTo, 0u);
  }
}

// Bursts of 64 KiB were slow to be sent for once, so the link seems to carry no
// more than 3.6 MB/s, at which both kinds would be as fast. But datagrams try
// three times as much.
TEST(transport_choice_takes_no_rate_that_is_exceeded_for_the_links) {
  RouteEvidence e;
  e.stream.roundTripS = e.datagrams.roundTripS = 0.04;
  e.stream.firstBytes = 229e3;
  e.stream.paced = true;
  e.streamBytesPerS = 0.5e6;
  e.datagramBytesPerS = 3.6e6;
  e.datagrams.bytesPerS = 10.4e6;
  TransportChoice choice;
  CHECK(choice.choose(e, TimePoint(std::chrono::hours(1))).upTo >= 65536);
  e.datagrams.bytesPerS = 3.6e6;
  CHECK_EQ(choice.choose(e, TimePoint(std::chrono::hours(1))).upTo, 0u);
}

// Connections that have carried something are faster than the model says of
// cold ones. Datagrams are not late for that.
TEST(transport_choice_keeps_datagrams_that_arrive_in_time) {
  Bursts bursts;
  for (int i = 0; i < 20; ++i) {
    CHECK(bursts.burst(i % 4 > 1, i % 4 > 1 ? 0.8 : 0.1).upTo > 0);
  }
}

TEST(transport_choice_returns_to_datagrams_if_all_are_late) {
  Bursts bursts;
  while (bursts.burst(true, 4).upTo > 0) {
  }
  for (int i = 0; i < 20; ++i) { // other bursts than those of datagrams
    CHECK_EQ(bursts.burst(false, 4, 1u << 20).upTo, 0u);
  }
  CHECK_EQ(bursts.burst(false, 4).upTo, 0u);
  CHECK(bursts.burst(false, 4).upTo > 0);
  for (int i = 0; i < 20; ++i) {
    CHECK(bursts.burst(true, 4).upTo > 0);
  }
}

// A policer lets the few chunks pass that still go as datagrams.
TEST(transport_choice_stays_with_connections_while_few_datagrams_are_in_time) {
  Bursts bursts;
  while (bursts.burst(true, 4).upTo > 0) {
  }
  for (int i = 0; i < 20; ++i) {
    CHECK_EQ(bursts.burst(i % 2 == 0, i % 2 == 0 ? 1 : 0.3, 16384).upTo, 0u);
    CHECK_EQ(bursts.burst(false, 0.3).upTo, 0u);
  }
}

// By the predictions, cold connections are slower even than late datagrams.
TEST(transport_choice_tries_connections_once_where_late_datagrams_are_lost) {
  for (const double times : {0.4, 1.0}) { // of what is predicted of them
    Bursts bursts;
    const auto late = [&] {
      bursts.e.packets += 50;
      bursts.e.packetsLost += 24;
      bursts.e.lossBursts += 8;
      return bursts.burst(true, 2).upTo;
    };
    CHECK(late() > 0);
    CHECK_EQ(late(), 0u);
    CHECK_EQ(bursts.burst(false, times).upTo, 0u);
    CHECK_EQ(bursts.burst(false, times).upTo > 0, times == 1);
    for (int i = 0; i < 20 && times == 1; ++i) {
      CHECK(bursts.burst(true, 2).upTo > 0);
    }
  }
}

TEST(transport_choice_judges_no_burst_that_had_to_wait) {
  Bursts beside, limited, small, unknown;
  limited.e.limitBytesPerS = kGigabit;
  unknown.e.stream.roundTripS = 0;
  for (int i = 0; i < 20; ++i) {
    // Connections carry something, too, which ends with it or later.
    beside.streamsBeside = i % 2 == 0;
    beside.e.streamIdle = beside.streamsBeside;
    CHECK(beside.burst(true, 4).upTo > 0);
    CHECK(limited.burst(true, 4).upTo > 0);
    (void)unknown.burst(true, 4);
    small.e.datagramBurst = {
        small.e.datagramBurst.number + 1, 100, Bursts::kEvery};
    CHECK(small.choice.choose(small.e, small.now += Bursts::kEvery).upTo > 0);
  }
  CHECK_EQ(unknown.news, "");
}

} // namespace
} // namespace resilient::test
