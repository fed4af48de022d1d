#include "collectives/sharded_reduction.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"

namespace resilient {
namespace {

using Results = ShardedReduction::Results;
using Scratch = std::unique_ptr<unsigned char[]>;

constexpr unsigned kContribution = 1; // slot phases
constexpr unsigned kResult = 2;

// The transfers of one kind, by lane and rank.
class Transfers {
 public:
  Transfers(size_t lanes, size_t ranks)
      : ranks_(ranks),
        transfers_(std::make_unique<Transfer[]>(lanes * ranks)) {}
  Transfer& of(size_t lane, size_t rank) {
    return transfers_[lane * ranks_ + rank];
  }

 private:
  size_t ranks_;
  std::unique_ptr<Transfer[]> transfers_;
};

// One reduceSharded(): how each shard is cut into segments, the scratch memory
// and the transfers of the lanes. A lane has what one segment of every shard
// needs: segment s uses lane s % lanes, so `lanes` segments are on their way at
// a time.
//
// Lives in the frame of reduceSharded() and outlives the Tasks there.
class ShardedRun {
 public:
  ShardedRun(Communicator& comm, ShardedReduction job)
      : comm_(comm),
        job_(std::move(job)),
        ranks_(static_cast<size_t>(comm.size())),
        me_(static_cast<size_t>(comm.rank())),
        elementBytes_(dtypeBytes(job_.reduction.dtype)),
        segmentCount_(
            std::max<size_t>(job_.tuning.segmentBytes / elementBytes_, 1)),
        segments_(segmentsOf(job_, segmentCount_)),
        steps_(*std::max_element(segments_.begin(), segments_.end())),
        lanes_(std::min(job_.tuning.window, steps_)),
        mineBytes_(std::min(segmentCount_, job_.counts[me_]) * elementBytes_),
        scaledBytes_(scaled() ? largestSegment() * elementBytes_ : 0),
        incoming_(scratch(
            segments_[me_] > 0 ? lanes_ * (ranks_ - 1) * mineBytes_ : 0)),
        scaledInputs_(scratch(lanes_ * ranks_ * scaledBytes_)),
        passedOn_(scratch(job_.output == nullptr ? lanes_ * mineBytes_ : 0)),
        contributionSends_(lanes_, ranks_),
        contributionRecvs_(lanes_, ranks_),
        resultSends_(lanes_, ranks_),
        resultRecvs_(lanes_, ranks_),
        operands_(ranks_) {}
  ShardedRun(const ShardedRun&) = delete;
  ShardedRun& operator=(const ShardedRun&) = delete;

  size_t ranks() const {
    return ranks_;
  }
  size_t me() const {
    return me_;
  }
  // The segments of the longest shard.
  size_t steps() const {
    return steps_;
  }
  size_t lanes() const {
    return lanes_;
  }
  // kPreMulSum: contributions are scaled before they are sent.
  bool scaled() const {
    return job_.reduction.op == ReduceOp::kPreMulSum;
  }
  bool hasSegment(size_t rank, size_t s) const {
    return s < segments_[rank];
  }

  // Posts the receives of all contributions to our segment s.
  // The lane must be free: finishSegment(s - lanes) has ended.
  void receiveContributions(size_t s) {
    for (size_t i = 1; i < ranks_; ++i) {
      const size_t from = (me_ + ranks_ - i) % ranks_;
      comm_.startRecv(
          contributionRecvs_.of(lane(s), from),
          static_cast<int>(from),
          slotOf(kContribution, s),
          incomingAt(s, from),
          bytesOf(me_, s));
    }
  }

  // Scales our contribution to segment s of a shard into scratch memory: the
  // inputs are not ours to scale in place.
  Task scaleContribution(size_t to, size_t s) {
    return scaleSliced(
        comm_,
        budget_,
        scaledAt(s, to),
        at(job_.inputs[to], offsetOf(s)),
        countOf(to, s),
        job_.reduction);
  }

