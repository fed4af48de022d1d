#include "planning/generator.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

namespace resilient {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// When each stage looks what it can do, and who is next: of several at one
// time the first stage. A tournament tree: changing a time costs the height.
class Looks {
 public:
  explicit Looks(size_t stages)
      : leaves_(std::bit_ceil(stages)),
        times_(leaves_, kNever),
        winners_(2 * leaves_) {
    for (size_t i = 0; i < leaves_; ++i) {
      winners_[leaves_ + i] = static_cast<uint32_t>(i);
    }
    for (size_t node = leaves_ - 1; node > 0; --node) {
      winners_[node] = winners_[2 * node];
    }
  }

  size_t next() const {
    return winners_[1];
  }
  double time(size_t stage) const {
    return times_[stage];
  }
  void set(size_t stage, double time) {
    times_[stage] = time;
    for (size_t node = (leaves_ + stage) / 2; node > 0; node /= 2) {
      const uint32_t left = winners_[2 * node];
      const uint32_t right = winners_[2 * node + 1];
      winners_[node] = times_[right] < times_[left] ? right : left;
    }
  }

 private:
  size_t leaves_;
  std::vector<double> times_; // by stage
  std::vector<uint32_t> winners_; // by node, the root is 1
};

// Arrivals of one kind of message at one stage, by microbatch.
struct Arrivals {
  std::vector<double> times; // room for all of them
  size_t known = 0;

  void add(double time) {
    times[known++] = time;
  }
  double of(size_t microbatch) const {
    return microbatch < known ? times[microbatch] : kNever;
  }
};

struct Stage {
  double forward = 0, inputBackward = 0, weightBackward = 0;
  double delayForward = 0, delayBackward = 0; // of what it sends
  size_t quota = 0, maxHeld = 0, maxPending = 0;
  Arrivals inputs, gradients;
  size_t forwards = 0, backwards = 0, weights = 0; // done
  double free = 0; // since when, or from when on
};

} // namespace

// Paper: PIPEMORPH §4.3, Algorithms 3 and 4
//
// How it works. Time jumps from look to look. At a look, a stage that is free
// chooses one operation by the rules or stays idle; either way it gets the time
// of its next look, and only a message that arrives at an idle stage can bring
// that forward. Each operation costs one look at least, and a look costs the
// height of the tree. Looks at one time are taken by ascending stage, which
// makes the result unique. A receiver knows when a message will arrive as soon
// as the operation that sends it starts; rules.weightShare uses that.
Generated generate(
    const PipelineCosts& costs,
    size_t microbatches,
    const Rules& rules,
    const Limits& limits) {
  const size_t last = costs.stages() - 1;
  const size_t maxWeights =
      std::max<size_t>(rules.maxWeights.value_or(microbatches), 1);
  std::vector<Stage> stages(costs.stages());
  Generated result;
  result.orders.resize(costs.stages());
  for (size_t i = 0; i <= last; ++i) {
    Stage& stage = stages[i];
    stage.forward = costs.forward[i];
    stage.inputBackward = costs.inputBackward[i];
    stage.weightBackward = costs.weightBackward[i];
    stage.delayForward = i < last ? costs.delayForward[i] : 0;
    stage.delayBackward = i > 0 ? costs.delayBackward[i - 1] : 0;
    stage.quota =
        std::min({rules.warmup[i], limits.activations[i], limits.pending[i]});
    if (i > 0) {
      // A stage that waited for more than the one before gives would wait
      // forever.
      stage.quota = std::min(stage.quota, stages[i - 1].quota);
    }
    stage.maxHeld = rules.gate ? stage.quota : limits.activations[i];
    stage.maxPending = limits.pending[i];
    stage.inputs.times.resize(microbatches);
    stage.gradients.times.resize(microbatches);
    result.orders[i].reserve(kKinds * microbatches);
  }
  stages[0].inputs.known = microbatches;

  Looks looks(costs.stages());
  looks.set(0, 0);
  // generator.py notes a look for each arrival. Here an idle stage has one, for
  // the first arrival that can change its mind, and a busy one looks when it is
  // free: what is left out are looks that find nothing new.
  const auto arrive = [&](size_t i, Arrivals& arrivals, double time) {
    arrivals.add(time);
    if (stages[i].free <= time && time < looks.time(i)) {
      looks.set(i, time);
    }
  };
  for (;;) {
    const size_t i = looks.next();
    const double now = looks.time(i);
    if (now == kNever) {
      break;
    }
    Stage& stage = stages[i];
    const bool mayStart = stage.forwards - stage.backwards < stage.maxHeld &&
        stage.forwards - stage.weights < stage.maxPending;
    const double input = mayStart ? stage.inputs.of(stage.forwards) : kNever;
    const double gradient = stage.gradients.of(stage.backwards);
    const size_t ready = stage.backwards - stage.weights; // W
    bool idle = false;
    OperationKind kind = kWeightBackward;
    if (rules.waitForWarmup && stage.forwards < stage.quota) {
      kind = kForward;
      idle = input > now;
    } else if (
        gradient <= now &&
        !(rules.forwardFirst && input <= now &&
          stage.forwards - stage.backwards < stage.quota)) {
      kind = kInputBackward;
    } else if (input <= now && ready < maxWeights) {
      kind = kForward;
    } else if (ready == 0) {
      idle = true;
    } else if (rules.weightShare != 0 && ready < maxWeights) {
      idle = std::min(input, gradient) - now <
          rules.weightShare * stage.weightBackward;
    }
    if (idle) {
      looks.set(
          i,
          std::min(
              input > now ? input : kNever,
              gradient > now ? gradient : kNever));
      continue;
    }
    Kinds& order = result.orders[i];
    order.push_back(kind);
    if (kind == kForward) {
      ++stage.forwards;
      stage.free = now + stage.forward;
    } else if (kind == kInputBackward) {
      ++stage.backwards;
      stage.free = now + stage.inputBackward;
    } else {
      ++stage.weights;
      stage.free = now + stage.weightBackward;
    }
    looks.set(i, order.size() < kKinds * microbatches ? stage.free : kNever);
    if (kind == kForward && i < last) {
      arrive(i + 1, stages[i + 1].inputs, stage.free + stage.delayForward);
    } else if (kind == kForward) {
      stage.gradients.add(stage.free);
    } else if (kind == kInputBackward && i > 0) {
      arrive(i - 1, stages[i - 1].gradients, stage.free + stage.delayBackward);
    }
  }
  for (const Stage& stage : stages) {
    result.iterationS = std::max(result.iterationS, stage.free);
  }
  return result;
}

} // namespace resilient
