#include "backend/staged_pieces.h"

#include <algorithm>
#include <iterator>

namespace resilient {

namespace {
// The size in bytes of every element divides it.
constexpr size_t kElementMax = 16;
} // namespace

std::vector<size_t> StagedPieces::pieceEnds(size_t bytes) {
  std::vector<size_t> ends;
  size_t end = 0;
  while (end < bytes) {
    const size_t next = std::clamp(end, kMinPieceBytes, kMaxPieceBytes);
    // The rest would be too small for a piece.
    end = bytes - end < next + kMinPieceBytes ? bytes : end + next;
    ends.push_back(end);
  }
  return ends;
}

size_t
StagedPieces::add(const void* data, size_t bytes, bool input, bool result) {
  Buffer& buffer = buffers_.emplace_back();
  buffer.begin = static_cast<const char*>(data);
  buffer.bytes = bytes;
  buffer.input = input;
  buffer.result = result;
  byBegin_.emplace(buffer.begin, &buffer);
  return buffers_.size() - 1;
}

void StagedPieces::arrived(size_t buffer, size_t end) {
  buffers_[buffer].there.store(end, std::memory_order_release);
  tell();
}

void StagedPieces::failed(Status status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = std::move(status);
  }
  tell();
}

void StagedPieces::tell() {
  std::lock_guard<std::mutex> lock(watchMutex_);
  if (changed_) {
    changed_();
  }
}

void StagedPieces::watch(std::function<void()> changed) {
  std::lock_guard<std::mutex> lock(watchMutex_);
  changed_ = std::move(changed);
}

const StagedPieces::Buffer* StagedPieces::bufferOf(const void* data) const {
  const auto* at = static_cast<const char*>(data);
  const auto after = byBegin_.upper_bound(at);
  if (after == byBegin_.begin()) {
    return nullptr;
  }
  const Buffer* buffer = std::prev(after)->second;
  return at < buffer->begin + buffer->bytes ? buffer : nullptr;
}

size_t StagedPieces::available(const void* data, size_t bytes) const {
  const Buffer* buffer = bufferOf(data);
  if (buffer == nullptr || !buffer->input) {
    return bytes;
  }
  const auto offset =
      static_cast<size_t>(static_cast<const char*>(data) - buffer->begin);
  const size_t there = buffer->there.load(std::memory_order_acquire);
  return there <= offset ? 0 : std::min(bytes, there - offset);
}

Status StagedPieces::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::string StagedPieces::waitsFor() const {
  const bool all = std::ranges::all_of(buffers_, [](const Buffer& b) {
    return !b.input || b.there.load(std::memory_order_acquire) == b.bytes;
  });
  return all ? "" : streams_;
}

// Merges the range with those that it touches.
void StagedPieces::insert(
    std::map<size_t, size_t>& ranges,
    size_t begin,
    size_t end) {
  auto next = ranges.lower_bound(begin);
  if (next != ranges.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
    end = std::max(end, next->second);
    next = ranges.erase(next);
  }
  while (next != ranges.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ranges.erase(next);
  }
  ranges.emplace(begin, end);
}

// The results on both sides have been taken, or there are none.
bool StagedPieces::cannotGrow(const Buffer& b, size_t begin, size_t end) {
  const auto after = b.taken.lower_bound(end);
  const bool before =
      after != b.taken.begin() && std::prev(after)->second == begin;
  return (begin == 0 || before) &&
      (end == b.bytes || (after != b.taken.end() && after->first == end));
}

void StagedPieces::resultIsFinal(const void* data, size_t bytes) {
  auto* buffer = const_cast<Buffer*>(bufferOf(data));
  if (buffer == nullptr || !buffer->result || bytes == 0) {
    return;
  }
  const auto offset =
      static_cast<size_t>(static_cast<const char*>(data) - buffer->begin);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    insert(buffer->final, offset, offset + bytes);
    const auto run = std::prev(buffer->final.upper_bound(offset));
    if (asked_ ||
        (run->second - run->first < kMinPieceBytes &&
         !cannotGrow(*buffer, run->first, run->second))) {
      return;
    }
    asked_ = true;
  }
  if (taker_) {
    taker_();
  }
}

std::vector<BufferRange> StagedPieces::takeFinal() {
  std::vector<BufferRange> runs;
  std::lock_guard<std::mutex> lock(mutex_);
  asked_ = false;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& b = buffers_[i];
    std::map<size_t, size_t> left;
    for (const auto& [begin, end] : b.final) {
      // Whole elements only; an algorithm may cut anywhere.
      const size_t first =
          (begin + kElementMax - 1) / kElementMax * kElementMax;
      const size_t last =
          end == b.bytes ? end : end / kElementMax * kElementMax;
      if (last <= first ||
          (last < first + kMinPieceBytes && last != b.bytes &&
           !cannotGrow(b, begin, end))) {
        left.emplace(begin, end);
        continue;
      }
      runs.push_back({i, first, last});
      insert(b.taken, first, last);
      if (begin < first) {
        left.emplace(begin, first);
      }
      if (last < end) {
        left.emplace(last, end);
      }
    }
    b.final = std::move(left);
  }
  return runs;
}

std::vector<BufferRange> StagedPieces::takeRest() {
  std::vector<BufferRange> runs;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& b = buffers_[i];
    if (!b.result) {
      continue;
    }
    size_t at = 0;
    b.taken.emplace(b.bytes, b.bytes);
    for (const auto& [begin, end] : b.taken) {
      if (at < begin) {
        runs.push_back({i, at, begin});
      }
      at = end;
    }
    b.final.clear();
    b.taken = {{0, b.bytes}};
  }
  return runs;
}

} // namespace resilient
