#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/status.h"
#include "base/trusted_completions.h"
#include "channel/channel.h"
#include "path/faults.h"
#include "transport/event_loop.h"
#include "transport/path_stats.h"
#include "transport/verbs_end.h"
#include "transport/verbs_loans.h"
#include "transport/verbs_slot.h"

namespace resilient {

// The sending half of a VerbsPath: fills slots with the frames of the channel,
// and posts them as the far end has receives and injected faults allow.
//
// Injected faults act on the slots: each is due at a time, and what a stall or
// silence holds back counts as sent without an answer, so that it shows as
// silence. While a rule concerns the path, nothing is offered to be read.
//
// A status that is not ok ends the path.
//
// Thread: loop thread. Lifetime: its path's; nothing is called once the end is
// gone.
class VerbsSender {
 public:
  // `faults` and `loans` may be null. `mayRefer`: the far end can read.
  VerbsSender(
      const EventLoop& loop,
      Channel& channel,
      PathId path,
      VerbsEnd& end,
      PathFaults* faults,
      VerbsLoans* loans,
      bool mayRefer,
      VerbsPending& pending,
      VerbsStats& counted);

  // As those of Path, for a path that is usable.
  bool hasRoom() const;
  size_t takeFrame(bool chunks);
  // Frames wait for a slot or a receive of the far end.
  bool isFull() const {
    return full_;
  }
  void setNotFull() {
    full_ = false;
  }

  // `posted`: receives of this end, since the beginning. Each send tells it.
  Status writeFrames(uint32_t posted);
  // Says it without a frame, if the far end may be waiting for receives.
  Status tellPosted(uint32_t posted);
  // The first send of a path: it has no frame.
  Status greet(uint32_t posted);
  // A send without a frame, only to have its completion, if the far end has a
  // receive to spare.
  Status probe(uint32_t posted);
  // What a fault has held back, if it is due.
  Status releaseHeld();
  // Breaks the path if a rule says so now, and releases what is due otherwise.
  Status lookAtFaults();
  // When lookAtFaults() should be called; kNever without rules.
  TimePoint nextFault() const;
  bool isDropping() const;

  // A slot has its completion.
  void onSent(uint32_t slot) {
    freeSlots_.push_back(slot);
    if (kTrustsCompletions) {
      channel_.delivered(path_, trusted_.bySlot[slot], loop_.now());
    }
  }
  // What the far end says in a slot. It is checked: the far end cannot have
  // seen more sends than there were.
  Status onHeader(const VerbsSlotHeader& header);

 private:
  // Frames that are taken ahead of writeFrames().
  static constexpr size_t kBatchBytes = 1u << 20;
  // Payloads from here on are worth a read: below, its round trip costs more
  // than a copy.
  static constexpr size_t kReferFrom = 64u << 10;
  // The far end has not read these yet. More would keep work from other paths.
  static constexpr uint64_t kReferAhead = 8u << 20;
  // A link that is limited by a fault has a queue of this length.
  static constexpr Nanos kLimitedQueue = std::chrono::milliseconds(20);

  // Reliable frames since the beginning, for kTrustsCompletions.
  struct Trusted {
    uint64_t written = 0;
    // When the slot was posted.
    std::array<uint64_t, kTrustsCompletions ? VerbsEnd::kSlots : 0> bySlot{};
  };
  // A filled slot that a fault holds back.
  struct Held {
    uint32_t slot = 0;
    size_t bytes = 0;
    TimePoint due;
    bool pending = false; // it counts as sent without an answer
  };

  bool hasFaults() const {
    return faults_ != nullptr && faults_->any();
  }
  bool mayPost(uint32_t reserve) const;
  void openSlot();
  Status postSlot(uint32_t posted);
  Status post(uint32_t slot, size_t bytes);
  bool refer(const OutFrame& frame, uint32_t posted, Status& status);
  void copyFrame(const OutFrame& frame);
  Status cut();

  const EventLoop& loop_;
  Channel& channel_;
  const PathId path_;
  VerbsEnd& end_;
  PathFaults* const faults_;
  VerbsLoans* const loans_;
  const bool mayRefer_;
  VerbsPending& pending_;
  VerbsStats& counted_;

  std::vector<uint32_t> freeSlots_;
  int slot_ = -1; // being filled, or none
  size_t slotBytes_ = 0; // of it, with its header
  size_t frontWritten_ = 0; // bytes of the first unwritten frame
  size_t unwrittenBytes_ = 0;
  bool full_ = false;

  uint32_t sent_ = 0; // sends posted
  uint32_t peerPosted_ = VerbsEnd::kSlots; // receives of the far end
  uint32_t told_ = VerbsEnd::kSlots; // of ours, told to the far end

  std::deque<Held> held_;
  uint64_t postedBytes_ = 0; // of slots
  Trusted trusted_;
};

} // namespace resilient
