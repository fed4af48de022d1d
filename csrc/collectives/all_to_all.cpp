#include <memory>

#include "collectives/algorithms.h"
#include "collectives/compute.h"

namespace resilient {

// Rounds 1; bytes: all inputs but the own. Staggered: rank r starts with r+1,
// and each rank is the target of about one other at a time.
Task allToAll(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> inputBytes,
    std::vector<void*> outputs,
    std::vector<size_t> outputBytes) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  require(
      inputs.size() == n && inputBytes.size() == n && outputs.size() == n &&
          outputBytes.size() == n,
      "all_to_all",
      "needs one input, output and size of each per rank");
  require(
      inputBytes[me] == outputBytes[me],
      "all_to_all",
      "the own input and output differ in size");
  auto sends = std::make_unique<Transfer[]>(n);
  auto recvs = std::make_unique<Transfer[]>(n);
  ComputeBudget budget;
  for (size_t i = 1; i < n; ++i) {
    const size_t from = (me + n - i) % n;
    comm.startRecv(
        recvs[from],
        static_cast<int>(from),
        slotOf(1, 0),
        outputs[from],
        outputBytes[from]);
  }
  for (size_t i = 1; i < n; ++i) {
    const size_t to = (me + i) % n;
    comm.startSend(
        sends[to],
        static_cast<int>(to),
        slotOf(1, 0),
        inputs[to],
        inputBytes[to]);
  }
  Task copying =
      copySliced(comm, budget, outputs[me], inputs[me], inputBytes[me]);
  co_await copying;
  for (size_t r = 0; r < n; ++r) {
    co_await finish(recvs[r]);
    co_await finish(sends[r]);
  }
}

} // namespace resilient
