#include "path/faults.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/check.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

const TimePoint kStart = TimePoint(1000s);

FaultPlan plan(const std::string& text) {
  FaultPlan p = FaultPlan::parse(text);
  p.begin(kStart);
  return p;
}

TEST(a_rule_concerns_only_the_paths_it_names) {
  FaultPlan p = plan("drop rank=1 peer=2 path=0");
  struct Case {
    int rank, peer, slot;
    bool hit;
  };
  for (Case c :
       {Case{1, 2, 0, true},
        Case{2, 1, 0, false},
        Case{1, 2, 1, false},
        Case{1, 3, 0, false},
        Case{0, 2, 0, false}}) {
    PathFaults f(p, c.rank, c.peer, c.slot);
    CHECK_EQ(f.any(), c.hit);
    CHECK_EQ(f.dropping(kStart), c.hit);
  }
  FaultPlan all = plan("drop");
  CHECK(PathFaults(all, 5, 6, 7).dropping(kStart));
  CHECK(!PathFaults(all, 5, 6, 7).stalled(kStart));
}

TEST(windows_include_their_beginning_and_exclude_their_end) {
  for (const char* text :
       {"stall at_s=5 for_s=2",
        "stall from_s=5 until_s=7",
        "stall from_s=5 for_s=2"}) {
    FaultPlan p = plan(text);
    PathFaults f(p, 0, 1, 0);
    CHECK(!f.stalled(kStart + 5s - 1ns));
    CHECK(f.stalled(kStart + 5s));
    CHECK(f.stalled(kStart + 7s - 1ns));
    CHECK(f.stalledUntil(kStart + 6s) == kStart + 7s);
    CHECK(!f.stalled(kStart + 7s));
    CHECK(f.nextChange(kStart) == kStart + 5s);
    CHECK(f.nextChange(kStart + 5s) == kStart + 7s);
    CHECK(f.nextChange(kStart + 7s) == kNever);
  }
}

TEST(steps_are_a_clock_of_their_own) {
  FaultPlan p = plan("drop from_step=3 until_step=5; stall at_step=4");
  PathFaults f(p, 0, 1, 0);
  const bool dropping[] = {false, false, false, true, true, false};
  for (int64_t step = 0; step < 6; ++step) {
    p.setStep(step);
    CHECK_EQ(f.dropping(kStart), dropping[step]);
    CHECK_EQ(f.stalled(kStart), step == 4);
  }
  p.setStep(4);
  CHECK(f.stalledUntil(kStart) == kNever);
  CHECK(f.nextChange(kStart) == kNever);
}

TEST(a_delay_moves_everything_by_the_same) {
  FaultPlan p = plan("delay ms=60 from_s=10 until_s=40; delay ms=5");
  PathFaults f(p, 0, 1, 0);
  CHECK(f.release(kStart, 100) == kStart + 5ms);
  CHECK(f.release(kStart + 10s, 1) == kStart + 10s + 65ms);
  // Sent after the long delay has ended, still not before what was sent
  // within it.
  CHECK(f.release(kStart + 40s - 1ns, 1) == kStart + 40s + 65ms - 1ns);
  CHECK(f.release(kStart + 40s, 1) == kStart + 40s + 65ms - 1ns);
  CHECK(f.release(kStart + 41s, 1) == kStart + 41s + 5ms);
}

TEST(a_rate_is_kept_over_any_time_and_idling_saves_nothing_up) {
  FaultPlan p = plan("rate bytes_per_s=1e6; rate bytes_per_s=2e6");
  PathFaults f(p, 0, 1, 0);
  CHECK(f.release(kStart, 500000) == kStart + 500ms);
  CHECK(f.release(kStart, 500000) == kStart + 1s);
  CHECK(f.release(kStart + 10s, 1000) == kStart + 10s + 1ms);
}

TEST(a_hopeless_rate_does_not_overflow_the_clock) {
  FaultPlan p = plan("rate bytes_per_s=1");
  PathFaults f(p, 0, 1, 0);
  for (int i = 0; i < 100; ++i) {
    CHECK(f.release(kStart, size_t{1} << 40) == kStart + 1000000000s);
  }
}

