#include "failover/failover.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/planted_bugs.h"

namespace resilient {
namespace {

// How long the process with the larger uid leaves a lost connection to the
// other one, so that not both make one.
constexpr Nanos kSecondInitiatorDelay = std::chrono::milliseconds(60);

// An attempt whose TCP connection has stood for longer than this no longer
// keeps the peer's own one out: the way may have failed since.
constexpr Nanos kAttemptPriority = std::chrono::seconds(1);

// While other connections work, an attempt to bring one back is over soon: if
// the way is a black hole, the next one may find it healed. But connecting and
// the handshake take 3 round trips, and a retransmission in between about 2
// more; twice that, and a loaded way still comes back.
constexpr Nanos kShortAttempt = std::chrono::milliseconds(600);
constexpr int kAttemptRoundTrips = 8;

// A connection on probation is asked this often, and must answer so many times,
// before it carries anything.
constexpr Nanos kProbeInterval = std::chrono::milliseconds(40);
constexpr uint32_t kProbes = 3;

} // namespace

Failover::Failover(const FailoverConfig& config, FailoverHost& host)
    : config_(config), host_(host) {}

// --- what there is

void Failover::addConnections(size_t count) {
  while (connections_.size() < count) {
    connections_.emplace_back(config_.holdDownMax);
  }
}

void Failover::setRoutes(size_t count, RolePolicy policy) {
  routes_ = std::max<size_t>(count, 1);
  policy_ = std::move(policy);
  routePaths_.resize(routes_);
  routeHealth_.resize(routes_, PathHealth(TimePoint()));
  refusals_.setRoutes(routes_);
  mayConnect_ = true;
}

void Failover::setWanted(size_t route, size_t count) {
  wanted_.resize(routes_, SIZE_MAX);
  wanted_[route] = count;
}

bool Failover::wanted(size_t c) const {
  return wanted_.empty() || placeOnRoute(c) < wanted_[routeOf(c)];
}

void Failover::setSharedMemory(bool usable) {
  sharedMemory_ = usable;
}

void Failover::setRoutePath(size_t route, RoutePathUse use) {
  routePaths_.resize(std::max(routePaths_.size(), route + 1));
  routePaths_[route] = use;
}

const std::string& Failover::nicOf(size_t c) const {
  static const std::string none;
  return policy_.nics.empty() ? none : policy_.nics[routeOf(c)];
}

size_t Failover::live() const {
  return static_cast<size_t>(std::count_if(
      connections_.begin(), connections_.end(), [](const Connection& c) {
        return c.state.connected;
      }));
}

std::string Failover::stateName(size_t c, uint8_t classes) const {
  const PathState& s = connections_[c].state;
  if (!s.connected) {
    return connections_[c].attempting ? "connecting"
        : wanted(c)                   ? "down"
                                      : "unused";
  }
  return s.stalled() || s.nicDown ? "stalled"
      : s.suspect()               ? "suspect"
      : s.proving()               ? "proving"
      : classes == 0              ? "reserve"
                                  : "up";
}

// --- views for the rules in takeover.h

ConnectionView Failover::viewOf(size_t c, TimePoint now) const {
  ConnectionView view;
  const Connection& x = connections_[c];
  if (!x.state.connected) {
    return view;
  }
  const ConnectionFacts facts = host_.facts(c);
  view.connected = true;
  view.suspect = x.state.suspect();
  view.stalled = x.state.stalled();
  view.nicDown = x.state.nicDown;
  view.onProbation = x.state.proving();
  view.answerAge = now - std::max(facts.answeredUpTo, x.upAt);
  view.roundTrip = facts.roundTrip;
  return view;
}

std::vector<ConnectionView> Failover::views(TimePoint now) const {
  std::vector<ConnectionView> all;
  all.reserve(connections_.size());
  for (size_t c = 0; c < connections_.size(); ++c) {
    all.push_back(viewOf(c, now));
  }
  return all;
}

// Behind the connections, the paths beside them by route, then those over other
// ranks.
std::vector<ConnectionView> Failover::allWays(TimePoint now) const {
  std::vector<ConnectionView> all = views(now);
  for (size_t route = 0; route < routes_; ++route) {
    ConnectionView& view = all.emplace_back();
    if (const auto facts = host_.routePath(route)) {
      view.connected = true;
      view.suspect = facts->silent;
      view.answerAge = now - facts->answeredUpTo;
      view.roundTrip = facts->roundTrip;
    }
  }
  const std::vector<ConnectionView> relays = host_.relays(now);
  all.insert(all.end(), relays.begin(), relays.end());
  return all;
}

bool Failover::answers(size_t c) const {
  const PathState& s = connections_[c].state;
  return s.connected && s.doubt == Doubt::kNone && !s.nicDown;
}

// A silent connection is replaced by one that works; see checkHealth().
bool Failover::mayReplace(size_t c, TimePoint now) const {
  const Connection& x = connections_[c];
  if (!x.state.connected) {
    return false;
  }
  return x.state.stalled() ||
      (x.state.suspect() &&
       worthReplacing(now - x.suspectAt, host_.facts(c).roundTrip));
}

// Some connection's way is neither silent for long nor by a NIC of ours that is
// down; the process at its end may be slow.
bool Failover::anyWorks() const {
  return std::any_of(
      connections_.begin(), connections_.end(), [](const Connection& c) {
        return c.state.connected && !c.wayDead && !c.state.nicDown;
      });
}

bool Failover::anyOtherGood(size_t c, TimePoint now) const {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (i != c && isGood(viewOf(i, now))) {
      return true;
    }
  }
  return false;
}

