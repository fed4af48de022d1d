#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace resilient {

enum class FileUse {
  kPublic,
  kSecret, // no other users may read it
};

// Reads a regular file of at most `maxBytes`. Never waits: a FIFO or a device,
// which might never end, is refused. Errors are kInvalidArgument, with the
// remedy and without the path.
Status readFile(
    const std::string& path,
    FileUse use,
    size_t maxBytes,
    std::string& text);

// The text of a small file of the kernel, such as those in /proc/sys, without
// the end of its last line; empty if it cannot be read.
//
// Not to be read by `>>` of a stream: with a C++ library of our own, linked
// statically beside that of torch, a number never ends there (seen with GCC
// 13).
std::string kernelText(const std::string& path);

} // namespace resilient
