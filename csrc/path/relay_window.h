#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"

namespace resilient {

// How many bytes may be on the way to a relay or wait there for their turn: as
// few as keep it busy. Bytes that wait at one relay can no longer leave by
// another one whose turn has come, or by our own NIC. Those that the relay has
// passed on do not count, so the distance to the far end plays no part.
//
// How it works. With an empty queue at the relay, it takes the shortest time
// that was seen until the relay tells that it has passed bytes on. The rest is
// queue: of a window w, the part w (1 - shortest / time). The window doubles
// with every round trip to the relay until there is a queue, and then follows
// it: a short one lets it grow slowly, a long one shrinks it. (The rule of TCP
// Vegas, in bytes.)
class RelayWindow {
 public:
  explicit RelayWindow(uint64_t most)
      : most_(std::max(most, kFirstBytes)), window_(kFirstBytes) {}

  uint64_t bytes() const {
    return window_;
  }
  // The relay has told, after `took`, that it has passed `bytes` on. `full`:
  // the window was what limited the sender, so this tells whether a larger one
  // would do.
  void onPassed(uint64_t bytes, Nanos took, bool full) {
    shortest_ = std::min(shortest_, std::max(took, Nanos(1)));
    const double queued = static_cast<double>(window_) *
        (1 - toSeconds(shortest_) / toSeconds(std::max(took, shortest_)));
    const double allowed =
        std::max<double>(kQueueBytes, static_cast<double>(window_) / 4);
    if (queued > allowed) {
      starting_ = false;
      window_ -= std::min(window_ / 2, bytes / 2);
    } else if (full && starting_) {
      window_ += bytes;
    } else if (full && queued < allowed / 2) {
      const uint64_t step = std::max(kStepBytes, window_ / 64);
      window_ += std::max<uint64_t>(bytes * step / window_, 1);
    }
    window_ = std::clamp(window_, kFirstBytes, most_);
  }

 private:
  // A few chunks: 8 ms at 250 Mbit/s, during which the relay's note and the
  // next chunks are under way, on a busy machine too.
  static constexpr uint64_t kFirstBytes = 256u << 10;
  static constexpr uint64_t kQueueBytes = 256u << 10;
  static constexpr uint64_t kStepBytes = 64u << 10; // a round trip

  const uint64_t most_;
  uint64_t window_;
  Nanos shortest_ = Nanos::max();
  bool starting_ = true;
};

} // namespace resilient
