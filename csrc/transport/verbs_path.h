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
#include "transport/verbs_end.h"
#include "transport/verbs_loans.h"
#include "transport/verbs_reads.h"
#include "transport/verbs_sender.h"
#include "transport/verbs_slot.h"

namespace resilient {

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
// VerbsEnd has the queue pair and its memory, VerbsSender fills and posts
// slots, VerbsReads has the payloads that are read. This class takes
// completions, reads the slots that arrive, and judges silence.
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
    return reads_.bytesUnderWay() != 0 || sender_.isFull() ||
        !reader_.betweenFrames();
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
  // The share of a turn; the rest follows in the next one.
  static constexpr size_t kCompletionsPerTurn = 64;

  // A slot of a receive, read up to `at`.
  struct Arrived {
    uint32_t slot = 0;
    size_t bytes = 0;
    size_t at = 0;
  };

  void onCompletion(const VerbsCompletion& completion);
  Status onReceived(uint32_t slot, size_t bytes);
  Status readArrived();
  Status readSlot(Arrived& arrived);
  Status startRead(const std::byte* data);
  Status finishReads();
  void onRead();
  void afterSending(const Status& status);
  void answered();
  Nanos silentAfter() const;
  TimePoint probeAt() const;
  void prove();
  void armTimer();
  void onTimer();
  void setUse(bool& flag, bool value);
  void end();
  void lookAtFaults();
  void armFaultTimer();

  EventLoop& loop_;
  std::unique_ptr<VerbsEnd> end_; // null once it is over
  const VerbsPathConfig config_;
  const std::string device_;
  FrameReader reader_;
  SilenceLimit silenceLimit_;
  ReadTime readTime_;
  bool proven_ = false;
  bool silent_ = false;
  TimePoint probedAt_{};
  bool avoided_ = false;
  TimePoint startedAt_, heardAt_;

  VerbsStats counted_; // of this queue pair
  VerbsPending pending_;
  VerbsReads reads_; // while there is an end
  VerbsSender sender_; // likewise
  // Receives in the order of arrival. The payloads that the frames before them
  // refer to are in reads_.
  std::deque<Arrived> arrived_;
  uint32_t posted_ = VerbsEnd::kSlots; // receives

  // Taken from the device, and not looked at yet.
  std::vector<VerbsCompletion> completions_;
  std::vector<VerbsCompletion> taken_; // by onNews(), to keep its memory
  Status polled_; // what the device said at the last call
  bool armed_ = false; // the next completion makes its descriptor readable
  TimerId timer_ = 0;
  TimerId faultTimer_ = 0;
  // For calls that are posted to the loop and may come too late.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

} // namespace resilient
