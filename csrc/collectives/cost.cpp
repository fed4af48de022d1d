#include "collectives/cost.h"

#include <algorithm>
#include <bit>
#include <initializer_list>

namespace resilient {
namespace {

double segmentsOf(double bytes) {
  const double segments = bytes / static_cast<double>(kSegmentBytes);
  return segments < 1 ? 1 : segments;
}

double incast(int ranks) {
  return ranks > kDirectRanksMax ? kIncastFactor : 1;
}

// The first of the cheapest: candidates come in order of preference.
template <typename Algorithm, typename CostOf>
Algorithm cheapest(
    std::initializer_list<Algorithm> candidates,
    CostOf costOf,
    const CostModel& model) {
  Algorithm best = *candidates.begin();
  double bestSeconds = costOf(best).seconds(model);
  for (Algorithm candidate : candidates) {
    const double seconds = costOf(candidate).seconds(model);
    if (seconds < bestSeconds) {
      best = candidate;
      bestSeconds = seconds;
    }
  }
  return best;
}

} // namespace

double Cost::seconds(const CostModel& model) const {
  return rounds * model.latencyS + bytes * model.secondsPerByte +
      reducedBytes * model.reduceSecondsPerByte + messages * kMessageSeconds;
}

int logRounds(int ranks) {
  return ranks <= 1
      ? 0
      : static_cast<int>(std::bit_width(static_cast<unsigned>(ranks - 1)));
}

Tuning tuningFor(int peers, const Topology* topology) {
  Tuning tuning;
  const size_t n = static_cast<size_t>(std::max(peers, 1));
  size_t scratch = kSegmentScratchBytesMax;
  if (topology != nullptr && topology->hasSites()) {
    scratch = kHierarchyScratchBytesMax;
    const double onTheWire =
        2 * topLink(*topology).latencyS * kFastestSiteBytesPerS;
    tuning.window = std::clamp(
        static_cast<size_t>(onTheWire) / kSegmentBytes + 1,
        kSegmentWindow,
        std::max(scratch / (n * kSegmentBytes), kSegmentWindow));
  }
  size_t segment = scratch / (n * tuning.window);
  segment -= segment % 4096;
  tuning.segmentBytes = std::clamp(segment, kSegmentBytesMin, kSegmentBytes);
  return tuning;
}

Cost allReduceCost(AllReduceAlgorithm algorithm, int ranks, size_t bytes) {
  const double n = ranks;
  const double size = static_cast<double>(bytes);
  const double shards = (n - 1) / n * size;
  switch (algorithm) {
    case AllReduceAlgorithm::kFlat:
      return {1, (n - 1) * size, (n - 1) * size, n - 1};
    case AllReduceAlgorithm::kRecursiveDoubling: {
      const bool folded = !std::has_single_bit(static_cast<unsigned>(ranks));
      const double exchanges = std::bit_width(static_cast<unsigned>(ranks)) - 1;
      const double rounds = exchanges + (folded ? 2 : 0);
      const double reductions = exchanges + (folded ? 1 : 0);
      return {rounds, rounds * size, reductions * size, rounds};
    }
    case AllReduceAlgorithm::kDirect:
      return {
          2,
          2 * shards * incast(ranks),
          shards,
          2 * (n - 1) * segmentsOf(size / n)};
    case AllReduceAlgorithm::kRing:
      return {
          2 * (n - 1), 2 * shards, shards, 2 * (n - 1) * segmentsOf(size / n)};
  }
  return {};
}

Cost reduceCost(ReduceAlgorithm algorithm, int ranks, size_t bytes) {
  const double n = ranks;
  const double size = static_cast<double>(bytes);
  switch (algorithm) {
    case ReduceAlgorithm::kDirect: // the root's incoming bytes
      return {
          1,
          (n - 1) * size * incast(ranks),
          (n - 1) * size,
          (n - 1) * segmentsOf(size)};
    case ReduceAlgorithm::kScatterGather: {
      const double shards = (n - 1) / n * size;
      return {
          2,
          2 * shards * incast(ranks),
          shards,
          2 * (n - 1) * segmentsOf(size / n)};
    }
  }
  return {};
}

Cost broadcastCost(BroadcastAlgorithm algorithm, int ranks, size_t bytes) {
  const double n = ranks;
  const double size = static_cast<double>(bytes);
  const double segment = std::min(size, static_cast<double>(kSegmentBytes));
  switch (algorithm) {
    case BroadcastAlgorithm::kFlat:
      return {1, (n - 1) * size, 0, n - 1};
    case BroadcastAlgorithm::kTree: {
      const double rounds = logRounds(ranks);
      return {rounds, rounds * size, 0, rounds};
    }
    case BroadcastAlgorithm::kSpread: {
      if (ranks < 3) {
        return broadcastCost(BroadcastAlgorithm::kFlat, ranks, bytes);
      }
      // The last segment is forwarded after the root has sent all.
      const double shard = size / (n - 1);
      return {
          2,
          size * incast(ranks) + std::min(segment, shard) * (n - 2),
          0,
          (n - 1) * segmentsOf(shard)};
    }
    case BroadcastAlgorithm::kChain:
      return {n - 1, size + (n - 2) * segment, 0, segmentsOf(size) + n - 2};
  }
  return {};
}

Cost allGatherCost(AllGatherAlgorithm algorithm, int ranks, size_t bytes) {
  const double n = ranks;
  const double size = (n - 1) / n * static_cast<double>(bytes);
  switch (algorithm) {
    case AllGatherAlgorithm::kDirect:
      return {1, size * incast(ranks), 0, n - 1};
    case AllGatherAlgorithm::kRing:
      return {
          n - 1, size, 0, (n - 1) * segmentsOf(static_cast<double>(bytes) / n)};
  }
  return {};
}

Cost barrierCost(BarrierAlgorithm algorithm, int ranks) {
  switch (algorithm) {
    case BarrierAlgorithm::kFlat:
      return {1, 0, 0, static_cast<double>(ranks - 1)};
    case BarrierAlgorithm::kDissemination: {
      const double rounds = logRounds(ranks);
      return {rounds, 0, 0, rounds};
    }
  }
  return {};
}

AllReduceAlgorithm chooseAllReduce(int ranks, size_t bytes, CostModel model) {
  using A = AllReduceAlgorithm;
  const auto costOf = [&](A a) { return allReduceCost(a, ranks, bytes); };
  const size_t peers = ranks > 1 ? static_cast<size_t>(ranks - 1) : 1;
  if (ranks <= kFlatRanksMax && bytes <= kUnsegmentedScratchBytesMax / peers) {
    return cheapest(
        {A::kFlat, A::kRecursiveDoubling, A::kDirect, A::kRing}, costOf, model);
  }
  if (bytes <= kUnsegmentedScratchBytesMax) {
    return cheapest(
        {A::kRecursiveDoubling, A::kDirect, A::kRing}, costOf, model);
  }
  return cheapest({A::kDirect, A::kRing}, costOf, model);
}

ReduceAlgorithm chooseReduce(int ranks, size_t bytes, CostModel model) {
  using A = ReduceAlgorithm;
  const auto costOf = [&](A a) { return reduceCost(a, ranks, bytes); };
  return cheapest({A::kDirect, A::kScatterGather}, costOf, model);
}

BroadcastAlgorithm chooseBroadcast(int ranks, size_t bytes, CostModel model) {
  using A = BroadcastAlgorithm;
  const auto costOf = [&](A a) { return broadcastCost(a, ranks, bytes); };
  if (ranks > kFlatRanksMax) {
    return cheapest({A::kTree, A::kSpread, A::kChain}, costOf, model);
  }
  return cheapest({A::kFlat, A::kTree, A::kSpread, A::kChain}, costOf, model);
}

AllGatherAlgorithm chooseAllGather(int ranks, size_t bytes, CostModel model) {
  using A = AllGatherAlgorithm;
  const auto costOf = [&](A a) { return allGatherCost(a, ranks, bytes); };
  return cheapest({A::kDirect, A::kRing}, costOf, model);
}

BarrierAlgorithm chooseBarrier(int ranks, CostModel model) {
  using A = BarrierAlgorithm;
  const auto costOf = [&](A a) { return barrierCost(a, ranks); };
  if (ranks > kFlatRanksMax) {
    return A::kDissemination;
  }
  return cheapest({A::kFlat, A::kDissemination}, costOf, model);
}

LinkModel topLink(const Topology& topology) {
  if (!topology.hasSites()) {
    return kBetweenHosts;
  }
  LinkModel link = kBetweenSites;
  if (topology.siteRoundTripS() > 0) {
    link.latencyS = topology.siteRoundTripS() / 2;
  }
  return link;
}

CostModel costModelFor(const Topology* topology) {
  CostModel model;
  if (topology != nullptr && topology->choice() != AlgorithmChoice::kFlat &&
      topology->hasHosts()) {
    const LinkModel link = topLink(*topology);
    model.latencyS = link.latencyS;
    model.secondsPerByte = link.secondsPerByte;
  }
  return model;
}

namespace {

// The time of the hierarchical all-reduce at the top level alone.
// Exchanging whole shares costs one latency less. Between two places it sends
// no more bytes than the two steps; with more places it does.
double
topAllReduceSeconds(const Topology& topology, double bytes, bool exchange) {
  const LinkModel link = topLink(topology);
  const double places = static_cast<double>(topology.root().children.size());
  return exchange ? link.latencyS + (places - 1) * bytes * link.secondsPerByte
                  : 2 * link.latencyS +
          2 * (places - 1) / places * bytes * link.secondsPerByte;
}

} // namespace

bool exchangesAtTop(const Topology& topology, size_t bytes) {
  const double size = static_cast<double>(bytes);
  return topAllReduceSeconds(topology, size, true) <=
      topAllReduceSeconds(topology, size, false);
}

// Compares two estimates: of one round where every rank sends all of its data
// to every other, and of the hierarchy. The time of either is latency, plus the
// bytes that cross the border of the busiest place, plus local work and the
// cost of each message. The switch has the bytes of each kind of collective;
// the rest is the same for all. The one round is only for few ranks and, in an
// all-reduce, for data that fits the scratch memory.
TopologyUse
chooseTopologyUse(const Topology& topology, CollectiveKind kind, size_t bytes) {
  if (topology.choice() == AlgorithmChoice::kFlat ||
      (bytes == 0 && kind != CollectiveKind::kBarrier)) {
    return TopologyUse::kIgnore;
  }
  if (!topology.hasLevels()) {
    // Between two ranks, the exchange at the top is the flat algorithm in
    // chunks: one round for data of any size.
    const bool exchanges = kind == CollectiveKind::kAllReduce &&
        topology.hasSites() && topology.size() == 2 &&
        bytes > kUnsegmentedScratchBytesMax;
    return exchanges ? TopologyUse::kHierarchy : TopologyUse::kIgnore;
  }
  if (topology.choice() == AlgorithmChoice::kHierarchical) {
    return TopologyUse::kHierarchy;
  }
  const double n = topology.size();
  const double size = static_cast<double>(bytes);
  const Place& root = topology.root();
  const double places = static_cast<double>(root.children.size());
  double largest = 0;
  double smallest = n;
  double crossing = 0; // pairs of a rank of one place and a rank elsewhere
  double parts = 0; // that cross once, the mean of both directions
  for (const Place& child : root.children) {
    const double m = static_cast<double>(child.ranks.size());
    largest = std::max(largest, m);
    smallest = std::min(smallest, m);
    crossing = std::max(crossing, m * (n - m));
    parts = std::max(parts, ((places - 1) * m + (n - m)) / 2);
  }
  const LinkModel top = topLink(topology);
  const LinkModel& lower = topology.hasSites() ? kBetweenHosts : kWithinHost;
  const double reduceSeconds = CostModel().reduceSecondsPerByte;

  double flatBytes = 0; // over the border of the busiest place
  double flatReduced = 0;
  double topSeconds = 0; // of the hierarchy
  double passes = 2; // of all data, at each lower level
  double reduced = 0;
  switch (kind) {
    case CollectiveKind::kAllReduce:
      flatBytes = crossing * size;
      flatReduced = (n - 1) * size;
      topSeconds =
          topAllReduceSeconds(topology, size, exchangesAtTop(topology, bytes));
      reduced = 2 * size;
      break;
    case CollectiveKind::kReduce:
    case CollectiveKind::kBroadcast:
      flatBytes = (n - smallest) * size;
      flatReduced = kind == CollectiveKind::kReduce ? (n - 1) * size : 0;
      topSeconds = top.latencyS + (places - 1) * size * top.secondsPerByte;
      reduced = kind == CollectiveKind::kReduce ? 2 * size : 0;
      break;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllGather:
      flatBytes = crossing * size / n;
      topSeconds = top.latencyS + parts * size / n * top.secondsPerByte;
      passes = 1;
      break;
    case CollectiveKind::kBarrier:
      topSeconds = top.latencyS;
      break;
  }
  const double levels = static_cast<double>(topology.height() - 1);
  const double oneRound = top.latencyS + flatBytes * top.secondsPerByte +
      flatReduced * reduceSeconds + (n - 1) * kMessageSeconds;
  const double hierarchy = topSeconds +
      levels * passes * (lower.latencyS + size * lower.secondsPerByte) +
      reduced * reduceSeconds +
      (levels * passes * (largest - 1) + places - 1) * kMessageSeconds;
  const bool fits = n <= kFlatRanksMax &&
      (kind != CollectiveKind::kAllReduce ||
       (n - 1) * size <= static_cast<double>(kUnsegmentedScratchBytesMax));
  return fits && oneRound <= hierarchy ? TopologyUse::kOneRound
                                       : TopologyUse::kHierarchy;
}

} // namespace resilient
