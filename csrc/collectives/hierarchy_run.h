#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/hierarchy_plan.h"

namespace resilient {

// The common core of the hierarchical collectives: takes a plan up the levels
// (forward), then down (backward), chunk by chunk.
struct HierarchyJob {
  // A block of the data, or the slice of it that belongs to one chunk.
  struct Block {
    const void* source = nullptr; // this rank's value, or null: it has none
    void* output = nullptr; // where the result goes, or null: not wanted here
    size_t count = 0; // elements

    Block slice(size_t first, size_t max, size_t elementBytes) const;
  };

  // Source and output of a block may be the same memory. They must not overlap
  // otherwise.
  std::vector<Block> blocks; // side by side, the row that plans are made for
  // The plan for blocks of these sizes; called for each size of a chunk.
  std::function<HierarchyPlan(const std::vector<size_t>& counts)> plan;
  size_t elementBytes = 1;
  size_t chunkCount = 1; // elements of each block in one chunk
  size_t lanes = 1; // chunks on their way at a time, at most

  // Levels [0, forward) run forward, upwards; then levels [backwardEnd,
  // backwardBegin) run backward, downwards.
  size_t forward = 0;
  size_t backwardBegin = 0;
  size_t backwardEnd = 0;
  // The level forward - 1 has exchanges of Exchange::kEverybody.
  bool exchangeAtTop = false;
  int complete = -1; // a rank that is given nothing backward: it has all

  Reduction reduction; // of the folds: never kAvg or kPreMulSum
  bool scales = false; // sources by reduction.factor, into scratch memory
  size_t divisor = 1; // of the results of the highest level
};

// Memory: for each chunk under way, the others' parts of what this rank folds,
// its share of the chunk again if exchangeAtTop, the chunk again if it scales;
// kHierarchyScratchBytesMax together, but two chunks at least.
// The jobs of all ranks must agree in everything except pointers, lanes and the
// factor. At most 2^20 chunks; more throw kInvalidArgument.
Task runHierarchy(Communicator& comm, HierarchyJob job);

} // namespace resilient
