#include "failover/path_state.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

constexpr std::array kEvents{
    PathEvent::kConnected,
    PathEvent::kReconnected,
    PathEvent::kAnswered,
    PathEvent::kAnsweredLate,
    PathEvent::kAnsweredOlder,
    PathEvent::kSilent,
    PathEvent::kSilentLong,
    PathEvent::kNicDown,
    PathEvent::kNicUp,
    PathEvent::kNicUpOwing,
    PathEvent::kProved,
    PathEvent::kNeeded,
    PathEvent::kClosed};
static_assert(
    kEvents.size() == static_cast<size_t>(PathEvent::kClosed) + 1,
    "name the new event here");

std::vector<PathState> allStates() {
  std::vector<PathState> all(1); // down
  for (const Trust trust : {Trust::kUp, Trust::kProving}) {
    for (const Doubt doubt :
         {Doubt::kNone, Doubt::kSuspect, Doubt::kStalled, Doubt::kAlone}) {
      for (const bool nicDown : {false, true}) {
        all.push_back({true, trust, doubt, nicDown});
      }
    }
  }
  return all;
}

std::string resultText(const PathState& from, PathEvent event) {
  const PathStep result = step(from, event);
  std::string s = result.next == from ? "stays" : toString(result.next);
  const std::pair<PathAction, const char*> names[] = {
      {kPutOnProbation, "put on probation"},
      {kTrust, "trust"},
      {kSetSuspect, "set suspect"},
      {kClearSuspect, "clear suspect"},
      {kAssignRoles, "assign roles"}};
  const char* separator = " | ";
  for (const auto& [action, name] : names) {
    if ((result.actions & action) != 0) {
      s += separator + std::string(name);
      separator = ", ";
    }
  }
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(result.lookAfter);
  return s + " | look after " + std::to_string(ms.count()) + " ms";
}

// A paragraph for each state: the results, and the events that have them.
std::string table() {
  std::string text;
  for (const PathState& state : allStates()) {
    std::vector<std::pair<std::string, std::string>> rows; // result, events
    for (const PathEvent event : kEvents) {
      const std::string result = resultText(state, event);
      auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& r) {
        return r.first == result;
      });
      if (row == rows.end()) {
        row = rows.insert(row, {result, ""});
      }
      row->second +=
          (row->second.empty() ? "" : "; ") + std::string(nameOf(event));
    }
    text += "\n" + toString(state) + "\n";
    for (const auto& [result, events] : rows) {
      text += "  " + events + "\n    -> " + result + "\n";
    }
  }
  return text;
}

// Every state and event. On a mismatch the test prints the whole text: check
// each change against the diagram in path_state.h, then paste it.
constexpr const char* kTable = R"(
down
  connected
    -> up | assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, assign roles | look after 5 ms
  answered; answered late; answered older; silent; silent long; NIC down; NIC up; NIC up, owing; proved; needed; closed
    -> stays | look after 100 ms

up
  connected; answered; answered late; answered older; NIC up; NIC up, owing; proved; needed
    -> stays | look after 100 ms
  reconnected
    -> proving | put on probation, assign roles | look after 5 ms
  silent
    -> up, suspect | set suspect, assign roles | look after 5 ms
  silent long
    -> up, alone | assign roles | look after 5 ms
  NIC down
    -> up, NIC down | assign roles | look after 100 ms
  closed
    -> down | assign roles | look after 100 ms

up, NIC down
  connected; NIC up
    -> up | assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, assign roles | look after 5 ms
  answered; answered late; answered older; NIC down; proved; needed
    -> stays | look after 100 ms
  silent
    -> up, suspect, NIC down | set suspect, assign roles | look after 5 ms
  silent long
    -> up, alone, NIC down | assign roles | look after 5 ms
  NIC up, owing
    -> up, alone | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, suspect
  connected; answered
    -> up | clear suspect, assign roles | look after 100 ms
  reconnected; answered late
    -> proving | put on probation, clear suspect, assign roles | look after 5 ms
  answered older; silent; NIC up; NIC up, owing; proved; needed
    -> stays | look after 5 ms
  silent long
    -> up, stalled | assign roles | look after 5 ms
  NIC down
    -> up, suspect, NIC down | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, suspect, NIC down
  connected
    -> up | clear suspect, assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, clear suspect, assign roles | look after 5 ms
  answered
    -> up, NIC down | clear suspect, assign roles | look after 100 ms
  answered late
    -> proving, NIC down | put on probation, clear suspect, assign roles | look after 5 ms
  answered older; silent; NIC down; proved; needed
    -> stays | look after 5 ms
  silent long
    -> up, stalled, NIC down | assign roles | look after 5 ms
  NIC up
    -> up, suspect | assign roles | look after 5 ms
  NIC up, owing
    -> up, stalled | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, stalled
  connected; answered
    -> up | clear suspect, assign roles | look after 100 ms
  reconnected; answered late
    -> proving | put on probation, clear suspect, assign roles | look after 5 ms
  answered older
    -> up, suspect | assign roles | look after 5 ms
  silent; silent long; NIC up; NIC up, owing; proved; needed
    -> stays | look after 5 ms
  NIC down
    -> up, stalled, NIC down | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, stalled, NIC down
  connected
    -> up | clear suspect, assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, clear suspect, assign roles | look after 5 ms
  answered
    -> up, NIC down | clear suspect, assign roles | look after 100 ms
  answered late
    -> proving, NIC down | put on probation, clear suspect, assign roles | look after 5 ms
  answered older
    -> up, suspect, NIC down | assign roles | look after 5 ms
  silent; silent long; NIC down; proved; needed
    -> stays | look after 5 ms
  NIC up; NIC up, owing
    -> up, stalled | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, alone
  connected; answered; answered late; answered older
    -> up | assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, assign roles | look after 5 ms
  silent
    -> up, stalled | set suspect, assign roles | look after 5 ms
  silent long; NIC up; NIC up, owing; proved; needed
    -> stays | look after 5 ms
  NIC down
    -> up, alone, NIC down | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

