#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "channel/channel.h"
#include "channel/channel_state.h"
#include "wire/control.h"

namespace resilient {

namespace {

// A message that the far end can read from where it lies is not copied before
// this time: to copy it costs more than to send it, on the fast networks where
// that is possible.
constexpr Nanos kReadWithin = std::chrono::seconds(1);

} // namespace

// Numbers the message, fixes the size of its chunks for good, and queues it by
// traffic class. The chunks themselves are cut in pullChunk(), when a path
// asks. The owner's buffer is lent until all chunks are acknowledged, unless
// the message is copied: a small one at once, a larger one later (lent_, see
// stageLent()).
void Channel::send(SendOp* op, TimePoint now) {
  lastNow_ = now;
  if (!failure_.ok()) {
    completions_.push(op, failure_);
    return;
  }
  if (op->bytes > kMaxMessageBytes) {
    completions_.push(
        op,
        Status(
            StatusCode::kInvalidArgument,
            "a message of " + std::to_string(op->bytes) +
                " bytes; the most is " + std::to_string(kMaxMessageBytes)));
    return;
  }
  auto owned = std::make_unique<OutMessage>();
  OutMessage& m = *owned;
  m.op = op;
  m.pointToPoint = op->pointToPoint;
  m.awaitsReceive = op->awaitReceive && op->bytes != 0;
  m.postedAt = postedAt_ = now;
  FrameHeader& h = m.header;
  h.type = FrameType::kData;
  h.trafficClass = op->trafficClass;
  h.message = ++lastMessage_;
  h.totalBytes = op->bytes;
  unacknowledgedBytes_ += op->bytes;
  m.burstBytes = std::max(unacknowledgedBytes_, op->burstBytes);
  h.chunkBytes = chunkBytesFor(op->bytes, m.burstBytes);
  // A message that is hardly larger is one chunk, such as the chunk of another
  // channel with its headers, at a relay: a second chunk costs as much as the
  // first, whatever its size, and may be on a slower path.
  if (op->bytes <= h.chunkBytes + h.chunkBytes / 4) {
    h.chunkBytes = std::min(
        std::max(h.chunkBytes, static_cast<uint32_t>(op->bytes)),
        kMaxChunkBytes);
  }
  // Chunks grow with messages too large for the header's limit of chunks.
  while (h.totalBytes / h.chunkBytes >= kMaxChunksPerMessage) {
    h.chunkBytes *= 2;
  }
  h.group = op->key.group;
  h.stream = op->key.stream;
  h.order = op->pointToPoint ? nextOrder_[{op->key.group, op->key.stream}]++
                             : op->key.order;
  h.signature = op->signature;
  h.sourceRank = op->sourceRank;
  m.chunks = h.totalBytes == 0
      ? 1
      : static_cast<uint32_t>((h.totalBytes + h.chunkBytes - 1) / h.chunkBytes);
  m.data = op->data;
  m.available = std::min(op->availableBytes, op->bytes);
  op->message = h.message;
  ++unacknowledged_;
  out_.emplace(h.message, std::move(owned));
  if (!op->failure.ok()) {
    cancelSend(op, op->failure.message(), now);
    completions_.push(op, op->failure);
    return;
  }
  if (!op->tolerance.exact()) {
    m.tolerant = true;
    h.flags |= kFlagTolerant;
  }
  const bool small = op->bytes <= config_.copyBytes;
  if (m.tolerant || op->neverCopied) {
    // Its owner waits for more than the buffer, or does not need it.
  } else if (
      (!small || !stage(m)) &&
      (op->pointToPoint || (patience() && !anyInMemory()))) {
    m.lent = true;
    lent_.push_back(h.message);
    stageInterval_ = config_.stageAfter;
    stageCheckAt_ = std::min(stageCheckAt_, now + stageInterval_);
  }
  enqueue(m, /*front=*/false);
  ready();
}

void Channel::sourceGrew(SendOp* op, uint64_t availableBytes, TimePoint now) {
  lastNow_ = now;
  op->availableBytes = availableBytes;
  postedAt_ = now;
  const auto found = out_.find(op->message);
  if (op->message == 0 || found == out_.end() || found->second->op != op) {
    return;
  }
  OutMessage& m = *found->second;
  m.available = std::min(availableBytes, op->bytes);
  if (m.hasUnsent() && !m.queued) {
    enqueue(m, /*front=*/true);
    ready();
  }
}

// Copies what is not acknowledged of the message; its owner gets the buffer
// back. False if that is too large, over the budget, not there yet, or if the
// message has ended already; then nothing has changed.
bool Channel::stage(OutMessage& m) {
  return beginCopy(m) && continueCopy(m, UINT64_MAX);
}

bool Channel::beginCopy(OutMessage& m) {
  if (m.op == nullptr || !m.availableWhole() ||
      (m.referred && !RESILIENT_PLANTED(copyReferred))) {
    return false;
  }
  if (m.copy) {
    return true;
  }
  const uint64_t from = firstNeeded(m);
  const uint64_t bytes = m.header.totalBytes - from;
  if (bytes > kMaxStagedBytes) {
    return false;
  }
  // A message that does not fit is not copied: its owner then waits for the
  // acknowledgement.
  m.copy = staging_.take(bytes);
  m.copyFrom = from;
  m.copiedBytes = 0;
  return bool(m.copy);
}

// True once the message sends from its copy. Frames that have not been written
// follow it there.
bool Channel::continueCopy(OutMessage& m, uint64_t maxBytes) {
  const uint64_t rest = m.header.totalBytes - m.copyFrom - m.copiedBytes;
  const uint64_t bytes = std::min(rest, maxBytes);
  if (bytes != 0) {
    std::memcpy(
        m.copy.data.get() + m.copiedBytes,
        m.at(m.copyFrom + m.copiedBytes),
        bytes);
    m.copiedBytes += bytes;
  }
  if (bytes < rest) {
    return false;
  }
  for (auto& [id, p] : paths_) {
    for (OutFrame& f : p.unwritten) {
      if (f.message == m.number() && f.payloadBytes != 0 && !f.owned) {
        f.payload = m.copy.data.get() + (f.offset - m.copyFrom);
      }
    }
  }
  m.data = m.copy.data.get();
  m.dataFrom = m.copyFrom;
  finishSend(m, Status());
  return true;
}

// The first byte that may have to be sent, or sent again. Chunks before it are
// acknowledged.
uint64_t Channel::firstNeeded(const OutMessage& m) const {
  if (m.nextChunk == 0 || m.chunks == 1) {
    return 0;
  }
  uint32_t first = m.nextChunk;
  for (const uint32_t chunk : m.retransmits) {
    first = std::min(first, chunk);
  }
  if (m.inFlight != 0) {
    for (const auto& [id, p] : paths_) {
      for (const InFlight& f : p.inFlight) {
        if (f.message == m.number() && !f.control) {
          first = std::min(first, f.chunk); // an offer's number is no less
        }
      }
    }
  }
  const uint64_t bytes = uint64_t(first) * m.header.chunkBytes;
  return RESILIENT_PLANTED(copyTooLittle)
      ? std::min(bytes + m.header.chunkBytes, m.header.totalBytes)
      : std::min(bytes, m.header.totalBytes);
}

// A point-to-point message of one chunk is copied once it has been written: the
// far end reads it meanwhile (kCopyWrittenBytes). If the budget has no room for
// it, a ping makes the peer acknowledge: every frame carries an
// acknowledgement, and so does the pong.
void Channel::popWritten(PathId path) {
  PathState& p = state(path);
  const OutFrame& f = p.unwritten.front();
  const uint64_t number = f.payloadBytes == 0 ? 0 : f.message;
  p.written += f.reliable;
  p.unwritten.pop_front();
  if (const auto found = out_.find(number); found != out_.end() &&
      found->second->copiedWhenWritten(p.selfAcknowledging) &&
      !stage(*found->second)) {
    ping(path); // no memory for a copy: the answer acknowledges
  }
}

void Channel::popReferred(PathId path) {
  PathState& p = state(path);
  const OutFrame& f = p.unwritten.front();
  if (const auto found = out_.find(f.message); found != out_.end()) {
    found->second->referred = true;
  }
  p.written += f.reliable;
  p.unwritten.pop_front();
}

// A frame that is half written must end with the bytes it began with, whatever
// becomes of the message's buffer: an abandoned chunk may be the one that
// makes the message whole at the receiver.
void Channel::detachFrames(OutMessage& m) {
  if (RESILIENT_PLANTED(noDetach)) {
    return;
  }
  for (auto& [id, p] : paths_) {
    for (OutFrame& f : p.unwritten) {
      if (f.message == m.number() && f.payloadBytes != 0 && !f.owned) {
        f.owned = std::make_unique_for_overwrite<std::byte[]>(f.payloadBytes);
        std::memcpy(f.owned.get(), f.payload, f.payloadBytes);
        f.payload = f.owned.get();
      }
    }
  }
}

void Channel::release(OutMessage& m) {
  if (m.copy) {
    staging_.giveBack(std::exchange(m.copy, {}), lastNow_);
  }
  m.data = nullptr;
}

void Channel::finishSend(OutMessage& m, const Status& status) {
  if (m.op != nullptr) {
    m.op->message = 0;
    completions_.push(m.op, status);
    m.op = nullptr;
  }
}

// How long a message that has been handed out whole waits for its
// acknowledgement before it is copied; nothing if it always waits. On a short
// link the acknowledgement is only late because both ends are busy, and a copy
// would make them busier. A link that has not been measured gets a little
// longer to show that it is short.
std::optional<Nanos> Channel::patience() const {
  double min = 0;
  for (const auto& [id, p] : paths_) {
    const double s = p.statistics.minRoundTripS();
    min = min == 0 ? s : std::min(min, s == 0 ? min : s);
  }
  if (min == 0) {
    return 5 * config_.stageAfter;
  }
  if (fromSeconds(min) >= config_.stageAfter) {
    return config_.stageAfter;
  }
  return std::nullopt;
}

bool Channel::anyInMemory() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const auto& each) {
    return each.second.inMemory();
  });
}

