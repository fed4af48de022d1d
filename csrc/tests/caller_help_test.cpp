#include "transport/caller_help.h"

#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "tests/check.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

TimePoint now() {
  return std::chrono::steady_clock::now();
}

TEST(one_caller_helps_at_a_time) {
  CallerHelp help;
  std::optional<CallerHelp::Helper> first(std::in_place, help);
  CHECK(static_cast<bool>(*first));
  CHECK(help.helped());
  CHECK(!help.helpedByOther()); // by this thread
  std::async(std::launch::async, [&] {
    CHECK(help.helpedByOther());
    CallerHelp::Helper second(help);
    CHECK(!second);
  }).get();
  first->end();
  CHECK(!help.helped());
  std::async(std::launch::async, [&] {
    CallerHelp::Helper second(help);
    CHECK(!second); // the first one is not gone yet
  }).get();
  first.reset();
  std::async(std::launch::async, [&] {
    CallerHelp::Helper second(help);
    CHECK(static_cast<bool>(second));
  }).get();
  CHECK(!help.helped());
}

TEST(the_wake_timer_moves_to_earlier_times_only) {
  CallerHelp help;
  const TimePoint start = now();
  help.wakeBy(start + 1h);
  help.wakeBy(start + 2h);
  help.wakeBy(start + 1h);
  CHECK_EQ(help.timersSet(), uint64_t{1});
  help.wakeBy(start + 1min);
  CHECK_EQ(help.timersSet(), uint64_t{2});
  help.timerNoticed(); // it has not gone off: nothing to forget
  help.wakeBy(start + 1h);
  CHECK_EQ(help.timersSet(), uint64_t{2});
  help.wakeBy(start); // at once
  help.timerNoticed();
  help.wakeBy(start + 1h);
  CHECK_EQ(help.timersSet(), uint64_t{4});
}

// Parks a thread while this one helps, and wakes it so many times meanwhile;
// gives how long it slept after the help ended.
Nanos parkedAfter(
    CallerHelp& help,
    const std::function<void()>& leave,
    uint64_t wakes = 0) {
  CallerHelp::Helper helper(help);
  CHECK(static_cast<bool>(helper));
  std::promise<TimePoint> woke;
  std::thread parked([&] {
    help.park();
    woke.set_value(now());
  });
  while (!help.parked()) {
    std::this_thread::yield();
  }
  // The timer is set again only after the parked thread has seen it.
  for (const uint64_t before = help.timersSet();
       wakes != 0 && help.timersSet() <= before + wakes;
       std::this_thread::yield()) {
    help.wakeBy(now());
  }
  auto future = woke.get_future();
  CHECK(future.wait_for(5ms) == std::future_status::timeout);
  helper.end();
  const TimePoint ended = now();
  leave();
  const TimePoint at = future.get();
  parked.join();
  CHECK(!help.parked());
  return at - ended;
}

TEST(a_parked_thread_lingers_after_the_help) {
  CallerHelp help;
  const Nanos slept = parkedAfter(help, [&] { help.lingerFrom(now()); });
  CHECK(slept >= LeftWork::kLinger);
}

TEST(only_callers_that_stay_away_shorten_the_linger) {
  CallerHelp help;
  // Callers came back again and again; then something was due.
  (void)parkedAfter(
      help,
      [&] {
        help.lingerFrom(now() + 1h);
        help.wakeBy(now());
      },
      5);
  CHECK(parkedAfter(help, [&] { help.lingerFrom(now()); }) >= 1ms);
}

TEST(a_parked_thread_lingers_longer_where_system_calls_are_slow) {
  CallerHelp help(1ms);
  const Nanos slept = parkedAfter(help, [&] { help.lingerFrom(now()); }, 5);
  CHECK(slept >= 5ms);
}

TEST(a_parked_thread_wakes_up_for_what_is_due) {
  CallerHelp help;
  const Nanos slept = parkedAfter(help, [&] {
    help.lingerFrom(now() + 1h);
    help.wakeParked();
  });
  CHECK(slept < 10min);
}

TEST(left_work_waits_longer_where_callers_come_back) {
  LeftWork left;
  const auto turns = [&](int times) {
    for (int i = 0; i < times; ++i) {
      left.leave();
      left.onTurn();
    }
  };
  left.onTurn(); // nothing was left: this counts for nothing
  turns(LeftWork::kTrusted - 1);
  CHECK(left.patience() == LeftWork::kSoon);
  turns(1);
  CHECK(left.patience() == LeftWork::kLinger);
  left.onNobodyCame();
  CHECK(left.patience() == LeftWork::kLinger);
  left.leave();
  left.onNobodyCame();
  CHECK(left.patience() == LeftWork::kSoon);
}

} // namespace
} // namespace resilient
