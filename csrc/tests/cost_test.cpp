#include "collectives/cost.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "collectives/algorithms.h"
#include "tests/check.h"
#include "tests/loopback_communicator.h"

namespace resilient {
namespace {

using test::expectAllOk;
using test::LoopbackNetwork;
using Bytes = std::vector<unsigned char>;

// The formula's bytes and messages are those that are sent.
TEST(collectives_cost_what_the_formula_says) {
  const size_t bytes = 48 * 1024; // divisible by all numbers of ranks below
  for (int ranks : {2, 3, 4, 6, 8}) {
    const auto busiest = [&](const LoopbackNetwork::Body& body, Cost cost) {
      const auto outcome =
          LoopbackNetwork::run({.ranks = ranks, .seed = 7}, body);
      expectAllOk(outcome);
      const auto max = [](const std::vector<uint64_t>& v) {
        return *std::max_element(v.begin(), v.end());
      };
      CHECK_EQ(static_cast<double>(max(outcome.messagesSent)), cost.messages);
      return static_cast<double>(max(outcome.bytesSent));
    };
    std::vector<Bytes> data(static_cast<size_t>(ranks), Bytes(bytes));
    const auto mine = [&](Communicator& comm) {
      return data[static_cast<size_t>(comm.rank())].data();
    };
    const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
    for (AllReduceAlgorithm a :
         {AllReduceAlgorithm::kFlat,
          AllReduceAlgorithm::kRecursiveDoubling,
          AllReduceAlgorithm::kDirect,
          AllReduceAlgorithm::kRing}) {
      if (a == AllReduceAlgorithm::kRecursiveDoubling &&
          !std::has_single_bit(static_cast<unsigned>(ranks))) {
        continue; // the formula counts a critical path, not one rank
      }
      const Cost cost = allReduceCost(a, ranks, bytes);
      CHECK_EQ(
          busiest(
              [&](Communicator& comm) {
                return allReduceWith(
                    a, comm, mine(comm), bytes / 4, sum, Tuning());
              },
              cost),
          cost.bytes);
    }
    for (BroadcastAlgorithm a :
         {BroadcastAlgorithm::kFlat, BroadcastAlgorithm::kTree}) {
      const Cost cost = broadcastCost(a, ranks, bytes);
      CHECK_EQ(
          busiest(
              [&](Communicator& comm) {
                return broadcastWith(a, comm, mine(comm), bytes, 0, Tuning());
              },
              cost),
          cost.bytes);
    }
    // The pipelined ones send the data once; the formula adds the time in
    // which the pipeline fills.
    for (BroadcastAlgorithm a :
         {BroadcastAlgorithm::kSpread, BroadcastAlgorithm::kChain}) {
      const auto outcome = LoopbackNetwork::run(
          {.ranks = ranks, .seed = 7}, [&](Communicator& comm) {
            return broadcastWith(a, comm, mine(comm), bytes, 0, Tuning());
          });
      expectAllOk(outcome);
      CHECK_EQ(
          *std::max_element(outcome.bytesSent.begin(), outcome.bytesSent.end()),
          bytes);
      CHECK(broadcastCost(a, ranks, bytes).bytes >= double(bytes));
    }
    for (BarrierAlgorithm a :
         {BarrierAlgorithm::kFlat, BarrierAlgorithm::kDissemination}) {
      CHECK_EQ(
          busiest(
              [&](Communicator& comm) { return barrierWith(a, comm); },
              barrierCost(a, ranks)),
          0.0);
    }
  }
}

TEST(collectives_choice_follows_size_and_ranks) {
  const CostModel lan;
  using A = AllReduceAlgorithm;
  CHECK(chooseAllReduce(4, 64, lan) == A::kFlat);
  CHECK(chooseAllReduce(64, 64, lan) == A::kRecursiveDoubling);
  CHECK(chooseAllReduce(8, 64u << 20, lan) == A::kDirect);
  CHECK(chooseAllReduce(32, 256u << 20, lan) == A::kRing);
  // A slow, distant link: bytes and rounds weigh more, never the ring's
  // many rounds for little data.
  const CostModel wan{20e-3, 1 / 1e8, 1 / 8e9};
  CHECK(chooseAllReduce(8, 1u << 20, wan) == A::kDirect);
  CHECK(chooseAllReduce(8, 1000, wan) == A::kFlat);
  CHECK(chooseBroadcast(8, 64u << 20, lan) == BroadcastAlgorithm::kSpread);
  CHECK(chooseBroadcast(3, 8, lan) == BroadcastAlgorithm::kFlat);
  CHECK(chooseReduce(2, 1u << 16, lan) == ReduceAlgorithm::kDirect);
  CHECK(chooseReduce(8, 64u << 20, lan) == ReduceAlgorithm::kScatterGather);
  CHECK(chooseAllGather(8, 64u << 20, lan) == AllGatherAlgorithm::kDirect);
  CHECK(chooseAllGather(32, 256u << 20, lan) == AllGatherAlgorithm::kRing);
  CHECK(chooseBarrier(4, lan) == BarrierAlgorithm::kFlat);
  CHECK(chooseBarrier(1000, lan) == BarrierAlgorithm::kDissemination);
  for (int ranks : {2, 9, 64, 1000}) {
    const Tuning tuning = tuningFor(ranks - 1, nullptr);
    CHECK(tuning.segmentBytes % 16 == 0);
    CHECK(tuning.segmentBytes >= kSegmentBytesMin);
    CHECK(tuning.segmentBytes <= kSegmentBytes);
  }
}

// Its first use would open a connection for each pair of ranks.
TEST(collectives_of_many_ranks_are_never_flat) {
  for (int ranks : {kFlatRanksMax + 1, 96, 1000}) {
    // Latency high enough to prefer one round at any price.
    for (const double latencyS : {30e-6, 1.0}) {
      const CostModel model{latencyS, 1 / 1e9, 1 / 8e9};
      CHECK(chooseBarrier(ranks, model) != BarrierAlgorithm::kFlat);
      for (size_t bytes = 1; bytes < (1u << 22); bytes *= 4) {
        CHECK(
            chooseAllReduce(ranks, bytes, model) != AllReduceAlgorithm::kFlat);
        CHECK(
            chooseBroadcast(ranks, bytes, model) != BroadcastAlgorithm::kFlat);
      }
    }
  }
  const auto topology = [](int ranks) {
    std::vector<std::string> sites;
    std::vector<int> hosts;
    for (int r = 0; r < ranks; ++r) {
      sites.push_back(r % 2 == 0 ? "east" : "west");
      hosts.push_back(r);
    }
    return Topology(sites, hosts, AlgorithmChoice::kAuto);
  };
  for (const auto kind :
       {CollectiveKind::kAllReduce,
        CollectiveKind::kBroadcast,
        CollectiveKind::kBarrier}) {
    CHECK(
        chooseTopologyUse(topology(kFlatRanksMax), kind, 8) ==
        TopologyUse::kOneRound);
    CHECK(
        chooseTopologyUse(topology(kFlatRanksMax + 1), kind, 8) ==
        TopologyUse::kHierarchy);
  }
}

TEST(collectives_use_places_where_it_pays) {
  using Kind = CollectiveKind;
  const auto make = [](std::vector<std::string> sites,
                       std::vector<int> hosts,
                       AlgorithmChoice choice = AlgorithmChoice::kAuto) {
    return Topology(std::move(sites), std::move(hosts), choice);
  };
  const std::vector<std::string> two = {"a", "a", "b", "b"};
  const std::vector<int> hosts = {0, 1, 2, 3};
  const Topology sites = make(two, hosts);
  for (Kind kind :
       {Kind::kAllReduce,
        Kind::kReduce,
        Kind::kReduceScatter,
        Kind::kAllGather,
        Kind::kBroadcast}) {
    CHECK(chooseTopologyUse(sites, kind, 8) == TopologyUse::kOneRound);
    CHECK(chooseTopologyUse(sites, kind, 64u << 20) == TopologyUse::kHierarchy);
    // Once it pays, it pays for more.
    bool pays = false;
    for (size_t bytes = 1; bytes < (size_t{1} << 34); bytes *= 2) {
      const bool now =
          chooseTopologyUse(sites, kind, bytes) == TopologyUse::kHierarchy;
      CHECK(now || !pays);
      pays = now;
    }
    CHECK(chooseTopologyUse(sites, kind, 0) == TopologyUse::kIgnore);
    // Nothing to share: one host, one rank for each site or host.
    for (const Topology& none :
         {Topology(4),
          make({"a", "b", "c", "d"}, hosts),
          make(std::vector<std::string>(4), hosts),
          make(two, hosts, AlgorithmChoice::kFlat)}) {
      CHECK(chooseTopologyUse(none, kind, 64u << 20) == TopologyUse::kIgnore);
    }
    const Topology always = make(two, hosts, AlgorithmChoice::kHierarchical);
    CHECK(chooseTopologyUse(always, kind, 8) == TopologyUse::kHierarchy);
  }
  const Topology onHosts = make(std::vector<std::string>(4), {0, 0, 1, 1});
  CHECK(
      chooseTopologyUse(onHosts, Kind::kAllReduce, 64u << 20) ==
      TopologyUse::kHierarchy);
  CHECK(chooseTopologyUse(sites, Kind::kBarrier, 0) == TopologyUse::kOneRound);
  // Two places exchange whole shares, several only a little.
  CHECK(exchangesAtTop(sites, size_t{1} << 30));
  const Topology three =
      make({"a", "a", "b", "b", "c"}, std::vector<int>{0, 1, 2, 3, 4});
  CHECK(exchangesAtTop(three, 1000));
  CHECK(!exchangesAtTop(three, 64u << 20));
}

// Two ranks, whose sites were found by their distance or declared.
Topology twoSites(double roundTripS) {
  return Topology({"a", "b"}, {0, 1}, AlgorithmChoice::kAuto, roundTripS);
}

TEST(cost_of_a_flat_algorithm_knows_the_distance_of_sites) {
  using A = AllReduceAlgorithm;
  const Topology far = twoSites(40e-3);
  CHECK_EQ(costModelFor(&far).latencyS, 20e-3);
  const Topology declared = twoSites(0);
  CHECK_EQ(costModelFor(&declared).latencyS, kBetweenSites.latencyS);
  // One round, which sends the same bytes.
  for (const size_t bytes : {8u, 1u << 20, 4u << 20}) {
    CHECK(chooseAllReduce(2, bytes, costModelFor(&far)) == A::kFlat);
  }
  CHECK(chooseAllReduce(2, 4u << 20, costModelFor(nullptr)) == A::kDirect);
  const auto useOf = [](const Topology& topology, size_t bytes) {
    return chooseTopologyUse(topology, CollectiveKind::kAllReduce, bytes);
  };
  CHECK(useOf(far, 4u << 20) == TopologyUse::kIgnore);
  CHECK(useOf(far, 64u << 20) == TopologyUse::kHierarchy);
  CHECK(exchangesAtTop(far, 64u << 20));
  const Topology hosts({"", ""}, {0, 1}, AlgorithmChoice::kAuto);
  CHECK_EQ(costModelFor(&hosts).latencyS, kBetweenHosts.latencyS);
  const Topology oneHost({"", ""}, {0, 0}, AlgorithmChoice::kAuto);
  CHECK_EQ(costModelFor(&oneHost).latencyS, CostModel().latencyS);
  CHECK(useOf(hosts, 64u << 20) == TopologyUse::kIgnore);
  const Topology flat({"a", "b"}, {0, 1}, AlgorithmChoice::kFlat);
  CHECK(useOf(flat, 64u << 20) == TopologyUse::kIgnore);
  CHECK_EQ(costModelFor(&flat).latencyS, CostModel().latencyS);
}

TEST(cost_segments_under_way_fill_a_long_link) {
  for (const double roundTripS : {5e-3, 10e-3, 40e-3}) {
    const Topology sites = twoSites(roundTripS);
    const Tuning tuning = tuningFor(1, &sites);
    CHECK(
        static_cast<double>(tuning.window * tuning.segmentBytes) >=
        roundTripS * kFastestSiteBytesPerS);
  }
  for (const int peers : {1, 3, 15, 100}) {
    const Topology sites = twoSites(300e-3);
    const Tuning tuning = tuningFor(peers, &sites);
    CHECK(tuning.window >= kSegmentWindow);
    CHECK(
        static_cast<size_t>(peers) * tuning.window * tuning.segmentBytes <=
        kHierarchyScratchBytesMax);
  }
}

} // namespace
} // namespace resilient