// --- changes of state

// The actions come in the order of their bits. The roles are last, since they
// depend on the states of all connections.
void Failover::apply(size_t c, PathEvent event, TimePoint now) {
  Connection& x = connections_[c];
  const PathState before = x.state;
  const PathStep result = step(x.state, event);
  x.state = result.next;
  if ((result.actions & kPutOnProbation) != 0) {
    if (before.connected) {
      // As if it had been lost and made again: it may be flapping.
      x.damping.onUp(now);
      x.upAt = now;
    }
    host_.putOnProbation(c);
  }
  if ((result.actions & kTrust) != 0) {
    host_.trust(c);
  }
  if ((result.actions & kSetSuspect) != 0) {
    x.suspectAt = now;
    host_.setSuspect(c, true);
    host_.note(c, ConnectionNote::kSuspect);
  }
  if ((result.actions & kClearSuspect) != 0) {
    host_.setSuspect(c, false);
    host_.note(c, ConnectionNote::kAnswersAgain);
  }
  if (!x.state.stalled()) {
    x.wayDead = false;
  }
  if ((result.actions & kAssignRoles) != 0) {
    assignRoles(now);
  }
}

void Failover::assignRoles(TimePoint now) {
  if (ended_) {
    return;
  }
  for (const size_t c : trustedEarly(views(now))) {
    apply(c, PathEvent::kNeeded, now);
  }
  RoleInput input;
  input.routes = routes_;
  input.routePaths = routePaths_;
  input.sharedMemory = sharedMemory_;
  input.relays = std::ranges::any_of(host_.relays(now), isGood);
  for (size_t c = 0; c < connections_.size(); ++c) {
    input.connections.push_back(
        {routeOf(c), answers(c) && !state(c).proving(), wanted(c)});
  }
  host_.rolesAssigned(resilient::assignRoles(input, policy_));
}

// --- connecting

void Failover::setNeeded(bool needed, TimePoint now) {
  needed_ = needed;
  if (needed && !ended_) {
    connectAll(now);
    watch(now);
  }
}

void Failover::connectAll(TimePoint now) {
  for (size_t c = 0; needed_ && c < connections_.size(); ++c) {
    connect(c, now);
  }
}

void Failover::retryAll(TimePoint now) {
  for (Connection& x : connections_) {
    x.failures = 0;
  }
  connectAll(now);
}

void Failover::retryNow(size_t c, TimePoint now) {
  connections_[c].failures = 0;
  connect(c, now);
}

// Starts an attempt if the connection is worth one: it is missing, off its
// route, or silent for so long that it may be replaced. Otherwise, and while
// one is under way or a caller is let in, it does nothing, so it may be called
// at any time.
void Failover::connect(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  const bool due = !x.state.connected || x.offRoute || mayReplace(c, now);
  if (ended_ || !mayConnect_ || !due || !wanted(c) || x.attempting ||
      x.reservedUntil > now) {
    return;
  }
  x.retryAt = kNever;
  x.attempting = true;
  x.attemptAt = now;
  if (x.failures == 0) {
    x.tryingSince = now;
  }
  host_.attempt(c, planAttempt(c, now));
}