// Paper: PIPEMORPH §5.2. On a slow link a send must not hold the trainer's
// buffer until the far end has it: a message that only waits for its
// acknowledgement is copied, and so is a point-to-point message that has waited
// long for its turn. A collective would wait half a round trip for what it does
// not need to know.
void Channel::stageLent(TimePoint now) {
  bool staged = false;
  bool copying = false;
  const std::optional<Nanos> wait = patience();
  std::deque<uint64_t> keep;
  for (uint64_t number : lent_) {
    auto found = out_.find(number);
    if (found == out_.end() || found->second->op == nullptr) {
      continue;
    }
    OutMessage& m = *found->second;
    if (!m.pointToPoint && !wait) {
      m.lent = false; // the link has proved to be short
      continue;
    }
    // The time that a fast link needs: it finishes before a copy would.
    const Nanos fair = 10 * config_.stageAfter +
        Nanos(static_cast<int64_t>(2 * m.header.totalBytes));
    const bool waitsForAck =
        wait && m.allHandedOut() && now - m.pulledAt >= *wait;
    const bool waitsForTurn = m.pointToPoint && now - m.postedAt >= fair;
    const bool mayBeRead = m.awaitsReceive && now - m.postedAt < kReadWithin;
    // One piece a turn: the loop has other things to do.
    if (!copying && (waitsForAck || waitsForTurn) && !mayBeRead &&
        beginCopy(m)) {
      if (continueCopy(m, config_.copyPieceBytes)) {
        staged = true;
        continue;
      }
      copying = true;
    }
    keep.push_back(number);
  }
  lent_ = std::move(keep);
  // Nothing to do for now: look less often.
  stageInterval_ = staged
      ? config_.stageAfter
      : std::min<Nanos>(stageInterval_ * 2, std::chrono::milliseconds(50));
  // Never at once again: what could be copied has been.
  stageInterval_ =
      std::max<Nanos>(stageInterval_, std::chrono::milliseconds(1));
  stageCheckAt_ = lent_.empty() ? kNever : now + stageInterval_;
  if (copying) {
    stageCheckAt_ = now;
  }
}

