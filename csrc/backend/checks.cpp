#include "backend/checks.h"

#include <cctype>

#include <c10/util/StringUtil.h>

#include "backend/errors.h"
#include "backend/host_tensors.h"
#include "base/random.h"
#include "collectives/reduce.h"

namespace resilient {

void rejectCall(const char* operation, const std::string& why) {
  throwCallError(std::string("resilient ") + operation + ": " + why);
}

void checkTensor(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    rejectCall(operation, "a tensor is undefined");
  }
  if (tensor.layout() != at::kStrided) {
    rejectCall(
        operation,
        c10::str(
            "only supports dense tensors (unsupported layout ",
            tensor.layout(),
            ")"));
  }
  if (tensor.device().is_meta()) {
    rejectCall(operation, "a tensor on the meta device has no data");
  }
  dtypeOf(tensor); // throws for types that cannot be sent
}

namespace {

// Layouts first: torch's tests expect the layout to be named where type and
// layout differ.
void checkMatch(
    const char* operation,
    const at::Tensor& expected,
    const at::Tensor& tensor,
    size_t index) {
  if (!tensor.defined()) {
    rejectCall(operation, "a tensor is undefined");
  }
  if (tensor.layout() != expected.layout()) {
    rejectCall(
        operation,
        c10::str(
            "invalid tensor layout at index ",
            index,
            " (expected ",
            expected.layout(),
            ", got ",
            tensor.layout(),
            ")"));
  }
  if (tensor.scalar_type() != expected.scalar_type()) {
    rejectCall(
        operation,
        c10::str(
            "tensors must all have the same type: invalid tensor type at "
            "index ",
            index,
            " (expected ",
            expected.scalar_type(),
            ", got ",
            tensor.scalar_type(),
            ")"));
  }
  if (tensor.device() != expected.device()) {
    rejectCall(
        operation,
        "tensors should be on the same device (" + expected.device().str() +
            " and " + tensor.device().str() + ")");
  }
}

} // namespace

void checkAlike(const char* operation, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) {
    rejectCall(operation, "requires non-empty tensor list");
  }
  if (!tensors[0].defined()) {
    rejectCall(operation, "a tensor is undefined");
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    checkMatch(operation, tensors[0], tensors[i], i);
  }
  checkTensor(operation, tensors[0]);
}

void checkLike(
    const char* operation,
    const at::Tensor& expected,
    const std::vector<at::Tensor>& tensors,
    size_t firstIndex) {
  checkTensor(operation, expected);
  for (const at::Tensor& tensor : tensors) {
    checkMatch(operation, expected, tensor, firstIndex++);
  }
}

void checkSingle(
    const char* operation,
    const std::vector<at::Tensor>& tensors,
    const char* which) {
  const std::string list = std::string(which) + "tensor list";
  if (tensors.size() == 1) {
    checkTensor(operation, tensors[0]);
    return;
  }
  if (tensors.empty()) {
    rejectCall(
        operation,
        "requires non-empty tensor list: requires a single-element " + list +
            ", which is empty");
  }
  // gloo accepts several tensors in some calls, and checks these things first.
  if (!tensors[0].defined()) {
    rejectCall(operation, "a tensor is undefined");
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    checkMatch(operation, tensors[0], tensors[i], i);
    if (tensors[i].sizes() != tensors[0].sizes()) {
      rejectCall(
          operation,
          c10::str(
              "invalid tensor size at index ",
              i,
              " (expected ",
              tensors[0].sizes(),
              ", got ",
              tensors[i].sizes(),
              ")"));
    }
  }
  rejectCall(
      operation,
      "requires a single-element " + list + " (got " +
          std::to_string(tensors.size()) + " tensors)");
}

void checkParts(
    const char* operation,
    const char* which,
    const std::vector<at::Tensor>& parts,
    int size) {
  if (parts.size() != static_cast<size_t>(size)) {
    const std::string list = std::string(which) + " list size ";
    std::string capital = list;
    capital[0] = static_cast<char>(std::toupper(capital[0]));
    rejectCall(
        operation,
        "Incorrect " + list + std::to_string(parts.size()) + ". " + capital +
            "should be " + std::to_string(size) +
            ", same as size of the process group.");
  }
}

