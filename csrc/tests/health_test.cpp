#include "failover/health.h"

#include "path/path_count.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const PathHealth::Limits kLimits{milliseconds(50), milliseconds(500)};

struct Watched {
  TimePoint now{seconds(100)};
  PathHealth health{now};
  PathEvidence evidence;

  PathVerdict after(Nanos time) {
    now += time;
    return health.observe(evidence, kLimits, now);
  }
};

TEST(health_doubts_early_and_gives_up_late) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 7;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(48)) == PathVerdict::kUncertain);
  CHECK(w.after(milliseconds(2)) == PathVerdict::kSuspect);
  CHECK(w.after(milliseconds(440)) == PathVerdict::kSuspect);
  CHECK(w.after(milliseconds(20)) == PathVerdict::kStalled);
  w.evidence.progress = 8; // it was only slow
  CHECK(w.after(milliseconds(20)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(40)) == PathVerdict::kUncertain);
}

// So the others have answered by the time at which it is suspect.
TEST(health_asks_the_others_after_half_the_time) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.roundTrip = milliseconds(20); // suspect after 50, if 70 are due
  w.evidence.progress = 7;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(33)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(3)) == PathVerdict::kUncertain);
  w.evidence.progress = 8;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
}

TEST(health_takes_an_answer_for_evidence_unless_it_is_in_doubt) {
  Watched w;
  CHECK(!w.health.answered(w.now)); // the round trip is not known
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 7;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(40)) == PathVerdict::kUncertain);
  CHECK(w.health.answered(w.now));
  CHECK(w.after(milliseconds(20)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(31)) == PathVerdict::kSuspect);
  CHECK(!w.health.answered(w.now));
}

// A process that pauses just after it was heard elsewhere is slow on all paths:
// only signs of life after a path began to owe show that it alone is silent.
TEST(health_compares_others_with_the_time_since_when_a_path_owes) {
  Watched w;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood); // last look when idle
  w.now += milliseconds(60);
  w.evidence.othersAt = w.now;
  w.evidence.owes = true;
  w.evidence.owesSince = w.now - milliseconds(1);
  CHECK(w.after(milliseconds(60)) == PathVerdict::kUncertain);
  CHECK(w.after(milliseconds(60)) == PathVerdict::kUncertain);
  w.evidence.othersAt = w.now; // asked elsewhere, it answers
  CHECK(w.after(milliseconds(1)) == PathVerdict::kSuspect);
}

TEST(health_of_an_idle_path_is_good) {
  Watched w;
  w.evidence.kernelOwes = true; // keepalive
  CHECK(w.after(seconds(10)) == PathVerdict::kGood);
  w.evidence.owes = true; // it begins to owe now
  CHECK(w.after(milliseconds(20)) == PathVerdict::kGood);
  w.evidence.heldOnPurpose = true;
  CHECK(w.after(seconds(10)) == PathVerdict::kGood);
}

// After an idle time the first look comes late; what counts is when it began
// to owe.
TEST(health_sees_the_first_silence_at_the_first_look) {
  Watched w;
  CHECK(w.after(seconds(10)) == PathVerdict::kGood);
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 7; // another measure: no sign of life
  w.evidence.owesSince = w.now + milliseconds(10);
  CHECK(w.after(milliseconds(59)) == PathVerdict::kUncertain);
  CHECK(w.after(milliseconds(2)) == PathVerdict::kSuspect);

  Watched late;
  CHECK(late.after(seconds(10)) == PathVerdict::kGood);
  late.evidence = w.evidence;
  late.evidence.owesSince = late.now + milliseconds(10);
  CHECK(late.after(milliseconds(61)) == PathVerdict::kSuspect);

  // That it was idle before is no silence.
  Watched early;
  CHECK(early.after(seconds(10)) == PathVerdict::kGood);
  early.evidence.owes = true; // the far kernel has it, its process not yet
  early.evidence.owesSince = early.now + milliseconds(95);
  early.evidence.othersAt = early.now + milliseconds(99);
  CHECK(early.after(milliseconds(100)) == PathVerdict::kGood);
}

