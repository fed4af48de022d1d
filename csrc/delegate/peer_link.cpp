#include "delegate/peer_link.h"

#include <algorithm>

#include "base/log.h"
#include "base/random.h"
#include "delegate/engine.h"

namespace resilient {
namespace {

// A peer is dead when its host has refused this many connections in a row,
// over at least this long, while no path is up. Its kernel then says that
// nobody listens: the process is gone. More tries only delay the news; fewer
// might fall for a firewall that is being reloaded.
constexpr int kRefusalsToDeath = 4;
constexpr Nanos kRefusalsSpan = std::chrono::milliseconds(150);

// How long the process with the larger uid leaves a lost connection to the
// other one, so that not both make one.
constexpr Nanos kSecondInitiatorDelay = std::chrono::milliseconds(60);

// An attempt older than this no longer keeps the peer's own one out: ours may
// be going into a black hole.
constexpr Nanos kAttemptPriority = std::chrono::seconds(1);

// Bytes that one link hands to its paths in one turn of the loop, before the
// others get theirs.
constexpr int kPumpRounds = 8;

constexpr Nanos kHealthInterval = std::chrono::milliseconds(100);

// Of the budget that a peer on this host grants, we use this much. What comes
// before its receive is posted is copied once more, which costs as much as the
// transfer; asking first costs 50 us. (On a network it is the other way
// round.) Measured with 4 ranks, all_to_all and broadcast of 4 to 256 MiB:
// 1.3 to 1.6 times as fast as with the whole budget.
constexpr uint64_t kLocalEagerBytes = 512u << 10;

} // namespace

PeerLink::PeerLink(Engine& engine, Uid uid, uint32_t channelId)
    : engine_(engine),
      uid_(uid),
      channel_(
          channelId,
          ChannelConfig{
              static_cast<uint32_t>(engine.options().chunk_bytes),
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
  std::string s = globalRank_ >= 0 ? "rank " + std::to_string(globalRank_)
                                   : std::string("a peer");
  if (address_) {
    s += " (host " + address_->hostName + ", pid " +
        std::to_string(address_->pid);
    if (!address_->addresses.empty()) {
      s += ", " + address_->addresses.front().toString();
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
  return at;
}

std::string PeerLink::pathSummary() const {
  std::string s = std::to_string(livePaths()) + " of " +
      std::to_string(slots_.size()) + " paths up";
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.path && !slot.lastError.ok()) {
      s += "; path " + std::to_string(i) + ": " + slot.lastError.message();
    }
  }
  return s;
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
  if (address_) {
    return;
  }
  address_ = address;
  secret_ = secret;
  globalRank_ = globalRank;
  const bool sameHost = address.hostId == engine_.self().hostId;
  if (!sameHost) {
    // Its loopback is not ours.
    std::erase_if(address_->addresses, [](const SocketAddress& a) {
      return a.isLoopback();
    });
    if (address_->addresses.empty()) {
      address_->addresses = address.addresses;
    }
  }
  ensureSlots(
      static_cast<size_t>(
          sameHost ? engine_.options().paths_same_host
                   : engine_.options().paths_remote));
  if (interest_ > 0) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      connect(i);
    }
  }
}

void PeerLink::ensureSlots(size_t count) {
  if (slots_.size() < count) {
    slots_.resize(count);
  }
}

void PeerLink::addInterest() {
  if (++interest_ > 1 || !usable()) {
    return;
  }
  if (state_ == State::kUnconnected && neededSince_ == kNever) {
    neededSince_ = engine_.loop().now();
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    connect(i);
  }
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
  // A suspect path is replaced by a connection that works; see checkPath().
  const bool needed = !slot.path || slot.suspect;
  if (!usable() || !address_ || !needed || slot.attempt ||
      slot.reservedUntil > loop.now()) {
    return;
  }
  loop.cancel(slot.retryTimer);
  slot.retryTimer = 0;
  OutgoingSpec spec;
  spec.candidates = address_->addresses;
  spec.options.sendBufferBytes =
      static_cast<int>(engine_.options().socket_buffer_bytes);
  spec.options.receiveBufferBytes = spec.options.sendBufferBytes;
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
  spec.attemptTimeout = fromSeconds(engine_.options().handshake_timeout_s);
  slot.attemptAt = loop.now();
  slot.attempt = OutgoingHandshake::start(
      loop, std::move(spec), [this, index](OutgoingResult result) {
        onAttempt(index, std::move(result));
      });
}

