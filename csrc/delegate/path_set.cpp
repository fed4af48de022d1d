#include "delegate/path_set.h"

#include <algorithm>

namespace resilient {
namespace {

// The share of one link in a turn of the loop.
constexpr int kPumpRounds = 8;

} // namespace

void PathSet::add(std::unique_ptr<Path> path) {
  const bool inTurn =
      path->kind() == PathKind::kTcp || path->kind() == PathKind::kRelay;
  paths_.insert(
      inTurn ? paths_.end()
             : paths_.begin() + static_cast<ptrdiff_t>(inTurnBegin_),
      std::move(path));
  inTurnBegin_ += !inTurn;
}

std::shared_ptr<Path> PathSet::remove(const Path& path) {
  const auto at = std::ranges::find(
      paths_, &path, [](const auto& owned) { return owned.get(); });
  inTurnBegin_ -= static_cast<size_t>(at - paths_.begin()) < inTurnBegin_;
  std::shared_ptr<Path> removed = std::move(*at);
  paths_.erase(at);
  return removed;
}

std::optional<TimePoint> PathSet::heardAt() const {
  std::optional<TimePoint> at;
  for (const auto& path : paths_) {
    at = at ? std::max(*at, path->heardAt()) : path->heardAt();
  }
  return at;
}

bool PathSet::pump(RateLimit* limit, TimePoint now) {
  limit_ = limit;
  now_ = now;
  for (int i = 0; i < kPumpRounds; ++i) {
    if (!round()) {
      return false;
    }
  }
  return true;
}

// How it works. Paths that take all they can come first: shared memory is the
// fastest, and while one of them works the connections below it are in reserve.
// If one of them has taken something, the next round begins with another one:
// a new path must get some of what the older ones could hold alone, or it would
// never show what it carries. The connections then take one frame each in turn,
// so that a message spreads over all of them. Taken frames are written at the
// end, in as few system calls as can be. True if another round may find more.
bool PathSet::round() {
  bool any = false;
  for (size_t i = 0; i < inTurnBegin_; ++i) {
    any = takeAll(*paths_[(nextFirst_ + i) % inTurnBegin_]) || any;
  }
  nextFirst_ += any;
  while (takeInTurn()) {
    any = true;
  }
  forEach([&](Path& path) {
    any = path.flush() || any;
    if (limit_ != nullptr) {
      if (const uint64_t bytes = path.takeUnpaid()) {
        charge(path, bytes);
      }
    }
  });
  return any;
}

bool PathSet::takeAll(Path& path) {
  bool any = false;
  while (path.hasRoom()) {
    const size_t bytes = path.takeFrame(mayTakeChunks(path));
    if (bytes == 0) {
      break;
    }
    any = true;
    charge(path, bytes);
  }
  return any;
}

// Each pass begins one connection further than the last. Under a rate limit it
// begins behind the connection that got the last frame, since the limit may
// allow only one frame in a pass.
bool PathSet::takeInTurn() {
  const size_t count = paths_.size() - inTurnBegin_;
  bool taken = false;
  size_t next = nextTurn_ + 1;
  for (size_t i = 0; i < count; ++i) {
    const size_t index = (nextTurn_ + i) % count;
    Path& path = *paths_[inTurnBegin_ + index];
    if (!path.hasRoom()) {
      continue;
    }
    if (const size_t bytes = path.takeFrame(mayTakeChunks(path))) {
      taken = true;
      charge(path, bytes);
      if (limit_ != nullptr) {
        // One frame may be all for now: the next is another path's.
        next = index + 1;
      }
    }
  }
  nextTurn_ = count == 0 ? 0 : next % count;
  return taken;
}

// Whether the cap on the peer's site lets us send more of our messages now. If
// not, we stand in its queue. The cap of a relay counts what goes over it.
bool PathSet::mayTakeChunks(const Path& path) {
  return limit_ == nullptr || path.kind() == PathKind::kRelay ||
      !channel_.takesChunks(path.id()) || !channel_.backlogged() ||
      limit_->mayTake(channel_.id(), now_);
}

// Control frames count as well, although they never wait for the limit.
void PathSet::charge(const Path& path, uint64_t bytes) {
  if (limit_ != nullptr && path.kind() != PathKind::kRelay) {
    limit_->took(channel_.id(), bytes, now_);
  }
}

} // namespace resilient
