#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel/in_message.h"
#include "channel/operation.h"
#include "channel/staging_memory.h"
#include "path/class_scheduler.h"
#include "path/link_statistics.h"
#include "path/number_set.h"
#include "path/recent_samples.h"
#include "path/striping.h"
#include "path/urgency.h"
#include "wire/frame.h"

namespace resilient {

class Mailbox;

using PathId = uint32_t;

// Sizes of bursts, in bytes: above the first, up to the second. From 0 on, an
// empty one belongs to it as well.
struct BurstRange {
  uint64_t above = 0;
  uint64_t upTo = UINT64_MAX;

  static constexpr BurstRange none() {
    return {UINT64_MAX, 0};
  }
  // 0: none.
  static constexpr BurstRange ofAtMost(uint64_t bytes) {
    return bytes == 0 ? none() : BurstRange{0, bytes};
  }
  bool isNone() const {
    return above > upTo;
  }
  bool contains(uint64_t bytes) const {
    return (bytes > above || above == 0) && bytes <= upTo;
  }
  bool operator==(const BurstRange&) const = default;
};

struct ChannelConfig {
  // The largest chunk. Messages are cut smaller where a path is slow, and
  // larger if they would exceed kMaxChunksPerMessage.
  uint32_t chunkBytes = 512u << 10;
  // The bytes that the *receiver* of a direction holds for messages without a
  // receive; the peer's value arrives with the handshake.
  uint64_t ownEagerBytes = 64u << 20;
  uint64_t peerEagerBytes = 64u << 20;
  // Sends up to this size are copied at once and end in send(), if the
  // StagingMemory allows it.
  uint64_t copyBytes = 64u << 10;
  // A larger send may be copied after this time: see stageLent().
  Nanos stageAfter = std::chrono::milliseconds(2);
  // A copy is made in pieces of this size: 16 MiB at once hold up the loop for
  // 2 to 3 ms.
  uint64_t copyPieceBytes = 2u << 20;
  uint64_t starvationBytes = 8u << 20;
  uint32_t firstChunkBytes = UINT32_MAX; // at most, while nothing is measured
};

// Callbacks of the channel to its owner, on the loop thread.
class ChannelHost {
 public:
  virtual ~ChannelHost() = default;
  // There may be frames for the paths, or an earlier deadline(). Called often;
  // must be cheap and must not call back into the channel.
  virtual void channelReady(Channel& channel) = 0;
  // Both are called from within onPayload(), once for each frame, whichever
  // paths repeated it. The host may send. It must not close the path that
  // brought the frame, nor destroy the channel, before a later turn: the path
  // goes on reading, and the acknowledgement of a goodbye still has to leave.
  virtual void onControl(
      Channel& channel,
      std::span<const std::byte> payload) = 0;
  virtual void onBye(Channel& channel) = 0;
};

// A frame on its way into a path: header, then payload. The payload pointer
// may change between two writes (a buffer was copied because its owner wants
// it back), never the bytes: ask again before each write.
//
// It stays in the unwritten frames of one path until popWritten(), removePath()
// or fail(). Until then the path may keep a pointer to it.
struct OutFrame {
  FrameBytes header;
  const std::byte* payload = nullptr;
  uint32_t payloadBytes = 0;
  uint64_t message = 0; // 0: control
  uint64_t offset = 0; // of the payload in its message
  uint64_t order = 0; // of the message in its stream
  uint64_t burstBytes = 0; // of the message: see BurstRange; 0: control
  bool reliable = false; // the receiver acknowledges it
  bool ackNow = false; // the sender waits for that
  // For paths that lose packets: what the payload is, and what of it may be
  // missing.
  TrafficClass trafficClass = TrafficClass::kActivation;
  DType dtype = DType::kUInt8;
  Tolerance tolerance;
  // The far end knows where the payload will lie, and the owner of the payload
  // waits until it does: a path may leave it to the far end to read it.
  bool mayRefer = false;
  // The payload, if its message gave the buffer back before the frame was
  // written: see detachFrames().
  std::unique_ptr<std::byte[]> owned;
};

struct ChannelCounters {
  uint64_t messagesSent = 0; // acknowledged whole
  uint64_t messagesReceived = 0; // whole and matched
  uint64_t bytesSent = 0; // payload, acknowledged
  uint64_t bytesReceived = 0; // payload, without duplicates
  uint64_t duplicateChunks = 0;
};

struct PathCounters {
  uint64_t bytesSent = 0; // payload handed to the path
  uint64_t bytesReceived = 0;
  uint64_t chunksSent = 0;
  uint64_t chunksRetransmitted = 0; // of these, repeats of another path's
  uint64_t timesSuspect = 0;