TEST(health_waits_for_the_round_trip) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.roundTrip = milliseconds(200);
  (void)w.after(milliseconds(1));
  CHECK(w.after(milliseconds(390)) == PathVerdict::kUncertain); // 200 + 200
  CHECK(w.after(milliseconds(20)) == PathVerdict::kSuspect);
  CHECK(w.after(milliseconds(180)) == PathVerdict::kSuspect);
  CHECK(w.after(milliseconds(20)) == PathVerdict::kStalled); // 3 * 200
}

TEST(health_gap_between_answers_is_no_round_trip) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.roundTrip = milliseconds(20);
  for (uint64_t i = 0; i < 30; ++i) {
    w.evidence.progress = i;
    CHECK(w.after(milliseconds(10)) == PathVerdict::kGood);
  }
  CHECK(w.after(milliseconds(49)) == PathVerdict::kUncertain);
  CHECK(w.after(milliseconds(2)) == PathVerdict::kSuspect);
}

// What was a real outage teaches no patience.
TEST(health_stays_quick_after_a_real_outage) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  for (uint64_t i = 1; i <= 5; ++i) {
    w.evidence.progress = i;
    (void)w.after(milliseconds(1));
    CHECK(w.after(milliseconds(52)) == PathVerdict::kSuspect);
    CHECK(w.after(milliseconds(300)) == PathVerdict::kSuspect);
  }
  w.evidence.progress = 6;
  (void)w.after(milliseconds(1));
  CHECK(w.health.wasOutage());
}

// That it has something to do is no proof that a path works.
TEST(health_is_not_proven_by_new_work) {
  Watched w;
  w.evidence.progress = 1000;
  (void)w.after(milliseconds(1));
  const TimePoint proven = w.health.provenAt();
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 3; // the other measure
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.health.provenAt() == proven);
  w.evidence.progress = 4;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.health.provenAt() == w.now);
}

// Of a way that works in one direction only, what comes in is no proof.
TEST(health_is_not_proven_by_what_comes_in) {
  Watched w;
  for (uint64_t i = 1; i <= 5; ++i) {
    w.evidence.progress = i;
    (void)w.after(milliseconds(10));
  }
  CHECK(w.health.provenAt() == TimePoint{});
}

// A lost packet holds up one connection; a dead way holds up all.
TEST(health_does_not_blame_a_path_whose_neighbours_work) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  (void)w.after(milliseconds(1));
  for (int i = 0; i < 10; ++i) {
    w.evidence.neighboursAt = w.now + milliseconds(15);
    CHECK(w.after(milliseconds(30)) == PathVerdict::kGood);
  }
  w.evidence.neighboursAt = w.now + milliseconds(190);
  CHECK(w.after(milliseconds(200)) == PathVerdict::kStalled);
}

// Both have lost their way at the same time. The one that was heard a moment
// later owes nothing, so nobody looks at it.
TEST(health_believes_a_silent_neighbour_no_longer_than_the_path) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 7;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  w.evidence.neighboursAt = w.now + milliseconds(1);
  CHECK(w.after(milliseconds(49)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(3)) == PathVerdict::kSuspect);
}

// After an outage the new neighbour is acknowledged at once. The path itself
// waits for a retransmission, as long as the outage was.
TEST(health_ends_no_doubt_for_a_neighbour) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  w.evidence.progress = 7;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.after(milliseconds(52)) == PathVerdict::kSuspect);
  for (int i = 0; i < 10; ++i) {
    w.evidence.neighboursAt = w.now + milliseconds(15);
    CHECK(w.after(milliseconds(30)) == PathVerdict::kSuspect);
  }
  w.evidence.progress = 8;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kGood);
  CHECK(w.health.wasOutage());
}

TEST(health_learns_patience_from_false_alarms) {
  Watched w;
  w.evidence.owes = w.evidence.kernelOwes = true;
  Nanos needed = milliseconds(50);
  for (uint64_t i = 1; i <= 5; ++i) {
    w.evidence.progress = i;
    (void)w.after(milliseconds(1));
    CHECK(w.after(needed - milliseconds(2)) == PathVerdict::kUncertain);
    CHECK(w.after(milliseconds(4)) == PathVerdict::kSuspect);
    needed = std::min<Nanos>(2 * needed, milliseconds(200));
  }
  for (uint64_t i = 6; i < 100; ++i) { // a long calm
    w.evidence.progress = i;
    (void)w.after(milliseconds(500));
  }
  CHECK(w.after(milliseconds(60)) == PathVerdict::kSuspect);
}

