#include "collectives/hierarchical.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/concurrent.h"
#include "collectives/hierarchy_plan.h"
#include "collectives/hierarchy_run.h"

namespace resilient {
namespace {

// The operation as the folds see it: division and scaling are apart.
// AVG must not divide at each level, and PREMUL_SUM must scale each input once.
Reduction plainSum(Reduction reduction) {
  if (reduction.op == ReduceOp::kAvg || reduction.op == ReduceOp::kPreMulSum) {
    reduction.op = ReduceOp::kSum;
  }
  return reduction;
}

void setReduction(HierarchyJob& job, const Reduction& reduction, int ranks) {
  job.elementBytes = dtypeBytes(reduction.dtype);
  job.reduction = plainSum(reduction);
  if (reduction.op == ReduceOp::kAvg) {
    job.divisor = static_cast<size_t>(ranks);
  }
}

size_t chunkCountOf(const HierarchyTuning& tuning, size_t elementBytes) {
  return std::max<size_t>(tuning.chunkBytes / elementBytes, 1);
}

// The elements of each of the `blocks` blocks of one chunk.
// A chunk holds a slice of every block, so the slices shrink as the group
// grows, down to kHierarchySliceBytesMin. With more blocks than that allows, a
// chunk is larger than chunkBytes.
size_t sliceCountOf(
    const HierarchyTuning& tuning,
    size_t elementBytes,
    size_t blocks) {
  const size_t bytes =
      std::max(tuning.chunkBytes / blocks, kHierarchySliceBytesMin);
  return std::max<size_t>(std::min(bytes, tuning.chunkBytes) / elementBytes, 1);
}

} // namespace

Task chooseByTopology(
    Communicator& comm,
    CollectiveKind kind,
    size_t bytes,
    TopologyUse& use) {
  use = TopologyUse::kIgnore;
  if (comm.size() == 1) {
    co_return;
  }
  if (comm.topology() == nullptr) {
    Transfer learning;
    comm.startLearning(learning);
    co_await learning;
  }
  use = chooseTopologyUse(*comm.topology(), kind, bytes);
}

HierarchyTuning hierarchyTuningFor(const Topology& topology) {
  HierarchyTuning tuning;
  tuning.lanes = topology.hasSites() ? kHierarchyLanesBetweenSites
                                     : kHierarchyLanesBetweenHosts;
  return tuning;
}

// Rounds: 2 at each level but the highest, where it is 1 if exchangeAtTop,
// else 2. Bytes over the border of each of s places: (s-1) times the data if
// exchangeAtTop, else 2(s-1)/s; both are the data once for s = 2.
//
// The exchanges run forward through all levels, then backward through those
// that leave other ranks without the result. An exchange of kEverybody leaves
// it with all who take part, so the highest level then has no backward step.
Task hierarchicalAllReduce(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    bool exchangeAtTop,
    HierarchyTuning tuning) {
  requireReduction("all_reduce", reduction);
  if (reduction.op == ReduceOp::kPreMulSum) {
    ComputeBudget budget; // the data is ours to scale
    Task scaling = scaleSliced(comm, budget, data, data, count, reduction);
    co_await scaling;
  }
  HierarchyJob job;
  setReduction(job, reduction, comm.size());
  job.blocks = {{data, data, count}};
  job.plan = [&root, rank = comm.rank(), exchangeAtTop](
                 const std::vector<size_t>& counts) {
    return planAllReduce(root, rank, counts[0], exchangeAtTop);
  };
  job.chunkCount = chunkCountOf(tuning, job.elementBytes);
  job.forward = root.height();
  job.backwardBegin = exchangeAtTop ? job.forward - 1 : job.forward;
  job.exchangeAtTop = exchangeAtTop;
  job.lanes = tuning.lanes;
  Task core = runHierarchy(comm, std::move(job));
  co_await core;
}

// Rounds: 1 at each level and 1 to the destination. Bytes over the border of
// each place but the destination's: the data once.
//
// The exchanges run forward through all levels. Then only the level beyond the
// root runs backward, from the owners of the shares to the destination.
Task hierarchicalReduce(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t count,
    Reduction reduction,
    int destination,
    HierarchyTuning tuning) {
  requireReduction("reduce", reduction);
  require(
      destination >= 0 && destination < comm.size(),
      "reduce",
      "no such root rank");
  HierarchyJob job;
  setReduction(job, reduction, comm.size());
  job.scales = reduction.op == ReduceOp::kPreMulSum;
  job.blocks = {{data, comm.rank() == destination ? data : nullptr, count}};
  job.plan = [&root, rank = comm.rank(), destination](
                 const std::vector<size_t>& counts) {
    return planRooted(root, rank, counts[0], destination, false);
  };
  job.chunkCount = chunkCountOf(tuning, job.elementBytes);
  job.forward = root.height();
  job.backwardBegin = job.forward + 1;
  job.backwardEnd = job.forward;
  job.lanes = tuning.lanes;
  Task core = runHierarchy(comm, std::move(job));
  co_await core;
}

// Rounds: 1 at each level. Bytes over the border into each place: its ranks'
// parts once from each other place.
//
// The exchanges run forward only. The blocks stand in rankOrder(), so those of
// a place are adjacent and cross its border as one range.
Task hierarchicalReduceScatter(
    const Place& root,
    Communicator& comm,
    std::vector<const void*> inputs,
    std::vector<size_t> counts,
    void* output,
    Reduction reduction,
    HierarchyTuning tuning) {
  requireReduction("reduce_scatter", reduction);
  const size_t n = static_cast<size_t>(comm.size());
  require(
      inputs.size() == n && counts.size() == n,
      "reduce_scatter",
      "needs one input and one count per rank");
  HierarchyJob job;
  setReduction(job, reduction, comm.size());
  job.scales = reduction.op == ReduceOp::kPreMulSum;
  for (int r : rankOrder(root)) {
    const size_t i = static_cast<size_t>(r);
    job.blocks.push_back(
        {inputs[i], r == comm.rank() ? output : nullptr, counts[i]});
  }
  job.plan = [&root, rank = comm.rank()](const std::vector<size_t>& sizes) {
    return planScatter(root, rank, sizes);
  };
  job.chunkCount = sliceCountOf(tuning, job.elementBytes, n);
  job.forward = root.height();
  job.lanes = tuning.lanes;
  Task core = runHierarchy(comm, std::move(job));
  co_await core;
}

// Rounds: 1 at each level. Bytes over the border out of each place: its ranks'
// parts once to each other place.
//
// The exchanges of a reduce-scatter run backward only.
Task hierarchicalAllGather(
    const Place& root,
    Communicator& comm,
    const void* input,
    std::vector<void*> outputs,
    std::vector<size_t> bytes,
    HierarchyTuning tuning) {
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  require(
      outputs.size() == n && bytes.size() == n,
      "all_gather",
      "needs one output and one size per rank");
  HierarchyJob job;
  for (int r : rankOrder(root)) {
    const size_t i = static_cast<size_t>(r);
    job.blocks.push_back({i == me ? input : nullptr, outputs[i], bytes[i]});
  }
  job.plan = [&root, rank = comm.rank()](const std::vector<size_t>& sizes) {
    return planScatter(root, rank, sizes);
  };
  job.chunkCount = sliceCountOf(tuning, 1, n);
  job.backwardBegin = root.height();
  job.lanes = tuning.lanes;
  ComputeBudget budget;
  // Both only read the input.
  std::vector<Task> tasks;
  tasks.push_back(runHierarchy(comm, std::move(job)));
  tasks.push_back(copySliced(comm, budget, outputs[me], input, bytes[me]));
  Task both = concurrently(std::move(tasks));
  co_await both;
}

// Rounds: 1 from the source, 1 at each level. Bytes over the border into each
// place but the source's: the data once.
//
// The exchanges of a reduce to `source` run backward only. The source also
// takes part in lower levels, but already has the data: nothing is sent to it.
Task hierarchicalBroadcast(
    const Place& root,
    Communicator& comm,
    void* data,
    size_t bytes,
    int source,
    HierarchyTuning tuning) {
  require(
      source >= 0 && source < comm.size(), "broadcast", "no such root rank");
  HierarchyJob job;
  job.blocks = {{comm.rank() == source ? data : nullptr, data, bytes}};
  job.plan =
      [&root, rank = comm.rank(), source](const std::vector<size_t>& counts) {
        return planRooted(root, rank, counts[0], source, true);
      };
  job.chunkCount = chunkCountOf(tuning, 1);
  job.backwardBegin = root.height() + 1;
  job.complete = source;
  job.lanes = tuning.lanes;
  Task core = runHierarchy(comm, std::move(job));
  co_await core;
}

namespace {

// Tells all of `tell`, hears from all of `hear`. All messages are empty.
Task notify(
    Communicator& comm,
    uint64_t slot,
    std::vector<int> tell,
    std::vector<int> hear) {
  auto sends = std::make_unique<Transfer[]>(tell.size());
  auto recvs = std::make_unique<Transfer[]>(hear.size());
  for (size_t i = 0; i < hear.size(); ++i) {
    comm.startRecv(recvs[i], hear[i], slot, nullptr, 0);
  }
  for (size_t i = 0; i < tell.size(); ++i) {
    comm.startSend(sends[i], tell[i], slot, nullptr, 0);
  }
  for (size_t i = 0; i < hear.size(); ++i) {
    co_await finish(recvs[i]);
  }
  for (size_t i = 0; i < tell.size(); ++i) {
    co_await finish(sends[i]);
  }
}

// The lowest ranks of the groups in `place`, without `rank`.
std::vector<int> leadersOf(const Place& place, int rank) {
  std::vector<int> leaders;
  for (const Place& child : place.children) {
    if (child.ranks.front() != rank) {
      leaders.push_back(child.ranks.front());
    }
  }
  return leaders;
}

} // namespace

// Up: the lowest rank of each group hears from the lowest ranks of the groups
// in it; at the top these tell each other. Then down again. Rounds: 2 at each
// level but the highest, where it is 1.
//
// `path` holds the places that contain this rank. The rank leads those at its
// end where it is the lowest rank; `led` is the first of them and moves up as
// reports arrive. It never becomes less than 1: the children of the root have
// no leader above them, and their lowest ranks meet. Afterwards `led` moves
// down the same places and releases them.
Task hierarchicalBarrier(const Place& root, Communicator& comm) {
  constexpr unsigned kReport = 1; // slot phases
  constexpr unsigned kRelease = 2;
  constexpr unsigned kMeeting = 3;
  const int rank = comm.rank();
  std::vector<const Place*> path; // from the root to the lowest group
  for (const Place* place = &root; !place->single();
       place = &place->children[place->childOf(rank)]) {
    path.push_back(place);
  }
  size_t led = path.size(); // this rank leads path[led] and those after it
  for (; led > 1 && path[led - 1]->ranks.front() == rank; --led) {
    const Place& place = *path[led - 1];
    Task gathering = notify(
        comm, slotOf(kReport, place.height()), {}, leadersOf(place, rank));
    co_await gathering;
  }
  const Place& place = *path[led - 1];
  if (led == 1) {
    const std::vector<int> others = leadersOf(place, rank);
    Task meeting =
        notify(comm, slotOf(kMeeting, place.height()), others, others);
    co_await meeting;
  } else {
    const std::vector<int> leader = {place.ranks.front()};
    Task reporting = notify(comm, slotOf(kReport, place.height()), leader, {});
    co_await reporting;
    Task waiting = notify(comm, slotOf(kRelease, place.height()), {}, leader);
    co_await waiting;
  }
  for (; led < path.size(); ++led) {
    const Place& below = *path[led];
    Task releasing = notify(
        comm, slotOf(kRelease, below.height()), leadersOf(below, rank), {});
    co_await releasing;
  }
}

} // namespace resilient
