#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/traffic_class.h"

namespace resilient {

// Which traffic class sends its next chunk: strict priority, but a class that
// has been passed over for `starvationBytes` gets one chunk through. So bulk
// costs an urgent class at most chunk/starvationBytes of its rate, and never
// stands still.
class ClassScheduler {
 public:
  explicit ClassScheduler(uint64_t starvationBytes)
      : starvationBytes_(starvationBytes) {}

  // `waiting[c]`: class c has something to send. Returns the class to serve,
  // or kTrafficClassCount if none waits.
  size_t pick(const std::array<bool, kTrafficClassCount>& waiting) const {
    size_t first = kTrafficClassCount;
    for (size_t c = 0; c < kTrafficClassCount; ++c) {
      if (!waiting[c]) {
        continue;
      }
      if (first == kTrafficClassCount) {
        first = c;
      } else if (passedOver_[c] >= starvationBytes_) {
        return c;
      }
    }
    return first;
  }

  // `cls` has sent `bytes`. Only classes below it in priority, and only while
  // they wait, add up what passed over them: a class that had nothing to send
  // has no claim.
  void served(
      size_t cls,
      uint64_t bytes,
      const std::array<bool, kTrafficClassCount>& waiting) {
    for (size_t c = cls + 1; c < kTrafficClassCount; ++c) {
      passedOver_[c] = waiting[c] ? passedOver_[c] + bytes : 0;
    }
    passedOver_[cls] = 0;
  }

 private:
  const uint64_t starvationBytes_;
  std::array<uint64_t, kTrafficClassCount> passedOver_{};
};

} // namespace resilient
