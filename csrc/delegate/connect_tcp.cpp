#include "delegate/connect_tcp.h"

#include <algorithm>

#include "base/random.h"
#include "path/uplink.h"

namespace resilient {
namespace {

// More than this many connections between two processes is a mistake.
constexpr size_t kMaxConnections = 2048;

// We use this much of the budget that a peer on this host grants. Data that
// comes before its receive is posted is copied once more, which costs as much
// as the transfer; asking first costs 50 us. (On a network it is the other way
// round.) Measured with 4 ranks, all_to_all and broadcast of 4 to 256 MiB:
// 1.3 to 1.6 times as fast as with the whole budget.
constexpr uint64_t kLocalEagerBytes = 512u << 10;

// Before a way to another host has been measured: it may be slow, and a chunk
// cannot leave the connection that has begun it.
constexpr uint32_t kFirstChunkBytes = 64u << 10;

// Beyond this, more connections rather than larger buffers.
constexpr uint64_t kMaxWindowBytes = 64u << 20;

// Each connection gets at least this of the pace of its route, in bytes per
// second: one that has carried little so far may be needed.
constexpr uint64_t kLeastPace = 1'000'000;
// While the kernel paces what is under way, tunePaths() is called so many times
// in a round trip, within bounds. A look makes system calls for each
// connection.
constexpr int kTunesInRoundTrip = 16;
constexpr Nanos kTuneAtLeastEvery = std::chrono::milliseconds(50);
// The time that other traffic and kernel timers add to a round trip.
constexpr Nanos kShortQueue = std::chrono::milliseconds(2);

FailoverConfig failoverConfig(const Link& link) {
  const EngineOptions& options = link.host().options();
  FailoverConfig config;
  config.suspectAfter = fromSeconds(options.suspect_after_s);
  config.stallTimeout = fromSeconds(options.stall_timeout_s);
  config.heartbeat = fromSeconds(options.heartbeat_s);
  config.reconnectMin = fromSeconds(options.reconnect_min_s);
  config.reconnectMax = fromSeconds(options.reconnect_max_s);
  config.holdDownMax = fromSeconds(options.hold_down_max_s);
  config.handshakeTimeout = fromSeconds(options.handshake_timeout_s);
  config.preferredInitiator = link.preferredInitiator();
  return config;
}

} // namespace

TcpConnector::TcpConnector(Link& link)
    : Connector(link), failover_(failoverConfig(link), *this) {}

TcpConnector::~TcpConnector() {
  link_.loop().cancel(timer_);
}

// Never shrinks, and stops at kMaxConnections whatever a peer asks for.
void TcpConnector::ensure(size_t count) {
  count = std::min(count, kMaxConnections);
  while (connections_.size() < count) {
    connections_.emplace_back();
  }
  failover_.addConnections(connections_.size());
}

// --- the ways

std::optional<size_t> TcpConnector::anyOf(size_t route) const {
  for (size_t c = route; c < connections_.size(); c += routes()) {
    if (connections_[c].path != nullptr) {
      return c;
    }
  }
  return std::nullopt;
}

std::string TcpConnector::nicOf(size_t c) const {
  return routes_.empty() ? "" : ourNics_[routes_[c % routes()].mine].nic;
}

std::string TcpConnector::remoteNicOf(size_t c) const {
  return routes_.empty()
      ? ""
      : link_.address()->addresses[routes_[c % routes()].theirs].nic;
}

double TcpConnector::capacityBytesPerS(size_t route) const {
  const Channel& channel = link_.channel();
  double sum = 0, together = 0;
  for (size_t c = route; c < connections_.size(); c += routes()) {
    if (const TcpPath* path = connections_[c].path) {
      sum += channel.pathStatistics(path->id()).capacityBytesPerS();
      together = std::max(together, channel.linkBytesPerS(path->id()));
    }
  }
  return together > 0 ? std::min(sum, together) : sum;
}

Nanos TcpConnector::minRoundTrip(size_t route) const {
  Nanos least(0);
  for (size_t c = route; c < connections_.size(); c += routes()) {
    if (const TcpPath* path = connections_[c].path) {
      const auto info = path->kernelView();
      const Nanos seen = !info             ? Nanos(0)
          : info->minRoundTrip == Nanos(0) ? info->roundTrip
                                           : info->minRoundTrip;
      if (seen > Nanos(0)) {
        least = least == Nanos(0) ? seen : std::min(least, seen);
      }
    }
  }
  return least;
}

void TcpConnector::observe(size_t route, RouteEvidence& e) const {
  constexpr double kSegmentBytes = 1448;
  constexpr uint32_t kInitialSegments = 10; // RFC 6928
  constexpr Nanos kLeastTimeout = std::chrono::milliseconds(200);
  const Channel& channel = link_.channel();
  Nanos least(0);
  for (size_t c = route; c < connections_.size(); c += routes()) {
    const TcpPath* const path = connections_[c].path;
    if (path == nullptr || channel.classes(path->id()) == 0) {
      continue;
    }
    e.streamIdle = e.streamIdle && channel.inFlightBytes(path->id()) == 0;
    e.streamBurst = channel.lastBurst(path->id());
    const auto info = path->kernelView();
    if (!info) {
      continue;
    }
    e.segments += info->deliveredSegments;
    e.segmentsLost += info->totalRetransmits;
    e.streamQueueing =
        e.streamQueueing || inQueue(info->roundTrip, info->minRoundTrip);
    least = least == Nanos(0) ? info->minRoundTrip
                              : std::min(least, info->minRoundTrip);
    uint32_t segments = info->congestionWindowSegments;
    double bytes = segments * kSegmentBytes;
    if (const auto bbr = path->bbr()) {
      e.stream.paced = true;
      bytes = std::min(
          bytes,
          static_cast<double>(bbr->sends) * toSeconds(info->minRoundTrip));
    } else if (slowStartsAfterIdle_) {
      // As the kernel does: half for each retransmission timeout.
      const Nanos timeout = info->roundTrip +
          std::max(kLeastTimeout, 4 * info->roundTripVariance);
      for (Nanos idle = info->sinceLastSent;
           idle > timeout && segments > kInitialSegments;
           idle -= timeout) {
        segments = std::max(segments / 2, kInitialSegments);
      }
      bytes = segments * kSegmentBytes;
    }
    e.stream.firstBytes += bytes;
  }
  e.stream.roundTripS = toSeconds(least);
  e.streamBytesPerS = capacityBytesPerS(route);
}

void TcpConnector::onAddress() {
  chooseRoutes();
  for (size_t c = 0; c < connections_.size(); ++c) { // made by the peer
    TcpPath* const path = connections_[c].path;
    if (path == nullptr) {
      continue;
    }
    if (byItsRoute(c)) {
      failover_.onCarried(c, link_.loop().now());
    }
    if (!link_.sameHost()) {
      path->setDscp(link_.host().dscpOf(link_.address()->site));
    }
  }
  failover_.assignRoles(link_.loop().now());
}

// Within one host there is one route with a fixed number of connections, which
// is not tuned. Otherwise routes are pairs of NICs, and each begins with the
// number of connections that an earlier link between the two NICs has found. If
// NICs cannot be paired (a loopback address only), the system chooses the way:
// then there is one route without NICs.
void TcpConnector::chooseRoutes() {
  const EngineOptions& options = link_.host().options();
  RolePolicy policy;
  policy.standby = options.nic_policy == "standby";
  policy.preferred = link_.host().nicClasses();
  if (link_.sameHost()) {
    const auto count = static_cast<size_t>(options.paths_same_host);
    ensure(count);
    tuning_.begin({.min = 1, .max = 1}, {});
    failover_.setRoutes(1, std::move(policy));
    failover_.setWanted(0, count);
    return;
  }
  link_.channel().setFirstChunkBytes(kFirstChunkBytes);
  ourNics_ = outward(link_.host().self().addresses);
  const std::vector<NicAddress>& theirs = link_.address()->addresses;
  if (!theirs.empty() && !theirs.front().address.isLoopback()) {
    routes_ = pairNics(ourNics_, theirs, link_.preferredInitiator());
  }
  PathCount::Config config;
  if (options.wan_connections > 0) {
    config.min = config.max = static_cast<int>(options.wan_connections);
  } else {
    config.windowBytes = options.socket_buffer_bytes > 0
        ? static_cast<uint64_t>(options.socket_buffer_bytes)
        : link_.host().bufferLimits().windowBytes();
    // More connections than carry what the limit lets pass only take turns:
    // each finds its rate anew in every burst, and messages wait for the last.
    if (Uplink* const uplink = link_.uplink();
        uplink != nullptr && uplink->limit() != nullptr) {
      config.assumedBytesPerS =
          std::min(config.assumedBytesPerS, uplink->bytesPerS());
    }
  }
  std::vector<std::string> keys;
  for (size_t r = 0; r < routes_.size(); ++r) {
    policy.nics.push_back(ourNics_[routes_[r].mine].nic);
    keys.push_back(
        ourNics_[routes_[r].mine].address.ip() + ' ' + link_.address()->hostId +
        ' ' + theirs[routes_[r].theirs].address.ip());
  }
  tuning_.begin(config, std::move(keys));
  failover_.setRoutes(routes_.size(), std::move(policy));
  for (size_t r = 0; r < routes(); ++r) {
    failover_.setWanted(r, static_cast<size_t>(tuning_.count(r).count()));
  }
  ensure(routes() * static_cast<size_t>(tuning_.maxConnections()));
}

// Whether the connection is between the two NICs of its route.
bool TcpConnector::byItsRoute(size_t c) const {
  if (routes_.empty()) {
    return true;
  }
  const Route& route = routes_[failover_.routeOf(c)];
  const TcpPath& path = *connections_[c].path;
  const auto host = [](const std::string& address) {
    return address.substr(0, address.rfind(':'));
  };
  const auto is = [&](const std::string& connected, const NicAddress& nic) {
    return host(connected) == host(nic.address.toString());
  };
  return is(path.localAddress(), ourNics_[route.mine]) &&
      is(path.remoteAddress(), link_.address()->addresses[route.theirs]);
}

// --- connecting

size_t TcpConnector::otherPairs(size_t c) const {
  return routes_.empty()
      ? 0
      : resilient::otherPairs(
            ourNics_, link_.address()->addresses, routes_[failover_.routeOf(c)])
            .size();
}

// Sets the addresses to connect from and to. Addresses that both hosts have are
// left out of the other pairs: those lead to ourselves.
void TcpConnector::aim(size_t c, const AttemptPlan& plan, OutgoingSpec& spec) {
  const std::vector<NicAddress>& theirs = link_.address()->addresses;
  if (routes_.empty()) {
    for (const NicAddress& nic : theirs) {
      spec.candidates.push_back(nic.address);
    }
    return;
  }
  Route route = routes_[failover_.routeOf(c)];
  if (plan.offRoute) {
    route = resilient::otherPairs(ourNics_, theirs, route)[*plan.offRoute];
  }
  const NicAddress& from = ourNics_[route.mine];
  spec.candidates = {theirs[route.theirs].address};
  spec.source = from.address;
  spec.source->setPort(0);
  if (route.sameSubnet) {
    spec.options.interface = from.nic;
  }
}

// One attempt at a time for each index; an existing path of that index stays
// until the attempt succeeds. The callback comes from the loop, never from
// within start(), as FailoverHost requires.
void TcpConnector::attempt(size_t c, const AttemptPlan& plan) {
  LinkHost& host = link_.host();
  OutgoingSpec spec;
  spec.options =
      host.socketOptions(link_.sameHost() ? nullptr : &link_.address()->site);
  aim(c, plan, spec);
  spec.hello.initiator = host.self().uid;
  spec.hello.acceptor = link_.uid();
  spec.hello.connectionIndex = static_cast<uint16_t>(c);
  spec.hello.pathsWanted = static_cast<uint16_t>(connections_.size());
  spec.hello.initiatorRank = host.globalRank();
  spec.hello.eagerBudgetBytes =
      static_cast<uint64_t>(host.options().eager_bytes);
  spec.nonce = [] {
    HelloNonce nonce;
    fillRandom(nonce.data(), nonce.size());
    return nonce;
  };
  spec.secret = link_.secret();
  spec.encryption = host.encryption();
  spec.certificates = host.certificates();
  spec.hostName = link_.address()->hostName;
  spec.counters = &host.handshakes();
  spec.mayBeAt = [&host](const Uid& process, const SocketAddress& at) {
    return host.mayBeAt(process, at);
  };
  spec.attemptTimeout = plan.timeout;
  spec.synTimeout = plan.synTimeout;
  connections_[c].attempt = OutgoingHandshake::start(
      link_.loop(), std::move(spec), [this, c](OutgoingResult result) {
        onAttempt(c, std::move(result));
      });
}

void TcpConnector::giveUpAttempt(size_t c) {
  if (connections_[c].attempt) {
    link_.host().destroyLater(
        std::shared_ptr<OutgoingHandshake>(std::move(connections_[c].attempt)));
  }
}

std::optional<TimePoint> TcpConnector::attemptConnectedAt(size_t c) const {
  const auto& attempt = connections_[c].attempt;
  return attempt ? attempt->connectedAt() : std::nullopt;
}

// The failover judges the failure first: it may find that the peer is gone and
// close the link. onNoConnection() is then without effect. An attempt that lost
// to the peer's own one is no failure to reach it.
void TcpConnector::onAttempt(size_t c, OutgoingResult result) {
  Connection& x = connections_[c];
  x.attempt.reset();
  if (!link_.usable()) {
    return;
  }
  if (result.status.ok()) {
    install(
        c,
        std::move(result.socket),
        result.accept.eagerBudgetBytes,
        /*ours=*/true);
    return;
  }
  x.lastError = result.status;
  const auto verdict = result.failure.verdict;
  AttemptFailure how;
  how.refused = result.failure.refusedEverywhere;
  how.answered = verdict.has_value();
  how.wrongPeer = verdict == HelloCode::kWrongPeer;
  how.duplicate = verdict == HelloCode::kDuplicateConnection;
  failover_.onAttemptFailed(c, how, link_.loop().now());
  if (!how.duplicate) {
    link_.onNoConnection();
  }
}

// The answer for a closed link is kWrongPeer. It is signed and counts as a
// refusal at the caller, which then gives up its link as well.
HelloCode TcpConnector::decide(
    const HelloInfo& hello,
    const CertifiedFor& certifiedFor) {
  const size_t c = hello.connectionIndex;
  if (!link_.usable() || c >= kMaxConnections) {
    return HelloCode::kWrongPeer;
  }
  if (!isOfPeer(certifiedFor)) {
    return HelloCode::kCertificate;
  }
  ensure(std::max<size_t>(c + 1, hello.pathsWanted));
  return failover_.reserve(c, link_.loop().now())
      ? HelloCode::kOk
      : HelloCode::kDuplicateConnection;
}

// A certificate is for the peer's host, by its name or by one of the addresses
// that the peer has published.
bool TcpConnector::isOfPeer(const CertifiedFor& certifiedFor) const {
  if (!certifiedFor) {
    return true; // the secret is all that is asked for
  }
  const auto& peer = link_.address();
  return peer &&
      (certifiedFor(peer->hostName) ||
       std::ranges::any_of(peer->addresses, [&](const NicAddress& nic) {
         return certifiedFor(nic.address.ip());
       }));
}

// No group may have known the caller at the verdict: its certificate is looked
// at again.
void TcpConnector::onIncoming(const HelloInfo& hello, StreamSocket socket) {
  if (socket.tls && !isOfPeer(socket.tls->certifiedFor())) {
    link_.host().handshakes().count(TrustFault::kCertificate);
    logMessage(
        LogLevel::kWarning,
        "a connection of " + link_.describe() +
            " is closed: " + helloCodeText(HelloCode::kCertificate));
    onIncomingLost(hello);
    return;
  }
  if (link_.usable() && hello.connectionIndex < connections_.size()) {
    install(
        hello.connectionIndex,
        std::move(socket),
        hello.eagerBudgetBytes,
        /*ours=*/false);
  }
}

void TcpConnector::onIncomingLost(const HelloInfo& hello) {
  if (hello.connectionIndex < connections_.size()) { // else let in as unknown
    failover_.onCallerLost(hello.connectionIndex, link_.loop().now());
  }
}

// How it works, for connections from either end:
// 1. Drop our own attempt, and close the path that this one replaces. The
//    failover must see onClosed() before onConnected().
// 2. Bind and tune the socket, before the first frame is written.
// 3. Make the path and give it to the link. The faults belong to the index, so
//    cuts that have happened do not happen again on the next connection.
// 4. Tell the failover, which asks for facts about the new path at once. It
//    decides whether the path carries or has to prove itself.
// 5. Tell the link. The first connection makes it kUp, and the other connectors
//    offer their paths.
void TcpConnector::install(
    size_t c,
    StreamSocket socket,
    uint64_t eagerBytes,
    bool ours) {
  paces_ = true;
  Connection& x = connections_[c];
  x.attempt.reset();
  if (x.path != nullptr) {
    x.path->reset(Status(StatusCode::kNetwork, "replaced by a new connection"));
  }
  const bool local = isLocalConnection(socket.get());
  if (!local) {
    bindToNic(socket.get());
    tuneNew(c, socket.get());
  }
  Channel& channel = link_.channel();
  channel.setPeerEagerBytes(
      local ? std::min(eagerBytes, kLocalEagerBytes) : eagerBytes);
  if (!x.faults) {
    x.faults = std::make_unique<PathFaults>(
        link_.host().faults(),
        link_.host().globalRank(),
        link_.globalRank(),
        static_cast<int>(c));
  }
  auto path = std::make_unique<TcpPath>(
      link_.loop(),
      channel,
      link_.host().nextPathId(),
      static_cast<int>(c),
      std::move(socket),
      *x.faults,
      link_.pathOwner());
  x.path = path.get();
  x.congestion = CongestionChoice();
  link_.addPath(std::move(path));
  failover_.onConnected(
      c, link_.loop().now(), byItsRoute(c), ours, /*measure=*/!local);
  const bool again = failover_.timesConnected(c) > 1;
  if (logEnabled(LogLevel::kDebug) || again) {
    link_.say(
        again ? LogLevel::kInfo : LogLevel::kDebug,
        "path " + std::to_string(c) + " to " + link_.describe() + " is up (" +
            x.path->localAddress() + " -> " + x.path->remoteAddress() + ')');
  }
  if (!failover_.offRoute(c)) {
    channel.setSharedLink(x.path->id(), failover_.routeOf(c));
  }
  if (failover_.carried(c)) {
    channel.expectCapacity(x.path->id(), x.pastBytesPerS);
  }
  link_.onConnection();
}

// Sets what a new connection to another host needs beyond what all sockets
// have.
void TcpConnector::tuneNew(size_t c, int fd) {
  LinkHost& host = link_.host();
  const EngineOptions& options = host.options();
  if (!host.congestionControl().empty()) {
    (void)setCongestionControl(fd, host.congestionControl());
  }
  if (link_.address()) {
    (void)setDscp(fd, host.dscpOf(link_.address()->site));
  }
  if (routes_.empty()) {
    return;
  }
  const size_t route = failover_.routeOf(c);
  const auto view = tcpInfo(fd); // the handshake has been a first measurement
  if (host.mayChangeCongestionControl() &&
      (tuning_.lossy(route) ||
       (view && view->roundTrip >= kSlowStartCounts && slowStartsAfterIdle_))) {
    (void)setCongestionControl(fd, kLossyCongestionControl);
  }
  if (view && options.wan_connections == 0 &&
      options.socket_buffer_bytes == 0) {
    PathCount& count = tuning_.count(route);
    const uint64_t window =
        std::min(kMaxWindowBytes, count.neededWindowBytes(view->roundTrip));
    if (window > host.bufferLimits().windowBytes()) {
      count.setWindowBytes(raiseBuffers(fd, window, host.bufferLimits()));
    }
  }
}

// The side that was called binds too: or its answers might all leave by one
// NIC, and die with it.
void TcpConnector::bindToNic(int fd) const {
  const SocketAddress local = localAddress(fd);
  const auto remote = SocketAddress::parse(remoteAddress(fd).ip(), 0);
  for (const NicAddress& nic : link_.host().self().addresses) {
    if (nic.address.ip() == local.ip() && remote && nic.inSubnet(*remote)) {
      bindToInterface(fd, nic.nic);
    }
  }
}

// Capacity and counters outlive the path: the next connection of this index is
// expected to carry as much, and stats() must not go back. The capacity is kept
// only if the connection ran between the NICs of its route.
void TcpConnector::onPathClosed(Path& path, const Status& why) {
  const auto c = static_cast<size_t>(static_cast<TcpPath&>(path).index());
  Connection& x = connections_[c];
  x.lastError = why;
  if (x.path != nullptr && x.path->tlsFailed()) {
    link_.host().handshakes().count(TrustFault::kRecord);
  }
  x.path = nullptr;
  Channel& channel = link_.channel();
  const LinkStatistics& statistics = channel.pathStatistics(path.id());
  const double capacity = channel.capacityBytesPerS(path.id());
  if (failover_.carried(c) && capacity > 0) {
    x.pastBytesPerS = capacity;
  }
  x.past.add(channel.pathCounters(path.id()));
  const bool lastOfAll = link_.leaving() && failover_.live() <= 1;
  failover_.onClosed(
      c,
      fromSeconds(statistics.roundTripS()),
      /*forGood=*/!link_.usable() || lastOfAll,
      link_.loop().now());
  if (link_.usable() && !lastOfAll) {
    link_.say(
        link_.levelOfLoss(why),
        "path " + std::to_string(c) + " to " + link_.describe() +
            " is down: " + why.message() + "; reconnecting");
  }
}

void TcpConnector::close() {
  failover_.end();
  link_.loop().cancel(timer_);
  timer_ = 0;
  for (size_t c = 0; c < connections_.size(); ++c) {
    giveUpAttempt(c);
  }
}

// --- news of addresses

void TcpConnector::onPathsLost(const PathsLost& lost) {
  // The peer has closed its ends of these, so ours are of no use, whether or
  // not another one works.
  for (const uint16_t c : lost.connections) {
    if (link_.usable() && c < connections_.size() && connections_[c].path) {
      connections_[c].path->reset(Status(
          StatusCode::kNetwork, link_.describe() + " says: " + lost.reason));
    }
  }
}

// Routes are pairs of NICs, so they stay as they are. Connections from
// the old address are lost; the peer learns of the new one as soon as any path
// carries, or from the connections that we make ourselves.
void TcpConnector::onOurAddresses() {
  if (!link_.usable() || routes_.empty()) {
    return;
  }
  const std::vector<NicAddress> now = outward(link_.host().self().addresses);
  std::vector<bool> changed(ourNics_.size(), false);
  for (size_t i = 0; i < ourNics_.size() && i < now.size(); ++i) {
    changed[i] = now[i].address.ip() != ourNics_[i].address.ip();
    ourNics_[i] = now[i];
  }
  link_.channel().sendControl(encode(Addresses{link_.host().addressText()}));
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (!changed[routes_[failover_.routeOf(c)].mine]) {
      continue;
    }
    if (TcpPath* const path = connections_[c].path) {
      failover_.forgetFailures(c);
      path->reset(Status(
          StatusCode::kNetwork,
          "our NIC " + nicOf(c) + " has another address"));
    } else {
      failover_.retryNow(c, link_.loop().now());
    }
  }
}

