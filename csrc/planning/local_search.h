#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "planning/evaluator.h"
#include "planning/problem.h"

namespace resilient {

// Betters given orders by small changes on the critical path. The readable text
// of the algorithm is tests/planner_twins/local_search.py; this one
// makes the same choices.
//
// The choices depend on the seed alone: not on time, nor on how the tries are
// divided among calls of run(). Not thread-safe. A copy of the best orders is
// kept for each improvement, at most kKept.
class Search {
 public:
  struct Found {
    double iterationS = 0;
    Orders orders;
  };

  // From `start`, which must be complete and free of deadlock. The search ends
  // when `lowerBoundS` is reached.
  Search(
      Orders start,
      const PipelineCosts& costs,
      Limits limits,
      double lowerBoundS,
      uint64_t seed);

  // Tries this many changes. Returns whether there is more to try. False: the
  // lower bound is reached, too many rounds brought nothing, or the critical
  // path allows no change.
  bool run(size_t tries);

  // The best orders until now, the shortest first.
  const std::vector<Found>& found() const {
    return found_;
  }

 private:
  // Take the operation at one position of a stage's order and put it at
  // another.
  struct Move {
    uint32_t stage, taken, put;
  };
  // The places of the operations of one stage: by position their microbatch,
  // and by kind and microbatch their position.
  struct Index {
    bool made = false;
    std::vector<uint32_t> microbatch;
    std::vector<uint32_t> position[kKinds];
  };

  // From 0 to count - 1; count is below 2^32. Advances the only source of
  // chance.
  uint32_t below(size_t count);
  // Only within findMoves(), which forgets all indices first: changes that are
  // tried afterwards do not update them.
  const Index& indexOf(size_t stage);
  // Changes that may shorten a critical path of the last run of evaluator_.
  void findMoves();
  void addMovesOf(size_t stage, size_t first, size_t last);
  // False if nothing changes.
  //
  // A move is undone by the move with its two positions exchanged.
  bool apply(const Move& move);
  bool tryOne();
  // From the best again, with room to get worse first.
  void restart();

  Limits limits_;
  Evaluator evaluator_;
  uint64_t seed_, drawn_ = 0;
  double enoughS_;
  Orders current_;
  double currentS_ = 0;
  std::vector<double> history_; // iteration times, of late acceptance
  size_t step_ = 0;
  size_t patience_, left_; // tries without a new best, of this round
  size_t rounds_; // that are left without a new best
  std::vector<Move> moves_;
  std::vector<Index> indices_; // by stage, of current_
  std::vector<Found> found_;
};

} // namespace resilient
