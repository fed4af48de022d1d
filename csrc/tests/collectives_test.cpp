#include "collectives/collectives.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "collectives/algorithms.h"
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
const AllReduceAlgorithm kAllReduces[] = {
    AllReduceAlgorithm::kFlat,
    AllReduceAlgorithm::kRecursiveDoubling,
    AllReduceAlgorithm::kDirect,
    AllReduceAlgorithm::kRing};
const BroadcastAlgorithm kBroadcasts[] = {
    BroadcastAlgorithm::kFlat,
    BroadcastAlgorithm::kTree,
    BroadcastAlgorithm::kSpread,
    BroadcastAlgorithm::kChain};
const size_t kCounts[] = {0, 1, 2, 3, 7, 64, 1000};

Bytes randomBytes(Prng& random, size_t bytes) {
  Bytes data(bytes);
  for (unsigned char& x : data) {
    x = static_cast<unsigned char>(random.next());
  }
  return data;
}

void* address(Bytes& b) {
  return b.data();
}

// Small segments make small data take every road of the pipelines.
Tuning randomTuning(Prng& random) {
  const size_t segments[] = {16, 48, 256, 4096, kSegmentBytes};
  Tuning tuning;
  tuning.segmentBytes = segments[random.below(std::size(segments))];
  tuning.window = 1 + random.below(5);
  return tuning;
}

size_t randomCount(Prng& random, const Tuning& tuning) {
  if (tuning.segmentBytes >= 4096 && random.chance(0.03)) {
    return 100003;
  }
  return kCounts[random.below(std::size(kCounts))];
}

// The dumb twins. Each folds whole vectors in the order that the algorithm
// promises; data may be any bits, NaN included.

struct Case {
  int ranks = 1;
  size_t count = 0;
  Reduction reduction;
  std::vector<Bytes> inputs; // by rank
  std::vector<double> factors;

  size_t size() const {
    return dtypeBytes(reduction.dtype);
  }
  Reduction of(int rank) const {
    Reduction r = reduction;
    r.factor = factors[static_cast<size_t>(rank)];
    return r;
  }
  // The inputs as they enter the sum.
  std::vector<Bytes> scaled() const {
    std::vector<Bytes> result = inputs;
    if (reduction.op == ReduceOp::kPreMulSum) {
      for (size_t r = 0; r < result.size(); ++r) {
        scaleOut(
            result[r].data(),
            inputs[r].data(),
            count,
            reduction.dtype,
            factors[r]);
      }
    }
    return result;
  }
  Bytes combined(const Bytes& a, const Bytes& b) const {
    Bytes out(a.size());
    reduceOut(
        out.data(), a.data(), b.data(), count, reduction.dtype, reduction.op);
    return out;
  }
  Bytes averaged(Bytes x) const {
    if (reduction.op == ReduceOp::kAvg && ranks > 1) {
      divideBy(x.data(), count, reduction.dtype, static_cast<uint64_t>(ranks));
    }
    return x;
  }
  Bytes leftFold(size_t first) const {
    const std::vector<Bytes> in = scaled();
    Bytes sum = in[first];
    for (size_t i = 1; i < in.size(); ++i) {
      sum = combined(sum, in[(first + i) % in.size()]);
    }
    return averaged(sum);
  }
  // Pairs of neighbouring blocks, after the excess over a power of two has
  // been folded into the first ranks.
  Bytes treeFold() const {
    std::vector<Bytes> blocks = scaled();
    const size_t excess = blocks.size() - std::bit_floor(blocks.size());
    std::vector<Bytes> folded;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (i < 2 * excess) {
        folded.push_back(combined(blocks[i], blocks[i + 1]));
        ++i;
      } else {
        folded.push_back(blocks[i]);
      }
    }
    while (folded.size() > 1) {
      std::vector<Bytes> half;
      for (size_t i = 0; i < folded.size(); i += 2) {
        half.push_back(combined(folded[i], folded[i + 1]));
      }
      folded = half;
    }
    return averaged(folded[0]);
  }
  // Shard c starts at rank c.
  Bytes ringFold() const {
    Bytes result(inputs[0].size());
    size_t offset = 0;
    const std::vector<size_t> counts = shardCounts(count, ranks);
    for (size_t c = 0; c < counts.size(); ++c) {
      const Bytes folded = leftFold(c);
      const size_t bytes = counts[c] * size();
      std::copy_n(
          folded.begin() + static_cast<long>(offset),
          bytes,
          result.begin() + static_cast<long>(offset));
      offset += bytes;
    }
    return result;
  }
  Bytes allReduced(AllReduceAlgorithm algorithm) const {
    switch (algorithm) {
      case AllReduceAlgorithm::kRecursiveDoubling:
        return treeFold();
      case AllReduceAlgorithm::kRing:
        return ranks == 1 ? leftFold(0) : ringFold();
      default:
        return leftFold(0);
    }
  }
};

