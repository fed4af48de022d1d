#include "collectives/hierarchical.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "collectives/concurrent.h"
#include "collectives/hierarchy_plan.h"
#include "collectives/reduce.h"
#include "collectives/sharded_reduction.h"
#include "tests/check.h"
#include "tests/loopback_communicator.h"

namespace resilient {
namespace {

using test::expectAllOk;
using test::LoopbackNetwork;
using Bytes = std::vector<unsigned char>;

const DType kAllTypes[] = {
#define X(name, bytes, text) DType::name,
    RESILIENT_DTYPES(X)
#undef X
};
const ReduceOp kAllOps[] = {
#define X(name, text) ReduceOp::name,
    RESILIENT_REDUCE_OPS(X)
#undef X
};

// "aab" are two ranks at site a, then one at site b; hosts likewise.
Topology make(
    const std::string& sites,
    const std::string& hosts,
    AlgorithmChoice choice = AlgorithmChoice::kAuto) {
  std::vector<std::string> names;
  std::vector<int> numbers;
  for (size_t r = 0; r < sites.size(); ++r) {
    names.push_back(sites.substr(r, 1));
    numbers.push_back(hosts[r]);
  }
  return Topology(names, numbers, choice);
}

// Two sites of two; uneven; interleaved; three sites; a site of one rank; one
// rank for each site; hosts only; hosts within sites, uneven, too.
struct Shape {
  std::string sites, hosts;
};
const Shape kShapes[] = {
    {"aabb", "1234"},
    {"aaab", "1234"},
    {"abab", "1234"},
    {"abba", "1212"},
    {"aabbb", "12345"},
    {"abcabca", "1234567"},
    {"abc", "123"},
    {"aabbc", "11223"},
    {"aaaa", "1122"},
    {"aaaaa", "11212"},
    {"aaaabbbb", "11223344"},
    {"aaaaabbbb", "111223334"},
    {"abababab", "12341234"},
    {"aaabbbccc", "112334566"},
};

Topology randomTopology(Prng& random) {
  if (random.chance(0.5)) {
    const Shape& shape = kShapes[random.below(std::size(kShapes))];
    return make(shape.sites, shape.hosts);
  }
  const size_t ranks = 2 + random.below(8);
  const uint64_t sites = 1 + random.below(4);
  const uint64_t hosts = 1 + random.below(5);
  std::string siteText, hostText;
  for (size_t r = 0; r < ranks; ++r) {
    siteText += static_cast<char>('a' + random.below(sites));
    hostText += static_cast<char>('1' + random.below(hosts));
  }
  return make(siteText, hostText);
}

HierarchyTuning randomTuning(Prng& random) {
  const size_t chunks[] = {16, 100, 1000, 1 << 20};
  HierarchyTuning tuning;
  tuning.chunkBytes = chunks[random.below(std::size(chunks))];
  tuning.lanes = 1 + random.below(5);
  return tuning;
}

size_t randomCount(Prng& random) {
  const size_t counts[] = {1, 2, 3, 7, 64, 300};
  return counts[random.below(std::size(counts))];
}

Bytes randomBytes(Prng& random, size_t bytes) {
  Bytes data(bytes);
  for (unsigned char& x : data) {
    x = static_cast<unsigned char>(random.next());
  }
  return data;
}

// A reduction and its dumb twin, which folds whole vectors, place by place.
struct Case {
  size_t ranks, count;
  Reduction reduction;
  std::vector<Bytes> inputs; // by rank
  std::vector<double> factors;

