#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "path/path_count.h"

namespace resilient {

// How many connections each route of a link has, from what they carry, and the
// memory of it for the next link between the same two NICs.
//
// Thread: loop thread.
class RouteTuning {
 public:
  // The kernel's view of the connections of one route.
  struct View {
    Nanos minRoundTrip{}; // 0: unknown
    int sending = 0, queueing = 0; // connections
    bool startingUp = false;
    uint64_t ackedBytes = 0; // since the beginning of the link
  };

  // `keys` name the routes for the memory; without them, there is one route of
  // which nothing is remembered. Call it once, before anything else. Afterwards
  // route indices are below max(1, keys).
  void begin(const PathCount::Config& config, std::vector<std::string> keys);
  const std::string& key(size_t route) const {
    return keys_[route];
  }
  PathCount& count(size_t route) {
    return counts_[route];
  }
  int maxConnections() const; // of any route
  // At each look: whether there was more to send all the time since the last.
  bool busySince(bool backlogged);
  bool backlogged() const {
    return backlogged_;
  }
  // Returns whether the number of connections has changed. observe(), lossy()
  // and setLossy() need a key for the route.
  bool observe(size_t route, const View& seen, bool busy, TimePoint now);
  // The route loses packets without a queue: new connections begin with BBR.
  bool lossy(size_t route) const;
  void setLossy(size_t route);

 private:
  std::vector<PathCount> counts_; // by route
  std::vector<std::string> keys_;
  std::vector<int> found_; // of the counts, as remembered
  bool backlogged_ = false; // at the last look
};

} // namespace resilient