  void add(const PathCounters& more) {
    bytesSent += more.bytesSent;
    bytesReceived += more.bytesReceived;
    chunksSent += more.chunksSent;
    chunksRetransmitted += more.chunksRetransmitted;
    timesSuspect += more.timesSuspect;
  }
};

// The relation to one remote process: messages in both directions over any
// number of paths that come and go. It owns numbering, chunking, credit,
// acknowledgement, re-queueing, reassembly and duplicate removal; it does no
// I/O and has no clock and no thread, which lets the simulation drive it.
//
// Sender. A message is cut into chunks of one size; each goes over whichever
// path asks next. The channel keeps, per path, the frames it handed out in
// order; the receiver acknowledges by counting frames per path. A path that
// dies gives its unacknowledged chunks back, to be sent again by the others.
// Credit: bytes of messages the receiver has not matched are charged against
// its budget; a message without credit is announced by an offer and waits
// until the receiver, having matched it, grants it.
//
// Receiver. A chunk of a matched message goes straight to its place in the
// user's buffer; before that, into a block of its own. A duplicate is
// discarded.
//
// Errors. A Status that is not ok from onHeader() or onPayload() is a protocol
// error of the peer. The channel does not act on it: the caller closes the
// path, and the other paths carry its frames. Errors of an operation only reach
// its owner through the completion queue, never as a return value.
//
// Time. Every call with `now` must pass a time that is not before that of the
// call before. Calls without it use the time of the last one that had it.
//
// Thread: loop thread. Lifetime: outlives every operation posted to it. The
// mailbox, the queue, the budget and the host are borrowed and outlive the
// channel.
class Channel {
 public:
  Channel(
      uint32_t id,
      ChannelConfig config,
      Mailbox& mailbox,
      CompletionQueue& completions,
      StagingMemory& staging,
      ChannelHost& host);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  uint32_t id() const {
    return id_;
  }
  void setPeerEagerBytes(uint64_t bytes) {
    config_.peerEagerBytes = bytes;
  }
  // The size of chunks until something is known of the paths.
  void setFirstChunkBytes(uint32_t bytes) {
    config_.firstChunkBytes = bytes;
  }
  // The owner sets the pace of all paths together (pull without chunks). Chunks
  // are no larger than this, or a quarter more where that is the whole message,
  // and leave in order: no path skips ahead to later messages.
  // `bytesPerS`: the cap.
  void setPaced(uint32_t chunkBytes, double bytesPerS) {
    pacedChunkBytes_ = chunkBytes;
    uplinkBytesPerS_ = bytesPerS;
  }

  // --- the application's side
  // Borrows `op` and its bytes until finished() or cancelSend(). The order of
  // the calls is the order in which messages of one (group, stream) match. A
  // message that is too large, or any message after fail(), ends through the
  // completion queue, too.
  void send(SendOp* op, TimePoint now);
  // More of the bytes of `op` may be read: the first `availableBytes`, no fewer
  // than before. Without effect if the send has ended.
  void sourceGrew(SendOp* op, uint64_t availableBytes, TimePoint now);
  // The operation will not be finished; its memory is free at return. The
  // receive that matches the message fails with `reason`, unless it has ended
  // before. A send that has ended already is left as it is.
  void cancelSend(SendOp* op, const std::string& reason, TimePoint now);
  // At most kMaxControlBytes. It reaches the peer exactly once, but in no order
  // with messages or other control frames. After fail() it is dropped.
  // `direct`: not over a relay, as what is about relays itself.
  void sendControl(std::vector<std::byte> payload, bool direct = false);
  // The goodbye may overtake messages on another path, so call it only once
  // drained() holds. It asks for an acknowledgement at once, and tells which
  // messages of the peer have ended here: their own acknowledgements may be
  // lost with us.
  void sendBye();
  // Everything pending fails; later sends fail at once. Only the first call
  // counts. Messages that have arrived whole stay for receives to come. The
  // paths stay, but pull() gives them nothing; their owner removes them.
  void fail(const Status& status);
  const Status& failure() const {
    return failure_;
  }
  // Nothing is waiting to be sent or acknowledged. A message counts until all
  // its chunks are acknowledged, even if a copy has ended its send. Control
  // frames count, too.
  bool drained() const;
  // A message of ours is not acknowledged yet.
  bool carriesMessages() const {
    return unacknowledged_ != 0;
  }
  // drained() for the messages of one group. Control frames do not count here.
  // Looks at every open message.
  bool drained(uint64_t group) const;