  Case(Prng& random, size_t n, size_t elements, DType dtype, ReduceOp op)
      : ranks(n), count(elements), reduction{dtype, op, 1} {
    for (size_t r = 0; r < n; ++r) {
      inputs.push_back(randomBytes(random, count * dtypeBytes(dtype)));
      factors.push_back(random.uniform() * 4 - 2);
    }
  }
  Reduction of(int rank) const {
    Reduction r = reduction;
    r.factor = factors[static_cast<size_t>(rank)];
    return r;
  }
  Bytes fold(const Place& place) const {
    if (place.single()) {
      const size_t r = static_cast<size_t>(place.ranks.front());
      Bytes value = inputs[r];
      if (reduction.op == ReduceOp::kPreMulSum) {
        scaleOut(
            value.data(), value.data(), count, reduction.dtype, factors[r]);
      }
      return value;
    }
    Bytes sum = fold(place.children.front());
    for (size_t c = 1; c < place.children.size(); ++c) {
      const Bytes next = fold(place.children[c]);
      reduceInto(sum.data(), next.data(), count, reduction.dtype, reduction.op);
    }
    return sum;
  }
  Bytes expected(const Topology& topology) const {
    Bytes result = fold(topology.root());
    if (reduction.op == ReduceOp::kAvg) {
      divideBy(result.data(), count, reduction.dtype, ranks);
    }
    return result;
  }
};

void randomReduction(Prng& random, DType& dtype, ReduceOp& op) {
  do {
    dtype = kAllTypes[random.below(std::size(kAllTypes))];
    op = kAllOps[random.below(std::size(kAllOps))];
  } while (!reductionSupported(dtype, op, nullptr));
}

Case randomCase(Prng& random, const Topology& topology) {
  DType dtype;
  ReduceOp op;
  randomReduction(random, dtype, op);
  return Case(
      random,
      static_cast<size_t>(topology.size()),
      randomCount(random),
      dtype,
      op);
}

// One buffer of each rank, filled and taken by a device.
std::vector<LoopbackNetwork::Staged>
staged(std::vector<Bytes>& data, bool input, bool result) {
  std::vector<LoopbackNetwork::Staged> all;
  for (size_t r = 0; r < data.size(); ++r) {
    all.push_back(
        {static_cast<int>(r), data[r].data(), data[r].size(), input, result});
  }
  return all;
}

std::vector<Bytes> allReduced(
    const Topology& topology,
    const Case& c,
    bool exchangeAtTop,
    HierarchyTuning tuning,
    uint64_t seed) {
  std::vector<Bytes> data = c.inputs;
  const auto outcome = LoopbackNetwork::run(
      {.ranks = topology.size(),
       .seed = seed,
       .staged = seed % 2 == 0 ? staged(data, true, true)
                               : std::vector<LoopbackNetwork::Staged>()},
      [&](Communicator& comm) {
        return hierarchicalAllReduce(
            topology.root(),
            comm,
            data[static_cast<size_t>(comm.rank())].data(),
            c.count,
            c.of(comm.rank()),
            exchangeAtTop,
            tuning);
      });
  expectAllOk(outcome);
  if (seed % 2 == 0) {
    // All of it leaves before the end.
    CHECK_EQ(
        outcome.finalBytes,
        static_cast<uint64_t>(topology.size()) * data[0].size());
  }
  return data;
}

// Bytes that the ranks of one site or host send out of it, by child of the
// root.
std::vector<uint64_t> bytesOut(
    const Topology& topology,
    const LoopbackNetwork::Outcome& outcome) {
  std::vector<uint64_t> out;
  for (const Place& place : topology.root().children) {
    uint64_t bytes = 0;
    for (int from : place.ranks) {
      for (int to = 0; to < topology.size(); ++to) {
        if (!place.contains(to)) {
          bytes +=
              outcome
                  .bytesTo[static_cast<size_t>(from)][static_cast<size_t>(to)];
        }
      }
    }
    out.push_back(bytes);
  }
  return out;
}

// What one rank sends out of, and receives into, its site or host.
std::pair<uint64_t, uint64_t> crossing(
    const Topology& topology,
    const LoopbackNetwork::Outcome& outcome,
    int rank) {
  const Place& home = topology.root().children[topology.root().childOf(rank)];
  uint64_t out = 0;
  uint64_t in = 0;
  const size_t me = static_cast<size_t>(rank);
  for (size_t other = 0; other < outcome.bytesTo.size(); ++other) {
    if (!home.contains(static_cast<int>(other))) {
      out += outcome.bytesTo[me][other];
      in += outcome.bytesTo[other][me];
    }
  }
  return {out, in};
}

void checkWithin(uint64_t bytes, double bound, double factor) {
  if (static_cast<double>(bytes) > bound * factor) {
    throw test::Failure(
        std::to_string(bytes) + " bytes cross, the bound is " +
        std::to_string(bound));
  }
}

} // namespace

TEST(topology_groups_by_site_then_host) {
  const auto text = [](const Topology& topology) {
    std::string s;
    const auto write = [&s](const auto& self, const Place& place) -> void {
      if (place.single()) {
        s += std::to_string(place.ranks.front());
        return;
      }
      s += '(';
      for (const Place& child : place.children) {
        self(self, child);
      }
      s += ')';
    };
    write(write, topology.root());
    return s;
  };
  CHECK_EQ(text(make("aabb", "1234")), "((01)(23))");
  CHECK_EQ(text(make("abab", "1234")), "((02)(13))");
  CHECK_EQ(text(make("aaab", "1234")), "((012)3)");
  CHECK_EQ(text(make("aaaa", "1111")), "(0123)");
  CHECK_EQ(text(make("aaaa", "1234")), "(0123)");
  CHECK_EQ(text(make("aaaa", "1212")), "((02)(13))");
  CHECK_EQ(text(make("aaaab", "11221")), "(((01)(23))4)");
  CHECK_EQ(text(make("abc", "111")), "(012)");
  CHECK(make("aab", "123").hasSites());
  CHECK(make("aab", "123").hasLevels());
  CHECK(!make("abc", "123").hasLevels());
  CHECK(!make("aaa", "112").hasSites());
  CHECK(make("aaa", "112").hasLevels());
  CHECK(!Topology(4).hasLevels());
  CHECK_EQ(make("aaaab", "11221").height(), 3);
  CHECK_EQ(
      rankOrder(make("abab", "1234").root()), (std::vector<int>{0, 2, 1, 3}));
}

TEST(hierarchical_all_reduce_every_type_operation_and_shape) {
  test::forSeeds(1, [](uint64_t seed) {
    Prng random(seed);
    size_t turn = 0;
    for (DType dtype : kAllTypes) {
      for (ReduceOp op : kAllOps) {
        if (!reductionSupported(dtype, op, nullptr)) {
          continue;
        }
        for (bool exchangeAtTop : {false, true}) {
          const Shape& shape = kShapes[turn++ % std::size(kShapes)];
          const Topology topology = make(shape.sites, shape.hosts);
          const Case c(
              random, shape.sites.size(), randomCount(random), dtype, op);
          const Bytes expected = c.expected(topology);
          for (const Bytes& result : allReduced(
                   topology,
                   c,
                   exchangeAtTop,
                   randomTuning(random),
                   random.next())) {
            CHECK(result == expected);
          }
        }
      }
    }
  });
}

// The order of the operands is that of the places, whatever the chunks, the
// lanes and the network do.
TEST(hierarchical_all_reduce_random_networks) {
  test::forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const Case c = randomCase(random, topology);
    const Bytes expected = c.expected(topology);
    for (bool exchangeAtTop : {false, true}) {
      for (const Bytes& result : allReduced(
               topology,
               c,
               exchangeAtTop,
               randomTuning(random),
               random.next())) {
        CHECK(result == expected);
      }
    }
  });
}

