#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace resilient::shift {

// A hash table that readers search without a lock. Writers exclude each other.
// Keys are neither kFree nor kErased.
//
// A value must outlive the searches for its key. The application guarantees
// that for a handle, because it must not use one that it destroys; the lock of
// the completion queue guarantees it for the number of a queue pair.
template <typename Value>
class Lookup {
 public:
  Value* find(uint64_t key) const {
    for (size_t i = 0, at = place(key); i < kSlots; ++i, at = next(at)) {
      const Slot& slot = slots_[at];
      const uint64_t found = slot.key.load(std::memory_order_acquire);
      if (found == key) {
        Value* value = slot.value.load(std::memory_order_acquire);
        // A writer may have given the slot to another key between the loads.
        return slot.key.load(std::memory_order_relaxed) == key ? value
                                                               : nullptr;
      }
      if (found == kFree) {
        break;
      }
    }
    return nullptr;
  }
  // Returns whether there was room. The key must not be in the table.
  bool insert(uint64_t key, Value* value) {
    for (size_t i = 0, at = place(key); i < kSlots; ++i, at = next(at)) {
      Slot& slot = slots_[at];
      const uint64_t found = slot.key.load(std::memory_order_relaxed);
      if (found == kFree || found == kErased) {
        slot.value.store(value, std::memory_order_release);
        slot.key.store(key, std::memory_order_release);
        return true;
      }
    }
    return false;
  }
  void erase(uint64_t key) {
    size_t at = place(key);
    for (size_t i = 0; slots_[at].key.load(std::memory_order_relaxed) != key;
         ++i, at = next(at)) {
      if (i == kSlots) {
        return;
      }
    }
    // A search for another key may have to pass this slot.
    slots_[at].key.store(kErased, std::memory_order_release);
    slots_[at].value.store(nullptr, std::memory_order_release);
    // Erased slots in front of a free one stop no search, so they become free.
    // Without this, every slot would be used after kSlots keys, and a search
    // for an absent key would visit them all.
    while (slots_[next(at)].key.load(std::memory_order_relaxed) == kFree &&
           slots_[at].key.load(std::memory_order_relaxed) == kErased) {
      slots_[at].key.store(kFree, std::memory_order_release);
      at = (at + kSlots - 1) % kSlots;
    }
  }
  // The slots that a search for an absent key may have to pass.
  size_t used() const {
    size_t count = 0;
    for (const Slot& slot : slots_) {
      count += slot.key.load(std::memory_order_relaxed) != kFree ? 1U : 0U;
    }
    return count;
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 13;
  static constexpr uint64_t kFree = 0;
  static constexpr uint64_t kErased = 1;
  static size_t place(uint64_t key) {
    return static_cast<size_t>((key * 0x9e3779b97f4a7c15) >> 51);
  }
  static size_t next(size_t at) {
    return (at + 1) % kSlots;
  }
  struct Slot {
    std::atomic<uint64_t> key{kFree};
    std::atomic<Value*> value{nullptr};
  };
  std::array<Slot, kSlots> slots_{};
};

} // namespace resilient::shift
