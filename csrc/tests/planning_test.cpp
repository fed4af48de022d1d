#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/random.h"
#include "planning/evaluator.h"
#include "planning/generator.h"
#include "planning/local_search.h"
#include "planning/problem.h"
#include "tests/check.h"

namespace resilient {
namespace {

PipelineCosts uniformCosts(size_t stages, double each) {
  const std::vector<double> times(stages, each);
  const std::vector<double> delays(stages - 1, 0);
  return {times, times, times, delays, delays};
}

struct Problem {
  PipelineCosts costs;
  size_t microbatches;
  Limits limits;
};

// Whole numbers up to 9, also 0, so that many things happen at once.
Problem drawProblem(Prng& dice) {
  const size_t stages = 1 + dice.below(6);
  const size_t microbatches = 1 + dice.below(10);
  const auto numbers = [&](size_t count, uint64_t max) {
    std::vector<double> result(count);
    for (double& each : result) {
      each = static_cast<double>(dice.below(max + 1));
    }
    return result;
  };
  Problem problem{
      .costs =
          {.forward = numbers(stages, 9),
           .inputBackward = numbers(stages, 9),
           .weightBackward = numbers(stages, 9),
           .delayForward = numbers(stages - 1, 36),
           .delayBackward = numbers(stages - 1, 36)},
      .microbatches = microbatches,
      .limits = {}};
  for (size_t i = 0; i < stages; ++i) {
    problem.limits.pending.push_back(1 + dice.below(microbatches));
    problem.limits.activations.push_back(
        1 + dice.below(problem.limits.pending.back()));
  }
  return problem;
}

Rules drawRules(Prng& dice, const Problem& problem) {
  Rules rules;
  for (size_t i = 0; i < problem.costs.stages(); ++i) {
    rules.warmup.push_back(1 + dice.below(problem.microbatches));
  }
  rules.waitForWarmup = dice.chance(0.5);
  rules.gate = dice.chance(0.5);
  rules.forwardFirst = dice.chance(0.5);
  rules.weightShare = 0.5 * static_cast<double>(dice.below(3));
  if (dice.chance(0.5)) {
    rules.maxWeights = 1 + dice.below(4);
  }
  return rules;
}

bool complete(const Orders& orders, size_t microbatches) {
  return std::all_of(orders.begin(), orders.end(), [&](const Kinds& kinds) {
    std::array<size_t, kKinds> counts{};
    for (const uint8_t kind : kinds) {
      ++counts.at(kind);
    }
    return counts == std::array{microbatches, microbatches, microbatches};
  });
}

bool within(const Limits& limits, const Orders& orders) {
  for (size_t i = 0; i < orders.size(); ++i) {
    if (!limits.allowStage(i, orders[i])) {
      return false;
    }
  }
  return true;
}

// The dumb twin of Evaluator: passes over everything until nothing changes.
// Nothing if the stages wait for each other.
std::optional<double> slowIterationS(
    const Orders& orders,
    const PipelineCosts& costs,
    size_t microbatches) {
  const size_t stages = orders.size();
  using Ends = std::vector<std::optional<double>>;
  std::vector<std::array<Ends, kKinds>> ends(stages);
  for (auto& stage : ends) {
    stage.fill(Ends(microbatches));
  }
  const auto duration = [&](size_t stage, uint8_t kind) {
    return kind == kForward      ? costs.forward[stage]
        : kind == kInputBackward ? costs.inputBackward[stage]
                                 : costs.weightBackward[stage];
  };
  // When what it needs from elsewhere has arrived.
  const auto arrival =
      [&](size_t stage, uint8_t kind, size_t m) -> std::optional<double> {
    if (kind == kWeightBackward || (kind == kForward && stage == 0)) {
      return 0;
    }
    if (kind == kInputBackward && stage + 1 == stages) {
      return ends[stage][kForward][m];
    }
    const size_t from = kind == kForward ? stage - 1 : stage + 1;
    const double delay = kind == kForward ? costs.delayForward[from]
                                          : costs.delayBackward[stage];
    const auto& end = ends[from][kind][m];
    return end ? std::optional(*end + delay) : std::nullopt;
  };
  double longest = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t stage = 0; stage < stages; ++stage) {
      double now = 0;
      std::array<size_t, kKinds> done{};
      for (const uint8_t kind : orders[stage]) {
        const size_t m = done.at(kind)++;
        const auto arrived = arrival(stage, kind, m);
        if (!arrived) {
          break;
        }
        now = std::max(now, *arrived) + duration(stage, kind);
        longest = std::max(longest, now);
        auto& end = ends[stage].at(kind)[m];
        changed = changed || !end;
        end = now;
      }
    }
  }
  for (const auto& stage : ends) {
    for (const auto& kind : stage) {
      if (std::find(kind.begin(), kind.end(), std::nullopt) != kind.end()) {
        return std::nullopt;
      }
    }
  }
  return longest;
}