void TcpConnector::onPeerAddresses() {
  if (failover_.live() == 0) {
    // To an address that is not the peer's any more: it may take as long as its
    // timeout.
    failover_.giveUpAttempts();
  }
  failover_.retryAll(link_.loop().now());
}

bool TcpConnector::anyAnswers() const {
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (failover_.answers(c)) {
      return true;
    }
  }
  return false;
}

// --- looking at the connections

void TcpConnector::wakeAt(TimePoint when) {
  if (timer_ != 0 && timerAt_ <= when) {
    return;
  }
  link_.loop().cancel(timer_);
  timerAt_ = when;
  timer_ = link_.loop().at(when, [this] {
    timer_ = 0;
    onTimer();
  });
}

void TcpConnector::onTimer() {
  const bool looked = failover_.onTimer(link_.loop().now());
  const TimePoint now = link_.loop().now();
  if (tuneAt_ <= now || (looked && now >= tunedAt_ + tuneEvery_)) {
    tunePaths();
  }
  if (looked) {
    link_.onNoConnection();
    if (link_.usable()) {
      tuneRoutes();
    }
  }
  if (const TimePoint due = std::min(failover_.deadline(), tuneAt_);
      due != kNever) {
    wakeAt(due);
  }
}

void TcpConnector::onSent() {
  const TimePoint now = link_.loop().now();
  failover_.onSent(now);
  if (paces_ && tuneAt_ == kNever) {
    tuneAt_ = now + tuneEvery_;
    wakeAt(tuneAt_);
  }
}

