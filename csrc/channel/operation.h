#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/signature.h"
#include "base/status.h"
#include "base/time.h"
#include "base/tolerance.h"
#include "base/traffic_class.h"
#include "wire/control.h"

namespace resilient {

class Channel;
class CompletionQueue;
struct InMessage;

// The address of a message: c10d's (group, tag) or one collective, and its
// place in that stream. See mailbox.h.
struct MessageKey {
  uint64_t group = 0;
  uint64_t stream = 0;
  uint64_t order = 0;
  bool operator==(const MessageKey&) const = default;
};

// A send or receive posted to the core. Lent by its owner until finished() is
// called or it has been cancelled; the memory it points to is lent with it. An
// owner that destroys it earlier has to cancel it first: the queue links
// operations without a record of its own.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // Called exactly once, from CompletionQueue::drain(). User code runs from
  // there alone, so no core function is ever re-entered.
  virtual void finished(const Status& status) = 0;

 private:
  friend class CompletionQueue;
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
  bool queued_ = false;
  Status status_;
};

struct SendOp : Operation {
  MessageKey key;
  // Numbered by the channel, in order of send; copied where that gives the
  // buffer back earlier. (A collective waits for its other messages anyway.)
  bool pointToPoint = false;
  // Messages of a collective must have the signature that the receiver began it
  // with. For point-to-point messages, only the element type is compared.
  OpSignature signature;
  TrafficClass trafficClass = TrafficClass::kGradient;
  int32_t sourceRank = -1;
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  // The first bytes of `data` that may be read, if not all are there yet. The
  // owner tells of more by Channel::sourceGrew().
  uint64_t availableBytes = UINT64_MAX;
  // About how many bytes the operation sends that this message is a part of, to
  // all peers; 0: it stands alone.
  uint64_t burstBytes = 0;
  // The owner has no other use for the buffer, so a copy would help nobody.
  bool neverCopied = false;
  // Nothing of it is sent before the far end has a receive for it, which can
  // then read it from where it lies (OutFrame::mayRefer). Costs a round trip.
  bool awaitReceive = false;
  // Unless it is exact, the send ends when the receiver has said what it had
  // to fill with zeros, and that stands in zeroFilled: ascending, disjoint.
  Tolerance tolerance;
  std::vector<ByteRange> zeroFilled;
  // Not ok: there is nothing to send. The message takes its number, so that
  // later ones keep theirs, ends with this, and fails at the receiver with the
  // same text.
  Status failure;

  uint64_t message = 0; // set by Channel::send; 0 once the core is done

  // All of it has been given to a path: nothing of it waits any more, unless
  // that path fails. It must not call back into the core.
  virtual void handedOut() {}
};

struct RecvOp : Operation {
  MessageKey key;
  bool ordered = false; // point-to-point: `order` is given by arrival
  Channel* source = nullptr; // null: any source (ordered only)
  OpSignature signature;
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  // Devices do not know the memory yet. A sender that waits for the receive is
  // not told of it before Channel::receiveReady().
  bool settling = false;

  // Called for each chunk that lies in `data`, whole. It must not call back
  // into the core. Chunks come in any order, each once.
  virtual void arrived(uint64_t offset, uint64_t bytes) {
    (void)offset;
    (void)bytes;
  }

  // The core's part. It is reset by Mailbox::post() and needs no initial
  // values.
  InMessage* message = nullptr; // the matched message, while it arrives
  Channel* matchedSource = nullptr; // set once matched
  int32_t matchedRank = -1; // of the sender, once matched
};

// Ended operations; their owners have not been called back yet. Loop thread.
class CompletionQueue {
 public:
  // Called when the queue stops being empty. The engine then drains it at the
  // end of the turn.
  void setWake(std::function<void()> wake) {
    wake_ = std::move(wake);
  }

  // `op` must not be in the queue already.
  void push(Operation* op, Status status) {
    if (head_ == nullptr && wake_) {
      wake_();
    }
    op->status_ = std::move(status);
    op->queued_ = true;
    op->previous_ = tail_;
    op->next_ = nullptr;
    (tail_ == nullptr ? head_ : tail_->next_) = op;
    tail_ = op;
  }

  // The owner no longer wants to know; true if `op` was queued.
  bool remove(Operation* op) {
    if (!op->queued_) {
      return false;
    }
    (op->previous_ == nullptr ? head_ : op->previous_->next_) = op->next_;
    (op->next_ == nullptr ? tail_ : op->next_->previous_) = op->previous_;
    op->queued_ = false;
    return true;
  }

  bool empty() const {
    return head_ == nullptr;
  }

  // Tells the owners of everything queued, also of what they cause. finished()
  // may destroy its operation, cancel any other one, and post new ones.
  void drain() {
    while (head_ != nullptr) {
      Operation* op = head_;
      remove(op);
      const Status status = std::move(op->status_);
      op->finished(status);
    }
  }

 private:
  Operation* head_ = nullptr;
  Operation* tail_ = nullptr;
  std::function<void()> wake_;
};

} // namespace resilient
