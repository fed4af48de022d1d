#include "tests/failover_process.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/control.h"
#include "wire/frame.h"

namespace resilient::test {
namespace {

// Kinds of segments: frames, and the steps of the handshake.
constexpr uint32_t kFrame = 0, kHello = 1, kChallenge = 2, kProof = 3,
                   kAccept = 4, kDuplicate = 5, kWrongPeer = 6;

// The constants of failover.cpp and health.h that are promises.
constexpr Nanos kShortestHoldDown = std::chrono::milliseconds(150);
constexpr Nanos kQuiet = std::chrono::seconds(5);
constexpr uint32_t kProbes = 3;

uint64_t messageBytes(size_t cls, uint64_t number, uint64_t word) {
  return mixBits(mixBits(word ^ (cls << 60)) ^ number);
}

void fill(std::byte* data, uint64_t bytes, uint64_t hash) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = mixBits(hash ^ at);
    std::memcpy(data + at, &word, std::min<uint64_t>(8, bytes - at));
  }
}

ChannelConfig channelConfig(const FailoverSetup& setup) {
  ChannelConfig config;
  config.chunkBytes = setup.chunkBytes;
  return config;
}

FailoverConfig failoverConfig(const FailoverSetup& setup, int side) {
  FailoverConfig config = setup.config;
  config.preferredInitiator = side == 0;
  return config;
}

} // namespace

void FailoverWorld::note(int side, const char* text, uint64_t a, uint64_t b) {
  const auto t = static_cast<uint64_t>(net.now().time_since_epoch().count());
  for (const uint64_t x : {t, static_cast<uint64_t>(side), a, b}) {
    result.traceHash = mixBits(result.traceHash ^ x);
  }
  if (trace) {
    trace(
        std::to_string(t / 1000) + " us, process " + std::to_string(side) +
        ": " + text + " " + std::to_string(a) + " " + std::to_string(b));
  }
}

struct FailoverProcess::Send final : SendOp {
  void finished(const Status& status) override {
    done = true;
    if (!status.ok() && !process->dead_) {
      process->world_.fail("a send failed: " + status.toString());
    }
  }
  FailoverProcess* process = nullptr;
  std::vector<std::byte> content;
  bool done = false;
};

struct FailoverProcess::Receive final : RecvOp {
  void finished(const Status& status) override {
    done = true;
    if (status.ok()) {
      process->messageArrived(cls);
    } else if (!process->dead_) {
      process->world_.fail("a receive failed: " + status.toString());
    }
  }
  FailoverProcess* process = nullptr;
  size_t cls = 0;
  uint64_t hash = 0;
  std::vector<std::byte> content;
  bool done = false;
};

FailoverProcess::FailoverProcess(FailoverWorld& world, int side)
    : world_(world),
      net_(world.net),
      side_(side),
      mailbox_(completions_, *this),
      channel_(
          static_cast<uint32_t>(side),
          channelConfig(world.setup),
          mailbox_,
          completions_,
          staging_,
          *this),
      failover_(failoverConfig(world.setup, side), *this),
      otherPaths_(world.setup.nics + 1),
      streams_(kTrafficClassCount) {
  staging_.setLimit(1 << 20);
  net_.setUser(side, this);
}

FailoverProcess::~FailoverProcess() = default;

// --- for the scenario

void FailoverProcess::begin() {
  enter([this] {
    begun_ = true;
    failover_.setRoutes(routes(), world_.setup.policy);
    ensure(routes() * world_.setup.lanes);
    for (size_t r = 0; r < routes(); ++r) {
      failover_.setWanted(r, world_.setup.lanes);
    }
    failover_.assignRoles(net_.now());
    failover_.setNeeded(true, net_.now());
  });
}

void FailoverProcess::send(uint64_t bytes, TrafficClass trafficClass) {
  if (dead_ || peer_->killed_) {
    return;
  }
  const auto cls = static_cast<size_t>(trafficClass);
  Stream& s = streams_[cls];
  while (!s.sends.empty() && s.sends.front()->done) {
    s.sends.pop_front();
  }
  Send& op = *s.sends.emplace_back(std::make_unique<Send>());
  op.process = this;
  op.content.resize(bytes);
  fill(op.content.data(), bytes, messageBytes(cls, s.sent, side_ + 1u));
  op.key = {0, cls, 0};
  op.pointToPoint = true;
  op.trafficClass = trafficClass;
  op.data = op.content.data();
  op.bytes = bytes;
  op.signature.count = bytes;
  // The receiver posts its receive when the message is sent: it knows the size.
  Stream& far = peer_->streams_[cls];
  far.underWay.push_back({net_.now(), bytes, peer_->arrivedBytes(cls)});
  const uint64_t number = s.sent++;
  peer_->enter([peer = peer_, cls, number, bytes] {
    Stream& stream = peer->streams_[cls];
    while (!stream.receives.empty() && stream.receives.front()->done) {
      stream.receives.pop_front();
    }
    Receive& r = *stream.receives.emplace_back(std::make_unique<Receive>());
    r.process = peer;
    r.cls = cls;
    r.hash = messageBytes(cls, number, peer->peer_->side_ + 1u);
    r.content.resize(bytes);
    r.key = {0, cls, 0};
    r.ordered = true;
    r.source = &peer->channel_;
    r.signature.count = bytes;
    r.data = r.content.data();
    r.bytes = bytes;
    ++stream.posted;
    peer->mailbox_.post(&r);
  });
  enter([this, &op] { channel_.send(&op, net_.now()); });
}