TEST(hierarchical_reduce_leaves_other_ranks_alone) {
  test::forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const Case c = randomCase(random, topology);
    const int root = static_cast<int>(random.below(c.ranks));
    const HierarchyTuning tuning = randomTuning(random);
    std::vector<Bytes> data = c.inputs;
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = topology.size(), .seed = seed}, [&](Communicator& comm) {
              return hierarchicalReduce(
                  topology.root(),
                  comm,
                  data[static_cast<size_t>(comm.rank())].data(),
                  c.count,
                  c.of(comm.rank()),
                  root,
                  tuning);
            }));
    for (size_t r = 0; r < c.ranks; ++r) {
      CHECK(
          data[r] ==
          (static_cast<int>(r) == root ? c.expected(topology) : c.inputs[r]));
    }
  });
}

TEST(hierarchical_reduce_scatter_uneven_and_in_place) {
  test::forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const size_t n = static_cast<size_t>(topology.size());
    DType dtype;
    ReduceOp op;
    randomReduction(random, dtype, op);
    const bool even = random.chance(0.5);
    const size_t same = randomCount(random);
    std::vector<Case> parts; // by destination
    std::vector<size_t> counts;
    for (size_t d = 0; d < n; ++d) {
      counts.push_back(even ? same : random.below(40));
      parts.push_back(Case(random, n, counts[d], dtype, op));
      parts[d].factors = parts[0].factors;
    }
    std::vector<std::vector<Bytes>> inputs(n); // by rank, by destination
    std::vector<Bytes> outputs;
    for (size_t r = 0; r < n; ++r) {
      for (size_t d = 0; d < n; ++d) {
        inputs[r].push_back(parts[d].inputs[r]);
      }
      outputs.push_back(Bytes(inputs[r][r].size()));
    }
    const std::vector<std::vector<Bytes>> before = inputs;
    const bool inPlace = random.chance(0.5);
    const HierarchyTuning tuning = randomTuning(random);
    std::vector<LoopbackNetwork::Staged> memory;
    for (size_t r = 0; r < n && seed % 2 == 0; ++r) {
      for (size_t d = 0; d < n; ++d) {
        Bytes& in = inputs[r][d];
        memory.push_back(
            {static_cast<int>(r),
             in.data(),
             in.size(),
             true,
             inPlace && r == d});
      }
      memory.push_back(
          {static_cast<int>(r),
           outputs[r].data(),
           outputs[r].size(),
           false,
           true});
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = topology.size(), .seed = seed, .staged = memory},
            [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<const void*> in;
              for (const Bytes& b : inputs[me]) {
                in.push_back(b.data());
              }
              return hierarchicalReduceScatter(
                  topology.root(),
                  comm,
                  in,
                  counts,
                  inPlace ? inputs[me][me].data() : outputs[me].data(),
                  parts[0].of(comm.rank()),
                  tuning);
            }));
    for (size_t r = 0; r < n; ++r) {
      CHECK(
          (inPlace ? inputs[r][r] : outputs[r]) == parts[r].expected(topology));
      for (size_t d = 0; d < n; ++d) {
        CHECK((inPlace && d == r) || inputs[r][d] == before[r][d]);
      }
    }
  });
}

