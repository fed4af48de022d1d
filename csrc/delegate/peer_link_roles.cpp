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

} // namespace

void PeerLink::chooseRoutes() {
  const EngineOptions& options = engine_.options();
  if (address_->hostId == engine_.self().hostId) {
    ensureSlots(static_cast<size_t>(options.paths_same_host));
    counts_.assign(1, ConnectionCount({.least = 1, .most = 1}));
    return;
  }
  // Its loopback is not ours.
  const auto outward = [](std::vector<NicAddress> nics) {
    std::erase_if(
        nics, [](const NicAddress& n) { return n.address.isLoopback(); });
    return nics;
  };
  channel_.setFirstChunkBytes(kFirstChunkBytes);
  ourNics_ = outward(engine_.self().addresses);
  const std::vector<NicAddress> theirs = outward(address_->addresses);
  if (!theirs.empty()) {
    address_->addresses = theirs;
    routes_ = pairNics(ourNics_, theirs, preferredInitiator());
  }
  ConnectionCount::Config config;
  if (options.wan_connections > 0) {
    config.least = config.most = static_cast<int>(options.wan_connections);
  } else {
    config.windowBytes = options.socket_buffer_bytes > 0
        ? static_cast<uint64_t>(options.socket_buffer_bytes)
        : engine_.windowBytes();
  }
  counts_.assign(routeCount(), ConnectionCount(config));
  ensureSlots(routeCount() * static_cast<size_t>(config.least));
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

// Where to connect from and to. If no path to the peer works, its own route
// may be the wrong one: our first NIC and the peer's second may be down. Then
// all pairs are tried in turn.
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
  const size_t mine = ourNics_.size();
  const size_t theirs = address_->addresses.size();
  if (slot.failures % 2 == 1 && livePaths() == 0 && mine * theirs > 1) {
    const size_t turn = static_cast<size_t>(slot.failures) / 2;
    route.mine = (route.mine + turn / theirs) % mine;
    route.theirs = (route.theirs + 1 + turn) % theirs;
    route.sameSubnet = ourNics_[route.mine].inSubnet(
        address_->addresses[route.theirs].address);
    slot.triesAstray = true;
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

// It carries what it is given, as far as anybody knows.
bool PeerLink::good(const Slot& slot) const {
  return slot.path && !channel_.isSuspect(slot.path->id()) &&
      !channel_.onProbation(slot.path->id());
}

bool PeerLink::anyOtherGood(size_t index) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (i != index && good(slots_[i])) {
      return true;
    }
  }
  return false;
}

// Says of each path which traffic classes it carries: none in reserve (more
// connections than help, or a NIC on standby), else all, but for classes that
// keep to a NIC of their own. Nothing is in reserve while what it stands by
// for does not work.
void PeerLink::assignRoles() {
  if (slots_.empty()) {
    return;
  }
  // Probation is for paths beside others that work.
  const bool proven = std::any_of(
      slots_.begin(), slots_.end(), [this](const Slot& s) { return good(s); });
  for (Slot& slot : slots_) {
    if (!proven && slot.path && channel_.onProbation(slot.path->id())) {
      channel_.trust(slot.path->id());
    }
  }
  const size_t routes = routeCount();
  std::vector<bool> routeWorks(routes, false);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (good(slots_[i]) && wanted(i)) {
      routeWorks[routeOf(i)] = true;
    }
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
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.path) {
      continue;
    }
    const size_t route = routeOf(i);
    uint8_t classes = 0;
    if (!anyWorks || (wanted(i) && (active == routes || route == active)) ||
        (!routeWorks[route] && active == routes)) {
      for (size_t c = 0; c < kTrafficClassCount; ++c) {
        if (kept[c] == 0 || nicOf(i) == preferred[c]) {
          classes = static_cast<uint8_t>(classes | 1u << c);
        }
      }
    }
    channel_.setClasses(slot.path->id(), classes);
  }
}

// Whether more connections carry more, route by route.
void PeerLink::countConnections(TimePoint now) {
  const bool backlogged = channel_.backlogged();
  const bool busy = backlogged && backlogged_;
  backlogged_ = backlogged;
  if (routes_.empty() || engine_.options().wan_connections > 0) {
    return;
  }
  bool changed = false;
  for (size_t route = 0; route < routes_.size(); ++route) {
    uint64_t acked = 0;
    Nanos roundTrip{};
    int sending = 0, queueing = 0;
    for (size_t i = route; i < slots_.size(); i += routes_.size()) {
      const Slot& slot = slots_[i];
      acked += slot.past.bytesSent;
      if (!slot.path) {
        continue;
      }
      acked += channel_.pathCounters(slot.path->id()).bytesSent -
          channel_.inFlightBytes(slot.path->id());
      const auto view = slot.path->kernelView();
      const Nanos least = view ? view->leastRoundTrip : Nanos(0);
      if (least > Nanos(0)) {
        roundTrip = roundTrip == Nanos(0) ? least : std::min(roundTrip, least);
        sending += view->unackedSegments > 0;
        queueing += view->unackedSegments > 0 &&
            view->roundTrip > least + least / 2 + kShortQueue;
      }
    }
    ConnectionCount& count = counts_[route];
    const int before = count.count();
    if (roundTrip > Nanos(0)) {
      count.onRoundTrip(roundTrip);
    }
    count.observe(acked, busy, 2 * queueing > sending, now);
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
