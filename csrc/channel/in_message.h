#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/planted_bugs.h"
#include "path/number_set.h"
#include "wire/control.h"
#include "wire/frame.h"

namespace resilient {

class Channel;
struct RecvOp;

// A message on its way in: which chunks are here, and where they are. Before
// a receive matches it, chunks lie in blocks of their own.
//
// Paper: SHIFT §3.1. A second copy must not overwrite what is being read. Here
// a known chunk is dropped, and a message is read only when it is whole: so
// anything may be sent again.
//
// A path that reads straight from the far end's memory pins the place of the
// chunk. What it reads lands there at any time, even after another path has
// brought the chunk, and the far end may have changed its memory by then. So
// the other copy waits in a block, and takes its place when the pin has ended.
//
// Invariant: op != nullptr implies blocks holds only chunks still being read,
// or pinned.
struct InMessage {
  InMessage(Channel& c, const FrameHeader& h) : channel(c), header(h) {}

  Channel& channel;
  const FrameHeader header; // of the frame that announced it
  // The receive that it is arriving for. Null before the match, and after a
  // cancel.
  RecvOp* op = nullptr;
  uint64_t receivedBytes = 0;
  uint32_t receivedChunks = 0;
  bool granted = false;
  bool announced = false; // the mailbox knows it
  bool matched = false; // had a receive, perhaps cancelled since
  // Its only chunk is being read: no grant needed, it needs no credit more.
  bool arrivingWhole = false;
  uint64_t bufferedBytes = 0; // what it takes of the channel's budget
  // Set by a kCancel frame before a receive matched it.
  bool cancelled = false;
  std::string cancelReason;
  StatusCode cancelCode = StatusCode::kAborted;

  // Each has the size of its chunk's payload. Reading may still be under way.
  std::map<uint32_t, std::unique_ptr<std::byte[]>> blocks; // by chunk
  NumberSet have; // chunks; a few ranges, about one per path
  std::vector<uint32_t> pinned; // chunks, each once
  std::vector<ByteRange> zeroFilled; // in the order of arrival

  uint32_t chunkCount() const {
    return header.totalBytes == 0
        ? 1
        : static_cast<uint32_t>(
              (header.totalBytes + header.chunkBytes - 1) / header.chunkBytes);
  }
  bool whole() const {
    return receivedChunks == chunkCount();
  }
  bool has(uint32_t chunk) const {
    return have.contains(chunk) && !RESILIENT_PLANTED(noDuplicateCheck);
  }
  bool isPinned(uint32_t chunk) const {
    return std::ranges::find(pinned, chunk) != pinned.end() &&
        !RESILIENT_PLANTED(copyToPinned);
  }
  void mark(uint32_t chunk, uint32_t bytes) {
    have.insert(chunk);
    ++receivedChunks;
    receivedBytes += bytes;
  }
};

} // namespace resilient
