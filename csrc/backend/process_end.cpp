#include "backend/process_end.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace resilient {

namespace {

// The interpreter needs some 100 ms to end, more on a loaded machine. A longer
// pause only delays a thread that joins such a one.
constexpr auto kPause = std::chrono::seconds(5);

std::atomic<bool> ending{false};

} // namespace

void processEnds() {
  ending.store(true);
}

void letProcessEnd() {
  if (ending.load(std::memory_order_relaxed) && gettid() != getpid()) {
    std::this_thread::sleep_for(kPause);
  }
}

} // namespace resilient
