#include "channel/channel.h"

#include <algorithm>
#include <cassert>

#include "channel/channel_state.h"
#include "channel/mailbox.h"

// Construction, paths, time and failure. channel_send.cpp and
// channel_receive.cpp hold the two directions.

namespace resilient {

Channel::Channel(
    uint32_t id,
    ChannelConfig config,
    Mailbox& mailbox,
    CompletionQueue& completions,
    StagingMemory& staging,
    ChannelHost& host)
    : id_(id),
      config_(config),
      mailbox_(mailbox),
      completions_(completions),
      staging_(staging),
      host_(host),
      scheduler_(config.starvationBytes) {}

Channel::~Channel() {
  for (auto& [number, m] : out_) {
    release(*m);
  }
}

Channel::PathState& Channel::state(PathId path) {
  auto it = paths_.find(path);
  assert(it != paths_.end());
  return it->second;
}

const Channel::PathState& Channel::state(PathId path) const {
  auto it = paths_.find(path);
  assert(it != paths_.end());
  return it->second;
}

void Channel::ready() {
  host_.channelReady(*this);
}

void Channel::addPath(PathId path, TimePoint now) {
  lastNow_ = now;
  paths_[path].ackAskedAt = now;
  ready();
}

// Paper: SHIFT §4.3.2. Unacknowledged frames move to the other paths. The peer
// may have some of them and drops duplicates, so nothing waits for a handshake.
// Paper: PIPEMORPH §5.3 tries the whole operation again; here only chunks move.
void Channel::removePath(PathId path, TimePoint now) {
  lastNow_ = now;
  auto it = paths_.find(path);
  if (it == paths_.end()) {
    return;
  }
  PathState lost = std::move(it->second);
  paths_.erase(it);
  if (lost.link != nullptr) {
    lost.link->inFlightBytes -= lost.inFlightBytes;
  }
  if (!lost.pins.empty()) {
    endingPins_[path] = std::move(lost.pins);
    if (RESILIENT_PLANTED(endPinsEarly)) {
      endPins(path);
    }
  }
  // Newest first: the oldest then ends up at the front of every queue.
  for (auto f = lost.inFlight.rbegin(); f != lost.inFlight.rend(); ++f) {
    takeBack(*f, /*pathIsGone=*/true);
  }
  unblock(); // what was taken back has its credit
  ready();
}

// Queues the content of `f` to be sent once more. There are two cases: a path
// that is gone gives its frames away; a suspect path keeps them, and other
// paths send copies. An offer is not repeated as such: the message goes back to
// its queue, and the next path announces it anew if there is still no credit.
void Channel::takeBack(InFlight& f, bool pathIsGone) {
  if (f.control) { // the peer may have it: it must bear a second one
    if (!f.superseded) {
      control_.push_front(
          pathIsGone ? std::move(f.control)
                     : std::make_unique<Control>(*f.control));
    }
    return;
  }
  auto found = out_.find(f.message);
  if (found == out_.end()) {
    return;
  }
  OutMessage& m = *found->second;
  m.inFlight -= pathIsGone;
  // Or another copy has arrived already.
  if (m.abandoned || f.superseded || m.acknowledgedChunks.contains(f.chunk)) {
    eraseIfDone(m);
    return;
  }
  if (f.chunk == kOfferChunk) {
    clearOffer(m);
  } else {
    if (!pathIsGone) {
      trackChunks(m);
    }
    if (!RESILIENT_PLANTED(noRequeue)) {
      m.retransmits.push_back(f.chunk);
    }
  }
  enqueue(m, /*front=*/true);
}

// From now on acknowledgements of the message may repeat. Until now none has:
// what is neither in flight nor taken back has been acknowledged. It must run
// before the second copy of any chunk is handed out: afterwards the frames in
// flight no longer tell which chunks are open. Costs one look at all frames in
// flight, once for each message.
void Channel::trackChunks(OutMessage& m) {
  if (m.tracked) {
    return;
  }
  m.tracked = true;
  if (m.chunks == 1) {
    return;
  }
  std::vector<bool> open(m.nextChunk, false);
  for (const auto& [id, p] : paths_) {
    for (const InFlight& f : p.inFlight) {
      if (f.message == m.number() && !f.control && f.chunk != kOfferChunk) {
        open[f.chunk] = true;
      }
    }
  }
  for (uint32_t chunk : m.retransmits) {
    open[chunk] = true;
  }
  for (uint32_t chunk = 0; chunk < m.nextChunk; ++chunk) {
    if (!open[chunk]) {
      m.acknowledgedChunks.insert(chunk);
    }
  }
}

// Paper: SHIFT §4.3.2 falls back when an error tells that a path has failed.
// Repeats do no harm here, so doubt is enough; the path keeps what it has.
// Superseded frames stay in inFlight. The peer counts them if they arrive, and
// its count must keep naming the same frames.
void Channel::setSuspect(PathId path, bool suspect) {
  PathState& p = state(path);
  if (p.suspect == suspect) {
    return;
  }
  p.suspect = suspect;
  if (!suspect) {
    // Late answers say nothing of what the path carries, and if others can do
    // the work alone, nothing would be measured any more.
    p.statistics.expectCapacity(p.capacityBefore);
  } else {
    p.capacityBefore = p.statistics.capacityBytesPerS();
    ++p.counters.timesSuspect;
    for (auto f = p.inFlight.rbegin(); f != p.inFlight.rend(); ++f) {
      takeBack(*f, /*pathIsGone=*/false);
      f->superseded = true;
    }
    unblock();
  }
  ready();
}

bool Channel::isSuspect(PathId path) const {
  return state(path).suspect;
}

void Channel::setClasses(PathId path, uint8_t classes) {
  PathState& p = state(path);
  if (p.classes != classes) {
    p.classes = classes;
    ready();
  }
}

void Channel::setBursts(PathId path, BurstRange range) {
  PathState& p = state(path);
  if (p.bursts != range) {
    p.bursts = range;
    ready();
  }
}

const BurstRange& Channel::bursts(PathId path) const {
  return state(path).bursts;
}

uint8_t Channel::classes(PathId path) const {
  return state(path).classes;
}

bool Channel::backlogged() const {
  return std::any_of(
      ready_.begin(), ready_.end(), [](const auto& q) { return !q.empty(); });
}

bool Channel::backloggedByOurs() const {
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    if (!isForOthers(queue) && waiting(queue) != nullptr) {
      return true;
    }
  }
  return false;
}

