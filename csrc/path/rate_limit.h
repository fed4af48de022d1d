#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>

#include "base/time.h"

namespace resilient {

// The most that some users together may send in a second: a bucket of tokens, a
// byte each, and a queue of those who found it empty. A frame may leave as soon
// as there is any token at all, and the bucket then owes the rest; so a frame
// larger than the bucket is only late, and the mean rate is kept. Waiting users
// get one frame at a time, in turn.
//
// The most urgent goes first; between equals, the one that has waited longest.
// One that has seen `starvationBytes` pass gets a frame in between.
//
// A link that is billed or shared between sites, as ATLAS §3 describes them,
// has such a limit for good reasons: the paper has none. Pure: the owner has
// the timer for readyAt(). A user is any number but 0.
class RateLimit {
 public:
  using User = uint32_t;
  // The burst that may leave at once, in time at the limit: after a pause, and
  // to make up for a turn that came late. The first one after a pause may not
  // be the most urgent, so it gets little ahead of the others.
  static constexpr Nanos kAfterPause = std::chrono::milliseconds(2);
  static constexpr Nanos kWhenLate = std::chrono::milliseconds(10);

  RateLimit(double bytesPerS, uint64_t starvationBytes)
      : bytesPerS_(bytesPerS),
        starvationBytes_(starvationBytes),
        tokens_(bytesPerS * toSeconds(kAfterPause)) {}

  double bytesPerS() const {
    return bytesPerS_;
  }

  // May `user` send a frame now? If not, it has a place in the queue. Asking
  // again keeps that place.
  bool mayTake(User user, TimePoint now) {
    refill(now);
    const bool itsTurn = turn_ == user || (waiting_.empty() && turn_ == kNone);
    if (tokens_ > 0 && itsTurn) {
      return true;
    }
    if (std::ranges::find(waiting_, user, &Waiting::user) == waiting_.end()) {
      waiting_.push_back({user, 0});
    }
    return false;
  }

  // It has sent so much, whether it was asked for or not.
  void took(User user, uint64_t bytes, TimePoint now) {
    refill(now);
    tokens_ -= static_cast<double>(bytes);
    used_ = used_ * std::exp(-toSeconds(now - usedAt_) / toSeconds(kUseTime)) +
        static_cast<double>(bytes);
    usedAt_ = now;
    for (Waiting& w : waiting_) {
      w.passedOver += bytes;
    }
    endTurn(user);
  }

  // How much of the limit has been used, 0 to 1, over about kUseTime.
  double use(TimePoint now) const {
    const double used =
        used_ * std::exp(-toSeconds(now - usedAt_) / toSeconds(kUseTime));
    return std::min(used / (bytesPerS_ * toSeconds(kUseTime)), 1.0);
  }

  // A user waits, and none has the turn: nextTurn() is due at readyAt().
  bool idleTurn() const {
    return turn_ == kNone && waiting();
  }
  bool waiting() const {
    return !waiting_.empty();
  }
  TimePoint readyAt() const {
    return tokens_ > 0 ? refilledAt_
                       : refilledAt_ + fromSeconds((1 - tokens_) / bytesPerS_);
  }
  // The user that has the turn now; it must then take a frame or call
  // endTurn(). Only if idleTurn(). `urgencyOf(user)`: lower goes first.
  template <typename UrgencyOf>
  User nextTurn(UrgencyOf urgencyOf) {
    auto next = std::ranges::min_element(
        waiting_, {}, [&](const Waiting& w) { return urgencyOf(w.user); });
    // The front has waited longest, so it has seen most pass.
    if (waiting_.front().passedOver >= starvationBytes_) {
      next = waiting_.begin();
    }
    turn_ = next->user;
    waiting_.erase(next);
    return turn_;
  }
  // It has nothing to send any more, or no path with room.
  void endTurn(User user) {
    if (turn_ == user) {
      turn_ = kNone;
    }
  }
  // It is gone.
  void leave(User user) {
    endTurn(user);
    std::erase_if(waiting_, [&](const Waiting& w) { return w.user == user; });
  }

 private:
  static constexpr User kNone = 0;
  // An iteration of a training, with the part of it in which nothing is sent.
  static constexpr Nanos kUseTime = std::chrono::seconds(3);
  struct Waiting {
    User user;
    uint64_t passedOver; // bytes that others have sent meanwhile
  };

  void refill(TimePoint now) {
    if (refilledAt_ != TimePoint{} && now > refilledAt_) {
      const bool pause = turn_ == kNone && waiting_.empty();
      tokens_ = std::min(
          tokens_ + bytesPerS_ * toSeconds(now - refilledAt_),
          bytesPerS_ * toSeconds(pause ? kAfterPause : kWhenLate));
    }
    refilledAt_ = std::max(refilledAt_, now);
  }

  const double bytesPerS_;
  const uint64_t starvationBytes_;
  double tokens_;
  TimePoint refilledAt_{};
  double used_ = 0; // bytes, which count less with time
  TimePoint usedAt_{};
  std::deque<Waiting> waiting_; // who has waited longest comes first
  User turn_ = kNone;
};

} // namespace resilient
