#include "loss/redundancy.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace resilient {
namespace {

// Two packets, the second sent some places after the first: the chance that the
// second is lost if the first arrived, or was lost. In between the channel
// forgets, by the factor `memory` for each place.
struct Transitions {
  double rate;
  double lostAfterArrival;
  double lostAfterLoss;
};

Transitions transitions(const LossEstimate& loss, double places) {
  const double rate = std::min(loss.rate, 1.0);
  // Each burst ends with chance 1 / burstPackets, and bursts begin as often as
  // the rate requires. A mean of 1 / (1 - rate) is that of losses one by one;
  // less would mean that losses avoid each other, which no link does.
  const double end = 1 / loss.burstPackets;
  const double begin = rate < 1 ? rate * end / (1 - rate) : 1;
  const double memory = std::pow(std::max(0.0, 1 - begin - end), places);
  return {rate, rate * (1 - memory), rate + (1 - rate) * memory};
}

// [m]: the chance that more than m of data + m packets are lost, for m from 0
// to maxParity.
//
// How it works. It follows the channel packet by packet, with a chance for each
// number of losses and each state of the channel. After packet data + m the
// chance of at most m losses is complete, which gives one entry. So all entries
// come from one pass, of (data + maxParity) * maxParity steps. Chances beyond
// maxParity losses are dropped: they only add up to the rest.
//
// The count goes downward in the inner loop because each step reads the entry
// below it, which must still be that of the packet before.
std::vector<double>
chancesOfMoreThan(int data, int maxParity, const Transitions& chance) {
  const auto max = static_cast<size_t>(maxParity);
  std::vector<double> result;
  // The chances by the number of losses so far, up to the maximum of interest:
  // of this number, and that the last packet arrived, or was lost.
  std::vector<double> arrived(max + 1, 0.0);
  std::vector<double> lost(max + 1, 0.0);
  // Before the first packet: as in the long run.
  arrived[0] = 1 - chance.rate;
  lost[0] = chance.rate;
  for (int packet = 1; packet <= data + maxParity; ++packet) {
    for (size_t count = max + 1; count-- > 0;) {
      const double nowArrived = arrived[count] * (1 - chance.lostAfterArrival) +
          lost[count] * (1 - chance.lostAfterLoss);
      const double nowLost = count == 0
          ? 0.0
          : arrived[count - 1] * chance.lostAfterArrival +
              lost[count - 1] * chance.lostAfterLoss;
      arrived[count] = nowArrived;
      lost[count] = nowLost;
    }
    if (packet >= data) {
      double few = 0;
      for (size_t count = 0; count <= result.size(); ++count) {
        few += arrived[count] + lost[count];
      }
      result.push_back(std::max(0.0, 1 - few));
    }
  }
  return result;
}

// The chance that two or more of `packets` are lost. One minus the chances of
// no loss and of a single one: at the first place, at the last, or between. The
// closed form costs the same for any length.
double chanceOfTwo(int packets, const Transitions& chance) {
  if (packets < 2) {
    return 0;
  }
  const double stays = 1 - chance.lostAfterArrival;
  const double ends = 1 - chance.lostAfterLoss;
  const double none = (1 - chance.rate) * std::pow(stays, packets - 1);
  const double first = chance.rate * ends * std::pow(stays, packets - 2);
  const double last = (1 - chance.rate) * std::pow(stays, packets - 2) *
      chance.lostAfterArrival;
  const double between = packets < 3 ? 0.0
                                     : (packets - 2) * (1 - chance.rate) *
          std::pow(stays, packets - 3) * chance.lostAfterArrival * ends;
  return std::max(0.0, 1 - none - first - last - between);
}

void check(const LossEstimate& loss, int interleavedBlocks) {
  if (!(loss.rate >= 0 && loss.rate <= 1)) {
    throw std::invalid_argument(
        "loss rate: expected 0 to 1, got " + std::to_string(loss.rate));
  }
  if (!(loss.burstPackets >= 1 && std::isfinite(loss.burstPackets))) {
    throw std::invalid_argument(
        "burst length: expected at least 1 packet, got " +
        std::to_string(loss.burstPackets));
  }
  if (interleavedBlocks < 1) {
    throw std::invalid_argument(
        "interleaved blocks: expected at least 1, got " +
        std::to_string(interleavedBlocks));
  }
}

} // namespace

// The packets of a run decay among themselves, too: the last one has the full
// weight. The sum is that of a geometric series.
double LossMeter::age(uint64_t count) {
  static const double kKept = std::exp(-1 / kLossMemoryPackets);
  const double factor = std::pow(kKept, static_cast<double>(count));
  packets_ *= factor;
  lost_ *= factor;
  bursts_ *= factor;
  const double weight = (1 - factor) / (1 - kKept);
  packets_ += weight;
  return weight;
}

void LossMeter::onPackets(uint64_t received, uint64_t lost) {
  if (received > 0) {
    age(received);
    inBurst_ = false;
  }
  if (lost > 0) {
    lost_ += age(lost);
    bursts_ += inBurst_ ? 0 : 1;
    inBurst_ = true;
  }
}

LossEstimate LossMeter::estimate() const {
  if (packets_ == 0) {
    return {};
  }
  return {
      .rate = lost_ / packets_,
      .burstPackets = bursts_ > 0 ? std::max(1.0, lost_ / bursts_) : 1.0};
}