void FailoverProcess::messageArrived(size_t cls) {
  Stream& s = streams_[cls];
  // They end in their order: the first that is not done before this one.
  const auto it = std::ranges::find_if(
      s.receives, [](const auto& r) { return r->done && !r->content.empty(); });
  if (s.underWay.empty() || it == s.receives.end()) {
    world_.fail("a message arrived that nobody sent");
    return;
  }
  Receive& r = **it;
  std::vector<std::byte> expected(r.bytes);
  fill(expected.data(), r.bytes, r.hash);
  if (expected != r.content) {
    world_.fail(
        "message " + std::to_string(receivedCount_) + " of class " +
        std::to_string(cls) + " has changed");
  }
  r.content.clear();
  const auto [at, bytes, arrivedBefore] = s.underWay.front();
  s.underWay.pop_front();
  s.arrivedBytes += bytes;
  ++receivedCount_;
  ++world_.result.messages;
  if (deliveryLimit_ > Nanos(0)) {
    ++world_.result.limited;
    // After a pause all that has been held up goes in the order of the
    // classes, over one connection if no more work.
    const Nanos limit =
        deliveryLimit_ + net_.timeToCarry(arrivedBytes(cls) - arrivedBefore);
    const double part = toSeconds(net_.now() - at) / toSeconds(limit);
    world_.result.worstPause = std::max(world_.result.worstPause, part);
    if (part > 1) {
      world_.fail(
          "a message of class " + std::to_string(cls) + " took " +
          durationText(net_.now() - at) + ", more than " + durationText(limit) +
          ", although one route has no fault");
    }
  }
  world_.note(side_, "received, class and bytes", cls, bytes);
}

// Of messages that go before the next one of the class.
uint64_t FailoverProcess::arrivedBytes(size_t cls) const {
  uint64_t bytes = 0;
  for (size_t c = 0; c <= cls; ++c) {
    bytes += streams_[c].arrivedBytes;
  }
  return bytes;
}

void FailoverProcess::onNicNews(size_t nic, bool works) {
  if (!works) {
    removeOtherPath(nic); // as DatagramConnector does
  }
  enter([this, nic, works] {
    const std::string name = world_.setup.policy.nics[nic];
    bool other = false;
    for (size_t c = 0; c < connections_.size(); ++c) {
      other = other || (c % routes() != nic && good(c));
    }
    failover_.onNic(name, works, net_.now());
    for (size_t c = nic; c < connections_.size() && !works && other;
         c += routes()) {
      if (connected(c)) {
        world_.fail(text(c) + " stays although its NIC is down");
      }
    }
  });
}

void FailoverProcess::setWanted(size_t route, size_t count) {
  enter([this, route, count] {
    failover_.setWanted(route, count);
    failover_.connectAll(net_.now());
    failover_.assignRoles(net_.now());
  });
}

void FailoverProcess::pause(TimePoint until) {
  if (until > pausedUntil_) {
    pausedUntil_ = until;
    net_.at(until, [this] {
      if (net_.now() < pausedUntil_) {
        return;
      }
      // As the event loop does: first what came in, then the timers.
      for (auto* queue : {&waiting_, &waitingTimers_}) {
        while (!queue->empty() && net_.now() >= pausedUntil_) {
          const auto what = std::move(queue->front());
          queue->pop_front();
          enter(what);
        }
      }
    });
  }
}

void FailoverProcess::kill() {
  killed_ = dead_ = true;
  failover_.end();
  net_.setUser(side_, nullptr);
  net_.closeAll(side_);
}

void FailoverProcess::breakConnection(size_t c) {
  if (connected(c)) {
    closePath(c, "broken by the network");
    enter([] {});
  }
}

FailoverProcess::OtherPath& FailoverProcess::otherPath(
    std::optional<size_t> route) {
  return otherPaths_[route.value_or(routes())];
}

void FailoverProcess::addOtherPath(std::optional<size_t> route, size_t socket) {
  enter([this, route, socket] {
    OtherPath& b = otherPath(route);
    if (b.socket || !net_.open(socket, side_)) {
      net_.close(socket, side_);
      return;
    }
    b.socket = socket;
    b.path = ++lastPath_;
    b.heardAt = net_.now();
    b.askedAt = kNever;
    b.silent = false;
    const FailoverConfig& config = world_.setup.config;
    b.returns.emplace(config.holdDownMax, config.suspectAfter, 1);
    b.returns->onUp(net_.now());
    channel_.addPath(b.path, net_.now());
    useChanged();
  });
}

