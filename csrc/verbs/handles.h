#pragma once

#include <fcntl.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/syscall.h"

namespace resilient {

// Owners of the objects of libibverbs. An object can be destroyed only after
// those that were made from it, so owners are declared in the order of
// creation.
template <auto kDestroy>
struct VerbsDeleter {
  template <typename Object>
  void operator()(Object* object) const {
    kDestroy(object);
  }
};
using ContextHandle =
    std::unique_ptr<ibv_context, VerbsDeleter<ibv_close_device>>;
using DomainHandle = std::unique_ptr<ibv_pd, VerbsDeleter<ibv_dealloc_pd>>;
using RegionHandle = std::unique_ptr<ibv_mr, VerbsDeleter<ibv_dereg_mr>>;
using ChannelHandle =
    std::unique_ptr<ibv_comp_channel, VerbsDeleter<ibv_destroy_comp_channel>>;
using CompletionQueueHandle =
    std::unique_ptr<ibv_cq, VerbsDeleter<ibv_destroy_cq>>;
using QueuePairHandle = std::unique_ptr<ibv_qp, VerbsDeleter<ibv_destroy_qp>>;

// An open device with its protection domain. Memory and queue pairs share it,
// so the device is closed after all of them.
struct OpenDevice {
  std::string name;
  ContextHandle context;
  DomainHandle domain;
  ibv_device_attr limits{};
};

// The error of a call that returned `result`. Most verbs return errno, some
// return its negative, and some only set it.
inline int verbsError(int result) {
  if (result > 0) {
    return result;
  }
  return result < -1 ? -result : errno;
}

// False, with errno, if it cannot.
inline bool setNonBlocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags != -1 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != -1;
}

// "rxe0: register 64 bytes: Cannot allocate memory"
inline Status
verbsStatus(const std::string& device, const std::string& attempt, int error) {
  return errnoStatus(StatusCode::kNetwork, device + ": " + attempt, error);
}

} // namespace resilient
