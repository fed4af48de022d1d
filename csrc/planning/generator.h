#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "planning/problem.h"

namespace resilient {

// How a stage chooses among the operations that could start now; Rules in
// torch_resilient/planning/generator.py says what each does. The fields of both
// are the same, and so are their defaults.
struct Rules {
  std::vector<size_t> warmup; // by stage, x_i of the paper
  bool waitForWarmup = false;
  bool gate = false;
  bool forwardFirst = false;
  double weightShare = 0;
  std::optional<size_t> maxWeights;
};

struct Generated {
  Orders orders;
  double iterationS = 0;
};

// The orders by these rules, within the limits, and the iteration time. The
// readable text of the algorithm is `generate` in generator.py; this one makes
// the same decisions, and its times are the same to the last bit.
//
// Time: O(log stages) for each operation.
//
// Preconditions: at least one stage and one microbatch; each warm-up and limit
// is at least 1. The orders are complete and free of deadlock.
Generated generate(
    const PipelineCosts& costs,
    size_t microbatches,
    const Rules& rules,
    const Limits& limits);

} // namespace resilient
