#include "loss/redundancy.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

// A Gilbert channel, run by run: packets that arrive, then packets that do not.
class Channel {
 public:
  Channel(const LossEstimate& loss, uint64_t seed)
      : random_(seed),
        endsBurst_(1 / loss.burstPackets),
        beginsBurst_(loss.rate * endsBurst_ / (1 - loss.rate)) {}
  uint64_t goodRun() {
    return length(beginsBurst_);
  }
  uint64_t badRun() {
    return length(endsBurst_);
  }
  // Packet by packet.
  bool nextIsLost() {
    while (left_ == 0) {
      lost_ = !lost_;
      left_ = lost_ ? badRun() : goodRun();
    }
    --left_;
    return lost_;
  }

 private:
  // 1 or more, geometric.
  uint64_t length(double end) {
    return end >= 1 ? 1
                    : 1 +
            static_cast<uint64_t>(
                          std::log(1 - random_.uniform()) / std::log1p(-end));
  }
  Prng random_;
  double endsBurst_;
  double beginsBurst_;
  uint64_t left_ = 0;
  bool lost_ = true;
};

LossEstimate oneByOne(double rate) {
  return {rate, 1 / (1 - rate)};
}

// Share of the blocks, or of the sequences of full length, that recoverable()
// gives up, with packets of `blocks` blocks sent in turn.
double simulated(
    const BlockShape& shape,
    const LossEstimate& loss,
    int blocks,
    int rounds,
    uint64_t seed) {
  const int symbols = shape.data + shape.parity;
  const auto each = static_cast<size_t>(symbols);
  const std::unique_ptr<bool[]> here(
      new bool[each * static_cast<size_t>(blocks)]);
  const bool xorKind = shape.kind == ParityKind::kXor;
  Channel channel(loss, seed);
  int failed = 0;
  int seen = 0;
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < each; ++i) {
      for (int b = 0; b < blocks; ++b) {
        here[static_cast<size_t>(b) * each + i] = !channel.nextIsLost();
      }
    }
    for (int b = 0; b < blocks; ++b) {
      const bool* block = &here[static_cast<size_t>(b) * each];
      if (!xorKind) {
        ++seen;
        failed += !recoverable(
            shape,
            {block, static_cast<size_t>(shape.data)},
            {block + shape.data, static_cast<size_t>(shape.parity)});
        continue;
      }
      for (int j = 0; j < shape.parity; ++j) {
        int lost = !block[shape.data + j];
        for (int i = j; i < shape.data; i += shape.parity) {
          lost += !block[i];
        }
        ++seen;
        failed += lost > 1;
      }
    }
  }
  return static_cast<double>(failed) / seen;
}

// The chances against simulation, where they are large enough to be seen.
TEST(redundancy_chances_are_those_of_a_simulation) {
  struct Case {
    BlockShape shape;
    LossEstimate loss;
    int blocks;
  };
  constexpr auto kXor = ParityKind::kXor;
  constexpr auto kRs = ParityKind::kReedSolomon;
  const Case cases[] = {
      {{kRs, 100, 2}, oneByOne(0.01), 1},
      {{kRs, 100, 10}, oneByOne(0.05), 1},
      {{kRs, 20, 2}, oneByOne(0.02), 1},
      {{kRs, 100, 10}, {0.01, 4}, 1},
      {{kRs, 100, 10}, {0.01, 10}, 1},
      {{kRs, 100, 10}, {0.01, 10}, 8}, // spreading helps
      {{kRs, 200, 20}, {0.05, 6}, 3},
      {{ParityKind::kNone, 50, 0}, {0.02, 3}, 1},
      {{kXor, 100, 10}, oneByOne(0.02), 1},
      {{kXor, 100, 1}, oneByOne(0.005), 1},
      {{kXor, 100, 10}, {0.02, 6}, 1},
      {{kXor, 100, 5}, {0.02, 10}, 4},
      {{kXor, 60, 30}, {0.05, 10}, 1},
  };
  for (const Case& c : cases) {
    constexpr int kBlocks = 12000;
    const double expected = chanceUnrecovered(c.shape, c.loss, c.blocks);
    const double found =
        simulated(c.shape, c.loss, c.blocks, kBlocks / c.blocks, 1);
    // Blocks sent together share their bursts: fewer independent cases.
    const double deviation =
        std::sqrt(expected * (1 - expected) / kBlocks * c.blocks);
    if (std::abs(found - expected) > 4 * deviation + 0.02 * expected) {
      fail(
          __FILE__,
          __LINE__,
          "kind " + show(c.shape.kind) + ", " + show(c.shape.data) + "+" +
              show(c.shape.parity) + ", loss " + show(c.loss.rate) +
              ", bursts " + show(c.loss.burstPackets) + ": expected " +
              show(expected) + ", found " + show(found));
    }
  }
}

