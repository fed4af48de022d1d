#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/collectives.h"

namespace resilient {

// Local work of the algorithms, in slices: the loop thread carries the traffic
// of the whole process, so whoever computes for long hands it back in between.
// Inputs may still be on their way from a device: each slice waits for its own
// part.

// Counts what has been computed since the thread was last handed back.
// Tasks that run at the same time may share one.
struct ComputeBudget {
  size_t spentBytes = 0;
};

// Operand bytes computed before yielding: 100 us at 10 GB/s. Higher makes
// other traffic wait (late acknowledgements), lower costs turns of the loop.
inline constexpr size_t kComputeSliceBytes = 1u << 20;

// All keep to the budget, which is the caller's and outlives the Task.

// out = the left fold of the operands (reduceOrdered), then, for kAvg,
// divided by the number of ranks if `last`, which also says that it is final.
// `out` may be one of the operands. A slice has a fixed number of operand
// bytes, whatever the number of operands, so all slices take about the same
// time. Throws the operation's error if it fails during a yield, like the
// functions below.
Task reduceSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    std::vector<const void*> operands,
    size_t count,
    Reduction reduction,
    bool last);

// Does nothing if `out` is `in`; other overlaps are not allowed.
Task copySliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    const void* in,
    size_t bytes);

// out = in * reduction.factor
Task scaleSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* out,
    const void* in,
    size_t count,
    Reduction reduction);

// data /= divisor, element by element (divideBy).
Task divideSliced(
    Communicator& comm,
    ComputeBudget& budget,
    void* data,
    size_t count,
    DType dtype,
    uint64_t divisor);

// co_await finish(transfers[i]) is co_await transfers[i], which gcc 12 refuses
// to compile: it copies an awaited array element.
struct Finish {
  Transfer* transfer;

  bool await_ready() const noexcept {
    return transfer->await_ready();
  }
  void await_suspend(std::coroutine_handle<> h) noexcept {
    transfer->await_suspend(h);
  }
  void await_resume() const {
    transfer->await_resume();
  }
};
inline Finish finish(Transfer& transfer) {
  return Finish{&transfer};
}

// Throws StatusError(kInvalidArgument, "<attempt>: <what>") if !condition.
void require(bool condition, const char* attempt, const char* what);

// Throws the same if there is no such reduction.
void requireReduction(const char* attempt, const Reduction& reduction);

inline unsigned char* at(void* base, size_t offset) {
  // No arithmetic on a null pointer, which an empty buffer may be.
  return offset == 0 ? static_cast<unsigned char*>(base)
                     : static_cast<unsigned char*>(base) + offset;
}
inline const unsigned char* at(const void* base, size_t offset) {
  return offset == 0 ? static_cast<const unsigned char*>(base)
                     : static_cast<const unsigned char*>(base) + offset;
}

} // namespace resilient
