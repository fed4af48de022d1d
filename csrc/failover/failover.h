#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/time.h"
#include "failover/health.h"
#include "failover/path_state.h"
#include "failover/refusals.h"
#include "failover/roles.h"
#include "failover/takeover.h"

namespace resilient {

struct FailoverConfig {
  // The options of the same names.
  Nanos suspectAfter = std::chrono::milliseconds(50);
  Nanos stallTimeout = std::chrono::seconds(5);
  Nanos heartbeat = std::chrono::seconds(2);
  Nanos reconnectMin = std::chrono::milliseconds(50);
  Nanos reconnectMax = std::chrono::seconds(2);
  Nanos holdDownMax = std::chrono::seconds(60);
  Nanos handshakeTimeout = std::chrono::seconds(10);
  // If both processes connect at once, this one's attempt counts.
  bool preferredInitiator = true;
};

// The facts about a connection that cost nothing.
struct ConnectionFacts {
  TimePoint heardAt{};
  // As Channel::waitingSince and the functions beside it.
  TimePoint waitingSince = kNever;
  TimePoint answeredUpTo{};
  uint32_t pingsAnswered = 0;
  Nanos roundTrip{}; // 0: unknown
};

// The facts about a path beside the connections of a route.
struct RoutePathFacts {
  bool silent = false; // it carries nothing until it answers
  TimePoint heardAt{};
  TimePoint answeredUpTo{}; // what was sent until then
  Nanos roundTrip{};
  PathEvidence evidence;
};

// How one attempt to connect is made.
struct AttemptPlan {
  Nanos timeout{};
  Nanos synTimeout = Nanos::max(); // for the answer to the SYN, if shorter
  // Between two NICs other than those of its route: the number of the pair.
  std::optional<size_t> offRoute;
};

// How it failed.
struct AttemptFailure {
  bool refused = false; // every address did: nobody listens there
  bool answered = false; // somebody listens, and said no
  bool wrongPeer = false; // namely: another process is there
  bool duplicate = false; // namely: the peer's own attempt goes first
};

// For the log.
enum class ConnectionNote : uint8_t {
  kSuspect,
  kAnswersAgain,
  kStalls,
  kProved,
};

// The actions and questions of the failover. Calls may lead back into the
// Failover only where that is said. A connection is only asked about while it
// is connected: facts() and evidence() need its path. reset() may lead to
// onClosed() before it returns, so loops over connections read the state again
// after it.
class FailoverHost {
 public:
  virtual ~FailoverHost() = default;
  virtual ConnectionFacts facts(size_t connection) const = 0;
  // From its transport; may cost a system call.
  virtual PathEvidence evidence(size_t connection) const = 0;
  // Paths to the peer over other ranks, if any: they can take over, and vouch
  // for the peer, but are made and judged elsewhere.
  virtual std::vector<ConnectionView> relays(TimePoint now) const {
    (void)now;
    return {};
  }
  // Those that have not answered for so long shall say whether they work.
  virtual void askRelays(Nanos age) {
    (void)age;
  }
  virtual TimePoint relaysHeardAt() const { // TimePoint(): there are none
    return {};
  }
  // The path beside the connections of the route, if there is one whose silence
  // is judged here, too. It is doubted as a connection is, and ends that
  // doubt itself once it answers.
  virtual std::optional<RoutePathFacts> routePath(size_t route) const {
    (void)route;
    return {};
  }
  virtual void askRoutePath(size_t route) {
    (void)route;
  }
  virtual void doubtRoutePath(size_t route) {
    (void)route;
  }
  // Some operation waits for the peer, or something is not acknowledged.
  virtual bool busy() const = 0;
  // deadline() is not later than this any more.
  virtual void wakeAt(TimePoint when) = 0;

  // Starts an attempt; it ends in Failover::onConnected(), onAttemptFailed(),
  // or giveUpAttempt(), none of them from within this call.
  virtual void attempt(size_t connection, const AttemptPlan& plan) = 0;
  virtual void giveUpAttempt(size_t connection) = 0;
  // When the TCP connection of the attempt stood; none: not yet.
  virtual std::optional<TimePoint> attemptConnectedAt(
      size_t connection) const = 0;
  // Pairs of NICs that could be tried instead of those of its route.
  virtual size_t otherPairs(size_t connection) const = 0;