double binomialTail(int packets, int more, double rate) {
  double few = 0;
  for (int k = 0; k <= more; ++k) {
    few += std::exp(
        std::lgamma(packets + 1) - std::lgamma(k + 1) -
        std::lgamma(packets - k + 1) + k * std::log(rate) +
        (packets - k) * std::log1p(-rate));
  }
  return 1 - few;
}

TEST(redundancy_chances_have_the_closed_forms_of_random_loss) {
  for (double rate : {0.001, 0.01, 0.05, 0.3}) {
    for (int parity : {0, 1, 5, 10, 20}) {
      const double found = chanceUnrecovered(
          {ParityKind::kReedSolomon, 100, parity}, oneByOne(rate), 1);
      CHECK(std::abs(found - binomialTail(100 + parity, parity, rate)) < 1e-9);
    }
    for (int parity : {1, 2, 10, 50, 100}) {
      const double found =
          chanceUnrecovered({ParityKind::kXor, 100, parity}, oneByOne(rate), 1);
      CHECK(std::abs(found - binomialTail(100 / parity + 1, 1, rate)) < 1e-9);
    }
  }
  for (ParityKind kind : {ParityKind::kXor, ParityKind::kReedSolomon}) {
    CHECK_EQ(chanceUnrecovered({kind, 100, 10}, {0, 1}, 1), 0.0);
    CHECK_EQ(chanceUnrecovered({kind, 100, 10}, {1, 1}, 1), 1.0);
  }
}

// As little as reaches the target, and no less.
TEST(redundancy_choice_is_the_least_that_suffices) {
  forSeeds(150, [](uint64_t seed) {
    Prng random(seed);
    const ParityKind kind =
        random.chance(0.5) ? ParityKind::kXor : ParityKind::kReedSolomon;
    const int data = 1 + static_cast<int>(random.below(200));
    const LossEstimate loss{
        std::exp2(-12.0 + 10.0 * random.uniform()),
        1 + 9 * random.uniform() * random.uniform()};
    const double min = 0.1 * random.uniform();
    const RedundancyLimits limits{
        .minRatio = min,
        .maxRatio = min + random.uniform(),
        .interleavedBlocks = 1 + static_cast<int>(random.below(8))};
    const BlockShape shape = chooseShape(kind, data, loss, limits);
    CHECK_EQ(shape.data, data);
    CHECK(shape.kind == (shape.parity == 0 ? ParityKind::kNone : kind));
    CHECK(faultOfShape(shape) == nullptr);
    CHECK(shape.parity >= std::min(limits.minRatio * data, 255.0 - data));
    CHECK(
        shape.parity <=
        std::max(limits.maxRatio * data, limits.minRatio * data + 1));
    const auto chance = [&](int parity) {
      return chanceUnrecovered(
          {kind, data, parity}, loss, limits.interleavedBlocks);
    };
    const int more = shape.parity + 1;
    if (chance(shape.parity) > kTargetUnrecovered) {
      // Then no more was allowed.
      CHECK(
          more > limits.maxRatio * data ||
          (kind == ParityKind::kXor && more > data) ||
          (kind == ParityKind::kReedSolomon && data + more > 255));
    }
    if (shape.parity - 1 >= limits.minRatio * data) {
      CHECK(chance(shape.parity - 1) > kTargetUnrecovered);
    }
  });
}

// The chosen shape, in a simulation with the loss that it was chosen for.
TEST(redundancy_choice_keeps_its_target_in_a_simulation) {
  constexpr int kBlocks = 30000; // 30 failures are allowed
  for (const LossEstimate& loss :
       {oneByOne(0.002),
        oneByOne(0.01),
        oneByOne(0.03),
        LossEstimate{0.01, 5}}) {
    const int blocks = loss.burstPackets > 2 ? 6 : 1;
    const RedundancyLimits limits{.maxRatio = 1, .interleavedBlocks = blocks};
    const BlockShape shape =
        chooseShape(ParityKind::kReedSolomon, 100, loss, limits);
    CHECK(shape.kind == ParityKind::kReedSolomon);
    const double found = simulated(shape, loss, blocks, kBlocks / blocks, 11);
    CHECK(found <= kTargetUnrecovered * 1.6);
    BlockShape less = shape;
    less.parity -= 1;
    CHECK(
        simulated(less, loss, blocks, kBlocks / blocks, 12) >
        kTargetUnrecovered * 0.6);
  }
}

