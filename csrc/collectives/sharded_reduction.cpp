#include "collectives/sharded_reduction.h"

#include <algorithm>
#include <memory>

#include "collectives/algorithms.h"
#include "collectives/compute.h"

namespace resilient {
namespace {

constexpr unsigned kContribution = 1; // slot phases
constexpr unsigned kResult = 2;

} // namespace

std::vector<size_t> shardCounts(size_t count, int ranks) {
  const size_t n = static_cast<size_t>(ranks);
  std::vector<size_t> counts(n, count / n);
  for (size_t i = 0; i < count % n; ++i) {
    ++counts[i];
  }
  return counts;
}

// Iteration s handles segment s of every shard: contributions in, reduce,
// result out. Contributions of the next `window` segments are on their way
// meanwhile. Nobody waits in a circle: what iteration s waits for has been
// posted by every peer in its iteration s - window, so the rank that is
// furthest behind can always go on.
Task reduceSharded(Communicator& comm, ShardedReduction job) {
  using Results = ShardedReduction::Results;
  const size_t n = static_cast<size_t>(comm.size());
  const size_t me = static_cast<size_t>(comm.rank());
  const size_t window = job.tuning.window;
  const size_t elementBytes = dtypeBytes(job.reduction.dtype);
  const size_t segmentCount =
      std::max<size_t>(job.tuning.segmentBytes / elementBytes, 1);
  const bool scaled = job.reduction.op == ReduceOp::kPreMulSum;
  const bool sendsResult = job.results == Results::kToAll ||
      (job.results == Results::kToRoot && comm.rank() != job.root);
  const bool receivesResults = job.results == Results::kToAll ||
      (job.results == Results::kToRoot && comm.rank() == job.root);

  // Segments of each shard: one, if empty, so that there is a message.
  std::vector<size_t> segments(n, 0);
  size_t steps = 0;
  size_t largestCount = 0;
  for (size_t r = 0; r < n; ++r) {
    if (job.onlyOwner < 0 || static_cast<size_t>(job.onlyOwner) == r) {
      segments[r] = std::max<size_t>(
          (job.counts[r] + segmentCount - 1) / segmentCount, 1);
      steps = std::max(steps, segments[r]);
      largestCount = std::max(largestCount, job.counts[r]);
    }
  }
  const auto countOf = [&job, segmentCount](size_t r, size_t s) {
    return std::min(segmentCount, job.counts[r] - s * segmentCount);
  };

  // Scratch memory, by window slot and rank. Declared before the transfers
  // that use it: they must be cancelled first.
  const size_t lanes = std::min(window, steps);
  const size_t mineBytes =
      std::min(segmentCount, job.counts[me]) * elementBytes;
  const size_t scaledBytes =
      scaled ? std::min(segmentCount, largestCount) * elementBytes : 0;
  const size_t resultBytes = job.output == nullptr ? mineBytes : 0;
  const bool owner = segments[me] > 0;
  auto incoming = std::make_unique_for_overwrite<unsigned char[]>(
      owner ? lanes * (n - 1) * mineBytes : 0);
  auto scaledInputs =
      std::make_unique_for_overwrite<unsigned char[]>(lanes * n * scaledBytes);
  auto passedOn =
      std::make_unique_for_overwrite<unsigned char[]>(lanes * resultBytes);

  auto contributionSends = std::make_unique<Transfer[]>(lanes * n);
  auto contributionRecvs = std::make_unique<Transfer[]>(lanes * n);
  auto resultSends = std::make_unique<Transfer[]>(lanes * n);
  auto resultRecvs = std::make_unique<Transfer[]>(lanes * n);
  ComputeBudget budget;
  std::vector<const void*> operands(n);

  const auto incomingAt = [&incoming, n, me, mineBytes](
                              size_t lane, size_t peer) {
    const size_t index = peer < me ? peer : peer - 1;
    return incoming.get() + (lane * (n - 1) + index) * mineBytes;
  };
  const auto contributionAt = [&](size_t lane, size_t r, size_t s) {
    return scaled ? scaledInputs.get() + (lane * n + r) * scaledBytes
                  : at(job.inputs[r], s * segmentCount * elementBytes);
  };

  // The first `lanes` turns only post; the others finish segment `turn -
  // lanes` and post segment `turn` into the lane that became free.
  for (size_t turn = 0; turn < steps + lanes; ++turn) {
    const size_t lane = turn % lanes;
    if (turn >= lanes) {
      const size_t s = turn - lanes;
      for (size_t r = 0; r < n; ++r) {
        co_await finish(resultSends[lane * n + r]);
        co_await finish(resultRecvs[lane * n + r]);
      }
      if (s < segments[me]) {
        for (size_t r = 0; r < n; ++r) {
          co_await finish(contributionRecvs[lane * n + r]);
          operands[r] = r == me
              ? static_cast<const void*>(contributionAt(lane, me, s))
              : static_cast<const void*>(incomingAt(lane, r));
        }
        unsigned char* result = job.output != nullptr
            ? at(job.output, s * segmentCount * elementBytes)
            : passedOn.get() + lane * resultBytes;
        Task reducing = reduceSliced(
            comm,
            budget,
            result,
            operands,
            countOf(me, s),
            job.reduction,
            true);
        co_await reducing;
        for (size_t i = 1; sendsResult && i < n; ++i) {
          const size_t peer = (me + i) % n;
          if (job.results == Results::kToAll ||
              peer == static_cast<size_t>(job.root)) {
            comm.startSend(
                resultSends[lane * n + peer],
                static_cast<int>(peer),
                slotOf(kResult, s),
                result,
                countOf(me, s) * elementBytes);
          }
        }
      }
      // A result arrives where our contribution is being sent from: that
      // memory is lent until the send is over.
      for (size_t r = 0; r < n; ++r) {
        co_await finish(contributionSends[lane * n + r]);
        if (receivesResults && r != me && s < segments[r]) {
          comm.startRecv(
              resultRecvs[lane * n + r],
              static_cast<int>(r),
              slotOf(kResult, s),
              at(job.places[r], s * segmentCount * elementBytes),
              countOf(r, s) * elementBytes);
        }
      }
    }
    if (turn >= steps) {
      continue;
    }
    for (size_t i = 1; i < n; ++i) {
      const size_t from = (me + n - i) % n;
      if (turn < segments[me]) {
        comm.startRecv(
            contributionRecvs[lane * n + from],
            static_cast<int>(from),
            slotOf(kContribution, turn),
            incomingAt(lane, from),
            countOf(me, turn) * elementBytes);
      }
    }
    // Staggered, each rank starting with its successor, so that not all send
    // to rank 0 first. The own shard (i == n) comes last and is only scaled.
    for (size_t i = 1; i <= n; ++i) {
      const size_t to = (me + i) % n;
      if (turn >= segments[to]) {
        continue;
      }
      if (scaled) {
        Task scaling = scaleSliced(
            comm,
            budget,
            scaledInputs.get() + (lane * n + to) * scaledBytes,
            at(job.inputs[to], turn * segmentCount * elementBytes),
            countOf(to, turn),
            job.reduction);
        co_await scaling;
      }
      if (to != me) {
        comm.startSend(
            contributionSends[lane * n + to],
            static_cast<int>(to),
            slotOf(kContribution, turn),
            contributionAt(lane, to, turn),
            countOf(to, turn) * elementBytes);
      }
    }
  }
  for (size_t i = 0; i < lanes * n; ++i) {
    co_await finish(resultSends[i]);
    co_await finish(resultRecvs[i]);
  }
}

} // namespace resilient
