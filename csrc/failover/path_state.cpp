#include "failover/path_state.h"

#include "base/planted_bugs.h"

namespace resilient {
namespace {

PathState nextState(const PathState& s, PathEvent event) {
  PathState next = s;
  if (event == PathEvent::kClosed) {
    return PathState{};
  }
  if (event == PathEvent::kConnected || event == PathEvent::kReconnected) {
    next = PathState{};
    next.connected = true;
    next.trust =
        event == PathEvent::kConnected || RESILIENT_PLANTED(noProbation)
        ? Trust::kUp
        : Trust::kProving;
    return next;
  }
  if (!s.connected) {
    return s;
  }
  switch (event) {
    case PathEvent::kAnswered:
      next.doubt = Doubt::kNone;
      break;
    case PathEvent::kAnsweredLate:
      next.trust = s.suspect() ? Trust::kProving : s.trust;
      next.doubt = Doubt::kNone;
      break;
    case PathEvent::kAnsweredOlder:
      next.doubt = s.suspect() ? Doubt::kSuspect : Doubt::kNone;
      break;
    case PathEvent::kSilent:
      next.doubt = s.stalled() ? Doubt::kStalled : Doubt::kSuspect;
      break;
    case PathEvent::kSilentLong:
      next.doubt = s.suspect() ? Doubt::kStalled : Doubt::kAlone;
      break;
    case PathEvent::kNicDown:
      next.nicDown = true;
      break;
    case PathEvent::kNicUp:
      next.nicDown = false;
      break;
    case PathEvent::kNicUpOwing:
      // It was silent for as long as the NIC was down.
      next.doubt = !s.nicDown ? s.doubt
          : s.suspect()       ? Doubt::kStalled
                              : Doubt::kAlone;
      next.nicDown = false;
      break;
    case PathEvent::kProved:
    case PathEvent::kNeeded:
      next.trust = Trust::kUp;
      break;
    case PathEvent::kConnected:
    case PathEvent::kReconnected:
    case PathEvent::kClosed:
      break; // above
  }
  return next;
}

} // namespace

Nanos lookAfter(const PathState& state) {
  const bool close =
      state.connected && (state.proving() || state.doubt != Doubt::kNone);
  return close ? kCloseLook : kIdleLook;
}

PathStep step(const PathState& state, PathEvent event) {
  PathStep result;
  const PathState& next = result.next = nextState(state, event);
  const auto act = [&result](PathAction action, bool due) {
    result.actions = static_cast<uint8_t>(result.actions | (due ? action : 0));
  };
  const bool lives = state.connected && next.connected;
  act(kPutOnProbation,
      next.proving() && (!state.proving() || !state.connected));
  act(kTrust, lives && state.proving() && !next.proving());
  act(kSetSuspect, lives && next.suspect() && !state.suspect());
  act(kClearSuspect, lives && state.suspect() && !next.suspect());
  // kNeeded is itself a part of assigning roles.
  act(kAssignRoles, next != state && event != PathEvent::kNeeded);
  result.lookAfter = lookAfter(next);
  return result;
}

std::string toString(const PathState& state) {
  if (!state.connected) {
    return "down";
  }
  std::string s = state.proving() ? "proving" : "up";
  switch (state.doubt) {
    case Doubt::kNone:
      break;
    case Doubt::kSuspect:
      s += ", suspect";
      break;
    case Doubt::kStalled:
      s += ", stalled";
      break;
    case Doubt::kAlone:
      s += ", alone";
      break;
  }
  return state.nicDown ? s + ", NIC down" : s;
}

const char* nameOf(PathEvent event) {
  switch (event) {
    case PathEvent::kConnected:
      return "connected";
    case PathEvent::kReconnected:
      return "reconnected";
    case PathEvent::kAnswered:
      return "answered";
    case PathEvent::kAnsweredLate:
      return "answered late";
    case PathEvent::kAnsweredOlder:
      return "answered older";
    case PathEvent::kSilent:
      return "silent";
    case PathEvent::kSilentLong:
      return "silent long";
    case PathEvent::kNicDown:
      return "NIC down";
    case PathEvent::kNicUp:
      return "NIC up";
    case PathEvent::kNicUpOwing:
      return "NIC up, owing";
    case PathEvent::kProved:
      return "proved";
    case PathEvent::kNeeded:
      return "needed";
    case PathEvent::kClosed:
      return "closed";
  }
  return "";
}

} // namespace resilient
