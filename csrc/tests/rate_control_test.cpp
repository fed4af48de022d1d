#include "datagram/rate_control.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/datagram_pair.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// One end always has something to send.
class Stream {
 public:
  Stream(uint64_t seed, const DatagramLink& link, RecoveryKind kind)
      : pair_(seed, schemesOf(kind), link, backOf(link)),
        header_(96, std::byte(1)),
        payload_(kBytes, std::byte(7)) {
    what_.header = header_;
    what_.payload = payload_;
    what_.trafficClass = TrafficClass::kGradient;
    pair_.onDelivery = [this] {
      delivered_ += kBytes;
      pair_.received(1).clear();
    };
  }
  // Payload bytes delivered per second.
  double run(Nanos time) {
    const uint64_t before = delivered_;
    const TimePoint end = pair_.now() + time;
    while (pair_.now() < end) {
      // Enough for 100 ms of any rate, and a millisecond to go.
      const auto enough = std::max<uint64_t>(
          4 * kBytes,
          static_cast<uint64_t>(pair_.sender(0).rate().bytesPerS() / 10));
      while (pair_.sender(0).waitingBytes() <
             std::min(enough, uint64_t(32) << 20)) {
        pair_.send(0, what_);
      }
      bool over = false;
      pair_.at(std::min(end, pair_.now() + milliseconds(5)), [&over] {
        over = true;
      });
      CHECK(pair_.run([&over] { return over; }, seconds(1)));
      CHECK_EQ(pair_.error().toString(), "ok");
      longest_ = std::max(longest_, pair_.sender(0).rate().roundTrip());
      congested_ = congested_ || pair_.sender(0).rate().congested();
    }
    return static_cast<double>(delivered_ - before) / toSeconds(time);
  }
  // The time that a message of so many objects takes.
  Nanos transfer(int objects) {
    const TimePoint begun = pair_.now();
    const uint64_t end = delivered_ + kBytes * objects;
    for (int i = 0; i < objects; ++i) {
      pair_.send(0, what_);
    }
    CHECK(pair_.run([this, end] { return delivered_ >= end; }, seconds(10)));
    const Nanos took = pair_.now() - begun;
    CHECK(pair_.runUntilIdle(seconds(10)));
    return took;
  }
  void rest(Nanos time) {
    bool over = false;
    pair_.at(pair_.now() + time, [&over] { over = true; });
    CHECK(pair_.run([&over] { return over; }, 2 * time));
  }
  DatagramPair& pair() {
    return pair_;
  }
  const RateControl& rate() {
    return pair_.sender(0).rate();
  }
  // Since the last call: smoothed round trip, and whether congested() was true.
  Nanos takeLongest() {
    return std::exchange(longest_, Nanos(0));
  }
  bool takeCongested() {
    return std::exchange(congested_, false);
  }

 private:
  static constexpr size_t kBytes = 128u << 10;
  static RecoverySchemes schemesOf(RecoveryKind kind) {
    RecoverySchemes schemes;
    for (RecoveryScheme& s : schemes) {
      s.kind = kind;
    }
    return schemes;
  }
  static DatagramLink backOf(DatagramLink link) {
    link.loss = 0;
    return link;
  }

  DatagramPair pair_;
  std::vector<std::byte> header_, payload_;
  ObjectToSend what_;
  uint64_t delivered_ = 0;
  Nanos longest_{};
  bool congested_ = false;
};

DatagramLink linkOf(double bytesPerS, Nanos oneWay) {
  DatagramLink link;
  link.bytesPerS = bytesPerS;
  link.oneWay = oneWay;
  link.queueBytes = // a round trip's worth
      static_cast<uint64_t>(bytesPerS * toSeconds(2 * oneWay)) + 100'000;
  return link;
}

// From nothing known to the link's rate: within some round trips of doubling.
// (Headers and seals take 7 % of it; the longest has sent for 16 round trips.)
TEST(rate_control_finds_the_rate_of_a_link) {
  for (const double rate : {2.5e6, 25e6, 125e6}) {
    for (const int ms : {2, 20, 60}) {
      Stream s(
          1, linkOf(rate, milliseconds(ms)), RecoveryKind::kSelectiveRepeat);
      s.run(seconds(2));
      const double goodput = s.run(seconds(2));
      CHECK(goodput > 0.7 * rate);
      CHECK(s.rate().capacityBytesPerS() > 0.8 * rate);
      CHECK(s.rate().capacityBytesPerS() < 1.3 * rate);
    }
  }
}

