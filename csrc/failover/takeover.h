#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/time.h"

namespace resilient {

// Pure rules of failover: which connections can take over from one that fails,
// and how soon a lost one is tried again.

// One connection of a link to a peer, at one moment.
struct ConnectionView {
  bool connected = false;
  bool suspect = false;
  bool stalled = false;
  bool nicDown = false; // ours
  bool onProbation = false;
  // Age of the newest frame, or handshake, that the peer has answered on it.
  Nanos answerAge = Nanos::max();
  Nanos roundTrip{}; // 0: unknown
};

// A connection on probation is pinged every 40 ms: it may miss one answer.
inline constexpr Nanos kProbationAnswerAge = std::chrono::milliseconds(100);

// Nothing is known against it.
inline bool answers(const ConnectionView& c) {
  return c.connected && !c.suspect && !c.stalled && !c.nicDown;
}

inline bool isGood(const ConnectionView& c) {
  return answers(c) && !c.onProbation;
}

// An answer takes a round trip, and half of one more if a queue grows.
inline bool answeredWithin(const ConnectionView& c, Nanos age) {
  return c.answerAge < age + c.roundTrip * 3 / 2;
}

// Probation keeps the load on connections that work. It does not keep it on
// one that fails.
inline bool canTakeOver(const ConnectionView& c) {
  return isGood(c) || (answers(c) && answeredWithin(c, kProbationAnswerAge));
}

// Whether any connection that is not about to be given up can take over.
inline bool anyCanTakeOver(std::span<const ConnectionView> connections) {
  return std::any_of(connections.begin(), connections.end(), canTakeOver);
}

// The reaction to a connection that is silent for too long.
struct SilenceVerdict {
  // Another one has answered lately and takes over. If none has, the network
  // or the peer is silent, and suspicion would gain nothing.
  bool takenOver = false;
  // Good ones that have been silent, too. They may have failed together: they
  // get nothing more until they answer.
  std::vector<size_t> doubtful;
};

// `silent` is the index of the silent connection, and `answerAge` how old an
// answer may be to count as lately.
inline SilenceVerdict judgeSilence(
    std::span<const ConnectionView> connections,
    size_t silent,
    Nanos answerAge) {
  SilenceVerdict verdict;
  for (size_t i = 0; i < connections.size(); ++i) {
    const ConnectionView& c = connections[i];
    if (i == silent || !canTakeOver(c)) {
      continue;
    }
    if (answeredWithin(c, answerAge)) {
      verdict.takenOver = true;
    } else if (isGood(c)) {
      verdict.doubtful.push_back(i);
    }
  }
  return verdict;
}

// Which connections on probation carry data before they have proved themselves:
// none while a good one exists, else those that have answered lately, else all
// that are not in doubt.
inline std::vector<size_t> trustedEarly(
    std::span<const ConnectionView> connections) {
  std::vector<size_t> trusted;
  if (std::any_of(connections.begin(), connections.end(), isGood)) {
    return trusted;
  }
  const bool lately = anyCanTakeOver(connections);
  for (size_t i = 0; i < connections.size(); ++i) {
    const ConnectionView& c = connections[i];
    if (lately ? canTakeOver(c) : answers(c)) {
      trusted.push_back(i);
    }
  }
  return trusted;
}

// A suspect connection is made again in the background after this time. The
// kernel's first retransmission, after 200 ms, has had its chance then; the
// next ones wait twice as long each, although the network may have healed.
inline bool worthReplacing(Nanos suspectFor, Nanos roundTrip) {
  return suspectFor >= std::chrono::milliseconds(200) + 2 * roundTrip;
}

// Two processes connect the same path to each other at the same time. The
// preferred one refuses the other's attempt while this holds of its own: its
// TCP connection stands, and has had less than `limit` for the handshake.
// Before that, the other process cannot have accepted it, so it is safe to
// accept the other's instead; our SYN may be lost.
inline bool keepsPriority(
    std::optional<TimePoint> connectedAt,
    TimePoint now,
    Nanos limit) {
  return connectedAt && now - *connectedAt < limit;
}

// How long to wait for the answer to the SYN of a connection that is made
// again, and how long from one such attempt to the next. The kernel retransmits
// a SYN after 1 s, which is late if the network has healed before. The limit is
// an eighth of the time for which we have tried: an outage becomes that much
// longer at most, and a dead host gets ever fewer packets.
inline Nanos synTimeout(Nanos tried, Nanos roundTrip) {
  constexpr Nanos kMin = std::chrono::milliseconds(40);
  constexpr Nanos kMax = std::chrono::milliseconds(600);
  if (roundTrip == Nanos(0)) {
    return kMax; // it may be long
  }
  return std::max(4 * roundTrip, std::clamp<Nanos>(tried / 8, kMin, kMax));
}

} // namespace resilient
