#pragma once

#include <cstddef>
#include <cstdint>

// The inner loops of parity_code.cpp, one version for each kind of processor.
// All versions give the same bytes. Pointers need no alignment; a destination
// must not overlap a source.
namespace resilient::kernels {

enum class Kernel : uint8_t {
  kScalar, // any processor; the oracle of the others
  kAvx2,
  kAvx512, // AVX-512 F and BW, with GFNI
};
inline constexpr Kernel kKernels[] = {
    Kernel::kScalar,
    Kernel::kAvx2,
    Kernel::kAvx512};

const char* kernelName(Kernel kernel);
// Whether this processor, and this build, can run it. Running a kernel that is
// not supported is undefined: it may stop the process.
bool supported(Kernel kernel);
// The fastest that is supported.
// Asks the processor once, at the first call. Any thread.
Kernel fastest();

// to = sources[0] ^ sources[stride] ^ ... ^ sources[(count - 1) * stride]. Each
// source is read once and `to` written once. count > 0. `ahead`: how many
// places further in `sources` stand those which the caller needs next (they
// are fetched into the cache meanwhile); 0: nothing comes next.
void xorOf(
    Kernel kernel,
    const std::byte* const* sources,
    size_t count,
    size_t stride,
    size_t ahead,
    std::byte* to,
    size_t bytes);

// to[r] = sum over i of factors[r * count + i] * sources[i], in GF(256).
// `accumulate`: the sum is added to what is in to[r]; else it replaces it.
// count may be 0.
//
// Without `accumulate` the old bytes of a destination have no effect, and with
// count 0 it becomes zero. Each source is read once for each group of rows that
// fits into registers.
void multiplySum(
    Kernel kernel,
    const uint8_t* factors,
    const std::byte* const* sources,
    size_t count,
    std::byte* const* to,
    size_t rows,
    size_t bytes,
    bool accumulate);

} // namespace resilient::kernels