// Bursts are the independent events, so their number gives the standard error:
// the relative one is 1 / sqrt(bursts).
LossEstimate LossMeter::cautious() const {
  LossEstimate loss = estimate();
  if (bursts_ > 0) {
    const double more = 1 + 1 / std::sqrt(std::max(bursts_, 1.0));
    loss.rate = std::min(loss.rate * more, 1.0);
    if (loss.burstPackets > 1) {
      loss.burstPackets *= more;
    }
  }
  return loss;
}

double LossMeter::doubt() const {
  const double seen = packets_ / kLossMemoryPackets;
  return std::clamp(1 - seen + lost_, 0.0, 1.0);
}

// For XOR, packets that lie between two neighbours of a sequence belong to
// other sequences and blocks: the more there are, the more independent are the
// two losses.
double chanceUnrecovered(
    const BlockShape& shape,
    const LossEstimate& loss,
    int interleavedBlocks) {
  if (const char* fault = faultOfShape(shape)) {
    throw std::invalid_argument(fault);
  }
  check(loss, interleavedBlocks);
  if (shape.kind == ParityKind::kXor && shape.parity > 0) {
    // Paper: SMART §3.2: neighbours in a sequence are `parity` packets apart.
    const int length = (shape.data + shape.parity - 1) / shape.parity + 1;
    return chanceOfTwo(
        length,
        transitions(
            loss, static_cast<double>(shape.parity) * interleavedBlocks));
  }
  return chancesOfMoreThan(
             shape.data, shape.parity, transitions(loss, interleavedBlocks))
      .back();
}

// Exact while that is cheap. Beyond, the losses are summed up as a normal
// distribution with the variance of a chain: (1 + memory) / (1 - memory) times
// that of independent losses. Its error matters little to a decision between
// "hardly ever" and "at times"
// (redundancy_chance_of_more_losses_is_that_of_a_simulation).
double chanceOfMoreLost(int packets, int max, const LossEstimate& loss) {
  check(loss, 1);
  if (max < 0 || max >= packets) {
    throw std::invalid_argument(
        "losses: expected 0 to less than " + std::to_string(packets) +
        ", got " + std::to_string(max));
  }
  if (loss.rate == 0) {
    return 0;
  }
  const Transitions chance = transitions(loss, 1);
  // Beyond, the sum of the losses is near enough to a normal distribution.
  constexpr int64_t kMaxSteps = 1 << 15;
  if (int64_t{packets} * max <= kMaxSteps) {
    return chancesOfMoreThan(packets - max, max, chance).back();
  }
  // Neighbours are alike: the variance is that of fewer, larger losses.
  const double memory = chance.lostAfterLoss - chance.lostAfterArrival;
  const double mean = packets * chance.rate;
  const double variance =
      mean * (1 - chance.rate) * (1 + memory) / std::max(1 - memory, 1e-9);
  return std::erfc((max + 0.5 - mean) / std::sqrt(2 * variance)) / 2;
}

// Searches upward from the least parity that is allowed. Reed-Solomon has the
// chances of all amounts from one pass; XOR computes each, since its sequences
// change with the amount.
BlockShape chooseShape(
    ParityKind kind,
    int dataPackets,
    const LossEstimate& loss,
    const RedundancyLimits& limits) {
  if (const char* fault = faultOfShape({kind, dataPackets, 0})) {
    throw std::invalid_argument(fault);
  }
  check(loss, limits.interleavedBlocks);
  if (!(limits.minRatio >= 0 && limits.maxRatio >= limits.minRatio &&
        std::isfinite(limits.maxRatio))) {
    throw std::invalid_argument(
        "redundancy: expected 0 <= least ratio <= most ratio, got " +
        std::to_string(limits.minRatio) + " and " +
        std::to_string(limits.maxRatio));
  }
  if (kind == ParityKind::kNone) {
    return {ParityKind::kNone, dataPackets, 0};
  }
  // XOR: one for each packet is a copy of it, and more are of no use.
  const int room = kind == ParityKind::kReedSolomon
      ? kMaxBlockSymbols - dataPackets
      : dataPackets;
  // A ratio of 0.07 shall be 7 of 100, though 0.07 * 100 is a little more.
  const auto within = [room](double parity) {
    return static_cast<int>(std::clamp<double>(parity, 0, room));
  };
  const int min = within(std::ceil(limits.minRatio * dataPackets - 1e-9));
  const int max =
      std::max(min, within(std::floor(limits.maxRatio * dataPackets + 1e-9)));

  int parity = min;
  if (limits.congested) {
    // Paper: SMART §4.3: parity goes down under congestion.
  } else if (kind == ParityKind::kReedSolomon) {
    const std::vector<double> chances = chancesOfMoreThan(
        dataPackets, max, transitions(loss, limits.interleavedBlocks));
    while (parity < max &&
           chances[static_cast<size_t>(parity)] > limits.target) {
      ++parity;
    }
  } else {
    while (parity < max &&
           chanceUnrecovered(
               {kind, dataPackets, parity}, loss, limits.interleavedBlocks) >
               limits.target) {
      ++parity;
    }
  }
  return {parity == 0 ? ParityKind::kNone : kind, dataPackets, parity};
}

} // namespace resilient
