#include "delegate/peer_link.h"

#include <algorithm>

#include "base/log.h"
#include "base/random.h"
#include "delegate/engine.h"

namespace resilient {
namespace {

// How long the process with the larger uid leaves a lost connection to the
// other one, so that not both make one.
constexpr Nanos kSecondInitiatorDelay = std::chrono::milliseconds(60);

// An attempt whose TCP connection has stood for longer than this no longer
// keeps the peer's own one out: the way may have failed since.
constexpr Nanos kAttemptPriority = std::chrono::seconds(1);

// Bytes that one link hands to its paths in one turn of the loop, before the
// others get theirs.
constexpr int kPumpRounds = 8;

// While other paths work, an attempt to bring one back is over soon: if the
// way is a black hole, the next one may find it healed. But connecting and the
// handshake take 3 round trips, and a retransmission in between about 2 more;
// twice that, and a loaded way still comes back.
constexpr Nanos kShortAttempt = std::chrono::milliseconds(600);
constexpr int kAttemptRoundTrips = 8;

// More than this many connections between two processes is a mistake.
constexpr size_t kMostSlots = 2048;

// Of the budget that a peer on this host grants, we use this much. What comes
// before its receive is posted is copied once more, which costs as much as the
// transfer; asking first costs 50 us. (On a network it is the other way
// round.) Measured with 4 ranks, all_to_all and broadcast of 4 to 256 MiB:
// 1.3 to 1.6 times as fast as with the whole budget.
constexpr uint64_t kLocalEagerBytes = 512u << 10;

// Where a cap allows less, chunks are of 20 ms each: what is more urgent waits
// behind one.
constexpr uint32_t kWholeElements = 64; // no chunk ends within an element
uint32_t chunkBytesAt(double bytesPerS) {
  constexpr uint32_t kLeast = 16u << 10, kMost = 64u << 20;
  const auto bytes =
      static_cast<uint32_t>(std::clamp<double>(bytesPerS / 50, kLeast, kMost));
  return bytes / kWholeElements * kWholeElements;
}

// For the counters of a path, and for what is shown of them.
template <typename Sum>
void addCounters(Sum& sum, const PathCounters& more) {
  sum.bytesSent += more.bytesSent;
  sum.bytesReceived += more.bytesReceived;
  sum.chunksSent += more.chunksSent;
  sum.chunksRetransmitted += more.chunksRetransmitted;
  sum.timesSuspect += more.timesSuspect;
}

} // namespace

PeerLink::PeerLink(Engine& engine, Uid uid, uint32_t channelId)
    : engine_(engine),
      uid_(uid),
      channel_(
          channelId,
          ChannelConfig{
              static_cast<uint32_t>(engine.options().chunk_bytes) /
                  kWholeElements * kWholeElements,
              static_cast<uint64_t>(engine.options().eager_bytes),
              static_cast<uint64_t>(engine.options().eager_bytes),
              static_cast<uint64_t>(engine.options().copy_bytes),
              fromSeconds(engine.options().stage_after_s),
              static_cast<uint64_t>(engine.options().starvation_bytes)},
          engine.mailbox(),
          engine.completions(),
          engine.staging(),
          *this) {}

PeerLink::~PeerLink() {
  EventLoop& loop = engine_.loop();
  loop.cancel(healthTimer_);
  loop.cancel(channelTimer_);
  for (Slot& slot : slots_) {
    loop.cancel(slot.retryTimer);
  }
}

std::string PeerLink::describe() const {
  const int32_t rank = newestRank_ >= 0 ? newestRank_ : globalRank_;
  std::string s =
      rank >= 0 ? "rank " + std::to_string(rank) : std::string("a peer");
  if (address_) {
    s += " (host " + address_->hostName + ", pid " +
        std::to_string(address_->pid);
    if (!address_->addresses.empty()) {
      s += ", " + address_->addresses.front().address.toString();
    }
    s += ')';
  }
  return s;
}

std::optional<TimePoint> PeerLink::heardAt() const {
  std::optional<TimePoint> at = heardAt_;
  for (const Slot& slot : slots_) {
    if (slot.path) {
      at = at ? std::max(*at, slot.path->heardAt()) : slot.path->heardAt();
    }
  }
  if (shared_) {
    at = at ? std::max(*at, shared_->heardAt()) : shared_->heardAt();
  }
  for (const Datagrams& d : datagrams_) {
    if (d.path) {
      at = at ? std::max(*at, d.path->heardAt()) : d.path->heardAt();
    }
  }
  return at;
}

std::string PeerLink::pathSummary() const {
  size_t count = 0, up = 0;
  std::string faults;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    count += wanted(i) || slot.path;
    const bool works = answers(viewOf(slot));
    up += works;
    if (works || (!slot.path && (slot.lastError.ok() || !wanted(i)))) {
      continue;
    }
    const std::string nic = nicOf(i);
    faults += "; path " + std::to_string(i) +
        (nic.empty() ? "" : " (" + nic + ")") + ": ";
    if (slot.path) {
      faults += slot.nicDown ? std::string("its NIC is down")
                             : "silent for " +
              durationText(engine_.loop().now() - slot.path->heardAt());
    } else {
      faults += slot.lastError.message();
    }
  }
  return std::to_string(up) + " of " + std::to_string(count) + " paths up" +
      faults;
}

