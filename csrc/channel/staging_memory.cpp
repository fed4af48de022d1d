#include "channel/staging_memory.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace resilient {

void StagingMemory::setLimit(uint64_t bytes) {
  limit_ = bytes;
  makeRoom(0);
}

// Sizes are (4 + step) << shift for the steps 0 to 3.
size_t StagingMemory::sizeIndex(uint64_t bytes) {
  const size_t shift = static_cast<size_t>(std::bit_width(bytes - 1)) - 3;
  const uint64_t quarters = ((bytes - 1) >> shift) + 1; // 5 to 8
  return 4 * shift + static_cast<size_t>(quarters - 4);
}

uint64_t StagingMemory::sizeAt(size_t index) {
  return (4 + uint64_t{index % 4}) << (index / 4);
}

bool StagingMemory::isKept(uint64_t bytes) {
  return bytes >= kKeptBytes && sizeAt(sizeIndex(bytes)) == bytes;
}

StagingMemory::Block StagingMemory::take(uint64_t bytes) {
  if (bytes > limit_ || used_ > limit_ - bytes) {
    return {};
  }
  Block block;
  block.bytes = bytes;
  if (bytes >= kKeptBytes) {
    // A copy that does not fit when it is rounded up may fit as it is.
    const uint64_t rounded = sizeAt(sizeIndex(bytes));
    block.bytes = rounded <= limit_ - used_ ? rounded : bytes;
  }
  auto* const kept =
      isKept(block.bytes) ? &free_[sizeIndex(block.bytes)] : nullptr;
  if (kept != nullptr && !kept->empty()) {
    // The last one: its bytes are the likeliest to be in a cache.
    block.data = std::move(kept->back().data);
    kept->pop_back();
    kept_ -= block.bytes;
    allowAccess(block.data.get(), block.bytes);
  } else {
    makeRoom(block.bytes);
    block.data = allocateBlock(block.bytes);
  }
  used_ += block.bytes;
  return block;
}

void StagingMemory::giveBack(Block block, TimePoint now) {
  used_ -= block.bytes;
  if (!isKept(block.bytes)) {
    return;
  }
  makeRoom(block.bytes);
  if (used_ + kept_ + block.bytes > limit_) {
    return;
  }
  forbidAccess(block.data.get(), block.bytes);
  kept_ += block.bytes;
  free_[sizeIndex(block.bytes)].push_back({std::move(block.data), now});
  due_ = std::min(due_, now + kKeptFor);
}

void StagingMemory::onTimer(TimePoint now) {
  due_ = kNever;
  for (size_t index = 0; index < kSizes; ++index) {
    auto& blocks = free_[index];
    while (!blocks.empty() && blocks.front().since + kKeptFor <= now) {
      freeOldest(index);
    }
    if (!blocks.empty()) {
      due_ = std::min(due_, blocks.front().since + kKeptFor);
    }
  }
}

void StagingMemory::freeOldest(size_t index) {
  allowAccess(free_[index].front().data.get(), sizeAt(index));
  free_[index].pop_front();
  kept_ -= sizeAt(index);
}

// Large blocks go first.
void StagingMemory::makeRoom(uint64_t bytes) {
  for (size_t index = kSizes; index-- > 0;) {
    while (used_ + kept_ + bytes > limit_ && !free_[index].empty()) {
      freeOldest(index);
    }
  }
}

} // namespace resilient
