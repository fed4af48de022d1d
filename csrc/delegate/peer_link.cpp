#include "delegate/peer_link.h"

#include <algorithm>
#include <utility>

#include "path/uplink.h"

namespace resilient {
namespace {

// Under a lower cap, chunks are of 5 ms each: what is more urgent waits behind
// one.
constexpr uint32_t kWholeElements = 64; // no chunk ends within an element
uint32_t chunkBytesAt(double bytesPerS) {
  constexpr uint32_t kMin = 16u << 10, kMax = 64u << 20;
  const auto bytes =
      static_cast<uint32_t>(std::clamp<double>(bytesPerS / 200, kMin, kMax));
  return bytes / kWholeElements * kWholeElements;
}

ChannelConfig channelConfig(const EngineOptions& options) {
  ChannelConfig config;
  config.chunkBytes = static_cast<uint32_t>(options.chunk_bytes) /
      kWholeElements * kWholeElements;
  config.peerEagerBytes = static_cast<uint64_t>(options.eager_bytes);
  config.ownEagerBytes = static_cast<uint64_t>(options.eager_bytes);
  config.copyBytes = static_cast<uint64_t>(options.copy_bytes);
  config.stageAfter = fromSeconds(options.stage_after_s);
  config.starvationBytes = static_cast<uint64_t>(options.starvation_bytes);
  return config;
}

} // namespace

PeerLink::PeerLink(LinkHost& host, const Uid& uid, uint32_t channelId)
    : Link(host, uid),
      channel_(
          channelId,
          channelConfig(host.options()),
          host.mailbox(),
          host.completions(),
          host.staging(),
          *this),
      tcp_(*this),
      shared_(*this),
      datagrams_(*this, tcp_),
      verbs_(*this, tcp_),
      relays_(*this),
      paths_(channel_) {}

PeerLink::~PeerLink() {
  loop().cancel(channelTimer_);
}

std::string PeerLink::pathSummary() const {
  const std::string relays = relays_.summary();
  return tcp_.summary() + (relays.empty() ? "" : "; " + relays);
}

std::optional<TimePoint> PeerLink::heardAt() const {
  return std::max(heardAt_, paths_.heardAt());
}

// --- what is known of the peer, and who needs it

// The order matters. The rate limit is known before the first path exists. The
// connector chooses its routes before letIn() installs the connections of
// callers. The missing connections are attempted after that, since the other
// order would attempt some that already wait at the engine.
void PeerLink::setAddress(
    const PeerAddress& address,
    const std::string& secret,
    int32_t globalRank) {
  newestRank_ = globalRank;
  if (address_) {
    return;
  }
  address_ = address;
  storedAddresses_ = address.toString();
  secret_ = secret;
  globalRank_ = globalRank;
  if (!sameHost()) {
    if (auto nics = outward(address.addresses); !nics.empty()) {
      address_->addresses = std::move(nics);
    }
    uplink_ = host_.uplink(address.site);
    setPaced();
  }
  host_.membersMoved();
  tcp_.onAddress();
  host_.letIn(*this);
  tcp_.failover().connectAll(loop().now());
  shared_.offer();
  datagrams_.offer();
  verbs_.offer();
  relays_.offer();
}

bool PeerLink::cut() const {
  return usable() && tcp_.failover().live() == 0;
}

void PeerLink::onStoredAddresses(const std::string& text) {
  if (storedAddresses_ != text) {
    storedAddresses_ = text;
    onPeerAddresses(text);
  }
}

void PeerLink::onPeerAddresses(const std::string& text) {
  PeerAddress now;
  if (!usable() || !address_ || !PeerAddress::parse(text, now).ok() ||
      now.uid != uid_) {
    return;
  }
  if (auto nics = outward(now.addresses); !sameHost() && !nics.empty()) {
    now.addresses = std::move(nics);
  }
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
  host_.membersMoved();
  tcp_.onPeerAddresses();
}

void PeerLink::addInterest() {
  if (++interest_ > 1 || !usable()) {
    return;
  }
  if (state_ == State::kUnconnected && neededSince_ == kNever) {
    neededSince_ = loop().now();
  }
  relays_.onNeeded();
  tcp_.failover().setNeeded(true, loop().now());
}

void PeerLink::dropInterest() {
  if (--interest_ == 0) {
    tcp_.failover().setNeeded(false, loop().now());
  }
}

void PeerLink::leave() {
  if (state_ == State::kUp) {
    leaving_ = true;
    channel_.sendBye();
  }
}

// --- paths that come and go

void PeerLink::onIncoming(const HelloInfo& hello, StreamSocket socket) {
  if (usable() && globalRank_ < 0) {
    globalRank_ = hello.initiatorRank;
  }
  tcp_.onIncoming(hello, std::move(socket));
}

Connector& PeerLink::connectorOf(const Path& path) {
  switch (path.kind()) {
    case PathKind::kShared:
      return shared_;
    case PathKind::kDatagram:
      return datagrams_;
    case PathKind::kVerbs:
      return verbs_;
    case PathKind::kRelay:
      return relays_;
    case PathKind::kTcp:
      break;
  }
  return tcp_;
}

void PeerLink::addPath(std::unique_ptr<Path> path) {
  paths_.add(std::move(path));
  changed();
}

// The connector reads the counters of the path while the channel still knows
// it. The path itself is destroyed later: its code may be on the stack.
void PeerLink::onPathClosed(Path& path, const Status& why) {
  heardAt_ = heardAt();
  connectorOf(path).onPathClosed(path, why);
  host_.destroyLater(paths_.remove(path));
  useChanged();
  if (cut() && path.kind() == PathKind::kTcp) {
    host_.onLinkCut(*this);
  }
  if (cut() && leaving_) {
    // It has gone too, maybe before it could acknowledge our goodbye.
    loop().post([this, alive = std::weak_ptr<void>(alive_)] {
      if (alive.lock()) {
        close(
            State::kLeft, StatusCode::kPeerLeft, "has left, as this rank has");
      }
    });
  }
}

void PeerLink::onPathReady(Path&) {
  changed();
}

void PeerLink::onPathUse(Path& path) {
  connectorOf(path).onPathUse(path);
  useChanged();
}

void PeerLink::changed() {
  host_.markDirty(*this);
}

// A path that judges its own health has changed.
void PeerLink::useChanged() {
  Failover& failover = tcp_.failover();
  failover.setSharedMemory(shared_.sharing());
  verbs_.onUseChanged();
  const size_t routes = std::max(datagrams_.routes(), verbs_.routes());
  for (size_t route = 0; route < routes; ++route) {
    RoutePathUse use = RoutePathUse::kNone;
    if (verbs_.carries(route)) {
      use = RoutePathUse::kAlone;
    } else if (datagrams_.carries(route)) {
      use = datagrams_.use();
    }
    failover.setRoutePath(route, use);
  }
  failover.assignRoles(loop().now());
  changed();
}

void PeerLink::onRoles(const Roles& roles) {
  paths_.forEach([&](Path& path) {
    if (!path.closed()) {
      channel_.setClasses(path.id(), connectorOf(path).classes(path, roles));
    }
  });
}

void PeerLink::faultsChanged() {
  paths_.forEach([this](Path& path) { path.faultsChanged(faultsConcern()); });
  useChanged();
  tcp_.failover().watch(loop().now());
}

// --- whether the process is there

void PeerLink::onConnection() {
  const bool first = state_ == State::kUnconnected;
  state_ = State::kUp;
  neededSince_ = kNever;
  if (first) {
    host_.onLinkUp(*this);
  }
  shared_.offer();
  datagrams_.offer();
  verbs_.offer();
  relays_.offer();
  changed();
}

// Paper: SHIFT §4.2 leaves the first connection to the application; ours has
// a limit of its own, since a wrong address or a firewall never heals.
void PeerLink::onNoConnection() {
  const double limit = host_.options().connect_timeout_s;
  if (state_ != State::kUnconnected || neededSince_ == kNever ||
      interest_ == 0 || loop().now() - neededSince_ < fromSeconds(limit)) {
    return;
  }
  const std::string paths = pathSummary();
  close(
      State::kDead,
      StatusCode::kNetwork,
      "cannot be reached within " + std::to_string(static_cast<int>(limit)) +
          " s (TORCH_RESILIENT_CONNECT_TIMEOUT_S): " + paths +
          (paths.find("secret") != std::string::npos
               ? ". Give all ranks the same TORCH_RESILIENT_SECRET (or "
                 "_SECRET_FILE)"
               : ". Check that its port is open and that "
                 "TORCH_RESILIENT_INTERFACE names a network that both "
                 "share"));
}

void PeerLink::onPeerGone(const AttemptFailure& last) {
  close(
      State::kDead,
      StatusCode::kPeerDied,
      std::string("died: its connections closed and ") +
          (last.wrongPeer
               ? "another process has its address now, or it has given "
                 "this rank up"
               : "its host refuses new ones") +
          ". Look at that process's own log for the cause");
}

// The state changes first. Everything that is called from here on, such as
// onPathClosed() of the connectors, then sees a link that is not usable and
// reconnects nothing. The connectors end their attempts before the paths close.
// The channel fails after its paths are gone, and the engine hears of it last.
void PeerLink::close(State state, StatusCode code, const std::string& how) {
  if (!usable()) {
    return;
  }
  heardAt_ = heardAt();
  state_ = state;
  closedBecause_ = Status(code, how);
  const Status why(code, describe() + ' ' + how);
  tcp_.close();
  shared_.close();
  datagrams_.close();
  verbs_.close();
  relays_.close();
  while (!paths_.empty()) {
    // Removed by onPathClosed(). A goodbye must still arrive.
    if (state == State::kLeft) {
      paths_.last().close(why);
    } else {
      paths_.last().reset(why);
    }
  }
  if (uplink_ != nullptr) { // the others go on
    uplink_->leave(channel_.id());
    host_.waitForTurn(address_->site);
    uplink_ = nullptr;
  }
  channel_.fail(closedBecause_);
  host_.onLinkClosed(*this, why);
}

// --- moving frames

void PeerLink::channelReady(Channel&) {
  changed();
}

// A path is reading a frame here. The engine therefore handles PathsLost, which
// closes connections, in a later turn.
void PeerLink::onControl(Channel&, std::span<const std::byte> payload) {
  host_.onControl(*this, payload);
}

void PeerLink::onBye(Channel&) {
  // It may close its paths before our next turn: that is no loss.
  leaving_ = true;
  // After this turn: the acknowledgement of the goodbye must still go out.
  loop().post([this, alive = std::weak_ptr<void>(alive_)] {
    if (alive.lock()) {
      close(
          State::kLeft,
          StatusCode::kPeerLeft,
          "has left: it destroyed its process group or ended");
    }
  });
}

// Paper: ATLAS §4.1. Several connections to one peer, since one alone does not
// fill a long link. Each takes what will arrive there first.
void PeerLink::pump() {
  if (!usable() || paths_.empty()) {
    return;
  }
  const TimePoint now = loop().now();
  RateLimit* limit = nullptr;
  if (uplink_ != nullptr) {
    const bool direct = channel_.takesChunksDirectly();
    uplink_->onWaiting(
        channel_.id(),
        direct && channel_.backloggedActivations(/*forOthers=*/false),
        direct && channel_.backloggedActivations(/*forOthers=*/true),
        now);
    limit = uplink_->limit();
  }
  datagrams_.chooseBursts(now);
  if (paths_.pump(limit, now)) { // more than one turn's share
    loop().post([this, alive = std::weak_ptr<void>(alive_)] {
      if (alive.lock()) {
        changed();
      }
    });
  }
  armChannelTimer();
  tcp_.onSent();
  relays_.onSent();
  if (limit != nullptr) {
    limit->endTurn(channel_.id()); // if it could not use it
    host_.waitForTurn(address_->site);
  }
}

void PeerLink::setPaced() {
  const double bytesPerS = uplink_ == nullptr ? 0 : uplink_->bytesPerS();
  channel_.setPaced(bytesPerS == 0 ? 0 : chunkBytesAt(bytesPerS), bytesPerS);
}

void PeerLink::armChannelTimer() {
  const TimePoint due = channel_.deadline();
  if (due == channelTimerAt_) {
    return;
  }
  // An earlier timer than needed is harmless, and cheaper than moving it with
  // every frame.
  if (channelTimer_ != 0 && channelTimerAt_ <= due) {
    return;
  }
  loop().cancel(channelTimer_);
  channelTimer_ = 0;
  channelTimerAt_ = due;
  if (due == kNever) {
    return;
  }
  channelTimer_ = loop().at(due, [this] {
    channelTimer_ = 0;
    channelTimerAt_ = kNever;
    channel_.onTimer(loop().now());
    changed();
  });
}

void PeerLink::fillStats(PeerStats& stats) const {
  stats.host = address_ ? address_->hostName : "";
  switch (state_) {
    case State::kUnconnected:
      stats.state = "unconnected";
      break;
    case State::kUp:
      stats.state = tcp_.anyAnswers() || relays_.usable() ? "up" : "suspect";
      break;
    case State::kDead:
      stats.state = "dead";
      break;
    case State::kLeft:
      stats.state = "left";
      break;
  }
  const ChannelCounters& c = channel_.counters();
  stats.messagesSent = c.messagesSent;
  stats.deliveriesS = channel_.deliveriesS();
  stats.messagesReceived = c.messagesReceived;
  stats.bytesSent = c.bytesSent;
  stats.bytesReceived = c.bytesReceived;
  if (const auto at = heardAt()) {
    stats.lastHeardSecondsAgo = toSeconds(host_.loop().now() - *at);
  }
  shared_.fillStats(stats);
  datagrams_.fillStats(stats);
  verbs_.fillStats(stats);
  tcp_.fillStats(stats);
  relays_.fillStats(stats);
}

} // namespace resilient
