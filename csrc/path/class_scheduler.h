#pragma once

#include <array>
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

// Which queue sends its next chunk: strict priority, but one that has been
// passed over for `starvationBytes` gets one chunk through. So bulk costs an
// urgent class at most chunk/starvationBytes of its rate, and never stands
// still.
class ClassScheduler {
 public:
  explicit ClassScheduler(uint64_t starvationBytes)
      : starvationBytes_(starvationBytes) {}

  // `waiting[q]`: queue q has something to send. Returns the queue to serve,
  // or kQueueCount if none waits.
  size_t pick(const std::array<bool, kQueueCount>& waiting) const {
    size_t first = kQueueCount;
    for (size_t q = 0; q < kQueueCount; ++q) {
      if (!waiting[q]) {
        continue;
      }
      if (first == kQueueCount) {
        first = q;
      } else if (passedOver_[q] >= starvationBytes_) {
        return q;
      }
    }
    return first;
  }

  // `queue` has sent `bytes`. Only those below it in priority, and only while
  // they wait, add up what passed over them: one that had nothing to send
  // has no claim.
  void served(
      size_t queue,
      uint64_t bytes,
      const std::array<bool, kQueueCount>& waiting) {
    for (size_t q = queue + 1; q < kQueueCount; ++q) {
      passedOver_[q] = waiting[q] ? passedOver_[q] + bytes : 0;
    }
    passedOver_[queue] = 0;
  }

 private:
  const uint64_t starvationBytes_;
  std::array<uint64_t, kQueueCount> passedOver_{};
};

} // namespace resilient
