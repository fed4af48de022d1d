#include "backend/fork_check.h"

#include <pthread.h>

#include <atomic>

namespace resilient {

namespace {
std::atomic<int> generation{0};
} // namespace

int forkGeneration() {
  // Registered on first use, which comes before anything worth guarding.
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

} // namespace resilient
