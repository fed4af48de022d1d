// Barriers.

#include <ATen/DeviceAccelerator.h>

#include "backend/checks.h"
#include "backend/process_group.h"

namespace resilient {

ProcessGroupResilient::WorkPtr ProcessGroupResilient::barrier(
    const c10d::BarrierOptions& opts) {
  checkUsable("barrier");
  auto work = makeWork(c10d::OpType::BARRIER, "resilient:barrier", {}, {});
  // As with NCCL, the barrier comes after what the current streams of these
  // devices have to do. Without an accelerator they mean nothing, as with gloo.
  if (const auto type = at::getAccelerator()) {
    for (const int64_t id : opts.device_ids) {
      work->tensors().waitForDevice(
          c10::Device(*type, static_cast<c10::DeviceIndex>(id)));
    }
  }
  OpSignature signature;
  signature.kind = OpKind::kBarrier;
  return launch(std::move(work), signature, opts, [](Communicator& comm) {
    return resilient::barrier(comm);
  });
}

// The call is synchronous: c10d gives it no Work. Inside a coalescing block it
// waits all the same.
void ProcessGroupResilient::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool waitAllRanks) {
  checkUsable("monitoredBarrier");
  auto work =
      makeWork(c10d::OpType::BARRIER, "resilient:monitored_barrier", {}, {});
  OpSignature signature;
  signature.kind = OpKind::kMonitoredBarrier;
  launch(work, signature, opts, [waitAllRanks](Communicator& comm) {
    return resilient::monitoredBarrier(comm, waitAllRanks);
  });
  work->wait();
}

} // namespace resilient
