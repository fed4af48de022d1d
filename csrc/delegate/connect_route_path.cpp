#include "delegate/connect_route_path.h"

#include <algorithm>
#include <utility>

#include "delegate/connect_tcp.h"

namespace resilient {
namespace {

constexpr Nanos kAnswerWithin = std::chrono::seconds(5);
constexpr Nanos kOfferAgain = std::chrono::seconds(1);
constexpr int kMaxDoublings = 6;
// A path that has worked for less counts as a failure.
constexpr Nanos kWorthTrying = std::chrono::seconds(10);

} // namespace

// --- offering

void RoutePathConnector::learnRoutes() {
  const EngineOptions& options = link_.host().options();
  const RouteReturn returns(
      fromSeconds(options.hold_down_max_s),
      fromSeconds(options.suspect_after_s),
      returnDoublings_);
  while (routes_.size() < connections_.routes()) {
    routes_.emplace_back(returns);
  }
}

void RoutePathConnector::offer() {
  // Only now the routes are known.
  if (link_.address()) {
    readEarlyOffers();
  }
  if (link_.state() != Link::State::kUp || !link_.address() ||
      !link_.preferredInitiator() || link_.sameHost() || !wanted()) {
    return;
  }
  learnRoutes();
  for (size_t route = 0; route < connections_.routes(); ++route) {
    if (routes_[route].timer == 0) {
      offer(route);
    }
  }
}

// Without a connection on the route nothing happens: onConnection() of the link
// offers again.
void RoutePathConnector::offer(size_t route) {
  Route& r = routes_[route];
  if (!link_.usable() || link_.leaving() || r.path != nullptr) {
    return;
  }
  const auto connection = connections_.anyOf(route);
  if (!connection || !possible(*connection)) {
    return;
  }
  if (const Status status = sendOffer(route, *connection); !status.ok()) {
    offerLater(route, status.message());
    return;
  }
  link_.changed();
  r.timer = link_.loop().after(kAnswerWithin, [this, route] {
    routes_[route].timer = 0;
    offerLater(route, "the offer was not answered");
  });
}

void RoutePathConnector::answered(size_t route) {
  link_.loop().cancel(routes_[route].timer);
  routes_[route].timer = 0;
  routes_[route].isPausing = false;
}

// Further apart with each failure.
void RoutePathConnector::offerLater(size_t route, const std::string& why) {
  Route& r = routes_[route];
  forgetOffer(route);
  if (!std::exchange(r.errorIsSaid, true) || r.lastError != why) {
    r.lastError = why;
    // Users have not asked for paths beside connections.
    link_.say(
        use() == RoutePathUse::kBeside ? LogLevel::kInfo : LogLevel::kWarning,
        "no " + name_ + " with " + link_.describe() +
            " for now, connections do: " + why);
  }
  answered(route);
  if (!link_.usable() || !link_.preferredInitiator()) {
    return;
  }
  const int doublings = std::min(r.failures++, kMaxDoublings);
  const TimePoint next = link_.loop().now() + kOfferAgain * (1 << doublings);
  offerAt(route, std::max(next, r.returns.notBefore()));
}

void RoutePathConnector::offerAt(size_t route, TimePoint when) {
  Route& r = routes_[route];
  r.isPausing = true;
  r.timer = link_.loop().at(when, [this, route] {
    routes_[route].timer = 0;
    routes_[route].isPausing = false;
    offer(route);
  });
}

// An offer that is under way stays: its end leads to the next one.
void RoutePathConnector::offerSoon(size_t route) {
  Route& r = routes_[route];
  if (!link_.usable() || link_.leaving() || !link_.preferredInitiator() ||
      r.path != nullptr || (r.timer != 0 && !r.isPausing)) {
    return;
  }
  link_.loop().cancel(r.timer);
  r.failures = 0;
  offerAt(route, std::max(link_.loop().now(), r.returns.notBefore()));
}

// --- paths

void RoutePathConnector::add(std::unique_ptr<RoutePath> path) {
  Route& r = routes_[path->route()];
  r.path = path.get();
  link_.channel().expectCapacity(path->id(), r.pastBytesPerS);
  path->faultsChanged(link_.faultsConcern());
  link_.addPath(std::move(path));
}

// usable() also changes with fault rules, so the state of the channel tells
// whether this call is about silence.
void RoutePathConnector::onPathUse(Path& path) {
  auto& p = static_cast<RoutePath&>(path);
  Route& r = routes_[p.route()];
  const std::string where =
      name_ + " with " + link_.describe() + ": " + p.where();
  Channel& channel = link_.channel();
  const bool isSuspect = channel.isSuspect(p.id());
  const TimePoint now = link_.loop().now();
  if (p.silent()) {
    link_.loop().cancel(std::exchange(r.rest, 0));
    if (!isSuspect) {
      r.returns.onSilent(now);
      channel.setSuspect(p.id(), true);
      link_.say(
          LogLevel::kWarning,
          where + " does not answer (last heard " +
              durationText(now - p.heardAt()) + " ago): others take over");
      connections_.failover().onRouteSilent(p.route(), now);
    }
  } else if (isSuspect && r.rest == 0) {
    heardAgain(p);
  } else if (r.upAt == TimePoint()) { // it has just shown that it works
    r.upAt = now;
    r.returns.onUp(now);
    ++r.timesUp;
    r.errorIsSaid = false;
    link_.say(
        LogLevel::kInfo,
        name_ + " with " + link_.describe() + ": " + p.about());
  }
}

// While it rests, the path stays suspect in the channel: it gets no frames, and
// so it cannot be lost with some.
void RoutePathConnector::heardAgain(RoutePath& path) {
  const size_t route = path.route();
  Route& r = routes_[route];
  const TimePoint now = link_.loop().now();
  TimePoint at = r.returns.onHeard(now);
  if (isAlone()) {
    at = now;
  }
  link_.say(
      LogLevel::kInfo,
      name_ + " with " + link_.describe() + ": " + path.where() +
          " is heard again" +
          (at > now ? ", and rests for " + durationText(at - now) : ""));
  if (at == now) {
    carryAgain(route);
    return;
  }
  r.rest = link_.loop().at(at, [this, route] { carryAgain(route); });
}

bool RoutePathConnector::isAlone() const {
  return connections_.failover().live() == 0 && !carriesAny();
}

void RoutePathConnector::onUseChanged() {
  for (size_t route = 0; route < routes_.size(); ++route) {
    if (routes_[route].rest != 0 && isAlone()) {
      link_.loop().cancel(routes_[route].rest);
      carryAgain(route);
    }
  }
}

void RoutePathConnector::carryAgain(size_t route) {
  Route& r = routes_[route];
  r.rest = 0;
  r.returns.onUp(link_.loop().now());
  link_.channel().setSuspect(r.path->id(), false);
  link_.useChanged();
}

void RoutePathConnector::onPathClosed(Path& path, const Status& why) {
  const size_t route = static_cast<RoutePath&>(path).route();
  Route& r = routes_[route];
  path.fill(r.past);
  if (r.past.datagrams) { // without what is no sum
    DatagramStats& past = *r.past.datagrams;
    past.packetBytes = 0;
    past.lossRate = past.paceBytesPerS = 0;
    past.burstPackets = 1;
  }
  if (r.past.verbs) {
    r.past.verbs->queuePair = 0;
  }
  r.path = nullptr;
  if (const double capacity = link_.channel().capacityBytesPerS(path.id());
      capacity > 0) {
    r.pastBytesPerS = capacity;
  }
  link_.loop().cancel(std::exchange(r.rest, 0));
  const TimePoint now = link_.loop().now();
  if (r.upAt != TimePoint() && now - r.upAt > kWorthTrying) {
    r.failures = 0;
  }
  r.returns.onClosed(now);
  r.upAt = TimePoint();
  if (link_.usable()) {
    offerLater(route, why.message());
  }
}

void RoutePathConnector::close() {
  for (size_t route = 0; route < routes_.size(); ++route) {
    answered(route);
    forgetOffer(route);
  }
}

void RoutePathConnector::fillStats(PeerStats& stats) const {
  for (size_t route = 0; route < routes_.size(); ++route) {
    const Route& r = routes_[route];
    PathStats p;
    // Only sums continue over closed paths.
    p.bytesSent = r.past.bytesSent;
    p.bytesReceived = r.past.bytesReceived;
    p.chunksSent = r.past.chunksSent;
    p.chunksRetransmitted = r.past.chunksRetransmitted;
    p.timesSuspect = r.past.timesSuspect;
    p.datagrams = r.past.datagrams;
    p.verbs = r.past.verbs;
    if (kind_ == PathKind::kDatagram && !p.datagrams) {
      p.datagrams = DatagramStats();
    }
    if (kind_ == PathKind::kVerbs && !p.verbs) {
      p.verbs = VerbsStats();
    }
    p.kind = kind_;
    p.index = static_cast<int>(route);
    p.nic = connections_.nicOf(route);
    p.remoteNic = connections_.remoteNicOf(route);
    p.reconnects = r.timesUp > 0 ? r.timesUp - 1 : 0;
    p.lastError = r.lastError;
    if (r.path == nullptr) {
      p.state = "down";
    } else {
      const bool inReserve = link_.channel().classes(r.path->id()) == 0;
      p.state = !r.path->proven()          ? "proving"
          : r.path->silent()               ? "suspect"
          : r.rest != 0                    ? "proving"
          : !r.path->usable() || inReserve ? "reserve"
                                           : "up";
      r.path->fill(p);
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
