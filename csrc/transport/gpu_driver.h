#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/syscall.h"

// The driver of NVIDIA GPUs, for the questions that RDMA asks about device
// memory. The driver library is looked up at run time and never linked: the
// same build runs on hosts without a GPU, and tests run it on a driver of their
// own.

namespace resilient {

// An address in the memory of a GPU. A negative number: none.
struct GpuAddress {
  int gpu = -1; // as the process counts its GPUs
  const std::byte* address = nullptr;
};

// The allocation that an address lies in.
struct GpuAllocation {
  enum class Kind : uint8_t {
    kPlain, // cudaMalloc: the same pages until it is freed
    kPool, // cudaMallocAsync
    kMapped, // expandable segments: pages come and go below an address
    kManaged, // pages move between the host and devices
  };
  std::span<std::byte> bytes;
  Kind kind = Kind::kPlain;
};

// Thread: any. No call changes the current context of its thread.
class GpuDriver {
 public:
  virtual ~GpuDriver() = default;
  virtual Status find(const GpuAddress& where, GpuAllocation& allocation) = 0;
  // A dma-buf of these bytes, which are whole pages of one allocation.
  virtual Status
  exportDmabuf(int gpu, std::span<std::byte> bytes, FileDescriptor& dmabuf) = 0;
};

// Finds a function of the driver library by its name, or returns null.
using FindSymbol = std::function<void*(const char* name)>;

// Null if a function is missing; `why` names it.
std::unique_ptr<GpuDriver> makeGpuDriver(
    const FindSymbol& find,
    std::string& why);

// The driver of this host, or null; `why` is then a sentence for people. Any
// thread; the answer of the first call stands.
GpuDriver* systemGpuDriver(std::string& why);

// Whether the kernel module is loaded that lets RDMA devices register GPU
// memory as if it were host memory.
bool hasPeerMemoryModule();

} // namespace resilient
