#include "transport/verbs_sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace resilient {

VerbsSender::VerbsSender(
    const EventLoop& loop,
    Channel& channel,
    PathId path,
    VerbsEnd& end,
    PathFaults* faults,
    VerbsLoans* loans,
    bool mayRefer,
    VerbsPending& pending,
    VerbsStats& counted)
    : loop_(loop),
      channel_(channel),
      path_(path),
      end_(end),
      faults_(faults),
      loans_(loans),
      mayRefer_(mayRefer && loans != nullptr),
      pending_(pending),
      counted_(counted) {
  for (uint32_t slot = VerbsEnd::kSlots; slot-- > 0;) {
    freeSlots_.push_back(slot);
  }
  if (faults_ != nullptr) {
    faults_->connectionOpened(loop.now());
  }
}

bool VerbsSender::hasRoom() const {
  if (hasFaults() && faults_->linkFreeAt() > loop_.now() + kLimitedQueue) {
    return false;
  }
  return unwrittenBytes_ < kBatchBytes && !(full_ && unwrittenBytes_ != 0) &&
      channel_.inFlightBytes(path_) < kReferAhead;
}

size_t VerbsSender::takeFrame(bool chunks) {
  const OutFrame* const frame = channel_.pull(path_, loop_.now(), chunks);
  if (frame == nullptr) {
    return 0;
  }
  const size_t bytes = kFrameHeaderBytes + frame->payloadBytes;
  unwrittenBytes_ += bytes;
  return bytes;
}

// --- slots

// `reserve`: receives of the far end that must be left.
bool VerbsSender::mayPost(uint32_t reserve) const {
  return !freeSlots_.empty() && peerPosted_ - sent_ > reserve;
}

void VerbsSender::openSlot() {
  slot_ = static_cast<int>(freeSlots_.back());
  freeSlots_.pop_back();
  slotBytes_ = sizeof(VerbsSlotHeader);
}

Status VerbsSender::postSlot(uint32_t posted) {
  VerbsSlotHeader header;
  header.posted = told_ = posted;
  const auto slot = static_cast<uint32_t>(std::exchange(slot_, -1));
  std::memcpy(end_.sendSlot(slot), &header, sizeof(header));
  ++sent_;
  if (kTrustsCompletions) {
    trusted_.bySlot[slot] = trusted_.written;
  }
  counted_.copiedBytes += slotBytes_ - sizeof(header);
  if (hasFaults() || !held_.empty()) {
    held_.push_back({slot, slotBytes_, loop_.now()});
    if (hasFaults()) {
      held_.back().due = faults_->release(loop_.now(), slotBytes_);
    }
    return releaseHeld();
  }
  pending_.add(loop_.now());
  return post(slot, slotBytes_);
}

Status VerbsSender::post(uint32_t slot, size_t bytes) {
  ++counted_.sends;
  postedBytes_ += bytes;
  return end_.send(slot, bytes);
}

Status VerbsSender::onHeader(const VerbsSlotHeader& header) {
  if (header.zero != 0 || header.posted - VerbsEnd::kSlots > sent_ ||
      header.posted - peerPosted_ > VerbsEnd::kSlots) {
    return Status(
        StatusCode::kProtocol, "peer posted more receives than it has slots");
  }
  peerPosted_ = header.posted;
  return Status();
}

Status VerbsSender::greet(uint32_t posted) {
  openSlot();
  return postSlot(posted);
}

Status VerbsSender::probe(uint32_t posted) {
  if (!mayPost(1)) {
    return Status();
  }
  openSlot();
  return postSlot(posted);
}

Status VerbsSender::tellPosted(uint32_t posted) {
  if (posted - told_ < VerbsEnd::kSlots / 2 || !mayPost(0)) {
    return Status();
  }
  openSlot();
  return postSlot(posted);
}

// --- frames