TEST(redundancy_choices_of_note) {
  constexpr auto kRs = ParityKind::kReedSolomon;
  const auto parity = [](ParityKind kind,
                         int data,
                         const LossEstimate& loss,
                         const RedundancyLimits& limits = {}) {
    return chooseShape(kind, data, loss, limits).parity;
  };
  // No loss, no parity; but what is asked for as the least.
  CHECK_EQ(parity(kRs, 100, {}), 0);
  CHECK_EQ(parity(kRs, 100, {}, {.minRatio = 0.07}), 7);
  // Of 100 data packets at 1 %: 1 expected, 5 for the unlucky block.
  CHECK_EQ(parity(kRs, 100, oneByOne(0.01)), 5);
  CHECK_EQ(parity(kRs, 100, oneByOne(0.05)), 14);
  // XOR: 5 of a sequence lose two with less than 1e-3 at 1 %.
  CHECK_EQ(parity(ParityKind::kXor, 100, oneByOne(0.01)), 25);
  // The same loss in bursts needs more; spread over blocks, less again.
  const LossEstimate bursts{0.01, 8};
  const int together = parity(kRs, 100, bursts);
  const int spread = parity(kRs, 100, bursts, {.interleavedBlocks = 16});
  CHECK(together > 2 * spread);
  CHECK(spread <= 10);
  // No more than allowed, and no more than the field has elements.
  CHECK_EQ(parity(kRs, 100, oneByOne(0.2), {.maxRatio = 0.25}), 25);
  CHECK_EQ(parity(kRs, 250, oneByOne(0.2), {.maxRatio = 1}), 5);
  CHECK_EQ(parity(kRs, 255, oneByOne(0.2), {.minRatio = 1, .maxRatio = 1}), 0);
  // Paper: SMART §4.3: under congestion parity would make it worse.
  CHECK_EQ(
      parity(kRs, 100, oneByOne(0.05), {.minRatio = 0.02, .congested = true}),
      2);
  // A packet alone is sent twice.
  CHECK_EQ(parity(kRs, 1, oneByOne(0.01), {.maxRatio = 3}), 1);
}

// Few packets are counted out; many are taken for a normal distribution, which
// need not be right beyond a decision between "hardly ever" and "at times".
TEST(redundancy_chance_of_more_losses_is_that_of_a_simulation) {
  struct Case {
    int packets, max;
    LossEstimate loss;
    double within;
  };
  for (const Case& c : {
           Case{190, 19, {0.02, 6}, 0.003},
           Case{190, 5, oneByOne(0.02), 0.005},
           Case{370, 37, {0.05, 6}, 0.005},
           Case{3000, 200, {0.05, 6}, 0.02},
           Case{3000, 170, oneByOne(0.05), 0.01},
       }) {
    constexpr int kRounds = 20000;
    Channel channel(c.loss, 11);
    int more = 0;
    for (int round = 0; round < kRounds; ++round) {
      int lost = 0;
      for (int i = 0; i < c.packets; ++i) {
        lost += channel.nextIsLost();
      }
      more += lost > c.max;
    }
    const double seen = double(more) / kRounds;
    CHECK(seen > 0.002);
    const double chance = chanceOfMoreLost(c.packets, c.max, c.loss);
    CHECK(std::abs(chance - seen) < c.within);
  }
  CHECK(chanceOfMoreLost(100, 0, {}) == 0);
  CHECK_THROWS(
      std::invalid_argument,
      "losses: expected",
      chanceOfMoreLost(100, 100, {}));
}

TEST(redundancy_refuses_what_makes_no_sense) {
  const auto choose = [](int data, LossEstimate loss, RedundancyLimits limits) {
    return chooseShape(ParityKind::kReedSolomon, data, loss, limits);
  };
  CHECK_THROWS(std::invalid_argument, "at most 255", choose(256, {}, {}));
  CHECK_THROWS(std::invalid_argument, "at least 1 data", choose(0, {}, {}));
  CHECK_THROWS(std::invalid_argument, "loss rate", choose(9, {1.5, 1}, {}));
  CHECK_THROWS(std::invalid_argument, "loss rate", choose(9, {NAN, 1}, {}));
  CHECK_THROWS(std::invalid_argument, "burst", choose(9, {0.1, 0.5}, {}));
  CHECK_THROWS(
      std::invalid_argument, "least ratio", choose(9, {}, {.minRatio = 2}));
  CHECK_THROWS(
      std::invalid_argument,
      "interleaved",
      choose(9, {}, {.interleavedBlocks = 0}));
}