// The far kernel has everything: its process is slow, on this path as on the
// others.
TEST(health_does_not_blame_a_path_for_a_slow_process) {
  Watched w;
  w.evidence.owes = true;
  w.evidence.progress = 1;
  (void)w.after(milliseconds(1));
  w.evidence.othersAt = w.now;
  CHECK(w.after(milliseconds(200)) == PathVerdict::kUncertain);
  // Others answer, this one does not.
  w.evidence.othersAt = w.now;
  CHECK(w.after(milliseconds(1)) == PathVerdict::kSuspect);
}

TEST(damping_doubles_while_it_flaps_and_forgets) {
  FlapDamping damping{seconds(60)};
  TimePoint now{seconds(100)};
  damping.onUp(now);
  now += seconds(1000);
  damping.onLost(now); // once in a long time
  CHECK(damping.holdDown() == milliseconds(150));
  Nanos last = damping.holdDown();
  for (int i = 0; i < 20; ++i) {
    damping.onUp(now);
    now += milliseconds(200);
    damping.onLost(now);
    CHECK(damping.holdDown() == std::min<Nanos>(2 * last, seconds(60)));
    last = damping.holdDown();
  }
  damping.onUp(now);
  now += seconds(1000);
  damping.onLost(now);
  CHECK(damping.holdDown() == milliseconds(150));
}

// A flap every 200 ms for 30 s: the path comes to rest.
TEST(damping_leaves_few_returns_to_a_flapping_path) {
  FlapDamping damping{seconds(60)};
  TimePoint now{seconds(100)}, end = now + seconds(30);
  int returns = 0;
  while (now < end) {
    damping.onUp(now);
    returns += damping.holdDown() < milliseconds(200);
    now += milliseconds(200);
    damping.onLost(now);
    now += milliseconds(200);
  }
  CHECK(returns <= 2);
}

// What `count` connections carry, on a link with that limit in all and for
// each, and what is found.
int found(
    double linkBytesPerS,
    double eachBytesPerS,
    Nanos roundTrip,
    PathCount& count,
    Nanos duration = seconds(5)) {
  count.onRoundTrip(roundTrip);
  TimePoint now{seconds(100)};
  double acked = 0;
  for (const TimePoint end = now + duration; now < end;
       now += milliseconds(10)) {
    acked += 0.01 * std::min(linkBytesPerS, eachBytesPerS * count.count());
    PathCount::View view;
    view.ackedBytes = static_cast<uint64_t>(acked);
    view.busy = true;
    view.queueing = eachBytesPerS * count.count() > linkBytesPerS;
    count.observe(view, now);
  }
  return count.count();
}

TEST(path_count_one_is_enough_where_it_fills_the_link) {
  PathCount count({});
  CHECK_EQ(found(125e6, 125e6, milliseconds(1), count), 1);
}

TEST(path_count_grows_with_the_round_trip) {
  // ATLAS Table 1: 4 MiB of window over 80 ms are 52 MB/s.
  PathCount count({});
  count.onRoundTrip(milliseconds(80));
  CHECK_EQ(count.count(), 12); // at once, for 5 Gbit/s
  CHECK_EQ(found(625e6, 52e6, milliseconds(80), count), 12); // 624 MB/s
  PathCount more({});
  CHECK_EQ(found(1250e6, 52e6, milliseconds(80), more), 16);
  PathCount less({});
  const int n = found(300e6, 52e6, milliseconds(80), less);
  CHECK(n >= 6 && n <= 8); // 5.8 fill it
}

TEST(path_count_drops_what_does_not_help) {
  PathCount count({});
  count.onRoundTrip(milliseconds(40));
  CHECK_EQ(count.count(), 6);
  CHECK_EQ(found(12e6, 12e6, milliseconds(40), count, seconds(8)), 1);
}

TEST(path_count_uses_none_of_those_that_add_nothing) {
  for (const bool help : {false, true}) {
    PathCount count({.min = 0, .max = 3, .mayCost = 1.05});
    count.beginWith(3);
    TimePoint now{seconds(100)};
    double acked = 0;
    for (int i = 0; i < 800; ++i) {
      now += milliseconds(10);
      acked += 0.01 * 10e6 * (help ? 1 + count.count() : 1);
      PathCount::View view;
      view.ackedBytes = static_cast<uint64_t>(acked);
      view.busy = true;
      count.observe(view, now);
    }
    CHECK_EQ(count.count(), help ? 3 : 0);
  }
}

