#include "transport/timer_queue.h"

#include <utility>

namespace resilient {

TimerId TimerQueue::add(TimePoint when, std::function<void()> run) {
  uint32_t index;
  if (free_.empty()) {
    index = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    index = free_.back();
    free_.pop_back();
  }
  Slot& slot = slots_[index];
  slot.when = when;
  slot.order = added_++;
  slot.run = std::move(run);
  heap_.push_back(index);
  slot.position = static_cast<uint32_t>(heap_.size() - 1);
  siftUp(heap_.size() - 1);
  return uint64_t{slot.generation} << 32 | index;
}

bool TimerQueue::cancel(TimerId id) {
  auto index = static_cast<uint32_t>(id);
  if (index >= slots_.size()) {
    return false;
  }
  const Slot& slot = slots_[index];
  if (slot.position == kFree || slot.generation != id >> 32) {
    return false;
  }
  removeAt(slot.position);
  return true;
}

std::function<void()> TimerQueue::popDue(TimePoint now, uint64_t mark) {
  if (heap_.empty()) {
    return nullptr;
  }
  const Slot& first = slots_[heap_[0]];
  if (first.when > now || first.order >= mark) {
    return nullptr;
  }
  return removeAt(0);
}

bool TimerQueue::before(uint32_t a, uint32_t b) const {
  const Slot& x = slots_[a];
  const Slot& y = slots_[b];
  return x.when != y.when ? x.when < y.when : x.order < y.order;
}

void TimerQueue::place(size_t position, uint32_t slot) {
  heap_[position] = slot;
  slots_[slot].position = static_cast<uint32_t>(position);
}

void TimerQueue::siftUp(size_t position) {
  uint32_t slot = heap_[position];
  while (position > 0) {
    size_t parent = (position - 1) / 2;
    if (!before(slot, heap_[parent])) {
      break;
    }
    place(position, heap_[parent]);
    position = parent;
  }
  place(position, slot);
}

void TimerQueue::siftDown(size_t position) {
  uint32_t slot = heap_[position];
  for (;;) {
    size_t child = 2 * position + 1;
    if (child >= heap_.size()) {
      break;
    }
    if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) {
      ++child;
    }
    if (!before(heap_[child], slot)) {
      break;
    }
    place(position, heap_[child]);
    position = child;
  }
  place(position, slot);
}

// The last timer of the heap takes the free position. It may belong above or
// below, so it is sifted both ways; one of the two does nothing.
std::function<void()> TimerQueue::removeAt(size_t position) {
  uint32_t index = heap_[position];
  uint32_t last = heap_.back();
  heap_.pop_back();
  if (last != index) {
    place(position, last);
    siftUp(position);
    siftDown(slots_[last].position);
  }
  Slot& slot = slots_[index];
  slot.position = kFree;
  if (++slot.generation == 0) {
    slot.generation = 1; // an id is never 0
  }
  free_.push_back(index);
  return std::exchange(slot.run, nullptr);
}

} // namespace resilient
