#include "delegate/connect_datagram.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/random.h"
#include "delegate/connect_tcp.h"
#include "path/uplink.h"

namespace resilient {
namespace {

constexpr Nanos kAnswerTakes = std::chrono::seconds(5);

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

WanTransport DatagramConnector::transport() const {
  return link_.address() ? link_.host().wanTo(link_.address()->site)
                         : WanTransport::kTcp;
}

bool DatagramConnector::wanted() const {
  std::string why;
  return transport() != WanTransport::kTcp && PacketSeal::available(why);
}

bool DatagramConnector::possible(size_t connection) const {
  return transport() == WanTransport::kUdp ||
      connections_.minRoundTrip(connections_.failover().routeOf(connection)) >=
      kSlowStartCounts;
}

void DatagramConnector::readEarlyOffers() {
  for (const DatagramOffer& early : std::exchange(early_, {})) {
    onOffer(early);
  }
}

Status DatagramConnector::sendOffer(size_t route, size_t connection) {
  Offered offered;
  Status status = open(connection, offered.socket);
  if (!status.ok()) {
    return status;
  }
  offered.connection = connection;
  offered.nonce = freshNonce();
  const auto own = connections_.path(connection)->ownSecret();
  offered.secret = own.value_or(link_.secret());
  offered.forwardSecret = own.has_value();
  DatagramOffer offer;
  offer.connection = static_cast<uint16_t>(connection);
  offer.port = offered.socket.port();
  offer.key = std::bit_cast<uint64_t>(keyIdOf(offered.secret));
  offer.nonce = offered.nonce;
  offered_[route] = std::move(offered);
  link_.channel().sendControl(encode(offer));
  return Status();
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
  learnRoutes();
  if (offer.answer) {
    onAnswer(offer, route);
  } else {
    answer(offer, route);
  }
}

void DatagramConnector::onAnswer(const DatagramOffer& answer, size_t route) {
  const size_t connection = answer.connection;
  const auto found = offered_.find(route);
  if (found == offered_.end() || found->second.connection != connection ||
      answer.key != beginOf(found->second.nonce)) {
    return; // too late: of an earlier offer
  }
  Offered offered = std::move(found->second);
  offered_.erase(found);
  answered(route);
  if (answer.port == 0 || connections_.path(connection) == nullptr) {
    offerLater(route, "the far end cannot take them; its log says why");
    return;
  }
  if (const Status status = connect(connection, answer.port, offered.socket);
      !status.ok()) {
    offerLater(route, status.message());
    return;
  }
  makePath(
      route,
      std::move(offered.socket),
      {offered.secret,
       offered.nonce,
       answer.nonce,
       /*initiator=*/true,
       offered.forwardSecret});
}

// An offer for a route with a path means that the peer has closed its end. An
// answer is always sent, so the peer need not wait for its timer.
void DatagramConnector::answer(const DatagramOffer& offer, size_t route) {
  if (path(route) != nullptr) { // the far end has given it up
    path(route)->close(Status(StatusCode::kNetwork, "the far end begins anew"));
  }
  const size_t connection = offer.connection;
  DatagramOffer answer;
  answer.connection = offer.connection;
  answer.answer = true;
  answer.key = beginOf(offer.nonce);
  answer.nonce = freshNonce();
  DatagramSocket socket;
  std::string why;
  Status status;
  if (transport() == WanTransport::kTcp) {
    status = Status(StatusCode::kNetwork, "its wan allows them, ours is tcp");
  } else if (!PacketSeal::available(why)) {
    status = Status(StatusCode::kNetwork, why);
  } else {
    status = open(connection, socket);
  }
  if (status.ok()) {
    status = connect(connection, offer.port, socket);
  }
  const auto secret = secretOf(offer);
  if (status.ok() && !secret) {
    status = Status(StatusCode::kNetwork, "its secret is not known yet");
  }
  if (status.ok()) {
    answer.port = socket.port();
    makePath(
        route,
        std::move(socket),
        {*secret,
         offer.nonce,
         answer.nonce,
         /*initiator=*/false,
         connections_.path(connection)->ownSecret().has_value()});
  } else {
    offerLater(route, status.message());
  }
  link_.channel().sendControl(encode(answer));
  link_.changed();
}

// --- for the failover

DatagramPath* DatagramConnector::provenPath(size_t route) const {
  auto* const path = route < routes()
      ? static_cast<DatagramPath*>(this->path(route))
      : nullptr;
  return path != nullptr && !path->closed() && path->proven() ? path : nullptr;
}

// While it rests, it carries nothing, although it answers.
std::optional<RoutePathFacts> DatagramConnector::facts(size_t route) const {
  const DatagramPath* const path = provenPath(route);
  if (path == nullptr) {
    return {};
  }
  RoutePathFacts facts;
  facts.silent = !carries(route);
  facts.heardAt = path->heardAt();
  facts.answeredUpTo = path->answeredAt() - path->minRoundTrip();
  facts.evidence = path->evidence();
  facts.roundTrip = facts.evidence.roundTrip;
  return facts;
}

void DatagramConnector::ask(size_t route) {
  if (DatagramPath* const path = provenPath(route)) {
    path->ask();
  }
}

void DatagramConnector::doubt(size_t route) {
  if (DatagramPath* const path = provenPath(route)) {
    path->doubt();
  }
}

// The kernel knows it before the path is silent.
void DatagramConnector::onNic(const std::string& nic, bool works) {
  for (size_t route = 0; route < routes(); ++route) {
    if (connections_.nicOf(route) != nic) {
      continue;
    }
    if (works) {
      offerSoon(route);
    } else if (path(route) != nullptr) {
      path(route)->close(
          Status(StatusCode::kNetwork, "its interface " + nic + " went down"));
    }
  }
}

// The next offer goes out once a connection of the route stands again.
void DatagramConnector::onPathsLost(const PathsLost& lost) {
  for (const uint16_t c : lost.connections) {
    const size_t route = connections_.failover().routeOf(c);
    if (route < routes() && path(route) != nullptr) {
      path(route)->close(Status(
          StatusCode::kNetwork, link_.describe() + " says: " + lost.reason));
      offerSoon(route);
    }
  }
}

// Without TLS there may be a group that only the far end has joined as yet;
// with it, the connection may have been made anew at one end. Either way the
// far end asks again. The job's secret is not taken where the connection has
// its own.
std::optional<std::string> DatagramConnector::secretOf(
    const DatagramOffer& offer) const {
  const auto key = std::bit_cast<KeyId>(offer.key);
  const TcpPath* const path = connections_.path(offer.connection);
  auto own = path != nullptr ? path->ownSecret() : std::nullopt;
  if (!own) {
    return link_.host().secretOf(key);
  }
  return keyIdOf(*own) == key ? own : std::nullopt;
}

// --- which messages

void DatagramConnector::chooseBursts(TimePoint now) {
  if (routes() == 0 || transport() != WanTransport::kAuto) {
    return;
  }
  for (size_t route = 0; route < routes(); ++route) {
    chooseFor(route, shares_[route], now);
  }
}

// The connections take everything while datagrams do not work. Else the choice
// is made anew every few milliseconds of a burst, since the connections get
// going meanwhile.
void DatagramConnector::chooseFor(size_t route, Share& share, TimePoint now) {
  constexpr Nanos kHoldsFor = std::chrono::milliseconds(5);
  if (!carries(route)) {
    if (std::exchange(share.chosenAt, TimePoint{}) != TimePoint{}) {
      setShare(route, 0);
    }
    return;
  }
  if (now - share.chosenAt < kHoldsFor) {
    return;
  }
  share.chosenAt = now;
  auto& path = static_cast<DatagramPath&>(*this->path(route));
  RouteEvidence e;
  connections_.observe(route, e);
  path.expectRate(e.streamBytesPerS);
  const SenderCounters& datagrams = path.sender()->counters();
  e.datagrams.roundTripS = toSeconds(path.minRoundTrip());
  if (const double overhead = path.sender()->overhead(); overhead > 0) {
    e.datagrams.overhead = overhead;
  }
  if (path.rateIsKnown()) {
    e.datagrams.bytesPerS = path.burstBytesPerS();
    e.datagramBytesPerS = path.capacityBytesPerS();
  }
  e.packets = datagrams.unqueued;
  e.packetsLost = datagrams.unqueuedLost;
  e.lossBursts = datagrams.unqueuedBursts;
  e.lossBurstPackets = path.sender()->loss().estimate().burstPackets;
  e.datagramsIdle = link_.channel().inFlightBytes(path.id()) == 0;
  e.datagramBurst = link_.channel().lastBurst(path.id());
  if (Uplink* const uplink = link_.uplink();
      uplink != nullptr && uplink->limit() != nullptr) {
    e.limitBytesPerS = uplink->bytesPerS();
    e.limitUse = uplink->limit()->use(now);
  }
  const TransportChoice::Choice choice = share.choice.choose(e, now);
  setShare(route, choice.upTo);
  if (!choice.news.empty()) {
    const std::string nic = connections_.nicOf(route);
    link_.say(
        LogLevel::kInfo,
        link_.describe() + (nic.empty() ? "" : " over " + nic) + ": " +
            choice.news);
  }
}

void DatagramConnector::setShare(size_t route, uint64_t upTo) {
  Channel& channel = link_.channel();
  if (const RoutePath* const path = this->path(route)) {
    channel.setBursts(path->id(), BurstRange::ofAtMost(upTo));
  }
  const size_t count = connections_.failover().connections();
  for (size_t c = route; c < count; c += connections_.routes()) {
    if (const TcpPath* const path = connections_.path(c)) {
      channel.setBursts(path->id(), {upTo, UINT64_MAX});
    }
  }
}

// --- paths

// The two keys differ by direction: each end seals with its own, and numbers of
// packets may then be equal at both ends.
void DatagramConnector::makePath(
    size_t route,
    DatagramSocket socket,
    const Keys& keys) {
  const auto key = [&](bool ofInitiator) {
    return deriveSealKey(
        keys.secret, keys.initiatorNonce, keys.answererNonce, ofInitiator);
  };
  DatagramPathConfig config;
  std::string why;
  config.route = route;
  config.ours = PacketSealer::make(
      key(keys.initiator), SealLimits(), link_.loop().now(), why);
  config.theirs = PacketOpener::make(key(!keys.initiator), why);
  config.forwardSecret = keys.forwardSecret;
  if (!config.ours || !config.theirs) {
    offerLater(route, why);
    return;
  }
  const std::string site =
      link_.address() ? link_.address()->site : std::string();
  config.schemes = link_.host().recoveryTo(site);
  if (!keys.initiator) { // the answer is still on its way
    config.proveWithin += kAnswerTakes;
  }
  config.knownBytesPerS = connections_.capacityBytesPerS(route);
  if (Uplink* const uplink = link_.uplink();
      uplink != nullptr && uplink->limit() != nullptr) {
    config.maxBytesPerS = uplink->bytesPerS();
  }
  socket.setDscp(link_.host().dscpOf(site));
  add(std::make_unique<DatagramPath>(
      link_.loop(),
      link_.channel(),
      link_.host().nextPathId(),
      std::move(socket),
      std::move(config),
      link_.pathOwner()));
}

} // namespace resilient