void FailoverProcess::removeOtherPath(std::optional<size_t> route) {
  enter([this, route] {
    OtherPath& b = otherPath(route);
    if (b.socket) {
      net_.close(*b.socket, side_);
      b.socket.reset();
      channel_.removePath(b.path, net_.now());
      useChanged();
    }
  });
}

void FailoverProcess::useChanged() {
  const bool shared = otherPath(std::nullopt).socket.has_value();
  failover_.setSharedMemory(shared);
  world_.result.sharedMemory += shared;
  for (size_t r = 0; r < routes(); ++r) {
    const bool works = datagramsWork(r);
    failover_.setRoutePath(
        r,
        !works           ? RoutePathUse::kNone
            : isBeside() ? RoutePathUse::kBeside
                         : RoutePathUse::kAlone);
    world_.result.datagrams += works;
    world_.result.beside += works && isBeside();
    shareBursts(r);
  }
  failover_.assignRoles(net_.now());
  dirty_ = true;
}

// As DatagramConnector does.
void FailoverProcess::shareBursts(size_t route) {
  const OtherPath& b = otherPath(route);
  const uint64_t upTo = datagramsWork(route) ? world_.setup.besideUpTo : 0;
  if (b.socket && isBeside()) {
    channel_.setBursts(b.path, BurstRange::ofAtMost(upTo));
  }
  for (size_t c = route; c < connections_.size(); c += routes()) {
    if (connected(c)) {
      channel_.setBursts(connections_[c].path, {upTo, UINT64_MAX});
    }
  }
}

bool FailoverProcess::allArrived() const {
  return std::ranges::all_of(
      streams_, [](const Stream& s) { return s.underWay.empty(); });
}

std::string FailoverProcess::notHealed() const {
  for (size_t c = 0; c < connections_.size(); ++c) {
    const PathState& s = failover_.state(c);
    if (failover_.wanted(c) &&
        (!good(c) || failover_.offRoute(c) || !connected(c))) {
      return text(c) + " is " + toString(s) +
          (failover_.offRoute(c) ? ", off its route" : "");
    }
  }
  return allArrived() ? "" : "messages are missing";
}

std::string FailoverProcess::text(size_t c) const {
  return "connection " + std::to_string(c) + " of process " +
      std::to_string(side_);
}

// --- turns of the loop

void FailoverProcess::enter(std::function<void()> what, bool timer) {
  if (killed_) {
    return;
  }
  if (net_.now() < pausedUntil_) {
    (timer ? waitingTimers_ : waiting_).push_back(std::move(what));
    return;
  }
  what();
  settle();
}

void FailoverProcess::settle() {
  if (std::exchange(settling_, true)) {
    return;
  }
  while (!completions_.empty() || dirty_) {
    completions_.drain();
    if (std::exchange(dirty_, false) && !dead_) {
      pump();
    }
  }
  if (!dead_) {
    armTimers();
  }
  settling_ = false;
}

void FailoverProcess::pump() {
  for (bool any = true; any;) {
    any = false;
    for (OtherPath& b : otherPaths_) {
      any = (b.socket && pumpPath(*b.socket, b.path, std::nullopt)) || any;
    }
    ++turn_;
    for (size_t i = 0; i < connections_.size(); ++i) {
      const size_t c = (turn_ + i) % connections_.size();
      const Connection& x = connections_[c];
      any = (x.socket && pumpPath(*x.socket, x.path, c)) || any;
    }
  }
  failover_.onSent(net_.now());
}

bool FailoverProcess::pumpPath(
    size_t socket,
    PathId path,
    std::optional<size_t> connection) {
  if (!net_.hasRoom(socket, side_)) {
    return false;
  }
  const OutFrame* const f = channel_.pull(path, net_.now());
  if (f == nullptr) {
    return false;
  }
  checkFrame(*f, path, connection);
  SimulatedTcp::Segment segment;
  segment.bytes.assign(f->header.begin(), f->header.end());
  segment.bytes.insert(
      segment.bytes.end(), f->payload, f->payload + f->payloadBytes);
  channel_.popWritten(path);
  net_.write(socket, side_, std::move(segment));
  return true;
}

// Chunks go only where they may: over paths of their class, and over no
// connection that has not proved itself.
void FailoverProcess::checkFrame(
    const OutFrame& frame,
    PathId path,
    std::optional<size_t> c) {
  FrameHeader header;
  if (!decodeFrame(frame.header, header).ok()) {
    world_.fail("the channel made a malformed frame");
    return;
  }
  if (header.type != FrameType::kData) {
    return;
  }
  world_.note(side_, "chunk, path and offset", c.value_or(99), header.offset);
  const auto bit = 1u << static_cast<size_t>(header.trafficClass);
  if ((channel_.classes(path) & bit) == 0) {
    world_.fail("a chunk goes over a path that does not carry its class");
  }
  if (c && connections_[*c].proving) {
    world_.fail(text(*c) + " carries a chunk before it has proved itself");
  }
}