TEST(jitter_stays_in_its_bounds_and_replays_from_the_seed) {
  auto run = [](const std::string& seed, int slot) {
    FaultPlan p = plan("delay ms=60 jitter_ms=5; " + seed);
    PathFaults f(p, 0, 1, slot);
    std::vector<int64_t> delays;
    for (int i = 0; i < 200; ++i) {
      // Far apart, so that order does not hide the jitter.
      TimePoint now = kStart + i * 1s;
      Nanos d = f.release(now, 1000) - now;
      CHECK(d >= 55ms && d <= 65ms);
      delays.push_back(d.count());
    }
    return delays;
  };
  auto a = run("seed=7", 0);
  CHECK(a == run("seed=7", 0));
  CHECK(a != run("seed=8", 0));
  CHECK(a != run("seed=7", 1));
  auto [low, high] = std::minmax_element(a.begin(), a.end());
  CHECK(*high - *low > 8000000); // uses most of the 10 ms
}

TEST(a_cut_after_bytes_hits_each_connection_at_that_byte) {
  FaultPlan p = plan("cut after_bytes=3000");
  PathFaults f(p, 0, 1, 0);
  for (int connection = 0; connection < 3; ++connection) {
    f.connectionOpened(kStart);
    CHECK_EQ(f.bytesUntilCut(0, kStart), 3000);
    CHECK_EQ(f.bytesUntilCut(2999, kStart), 1);
    CHECK_EQ(f.bytesUntilCut(3000, kStart), 0);
    f.cutDone(3000, kStart);
  }
  FaultPlan twice = plan("cut after_bytes=10 times=2");
  PathFaults g(twice, 0, 1, 0);
  g.cutDone(10, kStart);
  CHECK_EQ(g.bytesUntilCut(10, kStart), 0);
  g.cutDone(10, kStart);
  CHECK_EQ(g.bytesUntilCut(10, kStart), SIZE_MAX);
}

TEST(a_cut_after_bytes_that_comes_later_counts_from_then) {
  FaultPlan p = plan("");
  PathFaults f(p, 0, 1, 0);
  f.connectionOpened(kStart);
  CHECK_EQ(f.bytesUntilCut(5000, kStart), SIZE_MAX);
  const uint64_t id = p.add("cut after_bytes=3000 times=3", kStart);
  CHECK_EQ(f.bytesUntilCut(5000, kStart), 3000);
  CHECK_EQ(f.bytesUntilCut(7999, kStart), 1);
  CHECK_EQ(f.bytesUntilCut(8000, kStart), 0);
  f.cutDone(8000, kStart);
  // The next connection: from its beginning, and a second rule from then on.
  f.connectionOpened(kStart);
  CHECK_EQ(f.bytesUntilCut(0, kStart), 3000);
  p.add("cut after_bytes=10 times=1", kStart);
  CHECK_EQ(f.bytesUntilCut(100, kStart), 10);
  CHECK_EQ(f.bytesUntilCut(110, kStart), 0);
  f.cutDone(110, kStart);
  f.connectionOpened(kStart);
  CHECK_EQ(f.bytesUntilCut(110, kStart), 2890); // once is enough
  // Added while there is no connection: the same as at the start.
  CHECK(p.remove(id));
  p.add("cut after_bytes=20", kStart);
  f.connectionOpened(kStart);
  CHECK_EQ(f.bytesUntilCut(15, kStart), 5);
}