void PeerLink::onAttempt(size_t index, OutgoingResult result) {
  Slot& slot = slots_[index];
  slot.attempt.reset();
  if (!usable()) {
    return;
  }
  if (result.status.ok()) {
    install(index, std::move(result.fd), result.accept.eagerBudgetBytes);
    return;
  }
  slot.lastError = result.status;
  ++slot.failures;
  if (result.failure.verdict == HelloCode::kDuplicateSlot) {
    // The peer's own attempt is on its way.
    retryLater(index, kAttemptPriority);
    return;
  }
  if (result.failure.refusedEverywhere) {
    countRefusal();
    if (!usable()) {
      return;
    }
  }
  checkNeverConnected();
  if (!usable()) {
    return;
  }
  const double seconds = std::min(
      engine_.options().reconnect_max_s,
      engine_.options().reconnect_min_s *
          static_cast<double>(1 << std::min(slot.failures, 16)));
  retryLater(index, fromSeconds(seconds));
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

void PeerLink::countRefusal() {
  if (livePaths() != 0) {
    return;
  }
  const TimePoint now = engine_.loop().now();
  if (refusals_++ == 0) {
    firstRefusal_ = now;
  }
  if (refusals_ >= kRefusalsToDeath && now - firstRefusal_ >= kRefusalsSpan) {
    close(
        State::kDead,
        Status(
            StatusCode::kPeerDied,
            describe() +
                " died: its connections closed and its host refuses new "
                "ones. Look at that process's own log for the cause"));
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
      Status(
          StatusCode::kNetwork,
          "cannot connect to " + describe() + " within " +
              std::to_string(
                  static_cast<int>(engine_.options().connect_timeout_s)) +
              " s (TORCH_RESILIENT_CONNECT_TIMEOUT_S): " + pathSummary() +
              (pathSummary().find("secret") != std::string::npos
                   ? ". Give all ranks the same TORCH_RESILIENT_SECRET (or "
                     "_SECRET_FILE)"
                   : ". Check that its port is open and that "
                     "TORCH_RESILIENT_INTERFACE names a network that both "
                     "share")));
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
  channel_.setPeerEagerBytes(
      isLocalConnection(fd.get()) ? std::min(eagerBudget, kLocalEagerBytes)
                                  : eagerBudget);
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
  slot.failures = 0;
  if (++slot.connections > 1) {
    channel_.putOnProbation(slot.path->id());
  }
  slot.progress = 0;
  slot.progressAt = engine_.loop().now();
  slot.pingAt = kNever;
  slot.suspect = false;
  refusals_ = 0;
  if (logEnabled(LogLevel::kDebug) || slot.connections > 1) {
    logMessage(
        slot.connections > 1 ? LogLevel::kInfo : LogLevel::kDebug,
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
  armHealthTimer();
  engine_.markDirty(*this);
}

HelloCode PeerLink::decide(const HelloInfo& hello) {
  if (!usable()) {
    return HelloCode::kWrongPeer;
  }
  const size_t index = hello.pathSlot;
  ensureSlots(std::max<size_t>(index + 1, hello.pathsWanted));
  Slot& slot = slots_[index];
  const TimePoint now = engine_.loop().now();
  if (slot.attempt && preferredInitiator() &&
      now - slot.attemptAt < kAttemptPriority) {
    return HelloCode::kDuplicateSlot;
  }
  slot.reservedUntil = now + fromSeconds(engine_.options().handshake_timeout_s);
  return HelloCode::kOk;
}

void PeerLink::onIncoming(const HelloInfo& hello, FileDescriptor fd) {
  if (!usable()) {
    return;
  }
  if (globalRank_ < 0) {
    globalRank_ = hello.initiatorRank;
  }
  install(hello.pathSlot, std::move(fd), hello.eagerBudgetBytes);
}

void PeerLink::onIncomingLost(const HelloInfo& hello) {
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
  const PathCounters& c = channel_.pathCounters(path.id());
  slot.past.bytesSent += c.bytesSent;
  slot.past.bytesReceived += c.bytesReceived;
  slot.past.chunksSent += c.chunksSent;
  slot.past.chunksRetransmitted += c.chunksRetransmitted;
  engine_.destroyLater(std::shared_ptr<TcpPath>(std::move(slot.path)));
  engine_.markDirty(*this);
  if (!usable()) {
    return;
  }
  if (leaving_ && livePaths() == 0) {
    // It has gone too, maybe before it could acknowledge our goodbye.
    engine_.loop().post([engine = &engine_, uid = uid_] {
      engine->link(uid).close(
          State::kLeft, Status(StatusCode::kPeerLeft, "both have left"));
    });
    return;
  }
  logMessage(
      why.code() == StatusCode::kProtocol ? LogLevel::kWarning
                                          : LogLevel::kInfo,
      "path " + std::to_string(path.slot()) + " to " + describe() +
          " is down: " + why.message() + "; reconnecting");
  const size_t index = static_cast<size_t>(path.slot());
  retryLater(index, preferredInitiator() ? Nanos(0) : kSecondInitiatorDelay);
}

void PeerLink::close(State state, const Status& why) {
  if (!usable()) {
    return;
  }
  heardAt_ = heardAt();
  state_ = state;
  closedBecause_ = why;
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
  channel_.fail(why);
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
        Status(
            StatusCode::kPeerLeft,
            engine->link(uid).describe() +
                " has left: it destroyed its process group or ended"));
  });
}