void FailoverProcess::armTimers() {
  // The failover has said so, or it would not be called in time.
  if (failover_.deadline() < timerAt_) {
    world_.fail("the failover has a deadline of which it did not tell");
  }
  if (const TimePoint due = channel_.deadline(); due < channelTimerAt_) {
    channelTimerAt_ = due;
    net_.at(due, [this, due] {
      enter(
          [this, due] {
            if (channelTimerAt_ == due && !dead_) {
              channelTimerAt_ = kNever;
              channel_.onTimer(net_.now());
              dirty_ = true;
            }
          },
          /*timer=*/true);
    });
  }
}

void FailoverProcess::wakeAt(TimePoint when) {
  if (timerAt_ <= when) {
    return;
  }
  timerAt_ = when;
  net_.at(when, [this, when] {
    enter(
        [this, when] {
          if (timerAt_ != when || dead_) {
            return; // an earlier one has taken its place
          }
          timerAt_ = kNever;
          failover_.onTimer(net_.now());
          if (failover_.deadline() != kNever) {
            wakeAt(failover_.deadline());
          }
        },
        /*timer=*/true);
  });
}

// --- connecting

void FailoverProcess::ensure(size_t count) {
  while (connections_.size() < count) {
    connections_.emplace_back();
  }
  failover_.addConnections(connections_.size());
}

size_t FailoverProcess::otherPairs(size_t) const {
  return routes() * routes() - 1;
}

std::pair<size_t, size_t> FailoverProcess::otherPair(size_t route, size_t index)
    const {
  for (size_t i = 0; i < routes() * routes(); ++i) {
    const std::pair pair(i / routes(), i % routes());
    if (pair != std::pair(route, route) && index-- == 0) {
      return pair;
    }
  }
  return {route, route};
}

void FailoverProcess::attempt(size_t c, const AttemptPlan& plan) {
  Connection& x = connections_[c];
  const size_t route = c % routes();
  const auto [from, to] = plan.offRoute ? otherPair(route, *plan.offRoute)
                                        : std::pair(route, route);
  if (x.attempt) {
    world_.fail(text(c) + " is attempted twice at once");
  }
  world_.note(side_, "attempt, connection and NIC", c, from);
  const size_t socket = net_.connect(side_, from, to);
  x.attempt = Attempt{socket, std::nullopt, plan.offRoute.has_value()};
  const auto expires = [this, c, socket](bool unlessConnected) {
    enter(
        [this, c, socket, unlessConnected] {
          const auto& a = connections_[c].attempt;
          if (a && a->socket == socket &&
              !(unlessConnected && a->connectedAt)) {
            failAttempt(c, {});
          }
        },
        /*timer=*/true);
  };
  const TimePoint now = net_.now();
  net_.at(now + plan.timeout, [expires] { expires(false); });
  if (plan.synTimeout < plan.timeout) {
    net_.at(now + plan.synTimeout, [expires] { expires(true); });
  }
}

void FailoverProcess::giveUpAttempt(size_t c) {
  if (auto& a = connections_[c].attempt) {
    net_.close(a->socket, side_);
    a.reset();
  }
}

std::optional<TimePoint> FailoverProcess::attemptConnectedAt(size_t c) const {
  const auto& a = connections_[c].attempt;
  return a ? a->connectedAt : std::nullopt;
}

void FailoverProcess::failAttempt(size_t c, const AttemptFailure& how) {
  world_.note(side_, "attempt fails, connection", c, how.refused);
  giveUpAttempt(c);
  if (dead_) {
    return;
  }
  world_.result.duplicateAttempts += how.duplicate;
  failover_.onAttemptFailed(c, how, net_.now());
}

std::optional<size_t> FailoverProcess::attemptOf(size_t socket) const {
  for (size_t c = 0; c < connections_.size(); ++c) {
    const auto& a = connections_[c].attempt;
    if (a && a->socket == socket) {
      return c;
    }
  }
  return std::nullopt;
}

std::optional<size_t> FailoverProcess::connectionOf(size_t socket) const {
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (connections_[c].socket == socket) {
      return c;
    }
  }
  return std::nullopt;
}

void FailoverProcess::onConnected(size_t socket) {
  enter([this, socket] {
    if (const auto c = attemptOf(socket)) {
      connections_[*c].attempt->connectedAt = net_.now();
      sayHandshake(socket, kHello, *c);
    }
  });
}

void FailoverProcess::onRefused(size_t socket) {
  enter([this, socket] {
    if (const auto c = attemptOf(socket)) {
      AttemptFailure how;
      how.refused = true;
      failAttempt(*c, how);
    }
  });
}

void FailoverProcess::onWritable(size_t) {
  enter([this] { dirty_ = true; });
}

void FailoverProcess::onReset(size_t socket) {
  enter([this, socket] {
    if (const auto c = attemptOf(socket)) {
      failAttempt(*c, {});
    } else if (const auto at = connectionOf(socket)) {
      closePath(*at, "reset by the peer");
    } else if (callers_.contains(socket)) {
      loseCaller(socket);
    } else {
      for (size_t r = 0; r <= routes(); ++r) {
        if (otherPaths_[r].socket == socket) {
          removeOtherPath(r == routes() ? std::nullopt : std::optional(r));
        }
      }
    }
  });
}