// Questions are in flight themselves, so they go on after a burst. For a while
// they are meant to: the answers then tell when the next burst begins to
// arrive, and how fast its first bytes are.
void TcpConnector::tunePaths() {
  constexpr Nanos kAsksFor = std::chrono::seconds(2);
  // Beyond two round trips, for delayed acknowledgements (40 ms).
  constexpr Nanos kDelayedAck = std::chrono::milliseconds(50);
  pacing_.resize(routes());
  tunedAt_ = link_.loop().now();
  if (link_.channel().carriesMessages()) {
    carriedAt_ = link_.loop().now();
  }
  paces_ = false;
  tuneAt_ = kNever;
  std::optional<Nanos> shortest; // round trip of those that may be paced
  for (size_t r = 0; r < routes(); ++r) {
    RoutePacing::Sample sample;
    sample.now = link_.loop().now();
    std::vector<std::pair<TcpPath*, BbrView>> paced;
    std::vector<PacedConnection> seen;
    Nanos silent = Nanos::max(); // in both directions
    sample.arrivedAt = arrivedAt_;
    for (size_t c = r; c < connections_.size(); c += routes()) {
      sample.arrived += connections_[c].arrived;
      TcpPath* const path = connections_[c].path;
      const auto view = path == nullptr ? std::nullopt : path->tune();
      if (!view || failover_.offRoute(c)) {
        continue;
      }
      paced.emplace_back(path, *view);
      seen.push_back(path->paced(*view));
      sample.acknowledged += view->bytesAcked;
      sample.inFlight += view->inFlightBytes;
      sample.delivered += view->deliveredSegments;
      sample.lost += view->retransmits;
      sample.rate += view->arrives;
      sample.startingUp =
          sample.startingUp || (view->startingUp && carries(seen.back()));
      silent = std::min({silent, view->sinceLastAck, view->sinceLastSent});
      if (view->sinceLastAck <= view->minRoundTrip) { // else it is an old one
        sample.roundTrip = std::max(sample.roundTrip, view->roundTrip);
      }
      sample.minRoundTrip = sample.minRoundTrip == Nanos(0)
          ? view->minRoundTrip
          : std::min(sample.minRoundTrip, view->minRoundTrip);
    }
    const bool far = sample.minRoundTrip > kSlowStartCounts;
    const auto limit =
        far ? static_cast<double>(pacing_[r].observe(sample)) : 0;
    if (far && sample.inFlight > 0) {
      if (sample.now - carriedAt_ < kAsksFor) {
        askForArrivals(sample.minRoundTrip);
      }
      if (silent < 2 * sample.minRoundTrip + kDelayedAck) { // else it is dead
        tuneAt_ = sample.now; // and later, as soon as that is known
      }
    }
    if (far) {
      shortest =
          std::min(shortest.value_or(sample.minRoundTrip), sample.minRoundTrip);
    }
    paces_ = paces_ || far;
    const bool mayRestart = far && link_.host().mayChangeCongestionControl();
    const std::vector<double> shares = paceShares(seen);
    for (size_t i = 0; i < paced.size(); ++i) {
      const auto& [path, view] = paced[i];
      path->limitPace(
          limit == 0 ? 0 : std::max(kLeastPace, uint64_t(limit * shares[i])),
          view);
      if (mayRestart) {
        path->restartBbr(view);
      }
    }
  }
  tuneEvery_ = std::clamp(
      shortest.value_or(Nanos(0)) / kTunesInRoundTrip,
      kTuneEvery,
      kTuneAtLeastEvery);
  if (tuneAt_ != kNever) {
    tuneAt_ += tuneEvery_;
  }
}

