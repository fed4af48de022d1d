#pragma once

#include <cstddef>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/cost.h"
#include "operation/topology.h"

namespace resilient {

// The collectives over a hierarchy of places (topology.h): data that must cross
// the border between two sites or hosts crosses it once, sent by all ranks
// there; the rest is done within. Data is cut into chunks, which pass through
// the levels one after the other: all levels work at once.
//
// The operands of each sum are folded within the lowest group by rank, then the
// sums of the groups of one place in the order of their lowest ranks, and so on
// upwards. This order depends on the topology alone, not on sizes, chunks or
// arrival: the bits are equal on all ranks and in all runs.
//
// Rounds, bytes and memory: docs/collectives.md. `root` (the topology's) must
// have children and outlive the Task. There must be something to do: data of
// no elements is the flat algorithms' business.

// Waits until the ranks' places are known, and says what to make of them. For a
// single rank there is nothing to learn.
//
//   TopologyUse use = TopologyUse::kIgnore;
//   Task choosing = chooseByTopology(comm, kind, bytes, use);
//   co_await choosing;
//
// The first operation of a group may wait here until all ranks have joined,
// within its own timeout. `use` must outlive the Task.
Task chooseByTopology(
    Communicator& comm,
    CollectiveKind kind,
    size_t bytes,
    TopologyUse& use);

// How the data is cut.
// `chunkBytes` must be equal on all ranks. `lanes` may differ: a chunk waits
// for no chunk with a higher number.
struct HierarchyTuning {
  size_t chunkBytes = kHierarchyChunkBytes; // of one rank's data
  size_t lanes = kHierarchyLanesBetweenSites; // chunks on their way at a time
};
HierarchyTuning hierarchyTuningFor(const Topology& topology);

// `exchangeAtTop`, equal on all ranks: see exchangesAtTop() in cost.h. It
// changes bytes and rounds, never bits.
Task hierarchicalAllReduce(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    bool exchangeAtTop,
    HierarchyTuning tuning);

// `data` of all ranks but `destination` is only read.
Task hierarchicalReduce(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int destination,
    HierarchyTuning tuning);

// `output` may be inputs[rank].
Task hierarchicalReduceScatter(
    const Place& root,
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction,
    HierarchyTuning tuning);

// outputs[rank] may be `input`.
Task hierarchicalAllGather(
    const Place& root,
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes,
    HierarchyTuning tuning);

Task hierarchicalBroadcast(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t bytes,
    int source,
    HierarchyTuning tuning);

Task hierarchicalBarrier(const Place& root, Communicator& comm);

} // namespace resilient
