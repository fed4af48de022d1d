#include "shift/failover_qp.h"

#include <algorithm>
#include <bit>

namespace resilient::shift {
namespace {

// Half of the space of packet numbers: what is farther ahead is behind.
constexpr uint32_t kHalf = (kPacketMask + 1) / 2;

bool isTwoSided(const SendRequest& request) {
  return request.operation == Operation::kSend ||
      request.operation == Operation::kWriteWithImmediate;
}

// Some devices free a slot before its completion is polled, so an application
// may have more requests outstanding than it asked for.
uint64_t slots(uint32_t asked) {
  return std::bit_ceil((uint64_t{asked} + 2) * 2);
}

} // namespace

uint32_t packetsOf(uint32_t length, uint32_t mtu) {
  return length == 0
      ? 1
      : static_cast<uint32_t>((uint64_t{length} + mtu - 1) / mtu);
}

FailoverQp::FailoverQp(const Limits& limits)
    : limits_(limits),
      sends_(slots(limits.sends)),
      sendPieces_(sends_.size() * limits.sendPieces),
      inline_(sends_.size() * limits.inlineBytes),
      receives_(slots(limits.receives)),
      receivePieces_(receives_.size() * limits.receivePieces),
      sendMask_(sends_.size() - 1),
      receiveMask_(receives_.size() - 1) {}

SendRequest* FailoverQp::pushSend(std::span<const Piece> pieces) {
  // One slot stays free for a fence of our own.
  if (sendTail_ - sendHead_ + 1 >= sends_.size() ||
      pieces.size() > limits_.sendPieces) {
    return nullptr;
  }
  SendRequest& request = sendAt(sendTail_++);
  request.pieces = static_cast<uint16_t>(pieces.size());
  request.landed = 0;
  request.isInternal = false;
  uint32_t length = 0;
  Piece* out = this->pieces(request).data();
  for (const Piece& piece : pieces) {
    *out++ = piece;
    length += piece.length;
  }
  request.length = length;
  return &request;
}

SendRequest& FailoverQp::pushFence() {
  SendRequest& request = sendAt(sendTail_++);
  request = {};
  request.operation = Operation::kWrite;
  request.isSignaled = true;
  request.isInternal = true;
  return request;
}

ReceiveRequest* FailoverQp::pushReceive(std::span<const Piece> pieces) {
  if (receiveTail_ - receiveHead_ == receives_.size() ||
      pieces.size() > limits_.receivePieces) {
    return nullptr;
  }
  ReceiveRequest& request = receiveAt(receiveTail_++);
  request.pieces = static_cast<uint16_t>(pieces.size());
  std::copy(pieces.begin(), pieces.end(), this->pieces(request).begin());
  return &request;
}

void FailoverQp::numberSend(SendRequest& request) {
  const uint32_t left = request.length - request.landed;
  request.firstPacket = nextPacket_;
  request.packets = request.operation == Operation::kAtomic || left == 0
      ? 1
      : static_cast<uint32_t>(
            (uint64_t{left} + (1U << mtuShift_) - 1) >> mtuShift_);
  nextPacket_ = (nextPacket_ + request.packets) & kPacketMask;
}

void FailoverQp::undoSend() {
  const SendRequest& request = sendAt(--sendTail_);
  if (postedSends_ > sendTail_) {
    postedSends_ = sendTail_;
    nextPacket_ = request.firstPacket;
  }
}

void FailoverQp::undoReceive() {
  --receiveTail_;
  postedReceives_ = std::min(postedReceives_, receiveTail_);
}

bool FailoverQp::completeSend(SendRequest& completed) {
  while (sendHead_ != postedSends_) {
    const SendRequest& request = sendAt(sendHead_++);
    sent_ += isTwoSided(request) ? 1 : 0;
    if (request.isSignaled) {
      completed = request;
      return true;
    }
  }
  return false;
}

bool FailoverQp::completeReceive(ReceiveRequest& completed) {
  if (receiveHead_ == postedReceives_) {
    return false;
  }
  completed = receiveAt(receiveHead_++);
  ++received_;
  return true;
}

bool FailoverQp::awaitsCompletion() const {
  for (uint64_t index = sendHead_; index != postedSends_; ++index) {
    if (sendAt(index).isSignaled) {
      return true;
    }
  }
  return false;
}

std::string_view FailoverQp::unsafe() const {
  for (uint64_t index = sendHead_; index != postedSends_; ++index) {
    const SendRequest& request = sendAt(index);
    if (request.operation == Operation::kAtomic) {
      return "an atomic operation is in flight";
    }
    if (request.operation == Operation::kOther) {
      return "an operation that only one device knows is in flight";
    }
    if (request.isMarked) {
      return "a request marked as not to be sent again is in flight";
    }
  }
  return {};
}

void FailoverQp::hold() {
  // Paper: SHIFT §4.3.2, step 1: nothing is sent until the peer has answered
  isHeld_ = true;
}

std::string_view FailoverQp::applyProgress(
    const Progress& peer,
    std::vector<SendRequest>& completed) {
  // Paper: SHIFT §4.3.2: receive-side progress is ahead if ACKs were lost
  uint64_t sent = sent_;
  uint64_t retireUntil = sendHead_;
  for (uint64_t index = sendHead_;
       index != postedSends_ && sent < peer.received;
       ++index) {
    if (isTwoSided(sendAt(index))) {
      ++sent;
      retireUntil = index + 1;
    }
  }
  if (sent != peer.received) {
    return "the peer has counted other messages than were sent";
  }
  // A READ before a message that was counted may have lost its answer: it has
  // to run again, and so does everything after it.
  for (uint64_t index = sendHead_; index != retireUntil; ++index) {
    if (sendAt(index).operation == Operation::kRead) {
      return "a READ without an answer is followed by a message that was "
             "received";
    }
  }
  if (const std::string_view problem = noteLanded(peer.nextPacket);
      !problem.empty()) {
    return problem;
  }
  while (sendHead_ != retireUntil) {
    const SendRequest& request = sendAt(sendHead_++);
    sent_ += isTwoSided(request) ? 1 : 0;
    if (request.isSignaled) {
      completed.push_back(request);
    }
  }
  return {};
}

// Beyond the paper: the receiver's packet number tells which bytes of a plain
// WRITE are in its memory. A program may be polling on them, so they are not
// written again.
std::string_view FailoverQp::noteLanded(uint32_t nextPacket) {
  if (sendHead_ == postedSends_) {
    return {};
  }
  const uint32_t first = sendAt(sendHead_).firstPacket;
  if (((nextPacket - first) & kPacketMask) >
      ((nextPacket_ - first) & kPacketMask)) {
    return "the peer's packet number does not belong to what was sent";
  }
  bool isReadBefore = false;
  for (uint64_t index = sendHead_; index != postedSends_; ++index) {
    SendRequest& request = sendAt(index);
    const uint32_t ahead = (nextPacket - request.firstPacket) & kPacketMask;
    const bool isWrite = request.operation == Operation::kWrite ||
        request.operation == Operation::kWriteWithImmediate;
    if (isReadBefore && isWrite && request.length != request.landed &&
        ahead != 0 && ahead < kHalf) {
      // The READ would now see what was written after it.
      return "a READ without an answer is followed by a WRITE that has landed";
    }
    isReadBefore |= request.operation == Operation::kRead;
    if (request.operation == Operation::kWrite && ahead < kHalf) {
      const uint64_t bytes = uint64_t{std::min(ahead, request.packets)}
          << mtuShift_;
      request.landed += static_cast<uint32_t>(
          std::min<uint64_t>(bytes, request.length - request.landed));
    }
  }
  return {};
}

void FailoverQp::moveReceives() {
  // Paper: SHIFT §4.3.2, step 1, and §4.3.3, step 3
  receiveState_ =
      active_ == 0 ? ReceiveState::kFallback : ReceiveState::kDefault;
  postedReceives_ = receiveHead_;
}

void FailoverQp::endSwitch(uint32_t nextPacket) {
  // Paper: SHIFT §4.3.2, steps 2 and 3, and §4.3.3, step 3
  active_ = receivePath();
  sendState_ = active_ == 0 ? SendState::kDefault : SendState::kFallback;
  nextPacket_ = nextPacket & kPacketMask;
  postedSends_ = sendHead_;
}

void FailoverQp::beginReturn() {
  // Paper: SHIFT §4.3.3, step 1
  sendState_ = SendState::kWaitSignaled;
}

void FailoverQp::fencePosted() {
  // Paper: SHIFT §4.3.3, step 2
  sendState_ = SendState::kWaitDrained;
  isHeld_ = true;
}

void FailoverQp::cancelReturn() {
  sendState_ = SendState::kFallback;
  isHeld_ = false;
}

bool FailoverQp::popSend(SendRequest& request) {
  if (sendHead_ == sendTail_) {
    return false;
  }
  request = sendAt(sendHead_++);
  postedSends_ = std::max(postedSends_, sendHead_);
  return true;
}

bool FailoverQp::popReceive(ReceiveRequest& request) {
  if (receiveHead_ == receiveTail_) {
    return false;
  }
  request = receiveAt(receiveHead_++);
  postedReceives_ = std::max(postedReceives_, receiveHead_);
  return true;
}

std::span<Piece> FailoverQp::pieces(const SendRequest& request) {
  const auto index = size_t(&request - sends_.data());
  return {sendPieces_.data() + index * limits_.sendPieces, request.pieces};
}

std::span<Piece> FailoverQp::pieces(const ReceiveRequest& request) {
  const auto index = size_t(&request - receives_.data());
  return {
      receivePieces_.data() + index * limits_.receivePieces, request.pieces};
}

std::span<uint8_t> FailoverQp::inlineBytes(const SendRequest& request) {
  const auto index = size_t(&request - sends_.data());
  return {inline_.data() + index * limits_.inlineBytes, limits_.inlineBytes};
}

void FailoverQp::setPacketRules(uint32_t mtu, uint32_t nextPacket) {
  mtuShift_ = static_cast<uint32_t>(std::countr_zero(mtu));
  nextPacket_ = nextPacket & kPacketMask;
}

} // namespace resilient::shift
