#include "planning/cell.h"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {
namespace {

// Figure 6 of ATLAS: six stages in three sites, F, R, B = 1, 1, 2.
CellProblem figure6() {
  CellProblem cell;
  cell.pipelines = 2;
  cell.microbatches = 4;
  cell.durations = {
      std::vector<double>(6, 1),
      std::vector<double>{1, 1, 1, 1, 1, 0},
      std::vector<double>(6, 2),
      std::vector<double>(6, 0)};
  cell.hops = {{0, 0}, {2, 2}, {0, 0}, {2, 2}, {0, 0}};
  cell.latencies.assign(5, {0, 0});
  cell.crosses = {0, 1, 0, 1, 0};
  cell.relays = 2;
  cell.caps.assign(6, 4);
  return cell;
}

const std::vector<uint8_t> kBackwardFirst{
    kCellBackward,
    kCellForward,
    kCellRecompute,
    kCellWeight};
const std::vector<uint8_t> kRecomputeFirst{
    kCellBackward,
    kCellRecompute,
    kCellForward,
    kCellWeight};

// Paper: ATLAS §4.4
TEST(cell_schedules_of_figure_6) {
  const CellProblem cell = figure6();
  CellRules rules;
  rules.priority = kBackwardFirst;
  CHECK_EQ(scheduleCell(cell, rules).iteration, 34.0);
  rules.turn = 4;
  rules.reserve = true;
  const CellSchedule paper = scheduleCell(cell, rules);
  CHECK_EQ(paper.iteration, 36.0);
  CHECK_EQ(paper.starts[0][0], 0.0);
  CHECK_EQ(paper.starts[6][0], 4.0);
  CellRules varuna;
  varuna.priority = kRecomputeFirst;
  varuna.turn = 0;
  varuna.spatial = true;
  CHECK_EQ(scheduleCell(cell, varuna).iteration, 38.0);
}

TEST(cell_schedules_are_complete) {
  test::forSeeds(200, [](uint64_t seed) {
    Prng dice(seed);
    CellProblem cell = figure6();
    cell.pipelines = 1 + dice.below(4);
    cell.microbatches = 1 + dice.below(8);
    cell.relays = 1 + dice.below(8);
    cell.split = dice.below(2) != 0;
    for (size_t stage = 0; stage < cell.stages(); ++stage) {
      cell.caps[stage] = 1 + dice.below(cell.microbatches);
      for (auto& times : cell.durations) {
        times[stage] = static_cast<double>(dice.below(4));
      }
    }
    for (size_t hop = 0; hop + 1 < cell.stages(); ++hop) {
      cell.crosses[hop] = dice.below(2) != 0 ? 1 : 0;
      cell.hops[hop] = {
          static_cast<double>(dice.below(6)),
          static_cast<double>(dice.below(6))};
      cell.latencies[hop].fill(static_cast<double>(dice.below(6)));
    }
    CellRules rules;
    rules.priority = dice.below(2) != 0 ? kBackwardFirst : kRecomputeFirst;
    rules.turn = dice.below(cell.microbatches + 1);
    rules.reserve = dice.below(2) != 0;
    rules.spatial = dice.below(2) != 0;
    rules.early = dice.below(2) != 0;
    const CellSchedule found = scheduleCell(cell, rules);
    const size_t kinds = cell.split ? 4 : 3;
    for (size_t gpu = 0; gpu < found.kinds.size(); ++gpu) {
      const bool last = (gpu + 1) % cell.stages() == 0;
      CHECK_EQ(
          found.kinds[gpu].size(),
          cell.microbatches * (kinds - (last ? 1 : 0)));
    }
    const auto hops = static_cast<size_t>(
        std::accumulate(cell.crosses.begin(), cell.crosses.end(), 0));
    CHECK_EQ(
        found.sent.size(),
        hops * kDirections * cell.pipelines * cell.microbatches);
  });
}

} // namespace
} // namespace resilient
