#include <algorithm>

#include "base/log.h"
#include "delegate/engine.h"
#include "delegate/peer_link.h"

// Which ways lead to the peer, how many connections each has, and what each
// connection is for.

namespace resilient {
namespace {

// What other traffic and the kernel's own timers add to a round trip.
constexpr Nanos kShortQueue = std::chrono::milliseconds(2);

// Before a way to another host has been measured: it may be slow, and a chunk
// cannot leave the connection that has begun it.
constexpr uint32_t kFirstChunkBytes = 64u << 10;

// Beyond this, more connections rather than larger buffers.
constexpr uint64_t kMostWindowBytes = 64u << 20;

// The loopback of another host is not ours.
std::vector<NicAddress> outward(std::vector<NicAddress> nics) {
  std::erase_if(
      nics, [](const NicAddress& n) { return n.address.isLoopback(); });
  return nics;
}

} // namespace

void PeerLink::chooseRoutes() {
  const EngineOptions& options = engine_.options();
  if (address_->hostId == engine_.self().hostId) {
    ensureSlots(static_cast<size_t>(options.paths_same_host));
    counts_.assign(1, ConnectionCount({.least = 1, .most = 1}));
    return;
  }
  channel_.setFirstChunkBytes(kFirstChunkBytes);
  ourNics_ = outward(engine_.self().addresses);
  const std::vector<NicAddress> theirs = outward(address_->addresses);
  if (!theirs.empty()) {
    address_->addresses = theirs;
    routes_ = pairNics(ourNics_, theirs, preferredInitiator());
  }
  refusals_.setRoutes(routeCount());
  ConnectionCount::Config config;
  if (options.wan_connections > 0) {
    config.least = config.most = static_cast<int>(options.wan_connections);
  } else {
    config.windowBytes = options.socket_buffer_bytes > 0
        ? static_cast<uint64_t>(options.socket_buffer_bytes)
        : engine_.bufferLimits().windowBytes();
  }
  counts_.assign(routeCount(), ConnectionCount(config));
  found_.assign(routeCount(), 0);
  size_t lanes = static_cast<size_t>(config.least);
  for (size_t route = 0; route < routes_.size(); ++route) {
    counts_[route].beginWith(Engine::found(routeKey(route)).connections);
    lanes = std::max(lanes, static_cast<size_t>(counts_[route].count()));
  }
  ensureSlots(routeCount() * lanes);
}

// The same for the next link between the same two NICs.
std::string PeerLink::routeKey(size_t route) const {
  const Route& r = routes_[route];
  return ourNics_[r.mine].address.ip() + ' ' + address_->hostId + ' ' +
      address_->addresses[r.theirs].address.ip();
}

// What a new connection to another host needs beyond what all sockets have.
void PeerLink::tuneNew(size_t index, int fd) {
  const EngineOptions& options = engine_.options();
  if (!engine_.congestionControl().empty()) {
    (void)setCongestionControl(fd, engine_.congestionControl());
  }
  if (address_) {
    (void)setDscp(fd, engine_.dscpOf(address_->site));
  }
  if (routes_.empty()) {
    return;
  }
  const size_t route = routeOf(index);
  if (engine_.mayChangeCongestionControl() &&
      Engine::found(routeKey(route)).lossy) {
    (void)setCongestionControl(fd, kLossyCongestionControl);
  }
  if (const auto view = tcpInfo(fd); view && options.wan_connections == 0 &&
      options.socket_buffer_bytes == 0) {
    // The handshake has been a first measurement.
    const uint64_t window = std::min(
        kMostWindowBytes, counts_[route].neededWindowBytes(view->roundTrip));
    if (window > engine_.bufferLimits().windowBytes()) {
      counts_[route].setWindowBytes(
          raiseBuffers(fd, window, engine_.bufferLimits()));
    }
  }
}

// Routes are pairs of NICs, so they stay as they are. What was connected from
// the old address is lost; the peer learns of the new one as soon as any path
// carries, or from the connections that we make ourselves.
void PeerLink::onOurAddresses() {
  if (!usable() || routes_.empty()) {
    return;
  }
  const std::vector<NicAddress> now = outward(engine_.self().addresses);
  std::vector<bool> changed(ourNics_.size(), false);
  for (size_t i = 0; i < ourNics_.size() && i < now.size(); ++i) {
    changed[i] = now[i].address.ip() != ourNics_[i].address.ip();
    ourNics_[i] = now[i];
  }
  channel_.sendControl(encode(Addresses{engine_.record()}));
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!changed[routes_[routeOf(i)].mine]) {
      continue;
    }
    Slot& slot = slots_[i];
    slot.failures = 0;
    if (slot.path) {
      slot.path->reset(Status(
          StatusCode::kNetwork,
          "our NIC " + nicOf(i) + " has another address"));
    } else {
      connect(i);
    }
  }
}

