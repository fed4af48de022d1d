#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "operation/staged_memory.h"

namespace resilient {

// A range of bytes of one host buffer.
struct BufferRange {
  size_t buffer = 0;
  size_t begin = 0, end = 0;
};

// The host buffers of one operation, as the engine sees them while they are
// copied in pieces. The staging thread tells which bytes of inputs have come,
// and takes the results that are final.
//
// Lifetime: shared with the engine; it holds no memory of tensors.
class StagedPieces final : public StagedMemory {
 public:
  // A copy of fewer bytes costs more for its call than for its bytes (50 GB/s:
  // 20 us).
  static constexpr size_t kMinPieceBytes = 1u << 20;
  // Larger pieces begin when the network has had enough to do for long: each is
  // as large as all before it.
  static constexpr size_t kMaxPieceBytes = 16u << 20;

  // The ends of the pieces of a buffer, in bytes. All but the last end at a
  // multiple of kMinPieceBytes.
  static std::vector<size_t> pieceEnds(size_t bytes);

  // --- caller's thread, before the operation starts

  // Returns the number of the buffer. Memory of buffers does not overlap.
  size_t add(const void* data, size_t bytes, bool input, bool result);
  // The streams that the inputs wait for.
  void setStreams(std::string streams) {
    streams_ = std::move(streams);
  }
  // `taken` is called on the loop thread when takeFinal() has something to
  // take.
  void setTaker(std::function<void()> taker) {
    taker_ = std::move(taker);
  }

  // --- staging thread

  // The bytes of an input up to `end` have come.
  void arrived(size_t buffer, size_t end);
  void failed(Status status);
  // The final results that were not taken before, in runs of kMinPieceBytes or
  // more, or up to the end of a buffer. A shorter run comes as well if it fills
  // the space between runs that were taken: to wait would not make it longer.
  std::vector<BufferRange> takeFinal();
  // All that has not been taken. Nothing is left afterwards.
  std::vector<BufferRange> takeRest();

  // --- the engine

  size_t available(const void* data, size_t bytes) const override;
  Status failure() const override;
  std::string waitsFor() const override;
  void watch(std::function<void()> changed) override;
  void resultIsFinal(const void* data, size_t bytes) override;

 private:
  struct Buffer {
    const char* begin = nullptr;
    size_t bytes = 0;
    bool input = false, result = false;
    std::atomic<size_t> there{0}; // of an input
    std::map<size_t, size_t> final; // not taken: end by begin
    std::map<size_t, size_t> taken;
  };

  static void
  insert(std::map<size_t, size_t>& ranges, size_t begin, size_t end);
  static bool cannotGrow(const Buffer& b, size_t begin, size_t end);
  // Null for memory of others.
  const Buffer* bufferOf(const void* data) const;
  void tell();

  std::deque<Buffer> buffers_; // does not move them
  std::map<const char*, Buffer*> byBegin_;
  std::string streams_;
  std::function<void()> taker_;

  mutable std::mutex mutex_; // guards failure_, and final and taken of buffers
  Status failure_;
  bool asked_ = false; // taker_ was called, takeFinal() was not
  std::mutex watchMutex_; // held while changed_ runs
  std::function<void()> changed_;
};

} // namespace resilient