// Writes a reference to the payload of the frame, which is the next. False: it
// goes as it is.
bool VerbsSender::refer(
    const OutFrame& frame,
    uint32_t posted,
    Status& status) {
  if (!frame.mayRefer || hasFaults() || frame.payloadBytes < kReferFrom ||
      frame.payloadBytes > VerbsEnd::kMaxReadBytes || !mayRefer_) {
    return false;
  }
  VerbsMemory* const memory =
      loans_->find(end_.device(), {frame.payload, frame.payloadBytes});
  if (memory == nullptr) {
    return false;
  }
  if (VerbsEnd::kSlotBytes - slotBytes_ < kVerbsReferenceBytes) {
    status = postSlot(posted); // it must be whole in one
    if (!status.ok() || !mayPost(1)) {
      full_ = full_ || status.ok();
      return true;
    }
    openSlot();
  }
  VerbsReference reference;
  reference.address = reinterpret_cast<uintptr_t>(frame.payload);
  reference.key = memory->remoteKey();
  const FrameBytes header = asReference(frame.header);
  std::byte* const to =
      end_.sendSlot(static_cast<uint32_t>(slot_)) + slotBytes_;
  std::memcpy(to, header.data(), kFrameHeaderBytes);
  std::memcpy(to + kFrameHeaderBytes, &reference, sizeof(reference));
  slotBytes_ += kVerbsReferenceBytes;
  unwrittenBytes_ -= kFrameHeaderBytes + frame.payloadBytes;
  if (kTrustsCompletions) {
    trusted_.written += frame.reliable;
  }
  channel_.popReferred(path_);
  return true;
}

// As much of it as the slot has room for.
void VerbsSender::copyFrame(const OutFrame& frame) {
  const size_t size = kFrameHeaderBytes + frame.payloadBytes;
  std::byte* const to =
      end_.sendSlot(static_cast<uint32_t>(slot_)) + slotBytes_;
  const size_t room = VerbsEnd::kSlotBytes - slotBytes_;
  size_t taken = 0;
  if (frontWritten_ < kFrameHeaderBytes) {
    taken = std::min(room, kFrameHeaderBytes - frontWritten_);
    std::memcpy(to, frame.header.data() + frontWritten_, taken);
  }
  const size_t payload = std::min(room - taken, size - frontWritten_ - taken);
  if (payload != 0) {
    std::memcpy(
        to + taken,
        frame.payload + (frontWritten_ + taken - kFrameHeaderBytes),
        payload);
  }
  slotBytes_ += taken + payload;
  frontWritten_ += taken + payload;
  if (frontWritten_ == size) {
    frontWritten_ = 0;
    unwrittenBytes_ -= size;
    if (kTrustsCompletions) {
      trusted_.written += frame.reliable;
    }
    channel_.popWritten(path_);
  }
}

// Fills slots with frames until there are no more of one or the other. The
// channel may forget a frame as soon as it is copied.
Status VerbsSender::writeFrames(uint32_t posted) {
  full_ = false;
  Status status;
  while (status.ok() && !channel_.unwritten(path_).empty()) {
    if (slot_ < 0) {
      if (!mayPost(1)) {
        full_ = true;
        break;
      }
      openSlot();
    }
    const OutFrame& frame = channel_.unwritten(path_).front();
    if (frontWritten_ != 0 || !refer(frame, posted, status)) {
      copyFrame(frame);
    } else if (full_) {
      break;
    }
    if (status.ok() && slotBytes_ == VerbsEnd::kSlotBytes) {
      status = postSlot(posted);
    }
  }
  if (status.ok() && slot_ >= 0) {
    status = postSlot(posted);
  }
  return status;
}

// --- injected faults

bool VerbsSender::isDropping() const {
  return hasFaults() && faults_->dropping(loop_.now());
}

// Posts slots in their order.
Status VerbsSender::releaseHeld() {
  Status status;
  while (status.ok() && !held_.empty()) {
    Held& next = held_.front();
    const TimePoint now = loop_.now();
    size_t most = SIZE_MAX;
    if (hasFaults()) {
      if (next.due > now) {
        break;
      }
      most = faults_->bytesUntilCut(postedBytes_, now);
    }
    if (!next.pending) {
      next.pending = true;
      pending_.add(now);
    }
    if (hasFaults() && (faults_->stalled(now) || faults_->dropping(now))) {
      break;
    }
    const Held slot = next;
    held_.pop_front();
    if (most < slot.bytes) {
      if (most > sizeof(VerbsSlotHeader)) {
        (void)post(slot.slot, most); // within a frame
      }
      return cut();
    }
    status = post(slot.slot, slot.bytes);
  }
  return status;
}

Status VerbsSender::cut() {
  faults_->cutDone(postedBytes_, loop_.now());
  return Status(StatusCode::kNetwork, "cut by fault injection");
}

Status VerbsSender::lookAtFaults() {
  const bool cutNow =
      hasFaults() && faults_->bytesUntilCut(postedBytes_, loop_.now()) == 0;
  return cutNow ? cut() : releaseHeld();
}

TimePoint VerbsSender::nextFault() const {
  if (!hasFaults()) {
    return kNever;
  }
  const TimePoint change = faults_->nextChange(loop_.now());
  return !held_.empty() && held_.front().due > loop_.now()
      ? std::min(change, held_.front().due)
      : change;
}

} // namespace resilient
