#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace resilient {

// The last of many samples, and how many there have been: whoever looks now
// and then sees each once.
class RecentSamples {
 public:
  void add(double sample) {
    last_[count_ % last_.size()] = sample;
    ++count_;
  }
  uint64_t count() const {
    return count_;
  }
  // Oldest first.
  std::vector<double> last() const {
    const uint64_t kept = std::min<uint64_t>(count_, last_.size());
    std::vector<double> result;
    result.reserve(kept);
    for (uint64_t i = count_ - kept; i < count_; ++i) {
      result.push_back(last_[i % last_.size()]);
    }
    return result;
  }

 private:
  std::array<double, 32> last_{};
  uint64_t count_ = 0;
};

} // namespace resilient
