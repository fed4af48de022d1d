#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "channel/channel.h"
#include "path/faults.h"
#include "transport/event_loop.h"
#include "transport/frame_reader.h"
#include "transport/route_path.h"
#include "transport/silence_limit.h"
#include "transport/verbs_api.h"
#include "transport/verbs_loans.h"

namespace resilient {

// One end of a queue pair, with the memory that it sends from and receives to:
// a packet that is late lands there and harms nobody. Only reads access other
// memory, see VerbsPath.
//
// Thread: one at a time: the loop, or a thread that connects or ends it.
class VerbsEnd {
 public:
  // A slot holds one send or receive: 64 KiB fill a packet of any size many
  // times, and the sender fills the next while one is on its way. 32 of them
  // carry 2 MiB, 10 Gbit/s for 1.6 ms.
  static constexpr size_t kSlotBytes = 64u << 10;
  static constexpr uint32_t kSlots = 32;
  // Reads that are under way; a device may allow fewer.
  static constexpr uint32_t kReads = 16;
  // A payload that is read to memory of the path is no larger.
  static constexpr size_t kMaxReadBytes = 1u << 20;

  // Opens the device, and posts all receives. Throws nothing; `end` is set if
  // the status is ok.
  static Status make(
      VerbsApi& api,
      const VerbsPort& port,
      VerbsQueuePairConfig config, // but for its depth
      std::unique_ptr<VerbsEnd>& end);
  // Fences the queue pair first. May block if the device does not answer.
  ~VerbsEnd();
  VerbsEnd(const VerbsEnd&) = delete;
  VerbsEnd& operator=(const VerbsEnd&) = delete;

  VerbsQueuePair& queuePair() {
    return *queuePair_;
  }
  const VerbsPort& port() const {
    return port_;
  }
  const VerbsDevice& device() const {
    return *device_;
  }
  const std::shared_ptr<VerbsDevice>& sharedDevice() const {
    return device_;
  }
  std::byte* sendSlot(uint32_t slot) {
    return memory_.get() + size_t(slot) * kSlotBytes;
  }
  std::byte* receiveSlot(uint32_t slot) {
    return sendSlot(kSlots + slot);
  }
  // The first bytes of a slot.
  Status send(uint32_t slot, size_t bytes);
  Status receive(uint32_t slot);
  // To memory of its own, for payloads that have no other place. Registered at
  // the first call.
  Status readBuffer(std::span<std::byte>& bytes, VerbsMemory*& memory);

  // The request numbers of receives and of reads begin here, those of sends
  // with 0.
  static constexpr uint64_t kReceives = kSlots;
  static constexpr uint64_t kFirstRead = 2 * kSlots;

 private:
  VerbsEnd() = default;