void FailoverProcess::sayHandshake(
    size_t socket,
    uint32_t kind,
    size_t connection) {
  SimulatedTcp::Segment segment;
  segment.kind = kind | static_cast<uint32_t>(connection << 8);
  segment.bytes.resize(100);
  if (net_.open(socket, side_)) {
    net_.write(socket, side_, std::move(segment));
  }
}

void FailoverProcess::onHandshake(
    size_t socket,
    const SimulatedTcp::Segment& segment) {
  const size_t c = segment.kind >> 8;
  switch (segment.kind & 0xff) {
    case kHello:
      callers_[socket];
      sayHandshake(socket, kChallenge, c);
      net_.at(net_.now() + world_.setup.config.handshakeTimeout, [=, this] {
        enter([=, this] { loseCaller(socket); }, /*timer=*/true);
      });
      break;
    case kChallenge:
      sayHandshake(socket, kProof, c);
      break;
    case kProof:
      if (dead_) {
        sayHandshake(socket, kWrongPeer, c);
        break;
      }
      ensure(c + 1);
      if (!failover_.reserve(c, net_.now())) {
        sayHandshake(socket, kDuplicate, c);
        break;
      }
      callers_[socket].reserved = c;
      net_.at(
          net_.now() +
              Nanos(static_cast<int64_t>(world_.prng.below(3'000'000))),
          [=, this] {
            enter([=, this] {
              if (callers_.erase(socket) != 0 && !dead_) {
                sayHandshake(socket, kAccept, c);
                install(c, socket, /*ours=*/false);
              }
            });
          });
      break;
    case kAccept:
      if (const auto at = attemptOf(socket)) {
        install(*at, socket, /*ours=*/true);
      }
      break;
    default:
      if (const auto at = attemptOf(socket)) {
        AttemptFailure how;
        how.answered = true;
        how.duplicate = (segment.kind & 0xff) == kDuplicate;
        how.refused = how.wrongPeer = !how.duplicate;
        failAttempt(*at, how);
      }
  }
}

void FailoverProcess::loseCaller(size_t socket) {
  const auto it = callers_.find(socket);
  if (it == callers_.end()) {
    return;
  }
  const auto reserved = it->second.reserved;
  callers_.erase(it);
  net_.close(socket, side_);
  if (reserved && !dead_) {
    failover_.onCallerLost(*reserved, net_.now());
  }
}

void FailoverProcess::install(size_t c, size_t socket, bool ours) {
  Connection& x = connections_[c];
  if (x.attempt && x.attempt->socket == socket) {
    x.attempt.reset(); // the socket is the connection's now
  } else {
    giveUpAttempt(c);
  }
  if (x.socket) {
    closePath(c, "replaced");
  }
  const auto [nic0, nic1] = net_.nics(socket);
  const bool byItsRoute = nic0 == c % routes() && nic1 == c % routes();
  world_.note(side_, "connected, connection and times", c, x.times);
  x.socket = socket;
  x.path = ++lastPath_;
  x.heardAt = x.upAt = net_.now();
  x.suspect = false;
  x.taintedAt = kNever;
  x.trustedAt.reset();
  x.proving = x.times++ > 0;
  world_.result.reconnects += x.times > 1;
  world_.result.offRoute += !byItsRoute;
  channel_.addPath(x.path, net_.now());
  shareBursts(c % routes());
  dirty_ = true;
  failover_.onConnected(c, net_.now(), byItsRoute, ours, /*measure=*/true);
  if (!net_.open(socket, side_) && connections_[c].socket == socket) {
    closePath(c, "reset by the peer");
  }
}

void FailoverProcess::closePath(size_t c, const std::string& why) {
  Connection& x = connections_[c];
  world_.note(side_, why.c_str(), c);
  if (world_.onlyPauses) {
    world_.fail(text(c) + " is lost although the network is well: " + why);
  }
  noteLoss(x, /*counts=*/!x.suspect);
  net_.close(*x.socket, side_);
  x.socket.reset();
  if (!dead_) {
    const double roundTrip = channel_.pathStatistics(x.path).roundTripS();
    failover_.onClosed(
        c, fromSeconds(roundTrip), /*forGood=*/false, net_.now());
  }
  channel_.removePath(x.path, net_.now());
  if (!dead_) {
    useChanged();
  }
}

// --- reading

void FailoverProcess::onReadable(size_t socket) {
  enter([this, socket] { readAll(socket); });
}

void FailoverProcess::readAll(size_t socket) {
  while (net_.readable(socket, side_)) {
    const SimulatedTcp::Segment segment = net_.read(socket, side_);
    if (segment.kind != kFrame) {
      onHandshake(socket, segment);
    } else {
      readFrame(socket, segment);
    }
  }
}