void Channel::cancelSend(SendOp* op, const std::string& reason, TimePoint now) {
  lastNow_ = now;
  completions_.remove(op);
  auto found = out_.find(op->message);
  if (op->message == 0 || found == out_.end() || found->second->op != op) {
    return;
  }
  OutMessage& m = *found->second;
  detachFrames(m);
  m.op = nullptr;
  op->message = 0;
  abandon(m);
  m.cancelPending = true;
  queueControl(
      FrameType::kCancel, m.header, encodeReason(StatusCode::kAborted, reason));
  ready();
}

// The caller has detached the frames that are not written yet: release() frees
// a copy that they may point to.
void Channel::abandon(OutMessage& m) {
  if (!m.abandoned) {
    m.abandoned = true;
    // A tolerant one waits for more than its acknowledgements.
    if (m.acknowledged < m.chunks) {
      --unacknowledged_;
      unacknowledgedBytes_ -= m.header.totalBytes;
    }
    m.retransmits.clear();
    clearOffer(m);
    release(m);
    unblock(); // it may be among those that wait for credit
  }
}

void Channel::clearOffer(OutMessage& m) {
  if (m.offered) {
    m.offered = false;
    --offers_;
  }
}

// Erases the record once nothing refers to it: no frame on a path, no queue. An
// abandoned message also waits for the acknowledgement of its kCancel, which
// says that the peer has freed what it held, so the credit is ours again. Any
// other waits for all acknowledgements, for the grant, which returns the
// credit, and for the end of its send. `m` may be gone at return.
void Channel::eraseIfDone(OutMessage& m) {
  if (m.inFlight != 0 || m.queued) {
    return;
  }
  const bool over = m.abandoned
      ? !m.cancelPending
      : m.acknowledged == m.chunks && m.granted && m.op == nullptr;
  if (over) {
    chargedBytes_ -= m.charged;
    m.charged = 0;
    release(m);
    out_.erase(m.number());
    unblock();
  }
}

void Channel::enqueue(OutMessage& m, bool front) {
  if (m.queued) {
    return;
  }
  m.queued = true;
  auto& queue = ready_[m.queue()];
  if (front) {
    queue.push_front(m.number());
  } else {
    queue.push_back(m.number());
  }
}

// Credit has come back: those who waited for it go first, in their order.
void Channel::unblock() {
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    auto& ready = ready_[queue];
    auto& blocked = blocked_[queue];
    if (!blocked.empty()) {
      ready.insert(ready.begin(), blocked.begin(), blocked.end());
      blocked.clear();
    }
  }
}

// Charges a chunk that is sent for the first time. Both ends count alike, so
// the receiver's own check in onData() never fails for a correct sender.
bool Channel::takeCredit(OutMessage& m, uint64_t bytes) {
  if (m.granted || RESILIENT_PLANTED(ignoreCredit)) {
    return true;
  }
  const uint64_t need = bytes + kChunkOverheadBytes;
  if (m.awaitsReceive || chargedBytes_ + need > config_.peerEagerBytes) {
    return false;
  }
  chargedBytes_ += need;
  m.charged += need;
  return true;
}

// Smaller pieces where a path is slow: see kChunkTime. The slowest path that
// carries data decides, since any chunk may fall to it. Shared memory is left
// out: it is never the slow one. The size is a power of two times
// kMinSplitBytes.
uint32_t Channel::chunkBytesFor(uint64_t messageBytes, uint64_t burstBytes)
    const {
  const uint32_t max = pacedChunkBytes_ == 0
      ? config_.chunkBytes
      : std::min(config_.chunkBytes, pacedChunkBytes_);
  if (messageBytes <= std::min(max, kMinSplitBytes)) {
    return max;
  }
  double fits = 0;
  const OwnPaths own = ownPaths(burstBytes);
  for (const auto& [id, p] : paths_) {
    const PathLoad load = loadOf(p, own, {});
    const double rate =
        p.knownBytesPerS > 0 ? p.knownBytesPerS : load.bytesPerS;
    if (rate > 0 && !p.suspect && p.classes != 0 && !p.inMemory() &&
        p.bursts.contains(burstBytes)) {
      const double relayedS = std::clamp(
          kRelayedChunkPart * 2 * load.oneWayS,
          toSeconds(kRelayedChunkTime),
          toSeconds(kChunkTime));
      const double bytes =
          rate * (p.overRelay ? relayedS : toSeconds(kChunkTime));
      fits = fits == 0 ? bytes : std::min(fits, bytes);
    }
  }
  if (fits == 0) {
    return std::min(max, config_.firstChunkBytes);
  }
  if (fits >= max) {
    return max;
  }
  uint32_t bytes = kMinSplitBytes;
  while (2.0 * bytes <= fits) {
    bytes *= 2;
  }
  return std::min(bytes, max);
}

