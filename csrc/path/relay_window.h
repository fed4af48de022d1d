#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"

namespace resilient {

// How many bytes a path over a relay may have under way. The relay holds what
// it cannot pass on at once, so the window is what bounds its memory, and the
// time that chunks spend there.
//
// How it works. With an empty queue at the relay, an answer takes the shortest
// round trip that was seen. The rest of its time is queue: of a window w, the
// part w (1 - shortest / round trip). The window doubles with every round trip
// until there is a queue, and then follows it: a short one lets it grow slowly,
// a long one shrinks it. (The rule of TCP Vegas, in bytes.)
class RelayWindow {
 public:
  explicit RelayWindow(uint64_t most)
      : most_(std::max(most, kFirstBytes)), window_(kFirstBytes) {}

  uint64_t bytes() const {
    return window_;
  }
  // An answer for `bytes`, which took `roundTrip`. `full`: the window was what
  // limited the sender, so the answer tells whether a larger one would do.
  void onDelivered(uint64_t bytes, Nanos roundTrip, bool full) {
    shortest_ = std::min(shortest_, std::max(roundTrip, Nanos(1)));
    const double queued = static_cast<double>(window_) *
        (1 - toSeconds(shortest_) / toSeconds(std::max(roundTrip, shortest_)));
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
  // Bytes that wait at the relay for their turn look like a queue, too. So this
  // least window lets a relay go on until the next answer is there: 25 ms at
  // 250 Mbit/s. Less left the last of three pipelines without bytes.
  static constexpr uint64_t kFirstBytes = 768u << 10;
  static constexpr uint64_t kQueueBytes = 1024u << 10;
  static constexpr uint64_t kStepBytes = 128u << 10; // a round trip

  const uint64_t most_;
  uint64_t window_;
  Nanos shortest_ = Nanos::max();
  bool starting_ = true;
};

} // namespace resilient
