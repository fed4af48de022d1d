#pragma once

#include <cstddef>
#include <cstdint>

#include "base/time.h"
#include "wire/frame.h"

namespace resilient {

// The content of slots, and what both halves of a VerbsPath know.

// At the beginning of each slot.
struct VerbsSlotHeader {
  uint32_t posted = 0; // receives, since the beginning, modulo 2^32
  uint32_t zero = 0; // room for flags
};

// Behind the header of a frame: where its payload is.
struct VerbsReference {
  uint64_t address = 0;
  uint32_t key = 0;
  uint32_t zero = 0;
};
inline constexpr size_t kVerbsReferenceBytes =
    kFrameHeaderBytes + sizeof(VerbsReference);

// Sends and reads without a completion.
struct VerbsPending {
  void add(TimePoint now) {
    if (count++ == 0) {
      since = now;
    }
  }
  void completed(TimePoint now) {
    --count;
    since = now;
  }

  uint32_t count = 0;
  TimePoint since{}; // the last progress of these
};

} // namespace resilient