// Loss is not congestion.
TEST(rate_control_is_not_slowed_by_random_loss) {
  for (const RecoveryKind kind :
       {RecoveryKind::kSelectiveRepeat, RecoveryKind::kSemantic}) {
    double goodput[2], wire[2];
    for (const bool lossy : {false, true}) {
      DatagramLink link = linkOf(25e6, milliseconds(20));
      link.loss = lossy ? 0.02 : 0;
      Stream s(2, link, kind);
      s.run(seconds(2));
      const uint64_t before = s.pair().wireBytes(0);
      goodput[lossy] = s.run(seconds(4));
      wire[lossy] = static_cast<double>(s.pair().wireBytes(0) - before) / 4;
    }
    CHECK(wire[1] > 0.85 * wire[0]);
    CHECK(goodput[1] > 0.85 * goodput[0]);
  }
}

TEST(rate_control_follows_a_link_that_changes) {
  const double rate = 30e6;
  Stream s(3, linkOf(rate, milliseconds(15)), RecoveryKind::kSelectiveRepeat);
  s.run(seconds(3));
  s.pair().link(0).bytesPerS = rate / 3;
  s.pair().link(0).queueBytes = static_cast<uint64_t>(rate / 3 * 0.06);
  s.takeCongested();
  s.run(seconds(2));
  CHECK(s.takeCongested()); // what did not fit was lost
  s.takeLongest();
  const double slow = s.run(seconds(2));
  const Nanos queued = s.takeLongest();
  CHECK(slow > 0.75 * rate / 3);
  CHECK(s.rate().capacityBytesPerS() < 1.3 * rate / 3);
  CHECK(queued < milliseconds(100)); // 30 ms, and a queue of at most 60
  s.pair().link(0).bytesPerS = rate;
  s.pair().link(0).queueBytes = static_cast<uint64_t>(rate * 0.06);
  s.run(seconds(5));
  const double back = s.run(seconds(2));
  CHECK(back > 0.75 * rate);
}

// Where packets come irregularly, or the link stands still now and then, it
// looks faster than it is, and a queue builds. It must not pass for a longer
// way, which would get a longer queue, and so on.
TEST(rate_control_takes_no_standing_queue_for_the_way) {
  for (const bool stalls : {false, true}) {
    DatagramLink link = linkOf(2.5e6, milliseconds(20));
    link.queueBytes = 64u << 20;
    if (stalls) {
      link.stallEvery = milliseconds(30);
      link.stallFor = milliseconds(5);
    } else {
      link.reorder = 0.3;
    }
    Stream s(4, link, RecoveryKind::kSelectiveRepeat);
    s.run(seconds(20));
    s.takeLongest();
    CHECK(s.run(seconds(60)) > 0.8 * link.bytesPerS);
    CHECK(s.rate().minRoundTrip() < milliseconds(45));
    CHECK(s.takeLongest() < milliseconds(150));
  }
}

// Queues that are not of our making, and losses as ever, are no congestion.
TEST(rate_control_is_not_slowed_by_queues_and_usual_losses) {
  double times[2]; // of all messages
  for (const bool lossy : {false, true}) {
    DatagramLink link = linkOf(25e6, milliseconds(20));
    link.queueBytes = 64u << 20;
    link.stallEvery = milliseconds(60);
    link.stallFor = milliseconds(20);
    link.loss = lossy ? 0.02 : 0;
    Stream s(5, link, RecoveryKind::kSemantic);
    times[lossy] = 0;
    for (int i = 0; i < 300; ++i) {
      times[lossy] += toSeconds(s.transfer(8));
    }
  }
  CHECK(times[1] < 1.25 * times[0]);
}

// A new route that is longer looks like a queue as long as the shorter one is
// remembered. With a link that always loses something that is no congestion.
TEST(rate_control_is_not_slowed_by_a_longer_way) {
  DatagramLink link = linkOf(25e6, milliseconds(20));
  link.loss = 0.005;
  Stream s(6, link, RecoveryKind::kSelectiveRepeat);
  const double before = (s.run(seconds(3)), s.run(seconds(5)));
  s.pair().link(0).oneWay += milliseconds(15);
  s.run(seconds(1));
  s.takeCongested();
  CHECK(s.run(seconds(20)) > 0.85 * before);
  CHECK(!s.takeCongested());
  CHECK(s.rate().minRoundTrip() > milliseconds(54));
}

// --- fed by hand

