#pragma once

#include <cerrno>
#include <string>
#include <utility>

#include "base/status.h"

namespace resilient {

// Owns one file descriptor and closes it.
//
// Errors of close() are ignored. A moved-from object is empty. Remove a
// descriptor from the event loop before its owner closes it.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& o) noexcept {
    if (this != &o) {
      reset(std::exchange(o.fd_, -1));
    }
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    reset();
  }

  int get() const {
    return fd_;
  }
  explicit operator bool() const {
    return fd_ >= 0;
  }
  int release() {
    return std::exchange(fd_, -1);
  }
  // Keeps errno: an error path may close first and report afterwards.
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// strerror without its shared buffer: any thread may call it.
std::string errnoText(int error);

// "attempt: Connection refused"
Status errnoStatus(StatusCode code, const std::string& attempt, int error);

// Returns `result` unless it is -1; then throws a StatusError that names the
// attempt and errno. For calls that fail only if something is badly wrong (no
// memory, no descriptors); expected failures come back as a Status. Reads
// errno: nothing may come between the call and this one.
int checkSyscall(const std::string& attempt, int result);

// Repeats a system call that a signal interrupted. Not for close() and
// connect(): after EINTR these have done their work or go on in the background.
template <typename Call>
auto retryInterrupted(Call&& call) {
  for (;;) {
    auto result = call();
    if (result != -1 || errno != EINTR) {
      return result;
    }
  }
}

} // namespace resilient