void PeerLink::onPeerAddresses(const std::string& record) {
  PeerAddress now;
  if (!usable() || !address_ || !PeerAddress::parse(record, now).ok() ||
      now.uid != uid_) {
    return;
  }
  now.addresses = routes_.empty() ? now.addresses : outward(now.addresses);
  if (now.addresses.size() != address_->addresses.size()) {
    return; // it keeps their number and order
  }
  if (std::ranges::equal(
          now.addresses,
          address_->addresses,
          {},
          &NicAddress::toString,
          &NicAddress::toString)) {
    return;
  }
  address_->addresses = std::move(now.addresses);
  engine_.membersMoved();
  for (Slot& slot : slots_) {
    slot.failures = 0;
    if (slot.attempt && state_ == State::kUnconnected) {
      // To an address that is not the peer's any more: it may take as long as
      // its timeout.
      engine_.destroyLater(
          std::shared_ptr<OutgoingHandshake>(std::move(slot.attempt)));
    }
  }
  connectAll();
}

bool PeerLink::wanted(size_t slot) const {
  if (counts_.empty()) {
    return true; // we do not know the peer's address yet, only its connections
  }
  return routes_.empty() && engine_.self().hostId == address_->hostId
      ? slot < static_cast<size_t>(engine_.options().paths_same_host)
      : laneOf(slot) < static_cast<size_t>(counts_[routeOf(slot)].count());
}

std::string PeerLink::nicOf(size_t slot) const {
  return routes_.empty() ? "" : ourNics_[routes_[routeOf(slot)].mine].nic;
}

bool PeerLink::byItsRoute(size_t index) const {
  if (routes_.empty()) {
    return true;
  }
  const Route& route = routes_[routeOf(index)];
  const TcpPath& path = *slots_[index].path;
  const auto host = [](const std::string& address) {
    return address.substr(0, address.rfind(':'));
  };
  const auto is = [&](const std::string& connected, const NicAddress& nic) {
    return host(connected) == host(nic.address.toString());
  };
  return is(path.localAddress(), ourNics_[route.mine]) &&
      is(path.remoteAddress(), address_->addresses[route.theirs]);
}

// Where to connect from and to. If no path to the peer works, its own route
// may be the wrong one: our first NIC and the peer's second may be down. Then
// all pairs are tried in turn, but for addresses that both hosts have: those
// lead to ourselves.
void PeerLink::aim(size_t index, OutgoingSpec& spec) {
  Slot& slot = slots_[index];
  slot.triesAstray = false;
  if (routes_.empty()) {
    for (const NicAddress& nic : address_->addresses) {
      spec.candidates.push_back(nic.address);
    }
    return;
  }
  Route route = routes_[routeOf(index)];
  if (slot.failures % 2 == 1 && !anyWorks() &&
      !refusals_.undecided(routeOf(index))) {
    const std::vector<Route> others =
        otherPairs(ourNics_, address_->addresses, route);
    if (!others.empty()) {
      route = others[static_cast<size_t>(slot.failures) / 2 % others.size()];
      slot.triesAstray = true;
    }
  }
  const NicAddress& from = ourNics_[route.mine];
  spec.candidates = {address_->addresses[route.theirs].address};
  spec.source = from.address;
  spec.source->setPort(0);
  if (route.sameSubnet) {
    spec.options.interface = from.nic;
  }
}