LogLevel PeerLink::levelOfLoss(const Status& why) const {
  if (why.code() == StatusCode::kProtocol) {
    return LogLevel::kWarning;
  }
  return leaving_ ? LogLevel::kDebug : LogLevel::kInfo;
}

ConnectionView PeerLink::viewOf(const Slot& slot) const {
  ConnectionView view;
  if (!slot.path) {
    return view;
  }
  const PathId id = slot.path->id();
  view.connected = true;
  view.suspect = channel_.isSuspect(id);
  view.stalled = slot.stalled;
  view.nicDown = slot.nicDown;
  view.onProbation = channel_.onProbation(id);
  view.answerAge =
      engine_.loop().now() - std::max(channel_.answeredUpTo(id), slot.upAt);
  view.roundTrip = fromSeconds(channel_.pathStatistics(id).roundTripS());
  return view;
}

std::vector<ConnectionView> PeerLink::views() const {
  std::vector<ConnectionView> all;
  all.reserve(slots_.size());
  for (const Slot& slot : slots_) {
    all.push_back(viewOf(slot));
  }
  return all;
}

// A silent path is replaced by a connection that works; see checkPath().
bool PeerLink::mayReplace(const Slot& slot) const {
  const ConnectionView view = viewOf(slot);
  return view.stalled ||
      (view.suspect &&
       worthReplacing(engine_.loop().now() - slot.suspectAt, view.roundTrip));
}

bool PeerLink::anyWorks() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& s) {
    return s.path && !s.wayDead && !s.nicDown;
  });
}

size_t PeerLink::livePaths() const {
  size_t n = 0;
  for (const Slot& slot : slots_) {
    n += slot.path != nullptr;
  }
  return n;
}

bool PeerLink::preferredInitiator() const {
  return engine_.self().uid < uid_;
}

void PeerLink::setAddress(
    const PeerAddress& address,
    const std::string& secret,
    int32_t globalRank) {
  newestRank_ = globalRank;
  if (address_) {
    return;
  }
  address_ = address;
  engine_.membersMoved();
  secret_ = secret;
  globalRank_ = globalRank;
  chooseRoutes();
  for (size_t i = 0; i < slots_.size(); ++i) { // made by the peer already
    if (slots_[i].path && (slots_[i].carried = byItsRoute(i))) {
      refusals_.onCarried(routeOf(i), engine_.loop().now());
    }
  }
  if (address.hostId != engine_.self().hostId) {
    limit_ = engine_.rateLimit(address.site);
    if (limit_ != nullptr) {
      channel_.setPaced(chunkBytesAt(limit_->bytesPerS()));
    }
    for (Slot& slot : slots_) { // made by the peer, before we knew its site
      if (slot.path) {
        slot.path->setDscp(engine_.dscpOf(address.site));
      }
    }
  }
  assignRoles(); // of paths that the peer has made already
  engine_.letIn(*this);
  connectAll();
  offerSharedMemory();
  offerDatagrams();
}

void PeerLink::ensureSlots(size_t count) {
  while (slots_.size() < std::min(count, kMostSlots)) {
    slots_.emplace_back(fromSeconds(engine_.options().hold_down_max_s));
  }
}