void FailoverProcess::readFrame(
    size_t socket,
    const SimulatedTcp::Segment& segment) {
  std::optional<PathId> path;
  if (const auto c = connectionOf(socket)) {
    Connection& x = connections_[*c];
    x.heardAt = net_.now();
    ++x.heard;
    path = x.path;
  }
  std::optional<size_t> ofRoute;
  for (size_t r = 0; r < otherPaths_.size(); ++r) {
    OtherPath& b = otherPaths_[r];
    if (b.socket == socket) {
      path = b.path;
      ofRoute = r < routes() ? std::optional(r) : std::nullopt;
      b.heardAt = net_.now();
    }
  }
  if (!path || dead_) {
    return;
  }
  FrameHeader header;
  Status status = decodeFrame(
      std::span<const std::byte, kFrameHeaderBytes>(
          segment.bytes.data(), kFrameHeaderBytes),
      header);
  if (status.ok()) {
    status = channel_.onHeader(*path, header, net_.now());
  }
  if (status.ok()) {
    std::byte* const to = channel_.destination(*path);
    if (to != nullptr && header.payloadBytes > 0) {
      std::memcpy(
          to, segment.bytes.data() + kFrameHeaderBytes, header.payloadBytes);
    }
    status = channel_.onPayload(*path, net_.now());
  }
  if (!status.ok()) {
    world_.fail("protocol error: " + status.toString());
  }
  if (ofRoute) {
    datagramsHeard(*ofRoute);
  }
}

// As DatagramPath and RoutePathConnector do.
void FailoverProcess::datagramsHeard(size_t route) {
  OtherPath& b = otherPath(route);
  const TimePoint answered = channel_.answeredUpTo(b.path);
  if (answered >= b.askedAt) {
    b.askedAt = kNever;
  }
  if (b.silent && answered >= b.doubtedAt) {
    b.doubtedAt = kNever; // further answers change nothing
    const TimePoint at = b.returns->onHeard(net_.now());
    const PathId path = b.path;
    net_.at(at, [this, route, path] {
      enter([this, route, path] { datagramsCarry(route, path); });
    });
  }
}

void FailoverProcess::datagramsCarry(size_t route, PathId path) {
  OtherPath& b = otherPath(route);
  if (!b.socket || b.path != path || dead_) {
    return;
  }
  world_.note(side_, "datagrams carry again, route", route);
  ++world_.result.datagramsAgain;
  b.silent = false;
  b.returns->onUp(net_.now());
  channel_.setSuspect(path, false);
  useChanged();
}

void FailoverProcess::onControl(Channel&, std::span<const std::byte> payload) {
  const auto lost = decodePathsLost(payload);
  if (!lost) {
    world_.fail("a control message has changed");
    return;
  }
  // In a turn of its own, since the channel is reading.
  net_.at(net_.now(), [this, lost = *lost] {
    enter([this, lost] {
      for (const uint16_t c : lost.connections) {
        if (!dead_ && connected(c)) {
          closePath(c, "lost, says the peer");
        }
      }
    });
  });
}

// --- for the failover

ConnectionFacts FailoverProcess::facts(size_t c) const {
  const Connection& x = connections_[c];
  ConnectionFacts facts;
  facts.heardAt = x.heardAt;
  facts.waitingSince = channel_.waitingSince(x.path);
  facts.answeredUpTo = channel_.answeredUpTo(x.path);
  facts.pingsAnswered = channel_.pingsAnswered(x.path);
  facts.roundTrip = fromSeconds(channel_.pathStatistics(x.path).roundTripS());
  return facts;
}

PathEvidence FailoverProcess::evidence(size_t c) const {
  checking_ = c;
  const Connection& x = connections_[c];
  const SimulatedTcp::Evidence kernel = net_.evidence(*x.socket, side_);
  PathEvidence e;
  e.kernelOwes = kernel.owes;
  e.progress = kernel.owes
      ? kernel.acknowledged
      : static_cast<uint64_t>(x.heardAt.time_since_epoch().count());
  e.roundTrip = net_.roundTrip() * 5 / 4;
  return e;
}

std::optional<RoutePathFacts> FailoverProcess::routePath(size_t route) const {
  const OtherPath& b = otherPaths_[route];
  if (!b.socket) {
    return {};
  }
  RoutePathFacts f;
  f.silent = b.silent;
  f.heardAt = b.heardAt;
  f.answeredUpTo = channel_.answeredUpTo(b.path);
  f.roundTrip = net_.roundTrip() * 5 / 4;
  const TimePoint since = std::min(channel_.waitingSince(b.path), b.askedAt);
  f.evidence.owes = since != kNever;
  f.evidence.owesSince = f.evidence.owes ? since : TimePoint{};
  f.evidence.progress =
      static_cast<uint64_t>(f.answeredUpTo.time_since_epoch().count());
  f.evidence.roundTrip = f.roundTrip;
  return f;
}

void FailoverProcess::askRoutePath(size_t route) {
  OtherPath& b = otherPath(route);
  if (b.askedAt == kNever) {
    b.askedAt = net_.now();
    channel_.ping(b.path);
    dirty_ = true;
  }
}

