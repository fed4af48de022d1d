#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "path/rate_limit.h"
#include "transport/path.h"

namespace resilient {

// The paths of one link, and how frames get from the channel to them.
//
// Thread: loop thread. Paths may be removed, and added, from within pump() and
// forEach().
//
// It owns the paths; pointers to them are good until remove().
class PathSet {
 public:
  explicit PathSet(Channel& channel) : channel_(channel) {}

  bool empty() const {
    return paths_.empty();
  }
  void add(std::unique_ptr<Path> path);
  // For its owner to destroy, not at once if its code is on the stack.
  std::shared_ptr<Path> remove(const Path& path);
  Path& last() {
    return *paths_.back();
  }
  // Visits every path, also if `call` removes some. If it adds one, a path may
  // be visited twice.
  template <typename Call>
  void forEach(Call&& call) {
    for (size_t i = 0; i < paths_.size();) {
      Path* const path = paths_[i].get();
      call(*path);
      i += i < paths_.size() && paths_[i].get() == path;
    }
  }
  std::optional<TimePoint> heardAt() const;

  // Moves frames to the paths, at most one turn's share. `limit`: the cap on
  // the peer's site, or null. True if there may be more to do. `limit` is used
  // during the call only.
  bool pump(RateLimit* limit, TimePoint now);

 private:
  bool round();
  bool takeAll(Path& path);
  bool takeInTurn();
  bool mayTakeChunks(const Path& path);
  void charge(const Path& path, uint64_t bytes);

  Channel& channel_;
  // First those that take all they can, then the connections and the paths over
  // relays, which take one frame each in turn.
  std::vector<std::unique_ptr<Path>> paths_;
  size_t inTurnBegin_ = 0; // in paths_
  size_t nextFirst_ = 0; // of the paths before that, modulo their number
  size_t nextTurn_ = 0; // of the connections
  // Arguments of the present call of pump():
  RateLimit* limit_ = nullptr;
  TimePoint now_{};
};

} // namespace resilient