// The side that was called binds too: or its answers might all leave by one
// NIC, and die with it.
void PeerLink::bindToNic(int fd) const {
  const SocketAddress local = localAddress(fd);
  const auto remote = SocketAddress::parse(remoteAddress(fd).ip(), 0);
  for (const NicAddress& nic : engine_.self().addresses) {
    if (nic.address.ip() == local.ip() && remote && nic.inSubnet(*remote)) {
      bindToInterface(fd, nic.nic);
    }
  }
}

bool PeerLink::anyOtherGood(size_t index) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (i != index && isGood(viewOf(slots_[i]))) {
      return true;
    }
  }
  return false;
}

// Says of each path which traffic classes it carries: none in reserve (more
// connections than help, a NIC on standby, or memory is shared), else all, but
// for classes that keep to a NIC of their own. Nothing is in reserve while what
// it stands by for does not work.
void PeerLink::assignRoles() {
  if (shared_ && !shared_->closed()) {
    channel_.setClasses(
        shared_->id(), sharing() ? (1u << kTrafficClassCount) - 1 : 0);
  }
  if (slots_.empty()) {
    return;
  }
  for (const size_t i : trustedEarly(views())) {
    channel_.trust(slots_[i].path->id());
  }
  const size_t routes = routeCount();
  std::vector<bool> routeWorks(routes, false);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (isGood(viewOf(slots_[i])) && wanted(i)) {
      routeWorks[routeOf(i)] = true;
    }
  }
  for (size_t r = 0; r < datagrams_.size(); ++r) {
    routeWorks[r] = routeWorks[r] || onDatagrams(r);
  }
  const bool anyWorks =
      std::find(routeWorks.begin(), routeWorks.end(), true) != routeWorks.end();
  size_t active = routes; // with "standby": the first route that works
  if (engine_.options().nic_policy == "standby") {
    active = static_cast<size_t>(
        std::find(routeWorks.begin(), routeWorks.end(), true) -
        routeWorks.begin());
  }
  const auto& preferred = engine_.nicClasses();
  uint8_t kept[kTrafficClassCount] = {};
  for (size_t c = 0; c < kTrafficClassCount; ++c) {
    for (size_t r = 0; r < routes && !preferred[c].empty(); ++r) {
      kept[c] = kept[c] || (routeWorks[r] && nicOf(r) == preferred[c]);
    }
  }
  // What a path of this route carries; `needed`: it is not one too many.
  const auto classesFor = [&](size_t route, bool needed) {
    uint8_t classes = 0;
    if (!anyWorks || (needed && (active == routes || route == active)) ||
        (!routeWorks[route] && active == routes)) {
      for (size_t c = 0; c < kTrafficClassCount; ++c) {
        if (kept[c] == 0 || nicOf(route) == preferred[c]) {
          classes = static_cast<uint8_t>(classes | 1u << c);
        }
      }
    }
    return sharing() ? uint8_t(0) : classes;
  };
  for (size_t r = 0; r < datagrams_.size(); ++r) {
    if (datagrams_[r].path) {
      channel_.setClasses(
          datagrams_[r].path->id(), onDatagrams(r) ? classesFor(r, true) : 0);
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].path) {
      const size_t route = routeOf(i);
      channel_.setClasses(
          slots_[i].path->id(),
          onDatagrams(route) ? 0 : classesFor(route, wanted(i)));
    }
  }
}

