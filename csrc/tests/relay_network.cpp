#include "tests/relay_network.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "failover/roles.h"
#include "failover/takeover.h"
#include "wire/control.h"
#include "wire/frame.h"

namespace resilient::test {
namespace {

constexpr size_t kTurnLimit = 10'000; // at one time
constexpr Nanos kRetry = std::chrono::milliseconds(100);
// A busy relay is left alone at least so long (RelayPath).
constexpr Nanos kBusyFor = std::chrono::seconds(10);

} // namespace

// --- a process

SimulatedRank::SimulatedRank(
    RelayNetwork& network,
    size_t rank,
    const EngineOptions& options,
    const std::string& site,
    std::optional<double> declared)
    : network_(network), rank_(rank) {
  options_ = options;
  self_.uid[0] = static_cast<uint8_t>(rank + 1);
  self_.site = site;
  self_.hostId = self_.hostName = "host" + std::to_string(rank);
  loop_.turnAt(network.now());
  if (declared || options.relay == "auto") {
    uplink_.emplace(declared, static_cast<uint64_t>(options.starvation_bytes));
  }
  completions_.setWake([this] { scheduleTurn(); });
  service_ = std::make_unique<RelayService>(*this);
}

SimulatedRank::~SimulatedRank() {
  end("is left: the end of the simulation");
  service_.reset();
  graveyard_.clear();
  links_.clear(); // before the loop
}

void SimulatedRank::end(const std::string& how) {
  for (auto& link : links_) {
    if (link) {
      link->close(Link::State::kLeft, StatusCode::kAborted, how);
    }
  }
  completions_.drain();
  service_->close();
}

// Connections are those of the network: the connector makes none.
void SimulatedRank::join(
    const std::vector<std::unique_ptr<SimulatedRank>>& all) {
  links_.resize(all.size());
  timerAt_.resize(all.size(), kNever);
  for (size_t peer = 0; peer < all.size(); ++peer) {
    if (peer != rank_) {
      links_[peer] = std::make_unique<PeerLink>(
          *this, all[peer]->self().uid, static_cast<uint32_t>(peer + 1));
      links_[peer]->connections().close();
      links_[peer]->setAddress(
          all[peer]->self(), "secret", static_cast<int32_t>(peer));
    }
  }
}

bool SimulatedRank::drained() {
  return std::ranges::all_of(links_, [](const auto& link) {
    return !link || !link->usable() || link->channel().drained();
  });
}

PeerLink* SimulatedRank::linkTo(const Uid& uid) {
  const size_t peer = size_t{uid[0]} - 1;
  return peer < links_.size() ? links_[peer].get() : nullptr;
}

Uplink* SimulatedRank::uplink(const std::string& site) {
  return site != self_.site && uplink_ ? &*uplink_ : nullptr;
}

// As the Engine's.
void SimulatedRank::waitForTurn(const std::string&) {
  RateLimit* const limit = uplink_->limit();
  if (limit == nullptr || turnTimer_ != 0 || !limit->idleTurn()) {
    return;
  }
  turnTimer_ = loop_.at(limit->readyAt(), [this, limit] {
    turnTimer_ = 0;
    if (!limit->idleTurn()) {
      return;
    }
    const bool inOrder = uplink_->contended(loop_.now());
    const RateLimit::User next = limit->nextTurn([&](RateLimit::User user) {
      const Urgency urgency = links_[user - 1]
                                  ->channel()
                                  .mostUrgent(globalRank())
                                  .value_or(Urgency());
      return inOrder ? urgency : Urgency{urgency.cls};
    });
    markDirty(*links_[next - 1]);
  });
}

// As the Engine's: those behind us first.
std::vector<Uid> SimulatedRank::relaysTo(const Link& peer) const {
  std::vector<Uid> relays;
  for (size_t i = 1; i < links_.size(); ++i) {
    const auto& link = links_[(rank_ + i) % links_.size()];
    if (link->address()->site == self_.site && link->uid() != peer.uid()) {
      relays.push_back(link->uid());
    }
  }
  return relays;
}

void SimulatedRank::markDirty(PeerLink& link) {
  if (!std::exchange(link.dirty, true)) {
    dirty_.push_back(&link);
    scheduleTurn();
  }
}

void SimulatedRank::destroyLater(std::shared_ptr<void> object) {
  graveyard_.push_back(std::move(object));
  scheduleTurn();
}

void SimulatedRank::scheduleTurn() {
  if (!std::exchange(scheduled_, true)) {
    loop_.atEndOfTurn([this] { turn(); });
  }
}

void SimulatedRank::turn() {
  while (!completions_.empty() || !dirty_.empty()) {
    completions_.drain();
    for (PeerLink* link : std::exchange(dirty_, {})) {
      link->dirty = false;
      network_.pump(*this, *link);
      armTimer(*link);
    }
  }
  scheduled_ = false;
  graveyard_.clear();
}

// PeerLink has its own, but only while it has paths of its own.
void SimulatedRank::armTimer(PeerLink& link) {
  const size_t peer = link.channel().id() - 1;
  const TimePoint due = link.channel().deadline();
  if (due == kNever || due >= timerAt_[peer]) {
    return;
  }
  timerAt_[peer] = due;
  loop_.at(due, [this, &link, peer, due] {
    if (timerAt_[peer] == due) {
      timerAt_[peer] = kNever;
      link.channel().onTimer(loop_.now());
      markDirty(link);
    }
  });
}

void SimulatedRank::onControl(
    PeerLink& link,
    std::span<const std::byte> payload) {
  const auto note = decodeRelayNote(payload);
  if (!note) {
    network_.fail("a control frame that is no note");
    return;
  }
  if (note->what == RelayNote::What::kPassed) {
    network_.onPassed(*note);
    // A relay that is left alone says it again only when it is used again.
    PeerLink* const farEnd = linkTo(note->source());
    const RelayPath* const path =
        farEnd == nullptr ? nullptr : farEnd->relays().pathOf(note->flow);
    if (note->busy && (path == nullptr || !path->busy())) {
      busyUntil_[note->flow] = loop_.now() + kBusyFor;
    }
  }
  service_->onNote(link, *note);
}

void SimulatedRank::checkBusy(PeerLink& link, const Roles& roles) {
  for (const auto& [flow, until] : busyUntil_) {
    const RelayPath* const path =
        until > loop_.now() ? link.relays().pathOf(flow) : nullptr;
    if (path != nullptr && roles.relays == 0 &&
        link.channel().classes(path->id()) != 0) {
      network_.fail(
          "rank " + std::to_string(rank_) + " gives chunks to " +
          path->relay() + ", which is busy");
    }
  }
}

void SimulatedRank::onLinkClosed(PeerLink& link, const Status& why) {
  network_.onLinkClosed(*this, link);
  service_->onLinkClosed(link);
  for (auto& other : links_) {
    if (other) {
      other->relays().onRelayClosed(link.uid(), why.message());
    }
  }
  mailbox_.failSource(link.channel(), why);
}

// --- the network

RelayNetwork::~RelayNetwork() {
  ending_ = true;
  ranks_.clear();
}

SimulatedRank& RelayNetwork::add(
    const EngineOptions& options,
    const std::string& site,
    uint64_t uplinkBytesPerS,
    std::optional<double> declared) {
  uplinkBytesPerS_.push_back(uplinkBytesPerS);
  uplinkFree_.emplace_back();
  uplinkOf_.push_back(ranks_.size());
  wakeAt_.push_back(kNever);
  ranks_.push_back(
      std::make_unique<SimulatedRank>(
          *this, ranks_.size(), options, site, declared));
  return *ranks_.back();
}

void RelayNetwork::join() {
  for (auto& rank : ranks_) {
    rank->join(ranks_);
    wake(rank->rank(), now_);
  }
}

void RelayNetwork::fail(const std::string& what) {
  if (error_.empty()) {
    error_ = what;
  }
}

void RelayNetwork::note(
    uint64_t what,
    uint64_t a,
    uint64_t b,
    const char* text) {
  const auto t = static_cast<uint64_t>(now_.time_since_epoch().count());
  for (const uint64_t x : {t, what, a, b}) {
    traceHash_ = mixBits(traceHash_ ^ x);
  }
  if (trace_) {
    trace_(
        std::to_string(t / 1000) + " us: " + text + " " + std::to_string(a) +
        " " + std::to_string(b));
  }
}

void RelayNetwork::at(TimePoint when, std::function<void()> what) {
  queue_.push(Event{std::max(when, now_), eventNumber_++, std::move(what)});
}

void RelayNetwork::in(size_t r, std::function<void()> what) {
  if (ranks_[r]->state() != SimulatedRank::State::kGone) {
    ranks_[r]->loop().post(std::move(what));
    wake(r, now_);
  }
}

bool RelayNetwork::step() {
  if (queue_.empty()) {
    return false;
  }
  // The top is const only to protect the order, which moving leaves alone.
  const auto what = std::move(const_cast<Event&>(queue_.top()).what);
  now_ = queue_.top().when;
  queue_.pop();
  ++events_;
  what();
  return true;
}

void RelayNetwork::wake(size_t r, TimePoint when) {
  when = std::max(when, now_);
  if (when >= wakeAt_[r]) {
    return;
  }
  wakeAt_[r] = when;
  at(when, [this, r, when] {
    if (wakeAt_[r] == when) { // else an earlier one has taken its place
      wakeAt_[r] = kNever;
      run(r);
    }
  });
}

// Turns, until there is nothing to do at this time.
void RelayNetwork::run(size_t r) {
  SimulatedRank& rank = *ranks_[r];
  if (!runs(r)) {
    return; // when it is resumed
  }
  rank.loop().post([this, r] { readAll(r); });
  size_t turns = 0;
  do {
    rank.loop().turnAt(now_);
    if (++turns > kTurnLimit) {
      fail("rank " + std::to_string(r) + " is never done");
      return;
    }
  } while (runs(r) && rank.loop().dueAt() <= now_);
  afterTurn(r);
  if (runs(r)) {
    wake(r, std::min(rank.loop().dueAt(), nextArrival(r)));
  }
}

// --- frames

TimePoint RelayNetwork::nextArrival(size_t r) const {
  TimePoint next = kNever;
  for (const Connection& c : connections_) {
    const size_t side = sideOf(c, r);
    const Direction& d = c.directions[1 - side];
    if (c.ranks[side] == r && c.open[side] && !d.frames.empty()) {
      next = std::min(next, std::max(d.frames.front().at, c.silentUntil));
    }
  }
  return next;
}

void RelayNetwork::readAll(size_t r) {
  for (WayRef ref = 0; ref < connections_.size(); ++ref) {
    Connection& c = connections_[ref];
    const size_t side = sideOf(c, r);
    Direction& d = c.directions[1 - side];
    if (c.ranks[side] != r || now_ < c.silentUntil) {
      continue;
    }
    const bool wasFull = d.bytes >= c.way.windowBytes;
    bool any = false;
    while (c.open[side] && !d.frames.empty() && d.frames.front().at <= now_) {
      const std::vector<std::byte> bytes = std::move(d.frames.front().bytes);
      d.frames.pop_front();
      d.bytes -= bytes.size();
      any = true;
      read(c, side, bytes);
    }
    if (any && wasFull) {
      const size_t writer = c.ranks[1 - side];
      at(now_ + c.way.latency, [this, writer, r] {
        in(writer, [this, writer, r] { ranks_[writer]->link(r).changed(); });
      });
    }
    if (any) {
      ranks_[r]->link(c.ranks[1 - side]).changed(); // acknowledgements
    }
    if (c.open[side] && d.ended && d.frames.empty()) {
      closeEnd(ref, side);
    }
  }
}

void RelayNetwork::read(
    Connection& c,
    size_t side,
    const std::vector<std::byte>& bytes) {
  Channel& channel = linkOf(c, side).channel();
  const PathId id = c.ids[side];
  FrameHeader h;
  Status status = decodeFrame(std::span(bytes).first<kFrameHeaderBytes>(), h);
  if (status.ok()) {
    status = channel.onHeader(id, h, now_);
  }
  if (status.ok()) {
    std::byte* const to = channel.destination(id);
    if (to != nullptr && h.payloadBytes != 0) {
      std::memcpy(to, &bytes[kFrameHeaderBytes], h.payloadBytes);
    }
    status = channel.onPayload(id, now_);
  }
  if (!status.ok()) {
    fail(
        "rank " + std::to_string(c.ranks[side]) + " refuses bytes of " +
        std::to_string(c.ranks[1 - side]) + ": " + status.toString());
  }
}

// Which kind of path asks first must not matter. Under a limit, connections do:
// the link ends its turn when its own paths are done.
void RelayNetwork::pump(SimulatedRank& rank, PeerLink& link) {
  if (!link.usable()) {
    return;
  }
  assign(rank, link);
  Uplink* const uplink = rank.uplink(link.address()->site);
  RateLimit* const limit = uplink != nullptr ? uplink->limit() : nullptr;
  if (uplink != nullptr) {
    const Channel& channel = link.channel();
    const bool direct = channel.takesChunksDirectly();
    uplink->onWaiting(
        channel.id(),
        direct && channel.backloggedActivations(/*forOthers=*/false),
        direct && channel.backloggedActivations(/*forOthers=*/true),
        now_);
  }
  const bool relaysFirst = prng_.chance(0.5) && limit == nullptr;
  if (relaysFirst) {
    link.pump();
  }
  const auto ways = between(rank.rank(), link.channel().id() - 1);
  for (bool any = true; any;) {
    any = false;
    for (const WayRef ref : ways) {
      Connection& c = connections_[ref];
      any = write(c, sideOf(c, rank.rank()), limit) || any;
    }
  }
  if (!relaysFirst) {
    link.pump();
  }
  if (limit != nullptr) { // a link without paths of its own has not done so
    limit->endTurn(link.channel().id());
    rank.waitForTurn(link.address()->site);
  }
}

// One frame, if there is one and room for it.
bool RelayNetwork::write(Connection& c, size_t side, RateLimit* limit) {
  Direction& d = c.directions[side];
  if (!c.open[side] || d.bytes >= c.way.windowBytes) {
    return false;
  }
  Channel& channel = linkOf(c, side).channel();
  const PathId id = c.ids[side];
  const bool chunks = limit == nullptr || !channel.takesChunks(id) ||
      !channel.backlogged() || limit->mayTake(channel.id(), now_);
  const OutFrame* const f = channel.pull(id, now_, chunks);
  if (f == nullptr) {
    return false;
  }
  Frame frame;
  frame.bytes.assign(f->header.begin(), f->header.end());
  if (f->payloadBytes != 0) {
    frame.bytes.insert(
        frame.bytes.end(), f->payload, f->payload + f->payloadBytes);
  }
  channel.popWritten(id);
  if (limit != nullptr) {
    limit->took(channel.id(), frame.bytes.size(), now_);
  }
  if (c.broken) {
    return true; // nobody knows it yet
  }
  const size_t from = c.ranks[side], to = c.ranks[1 - side];
  const bool far = crossesSites(from, to);
  const size_t uplink = uplinkOf_[from];
  TimePoint& free = far ? uplinkFree_[uplink] : d.linkFree;
  const uint64_t rate = far
      ? std::min(uplinkBytesPerS_[uplink], c.way.bytesPerS)
      : c.way.bytesPerS;
  free = std::max(free, now_) +
      Nanos(static_cast<int64_t>(frame.bytes.size() * 1'000'000'000 / rate));
  d.lastArrival =
      std::max(d.lastArrival, free + c.way.latency + upTo(c.way.jitter));
  frame.at = d.lastArrival;
  d.bytes += frame.bytes.size();
  d.frames.push_back(std::move(frame));
  wake(to, std::max(d.frames.front().at, c.silentUntil));
  return true;
}

// The part of Failover: who carries what.
void RelayNetwork::assign(SimulatedRank& rank, PeerLink& link) {
  const auto ways = between(rank.rank(), link.channel().id() - 1);
  RoleInput input;
  for (const WayRef ref : ways) {
    const Connection& c = connections_[ref];
    const size_t side = sideOf(c, rank.rank());
    input.connections.push_back({0, c.open[side] && !c.suspect[side], true});
  }
  const std::vector<ConnectionView> views = link.relays(now_);
  input.relays = std::ranges::any_of(views, isGood);
  const Roles roles = assignRoles(input, RolePolicy());
  for (size_t i = 0; i < ways.size(); ++i) {
    const Connection& c = connections_[ways[i]];
    const size_t side = sideOf(c, rank.rank());
    if (c.open[side]) {
      link.channel().setClasses(c.ids[side], roles.connections[i]);
    }
  }
  link.onRoles(roles);
  rank.checkBusy(link, roles);
}

// --- connections

std::vector<RelayNetwork::WayRef> RelayNetwork::between(size_t a, size_t b)
    const {
  std::vector<WayRef> found;
  for (WayRef ref = 0; ref < connections_.size(); ++ref) {
    const auto& ranks = connections_[ref].ranks;
    if ((ranks[0] == a && ranks[1] == b) || (ranks[0] == b && ranks[1] == a)) {
      found.push_back(ref);
    }
  }
  return found;
}

RelayNetwork::WayRef RelayNetwork::connect(size_t a, size_t b, const Way& way) {
  Connection& c = connections_.emplace_back();
  c.way = way;
  c.ranks = {a, b};
  openLater(connections_.size() - 1);
  return connections_.size() - 1;
}

void RelayNetwork::openLater(WayRef ref) {
  Connection& c = connections_[ref];
  const auto gone = [this](size_t r) {
    return ranks_[r]->state() == SimulatedRank::State::kGone;
  };
  if (std::exchange(c.opening, true) || gone(c.ranks[0]) || gone(c.ranks[1])) {
    return;
  }
  at(now_ + upTo(kRetry), [this, ref] {
    Connection& x = connections_[ref];
    x.opening = false;
    const bool possible = runs(x.ranks[0]) && runs(x.ranks[1]) &&
        now_ >= std::max(x.silentUntil, x.notBefore);
    possible ? open(ref) : openLater(ref);
  });
}

// Both ends know of it within this time. (A frame takes longer.)
void RelayNetwork::open(WayRef ref) {
  Connection& c = connections_[ref];
  if (!linkOf(c, 0).usable() || !linkOf(c, 1).usable()) {
    return;
  }
  note(1, c.ranks[0], c.ranks[1], "connection between");
  const uint64_t generation = ++c.generation;
  c.made = true;
  c.broken = false;
  c.suspect = {};
  c.directions = {};
  for (const size_t side : {0, 1}) {
    in(c.ranks[side], [this, ref, side, generation] {
      Connection& x = connections_[ref];
      PeerLink& link = linkOf(x, side);
      if (x.generation != generation || !x.made || !link.usable()) {
        return;
      }
      x.ids[side] = ranks_[x.ranks[side]]->nextPathId();
      x.open[side] = true;
      link.channel().addPath(x.ids[side], now_);
      link.onConnection();
      link.changed();
    });
  }
}

// It is made anew when both ends are closed.
void RelayNetwork::closeEnd(WayRef ref, size_t side) {
  Connection& c = connections_[ref];
  if (std::exchange(c.open[side], false)) {
    note(2, ref, side, "end closed, connection and side");
    in(c.ranks[side], [this, ref, side, id = c.ids[side]] {
      PeerLink& link = linkOf(connections_[ref], side);
      link.channel().removePath(id, now_);
      link.changed();
    });
  }
  if (c.made && !c.open[1 - side]) {
    c.made = false;
    openLater(ref);
  }
}

// Only a part of what is on the way arrives.
void RelayNetwork::breakDirections(Connection& c) {
  c.broken = true;
  for (Direction& d : c.directions) {
    d.frames.resize(prng_.below(d.frames.size() + 1));
    d.bytes = 0;
    for (const Frame& frame : d.frames) {
      d.bytes += frame.bytes.size();
    }
  }
}

void RelayNetwork::cut(WayRef ref, Nanos notice, TimePoint until) {
  Connection& c = connections_[ref];
  c.notBefore = std::max(c.notBefore, until);
  if (!c.made || c.broken) {
    return;
  }
  note(3, ref, 0, "cut of connection");
  breakDirections(c);
  for (const size_t side : {0, 1}) {
    at(now_ + upTo(notice), [this, ref, side, generation = c.generation] {
      if (connections_[ref].generation == generation) {
        closeEnd(ref, side);
      }
    });
  }
}

void RelayNetwork::silence(WayRef ref, TimePoint until) {
  Connection& c = connections_[ref];
  if (until <= c.silentUntil) {
    return;
  }
  note(4, ref, 0, "silence of connection");
  c.silentUntil = until;
  for (const size_t side : {0, 1}) {
    const Nanos sees = std::chrono::milliseconds(60);
    at(now_ + sees + upTo(sees),
       [this, ref, side, g = c.generation] { doubt(ref, side, g); });
    const Nanos stalls = std::chrono::milliseconds(600);
    at(now_ + stalls + upTo(4 * stalls), [this, ref, side, g = c.generation] {
      Connection& x = connections_[ref];
      if (x.generation == g && x.open[side] && now_ < x.silentUntil) {
        if (!x.broken) {
          breakDirections(x);
        }
        closeEnd(ref, side);
      }
    });
  }
  at(until, [this, ref] { endSilence(ref); });
}

// Without another way, nothing is gained by suspicion.
void RelayNetwork::doubt(WayRef ref, size_t side, uint64_t generation) {
  Connection& c = connections_[ref];
  if (c.generation != generation || !c.open[side] || now_ >= c.silentUntil) {
    return;
  }
  bool other = linkOf(c, side).relays().usable();
  for (const WayRef each : between(c.ranks[0], c.ranks[1])) {
    const Connection& x = connections_[each];
    other = other || (x.open[side] && now_ >= x.silentUntil);
  }
  if (other) {
    setSuspect(ref, side, true);
    return;
  }
  at(now_ + kRetry,
     [this, ref, side, generation] { doubt(ref, side, generation); });
}

void RelayNetwork::setSuspect(WayRef ref, size_t side, bool suspect) {
  Connection& c = connections_[ref];
  if (c.suspect[side] == suspect) {
    return;
  }
  c.suspect[side] = suspect;
  note(5, ref, suspect, "suspect connection, or not");
  in(c.ranks[side], [this, ref, side, suspect, g = c.generation] {
    Connection& x = connections_[ref];
    if (x.generation == g && x.open[side]) {
      linkOf(x, side).channel().setSuspect(x.ids[side], suspect);
      linkOf(x, side).changed();
    }
  });
}

void RelayNetwork::endSilence(WayRef ref) {
  Connection& c = connections_[ref];
  if (now_ < c.silentUntil) {
    return; // another one has begun
  }
  for (const size_t side : {0, 1}) {
    wake(c.ranks[side], now_);
    if (!c.open[side]) {
      continue;
    }
    setSuspect(ref, side, false);
    if (!c.open[1 - side]) { // the far end has reset it
      at(now_ + c.way.latency, [this, ref, side, g = c.generation] {
        if (connections_[ref].generation == g) {
          closeEnd(ref, side);
        }
      });
    }
  }
}

void RelayNetwork::heal() {
  note(6, 0, 0, "healing");
  for (WayRef ref = 0; ref < connections_.size(); ++ref) {
    connections_[ref].notBefore = now_;
    connections_[ref].silentUntil = now_;
    endSilence(ref);
  }
}

// The end of a link closes its connections. The far end reads what was written
// before, if this one has left in good order.
void RelayNetwork::onLinkClosed(SimulatedRank& rank, PeerLink& link) {
  if (ending_) {
    return;
  }
  for (const WayRef ref : between(rank.rank(), link.channel().id() - 1)) {
    Connection& c = connections_[ref];
    const size_t side = sideOf(c, rank.rank());
    if (link.state() != Link::State::kLeft && !c.broken) {
      breakDirections(c);
    }
    c.broken = true;
    c.directions[side].ended = true;
    closeEnd(ref, side);
    wake(
        c.ranks[1 - side],
        std::max(
            {now_ + c.way.latency,
             c.directions[side].lastArrival,
             c.silentUntil}));
  }
}

// --- processes

void RelayNetwork::stop(size_t r) {
  if (runs(r)) {
    note(7, r, 0, "stop of rank");
    ranks_[r]->setState(SimulatedRank::State::kStopped);
  }
}

void RelayNetwork::resume(size_t r) {
  if (ranks_[r]->state() == SimulatedRank::State::kStopped) {
    note(8, r, 0, "rank goes on");
    ranks_[r]->setState(SimulatedRank::State::kRuns);
    wakeAt_[r] = kNever;
    wake(r, now_);
  }
}

// Its kernel resets its connections, and refuses new ones: after a while the
// others know that it has died.
void RelayNetwork::kill(size_t r) {
  if (!runs(r)) {
    return;
  }
  note(9, r, 0, "death of rank");
  ranks_[r]->setState(SimulatedRank::State::kGone);
  for (size_t other = 0; other < ranks_.size(); ++other) {
    if (other == r) {
      continue;
    }
    for (const WayRef ref : between(r, other)) {
      cut(ref, std::chrono::milliseconds(60), kNever);
    }
    const Nanos least = std::chrono::milliseconds(150);
    at(now_ + least + upTo(4 * least), [this, other, r] {
      in(other, [this, other, r] {
        ranks_[other]->link(r).close(
            Link::State::kDead, StatusCode::kPeerDied, "died");
      });
    });
  }
}

void RelayNetwork::leave(size_t r) {
  note(10, r, 0, "rank leaves");
  in(r, [this, r] { ranks_[r]->relays().leave(); });
  leaveWhenDrained(r, now_ + std::chrono::seconds(2), /*saidBye=*/false);
}

// As the Engine stops: what was sent must have arrived, and the goodbye, too,
// but no later than `limit`.
void RelayNetwork::leaveWhenDrained(size_t r, TimePoint limit, bool saidBye) {
  in(r, [this, r, limit, saidBye] {
    SimulatedRank& rank = *ranks_[r];
    if (!rank.drained() && now_ < limit) {
      at(now_ + std::chrono::milliseconds(10),
         [this, r, limit, saidBye] { leaveWhenDrained(r, limit, saidBye); });
      return;
    }
    if (!saidBye) {
      for (size_t peer = 0; peer < ranks_.size(); ++peer) {
        if (peer != r) {
          rank.link(peer).leave();
        }
      }
      at(now_ + std::chrono::milliseconds(1), [this, r] {
        leaveWhenDrained(r, now_ + std::chrono::seconds(1), true);
      });
      return;
    }
    note(11, r, 0, "rank has left");
    rank.end("is left: the process group was destroyed");
    rank.setState(SimulatedRank::State::kGone);
  });
}

} // namespace resilient::test
