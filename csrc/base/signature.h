#pragma once

#include <cstdint>
#include <string>

namespace resilient {

// Element types, by wire value. Complex tensors travel as pairs of reals.
#define RESILIENT_DTYPES(X)                                             \
  X(kUInt8, 1, "uint8")                                                 \
  X(kInt8, 1, "int8")                                                   \
  X(kInt16, 2, "int16")                                                 \
  X(kInt32, 4, "int32")                                                 \
  X(kInt64, 8, "int64")                                                 \
  X(kBool, 1, "bool")                                                   \
  X(kFloat16, 2, "float16")                                             \
  X(kBFloat16, 2, "bfloat16")                                           \
  X(kFloat32, 4, "float32")                                             \
  X(kFloat64, 8, "float64")                                             \
  X(kFloat8E4M3FN, 1, "float8_e4m3fn")                                  \
  X(kFloat8E5M2, 1, "float8_e5m2")                                      \
  X(kFloat8E4M3FNUZ, 1, "float8_e4m3fnuz")                              \
  X(kFloat8E5M2FNUZ, 1, "float8_e5m2fnuz")                              \
  X(kUInt16, 2, "uint16")                                               \
  X(kUInt32, 4, "uint32")                                               \
  X(kUInt64, 8, "uint64")                                               \
  X(kComplex32, 4, "complex32")                                         \
  X(kComplex64, 8, "complex64")                                         \
  X(kComplex128, 16, "complex128")                                      \
  X(kOpaque1, 1, "opaque1") /* any other type, moved but not reduced */ \
  X(kOpaque2, 2, "opaque2")                                             \
  X(kOpaque4, 4, "opaque4")                                             \
  X(kOpaque8, 8, "opaque8")                                             \
  X(kOpaque16, 16, "opaque16")

enum class DType : uint8_t {
#define X(name, bytes, text) name,
  RESILIENT_DTYPES(X)
#undef X
};

// Reductions, by wire value. kPreMulSum multiplies each rank's own input by a
// factor of its own first.
#define RESILIENT_REDUCE_OPS(X) \
  X(kSum, "SUM")                \
  X(kAvg, "AVG")                \
  X(kProduct, "PRODUCT")        \
  X(kMin, "MIN")                \
  X(kMax, "MAX")                \
  X(kBand, "BAND")              \
  X(kBor, "BOR")                \
  X(kBxor, "BXOR")              \
  X(kPreMulSum, "PREMUL_SUM")   \
  X(kNone, "none") /* the operation does not reduce */

enum class ReduceOp : uint8_t {
#define X(name, text) name,
  RESILIENT_REDUCE_OPS(X)
#undef X
};

#define RESILIENT_OPERATIONS(X)             \
  X(kSend, "send")                          \
  X(kBroadcast, "broadcast")                \
  X(kAllReduce, "all_reduce")               \
  X(kReduce, "reduce")                      \
  X(kAllGather, "all_gather")               \
  X(kGather, "gather")                      \
  X(kScatter, "scatter")                    \
  X(kReduceScatter, "reduce_scatter")       \
  X(kAllToAll, "all_to_all")                \
  X(kBarrier, "barrier")                    \
  X(kMonitoredBarrier, "monitored_barrier") \
  X(kAllReduceSparse, "sparse_all_reduce")

enum class OpKind : uint8_t {
#define X(name, text) name,
  RESILIENT_OPERATIONS(X)
#undef X
};

// The values of these three lists are wire values: add at the end, and move the
// bounds in validSignatureBytes() with the last entry.
size_t dtypeBytes(DType t);
const char* dtypeName(DType t);
const char* reduceOpName(ReduceOp op);
const char* opKindName(OpKind kind);

// True if the wire values name something we know; checked on arrival.
bool validSignatureBytes(uint8_t kind, uint8_t dtype, uint8_t reduceOp);

// The description of an operation by its rank. It travels with every message:
// ranks that call different operations find out at once instead of hanging or
// mixing their data. Two signatures of one operation must be equal on all
// ranks, so only what must agree is in it: `count` is 0 where sizes may differ
// by rank (all_to_all, gather of uneven parts).
//
// Ranks compare all fields, so what one rank cannot know must not be in it.
struct OpSignature {
  OpKind kind = OpKind::kSend;
  DType dtype = DType::kUInt8;
  ReduceOp reduceOp = ReduceOp::kNone;
  // How many tensors one coalesced call holds, at most 255 (then 0).
  uint8_t tensors = 1;
  // The root rank, or -1. Operations on lists of tensors have no root: where
  // these are not all alike, a digest of their sizes and types, below -1.
  int32_t root = -1;
  uint64_t count = 0; // elements

  bool operator==(const OpSignature&) const = default;
  // "all_reduce(float32[1024], SUM)"
  std::string toString() const;
};

} // namespace resilient