TEST(timed_cuts_happen_once_each_and_never_to_a_later_connection) {
  FaultPlan p = plan("cut at_s=3 every_s=1 until_s=6");
  PathFaults f(p, 0, 1, 0);
  f.connectionOpened(kStart);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 3s - 1ns), SIZE_MAX);
  CHECK(f.nextChange(kStart) == kStart + 3s);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 3s), 0);
  CHECK_EQ(f.bytesUntilCut(99, kStart + 3500ms), 0); // until it is done
  f.cutDone(99, kStart + 3500ms);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 3600ms), SIZE_MAX);
  CHECK(f.nextChange(kStart + 3600ms) == kStart + 4s);
  // Nobody was connected at 4 s: nothing left to cut.
  f.connectionOpened(kStart + 4100ms);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 4200ms), SIZE_MAX);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 5s), 0);
  f.cutDone(0, kStart + 5s);
  CHECK_EQ(f.bytesUntilCut(0, kStart + 100s), SIZE_MAX);
  CHECK(f.nextChange(kStart + 6s) == kNever);
}

TEST(a_cut_at_a_step_happens_once) {
  FaultPlan p = plan("cut at_step=2");
  PathFaults f(p, 0, 1, 0);
  f.connectionOpened(kStart);
  p.setStep(1);
  CHECK_EQ(f.bytesUntilCut(0, kStart), SIZE_MAX);
  p.setStep(3); // step 2 was passed over
  CHECK_EQ(f.bytesUntilCut(0, kStart), 0);
  f.cutDone(0, kStart);
  CHECK_EQ(f.bytesUntilCut(0, kStart), SIZE_MAX);
}

TEST(rules_come_and_go_while_running) {
  FaultPlan p = plan("");
  CHECK(p.empty());
  PathFaults f(p, 0, 1, 0);
  f.connectionOpened(kStart);
  CHECK(!f.any());
  TimePoint now = kStart + 50s;
  uint64_t stall = p.add("stall peer=1", now);
  uint64_t drop = p.add("drop for_s=2", now);
  CHECK(stall != drop);
  CHECK(f.stalled(now));
  CHECK(f.dropping(now) && !f.dropping(now + 2s));
  CHECK(p.remove(stall));
  CHECK(!p.remove(stall));
  CHECK(!f.stalled(now));
  p.add("cut", now);
  CHECK_EQ(f.bytesUntilCut(5, now), 0);
  f.cutDone(5, now);
  CHECK_EQ(f.bytesUntilCut(5, now + 1h), SIZE_MAX);
  CHECK_THROWS(StatusError, "one rule at a time", p.add("drop; drop", now));
  CHECK_THROWS(StatusError, "only be given at the start", p.add("seed=1", now));
}

TEST(separators_and_comments_are_skipped) {
  FaultPlan p = FaultPlan::parse(
      ";; drop peer=1 # all of it; drop\n\n\tstall peer=2 ;\r\nseed=9\n");
  CHECK_EQ(p.rules().size(), 2);
  CHECK_EQ(p.rules()[0].text, std::string("drop peer=1"));
  CHECK_EQ(p.seed(), 9);
}

TEST(errors_name_rule_key_and_what_is_allowed) {
  struct Case {
    const char* text;
    const char* part;
  };
  for (Case c :
       {Case{"drop; dealy ms=5", "fault rule 2 \"dealy ms=5\""},
        Case{"dealy ms=5", "want delay, rate, stall, cut, drop or seed=N"},
        Case{"delay", "delay needs ms=..."},
        Case{"delay ms=x", "ms=x: want milliseconds, 0 or more"},
        Case{"delay ms=-1", "ms=-1: want milliseconds"},
        Case{"delay ms=nan", "ms=nan"},
        Case{"delay ms=inf", "ms=inf"},
        Case{"delay ms=", "ms=: want"},
        Case{"delay ms=1 ms=2", "ms is given twice"},
        Case{"delay ms=1 bytes_per_s=3", "no key bytes_per_s for delay"},
        Case{"delay ms=1 foo=3", "allowed: ms jitter_ms rank peer"},
        Case{"rate", "rate needs bytes_per_s"},
        Case{"rate bytes_per_s=0", "1 or more"},
        Case{"rate 1e6", "\"1e6\" is not of the form key=value"},
        Case{"stall rank=1.5", "rank=1.5: want a whole number, 0 or more"},
        Case{"stall rank=-1", "rank=-1"},
        Case{"stall at_s=1", "at_s needs for_s"},
        Case{"stall at_s=1 from_s=2", "from_s and at_s exclude each other"},
        Case{"stall until_s=1 for_s=2", "until_s and for_s exclude"},
        Case{"stall from_s=2 until_s=2", "ends before it begins"},
        Case{"stall at_s=2 for_s=0", "ends before it begins"},
        Case{"drop from_step=2 until_step=1", "until_step is not after"},
        Case{"cut", "cut needs one of at_s, every_s, at_step or after_bytes"},
        Case{"cut after_bytes=0", "after_bytes=0"},
        Case{"cut after_bytes=5 at_s=1", "exclude each other"},
        Case{"cut at_s=1 times=2", "times goes with after_bytes"},
        Case{"cut at_s=1 every_s=0", "every_s=0"},
        Case{"drop from_s=1e30", "from_s=1e30"},
        Case{"seed=", "want seed=N"},
        Case{"seed=-1", "want seed=N"},
        Case{"seed=99999999999999999999", "want seed=N"}}) {
    CHECK_THROWS(StatusError, c.part, FaultPlan::parse(c.text));
  }
}

