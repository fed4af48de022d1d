#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "base/trusted_completions.h"
#include "channel/channel.h"
#include "channel/channel_state.h"
#include "channel/mailbox.h"
#include "wire/control.h"

namespace resilient {

Status
Channel::onHeader(PathId path, const FrameHeader& header, TimePoint now) {
  lastNow_ = now;
  PathState& p = state(path);
  // A refusal comes first, the acknowledgement of the refused bytes after it,
  // on the same path: else the send would have succeeded when it is read.
  if (header.type != FrameType::kReject && p.ordered) {
    Status status = onAck(p, header.ack, now);
    if (!status.ok()) {
      return status;
    }
  }
  p.header = header;
  p.message = nullptr;
  if (RESILIENT_PLANTED(acknowledgeEarly) && isReliable(header.type)) {
    ++p.received;
    p.ackUrgent = true;
    ready();
  }
  if (header.type == FrameType::kData) {
    arrivingOn_ = path;
    Status status = onData(p, header);
    arrivingOn_.reset();
    return status;
  }
  p.control.resize(header.payloadBytes);
  return Status();
}

// The header of a chunk or an offer: finds or creates the message, announces it
// to the mailbox, and leaves in p.message whether the payload is wanted. A
// matched message takes the payload in the user's buffer; another one in a
// block of its own, charged against ownEagerBytes. Messages that are over are
// discarded, which makes it safe for a sender to repeat any chunk.
//
// The order matters. p.message is set before the announcement, since the
// mailbox may refuse the message there, and forget() then resets p.message: no
// payload is written to freed memory. A block is made only after the
// announcement, since a match gives the payload a place in the user's buffer.
// The credit is checked where a block is made, so a peer can never make us hold
// more than our budget.
Status Channel::onData(PathState& p, const FrameHeader& header) {
  if (done_.contains(header.message) || !failure_.ok()) {
    refuseAgain(header);
    return Status(); // message == nullptr: discard
  }
  InMessage* found = nullptr;
  Status status = findOrCreate(header, found);
  if (!status.ok()) {
    return status;
  }
  InMessage& m = *found;
  if (m.cancelled) {
    return Status();
  }
  if (m.header.totalBytes != header.totalBytes ||
      m.header.chunkBytes != header.chunkBytes) {
    return Status(
        StatusCode::kProtocol,
        "message " + std::to_string(header.message) + " changed its size");
  }
  const bool offer = (header.flags & kFlagOffer) != 0;
  const uint32_t chunk = header.chunkIndex();
  if (offer || m.has(chunk)) {
    // Created by this frame, or known: either way nothing to read.
    if (!m.announced) {
      announce(m);
    }
    return Status();
  }
  p.message = &m;
  if (!m.announced) {
    m.arrivingWhole = m.chunkCount() == 1;
    announce(m);
    if (p.message == nullptr) {
      return Status(); // the mailbox refused it
    }
  }
  const bool pinned = m.isPinned(chunk);
  const bool itself = pinned && !p.pins.empty() &&
      p.pins.front().message == header.message && p.pins.front().chunk == chunk;
  if (pinned && !itself) {
    // Beyond the credit: no more than the paths have begun to read.
    auto& block = m.blocks[chunk];
    if (!block) {
      block = std::make_unique_for_overwrite<std::byte[]>(header.payloadBytes);
    }
  } else if (m.op == nullptr && header.payloadBytes != 0) {
    auto& block = m.blocks[chunk];
    if (!block) {
      const uint64_t cost = header.payloadBytes + kChunkOverheadBytes;
      if (bufferedBytes_ + cost > config_.ownEagerBytes) {
        return Status(
            StatusCode::kProtocol,
            "peer sent more than its credit of " +
                std::to_string(config_.ownEagerBytes) + " bytes");
      }
      block = std::make_unique_for_overwrite<std::byte[]>(header.payloadBytes);
      m.bufferedBytes += cost;
      bufferedBytes_ += cost;
    }
  }
  return Status();
}

// A chunk that was refused has come once more, since the path that was to bring
// the refusal has died or is slow: it must not be acknowledged on this path
// before it is refused there, too.
void Channel::refuseAgain(const FrameHeader& header) {
  const auto found = refusals_.find(header.message);
  if (found != refusals_.end() && found->second.offset == header.offset &&
      (header.flags & kFlagOffer) == 0) {
    queueControl(FrameType::kReject, header, found->second.reason);
    control_.back()->via = arrivingOn_;
    ready();
  }
}

// Limits what a peer can make us keep beyond its credit: records of messages
// without a receive, and answers that it does not fetch. The limits of a
// correct peer (offers, credit) keep it below. The second kMaxOffers is for
// messages that it cancelled before a receive came.
//
// The tests channel_bounds_* reach each limit.
Status Channel::checkPeerLimits() const {
  const uint64_t records =
      config_.ownEagerBytes / kChunkOverheadBytes + 2 * kMaxOffers;
  const char* what = nullptr;
  if (in_.size() - matchedMessages_ >= records) {
    what = "messages that nobody has asked for";
  } else if (refusals_.size() >= records) {
    what = "refused messages, without acknowledging";
  } else if (done_.ranges() >= kMaxGaps) {
    what = "gaps in the numbers of its messages";
  } else {
    return Status();
  }
  return Status(
      StatusCode::kProtocol, std::string("peer sent too many ") + what);
}

Status Channel::findOrCreate(const FrameHeader& header, InMessage*& message) {
  auto found = in_.find(header.message);
  if (found != in_.end()) {
    message = found->second.get();
    return Status();
  }
  Status status = checkPeerLimits();
  if (!status.ok()) {
    return status;
  }
  auto owned = std::make_unique<InMessage>(*this, header);
  message = owned.get();
  in_.emplace(header.message, std::move(owned));
  return Status();
}

void Channel::announce(InMessage& m) {
  m.announced = true;
  if ((m.header.stream & kCollectiveBit) != 0) {
    lastCollective_ = m.header;
  }
  mailbox_.onArrival(m);
}

// Null for a chunk that has arrived whole on another path meanwhile: the slower
// copy must not overwrite it (channel_gives_no_place_to_a_chunk_that_is_here).
std::byte* Channel::destination(PathId path) {
  PathState& p = state(path);
  const FrameHeader& h = p.header;
  if (h.type != FrameType::kData) {
    return p.control.data();
  }
  if (p.message == nullptr || p.message->has(h.chunkIndex())) {
    return nullptr;
  }
  if (p.message->op != nullptr && !p.message->isPinned(h.chunkIndex())) {
    return p.message->op->data + h.offset;
  }
  const auto block = p.message->blocks.find(h.chunkIndex());
  return block == p.message->blocks.end() ? nullptr : block->second.get();
}

// The payload of the header that onHeader() has taken. Three steps: count the
// frame, for the acknowledgement that the peer waits for; then whatever the
// type asks for. A kReject acknowledges last: see onHeader().
Status Channel::onPayload(
    PathId path,
    TimePoint now,
    std::span<const ByteRange> zeroFilled) {
  lastNow_ = now;
  PathState& p = state(path);
  const FrameHeader h = p.header;
  p.counters.bytesReceived += h.payloadBytes;
  if (isReliable(h.type)) {
    countForAck(p, h, now);
  }
  const std::span<const std::byte> payload(p.control);
  switch (h.type) {
    case FrameType::kData:
      return onChunk(p, h, zeroFilled);
    case FrameType::kResidual:
      return onResidual(h.message, payload);
    case FrameType::kGrant:
      return onGrant(payload);
    case FrameType::kReject:
      onReject(h.message, payload);
      return p.ordered ? onAck(p, h.ack, now) : Status();
    case FrameType::kCancel:
      return onCancel(h, payload);
    case FrameType::kControl:
    case FrameType::kBye:
      return onControlFrame(h, payload);
    case FrameType::kPing:
      p.pongDue = true;
      p.pongStamp = h.message;
      ready();
      return Status();
    case FrameType::kPong:
      onPong(p, h.message, now);
      return Status();
    case FrameType::kAck:
      return Status();
  }
  return Status();
}

// A reliable frame has come: the acknowledgement is due now if the sender asks
// for it or waits for many, else after kAckDelay.
void Channel::countForAck(PathState& p, const FrameHeader& h, TimePoint now) {
  p.received += !RESILIENT_PLANTED(acknowledgeEarly);
  p.bytesSinceAck += h.payloadBytes;
  if (p.selfAcknowledging || kTrustsCompletions) {
    return; // the transport tells the sender
  }
  if ((h.flags & kFlagAckNow) != 0 || p.bytesSinceAck >= kAckEveryBytes ||
      p.received - p.ackedBack >= kAckEveryFrames) {
    p.ackUrgent = true;
    ready();
  } else if (p.ackDue == kNever) {
    p.ackDue = now + kAckDelay;
    ready();
  }
}

// The chunk lies where destination() said, unless its message is over or has it
// already. May complete the message.
//
// The sender of a tolerant message hears of its holes before the receive ends,
// and also if there is no receive yet: it must not wait for the receiving
// program.
Status Channel::onChunk(
    PathState& p,
    const FrameHeader& h,
    std::span<const ByteRange> zeroFilled) {
  InMessage* m = std::exchange(p.message, nullptr);
  if ((h.flags & kFlagOffer) != 0) {
    return Status();
  }
  if (m == nullptr || m->has(h.chunkIndex())) {
    ++counters_.duplicateChunks;
    return Status();
  }
  if (!zeroFilled.empty() && (m->header.flags & kFlagTolerant) == 0) {
    return Status(
        StatusCode::kProtocol, "parts of an exact message are missing");
  }
  for (const ByteRange& r : zeroFilled) {
    m->zeroFilled.push_back({h.offset + r.offset, r.bytes});
  }
  m->mark(h.chunkIndex(), h.payloadBytes);
  counters_.bytesReceived += h.payloadBytes;
  const bool itself = !p.pins.empty() && p.pins.front().message == h.message &&
      p.pins.front().chunk == h.chunkIndex();
  if (itself) {
    m->blocks.erase(h.chunkIndex()); // another path has begun to bring it
  }
  if (m->op != nullptr && (itself || !m->isPinned(h.chunkIndex()))) {
    m->op->arrived(h.offset, h.payloadBytes);
  }
  if (m->whole()) {
    tellResidual(*m);
  }
  deliverIfWhole(*m);
  return Status();
}

// Not where another path is putting the chunk already: that would have no block
// to come back from.
std::optional<Channel::Place> Channel::pin(
    PathId path,
    const FrameHeader& header,
    const std::function<bool(std::span<std::byte>)>& mayRead) {
  if (done_.contains(header.message) || !failure_.ok()) {
    return Place{};
  }
  const auto found = in_.find(header.message);
  if (found == in_.end()) {
    return std::nullopt;
  }
  InMessage& m = *found->second;
  const uint32_t chunk = header.chunkIndex();
  if (m.cancelled || m.has(chunk)) {
    return Place{};
  }
  if (m.op == nullptr || m.header.totalBytes != header.totalBytes ||
      m.header.chunkBytes != header.chunkBytes || m.isPinned(chunk)) {
    return Place{.wanted = true};
  }
  for (const auto& [id, p] : paths_) {
    if (p.message == &m && p.header.chunkIndex() == chunk) {
      return Place{.wanted = true};
    }
  }
  std::byte* const place = m.op->data + header.offset;
  if (!mayRead({place, header.payloadBytes})) {
    return Place{.wanted = true};
  }
  if (!kTrustsCompletions) {
    m.pinned.push_back(chunk);
    state(path).pins.push_back({header.message, chunk});
  }
  return Place{.wanted = true, .pinned = place};
}

void Channel::unpin(PathId path) {
  PathState& p = state(path);
  const Pin pin = p.pins.front();
  p.pins.pop_front();
  release(pin);
}

void Channel::endPins(PathId path) {
  const auto found = endingPins_.find(path);
  if (found == endingPins_.end()) {
    return;
  }
  const std::deque<Pin> pins = std::move(found->second);
  endingPins_.erase(found);
  for (const Pin& pin : pins) {
    release(pin);
  }
}

// A copy that another path has brought, or is bringing, takes the place. It
// goes on there. Without a copy, the chunk has been read or is still missing.
void Channel::release(const Pin& pin) {
  const auto found = in_.find(pin.message);
  if (found == in_.end()) {
    return; // it ended badly
  }
  InMessage& m = *found->second;
  std::erase(m.pinned, pin.chunk);
  const auto block = m.blocks.find(pin.chunk);
  if (m.op != nullptr && block != m.blocks.end()) {
    const uint64_t offset = uint64_t(pin.chunk) * m.header.chunkBytes;
    const uint64_t bytes =
        std::min<uint64_t>(m.header.totalBytes - offset, m.header.chunkBytes);
    std::memcpy(m.op->data + offset, block->second.get(), bytes);
    m.blocks.erase(block);
    if (m.has(pin.chunk)) {
      m.op->arrived(offset, bytes);
    }
  }
  deliverIfWhole(m);
}

// kControl and kBye reach the host exactly once, whichever paths repeat them.
Status Channel::onControlFrame(
    const FrameHeader& h,
    std::span<const std::byte> payload) {
  if (controlSeen_.ranges() >= kMaxGaps) {
    return Status(
        StatusCode::kProtocol, "peer left too many gaps in control frames");
  }
  if (!controlSeen_.insert(h.message)) {
    return Status();
  }
  if (h.type == FrameType::kBye) {
    Status status = onBye(payload);
    if (!status.ok()) {
      return status;
    }
    host_.onBye(*this);
  } else {
    host_.onControl(*this, payload);
  }
  return Status();
}

// `stamp` is the time of a ping, as the peer repeats it. A round trip counts
// only if it is the time of the ping that we have noted ourselves.
//
// A stamp later than our last ping is a peer's invention and proves nothing.
void Channel::onPong(PathState& p, uint64_t stamp, TimePoint now) {
  if (p.pingSent &&
      static_cast<uint64_t>(p.pingSent->time_since_epoch().count()) == stamp) {
    p.statistics.onRoundTrip(now - *p.pingSent, now);
    p.pingSent.reset();
  }
  // The path works in both directions, whichever ping this answers.
  const TimePoint sent{Nanos(static_cast<int64_t>(stamp))};
  if (sent <= p.lastPing) {
    p.answeredUpTo = std::max(p.answeredUpTo, sent);
  }
  p.pingsAnswered += p.onProbation;
}

// A message got its receive. The blocks are copied to the user's buffer, and
// their bytes no longer count against our budget. If chunks are missing, a
// grant asks for them at once, since the sender may be waiting for it. A single
// chunk that is being read needs no such grant; deliverIfWhole() returns its
// credit later.
void Channel::matched(InMessage& m) {
  assert(m.op != nullptr && !m.matched);
  m.matched = true;
  ++matchedMessages_;
  for (const auto& [chunk, block] : m.blocks) {
    // A chunk that is still being read is copied too: the path goes on in the
    // user's buffer behind what it has read so far.
    const uint64_t offset = uint64_t(chunk) * m.header.chunkBytes;
    const uint64_t rest = m.header.totalBytes - offset;
    std::memcpy(
        m.op->data + offset,
        block.get(),
        rest < m.header.chunkBytes ? rest : m.header.chunkBytes);
    if (m.has(chunk)) {
      m.op->arrived(
          offset, rest < m.header.chunkBytes ? rest : m.header.chunkBytes);
    }
  }
  m.blocks.clear();
  bufferedBytes_ -= m.bufferedBytes;
  m.bufferedBytes = 0;
  if (!m.op->settling) {
    askForRest(m);
  }
  deliverIfWhole(m);
}

void Channel::askForRest(InMessage& m) {
  if (!m.whole() && !m.arrivingWhole && !m.granted) {
    m.granted = true;
    creditReturned(m.header.message, /*urgent=*/true);
  }
}

void Channel::receiveReady(RecvOp* op, TimePoint now) {
  lastNow_ = now;
  op->settling = false;
  if (op->message != nullptr && !RESILIENT_PLANTED(forgetSettled)) {
    askForRest(*op->message);
  }
}

// Ends the receive if the message is whole and matched; `m` is gone then. The
// owner is called later, from the completion queue.
void Channel::deliverIfWhole(InMessage& m) {
  if (m.op == nullptr || !m.whole() ||
      (!m.pinned.empty() && !RESILIENT_PLANTED(deliverPinned))) {
    return;
  }
  RecvOp* op = m.op;
  op->message = nullptr;
  ++counters_.messagesReceived;
  if (!m.granted) {
    creditReturned(m.header.message, /*urgent=*/false);
  }
  forget(m);
  completions_.push(op, Status());
}

// The message is whole. Its sender, if it tolerates losses, waits to hear of
// them, also if there were none.
void Channel::tellResidual(InMessage& m) {
  if ((m.header.flags & kFlagTolerant) == 0) {
    return;
  }
  std::span<const ByteRange> left(m.zeroFilled);
  do {
    const size_t n = std::min(left.size(), Residual::kMax);
    queueControl(
        FrameType::kResidual,
        m.header,
        encodeResidual(m.zeroFilled.size(), left.first(n)));
    left = left.subspan(n);
  } while (!left.empty());
  ready();
}

// Tells the sender that a message no longer counts against the budget. Late
// is fine unless the sender waits for it.
void Channel::creditReturned(uint64_t message, bool urgent) {
  if (!failure_.ok() || RESILIENT_PLANTED(forgetCredit)) {
    return;
  }
  grants_.push_back(message);
  grantsUrgent_ = grantsUrgent_ || urgent || grants_.size() >= kGrantBatch;
  if (grantsDue_ == kNever) {
    grantsDue_ = lastNow_ + kAckDelay;
  }
  ready();
}

// Several messages share one frame. They are numbers of the sender, so a
// repeated frame does no harm: onGrant() ignores a message that is granted.
void Channel::flushGrants() {
  grantsUrgent_ = false;
  grantsDue_ = kNever;
  size_t at = 0;
  while (at < grants_.size()) {
    const size_t n = std::min(grants_.size() - at, kMaxControlBytes / 8ul);
    std::vector<std::byte> payload(n * 8);
    std::memcpy(payload.data(), grants_.data() + at, n * 8);
    queueControl(FrameType::kGrant, FrameHeader(), std::move(payload));
    at += n;
  }
  grants_.clear();
}

// A refusal stays in refusals_ until the peer has acknowledged it. If the
// refused chunk comes again before that, refuseAgain() answers on its new path.
void Channel::reject(InMessage& m, StatusCode code, const std::string& reason) {
  if (failure_.ok()) {
    std::vector<std::byte> payload = encodeReason(code, reason);
    queueControl(FrameType::kReject, m.header, payload);
    control_.back()->via = arrivingOn_;
    // If it is no frame that is refused, what has come is acknowledged already.
    const uint64_t offset =
        arrivingOn_ ? state(*arrivingOn_).header.offset : UINT64_MAX;
    refusals_[m.header.message] = {offset, std::move(payload)};
    ready();
  }
  forget(m);
}

// The sender gave the message up. If it is over here, there is nothing to do.
// If a receive waits for it, that receive fails. Otherwise the record stays
// without its data, as the answer to the receive that will match it: a later
// message of the tag must not take its place in the order.
Status Channel::onCancel(
    const FrameHeader& h,
    std::span<const std::byte> payload) {
  if (done_.contains(h.message) || !failure_.ok()) {
    return Status();
  }
  const Status reason = decodeReason(payload);
  InMessage* found = nullptr;
  Status status = findOrCreate(h, found);
  if (!status.ok()) {
    return status;
  }
  InMessage& m = *found;
  if (m.op != nullptr) {
    mailbox_.onLost(m, reason);
    forget(m);
    return Status();
  }
  // The receive that will match it must learn that it never comes.
  m.cancelled = true;
  m.cancelCode = reason.code();
  m.cancelReason = reason.message();
  m.blocks.clear();
  bufferedBytes_ -= m.bufferedBytes;
  m.bufferedBytes = 0;
  for (auto& [id, p] : paths_) {
    if (p.message == &m) {
      p.message = nullptr;
    }
  }
  if (!m.announced) {
    announce(m);
  }
  return Status();
}

// The message is over, in whatever way: frames of it are discarded from now.
void Channel::forget(InMessage& m) {
  bufferedBytes_ -= m.bufferedBytes;
  matchedMessages_ -= m.matched;
  for (auto& [id, p] : paths_) {
    if (p.message == &m && !RESILIENT_PLANTED(keepDestination)) {
      p.message = nullptr;
    }
  }
  done_.insert(m.header.message);
  in_.erase(m.header.message);
}

} // namespace resilient