bool Channel::takesChunks(PathId path) const {
  const PathState& p = state(path);
  return p.classes != 0 && !p.suspect && !p.onProbation;
}

bool Channel::takesChunksDirectly() const {
  return std::ranges::any_of(paths_, [&](const auto& each) {
    return !each.second.overRelay && takesChunks(each.first);
  });
}

// A path alone may get all that its link carries, so the capacities of those
// that share one must not be added up.
double Channel::shareBytesPerS(const PathState& p) const {
  const double own = p.ownBytesPerS();
  const double together =
      p.link == nullptr ? 0 : p.link->statistics.capacityBytesPerS();
  if (together == 0) {
    return own;
  }
  double sum = 0;
  for (const auto& [id, other] : paths_) {
    if (other.link == p.link && (&other == &p || takesChunks(id))) {
      sum += other.ownBytesPerS();
    }
  }
  return sum > together ? own * together / sum : own;
}

double Channel::linkBytesPerS(PathId path) const {
  const PathState& p = state(path);
  return p.link == nullptr ? 0 : p.link->statistics.capacityBytesPerS();
}

const LinkStatistics::Burst& Channel::lastBurst(PathId path) const {
  const PathState& p = state(path);
  return (p.link == nullptr ? p.statistics : p.link->statistics).lastBurst();
}