// A queue that drains arrives with what is sent, and looks like a rate.
TEST(path_count_takes_no_moment_of_luck_for_the_rate) {
  PathCount count({.min = 0, .max = 3, .mayCost = 1.05});
  count.beginWith(3);
  TimePoint now{seconds(100)};
  double acked = 0;
  for (int i = 0; i < 800; ++i) {
    now += milliseconds(10);
    acked += 0.01 * (i < 35 ? 14e6 : 10e6);
    PathCount::View view;
    view.ackedBytes = static_cast<uint64_t>(acked);
    view.busy = true;
    count.observe(view, now);
  }
  CHECK_EQ(count.count(), 0);
}

TEST(path_count_learns_nothing_from_an_idle_link) {
  PathCount count({});
  count.onRoundTrip(milliseconds(40));
  TimePoint now{seconds(100)};
  for (int i = 0; i < 2000; ++i) {
    now += milliseconds(10);
    PathCount::View view;
    view.ackedBytes = static_cast<uint64_t>(i);
    view.busy = i % 20 != 0;
    CHECK(!count.observe(view, now));
  }
  CHECK_EQ(count.count(), 6);
}

// A lone connection doubles what it carries in every round trip: another one
// beside it would seem to have done that.
TEST(path_count_waits_until_connections_are_up_to_speed) {
  PathCount count({.windowBytes = 64u << 20});
  const Nanos roundTrip = milliseconds(80);
  const double link = 250e6;
  count.onRoundTrip(roundTrip);
  TimePoint now{seconds(100)};
  double acked = 0;
  double rate = 0.2e6;
  for (int i = 0; i < 250; ++i) {
    now += milliseconds(20);
    rate = std::min(rate * 1.19, link); // doubles in 80 ms
    acked += 0.02 * rate;
    PathCount::View view;
    view.ackedBytes = static_cast<uint64_t>(acked);
    view.busy = true;
    count.observe(view, now);
    CHECK(count.count() <= 2); // one trial, which shows nothing
  }
  CHECK_EQ(count.count(), 1);
}

// While one is looking for the link's rate, it fills the link's queue.
TEST(path_count_does_not_judge_by_a_start_up) {
  for (const bool forEver : {false, true}) {
    PathCount count({});
    count.onRoundTrip(milliseconds(40));
    const int before = count.count();
    TimePoint now{seconds(100)};
    double acked = 0;
    int startUpTrials = 0;
    for (int i = 0; i < 800; ++i) {
      now += milliseconds(10);
      PathCount::View view;
      view.startingUp = forEver || i < 70;
      acked += 0.01 * (view.startingUp ? 80e6 : 12e6 * count.count());
      view.ackedBytes = static_cast<uint64_t>(acked);
      view.busy = true;
      startUpTrials += count.observe(view, now) && view.startingUp;
    }
    // Some never find it.
    CHECK_EQ(startUpTrials != 0, forEver);
    CHECK(forEver || count.count() > before);
  }
}

TEST(path_count_begins_with_what_was_found) {
  PathCount first({});
  CHECK_EQ(first.found(), 0);
  CHECK_EQ(found(125e6, 52e6, milliseconds(80), first, seconds(8)), 3);
  PathCount next({});
  next.beginWith(first.found());
  CHECK_EQ(next.count(), 3);
  next.onRoundTrip(milliseconds(80)); // instead of the 12 of the assumed link
  CHECK_EQ(next.count(), 3);
}

TEST(path_count_follows_the_window_that_connections_have) {
  PathCount count({});
  CHECK_EQ(count.neededWindowBytes(milliseconds(80)), 50'000'000u);
  count.setWindowBytes(64u << 20);
  count.onRoundTrip(milliseconds(80));
  CHECK_EQ(count.count(), 1);
}

TEST(path_count_keeps_to_a_number_that_is_given) {
  PathCount count({.min = 3, .max = 3});
  CHECK_EQ(found(625e6, 52e6, milliseconds(80), count), 3);
}

} // namespace
} // namespace resilient::test