// Several times in a round trip, of all routes at once. Older peers do not
// answer.
void TcpConnector::askForArrivals(Nanos roundTrip) {
  constexpr Nanos kOften = std::chrono::milliseconds(5);
  constexpr Nanos kUnanswered = std::chrono::seconds(1);
  const TimePoint now = link_.loop().now();
  const Nanos interval =
      arrivedAt_ == TimePoint{} ? kUnanswered : std::max(roundTrip / 4, kOften);
  if (tellsArrivals_ &&
      (askedAt_ == TimePoint{} || now - askedAt_ >= interval)) {
    askedAt_ = now;
    link_.channel().sendControl(encode(Arrivals()));
  }
}

void TcpConnector::onArrivals(const Arrivals& arrivals) {
  if (!arrivals.answer) {
    if (!tellsArrivals_) {
      return;
    }
    Arrivals answer;
    answer.answer = true;
    answer.clockNanos =
        static_cast<uint64_t>(link_.loop().now().time_since_epoch().count());
    for (size_t c = 0; c < connections_.size(); ++c) {
      const TcpPath* const path = connections_[c].path;
      if (path != nullptr) {
        answer.connections.push_back(
            {static_cast<uint16_t>(c), path->bytesReceived()});
      }
    }
    link_.channel().sendControl(encode(answer));
    return;
  }
  // Control frames come in no order.
  const TimePoint at{Nanos(static_cast<int64_t>(arrivals.clockNanos))};
  if (at <= arrivedAt_) {
    return;
  }
  arrivedAt_ = at;
  for (const auto& [index, bytes] : arrivals.connections) {
    if (index < connections_.size()) {
      Connection& x = connections_[index];
      x.arrived += x.told && bytes >= *x.told ? bytes - *x.told : 0;
      x.told = bytes;
    }
  }
  // Answers wait behind the data of the other direction and come in a clump:
  // each of them is looked at, not the last alone.
  tunePaths();
  if (tuneAt_ != kNever) {
    wakeAt(tuneAt_);
  }
}