// If no connection to the peer works, its own route may be the wrong one: our
// first NIC and the peer's second may be down. Then all pairs are tried in
// turn.
AttemptPlan Failover::planAttempt(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  AttemptPlan plan;
  plan.timeout = config_.handshakeTimeout;
  if (x.timesConnected > 0) {
    plan.synTimeout = synTimeoutOf(c, now);
    if (anyOtherGood(c, now)) {
      plan.timeout = std::min(
          plan.timeout,
          std::max(kShortAttempt, kAttemptRoundTrips * longestRoundTrip(c)));
    }
  }
  const size_t others = host_.otherPairs(c);
  x.triesOffRoute = x.failures % 2 == 1 && others != 0 && !anyWorks() &&
      !refusals_.undecided(routeOf(c)) && !RESILIENT_PLANTED(neverOffRoute);
  if (x.triesOffRoute) {
    plan.offRoute = static_cast<size_t>(x.failures) / 2 % others;
  }
  return plan;
}

Nanos Failover::synTimeoutOf(size_t c, TimePoint now) const {
  return synTimeout(now - connections_[c].tryingSince, longestRoundTrip(c));
}

// The longest of the lost connection, if known, and of the others.
Nanos Failover::longestRoundTrip(size_t c) const {
  Nanos longest = connections_[c].pastRoundTrip;
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].state.connected) {
      longest = std::max(longest, host_.facts(i).roundTrip);
    }
  }
  return longest;
}

// Paper: SHIFT §4.3.3 probes the failed path again and again, then moves the
// traffic back behind a fence. Here the attempt to connect is the probe, and
// there is no fence: the order of messages does not depend on paths.
void Failover::retryLater(size_t c, TimePoint at) {
  connections_[c].retryAt = at;
  retryAt_ = std::min(retryAt_, at);
  host_.wakeAt(at);
}

bool Failover::reserve(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  if (x.attempting && config_.preferredInitiator &&
      keepsPriority(host_.attemptConnectedAt(c), now, kAttemptPriority)) {
    return false;
  }
  // The peer has accepted ours, and has given up this call of its own by then:
  // it would replace a connection that works by one that is closed.
  const bool accepted =
      x.ours && x.state.connected && x.state.doubt == Doubt::kNone;
  if (accepted && config_.preferredInitiator &&
      now - x.upAt < kAttemptPriority) {
    return false;
  }
  if (x.attempting && config_.preferredInitiator) {
    // The peer would accept ours, too, and each end replace the other's. (The
    // other process keeps its attempt: we may have accepted it already.)
    host_.giveUpAttempt(c);
    x.attempting = false;
  }
  x.reservedUntil = now + config_.handshakeTimeout;
  return true;
}

void Failover::onCallerLost(size_t c, TimePoint now) {
  connections_[c].reservedUntil = {};
  if (needed_) {
    connect(c, now);
  }
}

void Failover::onConnected(
    size_t c,
    TimePoint now,
    bool byItsRoute,
    bool ours,
    bool measure) {
  Connection& x = connections_[c];
  x.attempting = false;
  x.reservedUntil = {};
  x.retryAt = kNever;
  x.failures = 0;
  x.ours = ours;
  x.offRoute = ours && x.triesOffRoute;
  x.health = PathHealth(now);
  x.damping.onUp(now);
  x.upAt = now;
  x.pingAt = x.taintedAt = kNever;
  x.pingedAt = now;
  refusals_.onConnected();
  x.carried = byItsRoute;
  if (byItsRoute) {
    refusals_.onCarried(routeOf(c), now);
  }
  const bool first = x.timesConnected++ == 0;
  if (first && measure) {
    host_.ping(c);
  }
  apply(c, first ? PathEvent::kConnected : PathEvent::kReconnected, now);
  leaveDownNics(now);
  if (x.offRoute) {
    retryLater(c, now + config_.reconnectMax);
  }
  watch(now);
}

void Failover::onCarried(size_t c, TimePoint now) {
  connections_[c].carried = true;
  refusals_.onCarried(routeOf(c), now);
}

// Whether the attempts of all ways to the peer have now been refused. Counted
// while no connection stands.
bool Failover::peerIsGone(size_t c, const AttemptFailure& how, TimePoint now) {
  if (connections_[c].triesOffRoute || live() != 0 ||
      anyCanTakeOver(host_.relays(now))) {
    return false;
  }
  if (!how.refused) {
    refusals_.onOther(routeOf(c));
    return false;
  }
  return refusals_.onRefused(routeOf(c), now);
}

