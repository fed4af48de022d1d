#pragma once

#include <cstddef>
#include <cstdint>

#include "base/signature.h"

using cudaStream_t = struct CUstream_st*;

// Priorities and XOR parity of tensors in a GPU's memory: the functions of
// loss/priority.h and loss/parity_code.h, with the same bits. All pointers are
// to the memory of the current device, those to elements aligned as these are.
// All only begin on `stream`, except sampledThreshold.
//
// They throw std::invalid_argument as their twins do, and std::runtime_error
// with CUDA's text if a kernel cannot be started.
// An error while a kernel runs shows in a later call of CUDA.
//
// Any thread may call them, with the device of the pointers as its current one.
// They allocate nothing on the device. A call without elements or blocks starts
// no kernel.
namespace resilient::cuda {

// `out` has packetCount() elements (loss/priority.h).
void meanMagnitudes(
    DType dtype,
    const void* data,
    size_t count,
    size_t elementsPerPacket,
    size_t firstPacketElements,
    float* out, // one for each packet
    cudaStream_t stream);

// `room`: for as many doubles as kThresholdSample. Waits for the result.
double sampledThreshold(
    DType dtype,
    const void* data,
    size_t count,
    double topFraction,
    uint64_t seed,
    double* room,
    cudaStream_t stream);

// *finite becomes 0 if an element is infinite or not a number; else it stays.
// The caller sets it to 1 before, on the same stream.
void allFinite(
    DType dtype,
    const void* data,
    size_t count,
    int32_t* finite,
    cudaStream_t stream);

// Blocks one after the other, each of `symbols` data and `paritySymbols`
// parity symbols of `bytes`. Fastest if bytes and pointers are multiples of 16.
struct XorBlocks {
  void* data;
  void* parity;
  size_t blocks;
  size_t symbols;
  size_t paritySymbols;
  size_t bytes;
};

// Writes the parity symbols.
// Symbol i of a block belongs to parity symbol i % paritySymbols.
void encodeXor(const XorBlocks& blocks, cudaStream_t stream);

// Writes those missing data symbols that can be repaired, sets their flag in
// `have` (one for each data symbol of each block; `parityHere` is the same for
// parity) and adds their number to *filled.
// A parity symbol repairs one missing symbol of its own; if two are missing,
// both stay as they are.
void recoverXor(
    const XorBlocks& blocks,
    bool* have,
    const bool* parityHere,
    unsigned long long* filled,
    cudaStream_t stream);

} // namespace resilient::cuda