// Whether more connections carry more, route by route. With a fixed number of
// connections, observe() changes nothing, but viewOf() still watches for drops.
// busySince() is called at every look, so it covers the time since the last
// one. The rest makes system calls, and needs several looks in the 200 ms that
// PathCount and CongestionChoice measure at least, not one every 5 ms.
void TcpConnector::tuneRoutes() {
  constexpr Nanos kEvery = std::chrono::milliseconds(20);
  const TimePoint now = link_.loop().now();
  wasBusy_ = tuning_.busySince(link_.channel().backlogged()) && wasBusy_;
  if (now - routesTunedAt_ < kEvery) {
    return;
  }
  routesTunedAt_ = now;
  const bool busy = std::exchange(wasBusy_, true);
  if (link_.host().options().wan_connections > 0 &&
      !link_.host().mayChangeCongestionControl()) {
    return;
  }
  bool changed = false;
  for (size_t r = 0; r < routes_.size(); ++r) {
    if (failover_.routePathAlone(r)) {
      continue; // its connections are in reserve: they show nothing
    }
    const int before = tuning_.count(r).count();
    if (tuning_.observe(r, viewOf(r, now), busy, now)) {
      changed = true;
      const int count = tuning_.count(r).count();
      failover_.setWanted(r, static_cast<size_t>(count));
      logMessage(
          LogLevel::kDebug,
          nicOf(r) + " to " + link_.describe() + ": " + std::to_string(count) +
              " connections instead of " + std::to_string(before));
    }
  }
  if (changed) {
    ensure(routes() * static_cast<size_t>(tuning_.maxConnections()));
    failover_.connectAll(now);
    failover_.assignRoles(now);
    link_.changed();
  }
}