// A path waits for its turn at an uplink that has a limit, and its own rate is
// then only that of its share. Its chunks go at the rate of the uplink. Chunks
// over a relay may always wait there behind others. The relay is of our site,
// so its way is as long as ours.
PathLoad Channel::loadOf(const PathState& p, const OwnPaths& own, TimePoint now)
    const {
  PathLoad l;
  l.bytesPerS = shareBytesPerS(p);
  if (p.overRelay && p.knownBytesPerS > 0) {
    l.bytesPerS = p.knownBytesPerS;
  } else if (!p.overRelay) {
    l.bytesPerS = own.gain * l.bytesPerS + own.moreBytesPerS;
  }
  l.oneWayS = p.statistics.minRoundTripS() / 2;
  if (p.overRelay) {
    l.oneWayS = std::min(l.oneWayS, own.oneWayS);
  }
  l.inFlightBytes = p.inFlightBytes;
  if (!p.inFlight.empty() && !p.overRelay) {
    l.silentS = toSeconds(now - p.progressAt);
  }
  return l;
}

// A chunk of a message's tail that another path is late with, for one that has
// nothing to send. Null if there is none. The copy on the other path becomes a
// superseded: the first acknowledgement of either counts.
//
// How it works. For each other path it goes through the oldest frames in
// flight, adding up the bytes ahead, to the first chunk that counts: of a
// message that has been handed out whole, not acknowledged, of a class that `p`
// carries. Only that one is judged, since everything behind it is later still;
// if it is not worth a copy yet, askAgainAt_ is set to the time when it may be.
// A message with chunks left to hand out is skipped: only a tail is worth a
// copy.
Channel::OutMessage*
Channel::hedge(PathState& p, TimePoint now, uint32_t& chunk) {
  // Further back, it is not the tail.
  constexpr size_t kMaxLooks = 64;
  if (paths_.size() == 1 || pacedChunkBytes_ != 0 || !p.inFlight.empty()) {
    return nullptr;
  }
  const OwnPaths own = ownPaths();
  for (auto& [id, holder] : paths_) {
    if (&holder == &p || holder.suspect || holder.selfAcknowledging) {
      continue; // has been taken back; is never late
    }
    const Hedge hedge(loadOf(p, own, now), loadOf(holder, own, now));
    uint64_t ahead = 0;
    const size_t looks = std::min(kMaxLooks, holder.inFlight.size());
    for (size_t i = 0; i < looks; ++i) {
      InFlight& f = holder.inFlight[i];
      ahead += f.bytes;
      const auto found = out_.find(f.message);
      if (f.control || f.superseded || f.chunk == kOfferChunk ||
          found == out_.end()) {
        continue;
      }
      OutMessage& m = *found->second;
      if (m.abandoned || !m.allHandedOut() ||
          m.acknowledgedChunks.contains(f.chunk) || !p.carries(m.queue())) {
        continue;
      }
      if (hedge.worthIt(ahead, f.bytes)) {
        trackChunks(m);
        f.superseded = true;
        chunk = f.chunk;
        return &m;
      }
      if (p.statistics.capacityBytesPerS() > 0) {
        askAgainAt_ = std::min(
            askAgainAt_,
            std::max(
                now + kAskAgain,
                holder.progressAt + fromSeconds(hedge.nextLookS(f.bytes))));
      }
      break; // those behind it are asked about with it
    }
  }
  return nullptr;
}

// A message goes over the kind of path that suits its burst, or over any path
// if no such path is good.
bool Channel::suits(const PathState& p, const OutMessage& m) const {
  return p.bursts.contains(m.burstBytes) ||
      (std::none_of(
           paths_.begin(),
           paths_.end(),
           [&](const auto& other) {
             return other.second.isGood(m.queue()) &&
                 other.second.bursts.contains(m.burstBytes);
           }) &&
       !RESILIENT_PLANTED(keepToKindOfPath));
}

// The first message of the queue with a chunk that would arrive in time on this
// path: before the other paths have sent everything in front of it. A slow path
// thus works on messages that are needed later. Null: the path waits, unless
// `noneSuits`: all messages looked at are for other paths.
//
// How it works. The queue is searched for the first message that suits this
// path. ArrivalOrder compares the path with the others that may carry it. The
// message is taken if its next chunk arrives in time. Otherwise the search goes
// on for one with more in front of it, up to kLookAhead. A message behind the
// front must have its credit, so nextSendable() finds only the front without
// it. A path that has idled for kExploreAfter gets a chunk without proof if
// enough waits.
Channel::OutMessage* Channel::worthTaking(
    const PathState& p,
    size_t queue,
    TimePoint now,
    bool& noneSuits) {
  // Beyond these, every path has enough to do.
  constexpr size_t kLookAhead = 16;
  noneSuits = false;
  OutMessage* first = out_.at(ready_[queue].front()).get();
  if (paths_.size() == 1) {
    return first;
  }
  const size_t max =
      pacedChunkBytes_ != 0 ? 1 : std::min(kLookAhead, ready_[queue].size());
  size_t i = 0;
  for (; i < max; ++i) {
    OutMessage& m = *out_.at(ready_[queue][i]);
    if (suits(p, m) && (i == 0 || mayFollow(m))) {
      first = &m;
      break;
    }
  }
  if (i == max) {
    noneSuits = true;
    return nullptr;
  }
  const OwnPaths own = ownPaths(first->burstBytes);
  ArrivalOrder order(
      loadOf(p, own, now),
      std::min<uint64_t>(first->header.chunkBytes, first->unsentBytes()));
  for (const auto& [id, other] : paths_) {
    if (&other != &p && other.isGood(queue) && suits(other, *first)) {
      order.addOther(loadOf(other, own, now));
    }
  }
  uint64_t backlog = first->unsentBytes();
  if (order.mayTake(backlog)) {
    return first;
  }
  for (++i; i < max; ++i) {
    OutMessage& m = *out_.at(ready_[queue][i]);
    if (!suits(p, m)) {
      continue;
    }
    backlog += m.unsentBytes();
    if (mayFollow(m) && order.inTime(backlog)) {
      return &m;
    }
  }
  const bool forgotten = p.inFlight.empty() && now - p.chunkAt >= kExploreAfter;
  return forgotten && backlog >= kWorthExploring ? first : nullptr;
}