Case makeCase(Prng& random, int ranks, size_t count, DType dtype, ReduceOp op) {
  Case c;
  c.ranks = ranks;
  c.count = count;
  c.reduction = {dtype, op, 1};
  for (int r = 0; r < ranks; ++r) {
    c.inputs.push_back(randomBytes(random, count * dtypeBytes(dtype)));
    c.factors.push_back(random.uniform() * 4 - 2);
  }
  return c;
}

// A random type and operation that go together.
void randomReduction(Prng& random, DType& dtype, ReduceOp& op) {
  do {
    dtype = kAllTypes[random.below(std::size(kAllTypes))];
    op = kAllOps[random.below(std::size(kAllOps))];
  } while (!reductionSupported(dtype, op, nullptr));
}

void checkAllReduce(
    Prng& random,
    AllReduceAlgorithm algorithm,
    const Case& c,
    Tuning tuning) {
  std::vector<Bytes> data = c.inputs;
  const auto outcome = LoopbackNetwork::run(
      {.ranks = c.ranks, .seed = random.next()}, [&](Communicator& comm) {
        return allReduceWith(
            algorithm,
            comm,
            data[static_cast<size_t>(comm.rank())].data(),
            c.count,
            c.of(comm.rank()),
            tuning);
      });
  expectAllOk(outcome);
  const Bytes expected = c.allReduced(algorithm);
  for (const Bytes& result : data) {
    CHECK(result == expected);
  }
}

// Every collective once, by number, with small random sizes; for the sweeps.
constexpr int kKinds = 21;

struct Everything {
  std::vector<Bytes> a; // by rank
  std::vector<std::vector<Bytes>> outs, ins; // by rank, by peer
  std::vector<size_t> counts;
  Tuning tuning;
  size_t count;

  Everything(Prng& random, int n, size_t elements)
      : tuning{16, 1 + random.below(3)}, count(elements) {
    const size_t ranks = static_cast<size_t>(n);
    for (size_t r = 0; r < ranks; ++r) {
      counts.push_back(random.below(elements + 1));
    }
    for (size_t r = 0; r < ranks; ++r) {
      a.push_back(randomBytes(random, elements * 4));
      outs.emplace_back();
      ins.emplace_back();
      for (size_t p = 0; p < ranks; ++p) {
        outs[r].push_back(Bytes(elements * 4));
        ins[r].push_back(randomBytes(random, elements * 4));
      }
    }
  }

