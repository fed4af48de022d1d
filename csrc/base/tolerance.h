#pragma once

namespace resilient {

// The parts of a message that may be missing at its receiver, which then has
// zeros there and reports their places. Nothing, unless its sender asks for it.
//
// Paper: SMART §3.1, §3.2.
//
// Only paths of datagrams make use of it; connections and shared memory deliver
// every byte.
struct Tolerance {
  // Packets of gradients with at least this mean magnitude must arrive.
  float threshold = 0;
  // This part of the message's bytes at most, in whole packets. 0: the message
  // is exact.
  float maxLost = 0;

  bool exact() const {
    return !(maxLost > 0);
  }
};

} // namespace resilient