  // --- the mailbox's side
  // `message` got a receive; moves what has arrived, asks for the rest. Call it
  // once for each message, after setting `message.op`. A whole message ends its
  // receive, so `message` may be gone at return.
  void matched(InMessage& message);
  // Devices know the memory of `op` now, or never will: the sender may send.
  // `op` is posted, and this channel's if it has matched.
  void receiveReady(RecvOp* op, TimePoint now);
  // `message` is over and its sender knows. Frees it.
  void drop(InMessage& message) {
    forget(message);
  }
  // No receive will take `message`: tells the sender why and frees it. If this
  // happens while a chunk of it is being read, the refusal takes the path of
  // that chunk, ahead of its acknowledgement. On another path it could come too
  // late: the send would have succeeded.
  void reject(InMessage& message, StatusCode code, const std::string& reason);

  // --- the paths' side
  //
  // A path's owner adds it before any other call with its id and removes it
  // when it is closed. All other functions need a path that is there; only
  // removePath() ignores an unknown one. The references stay valid while other
  // paths come and go.
  void addPath(PathId path, TimePoint now);
  // Takes back what the path had not delivered.
  void removePath(PathId path, TimePoint now);
  // Adds the next frame to the path's unwritten ones; null if there is none.
  // Without `chunks` none of a message: only what keeps the path alive. A
  // pulled frame is bound to this path. Others repeat it only if the path is
  // removed, suspect, or late with it (hedge()), so a path should pull no more
  // than it can write soon.
  const OutFrame* pull(PathId path, TimePoint now, bool chunks = true);
  // In the order of pull(). The front may be half written.
  const std::deque<OutFrame>& unwritten(PathId path) const;
  // Needs an unwritten frame. From then on the peer may acknowledge it; before,
  // an acknowledgement of it is a protocol error. A message whose last byte
  // this was may be copied here, which ends its send.
  void popWritten(PathId path); // the front has been written whole
  // The front has been written whole, but only a reference to its payload: the
  // far end reads that, at any time until the message ends. If it ends in any
  // other way than well, its owner must see to it that nobody can read it.
  void popReferred(PathId path);
  // For a path whose transport itself reports how far the peer is: delivered()
  // gives the number of reliable frames since the beginning. Neither end then
  // sends acknowledgements over it. Both must call this before the first frame.
  // `ordered`: frames arrive in the order of writing.
  void setSelfAcknowledging(PathId path, bool ordered = true);
  // The path goes over a relay. So it carries no message that is relayed itself
  // (kRelayGroup), nor direct control frames: two processes that relay for each
  // other would otherwise wrap messages without end. Other control frames take
  // it only if no other path works, since all others are shorter.
  void setOverRelay(PathId path);
  // A number beyond what was written counts as that, and a lower one than
  // before is ignored.
  void delivered(PathId path, uint64_t frames, TimePoint now);
  // The path shares what the link of that number carries with others. Call it
  // before the first frame.
  void setSharedLink(PathId path, size_t link);
  // The capacity in bytes per second that the transport knows. It is more exact
  // than an estimate from single messages with pauses between them. It decides
  // the size of chunks only. The choice of paths goes by measurements.
  void setCapacity(PathId path, double bytesPerS);
  // The transport sends no faster than so many bytes per second, whatever
  // acknowledgements show: a busy far end sends these late, many at a time.
  void setPace(PathId path, double bytesPerS);
  // The capacity in bytes per second of the path that this one replaces.
  // Without it, a path that joins one which can do the work alone is never
  // saturated, so its capacity cannot be measured.
  void expectCapacity(PathId path, double bytesPerS);
  // The capacity in bytes per second that the path has shown, of a suspect one
  // before it was suspect; 0: unknown.
  double capacityBytesPerS(PathId path) const;
  // Something to pull for some path? (An approximation: may be true in vain.)
  bool hasFrames(PathId path) const;

