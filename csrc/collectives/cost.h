#pragma once

#include <cstddef>

#include "collectives/collectives.h"

namespace resilient {

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

// Above this many ranks each rank of a direct exchange talks to so many peers
// at once that receive queues overflow (incast); its bytes then count for
// more, and rings take over for large sizes. Too low costs latency.
inline constexpr int kDirectRanksMax = 16;
inline constexpr double kIncastFactor = 1.25;

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

// How an algorithm cuts its data.
struct Tuning {
  size_t segmentBytes = kSegmentBytes; // a multiple of 16 unless in tests
  size_t window = kSegmentWindow; // >= 1
};

// The tuning for a reduction in which every rank receives from n-1 peers.
Tuning tuningForFanIn(int ranks);

enum class AllReduceAlgorithm { kFlat, kRecursiveDoubling, kDirect, kRing };
enum class ReduceAlgorithm { kDirect, kScatterGather };
enum class BroadcastAlgorithm { kFlat, kTree, kSpread, kChain };
enum class AllGatherAlgorithm { kDirect, kRing };
enum class BarrierAlgorithm { kFlat, kDissemination };

Cost allReduceCost(AllReduceAlgorithm algorithm, int ranks, size_t bytes);
Cost reduceCost(ReduceAlgorithm algorithm, int ranks, size_t bytes);
Cost broadcastCost(BroadcastAlgorithm algorithm, int ranks, size_t bytes);
// `bytes`: of all ranks together.
Cost allGatherCost(AllGatherAlgorithm algorithm, int ranks, size_t bytes);
Cost barrierCost(BarrierAlgorithm algorithm, int ranks);

AllReduceAlgorithm chooseAllReduce(int ranks, size_t bytes, CostModel model);
ReduceAlgorithm chooseReduce(int ranks, size_t bytes, CostModel model);
BroadcastAlgorithm chooseBroadcast(int ranks, size_t bytes, CostModel model);
AllGatherAlgorithm chooseAllGather(int ranks, size_t bytes, CostModel model);
BarrierAlgorithm chooseBarrier(int ranks, CostModel model);

// ceil(log2(ranks)): 0 for 1 rank.
int logRounds(int ranks);

} // namespace resilient
