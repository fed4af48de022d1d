#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "operation/staged_memory.h"
#include "transport/event_loop.h"

namespace resilient {

// Brings news of an operation's memory to the loop thread. Without memory to
// watch it does nothing.
//
// Thread: loop thread. Lifetime: the operation's; nothing is called after its
// end.
class MemoryWatch {
 public:
  // `onNews` runs in a turn after the memory has changed; several changes may
  // become one call.
  MemoryWatch(
      EventLoop& loop,
      std::shared_ptr<StagedMemory> memory,
      std::function<void()> onNews)
      : memory_(std::move(memory)) {
    if (memory_ == nullptr) {
      return;
    }
    onNews_ = std::make_shared<std::function<void()>>(std::move(onNews));
    memory_->watch([&loop, weak = std::weak_ptr(onNews_)] {
      loop.post([weak] {
        if (const auto call = weak.lock()) {
          (*call)();
        }
      });
    });
  }
  ~MemoryWatch() {
    if (memory_ != nullptr) {
      memory_->watch({});
    }
  }
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  const std::shared_ptr<StagedMemory> memory_;
  std::shared_ptr<std::function<void()>> onNews_;
};

} // namespace resilient