  // Received: a header, then its payload. destination() says where the payload
  // begins (null: discard); it may change between reads. A path reads one frame
  // after the other: onHeader(), all bytes of the payload to where
  // destination() says, onPayload(). Ask destination() before each read, and go
  // on at the same offset: a match in between moves the message from a block of
  // ours to the user's buffer. onPayload() follows every header, including one
  // without a payload.
  Status onHeader(PathId path, const FrameHeader& header, TimePoint now);
  std::byte* destination(PathId path);
  // `zeroFilled`: parts of the payload that were lost, and are zero. Only of a
  // message that tolerates it.
  Status onPayload(
      PathId path,
      TimePoint now,
      std::span<const ByteRange> zeroFilled = {});
  // For a path that reads payloads from the memory of the far end, and has got
  // the header of this one. If it is wanted, and has a place in the memory of
  // its receive that `mayRead`, that place is pinned until unpin(): no other
  // path writes there, and the receive does not end well before. (If it fails
  // or is cancelled, its owner must see to it that nobody can write there.)
  //
  // Once it has been read, the path calls onHeader() and onPayload() as for any
  // frame, in the order of the frames, and then unpin() if it was pinned.
  struct Place {
    // False: nobody needs it, and the far end may have taken its memory back.
    // The path reads nothing.
    bool wanted = false;
    // Null: the path reads the payload to memory of its own.
    std::byte* pinned = nullptr;
  };
  // Nothing: the peer has not announced the message, which is an error of it.
  std::optional<Place> pin(
      PathId path,
      const FrameHeader& header,
      const std::function<bool(std::span<std::byte>)>& mayRead);
  void unpin(PathId path); // the oldest
  // removePath() leaves the pins of the path: what it has begun to read may
  // still arrive. The owner of the path calls this when nothing does any more.
  void endPins(PathId path);
  // The next pull() sends it, also over a path that is suspect or on probation.
  // Calls before that pull() send one ping together. The answer moves
  // answeredUpTo().
  void ping(PathId path);
  // Nothing but pings goes over the path until trust(). For one that has
  // broken before, where others work: what it were given might be stuck until
  // it breaks again.
  void putOnProbation(PathId path);
  bool onProbation(PathId path) const;
  uint32_t pingsAnswered(PathId path) const; // since putOnProbation
  void trust(PathId path);
  // A suspect path gets nothing new that must arrive, and what it has in flight
  // is sent once more by the others. It may recover: then it goes on. The end
  // of a suspicion takes nothing back: of two copies in flight, the first that
  // is acknowledged counts.
  void setSuspect(PathId path, bool suspect);
  bool isSuspect(PathId path) const;
  // The traffic classes that the path carries, a bit each (1 << class); all at
  // first. 0: a path in reserve. A path in reserve still takes control frames.
  void setClasses(PathId path, uint8_t classes);
  // The path carries only messages in bursts of this size, unless no other path
  // works for them. At first it takes all. If the range is none(), control
  // frames go over other paths as well.
  void setBursts(PathId path, BurstRange range);
  const BurstRange& bursts(PathId path) const;
  uint8_t classes(PathId path) const;

  // --- time
  TimePoint deadline() const; // when onTimer has something to do
  // An early call does nothing.
  void onTimer(TimePoint now);

  // --- what is known
  const ChannelCounters& counters() const {
    return counters_;
  }
  // How long point-to-point messages took, in seconds, from send() until the
  // peer had said that it has them: those that it was asked about at once.
  const RecentSamples& deliveriesS() const {
    return deliveriesS_;
  }
  const PathCounters& pathCounters(PathId path) const;
  const LinkStatistics& pathStatistics(PathId path) const;
  // The capacity of its shared link, in bytes per second; 0: it has none, or
  // unknown.
  double linkBytesPerS(PathId path) const;
  // The last burst of its shared link; of the path, if it has none.
  const LinkStatistics::Burst& lastBurst(PathId path) const;
  uint64_t inFlightBytes(PathId path) const;
  // There is more to send than the paths have taken; of our own, not of what we
  // relay.
  bool backlogged() const;
  bool backloggedByOurs() const;
  // The most urgent message that waits; nothing if none does. `self`: our rank.
  std::optional<Urgency> mostUrgent(int32_t self) const;
  // The path is to take chunks, as far as is known; some path that goes over no
  // relay is.
  bool takesChunks(PathId path) const;
  bool takesChunksDirectly() const;
  // Activations wait: of our own, or that we relay.
  bool backloggedActivations(bool forOthers) const;
  // Since when the path owes us an acknowledgement without any progress;
  // kNever if it owes none.
  TimePoint waitingSince(PathId path) const;
  // The latest time at which something was handed to the path that has been
  // answered: until then at least, the outgoing direction worked. Other frames
  // from the peer prove nothing about that direction. TimePoint() if nothing
  // has been.
  TimePoint answeredUpTo(PathId path) const;
  // The description of the last collective message that the peer sent: what
  // it was doing when it was last heard of. stream is 0 before the first.
  const FrameHeader& lastCollective() const {
    return lastCollective_;
  }
  size_t openMessages() const {
    return out_.size();
  }
  // Messages of the peer that are not over, and what they hold here of
  // ownEagerBytes.
  size_t incomingMessages() const {
    return in_.size();
  }
  uint64_t bufferedBytes() const {
    return bufferedBytes_;
  }
  // The part of peerEagerBytes that our messages hold.
  uint64_t chargedBytes() const {
    return chargedBytes_;
  }

