#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/time.h"

namespace resilient {

// Names a timer; never used twice (the high half counts the uses of a slot).
// 0 names none.
using TimerId = uint64_t;

// Timers by time, in an indexed binary heap: add and cancel cost O(log n) and
// a cancelled timer leaves nothing behind. Equal times fire in the order of
// adding. Not thread-safe.
//
// The callback is taken out before it runs, so it may add and cancel timers,
// its own included. cancel() destroys the callback at once.
class TimerQueue {
 public:
  TimerId add(TimePoint when, std::function<void()> run);
  // False if it has fired or was cancelled already, which is no mistake.
  bool cancel(TimerId id);
  // The time of the next one, or kNever.
  TimePoint next() const {
    return heap_.empty() ? kNever : slots_[heap_[0]].when;
  }
  size_t size() const {
    return heap_.size();
  }
  // How many were ever added: a mark for popDue.
  uint64_t added() const {
    return added_;
  }
  // Takes the first timer due at `now` among those added before the mark; an
  // empty function if there is none.
  //
  // Only the first timer is looked at. No timer may be added with a time before
  // `now`, which EventLoop::at() guarantees. A newer timer in front would hide
  // older ones that are due.
  std::function<void()> popDue(TimePoint now, uint64_t mark);

 private:
  struct Slot {
    TimePoint when;
    uint64_t order = 0;
    uint32_t generation = 1;
    uint32_t position = 0; // in heap_; kFree if unused
    std::function<void()> run;
  };
  static constexpr uint32_t kFree = UINT32_MAX;

  bool before(uint32_t a, uint32_t b) const;
  void place(size_t position, uint32_t slot);
  void siftUp(size_t position);
  void siftDown(size_t position);
  std::function<void()> removeAt(size_t position);

  // A slot keeps its index while its timer moves through the heap, and is
  // reused later with another generation. Memory grows with the largest number
  // of timers at a time.
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> heap_; // slot numbers
  uint64_t added_ = 0;
};

} // namespace resilient