TEST(hierarchical_all_gather_uneven_and_in_place) {
  test::forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const size_t n = static_cast<size_t>(topology.size());
    const bool even = random.chance(0.5);
    const size_t same = randomCount(random);
    std::vector<Bytes> parts;
    std::vector<Bytes> blank;
    std::vector<size_t> sizes;
    for (size_t r = 0; r < n; ++r) {
      sizes.push_back(even ? same : random.below(200));
      parts.push_back(randomBytes(random, sizes[r]));
      blank.push_back(Bytes(sizes[r], 0x55));
    }
    std::vector<std::vector<Bytes>> outputs(n, blank);
    const bool inPlace = random.chance(0.5);
    for (size_t r = 0; inPlace && r < n; ++r) {
      outputs[r][r] = parts[r];
    }
    const HierarchyTuning tuning = randomTuning(random);
    std::vector<LoopbackNetwork::Staged> memory;
    for (size_t r = 0; r < n && seed % 2 == 0; ++r) {
      for (size_t d = 0; d < n; ++d) {
        Bytes& out = outputs[r][d];
        const bool own = inPlace && r == d;
        memory.push_back(
            {static_cast<int>(r), out.data(), out.size(), own, true});
      }
      memory.push_back(
          {static_cast<int>(r), parts[r].data(), sizes[r], true, false});
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = topology.size(), .seed = seed, .staged = memory},
            [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<void*> out;
              for (Bytes& b : outputs[me]) {
                out.push_back(b.data());
              }
              return hierarchicalAllGather(
                  topology.root(),
                  comm,
                  inPlace ? outputs[me][me].data() : parts[me].data(),
                  out,
                  sizes,
                  tuning);
            }));
    for (size_t r = 0; r < n; ++r) {
      CHECK(outputs[r] == parts);
    }
  });
}

TEST(hierarchical_broadcast_from_every_rank) {
  test::forSeeds(100, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const size_t n = static_cast<size_t>(topology.size());
    const size_t bytes = randomCount(random);
    for (size_t root = 0; root < n; ++root) {
      std::vector<Bytes> data(n, Bytes(bytes, 0x55));
      const Bytes expected = data[root] = randomBytes(random, bytes);
      const HierarchyTuning tuning = randomTuning(random);
      auto memory = staged(data, false, true);
      memory[root].input = true;
      memory[root].result = false;
      expectAllOk(
          LoopbackNetwork::run(
              {.ranks = topology.size(),
               .seed = random.next(),
               .staged = memory},
              [&](Communicator& comm) {
                return hierarchicalBroadcast(
                    topology.root(),
                    comm,
                    data[static_cast<size_t>(comm.rank())].data(),
                    bytes,
                    static_cast<int>(root),
                    tuning);
              }));
      for (const Bytes& result : data) {
        CHECK(result == expected);
      }
    }
  });
}

