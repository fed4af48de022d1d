#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/signature.h"

namespace resilient {

// Elementwise reductions. The same operands give the same bits on every CPU:
// no contraction of a product and a sum, no reassociation, and each NaN that
// comes out is the canonical one of its type. Buffers need no alignment.
//
// float16, bfloat16 and float8 are computed in float32 and rounded to nearest
// even after every operation, as gloo does. Integers wrap around. bool: SUM,
// MAX and BOR are "or", PRODUCT, MIN and BAND "and". MIN and MAX return NaN if
// either operand is NaN; of two zeros they return the first.
//
// All functions are pure and thread-safe. The floating-point state is an input,
// too: callers must have the default one, since flush-to-zero changes bits. A
// turn of the loop always has it. Nothing here yields; compute.h cuts long data
// into slices.

// False, and the reason in *why unless it is null, if there is no such
// reduction. To be asked before anything is sent.
bool reductionSupported(DType dtype, ReduceOp op, std::string* why);

// out[i] = op(a[i], b[i]). `out` may be `a` or `b`, but must not overlap them
// otherwise. kAvg and kPreMulSum are sums here; the caller divides or scales.
// Throws StatusError (kInternal) if the reduction is not supported.
void reduceOut(
    void* out,
    const void* a,
    const void* b,
    size_t count,
    DType dtype,
    ReduceOp op);

// accumulator[i] = op(accumulator[i], operand[i])
inline void reduceInto(
    void* accumulator,
    const void* operand,
    size_t count,
    DType dtype,
    ReduceOp op) {
  reduceOut(accumulator, accumulator, operand, count, dtype, op);
}

// out = op(...op(op(operands[0], operands[1]), operands[2])...): a left fold.
// Works in blocks that stay in the first-level cache, so each operand is read
// once and `out` written once. `out` may be any one of the operands. With one
// operand it is a copy.
// With no operand it leaves `out` unchanged.
void reduceOrdered(
    void* out,
    const void* const* operands,
    size_t operandCount,
    size_t count,
    DType dtype,
    ReduceOp op);

// out[i] = in[i] * factor, in the type's own arithmetic (float32 for the
// narrower floats). `out` may be `in`. Floating and complex types only.
void scaleOut(
    void* out,
    const void* in,
    size_t count,
    DType dtype,
    double factor);

// data[i] /= divisor, the last step of kAvg: integers round toward zero.
// divisor > 0.
void divideBy(void* data, size_t count, DType dtype, uint64_t divisor);

} // namespace resilient
