#pragma once

#include "base/signature.h"
#include "loss/kernels.h"

// For tests: the loops of priority.cpp with a kernel of the caller's choice,
// which must be supported. All give the same bits.
namespace resilient::kernels {

// The sum of the magnitudes of `count` elements.
double
magnitudeSum(Kernel kernel, DType dtype, const std::byte* data, size_t count);
bool allFinite(Kernel kernel, DType dtype, const std::byte* data, size_t count);

} // namespace resilient::kernels
