#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/hierarchical.h"
#include "collectives/reduce.h"
#include "collectives/sharded_reduction.h"

namespace resilient {
namespace {

// Every rank sends its data to every other and reduces all of it itself.
// Rounds 1; bytes (n-1) * size; reduced (n-1) * size; memory (n-1) * size.
// The result replaces `data`, which is lent to all sends until they end. Each
// rank folds in rank order, so all get the same bits.
Task flat(
    Communicator& comm,
    ComputeBudget& budget,
    void* data,
    size_t count,
    Reduction reduction) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  const size_t bytes = count * dtypeBytes(reduction.dtype);
  auto incoming = std::make_unique_for_overwrite<unsigned char[]>(n * bytes);
  auto sends = std::make_unique<Transfer[]>(n);
  auto recvs = std::make_unique<Transfer[]>(n);
  std::vector<const void*> operands(n);
  for (size_t i = 1; i < n; ++i) {
    const size_t from = (me + n - i) % n;
    comm.startRecv(
        recvs[from],
        static_cast<int>(from),
        slotOf(1, 0),
        incoming.get() + from * bytes,
        bytes);
  }
  for (size_t i = 1; i < n; ++i) {
    const size_t to = (me + i) % n;
    comm.startSend(sends[to], static_cast<int>(to), slotOf(1, 0), data, bytes);
  }
  for (size_t r = 0; r < n; ++r) {
    co_await finish(recvs[r]);
    operands[r] = r == me ? data : incoming.get() + r * bytes;
  }
  for (size_t r = 0; r < n; ++r) {
    co_await finish(sends[r]); // `data` is lent until then
  }
  Task reducing = reduceSliced(
      comm, budget, data, std::move(operands), count, reduction, true);
  co_await reducing;
}

// Blocks of neighbouring ranks that hold the same partial result exchange it
// and double. If n is no power of two, the first 2 * (n - 2^k) ranks fold in
// pairs into the even one first and get the result from it last.
// Rounds log2(n), plus 2 if folded; bytes rounds * size; memory size.
// Both partners compute op(lower block, higher block), so the bits agree.
//
// After the pairs have folded, `power` ranks take part; `index` numbers them
// without gaps. A pair counts as its even rank, which keeps blocks of indices
// blocks of neighbouring ranks. `data` is sent in each round and is the target
// of the fold, so a round ends only after its send.
Task recursiveDoubling(
    Communicator& comm,
    ComputeBudget& budget,
    void* data,
    size_t count,
    Reduction reduction) {
  const int n = comm.size();
  const int me = comm.rank();
  const size_t bytes = count * dtypeBytes(reduction.dtype);
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const int extra = n - power;
  const bool inPair = me < 2 * extra;
  auto incoming = std::make_unique_for_overwrite<unsigned char[]>(bytes);
  Transfer send;
  Transfer recv;
  std::vector<const void*> operands(2);

  if (inPair && me % 2 == 1) {
    comm.startSend(send, me - 1, slotOf(1, 0), data, bytes);
    co_await send;
    comm.startRecv(recv, me - 1, slotOf(3, 0), data, bytes);
    co_await recv;
    co_return;
  }
  if (inPair) {
    comm.startRecv(recv, me + 1, slotOf(1, 0), incoming.get(), bytes);
    co_await recv;
    operands[0] = data;
    operands[1] = incoming.get();
    Task folding =
        reduceSliced(comm, budget, data, operands, count, reduction, false);
    co_await folding;
  }
  const int index = inPair ? me / 2 : me - extra;
  for (int mask = 1; mask < power; mask <<= 1) {
    const int partnerIndex = index ^ mask;
    const int partner =
        partnerIndex < extra ? 2 * partnerIndex : partnerIndex + extra;
    const uint64_t slot = slotOf(2, static_cast<uint64_t>(mask));
    comm.startRecv(recv, partner, slot, incoming.get(), bytes);
    comm.startSend(send, partner, slot, data, bytes);
    co_await recv;
    co_await send;
    const bool lower = (index & mask) == 0;
    operands[0] = lower ? data : incoming.get();
    operands[1] = lower ? incoming.get() : data;
    const bool last = mask * 2 == power;
    Task reducing =
        reduceSliced(comm, budget, data, operands, count, reduction, last);
    co_await reducing;
  }
  if (inPair) {
    comm.startSend(send, me + 1, slotOf(3, 0), data, bytes);
    co_await send;
  }
}

// Reduce-scatter, then all-gather, both by direct exchange, the second
// following the first segment by segment.
// Rounds 2; bytes 2(n-1)/n * size; reduced (n-1)/n * size.
// The operation is in place: inputs, results and places are parts of `data`.
// reduceSharded() receives a result only after the contribution in the same
// memory has been sent.
Task direct(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t elementBytes = dtypeBytes(reduction.dtype);
  ShardedReduction job;
  job.results = ShardedReduction::Results::kToAll;
  job.reduction = reduction;
  job.tuning = tuning;
  job.counts = shardCounts(count, comm.size());
  job.inputs.resize(n);
  job.places.resize(n);
  size_t offset = 0;
  for (size_t r = 0; r < n; ++r) {
    job.inputs[r] = at(data, offset);
    job.places[r] = at(data, offset);
    offset += job.counts[r] * elementBytes;
  }
  job.output = job.places[static_cast<size_t>(comm.rank())];
  Task core = reduceSharded(comm, std::move(job));
  co_await core;
}

// Each shard travels round the ring twice: once being reduced, starting at the
// rank of its number, once as the result. In step k a rank receives shard
// rank-k-1 from the left and sends shard rank-k to the right; within a step
// segment by segment, each passed on as soon as it is there.
// Rounds 2(n-1); bytes 2(n-1)/n * size; reduced (n-1)/n * size; memory
// window * segment. Talks to two neighbours only.
//
// Units (step, segment) are processed in order. Posting unit u waits for unit
// u - window here and u - segments on the left, never for a later one, so
// the rank that is furthest behind can always go on.
//
// The incoming part is the first operand: the shard of rank c is folded in the
// order c, c+1, ..., c-1. In the first n-1 steps a part arrives in scratch
// memory and is folded into its place in `data`; afterwards results arrive in
// their places directly. sends[s] belongs to segment s of the step before: it
// must end before the same entry sends the part of this step.
Task ring(
    Communicator& comm,
    ComputeBudget& budget,
    void* data,
    size_t count,
    Reduction reduction,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  const int left = static_cast<int>((me + n - 1) % n);
  const int right = static_cast<int>((me + 1) % n);
  const size_t elementBytes = dtypeBytes(reduction.dtype);
  const size_t segmentCount =
      std::max<size_t>(tuning.segmentBytes / elementBytes, 1);
  const std::vector<size_t> counts = shardCounts(count, comm.size());
  std::vector<size_t> offsets(n, 0);
  for (size_t r = 1; r < n; ++r) {
    offsets[r] = offsets[r - 1] + counts[r - 1];
  }
  // The number for the largest shard; the others may end in empty segments.
  const size_t segments =
      std::max<size_t>((counts[0] + segmentCount - 1) / segmentCount, 1);
  const size_t reduceSteps = n - 1;
  const size_t steps = 2 * (n - 1);
  const size_t units = steps * segments;
  // A shard comes back to where it is being sent from n-1 steps later: the
  // window must not reach that far.
  const size_t window = std::min(tuning.window, (n - 1) * segments);

  const auto sizeOf = [&counts, segmentCount](size_t shard, size_t s) {
    const size_t start = std::min(s * segmentCount, counts[shard]);
    return std::min(segmentCount, counts[shard] - start);
  };
  const auto place = [&](size_t shard, size_t s) {
    const size_t start = std::min(s * segmentCount, counts[shard]);
    return at(data, (offsets[shard] + start) * elementBytes);
  };
  const auto shardOfStep = [n, me](size_t step) { // the one received
    return (me + 2 * n - step - 1) % n;
  };

  const size_t scratchBytes = std::min(segmentCount, counts[0]) * elementBytes;
  auto incoming =
      std::make_unique_for_overwrite<unsigned char[]>(window * scratchBytes);
  auto recvs = std::make_unique<Transfer[]>(window);
  auto sends = std::make_unique<Transfer[]>(segments);
  std::vector<const void*> operands(2);

  const auto postRecv = [&](size_t unit) {
    const size_t step = unit / segments;
    const size_t s = unit % segments;
    const size_t shard = shardOfStep(step);
    const size_t lane = unit % window;
    comm.startRecv(
        recvs[lane],
        left,
        slotOf(1, unit),
        step < reduceSteps ? incoming.get() + lane * scratchBytes
                           : place(shard, s),
        sizeOf(shard, s) * elementBytes);
  };

  for (size_t unit = 0; unit < window; ++unit) {
    postRecv(unit);
  }
  for (size_t s = 0; s < segments; ++s) {
    comm.startSend(
        sends[s],
        right,
        slotOf(1, s),
        place(me, s),
        sizeOf(me, s) * elementBytes);
  }
  for (size_t unit = 0; unit < units; ++unit) {
    const size_t step = unit / segments;
    const size_t s = unit % segments;
    const size_t shard = shardOfStep(step);
    co_await finish(recvs[unit % window]);
    if (step < reduceSteps) {
      operands[0] = incoming.get() + (unit % window) * scratchBytes;
      operands[1] = place(shard, s);
      Task reducing = reduceSliced(
          comm,
          budget,
          place(shard, s),
          operands,
          sizeOf(shard, s),
          reduction,
          step + 1 == reduceSteps);
      co_await reducing;
    }
    co_await finish(sends[s]);
    if (step + 1 < steps) {
      comm.startSend(
          sends[s],
          right,
          slotOf(1, unit + segments),
          place(shard, s),
          sizeOf(shard, s) * elementBytes);
    }
    if (unit + window < units) {
      postRecv(unit + window);
    }
  }
}

} // namespace

