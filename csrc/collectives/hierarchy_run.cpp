#include "collectives/hierarchy_run.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "collectives/algorithms.h"
#include "collectives/compute.h"
#include "collectives/concurrent.h"
#include "collectives/cost.h"

namespace resilient {
namespace {

using Block = HierarchyJob::Block;

// Slot phases, plus the level.
constexpr unsigned kForward = 0x10;
constexpr unsigned kBackward = 0x20;
// Within a slot's index: chunk, then exchange.
constexpr int kChunkShift = Exchange::kIndexBits;
constexpr int kChunkBits = 20;
constexpr size_t kAlignBytes = 64;

size_t aligned(size_t bytes) {
  return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

size_t totalCount(const std::vector<Block>& blocks) {
  size_t count = 0;
  for (const Block& block : blocks) {
    count += block.count;
  }
  return count;
}

// One exchange of one chunk.
// Each kind of transfer has an entry for every owner. Entries that are not
// needed are never begun and count as complete. In back_ the entry of this rank
// is the receive from the target.
struct Part {
  const Exchange* exchange = nullptr;
  size_t transfers = 0; // index of the first of owners.size() of each kind
  size_t incoming = 0; // offset in scratch memory of the others' values
  size_t me = 0; // index into owners

  bool folds() const {
    return exchange->target == me || exchange->target == Exchange::kEverybody;
  }
  bool sendsTo(size_t owner) const { // forward
    return owner != me &&
        (exchange->target == owner || exchange->target == Exchange::kEverybody);
  }
};

// The needs of one chunk: its parts by level, and their places in memory.
// Scratch memory holds the operands of other ranks, the results of kEverybody
// and the scaled input. All other results go to the output, or over an operand
// in scratch memory if this rank has no output.
struct Layout {
  std::vector<std::vector<Part>> parts;
  size_t transfers = 0;
  // The results of kEverybody: their offset, and the element that lies there.
  size_t exchanged = 0;
  size_t exchangedFrom = SIZE_MAX;
  size_t scaled = 0; // offset of the scaled input
  size_t bytes = 0;

  Layout(
      const HierarchyJob& job,
      const HierarchyPlan& plan,
      int rank,
      size_t count) {
    parts.resize(plan.levels.size());
    for (size_t level = 0; level < plan.levels.size(); ++level) {
      for (const Exchange& e : plan.levels[level]) {
        Part part;
        part.exchange = &e;
        part.me = static_cast<size_t>(
            std::find(e.owners.begin(), e.owners.end(), rank) -
            e.owners.begin());
        part.transfers = transfers;
        transfers += e.owners.size();
        if (level < job.forward && part.folds()) {
          part.incoming = bytes;
          bytes += (e.owners.size() - 1) * aligned(e.count * job.elementBytes);
        }
        parts[level].push_back(part);
      }
    }
    if (job.exchangeAtTop && parts[job.forward - 1].size() == 1) {
      // The usual case: the result takes the place of the first operand.
      exchanged = parts[job.forward - 1].front().incoming;
      exchangedFrom = parts[job.forward - 1].front().exchange->begin;
    } else if (job.exchangeAtTop) {
      size_t end = 0;
      for (const Exchange& e : plan.levels[job.forward - 1]) {
        exchangedFrom = std::min(exchangedFrom, e.begin);
        end = std::max(end, e.begin + e.count);
      }
      exchanged = bytes;
      bytes += end == 0 ? 0 : aligned((end - exchangedFrom) * job.elementBytes);
    }
    if (job.scales) {
      scaled = bytes;
      bytes += aligned(count * job.elementBytes);
    }
  }
};

// State that the chunks of one operation share.
struct Shared {
  Communicator& comm;
  const HierarchyJob job;
  ComputeBudget budget;
  std::map<std::vector<size_t>, HierarchyPlan> plans; // by counts

  Shared(Communicator& c, HierarchyJob j) : comm(c), job(std::move(j)) {}

  // All chunks but the last ones of each block have equal sizes, so few plans
  // are made. std::map keeps the references valid.
  const HierarchyPlan& planFor(const std::vector<Block>& slices) {
    std::vector<size_t> counts;
    for (const Block& slice : slices) {
      counts.push_back(slice.count);
    }
    const auto found = plans.find(counts);
    if (found != plans.end()) {
      return found->second;
    }
    HierarchyPlan plan = job.plan(counts);
    return plans.emplace(std::move(counts), std::move(plan)).first->second;
  }

  std::vector<Block> slicesOf(size_t chunk) const {
    std::vector<Block> slices;
    for (const Block& block : job.blocks) {
      slices.push_back(block.slice(
          chunk * job.chunkCount, job.chunkCount, job.elementBytes));
    }
    return slices;
  }
};

// Scratch memory of a lane, used by its chunks one after the other.
struct Arena {
  std::unique_ptr<unsigned char[]> memory;
  size_t bytes = 0;

  // Call only while no transfer uses the memory: growing replaces it.
  unsigned char* reserve(size_t wanted) {
    if (wanted > bytes) {
      memory = std::make_unique_for_overwrite<unsigned char[]>(wanted);
      bytes = wanted;
    }
    return memory.get();
  }
};

// One chunk: up the levels, then down. Each exchange is a message between each
// two ranks, whatever its size.
//
// No circle of waiting ranks: at each level a rank waits for messages that
// their senders post when they reach this level of this chunk, and for its own
// sends of earlier levels, where the receivers post before they wait. So the
// rank that is furthest behind can always proceed.
//
// Memory that is being sent must not change, and results may come to the memory
// where contributions lie. Three rules follow:
//
// - A receive of a result is posted only after the contribution in its place
//   has been sent (rise(), sink()).
// - A result of kEverybody goes to scratch memory, because the output is still
//   being sent to the others. settle() copies it when these sends have ended.
// - If nothing runs forward, outputs hold no contributions, so all results are
//   asked for at the beginning.
class ChunkRun {
 public:
  ChunkRun(Shared& shared, uint64_t chunk, Arena& arena)
      : shared_(shared),
        comm_(shared.comm),
        job_(shared.job),
        chunk_(chunk),
        slices_(shared.slicesOf(chunk)),
        layout_(
            job_,
            shared.planFor(slices_),
            comm_.rank(),
            totalCount(slices_)),
        scratch_(arena.reserve(layout_.bytes)),
        top_(job_.forward == 0 ? 0 : job_.forward - 1),
        asked_(job_.backwardEnd),
        settled_(!job_.exchangeAtTop) {
    size_t begin = 0;
    for (const Block& slice : slices_) {
      begins_.push_back(begin);
      begin += slice.count;
    }
    if (job_.forward > 0) {
      incoming_ = std::make_unique<Transfer[]>(layout_.transfers);
      outgoing_ = std::make_unique<Transfer[]>(layout_.transfers);
    }
    if (job_.backwardBegin > job_.backwardEnd) {
      back_ = std::make_unique<Transfer[]>(layout_.transfers);
    }
  }

  Task run() {
    receiveForward();
    if (job_.scales) {
      Task scaling = scale();
      co_await scaling;
    }
    if (job_.forward == 0) {
      for (; asked_ < job_.backwardBegin; ++asked_) {
        for (const Part& p : layout_.parts[asked_]) {
          askFor(asked_, p);
        }
      }
    }
    for (size_t level = 0; level < job_.forward; ++level) {
      Task rising = rise(level);
      co_await rising;
    }
    for (size_t level = job_.backwardBegin; level-- > job_.backwardEnd;) {
      if (!settled_ && level + 1 < top_) {
        // Data that goes down from here may hold parts of other ranks: it must
        // be contiguous.
        Task settling = settle();
        co_await settling;
      }
      Task sinking = sink(level);
      co_await sinking;
    }
    for (size_t i = 0; i < layout_.transfers; ++i) {
      if (outgoing_) {
        co_await finish(outgoing_[i]);
      }
      if (back_) {
        co_await finish(back_[i]);
      }
    }
    if (!settled_) {
      Task settling = settle();
      co_await settling;
    }
  }

 private:
  // A stretch of the row; its value lies at `value`.
  struct Located {
    size_t begin = 0;
    size_t count = 0;
    unsigned char* value = nullptr;
  };

  // --- where things lie

  size_t bytesOf(const Exchange& e) const {
    return e.count * job_.elementBytes;
  }
  uint64_t slotFor(unsigned phase, size_t level, const Part& p) const {
    return slotOf(
        phase + static_cast<unsigned>(level),
        (chunk_ << kChunkShift) | p.exchange->index);
  }
  size_t sliceAt(size_t begin) const { // never an empty one
    return static_cast<size_t>(
        std::upper_bound(begins_.begin(), begins_.end(), begin) -
        begins_.begin() - 1);
  }
  unsigned char* outputAt(size_t begin) const {
    const size_t i = sliceAt(begin);
    return slices_[i].output == nullptr
        ? nullptr
        : at(slices_[i].output, (begin - begins_[i]) * job_.elementBytes);
  }
  unsigned char* incomingAt(const Part& p, size_t owner) const {
    const size_t i = owner < p.me ? owner : owner - 1;
    return scratch_ + p.incoming + i * aligned(bytesOf(*p.exchange));
  }
  unsigned char* exchangedAt(size_t begin) const {
    return scratch_ + layout_.exchanged +
        (begin - layout_.exchangedFrom) * job_.elementBytes;
  }
  // This rank's own value of what is exchanged: the result of a lower level,
  // else what it was given.
  const unsigned char* valueOf(const Exchange& e) const {
    for (size_t i = located_.size(); i-- > 0;) {
      const Located& l = located_[i];
      if (l.begin < e.begin + e.count && e.begin < l.begin + l.count) {
        if (l.begin > e.begin || e.begin + e.count > l.begin + l.count) {
          throw StatusError(Status(
              StatusCode::kInternal,
              "hierarchical collective: an exchange across two results"));
        }
        return l.value + (e.begin - l.begin) * job_.elementBytes;
      }
    }
    const size_t i = sliceAt(e.begin);
    return slices_[i].source == nullptr
        ? outputAt(e.begin)
        : at(slices_[i].source, (e.begin - begins_[i]) * job_.elementBytes);
  }
  // The same on the way down. Results of the way up are in the output, except
  // those that have just been exchanged.
  const unsigned char* resultOf(size_t level, const Exchange& e) const {
    if (level >= job_.forward) {
      return valueOf(e);
    }
    return job_.exchangeAtTop && level + 1 == top_ ? exchangedAt(e.begin)
                                                   : outputAt(e.begin);
  }

  // --- up

  void receiveForward() {
    for (size_t level = 0; level < job_.forward; ++level) {
      for (const Part& p : layout_.parts[level]) {
        for (size_t o = 0; p.folds() && o < p.exchange->owners.size(); ++o) {
          if (o != p.me) {
            comm_.startRecv(
                incoming_[p.transfers + o],
                p.exchange->owners[o],
                slotFor(kForward, level, p),
                incomingAt(p, o),
                bytesOf(*p.exchange));
          }
        }
      }
    }
  }

  Task scale() {
    for (size_t i = 0; i < slices_.size(); ++i) {
      void* scaled =
          at(scratch_, layout_.scaled + begins_[i] * job_.elementBytes);
      Task scaling = scaleSliced(
          comm_,
          shared_.budget,
          scaled,
          slices_[i].source,
          slices_[i].count,
          job_.reduction);
      co_await scaling;
      slices_[i].source = scaled;
    }
  }

  Task rise(size_t level) {
    for (const Part& p : layout_.parts[level]) {
      const Exchange& e = *p.exchange;
      for (size_t o = 0; o < e.owners.size(); ++o) {
        if (p.sendsTo(o)) {
          comm_.startSend(
              outgoing_[p.transfers + o],
              e.owners[o],
              slotFor(kForward, level, p),
              valueOf(e),
              bytesOf(e));
        }
      }
    }
    // While the highest level, the slowest, is under way: results come to
    // where our contributions lie, as soon as these are sent.
    while (level == top_ && asked_ < std::min(top_, job_.backwardBegin)) {
      for (const Part& p : layout_.parts[asked_]) {
        if (!p.folds()) {
          co_await finish(outgoing_[p.transfers + p.exchange->target]);
        }
        askFor(asked_, p);
      }
      ++asked_;
    }
    std::vector<Located> results;
    for (const Part& p : layout_.parts[level]) {
      if (p.folds()) {
        Task folding = fold(level, p, results);
        co_await folding;
      }
    }
    located_.insert(located_.end(), results.begin(), results.end());
  }

  Task fold(size_t level, const Part& p, std::vector<Located>& results) {
    const Exchange& e = *p.exchange;
    std::vector<const void*> operands(e.owners.size());
    for (size_t o = 0; o < e.owners.size(); ++o) {
      if (o == p.me) {
        operands[o] = valueOf(e);
      } else {
        co_await finish(incoming_[p.transfers + o]);
        operands[o] = incomingAt(p, o);
      }
    }
    unsigned char* result = outputAt(e.begin);
    if (e.target == Exchange::kEverybody) {
      result = exchangedAt(e.begin); // the output may still be being sent
    } else if (result == nullptr) {
      result = incomingAt(p, p.me == 0 ? 1 : 0);
    }
    Task folding = reduceSliced(
        comm_,
        shared_.budget,
        result,
        std::move(operands),
        e.count,
        job_.reduction,
        false);
    co_await folding;
    if (level == top_ && job_.divisor > 1) {
      Task dividing = divideSliced(
          comm_,
          shared_.budget,
          result,
          e.count,
          job_.reduction.dtype,
          job_.divisor);
      co_await dividing;
    }
    if (level == top_) {
      comm_.resultIsFinal(result, bytesOf(e));
    }
    Located* const last = results.empty() ? nullptr : &results.back();
    if (last != nullptr && last->begin + last->count == e.begin &&
        last->value + last->count * job_.elementBytes == result) {
      last->count += e.count; // the next level may take both in one
    } else {
      results.push_back({e.begin, e.count, result});
    }
  }

  // --- down

  // The part's result comes from its target; nothing if it is known here.
  void askFor(size_t level, const Part& p) {
    if (isGiven(p)) {
      comm_.startRecv(
          back_[p.transfers + p.me],
          p.exchange->targetRank(),
          slotFor(kBackward, level, p),
          outputAt(p.exchange->begin),
          bytesOf(*p.exchange));
    }
  }
  bool isGiven(const Part& p) const {
    return !p.folds() && comm_.rank() != job_.complete;
  }

  // The results of the exchange at the top go to the output.
  Task settle() {
    settled_ = true;
    for (const Part& p : layout_.parts[top_]) {
      for (size_t o = 0; o < p.exchange->owners.size(); ++o) {
        co_await finish(outgoing_[p.transfers + o]);
      }
      Task copying = copySliced(
          comm_,
          shared_.budget,
          outputAt(p.exchange->begin),
          exchangedAt(p.exchange->begin),
          bytesOf(*p.exchange));
      co_await copying;
      comm_.resultIsFinal(outputAt(p.exchange->begin), bytesOf(*p.exchange));
    }
  }

  Task sink(size_t level) {
    for (const Part& p : layout_.parts[level]) {
      const Exchange& e = *p.exchange;
      for (size_t o = 0; e.target == p.me && o < e.owners.size(); ++o) {
        if (o != p.me && e.owners[o] != job_.complete) {
          comm_.startSend(
              back_[p.transfers + o],
              e.owners[o],
              slotFor(kBackward, level, p),
              resultOf(level, e),
              bytesOf(e));
        }
      }
    }
    for (const Part& p : layout_.parts[level]) {
      if (level >= asked_ && isGiven(p)) {
        // The sends of the level itself; but the destination of a reduce is
        // given results that it has contributed to at any level.
        const bool ofLevel = level < job_.forward;
        const size_t first = ofLevel ? p.transfers + p.exchange->target : 0;
        const size_t end = ofLevel ? first + 1 : layout_.transfers;
        for (size_t i = first; i < end; ++i) {
          co_await finish(outgoing_[i]);
        }
        askFor(level, p);
      }
    }
    for (const Part& p : layout_.parts[level]) {
      if (isGiven(p)) {
        co_await finish(back_[p.transfers + p.me]);
      }
    }
  }

  Shared& shared_;
  Communicator& comm_;
  const HierarchyJob& job_;
  const uint64_t chunk_;
  std::vector<Block> slices_;
  const Layout layout_;
  unsigned char* const scratch_;
  const size_t top_; // the highest level that runs forward
  std::vector<size_t> begins_; // of the slices
  std::vector<Located> located_; // results of folds, the newest last
  size_t asked_; // below this level, results have been asked for
  bool settled_;
  // By Part::transfers. Declared last, to be cancelled first.
  std::unique_ptr<Transfer[]> incoming_, outgoing_, back_;
};

// The chunks lane, lane + lanes, ... one after the other.
Task runLane(Shared& shared, size_t lane, size_t lanes, size_t chunks) {
  Arena arena;
  for (size_t chunk = lane; chunk < chunks; chunk += lanes) {
    ChunkRun one(shared, chunk, arena);
    Task running = one.run();
    co_await running;
  }
}

} // namespace

HierarchyJob::Block HierarchyJob::Block::slice(
    size_t first,
    size_t max,
    size_t elementBytes) const {
  const size_t start = std::min(first, count);
  Block part;
  part.count = std::min(max, count - start);
  part.source = source == nullptr ? nullptr : at(source, start * elementBytes);
  part.output = output == nullptr ? nullptr : at(output, start * elementBytes);
  return part;
}

Task runHierarchy(Communicator& comm, HierarchyJob job) {
  Shared shared(comm, std::move(job));
  size_t largest = 0;
  for (const Block& block : shared.job.blocks) {
    largest = std::max(largest, block.count);
  }
  const size_t chunkCount = shared.job.chunkCount;
  const size_t chunks = (largest + chunkCount - 1) / chunkCount;
  require(
      chunks < size_t{1} << kChunkBits,
      "hierarchical collective",
      "more than a million chunks");
  const std::vector<Block> first = shared.slicesOf(0);
  const Layout layout(
      shared.job, shared.planFor(first), comm.rank(), totalCount(first));
  // Two at least, or nothing overlaps.
  const size_t lanes = std::min(
      {chunks,
       shared.job.lanes,
       std::max<size_t>(
           kHierarchyScratchBytesMax / std::max<size_t>(layout.bytes, 1), 2)});
  std::vector<Task> tasks;
  for (size_t lane = 0; lane < lanes; ++lane) {
    tasks.push_back(runLane(shared, lane, lanes, chunks));
  }
  Task all = concurrently(std::move(tasks));
  co_await all;
}

} // namespace resilient
