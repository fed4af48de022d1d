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

// --- fed by hand

struct Fed {
  explicit Fed(double firstBytesPerS = 10e6)
      : rate(milliseconds(20), firstBytesPerS, 0) {}
  // One round trip of it.
  void round(Nanos roundTrip, uint64_t lost, double bytesPerS = 10e6) {
    DeliverySample s;
    s.roundTrip = s.interval = roundTrip;
    s.bytes = static_cast<uint64_t>(bytesPerS * toSeconds(roundTrip));
    s.packets = 100;
    s.lost = lost;
    now += roundTrip;
    rate.onSample(s, now);
  }
  RateControl rate;
  TimePoint now{seconds(7)};
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
