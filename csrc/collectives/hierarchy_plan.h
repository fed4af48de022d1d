#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "operation/topology.h"

namespace resilient {

// The exchanges between ranks, level by level, in a collective over a hierarchy
// of places. Pure; every rank computes its part of the same plan.
//
// Data is a row of elements, which may be cut into blocks. At each place,
// each child holds its own partial result of a stretch of the data, in the
// hands of one of its ranks. An exchange brings these ranks, one for each
// child, together.
//   - Forward (to reduce): all others give theirs to the target, who folds
//     them in the order of the children.
//   - Backward (to gather): the target gives its own to all others.
// So data crosses the border of a place once, sent by all its ranks, and each
// of them holds an equal share.
struct Exchange {
  static constexpr size_t kEverybody = SIZE_MAX;
  // An index has so many bits in the numbers of messages. Making a plan with
  // more exchanges on one level throws StatusError.
  static constexpr int kIndexBits = 20;

  size_t begin = 0; // elements from the beginning of the row
  size_t count = 0;
  std::vector<int> owners; // ranks, in the order of the place's children
  size_t target = 0; // index into owners, or kEverybody: each gives to each
  uint64_t index = 0; // within the level, the same on all ranks

  int targetRank() const {
    return owners[target];
  }
};

// Every rank computes the exchanges of all ranks, in one order, and keeps its
// own. All ranks therefore give an exchange the same index, without a message.
struct HierarchyPlan {
  // By level, lowest first; those exchanges that this rank takes part in.
  // Forward they run upwards, backward downwards.
  std::vector<std::vector<Exchange>> levels;
};

// Forward and then backward: an all-reduce of `count` elements. With
// `exchangeAtTop` the children of the root exchange their shares whole: one
// message after another instead of two, and as many bytes for two children.
// `root` must have children in this and the other plans; `rank` is in it.
HierarchyPlan
planAllReduce(const Place& root, int rank, size_t count, bool exchangeAtTop);

// Forward: a reduce-scatter; backward: an all-gather. Block i of counts[i]
// elements is for, or from, rank rankOrder(root)[i].
HierarchyPlan
planScatter(const Place& root, int rank, const std::vector<size_t>& counts);

// The ranks from left to right: each place's blocks are adjacent.
std::vector<int> rankOrder(const Place& root);

// Forward, then the last level backward: a reduce of `count` elements to
// `destination` (outward = false). All backward: a broadcast (outward = true).
// The last level, beyond the height of `root`, is between `destination` and
// the ranks of its place among which the data is shared out.
HierarchyPlan planRooted(
    const Place& root,
    int rank,
    size_t count,
    int destination,
    bool outward);

} // namespace resilient