// Three kinds of failure lead to three pauses. If the peer's own attempt comes
// first, ours waits for it. If the host answered or refused, the pause grows
// with each failure. If nothing answered and the connection has stood before,
// the pause is no longer than the time for a SYN: the network may heal at any
// moment.
void Failover::onAttemptFailed(
    size_t c,
    const AttemptFailure& how,
    TimePoint now) {
  Connection& x = connections_[c];
  x.attempting = false;
  if (ended_) {
    return;
  }
  ++x.failures;
  if (peerIsGone(c, how, now)) {
    host_.onPeerGone(how);
    return;
  }
  if (how.duplicate) {
    // The peer's own attempt is on its way.
    retryLater(c, now + kAttemptPriority);
    return;
  }
  Nanos pause = std::min(
      config_.reconnectMax,
      config_.reconnectMin * (int64_t{1} << std::min(x.failures, 16)));
  // The host has not refused: it is the network, which may heal at any moment.
  if (x.timesConnected > 0 && !how.answered && !how.refused) {
    pause = std::min(pause, synTimeoutOf(c, now));
  }
  // Counted from the beginning of the attempt: one into a black hole is pause
  // enough.
  retryLater(
      c,
      now +
          std::max<Nanos>(
              pause - (now - x.attemptAt), std::chrono::milliseconds(1)));
}

void Failover::onClosed(
    size_t c,
    Nanos roundTrip,
    bool forGood,
    TimePoint now) {
  Connection& x = connections_[c];
  if (x.carried) {
    refusals_.onCarried(routeOf(c), now);
  }
  if (roundTrip > Nanos(0)) {
    x.pastRoundTrip = roundTrip;
  }
  if (!x.state.suspect()) { // else it counts already
    x.damping.onLost(now);
  }
  x.offRoute = false;
  apply(c, PathEvent::kClosed, now);
  if (!ended_ && !forGood && !RESILIENT_PLANTED(noReconnect)) {
    const Nanos delay =
        config_.preferredInitiator ? Nanos(0) : kSecondInitiatorDelay;
    retryLater(c, now + delay);
  }
}

void Failover::giveUpAttempts() {
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (connections_[c].attempting) {
      host_.giveUpAttempt(c);
      connections_[c].attempting = false;
    }
  }
}

void Failover::dropSilentAttempt(size_t c) {
  Connection& x = connections_[c];
  if (x.attempting && !host_.attemptConnectedAt(c)) {
    host_.giveUpAttempt(c);
    x.attempting = false;
  }
}

// --- time

bool Failover::onTimer(TimePoint now) {
  if (ended_) {
    return false;
  }
  if (retryAt_ <= now) {
    retryAt_ = kNever;
    for (size_t c = 0; c < connections_.size(); ++c) {
      if (connections_[c].retryAt <= now) {
        connections_[c].retryAt = kNever;
        connect(c, now);
      }
    }
    for (const Connection& x : connections_) {
      retryAt_ = std::min(retryAt_, x.retryAt);
    }
  }
  if (lookAt_ > now) {
    return false;
  }
  lookAt_ = kNever;
  look(now);
  return true;
}

// Only while somebody waits for the peer: an idle job has no timers.
void Failover::watch(TimePoint now) {
  lookIn(lookInterval(), now);
}

// On a link that was idle the next look may be set for much later than the
// first silence can be noticed. Once it is set for that, further frames do not
// move it.
void Failover::onSent(TimePoint now) {
  if (lookAt_ != kNever && lookAt_ <= now + config_.suspectAfter) {
    return;
  }
  if (const Nanos interval = lookInterval(); interval < kIdleLook) {
    lookIn(std::max(config_.suspectAfter, interval), now);
  }
}

void Failover::lookIn(Nanos delay, TimePoint now) {
  if (!ended_ && now + delay < lookAt_) {
    lookAt_ = now + delay;
    host_.wakeAt(lookAt_);
  }
}

