#pragma once

#include <cstddef>
#include <vector>

#include "base/signature.h"
#include "operation/communicator.h"
#include "operation/task.h"

namespace resilient {

// The collectives, as straight-line algorithms over a Communicator. All
// buffers are contiguous host memory that outlives the Task; counts are in
// elements of `dtype`, sizes in bytes. Every algorithm gives the same bits on
// every rank and in every run: the order of the operands of each reduction
// depends on ranks and sizes only, never on arrival.

// The costs by which an algorithm is chosen; see collectives/cost.h.
struct CostModel {
  double latencyS = 30e-6; // one message, one way
  double secondsPerByte = 1 / 2e9; // on the wire
  double reduceSecondsPerByte = 1 / 8e9;
};

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1; // kPreMulSum only: applied to this rank's input first
};

// In place; any count, 0 included.
Task allReduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    CostModel cost);

// The result is in `data` of the root; elsewhere `data` is left as it was.
Task reduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int root,
    CostModel cost);

Task broadcast(Communicator& comm, void* data, size_t bytes, int root);

// outputs[r] receives the input of rank r; outputs[rank] may be `input`
// itself. Sizes by rank: bytes[r], the same vector on all ranks.
Task allGather(
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes);

// outputs and its sizes are used on the root only. `bytes` is what this rank
// sends.
Task gather(
    Communicator& comm,
    const void* input,
    size_t bytes,
    std::vector<void*> outputs,
    std::vector<size_t> outputBytes,
    int root);

Task scatter(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> inputBytes,
    void* output,
    size_t bytes,
    int root);

// inputs[r] (counts[r] elements) is this rank's contribution to rank r;
// output has counts[rank] elements and may alias inputs[rank], no other.
Task reduceScatter(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction,
    CostModel cost);

// inputs[r] goes to rank r, outputs[r] comes from it. Outputs do not alias
// inputs.
Task allToAll(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> inputBytes,
    std::vector<void*> outputs,
    std::vector<size_t> outputBytes);

Task barrier(Communicator& comm);

// Rank 0 hears from all, then answers all. If the operation's time runs out
// the error on rank 0 names the missing ranks: the first one, or all if
// waitAllRanks (texts as in ProcessGroupGloo, which torch's tests expect).
Task monitoredBarrier(Communicator& comm, bool waitAllRanks);

// Runs the parts one after the other in one operation; each part sees a
// Communicator with slots of its own.
Task coalesced(
    Communicator& comm,
    std::vector<std::function<Task(Communicator&)>> parts);

} // namespace resilient
