#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace resilient::test {

struct SimulationResult {
  std::string error; // empty: everything was as it must be
  uint64_t traceHash = 0;
  uint64_t events = 0;
  // How much was exercised, so that a test can show it tests something.
  uint64_t delivered = 0; // receives that got their message
  uint64_t failed = 0; // operations that ended with an error, as they must
  uint64_t cancelled = 0; // operations
  uint64_t cuts = 0; // paths
  uint64_t stalls = 0; // of paths
  uint64_t suspicions = 0; // of paths that may be quite well
  uint64_t roles = 0; // changes of the classes that a path carries
  uint64_t losses = 0; // channels that failed, groups that were closed
  uint64_t duplicates = 0; // chunks that arrived in vain
  uint64_t zeroFilled = 0; // bytes that senders were told were missing

  // What the network and the processes did wrong on purpose.
  uint64_t faults() const {
    return cuts + stalls + suspicions + roles + losses;
  }
};

// Runs one random program on one random network, both decided by the seed:
// sends, receives, collectives, cancels, lost groups and channels, on paths
// that tear, stall, break and return. Then heals the network, gives every
// message a receive, and checks that everything has ended as it must.
SimulationResult simulate(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace = {});

} // namespace resilient::test