// ackedBytes must not fall when a connection is replaced, so closed paths
// count. A connection queues if its round trip is half as long again as its
// shortest one, and a little more. Also watches each connection for drops,
// since the kernel's view is at hand.
RouteTuning::View TcpConnector::viewOf(size_t route, TimePoint now) {
  RouteTuning::View seen;
  for (size_t c = route; c < connections_.size(); c += routes()) {
    const Connection& x = connections_[c];
    seen.ackedBytes += x.past.bytesSent;
    if (x.path == nullptr) {
      continue;
    }
    const Channel& channel = link_.channel();
    seen.ackedBytes += channel.pathCounters(x.path->id()).bytesSent -
        channel.inFlightBytes(x.path->id());
    seen.startingUp = seen.startingUp || x.path->startingUp();
    const auto view = x.path->kernelView();
    const Nanos min = view ? view->minRoundTrip : Nanos(0);
    if (min > Nanos(0)) {
      seen.minRoundTrip = seen.minRoundTrip == Nanos(0)
          ? min
          : std::min(seen.minRoundTrip, min);
      seen.sending += view->unackedSegments > 0;
      seen.queueing += view->unackedSegments > 0 &&
          view->roundTrip > min + min / 2 + kShortQueue;
      watchLoss(c, *view, now);
    }
  }
  return seen;
}