// Whether it can be sent although it is not at the front of its queue.
bool Channel::mayFollow(const OutMessage& m) const {
  return m.hasUnsent() &&
      (m.granted ||
       (!m.awaitsReceive &&
        chargedBytes_ + m.header.chunkBytes + kChunkOverheadBytes <=
            config_.peerEagerBytes));
}

// The next chunk for this path (`repeated`: another path lost it), or
// kOfferChunk to announce the message; null if there is nothing that the path
// should send now.
//
// Each turn of the loop returns, removes a message from a queue or leaves a
// queue out, so it ends. A message without credit moves to blocked_, and later
// ones overtake it. An offer has no payload, so the scheduler does not count
// it.
Channel::OutMessage* Channel::nextSendable(
    PathState& p,
    TimePoint now,
    uint32_t& chunk,
    bool& repeated) {
  repeated = false;
  QueueSet unsuited = 0; // queues with nothing for this path
  for (;;) {
    QueueSet waiting = 0;
    for (size_t queue = 0; queue < kQueueCount; ++queue) {
      if (!ready_[queue].empty() && p.carries(queue)) {
        waiting |= QueueSet{1} << queue;
      }
    }
    const size_t queue = scheduler_.pick(waiting & ~unsuited);
    if (queue == kQueueCount) {
      return nullptr;
    }
    auto found = out_.find(ready_[queue].front());
    assert(found != out_.end());
    if (OutMessage& front = *found->second; !front.hasUnsent()) {
      ready_[queue].pop_front();
      front.queued = false;
      eraseIfDone(front);
      continue;
    }
    bool noneSuits = false;
    OutMessage* const chosen = worthTaking(p, queue, now, noneSuits);
    if (noneSuits) {
      unsuited |= QueueSet{1} << queue;
      continue;
    }
    if (chosen == nullptr) {
      askAgainAt_ = std::min(askAgainAt_, now + kAskAgain);
      return nullptr;
    }
    OutMessage& m = *chosen;
    if (!m.retransmits.empty()) {
      chunk = m.retransmits.back(); // was charged when it was sent first
      m.retransmits.pop_back();
      repeated = true;
      scheduler_.served(queue, m.chunkPayload(chunk), waiting);
      return &m;
    }
    if (takeCredit(m, m.chunkPayload(m.nextChunk))) {
      chunk = m.nextChunk++;
      scheduler_.served(queue, m.chunkPayload(chunk), waiting);
      if (m.nextChunk == m.chunks && m.op != nullptr) {
        m.op->handedOut();
      }
      return &m;
    }
    ready_[queue].pop_front();
    blocked_[queue].push_back(m.number());
    // Any chunk announces the message; without one it takes an offer.
    if (m.nextChunk == 0 && !m.offered && offers_ < kMaxOffers) {
      m.offered = true;
      ++offers_;
      chunk = kOfferChunk;
      return &m;
    }
  }
}

// Every frame acknowledges, so none is due any more.
OutFrame& Channel::appendFrame(PathState& p, FrameHeader& header) {
  header.ack = p.received;
  p.ackedBack = p.received;
  p.bytesSinceAck = 0;
  p.ackDue = kNever;
  p.ackUrgent = false;
  OutFrame& f = p.unwritten.emplace_back();
  f.reliable = isReliable(header.type);
  f.ackNow = f.reliable && (header.flags & kFlagAckNow) != 0;
  encodeFrame(header, f.header);
  return f;
}

// Order of urgency: control frames, chunks, then frames that are not
// acknowledged (pongs, pings, plain acknowledgements). Every frame carries an
// acknowledgement anyway, so a plain one leaves only if nothing else does. A
// path that is suspect or on probation carries only the last kind.
const OutFrame* Channel::pull(PathId path, TimePoint now, bool chunks) {
  lastNow_ = now;
  if (!failure_.ok()) {
    return nullptr;
  }
  PathState& p = state(path);
  const bool wasIdle = p.inFlight.empty();
  const OutFrame* f = nullptr;
  if (!p.onProbation && !p.suspect) {
    // A path in reserve helps with what is small and may be urgent.
    f = pullControl(path, now);
    if (f == nullptr && chunks && p.classes != 0) {
      f = pullChunk(p, now);
    }
  }
  if (f == nullptr) {
    return pullUnreliable(p, now);
  }
  if (wasIdle) {
    p.progressAt = now;
  }
  return f;
}

// The first that may leave by this path.
std::deque<std::unique_ptr<Channel::Control>>::const_iterator
Channel::controlFor(PathId path) const {
  if (control_.empty()) {
    return control_.end();
  }
  const PathState& p = state(path);
  const bool leavesToOthers =
      (p.overRelay || p.bursts.isNone()) && anyForControl();
  return std::find_if(control_.begin(), control_.end(), [&](const auto& c) {
    if (p.overRelay && c->direct) {
      return false;
    }
    if (c->via == path) {
      return true;
    }
    if (leavesToOthers) {
      return false;
    }
    const auto via = c->via ? paths_.find(*c->via) : paths_.end();
    return via == paths_.end() || via->second.suspect ||
        via->second.onProbation;
  });
}

