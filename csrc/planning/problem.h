#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace resilient {

// The planner's problem: the twins of torch_resilient/planning/costs.py and
// generator.py, which define each value.

// Numbers of the kinds of operations in compact orders. Each kind goes through
// the microbatches in turn, so the kinds of a stage's operations are its order.
// The numbers are part of the interface to Python, where an order is a bytes
// object. B of a microbatch follows its F, and W its B, on each stage.
enum OperationKind : uint8_t { kForward, kInputBackward, kWeightBackward };
inline constexpr size_t kKinds = 3;

using Kinds = std::vector<uint8_t>; // of one stage
using Orders = std::vector<Kinds>; // by stage

// Seconds. Stages and links are counted from the pipeline's input on; link i is
// between stages i and i + 1. None is negative, and all are finite. With n
// stages there are n - 1 links. The core checks none of this: bindings.cpp
// checks the sizes, costs.py the values.
struct PipelineCosts {
  std::vector<double> forward, inputBackward, weightBackward; // by stage
  std::vector<double> delayForward, delayBackward; // by link

  size_t stages() const {
    return forward.size();
  }
};

// The most microbatches that a stage may hold, by stage.
struct Limits {
  std::vector<size_t> activations; // between F and B
  std::vector<size_t> pending; // between F and W

  // Whether the order of `stage` keeps to them; false also for B before F or W
  // before B of a microbatch. A microbatch is pending from F to W, which
  // includes the time from F to B. Time: linear in the order.
  bool allowStage(size_t stage, const Kinds& kinds) const {
    size_t forwards = 0, backwards = 0, weights = 0;
    for (const uint8_t kind : kinds) {
      if (kind == kForward) {
        ++forwards;
        if (forwards - backwards > activations[stage] ||
            forwards - weights > pending[stage]) {
          return false;
        }
      } else if (kind == kInputBackward) {
        if (++backwards > forwards) {
          return false;
        }
      } else if (++weights > backwards) {
        return false;
      }
    }
    return true;
  }
};

} // namespace resilient