  virtual void ping(size_t connection) = 0;
  virtual void putOnProbation(size_t connection) = 0;
  virtual void trust(size_t connection) = 0;
  virtual void setSuspect(size_t connection, bool suspect) = 0;
  // Closes it; leads to Failover::onClosed().
  virtual void reset(size_t connection, const std::string& why) = 0;
  // Tells the peer that these were reset, since our NIC has gone down.
  virtual void tellLost(
      const std::vector<size_t>& connections,
      const std::string& nic) = 0;
  virtual void rolesAssigned(const Roles& roles) = 0;
  // Every way to the peer refuses, so its process is gone. Leads to end().
  virtual void onPeerGone(const AttemptFailure& last) = 0;
  virtual void note(size_t connection, ConnectionNote what) = 0;
};

// The failover of one link: when each of its connections is made, doubted,
// closed and made again, when one that has come back is trusted, and which
// traffic classes each path carries.
//
// How it works. Connections have numbers that both ends know: the route (a pair
// of NICs) is the number modulo the routes. Witnesses of a
// failure are the kernel's news of our own NICs, the peer's word for its own,
// errors of the transport (onClosed), and silence where an answer was due. The
// owner reports these, and calls onTimer() at deadline(); what follows is asked
// of the host. PathState has the states of each connection, PathHealth the
// degrees of doubt, takeover.h the choice of what replaces what.
//
// Pure: no I/O, no clock, no thread. Time never goes back from call to call.
// Lifetime: the host outlives it.
class Failover {
 public:
  Failover(const FailoverConfig& config, FailoverHost& host);

  // --- what there is
  // Grows to `count` connections.
  void addConnections(size_t count);
  size_t connections() const {
    return connections_.size();
  }
  // The routes are known (at least 1), and so one may connect. Connections that
  // the peer has made before stay. The policy names a NIC for each route, or
  // none at all. setWanted() comes after it.
  void setRoutes(size_t count, RolePolicy policy);
  size_t routes() const {
    return routes_;
  }
  size_t routeOf(size_t connection) const {
    return connection % routes_;
  }
  size_t placeOnRoute(size_t connection) const {
    return connection / routes_;
  }
  // So many connections of the route are of use; the others are in reserve, and
  // not made again. All are, until this is called.
  void setWanted(size_t route, size_t count);
  bool wanted(size_t connection) const;
  // Whether other paths can carry, as their owners know. Those of which
  // FailoverHost::routePath() tells are doubted here, too.
  void setSharedMemory(bool usable);
  void setRoutePath(size_t route, RoutePathUse use);
  // Its connections are in reserve.
  bool routePathAlone(size_t route) const {
    return route < routePaths_.size() &&
        routePaths_[route] == RoutePathUse::kAlone;
  }

  // --- what happens
  // Somebody waits for the peer: connects, and watches over the connections.
  // False: nobody does any more; what is under way goes on.
  void setNeeded(bool needed, TimePoint now);
  void connectAll(TimePoint now);
  void retryAll(TimePoint now); // without the pauses after failures
  void retryNow(size_t connection, TimePoint now);
  void forgetFailures(size_t connection) {
    connections_[connection].failures = 0;
  }
  void giveUpAttempts();
  // A caller asks for this connection. False: ours goes first. True: it is kept
  // for the caller until onConnected() or onCallerLost(). The preferred
  // initiator then gives up its own attempt: each end would otherwise replace
  // the other's connection.
  bool reserve(size_t connection, TimePoint now);
  void onCallerLost(size_t connection, TimePoint now);
  // A connection stands; the one before it, if any, has been closed.
  // `byItsRoute`: between the NICs of its route. `ours`: by attempt().
  // `measure`: its round trip is worth a ping.
  void onConnected(
      size_t connection,
      TimePoint now,
      bool byItsRoute,
      bool ours,
      bool measure);
  // It turns out that the connection is one of its route.
  void onCarried(size_t connection, TimePoint now);
  void
  onAttemptFailed(size_t connection, const AttemptFailure& how, TimePoint now);
  // `roundTrip`: as last measured, or 0. Made again unless `forGood`.
  void
  onClosed(size_t connection, Nanos roundTrip, bool forGood, TimePoint now);
  void onNic(const std::string& nic, bool works, TimePoint now);
  // The path beside the connections of the route has fallen silent. They must
  // answer before they carry, if another route can take over.
  void onRouteSilent(size_t route, TimePoint now);
  // Frames were handed to paths.
  void onSent(TimePoint now);
  // The evidence of health may have changed: look soon.
  void watch(TimePoint now);
  // The link is over. Nothing is asked of the host any more.
  void end();

  // --- time
  TimePoint deadline() const {
    return std::min(lookAt_, retryAt_);
  }
  // At deadline() or later. True if it has looked at the connections. An early
  // call does nothing, and a late one does once what was due.
  bool onTimer(TimePoint now);

