#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "channel/channel.h"
#include "channel/mailbox.h"
#include "channel/operation.h"

namespace resilient {

// One simulated path: an in-order byte stream each way, as TCP gives, or whole
// frames in any order.
struct SimulatedLink {
  Nanos latency = std::chrono::microseconds(100); // one way
  Nanos jitter{}; // added at random to each piece, order is kept
  uint64_t bytesPerS = 100'000'000;
  // What the sending side may have written and not yet delivered: the socket
  // buffers. Small ones tear frames into many pieces.
  uint64_t windowBytes = 64 << 10;
  // As shared memory does: the writer learns from the path what was read.
  bool selfAcknowledging = false;
  // As a path of datagrams does: frames come whole and in any order, the writer
  // learns of each, and of messages that tolerate it parts are missing.
  bool datagrams = false;
  // As RDMA does: a payload may stay where it is, and the reader fetches it
  // from there, packet by packet.
  bool reads = false;
};

// A header, where the payload is, and the key of that memory.
inline constexpr size_t kReferenceBytes =
    kFrameHeaderBytes + sizeof(const std::byte*) + sizeof(uint64_t);

// A network of processes in virtual time: real channels and mailboxes, joined
// by simulated paths that are slow, tear frames anywhere or change their order,
// stall, break with bytes in flight, and come back as new ones. It is to the
// core what event loop and TCP are, so it also shows how the core's calls are
// to be used. Everything is decided by the seed.
//
// Thread: one. No real clock, no I/O.
class SimulatedNetwork : private ChannelHost {
 public:
  using PathRef = size_t;

  // What the users of the network want to know.
  class Listener : public MailboxListener {
   public:
    virtual void onControl(
        size_t process,
        size_t peer,
        std::span<const std::byte> payload) = 0;
    virtual void onBye(size_t process, size_t peer) = 0;
    // A channel refused the bytes of its peer: a bug, here.
    virtual void
    onProtocolError(size_t process, size_t peer, const Status& status) = 0;
    // After every event, when all that follows from it has happened.
    virtual void onSettled() = 0;
  };

  SimulatedNetwork(uint64_t seed, Listener& listener);
  ~SimulatedNetwork() override;

  // A process with channels to all others. Call `join` once all are added.
  void addProcess(const ChannelConfig& config, uint64_t stagingBytes);
  void join();

  size_t processes() const {
    return processes_.size();
  }
  Channel& channel(size_t process, size_t peer) {
    return *processes_[process]->channels[peer];
  }
  Mailbox& mailbox(size_t process) {
    return processes_[process]->mailbox;
  }
  CompletionQueue& completions(size_t process) {
    return processes_[process]->completions;
  }
  const StagingMemory& staging(size_t process) const {
    return processes_[process]->staging;
  }
  // The process whose channel this is, and whom the channel leads to.
  std::pair<size_t, size_t> ownerOf(const Channel& channel) const;

  // --- paths
  PathRef connect(size_t a, size_t b, const SimulatedLink& link);
  // No byte moves until then, in either direction.
  void stall(PathRef path, TimePoint until);
  // The connection breaks now: of what is in flight only a part arrives, cut
  // at any byte. Both ends learn of it, each at its own time within `notice`,
  // and go on writing into it until then.
  void cut(PathRef path, Nanos notice);
  // What the owner of a path decides about it, at one end.
  void suspect(PathRef path, int side, bool suspect);
  void setClasses(PathRef path, int side, uint8_t classes);
  void setBursts(PathRef path, int side, BurstRange range);
  // Nothing is suspect any more, and all paths carry everything.
  void trustAll();
  bool broken(PathRef path) const {
    return paths_[path]->broken;
  }
  // All paths between two processes that are not broken.
  std::vector<PathRef> pathsBetween(size_t a, size_t b) const;

  // --- memory that paths which read may access
  void registerMemory(const std::byte* data, uint64_t bytes);
  // The key of its registration, 0 if it has none. The same memory gets another
  // key each time, so what was late for its last owner finds it revoked.
  uint64_t keyOf(const std::byte* data, uint64_t bytes) const;
  // After a while, no path accesses it any more, and `done` is called.
  void revoke(const std::byte* data, std::function<void()> done);

  // --- time
  TimePoint now() const {
    return now_;
  }
  void at(TimePoint when, std::function<void()> what);
  // Runs the next event and what follows from it; false if there is none.
  bool step();
  uint64_t events() const {
    return events_;
  }

  // Two runs that did the same have the same hash.
  uint64_t traceHash() const {
    return traceHash_;
  }
  // Lines for people, one per event; empty function: none.
  void setTrace(std::function<void(const std::string&)> sink) {
    trace_ = std::move(sink);
  }
  void note(uint64_t what, uint64_t a, uint64_t b, const char* text);

