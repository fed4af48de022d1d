// How RDMA devices register the memory of a GPU. The GPU is the strict device:
// the process must not touch its memory, and its "driver library" is a table of
// functions of this file.

#include "transport/gpu_way.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "tests/check.h"
#include "tests/device/strict_memory.h"
#include "tests/device/strict_stream.h"
#include "tests/verbs_fake.h"
#include "transport/event_loop.h"
#include "transport/verbs_loans.h"

namespace resilient {
namespace {

constexpr size_t kBytes = 3u << 20;

// ---- A driver library ----

struct Driver {
  bool exports = true;
  bool isOld = false; // before CUDA 11.7
  unsigned managed = 0;
  unsigned plain = 1;
  void* pool = nullptr;
  int contexts = 0; // that are retained or current
};

Driver& driver() {
  static Driver one;
  return one;
}

constexpr int kNotSupported = 801, kInvalidValue = 1;

int deviceGet(int* device, int number) {
  *device = number;
  return number < strict::kDevices ? 0 : kInvalidValue;
}
int deviceGetAttribute(int* value, int which, int) {
  *value = driver().exports ? 1 : 0;
  return which == 124 ? 0 : kInvalidValue;
}
int primaryRetain(void** context, int) {
  ++driver().contexts;
  *context = &driver();
  return 0;
}
int primaryRelease(int) {
  --driver().contexts;
  return 0;
}
int push(void*) {
  ++driver().contexts;
  return 0;
}
int pop(void** context) {
  --driver().contexts;
  *context = nullptr;
  return 0;
}
int pointerGetAttribute(void* value, int which, unsigned long long) {
  switch (which) {
    case 8:
      std::memcpy(value, &driver().managed, sizeof(unsigned));
      return 0;
    case 10:
      std::memcpy(value, &driver().plain, sizeof(unsigned));
      return 0;
    case 17:
      std::memcpy(value, &driver().pool, sizeof(void*));
      return 0;
    default:
      return kInvalidValue;
  }
}
int rangeOf(unsigned long long* base, size_t* size, unsigned long long at) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  const auto* pointer = reinterpret_cast<const void*>(at);
  const int device = strict::deviceOf(pointer);
  const auto found =
      device < 0 ? std::nullopt : strict::memory(device).blockOf(pointer);
  if (!found || driver().contexts != 2) {
    return kInvalidValue;
  }
  *base = reinterpret_cast<uintptr_t>(found->begin);
  *size = found->bytes;
  return 0;
}
int getErrorName(int error, const char** name) {
  *name = error == kNotSupported ? "CUDA_ERROR_NOT_SUPPORTED"
                                 : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int handleFor(
    void* handle,
    unsigned long long at,
    size_t size,
    int kind,
    unsigned long long flags) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  const auto* pointer = reinterpret_cast<const void*>(at);
  const int device = strict::deviceOf(pointer);
  const bool isWhole = at % 4096 == 0 && size % 4096 == 0;
  if (device < 0 || !isWhole || kind != 1 || flags != 0) {
    return kInvalidValue;
  }
  const int file = strict::memory(device).openAt(pointer);
  std::memcpy(handle, &file, sizeof(file));
  return file < 0 ? kNotSupported : 0;
}

void* findSymbol(const char* name) {
  static const std::map<std::string, void*> table = {
      {"cuDeviceGet", reinterpret_cast<void*>(deviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(deviceGetAttribute)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(primaryRetain)},
      {"cuDevicePrimaryCtxRelease_v2", reinterpret_cast<void*>(primaryRelease)},
      {"cuCtxPushCurrent_v2", reinterpret_cast<void*>(push)},
      {"cuCtxPopCurrent_v2", reinterpret_cast<void*>(pop)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(pointerGetAttribute)},
      {"cuMemGetAddressRange_v2", reinterpret_cast<void*>(rangeOf)},
      {"cuGetErrorName", reinterpret_cast<void*>(getErrorName)}};
  if (name == std::string("cuMemGetHandleForAddressRange")) {
    return driver().isOld ? nullptr : reinterpret_cast<void*>(handleFor);
  }
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

size_t openFiles() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& each :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// ---- A tensor on GPU 0, and an RDMA device ----

struct Setup {
  Setup() {
    driver() = Driver();
    setGpu(true, false);
    CHECK(fake.open("fake0", device).ok());
    make();
    stream().synchronize(); // a former block is poisoned
    std::memset(strict::memory(0).inTask(tensor), 'x', kBytes);
  }
  ~Setup() {
    strict::memory(0).free(block);
    CHECK_EQ(driver().contexts, 0);
    CHECK_EQ(fake.memories(), 0u);
  }
  Setup(const Setup&) = delete;
  Setup& operator=(const Setup&) = delete;

  void make() {
    std::string why;
    made = makeGpuDriver(findSymbol, why);
    CHECK_EQ(why, "");
    system.driver = made.get();
  }
  void setGpu(bool takesDmabuf, bool takesPeerMemory) {
    fake.setGpu(
        {[](const void* at) { return strict::deviceOf(at) >= 0; },
         takesDmabuf,
         takesPeerMemory});
  }
  GpuRegistration registration() {
    return registerGpuMemory(system, *device, {0, tensor}, kBytes);
  }

  // Never destroyed: its thread runs until the process ends.
  static strict::Stream& stream() {
    static auto* const one = new strict::Stream(0, 77, false);
    return *one;
  }

  void* block = strict::memory(0).allocate(kBytes + (64u << 10), stream());
  std::byte* tensor = static_cast<std::byte*>(block) + 512;
  test::VerbsFake fake;
  std::shared_ptr<VerbsDevice> device;
  std::unique_ptr<GpuDriver> made;
  GpuSystem system;
};

TEST(gpu_memory_is_registered_by_dmabuf) {
  Setup setup;
  const size_t before = openFiles();
  const GpuRegistration made = setup.registration();
  CHECK(made.way == GpuWay::kDmabuf);
  CHECK_EQ(made.why, "");
  CHECK(made.memory != nullptr);
  CHECK_EQ(openFiles(), before); // the registration keeps the memory
}

// The device reads the bytes of the GPU itself: this process cannot.
TEST(gpu_memory_by_dmabuf_has_the_bytes_of_the_tensor) {
  Setup setup;
  const GpuRegistration made = setup.registration();
  std::vector<VerbsPort> ports;
  CHECK(setup.fake.ports(ports).ok());
  std::unique_ptr<VerbsQueuePair> near;
  std::unique_ptr<VerbsQueuePair> far;
  std::shared_ptr<VerbsDevice> other;
  CHECK(setup.fake.open("fake1", other).ok());
  VerbsQueuePairConfig config;
  config.depth = 4;
  CHECK(setup.device->makeQueuePair(ports[0], config, far).ok());
  CHECK(other->makeQueuePair(ports[1], config, near).ok());
  CHECK(near->connect(far->address()).ok());
  CHECK(far->connect(near->address()).ok());
  std::vector<std::byte> into(kBytes);
  std::unique_ptr<VerbsMemory> landing;
  CHECK(other->registerMemory(into, false, landing).ok());
  const auto readFrom = [&](const std::byte* at) {
    std::vector<VerbsCompletion> done;
    CHECK(near->postRead(
                  1,
                  *landing,
                  into,
                  reinterpret_cast<uintptr_t>(at),
                  made.memory->remoteKey())
              .ok());
    CHECK(near->poll(done, 1).ok());
    CHECK_EQ(done.size(), 1u);
    return done[0].result == VerbsCompletion::Result::kOk;
  };
  CHECK(readFrom(setup.tensor));
  CHECK(into == std::vector<std::byte>(kBytes, std::byte('x')));
  CHECK(setup.fake.faults().empty());
  // What is not registered is refused.
  CHECK(!readFrom(setup.tensor + (64u << 10)));
}

TEST(gpu_memory_is_registered_by_its_address_where_there_is_no_dmabuf) {
  Setup setup;
  setup.setGpu(false, true); // rxe and old kernels know no dma-buf
  setup.system.hasPeerMemory = true;
  CHECK(setup.registration().way == GpuWay::kPeerMemory);
  CHECK_EQ(
      setup.registration().why, "no dmabuf: fake0: Operation not supported");
  setup.setGpu(true, true);
  driver().exports = false;
  CHECK(setup.registration().way == GpuWay::kPeerMemory);
  CHECK_CONTAINS(setup.registration().why, "it needs the open kernel modules");
  driver() = Driver();
  driver().isOld = true;
  setup.make();
  CHECK(setup.registration().way == GpuWay::kPeerMemory);
  CHECK_CONTAINS(setup.registration().why, "older than that of CUDA 11.7");
}

TEST(gpu_memory_is_staged_where_nothing_else_works) {
  Setup setup;
  setup.setGpu(false, false);
  GpuRegistration made = setup.registration();
  CHECK(made.way == GpuWay::kStaging);
  CHECK(made.memory == nullptr);
  CHECK_EQ(
      made.why,
      "no dmabuf: fake0: Operation not supported; the module nvidia-peermem is "
      "not loaded");
  setup.system.hasPeerMemory = true;
  made = setup.registration();
  CHECK(made.way == GpuWay::kStaging);
  CHECK_CONTAINS(made.why, "; nvidia-peermem: fake0: Bad address");
  // It is not the memory of a GPU.
  std::byte host{};
  made = registerGpuMemory(setup.system, *setup.device, {0, &host}, 1);
  CHECK(made.way == GpuWay::kStaging);
  CHECK_EQ(made.why, "GPU 0: find an allocation: CUDA_ERROR_INVALID_VALUE");
  setup.system = {.noDriver = "there is no driver library libcuda.so.1"};
  CHECK_EQ(setup.registration().why, setup.system.noDriver);
}

TEST(gpu_memory_that_can_change_its_pages_is_never_registered) {
  Setup setup;
  setup.setGpu(true, true);
  setup.system.hasPeerMemory = true;
  const auto why = [&] {
    const GpuRegistration made = setup.registration();
    CHECK(made.way == GpuWay::kStaging);
    CHECK(made.memory == nullptr);
    return made.why;
  };
  driver().plain = 0;
  CHECK_EQ(why(), "its tensors are in expandable segments");
  driver().pool = &setup;
  CHECK_EQ(why(), "its tensors come from cudaMallocAsync");
  driver().managed = 1;
  CHECK_EQ(why(), "its tensors are in managed memory");
}

TEST(gpu_driver_without_a_function_is_none) {
  std::string why;
  CHECK(
      makeGpuDriver(
          [](const char* name) {
            return name == std::string("cuCtxPopCurrent_v2") ? nullptr
                                                             : findSymbol(name);
          },
          why) == nullptr);
  CHECK_EQ(why, "the driver library has no cuCtxPopCurrent_v2");
}

// ---- The log ----

TEST(gpu_way_is_logged_once_for_each_pair) {
  struct Lines {
    Lines() {
      setLogLevel(LogLevel::kInfo);
      setLogSink([this](std::string_view line) {
        const std::lock_guard lock(mutex);
        lines.emplace_back(line);
      });
    }
    ~Lines() {
      setLogSink({});
    }
    Lines(const Lines&) = delete;
    Lines& operator=(const Lines&) = delete;
    std::vector<std::string> all() {
      const std::lock_guard lock(mutex);
      return lines;
    }
    std::mutex mutex;
    std::vector<std::string> lines;
  };
  Setup setup;
  Lines lines;
  EventLoop loop;
  VerbsLoans loans(loop, {}, [&](VerbsDevice& device, const GpuAddress& where) {
    return tryGpuWay(setup.system, device, where);
  });
  loans.meetGpu({0, setup.tensor}); // no device is in use yet
  loans.use(setup.device);
  const auto lineCount = [&](size_t count) {
    const auto limit =
        std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (lines.all().size() < count &&
           std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    CHECK_EQ(lines.all().size(), count);
  };
  loans.meetGpu({});
  loans.meetGpu({0, setup.tensor});
  lineCount(1);
  CHECK_CONTAINS(
      lines.all()[0],
      "RDMA fake0 and GPU 0: its memory can be registered by dmabuf, which is "
      "not used yet; tensors are copied through pinned host memory");
  setup.setGpu(false, false);
  loans.meetGpu({0, setup.tensor});
  loans.meetGpu({1, setup.tensor}); // another GPU: another line
  lineCount(2);
  CHECK_CONTAINS(
      lines.all()[1],
      "RDMA fake0 and GPU 1: its memory cannot be registered (no dmabuf: ");
  std::shared_ptr<VerbsDevice> other;
  CHECK(setup.fake.open("fake1", other).ok());
  loans.use(other);
  loans.meetGpu({0, setup.tensor});
  lineCount(3);
  CHECK_CONTAINS(lines.all()[2], "RDMA fake1 and GPU 0: ");
}

} // namespace
} // namespace resilient
