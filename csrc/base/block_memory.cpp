#include "base/block_memory.h"

#include <sys/mman.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define RESILIENT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RESILIENT_ASAN 1
#endif
#endif
#ifdef RESILIENT_ASAN
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
#endif

namespace resilient {
namespace {

constexpr uint64_t kHugePageBytes = 2u << 20; // of x86 and of most ARM kernels

} // namespace

BlockMemory allocateBlock(uint64_t bytes) {
  const uint64_t huge = bytes - bytes % kHugePageBytes;
  void* data = nullptr;
  if (huge == 0) {
    data = std::malloc(bytes);
  } else if (::posix_memalign(&data, kHugePageBytes, bytes) != 0) {
    data = nullptr;
  }
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  if (huge != 0) {
    // It is a wish: without huge pages the memory serves as well.
    (void)::madvise(data, huge, MADV_HUGEPAGE);
  }
  return BlockMemory(static_cast<std::byte*>(data));
}

void forbidAccess(
    [[maybe_unused]] std::byte* data,
    [[maybe_unused]] uint64_t bytes) {
#ifdef RESILIENT_ASAN
  __asan_poison_memory_region(data, bytes);
#endif
}

void allowAccess(
    [[maybe_unused]] std::byte* data,
    [[maybe_unused]] uint64_t bytes) {
#ifdef RESILIENT_ASAN
  __asan_unpoison_memory_region(data, bytes);
#endif
}

} // namespace resilient