Nanos Failover::lookInterval() const {
  size_t ways = live() + (host_.relaysHeardAt() != TimePoint{});
  Nanos interval = kIdleLook;
  for (size_t route = 0; route < routes_; ++route) {
    if (const auto facts = host_.routePath(route)) {
      ++ways;
      if (facts->evidence.owes && !facts->silent) {
        interval = std::min(interval, routeHealth_[route].lookAfter());
      }
    }
  }
  if (ways < 2) {
    return kIdleLook;
  }
  for (size_t c = 0; c < connections_.size(); ++c) {
    const Connection& x = connections_[c];
    if (!x.state.connected) {
      continue;
    }
    if (lookAfter(x.state) == kCloseLook) {
      return kCloseLook;
    }
    if (x.health.lookAfter() < interval &&
        (x.pingAt != kNever || host_.facts(c).waitingSince != kNever)) {
      interval = x.health.lookAfter();
    }
  }
  return interval;
}

// Each step may close connections or end the link, so the state is read again
// after each.
void Failover::look(TimePoint now) {
  leaveDownNics(now);
  bool waiting = host_.busy();
  // Once for all, since each connection is compared with all others.
  facts_.resize(connections_.size());
  for (size_t c = 0; c < connections_.size(); ++c) {
    facts_[c] = state(c).connected ? host_.facts(c) : ConnectionFacts();
  }
  for (size_t c = 0; c < facts_.size() && !ended_; ++c) {
    if (state(c).connected) {
      checkHealth(c, now);
    }
    if (state(c).connected) {
      checkProbation(c, now);
      waiting = waiting || connections_[c].pingAt != kNever;
    }
  }
  for (size_t route = 0; route < routes_ && !ended_; ++route) {
    checkRoutePath(route, now);
  }
  if (waiting && !ended_) {
    watch(now);
  }
}

// --- doubt

void Failover::ping(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  x.pingedAt = now;
  if (x.pingAt == kNever) { // else it stays unanswered since then
    x.pingAt = now;
  }
  host_.ping(c);
}

// An answer to something that was sent so long ago, and a round trip, shows
// that a connection works.
Nanos Failover::recentAnswer() const {
  return std::max(config_.suspectAfter / 2, 4 * kCloseLook);
}

// Asks the other ways, if they have not answered lately, whether they work.
void Failover::askOthers(size_t way, TimePoint now) {
  const std::vector<ConnectionView> ways = allWays(now);
  for (size_t i = 0; i < wayOf(routes_); ++i) {
    if (i == way || !resilient::answers(ways[i]) ||
        answeredWithin(ways[i], recentAnswer())) {
      continue;
    }
    if (i >= connections_.size()) {
      host_.askRoutePath(i - connections_.size());
    } else if (connections_[i].pingAt == kNever) {
      ping(i, now);
    }
  }
  host_.askRelays(recentAnswer());
}

// It gets nothing until it answers what it is asked now.
void Failover::taint(size_t c, TimePoint now) {
  connections_[c].taintedAt = now;
  ping(c, now);
  apply(c, PathEvent::kSilent, now);
}

// Its connections had nothing to do, so they have missed nothing: if the way is
// dead, what they get now would wait until their own silence shows.
void Failover::onRouteSilent(size_t route, TimePoint now) {
  const std::vector<ConnectionView> ways = allWays(now);
  bool isReplaced = false;
  for (size_t i = 0; i < ways.size(); ++i) {
    const bool isOfRoute =
        i < connections_.size() ? routeOf(i) == route : i == wayOf(route);
    isReplaced = isReplaced || (!isOfRoute && canTakeOver(ways[i]));
  }
  for (size_t c = 0; c < connections_.size() && isReplaced && !ended_; ++c) {
    if (routeOf(c) == route && isGood(ways[c]) &&
        !answeredWithin(ways[c], recentAnswer())) {
      taint(c, now);
      lookIn(kCloseLook, now);
    }
  }
}

// A way is silent; `news`: it was not before. True: it is to be suspect, and
// others that have not answered lately, which would be the next, are doubted:
// they must show that they work before they get anything. False: no other one
// can take over (they are asked), so it is the network or the peer that is
// silent. Then nothing is gained by suspicion, and much is lost: all that is in
// flight would go twice, and what came back would have to prove itself.
bool Failover::takeOver(size_t way, bool news, TimePoint now) {
  const SilenceVerdict verdict =
      judgeSilence(allWays(now), way, recentAnswer());
  if (!verdict.takenOver && !RESILIENT_PLANTED(suspectAll)) {
    askOthers(way, now);
    return false;
  }
  for (const size_t i : verdict.doubtful) {
    if (!news || i >= wayOf(routes_)) {
      continue; // those over a relay are judged elsewhere
    }
    if (i >= connections_.size()) {
      host_.doubtRoutePath(i - connections_.size());
    } else {
      taint(i, now);
    }
  }
  return true;
}