// Paper: ATLAS §4.1. Several connections to one peer, since one alone does not
// fill a long link. Each takes what it has room for, so a fast one carries
// more. How many there are is an option: nothing is measured beforehand.
void PeerLink::pump() {
  if (!usable() || slots_.empty()) {
    return;
  }
  // Probation is for paths beside others that work.
  const bool proven =
      std::any_of(slots_.begin(), slots_.end(), [this](const Slot& slot) {
        return slot.path && !slot.suspect &&
            !channel_.onProbation(slot.path->id());
      });
  for (Slot& slot : slots_) {
    if (!proven && slot.path && channel_.onProbation(slot.path->id())) {
      channel_.trust(slot.path->id());
    }
  }
  for (int round = 0; round < kPumpRounds; ++round) {
    // One frame per path in turn, so that a message spreads over all of them.
    bool taken = true;
    bool any = false;
    while (taken) {
      taken = false;
      for (size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[(nextSlot_ + i) % slots_.size()];
        if (slot.path && !slot.suspect && slot.path->hasRoom() &&
            slot.path->takeFrame()) {
          taken = true;
        }
      }
      nextSlot_ = (nextSlot_ + 1) % slots_.size();
      any = any || taken;
    }
    for (Slot& slot : slots_) {
      if (slot.path) {
        slot.path->flush();
      }
    }
    if (!any) {
      armChannelTimer();
      return;
    }
  }
  // More to do than one turn's share.
  engine_.loop().post([engine = &engine_, uid = uid_] {
    engine->markDirty(engine->link(uid));
  });
  armChannelTimer();
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

// --- health

void PeerLink::faultsChanged() {
  for (Slot& slot : slots_) {
    if (slot.path) {
      slot.path->faultsChanged();
    }
  }
  engine_.markDirty(*this);
}

// Runs only while somebody waits for this peer: an idle job has no timers.
void PeerLink::armHealthTimer() {
  if (healthTimer_ != 0 || !usable()) {
    return;
  }
  healthTimer_ = engine_.loop().after(kHealthInterval, [this] {
    healthTimer_ = 0;
    onHealthTimer();
  });
}

void PeerLink::onHealthTimer() {
  const TimePoint now = engine_.loop().now();
  bool waiting = interest_ > 0 || !channel_.drained();
  for (size_t i = 0; i < slots_.size() && usable(); ++i) {
    if (slots_[i].path) {
      checkPath(i, now);
      waiting = waiting || slots_[i].pingAt != kNever;
    }
  }
  checkNeverConnected();
  if (waiting && usable()) {
    armHealthTimer();
  }
}

// A path may be silent four round trips: less would call every WAN path with
// a full queue dead.
Nanos PeerLink::stallLimit(const TcpPath& path) const {
  const double roundTrip = channel_.pathStatistics(path.id()).roundTripS();
  return fromSeconds(
      std::max(engine_.options().stall_timeout_s, 4 * roundTrip));
}

bool PeerLink::othersProgress(size_t index, TimePoint now) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (i != index && slot.path && !slot.suspect &&
        now - slot.path->heardAt() < stallLimit(*slot.path)) {
      return true;
    }
  }
  return false;
}

