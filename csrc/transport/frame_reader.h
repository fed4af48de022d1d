#pragma once

#include <cstddef>

#include "channel/channel.h"
#include "wire/frame.h"

namespace resilient {

// Takes the bytes of one path, in any pieces, and gives the channel frames.
// Payload goes straight to where the channel wants it. Every error is the
// peer's fault, and ends the path.
class FrameReader {
 public:
  FrameReader(Channel& channel, PathId path) : channel_(channel), path_(path) {}

  // The payload that the next bytes belong to: the number of missing bytes, and
  // their destination (null: discard). 0 between frames.
  size_t missing() const {
    return inPayload_ ? payloadBytes_ - payloadRead_ : 0;
  }
  std::byte* destination() const {
    std::byte* const to = channel_.destination(path_);
    return to == nullptr ? nullptr : to + payloadRead_;
  }
  // The caller has put this many bytes there, at most missing().
  Status placed(size_t bytes, TimePoint now);
  Status consume(const std::byte* data, size_t bytes, TimePoint now);

 private:
  Channel& channel_;
  const PathId path_;
  FrameBytes header_;
  size_t headerRead_ = 0;
  bool inPayload_ = false;
  uint32_t payloadBytes_ = 0;
  uint32_t payloadRead_ = 0;
};

} // namespace resilient
