#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/syscall.h"

namespace resilient {

namespace {

constexpr size_t kKernelTextMax = 4096; // those that are read have some hundred

Status invalid(const std::string& text) {
  return Status(StatusCode::kInvalidArgument, text);
}

} // namespace

// One byte more than allowed is read, which shows that a file is too long.
Status readFile(
    const std::string& path,
    FileUse use,
    size_t maxBytes,
    std::string& text) {
  // Without O_NONBLOCK a FIFO would wait for a writer. Links are followed:
  // Kubernetes makes secrets available by them; what counts is the file.
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat about{};
  if (!file || ::fstat(file.get(), &about) != 0) {
    return invalid("cannot read it: " + errnoText(errno));
  }
  if (!S_ISREG(about.st_mode)) {
    return invalid("not a regular file");
  }
  // The group may: Kubernetes lets a process that is not root read a secret by
  // its group (fsGroup).
  if (use == FileUse::kSecret && (about.st_mode & S_IRWXO) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", about.st_mode & 07777u);
    return invalid(
        std::string("its mode ") + mode +
        " lets other users in: chmod 600 it (in Kubernetes: defaultMode: "
        "0400)");
  }
  text.assign(maxBytes + 1, '\0');
  size_t bytes = 0;
  for (ssize_t n = 1; n > 0 && bytes < text.size();) {
    n = retryInterrupted([&] {
      return ::read(file.get(), text.data() + bytes, text.size() - bytes);
    });
    if (n < 0) {
      return invalid("cannot read it: " + errnoText(errno));
    }
    bytes += static_cast<size_t>(n);
  }
  text.resize(bytes);
  if (bytes > maxBytes) {
    return invalid(
        "longer than " + std::to_string(maxBytes) +
        " bytes: is it the right file?");
  }
  return Status();
}

std::string kernelText(const std::string& path) {
  std::string text;
  if (!readFile(path, FileUse::kPublic, kKernelTextMax, text).ok()) {
    return "";
  }
  text.erase(text.find_last_not_of(" \t\n") + 1);
  return text;
}

} // namespace resilient