// Whether this connection would do better with another congestion control. The
// change is for the life of the connection; there is no way back to the
// system's choice.
void TcpConnector::watchLoss(size_t c, const TcpInfo& view, TimePoint now) {
  if (!link_.host().mayChangeCongestionControl()) {
    return;
  }
  Connection& x = connections_[c];
  CongestionChoice::Sample sample;
  sample.retransmits = view.totalRetransmits;
  sample.delivered = view.deliveredSegments;
  sample.roundTrip = view.roundTrip;
  sample.minRoundTrip = view.minRoundTrip;
  sample.busy = view.unackedSegments > 0 &&
      (tuning_.backlogged() || view.notSentBytes > 0);
  if (x.congestion.observe(sample, now) &&
      x.path->setCongestionControl(kLossyCongestionControl)) {
    // The next connections between these two NICs begin with it.
    tuning_.setLossy(failover_.routeOf(c));
    logMessage(
        LogLevel::kInfo,
        "path " + std::to_string(c) + " to " + link_.describe() +
            " loses packets without any queue: it goes on with " +
            kLossyCongestionControl);
  }
}

// Names only connections that do not work, since errors quote it.
std::string TcpConnector::summary() const {
  size_t count = 0, up = 0;
  std::string faults;
  for (size_t c = 0; c < connections_.size(); ++c) {
    const Connection& x = connections_[c];
    const bool wanted = failover_.wanted(c);
    const bool works = failover_.answers(c);
    count += wanted || x.path != nullptr;
    up += works;
    if (works || (x.path == nullptr && (x.lastError.ok() || !wanted))) {
      continue;
    }
    const std::string nic = nicOf(c);
    faults += "; path " + std::to_string(c) +
        (nic.empty() ? "" : " (" + nic + ")") + ": ";
    faults += x.path == nullptr ? x.lastError.message()
        : failover_.state(c).nicDown
        ? std::string("its NIC is down")
        : "silent for " + durationText(link_.loop().now() - x.path->heardAt());
  }
  return std::to_string(up) + " of " + std::to_string(count) + " paths up" +
      faults;
}