PeerLink::RouteView PeerLink::lookAt(size_t route, TimePoint now) {
  RouteView route_;
  for (size_t i = route; i < slots_.size(); i += routes_.size()) {
    const Slot& slot = slots_[i];
    route_.ackedBytes += slot.past.bytesSent;
    if (!slot.path) {
      continue;
    }
    route_.ackedBytes += channel_.pathCounters(slot.path->id()).bytesSent -
        channel_.inFlightBytes(slot.path->id());
    route_.startingUp = route_.startingUp || slot.path->startingUp();
    const auto view = slot.path->kernelView();
    const Nanos least = view ? view->leastRoundTrip : Nanos(0);
    if (least > Nanos(0)) {
      route_.leastRoundTrip = route_.leastRoundTrip == Nanos(0)
          ? least
          : std::min(route_.leastRoundTrip, least);
      route_.sending += view->unackedSegments > 0;
      route_.queueing += view->unackedSegments > 0 &&
          view->roundTrip > least + least / 2 + kShortQueue;
      watchLoss(i, *view, now);
    }
  }
  return route_;
}

// Whether this connection would do better with another congestion control.
void PeerLink::watchLoss(size_t index, const TcpInfo& view, TimePoint now) {
  if (!engine_.mayChangeCongestionControl()) {
    return;
  }
  Slot& slot = slots_[index];
  CongestionChoice::Sample sample;
  sample.retransmits = view.totalRetransmits;
  sample.delivered = view.deliveredSegments;
  sample.roundTrip = view.roundTrip;
  sample.leastRoundTrip = view.leastRoundTrip;
  sample.busy =
      view.unackedSegments > 0 && (backlogged_ || view.notSentBytes > 0);
  if (slot.congestion.observe(sample, now) &&
      slot.path->setCongestionControl(kLossyCongestionControl)) {
    // The next connections between these two NICs begin with it.
    const std::string key = routeKey(routeOf(index));
    Engine::FoundRoute found = Engine::found(key);
    found.lossy = true;
    Engine::remember(key, found);
    logMessage(
        LogLevel::kInfo,
        "path " + std::to_string(index) + " to " + describe() +
            " loses packets without any queue: it goes on with " +
            kLossyCongestionControl);
  }
}

// Whether more connections carry more, route by route.
void PeerLink::countConnections(TimePoint now) {
  const bool backlogged = channel_.backlogged();
  const bool busy = backlogged && backlogged_;
  backlogged_ = backlogged;
  bool changed = false;
  if (engine_.options().wan_connections > 0 &&
      !engine_.mayChangeCongestionControl()) {
    return;
  }
  for (size_t route = 0; route < routes_.size(); ++route) {
    if (onDatagrams(route)) {
      continue; // its connections are in reserve: they show nothing
    }
    const RouteView seen = lookAt(route, now);
    ConnectionCount& count = counts_[route];
    const int before = count.count();
    if (seen.leastRoundTrip > Nanos(0)) {
      count.onRoundTrip(seen.leastRoundTrip);
    }
    ConnectionCount::View view;
    view.ackedBytes = seen.ackedBytes;
    view.busy = busy;
    view.queueing = 2 * seen.queueing > seen.sending;
    view.startingUp = seen.startingUp;
    count.observe(view, now);
    if (count.found() != found_[route]) {
      found_[route] = count.found();
      const std::string key = routeKey(route);
      Engine::FoundRoute found = Engine::found(key);
      found.connections = found_[route];
      Engine::remember(key, found);
    }
    if (count.count() != before) {
      changed = true;
      logMessage(
          LogLevel::kDebug,
          nicOf(route) + " to " + describe() + ": " +
              std::to_string(count.count()) + " connections instead of " +
              std::to_string(before));
    }
  }
  if (changed) {
    size_t lanes = 0;
    for (const ConnectionCount& count : counts_) {
      lanes = std::max(lanes, static_cast<size_t>(count.count()));
    }
    ensureSlots(lanes * routes_.size());
    connectAll();
    assignRoles();
    engine_.markDirty(*this);
  }
}

} // namespace resilient
