#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "base/status.h"
#include "channel/channel.h"
#include "transport/path_stats.h"
#include "transport/verbs_end.h"
#include "transport/verbs_loans.h"
#include "transport/verbs_slot.h"

namespace resilient {

// The payloads that a VerbsPath reads from the memory of the far end, in the
// order of the frames that refer to them. Each goes straight to its place in
// its receive, which stays pinned meanwhile, or to memory of the path, if that
// place is not lent to the device.
//
// A status that is not ok ends the path.
//
// Thread: loop thread. Lifetime: its path's; nothing is called once the end is
// gone.
class VerbsReads {
 public:
  // `loans` may be null. `remoteReads`: that the far end answers at a time.
  VerbsReads(
      Channel& channel,
      PathId path,
      VerbsEnd& end,
      VerbsLoans* loans,
      uint16_t remoteReads,
      VerbsPending& pending,
      VerbsStats& counted);

  // None is allowed.
  bool isOff() const {
    return max_ == 0;
  }
  bool isEmpty() const {
    return reads_.empty();
  }
  // Another one may begin.
  bool hasRoom() const;
  uint64_t bytesUnderWay() const {
    return bytes_;
  }
  // The size of the oldest that is under way.
  std::optional<uint32_t> oldest() const;
  // The request of the newest.
  std::optional<uint64_t> newest() const;

  // `data`: the header of a frame, and a reference, as they came. `now`: of
  // their arrival.
  Status start(const std::byte* data, TimePoint now);
  // The device has completed the oldest: its size, or none if there is none.
  std::optional<uint32_t> complete();
  // The oldest is there, or need not be: finish() it.
  bool canFinish() const {
    return !reads_.empty() && (reads_.front().done || !reads_.front().wanted);
  }
  // Tells the channel. It may close the path. `heardAt`: of its bytes.
  Status finish(TimePoint heardAt);

 private:
  struct Read {
    FrameHeader header;
    VerbsReference from;
    bool wanted = false;
    bool pinned = false;
    bool inBuffer = false;
    bool done = false;
  };

  Channel& channel_;
  const PathId path_;
  VerbsEnd& end_;
  VerbsLoans* const loans_;
  VerbsPending& pending_;
  VerbsStats& counted_;
  const size_t max_;
  std::deque<Read> reads_;
  uint64_t bytes_ = 0; // under way
  uint64_t next_ = VerbsEnd::kFirstRead;
  bool bufferInUse_ = false;
};

} // namespace resilient