  // --- what is known
  const PathState& state(size_t connection) const {
    return connections_[connection].state;
  }
  // In words, as for stats().
  std::string stateName(size_t connection, uint8_t classes) const;
  bool answers(size_t connection) const;
  bool offRoute(size_t connection) const {
    return connections_[connection].offRoute;
  }
  bool carried(size_t connection) const {
    return connections_[connection].carried;
  }
  uint64_t timesConnected(size_t connection) const {
    return connections_[connection].timesConnected;
  }
  size_t live() const; // connections
  // May first end the probation of connections, if no good one is left. The
  // result goes to rolesAssigned().
  void assignRoles(TimePoint now);

 private:
  struct Connection {
    explicit Connection(Nanos longestHoldDown)
        : health(TimePoint{}), damping(longestHoldDown) {}

    PathState state;
    // Stalled, and not even the peer's kernel answers: its process may be well.
    bool wayDead = false;
    bool ours = false; // last connected by an attempt of ours
    bool offRoute = false; // connected, but not between the NICs of its route
    bool carried = false; // connected by its own route, now or last
    uint64_t timesConnected = 0;
    PathHealth health;
    FlapDamping damping; // of all connections of this number
    TimePoint upAt{};
    TimePoint answeredUpTo{}; // at the last look
    TimePoint suspectAt{}; // last became
    TimePoint pingAt = kNever; // unanswered ping since
    TimePoint pingedAt{}; // last
    // Another connection of its route fell silent then, and nothing sent since
    // has been answered on it.
    TimePoint taintedAt = kNever;

    bool attempting = false;
    bool triesOffRoute = false;
    TimePoint attemptAt{};
    TimePoint tryingSince{}; // the first attempt that has failed in a row
    int failures = 0; // of attempts, in a row
    TimePoint retryAt = kNever;
    TimePoint reservedUntil{}; // for a caller that was let in
    Nanos pastRoundTrip{}; // of the last that was measured, or 0
  };

  // The only way to change a PathState.
  void apply(size_t c, PathEvent event, TimePoint now);
  std::vector<ConnectionView> views(TimePoint now) const;
  std::vector<ConnectionView> allWays(TimePoint now) const;
  size_t wayOf(size_t route) const {
    return connections_.size() + route;
  }
  ConnectionView viewOf(size_t c, TimePoint now) const;
  bool mayReplace(size_t c, TimePoint now) const;
  bool anyWorks() const;
  bool anyOtherGood(size_t c, TimePoint now) const;

  void connect(size_t c, TimePoint now);
  void dropSilentAttempt(size_t c);
  AttemptPlan planAttempt(size_t c, TimePoint now);
  Nanos synTimeoutOf(size_t c, TimePoint now) const;
  Nanos longestRoundTrip(size_t c) const;
  void retryLater(size_t c, TimePoint at);
  bool peerIsGone(size_t c, const AttemptFailure& how, TimePoint now);

  void look(TimePoint now);
  void lookIn(Nanos delay, TimePoint now);
  Nanos lookInterval() const;
  void checkHealth(size_t c, TimePoint now);
  void checkRoutePath(size_t route, TimePoint now);
  PathEvidence gatherEvidence(size_t c) const;
  void addOthers(size_t way, PathEvidence& evidence) const;
  void onGood(size_t c, TimePoint now);
  void onStalled(size_t c, const PathEvidence& evidence, TimePoint now);
  void checkProbation(size_t c, TimePoint now);
  void ping(size_t c, TimePoint now);
  void taint(size_t connection, TimePoint now);
  void doubt(size_t c, TimePoint now);
  bool takeOver(size_t way, bool news, TimePoint now);
  void askOthers(size_t way, TimePoint now);
  Nanos recentAnswer() const;
  void leaveDownNics(TimePoint now);
  const std::string& nicOf(size_t c) const;

  const FailoverConfig config_;
  FailoverHost& host_;
  bool ended_ = false;
  bool mayConnect_ = false; // the way is known
  bool needed_ = false;
  size_t routes_ = 1;
  RolePolicy policy_;
  std::vector<size_t> wanted_; // by route; empty: all
  std::deque<Connection> connections_;
  std::vector<ConnectionFacts> facts_; // of connections, at this look
  bool sharedMemory_ = false;
  std::vector<RoutePathUse> routePaths_; // by route
  // One for each route; used if the path there is judged here.
  std::vector<PathHealth> routeHealth_{PathHealth(TimePoint())};
  Refusals refusals_; // by route
  TimePoint lookAt_ = kNever;
  TimePoint retryAt_ = kNever; // the earliest of all connections
};

} // namespace resilient
