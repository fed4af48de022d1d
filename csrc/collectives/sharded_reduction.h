#pragma once

#include <cstddef>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/cost.h"

namespace resilient {

// The common core of reduce_scatter, reduce and the direct all_reduce: the
// data is cut into one shard per rank, each rank receives the others'
// contributions to its shard and folds them in rank order.
// `counts`, `results`, `root`, `onlyOwner`, the operation and `tuning` must be
// equal on all ranks. Memory that the pointers refer to must outlive the Task.
struct ShardedReduction {
  // The receivers of a reduced shard.
  enum class Results { kKeep, kToAll, kToRoot };

  std::vector<const void*> inputs; // by rank: this rank's part of its shard
  std::vector<size_t> counts; // by rank: elements of its shard
  // The place of the own shard's result; may be inputs[rank]. Null with kToRoot
  // if this rank is not the root: then it is only passed on.
  void* output = nullptr;
  Results results = Results::kKeep;
  int root = -1; // with kToRoot
  // By rank: where the result of its shard arrives here. May be inputs[r].
  // Used with kToAll, and with kToRoot on the root.
  std::vector<void*> places;
  // Not -1: only this rank has a shard, nothing is sent to the others.
  int onlyOwner = -1;
  Reduction reduction;
  Tuning tuning;
};

// Rounds: 1, and 1 more unless kKeep, both pipelined by segment.
// Bytes: each rank sends its input less its own shard; kToAll adds (n-1)
// times its shard, kToRoot its shard.
// Memory: (n-1) * segment * window; with kPreMulSum twice that and a little,
// as the inputs are not ours to scale in place.
// A shard of no elements still costs one empty message from each rank: it tells
// ranks with different operations apart.
Task reduceSharded(Communicator& comm, ShardedReduction job);

// Cuts `count` elements into one shard per rank, sizes differing by at most 1.
// The larger shards come first.
std::vector<size_t> shardCounts(size_t count, int ranks);

} // namespace resilient