// No rank leaves before the last has come.
TEST(hierarchical_barrier_holds_everyone_back) {
  test::forSeeds(100, [](uint64_t seed) {
    Prng random(seed);
    const Topology topology = randomTopology(random);
    const auto body = [&](Communicator& comm) {
      return hierarchicalBarrier(topology.root(), comm);
    };
    expectAllOk(
        LoopbackNetwork::run({.ranks = topology.size(), .seed = seed}, body));
    const int late =
        static_cast<int>(random.below(static_cast<uint64_t>(topology.size())));
    const auto outcome = LoopbackNetwork::run(
        {.ranks = topology.size(),
         .seed = seed,
         .absent = {late},
         .deadline = true},
        body);
    for (const Status& status : outcome.status) {
      CHECK(!status.ok());
    }
  });
}

// Over a cut between two places, each side needs all of the other's sum: n
// bytes each way are the least for an all-reduce of n bytes.
TEST(hierarchical_bytes_over_the_cut_are_the_least) {
  const size_t count = 100003;
  const double bytes = static_cast<double>(count) * 4;
  const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
  HierarchyTuning tuning;
  tuning.chunkBytes = 64 << 10;
  for (const Shape& shape : kShapes) {
    const Topology topology = make(shape.sites, shape.hosts);
    const Place& root = topology.root();
    const size_t n = shape.sites.size();
    const double places = static_cast<double>(root.children.size());
    std::vector<Bytes> data(n, Bytes(count * 4));
    const auto mine = [&](Communicator& comm) {
      return data[static_cast<size_t>(comm.rank())].data();
    };
    const auto run = [&](const LoopbackNetwork::Body& body) {
      auto outcome =
          LoopbackNetwork::run({.ranks = topology.size(), .seed = 5}, body);
      expectAllOk(outcome);
      return outcome;
    };

    for (bool exchangeAtTop : {false, true}) {
      if (exchangeAtTop && root.children.size() > 2) {
        continue; // for little data only
      }
      const auto outcome = run([&](Communicator& comm) {
        return hierarchicalAllReduce(
            root, comm, mine(comm), count, sum, exchangeAtTop, tuning);
      });
      for (uint64_t out : bytesOut(topology, outcome)) {
        checkWithin(out, 2 * (places - 1) / places * bytes, 1.02);
      }
      // All members of a place cross, each with its share, both ways.
      for (int r = 0; r < topology.size(); ++r) {
        const Place* home = &root.children[root.childOf(r)];
        double share = 2 * (places - 1) / places * bytes;
        while (!home->single()) {
          share /= static_cast<double>(home->children.size());
          home = &home->children[home->childOf(r)];
        }
        const auto [out, in] = crossing(topology, outcome, r);
        checkWithin(out, share, 1.02);
        checkWithin(in, share, 1.02);
      }
    }

    std::vector<std::vector<Bytes>> blocks(
        n, std::vector<Bytes>(n, Bytes(count / n * 4)));
    const double block = static_cast<double>(count / n * 4);
    const auto scattered = run([&](Communicator& comm) {
      std::vector<const void*> in;
      for (const Bytes& b : blocks[static_cast<size_t>(comm.rank())]) {
        in.push_back(b.data());
      }
      return hierarchicalReduceScatter(
          root,
          comm,
          in,
          std::vector<size_t>(n, count / n),
          mine(comm),
          sum,
          tuning);
    });
    const auto gathered = run([&](Communicator& comm) {
      std::vector<void*> out;
      for (Bytes& b : blocks[static_cast<size_t>(comm.rank())]) {
        out.push_back(b.data());
      }
      return hierarchicalAllGather(
          root,
          comm,
          mine(comm),
          out,
          std::vector<size_t>(n, count / n * 4),
          tuning);
    });
    for (size_t p = 0; p < root.children.size(); ++p) {
      const double members = static_cast<double>(root.children[p].ranks.size());
      // To the others, what they are to have; to each other, what we have.
      checkWithin(
          bytesOut(topology, scattered)[p],
          (static_cast<double>(n) - members) * block,
          1.0);
      checkWithin(
          bytesOut(topology, gathered)[p], (places - 1) * members * block, 1.0);
      const double share = (places - 1) * block;
      for (int r : root.children[p].ranks) {
        checkWithin(crossing(topology, gathered, r).first, share, 1.0);
        checkWithin(crossing(topology, scattered, r).second, share, 1.0);
      }
    }

    for (int at = 0; topology.hasLevels() && at < topology.size(); ++at) {
      const size_t home = root.childOf(at);
      const auto reduced = run([&](Communicator& comm) {
        return hierarchicalReduce(
            root, comm, mine(comm), count, sum, at, tuning);
      });
      const auto spread = run([&](Communicator& comm) {
        return hierarchicalBroadcast(
            root, comm, mine(comm), count * 4, at, tuning);
      });
      for (size_t p = 0; p < root.children.size(); ++p) {
        checkWithin(bytesOut(topology, reduced)[p], p == home ? 0 : bytes, 1.0);
        checkWithin(
            bytesOut(topology, spread)[p],
            p == home ? (places - 1) * bytes : 0,
            1.0);
      }
      // From all hands to all hands, unless there is only one on that side.
      for (int r : root.children[home].ranks) {
        bool alone = false;
        for (const Place& child : root.children[home].children) {
          alone = alone || !child.single();
        }
        if (!alone) {
          const double hands =
              static_cast<double>(root.children[home].ranks.size());
          checkWithin(
              crossing(topology, spread, r).first,
              (places - 1) * bytes / hands,
              1.02);
        }
      }
    }
  }
}

