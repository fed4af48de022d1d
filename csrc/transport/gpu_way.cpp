#include "transport/gpu_way.h"

#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>

namespace resilient {
namespace {

// Enough for a trial. Registering maps the memory into the address space of the
// PCIe bus, of which some GPUs have 256 MiB only.
constexpr size_t kTrialBytes = 2u << 20;

// Null if memory of this kind may be registered.
const char* whyNot(GpuAllocation::Kind kind) {
  switch (kind) {
    case GpuAllocation::Kind::kPlain:
      return nullptr;
    case GpuAllocation::Kind::kPool:
      return "its tensors come from cudaMallocAsync";
    case GpuAllocation::Kind::kMapped:
      return "its tensors are in expandable segments";
    case GpuAllocation::Kind::kManaged:
      return "its tensors are in managed memory";
  }
  return "its tensors are in memory of an unknown kind";
}

// The whole pages of the allocation that hold these bytes, as far as it has
// them. Empty if the allocation does not begin at a page.
std::span<std::byte> pagesOf(
    const GpuAllocation& allocation,
    const std::byte* address,
    size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<uintptr_t>(allocation.bytes.data());
  if (base % page != 0) {
    return {};
  }
  const size_t at = reinterpret_cast<uintptr_t>(address) - base;
  const size_t begin = at / page * page;
  const size_t end = std::min(
      (at + bytes + page - 1) / page * page,
      allocation.bytes.size() / page * page);
  return end > begin ? allocation.bytes.subspan(begin, end - begin)
                     : std::span<std::byte>();
}

Status byDmabuf(
    GpuDriver& driver,
    VerbsDevice& device,
    int gpu,
    std::span<std::byte> pages,
    std::unique_ptr<VerbsMemory>& memory) {
  // The registration keeps the memory; the descriptor is needed no longer.
  FileDescriptor dmabuf;
  const Status status = driver.exportDmabuf(gpu, pages, dmabuf);
  return status.ok()
      ? device.registerDmabuf(dmabuf.get(), 0, pages, /*forReads=*/true, memory)
      : status;
}

} // namespace

const char* nameOf(GpuWay way) {
  switch (way) {
    case GpuWay::kDmabuf:
      return "dmabuf";
    case GpuWay::kPeerMemory:
      return "peermem";
    case GpuWay::kStaging:
      return "staging";
  }
  return "unknown";
}

GpuSystem gpuSystem() {
  GpuSystem system;
  system.driver = systemGpuDriver(system.noDriver);
  system.hasPeerMemory = hasPeerMemoryModule();
  return system;
}

GpuRegistration registerGpuMemory(
    const GpuSystem& system,
    VerbsDevice& device,
    const GpuAddress& where,
    size_t bytes) {
  GpuRegistration made;
  if (system.driver == nullptr) {
    made.why = system.noDriver;
    return made;
  }
  GpuAllocation allocation;
  if (const Status status = system.driver->find(where, allocation);
      !status.ok()) {
    made.why = status.message();
    return made;
  }
  if (const char* const not_ = whyNot(allocation.kind); not_ != nullptr) {
    made.why = not_;
    return made;
  }
  const std::span<std::byte> pages = pagesOf(allocation, where.address, bytes);
  if (pages.empty()) {
    made.why = "its allocation has no whole pages there";
    return made;
  }
  Status status =
      byDmabuf(*system.driver, device, where.gpu, pages, made.memory);
  if (status.ok()) {
    made.way = GpuWay::kDmabuf;
    return made;
  }
  made.why = "no dmabuf: " + status.message();
  if (!system.hasPeerMemory) {
    made.why += "; the module nvidia-peermem is not loaded";
    return made;
  }
  status = device.registerMemory(pages, /*forReads=*/true, made.memory);
  if (status.ok()) {
    made.way = GpuWay::kPeerMemory;
  } else {
    made.why += "; nvidia-peermem: " + status.message();
  }
  return made;
}

std::string tryGpuWay(
    const GpuSystem& system,
    VerbsDevice& device,
    const GpuAddress& where) {
  const GpuRegistration made =
      registerGpuMemory(system, device, where, kTrialBytes);
  const std::string pair =
      "RDMA " + device.name() + " and GPU " + std::to_string(where.gpu) + ": ";
  // Whatever the result is, see docs/verbs.md.
  const std::string carried = "; tensors are copied through pinned host memory";
  if (made.way == GpuWay::kStaging) {
    return pair + "its memory cannot be registered (" + made.why + ")" +
        carried;
  }
  return pair + "its memory can be registered by " + nameOf(made.way) +
      (made.why.empty() ? "" : " (" + made.why + ")") +
      ", which is not used yet" + carried;
}

} // namespace resilient
