#include "transport/gpu_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <type_traits>

namespace resilient {
namespace {

// The types and numbers of cuda.h that are used here. They are a stable part of
// the interface of the driver library.
using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuPointer = unsigned long long;
constexpr CuResult kSuccess = 0;
constexpr int kIsManaged = 8; // CU_POINTER_ATTRIBUTE_IS_MANAGED
constexpr int kIsPlain = 10; // ..._IS_LEGACY_CUDA_IPC_CAPABLE
constexpr int kPool = 17; // ..._MEMPOOL_HANDLE
constexpr int kDmabufSupported = 124; // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int kDmabuf = 1; // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

struct Functions {
  CuResult (*deviceGet)(CuDevice*, int);
  CuResult (*deviceGetAttribute)(int*, int, CuDevice);
  CuResult (*primaryRetain)(CuContext*, CuDevice);
  CuResult (*primaryRelease)(CuDevice);
  CuResult (*push)(CuContext);
  CuResult (*pop)(CuContext*);
  CuResult (*pointerGetAttribute)(void*, int, CuPointer);
  CuResult (*rangeOf)(CuPointer*, size_t*, CuPointer);
  CuResult (*getErrorName)(CuResult, const char**);
  // Null with drivers before CUDA 11.7.
  CuResult (*handleFor)(void*, CuPointer, size_t, int, unsigned long long);
};

CuPointer pointerOf(const std::byte* address) {
  return reinterpret_cast<uintptr_t>(address);
}

class RealGpuDriver final : public GpuDriver {
 public:
  explicit RealGpuDriver(const Functions& functions) : call_(functions) {}

  Status find(const GpuAddress& where, GpuAllocation& allocation) override;
  Status exportDmabuf(
      int gpu,
      std::span<std::byte> bytes,
      FileDescriptor& dmabuf) override;

 private:
  // The context of the GPU that torch uses is current while this exists.
  class Current;

  Status failed(int gpu, const char* attempt, CuResult result) const;
  template <typename Value>
  Value attribute(int which, const std::byte* address) const {
    Value value{};
    // An older driver does not know the attribute, and so has no such memory.
    return call_.pointerGetAttribute(
               static_cast<void*>(&value), which, pointerOf(address)) ==
            kSuccess
        ? value
        : Value{};
  }

