#pragma once

#include <compare>
#include <cstdint>

#include "base/traffic_class.h"

namespace resilient {

// The order in which a site sends to another one. Pipelines that train in step
// send equally many messages, so of two streams of activations the one with the
// lower position is at the earlier microbatch; the rank decides a tie, and is
// the same for everybody who compares. All NICs of a site thus serve the same
// message at a time, and it is there early, while the last one is no later.
// Paper: ATLAS §4.3, temporal bandwidth sharing.
struct Urgency {
  TrafficClass cls = TrafficClass::kBulk;
  uint64_t position = 0; // of an activation in its stream
  int32_t source = -1; // the rank that sends the activation

  auto operator<=>(const Urgency&) const = default;
};

} // namespace resilient
