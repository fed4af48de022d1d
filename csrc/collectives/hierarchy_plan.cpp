#include "collectives/hierarchy_plan.h"

#include <algorithm>
#include <utility>

#include "collectives/compute.h"
#include "collectives/sharded_reduction.h"

namespace resilient {
namespace {

// A stretch of the data and the rank that holds a place's value of it.
struct Stretch {
  size_t begin = 0;
  size_t count = 0;
  int owner = -1;
};

// Stretches side by side, in order.
// A Holding covers one range without gaps. Some stretches may be empty.
using Holding = std::vector<Stretch>;

// Walks the places of one operation and emits its exchanges. Each walk returns
// who holds the result of which stretch; the walk of the place above cuts these
// stretches against those of its other children.
//
// The walk must be the same on all ranks: it may depend on places, sizes and
// the destination, but not on rank_, which only selects the exchanges to keep.
// The order of the walk fixes the index of every exchange.
class Planner {
 public:
  Planner(const Place& root, int rank)
      : root_(root), rank_(rank), counters_(root.height() + 1, 0) {
    plan_.levels.resize(root.height() + 1);
  }

  // Blocks end here: no exchange goes across.
  void cutAt(std::vector<size_t> ends) {
    ends_ = std::move(ends);
  }

  // Reduces [begin, begin + count) among the ranks of `place` without a
  // preferred one: each ends with an equal share of its child's holding.
  // A single rank already holds its own value, without an exchange.
  Holding shareOut(const Place& place, size_t begin, size_t count) {
    if (place.single()) {
      return {{begin, count, place.ranks.front()}};
    }
    std::vector<Holding> holdings;
    for (const Place& child : place.children) {
      holdings.push_back(shareOut(child, begin, count));
    }
    Holding result;
    forPieces(
        holdings,
        begin,
        count,
        [&](size_t from, size_t size, const std::vector<int>& owners) {
          shareAmong(place, from, size, owners, result);
        });
    return result;
  }

  // As shareOut for the whole data, but what the children of the root hold
  // everybody gives to everybody.
  void shareOutAndExchange(size_t count) {
    std::vector<Holding> holdings;
    for (const Place& child : root_.children) {
      holdings.push_back(shareOut(child, 0, count));
    }
    forPieces(
        holdings,
        0,
        count,
        [&](size_t from, size_t size, const std::vector<int>& owners) {
          emit(root_, from, size, owners, Exchange::kEverybody);
        });
  }

  // Each rank's block, at blockOf(rank), comes to that rank.
  // For each child, every other child first shares out the blocks of that child
  // among its own ranks. Each share then crosses the border once, to the rank
  // of its block, which folds it with what its own place contributes:
  // scatter(child) has brought that to the same rank one level lower. Levels
  // run upwards, so the lower exchange comes first although the walk emits it
  // last.
  template <typename BlockOf>
  void scatter(const Place& place, const BlockOf& blockOf) {
    for (size_t c = 0; c < place.children.size(); ++c) {
      const Place& child = place.children[c];
      // The child's blocks lie side by side.
      size_t begin = SIZE_MAX;
      size_t end = 0;
      for (int rank : child.ranks) {
        const auto [from, count] = blockOf(rank);
        begin = std::min(begin, from);
        end = std::max(end, from + count);
      }
      std::vector<Holding> holdings;
      for (size_t other = 0; other < place.children.size(); ++other) {
        if (other != c) {
          holdings.push_back(
              shareOut(place.children[other], begin, end - begin));
          continue;
        }
        Holding blocks;
        for (int rank : rankOrder(child)) {
          const auto [from, count] = blockOf(rank);
          blocks.push_back({from, count, rank});
        }
        holdings.push_back(std::move(blocks));
      }
      forPieces(
          holdings,
          begin,
          end - begin,
          [&](size_t from, size_t size, const std::vector<int>& owners) {
            emit(place, from, size, owners, c);
          });
      scatter(child, blockOf);
    }
  }

  // Brings the children's holdings to the child that has `destination`, shared
  // among the ranks nearest to it.
  // In the lowest place the shares go to all its ranks, so collect() has
  // several senders. At higher levels a share goes to the rank that holds the
  // home child's own part of it.
  Holding bringTo(const Place& place, int destination, size_t count) {
    if (place.single()) {
      return {{0, count, place.ranks.front()}};
    }
    const size_t home = place.childOf(destination);
    std::vector<Holding> holdings;
    bool lowest = true;
    for (size_t c = 0; c < place.children.size(); ++c) {
      const Place& child = place.children[c];
      lowest = lowest && child.single();
      holdings.push_back(
          c == home ? bringTo(child, destination, count)
                    : shareOut(child, 0, count));
    }
    Holding result;
    forPieces(
        holdings,
        0,
        count,
        [&](size_t from, size_t size, const std::vector<int>& owners) {
          if (lowest) {
            shareAmong(place, from, size, owners, result);
          } else {
            emit(place, from, size, owners, home);
            result.push_back({from, size, owners[home]});
          }
        });
    return result;
  }