  const Functions call_;
};

class RealGpuDriver::Current {
 public:
  Current(const RealGpuDriver& driver, int gpu) : call_(driver.call_) {
    CuResult result = call_.deviceGet(&device_, gpu);
    if (result == kSuccess) {
      result = call_.primaryRetain(&context_, device_);
      isRetained_ = result == kSuccess;
    }
    if (isRetained_) {
      result = call_.push(context_);
      isPushed_ = result == kSuccess;
    }
    if (result != kSuccess) {
      status_ = driver.failed(gpu, "use its context", result);
    }
  }
  ~Current() {
    CuContext popped = nullptr;
    if (isPushed_) {
      call_.pop(&popped);
    }
    if (isRetained_) {
      call_.primaryRelease(device_);
    }
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  const Status& status() const {
    return status_;
  }
  CuDevice device() const {
    return device_;
  }

 private:
  const Functions& call_;
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  bool isRetained_ = false;
  bool isPushed_ = false;
  Status status_;
};

// "GPU 0: export a dma-buf: CUDA_ERROR_NOT_SUPPORTED"
Status RealGpuDriver::failed(int gpu, const char* attempt, CuResult result)
    const {
  const char* name = nullptr;
  if (call_.getErrorName(result, &name) != kSuccess || name == nullptr) {
    name = "unknown error";
  }
  return Status(
      StatusCode::kInternal,
      "GPU " + std::to_string(gpu) + ": " + attempt + ": " + name);
}

Status RealGpuDriver::find(const GpuAddress& where, GpuAllocation& allocation) {
  const Current current(*this, where.gpu);
  if (!current.status().ok()) {
    return current.status();
  }
  CuPointer base = 0;
  size_t size = 0;
  if (const CuResult result =
          call_.rangeOf(&base, &size, pointerOf(where.address));
      result != kSuccess) {
    return failed(where.gpu, "find an allocation", result);
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as the driver gives it
  allocation.bytes = {reinterpret_cast<std::byte*>(base), size};
  if (attribute<unsigned>(kIsManaged, where.address) != 0) {
    allocation.kind = GpuAllocation::Kind::kManaged;
  } else if (attribute<void*>(kPool, where.address) != nullptr) {
    allocation.kind = GpuAllocation::Kind::kPool;
  } else if (attribute<unsigned>(kIsPlain, where.address) == 0) {
    allocation.kind = GpuAllocation::Kind::kMapped;
  } else {
    allocation.kind = GpuAllocation::Kind::kPlain;
  }
  return {};
}

Status RealGpuDriver::exportDmabuf(
    int gpu,
    std::span<std::byte> bytes,
    FileDescriptor& dmabuf) {
  if (call_.handleFor == nullptr) {
    return Status(
        StatusCode::kInternal, "the driver is older than that of CUDA 11.7");
  }
  const Current current(*this, gpu);
  if (!current.status().ok()) {
    return current.status();
  }
  int isSupported = 0;
  if (call_.deviceGetAttribute(
          &isSupported, kDmabufSupported, current.device()) != kSuccess ||
      isSupported == 0) {
    return Status(
        StatusCode::kInternal,
        "GPU " + std::to_string(gpu) +
            " exports no dma-buf (it needs the open kernel modules)");
  }
  int fd = -1;
  if (const CuResult result = call_.handleFor(
          &fd, pointerOf(bytes.data()), bytes.size(), kDmabuf, 0);
      result != kSuccess) {
    return failed(gpu, "export a dma-buf", result);
  }
  dmabuf.reset(fd);
  return {};
}

} // namespace

std::unique_ptr<GpuDriver> makeGpuDriver(
    const FindSymbol& find,
    std::string& why) {
  Functions found{};
  const char* missing = nullptr;
  const auto take = [&](auto& function, const char* name) {
    using Function = std::remove_reference_t<decltype(function)>;
    function = reinterpret_cast<Function>(find(name));
    missing = function == nullptr ? name : missing;
  };
  take(found.deviceGet, "cuDeviceGet");
  take(found.deviceGetAttribute, "cuDeviceGetAttribute");
  take(found.primaryRetain, "cuDevicePrimaryCtxRetain");
  take(found.primaryRelease, "cuDevicePrimaryCtxRelease_v2");
  take(found.push, "cuCtxPushCurrent_v2");
  take(found.pop, "cuCtxPopCurrent_v2");
  take(found.pointerGetAttribute, "cuPointerGetAttribute");
  take(found.rangeOf, "cuMemGetAddressRange_v2");
  take(found.getErrorName, "cuGetErrorName");
  if (missing != nullptr) {
    why = std::string("the driver library has no ") + missing;
    return nullptr;
  }
  take(found.handleFor, "cuMemGetHandleForAddressRange");
  return std::make_unique<RealGpuDriver>(found);
}

GpuDriver* systemGpuDriver(std::string& why) {
  struct Answer {
    std::unique_ptr<GpuDriver> driver;
    std::string why;
    Answer() {
      // Never closed: the program uses it until it ends.
      void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) {
        why = "there is no driver library libcuda.so.1";
        return;
      }
      driver = makeGpuDriver(
          [library](const char* name) { return ::dlsym(library, name); }, why);
    }
  };
  static const auto* const answer = new Answer;
  why = answer->why;
  return answer->driver.get();
}

bool hasPeerMemoryModule() {
  constexpr std::array kModules = {
      "/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"};
  for (const char* const module : kModules) {
    if (::access(module, F_OK) == 0) {
      return true;
    }
  }
  return false;
}

} // namespace resilient
