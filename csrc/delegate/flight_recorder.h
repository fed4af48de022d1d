#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/signature.h"
#include "base/time.h"

namespace resilient {

// The last operations of this process, for the question "what was everybody
// doing?" after a failure. Bounded; costs one short lock per operation.
// Thread: any.
class FlightRecorder {
 public:
  explicit FlightRecorder(size_t entries) : entries_(entries) {}

  struct Entry {
    uint64_t id = 0; // from 1
    std::string group;
    OpSignature signature;
    uint64_t sequence = 0; // collectives; else 0
    int peer = -1; // point-to-point
    bool isSend = false;
    uint64_t tag = 0;
    uint64_t bytes = 0;
    std::chrono::system_clock::time_point at; // when it was called
    Nanos took{-1}; // negative: pending
    std::string error; // empty: none so far
  };

  // Returns the number for end(), or 0 if the recorder is off. The oldest entry
  // is overwritten; end() of an operation that has lost its entry does nothing.
  uint64_t begin(Entry entry);
  void end(uint64_t id, Nanos took, const std::string& error);
  // A line each, oldest first.
  std::string dump() const;

 private:
  mutable std::mutex mutex_;
  const size_t entries_;
  std::vector<Entry> ring_;
  uint64_t lastId_ = 0;
};

} // namespace resilient
