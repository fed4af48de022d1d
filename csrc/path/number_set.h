#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace resilient {

// A set of numbers kept as ranges. Message numbers finish nearly in order, so
// it stays a handful of ranges: one more than the messages still open.
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

 private:
  std::map<uint64_t, uint64_t> ranges_; // first -> last, inclusive
};

} // namespace resilient
