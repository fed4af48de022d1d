#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/hierarchical.h"

namespace resilient {
namespace {

// Rounds 1; bytes (n-1) * own input out, all the others' in.
Task direct(
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes) {
  const auto n = static_cast<size_t>(comm.size());
  const size_t own = bytes[static_cast<size_t>(comm.rank())];
  return allToAll(
      comm,
      std::vector<const void*>(n, input),
      std::vector<size_t>(n, own),
      std::move(outputs),
      std::move(bytes));
}

// Each part travels round the ring, segment by segment, passed on as it
// comes. Rounds n-1; bytes: all parts but the right neighbour's; two
// neighbours only. No limit on sends under way is needed: what is passed on
// has come in, within the window, and all of it is the caller's memory.
//
// The part of the right neighbour arrives last and is not forwarded, because
// that rank has it. No wait is circular: every unit that a rank waits for is
// the sender's own, or one that the sender has waited for earlier.
Task ring(
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  const int left = static_cast<int>((me + n - 1) % n);
  const int right = static_cast<int>((me + 1) % n);

  struct Unit {
    size_t part = 0;
    size_t offset = 0;
    size_t bytes = 0;
    uint64_t slot = 0;
  };
  // The units that come in, in this order: the left neighbour's part, its left
  // neighbour's, ..., at last the right neighbour's. Then the own part.
  // The slot names part and segment, which do not change on the way: sender and
  // receiver number their units differently.
  std::vector<Unit> incoming;
  std::vector<Unit> own;
  size_t passedOn = 0; // units before the right neighbour's part
  for (size_t step = 0; step < n; ++step) {
    const size_t part = (me + 2 * n - step - 1) % n;
    std::vector<Unit>& list = part == me ? own : incoming;
    if (part == static_cast<size_t>(right)) {
      passedOn = incoming.size();
    }
    size_t offset = 0;
    uint64_t s = 0;
    do {
      const size_t size = std::min(tuning.segmentBytes, bytes[part] - offset);
      list.push_back(
          {part,
           offset,
           size,
           slotOf(1, (static_cast<uint64_t>(part) << 20) | s)});
      offset += size;
      ++s;
    } while (offset < bytes[part]);
  }

  const size_t window = std::min(tuning.window, incoming.size());
  auto recvs = std::make_unique<Transfer[]>(window);
  auto sends = std::make_unique<Transfer[]>(own.size() + passedOn);
  ComputeBudget budget;
  const auto postRecv = [&](size_t i) {
    const Unit& unit = incoming[i];
    comm.startRecv(
        recvs[i % window],
        left,
        unit.slot,
        at(outputs[unit.part], unit.offset),
        unit.bytes);
  };
  for (size_t i = 0; i < window; ++i) {
    postRecv(i);
  }
  for (size_t i = 0; i < own.size(); ++i) {
    comm.startSend(
        sends[i], right, own[i].slot, at(input, own[i].offset), own[i].bytes);
  }
  Task copying = copySliced(comm, budget, outputs[me], input, bytes[me]);
  co_await copying;
  for (size_t i = 0; i < incoming.size(); ++i) {
    co_await finish(recvs[i % window]);
    if (i < passedOn) {
      const Unit& unit = incoming[i];
      comm.startSend(
          sends[own.size() + i],
          right,
          unit.slot,
          at(outputs[unit.part], unit.offset),
          unit.bytes);
    }
    if (i + window < incoming.size()) {
      postRecv(i + window);
    }
  }
  for (size_t i = 0; i < own.size() + passedOn; ++i) {
    co_await finish(sends[i]);
  }
}

} // namespace

Task allGatherWith(
    AllGatherAlgorithm algorithm,
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  require(
      outputs.size() == n && bytes.size() == n,
      "all_gather",
      "needs one output and one size per rank");
  Task chosen;
  switch (algorithm) {
    case AllGatherAlgorithm::kDirect:
      chosen = direct(comm, input, std::move(outputs), std::move(bytes));
      break;
    case AllGatherAlgorithm::kRing:
      if (n == 1) {
        chosen = direct(comm, input, std::move(outputs), std::move(bytes));
      } else {
        chosen =
            ring(comm, input, std::move(outputs), std::move(bytes), tuning);
      }
      break;
  }
  co_await chosen;
}

Task allGather(
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes) {
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing =
      chooseByTopology(comm, CollectiveKind::kAllGather, total, use);
  co_await choosing;
  Task chosen;
  if (use == TopologyUse::kHierarchy) {
    chosen = hierarchicalAllGather(
        comm.topology()->root(),
        comm,
        input,
        std::move(outputs),
        std::move(bytes),
        hierarchyTuningFor(*comm.topology()));
  } else {
    chosen = allGatherWith(
        use == TopologyUse::kOneRound
            ? AllGatherAlgorithm::kDirect
            : chooseAllGather(
                  comm.size(), total, costModelFor(comm.topology())),
        comm,
        input,
        std::move(outputs),
        std::move(bytes),
        tuningFor(1, comm.topology()));
  }
  co_await chosen;
}

// Rounds 1; bytes: the root receives all the others' inputs.
// The root receives from all ranks at once and directly into its outputs. Sizes
// are not in the signature; if a rank sends another size than the root expects,
// both fail with kMismatch when the message arrives.
Task gather(
    Communicator& comm,
    const void* input,
    size_t bytes,
    std::vector<void*> outputs,
    std::vector<size_t> outputBytes,
    int root) {
  const size_t n = static_cast<size_t>(comm.size());
  require(root >= 0 && root < comm.size(), "gather", "no such root rank");
  if (comm.rank() != root) {
    Transfer send;
    comm.startSend(send, root, slotOf(1, 0), input, bytes);
    co_await send;
    co_return;
  }
  const size_t me = static_cast<size_t>(root);
  require(
      outputs.size() == n && outputBytes.size() == n,
      "gather",
      "the root needs one output and one size per rank");
  require(
      outputBytes[me] == bytes,
      "gather",
      "the root's own output and input differ in size");
  auto recvs = std::make_unique<Transfer[]>(n);
  ComputeBudget budget;
  for (size_t i = 1; i < n; ++i) {
    const size_t from = (me + i) % n;
    comm.startRecv(
        recvs[from],
        static_cast<int>(from),
        slotOf(1, 0),
        outputs[from],
        outputBytes[from]);
  }
  Task copying = copySliced(comm, budget, outputs[me], input, bytes);
  co_await copying;
  for (size_t r = 0; r < n; ++r) {
    co_await finish(recvs[r]);
  }
}

// Rounds 1; bytes: the root sends all the others' inputs.
Task scatter(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> inputBytes,
    void* output,
    size_t bytes,
    int root) {
  const size_t n = static_cast<size_t>(comm.size());
  require(root >= 0 && root < comm.size(), "scatter", "no such root rank");
  if (comm.rank() != root) {
    Transfer recv;
    comm.startRecv(recv, root, slotOf(1, 0), output, bytes);
    co_await recv;
    co_return;
  }
  const size_t me = static_cast<size_t>(root);
  require(
      inputs.size() == n && inputBytes.size() == n,
      "scatter",
      "the root needs one input and one size per rank");
  require(
      inputBytes[me] == bytes,
      "scatter",
      "the root's own input and output differ in size");
  auto sends = std::make_unique<Transfer[]>(n);
  ComputeBudget budget;
  for (size_t i = 1; i < n; ++i) {
    const size_t to = (me + i) % n;
    comm.startSend(
        sends[to],
        static_cast<int>(to),
        slotOf(1, 0),
        inputs[to],
        inputBytes[to]);
  }
  Task copying = copySliced(comm, budget, output, inputs[me], bytes);
  co_await copying;
  for (size_t r = 0; r < n; ++r) {
    co_await finish(sends[r]);
  }
}

} // namespace resilient