void PeerLink::connectAll() {
  if (interest_ > 0) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      connect(i);
    }
  }
}

void PeerLink::addInterest() {
  if (++interest_ > 1 || !usable()) {
    return;
  }
  if (state_ == State::kUnconnected && neededSince_ == kNever) {
    neededSince_ = engine_.loop().now();
  }
  connectAll();
  armHealthTimer();
}

void PeerLink::leave() {
  if (state_ == State::kUp) {
    leaving_ = true;
    channel_.sendBye();
  }
}

void PeerLink::dropInterest() {
  --interest_;
}

// --- connecting

void PeerLink::connect(size_t index) {
  Slot& slot = slots_[index];
  EventLoop& loop = engine_.loop();
  const bool needed = !slot.path || slot.astray || mayReplace(slot);
  if (!usable() || !address_ || !needed || !wanted(index) || slot.attempt ||
      slot.reservedUntil > loop.now()) {
    return;
  }
  loop.cancel(slot.retryTimer);
  slot.retryTimer = 0;
  OutgoingSpec spec;
  spec.options = engine_.socketOptions(
      address_->hostId == engine_.self().hostId ? nullptr : &address_->site);
  aim(index, spec);
  spec.hello.initiator = engine_.self().uid;
  spec.hello.acceptor = uid_;
  spec.hello.pathSlot = static_cast<uint16_t>(index);
  spec.hello.pathsWanted = static_cast<uint16_t>(slots_.size());
  spec.hello.initiatorRank = engine_.globalRank();
  spec.hello.eagerBudgetBytes =
      static_cast<uint64_t>(engine_.options().eager_bytes);
  spec.nonce = [] {
    HelloNonce nonce;
    fillRandom(nonce.data(), nonce.size());
    return nonce;
  };
  spec.secret = secret_;
  spec.mayBeAt = [this](const Uid& process, const SocketAddress& at) {
    return engine_.mayBeAt(process, at);
  };
  spec.attemptTimeout = fromSeconds(engine_.options().handshake_timeout_s);
  slot.attemptAt = loop.now();
  if (slot.failures == 0) {
    slot.tryingSince = slot.attemptAt;
  }
  if (slot.connections > 0) {
    spec.synTimeout = synTimeoutOf(index);
  }
  if (slot.connections > 0 && anyOtherGood(index)) {
    spec.attemptTimeout = std::min(
        spec.attemptTimeout,
        std::max(kShortAttempt, kAttemptRoundTrips * longestRoundTrip(index)));
  }
  slot.attempt = OutgoingHandshake::start(
      loop, std::move(spec), [this, index](OutgoingResult result) {
        onAttempt(index, std::move(result));
      });
}

Nanos PeerLink::synTimeoutOf(size_t index) const {
  return synTimeout(
      engine_.loop().now() - slots_[index].tryingSince,
      longestRoundTrip(index));
}

// Of what is known of the way that the slot lost, and of the others.
Nanos PeerLink::longestRoundTrip(size_t index) const {
  Nanos longest = slots_[index].pastRoundTrip;
  for (const Slot& slot : slots_) {
    if (slot.path) {
      longest = std::max(
          longest,
          fromSeconds(channel_.pathStatistics(slot.path->id()).roundTripS()));
    }
  }
  return longest;
}

void PeerLink::onAttempt(size_t index, OutgoingResult result) {
  Slot& slot = slots_[index];
  slot.attempt.reset();
  if (!usable()) {
    return;
  }
  if (result.status.ok()) {
    install(index, std::move(result.fd), result.accept.eagerBudgetBytes);
    slot.astray = slot.triesAstray;
    if (slot.astray) {
      retryLater(index, fromSeconds(engine_.options().reconnect_max_s));
    }
    return;
  }
  slot.lastError = result.status;
  ++slot.failures;
  if (!slot.triesAstray && livePaths() == 0) {
    countAttempt(routeOf(index), result.failure);
    if (!usable()) {
      return;
    }
  }
  if (result.failure.verdict == HelloCode::kDuplicateSlot) {
    // The peer's own attempt is on its way.
    retryLater(index, kAttemptPriority);
    return;
  }
  checkNeverConnected();
  if (!usable()) {
    return;
  }
  // Counted from the beginning of the attempt: one into a black hole is pause
  // enough.
  Nanos pause = fromSeconds(
      std::min(
          engine_.options().reconnect_max_s,
          engine_.options().reconnect_min_s *
              static_cast<double>(1 << std::min(slot.failures, 16))));
  // The host has not refused: it is the network, which may heal at any moment.
  if (slot.connections > 0 && !result.failure.verdict &&
      !result.failure.refusedEverywhere) {
    pause = std::min(pause, synTimeoutOf(index));
  }
  retryLater(
      index,
      std::max<Nanos>(
          pause - (engine_.loop().now() - slot.attemptAt),
          std::chrono::milliseconds(1)));
}

