#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <unordered_set>

namespace resilient {

// The names (wire/tls_keys.h) by which callers have told which secret they use.
// A member uses each for one connection; a caller that repeats one has recorded
// it. It can prove nothing, but an answer costs as much as one to a member.
// Strangers cannot make names, so at most as many answers are lost on them as
// they have recordings, once at each rank.
//
// A stranger whose recording arrives before the original keeps that one
// connection from being made; the member tries again by another name.
class UsedNames {
 public:
  // At 40 bytes each. With more, the oldest are forgotten.
  static constexpr size_t kMax = 1u << 16;

  // `name`: checked, so its end is a MAC. False: it has been used before.
  bool use(std::span<const uint8_t> name) {
    uint64_t end = 0;
    std::memcpy(&end, name.last<sizeof(end)>().data(), sizeof(end));
    if (!known_.insert(end).second) {
      return false;
    }
    order_.push_back(end);
    if (order_.size() > kMax) {
      known_.erase(order_.front());
      order_.pop_front();
      forgotten_ = true;
    }
    return true;
  }
  // None was forgotten.
  bool knowsAll() const {
    return !forgotten_;
  }

 private:
  std::unordered_set<uint64_t> known_;
  std::deque<uint64_t> order_;
  bool forgotten_ = false;
};

} // namespace resilient