up, alone, NIC down
  connected
    -> up | assign roles | look after 100 ms
  reconnected
    -> proving | put on probation, assign roles | look after 5 ms
  answered; answered late; answered older
    -> up, NIC down | assign roles | look after 100 ms
  silent
    -> up, stalled, NIC down | set suspect, assign roles | look after 5 ms
  silent long; NIC down; proved; needed
    -> stays | look after 5 ms
  NIC up; NIC up, owing
    -> up, alone | assign roles | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving
  connected; proved
    -> up | trust, assign roles | look after 100 ms
  reconnected; answered; answered late; answered older; NIC up; NIC up, owing
    -> stays | look after 5 ms
  silent
    -> proving, suspect | set suspect, assign roles | look after 5 ms
  silent long
    -> proving, alone | assign roles | look after 5 ms
  NIC down
    -> proving, NIC down | assign roles | look after 5 ms
  needed
    -> up | trust | look after 100 ms
  closed
    -> down | assign roles | look after 100 ms

proving, NIC down
  connected
    -> up | trust, assign roles | look after 100 ms
  reconnected; NIC up
    -> proving | assign roles | look after 5 ms
  answered; answered late; answered older; NIC down
    -> stays | look after 5 ms
  silent
    -> proving, suspect, NIC down | set suspect, assign roles | look after 5 ms
  silent long
    -> proving, alone, NIC down | assign roles | look after 5 ms
  NIC up, owing
    -> proving, alone | assign roles | look after 5 ms
  proved
    -> up, NIC down | trust, assign roles | look after 100 ms
  needed
    -> up, NIC down | trust | look after 100 ms
  closed
    -> down | assign roles | look after 100 ms

proving, suspect
  connected
    -> up | trust, clear suspect, assign roles | look after 100 ms
  reconnected; answered; answered late
    -> proving | clear suspect, assign roles | look after 5 ms
  answered older; silent; NIC up; NIC up, owing
    -> stays | look after 5 ms
  silent long
    -> proving, stalled | assign roles | look after 5 ms
  NIC down
    -> proving, suspect, NIC down | assign roles | look after 5 ms
  proved
    -> up, suspect | trust, assign roles | look after 5 ms
  needed
    -> up, suspect | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving, suspect, NIC down
  connected
    -> up | trust, clear suspect, assign roles | look after 100 ms
  reconnected
    -> proving | clear suspect, assign roles | look after 5 ms
  answered; answered late
    -> proving, NIC down | clear suspect, assign roles | look after 5 ms
  answered older; silent; NIC down
    -> stays | look after 5 ms
  silent long
    -> proving, stalled, NIC down | assign roles | look after 5 ms
  NIC up
    -> proving, suspect | assign roles | look after 5 ms
  NIC up, owing
    -> proving, stalled | assign roles | look after 5 ms
  proved
    -> up, suspect, NIC down | trust, assign roles | look after 5 ms
  needed
    -> up, suspect, NIC down | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving, stalled
  connected
    -> up | trust, clear suspect, assign roles | look after 100 ms
  reconnected; answered; answered late
    -> proving | clear suspect, assign roles | look after 5 ms
  answered older
    -> proving, suspect | assign roles | look after 5 ms
  silent; silent long; NIC up; NIC up, owing
    -> stays | look after 5 ms
  NIC down
    -> proving, stalled, NIC down | assign roles | look after 5 ms
  proved
    -> up, stalled | trust, assign roles | look after 5 ms
  needed
    -> up, stalled | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving, stalled, NIC down
  connected
    -> up | trust, clear suspect, assign roles | look after 100 ms
  reconnected
    -> proving | clear suspect, assign roles | look after 5 ms
  answered; answered late
    -> proving, NIC down | clear suspect, assign roles | look after 5 ms
  answered older
    -> proving, suspect, NIC down | assign roles | look after 5 ms
  silent; silent long; NIC down
    -> stays | look after 5 ms
  NIC up; NIC up, owing
    -> proving, stalled | assign roles | look after 5 ms
  proved
    -> up, stalled, NIC down | trust, assign roles | look after 5 ms
  needed
    -> up, stalled, NIC down | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving, alone
  connected
    -> up | trust, assign roles | look after 100 ms
  reconnected; answered; answered late; answered older
    -> proving | assign roles | look after 5 ms
  silent
    -> proving, stalled | set suspect, assign roles | look after 5 ms
  silent long; NIC up; NIC up, owing
    -> stays | look after 5 ms
  NIC down
    -> proving, alone, NIC down | assign roles | look after 5 ms
  proved
    -> up, alone | trust, assign roles | look after 5 ms
  needed
    -> up, alone | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms

proving, alone, NIC down
  connected
    -> up | trust, assign roles | look after 100 ms
  reconnected
    -> proving | assign roles | look after 5 ms
  answered; answered late; answered older
    -> proving, NIC down | assign roles | look after 5 ms
  silent
    -> proving, stalled, NIC down | set suspect, assign roles | look after 5 ms
  silent long; NIC down
    -> stays | look after 5 ms
  NIC up; NIC up, owing
    -> proving, alone | assign roles | look after 5 ms
  proved
    -> up, alone, NIC down | trust, assign roles | look after 5 ms
  needed
    -> up, alone, NIC down | trust | look after 5 ms
  closed
    -> down | assign roles | look after 100 ms
)";

TEST(path_state_table_is_as_written) {
  const std::string now = table();
  if (now != kTable) {
    std::printf("The table is now:\n%s\n", now.c_str());
  }
  CHECK(now == kTable);
}

// From down, by any events: the states of the table and no others.
TEST(path_states_are_all_reachable) {
  std::set<std::string> names;
  std::vector<PathState> reached{PathState{}};
  for (size_t i = 0; i < reached.size(); ++i) {
    CHECK(names.insert(toString(reached[i])).second);
    for (const PathEvent event : kEvents) {
      const PathState next = step(reached[i], event).next;
      if (std::find(reached.begin(), reached.end(), next) == reached.end()) {
        reached.push_back(next);
      }
    }
  }
  CHECK_EQ(reached.size(), allStates().size());
  for (const PathState& state : allStates()) {
    CHECK(names.count(toString(state)) == 1);
  }
}

TEST(path_state_closes_from_everywhere) {
  for (const PathState& state : allStates()) {
    const PathStep result = step(state, PathEvent::kClosed);
    CHECK_EQ(toString(result.next), "down");
    // The path is gone: there is nothing to tell the channel about it.
    CHECK_EQ(result.actions & ~kAssignRoles, 0);
  }
}

TEST(path_state_leaves_down_only_by_a_connection) {
  for (const PathEvent event : kEvents) {
    const PathStep result = step(PathState{}, event);
    if (event == PathEvent::kConnected) {
      CHECK_EQ(toString(result.next), "up");
    } else if (event == PathEvent::kReconnected) {
      CHECK_EQ(toString(result.next), "proving");
    } else {
      CHECK_EQ(toString(result.next), "down");
      CHECK_EQ(result.actions, 0);
    }
  }
}

// An event that is reported twice has no further effect. A new connection is
// the exception: it begins anew.
TEST(path_state_bears_repeated_events) {
  for (const PathState& state : allStates()) {
    for (const PathEvent event : kEvents) {
      const PathState once = step(state, event).next;
      const PathStep twice = step(once, event);
      CHECK(twice.next == once);
      CHECK_EQ(twice.actions, 0);
    }
  }
}

// The host's view of a connection, which knows only the actions, agrees with
// the state after any sequence of events.
TEST(path_state_actions_tell_the_whole_state) {
  forSeeds(200, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    PathState state;
    bool suspect = false, proving = false;
    for (int i = 0; i < 200; ++i) {
      const PathEvent event = kEvents[prng.below(kEvents.size())];
      const PathStep result = step(state, event);
      if (!result.next.connected || !state.connected) {
        suspect = proving = false; // another path, or none
      }
      const auto due = [&](PathAction a) { return (result.actions & a) != 0; };
      CHECK(!(due(kSetSuspect) && due(kClearSuspect)));
      CHECK(!(due(kPutOnProbation) && due(kTrust)));
      CHECK(!due(kSetSuspect) || !suspect);
      CHECK(!due(kClearSuspect) || suspect);
      CHECK(!due(kTrust) || proving);
      suspect = (suspect || due(kSetSuspect)) && !due(kClearSuspect);
      proving = (proving || due(kPutOnProbation)) && !due(kTrust);
      // kNeeded is part of assigning roles.
      CHECK_EQ(
          due(kAssignRoles),
          result.next != state && event != PathEvent::kNeeded);
      state = result.next;
      CHECK_EQ(suspect, state.suspect());
      CHECK_EQ(proving, state.connected && state.proving());
    }
  });
}

// A doubted connection, or one on probation, is looked at closely.
TEST(path_state_says_when_to_look_again) {
  for (const PathState& state : allStates()) {
    for (const PathEvent event : kEvents) {
      const PathStep result = step(state, event);
      const PathState& next = result.next;
      const bool calm = !next.connected ||
          (!next.proving() && !next.suspect() && !next.stalled());
      CHECK(result.lookAfter == (calm ? kIdleLook : kCloseLook));
    }
  }
}

} // namespace
} // namespace resilient::test