struct Fed {
  explicit Fed(double firstBytesPerS = 10e6)
      : rate(milliseconds(20), firstBytesPerS, 0) {}
  // One round trip of it.
  void round(Nanos roundTrip, uint64_t lost, double bytesPerS = 10e6) {
    DeliverySample s;
    s.usuallyLost = s.usualVariance = usuallyLost;
    s.roundTrip = s.interval = roundTrip;
    s.bytes = static_cast<uint64_t>(bytesPerS * toSeconds(roundTrip));
    s.packets = packets;
    s.lost = lost;
    s.sentBytesPerS = sentBytesPerS;
    s.limitedBySender = limitedBySender;
    now += roundTrip;
    rate.onSample(s, now);
  }
  void settle() {
    for (int i = 0; i < 20; ++i) {
      round(milliseconds(20), 0);
    }
  }
  RateControl rate;
  TimePoint now{seconds(7)};
  double usuallyLost = 0;
  uint64_t packets = 100;
  double sentBytesPerS = 0;
  bool limitedBySender = false;
};

TEST(rate_control_congestion_is_loss_with_a_queue) {
  Fed f;
  for (int i = 0; i < 30; ++i) {
    f.round(milliseconds(20), 5);
    CHECK(!f.rate.congested()); // loss alone
  }
  const double before = f.rate.bytesPerS();
  for (int i = 0; i < 30; ++i) {
    f.round(milliseconds(40), 0);
    CHECK(!f.rate.congested()); // a queue alone
  }
  for (int i = 0; i < 3; ++i) {
    f.round(milliseconds(40), 1);
  }
  CHECK(f.rate.congested());
  CHECK(f.rate.bytesPerS() < 0.8 * before);
  // It passes: first the state, then the cut.
  for (int i = 0; i < 20; ++i) {
    f.round(milliseconds(20), 5);
  }
  CHECK(!f.rate.congested());
  for (int i = 0; i < 100; ++i) {
    f.round(milliseconds(20), 5);
  }
  CHECK(f.rate.bytesPerS() > 0.7 * 10e6);
}

TEST(rate_control_congestion_is_more_loss_than_usual) {
  Fed f;
  f.usuallyLost = 4;
  f.round(milliseconds(20), 4);
  for (int i = 0; i < 30; ++i) {
    f.round(milliseconds(40), 9);
    CHECK(!f.rate.congested());
  }
  for (int i = 0; i < 3; ++i) {
    f.round(milliseconds(40), 20);
  }
  CHECK(f.rate.congested());
}

// The last packets of a burst are a round of their own, behind the queue that
// the burst has made. One of these is lost now and then.
TEST(rate_control_takes_single_losses_at_the_ends_of_bursts_for_chance) {
  Fed f;
  for (int i = 0; i < 100; ++i) {
    f.packets = 4000;
    f.usuallyLost = 4;
    f.now += milliseconds(30);
    f.round(milliseconds(20), 4);
    f.packets = 30;
    f.usuallyLost = 0.03;
    f.round(milliseconds(40), 1);
    CHECK(!f.rate.congested());
  }
}

TEST(rate_control_congestion_may_take_rounds_of_few_packets_to_show) {
  Fed f;
  f.packets = 10;
  f.usuallyLost = 0.01;
  for (int i = 0; i < 10; ++i) {
    f.round(milliseconds(40), i % 2 == 0 ? 1 : 0);
  }
  CHECK(f.rate.congested());
}

TEST(rate_control_believes_a_longer_way_when_the_queue_is_gone) {
  Fed f;
  f.settle();
  const uint64_t window = f.rate.windowBytes();
  for (int i = 0; i < 201; ++i) { // more than 10 s
    CHECK(f.rate.windowBytes() > window / 2);
    f.round(milliseconds(50), 0);
  }
  CHECK(f.rate.windowBytes() < window / 3);
  CHECK_EQ(f.rate.minRoundTrip(), Nanos(milliseconds(20)));
  for (int i = 0; i < 3; ++i) {
    f.round(milliseconds(50), 0);
  }
  CHECK_EQ(f.rate.minRoundTrip(), Nanos(milliseconds(50)));
  CHECK(f.rate.windowBytes() > window);
}

