#include "shift/spin_lock.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace resilient::shift {

bool SpinLock::canBeOwned() {
  static const bool can =
      ::syscall(
          SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return can;
}

void SpinLock::barrierInAllThreads() {
  (void)::syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

// No barrier where there is no owner yet, as a rule while a queue pair is
// connected: the owner to come sees the caller (enter). Nor for the owner's
// own thread, which is not inside.
void SpinLock::awaitOwner() {
  const void* const owner = owner_.load(std::memory_order_seq_cst);
  if (owner == nullptr || owner == self()) {
    return;
  }
  barrierInAllThreads();
  while (inside_.load(std::memory_order_acquire)) {
    sched_yield();
  }
}

bool SpinLock::beOwner() {
  const void* none = nullptr;
  if (owner_.compare_exchange_strong(none, self())) {
    return true;
  }
  others_.fetch_add(1, std::memory_order_seq_cst); // for good
  awaitOwner();
  shared_.store(true, std::memory_order_release);
  return false;
}

} // namespace resilient::shift