void checkSameNumel(
    const char* operation,
    const char* which,
    int index,
    const at::Tensor& part,
    const at::Tensor& own) {
  if (part.numel() != own.numel()) {
    rejectCall(
        operation,
        "invalid tensor size at index " + std::to_string(index) + " of the " +
            which + " list (expected " + std::to_string(own.numel()) +
            " elements, got " + std::to_string(part.numel()) + ")");
  }
}

void checkRoot(const char* operation, int64_t root, int size) {
  if (root < 0 || root >= size) {
    rejectCall(
        operation,
        "invalid root rank: " + std::to_string(root) + " (the group has " +
            std::to_string(size) + " ranks)");
  }
}

void checkRootTensor(
    const char* operation,
    int64_t index,
    const std::vector<at::Tensor>& tensors) {
  if (index < 0 || static_cast<size_t>(index) >= tensors.size()) {
    rejectCall(
        operation,
        "invalid root tensor: " + std::to_string(index) + " (the call has " +
            std::to_string(tensors.size()) + " tensors)");
  }
}

Reduction reductionFor(
    const char* operation,
    const c10d::ReduceOp& op,
    const at::Tensor& tensor) {
  Reduction reduction;
  reduction.dtype = dtypeOf(tensor);
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      reduction.op = ReduceOp::kSum;
      break;
    case c10d::ReduceOp::AVG:
      reduction.op = ReduceOp::kAvg;
      break;
    case c10d::ReduceOp::PRODUCT:
      reduction.op = ReduceOp::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      reduction.op = ReduceOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      reduction.op = ReduceOp::kMax;
      break;
    case c10d::ReduceOp::BAND:
      reduction.op = ReduceOp::kBand;
      break;
    case c10d::ReduceOp::BOR:
      reduction.op = ReduceOp::kBor;
      break;
    case c10d::ReduceOp::BXOR:
      reduction.op = ReduceOp::kBxor;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      reduction.op = ReduceOp::kPreMulSum;
      const auto* supplement =
          dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) {
        rejectCall(operation, "PREMUL_SUM without a factor");
      }
      reduction.factor = supplement->tensor_factor.defined()
          ? supplement->tensor_factor.item().toDouble()
          : supplement->double_factor;
      break;
    }
    default:
      rejectCall(operation, "unhandled reduction operation");
  }
  std::string why;
  if (!reductionSupported(reduction.dtype, reduction.op, &why)) {
    rejectCall(operation, why);
  }
  return reduction;
}

OpSignature
signatureOf(OpKind kind, const at::Tensor& tensor, uint64_t count, int root) {
  OpSignature signature;
  signature.kind = kind;
  signature.dtype = dtypeOf(tensor);
  signature.root = root;
  signature.count = count;
  return signature;
}

OpSignature
signatureOf(OpKind kind, const Reduction& reduction, uint64_t count, int root) {
  OpSignature signature;
  signature.kind = kind;
  signature.dtype = reduction.dtype;
  signature.reduceOp = reduction.op;
  signature.root = root;
  signature.count = count;
  return signature;
}

uint8_t tensorCount(size_t tensors) {
  return tensors <= 255 ? static_cast<uint8_t>(tensors) : 0;
}

// The upper 30 bits of the hash leave room below -1: ranks use the values from
// 0 on, and -1 means that there is no root.
int32_t layoutOf(const std::vector<at::Tensor>& tensors) {
  bool alike = tensorCount(tensors.size()) != 0;
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    alike = alike && tensor.numel() == tensors[0].numel() &&
        tensor.scalar_type() == tensors[0].scalar_type();
    hash = mixBits(hash ^ static_cast<uint64_t>(tensor.numel()));
    hash = mixBits(hash ^ static_cast<uint64_t>(dtypeOf(tensor)));
  }
  return alike ? -1 : -2 - static_cast<int32_t>(hash >> 34);
}

} // namespace resilient
