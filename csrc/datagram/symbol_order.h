#pragma once

#include <cstdint>
#include <vector>

namespace resilient {

// The sending order of the symbols of an object. The first `must` data symbols
// have to arrive. These and the repair symbols leave evenly among those that
// may be missing, so a burst of losses takes few of them. Data symbols are
// numbered from 0, repair symbols from `count` on.
//
// Both ends compute it from the object's description, so a change of it is a
// change of the protocol (docs/wire_format.md). Each symbol occurs once.
inline std::vector<uint32_t>
spreadOrder(uint32_t count, uint32_t must, uint32_t repair) {
  std::vector<uint32_t> order;
  const uint64_t all = uint64_t(count) + repair;
  const uint64_t important = uint64_t(must) + repair;
  order.reserve(all);
  uint32_t next = 0, other = must;
  for (uint64_t slot = 0; slot < all; ++slot) {
    // The share of the important ones in the slots up to this one.
    if ((slot + 1) * important / all > next) {
      order.push_back(next < must ? next : count + (next - must));
      ++next;
    } else {
      order.push_back(other++);
    }
  }
  return order;
}

} // namespace resilient
