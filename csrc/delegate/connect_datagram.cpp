#include "delegate/connect_datagram.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/random.h"
#include "delegate/connect_tcp.h"

namespace resilient {
namespace {

constexpr Nanos kAnswerWithin = std::chrono::seconds(5);
constexpr Nanos kOfferAgain = std::chrono::seconds(1);
constexpr int kMaxDoublings = 6;
// A path that has worked for less counts as a failure.
constexpr Nanos kWorthTrying = std::chrono::seconds(10);

uint64_t beginOf(const std::string& nonce) {
  uint64_t begin = 0;
  std::memcpy(&begin, nonce.data(), std::min(sizeof(begin), nonce.size()));
  return begin;
}

std::string freshNonce() {
  std::string nonce(DatagramOffer::kNonceBytes, '\0');
  fillRandom(nonce.data(), nonce.size());
  return nonce;
}

} // namespace

// --- offering

void DatagramConnector::offer() {
  // Only now the routes are known.
  for (const DatagramOffer& early : link_.address()
           ? std::exchange(early_, {})
           : std::vector<DatagramOffer>()) {
    onOffer(early);
  }
  if (link_.state() != Link::State::kUp || !link_.address() ||
      !link_.preferredInitiator() || link_.sameHost() ||
      !link_.host().datagramsTo(link_.address()->site)) {
    return;
  }
  routes_.resize(std::max(routes_.size(), connections_.routes()));
  for (size_t route = 0; route < connections_.routes(); ++route) {
    if (routes_[route].timer == 0) {
      offer(route);
    }
  }
}

// Without a connection on the route nothing happens: onConnection() of the link
// offers again.
void DatagramConnector::offer(size_t route) {
  Route& r = routes_[route];
  if (!link_.usable() || link_.leaving() || r.path != nullptr) {
    return;
  }
  const auto connection = connections_.anyOf(route);
  if (!connection) {
    return;
  }
  DatagramSocket socket;
  const Status status = open(*connection, socket);
  if (!status.ok()) {
    offerLater(route, status.message());
    return;
  }
  r.connection = *connection;
  r.nonce = freshNonce();
  DatagramOffer offer;
  offer.connection = static_cast<uint16_t>(*connection);
  offer.port = socket.port();
  offer.key = std::bit_cast<uint64_t>(keyIdOf(link_.secret()));
  offer.nonce = r.nonce;
  r.offered = std::move(socket);
  link_.channel().sendControl(encode(offer));
  link_.changed();
  r.timer = link_.loop().after(kAnswerWithin, [this, route] {
    routes_[route].timer = 0;
    offerLater(route, "the offer was not answered");
  });
}

// Further apart with each failure.
void DatagramConnector::offerLater(size_t route, const std::string& why) {
  Route& r = routes_[route];
  r.offered.reset();
  if (r.lastError != why) {
    r.lastError = why;
    link_.say(
        LogLevel::kWarning,
        "no datagrams with " + link_.describe() +
            " for now, connections do: " + why);
  }
  link_.loop().cancel(r.timer);
  r.timer = 0;
  if (!link_.usable() || !link_.preferredInitiator()) {
    return;
  }
  const int doublings = std::min(r.failures++, kMaxDoublings);
  r.timer = link_.loop().after(kOfferAgain * (1 << doublings), [this, route] {
    routes_[route].timer = 0;
    offer(route);
  });
}

// A socket from the same interface as the connection.
Status DatagramConnector::open(size_t connection, DatagramSocket& socket)
    const {
  const TcpPath* const path = connections_.path(connection);
  if (path == nullptr) {
    return Status(StatusCode::kNetwork, "its connection is down");
  }
  SocketAddress local = path->localSocket();
  local.setPort(0);
  return DatagramSocket::open(
      local,
      connections_.failover().offRoute(connection)
          ? std::string()
          : connections_.nicOf(connection),
      socket);
}

Status DatagramConnector::connect(
    size_t connection,
    uint16_t port,
    DatagramSocket& socket) const {
  SocketAddress remote = connections_.path(connection)->remoteSocket();
  remote.setPort(port);
  return socket.connect(remote);
}

// --- what the peer says

void DatagramConnector::onOffer(const DatagramOffer& offer) {
  if (!link_.usable() || link_.leaving() ||
      offer.connection >= connections_.failover().connections()) {
    return;
  }
  if (!link_.address()) {
    std::erase_if(early_, [&](const DatagramOffer& o) {
      return o.connection == offer.connection;
    });
    early_.push_back(offer);
    return;
  }
  const size_t route = connections_.failover().routeOf(offer.connection);
  routes_.resize(std::max(routes_.size(), connections_.routes()));
  if (offer.answer) {
    onAnswer(offer, routes_[route], route);
  } else {
    answer(offer, routes_[route], route);
  }
}

void DatagramConnector::onAnswer(
    const DatagramOffer& answer,
    Route& r,
    size_t route) {
  const size_t connection = answer.connection;
  if (!r.offered || r.connection != connection ||
      answer.key != beginOf(r.nonce)) {
    return; // too late: of an earlier offer
  }
  link_.loop().cancel(r.timer);
  r.timer = 0;
  if (answer.port == 0 || connections_.path(connection) == nullptr) {
    offerLater(route, "the far end cannot take them; its log says why");
    return;
  }
  DatagramSocket socket = std::move(*r.offered);
  r.offered.reset();
  if (const Status status = connect(connection, answer.port, socket);
      !status.ok()) {
    offerLater(route, status.message());
    return;
  }
  makePath(
      route,
      std::move(socket),
      {link_.secret(), r.nonce, answer.nonce, /*initiator=*/true});
}

// An offer for a route with a path means that the peer has closed its end. An
// answer is always sent, so the peer need not wait for its timer.
void DatagramConnector::answer(
    const DatagramOffer& offer,
    Route& r,
    size_t route) {
  if (r.path != nullptr) { // the far end has given it up
    r.path->close(Status(StatusCode::kNetwork, "the far end begins anew"));
  }
  const size_t connection = offer.connection;
  DatagramOffer answer;
  answer.connection = offer.connection;
  answer.answer = true;
  answer.key = beginOf(offer.nonce);
  answer.nonce = freshNonce();
  DatagramSocket socket;
  std::string why;
  Status status = open(connection, socket);
  if (!PacketSeal::available(why)) {
    status = Status(StatusCode::kNetwork, why);
  }
  if (status.ok()) {
    status = connect(connection, offer.port, socket);
  }
  // A group that only the far end has joined as yet: it will ask again.
  const auto secret = link_.host().secretOf(std::bit_cast<KeyId>(offer.key));
  if (status.ok() && !secret) {
    status = Status(StatusCode::kNetwork, "its secret is not known yet");
  }
  if (status.ok()) {
    answer.port = socket.port();
    r.connection = connection;
    makePath(
        route,
        std::move(socket),
        {*secret, offer.nonce, answer.nonce, /*initiator=*/false});
  } else {
    offerLater(route, status.message());
  }
  link_.channel().sendControl(encode(answer));
  link_.changed();
}

// --- paths

// The two keys differ by direction: each end seals with its own, and numbers of
// packets may then be equal at both ends.
void DatagramConnector::makePath(
    size_t route,
    DatagramSocket socket,
    const Keys& keys) {
  Route& r = routes_[route];
  const auto key = [&](bool ofInitiator) {
    return deriveSealKey(
        keys.secret, keys.initiatorNonce, keys.answererNonce, ofInitiator);
  };
  DatagramPathConfig config;
  std::string why;
  config.route = route;
  config.ours = PacketSeal::make(key(keys.initiator), why);
  config.theirs = PacketSeal::make(key(!keys.initiator), why);
  if (!config.ours || !config.theirs) {
    offerLater(route, why);
    return;
  }
  const std::string site =
      link_.address() ? link_.address()->site : std::string();
  config.schemes = link_.host().recoveryTo(site);
  if (!keys.initiator) { // the answer is still on its way
    config.proveWithin += kAnswerWithin;
  }
  config.knownBytesPerS = connections_.capacityBytesPerS(route);
  if (link_.rateLimit() != nullptr) {
    config.maxBytesPerS = link_.rateLimit()->bytesPerS();
  }
  socket.setDscp(link_.host().dscpOf(site));
  auto path = std::make_unique<DatagramPath>(
      link_.loop(),
      link_.channel(),
      link_.host().nextPathId(),
      std::move(socket),
      std::move(config),
      link_.pathOwner());
  r.path = path.get();
  path->faultsChanged(link_.faultsConcern());
  link_.addPath(std::move(path));
}

// usable() also changes with fault rules, so the state of the channel tells
// whether this call is about silence.
void DatagramConnector::onPathUse(Path& path) {
  auto& p = static_cast<DatagramPath&>(path);
  Route& r = routes_[p.route()];
  const std::string where = "datagrams with " + link_.describe() + ": " +
      p.localAddress() + " -> " + p.remoteAddress();
  Channel& channel = link_.channel();
  const bool wasSilent = channel.isSuspect(p.id());
  if (p.silent() && !wasSilent) {
    link_.say(
        LogLevel::kWarning,
        where + " were last heard " +
            durationText(link_.loop().now() - p.heardAt()) +
            " ago: connections take over");
  } else if (!p.silent() && wasSilent) {
    link_.say(LogLevel::kInfo, where + " are heard again");
  } else if (r.upAt == TimePoint()) { // it has just shown that it works
    r.upAt = link_.loop().now();
    r.lastError.clear();
    link_.say(LogLevel::kInfo, where);
  }
  channel.setSuspect(p.id(), p.silent());
}

void DatagramConnector::onPathClosed(Path& path, const Status& why) {
  const size_t route = static_cast<DatagramPath&>(path).route();
  Route& r = routes_[route];
  path.fill(r.past);
  DatagramStats& past = *r.past.datagrams; // without what is no sum
  past.packetBytes = 0;
  past.lossRate = past.paceBytesPerS = 0;
  past.burstPackets = 1;
  r.path = nullptr;
  if (r.upAt != TimePoint() && link_.loop().now() - r.upAt > kWorthTrying) {
    r.failures = 0;
  }
  r.upAt = TimePoint();
  if (link_.usable()) {
    offerLater(route, why.message());
  }
}

void DatagramConnector::close() {
  for (Route& r : routes_) {
    link_.loop().cancel(r.timer);
    r.timer = 0;
    r.offered.reset();
  }
}

void DatagramConnector::fillStats(PeerStats& stats) const {
  for (size_t route = 0; route < routes_.size(); ++route) {
    const Route& r = routes_[route];
    PathStats p;
    // Only sums continue over closed paths.
    p.bytesSent = r.past.bytesSent;
    p.bytesReceived = r.past.bytesReceived;
    p.chunksSent = r.past.chunksSent;
    p.chunksRetransmitted = r.past.chunksRetransmitted;
    p.timesSuspect = r.past.timesSuspect;
    p.datagrams = r.past.datagrams ? r.past.datagrams : DatagramStats();
    p.kind = PathKind::kDatagram;
    p.index = static_cast<int>(route);
    p.nic = connections_.nicOf(route);
    p.remoteNic = connections_.remoteNicOf(route);
    p.lastError = r.lastError;
    if (r.path == nullptr) {
      p.state = "down";
    } else {
      const bool inReserve = link_.channel().classes(r.path->id()) == 0;
      p.state = !r.path->proven()          ? "proving"
          : r.path->silent()               ? "suspect"
          : !r.path->usable() || inReserve ? "reserve"
                                           : "up";
      r.path->fill(p);
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