void FailoverProcess::doubtRoutePath(size_t route) {
  OtherPath& b = otherPath(route);
  world_.note(side_, "datagrams are silent, route", route);
  ++world_.result.silentDatagrams;
  if (b.silent) {
    world_.fail("datagrams are doubted twice");
  }
  if (world_.onlyPauses && net_.now() < peer_->pausedUntil_) {
    world_.fail("datagrams are doubted although only the peer is slow");
  }
  if (!anyAnsweredLately(std::nullopt, route)) {
    world_.fail("datagrams are doubted although nothing takes over");
  }
  b.silent = true;
  b.doubtedAt = net_.now();
  b.returns->onSilent(net_.now());
  channel_.setSuspect(b.path, true);
  b.askedAt = kNever; // an older question proves nothing
  askRoutePath(route);
  useChanged();
  failover_.onRouteSilent(route, net_.now());
}

void FailoverProcess::ping(size_t c) {
  channel_.ping(connections_[c].path);
  dirty_ = true;
}

void FailoverProcess::putOnProbation(size_t c) {
  Connection& x = connections_[c];
  channel_.putOnProbation(x.path);
  x.proving = true;
  x.upAt = net_.now();
  x.trustedAt.reset();
  world_.note(side_, "on probation", c);
}

void FailoverProcess::trust(size_t c) {
  Connection& x = connections_[c];
  const Nanos holdDown = std::min(
      kShortestHoldDown * (int64_t{1} << std::min(x.losses, 16)),
      world_.setup.config.holdDownMax);
  const bool proved = channel_.pingsAnswered(x.path) >= kProbes &&
      net_.now() - x.upAt >= holdDown;
  if (!proved && anotherGood(c)) {
    world_.fail(
        text(c) + " is trusted after " + durationText(net_.now() - x.upAt) +
        " and " + std::to_string(channel_.pingsAnswered(x.path)) +
        " answers, although others work; it was lost " +
        std::to_string(x.losses) + " times in a row");
  }
  world_.result.longHoldDowns += proved && x.losses >= 2;
  (proved ? world_.result.proved : world_.result.needed) += 1;
  x.trustedAt = net_.now();
  channel_.trust(x.path);
  x.proving = false;
  dirty_ = true;
  world_.note(side_, "trusted", c, proved);
}

void FailoverProcess::setSuspect(size_t c, bool suspect) {
  Connection& x = connections_[c];
  world_.note(side_, suspect ? "suspect" : "answers again", c);
  if (suspect) {
    ++world_.result.suspicions;
    if (world_.onlyPauses && net_.now() < peer_->pausedUntil_) {
      world_.fail(text(c) + " is suspect although only the peer is slow");
    }
    if (!anyAnsweredLately(c, std::nullopt)) {
      world_.fail(text(c) + " is suspect although no other one takes over");
    }
    noteLoss(x, /*counts=*/false);
    if (checking_ != c) { // for another one's silence
      ++world_.result.tainted;
      x.taintedAt = net_.now();
    }
  } else if (
      x.taintedAt != kNever &&
      channel_.answeredUpTo(x.path) < std::exchange(x.taintedAt, kNever)) {
    world_.fail(text(c) + " is trusted again although it has not answered");
  }
  x.suspect = suspect;
  channel_.setSuspect(x.path, suspect);
  dirty_ = true;
}

void FailoverProcess::reset(size_t c, const std::string& why) {
  const Nanos stall = world_.setup.config.stallTimeout;
  bool heardOfOthers = another(c, [&](size_t i) {
    return net_.now() - connections_[i].heardAt <= stall;
  });
  for (size_t r = 0; r < routes(); ++r) {
    const OtherPath& b = otherPaths_[r];
    heardOfOthers =
        heardOfOthers || (b.socket && net_.now() - b.heardAt <= stall);
  }
  if (!heardOfOthers && !failover_.state(c).nicDown) {
    world_.fail(text(c) + " is reset although nothing else works");
  }
  closePath(c, why);
}

void FailoverProcess::tellLost(
    const std::vector<size_t>& connections,
    const std::string& nic) {
  PathsLost lost;
  for (const size_t c : connections) {
    lost.connections.push_back(static_cast<uint16_t>(c));
  }
  lost.reason = nic;
  channel_.sendControl(encode(lost));
}

void FailoverProcess::rolesAssigned(const Roles& roles) {
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (connected(c)) {
      channel_.setClasses(connections_[c].path, roles.connections[c]);
    }
  }
  for (size_t r = 0; r < routes(); ++r) {
    if (otherPath(r).socket) {
      channel_.setClasses(otherPath(r).path, roles.routePaths[r]);
    }
  }
  if (const OtherPath& b = otherPath(std::nullopt); b.socket) {
    channel_.setClasses(b.path, roles.sharedMemory);
  }
  dirty_ = true;
  if (begun_) { // before, the policy is not known
    checkRoles(roles);
  }
}

void FailoverProcess::onPeerGone(const AttemptFailure&) {
  world_.note(side_, "the peer is gone", 0);
  if (!world_.expectDeath) {
    world_.fail(
        "process " + std::to_string(side_) + " takes the other one for dead");
  }
  dead_ = true;
  failover_.end();
  for (size_t c = 0; c < connections_.size(); ++c) {
    giveUpAttempt(c);
    if (connected(c)) {
      closePath(c, "the peer is gone");
    }
  }
  channel_.fail(Status(StatusCode::kPeerDied, "gone"));
}

