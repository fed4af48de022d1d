#pragma once

#include <cstdint>
#include <deque>

#include "base/status.h"
#include "base/syscall.h"
#include "channel/channel.h"
#include "transport/event_loop.h"
#include "transport/frame_reader.h"
#include "transport/path.h"
#include "transport/shared_memory.h"

namespace resilient {

// The objects that two processes of one host share once they have met (see
// shared_rendezvous.h). Complete when a path gets them: no member is empty.
struct SharedEnds {
  SharedMemory memory;
  int side = 0; // ours
  FileDescriptor wakeMine, wakeTheirs; // eventfds
  FileDescriptor socket; // to the peer; its end is the end of the peer
};

// Shared memory as a path of a channel: the same stream of frames as on a TCP
// connection, in a ring for each direction, without a system call unless the
// far end sleeps. The ring itself acknowledges the bytes that the peer has
// read.
//
// The bytes in it are as safe as the peer: they are lost only with it. So the
// path is never suspect and needs no probes.
//
// Thread: loop thread. Lifetime: owned by its PeerLink.
//
// Two positions of the reader have two meanings. `read` makes room in the ring.
// `done` acknowledges, and is published by flush() only after the answers to
// those bytes have been written: a refusal must be read before the
// acknowledgement of what it refuses.
class SharedPath final : public Path, public Poller {
 public:
  SharedPath(
      EventLoop& loop,
      Channel& channel,
      PathId id,
      SharedEnds ends,
      PathOwner& owner);
  ~SharedPath() override;

  // Path
  // False as long as one of the two ends avoids it.
  bool usable() const override {
    return !closed_ && !avoided_;
  }
  bool hasRoom() const override;
  size_t takeFrame(bool chunks = true) override;
  // Also publishes `done` for what was read in this turn.
  bool flush() override;
  void close(const Status& why) override;
  TimePoint heardAt() const override {
    return heardAt_;
  }
  void faultsChanged(bool concerned) override {
    avoid(concerned);
  }

  // Messages take the network instead, as long as one of the two ends says so.
  // The word lies in the shared memory, so the other end learns it without a
  // message. Bytes that are in the ring already are still read.
  void avoid(bool avoid);

  // Poller
  bool hasNews() override;
  void onNews() override;
  bool inMidst() const override;
  bool hasWriterHere() const override {
    return true;
  }
  bool writerIsOn(int processor) const override;
  void setAsleep(bool asleep) override;

 private:
  // Copied in one go; small enough that the far end soon has something to do.
  static constexpr size_t kPiece = 32u << 10;
  static constexpr size_t kBatchBytes = 1u << 20;
  static constexpr size_t kReadPerTurn = 4u << 20;
  // Completion that no caller waits for is noticed after this time.
  static constexpr Nanos kLookAfter = std::chrono::milliseconds(5);
  static constexpr Nanos kLookAtLast = std::chrono::seconds(1);
  static constexpr uint64_t kNowhere = UINT64_MAX;

  struct Wake final : Handler {
    void onEvents(uint32_t) override {} // the loop asks hasNews() anyway
  };
  struct End final : Handler {
    explicit End(SharedPath& p) : path(p) {}
    void onEvents(uint32_t events) override;
    SharedPath& path;
  };
  struct Written {
    uint64_t end = 0; // position in the ring
    bool reliable = false;
  };

  // False: the ring is full, or the peer has broken it and the path is closed.
  bool put(const std::byte* data, size_t bytes);
  void writeOut();
  // False: the path is closed. True says nothing about progress.
  bool refresh();
  void acknowledge();
  void lookLater();
  void read();
  void finish();
  void wakePeer();
  void wakePeerForRoom();
  void sayWhere();
  void lookAtAvoidance();
  void setWakeAt();

  EventLoop& loop_;
  SharedEnds ends_;
  SharedMemory::Side& mine_;
  SharedMemory::Side& theirs_;
  RingWriter out_;
  RingReader in_;
  FrameReader reader_;
  Wake wake_;
  End end_;
  bool avoided_ = false;
  TimePoint heardAt_;

  size_t frontWritten_ = 0; // bytes of the first unwritten frame
  size_t unwrittenBytes_ = 0;
  bool full_ = false; // frames wait for room in the ring
  // Both queues ascend by position.
  std::deque<Written> undone_; // frames in the ring, whole
  std::deque<uint64_t> asked_; // ends of those whose owner waits
  uint64_t framesDone_ = 0; // reliable ones
  // Positions whose being reached is news.
  uint64_t wakeAtRead_ = kNowhere, wakeAtDone_ = kNowhere;
  TimerId lookTimer_ = 0;
  Nanos lookAfter_ = kLookAfter;
};

} // namespace resilient