 private:
  struct Process {
    explicit Process(MailboxListener& listener)
        : mailbox(completions, listener) {}
    ChannelConfig config;
    CompletionQueue completions;
    StagingMemory staging;
    Mailbox mailbox;
    std::vector<std::unique_ptr<Channel>> channels; // by peer; own: null
  };

  // A payload that the reader fetches.
  struct Read {
    FrameHeader header;
    const std::byte* from = nullptr;
    uint64_t fromKey = 0;
    std::byte* to = nullptr; // its pinned place, or in `own`
    uint64_t toKey = 0; // not 0 if it is pinned
    std::vector<std::byte> own;
    uint64_t asked = 0, landed = 0; // bytes
  };

  // One direction of a path: its writer, the bytes on the way, its reader.
  struct Stream {
    // writer
    size_t writtenOfFrame = 0; // header and payload of the front frame
    // on the way
    std::deque<std::pair<TimePoint, std::vector<std::byte>>> pieces;
    uint64_t inFlightBytes = 0;
    TimePoint linkFree{}; // when the link has sent what it was given
    TimePoint lastArrival{};
    bool deliveryPlanned = false;
    std::optional<uint64_t> bytesLeft; // once broken: these still arrive
    // reader
    FrameBytes header;
    size_t headerRead = 0;
    FrameHeader frame;
    size_t payloadRead = 0;
    uint64_t framesRead = 0; // reliable ones
    // of datagrams: what the writer knows of each frame it has sent
    struct Sent {
      bool reliable = false;
      bool done = false;
    };
    std::deque<Sent> sent; // from number sentBegin on
    uint64_t sentBegin = 0;
    uint64_t framesDone = 0; // reliable ones, up to the first that is not
    // of reads: what the reader has begun, and the bytes behind
    std::deque<std::shared_ptr<Read>> reads;
    std::vector<std::byte> held;
    size_t frameLeft = 0; // of the frame that is being read
    TimePoint lastLanding{};
  };

  // A frame on its way over a path of datagrams.
  struct Datagram {
    uint64_t number = 0;
    FrameBytes header;
    std::vector<std::byte> payload;
    std::vector<ByteRange> holes;
  };

  struct End {
    size_t process = 0;
    size_t peer = 0;
    PathId id = 0;
    bool open = false; // the channel knows the path
    bool fenced = false; // its device accesses no memory any more
    Stream stream; // written by this end
  };

  struct Path {
    SimulatedLink link;
    End ends[2];
    TimePoint stalledUntil{};
    bool broken = false;
  };

  struct Event {
    TimePoint when;
    uint64_t number; // keeps events of one time in order
    std::function<void()> what;
    bool operator<(const Event& o) const {
      return when != o.when ? when > o.when : number > o.number;
    }
  };

  void channelReady(Channel& channel) override;
  void onControl(Channel& channel, std::span<const std::byte> payload) override;
  void onBye(Channel& channel) override;

  void settle();
  void armTimer(Channel& channel);
  void write(PathRef path, int side);
  void writeDatagrams(PathRef path, int side);
  void arrive(PathRef path, int side, const std::shared_ptr<Datagram>& what);
  void acknowledge(PathRef path, int side, uint64_t number);
  void planDelivery(PathRef path, int side);
  void deliver(PathRef path, int side);
  void planAcknowledgement(PathRef path, int side);
  bool read(
      Path& path,
      End& reader,
      Stream& stream,
      const std::byte* data,
      size_t bytes);
  void closeEnd(PathRef path, int side);
  bool refer(PathRef path, int side, std::vector<std::byte>& piece);
  bool readHeld(PathRef path, int side);
  void startRead(PathRef path, int side, const std::byte* data);
  void answerRead(PathRef path, int side, const std::shared_ptr<Read>& what);
  void land(
      PathRef path,
      int side,
      const std::shared_ptr<Read>& what,
      uint64_t offset,
      std::vector<std::byte> packet);
  void finishReads(PathRef path, int side);
  void breakNow(PathRef path);

  Listener& listener_;
  Prng prng_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::unique_ptr<Path>> paths_;
  PathId lastPathId_ = 0;
  struct Region {
    uint64_t bytes;
    uint64_t key;
  };
  std::map<const std::byte*, Region> memory_; // that is registered
  uint64_t lastKey_ = 0;
  TimePoint now_{std::chrono::seconds(1)};
  std::priority_queue<Event> queue_;
  uint64_t events_ = 0;
  uint64_t eventNumber_ = 0;
  std::vector<bool> dirty_; // by channel id
  std::vector<uint32_t> dirtyList_;
  std::vector<TimePoint> timerAt_; // by channel id; planned onTimer
  std::vector<std::vector<PathRef>> openPaths_; // by channel id
  uint64_t traceHash_ = 0;
  std::function<void(const std::string&)> trace_;
};

} // namespace resilient