void Failover::doubt(size_t c, TimePoint now) {
  const bool news = !state(c).suspect();
  if (takeOver(c, news, now)) {
    if (news) {
      connections_[c].damping.onLost(now);
    }
    apply(c, PathEvent::kSilent, now);
  }
}

// A path beside the connections of a route owes us something if what it has
// sent is not answered. It then falls silent as a connection does.
void Failover::checkRoutePath(size_t route, TimePoint now) {
  const auto facts = host_.routePath(route);
  if (!facts) {
    routeHealth_[route] = PathHealth(now);
    return;
  }
  PathEvidence evidence = facts->evidence;
  addOthers(wayOf(route), evidence);
  const PathHealth::Limits limits{config_.suspectAfter, config_.stallTimeout};
  const PathVerdict verdict =
      routeHealth_[route].observe(evidence, limits, now);
  if (facts->silent || verdict == PathVerdict::kGood ||
      RESILIENT_PLANTED(trustDatagrams)) {
    return;
  }
  if (verdict == PathVerdict::kUncertain) {
    askOthers(wayOf(route), now);
  } else if (takeOver(wayOf(route), /*news=*/true, now)) {
    host_.doubtRoutePath(route);
  }
}

// The other ways show whether the peer lives, and, where the route has its own
// NIC, whether that works.
void Failover::addOthers(size_t way, PathEvidence& evidence) const {
  const bool isRoutePath = way >= connections_.size();
  const size_t route = isRoutePath ? way - connections_.size() : routeOf(way);
  const bool ownNic = !policy_.nics.empty();
  evidence.othersAt = host_.relaysHeardAt();
  for (size_t i = 0; i < facts_.size(); ++i) {
    if (i == way || !state(i).connected) {
      continue;
    }
    const ConnectionFacts& facts = facts_[i];
    evidence.othersAt = std::max(evidence.othersAt, facts.heardAt);
    if (ownNic && routeOf(i) == route) {
      evidence.neighboursAt = std::max(
          {evidence.neighboursAt,
           connections_[i].health.provenAt(),
           isRoutePath ? facts.answeredUpTo : TimePoint{}});
    }
  }
  for (size_t r = 0; r < routes_; ++r) {
    const auto facts = host_.routePath(r);
    if (!facts || wayOf(r) == way) {
      continue;
    }
    evidence.othersAt = std::max(evidence.othersAt, facts->heardAt);
    if (ownNic && r == route) {
      evidence.neighboursAt =
          std::max(evidence.neighboursAt, facts->answeredUpTo);
    }
  }
}

// The evidence of the transport, and what only the channel and the other
// connections do.
PathEvidence Failover::gatherEvidence(size_t c) const {
  const Connection& x = connections_[c];
  PathEvidence evidence = host_.evidence(c);
  const TimePoint owesSince = std::min(facts_[c].waitingSince, x.pingAt);
  evidence.owes = owesSince != kNever;
  evidence.owesSince = evidence.owes ? owesSince : TimePoint{};
  addOthers(c, evidence);
  return evidence;
}

// A connection owes us something if frames are unacknowledged or a ping is
// unanswered. If then nothing moves on it, it is suspect as soon as another one
// could take over what it has. It is given up if it stays silent while the peer
// is heard of elsewhere, or when a new connection in its place stands; until
// then it is kept, and may simply go on.
void Failover::checkHealth(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  // Only an answer tells of our direction. The other one may be quite well.
  const TimePoint answered = facts_[c].answeredUpTo;
  if (x.pingAt != kNever && answered >= x.pingAt) {
    x.pingAt = kNever;
  }
  if (x.taintedAt != kNever &&
      (answered >= x.taintedAt || RESILIENT_PLANTED(forgetTaint))) {
    x.taintedAt = kNever;
  }
  if (answered > std::exchange(x.answeredUpTo, answered) &&
      x.state.doubt == Doubt::kNone && x.health.answered(now)) {
    onGood(c, now);
    return;
  }
  const PathEvidence evidence = gatherEvidence(c);
  const PathHealth::Limits limits{config_.suspectAfter, config_.stallTimeout};
  switch (x.health.observe(evidence, limits, now)) {
    case PathVerdict::kGood:
      onGood(c, now);
      return;
    case PathVerdict::kUncertain:
      askOthers(c, now);
      return;
    case PathVerdict::kSuspect:
      if (RESILIENT_PLANTED(neverSuspect)) {
        return;
      }
      doubt(c, now);
      if (x.retryAt == kNever) { // else the pause after the last attempt
        connect(c, now);
      }
      return;
    case PathVerdict::kStalled:
      doubt(c, now);
      onStalled(c, evidence, now);
      return;
  }
}