// Paper: SHIFT §4.3.3 probes the failed path again and again, then moves the
// traffic back behind a fence. Here the attempt to connect is the probe, and
// there is no fence: the order of messages does not depend on paths.
void PeerLink::retryLater(size_t index, Nanos delay) {
  Slot& slot = slots_[index];
  engine_.loop().cancel(slot.retryTimer);
  slot.retryTimer = engine_.loop().after(delay, [this, index] {
    slots_[index].retryTimer = 0;
    connect(index);
  });
}

// An attempt of a route has failed while no path is up.
void PeerLink::countAttempt(size_t route, const ConnectFailure& failure) {
  if (!failure.refusedEverywhere) {
    refusals_.onOther(route);
  } else if (refusals_.onRefused(route, engine_.loop().now())) {
    close(
        State::kDead,
        StatusCode::kPeerDied,
        std::string("died: its connections closed and ") +
            (failure.verdict == HelloCode::kWrongPeer
                 ? "another process has its address now, or it has given "
                   "this rank up"
                 : "its host refuses new ones") +
            ". Look at that process's own log for the cause");
  }
}

// Paper: SHIFT §4.2 leaves the first connection to the application; ours has
// a limit of its own, since a wrong address or a firewall never heals.
void PeerLink::checkNeverConnected() {
  const TimePoint now = engine_.loop().now();
  if (state_ != State::kUnconnected || neededSince_ == kNever ||
      interest_ == 0 ||
      now - neededSince_ < fromSeconds(engine_.options().connect_timeout_s)) {
    return;
  }
  close(
      State::kDead,
      StatusCode::kNetwork,
      "cannot be reached within " +
          std::to_string(
              static_cast<int>(engine_.options().connect_timeout_s)) +
          " s (TORCH_RESILIENT_CONNECT_TIMEOUT_S): " + pathSummary() +
          (pathSummary().find("secret") != std::string::npos
               ? ". Give all ranks the same TORCH_RESILIENT_SECRET (or "
                 "_SECRET_FILE)"
               : ". Check that its port is open and that "
                 "TORCH_RESILIENT_INTERFACE names a network that both "
                 "share"));
}

void PeerLink::install(size_t index, FileDescriptor fd, uint64_t eagerBudget) {
  Slot& slot = slots_[index];
  engine_.loop().cancel(slot.retryTimer);
  slot.retryTimer = 0;
  slot.attempt.reset();
  slot.reservedUntil = {};
  if (slot.path) {
    TcpPath& old = *slot.path;
    old.reset(Status(StatusCode::kNetwork, "replaced by a new connection"));
    engine_.loop().cancel(slot.retryTimer);
    slot.retryTimer = 0;
  }
  const bool local = isLocalConnection(fd.get());
  if (!local) {
    bindToNic(fd.get());
    tuneNew(index, fd.get());
  }
  channel_.setPeerEagerBytes(
      local ? std::min(eagerBudget, kLocalEagerBytes) : eagerBudget);
  if (!slot.faults) {
    slot.faults = std::make_unique<PathFaults>(
        engine_.faults(),
        engine_.globalRank(),
        globalRank_,
        static_cast<int>(index));
  }
  slot.path = std::make_unique<TcpPath>(
      engine_.loop(),
      channel_,
      engine_.nextPathId(),
      static_cast<int>(index),
      std::move(fd),
      *slot.faults,
      *this);
  const TimePoint now = engine_.loop().now();
  slot.failures = 0;
  slot.health = PathHealth(now);
  slot.congestion = CongestionChoice();
  slot.damping.onUp(now);
  slot.upAt = now;
  slot.pingAt = kNever;
  slot.pingedAt = now; // below
  slot.taintedAt = kNever;
  slot.stalled = slot.wayDead = slot.nicDown = false;
  if (++slot.connections > 1) {
    channel_.putOnProbation(slot.path->id());
  } else if (!local) {
    channel_.ping(slot.path->id()); // how long is the way?
  }
  refusals_.onConnected();
  slot.carried = byItsRoute(index);
  if (slot.carried) {
    refusals_.onCarried(routeOf(index), now);
    channel_.expectCapacity(slot.path->id(), slot.pastBytesPerS);
  }
  if (logEnabled(LogLevel::kDebug) || slot.connections > 1) {
    say(slot.connections > 1 ? LogLevel::kInfo : LogLevel::kDebug,
        "path " + std::to_string(index) + " to " + describe() + " is up (" +
            slot.path->localAddress() + " -> " + slot.path->remoteAddress() +
            ')');
  }
  const bool first = state_ == State::kUnconnected;
  state_ = State::kUp;
  neededSince_ = kNever;
  if (first) {
    engine_.onLinkUp(*this);
  }
  assignRoles();
  leaveDownNics();
  armHealthTimer();
  offerSharedMemory();
  offerDatagrams();
  engine_.markDirty(*this);
}