// Some path is neither in doubt nor on probation, goes over no relay, and may
// carry messages: the others may be slow even for what is small. A path that is
// the only one of its kind may be dead without being in doubt, so one that has
// stood still for kStandsStill does not count.
bool Channel::anyForControl() const {
  constexpr Nanos kStandsStill = std::chrono::seconds(1);
  return std::any_of(paths_.begin(), paths_.end(), [&](const auto& each) {
    const PathState& p = each.second;
    return !p.overRelay && !p.bursts.isNone() && !p.suspect && !p.onProbation &&
        (p.inFlight.empty() || lastNow_ - p.progressAt < kStandsStill);
  });
}

const OutFrame* Channel::pullControl(PathId path, TimePoint now) {
  if (grantsUrgent_) {
    flushGrants();
  }
  const auto at = control_.begin() + (controlFor(path) - control_.begin());
  if (at == control_.end()) {
    return nullptr;
  }
  std::unique_ptr<Control> c = std::move(*at);
  control_.erase(at);
  PathState& p = state(path);
  OutFrame& f = appendFrame(p, c->header);
  f.payload = c->payload.data();
  f.payloadBytes = static_cast<uint32_t>(c->payload.size());
  InFlight& flight = p.inFlight.emplace_back();
  flight.message = c->header.message;
  flight.at = now;
  flight.ackNow = (c->header.flags & kFlagAckNow) != 0;
  flight.control = std::move(c);
  ++p.handedOut;
  return &f;
}

// Hands the next chunk to a path, in four steps. A new path has a window until
// its acknowledgements have shown that it works. The scheduler picks a message
// that this path should work on; without one, the path repeats a late chunk of
// another path (hedge). The header says whether this is an offer, and whether
// the receiver is to acknowledge at once. The frame is then recorded twice: in
// `unwritten` for the transport, and in `inFlight` until its acknowledgement.
const OutFrame* Channel::pullChunk(PathState& p, TimePoint now) {
  const bool opening = p.window < kOpenWindowBytes;
  if (opening && p.inFlightBytes >= p.window) {
    return nullptr; // until an acknowledgement, which calls ready()
  }
  uint32_t chunk = 0;
  bool repeated = false;
  OutMessage* m = nextSendable(p, now, chunk, repeated);
  if (m == nullptr) {
    m = hedge(p, now, chunk);
    repeated = true;
  }
  if (m == nullptr) {
    return nullptr;
  }
  FrameHeader h = m->header;
  const bool offer = chunk == kOfferChunk;
  if (offer) {
    h.flags |= kFlagOffer;
  } else {
    h.offset = uint64_t(chunk) * h.chunkBytes;
    h.payloadBytes = m->chunkPayload(chunk);
    // Ask for an acknowledgement at once if the owner waits for its buffer, or
    // we for the window; to measure what a large message takes; and if the
    // round trip has not been measured lately.
    const bool awaited =
        m->op != nullptr && !m->copiedWhenWritten(p.selfAcknowledging);
    const bool large = m->pointToPoint && h.totalBytes > kCopyWrittenBytes;
    if ((opening && p.inFlightBytes + h.payloadBytes >= p.window) ||
        (m->allHandedOut() && (awaited || large)) ||
        now - p.ackAskedAt >= kMeasureEvery) {
      h.flags |= kFlagAckNow;
      p.ackAskedAt = now;
    }
  }
  OutFrame& f = appendFrame(p, h);
  f.message = m->number();
  f.offset = h.offset;
  f.order = h.order;
  f.burstBytes = m->burstBytes;
  f.payloadBytes = h.payloadBytes;
  f.trafficClass = h.trafficClass;
  f.dtype = h.signature.dtype;
  if (m->tolerant && m->op != nullptr) {
    f.tolerance = m->op->tolerance;
  }
  f.payload = h.payloadBytes == 0 ? nullptr : m->at(h.offset);
  f.mayRefer = m->granted && m->op != nullptr &&
      !m->copiedWhenWritten(p.selfAcknowledging);
  InFlight& flight = p.inFlight.emplace_back();
  flight.message = m->number();
  flight.chunk = chunk;
  flight.bytes = h.payloadBytes;
  flight.ackNow = (h.flags & kFlagAckNow) != 0;
  flight.at = now;
  ++p.handedOut;
  ++m->inFlight;
  m->pulledAt = now;
  if (m->lent && m->allHandedOut()) {
    if (const auto wait = patience()) {
      stageCheckAt_ = std::min(stageCheckAt_, now + *wait);
    }
  }
  p.chunkAt = now;
  p.busySince = p.inFlightBytes == 0 ? now : p.busySince;
  p.inFlightBytes += h.payloadBytes;
  if (SharedLink* const link = p.link) {
    link->busySince = link->inFlightBytes == 0 ? now : link->busySince;
    link->inFlightBytes += h.payloadBytes;
  }
  p.counters.bytesSent += h.payloadBytes;
  p.counters.chunksSent += !offer;
  p.counters.chunksRetransmitted += repeated;
  return &f;
}

// One frame for each call. The pong goes first: the peer measures a round trip
// with it, and every frame before it would add to that.
const OutFrame* Channel::pullUnreliable(PathState& p, TimePoint now) {
  FrameHeader h;
  if (p.pongDue) {
    p.pongDue = false;
    h.type = FrameType::kPong;
    h.message = p.pongStamp;
  } else if (p.pingDue) {
    p.pingDue = false;
    h.type = FrameType::kPing;
    h.message = static_cast<uint64_t>(now.time_since_epoch().count());
    p.pingSent = p.lastPing = now;
  } else if (p.ackUrgent) {
    h.type = FrameType::kAck;
  } else {
    return nullptr;
  }
  return &appendFrame(p, h);
}