Channel::OwnPaths Channel::ownPaths(std::optional<uint64_t> burstBytes) const {
  OwnPaths own;
  double sum = 0;
  int count = 0;
  bool relayed = false;
  for (const auto& [id, p] : paths_) {
    const bool takes = takesChunks(id);
    if (p.overRelay) {
      relayed = relayed || takes;
      continue;
    }
    if (const double s = p.statistics.minRoundTripS() / 2; s > 0) {
      own.oneWayS = std::min(own.oneWayS, s);
    }
    const bool suits = !burstBytes || p.bursts.contains(*burstBytes);
    if (uplinkBytesPerS_ != 0 && takes && suits) {
      sum += shareBytesPerS(p);
      ++count;
    }
  }
  if (relayed && sum < uplinkBytesPerS_ && count > 0) {
    own.gain = sum > 0 ? uplinkBytesPerS_ / sum : 0;
    own.moreBytesPerS = sum > 0 ? 0 : uplinkBytesPerS_ / count;
  }
  return own;
}

// Passes over those that have been handed out whole: they are still queued.
const Channel::OutMessage* Channel::waiting(size_t queue) const {
  for (const uint64_t number : ready_[queue]) {
    if (const OutMessage& m = *out_.at(number); m.hasUnsent()) {
      return &m;
    }
  }
  return nullptr;
}

std::optional<Urgency> Channel::mostUrgent(int32_t self) const {
  std::optional<Urgency> first;
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    const OutMessage* const m = waiting(queue);
    if (m == nullptr) {
      continue;
    }
    const FrameHeader& h = m->header;
    Urgency urgency{h.trafficClass};
    if (h.trafficClass <= TrafficClass::kActivationGradient) {
      urgency.position = h.order;
      urgency.source = isForOthers(queue) ? h.sourceRank : self;
    }
    first = first ? std::min(*first, urgency) : urgency;
  }
  return first;
}

bool Channel::backloggedActivations(bool forOthers) const {
  return waiting(queueOf(TrafficClass::kActivation, forOthers)) != nullptr ||
      waiting(queueOf(TrafficClass::kActivationGradient, forOthers)) != nullptr;
}

const std::deque<OutFrame>& Channel::unwritten(PathId path) const {
  return state(path).unwritten;
}

// An urgent acknowledgement, a ping or a pong leaves over any path. Chunks and
// control frames need one that is not suspect and not on probation; whether a
// chunk is worth taking here is only known in pull().
bool Channel::hasFrames(PathId path) const {
  const PathState& p = state(path);
  if (controlFor(path) != control_.end() || grantsUrgent_ || p.ackUrgent ||
      p.pingDue || p.pongDue) {
    return true;
  }
  if (p.suspect || p.onProbation) {
    return false;
  }
  return std::any_of(
      ready_.begin(), ready_.end(), [](const auto& q) { return !q.empty(); });
}

void Channel::setSelfAcknowledging(PathId path, bool ordered) {
  PathState& p = state(path);
  p.selfAcknowledging = true;
  p.ordered = ordered;
  p.window = kOpenWindowBytes; // nothing that it has is in danger
}

void Channel::setOverRelay(PathId path) {
  state(path).overRelay = true;
}

void Channel::setSharedLink(PathId path, size_t link) {
  state(path).link = &links_[link];
}

void Channel::setCapacity(PathId path, double bytesPerS) {
  state(path).knownBytesPerS = bytesPerS;
}

void Channel::setPace(PathId path, double bytesPerS) {
  state(path).paceBytesPerS = bytesPerS;
}

void Channel::expectCapacity(PathId path, double bytesPerS) {
  state(path).statistics.expectCapacity(bytesPerS);
}

double Channel::capacityBytesPerS(PathId path) const {
  const PathState& p = state(path);
  return p.suspect ? p.capacityBefore : p.statistics.capacityBytesPerS();
}

// Paper: SHIFT §4.3.3. A path that has come back must show that it works.
void Channel::putOnProbation(PathId path) {
  PathState& p = state(path);
  p.onProbation = true;
  p.pingsAnswered = 0;
  ping(path);
}

bool Channel::onProbation(PathId path) const {
  return state(path).onProbation;
}

uint32_t Channel::pingsAnswered(PathId path) const {
  return state(path).pingsAnswered;
}

void Channel::trust(PathId path) {
  state(path).onProbation = false;
  ready();
}

void Channel::ping(PathId path) {
  state(path).pingDue = true;
  ready();
}

