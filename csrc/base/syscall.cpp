#include "base/syscall.h"

#include <unistd.h>

#include <system_error>

namespace resilient {

void FileDescriptor::reset(int fd) {
  int old = std::exchange(fd_, fd);
  if (old >= 0 && old != fd) {
    int saved = errno;
    // Not retried on EINTR: Linux has released the number by then, and it may
    // belong to another thread already.
    ::close(old);
    errno = saved;
  }
}

std::string errnoText(int error) {
  return std::system_category().message(error);
}

Status errnoStatus(StatusCode code, const std::string& attempt, int error) {
  return Status(code, attempt + ": " + errnoText(error));
}

int checkSyscall(const std::string& attempt, int result) {
  if (result == -1) {
    throw StatusError(errnoStatus(StatusCode::kInternal, attempt, errno));
  }
  return result;
}

} // namespace resilient
