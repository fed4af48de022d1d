#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/random.h"
#include "delegate/engine.h"
#include "delegate/peer_link.h"

// Datagrams with a peer on another host, where the option wan asks for them:
// on each route one path beside its connections, which are in reserve as long
// as it works.

namespace resilient {
namespace {

constexpr Nanos kAnswerWithin = std::chrono::seconds(5);
constexpr Nanos kOfferAgain = std::chrono::seconds(1);
constexpr int kMostDoublings = 6;
// A path that has worked for less counts as a failure.
constexpr Nanos kWorthTrying = std::chrono::seconds(10);

uint64_t beginOf(const std::string& nonce) {
  uint64_t begin = 0;
  std::memcpy(&begin, nonce.data(), std::min(sizeof(begin), nonce.size()));
  return begin;
}

// Adds what a path has counted.
void addCounts(DatagramStats& s, const DatagramPath& path) {
  const ReceiverCounters& r = path.receiver().counters();
  s.recovered += r.recovered;
  s.zeroFilled += r.zeroFilled;
  s.duplicates += r.duplicates;
  s.forged += path.forged();
  if (path.sender() != nullptr) {
    const SenderCounters& c = path.sender()->counters();
    s.packets += c.packets;
    s.bytes += c.bytes;
    s.lost += c.lost;
    s.parity += c.repairSymbols;
    s.retransmitted += c.again;
  }
}

} // namespace

// Called when a connection is up and when the peer's address is known. One of
// the two processes offers.
void PeerLink::offerDatagrams() {
  // Only now the routes are known.
  for (const DatagramOffer& offer : address_ ? std::exchange(earlyOffers_, {})
                                             : std::vector<DatagramOffer>()) {
    onDatagramOffer(offer);
  }
  if (state_ != State::kUp || !address_ || !preferredInitiator() ||
      address_->hostId == engine_.self().hostId ||
      !engine_.datagramsTo(address_->site)) {
    return;
  }
  datagrams_.resize(std::max(datagrams_.size(), routeCount()));
  for (size_t route = 0; route < routeCount(); ++route) {
    if (datagrams_[route].timer == 0) {
      offerDatagrams(route);
    }
  }
}

void PeerLink::offerDatagrams(size_t route) {
  Datagrams& d = datagrams_[route];
  if (!usable() || leaving_ || d.path) {
    return;
  }
  for (size_t i = route; i < slots_.size(); i += routeCount()) {
    if (!slots_[i].path) {
      continue;
    }
    DatagramSocket socket;
    const Status status = openDatagrams(i, socket);
    if (!status.ok()) {
      offerDatagramsLater(route, status.message());
      return;
    }
    d.slot = i;
    d.nonce.resize(DatagramOffer::kNonceBytes);
    fillRandom(d.nonce.data(), d.nonce.size());
    DatagramOffer offer;
    offer.slot = static_cast<uint16_t>(i);
    offer.port = socket.port();
    offer.key = std::bit_cast<uint64_t>(keyIdOf(secret_));
    offer.nonce = d.nonce;
    d.offered = std::move(socket);
    channel_.sendControl(encode(offer));
    engine_.markDirty(*this);
    d.timer = engine_.loop().after(kAnswerWithin, [this, route] {
      datagrams_[route].timer = 0;
      offerDatagramsLater(route, "the offer was not answered");
    });
    return;
  }
}

// Further apart with each failure.
void PeerLink::offerDatagramsLater(size_t route, const std::string& why) {
  Datagrams& d = datagrams_[route];
  d.offered.reset();
  if (d.lastError != why) {
    d.lastError = why;
    say(LogLevel::kWarning,
        "no datagrams with " + describe() + " for now, connections do: " + why);
  }
  engine_.loop().cancel(d.timer);
  d.timer = 0;
  if (!usable() || !preferredInitiator()) {
    return;
  }
  const int doublings = std::min(d.failures++, kMostDoublings);
  d.timer = engine_.loop().after(kOfferAgain * (1 << doublings), [this, route] {
    datagrams_[route].timer = 0;
    offerDatagrams(route);
  });
}

// A socket from the same interface as the connection.
Status PeerLink::openDatagrams(size_t slot, DatagramSocket& socket) const {
  const TcpPath* const path = slots_[slot].path.get();
  if (path == nullptr) {
    return Status(StatusCode::kNetwork, "its connection is down");
  }
  SocketAddress local = path->localSocket();
  local.setPort(0);
  return DatagramSocket::open(
      local, slots_[slot].astray ? std::string() : nicOf(slot), socket);
}

void PeerLink::onDatagramOffer(const DatagramOffer& offer) {
  if (!usable() || leaving_ || offer.slot >= slots_.size()) {
    return;
  }
  if (!address_) {
    std::erase_if(earlyOffers_, [&](const DatagramOffer& o) {
      return o.slot == offer.slot;
    });
    earlyOffers_.push_back(offer);
    return;
  }
  const size_t slot = offer.slot;
  const size_t route = routeOf(slot);
  datagrams_.resize(std::max(datagrams_.size(), routeCount()));
  Datagrams& d = datagrams_[route];
  if (offer.answer) {
    if (!d.offered || d.slot != slot || offer.key != beginOf(d.nonce)) {
      return; // too late: of an earlier offer
    }
    engine_.loop().cancel(d.timer);
    d.timer = 0;
    if (offer.port == 0 || !slots_[slot].path) {
      offerDatagramsLater(
          route, "the far end cannot take them; its log says why");
      return;
    }
    DatagramSocket socket = std::move(*d.offered);
    d.offered.reset();
    SocketAddress remote = slots_[slot].path->remoteSocket();
    remote.setPort(offer.port);
    if (const Status status = socket.connect(remote); !status.ok()) {
      offerDatagramsLater(route, status.message());
      return;
    }
    makeDatagramPath(
        route, std::move(socket), secret_, d.nonce, offer.nonce, true);
    return;
  }
  if (d.path) { // the far end has given it up
    d.path->close(Status(StatusCode::kNetwork, "the far end begins anew"));
  }
  DatagramOffer answer;
  answer.slot = offer.slot;
  answer.answer = true;
  answer.key = beginOf(offer.nonce);
  answer.nonce.resize(DatagramOffer::kNonceBytes);
  fillRandom(answer.nonce.data(), answer.nonce.size());
  DatagramSocket socket;
  std::string why;
  Status status = openDatagrams(slot, socket);
  if (!PacketSeal::available(why)) {
    status = Status(StatusCode::kNetwork, why);
  }
  if (status.ok()) {
    SocketAddress remote = slots_[slot].path->remoteSocket();
    remote.setPort(offer.port);
    status = socket.connect(remote);
  }
  // A group that only the far end has joined as yet: it will ask again.
  const auto secret = engine_.secretOf(std::bit_cast<KeyId>(offer.key));
  if (status.ok() && !secret) {
    status = Status(StatusCode::kNetwork, "its secret is not known yet");
  }
  if (status.ok()) {
    answer.port = socket.port();
    d.slot = slot;
    makeDatagramPath(
        route, std::move(socket), *secret, offer.nonce, answer.nonce, false);
  } else {
    offerDatagramsLater(route, status.message());
  }
  channel_.sendControl(encode(answer));
  engine_.markDirty(*this);
}

void PeerLink::makeDatagramPath(
    size_t route,
    DatagramSocket socket,
    const std::string& secret,
    const std::string& initiatorNonce,
    const std::string& answererNonce,
    bool initiator) {
  Datagrams& d = datagrams_[route];
  const auto key = [&](bool ofInitiator) {
    return deriveSealKey(secret, initiatorNonce, answererNonce, ofInitiator);
  };
  DatagramPathConfig config;
  std::string why;
  config.slot = static_cast<int>(d.slot);
  config.ours = PacketSeal::make(key(initiator), why);
  config.theirs = PacketSeal::make(key(!initiator), why);
  if (!config.ours || !config.theirs) {
    offerDatagramsLater(route, why);
    return;
  }
  const std::string site = address_ ? address_->site : std::string();
  config.schemes = engine_.recoveryTo(site);
  if (!initiator) { // the answer is still on its way
    config.proveWithin += kAnswerWithin;
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (routeOf(i) == route && slots_[i].path) {
      config.knownBytesPerS +=
          channel_.pathStatistics(slots_[i].path->id()).capacityBytesPerS();
    }
  }
  if (limit_ != nullptr) {
    config.mostBytesPerS = limit_->bytesPerS();
  }
  socket.setDscp(engine_.dscpOf(site));
  d.charged = d.advanced = 0;
  d.path = std::make_unique<DatagramPath>(
      engine_.loop(),
      channel_,
      engine_.nextPathId(),
      std::move(socket),
      std::move(config),
      *this);
  engine_.markDirty(*this);
}

// The datagrams of this route work, so its connections are in reserve. Rules of
// faults stand for the network that connections have.
bool PeerLink::onDatagrams(size_t route) const {
  return route < datagrams_.size() && datagrams_[route].path &&
      datagrams_[route].path->usable() &&
      !engine_.faults().concerns(engine_.globalRank(), globalRank_);
}

// The cap on a site counts all that leaves: parity, headers and what is sent
// again, too, which is known only now.
void PeerLink::chargeDatagrams(Datagrams& d) {
  if (limit_ == nullptr || !d.path || d.path->sender() == nullptr) {
    return;
  }
  const uint64_t bytes = d.path->sender()->counters().bytes;
  const uint64_t left = bytes - std::exchange(d.charged, bytes);
  const uint64_t paid = std::min(left, d.advanced);
  d.advanced -= paid;
  if (left > paid) {
    limit_->took(channel_.id(), left - paid, engine_.loop().now());
  }
}

void PeerLink::onDatagramReady(DatagramPath&) {
  engine_.markDirty(*this);
}

void PeerLink::onDatagramUse(DatagramPath& path) {
  const size_t route = routeOf(static_cast<size_t>(path.slot()));
  const std::string where = "datagrams with " + describe() + ": " +
      path.localAddress() + " -> " + path.remoteAddress();
  if (!path.usable()) {
    say(LogLevel::kWarning,
        where + " were last heard " +
            durationText(engine_.loop().now() - path.heardAt()) +
            " ago: connections take over");
  } else if (channel_.isSuspect(path.id())) {
    say(LogLevel::kInfo, where + " are heard again");
  } else {
    datagrams_[route].upAt = engine_.loop().now();
    datagrams_[route].lastError.clear();
    say(LogLevel::kInfo, where);
  }
  channel_.setSuspect(path.id(), !path.usable());
  assignRoles();
  engine_.markDirty(*this);
}

void PeerLink::onDatagramClosed(DatagramPath& path, const Status& why) {
  heardAt_ = heardAt();
  const size_t route = routeOf(static_cast<size_t>(path.slot()));
  Datagrams& d = datagrams_[route];
  const PathCounters& c = channel_.pathCounters(path.id());
  d.past.bytesSent += c.bytesSent;
  d.past.bytesReceived += c.bytesReceived;
  d.past.chunksSent += c.chunksSent;
  d.past.chunksRetransmitted += c.chunksRetransmitted;
  d.past.timesSuspect += c.timesSuspect;
  addCounts(d.pastDatagrams, path);
  engine_.destroyLater(std::shared_ptr<DatagramPath>(std::move(d.path)));
  assignRoles();
  engine_.markDirty(*this);
  if (d.upAt != TimePoint() && engine_.loop().now() - d.upAt > kWorthTrying) {
    d.failures = 0;
  }
  d.upAt = TimePoint();
  if (usable()) {
    offerDatagramsLater(route, why.message());
  }
}

void PeerLink::closeDatagrams(const Status& why) {
  for (Datagrams& d : datagrams_) {
    engine_.loop().cancel(d.timer);
    d.timer = 0;
    d.offered.reset();
    if (d.path) {
      d.path->close(why); // moves it to onDatagramClosed()
    }
  }
}

void PeerLink::fillDatagramStats(PeerStats& stats) const {
  for (size_t route = 0; route < datagrams_.size(); ++route) {
    const Datagrams& d = datagrams_[route];
    PathStats p;
    p.slot = -2 - static_cast<int>(route);
    p.nic = nicOf(route);
    if (!routes_.empty()) {
      p.remoteNic = address_->addresses[routes_[route].theirs].nic;
    }
    p.state = !d.path ? "down"
        : d.path->usable()
        ? (channel_.classes(d.path->id()) != 0 ? "up" : "reserve")
        : (d.path->sender() != nullptr ? "suspect" : "proving");
    p.bytesSent = d.past.bytesSent;
    p.bytesReceived = d.past.bytesReceived;
    p.chunksSent = d.past.chunksSent;
    p.chunksRetransmitted = d.past.chunksRetransmitted;
    p.timesSuspect = d.past.timesSuspect;
    p.lastError = d.lastError;
    p.datagrams = d.pastDatagrams;
    if (d.path) {
      fillMeasured(p, d.path->id());
      p.localAddress = d.path->localAddress();
      p.remoteAddress = d.path->remoteAddress();
      DatagramStats& s = *p.datagrams;
      addCounts(s, *d.path);
      s.packetBytes = d.path->pieceBytes();
      if (const PacketSender* sender = d.path->sender()) {
        s.lossRate = sender->loss().estimate().rate;
        s.burstPackets = sender->loss().estimate().burstPackets;
        s.paceBytesPerS = sender->rate().bytesPerS();
        p.leastRoundTripS = toSeconds(sender->rate().leastRoundTrip());
      }
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
