#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/traffic_class.h"

namespace resilient {

// The queues of a channel, in order of priority: for each traffic class, first
// our own messages and then those that we relay for others.
inline constexpr size_t kQueueCount = 2 * kTrafficClassCount;

constexpr size_t queueOf(TrafficClass cls, bool forOthers) {
  return 2 * static_cast<size_t>(cls) + forOthers;
}
constexpr size_t classOf(size_t queue) {
  return queue / 2;
}
constexpr bool isForOthers(size_t queue) {
  return queue % 2 != 0;
}

// A set of queues: bit q stands for queue q.
using QueueSet = uint32_t;
static_assert(kQueueCount <= 32);

// Which queue sends its next chunk: strict priority, but one that has been
// passed over for `starvationBytes` gets one chunk through. So bulk costs an
// urgent class at most chunk/starvationBytes of its rate, and never stands
// still.
class ClassScheduler {
 public:
  explicit ClassScheduler(uint64_t starvationBytes)
      : starvationBytes_(starvationBytes) {}

  // `waiting`: the queues that have something to send. Returns the one to
  // serve, or kQueueCount if none waits.
  size_t pick(QueueSet waiting) const {
    if (waiting == 0) {
      return kQueueCount;
    }
    for (QueueSet rest = waiting & (waiting - 1); rest != 0; rest &= rest - 1) {
      const auto q = static_cast<size_t>(std::countr_zero(rest));
      if (passedOver_[q] >= starvationBytes_) {
        return q;
      }
    }
    return static_cast<size_t>(std::countr_zero(waiting));
  }

  // `queue` has sent `bytes`. Only those below it in priority, and only while
  // they wait, add up what passed over them: one that had nothing to send
  // has no claim.
  void served(size_t queue, uint64_t bytes, QueueSet waiting) {
    for (size_t q = queue + 1; q < kQueueCount; ++q) {
      const bool waits = (waiting >> q & 1) != 0;
      passedOver_[q] = waits ? passedOver_[q] + bytes : 0;
    }
    passedOver_[queue] = 0;
  }

 private:
  const uint64_t starvationBytes_;
  std::array<uint64_t, kQueueCount> passedOver_{};
};

} // namespace resilient