// Paper: PIPEMORPH §3.1, Figures 4 and 5
TEST(planning_gives_the_papers_figures) {
  PipelineCosts costs = uniformCosts(4, 10);
  const Limits limits{
      .activations = std::vector<size_t>(4, 12),
      .pending = std::vector<size_t>(4, 12)};
  Rules rules;
  rules.warmup = {7, 5, 3, 1};
  rules.waitForWarmup = true;
  const Generated made = generate(costs, 12, rules, limits);
  CHECK_EQ(made.iterationS, 390.0);
  for (const auto& [delay, expected] :
       {std::pair(0.0, 390.0),
        std::pair(10.0, 400.0),
        std::pair(20.0, 440.0)}) {
    costs.delayForward[0] = costs.delayBackward[0] = delay;
    Evaluator evaluator(costs, 12);
    CHECK(evaluator.run(made.orders));
    CHECK_EQ(evaluator.iterationS(), expected);
  }
  for (const Kinds& kinds : made.orders) {
    const MemoryPeaks held = memoryPeaks(kinds, 1, 1.5);
    CHECK_EQ(held.pending, 12);
  }
  CHECK_EQ(memoryPeaks(made.orders[0], 1, 1.5).activations, 7);
}

TEST(planning_counts_what_an_order_holds) {
  const Kinds kinds{
      kForward,
      kForward,
      kInputBackward,
      kForward, // two between F and B, one between B and W
      kInputBackward, // one and two
      kWeightBackward,
      kInputBackward,
      kWeightBackward,
      kWeightBackward};
  const MemoryPeaks light = memoryPeaks(kinds, 2, 1);
  CHECK_EQ(light.activations, 2);
  CHECK_EQ(light.pending, 3);
  CHECK_EQ(light.units, 5.0);
  CHECK_EQ(memoryPeaks(kinds, 2, 4).units, 10.0);
}

TEST(planning_generates_complete_orders_within_the_limits) {
  test::forSeeds(300, [](uint64_t seed) {
    Prng dice(seed);
    const Problem problem = drawProblem(dice);
    const Rules rules = drawRules(dice, problem);
    const Generated made =
        generate(problem.costs, problem.microbatches, rules, problem.limits);
    CHECK(complete(made.orders, problem.microbatches));
    CHECK(within(problem.limits, made.orders));
    const auto slow =
        slowIterationS(made.orders, problem.costs, problem.microbatches);
    CHECK(slow.has_value());
    // A stage that waits though it could go on is faster in the replay.
    CHECK(*slow <= made.iterationS);
    if (rules.weightShare == 0 && !rules.waitForWarmup) {
      CHECK_EQ(*slow, made.iterationS);
    }
  });
}