TEST(hierarchical_unwinds_from_every_failure) {
  test::forSeeds(1, [](uint64_t seed) {
    const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
    const size_t count = 13;
    for (const Shape& shape :
         {Shape{"aabb", "1234"},
          Shape{"aab", "123"},
          Shape{"abcab", "12312"},
          Shape{"aaabb", "11233"}}) {
      const Topology topology = make(shape.sites, shape.hosts);
      const Place& root = topology.root();
      const size_t n = shape.sites.size();
      for (int kind = 0; kind < 7; ++kind) {
        const uint64_t networkSeed = seed * 100 + static_cast<uint64_t>(kind);
        int64_t events = 1;
        for (int64_t failAt = -1; failAt < events; ++failAt) {
          Prng random(networkSeed);
          std::vector<Bytes> data(n);
          std::vector<std::vector<Bytes>> blocks(n);
          for (size_t r = 0; r < n; ++r) {
            data[r] = randomBytes(random, count * 4);
            for (size_t p = 0; p < n; ++p) {
              blocks[r].push_back(randomBytes(random, count * 4));
            }
          }
          const HierarchyTuning tuning{20, 2};
          const auto outcome = LoopbackNetwork::run(
              {.ranks = topology.size(), .seed = networkSeed, .failAt = failAt},
              [&](Communicator& comm) {
                const size_t me = static_cast<size_t>(comm.rank());
                void* mine = data[me].data();
                std::vector<const void*> in;
                std::vector<void*> out;
                for (Bytes& b : blocks[me]) {
                  in.push_back(b.data());
                  out.push_back(b.data());
                }
                switch (kind) {
                  case 0:
                  case 1:
                    return hierarchicalAllReduce(
                        root, comm, mine, count, sum, kind == 0, tuning);
                  case 2:
                    return hierarchicalReduce(
                        root, comm, mine, count, sum, 1, tuning);
                  case 3:
                    return hierarchicalReduceScatter(
                        root,
                        comm,
                        in,
                        std::vector<size_t>(n, count),
                        mine,
                        {DType::kFloat32, ReduceOp::kPreMulSum, 0.5},
                        tuning);
                  case 4:
                    return hierarchicalAllGather(
                        root,
                        comm,
                        mine,
                        out,
                        std::vector<size_t>(n, count * 4),
                        tuning);
                  case 5:
                    return hierarchicalBroadcast(
                        root, comm, mine, count * 4, 2, tuning);
                  default:
                    return hierarchicalBarrier(root, comm);
                }
              });
          if (failAt < 0) {
            expectAllOk(outcome);
            events = outcome.events;
            CHECK(events > 0);
            continue;
          }
          CHECK(outcome.failedRank >= 0);
          CHECK_CONTAINS(
              outcome.status[static_cast<size_t>(outcome.failedRank)]
                  .toString(),
              "injected failure");
        }
      }
    }
  });
}