HelloCode PeerLink::decide(const HelloInfo& hello) {
  if (!usable()) {
    return HelloCode::kWrongPeer;
  }
  const size_t index = hello.pathSlot;
  if (index >= kMostSlots) {
    return HelloCode::kWrongPeer;
  }
  ensureSlots(std::max<size_t>(index + 1, hello.pathsWanted));
  Slot& slot = slots_[index];
  const TimePoint now = engine_.loop().now();
  if (slot.attempt && preferredInitiator() &&
      keepsPriority(slot.attempt->connectedAt(), now, kAttemptPriority)) {
    return HelloCode::kDuplicateSlot;
  }
  slot.reservedUntil = now + fromSeconds(engine_.options().handshake_timeout_s);
  return HelloCode::kOk;
}

void PeerLink::onIncoming(const HelloInfo& hello, FileDescriptor fd) {
  if (!usable() || hello.pathSlot >= slots_.size()) {
    return;
  }
  if (globalRank_ < 0) {
    globalRank_ = hello.initiatorRank;
  }
  install(hello.pathSlot, std::move(fd), hello.eagerBudgetBytes);
}

void PeerLink::onIncomingLost(const HelloInfo& hello) {
  if (hello.pathSlot >= slots_.size()) {
    return; // let in as unknown, and not by decide()
  }
  slots_[hello.pathSlot].reservedUntil = {};
  if (interest_ > 0) {
    connect(hello.pathSlot);
  }
}

PeerLink::Slot& PeerLink::slotOf(const TcpPath& path) {
  return slots_[static_cast<size_t>(path.slot())];
}

void PeerLink::onPathClosed(TcpPath& path, const Status& why) {
  Slot& slot = slotOf(path);
  heardAt_ = heardAt();
  slot.lastError = why;
  if (slot.carried) {
    refusals_.onCarried(
        routeOf(static_cast<size_t>(path.slot())), engine_.loop().now());
  }
  const LinkStatistics& statistics = channel_.pathStatistics(path.id());
  if (statistics.roundTripS() > 0) {
    slot.pastRoundTrip = fromSeconds(statistics.roundTripS());
  }
  if (slot.carried && statistics.capacityBytesPerS() > 0) {
    slot.pastBytesPerS = statistics.capacityBytesPerS();
  }
  addCounters(slot.past, channel_.pathCounters(path.id()));
  if (!channel_.isSuspect(path.id())) { // else it counts already
    slot.damping.onLost(engine_.loop().now());
  }
  slot.astray = false;
  engine_.destroyLater(std::shared_ptr<TcpPath>(std::move(slot.path)));
  assignRoles();
  engine_.markDirty(*this);
  if (!usable()) {
    return;
  }
  if (leaving_ && livePaths() == 0) {
    // It has gone too, maybe before it could acknowledge our goodbye.
    engine_.loop().post([engine = &engine_, uid = uid_] {
      engine->link(uid).close(
          State::kLeft, StatusCode::kPeerLeft, "has left, as this rank has");
    });
    return;
  }
  say(levelOfLoss(why),
      "path " + std::to_string(path.slot()) + " to " + describe() +
          " is down: " + why.message() + "; reconnecting");
  const size_t index = static_cast<size_t>(path.slot());
  retryLater(index, preferredInitiator() ? Nanos(0) : kSecondInitiatorDelay);
}

