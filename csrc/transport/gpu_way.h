#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/gpu_driver.h"
#include "transport/verbs_api.h"

namespace resilient {

// How the memory of a GPU can be registered with an RDMA device. The first way
// that works is taken, in this order.
enum class GpuWay : uint8_t {
  kDmabuf, // the GPU's driver exports a dma-buf, which the device imports
  kPeerMemory, // nvidia-peermem: the device takes the address itself
  kStaging, // not at all: tensors are copied through pinned host memory
};

// "dmabuf", "peermem", "staging"
const char* nameOf(GpuWay way);

struct GpuRegistration {
  GpuWay way = GpuWay::kStaging;
  // Why the ways before it cannot be used; empty with kDmabuf.
  std::string why;
  // Of whole pages around the address; null with kStaging.
  std::unique_ptr<VerbsMemory> memory;
};

// What the choice depends on besides the device.
struct GpuSystem {
  GpuDriver* driver = nullptr; // null: none, because of `noDriver`
  std::string noDriver;
  bool hasPeerMemory = false;
};
GpuSystem gpuSystem();

// Registers up to `bytes` bytes from the address on, for reads of far ends.
// Memory whose pages can change while its address stays the same is never
// registered: a device would go on with the old pages.
//
// Thread: any. It may block.
GpuRegistration registerGpuMemory(
    const GpuSystem& system,
    VerbsDevice& device,
    const GpuAddress& where,
    size_t bytes);

// Tries a registration, and ends it. One line for people about the result, and
// about what carries tensors.
std::string tryGpuWay(
    const GpuSystem& system,
    VerbsDevice& device,
    const GpuAddress& where);

} // namespace resilient
