#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "base/block_memory.h"
#include "base/time.h"

namespace resilient {

// The memory of a process for copies that let a send complete before its
// acknowledgement. One object serves all channels of a process.
//
// New memory costs a page fault for each page that is written, which takes
// longer than the copy. So large blocks are kept for the copies of the next
// minute, and consist of huge pages if the system has them.
//
// Thread: loop thread.
class StagingMemory {
 public:
  struct Block {
    BlockMemory data;
    uint64_t bytes = 0; // of the memory: at least those of the copy
    explicit operator bool() const {
      return data != nullptr;
    }
  };

  // Blocks of fewer bytes are not kept: malloc() does that.
  static constexpr uint64_t kKeptBytes = 128u << 10;
  static constexpr Nanos kKeptFor = std::chrono::minutes(1);

  explicit StagingMemory(uint64_t limit = 0) : limit_(limit) {}

  // The limit covers the blocks of all copies and the kept ones together.
  void setLimit(uint64_t bytes);
  uint64_t limit() const {
    return limit_;
  }

  // Uninitialized. An empty block if the limit has no room for `bytes`.
  Block take(uint64_t bytes);
  // Every block comes back. Its bytes must not be read any more.
  void giveBack(Block block, TimePoint now);

  uint64_t used() const { // by copies
    return used_;
  }
  uint64_t kept() const { // by blocks without a copy
    return kept_;
  }
  // When onTimer() may free a block; kNever: there is none.
  TimePoint deadline() const {
    return due_;
  }
  void onTimer(TimePoint now);

 private:
  // Kept blocks have one of a few sizes, so that copies of similar sizes use
  // the same: four steps between a power of two and the next.
  static constexpr size_t kSizes = 4 * 64;
  struct Kept {
    BlockMemory data;
    TimePoint since;
  };
  static size_t sizeIndex(uint64_t bytes); // of the smallest that holds `bytes`
  static uint64_t sizeAt(size_t index);
  static bool isKept(uint64_t bytes);
  void freeOldest(size_t index);
  void makeRoom(uint64_t bytes);

  uint64_t limit_ = 0, used_ = 0, kept_ = 0;
  std::array<std::deque<Kept>, kSizes> free_; // oldest first
  TimePoint due_ = kNever; // of the oldest, or earlier
};

} // namespace resilient
