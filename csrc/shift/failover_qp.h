#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace resilient::shift {

// The states of SHIFT, section 4.3. The initial numbers are those of the paper.
enum class SendState : uint8_t {
  kDefault = 1,
  kFallback = 2,
  kWaitSignaled = 3,
  kWaitDrained = 4,
};
enum class ReceiveState : uint8_t { kDefault = 1, kFallback = 2 };

enum class Operation : uint8_t {
  kWrite,
  kWriteWithImmediate,
  kSend,
  kRead,
  kAtomic,
  // Everything that cannot be repeated on another device (binding of memory
  // windows, local invalidation).
  kOther,
};

// As ibv_sge.
struct Piece {
  uint64_t address;
  uint32_t length;
  uint32_t key;
};

// One request to send, as it was posted. The pieces and the inline bytes lie in
// FailoverQp.
struct SendRequest {
  uint64_t id = 0;
  uint64_t remoteAddress = 0;
  uint32_t remoteKey = 0;
  uint32_t immediate = 0;
  uint32_t opcode = 0; // of the verbs library, not interpreted here
  uint32_t flags = 0; // likewise
  uint32_t length = 0;
  // The first packet's number on the active path, and how many packets.
  uint32_t firstPacket = 0;
  uint32_t packets = 0;
  // Bytes of a plain WRITE that the receiver's NIC accepted on an earlier path.
  uint32_t landed = 0;
  uint16_t pieces = 0;
  Operation operation = Operation::kOther;
  bool isSignaled = false;
  bool isInline = false;
  // The application marked it as ineligible for retransmission.
  bool isMarked = false;
  // A fence of our own: the application gets no completion for it.
  bool isInternal = false;
};

struct ReceiveRequest {
  uint64_t id = 0;
  uint16_t pieces = 0;
};

struct Limits {
  uint32_t sends = 0;
  uint32_t receives = 0;
  uint32_t sendPieces = 0;
  uint32_t receivePieces = 0;
  uint32_t inlineBytes = 0;
};

// What one end states after it has fenced its queue pair: final, because
// nothing can arrive there any more.
struct Progress {
  // Two-sided messages received since the queue pair was connected.
  uint64_t received = 0;
  // The number of the next packet that its NIC would have accepted.
  uint32_t nextPacket = 0;
};

inline constexpr uint32_t kPacketMask = 0xffffff;

// The packets of a message of `length` bytes; 1 if it is empty.
uint32_t packetsOf(uint32_t length, uint32_t mtu);

// The requests of one protected queue pair and the states of SHIFT. No I/O, no
// locks, no clock. Nothing here allocates after the constructor.
class FailoverQp {
 public:
  explicit FailoverQp(const Limits& limits);

  // ---- Requests. Each returns the recorded request, or nullptr if full. ----
  SendRequest* pushSend(std::span<const Piece> pieces);
  // A signaled, empty WRITE of our own; a slot is always free for one.
  SendRequest& pushFence();
  ReceiveRequest* pushReceive(std::span<const Piece> pieces);
  // Sets the packet numbers of a pushed send that is now given to the NIC.
  void numberSend(SendRequest& request);
  // The newest request was refused by the library below.
  void undoSend();
  void undoReceive();

  // ---- Completions ----
  // A signaled request succeeded: retires it and unsignaled ones before it.
  // Returns false if nothing signaled is outstanding.
  bool completeSend(SendRequest& completed);
  bool completeReceive(ReceiveRequest& completed);

  // ---- A switch of paths, in this order ----
  // Why outstanding requests cannot be sent again; empty if they can.
  // Paper: SHIFT §4.3.2, retransmission-safe check
  std::string_view unsafe() const;
  // Holds all sends from now on (the doorbell is withheld).
  void hold();
  uint64_t received() const {
    return received_;
  }
  // Applies the peer's statement. Sends that it has received are retired, and
  // the signaled ones among them put into `completed`. Returns why the
  // statement is impossible; then nothing may be sent again.
  // Paper: SHIFT §4.3.2, work queue resubmitting
  std::string_view applyProgress(
      const Progress& peer,
      std::vector<SendRequest>& completed);
  // Receives are posted to the other path from now on, all outstanding ones
  // again. Call before the own progress is stated.
  void moveReceives();
  // Sends take the path of the receives; its first packet has this number.
  void endSwitch(uint32_t nextPacket);

