#include <numeric>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/hierarchical.h"
#include "collectives/sharded_reduction.h"

namespace resilient {
namespace {

// One rank: its input, scaled if so asked, is the result.
Task reduceAlone(
    Communicator& comm,
    void* output,
    const void* input,
    size_t count,
    Reduction reduction) {
  ComputeBudget budget;
  if (reduction.op == ReduceOp::kPreMulSum) {
    Task scaling = scaleSliced(comm, budget, output, input, count, reduction);
    co_await scaling;
  } else {
    Task copying = copySliced(
        comm, budget, output, input, count * dtypeBytes(reduction.dtype));
    co_await copying;
  }
}

} // namespace

// Rounds 1. Bytes: each rank sends its input less its own part, receives
// (n-1) times its part.
Task reduceScatterWith(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  requireReduction("reduce_scatter", reduction);
  require(
      inputs.size() == n && counts.size() == n,
      "reduce_scatter",
      "needs one input and one count per rank");
  if (n == 1) {
    Task alone = reduceAlone(comm, output, inputs[0], counts[0], reduction);
    co_await alone;
    co_return;
  }
  ShardedReduction job;
  job.inputs = std::move(inputs);
  job.counts = std::move(counts);
  job.output = output;
  job.reduction = reduction;
  job.tuning = tuning;
  Task core = reduceSharded(comm, std::move(job));
  co_await core;
}

Task reduceScatter(
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction) {
  const size_t bytes =
      std::accumulate(counts.begin(), counts.end(), size_t{0}) *
      dtypeBytes(reduction.dtype);
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing =
      chooseByTopology(comm, CollectiveKind::kReduceScatter, bytes, use);
  co_await choosing;
  Task chosen = use == TopologyUse::kHierarchy
      ? hierarchicalReduceScatter(
            comm.topology()->root(),
            comm,
            std::move(inputs),
            std::move(counts),
            output,
            reduction,
            hierarchyTuningFor(*comm.topology()))
      : reduceScatterWith(
            comm,
            std::move(inputs),
            std::move(counts),
            output,
            reduction,
            tuningFor(comm.size() - 1, comm.topology()));
  co_await chosen;
}

// kDirect: rounds 1; the root receives (n-1) * size bytes and reduces all.
// kScatterGather: rounds 2, 2(n-1)/n * size bytes; every rank reduces a shard
// and passes it to the root.
Task reduceWith(
    ReduceAlgorithm algorithm,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int root,
    Tuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  requireReduction("reduce", reduction);
  require(root >= 0 && root < comm.size(), "reduce", "no such root rank");
  if (n == 1) {
    Task alone = reduceAlone(comm, data, data, count, reduction);
    co_await alone;
    co_return;
  }
  const size_t elementBytes = dtypeBytes(reduction.dtype);
  const bool isRoot = comm.rank() == root;
  ShardedReduction job;
  job.root = root;
  job.reduction = reduction;
  job.tuning = tuning;
  job.inputs.resize(n);
  job.places.resize(n);
  if (algorithm == ReduceAlgorithm::kDirect) {
    job.counts.assign(n, 0);
    job.counts[static_cast<size_t>(root)] = count;
    job.onlyOwner = root;
    job.inputs[static_cast<size_t>(root)] = data;
    job.output = isRoot ? data : nullptr;
  } else {
    job.counts = shardCounts(count, comm.size());
    job.results = ShardedReduction::Results::kToRoot;
    size_t offset = 0;
    for (size_t r = 0; r < n; ++r) {
      job.inputs[r] = at(data, offset);
      job.places[r] = at(data, offset);
      if (isRoot && r == static_cast<size_t>(root)) {
        job.output = at(data, offset);
      }
      offset += job.counts[r] * elementBytes;
    }
  }
  Task core = reduceSharded(comm, std::move(job));
  co_await core;
}

Task reduce(
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int root) {
  const size_t bytes = count * dtypeBytes(reduction.dtype);
  TopologyUse use = TopologyUse::kIgnore;
  Task choosing = chooseByTopology(comm, CollectiveKind::kReduce, bytes, use);
  co_await choosing;
  Task chosen;
  if (use == TopologyUse::kHierarchy) {
    chosen = hierarchicalReduce(
        comm.topology()->root(),
        comm,
        data,
        count,
        reduction,
        root,
        hierarchyTuningFor(*comm.topology()));
  } else {
    chosen = reduceWith(
        use == TopologyUse::kOneRound
            ? ReduceAlgorithm::kDirect
            : chooseReduce(comm.size(), bytes, costModelFor(comm.topology())),
        comm,
        data,
        count,
        reduction,
        root,
        tuningFor(comm.size() - 1, comm.topology()));
  }
  co_await chosen;
}

} // namespace resilient