void PeerLink::close(State state, StatusCode code, const std::string& how) {
  if (!usable()) {
    return;
  }
  heardAt_ = heardAt();
  state_ = state;
  closedBecause_ = Status(code, how);
  const Status why(code, describe() + ' ' + how);
  EventLoop& loop = engine_.loop();
  for (Slot& slot : slots_) {
    loop.cancel(slot.retryTimer);
    slot.retryTimer = 0;
    if (slot.attempt) {
      engine_.destroyLater(
          std::shared_ptr<OutgoingHandshake>(std::move(slot.attempt)));
    }
    if (slot.path) {
      // Moves the path to onPathClosed(). A goodbye must still arrive.
      if (state == State::kLeft) {
        slot.path->close(why);
      } else {
        slot.path->reset(why);
      }
    }
  }
  loop.cancel(healthTimer_);
  healthTimer_ = 0;
  knock_.reset();
  if (shared_) {
    shared_->close(why); // moves it to onSharedClosed()
  }
  closeDatagrams(why);
  if (limit_ != nullptr) { // the others go on
    limit_->leave(channel_.id());
    engine_.waitForTurn(address_->site);
    limit_ = nullptr;
  }
  channel_.fail(closedBecause_);
  engine_.onLinkClosed(*this, why);
}

// --- moving frames

void PeerLink::channelReady(Channel&) {
  engine_.markDirty(*this);
}

void PeerLink::onPathWritable(TcpPath&) {
  engine_.markDirty(*this);
}

void PeerLink::onControl(Channel&, std::span<const std::byte> payload) {
  engine_.onControl(*this, payload);
}

void PeerLink::onBye(Channel&) {
  // After this turn: the acknowledgement of the goodbye must still go out.
  engine_.loop().post([engine = &engine_, uid = uid_] {
    engine->link(uid).close(
        State::kLeft,
        StatusCode::kPeerLeft,
        "has left: it destroyed its process group or ended");
  });
}

// Paper: ATLAS §4.1. Several connections to one peer, since one alone does not
// fill a long link. Each takes what will arrive there first.
void PeerLink::pump() {
  if (!usable() || slots_.empty()) {
    return;
  }
  pumpRounds();
  armChannelTimer();
  watchOutgoing();
  if (limit_ != nullptr) {
    limit_->endTurn(channel_.id()); // if it could not use it
    engine_.waitForTurn(address_->site);
  }
}

// Whether the cap on the peer's site lets us send more of our messages now. If
// not, we stand in its queue.
bool PeerLink::mayTakeChunks() {
  return limit_ == nullptr || !channel_.backlogged() ||
      limit_->mayTake(channel_.id(), engine_.loop().now());
}

void PeerLink::pumpRounds() {
  for (int round = 0; round < kPumpRounds; ++round) {
    bool any = false;
    // First, since it is the fastest.
    while (shared_ && shared_->hasRoom() && shared_->takeFrame()) {
      any = true;
    }
    for (size_t r = 0; r < datagrams_.size(); ++r) {
      Datagrams& d = datagrams_[r];
      while (onDatagrams(r) && d.path->hasRoom()) {
        const size_t bytes = d.path->takeFrame(mayTakeChunks());
        if (bytes == 0) {
          break;
        }
        any = true;
        if (limit_ != nullptr) {
          limit_->took(channel_.id(), bytes, engine_.loop().now());
          d.advanced += bytes;
        }
      }
    }
    // One frame per path in turn, so that a message spreads over all of them.
    bool taken = true;
    while (taken) {
      taken = false;
      size_t next = nextSlot_ + 1;
      for (size_t i = 0; i < slots_.size(); ++i) {
        const size_t index = (nextSlot_ + i) % slots_.size();
        Slot& slot = slots_[index];
        if (!slot.path || !slot.path->hasRoom()) {
          continue;
        }
        if (const size_t bytes = slot.path->takeFrame(mayTakeChunks())) {
          taken = true;
          if (limit_ != nullptr) {
            limit_->took(channel_.id(), bytes, engine_.loop().now());
            // One frame may be all for now: the next is another path's.
            next = index + 1;
          }
        }
      }
      nextSlot_ = next % slots_.size();
      any = any || taken;
    }
    if (shared_ && shared_->flush()) {
      any = true;
    }
    for (Slot& slot : slots_) {
      if (slot.path) {
        slot.path->flush();
      }
    }
    for (Datagrams& d : datagrams_) {
      if (d.path) {
        d.path->flush();
        chargeDatagrams(d);
      }
    }
    if (!any) {
      return;
    }
  }
  // More to do than one turn's share.
  engine_.loop().post([engine = &engine_, uid = uid_] {
    engine->markDirty(engine->link(uid));
  });
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
  EventLoop& loop = engine_.loop();
  loop.cancel(channelTimer_);
  channelTimer_ = 0;
  channelTimerAt_ = due;
  if (due == kNever) {
    return;
  }
  channelTimer_ = loop.at(due, [this] {
    channelTimer_ = 0;
    channelTimerAt_ = kNever;
    channel_.onTimer(engine_.loop().now());
    engine_.markDirty(*this);
  });
}