  // The last level of a rooted plan.
  // Both directions run backward, where the target sends: it is the destination
  // of an outward plan and the owner of the share otherwise.
  void collect(const Holding& holding, int destination, bool outward) {
    for (const Stretch& s : holding) {
      if (s.owner != destination) {
        add(plan_.levels.size() - 1,
            s.begin,
            s.count,
            {s.owner, destination},
            outward ? 1 : 0);
      }
    }
  }

  HierarchyPlan take() {
    return std::move(plan_);
  }

 private:
  // Calls `piece` for each longest stretch that has one owner in each holding.
  // All holdings cover [begin, begin + count).
  // A cut lies where any holding changes its owner. Each holding is passed
  // through once, from left to right.
  template <typename Piece>
  static void forPieces(
      const std::vector<Holding>& holdings,
      size_t begin,
      size_t count,
      const Piece& piece) {
    const size_t end = begin + count;
    std::vector<size_t> at(holdings.size(), 0);
    std::vector<int> owners(holdings.size());
    for (size_t from = begin; from < end;) {
      size_t to = end;
      for (size_t h = 0; h < holdings.size(); ++h) {
        while (holdings[h][at[h]].begin + holdings[h][at[h]].count <= from) {
          ++at[h];
        }
        const Stretch& s = holdings[h][at[h]];
        owners[h] = s.owner;
        to = std::min(to, s.begin + s.count);
      }
      piece(from, to - from, owners);
      from = to;
    }
  }

  // Cuts a piece into one share per owner; the owner of a share is its target.
  // Shares of no elements have no exchange.
  void shareAmong(
      const Place& place,
      size_t begin,
      size_t count,
      const std::vector<int>& owners,
      Holding& result) {
    const std::vector<size_t> shares =
        shardCounts(count, static_cast<int>(owners.size()));
    for (size_t i = 0; i < owners.size(); ++i) {
      if (shares[i] > 0) {
        emit(place, begin, shares[i], owners, i);
        result.push_back({begin, shares[i], owners[i]});
      }
      begin += shares[i];
    }
  }

  // Adds the exchange, cut at the ends of blocks: source and output of one
  // block are contiguous memory, two blocks need not be.
  void emit(
      const Place& place,
      size_t begin,
      size_t count,
      const std::vector<int>& owners,
      size_t target) {
    const size_t level = place.height() - 1;
    const size_t end = begin + count;
    while (begin < end) {
      const auto cut = std::upper_bound(ends_.begin(), ends_.end(), begin);
      const size_t to = cut == ends_.end() ? end : std::min(end, *cut);
      add(level, begin, to - begin, owners, target);
      begin = to;
    }
  }

  // Counts the exchange for all ranks, even if this rank does not keep it.
  void add(
      size_t level,
      size_t begin,
      size_t count,
      const std::vector<int>& owners,
      size_t target) {
    const uint64_t index = counters_[level]++;
    require(
        index < uint64_t{1} << Exchange::kIndexBits,
        "hierarchical collective",
        "more than a million exchanges on one level: choose the flat "
        "algorithm");
    if (std::find(owners.begin(), owners.end(), rank_) != owners.end()) {
      plan_.levels[level].push_back({begin, count, owners, target, index});
    }
  }

  const Place& root_;
  const int rank_;
  std::vector<uint64_t> counters_; // exchanges of all ranks, by level
  std::vector<size_t> ends_; // of blocks, ascending
  HierarchyPlan plan_;
};

void appendRanks(const Place& place, std::vector<int>& order) {
  if (place.single()) {
    order.push_back(place.ranks.front());
  }
  for (const Place& child : place.children) {
    appendRanks(child, order);
  }
}

} // namespace

std::vector<int> rankOrder(const Place& root) {
  std::vector<int> order;
  appendRanks(root, order);
  return order;
}

HierarchyPlan
planAllReduce(const Place& root, int rank, size_t count, bool exchangeAtTop) {
  Planner planner(root, rank);
  if (exchangeAtTop) {
    planner.shareOutAndExchange(count);
  } else {
    planner.shareOut(root, 0, count);
  }
  return planner.take();
}

HierarchyPlan
planScatter(const Place& root, int rank, const std::vector<size_t>& counts) {
  const std::vector<int> order = rankOrder(root);
  std::vector<size_t> begins(order.size());
  std::vector<size_t> sizes(order.size());
  std::vector<size_t> ends;
  size_t end = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    begins[static_cast<size_t>(order[i])] = end;
    sizes[static_cast<size_t>(order[i])] = counts[i];
    end += counts[i];
    ends.push_back(end);
  }
  Planner planner(root, rank);
  planner.cutAt(std::move(ends));
  planner.scatter(root, [&](int r) {
    const size_t i = static_cast<size_t>(r);
    return std::pair(begins[i], sizes[i]);
  });
  return planner.take();
}

HierarchyPlan planRooted(
    const Place& root,
    int rank,
    size_t count,
    int destination,
    bool outward) {
  Planner planner(root, rank);
  planner.collect(
      planner.bringTo(root, destination, count), destination, outward);
  return planner.take();
}

} // namespace resilient