// Paper: SHIFT §3.2, C#2. Every frame tells how many the far end has had on
// this path. So each end knows all along what to send again, where the paper
// needs a handshake after the failure.
//
// How it works. The count covers the oldest frames in flight. Each is removed
// and handled by its kind: a control frame is done; an offer only leaves the
// path; a chunk counts for its message. A message may be erased in the loop, so
// nothing is kept from one frame to the next. Statistics follow at the end,
// once for the whole acknowledgement, because they measure bytes per time.
Status Channel::onAck(PathState& p, uint64_t count, TimePoint now) {
  if (count < p.acknowledged) {
    return Status(); // an older frame's view
  }
  // Not handedOut: the payload of a frame that is still being written must
  // not be given back on a peer's word.
  if (count > p.written) {
    return Status(
        StatusCode::kProtocol,
        "acknowledgement of frame " + std::to_string(count) + " of " +
            std::to_string(p.written));
  }
  uint64_t bytes = 0;
  const bool progress = count > p.acknowledged;
  for (; p.acknowledged < count; ++p.acknowledged) {
    InFlight f = std::move(p.inFlight.front());
    p.inFlight.pop_front();
    p.answeredUpTo = std::max(p.answeredUpTo, f.at);
    // The answer to a frame that another path has sent meanwhile tells how long
    // the silence was.
    if (f.ackNow && !f.superseded) {
      p.statistics.onRoundTrip(now - f.at, now);
      if (p.link != nullptr) {
        p.link->statistics.onRoundTrip(now - f.at, now);
      }
    }
    if (f.control && f.control->header.type != FrameType::kCancel) {
      if (f.control->header.type == FrameType::kReject) {
        refusals_.erase(f.message);
      }
      continue;
    }
    auto found = out_.find(f.message);
    if (found == out_.end()) {
      continue;
    }
    OutMessage& m = *found->second;
    if (f.control) {
      m.cancelPending = false;
      eraseIfDone(m);
      continue;
    }
    --m.inFlight;
    bytes += f.bytes;
    p.inFlightBytes -= f.bytes;
    if (f.chunk != kOfferChunk && !m.abandoned) {
      const bool whole = chunkAcknowledged(m, f.chunk);
      if (whole && m.pointToPoint && f.ackNow) {
        deliveriesS_.add(toSeconds(now - m.postedAt));
      }
    }
    eraseIfDone(m);
  }
  if (progress) {
    if (p.window < kOpenWindowBytes) {
      p.window += bytes;
      ready();
    }
    p.progressAt = now;
    counters_.bytesSent += bytes;
    if (bytes != 0) {
      p.statistics.onAcknowledged(
          bytes, p.busySince, now, p.inFlightBytes, postedAt_);
      if (SharedLink* const link = p.link) {
        link->inFlightBytes -= bytes;
        link->statistics.onAcknowledged(
            bytes, link->busySince, now, link->inFlightBytes, postedAt_);
      }
    }
  }
  return Status();
}

void Channel::delivered(PathId path, uint64_t frames, TimePoint now) {
  lastNow_ = now;
  PathState& p = state(path);
  if (failure_.ok()) {
    // It is our own transport that says so: no claim of a peer to check.
    (void)onAck(p, std::min(frames, p.written), now);
  }
}

// Returns whether it was the last that was missing.
//
// Does not erase the record: the caller does, since it still needs it.
bool Channel::chunkAcknowledged(OutMessage& m, uint32_t chunk) {
  if (m.tracked && !RESILIENT_PLANTED(countRepeats)) {
    if (!m.acknowledgedChunks.insert(chunk)) {
      return false; // its other copy was faster
    }
    std::erase(m.retransmits, chunk);
  }
  if (++m.acknowledged < m.chunks) {
    return false;
  }
  if (m.tracked) {
    detachFrames(m); // copies that suspect paths have not written
  }
  // The receiver has it all. The record stays until it is granted too: until
  // then the bytes count against the receiver's budget.
  ++counters_.messagesSent;
  --unacknowledged_;
  unacknowledgedBytes_ -= m.header.totalBytes;
  if (!m.tolerant) {
    finishSend(m, Status());
  }
  release(m);
  return true;
}

// Needed before a peer's claim that it has all of it.
Status Channel::checkSentWhole(const OutMessage& m) const {
  if (m.nextChunk < m.chunks) {
    return Status(
        StatusCode::kProtocol,
        "message " + std::to_string(m.number()) +
            " is said to be whole, but has not been sent whole");
  }
  return Status();
}

// The receiver has it all, whatever has not been acknowledged: none of it may
// go again, since the owner gets its buffer back. The end of a tolerant send
// and the end of the record are left to the caller.
void Channel::wholeAcknowledged(OutMessage& m) {
  detachFrames(m);
  if (m.acknowledged < m.chunks) {
    trackChunks(m);
    for (uint32_t c = 0; c < m.chunks && m.acknowledged < m.chunks; ++c) {
      chunkAcknowledged(m, c);
    }
  }
}

// The peer leaves. Acknowledgements of what it has got may never come: they
// wait for a repetition on a path that loses packets, and the goodbye came over
// another one.
Status Channel::onBye(std::span<const std::byte> payload) {
  const auto ended = decodeBye(payload);
  if (!ended) {
    return Status(
        StatusCode::kProtocol,
        "goodbye of " + std::to_string(payload.size()) + " bytes");
  }
  if (!ended->empty() && ended->back().second > lastMessage_) {
    return Status(
        StatusCode::kProtocol,
        "goodbye names unknown message " +
            std::to_string(ended->back().second));
  }
  std::vector<uint64_t> open; // in the order of their sends
  for (const auto& [number, m] : out_) {
    const auto next = std::ranges::upper_bound(
        *ended, number, {}, &MessageRanges::value_type::first);
    if (!m->abandoned && m->acknowledged < m->chunks &&
        next != ended->begin() && std::prev(next)->second >= number) {
      open.push_back(number);
    }
  }
  std::ranges::sort(open);
  for (const uint64_t number : open) {
    OutMessage& m = *out_.at(number);
    Status status = checkSentWhole(m);
    if (!status.ok()) {
      return status;
    }
    wholeAcknowledged(m);
    eraseIfDone(m);
  }
  return Status();
}