// A single rank has nothing to exchange. Its result is its operand, which only
// PREMUL_SUM changes.
Task allReduceWith(
    AllReduceAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    Tuning tuning) {
  requireReduction("all_reduce", reduction);
  ComputeBudget budget;
  if (reduction.op == ReduceOp::kPreMulSum &&
      (comm.size() == 1 || algorithm != AllReduceAlgorithm::kDirect)) {
    // Here the data is ours to scale. Only the direct algorithm also serves
    // operations with an input that must not change.
    Task scaling = scaleSliced(comm, budget, data, data, count, reduction);
    co_await scaling;
    reduction.op = ReduceOp::kSum;
  }
  if (comm.size() == 1) {
    co_return;
  }
  Task chosen;
  switch (algorithm) {
    case AllReduceAlgorithm::kFlat:
      chosen = flat(comm, budget, data, count, reduction);
      break;
    case AllReduceAlgorithm::kRecursiveDoubling:
      chosen = recursiveDoubling(comm, budget, data, count, reduction);
      break;
    case AllReduceAlgorithm::kDirect:
      chosen = direct(comm, data, count, reduction, tuning);
      break;
    case AllReduceAlgorithm::kRing:
      chosen = ring(comm, budget, data, count, reduction, tuning);
      break;
  }
  co_await chosen;
}

Task allReduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction) {
  const size_t bytes = count * dtypeBytes(reduction.dtype);
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing =
      chooseByTopology(comm, CollectiveKind::kAllReduce, bytes, use);
  co_await choosing;
  Task chosen;
  if (use == TopologyUse::kHierarchy) {
    const Topology& topology = *comm.topology();
    chosen = hierarchicalAllReduce(
        topology.root(),
        comm,
        data,
        count,
        reduction,
        exchangesAtTop(topology, bytes),
        hierarchyTuningFor(*comm.topology()));
  } else {
    const AllReduceAlgorithm algorithm = use == TopologyUse::kOneRound
        ? AllReduceAlgorithm::kFlat
        : chooseAllReduce(comm.size(), bytes, costModelFor(comm.topology()));
    const int peers =
        algorithm == AllReduceAlgorithm::kDirect ? comm.size() - 1 : 1;
    chosen = allReduceWith(
        algorithm,
        comm,
        data,
        count,
        reduction,
        tuningFor(peers, comm.topology()));
  }
  co_await chosen;
}

} // namespace resilient