void FailoverProcess::note(size_t c, ConnectionNote what) {
  world_.note(side_, "note, connection and what", c, static_cast<size_t>(what));
}

// --- checks

bool FailoverProcess::good(size_t c) const {
  return failover_.answers(c) && !failover_.state(c).proving();
}

bool FailoverProcess::another(size_t c, const std::function<bool(size_t)>& what)
    const {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (i != c && connected(i) && what(i)) {
      return true;
    }
  }
  return false;
}

// Those that were trusted at the same moment do not count: they were trusted
// together.
bool FailoverProcess::anotherGood(size_t c) const {
  return another(c, [this](size_t i) {
    return good(i) && connections_[i].trustedAt != net_.now();
  });
}

bool FailoverProcess::answeredLately(size_t c, Nanos age) const {
  const Connection& x = connections_[c];
  const ConnectionFacts f = facts(c);
  return failover_.answers(c) &&
      net_.now() - std::max(f.answeredUpTo, x.upAt) < age + f.roundTrip * 3 / 2;
}

bool FailoverProcess::anyAnsweredLately(
    std::optional<size_t> butConnection,
    std::optional<size_t> butRoute) const {
  const Nanos lately =
      std::max<Nanos>(world_.setup.config.suspectAfter / 2, 4 * kCloseLook);
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (i != butConnection && connected(i) && answeredLately(i, lately)) {
      return true;
    }
  }
  for (size_t r = 0; r < routes(); ++r) {
    const auto f = r == butRoute ? std::nullopt : routePath(r);
    if (f && !f->silent &&
        net_.now() - f->answeredUpTo < lately + f->roundTrip * 3 / 2) {
      return true;
    }
  }
  return false;
}

// A lower bound of what FlapDamping counts.
void FailoverProcess::noteLoss(Connection& x, bool counts) {
  if (net_.now() - x.upAt >= kQuiet) {
    x.losses = 0;
  } else if (counts) {
    ++x.losses;
  }
}

void FailoverProcess::checkRoles(const Roles& roles) {
  const RolePolicy& policy = world_.setup.policy;
  std::vector<bool> works(routes(), false); // by route
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (connected(c) && good(c) && failover_.wanted(c)) {
      works[c % routes()] = true;
    }
  }
  const bool shared = otherPath(std::nullopt).socket.has_value();
  for (size_t r = 0; r < routes(); ++r) {
    works[r] = works[r] || datagramsWork(r);
  }
  const auto classesOf = [&](size_t c) -> unsigned {
    return connected(c) ? roles.connections[c] : 0u;
  };
  const auto first =
      static_cast<size_t>(std::ranges::find(works, true) - works.begin());
  world_.result.standbyTakeovers +=
      policy.standby && first > 0 && first < routes();
  for (size_t c = 0; c < connections_.size(); ++c) {
    if (shared && classesOf(c) != 0) {
      world_.fail(text(c) + " carries although shared memory works");
    }
    if (!shared && first == routes() && connected(c) &&
        classesOf(c) != kAllClasses) {
      world_.fail(text(c) + " is in reserve although nothing works");
    }
  }
  if (shared || first == routes()) {
    return;
  }
  for (size_t cls = 0; cls < kTrafficClassCount; ++cls) {
    const unsigned bit = 1u << cls;
    const std::string& nic = policy.preferred[cls];
    size_t home = 0; // the first route on its NIC that works
    while (home < routes() &&
           (nic.empty() || policy.nics[home] != nic || !works[home])) {
      ++home;
    }
    const bool keeps = home < routes();
    world_.result.classMoves += !nic.empty() && !keeps;
    const auto mayCarry = [&](size_t route) {
      return keeps ? policy.nics[route] == nic
                   : !policy.standby || route == first;
    };
    bool carried = false;
    for (size_t r = 0; r < routes(); ++r) {
      const bool does = datagramsWork(r) && (roles.routePaths[r] & bit) != 0;
      carried = carried || does;
      if (does && !mayCarry(r)) {
        world_.fail("datagrams carry a class that is not theirs");
      }
    }
    for (size_t c = 0; c < connections_.size(); ++c) {
      const size_t route = c % routes();
      const bool does = (classesOf(c) & bit) != 0;
      carried = carried || (does && good(c));
      if (does && !mayCarry(route)) {
        world_.fail(
            text(c) + " carries class " + std::to_string(cls) +
            " although it is in reserve, or the class keeps to another NIC");
      }
      const bool relieved = datagramsWork(route) && !isBeside();
      if (does && relieved) {
        world_.fail(text(c) + " carries although datagrams do");
      }
      if (!does && connected(c) && good(c) && failover_.wanted(c) &&
          !relieved && mayCarry(route)) {
        world_.fail(
            text(c) + " works and does not carry class " + std::to_string(cls));
      }
    }
    if (!carried) {
      world_.fail(
          "class " + std::to_string(cls) + " of process " +
          std::to_string(side_) + " is carried by nothing");
    }
  }
}

} // namespace resilient::test
