#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/host_tensors.h"
#include "collectives/collectives.h"

namespace resilient {

// Sum of one sparse (COO) tensor per rank. All ranks gather all indices and
// values, then each adds them up in rank order, so all get the same bits. On
// the wire each rank sends its own part to all others: cheap for very sparse
// tensors, the only use of this operation.
//
// Lifetime: until the Work ends, see HostTensors::keep(). Threads use it one
// after the other: the caller's, the loop's, the staging thread. It holds the
// parts of all ranks at the same time.
class SparseAllReduce {
 public:
  // Caller's thread. Coalesces a host tensor. A tensor on a device is staged by
  // `tensors` as it is, since coalescing it would stop the caller until its
  // stream is done: equal indices then go over the wire apart. `tensors` must
  // live as long.
  SparseAllReduce(const at::Tensor& tensor, int size, HostTensors& tensors);

  // Loop thread.
  // Throws kMismatch if another rank's tensor has another shape. `this` must
  // outlive the Task.
  Task run(Communicator& comm);
  // Staging thread, after run(): writes the sum into the tensor. On a device
  // the copies are only enqueued.
  void store();

 private:
  // The ranks exchange this first. The sparse and dense shape must agree, the
  // number of stored elements need not.
  struct Header {
    int64_t stored;
    int64_t sparseDims;
    int64_t dims;
    int64_t shapeHash; // of all sizes
  };

  Task gatherHeaders(Communicator& comm);
  Task gatherIndices(Communicator& comm);
  Task gatherValues(Communicator& comm);

  // A host tensor with the contents of `part`, at the latest when run() begins.
  at::Tensor staged(const at::Tensor& part);

  at::Tensor tensor_;
  HostTensors& tensors_;
  at::Tensor indices_; // int64 [sparse dims][stored], contiguous, host
  at::Tensor values_; // [stored][dense shape...], contiguous, host
  Header header_{};
  std::vector<Header> headers_;
  std::vector<at::Tensor> allIndices_;
  std::vector<at::Tensor> allValues_;
};

} // namespace resilient