  struct Free {
    void operator()(std::byte* memory) const;
  };
  // Destroyed from the last to the first.
  VerbsPort port_;
  std::unique_ptr<std::byte, Free> memory_;
  std::shared_ptr<VerbsDevice> device_;
  std::unique_ptr<VerbsMemory> registered_;
  std::unique_ptr<std::byte[]> readBuffer_;
  std::unique_ptr<VerbsMemory> readBufferMemory_;
  std::unique_ptr<VerbsQueuePair> queuePair_;
};

struct VerbsPathConfig {
  size_t route = 0; // on which it is, for the owner
  bool initiator = false; // the end that offered it
  // A send without a completion for this long makes the path silent, or a
  // little longer if answers have been slow (SilenceLimit). The NIC of the far
  // end answers, however busy its process is.
  Nanos silentAfter = std::chrono::milliseconds(40);
  // And one for this long closes it: some devices never complete a request
  // after a failure.
  Nanos closeAfter = std::chrono::seconds(5);
  // It is closed if it has not shown within this time that it works.
  Nanos proveWithin = std::chrono::seconds(3);
  std::string remoteDevice; // for messages
  // Injected faults; outlive the path. Null: none.
  PathFaults* faults = nullptr;
  // Payloads are read straight from one tensor to the other, where both ends
  // have lent them. Null: all bytes go through slots.
  VerbsLoans* loans = nullptr;
  uint16_t remoteReads = 0; // that the far end answers at a time
  uint32_t mtuBytes = 0; // of both ends, the smaller
};

// An RDMA queue pair as a path of a channel. The frames are a stream of bytes,
// as on a connection; each send carries up to a slot of it, and the reader
// copies it out of the slot of a receive.
//
// How it works. A sender never sends more than the far end has posted receives
// for: each send says how many receives have been posted since the beginning.
// One of them is kept for a send that says nothing else, so the two ends cannot
// wait for each other. A completion frees the slot that was sent from, and
// shows that the NIC of the far end answers. It acknowledges nothing: a frame
// counts when the far end has read it, as on every path.
//
// Large payloads stay where they are, if their memory is lent to the device:
// the frame refers to it, and the far end reads it, straight to its place where
// that is lent, too. Nobody writes to the far end's memory. So what is late can
// only land in memory of the end that asked for it, which pins it in the
// channel until the read has completed or this queue pair is fenced. (SHIFT
// §3.1 shows why writes of the sender could not be repeated safely.) Frames are
// counted in order, so those behind a read wait for it.
//
// Paper: SHIFT §3.2, C#2, and §4.3: the receiver's count decides what is sent
// again after a failure; no completion does.
//
// Thread: loop thread. Lifetime: owned by its PeerLink.
class VerbsPath final : public RoutePath, public Handler, public Poller {
 public:
  // `end` is connected.
  VerbsPath(
      EventLoop& loop,
      Channel& channel,
      PathId id,
      std::unique_ptr<VerbsEnd> end,
      VerbsPathConfig config,
      PathOwner& owner);
  ~VerbsPath() override;

  // RoutePath
  size_t route() const override {
    return config_.route;
  }
  bool proven() const override {
    return proven_;
  }
  bool silent() const override {
    return silent_;
  }
  std::string where() const override;
  std::string about() const override;

  // Path
  // Proven, not silent, and no fault rule is about connections of the peer.
  bool usable() const override {
    return !closed_ && proven_ && !silent_ && !avoided_;
  }
  bool hasRoom() const override;
  size_t takeFrame(bool chunks = true) override;
  // Copies what it has taken: nothing of a frame is borrowed afterwards.
  bool flush() override;
  void close(const Status& why) override;
  TimePoint heardAt() const override {
    return heardAt_;
  }
  void faultsChanged(bool concerned) override;
  void fill(PathStats& stats) const override;

  // Handler: a notification of the device.
  void onEvents(uint32_t events) override;

  // Poller
  bool hasNews() override;
  void onNews() override;
  bool inMidst() const override {
    return readingBytes_ != 0 || full_ || !reader_.betweenFrames();
  }
  bool hasWriterHere() const override {
    return false;
  }
  bool writerIsOn(int) const override {
    return false;
  }
  void setAsleep(bool asleep) override;

  // Of an open path.
  const VerbsDevice& device() const {
    return end_->device();
  }

 private:
  // Frames that are taken ahead of flush().
  static constexpr size_t kBatchBytes = 1u << 20;
  // Payloads from here on are worth a read: below, its round trip costs more
  // than a copy.
  static constexpr size_t kReferFrom = 64u << 10;
  // The far end has not read these yet. More would keep work from other paths.
  static constexpr uint64_t kReferAhead = 8u << 20;
  // A slow network may need this much longer for each byte that is read.
  static constexpr double kSlowestBytesPerS = 10e6;
  // A link that is limited by a fault has a queue of this length.
  static constexpr Nanos kLimitedQueue = std::chrono::milliseconds(20);
  // The share of a turn; the rest follows in the next one.
  static constexpr size_t kCompletionsPerTurn = 64;

  // At the beginning of each slot.
  struct SlotHeader {
    uint32_t posted = 0; // receives, since the beginning, modulo 2^32
    uint32_t zero = 0; // room for flags
  };

