#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace resilient {

// The load of one path, and its speed.
struct PathLoad {
  double bytesPerS = 0; // its capacity; 0: unknown
  double oneWayS = 0;
  uint64_t inFlightBytes = 0;
  double silentS = 0; // with bytes in flight and none acknowledged

  // When the last of `bytes` more would arrive, in seconds from now. A path
  // that is silent is at least that late.
  double arrivalS(uint64_t bytes) const {
    return std::max(
        silentS,
        static_cast<double>(inFlightBytes + bytes) / bytesPerS + oneWayS);
  }
};

// Whether the tail of a message, which one path has in flight, is worth sending
// once more over another that has nothing else to do: a path may have become
// slow, without falling silent, since it was given its last chunks.
//
// Paper: PIPEMORPH §5.3 sends again what has failed; this is only late.
class Hedge {
 public:
  // `holder` has the chunk in flight, as the last of its first `ahead` bytes.
  Hedge(const PathLoad& helper, const PathLoad& holder)
      : helper_(helper), holder_(holder) {}

  bool worthIt(uint64_t ahead, uint64_t chunkBytes) const {
    if (helper_.bytesPerS == 0) {
      return false;
    }
    double needsS = 0;
    if (holder_.bytesPerS > 0) {
      needsS = static_cast<double>(ahead) / holder_.bytesPerS + holder_.oneWayS;
    }
    if (holder_.silentS > patienceS(chunkBytes)) {
      // It will take as long again, as far as anybody knows.
      needsS = std::max(needsS, holder_.silentS);
    }
    return limitS(chunkBytes) < needsS;
  }
  // The silence at which worthIt() may become true.
  double nextLookS(uint64_t chunkBytes) const {
    return std::max(patienceS(chunkBytes), limitS(chunkBytes)) + kSlackS / 5;
  }

 private:
  // A copy costs its bytes, and rates are measured roughly.
  static constexpr double kFactor = 2;
  static constexpr double kSlackS = 0.005;

  double limitS(uint64_t chunkBytes) const {
    return kFactor * helper_.arrivalS(chunkBytes) + kSlackS;
  }
  // A path that works is silent for a chunk and a round trip.
  double patienceS(uint64_t chunkBytes) const {
    const double chunkS = holder_.bytesPerS > 0
        ? static_cast<double>(chunkBytes) / holder_.bytesPerS
        : 0;
    return kFactor * (chunkS + 2 * holder_.oneWayS) + kSlackS;
  }

  const PathLoad helper_, holder_;
};

// Chunks go where they will arrive first. A path with room asks whether it
// should take the next one; it should not if the chunk, and all that waits
// behind it, would be there sooner by the other paths. So unequal paths add
// up, and the slowest never sets the pace at the end of a message.
//
// Paper: ATLAS §4.1 gives every connection the same share; these are for
// connections that differ.
//
// For one decision: it is built from the loads of this moment and thrown away.
// If no other path has been measured, a path may always take a chunk.
class ArrivalOrder {
 public:
  // May this path, so loaded, take a chunk of `chunkBytes`?
  ArrivalOrder(const PathLoad& mine, uint64_t chunkBytes)
      : mine_(mine), chunkBytes_(chunkBytes) {}

  // Ignore paths that have not been measured.
  void addOther(const PathLoad& other) {
    if (other.bytesPerS == 0) {
      return;
    }
    known_ = true;
    rate_ += other.bytesPerS;
    ahead_ += std::max(
        static_cast<double>(other.inFlightBytes) +
            other.oneWayS * other.bytesPerS,
        other.silentS * other.bytesPerS);
    soonestS_ = std::min(soonestS_, other.arrivalS(chunkBytes_));
  }

  // The chunk, with all of `backlogBytes` that waits (itself included), would
  // be there no sooner by the others alone. There is no tolerance, although
  // rates are measured roughly: a path that is early with its questions would
  // use it each time, at the end of each message.
  bool inTime(uint64_t backlogBytes) const {
    const double othersDoneS =
        (ahead_ + static_cast<double>(backlogBytes)) / rate_;
    return mine_.bytesPerS > 0 && mine_.arrivalS(chunkBytes_) <= othersDoneS;
  }
  bool mayTake(uint64_t backlogBytes) const {
    if (!known_) {
      return true;
    }
    if (mine_.bytesPerS == 0) {
      return mine_.inFlightBytes < kFirstShareBytes;
    }
    // The path with the earliest arrival of the chunk never refuses it, or no
    // path might take it.
    return inTime(backlogBytes) || mine_.arrivalS(chunkBytes_) <= soonestS_;
  }

 private:
  // An unmeasured path gets this much to show its capacity.
  static constexpr uint64_t kFirstShareBytes = 64u << 10;

  const PathLoad mine_;
  const uint64_t chunkBytes_;
  bool known_ = false;
  double rate_ = 0; // of the others together
  double ahead_ = 0; // bytes that they deliver before anything new
  double soonestS_ = std::numeric_limits<double>::infinity();
};

} // namespace resilient
