#include "path/bbr_restart.h"

#include <vector>

#include "tests/check.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A connection with BBR, which begins anew when that is due.
struct Connection {
  TimePoint now{seconds(100)};
  BbrRestart restart{now};
  TimePoint measuredAt = now; // by BBR
  bool queue = true; // in each burst
  bool frames = false; // small ones in pauses
  TimePoint measuresUntil{};
  int restarts = 0;
  int spoilt = 0; // bursts in which BBR measures

  bool measures() {
    const bool due = now - measuredAt >= seconds(10);
    measuredAt = due ? now : measuredAt;
    return due;
  }
  void burst(Nanos lasts, Nanos pause) {
    spoilt += now < measuresUntil;
    measures(); // at once, behind a pause
    TimePoint end = now + lasts;
    for (; now < end; now += milliseconds(5)) {
      spoilt += measures();
      restart.observe(now, /*carries=*/true, queue);
    }
    look();
    for (end = now + pause; now < end; now += milliseconds(5)) {
      if (frames && measures()) {
        measuresUntil = now + milliseconds(240);
      }
      if (frames) {
        look();
      }
    }
  }
  void look() { // in a pause
    restart.observe(now, /*carries=*/false, queue);
    if (restart.due(now)) {
      restart.restarted(now);
      measuredAt = now;
      ++restarts;
    }
  }
};

// Regular bursts of any length and with any pauses.
Connection regularBursts(int burst, int pause, bool frames) {
  Connection c;
  c.queue = false;
  c.frames = frames;
  for (int i = 0; i < 10; ++i) {
    c.burst(milliseconds(burst), milliseconds(pause));
  }
  c.spoilt = c.restarts = 0;
  const TimePoint begin = c.now;
  for (int i = 0; i < 100; ++i) {
    c.burst(milliseconds(burst), milliseconds(pause));
  }
  CHECK_EQ(c.spoilt, 0);
  // Not much oftener than BBR would have measured.
  CHECK(c.restarts <= 1.7 * toSeconds(c.now - begin) / 10 + 1);
  return c;
}

TEST(bbr_measures_in_no_burst_of_regular_ones) {
  for (const int burst : {50, 160, 600, 1200}) {
    for (const int pause : {200, 300, 1000, 1700, 2500, 6300, 9500, 15'000}) {
      Connection c = regularBursts(burst, pause, /*frames=*/false);
      // With a queue in each burst it has to measure now and then.
      c.queue = true;
      for (int i = 0; i < 100; ++i) {
        c.burst(milliseconds(burst), milliseconds(pause));
      }
      CHECK(c.spoilt <= 15);
    }
  }
}

// They begin the measurement, which goes on for a while. The end of a longer
// pause is not known well enough.
TEST(bbr_measures_in_no_burst_behind_a_pause_with_small_frames) {
  for (const int burst : {50, 160, 600, 1200}) {
    for (const int pause : {200, 300, 1000, 1700, 2500, 6300}) {
      regularBursts(burst, pause, /*frames=*/true);
    }
  }
}

// Pauses that are no pauses do not count.
TEST(bbr_restarts_see_a_burst_with_gaps_as_one) {
  Connection c;
  for (int i = 0; i < 100; ++i) {
    c.burst(milliseconds(100), milliseconds(20));
    c.burst(milliseconds(100), milliseconds(40));
    c.burst(milliseconds(100), milliseconds(1200));
  }
  CHECK(c.spoilt <= 2);
  CHECK(c.restarts < 2 * 160 / 10);
}

// Irregular bursts may come at any time.
TEST(bbr_begins_anew_every_few_seconds_without_a_rhythm) {
  Connection c;
  c.queue = false;
  int spoilt = 0;
  for (int i = 0; i < 200; ++i) {
    c.burst(milliseconds(160), milliseconds(i % 2 == 0 ? 400 : 2400 + 7 * i));
    spoilt += c.spoilt;
    c.spoilt = 0;
  }
  CHECK(spoilt <= 2);
}

// A pipeline sends regularly within an iteration, and then there is a longer
// pause, in which acknowledgements of the other direction are under way.
TEST(bbr_measures_in_no_burst_behind_a_longer_pause_than_usual) {
  Connection c;
  c.queue = false;
  c.frames = true;
  for (int i = 0; i < 40; ++i) {
    for (int k = 0; k < 8; ++k) {
      c.burst(milliseconds(550), milliseconds(300));
    }
    c.burst(milliseconds(550), milliseconds(1600));
    c.burst(milliseconds(1850), milliseconds(1400));
  }
  CHECK_EQ(c.spoilt, 0);
}

// It begins with the shortest round trip of minutes. So if the route is longer
// now, it has to find that out first.
TEST(bbr_does_not_begin_anew_without_a_new_round_trip) {
  Connection c;
  for (int i = 0; i < 6; ++i) { // without a rhythm
    c.burst(milliseconds(100), milliseconds(i % 2 == 0 ? 500 : 1500));
  }
  CHECK_EQ(c.restarts, 1);
  c.queue = false;
  c.burst(milliseconds(100), milliseconds(500));
  c.burst(milliseconds(100), milliseconds(1500));
  c.burst(milliseconds(100), milliseconds(500));
  CHECK_EQ(c.restarts, 2);
}

} // namespace
} // namespace resilient::test