  Task task(int kind, Communicator& comm) {
    const size_t me = static_cast<size_t>(comm.rank());
    const size_t n = static_cast<size_t>(comm.size());
    const int root = comm.size() / 2;
    const size_t bytes = count * 4;
    const Reduction sum{DType::kFloat32, ReduceOp::kSum, 1};
    const Reduction scaled{DType::kFloat32, ReduceOp::kPreMulSum, 0.5};
    std::vector<void*> out;
    std::vector<const void*> in;
    std::vector<size_t> same(n, bytes), uneven, pairwise, pairwiseOut;
    for (size_t p = 0; p < n; ++p) {
      out.push_back(address(outs[me][p]));
      in.push_back(ins[me][p].data());
      uneven.push_back(counts[p] * 4);
      pairwise.push_back((counts[p] * 3 + me) % (count + 1));
      pairwiseOut.push_back((counts[me] * 3 + p) % (count + 1));
    }
    switch (kind) {
      case 0:
      case 1:
      case 2:
      case 3:
        return allReduceWith(
            kAllReduces[kind], comm, a[me].data(), count, sum, tuning);
      case 4:
      case 5:
      case 6:
      case 7:
        return broadcastWith(
            kBroadcasts[kind - 4], comm, a[me].data(), bytes, root, tuning);
      case 8:
        return reduceWith(
            ReduceAlgorithm::kDirect,
            comm,
            a[me].data(),
            count,
            sum,
            root,
            tuning);
      case 9:
        return reduceWith(
            ReduceAlgorithm::kScatterGather,
            comm,
            a[me].data(),
            count,
            sum,
            root,
            tuning);
      case 10:
        return allGatherWith(
            AllGatherAlgorithm::kDirect,
            comm,
            ins[me][me].data(),
            out,
            uneven,
            tuning);
      case 11:
        return allGatherWith(
            AllGatherAlgorithm::kRing,
            comm,
            ins[me][me].data(),
            out,
            uneven,
            tuning);
      case 12:
        return gather(comm, ins[me][me].data(), uneven[me], out, uneven, root);
      case 13:
        return scatter(comm, in, uneven, a[me].data(), uneven[me], root);
      case 14:
        return reduceScatterWith(comm, in, counts, a[me].data(), sum, tuning);
      case 15:
        return allToAll(comm, in, pairwise, out, pairwiseOut);
      case 16:
        return barrierWith(BarrierAlgorithm::kFlat, comm);
      case 17:
        return barrierWith(BarrierAlgorithm::kDissemination, comm);
      case 18:
        return monitoredBarrier(comm, me % 2 == 0);
      case 19:
        return reduceScatterWith(
            comm, in, counts, a[me].data(), scaled, tuning);
      default: {
        std::vector<std::function<Task(Communicator&)>> parts;
        for (int part : {2, 16, 11, 3}) {
          parts.push_back(
              [this, part](Communicator& c) { return task(part, c); });
        }
        return coalesced(comm, parts);
      }
    }
  }
};

} // namespace

// The memory of one collective as a device fills and takes it.
std::vector<LoopbackNetwork::Staged> stagedMemory(Everything& all, int kind) {
  std::vector<LoopbackNetwork::Staged> staged;
  const int n = static_cast<int>(all.a.size());
  const auto add = [&](int rank, Bytes& bytes, bool input, bool result) {
    staged.push_back({rank, bytes.data(), bytes.size(), input, result});
  };
  for (int rank = 0; rank < n; ++rank) {
    const auto me = static_cast<size_t>(rank);
    const bool root = rank == n / 2;
    const bool broadcasts = kind >= 4 && kind <= 7;
    const bool reduces = kind == 8 || kind == 9;
    const bool inPlace = kind <= 3;
    const bool twice = kind == 20; // two of its parts reduce the same memory
    const bool input = inPlace || twice || reduces || (broadcasts && root);
    const bool result = reduces ? root : broadcasts ? !root : !twice;
    add(rank, all.a[me], input, result);
    for (size_t p = 0; p < all.a.size(); ++p) {
      add(rank, all.ins[me][p], true, false);
      add(rank, all.outs[me][p], false, true);
    }
  }
  return staged;
}

// Kinds whose results are final before the end, most of them: those that take
// long for large tensors.
bool namesResults(int kind) {
  return kind <= 7 || kind == 11 || kind == 14;
}