  // The memory stays lent until finishSegment(s).
  void sendContribution(size_t to, size_t s) {
    comm_.startSend(
        contributionSends_.of(lane(s), to),
        static_cast<int>(to),
        slotOf(kContribution, s),
        contributionAt(s, to),
        bytesOf(to, s));
  }

  // Ends what segment s began, for every shard, and the results that still use
  // its lane: afterwards the lane is free for contributions, while results of
  // this segment may be on their way.
  // The result is sent before the contributions' sends are awaited, so a slow
  // receiver of a contribution does not delay it.
  Task finishSegment(size_t s) {
    Task emptying = finishResults(lane(s));
    co_await emptying;
    if (hasSegment(me_, s)) {
      for (size_t r = 0; r < ranks_; ++r) {
        co_await finish(contributionRecvs_.of(lane(s), r));
        operands_[r] = r == me_ ? contributionAt(s, me_) : incomingAt(s, r);
      }
      unsigned char* result = job_.output != nullptr
          ? at(job_.output, offsetOf(s))
          : passedOn_.get() + lane(s) * mineBytes_;
      Task reducing = reduceSliced(
          comm_,
          budget_,
          result,
          operands_,
          countOf(me_, s),
          job_.reduction,
          true);
      co_await reducing;
      sendResult(s, result);
    }
    // A result arrives where our contribution is being sent from: that memory
    // is lent until the send is over.
    for (size_t r = 0; r < ranks_; ++r) {
      co_await finish(contributionSends_.of(lane(s), r));
      receiveResult(r, s);
    }
  }

  // Waits for the results that were last sent and received in this lane.
  Task finishResults(size_t lane) {
    for (size_t r = 0; r < ranks_; ++r) {
      co_await finish(resultSends_.of(lane, r));
      co_await finish(resultRecvs_.of(lane, r));
    }
  }

 private:
  // By rank. An empty shard has one segment: there must be a message.
  static std::vector<size_t> segmentsOf(
      const ShardedReduction& job,
      size_t segmentCount) {
    std::vector<size_t> segments(job.counts.size(), 0);
    for (size_t r = 0; r < segments.size(); ++r) {
      if (job.onlyOwner < 0 || static_cast<size_t>(job.onlyOwner) == r) {
        segments[r] = std::max<size_t>(
            (job.counts[r] + segmentCount - 1) / segmentCount, 1);
      }
    }
    return segments;
  }
  static Scratch scratch(size_t bytes) {
    return std::make_unique_for_overwrite<unsigned char[]>(bytes);
  }
  size_t largestSegment() const {
    size_t largest = 0;
    for (size_t r = 0; r < ranks_; ++r) {
      if (segments_[r] > 0) {
        largest = std::max(largest, std::min(segmentCount_, job_.counts[r]));
      }
    }
    return largest;
  }

  size_t lane(size_t s) const {
    return s % lanes_;
  }
  size_t offsetOf(size_t s) const {
    return s * segmentCount_ * elementBytes_;
  }
  size_t countOf(size_t rank, size_t s) const {
    return std::min(segmentCount_, job_.counts[rank] - s * segmentCount_);
  }
  size_t bytesOf(size_t rank, size_t s) const {
    return countOf(rank, s) * elementBytes_;
  }
  unsigned char* incomingAt(size_t s, size_t peer) {
    const size_t index = peer < me_ ? peer : peer - 1;
    return incoming_.get() + (lane(s) * (ranks_ - 1) + index) * mineBytes_;
  }
  unsigned char* scaledAt(size_t s, size_t rank) {
    return scaledInputs_.get() + (lane(s) * ranks_ + rank) * scaledBytes_;
  }
  const unsigned char* contributionAt(size_t s, size_t rank) {
    return scaled() ? scaledAt(s, rank) : at(job_.inputs[rank], offsetOf(s));
  }

