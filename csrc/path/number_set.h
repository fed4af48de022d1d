#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace resilient {

// A set of numbers kept as ranges. Message numbers finish nearly in order, so
// it stays a handful of ranges: one more than the messages still open. All
// calls take logarithmic time in the number of ranges, except rangesAbove().
class NumberSet {
 public:
  bool contains(uint64_t n) const {
    auto it = ranges_.upper_bound(n);
    return it != ranges_.begin() && std::prev(it)->second >= n;
  }

  // False if it was there already.
  bool insert(uint64_t n) {
    auto next = ranges_.upper_bound(n);
    if (next != ranges_.begin()) {
      auto prev = std::prev(next);
      if (prev->second >= n) {
        return false;
      }
      if (prev->second + 1 == n) {
        prev->second = n;
        if (next != ranges_.end() && next->first == n + 1) {
          prev->second = next->second;
          ranges_.erase(next);
        }
        return true;
      }
    }
    if (next != ranges_.end() && next->first == n + 1) {
      const uint64_t last = next->second;
      ranges_.erase(next);
      ranges_.emplace(n, last);
      return true;
    }
    ranges_.emplace(n, n);
    return true;
  }

  size_t ranges() const {
    return ranges_.size();
  }
  // The least number that is not in it, from `n` on.
  uint64_t firstGap(uint64_t n) const {
    auto it = ranges_.upper_bound(n);
    return it != ranges_.begin() && std::prev(it)->second >= n
        ? std::prev(it)->second + 1
        : n;
  }
  // Those that begin above `n`, ascending: first and last number of each.
  std::vector<std::pair<uint64_t, uint64_t>> rangesAbove(uint64_t n) const {
    return {ranges_.upper_bound(n), ranges_.end()};
  }

 private:
  std::map<uint64_t, uint64_t> ranges_; // first -> last, inclusive
};

} // namespace resilient