// Bursts with rests between them: each ends with a queue and begins without.
TEST(rate_control_does_not_slow_down_where_bursts_queue) {
  Fed f;
  f.settle();
  const uint64_t window = f.rate.windowBytes();
  for (int i = 0; i < 500; ++i) {
    for (const auto trip : {20'300, 24'000, 24'000}) {
      f.round(std::chrono::microseconds(trip), 0);
      CHECK(f.rate.windowBytes() > window / 2);
    }
    f.now += milliseconds(30);
  }
}

// What arrives while less is in flight says nothing of the link's rate.
TEST(rate_control_forgets_no_rate_while_less_is_in_flight) {
  Fed f;
  f.settle();
  const double rate = f.rate.capacityBytesPerS();
  const uint64_t window = f.rate.windowBytes();
  for (int i = 0; f.rate.windowBytes() > window / 2; ++i) {
    CHECK(i < 500);
    f.round(milliseconds(24), 0);
  }
  for (int i = 0; f.rate.windowBytes() < window / 2; ++i) {
    CHECK(i < 20);
    f.round(milliseconds(24), 0, rate / 8);
  }
  f.round(milliseconds(23), 0, rate / 8); // sent before
  CHECK(f.rate.capacityBytesPerS() > 0.9 * rate);
}

// Reports and small messages are many packets, too.
TEST(rate_control_knows_the_rate_by_what_has_left_at_its_pace) {
  for (const bool slower : {false, true}) {
    Fed f(2e6);
    f.limitedBySender = true;
    f.sentBytesPerS = 1e6;
    for (int i = 0; i < 100; ++i) {
      f.round(milliseconds(20), 0, 1e6);
      CHECK(!f.rate.known());
    }
    int rounds = 0;
    for (; !f.rate.known(); ++rounds) {
      f.sentBytesPerS = f.rate.bytesPerS();
      f.round(milliseconds(20), 0, f.sentBytesPerS / (slower ? 3 : 1));
    }
    CHECK_EQ(rounds, slower ? 1 : 4);
  }
}

// Small messages while a process pauses, or behind the queue of others: their
// round trips tell nothing of the link's rate, before a burst and after one.
TEST(rate_control_looks_for_the_rate_where_small_messages_are_late) {
  Fed f(1e6);
  f.limitedBySender = true;
  for (int burst = 0; burst < 3; ++burst) {
    f.sentBytesPerS = 0.5e6;
    for (const int ms : {20, 20, 20, 28, 28, 28, 20, 20, 20}) {
      f.round(milliseconds(ms), 0, 0.5e6);
    }
    f.sentBytesPerS = f.rate.bytesPerS();
    f.round(milliseconds(20), 0, f.sentBytesPerS);
    CHECK(f.rate.bytesPerS() > 2 * f.sentBytesPerS);
  }
}

TEST(rate_control_keeps_to_the_limit_from_outside) {
  RateControl rate(milliseconds(20), 50e6, 3e6);
  CHECK(rate.bytesPerS() <= 3e6);
  DeliverySample s;
  s.roundTrip = s.interval = milliseconds(20);
  s.bytes = 10'000'000;
  s.packets = 100;
  TimePoint now{seconds(7)};
  for (int i = 0; i < 50; ++i) {
    rate.onSample(s, now += milliseconds(20));
    CHECK(rate.bytesPerS() <= 3e6);
  }
}

// The choice between datagrams and connections goes by this. By the rate of the
// moment it would change amid a burst, in each round that drains.
TEST(rate_control_tells_the_rate_of_a_burst_whatever_the_round) {
  Stream s(1, linkOf(25e6, milliseconds(20)), RecoveryKind::kSelectiveRepeat);
  s.run(seconds(2));
  int draining = 0;
  for (int i = 0; i < 200; ++i) {
    s.run(milliseconds(10));
    const RateControl& rate = s.rate();
    draining += rate.bytesPerS() < 0.8 * rate.capacityBytesPerS();
    CHECK(rate.burstBytesPerS() >= rate.capacityBytesPerS());
    CHECK(rate.burstBytesPerS() >= rate.bytesPerS());
  }
  CHECK(draining > 5);
  CHECK(RateControl(milliseconds(20), 50e6, 3e6).burstBytesPerS() <= 3e6);
}

// Nothing but messages of 128 or 256 KiB, which soon leave in less than half a
// round trip. The rest between them is no part of what is measured, however
// short it is.
TEST(rate_control_finds_the_rate_by_short_bursts) {
  for (const Nanos rest :
       {milliseconds(100), milliseconds(300), milliseconds(1000)}) {
    for (const int objects : {1, 2}) {
      Stream stream(
          1, linkOf(125e6, milliseconds(20)), RecoveryKind::kSelectiveRepeat);
      Nanos took{};
      for (int i = 0; i < 5; ++i) {
        took = stream.transfer(objects);
        stream.rest(rest);
      }
      // 20 ms, and 1 or 2 at the rate of the link.
      CHECK(took < milliseconds(25));
    }
  }
}

// Also after a time in which the link was slower. Clumps queued in it, so the
// rate was cut and takes time to grow back.
TEST(rate_control_follows_a_link_by_short_bursts) {
  for (const Nanos clump : {Nanos(0), Nanos(milliseconds(2))}) {
    DatagramLink link = linkOf(5e6, milliseconds(20));
    link.clump = clump;
    Stream stream(1, link, RecoveryKind::kSelectiveRepeat);
    (void)stream.run(seconds(3));
    CHECK(stream.rate().capacityBytesPerS() < 8e6);
    link.bytesPerS = 125e6;
    stream.pair().link(0) = link;
    for (int i = clump == Nanos(0) ? 16 : 60; i > 0; --i) {
      stream.rest(milliseconds(300));
      (void)stream.transfer(2);
    }
    CHECK(stream.rate().capacityBytesPerS() > 40e6);
    CHECK(stream.rate().capacityBytesPerS() < 200e6);
  }
}

// Small bursts that leave too fast to be measured, and a round trip that is too
// long for once: by a queue of others, or a pause of a process.
TEST(rate_control_keeps_what_it_expects_until_it_has_measured) {
  constexpr double kExpected = 125e6;
  RateControl rate(milliseconds(40), 1e6, 0);
  rate.expect(kExpected);
  rate.expect(0); // all connections are lost: nothing is known
  DeliverySample s;
  s.packets = 47;
  s.limitedBySender = true;
  TimePoint now{seconds(7)};
  for (int i = 0; i < 20; ++i) {
    s.roundTrip = milliseconds(i == 5 ? 60 : 40);
    rate.onSample(s, now += milliseconds(300));
    CHECK_EQ(rate.capacityBytesPerS(), kExpected);
  }
}

// Bursts that double, and one report that a process held back.
TEST(rate_control_grows_on_after_a_late_report) {
  RateControl rate(milliseconds(40), 0, 0);
  TimePoint now{seconds(7)};
  double sends = 0;
  for (int i = 0; i < 8; ++i) {
    sends = rate.bytesPerS();
    now += milliseconds(300);
    rate.onRestart(now);
    DeliverySample s;
    s.packets = 47;
    s.limitedBySender = true;
    s.roundTrip = milliseconds(i == 3 ? 50 : 40);
    rate.onSample(s, now += s.roundTrip + milliseconds(2));
    s.brief = true;
    s.interval = milliseconds(1);
    s.bytes = static_cast<uint64_t>(sends / 1000);
    s.roundTrip = Nanos(0); // as before
    rate.onSample(s, now += milliseconds(1));
  }
  CHECK(sends > 100e6);
}

// For 300 ms the link, or the machine of the far end, takes a hundredth, and
// drops what does not fit.
TEST(rate_control_returns_after_a_pause_with_losses) {
  forSeeds(4, [](uint64_t seed) {
    DatagramLink link = linkOf(50e6, milliseconds(20));
    link.loss = 0.01;
    Stream stream(seed, link, RecoveryKind::kSelectiveRepeat);
    CHECK(stream.run(seconds(3)) > 30e6);
    DatagramLink slow = link;
    slow.bytesPerS /= 100;
    slow.queueBytes = 100'000;
    stream.pair().link(0) = slow;
    (void)stream.run(milliseconds(300));
    stream.pair().link(0) = link;
    // The queue drains within 200 ms; then it is at least as after one cut.
    (void)stream.run(milliseconds(800));
    CHECK(stream.run(seconds(1)) > 25e6);
  });
}

TEST(rate_control_idle_time_says_nothing_of_the_link) {
  Fed f;
  for (int i = 0; i < 20; ++i) {
    f.round(milliseconds(20), 0);
  }
  const double before = f.rate.capacityBytesPerS();
  for (int i = 0; i < 100; ++i) {
    DeliverySample s;
    s.roundTrip = s.interval = milliseconds(20);
    s.bytes = 500;
    s.packets = 1;
    s.limitedBySender = true;
    f.rate.onSample(s, f.now += milliseconds(20));
  }
  CHECK_EQ(f.rate.capacityBytesPerS(), before);
}

} // namespace
} // namespace resilient::test
