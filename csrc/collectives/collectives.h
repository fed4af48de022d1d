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
// depends on ranks, sizes and places only, never on arrival.
//
// Calls only create the Task; it runs on the loop thread and never blocks it.
// It throws StatusError: kInvalidArgument for arguments that this rank can find
// wrong, before it sends anything, otherwise the error of the first transfer
// that failed. All other transfers are then cancelled, and outputs have
// undefined contents. kMismatch means that the ranks differ in the operation or
// in a size.
//
// Inputs may share memory with each other. An output shares memory with no
// other buffer, except where a function allows it. The backend sees to that
// (backend/host_tensors.h).

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1; // kPreMulSum only: applied to this rank's input first
};

// In place; any count, 0 included.
// `count`, type and operation are equal on all ranks; the factor may differ.
Task allReduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction);

// The result is in `data` of the root; elsewhere `data` is left as it was.
Task reduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int root);

// `data` of the root is only read.
Task broadcast(Communicator& comm, void* data, size_t bytes, int root);

// outputs[r] receives the input of rank r; outputs[rank] may be `input`
// itself. Sizes by rank: bytes[r], the same vector on all ranks.
// Sizes may be 0 and may differ by rank.
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

// The reverse of gather: inputs and their sizes are used on the root only, and
// `bytes` is the size that this rank receives.
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
    Reduction reduction);

// inputs[r] goes to rank r, outputs[r] comes from it. Outputs do not alias
// inputs.
// Sizes may differ for each pair, but inputBytes[rank] and outputBytes[rank]
// must be equal.
Task allToAll(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> inputBytes,
    std::vector<void*> outputs,
    std::vector<size_t> outputBytes);

// Ends on no rank before all ranks have begun it.
Task barrier(Communicator& comm);

// Rank 0 hears from all, then answers all. If the operation's time runs out
// the error on rank 0 names the missing ranks: the first one, or all if
// waitAllRanks (texts as in ProcessGroupGloo, which torch's tests expect).
Task monitoredBarrier(Communicator& comm, bool waitAllRanks);

// Runs the parts one after the other in one operation; each part sees a
// Communicator with slots of its own.
// At most 65,536 parts. A part must not be coalesced itself: the numbers of
// inner and outer parts use the same bits of a slot.
Task coalesced(
    Communicator& comm,
    std::vector<std::function<Task(Communicator&)>> parts);

} // namespace resilient
