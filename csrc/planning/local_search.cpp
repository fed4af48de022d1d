#include "planning/local_search.h"

#include <algorithm>
#include <utility>

namespace resilient {
namespace {

// local_search.py gives the reasons.
constexpr size_t kMemoryMin = 20;
constexpr size_t kMemoryMax = 300;
constexpr size_t kMemoryOperations = 200'000;
constexpr double kRestartRoom = 0.02;
constexpr size_t kRounds = 30;
constexpr size_t kLookBack = 40;
constexpr size_t kGaps = 4;
constexpr size_t kLongestJump = 12;
constexpr size_t kKept = 8;

} // namespace

Search::Search(
    Orders start,
    const PipelineCosts& costs,
    Limits limits,
    double lowerBoundS,
    uint64_t seed)
    : limits_(std::move(limits)),
      evaluator_(costs, start[0].size() / kKinds),
      // Mixed, since seeds are often neighbours.
      seed_(mixBits(seed)),
      enoughS_(lowerBoundS * (1 + 1e-9)),
      current_(std::move(start)),
      patience_(
          std::max<size_t>(1000, 10 * current_.size() * current_[0].size())),
      left_(patience_),
      rounds_(kRounds),
      indices_(current_.size()) {
  evaluator_.run(current_);
  currentS_ = evaluator_.iterationS();
  const size_t operations = current_.size() * current_[0].size();
  history_.assign(
      std::clamp(kMemoryOperations / operations, kMemoryMin, kMemoryMax),
      currentS_);
  found_.push_back({currentS_, current_});
  findMoves();
}

uint32_t Search::below(size_t count) {
  const uint64_t high = mixBits(seed_ + drawn_++) >> 32;
  return static_cast<uint32_t>(high * count >> 32);
}

const Search::Index& Search::indexOf(size_t stage) {
  Index& index = indices_[stage];
  if (!index.made) {
    index.made = true;
    index.microbatch.clear();
    for (auto& positions : index.position) {
      positions.clear();
    }
    for (const uint8_t kind : current_[stage]) {
      auto& positions = index.position[kind];
      positions.push_back(static_cast<uint32_t>(index.microbatch.size()));
      index.microbatch.push_back(static_cast<uint32_t>(positions.size() - 1));
    }
  }
  return index;
}

// How it works. A critical path is walked backwards in blocks, runs of
// operations of one stage without a gap. A block begins because its first
// operation waited for a message, so the path goes on at the stage that sent
// it. Times compare with == because a start is the very sum that was computed
// for the end before it. The first stage never waits for an input, nor the last
// one for a gradient (its own F has ended), so the neighbour always exists.
// Only changes on this path can shorten the iteration; one of several such
// paths is drawn.
void Search::findMoves() {
  moves_.clear();
  for (Index& index : indices_) {
    index.made = false;
  }
  // One of the stages that end last, then back along a critical path.
  std::vector<size_t> longest;
  for (size_t i = 0; i < current_.size(); ++i) {
    if (evaluator_.times(i).end == currentS_) {
      longest.push_back(i);
    }
  }
  size_t stage = longest[below(longest.size())];
  size_t position = current_[stage].size() - 1;
  for (;;) {
    const Kinds& order = current_[stage];
    const auto& starts = evaluator_.starts(stage);
    const auto& durations = evaluator_.durations(stage);
    const size_t last = position;
    while (position > 0 &&
           starts[position - 1] + durations[order[position - 1]] ==
               starts[position]) {
      --position;
    }
    addMovesOf(stage, position, last);
    if (starts[position] <= 0) {
      return;
    }
    // It began when its message arrived.
    const uint8_t kind = order[position];
    const uint32_t microbatch = indexOf(stage).microbatch[position];
    stage = kind == kInputBackward ? stage + 1 : stage - 1;
    position = indexOf(stage).position[kind][microbatch];
  }
}

// Adds at most kGaps + 3 moves for each operation of the block, and one more.
// Moves that break a limit or an order are sorted out in tryOne().
void Search::addMovesOf(size_t stage, size_t first, size_t last) {
  const Kinds& order = current_[stage];
  const auto& starts = evaluator_.starts(stage);
  const auto& durations = evaluator_.durations(stage);
  const auto add = [&](size_t taken, size_t put) {
    moves_.push_back(
        {static_cast<uint32_t>(stage),
         static_cast<uint32_t>(taken),
         static_cast<uint32_t>(put)});
  };
  // The gaps before the block where the stage idles for at least half of a W.
  size_t gaps[kGaps], found = 0;
  for (size_t back = 0; back <= kLookBack && back < first; ++back) {
    const size_t position = first - back;
    const double idle = starts[position] - starts[position - 1] -
        durations[order[position - 1]];
    if (idle >= 0.5 * durations[kWeightBackward]) {
      gaps[found++] = position;
      if (found == kGaps) {
        break;
      }
    }
  }
  for (size_t position = first; position <= last; ++position) {
    const uint8_t kind = order[position];
    if (position > first && order[position - 1] != kind) {
      // Swapping neighbours of one kind would change nothing.
      add(position, position - 1);
    }
    if (kind == kWeightBackward) {
      // No other operation waits for it: behind the block, into idle time
      // before, or anywhere later.
      if (position < last) {
        add(position, last);
      }
      for (size_t i = 0; i < found; ++i) {
        add(position, gaps[i]);
      }
      if (position + 1 < order.size()) {
        add(position, position + 1 + below(order.size() - position - 1));
      }
    } else if (position > first + 1 && position - first < kLongestJump) {
      add(position, first + below(position - first));
    }
  }
  if (first > 0 && order[first - 1] != order[first]) {
    // The operation before the block, which nothing hurries: let the block pass
    // it.
    add(first, first - 1);
  }
}

bool Search::apply(const Move& move) {
  Kinds& order = current_[move.stage];
  const auto begin = order.begin();
  const uint8_t kind = order[move.taken];
  if (move.taken < move.put) {
    const auto from = begin + move.taken, to = begin + move.put + 1;
    if (std::all_of(from, to, [&](uint8_t each) { return each == kind; })) {
      return false;
    }
    std::rotate(from, from + 1, to);
  } else {
    const auto from = begin + move.put, to = begin + move.taken + 1;
    if (std::all_of(from, to, [&](uint8_t each) { return each == kind; })) {
      return false;
    }
    std::rotate(from, to - 1, to);
  }
  return true;
}

bool Search::run(size_t tries) {
  for (; tries > 0; --tries) {
    if (found_[0].iterationS <= enoughS_) {
      return false;
    }
    if (left_ == 0) {
      if (rounds_ == 0) {
        return false;
      }
      --rounds_;
      restart();
    }
    --left_;
    if (!tryOne()) {
      return false;
    }
  }
  return true;
}

void Search::restart() {
  current_ = found_[0].orders;
  evaluator_.run(current_);
  currentS_ = found_[0].iterationS;
  std::fill(history_.begin(), history_.end(), currentS_ * (1 + kRestartRoom));
  left_ = patience_;
  findMoves();
}

// False if there is no change to try. Late acceptance: a change stays if the
// iteration is no longer than the present one or than the one of
// history_.size() changes ago. After a rejected change the moves that are left
// stay valid, but the evaluator has times of the rejected orders, so it runs
// again before findMoves().
bool Search::tryOne() {
  if (moves_.empty()) {
    evaluator_.run(current_);
    findMoves();
    if (moves_.empty()) {
      return false;
    }
  }
  std::swap(moves_[below(moves_.size())], moves_.back());
  const Move move = moves_.back();
  moves_.pop_back();
  if (!apply(move)) {
    return true;
  }
  const Move undo{move.stage, move.put, move.taken};
  if (!limits_.allowStage(move.stage, current_[move.stage])) {
    apply(undo);
    return true;
  }
  ++step_;
  double& remembered = history_[step_ % history_.size()];
  // The remaining work of the stages is a sum in another order, so leave room
  // for rounding.
  const double maxS = std::max(currentS_, remembered);
  if (evaluator_.run(current_, maxS * (1 + 1e-12)) &&
      evaluator_.iterationS() <= maxS) {
    currentS_ = evaluator_.iterationS();
    findMoves();
    if (currentS_ < found_[0].iterationS) {
      found_.insert(found_.begin(), {currentS_, current_});
      if (found_.size() > kKept) {
        found_.pop_back();
      }
      left_ = patience_;
      rounds_ = kRounds;
    }
  } else {
    apply(undo);
  }
  remembered = std::min(remembered, currentS_);
  return true;
}

} // namespace resilient