// A path owes us something if frames are unacknowledged or a ping is
// unanswered. If then nothing moves on it, in either direction and in the
// kernel's own count, it is suspect: new chunks avoid it. It is given up as
// soon as another path shows that the peer is alive, or a new connection in
// its place does; until then (the peer may be stopped, the network down) it
// is kept, and may simply go on.
// Paper: SHIFT §4.4 leaves silent failures to other tools; this finds those
// in which nothing moves at all.
void PeerLink::checkPath(size_t index, TimePoint now) {
  Slot& slot = slots_[index];
  TcpPath& path = *slot.path;
  const uint64_t progress = path.progress();
  const bool owes = channel_.waitingSince(path.id()) != kNever;
  if (slot.pingAt != kNever && path.heardAt() >= slot.pingAt) {
    slot.pingAt = kNever;
  }
  if (progress != slot.progress || (!owes && slot.pingAt == kNever) ||
      path.waitsOnPurpose()) {
    slot.progress = progress;
    slot.progressAt = now;
    slot.suspect = false;
    const Nanos heartbeat = fromSeconds(engine_.options().heartbeat_s);
    if (interest_ > 0 && slot.pingAt == kNever &&
        now - path.heardAt() >= heartbeat) {
      slot.pingAt = now;
      channel_.ping(path.id());
    }
    return;
  }
  if (now - slot.progressAt < stallLimit(path)) {
    return;
  }
  if (!slot.suspect) {
    slot.suspect = true;
    logMessage(
        LogLevel::kInfo,
        "path " + std::to_string(index) + " to " + describe() +
            " stalls; trying another way");
  }
  if (othersProgress(index, now)) {
    path.reset(Status(
        StatusCode::kNetwork, "stalled while other paths made progress"));
    return;
  }
  connect(index);
}

void PeerLink::fillStats(PeerStats& stats) const {
  const TimePoint now = engine_.loop().now();
  stats.host = address_ ? address_->hostName : "";
  switch (state_) {
    case State::kUnconnected:
      stats.state = "unconnected";
      break;
    case State::kUp:
      stats.state = livePaths() == 0 ? "suspect" : "up";
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
  stats.messagesReceived = c.messagesReceived;
  stats.bytesSent = c.bytesSent;
  stats.bytesReceived = c.bytesReceived;
  if (const auto at = heardAt()) {
    stats.lastHeardSecondsAgo = toSeconds(now - *at);
  }
  if (!usable()) {
    stats.lastError = closedBecause_.message();
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    PathStats p;
    p.slot = static_cast<int>(i);
    p.reconnects = slot.connections > 0 ? slot.connections - 1 : 0;
    p.lastError = slot.lastError.message();
    if (!slot.lastError.ok() && stats.lastError.empty()) {
      stats.lastError = slot.lastError.message();
    }
    p.state = slot.path ? (slot.suspect ? "suspect" : "up")
        : slot.attempt  ? "connecting"
                        : "down";
    p.bytesSent = slot.past.bytesSent;
    p.bytesReceived = slot.past.bytesReceived;
    p.chunksSent = slot.past.chunksSent;
    p.chunksRetransmitted = slot.past.chunksRetransmitted;
    if (slot.path) {
      const PathCounters& now_ = channel_.pathCounters(slot.path->id());
      p.bytesSent += now_.bytesSent;
      p.bytesReceived += now_.bytesReceived;
      p.chunksSent += now_.chunksSent;
      p.chunksRetransmitted += now_.chunksRetransmitted;
      const LinkStatistics& s = channel_.pathStatistics(slot.path->id());
      p.roundTripS = s.roundTripS();
      p.leastRoundTripS = s.leastRoundTripS();
      p.roundTrips = s.roundTrips();
      p.recentRoundTripsS = s.recentRoundTripsS();
      p.goodputBytesPerS = s.goodputBytesPerS();
      p.localAddress = slot.path->localAddress();
      p.remoteAddress = slot.path->remoteAddress();
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