// What the others wait for may never come.
TEST(concurrently_ends_with_the_first_error) {
  for (bool atOnce : {false, true}) {
    const auto waits = [](Communicator& comm, uint64_t slot) -> Task {
      Transfer never;
      unsigned char byte = 0;
      comm.startRecv(never, 1, slot, &byte, 1);
      co_await never;
    };
    const auto fails = [](Communicator& comm, bool first) -> Task {
      Transfer turn;
      if (!first) {
        comm.startYield(turn);
        co_await turn;
      }
      throw StatusError(Status(StatusCode::kMismatch, "as planned"));
    };
    const auto ends = [](Communicator&) -> Task { co_return; };
    const auto outcome = LoopbackNetwork::run(
        {.ranks = 2, .seed = 1, .absent = {1}}, [&](Communicator& comm) {
          std::vector<Task> tasks;
          tasks.push_back(ends(comm));
          tasks.push_back(waits(comm, 1));
          tasks.push_back(fails(comm, atOnce));
          tasks.push_back(waits(comm, 2));
          return concurrently(std::move(tasks));
        });
    CHECK_EQ(outcome.status[0].message(), std::string("as planned"));
  }
  expectAllOk(LoopbackNetwork::run({.ranks = 1, .seed = 1}, [](Communicator&) {
    return concurrently({});
  }));
}

// The public entry points ask for the topology and follow it; a group that is
// told to be flat gives the bits of one without a topology.
TEST(collectives_follow_the_topology) {
  test::forSeeds(60, [](uint64_t seed) {
    Prng random(seed);
    const Shape& shape = kShapes[random.below(std::size(kShapes))];
    const size_t counts[] = {0, 1, 1000, 100003};
    const size_t n = shape.sites.size();
    const Case c(
        random,
        n,
        counts[random.below(std::size(counts))],
        DType::kFloat32,
        ReduceOp::kSum);
    const auto reduced = [&](const Topology* topology) {
      std::vector<Bytes> data = c.inputs;
      expectAllOk(
          LoopbackNetwork::run(
              {.ranks = static_cast<int>(n),
               .seed = random.next(),
               .topology = topology},
              [&](Communicator& comm) {
                return allReduce(
                    comm,
                    data[static_cast<size_t>(comm.rank())].data(),
                    c.count,
                    c.of(comm.rank()));
              }));
      for (const Bytes& result : data) {
        CHECK(result == data[0]);
      }
      return data[0];
    };
    const Bytes unknown = reduced(nullptr);
    const Topology flat =
        make(shape.sites, shape.hosts, AlgorithmChoice::kFlat);
    CHECK(reduced(&flat) == unknown);
    const Topology levels =
        make(shape.sites, shape.hosts, AlgorithmChoice::kHierarchical);
    CHECK(
        reduced(&levels) ==
        (levels.hasLevels() && c.count > 0 ? c.expected(levels) : unknown));
    const Topology chosen = make(shape.sites, shape.hosts);
    const TopologyUse use =
        chooseTopologyUse(chosen, CollectiveKind::kAllReduce, c.count * 4);
    CHECK(
        use == TopologyUse::kOneRound ||
        reduced(&chosen) ==
            (use == TopologyUse::kHierarchy ? c.expected(chosen) : unknown));
  });
}

// More would share the numbers of messages with the next chunk.
TEST(hierarchy_plan_refuses_more_exchanges_than_an_index_holds) {
  constexpr int kHosts = 513;
  constexpr int kRanks = kHosts * 8;
  std::vector<int> hosts(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    hosts[static_cast<size_t>(rank)] = rank / 8;
  }
  const Topology topology(
      std::vector<std::string>(kRanks), hosts, AlgorithmChoice::kAuto);
  CHECK_THROWS(
      StatusError,
      "more than a million exchanges",
      planScatter(topology.root(), 0, std::vector<size_t>(kRanks, 1)));
}

} // namespace resilient