void TcpConnector::fillStats(PeerStats& stats) const {
  for (size_t c = 0; c < connections_.size(); ++c) {
    const Connection& x = connections_[c];
    PathStats p;
    p.index = static_cast<int>(c);
    const uint64_t times = failover_.timesConnected(c);
    p.reconnects = times > 0 ? times - 1 : 0;
    p.lastError = x.lastError.message();
    if (!x.lastError.ok() && stats.lastError.empty()) {
      stats.lastError = x.lastError.message();
    }
    p.nic = nicOf(c);
    p.remoteNic = remoteNicOf(c);
    p.state = failover_.stateName(
        c, x.path == nullptr ? 0 : link_.channel().classes(x.path->id()));
    p.add(x.past);
    if (x.path != nullptr) {
      x.path->fill(p);
    }
    stats.paths.push_back(std::move(p));
  }
}

// --- for the failover

ConnectionFacts TcpConnector::facts(size_t c) const {
  const TcpPath& path = *connections_[c].path;
  const Channel& channel = link_.channel();
  ConnectionFacts facts;
  facts.heardAt = path.heardAt();
  facts.waitingSince = channel.waitingSince(path.id());
  facts.answeredUpTo = channel.answeredUpTo(path.id());
  facts.pingsAnswered = channel.pingsAnswered(path.id());
  facts.roundTrip = fromSeconds(channel.pathStatistics(path.id()).roundTripS());
  return facts;
}

PathEvidence TcpConnector::evidence(size_t c) const {
  return connections_[c].path->evidence();
}

bool TcpConnector::busy() const {
  return link_.needed() || !link_.channel().drained();
}

void TcpConnector::ping(size_t c) {
  link_.channel().ping(connections_[c].path->id());
}

void TcpConnector::putOnProbation(size_t c) {
  link_.channel().putOnProbation(connections_[c].path->id());
}

void TcpConnector::trust(size_t c) {
  link_.channel().trust(connections_[c].path->id());
}

void TcpConnector::setSuspect(size_t c, bool suspect) {
  link_.channel().setSuspect(connections_[c].path->id(), suspect);
}

void TcpConnector::reset(size_t c, const std::string& why) {
  connections_[c].path->reset(Status(StatusCode::kNetwork, why));
}

void TcpConnector::tellLost(
    const std::vector<size_t>& connections,
    const std::string& nic) {
  PathsLost lost;
  for (const size_t c : connections) {
    lost.connections.push_back(static_cast<uint16_t>(c));
  }
  lost.reason = "its NIC " + nic + " went down";
  link_.channel().sendControl(encode(lost));
}

void TcpConnector::rolesAssigned(const Roles& roles) {
  link_.onRoles(roles);
}

void TcpConnector::onPeerGone(const AttemptFailure& last) {
  link_.onPeerGone(last);
}

void TcpConnector::note(size_t c, ConnectionNote what) {
  const auto say = [&](LogLevel level, const char* rest) {
    if (logEnabled(level)) {
      logMessage(
          level,
          "path " + std::to_string(c) + " to " + link_.describe() + rest);
    }
  };
  switch (what) {
    case ConnectionNote::kSuspect:
      return say(LogLevel::kDebug, " is suspect");
    case ConnectionNote::kAnswersAgain:
      return say(LogLevel::kDebug, " answers again");
    case ConnectionNote::kStalls:
      return say(LogLevel::kInfo, " stalls; trying another way");
    case ConnectionNote::kProved:
      return say(LogLevel::kInfo, " has proved itself and carries data again");
  }
}

} // namespace resilient