void Failover::onGood(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  if (mayReplace(c, now)) { // it has come back by itself
    x.failures = 0;
    dropSilentAttempt(c);
    if (x.offRoute && !x.attempting) {
      retryLater(c, now + config_.reconnectMax);
    }
  }
  if (x.state.doubt != Doubt::kNone) {
    apply(
        c,
        x.taintedAt != kNever      ? PathEvent::kAnsweredOlder
            : x.health.wasOutage() ? PathEvent::kAnsweredLate
                                   : PathEvent::kAnswered,
        now);
  }
  if (needed_ && x.pingAt == kNever &&
      now - host_.facts(c).heardAt >= config_.heartbeat) {
    ping(c, now);
  }
}

void Failover::onStalled(
    size_t c,
    const PathEvidence& evidence,
    TimePoint now) {
  Connection& x = connections_[c];
  if (evidence.othersAt + config_.stallTimeout > now) {
    host_.reset(c, "stalled while other paths made progress");
    return;
  }
  const bool news = !x.state.stalled();
  apply(c, PathEvent::kSilentLong, now);
  x.wayDead = evidence.kernelOwes;
  if (news) {
    host_.note(c, ConnectionNote::kStalls);
    ping(c, now);
  }
  if (x.retryAt == kNever) {
    connect(c, now);
  }
}

// Paper: SHIFT §4.3.3. A connection that has come back shows that it works
// before it carries anything; then the channel lets a little through, and more
// with each acknowledgement.
void Failover::checkProbation(size_t c, TimePoint now) {
  Connection& x = connections_[c];
  if (!x.state.proving()) {
    return;
  }
  if (x.pingAt == kNever && now - x.pingedAt >= kProbeInterval) {
    ping(c, now);
  }
  if (host_.facts(c).pingsAnswered >= kProbes &&
      (now - x.upAt >= x.damping.holdDown() || RESILIENT_PLANTED(noHoldDown))) {
    apply(c, PathEvent::kProved, now);
    host_.note(c, ConnectionNote::kProved);
  }
}

// --- our NICs

void Failover::onNic(const std::string& nic, bool works, TimePoint now) {
  if (ended_ || policy_.nics.empty()) {
    return;
  }
  bool lost = false;
  for (size_t c = 0; c < connections_.size() && !ended_; ++c) {
    if (nicOf(c) != nic) {
      continue;
    }
    Connection& x = connections_[c];
    if (works) {
      // Skip the pause between attempts. An unanswered SYN was lost, and the
      // kernel retransmits it late.
      x.failures = 0;
      dropSilentAttempt(c);
      const bool owes = x.pingAt != kNever ||
          (x.state.connected && host_.facts(c).waitingSince != kNever);
      apply(c, owes ? PathEvent::kNicUpOwing : PathEvent::kNicUp, now);
      connect(c, now);
    } else if (x.state.connected && !RESILIENT_PLANTED(ignoreNicDown)) {
      apply(c, PathEvent::kNicDown, now);
      lost = true;
    }
  }
  leaveDownNics(now);
  if (lost) {
    connectAll(now); // another pair of NICs may do
  }
}

// Closes the connections of our NICs that are down, once another one can take
// over, and tells the peer. Until then they are kept: the NIC may come back
// soon.
void Failover::leaveDownNics(TimePoint now) {
  std::map<std::string, std::vector<size_t>> lost; // by NIC
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (state(c).connected && state(c).nicDown) {
      lost[nicOf(c)].push_back(c);
    }
  }
  if (lost.empty() || !anyCanTakeOver(allWays(now))) {
    return;
  }
  for (const auto& [nic, connections] : lost) {
    for (const size_t c : connections) {
      host_.reset(c, "our NIC " + nic + " went down");
    }
    host_.tellLost(connections, nic);
  }
}

void Failover::end() {
  ended_ = true;
  lookAt_ = retryAt_ = kNever;
}

} // namespace resilient
