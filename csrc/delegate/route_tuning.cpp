#include "delegate/route_tuning.h"

#include <algorithm>
#include <utility>

#include "delegate/found_routes.h"

namespace resilient {

void RouteTuning::begin(
    const PathCount::Config& config,
    std::vector<std::string> keys) {
  keys_ = std::move(keys);
  counts_.assign(std::max<size_t>(keys_.size(), 1), PathCount(config));
  found_.assign(counts_.size(), 0);
  for (size_t route = 0; route < keys_.size(); ++route) {
    counts_[route].beginWith(foundRoute(keys_[route]).connections);
  }
}

int RouteTuning::maxConnections() const {
  int max = 0;
  for (const PathCount& count : counts_) {
    max = std::max(max, count.count());
  }
  return max;
}

bool RouteTuning::busySince(bool backlogged) {
  return std::exchange(backlogged_, backlogged) && backlogged;
}

bool RouteTuning::observe(
    size_t route,
    const View& seen,
    bool busy,
    TimePoint now) {
  PathCount& count = counts_[route];
  const int before = count.count();
  if (seen.minRoundTrip > Nanos(0)) {
    count.onRoundTrip(seen.minRoundTrip);
  }
  PathCount::View view;
  view.ackedBytes = seen.ackedBytes;
  view.busy = busy;
  view.queueing = 2 * seen.queueing > seen.sending;
  view.startingUp = seen.startingUp;
  count.observe(view, now);
  if (count.found() != found_[route]) {
    found_[route] = count.found();
    FoundRoute found = foundRoute(keys_[route]);
    found.connections = found_[route];
    rememberRoute(keys_[route], found);
  }
  return count.count() != before;
}

bool RouteTuning::lossy(size_t route) const {
  return foundRoute(keys_[route]).lossy;
}

void RouteTuning::setLossy(size_t route) {
  FoundRoute found = foundRoute(keys_[route]);
  found.lossy = true;
  rememberRoute(keys_[route], found);
}

} // namespace resilient