 private:
  struct OutMessage;
  struct Control;
  struct InFlight;
  struct PathState;
  struct SharedLink;
  // A chunk that a path reads straight to its place.
  struct Pin {
    uint64_t message = 0;
    uint32_t chunk = 0;
  };

  PathState& state(PathId path);
  const PathState& state(PathId path) const;
  void ready();

  // sending
  OutMessage*
  nextSendable(PathState& p, TimePoint now, uint32_t& chunk, bool& repeated);
  // The paths over no relay together, all or those that suit a burst. In our
  // turn they share what the uplink carries, in proportion to their own rates.
  struct OwnPaths {
    double gain = 1; // of a path's own rate
    double moreBytesPerS = 0; // beyond it
    double oneWayS = std::numeric_limits<double>::infinity(); // the shortest
  };
  OwnPaths ownPaths(std::optional<uint64_t> burstBytes = {}) const;
  PathLoad loadOf(const PathState& p, const OwnPaths& own, TimePoint now) const;
  double shareBytesPerS(const PathState& p) const;
  OutMessage*
  worthTaking(const PathState& p, size_t queue, TimePoint now, bool& noneSuits);
  bool suits(const PathState& p, const OutMessage& m) const;
  bool mayFollow(const OutMessage& m) const;
  const OutMessage* waiting(size_t queue) const; // the first; null: none
  uint32_t chunkBytesFor(uint64_t messageBytes, uint64_t burstBytes) const;
  void trackChunks(OutMessage& m);
  void takeBack(InFlight& f, bool pathIsGone);
  OutMessage* hedge(PathState& p, TimePoint now, uint32_t& chunk);
  bool takeCredit(OutMessage& m, uint64_t bytes);
  std::deque<std::unique_ptr<Control>>::const_iterator controlFor(
      PathId path) const;
  bool anyForControl() const;
  const OutFrame* pullControl(PathId path, TimePoint now);
  const OutFrame* pullChunk(PathState& p, TimePoint now);
  const OutFrame* pullUnreliable(PathState& p, TimePoint now);
  OutFrame& appendFrame(PathState& p, FrameHeader& header);
  void enqueue(OutMessage& m, bool front);
  void unblock();
  void queueControl(
      FrameType type,
      const FrameHeader& about,
      std::vector<std::byte> payload);
  size_t controlInFlight() const;
  Status onAck(PathState& p, uint64_t count, TimePoint now);
  bool chunkAcknowledged(OutMessage& m, uint32_t chunk);
  Status checkSentWhole(const OutMessage& m) const;
  void wholeAcknowledged(OutMessage& m);
  void finishSend(OutMessage& m, const Status& status);
  void abandon(OutMessage& m); // no more of it will be sent
  void detachFrames(OutMessage& m);
  void clearOffer(OutMessage& m);
  void eraseIfDone(OutMessage& m);
  bool stage(OutMessage& m);
  bool beginCopy(OutMessage& m);
  bool continueCopy(OutMessage& m, uint64_t maxBytes);
  uint64_t firstNeeded(const OutMessage& m) const;
  std::optional<Nanos> patience() const;
  bool anyInMemory() const;
  void stageLent(TimePoint now);
  void release(OutMessage& m);

