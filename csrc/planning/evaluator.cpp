#include "planning/evaluator.h"

#include <algorithm>

namespace resilient {

Evaluator::Evaluator(const PipelineCosts& costs, size_t microbatches)
    : microbatches_(microbatches), stages_(costs.stages()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    stage.durations[kForward] = costs.forward[i];
    stage.durations[kInputBackward] = costs.inputBackward[i];
    stage.durations[kWeightBackward] = costs.weightBackward[i];
    stage.delayForward = i + 1 < stages_.size() ? costs.delayForward[i] : 0;
    stage.delayBackward = i > 0 ? costs.delayBackward[i - 1] : 0;
    stage.starts.resize(kKinds * microbatches);
    stage.inputs.resize(microbatches); // 0 for the first stage, always
    stage.gradients.resize(microbatches);
  }
}

// How it works. Each stage runs as far as its messages reach, then wakes its
// two neighbours, since it may have sent something to them. The order in which
// stages run does not change the times: an operation starts when its
// predecessor has ended and its message has arrived. No clock is needed. Stages
// that wait for each other are never woken again, so the loop ends with some
// incomplete.
//
// A stage cannot end before its present end plus the durations of what is left.
// If that exceeds maxS, the orders are given up at once.
bool Evaluator::run(const Orders& orders, double maxS) {
  runnable_.clear();
  for (size_t i = stages_.size(); i-- > 0;) {
    Stage& stage = stages_[i];
    stage.times = StageTimes();
    stage.inputsKnown = i == 0 ? microbatches_ : 0;
    stage.gradientsKnown = 0;
    stage.position = stage.forwards = stage.backwards = 0;
    stage.queued = true;
    runnable_.push_back(i);
  }
  const size_t length = kKinds * microbatches_;
  size_t complete = 0;
  while (!runnable_.empty()) {
    const size_t i = runnable_.back();
    runnable_.pop_back();
    Stage& stage = stages_[i];
    stage.queued = false;
    const bool further = advance(i, orders[i]);
    if (stage.times.end + left(stage) > maxS) {
      return false;
    }
    complete += further && stage.position == length;
    const auto wake = [&](size_t other) {
      if (!stages_[other].queued && stages_[other].position < length) {
        stages_[other].queued = true;
        runnable_.push_back(other);
      }
    };
    if (further && i > 0) {
      wake(i - 1);
    }
    if (further && i + 1 < stages_.size()) {
      wake(i + 1);
    }
  }
  return complete == stages_.size();
}

// F of the last stage sends to itself: its gradient is there when it ends. Idle
// time before the first operation is no wait. W needs no message, since its B
// comes before it in the order.
bool Evaluator::advance(size_t index, const Kinds& kinds) {
  Stage& stage = stages_[index];
  Stage* next = index + 1 < stages_.size() ? &stage + 1 : nullptr;
  Stage* previous = index > 0 ? &stage - 1 : nullptr;
  const size_t begin = stage.position;
  const size_t length = kKinds * microbatches_;
  double now = stage.times.end;
  size_t position = begin;
  for (; position < length; ++position) {
    const uint8_t kind = kinds[position];
    if (kind == kWeightBackward) {
      stage.starts[position] = now;
      now += stage.durations[kWeightBackward];
      continue;
    }
    const bool forward = kind == kForward;
    size_t& microbatch = forward ? stage.forwards : stage.backwards;
    if (microbatch == (forward ? stage.inputsKnown : stage.gradientsKnown)) {
      break;
    }
    const double arrival =
        (forward ? stage.inputs : stage.gradients)[microbatch];
    if (arrival > now) {
      if (position > 0) {
        (forward ? stage.times.forwardWait : stage.times.backwardWait) +=
            arrival - now;
      }
      now = arrival;
    }
    stage.starts[position] = now;
    now += stage.durations[kind];
    if (!forward) {
      if (previous != nullptr) {
        previous->gradients[microbatch] = now + stage.delayBackward;
        ++previous->gradientsKnown;
      }
    } else if (next != nullptr) {
      next->inputs[microbatch] = now + stage.delayForward;
      ++next->inputsKnown;
    } else {
      stage.gradients[microbatch] = now;
      ++stage.gradientsKnown;
    }
    ++microbatch;
  }
  stage.position = position;
  stage.times.end = now;
  if (position > 0) {
    stage.times.begin = stage.starts[0];
  }
  return position > begin;
}

// A sum of products, which rounding may make a little larger than the sum in
// run(). A caller that compares exactly leaves room for that in maxS.
double Evaluator::left(const Stage& stage) const {
  const auto times = [](size_t count, double each) {
    return static_cast<double>(count) * each;
  };
  const size_t weights = stage.position - stage.forwards - stage.backwards;
  return times(microbatches_ - stage.forwards, stage.durations[kForward]) +
      times(microbatches_ - stage.backwards, stage.durations[kInputBackward]) +
      times(microbatches_ - weights, stage.durations[kWeightBackward]);
}

double Evaluator::iterationS() const {
  double longest = 0;
  for (const Stage& stage : stages_) {
    longest = std::max(longest, stage.times.end);
  }
  return longest;
}

MemoryPeaks
memoryPeaks(const Kinds& kinds, double activationUnits, double weightUnits) {
  MemoryPeaks max;
  size_t done[kKinds] = {};
  for (const uint8_t kind : kinds) {
    ++done[kind];
    const size_t held = done[kForward] - done[kInputBackward];
    const size_t backward = done[kInputBackward] - done[kWeightBackward];
    max.activations = std::max(max.activations, held);
    max.pending = std::max(max.pending, held + backward);
    max.units = std::max(
        max.units,
        static_cast<double>(held) * activationUnits +
            static_cast<double>(backward) * weightUnits);
  }
  return max;
}

} // namespace resilient