TEST(collectives_work_on_inputs_that_arrive_and_results_that_leave) {
  test::forSeeds(40, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 2 + static_cast<int>(random.below(5));
    const size_t elements = 1 + random.below(40);
    const uint64_t contents = random.next();
    for (int kind = 0; kind < kKinds; ++kind) {
      Prng first(contents);
      Prng second(contents);
      Everything whole(first, ranks, elements);
      Everything staged(second, ranks, elements);
      expectAllOk(
          LoopbackNetwork::run(
              {.ranks = ranks, .seed = random.next()},
              [&](Communicator& c) { return whole.task(kind, c); }));
      const auto outcome = LoopbackNetwork::run(
          {.ranks = ranks,
           .seed = random.next(),
           .staged = stagedMemory(staged, kind)},
          [&](Communicator& c) { return staged.task(kind, c); });
      expectAllOk(outcome);
      CHECK(whole.a == staged.a);
      CHECK(whole.outs == staged.outs);
      CHECK(whole.ins == staged.ins);
      if (namesResults(kind)) {
        CHECK(outcome.finalBytes > 0);
      }
    }
  });
}

TEST(collectives_all_reduce_every_type_and_operation) {
  test::forSeeds(1, [](uint64_t seed) {
    Prng random(seed);
    for (DType dtype : kAllTypes) {
      for (ReduceOp op : kAllOps) {
        if (!reductionSupported(dtype, op, nullptr)) {
          continue;
        }
        for (AllReduceAlgorithm algorithm : kAllReduces) {
          const Tuning tuning = randomTuning(random);
          const int ranks = 1 + static_cast<int>(random.below(9));
          checkAllReduce(
              random,
              algorithm,
              makeCase(
                  random,
                  ranks,
                  kCounts[random.below(std::size(kCounts))],
                  dtype,
                  op),
              tuning);
        }
      }
    }
  });
}

TEST(collectives_all_reduce_every_size) {
  test::forSeeds(1, [](uint64_t seed) {
    Prng random(seed);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (size_t count : kCounts) {
        for (AllReduceAlgorithm algorithm : kAllReduces) {
          DType dtype;
          ReduceOp op;
          randomReduction(random, dtype, op);
          checkAllReduce(
              random,
              algorithm,
              makeCase(random, ranks, count, dtype, op),
              randomTuning(random));
        }
      }
    }
    for (AllReduceAlgorithm algorithm : kAllReduces) {
      for (int ranks : {2, 5}) {
        Tuning tuning = randomTuning(random);
        tuning.segmentBytes = 8192;
        checkAllReduce(
            random,
            algorithm,
            makeCase(random, ranks, 100003, DType::kBFloat16, ReduceOp::kAvg),
            tuning);
      }
    }
  });
}

TEST(collectives_all_reduce_random_networks) {
  test::forSeeds(150, [](uint64_t seed) {
    Prng random(seed);
    const Tuning tuning = randomTuning(random);
    DType dtype;
    ReduceOp op;
    randomReduction(random, dtype, op);
    const Case c = makeCase(
        random,
        1 + static_cast<int>(random.below(9)),
        randomCount(random, tuning),
        dtype,
        op);
    checkAllReduce(
        random, kAllReduces[random.below(std::size(kAllReduces))], c, tuning);
  });
}

TEST(collectives_all_reduce_chooses_by_itself) {
  test::forSeeds(30, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 1 + static_cast<int>(random.below(9));
    const size_t counts[] = {0, 1, 1000, 100003, 700001};
    const Case c = makeCase(
        random,
        ranks,
        counts[random.below(std::size(counts))],
        DType::kFloat32,
        ReduceOp::kSum);
    std::vector<Bytes> data = c.inputs;
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              return allReduce(
                  comm,
                  data[static_cast<size_t>(comm.rank())].data(),
                  c.count,
                  c.of(comm.rank()));
            }));
    const Bytes expected =
        c.allReduced(chooseAllReduce(ranks, c.inputs[0].size(), CostModel()));
    for (const Bytes& result : data) {
      CHECK(result == expected);
    }
  });
}