  // Behind the header of a frame: where its payload is.
  struct Reference {
    uint64_t address = 0;
    uint32_t key = 0;
    uint32_t zero = 0;
  };
  static constexpr size_t kReferenceBytes =
      kFrameHeaderBytes + sizeof(Reference);
  // A payload that is being read, or need not be.
  struct Read {
    FrameHeader header;
    Reference from;
    bool wanted = false;
    bool pinned = false;
    bool inBuffer = false;
    bool done = false;
  };
  // A slot of a receive, read up to `at`.
  struct Arrived {
    uint32_t slot = 0;
    size_t bytes = 0;
    size_t at = 0;
  };

  // A filled slot that a fault holds back.
  struct Held {
    uint32_t slot = 0;
    size_t bytes = 0;
    TimePoint due;
    bool pending = false; // it counts as sent without an answer
  };

  bool mayPost(uint32_t reserve) const;
  void openSlot();
  Status postSlot();
  Status post(uint32_t slot, size_t bytes);
  void addPending();
  void writeOut();
  void tellPosted();
  void onCompletion(const VerbsCompletion& completion);
  bool refer(const OutFrame& frame, Status& status);
  Status onReceived(uint32_t slot, size_t bytes);
  Status readArrived();
  Status readSlot(Arrived& arrived);
  Status startRead(const std::byte* data);
  Status finishReads();
  void onRead();
  void answered();
  Nanos silentAfter() const;
  void prove();
  void armTimer();
  void onTimer();
  void setUse(bool& flag, bool value);
  void end();

  // Fault injection. It acts on the slots: while a rule concerns the path,
  // nothing is offered to be read.
  bool hasFaults() const {
    return config_.faults != nullptr && config_.faults->any();
  }
  bool isDropping() const {
    return hasFaults() && config_.faults->dropping(loop_.now());
  }
  Status releaseHeld();
  Status cut();
  void lookAtFaults();
  void armFaultTimer();

  EventLoop& loop_;
  std::unique_ptr<VerbsEnd> end_; // null once it is over
  const VerbsPathConfig config_;
  const std::string device_;
  FrameReader reader_;
  SilenceLimit silenceLimit_;
  bool proven_ = false;
  bool silent_ = false;
  bool avoided_ = false;
  TimePoint startedAt_, heardAt_;

  std::vector<uint32_t> freeSlots_;
  int slot_ = -1; // being filled, or none
  size_t slotBytes_ = 0; // of it, with its header
  size_t frontWritten_ = 0; // bytes of the first unwritten frame
  size_t unwrittenBytes_ = 0;
  bool full_ = false; // frames wait for a slot or a receive of the far end

  uint32_t sent_ = 0; // sends posted
  uint32_t peerPosted_ = VerbsEnd::kSlots; // receives of the far end
  uint32_t posted_ = VerbsEnd::kSlots; // ours
  uint32_t told_ = VerbsEnd::kSlots; // of these, told to the far end
  uint32_t pending_ = 0; // sends and reads without a completion
  TimePoint pendingSince_{}; // the last progress of these

  // Receives in the order of arrival, the payloads that the frames before them
  // refer to, and bytes of these that are under way.
  std::deque<Arrived> arrived_;
  std::deque<Read> reads_;
  uint64_t readingBytes_ = 0;
  uint64_t nextRead_ = VerbsEnd::kFirstRead;
  bool bufferInUse_ = false;
  const size_t maxReads_;

  std::deque<Held> held_;
  uint64_t postedBytes_ = 0; // of slots
  TimerId faultTimer_ = 0;

  VerbsStats counted_; // of this queue pair
  // Taken from the device, and not looked at yet.
  std::vector<VerbsCompletion> completions_;
  std::vector<VerbsCompletion> taken_; // by onNews(), to keep its memory
  Status polled_; // what the device said at the last call
  bool armed_ = false; // the next completion makes its descriptor readable
  TimerId timer_ = 0;
  // For calls that are posted to the loop and may come too late.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

} // namespace resilient
