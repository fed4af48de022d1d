#include "backend/checks.h"

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
    rejectCall(operation, "only supports dense tensors");
  }
  if (tensor.device().is_meta()) {
    rejectCall(operation, "a tensor on the meta device has no data");
  }
  dtypeOf(tensor); // throws for types that cannot be sent
}

void checkAlike(const char* operation, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) {
    rejectCall(operation, "requires non-empty tensor list");
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkTensor(operation, tensors[i]);
    if (tensors[i].scalar_type() != tensors[0].scalar_type()) {
      rejectCall(
          operation,
          std::string("invalid tensor type at index ") + std::to_string(i) +
              " (expected " + c10::toString(tensors[0].scalar_type()) +
              ", got " + c10::toString(tensors[i].scalar_type()) + ")");
    }
    if (tensors[i].device() != tensors[0].device()) {
      rejectCall(
          operation,
          "tensors should be on the same device (" + tensors[0].device().str() +
              " and " + tensors[i].device().str() + ")");
    }
  }
}

void checkSingle(
    const char* operation,
    const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) {
    rejectCall(
        operation,
        "requires a single-element tensor list (got " +
            std::to_string(tensors.size()) + " tensors)");
  }
  checkTensor(operation, tensors[0]);
}

void checkRoot(const char* operation, int64_t root, int size) {
  if (root < 0 || root >= size) {
    rejectCall(
        operation,
        "invalid root rank: " + std::to_string(root) + " (the group has " +
            std::to_string(size) + " ranks)");
  }
}

void checkRootTensor(const char* operation, int64_t tensor) {
  if (tensor != 0) {
    rejectCall(operation, "invalid root tensor: " + std::to_string(tensor));
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