  // With kKeep the result stays here, and with kToRoot the root keeps its own.
  void sendResult(size_t s, const unsigned char* result) {
    const bool toAll = job_.results == Results::kToAll;
    if (!toAll &&
        (job_.results == Results::kKeep || comm_.rank() == job_.root)) {
      return;
    }
    for (size_t i = 1; i < ranks_; ++i) {
      const size_t peer = (me_ + i) % ranks_;
      if (toAll || peer == static_cast<size_t>(job_.root)) {
        comm_.startSend(
            resultSends_.of(lane(s), peer),
            static_cast<int>(peer),
            slotOf(kResult, s),
            result,
            bytesOf(me_, s));
      }
    }
  }

  // Call only when our contribution to the segment has been sent: the result
  // may have the same place.
  void receiveResult(size_t from, size_t s) {
    const bool wanted = job_.results == Results::kToAll ||
        (job_.results == Results::kToRoot && comm_.rank() == job_.root);
    if (wanted && from != me_ && hasSegment(from, s)) {
      comm_.startRecv(
          resultRecvs_.of(lane(s), from),
          static_cast<int>(from),
          slotOf(kResult, s),
          at(job_.places[from], offsetOf(s)),
          bytesOf(from, s));
    }
  }

  Communicator& comm_;
  const ShardedReduction job_;
  const size_t ranks_, me_, elementBytes_;
  const size_t segmentCount_; // elements of a whole segment
  const std::vector<size_t> segments_; // of each rank's shard
  const size_t steps_, lanes_;
  const size_t mineBytes_; // of a whole segment of our own shard
  const size_t scaledBytes_; // of the largest scaled one; 0: none is

  // Scratch memory. Declared before the transfers that use it: they must be
  // cancelled first.
  const Scratch incoming_; // by lane and sender
  const Scratch scaledInputs_; // by lane and rank
  const Scratch passedOn_; // results that have no output here, by lane
  Transfers contributionSends_, contributionRecvs_, resultSends_, resultRecvs_;
  ComputeBudget budget_;
  std::vector<const void*> operands_; // of the segment that is being reduced
};

} // namespace

std::vector<size_t> shardCounts(size_t count, int ranks) {
  const size_t n = static_cast<size_t>(ranks);
  std::vector<size_t> counts(n, count / n);
  for (size_t i = 0; i < count % n; ++i) {
    ++counts[i];
  }
  return counts;
}

// Segment s of every shard goes through three steps: contributions in, reduce,
// result out. The first `lanes` turns only post contributions; each later one
// finishes segment `turn - lanes` and posts segment `turn` in the lane that
// became free.
//
// No circle of waiting ranks: each peer posted what we wait for in turn t in
// its own turn t - lanes, so the rank that is furthest behind can always
// proceed.
Task reduceSharded(Communicator& comm, ShardedReduction job) {
  ShardedRun run(comm, std::move(job));
  for (size_t turn = 0; turn < run.steps() + run.lanes(); ++turn) {
    if (turn >= run.lanes()) {
      Task finishing = run.finishSegment(turn - run.lanes());
      co_await finishing;
    }
    if (turn >= run.steps()) {
      continue;
    }
    if (run.hasSegment(run.me(), turn)) {
      run.receiveContributions(turn);
    }
    // Staggered, each rank starting with its successor: else all would send to
    // rank 0 first. The own shard comes last and is only scaled.
    for (size_t i = 1; i <= run.ranks(); ++i) {
      const size_t to = (run.me() + i) % run.ranks();
      if (!run.hasSegment(to, turn)) {
        continue;
      }
      if (run.scaled()) {
        Task scaling = run.scaleContribution(to, turn);
        co_await scaling;
      }
      if (to != run.me()) {
        run.sendContribution(to, turn);
      }
    }
  }
  for (size_t lane = 0; lane < run.lanes(); ++lane) {
    Task finishing = run.finishResults(lane);
    co_await finishing;
  }
}

} // namespace resilient