// Adds what the channel knows of a path.
void PeerLink::fillMeasured(PathStats& p, PathId id) const {
  addCounters(p, channel_.pathCounters(id));
  const LinkStatistics& s = channel_.pathStatistics(id);
  p.roundTripS = s.roundTripS();
  p.leastRoundTripS = s.leastRoundTripS();
  p.roundTripsS = s.roundTripsS();
  p.goodputBytesPerS = s.goodputBytesPerS();
  p.capacityBytesPerS = s.capacityBytesPerS();
}

void PeerLink::say(LogLevel level, const std::string& line) {
  if (logEnabled(level)) {
    LogRateLimit& limit = level == LogLevel::kWarning ? warnings_ : lines_;
    if (const auto dropped = limit.pass(engine_.loop().now())) {
      logMessage(level, line + LogRateLimit::suffix(*dropped));
    }
  }
}

void PeerLink::fillStats(PeerStats& stats) const {
  const TimePoint now = engine_.loop().now();
  stats.host = address_ ? address_->hostName : "";
  switch (state_) {
    case State::kUnconnected:
      stats.state = "unconnected";
      break;
    case State::kUp:
      stats.state = std::any_of(
                        slots_.begin(),
                        slots_.end(),
                        [this](const Slot& s) { return answers(viewOf(s)); })
          ? "up"
          : "suspect";
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
    stats.lastHeardSecondsAgo = toSeconds(now - *at);
  }
  if (shared_ || pastShared_) {
    PathStats p;
    p.slot = -1;
    p.nic = p.remoteNic = "shared memory";
    p.state = !shared_ ? "down" : shared_->usable() ? "up" : "reserve";
    if (pastShared_) {
      addCounters(p, *pastShared_);
    }
    if (shared_) {
      fillMeasured(p, shared_->id());
    }
    stats.paths.push_back(std::move(p));
  }
  fillDatagramStats(stats);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    PathStats p;
    p.slot = static_cast<int>(i);
    p.reconnects = slot.connections > 0 ? slot.connections - 1 : 0;
    p.lastError = slot.lastError.message();
    if (!slot.lastError.ok() && stats.lastError.empty()) {
      stats.lastError = slot.lastError.message();
    }
    p.nic = nicOf(i);
    if (!routes_.empty()) {
      p.remoteNic = address_->addresses[routes_[routeOf(i)].theirs].nic;
    }
    if (!slot.path) {
      p.state = slot.attempt ? "connecting" : wanted(i) ? "down" : "unused";
    } else if (slot.stalled || slot.nicDown) {
      p.state = "stalled";
    } else if (channel_.isSuspect(slot.path->id())) {
      p.state = "suspect";
    } else if (channel_.onProbation(slot.path->id())) {
      p.state = "proving";
    } else {
      p.state = channel_.classes(slot.path->id()) == 0 ? "reserve" : "up";
    }
    addCounters(p, slot.past);
    if (slot.path) {
      fillMeasured(p, slot.path->id());
      p.localAddress = slot.path->localAddress();
      p.remoteAddress = slot.path->remoteAddress();
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
