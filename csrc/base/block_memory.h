#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace resilient {

struct FreeBlock {
  void operator()(std::byte* data) const {
    std::free(data);
  }
};
using BlockMemory = std::unique_ptr<std::byte[], FreeBlock>;

// Uninitialized. Each whole 2 MiB of it is a huge page, if the system has them:
// the first write to each page costs a page fault. Throws std::bad_alloc.
BlockMemory allocateBlock(uint64_t bytes);

// For memory that is kept without a user: under AddressSanitizer, an access is
// as wrong as to freed memory.
void forbidAccess(std::byte* data, uint64_t bytes);
void allowAccess(std::byte* data, uint64_t bytes);

} // namespace resilient
