#include "path/rate_limit.h"

#include <array>
#include <vector>

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kStarvation = 100'000;

// Some users with frames of their own sizes; sends as the engine does.
struct Shared {
  RateLimit limit;
  TimePoint now{seconds(100)};
  std::vector<uint64_t> frameBytes; // by user - 1; 0: nothing to send
  std::vector<uint64_t> sent = std::vector<uint64_t>(frameBytes.size(), 0);
  std::vector<int> urgency{}; // by user - 1; empty: all alike

  // All that may leave now.
  void pump(RateLimit::User user) {
    const uint64_t bytes = frameBytes[user - 1];
    while (bytes != 0 && limit.mayTake(user, now)) {
      limit.took(user, bytes, now);
      sent[user - 1] += bytes;
    }
    limit.endTurn(user);
  }
  void run(Nanos duration) {
    const TimePoint end = now + duration;
    for (RateLimit::User u = 1; u <= frameBytes.size(); ++u) {
      pump(u);
    }
    while (limit.idleTurn() && limit.readyAt() < end) {
      now = std::max(now, limit.readyAt());
      pump(limit.nextTurn([this](RateLimit::User user) {
        return urgency.empty() ? 0 : urgency[user - 1];
      }));
    }
    now = end;
  }
};

TEST(rate_limit_keeps_the_mean_whatever_the_frames) {
  for (uint64_t bytes : {100ull, 1500ull, 65536ull, 4000000ull}) {
    Shared s{RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {bytes}};
    s.run(seconds(20));
    const double expected = 20e6;
    CHECK(static_cast<double>(s.sent[0]) >= 0.98 * expected - 1);
    CHECK(
        static_cast<double>(s.sent[0]) <=
        expected * 1.01 + static_cast<double>(bytes));
  }
}

TEST(rate_limit_knows_how_much_of_it_is_used) {
  Shared s{RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {1500}};
  CHECK_EQ(s.limit.use(s.now), 0);
  s.run(seconds(30));
  CHECK(s.limit.use(s.now) > 0.99 && s.limit.use(s.now) <= 1);
  s.frameBytes[0] = 0;
  s.run(seconds(3));
  CHECK(s.limit.use(s.now) > 0.3 && s.limit.use(s.now) < 0.4);
  for (int i = 0; i < 3000; ++i) {
    s.limit.took(1, 5000, s.now += milliseconds(10));
  }
  CHECK(std::abs(s.limit.use(s.now) - 0.5) < 0.02);
}

TEST(rate_limit_lets_little_go_at_once_after_a_pause) {
  Shared s{RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {1000}};
  s.run(milliseconds(1));
  s.frameBytes[0] = 0;
  s.run(seconds(1000));
  CHECK(!s.limit.waiting());
  s.frameBytes[0] = 1000;
  const uint64_t before = s.sent[0];
  s.run(Nanos(1));
  CHECK(s.sent[0] - before <= 3000); // 2 ms, and a frame
  CHECK(s.sent[0] - before >= 1000);
}

// A timer that comes late is no pause: the time belonged to those who waited.
TEST(rate_limit_makes_up_for_a_late_turn) {
  Shared s{RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {1000}};
  s.run(milliseconds(5));
  CHECK(s.limit.waiting());
  s.now += milliseconds(8);
  const uint64_t before = s.sent[0];
  s.run(Nanos(1));
  CHECK(s.sent[0] - before >= 8000 && s.sent[0] - before <= 10000);
}

TEST(rate_limit_is_shared_frame_by_frame) {
  Shared s{
      RateLimit(1e6, kStarvation),
      TimePoint{seconds(1)},
      {10000, 10000, 10000}};
  s.run(seconds(3));
  for (uint64_t bytes : s.sent) {
    CHECK(bytes >= 970'000 && bytes <= 1'030'000);
  }
  // Who has nothing to send leaves its share to the others.
  s.frameBytes[1] = 0;
  const auto before = s.sent;
  s.run(seconds(2));
  CHECK(s.sent[1] == before[1]);
  CHECK(s.sent[0] - before[0] >= 970'000);
  CHECK(s.sent[2] - before[2] >= 970'000);
}

TEST(rate_limit_serves_the_most_urgent_first) {
  Shared s{
      RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {5000, 5000, 5000}};
  s.run(milliseconds(20)); // all three wait
  s.urgency = {3, 1, 2};
  const auto before = s.sent;
  s.run(seconds(2));
  // The others get a frame each for every 100,000 bytes.
  CHECK(s.sent[1] - before[1] >= 1'780'000);
  CHECK(s.sent[0] - before[0] >= 80'000 && s.sent[0] - before[0] <= 110'000);
  CHECK(s.sent[2] - before[2] >= 80'000 && s.sent[2] - before[2] <= 110'000);
  // It is work-conserving.
  s.frameBytes[1] = 0;
  const auto then = s.sent;
  s.run(seconds(2));
  CHECK(s.sent[2] - then[2] >= 1'850'000);
  CHECK(s.sent[0] - then[0] >= 80'000);
}

TEST(rate_limit_goes_on_when_one_that_waits_is_gone) {
  Shared s{RateLimit(1e6, kStarvation), TimePoint{seconds(1)}, {50000, 50000}};
  s.run(milliseconds(1));
  CHECK(s.limit.idleTurn());
  s.limit.leave(1);
  s.frameBytes[0] = 0;
  const uint64_t before = s.sent[1];
  s.run(seconds(1));
  CHECK(s.sent[1] - before >= 900'000);
}

TEST(rate_limit_counts_what_was_not_asked_for) {
  RateLimit limit(1e6, kStarvation);
  TimePoint now{seconds(1)};
  CHECK(limit.mayTake(1, now));
  limit.took(1, 500'000, now); // acknowledgements never wait
  CHECK(!limit.mayTake(1, now + milliseconds(480)));
  CHECK(limit.mayTake(1, now + milliseconds(500)) == false); // not its turn
  CHECK(limit.idleTurn());
  CHECK_EQ(limit.nextTurn([](RateLimit::User) { return 0; }), 1u);
  CHECK(limit.mayTake(1, now + milliseconds(500)));
}

} // namespace
} // namespace resilient::test
