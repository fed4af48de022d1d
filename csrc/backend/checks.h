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
//
// Any thread may call them. None changes a tensor or sends anything, so a
// refused call leaves the group usable on all ranks. They see the arguments of
// this rank only; the signature of the operation reveals ranks that disagree.

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
// The list has exactly one tensor, and checkTensor() accepts it.
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
// `part`, which the list has for this rank, holds as many elements as `own`.
// The data of this part never travels, so no message would reveal a wrong size.
void checkSameNumel(
    const char* operation,
    const char* which,
    int index,
    const at::Tensor& part,
    const at::Tensor& own);
void checkRoot(const char* operation, int64_t root, int size);
// c10d's index of the tensor in the list. It must be valid, although lists have
// one tensor here.
void checkRootTensor(
    const char* operation,
    int64_t index,
    const std::vector<at::Tensor>& tensors);

// The reduction c10d asks for, of tensors like this one.
// Throws if there is no such reduction. The factor of PREMUL_SUM may be a
// tensor: one on a device is read here, and the calling thread waits for that
// device.
Reduction reductionFor(
    const char* operation,
    const c10d::ReduceOp& op,
    const at::Tensor& tensor);

// The signature that all ranks must agree on. `count` is 0 where sizes may
// differ by rank.
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
// The field holds 255 at most; more tensors give 0, and layoutOf() then always
// gives a digest.
uint8_t tensorCount(size_t tensors);
// For calls with a list of tensors, what OpSignature::root says of them. Their
// number and total size alone would let two ranks take different tensors for
// the same: pieces of large ones are alike.
// The result is -1 for tensors that are all alike, otherwise below -1. Two
// unlike lists have the same digest with a probability of 2^-30.
int32_t layoutOf(const std::vector<at::Tensor>& tensors);

} // namespace resilient
