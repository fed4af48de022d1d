#pragma once

#include <cstdint>
#include <string>

#include "base/time.h"

namespace resilient {

// The state of one connection, and the only code that changes it.
// Paper: SHIFT §4.3, whose states of a default and a backup queue pair become
// states that each connection has for itself.
//
//              kConnected
//     down ──────────────────▶ up
//      ▲ │                      ▲
//      │ │ kReconnected         │ kProved, or kNeeded: nothing else works
//      │ └────────▶ proving ────┘
//      │                ▲
//      │                └── kAnsweredLate, from any doubt: as if reconnected
//      └── kClosed, from every state
//
// Within up and proving alike, how far it is doubted:
//
//              kSilent                  kSilentLong
//     none ───────────────▶ suspect ──────────────────▶ stalled
//      │  ◀── kAnswered ──┘  ▲ ◀── kAnsweredOlder ──┘ ▲   │
//      │                                              │   └── kAnswered ▶ none
//      └──── kSilentLong ──────▶ alone ─── kSilent ───┘
//                                  └── kAnswered, kAnsweredOlder ▶ none
//
// A suspect connection gets nothing new, and the others send once more what it
// has in flight. This needs another connection that works. If there is none, a
// silent connection keeps what it has (alone): the peer may be stopped, or the
// network down, and all may simply go on.
//
// And whether our own NIC below it is down: kNicDown, kNicUp.
enum class Trust : uint8_t {
  kUp, // carries what its role allows
  kProving, // on probation: pings only
};
enum class Doubt : uint8_t { kNone, kSuspect, kStalled, kAlone };

struct PathState {
  bool connected = false;
  Trust trust = Trust::kUp;
  Doubt doubt = Doubt::kNone;
  bool nicDown = false;

  // In doubt, and another connection carries in its place.
  bool suspect() const {
    return doubt == Doubt::kSuspect || doubt == Doubt::kStalled;
  }
  // Silent for so long that a new connection may take its place.
  bool stalled() const {
    return doubt == Doubt::kStalled || doubt == Doubt::kAlone;
  }
  bool proving() const {
    return trust == Trust::kProving;
  }
  bool operator==(const PathState&) const = default;
};

enum class PathEvent : uint8_t {
  kConnected, // its first connection stands
  kReconnected, // another connection stands, after one that was lost
  kAnswered, // it is not silent, and owes nothing from before the doubt
  kAnsweredLate, // the same, after a silence that was an outage, not a delay
  kAnsweredOlder, // not silent, but what was sent since the doubt is unanswered
  kSilent, // for suspect_after_s, and another one takes over
  kSilentLong, // for stall_timeout_s
  kNicDown,
  kNicUp,
  kNicUpOwing, // and something is unanswered
  kProved, // its probation is over
  kNeeded, // it must carry before it has proved itself
  kClosed,
};

// Bits of PathStep::actions, in the order in which they are due.
enum PathAction : uint8_t {
  kPutOnProbation = 1,
  kTrust = 2,
  kSetSuspect = 4,
  kClearSuspect = 8,
  kAssignRoles = 16, // to all connections
};

struct PathStep {
  PathState next;
  uint8_t actions = 0;
  // lookAfter() of the next state.
  Nanos lookAfter{};
};

// The interval while a pause would be noticed, since another connection could
// take over; a fraction of suspect_after_s. And where not.
inline constexpr Nanos kCloseLook = std::chrono::milliseconds(5);
inline constexpr Nanos kIdleLook = std::chrono::milliseconds(100);

// When to look again at a connection that owes nothing, if another one could
// take over. One that owes something is looked at after kCloseLook.
Nanos lookAfter(const PathState& state);

// Total: an event that means nothing in a state leaves it as it is.
PathStep step(const PathState& state, PathEvent event);

// "down", "up", "proving, suspect", "up, alone, NIC down": for tests and logs.
std::string toString(const PathState& state);
const char* nameOf(PathEvent event);

} // namespace resilient