// Properties that must hold whatever the rules are.
TEST(any_plan_keeps_its_promises) {
  test::forSeeds(500, [](uint64_t seed) {
    Prng random(seed);
    auto number = [&](uint64_t below, uint64_t min = 0) {
      return std::to_string(min + random.below(below));
    };
    std::string text = "seed=" + number(1000);
    for (uint64_t i = random.below(6); i > 0; --i) {
      std::string window = random.chance(0.5)
          ? " at_s=" + number(10) + " for_s=" + number(5, 1)
          : random.chance(0.5) ? " from_s=" + number(10)
                               : "";
      switch (random.below(6)) {
        case 0:
          text +=
              ";delay ms=" + number(900) + " jitter_ms=" + number(300) + window;
          break;
        case 1:
          text += ";rate bytes_per_s=" + number(100000, 1000) + window;
          break;
        case 2:
          text += ";stall" + window;
          break;
        case 3:
          text += ";drop" + window;
          break;
        case 4:
          text += ";cut at_s=" + number(10) + " every_s=" + number(3, 1);
          break;
        default:
          text += ";cut after_bytes=" + number(5000, 1);
      }
    }
    FaultPlan p = plan(text);
    PathFaults f(p, 0, 1, 0), twin(p, 0, 1, 0);
    f.connectionOpened(kStart);
    twin.connectionOpened(kStart);
    TimePoint now = kStart;
    TimePoint last = kStart;
    uint64_t sent = 0;
    while (now < kStart + 20s) {
      CHECK(f.stalled(now) == (f.stalledUntil(now) > now));
      // Between now and the next change nothing changes by itself.
      TimePoint next = f.nextChange(now);
      CHECK(next > now);
      CHECK(f.nextChange(now) == twin.nextChange(now));
      TimePoint just = std::min(next, kStart + 30s) - 1ns;
      CHECK_EQ(f.stalled(now), f.stalled(just));
      CHECK_EQ(f.dropping(now), f.dropping(just));
      CHECK_EQ(f.bytesUntilCut(sent, now), f.bytesUntilCut(sent, just));
      size_t bytes = random.below(2000);
      TimePoint at = f.release(now, bytes);
      CHECK(at >= now && at >= last);
      CHECK(at == twin.release(now, bytes));
      last = at;
      size_t left = f.bytesUntilCut(sent, now);
      if (left <= bytes) {
        sent += left;
        CHECK_EQ(f.bytesUntilCut(sent, now), 0);
        f.cutDone(sent, now);
        twin.cutDone(sent, now);
        sent = 0;
        f.connectionOpened(now);
        twin.connectionOpened(now);
        CHECK(f.bytesUntilCut(0, now) > 0); // or it would spin
      } else {
        sent += bytes;
      }
      now += Nanos(1 + random.below(400000000));
    }
  });
}

} // namespace
} // namespace resilient
