#pragma once

#include <cstddef>

#include "channel/channel.h"
#include "wire/frame.h"

namespace resilient {

// Takes the bytes of one path, in any pieces, and gives the channel frames.
// Payload goes straight to where the channel wants it. Every error is the
// peer's fault, and ends the path.
//
// Two ways to feed it, in any mixture. consume() takes bytes that lie in a
// buffer of the caller. A path that reads from the kernel first asks missing()
// and destination(), reads straight to that place, and then calls placed().
// Neither may be called again after an error.
class FrameReader {
 public:
  FrameReader(Channel& channel, PathId path) : channel_(channel), path_(path) {}

  // The payload that the next bytes belong to: the number of missing bytes, and
  // their destination (null: discard). 0 between frames.
  size_t missing() const {
    return inPayload_ ? payloadBytes_ - payloadRead_ : 0;
  }
  // Bytes that surely belong to the frame that is being read, or to the next
  // one between frames.
  size_t wants() const {
    return inPayload_ ? missing() : kFrameHeaderBytes - headerRead_;
  }
  bool betweenFrames() const {
    return !inPayload_ && headerRead_ == 0;
  }
  // The result counts only while missing() is not 0. Ask again before each
  // read: a receive that is posted meanwhile moves the place from a block to
  // the user's buffer.
  std::byte* destination() const {
    std::byte* const to = channel_.destination(path_);
    return to == nullptr ? nullptr : to + payloadRead_;
  }
  // The caller has put this many bytes there, at most missing(). `now` goes to
  // the channel, for acknowledgements and statistics.
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