TEST(planning_evaluates_any_orders_as_the_dumb_twin) {
  size_t stuck = 0, ran = 0;
  test::forSeeds(300, [&](uint64_t seed) {
    Prng dice(seed);
    const Problem problem = drawProblem(dice);
    Orders orders = generate(
                        problem.costs,
                        problem.microbatches,
                        drawRules(dice, problem),
                        problem.limits)
                        .orders;
    // A few operations to other places, which may make a circle of waiting.
    for (uint64_t moves = dice.below(4); moves > 0; --moves) {
      Kinds& kinds = orders[dice.below(orders.size())];
      std::swap(
          kinds[dice.below(kinds.size())], kinds[dice.below(kinds.size())]);
    }
    const auto slow =
        slowIterationS(orders, problem.costs, problem.microbatches);
    Evaluator evaluator(problem.costs, problem.microbatches);
    CHECK_EQ(evaluator.run(orders), slow.has_value());
    if (!slow) {
      ++stuck;
      return;
    }
    ++ran;
    CHECK_EQ(evaluator.iterationS(), *slow);
    for (size_t i = 0; i < orders.size(); ++i) {
      // Busy and idle times add up. Whole numbers are exact.
      const StageTimes& times = evaluator.times(i);
      double busy = 0;
      for (const uint8_t kind : orders[i]) {
        busy += evaluator.durations(i)[kind];
      }
      CHECK_EQ(
          times.begin + busy + times.forwardWait + times.backwardWait,
          times.end);
    }
    CHECK(evaluator.run(orders, *slow));
    CHECK(*slow == 0 || !evaluator.run(orders, *slow - 0.5));
    // What is left from a run that was broken off does not show.
    CHECK(evaluator.run(orders));
    CHECK_EQ(evaluator.iterationS(), *slow);
  });
  CHECK(test::runState().forcedSeed || (stuck > 10 && ran > 10));
}

TEST(planning_search_betters_1f1b) {
  PipelineCosts costs = uniformCosts(4, 10);
  costs.delayForward[0] = costs.delayBackward[0] = 20;
  const Limits limits{
      .activations = std::vector<size_t>(4, 12),
      .pending = std::vector<size_t>(4, 12)};
  Orders start;
  for (size_t warmup = 4; warmup > 0; --warmup) {
    Kinds kinds(warmup, kForward);
    for (size_t i = 0; i < 12; ++i) {
      kinds.push_back(kInputBackward);
      kinds.push_back(kWeightBackward);
      if (i < 12 - warmup) {
        kinds.push_back(kForward);
      }
    }
    start.push_back(kinds);
  }
  Search search(start, costs, limits, 410, 3);
  CHECK(search.found()[0].iterationS > 500);
  search.run(10000);
  CHECK(search.found()[0].iterationS <= 430);
}

TEST(planning_search_finds_valid_orders_and_replays_from_its_seed) {
  size_t bettered = 0;
  test::forSeeds(60, [&](uint64_t seed) {
    Prng dice(seed);
    const Problem problem = drawProblem(dice);
    const Generated start = generate(
        problem.costs,
        problem.microbatches,
        drawRules(dice, problem),
        problem.limits);
    const auto search = [&] {
      return Search(start.orders, problem.costs, problem.limits, 0, seed);
    };
    Search whole = search(), parts = search();
    whole.run(1200);
    for (int i = 0; i < 12; ++i) {
      parts.run(100);
    }
    const auto& found = whole.found();
    CHECK_EQ(found.size(), parts.found().size());
    for (size_t i = 0; i < found.size(); ++i) {
      CHECK_EQ(found[i].iterationS, parts.found()[i].iterationS);
      CHECK(found[i].orders == parts.found()[i].orders);
      CHECK(complete(found[i].orders, problem.microbatches));
      CHECK(within(problem.limits, found[i].orders));
      const auto slow =
          slowIterationS(found[i].orders, problem.costs, problem.microbatches);
      CHECK(slow.has_value());
      CHECK_EQ(*slow, found[i].iterationS);
      CHECK(i == 0 || found[i - 1].iterationS < found[i].iterationS);
    }
    bettered += found.size() > 1;
  });
  CHECK(test::runState().forcedSeed || bettered > 0);
}

} // namespace
} // namespace resilient
