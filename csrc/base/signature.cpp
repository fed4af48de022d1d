#include "base/signature.h"

namespace resilient {

size_t dtypeBytes(DType t) {
  switch (t) {
#define X(name, bytes, text) \
  case DType::name:          \
    return bytes;
    RESILIENT_DTYPES(X)
#undef X
  }
  return 1;
}

const char* dtypeName(DType t) {
  switch (t) {
#define X(name, bytes, text) \
  case DType::name:          \
    return text;
    RESILIENT_DTYPES(X)
#undef X
  }
  return "unknown";
}

const char* reduceOpName(ReduceOp op) {
  switch (op) {
#define X(name, text)  \
  case ReduceOp::name: \
    return text;
    RESILIENT_REDUCE_OPS(X)
#undef X
  }
  return "unknown";
}

const char* opKindName(OpKind kind) {
  switch (kind) {
#define X(name, text) \
  case OpKind::name:  \
    return text;
    RESILIENT_OPERATIONS(X)
#undef X
  }
  return "unknown";
}

bool validSignatureBytes(uint8_t kind, uint8_t dtype, uint8_t reduceOp) {
  return kind <= static_cast<uint8_t>(OpKind::kAllReduceSparse) &&
      dtype <= static_cast<uint8_t>(DType::kOpaque16) &&
      reduceOp <= static_cast<uint8_t>(ReduceOp::kNone);
}

std::string OpSignature::toString() const {
  std::string s = opKindName(kind);
  s += '(';
  s += dtypeName(dtype);
  if (count != 0) {
    s += '[' + std::to_string(count) + ']';
  }
  if (reduceOp != ReduceOp::kNone) {
    s += ", ";
    s += reduceOpName(reduceOp);
  }
  if (root >= 0) {
    s += ", root=" + std::to_string(root);
  }
  if (tensors != 1) {
    s += ", tensors=" + std::to_string(tensors);
  }
  if (root < -1) {
    s += ", layout=" + std::to_string(-root);
  }
  return s + ')';
}

} // namespace resilient