TEST(collectives_reduce_leaves_other_ranks_alone) {
  test::forSeeds(250, [](uint64_t seed) {
    Prng random(seed);
    const Tuning tuning = randomTuning(random);
    DType dtype;
    ReduceOp op;
    randomReduction(random, dtype, op);
    const int ranks = 1 + static_cast<int>(random.below(9));
    const Case c =
        makeCase(random, ranks, randomCount(random, tuning), dtype, op);
    const int root = static_cast<int>(random.below(c.inputs.size()));
    const ReduceAlgorithm algorithm = random.chance(0.5)
        ? ReduceAlgorithm::kDirect
        : ReduceAlgorithm::kScatterGather;
    const bool choose = random.chance(0.2);
    std::vector<Bytes> data = c.inputs;
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              void* mine = data[static_cast<size_t>(comm.rank())].data();
              const Reduction reduction = c.of(comm.rank());
              return choose ? reduce(comm, mine, c.count, reduction, root)
                            : reduceWith(
                                  algorithm,
                                  comm,
                                  mine,
                                  c.count,
                                  reduction,
                                  root,
                                  tuning);
            }));
    for (int r = 0; r < ranks; ++r) {
      const size_t i = static_cast<size_t>(r);
      CHECK(data[i] == (r == root ? c.leftFold(0) : c.inputs[i]));
    }
  });
}

TEST(collectives_reduce_scatter_in_rank_order) {
  test::forSeeds(250, [](uint64_t seed) {
    Prng random(seed);
    const Tuning tuning = randomTuning(random);
    DType dtype;
    ReduceOp op;
    randomReduction(random, dtype, op);
    const int ranks = 1 + static_cast<int>(random.below(9));
    const size_t n = static_cast<size_t>(ranks);
    std::vector<Case> parts; // by destination
    std::vector<size_t> counts;
    const bool even = random.chance(0.5);
    for (size_t r = 0; r < n; ++r) {
      counts.push_back(even && r > 0 ? counts[0] : randomCount(random, tuning));
      parts.push_back(makeCase(random, ranks, counts[r], dtype, op));
      parts[r].factors = parts[0].factors;
    }
    const bool inPlace = random.chance(0.5);
    std::vector<Case> sent = parts;
    std::vector<Bytes> apart;
    for (size_t r = 0; r < n; ++r) {
      apart.push_back(Bytes(counts[r] * dtypeBytes(dtype), 0x55));
    }
    const auto outputOf = [&](size_t r) -> Bytes& {
      return inPlace ? sent[r].inputs[r] : apart[r];
    };
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<const void*> inputs;
              for (size_t r = 0; r < n; ++r) {
                inputs.push_back(sent[r].inputs[me].data());
              }
              return reduceScatterWith(
                  comm,
                  inputs,
                  counts,
                  outputOf(me).data(),
                  parts[0].of(comm.rank()),
                  tuning);
            }));
    for (size_t r = 0; r < n; ++r) {
      CHECK(outputOf(r) == parts[r].leftFold(0));
    }
    // Inputs are const but for the one that is the output.
    for (size_t r = 0; r < n; ++r) {
      for (size_t i = 0; i < n; ++i) {
        if (!inPlace || i != r) {
          CHECK(sent[r].inputs[i] == parts[r].inputs[i]);
        }
      }
    }
  });
}