// Frames that are urgent already set no deadline: they leave with the next
// pull().
TimePoint Channel::deadline() const {
  TimePoint due = grantsUrgent_ ? kNever : grantsDue_;
  due = std::min({due, stageCheckAt_, askAgainAt_, staging_.deadline()});
  for (const auto& [id, p] : paths_) {
    if (!p.ackUrgent) {
      due = std::min(due, p.ackDue);
    }
  }
  return due;
}

// Makes no frame itself. It marks acknowledgements and grants as urgent, copies
// lent buffers, and lets the owner pump: a frame exists only once a path pulls
// it.
void Channel::onTimer(TimePoint now) {
  lastNow_ = now;
  bool wake = false;
  if (grantsDue_ <= now) {
    grantsUrgent_ = true;
    wake = true;
  }
  for (auto& [id, p] : paths_) {
    if (p.ackDue <= now) {
      p.ackUrgent = true;
      wake = true;
    }
  }
  if (stageCheckAt_ <= now) {
    stageLent(now);
  }
  if (staging_.deadline() <= now) {
    staging_.onTimer(now);
  }
  if (askAgainAt_ <= now) {
    askAgainAt_ = kNever;
    wake = true;
  }
  if (wake) {
    ready();
  }
}

// The relation is over: fails all sends, drops all frames, and gives up
// incoming messages that are not whole. Whole messages stay for receives to
// come. Acknowledgements that still arrive must not refer to frames that were
// dropped, hence the counters at the end of the loop over the paths.
void Channel::fail(const Status& status) {
  if (!failure_.ok()) {
    return;
  }
  failure_ = status;
  for (auto& [number, m] : out_) {
    if (m->op != nullptr) {
      m->op->message = 0;
      completions_.push(m->op, status);
      m->op = nullptr;
    }
    release(*m);
  }
  out_.clear();
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    ready_[queue].clear();
    blocked_[queue].clear();
  }
  control_.clear();
  lent_.clear();
  stageCheckAt_ = kNever;
  askAgainAt_ = kNever;
  chargedBytes_ = 0;
  offers_ = 0;
  unacknowledged_ = 0;
  unacknowledgedBytes_ = 0;
  refusals_.clear();
  grants_.clear();
  grantsDue_ = kNever;
  grantsUrgent_ = false;
  for (auto& [id, p] : paths_) {
    p.unwritten.clear();
    p.inFlight.clear();
    p.inFlightBytes = 0;
    // Acknowledgements still to come are of frames that are forgotten.
    p.acknowledged = p.written = p.handedOut;
  }
  // Whole messages may still be received; the rest never will.
  std::vector<InMessage*> lost;
  for (auto& [number, m] : in_) {
    if (!m->whole()) {
      lost.push_back(m.get());
    }
  }
  for (InMessage* m : lost) {
    mailbox_.onLost(*m, status);
    forget(*m);
  }
  mailbox_.failSource(*this, status);
}

bool Channel::drained() const {
  return unacknowledged_ == 0 && control_.empty() && controlInFlight() == 0;
}

bool Channel::drained(uint64_t group) const {
  return std::none_of(out_.begin(), out_.end(), [group](const auto& entry) {
    const OutMessage& m = *entry.second;
    return m.header.group == group && !m.abandoned && m.acknowledged < m.chunks;
  });
}

size_t Channel::controlInFlight() const {
  size_t n = 0;
  for (const auto& [id, p] : paths_) {
    for (const InFlight& f : p.inFlight) {
      n += f.control != nullptr && !f.superseded;
    }
  }
  return n;
}

const PathCounters& Channel::pathCounters(PathId path) const {
  return state(path).counters;
}

const LinkStatistics& Channel::pathStatistics(PathId path) const {
  return state(path).statistics;
}

uint64_t Channel::inFlightBytes(PathId path) const {
  return state(path).inFlightBytes;
}

TimePoint Channel::answeredUpTo(PathId path) const {
  return state(path).answeredUpTo;
}

TimePoint Channel::waitingSince(PathId path) const {
  const PathState& p = state(path);
  return p.inFlight.empty() ? kNever : p.progressAt;
}

} // namespace resilient