  // ---- Held requests: recorded and not yet given to a NIC ----
  SendRequest* firstHeldSend() {
    return postedSends_ == sendTail_ ? nullptr : &sendAt(postedSends_);
  }
  void sendPosted() {
    ++postedSends_;
  }
  ReceiveRequest* firstHeldReceive() {
    return postedReceives_ == receiveTail_ ? nullptr
                                           : &receiveAt(postedReceives_);
  }
  void receivePosted() {
    ++postedReceives_;
  }
  void releaseSends() {
    isHeld_ = false;
  }
  bool isHeld() const {
    return isHeld_;
  }

  // ---- The return to the default path. Paper: SHIFT §4.3.3 ----
  void beginReturn();
  // The fence was given to the NIC: sends are held until it completes.
  void fencePosted();
  void cancelReturn();
  bool isDrained() const {
    return sendState_ == SendState::kWaitDrained && sendHead_ == postedSends_;
  }

  // ---- For all outstanding requests, when protection ends ----
  bool popSend(SendRequest& request);
  bool popReceive(ReceiveRequest& request);

  // Whether nothing was posted to the NIC that has not completed.
  bool isIdle() const {
    return sendHead_ == postedSends_;
  }
  // Whether something was posted whose success would give a completion.
  bool awaitsCompletion() const;
  uint64_t completedSends() const {
    return sendHead_;
  }
  uint64_t outstandingReceives() const {
    return receiveTail_ - receiveHead_;
  }
  std::span<Piece> pieces(const SendRequest& request);
  std::span<Piece> pieces(const ReceiveRequest& request);
  std::span<uint8_t> inlineBytes(const SendRequest& request);

  SendState sendState() const {
    return sendState_;
  }
  ReceiveState receiveState() const {
    return receiveState_;
  }
  // 0: the default path, 1: the backup.
  int active() const {
    return active_;
  }
  int receivePath() const {
    return receiveState_ == ReceiveState::kDefault ? 0 : 1;
  }
  void setPacketRules(uint32_t mtu, uint32_t nextPacket);
  void setNextPacket(uint32_t nextPacket) {
    nextPacket_ = nextPacket & kPacketMask;
  }

 private:
  SendRequest& sendAt(uint64_t index) {
    return sends_[index & sendMask_];
  }
  const SendRequest& sendAt(uint64_t index) const {
    return sends_[index & sendMask_];
  }
  ReceiveRequest& receiveAt(uint64_t index) {
    return receives_[index & receiveMask_];
  }
  std::string_view noteLanded(uint32_t nextPacket);

  Limits limits_;
  std::vector<SendRequest> sends_;
  std::vector<Piece> sendPieces_;
  std::vector<uint8_t> inline_;
  std::vector<ReceiveRequest> receives_;
  std::vector<Piece> receivePieces_;
  uint64_t sendMask_;
  uint64_t receiveMask_;
  // Indices that only grow; head <= posted <= tail.
  uint64_t sendHead_ = 0;
  uint64_t postedSends_ = 0;
  uint64_t sendTail_ = 0;
  uint64_t receiveHead_ = 0;
  uint64_t postedReceives_ = 0;
  uint64_t receiveTail_ = 0;
  // Two-sided messages.
  uint64_t received_ = 0;
  uint64_t sent_ = 0;
  uint32_t mtuShift_ = 10;
  uint32_t nextPacket_ = 0;
  bool isHeld_ = false;
  int active_ = 0;
  SendState sendState_ = SendState::kDefault;
  ReceiveState receiveState_ = ReceiveState::kDefault;
};

} // namespace resilient::shift