TEST(collectives_broadcast_every_algorithm_size_and_root) {
  test::forSeeds(1, [](uint64_t seed) {
    Prng random(seed);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (size_t bytes : {0, 1, 2, 7, 64, 1000, 100003}) {
        for (int algorithm = 0; algorithm < 5; ++algorithm) {
          Tuning tuning = randomTuning(random);
          if (bytes > 1000) {
            tuning.segmentBytes = 4096;
          }
          const int root =
              static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
          std::vector<Bytes> data;
          for (int r = 0; r < ranks; ++r) {
            data.push_back(randomBytes(random, bytes));
          }
          const Bytes expected = data[static_cast<size_t>(root)];
          expectAllOk(
              LoopbackNetwork::run(
                  {.ranks = ranks, .seed = random.next()},
                  [&](Communicator& comm) {
                    void* mine = data[static_cast<size_t>(comm.rank())].data();
                    return algorithm == 4 ? broadcast(comm, mine, bytes, root)
                                          : broadcastWith(
                                                kBroadcasts[algorithm],
                                                comm,
                                                mine,
                                                bytes,
                                                root,
                                                tuning);
                  }));
          for (const Bytes& result : data) {
            CHECK(result == expected);
          }
        }
      }
    }
  });
}

TEST(collectives_gather_scatter_and_all_gather) {
  test::forSeeds(200, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 1 + static_cast<int>(random.below(9));
    const size_t n = static_cast<size_t>(ranks);
    const Tuning tuning = randomTuning(random);
    const int root = static_cast<int>(random.below(n));
    const size_t rootIndex = static_cast<size_t>(root);
    std::vector<Bytes> parts;
    std::vector<size_t> sizes;
    for (size_t r = 0; r < n; ++r) {
      parts.push_back(randomBytes(random, randomCount(random, tuning)));
      sizes.push_back(parts[r].size());
    }
    const auto blank = [&] {
      std::vector<Bytes> result;
      for (size_t size : sizes) {
        result.push_back(Bytes(size, 0x55));
      }
      return result;
    };
    const auto addresses = [](std::vector<Bytes>& buffers) {
      std::vector<void*> result;
      for (Bytes& b : buffers) {
        result.push_back(b.data());
      }
      return result;
    };

    std::vector<std::vector<Bytes>> outputs(n, blank());
    const bool inPlace = random.chance(0.5);
    const int algorithm = static_cast<int>(random.below(3));
    if (inPlace) {
      for (size_t r = 0; r < n; ++r) {
        outputs[r][r] = parts[r];
      }
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              const void* input =
                  inPlace ? outputs[me][me].data() : parts[me].data();
              return algorithm == 2
                  ? allGather(comm, input, addresses(outputs[me]), sizes)
                  : allGatherWith(
                        algorithm == 0 ? AllGatherAlgorithm::kDirect
                                       : AllGatherAlgorithm::kRing,
                        comm,
                        input,
                        addresses(outputs[me]),
                        sizes,
                        tuning);
            }));
    for (size_t r = 0; r < n; ++r) {
      CHECK(outputs[r] == parts);
    }

    std::vector<Bytes> gathered = blank();
    if (inPlace) {
      gathered[rootIndex] = parts[rootIndex];
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              const bool isRoot = comm.rank() == root;
              const void* input =
                  isRoot && inPlace ? gathered[me].data() : parts[me].data();
              return gather(
                  comm,
                  input,
                  sizes[me],
                  isRoot ? addresses(gathered) : std::vector<void*>(),
                  isRoot ? sizes : std::vector<size_t>(),
                  root);
            }));
    CHECK(gathered == parts);

    std::vector<Bytes> scattered = blank();
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<const void*> inputs;
              std::vector<size_t> inputBytes;
              if (comm.rank() == root) {
                for (const Bytes& b : parts) {
                  inputs.push_back(b.data());
                }
                inputBytes = sizes;
              }
              return scatter(
                  comm,
                  inputs,
                  inputBytes,
                  scattered[me].data(),
                  sizes[me],
                  root);
            }));
    CHECK(scattered == parts);
  });
}

