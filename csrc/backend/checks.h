#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collectives/collectives.h"

namespace resilient {

// Checks of arguments, before anything is sent; they throw CallError.
// `operation` is the name of the method for the message: "allreduce: invalid
// root rank: 7". The texts follow c10d's own
// (torch/csrc/distributed/c10d/Utils.hpp), which programs and torch's tests
// match.

[[noreturn]] void rejectCall(const char* operation, const std::string& why);

// Dense (strided), of a type that can be sent.
void checkTensor(const char* operation, const at::Tensor& tensor);
// At least one; all of them dense, on one device and of one type.
void checkAlike(const char* operation, const std::vector<at::Tensor>& tensors);
// All of them as `expected`, which is dense. The error counts them from
// `firstIndex`.
void checkLike(
    const char* operation,
    const at::Tensor& expected,
    const std::vector<at::Tensor>& tensors,
    size_t firstIndex = 0);
// `which`: "input " or "output " where the call has several lists.
void checkSingle(
    const char* operation,
    const std::vector<at::Tensor>& tensors,
    const char* which = "");
// A list with one tensor for each rank; `which`: "input" or "output".
void checkParts(
    const char* operation,
    const char* which,
    const std::vector<at::Tensor>& parts,
    int size);
void checkSameNumel(
    const char* operation,
    const char* which,
    int index,
    const at::Tensor& part,
    const at::Tensor& own);
void checkRoot(const char* operation, int64_t root, int size);
void checkRootTensor(
    const char* operation,
    int64_t index,
    const std::vector<at::Tensor>& tensors);

// The reduction c10d asks for, of tensors like this one.
Reduction reductionFor(
    const char* operation,
    const c10d::ReduceOp& op,
    const at::Tensor& tensor);

OpSignature signatureOf(
    OpKind kind,
    const at::Tensor& tensor,
    uint64_t count,
    int root = -1);
OpSignature signatureOf(
    OpKind kind,
    const Reduction& reduction,
    uint64_t count,
    int root = -1);
// For coalesced calls.
uint8_t tensorCount(size_t tensors);
// For calls with a list of tensors, what OpSignature::root says of them. Their
// number and total size alone would let two ranks take different tensors for
// the same: pieces of large ones are alike.
int32_t layoutOf(const std::vector<at::Tensor>& tensors);

} // namespace resilient
