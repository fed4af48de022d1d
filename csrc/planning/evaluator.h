#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "planning/problem.h"

namespace resilient {

// The result of replaying compact orders, for one stage, in seconds.
struct StageTimes {
  double begin = 0; // of its first operation
  double forwardWait = 0; // after that, for activations
  double backwardWait = 0; // and for gradients
  double end = 0; // of its last operation
};

// Iteration times of compact orders, the same to the last bit as those of
// torch_resilient/planning/replay.py. Keeps its memory from run to run. The
// same sums in the same order give the same bits: the twins in
// tests/planner_twins compare with ==, and so does Search when it looks for
// operations that run back to back. Do not reorder an addition.
//
// Copies the costs. Not thread-safe.
class Evaluator {
 public:
  // The durations of one stage's F, B and W.
  using Durations = double[kKinds];

  Evaluator(const PipelineCosts& costs, size_t microbatches);

  // Runs the orders, which hold each kind `microbatches` times on each stage.
  // False if the stages wait for each other, and, sooner, if it takes more
  // than `maxS`; then the results below mean nothing.
  //
  // Time: linear in the number of operations.
  //
  // Precondition: every order has 3 x microbatches entries, none above
  // kWeightBackward. Positions are not checked again.
  bool run(
      const Orders& orders,
      double maxS = std::numeric_limits<double>::infinity());

  // These are of the last run(), and overwritten by the next one.
  double iterationS() const;
  const StageTimes& times(size_t stage) const {
    return stages_[stage].times;
  }
  // When each operation of the stage starts.
  const std::vector<double>& starts(size_t stage) const {
    return stages_[stage].starts;
  }
  const Durations& durations(size_t stage) const {
    return stages_[stage].durations;
  }

 private:
  struct Stage {
    Durations durations{};
    double delayForward = 0, delayBackward = 0; // of what it sends
    StageTimes times;
    std::vector<double> starts;
    std::vector<double> inputs, gradients; // arrivals, by microbatch
    size_t inputsKnown = 0, gradientsKnown = 0;
    size_t position = 0, forwards = 0, backwards = 0; // done
    bool queued = false;
  };

  // Runs the stage until it has to wait. Returns whether it got any further.
  bool advance(size_t index, const Kinds& kinds);
  // Seconds that what is left of the stage takes at least.
  double left(const Stage& stage) const;

  size_t microbatches_;
  std::vector<Stage> stages_;
  // Stages to look at, a stack; Stage::queued keeps each from being in it
  // twice.
  std::vector<size_t> runnable_;
};

// The most microbatches that a stage holds with this order.
struct MemoryPeaks {
  size_t activations = 0; // between F and B
  size_t pending = 0; // between F and W
  double units = 0; // of memory
};

// `activationUnits`: memory of a microbatch between F and B; `weightUnits`:
// between B and W.
MemoryPeaks
memoryPeaks(const Kinds& kinds, double activationUnits, double weightUnits);

} // namespace resilient
