#pragma once

#include <cstddef>

#include "collectives/collectives.h"
#include "operation/topology.h"

namespace resilient {

// The costs by which an algorithm is chosen. The model must be equal on all
// ranks; otherwise they choose different algorithms.
struct CostModel {
  double latencyS = 30e-6; // one message, one way
  double secondsPerByte = 1 / 2e9; // on the wire
  double reduceSecondsPerByte = 1 / 8e9;
};

// The time an algorithm takes, as far as the choice between algorithms needs
// to know it:
//
//   T = rounds * latency + bytes * secondsPerByte
//       + reducedBytes * reduceSecondsPerByte + messages * kMessageSeconds
//
// all for the busiest rank. rounds: messages that must follow one another.
// bytes: what that rank sends (it receives as much at the same time).
// reducedBytes: operand bytes it reduces after the first operand. messages:
// those it sends. Every rank must come to the same choice, so nothing enters
// but sizes, the group's size and the CostModel, which must be equal on all
// ranks.
struct Cost {
  double rounds = 0;
  double bytes = 0;
  double reducedBytes = 0;
  double messages = 0;

  double seconds(const CostModel& model) const;
};

// The work of one message on the sending and the receiving thread. Too low
// favours many small messages; too high favours trees and rings.
inline constexpr double kMessageSeconds = 2e-6;

// Above this many ranks, the peers of a direct exchange overflow a rank's
// receive queues (incast). Its bytes then count for more, and rings take over
// for large sizes. Too low costs latency.
inline constexpr int kDirectRanksMax = 16;
inline constexpr double kIncastFactor = 1.25;

// In a flat algorithm every rank sends to every other, so its first use opens
// a connection for each pair. Above this many ranks that costs more than the
// rounds it saves: with 96 ranks on 2 cores, 16 bytes took 1.8 s the first
// time and 94 ms in a barrier, against 0.2 s and 17 ms without.
inline constexpr int kFlatRanksMax = 16;

// Algorithms that do not cut data into segments receive whole operands into
// scratch memory; this is its limit in bytes. Higher only costs memory: beyond
// it the segmented algorithms win anyway.
inline constexpr size_t kUnsegmentedScratchBytesMax = 4u << 20;

// Scratch memory of a segmented reduction, in bytes: (n-1) peers * window *
// segment. Lower makes segments smaller, hence messages more.
inline constexpr size_t kSegmentScratchBytesMax = 32u << 20;

// The unit of pipelining, in bytes: long enough that kMessageSeconds and a
// round trip within a site do not count (512 KiB at 2 GB/s is 260 us), short
// enough that the first and last segment, which overlap with nothing, do not
// count either and that a segment stays in the second-level cache.
inline constexpr size_t kSegmentBytes = 512u << 10;
inline constexpr size_t kSegmentBytesMin = 16u << 10;

// Segments under way at a time, per peer: one is reduced while others travel.
inline constexpr size_t kSegmentWindow = 4;
// Between sites, as many as are on the wire at this rate, or the sender waits
// for acknowledgements. More only cost memory, up to
// kHierarchyScratchBytesMax.
inline constexpr double kFastestSiteBytesPerS = 1.25e9;

// The unit of pipelining between the levels of a hierarchy, in bytes of one
// rank's data: long enough that the share of one rank in four is a segment,
// short enough that the first and the last chunk, which overlap with nothing,
// take little of the time of 64 MiB between two sites.
inline constexpr size_t kHierarchyChunkBytes = 2u << 20;
// The minimum of one rank's part in a chunk, for a reduce-scatter or all-gather
// of many ranks.
inline constexpr size_t kHierarchySliceBytesMin = 64u << 10;
// Chunks under way at a time. Between sites, 48 MiB: at 10 Gbit/s and 40 ms
// that much is on the wire. Between hosts, few: chunks under way should stay in
// the cache, and 24 took twice as long as 4 on loopback.
inline constexpr size_t kHierarchyLanesBetweenSites = 24;
inline constexpr size_t kHierarchyLanesBetweenHosts = 4;
// Scratch memory of all chunks under way: with two sites a chunk needs about
// its own size.
inline constexpr size_t kHierarchyScratchBytesMax = 64u << 20;

// How an algorithm cuts its data.
struct Tuning {
  size_t segmentBytes = kSegmentBytes; // a multiple of 16 unless in tests
  size_t window = kSegmentWindow; // >= 1
};

// The tuning for an algorithm where every rank receives from `peers` others at
// a time. Segments shrink as the number grows, to keep the scratch memory
// within kSegmentScratchBytesMax, down to kSegmentBytesMin: beyond 512 ranks
// the memory grows with the group. Null: nothing is known of the places.
Tuning tuningFor(int peers, const Topology* topology);

enum class AllReduceAlgorithm { kFlat, kRecursiveDoubling, kDirect, kRing };
enum class ReduceAlgorithm { kDirect, kScatterGather };
enum class BroadcastAlgorithm { kFlat, kTree, kSpread, kChain };
enum class AllGatherAlgorithm { kDirect, kRing };
enum class BarrierAlgorithm { kFlat, kDissemination };

// The cost of each algorithm, without regard to what is allowed at this size.
// `bytes`: of one rank's data, unless said otherwise. The test
// collectives_cost_what_the_formula_says compares those of all_reduce,
// broadcast and barrier with the messages that are sent.
Cost allReduceCost(AllReduceAlgorithm algorithm, int ranks, size_t bytes);
Cost reduceCost(ReduceAlgorithm algorithm, int ranks, size_t bytes);
Cost broadcastCost(BroadcastAlgorithm algorithm, int ranks, size_t bytes);
// `bytes`: of all ranks together.
Cost allGatherCost(AllGatherAlgorithm algorithm, int ranks, size_t bytes);
Cost barrierCost(BarrierAlgorithm algorithm, int ranks);

// The cheapest algorithm that is allowed for this many ranks and bytes. The
// same arguments give the same answer on every rank.
AllReduceAlgorithm chooseAllReduce(int ranks, size_t bytes, CostModel model);
ReduceAlgorithm chooseReduce(int ranks, size_t bytes, CostModel model);
BroadcastAlgorithm chooseBroadcast(int ranks, size_t bytes, CostModel model);
AllGatherAlgorithm chooseAllGather(int ranks, size_t bytes, CostModel model);
BarrierAlgorithm chooseBarrier(int ranks, CostModel model);

// Messages between two places. The figures must be the same on all ranks, so
// they are assumed, not measured; only the choice at small sizes hangs on them.
struct LinkModel {
  double latencyS;
  double secondsPerByte; // between a place and the others, all ranks together
};
inline constexpr LinkModel kBetweenSites{20e-3, 1 / 125e6};
inline constexpr LinkModel kBetweenHosts{100e-6, 1 / 1.25e9};
inline constexpr LinkModel kWithinHost{30e-6, 1 / 2e9};

// Between the children of the root. The latency of inferred sites is known: it
// was published once and is the same on all ranks.
LinkModel topLink(const Topology& topology);

// The model for an algorithm that regards no places. Null: nothing is known, as
// for a single rank.
CostModel costModelFor(const Topology* topology);

enum class CollectiveKind {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kBarrier
};

// How a collective uses the topology. With places apart, only two kinds of
// algorithm can be best: for little data, one round where every rank sends all
// to every other; else the hierarchy.
enum class TopologyUse { kIgnore, kOneRound, kHierarchy };

// `bytes`: of one rank's data; for reduce-scatter and all-gather of the parts
// of all ranks together.
TopologyUse
chooseTopologyUse(const Topology& topology, CollectiveKind kind, size_t bytes);

// The hierarchical all-reduce sends shares whole between the children of the
// root, rather than in two steps.
bool exchangesAtTop(const Topology& topology, size_t bytes);

// ceil(log2(ranks)): 0 for 1 rank.
int logRounds(int ranks);

} // namespace resilient
