#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "base/status.h"

namespace resilient {

// The host memory of one operation on device tensors, while copies from and to
// the device are under way: inputs arrive from their first byte on, and results
// may leave before the operation ends. The engine learns here how far the
// inputs are, and tells which results are final.
//
// An operation whose memory is complete from the start has no such object.
//
// Thread: the loop's, unless marked. Lifetime: as the memory.
class StagedMemory {
 public:
  virtual ~StagedMemory() = default;
  // How many of the bytes may be read, counted from the first. All of them for
  // memory that no copy writes.
  virtual size_t available(const void* data, size_t bytes) const = 0;
  // Not ok: a copy has failed, and no more bytes will come.
  virtual Status failure() const = 0;
  // The streams that the copies of inputs wait for, for messages; empty if all
  // bytes are there.
  virtual std::string waitsFor() const = 0;
  // From now on `changed` is called, by any thread, after more bytes have come
  // or a copy has failed. An empty function ends that; no call is under way
  // then.
  virtual void watch(std::function<void()> changed) = 0;
  // The operation changes these bytes no more, so they may go to the device.
  // Ignored for memory that holds no result. Results that are never named here
  // go there after the operation.
  virtual void resultIsFinal(const void* data, size_t bytes) = 0;
};

} // namespace resilient