TEST(collectives_all_to_all_uneven) {
  test::forSeeds(100, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 1 + static_cast<int>(random.below(9));
    const size_t n = static_cast<size_t>(ranks);
    std::vector<std::vector<Bytes>> sent(n), received(n);
    for (size_t from = 0; from < n; ++from) {
      for (size_t to = 0; to < n; ++to) {
        sent[from].push_back(randomBytes(random, random.below(200)));
      }
    }
    for (size_t to = 0; to < n; ++to) {
      for (size_t from = 0; from < n; ++from) {
        received[to].push_back(Bytes(sent[from][to].size()));
      }
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<const void*> in;
              std::vector<void*> out;
              std::vector<size_t> inBytes, outBytes;
              for (size_t p = 0; p < n; ++p) {
                in.push_back(sent[me][p].data());
                inBytes.push_back(sent[me][p].size());
                out.push_back(received[me][p].data());
                outBytes.push_back(received[me][p].size());
              }
              return allToAll(comm, in, inBytes, out, outBytes);
            }));
    for (size_t to = 0; to < n; ++to) {
      for (size_t from = 0; from < n; ++from) {
        CHECK(received[to][from] == sent[from][to]);
      }
    }
  });
}

// No rank leaves before the last has come.
TEST(collectives_barriers_hold_everyone_back) {
  test::forSeeds(60, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 1 + static_cast<int>(random.below(9));
    for (int kind = 0; kind < 4; ++kind) {
      const auto body = [&](Communicator& comm) {
        switch (kind) {
          case 0:
            return barrierWith(BarrierAlgorithm::kFlat, comm);
          case 1:
            return barrierWith(BarrierAlgorithm::kDissemination, comm);
          case 2:
            return barrier(comm);
          default:
            return monitoredBarrier(comm, random.chance(0.5));
        }
      };
      expectAllOk(LoopbackNetwork::run({.ranks = ranks, .seed = seed}, body));
      if (ranks == 1) {
        continue;
      }
      const int late =
          static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
      const auto outcome = LoopbackNetwork::run(
          {.ranks = ranks, .seed = seed, .absent = {late}, .deadline = true},
          body);
      for (const Status& status : outcome.status) {
        CHECK(!status.ok());
      }
    }
  });
}

TEST(collectives_monitored_barrier_names_the_missing) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (bool waitAllRanks : {false, true}) {
      const auto outcome = LoopbackNetwork::run(
          {.ranks = 5, .seed = seed, .absent = {2, 4}, .deadline = true},
          [&](Communicator& comm) {
            return monitoredBarrier(comm, waitAllRanks);
          });
      CHECK(outcome.status[0].code() == StatusCode::kTimeout);
      const std::string& message = outcome.status[0].message();
      if (waitAllRanks) {
        CHECK_CONTAINS(message, "Ranks 2, 4 failed to pass monitoredBarrier");
        CHECK_CONTAINS(message, "ranks that passed: 1, 3.");
      } else {
        CHECK_CONTAINS(message, "Rank 2 failed to pass monitoredBarrier");
        CHECK_CONTAINS(message, "ranks that passed: 1, later ranks");
      }
      CHECK_CONTAINS(message, "Rank 0 timed out in monitoredBarrier");
      for (int r : {1, 3}) {
        CHECK_CONTAINS(
            outcome.status[static_cast<size_t>(r)].message(),
            "Rank " + std::to_string(r) +
                " successfully reached monitoredBarrier, but received errors "
                "while waiting for send/recv from rank 0");
      }
    }
  }
}

