#include "verbs/registered_memory.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>

namespace resilient {
namespace {

// Registered memory stays in RAM, and the kernel limits how much of it a
// process without CAP_IPC_LOCK may have. Containers often start with 64 KiB.
std::string lockLimitText() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY) {
    return "";
  }
  return "; this process may lock " + std::to_string(limit.rlim_cur >> 10) +
      " KiB of memory (RLIMIT_MEMLOCK): raise it with `ulimit -l`, or "
      "for a container with `--ulimit memlock=-1`";
}

// A number, since ibv_reg_mr() combines it with another enumeration.
int accessFor(bool forReads) {
  int access = IBV_ACCESS_LOCAL_WRITE;
  if (forReads) {
    access |= IBV_ACCESS_REMOTE_READ;
  }
  return access;
}

// Looked up: it is newer than all other functions that are used here, and the
// rest works without it.
using RegisterDmabuf =
    ibv_mr* (*)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);

RegisterDmabuf registerDmabufFunction() {
  void* const library = ::dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr
      ? nullptr
      : reinterpret_cast<RegisterDmabuf>(
            ::dlvsym(library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"));
}

} // namespace

Status RegisteredMemory::make(
    const std::shared_ptr<OpenDevice>& device,
    std::span<std::byte> bytes,
    bool forReads,
    std::unique_ptr<VerbsMemory>& memory) {
  const std::string attempt =
      "register " + std::to_string(bytes.size()) + " bytes";
  if (bytes.empty()) {
    return Status(
        StatusCode::kInvalidArgument,
        device->name + ": " + attempt + ": there is nothing to register");
  }
  const int access = accessFor(forReads);
  RegionHandle region(
      ibv_reg_mr(device->domain.get(), bytes.data(), bytes.size(), access));
  if (region == nullptr) {
    const int error = errno;
    const Status status = verbsStatus(device->name, attempt, error);
    return error == ENOMEM
        ? Status(status.code(), status.message() + lockLimitText())
        : status;
  }
  memory.reset(new RegisteredMemory(device, bytes, std::move(region)));
  return {};
}

Status RegisteredMemory::fromDmabuf(
    const std::shared_ptr<OpenDevice>& device,
    int dmabuf,
    uint64_t offset,
    std::span<std::byte> bytes,
    bool forReads,
    std::unique_ptr<VerbsMemory>& memory) {
  const std::string attempt =
      "register a dma-buf of " + std::to_string(bytes.size()) + " bytes";
  static const RegisterDmabuf call = registerDmabufFunction();
  if (call == nullptr) {
    return Status(
        StatusCode::kNetwork,
        device->name + ": " + attempt + ": libibverbs is too old for it");
  }
  RegionHandle region(call(
      device->domain.get(),
      offset,
      bytes.size(),
      reinterpret_cast<uintptr_t>(bytes.data()),
      dmabuf,
      accessFor(forReads)));
  if (region == nullptr) {
    return verbsStatus(device->name, attempt, errno);
  }
  memory.reset(new RegisteredMemory(device, bytes, std::move(region)));
  return {};
}

bool RegisteredMemory::covers(
    std::span<const std::byte> bytes,
    const ibv_pd* domain) const {
  return region_->pd == domain && bytes.data() >= bytes_.data() &&
      bytes.data() + bytes.size() <= bytes_.data() + bytes_.size();
}

} // namespace resilient
