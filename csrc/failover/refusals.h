#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/time.h"

namespace resilient {

// Whether a peer's process is gone, by how the attempts to connect to it end.
// A refusal says that nobody listens, which the kernel of a living peer does
// not say; but a firewall does, and a way that never led to the peer proves
// nothing. So all ways by which it has been reached must refuse: those by which
// it was reached lately, or, before any connection stood, all there are.
//
// Told only of attempts by a route's own two NICs, while no path is up.
class Refusals {
 public:
  // So many refusals over so long. More tries only delay the news; fewer might
  // fall for a firewall that is being reloaded.
  static constexpr int kToDeath = 4;
  static constexpr Nanos kSpan = std::chrono::milliseconds(150);
  // A way that was lost so long before the last one: its answer is not waited
  // for, since it may never come.
  static constexpr Nanos kLately = std::chrono::seconds(60);

  void setRoutes(size_t count) {
    routes_.resize(std::max(count, routes_.size()));
  }
  // Any connection stands: the process lives.
  void onConnected() {
    for (Route& r : routes_) {
      r.refusals = 0;
    }
  }
  // A connection of this route's own two NICs stands, or stood until now.
  void onCarried(size_t route, TimePoint now) {
    setRoutes(route + 1);
    routes_[route].carriedAt = now;
  }
  // An attempt has ended in another way: silence, or another answer.
  void onOther(size_t route) {
    setRoutes(route + 1);
    routes_[route].refusals = 0;
  }
  // It refuses, and few more such answers may decide: better ask it again than
  // look for other ways.
  bool undecided(size_t route) const {
    return route < routes_.size() && routes_[route].refusals > 0 &&
        routes_[route].refusals < kToDeath;
  }
  // One was refused; true if the process is gone. The refusals of all routes
  // that count are added up, and none of these routes may have answered
  // otherwise since.
  bool onRefused(size_t route, TimePoint now) {
    setRoutes(route + 1);
    Route& refusing = routes_[route];
    if (refusing.refusals++ == 0) {
      refusing.since = now;
    }
    TimePoint last{};
    for (const Route& r : routes_) {
      last = std::max(last, r.carriedAt);
    }
    int count = 0;
    TimePoint since = now;
    for (const Route& r : routes_) {
      if (last != TimePoint{} &&
          (r.carriedAt == TimePoint{} || last - r.carriedAt > kLately)) {
        continue;
      }
      if (r.refusals == 0) {
        return false;
      }
      count += r.refusals;
      since = std::min(since, r.since);
    }
    return count >= kToDeath && now - since >= kSpan;
  }

 private:
  struct Route {
    TimePoint carriedAt{}; // last; the beginning of time: never
    int refusals = 0; // in a row
    TimePoint since{}; // of the first of these
  };
  std::vector<Route> routes_;
};

} // namespace resilient
