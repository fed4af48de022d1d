#pragma once

#include <cstdint>

#include "loss/parity_code.h"

// How much parity a block gets, from the loss that was measured. Pure; time is
// counted in packets.
namespace resilient {

// With burstPackets 1 / (1 - rate) or less, losses are independent.
struct LossEstimate {
  double rate = 0; // share of packets that are lost, 0 to 1
  double burstPackets = 1; // mean number of losses in a row, at least 1
};

// Loss rate and burst length of one direction of a path, of late. Not
// thread-safe; its sender's alone.
class LossMeter {
 public:
  // A run, in the order of sending: `received` packets that arrived, then
  // `lost` that did not. Either may be 0; a burst may go on in the next run.
  // The result does not depend on how a sequence is cut into runs
  // (redundancy_meter_does_not_care_how_runs_are_cut).
  void onPackets(uint64_t received, uint64_t lost);

  // Rate 0 before the first report.
  LossEstimate estimate() const;
  // An upper estimate: more by a standard error, which is large if losses come
  // in few bursts. Repair that is planned for the estimate itself falls short
  // half of the time.
  LossEstimate cautious() const;
  // How far the next packets may be lost unlike those before: 1 where little is
  // known and after a loss; towards 0 the longer none was lost.
  double doubt() const;

 private:
  // Ages everything by `count` packets; returns the weight that these have.
  double age(uint64_t count);

  // Decaying sums: a packet counts less the more have come after it.
  double packets_ = 0;
  double lost_ = 0;
  double bursts_ = 0;
  bool inBurst_ = false;
};

// For how long a packet counts: its weight falls to 1 / e after this many more.
// At 1 % loss the rate is known within a twelfth (160 losses), at 0.1 % within
// a quarter; at 1 Gbit/s it is 0.2 s of traffic, so longer than most round
// trips. Fewer, and redundancy follows chance; more, and it comes late.
inline constexpr double kLossMemoryPackets = 16384;

// The target of chooseShape, if no other is given. A message of 1 MiB has eight
// blocks of 100 packets; then fewer than 1 % of the messages wait for a
// retransmission, and the 99th percentile of their times is that without loss.
// Ten times less would cost about two more parity packets of 100 at 1 % loss.
inline constexpr double kTargetUnrecovered = 1e-3;

// The code has limits of its own: Reed-Solomon has at most kMaxBlockSymbols
// symbols in a block, and XOR at most one repair symbol for each data symbol.
struct RedundancyLimits {
  // Parity for each data packet; 0 <= minRatio <= maxRatio.
  double minRatio = 0;
  double maxRatio = 0.5;
  // Loss comes with growing queues: then parity only adds to what overflows.
  bool congested = false;
  // Over how many blocks the sender spreads neighbours: 2 if it sends packet 0
  // of two blocks, then packet 1 of both, and so on.
  int interleavedBlocks = 1;
  // The chance that a block stays unrecovered, at most.
  double target = kTargetUnrecovered;
};

// The chance that repair is not complete if losses are a Gilbert channel (each
// packet is lost or not depending on the one before only) with this rate and
// mean burst length: of a block for Reed-Solomon and without parity, of the
// longest of its sequences for XOR.
double chanceUnrecovered(
    const BlockShape& shape,
    const LossEstimate& loss,
    int interleavedBlocks);

// The chance that more than `max` of `packets` that leave one after the other
// are lost, 0 <= max < packets. Takes tens of microseconds. Throws
// std::invalid_argument.
double chanceOfMoreLost(int packets, int max, const LossEstimate& loss);

// The least parity for `dataPackets` with which chanceUnrecovered() is at most
// the target, or the most that the limits and the code allow. Kind
// kNone if that is no parity at all. XOR aims at the target for each sequence:
// for the whole block no affordable number would reach it. Congested: the
// least that the limits allow (Paper: SMART §4.3). Takes tens of microseconds:
// for a new measurement, not for each block. Throws std::invalid_argument.
BlockShape chooseShape(
    ParityKind kind,
    int dataPackets,
    const LossEstimate& loss,
    const RedundancyLimits& limits);

} // namespace resilient