TEST(collectives_coalesced_parts_do_not_mix) {
  test::forSeeds(50, [](uint64_t seed) {
    Prng random(seed);
    const int ranks = 1 + static_cast<int>(random.below(5));
    std::vector<Case> cases;
    std::vector<std::vector<Bytes>> data;
    std::vector<AllReduceAlgorithm> algorithms;
    const Tuning tuning{16, 2};
    for (int part = 0; part < 4; ++part) {
      DType dtype;
      ReduceOp op;
      randomReduction(random, dtype, op);
      cases.push_back(makeCase(random, ranks, random.below(70), dtype, op));
      data.push_back(cases.back().inputs);
      algorithms.push_back(kAllReduces[random.below(std::size(kAllReduces))]);
    }
    expectAllOk(
        LoopbackNetwork::run(
            {.ranks = ranks, .seed = seed}, [&](Communicator& comm) {
              const size_t me = static_cast<size_t>(comm.rank());
              std::vector<std::function<Task(Communicator&)>> parts;
              for (size_t part = 0; part < 4; ++part) {
                parts.push_back([&, me, part](Communicator& c) {
                  return allReduceWith(
                      algorithms[part],
                      c,
                      data[part][me].data(),
                      cases[part].count,
                      cases[part].of(static_cast<int>(me)),
                      tuning);
                });
              }
              return coalesced(comm, parts);
            }));
    for (size_t part = 0; part < 4; ++part) {
      for (const Bytes& result : data[part]) {
        CHECK(result == cases[part].allReduced(algorithms[part]));
      }
    }
  });
}

// Whatever fails, and when: the rank it happens to reports just that, no
// other rank is harmed, and nothing is left behind. Worth most under ASan.
TEST(collectives_unwind_from_every_failure) {
  test::forSeeds(2, [](uint64_t seed) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (int ranks = 2; ranks <= 4; ++ranks) {
        Prng random(seed * 1000 + static_cast<uint64_t>(kind * 10 + ranks));
        const uint64_t networkSeed = random.next();
        const Everything fresh(random, ranks, 13);
        int64_t events = 1;
        for (int64_t failAt = -1; failAt < events; ++failAt) {
          Everything world = fresh;
          const auto outcome = LoopbackNetwork::run(
              {.ranks = ranks, .seed = networkSeed, .failAt = failAt},
              [&](Communicator& comm) { return world.task(kind, comm); });
          if (failAt < 0) {
            expectAllOk(outcome);
            events = outcome.events;
            CHECK(events > 0);
            continue;
          }
          CHECK(outcome.failedRank >= 0);
          const Status& status =
              outcome.status[static_cast<size_t>(outcome.failedRank)];
          CHECK_CONTAINS(status.toString(), "injected failure");
        }
      }
    }
  });
}

TEST(collectives_reject_what_cannot_be) {
  const auto failing = [](int ranks, const LoopbackNetwork::Body& body) {
    const auto outcome =
        LoopbackNetwork::run({.ranks = ranks, .seed = 1}, body);
    CHECK_EQ(outcome.events, 0); // nothing was sent
    CHECK(outcome.status[0].code() == StatusCode::kInvalidArgument);
    return outcome.status[0].message();
  };
  float x = 0;
  CHECK_CONTAINS(
      failing(
          1,
          [&](Communicator& comm) {
            return allReduce(
                comm, &x, 1, {DType::kFloat32, ReduceOp::kBand, 1});
          }),
      "all_reduce: BAND of float32");
  CHECK_CONTAINS(
      failing(1, [&](Communicator& comm) { return broadcast(comm, &x, 4, 1); }),
      "no such root");
  CHECK_CONTAINS(
      failing(
          1,
          [&](Communicator& comm) {
            return allToAll(comm, {&x}, {4}, {&x}, {0});
          }),
      "differ in size");
}

TEST(collectives_hand_the_thread_back_while_computing) {
  const size_t count = 2u << 20; // 8 MiB of float32, 2 ranks
  std::vector<Bytes> data(2, Bytes(count * 4));
  const auto outcome =
      LoopbackNetwork::run({.ranks = 2, .seed = 1}, [&](Communicator& comm) {
        return allReduceWith(
            AllReduceAlgorithm::kDirect,
            comm,
            data[static_cast<size_t>(comm.rank())].data(),
            count,
            {DType::kFloat32, ReduceOp::kSum, 1},
            Tuning());
      });
  expectAllOk(outcome);
  // Each reduces 4 MiB with two operands, 1 MiB at a time.
  CHECK(outcome.yields >= 2 * 6);
}

} // namespace resilient
