#include "verbs/registered_memory.h"

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
  // A number, since ibv_reg_mr() combines it with another enumeration.
  int access = IBV_ACCESS_LOCAL_WRITE;
  if (forReads) {
    access |= IBV_ACCESS_REMOTE_READ;
  }
  RegionHandle region(
      ibv_reg_mr(device->domain.get(), bytes.data(), bytes.size(), access));
  if (region == nullptr) {
    const int error = errno;
    const Status status = verbsStatus(device->name, attempt, error);
    return error == ENOMEM
        ? Status(status.code(), status.message() + lockLimitText())
        : status;
  }
  memory.reset(new RegisteredMemory(device, std::move(region)));
  return {};
}

bool RegisteredMemory::covers(
    std::span<const std::byte> bytes,
    const ibv_pd* domain) const {
  const auto* const begin = static_cast<const std::byte*>(region_->addr);
  return region_->pd == domain && bytes.data() >= begin &&
      bytes.data() + bytes.size() <= begin + region_->length;
}

} // namespace resilient
