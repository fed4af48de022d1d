#include "collectives/compute.h"

#include <algorithm>
#include <cstring>

#include "collectives/reduce.h"

namespace resilient {
namespace {

// Waits for bytes that come from a device. Call it only if they are not there:
// a Task costs an allocation.
Task fetch(Communicator& comm, const void* data, size_t bytes) {
  Transfer transfer;
  comm.startFetch(transfer, data, bytes);
  co_await transfer;
}

} // namespace

// The slices below yield before they compute, not after: what has been spent
// may come from an earlier call, and the last slice often has nothing behind
// it that would be held up.

Task reduceSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    std::vector<const void*> operands,
    size_t count,
    Reduction reduction,
    bool last) {
  const size_t elementBytes = dtypeBytes(reduction.dtype);
  const size_t passes = std::max<size_t>(operands.size(), 1);
  const size_t slice =
      std::max<size_t>(kComputeSliceBytes / (passes * elementBytes), 1);
  std::vector<const void*> shifted(operands.size());
  for (size_t done = 0; done < count;) {
    if (budget.spentBytes >= kComputeSliceBytes) {
      Transfer turn;
      comm.startYield(turn);
      co_await turn;
      budget.spentBytes = 0;
    }
    const size_t n = std::min(slice, count - done);
    for (size_t i = 0; i < operands.size(); ++i) {
      shifted[i] = at(operands[i], done * elementBytes);
      if (comm.available(shifted[i], n * elementBytes) < n * elementBytes) {
        Task fetching = fetch(comm, shifted[i], n * elementBytes);
        co_await fetching;
      }
    }
    unsigned char* target = at(out, done * elementBytes);
    reduceOrdered(
        target,
        shifted.data(),
        shifted.size(),
        n,
        reduction.dtype,
        reduction.op);
    if (last && reduction.op == ReduceOp::kAvg) {
      divideBy(target, n, reduction.dtype, static_cast<uint64_t>(comm.size()));
    }
    if (last) {
      comm.resultIsFinal(target, n * elementBytes);
    }
    budget.spentBytes += n * elementBytes * passes;
    done += n;
  }
}

Task copySliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    const void* in,
    size_t bytes) {
  if (out == in) {
    co_return;
  }
  for (size_t done = 0; done < bytes;) {
    if (budget.spentBytes >= kComputeSliceBytes) {
      Transfer turn;
      comm.startYield(turn);
      co_await turn;
      budget.spentBytes = 0;
    }
    const size_t n = std::min(kComputeSliceBytes, bytes - done);
    if (comm.available(at(in, done), n) < n) {
      Task fetching = fetch(comm, at(in, done), n);
      co_await fetching;
    }
    std::memcpy(at(out, done), at(in, done), n);
    budget.spentBytes += n;
    done += n;
  }
}

Task scaleSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    const void* in,
    size_t count,
    Reduction reduction) {
  const size_t elementBytes = dtypeBytes(reduction.dtype);
  const size_t slice = kComputeSliceBytes / elementBytes;
  for (size_t done = 0; done < count;) {
    if (budget.spentBytes >= kComputeSliceBytes) {
      Transfer turn;
      comm.startYield(turn);
      co_await turn;
      budget.spentBytes = 0;
    }
    const size_t n = std::min(slice, count - done);
    const unsigned char* from = at(in, done * elementBytes);
    if (comm.available(from, n * elementBytes) < n * elementBytes) {
      Task fetching = fetch(comm, from, n * elementBytes);
      co_await fetching;
    }
    scaleOut(
        at(out, done * elementBytes),
        from,
        n,
        reduction.dtype,
        reduction.factor);
    budget.spentBytes += n * elementBytes;
    done += n;
  }
}

Task divideSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* data,
    size_t count,
    DType dtype,
    uint64_t divisor) {
  const size_t elementBytes = dtypeBytes(dtype);
  const size_t slice = kComputeSliceBytes / elementBytes;
  for (size_t done = 0; done < count;) {
    if (budget.spentBytes >= kComputeSliceBytes) {
      Transfer turn;
      comm.startYield(turn);
      co_await turn;
      budget.spentBytes = 0;
    }
    const size_t n = std::min(slice, count - done);
    divideBy(at(data, done * elementBytes), n, dtype, divisor);
    budget.spentBytes += n * elementBytes;
    done += n;
  }
}

void require(bool condition, const char* attempt, const char* what) {
  if (!condition) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument, std::string(attempt) + ": " + what));
  }
}

void requireReduction(const char* attempt, const Reduction& reduction) {
  std::string why;
  if (!reductionSupported(reduction.dtype, reduction.op, &why)) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument, std::string(attempt) + ": " + why));
  }
}

} // namespace resilient
