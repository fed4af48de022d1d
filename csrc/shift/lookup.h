#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace resilient::shift {

// A hash table that readers search without a lock. Writers exclude each other.
template <typename Value>
class Lookup {
 public:
  Value* find(uint64_t key) const {
    for (size_t i = 0, at = place(key); i < kSlots;
         ++i, at = (at + 1) % kSlots) {
      const uint64_t found = slots_[at].key.load(std::memory_order_acquire);
      if (found == key) {
        return slots_[at].value.load(std::memory_order_acquire);
      }
      if (found == 0) {
        break;
      }
    }
    return nullptr;
  }
  // Whether there was room.
  bool insert(uint64_t key, Value* value) {
    for (size_t i = 0, at = place(key); i < kSlots;
         ++i, at = (at + 1) % kSlots) {
      const uint64_t found = slots_[at].key.load(std::memory_order_relaxed);
      if (found == 0 || found == key || slots_[at].value.load() == nullptr) {
        slots_[at].value.store(value, std::memory_order_release);
        slots_[at].key.store(key, std::memory_order_release);
        return true;
      }
    }
    return false;
  }
  // The slot stays marked as used, so that searches pass it.
  void erase(uint64_t key) {
    for (size_t i = 0, at = place(key); i < kSlots;
         ++i, at = (at + 1) % kSlots) {
      if (slots_[at].key.load(std::memory_order_relaxed) == key) {
        slots_[at].value.store(nullptr, std::memory_order_release);
        return;
      }
    }
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 13;
  static size_t place(uint64_t key) {
    return static_cast<size_t>((key * 0x9e3779b97f4a7c15) >> 51);
  }
  struct Slot {
    std::atomic<uint64_t> key{0};
    std::atomic<Value*> value{nullptr};
  };
  std::array<Slot, kSlots> slots_{};
};

} // namespace resilient::shift