TEST(redundancy_meter_finds_rate_and_bursts) {
  for (const LossEstimate& truth :
       {oneByOne(0.01), oneByOne(0.1), LossEstimate{0.02, 6}}) {
    LossMeter meter;
    CHECK_EQ(meter.estimate().rate, 0.0);
    CHECK_EQ(meter.estimate().burstPackets, 1.0);
    Channel channel(truth, 5);
    double rate = 0;
    double burst = 0;
    constexpr int kRuns = 40000;
    for (int i = 0; i < kRuns; ++i) {
      // A burst that is reported in two pieces is one.
      const uint64_t lost = channel.badRun();
      meter.onPackets(channel.goodRun(), lost / 2);
      meter.onPackets(0, lost - lost / 2);
      rate += meter.estimate().rate / kRuns;
      burst += meter.estimate().burstPackets / kRuns;
    }
    CHECK(std::abs(rate / truth.rate - 1) < 0.1);
    CHECK(std::abs(burst / truth.burstPackets - 1) < 0.1);
  }
}

// A block is repaired as often as is aimed at, though the losses that a meter
// has seen are few: less than half of its plans fall short.
TEST(redundancy_meter_is_cautious_about_what_it_knows_badly) {
  for (const LossEstimate& truth : {oneByOne(0.01), LossEstimate{0.01, 6}}) {
    Channel channel(truth, 7);
    LossMeter meter;
    int low = 0;
    int lowCautious = 0;
    constexpr int kRuns = 20000;
    for (int i = 0; i < kRuns; ++i) {
      const uint64_t lost = channel.badRun();
      meter.onPackets(channel.goodRun(), lost);
      low += meter.estimate().rate < truth.rate;
      const LossEstimate cautious = meter.cautious();
      lowCautious += cautious.rate < truth.rate;
      CHECK(cautious.burstPackets >= meter.estimate().burstPackets);
    }
    CHECK(low > kRuns / 3);
    CHECK(lowCautious < low / 2);
  }
  CHECK_EQ(LossMeter().cautious().rate, 0.0);
}

TEST(redundancy_meter_does_not_care_how_runs_are_cut) {
  LossMeter whole;
  LossMeter pieces;
  for (int i = 0; i < 50; ++i) {
    whole.onPackets(5000, 3);
    for (int k = 0; k < 5; ++k) {
      pieces.onPackets(1000, 0);
    }
    for (int k = 0; k < 3; ++k) {
      pieces.onPackets(0, 1);
    }
  }
  CHECK(std::abs(whole.estimate().rate / pieces.estimate().rate - 1) < 1e-6);
  CHECK(
      std::abs(
          whole.estimate().burstPackets / pieces.estimate().burstPackets - 1) <
      1e-3);
}

TEST(redundancy_meter_doubts_until_nothing_was_lost_for_long) {
  LossMeter meter;
  CHECK_EQ(meter.doubt(), 1.0);
  const auto memory = static_cast<uint64_t>(kLossMemoryPackets);
  meter.onPackets(memory, 0);
  CHECK(std::abs(meter.doubt() - std::exp(-1)) < 1e-3);
  meter.onPackets(5 * memory, 0);
  CHECK(meter.doubt() < 0.01);
  meter.onPackets(0, 1);
  CHECK_EQ(meter.doubt(), 1.0);
  meter.onPackets(2 * memory, 0);
  CHECK(meter.doubt() > 0.1 && meter.doubt() < 0.2);
}

TEST(redundancy_meter_forgets) {
  LossMeter meter;
  Channel bad({0.05, 4}, 1);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t good = bad.goodRun();
    meter.onPackets(good, bad.badRun());
  }
  CHECK(meter.estimate().rate > 0.03);
  // e^-3 of it is left after three times the memory, then nothing.
  meter.onPackets(static_cast<uint64_t>(3 * kLossMemoryPackets), 0);
  CHECK(meter.estimate().rate > 0.0005 && meter.estimate().rate < 0.005);
  meter.onPackets(uint64_t{1} << 40, 0);
  CHECK_EQ(meter.estimate().rate, 0.0);
  CHECK_EQ(meter.estimate().burstPackets, 1.0);
  // And it learns as fast.
  meter.onPackets(0, static_cast<uint64_t>(kLossMemoryPackets));
  CHECK(meter.estimate().rate > 0.6 && meter.estimate().rate < 0.65);
}

} // namespace
} // namespace resilient::test
