#include "transport/verbs_end.h"

#include <sys/mman.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "transport/verbs_loans.h"

namespace resilient {
namespace {

static_assert(VerbsEnd::kMaxReadBytes <= VerbsLoans::kMaxFound);

constexpr size_t kMemoryBytes =
    2 * VerbsEnd::kSlots * VerbsEnd::kSlotBytes + VerbsEnd::kMaxReadBytes;

} // namespace

void VerbsEnd::Free::operator()(std::byte* memory) const {
  ::munmap(memory, kMemoryBytes);
}

Status VerbsEnd::make(
    VerbsApi& api,
    const VerbsPort& port,
    VerbsQueuePairConfig config,
    std::unique_ptr<VerbsEnd>& end) {
  std::shared_ptr<VerbsDevice> device;
  const Status status = api.open(port.device, device);
  return status.ok() ? make(std::move(device), port, config, end) : status;
}

Status VerbsEnd::make(
    std::shared_ptr<VerbsDevice> device,
    const VerbsPort& port,
    VerbsQueuePairConfig config,
    std::unique_ptr<VerbsEnd>& end) {
  config.depth = kSlots + kReads;
  std::unique_ptr<VerbsEnd> made(new VerbsEnd());
  made->port_ = port;
  made->device_ = std::move(device);
  void* const memory = ::mmap(
      nullptr,
      kMemoryBytes,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (memory == MAP_FAILED) {
    return Status(StatusCode::kInternal, "no memory for an RDMA connection");
  }
  made->memory_.reset(static_cast<std::byte*>(memory));
  // A child has no use for it. Kernels before 5.12 would give the pages that
  // the device knows to whichever process writes first after a fork.
  (void)::madvise(memory, kMemoryBytes, MADV_DONTFORK);
  Status status = made->device_->registerMemory(
      {made->memory_.get(), kMemoryBytes},
      /*forReads=*/false,
      made->registered_);
  if (status.ok()) {
    status = made->device_->makeQueuePair(port, config, made->queuePair_);
  }
  for (uint32_t slot = 0; status.ok() && slot < kSlots; ++slot) {
    status = made->receive(slot);
  }
  if (status.ok()) {
    end = std::move(made);
  }
  return status;
}

// The queue pair must be gone before its memory is deregistered.
VerbsEnd::~VerbsEnd() {
  if (queuePair_) {
    (void)queuePair_->fence();
    queuePair_.reset();
  }
}

bool VerbsEnd::settle(uint64_t request, Nanos limit) {
  constexpr Nanos kPause = std::chrono::microseconds(100);
  if (!queuePair_->fence().ok()) {
    return false;
  }
  const TimePoint end = std::chrono::steady_clock::now() + limit;
  std::vector<VerbsCompletion> completions;
  while (queuePair_->poll(completions, kSlots).ok()) {
    if (std::ranges::find(completions, request, &VerbsCompletion::request) !=
        completions.end()) {
      return true;
    }
    if (completions.empty()) {
      if (std::chrono::steady_clock::now() > end) {
        return false;
      }
      std::this_thread::sleep_for(kPause);
    }
    completions.clear();
  }
  return false;
}

Status VerbsEnd::send(uint32_t slot, size_t bytes) {
  return queuePair_->postSend(slot, *registered_, {sendSlot(slot), bytes});
}

Status VerbsEnd::receive(uint32_t slot) {
  return queuePair_->postReceive(
      kReceives + slot, *registered_, {receiveSlot(slot), kSlotBytes});
}

} // namespace resilient
