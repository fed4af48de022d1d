#include "channel/staging_memory.h"

#include <algorithm>
#include <utility>

namespace resilient {

void StagingMemory::setLimit(uint64_t bytes) {
  limit_ = bytes;
  makeRoom(0);
}

StagingMemory::Block StagingMemory::take(uint64_t bytes) {
  if (bytes > limit_ || used_ > limit_ - bytes) {
    return {};
  }
  Block block;
  block.bytes = bytes;
  const bool keeps = bytes >= kKeptBytes;
  const size_t size = keeps ? sizeOf(bytes) : 0;
  if (keeps && !free_[size].empty()) {
    // The last one: its bytes are the likeliest to be in a cache.
    block.data = std::move(free_[size].back().data);
    free_[size].pop_back();
    kept_ -= uint64_t{1} << size;
    allowAccess(block.data.get(), uint64_t{1} << size);
  } else {
    makeRoom(bytes);
    block.data = allocateBlock(keeps ? uint64_t{1} << size : bytes);
  }
  used_ += bytes;
  return block;
}

void StagingMemory::giveBack(Block block, TimePoint now) {
  used_ -= block.bytes;
  if (block.bytes < kKeptBytes) {
    return;
  }
  const size_t size = sizeOf(block.bytes);
  const uint64_t bytes = uint64_t{1} << size;
  makeRoom(bytes);
  if (used_ + kept_ + bytes > limit_) {
    return;
  }
  forbidAccess(block.data.get(), bytes);
  kept_ += bytes;
  free_[size].push_back({std::move(block.data), now});
  due_ = std::min(due_, now + kKeptFor);
}

void StagingMemory::onTimer(TimePoint now) {
  due_ = kNever;
  for (size_t size = 0; size < kSizes; ++size) {
    auto& blocks = free_[size];
    while (!blocks.empty() && blocks.front().since + kKeptFor <= now) {
      freeOldest(size);
    }
    if (!blocks.empty()) {
      due_ = std::min(due_, blocks.front().since + kKeptFor);
    }
  }
}

void StagingMemory::freeOldest(size_t size) {
  allowAccess(free_[size].front().data.get(), uint64_t{1} << size);
  free_[size].pop_front();
  kept_ -= uint64_t{1} << size;
}

// Large blocks go first.
void StagingMemory::makeRoom(uint64_t bytes) {
  for (size_t size = kSizes; size-- > 0;) {
    while (used_ + kept_ + bytes > limit_ && !free_[size].empty()) {
      freeOldest(size);
    }
  }
}

} // namespace resilient
