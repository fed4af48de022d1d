#pragma once

#include "loss/kernels.h"
#include "loss/parity_code.h"

// For tests and benchmarks: the functions of parity_code.h with a kernel of
// the caller's choice, which must be supported.
namespace resilient::kernels {

void encodeParity(
    Kernel kernel,
    const BlockShape& shape,
    std::span<const std::byte* const> data,
    std::span<std::byte* const> parity,
    size_t bytes);

int recoverData(
    Kernel kernel,
    const BlockShape& shape,
    std::span<std::byte* const> data,
    std::span<bool> have,
    std::span<const std::byte* const> parity,
    size_t bytes);

} // namespace resilient::kernels