// Paper: SMART §3.3, "Receiver-side feedback".
//
// How it works. Frames of one residual come in any order, and twice, so parts
// are collected by offset until their number is complete. Every claim is
// checked before it is kept: the ranges, their number, and at the end that none
// overlap. Only then the send ends. A residual may overtake acknowledgements on
// another path; the message then counts as acknowledged whole.
Status Channel::onResidual(
    uint64_t message,
    std::span<const std::byte> payload) {
  Residual residual;
  Status status = decodeResidual(payload, residual);
  const auto found = out_.find(message);
  if (!status.ok() || found == out_.end()) {
    return status;
  }
  OutMessage& m = *found->second;
  if (!m.tolerant || m.op == nullptr) {
    return Status();
  }
  status = checkSentWhole(m);
  if (!status.ok()) {
    return status;
  }
  // Holes are much larger: this bounds what a faulty peer makes us keep.
  if (residual.parts > m.header.totalBytes / 8 + m.chunks) {
    return Status(
        StatusCode::kProtocol,
        "message " + std::to_string(message) + " misses too many parts");
  }
  for (const ByteRange& r : residual.ranges) {
    if (r.bytes == 0 || r.offset >= m.header.totalBytes ||
        r.bytes > m.header.totalBytes - r.offset) {
      return Status(
          StatusCode::kProtocol,
          "message " + std::to_string(message) +
              " misses bytes beyond its end");
    }
    m.zeroFilled[r.offset] = r.bytes;
  }
  if (m.zeroFilled.size() < residual.parts) {
    return Status(); // the rest comes in frames of its own
  }
  uint64_t end = 0;
  for (const auto& [offset, bytes] : m.zeroFilled) {
    if (offset < end) {
      return Status(
          StatusCode::kProtocol,
          "message " + std::to_string(message) + " misses bytes twice");
    }
    end = offset + bytes;
  }
  for (const auto& [offset, bytes] : m.zeroFilled) {
    m.op->zeroFilled.push_back({offset, bytes});
  }
  wholeAcknowledged(m);
  finishSend(m, Status());
  eraseIfDone(m);
  return Status();
}

// Numbers of messages that are over, or granted already, come from repeated
// frames and are ignored. A number that was never sent is a protocol error.
Status Channel::onGrant(std::span<const std::byte> payload) {
  for (size_t at = 0; at + 8 <= payload.size(); at += 8) {
    uint64_t number = 0;
    std::memcpy(&number, payload.data() + at, 8);
    if (number > lastMessage_ || number == 0) {
      return Status(
          StatusCode::kProtocol,
          "grant of unknown message " + std::to_string(number));
    }
    auto found = out_.find(number);
    if (found == out_.end() || found->second->granted) {
      continue;
    }
    OutMessage& m = *found->second;
    m.granted = true;
    clearOffer(m);
    chargedBytes_ -= m.charged;
    m.charged = 0;
    eraseIfDone(m);
  }
  unblock();
  ready();
  return Status();
}

// The receiver refuses the message. Its send fails with the reason if it is
// still open; a send that has ended by a copy has succeeded, and only the rest
// of its chunks is dropped. Either way the credit returns, and the message
// counts as granted: nothing more comes about it.
void Channel::onReject(uint64_t message, std::span<const std::byte> payload) {
  auto found = out_.find(message);
  if (found == out_.end()) {
    return;
  }
  OutMessage& m = *found->second;
  const Status reason = decodeReason(payload);
  if (m.op != nullptr) {
    SendOp* op = m.op;
    cancelSend(op, reason.message(), lastNow_);
    completions_.push(op, reason);
  } else if (!m.abandoned && m.acknowledged < m.chunks) {
    detachFrames(m);
    abandon(m);
  }
  clearOffer(m);
  m.granted = true;
  chargedBytes_ -= m.charged;
  m.charged = 0;
  eraseIfDone(m);
  unblock();
  ready();
}

void Channel::queueControl(
    FrameType type,
    const FrameHeader& about,
    std::vector<std::byte> payload) {
  assert(payload.size() <= kMaxControlBytes);
  auto c = std::make_unique<Control>();
  c->header.type = type;
  c->header.message = about.message;
  c->header.group = about.group;
  c->header.stream = about.stream;
  c->header.order = about.order;
  c->header.signature = about.signature;
  c->header.sourceRank = about.sourceRank;
  c->header.payloadBytes = static_cast<uint32_t>(payload.size());
  c->payload = std::move(payload);
  control_.push_back(std::move(c));
}

void Channel::sendControl(std::vector<std::byte> payload, bool direct) {
  if (failure_.ok()) {
    FrameHeader about;
    about.message = ++lastControl_;
    queueControl(FrameType::kControl, about, std::move(payload));
    control_.back()->direct = direct;
    ready();
  }
}

void Channel::sendBye() {
  if (failure_.ok()) {
    FrameHeader about;
    about.message = ++lastControl_;
    // done_ also has the messages that were refused. The peer has given these
    // up once it has acknowledged all refusals; until then nothing is named.
    MessageRanges ended;
    if (refusals_.empty()) {
      ended = done_.rangesAbove(0);
    }
    if (ended.size() > kMaxByeRanges) { // the newest are those under way
      ended.erase(ended.begin(), ended.end() - kMaxByeRanges);
    }
    queueControl(FrameType::kBye, about, encodeBye(ended));
    control_.back()->header.flags = kFlagAckNow;
    ready();
  }
}

} // namespace resilient
