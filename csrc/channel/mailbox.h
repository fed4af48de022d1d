#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "channel/in_message.h"
#include "channel/operation.h"
#include "path/number_set.h"

namespace resilient {

// Streams with this bit belong to one collective: the rest is its sequence
// number in the group, and `order` tells its messages apart. Streams without
// it are point-to-point tags.
inline constexpr uint64_t kCollectiveBit = uint64_t(1) << 63;

// Thread: the loop's, from within the mailbox: must not call back into it or
// into a channel. The engine handles the mismatch in a later turn for that
// reason.
class MailboxListener {
 public:
  virtual ~MailboxListener() = default;
  // A message that this process is to pass on, or that was passed on to it
  // (kRelayGroup): returns a receive of its size, which need not be ordered,
  // lent like one given to Mailbox::post(); null refuses the message.
  virtual RecvOp* onRelayed(const FrameHeader& header, Channel& channel) {
    (void)header;
    (void)channel;
    return nullptr;
  }
  // A peer runs something else as collective `sequence` than we do (or did).
  // `remote` is the description it sent along.
  virtual void onCollectiveMismatch(
      uint64_t group,
      uint64_t sequence,
      const OpSignature& local,
      const FrameHeader& remote,
      Channel& channel) = 0;
};

// Brings messages and receives together, for all channels of a process.
//
// Point-to-point: per (group, tag) the messages of one source match in the
// order of their sends, receives in the order of their posts; a receive from
// any source takes the first message that no earlier receive can take. So any
// interleaving of sends and receives is safe, and nothing overtakes.
// Paper: SHIFT §3.2, C#3. The order is that of the numbers in the messages,
// whichever paths they took: a change of paths needs no fence.
// Collective: message and receive name the same (sequence, order, source).
//
// A message may come before its receive, before its collective has begun,
// even before its group exists here (its channel's credit bounds how much).
//
// Thread: loop thread. No I/O, no clock.
class Mailbox {
 public:
  Mailbox(CompletionQueue& completions, MailboxListener& listener)
      : completions_(completions), listener_(listener) {}

  // --- receives
  // Borrows `op` until finished() or cancel(). A match here ends it through the
  // completion queue, not within this call. A receive of a collective names its
  // source, and must not come after end().
  void post(RecvOp* op);
  // The operation will not be finished; its memory is free at return. A
  // message that was arriving for it is lost (and its sender told `reason`);
  // one that was not matched yet stays for the next receive.
  void cancel(RecvOp* op, const std::string& reason);
  // Receives that only this channel could serve fail. Those from any source
  // stay, since another channel may serve them; the group ends them when no
  // rank is left.
  void failSource(Channel& channel, const Status& status);

  // --- collectives: between begin and end, messages that say something else
  // are reported as mismatches. After end, stragglers are refused with the
  // reason (or, after success, silently dropped if they match).
  //
  // Messages may come before begin(), which then checks them. Each sequence
  // number is begun and ended once.
  void begin(uint64_t group, uint64_t sequence, const OpSignature& signature);
  void end(uint64_t group, uint64_t sequence, const Status& outcome);

  // A group that is gone: its messages are dropped now and in future. Its
  // number must never be used again. Posted receives fail.
  void closeGroup(uint64_t group);

  // "collective #7 does not match: rank 2 called ... where this rank ..."
  static std::string mismatchText(
      uint64_t sequence,
      const OpSignature& local,
      const FrameHeader& remote);

  // --- from channels
  // Once for each message, with its first frame. `message` may be gone at
  // return: refused, or matched and delivered.
  void onArrival(InMessage& message);
  // The message will never be whole (its channel failed or gave it up).
  void onLost(InMessage& message, const Status& status);

 private:
  // Messages overtake each other on different paths, so `arrived` may have
  // gaps. Only the message with number nextOrder can match.
  struct Source { // of one ordered stream
    uint64_t nextOrder = 0;
    std::map<uint64_t, InMessage*> arrived; // by order, not matched
    bool ready() const {
      return !arrived.empty() &&
          (arrived.begin()->first == nextOrder ||
           RESILIENT_PLANTED(matchByArrival));
    }
  };
  // Records of a tag stay until the group is closed: nextOrder is needed while
  // the tag may be used.
  struct Ordered {
    std::vector<RecvOp*> posted; // empty, it costs nothing: tags may be many
    std::map<uint32_t, Source> sources; // by channel id
  };
  // One collective, from its first message, receive or begin() until end().
  struct Exact {
    bool begun = false;
    OpSignature signature;
    // By (order, channel id): exactly one of the two is set.
    struct Entry {
      RecvOp* op = nullptr;
      InMessage* message = nullptr;
    };
    std::map<std::pair<uint64_t, uint32_t>, Entry> entries;
  };
  struct Ended {
    uint64_t sequence;
    OpSignature signature;
    Status outcome;
  };
  struct GroupState {
    std::unordered_map<uint64_t, Ordered> ordered; // by tag
    std::unordered_map<uint64_t, Exact> exact; // by sequence
    NumberSet endedNumbers;
    std::deque<Ended> ended; // the last kEndedKept
  };
  // Enough for the collectives that ranks can be apart; a straggler of an
  // older one is refused without a reason.
  static constexpr size_t kEndedKept = 256;

  void bind(RecvOp* op, InMessage& message);
  void matchOrdered(Ordered& stream);
  void arriveExact(GroupState& group, InMessage& message);
  void refuseEnded(GroupState& group, uint64_t sequence, InMessage& message);

  CompletionQueue& completions_;
  MailboxListener& listener_;
  std::unordered_map<uint64_t, GroupState> groups_;
  // Never shrinks: messages of a closed group may come at any time.
  std::set<uint64_t> closed_;
};

} // namespace resilient