  // receiving
  Status onData(PathState& p, const FrameHeader& header);
  void refuseAgain(const FrameHeader& header);
  void countForAck(PathState& p, const FrameHeader& h, TimePoint now);
  Status onChunk(
      PathState& p,
      const FrameHeader& h,
      std::span<const ByteRange> zeroFilled);
  Status onControlFrame(
      const FrameHeader& h,
      std::span<const std::byte> payload);
  void onPong(PathState& p, uint64_t stamp, TimePoint now);
  Status checkPeerLimits() const;
  Status onGrant(std::span<const std::byte> payload);
  void onReject(uint64_t message, std::span<const std::byte> payload);
  Status onCancel(const FrameHeader& h, std::span<const std::byte> payload);
  Status onResidual(uint64_t message, std::span<const std::byte> payload);
  Status onBye(std::span<const std::byte> payload);
  void deliverIfWhole(InMessage& message);
  void tellResidual(InMessage& message);
  void askForRest(InMessage& m);
  void creditReturned(uint64_t message, bool urgent);
  void flushGrants();
  void announce(InMessage& message);
  void forget(InMessage& message);
  void release(const Pin& pin);
  Status findOrCreate(const FrameHeader& header, InMessage*& message);

  const uint32_t id_;
  ChannelConfig config_;
  Mailbox& mailbox_;
  CompletionQueue& completions_;
  StagingMemory& staging_;
  ChannelHost& host_;
  Status failure_;

  // sending
  uint64_t lastMessage_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<OutMessage>> out_;
  // Messages with chunks to send, by queue; and those that wait for credit. A
  // message is in one of these queues at most, and once (OutMessage::queued),
  // and stays in out_ while it is. One with nothing left to send is removed
  // only when nextSendable() meets it at the front.
  std::array<std::deque<uint64_t>, kQueueCount> ready_;
  std::array<std::deque<uint64_t>, kQueueCount> blocked_;
  ClassScheduler scheduler_;
  uint64_t chargedBytes_ = 0; // of peerEagerBytes
  size_t offers_ = 0; // announced, not granted
  uint64_t unacknowledged_ = 0; // messages not abandoned and not acknowledged
  uint64_t unacknowledgedBytes_ = 0; // of these
  // Not handed to a path yet. Frames that a path gives back go to the front.
  std::deque<std::unique_ptr<Control>> control_;
  std::optional<PathId> arrivingOn_; // the path of the frame in onHeader()
  uint64_t lastControl_ = 0; // numbers kControl and kBye
  // The reason why a chunk was refused.
  struct Refusal {
    uint64_t offset = 0; // of the chunk
    std::vector<std::byte> reason;
  };
  // By message, until the peer has acknowledged one of its kReject frames.
  std::unordered_map<uint64_t, Refusal> refusals_;
  std::deque<uint64_t> lent_; // messages with a lent buffer, oldest first
  TimePoint stageCheckAt_ = kNever;
  Nanos stageInterval_{};
  TimePoint askAgainAt_ = kNever; // a path has left a chunk to the others
  struct StreamHash {
    size_t operator()(const std::pair<uint64_t, uint64_t>& s) const {
      return (s.first ^ (s.second * 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd;
    }
  };
  // Next order by (group, stream), for point-to-point. It keeps an entry for
  // every tag that was ever used.
  std::unordered_map<std::pair<uint64_t, uint64_t>, uint64_t, StreamHash>
      nextOrder_;

  // receiving
  std::unordered_map<uint64_t, std::unique_ptr<InMessage>> in_;
  size_t matchedMessages_ = 0; // of in_
  NumberSet done_; // messages that are over: delivered, cancelled, rejected
  NumberSet controlSeen_; // a path that dies makes them come twice
  uint64_t bufferedBytes_ = 0; // of ownEagerBytes
  std::vector<uint64_t> grants_; // matched, the sender not yet told
  TimePoint grantsDue_ = kNever;
  bool grantsUrgent_ = false;

  FrameHeader lastCollective_;
  uint32_t pacedChunkBytes_ = 0; // 0: not paced
  double uplinkBytesPerS_ = 0;

  // The pins of paths that have been removed.
  std::map<PathId, std::deque<Pin>> endingPins_;

  // A map: references to a state must survive when other paths are added.
  std::map<PathId, PathState> paths_;
  std::map<size_t, SharedLink> links_;
  TimePoint postedAt_{}; // when bytes of a message last became ready to send
  TimePoint lastNow_{};
  ChannelCounters counters_;
  RecentSamples deliveriesS_;
};

} // namespace resilient
