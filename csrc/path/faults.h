#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/time.h"

namespace resilient {

// Injected faults of a path, from rules in a small language: a user can try a
// slow, lossy or breaking network on one machine. Pure and deterministic: the
// same rules, seed and calls give the same faults.
//
//   delay rank=1 peer=2 ms=60 jitter_ms=5 from_s=10 until_s=40;
//   rate rank=0 peer=1 bytes_per_s=1e6;
//   stall peer=2 path=0 at_s=5 for_s=2;
//   cut rank=1 peer=2 path=0 after_bytes=3000000;
//   cut peer=2 at_s=3 every_s=1;
//   drop rank=1 peer=2 at_s=3 for_s=2;
//   seed=7
//
// Paper: SHIFT §5.1. Injection that needs no rights over the network.
//
// Rules are separated by ';' or newlines; '#' begins a comment.
//
// kind   what happens while it applies         keys of its own
// delay  bytes leave later                     ms, jitter_ms (+-, uniform)
// rate   bytes leave no faster                 bytes_per_s
// stall  nothing is written                    -
// drop   silence: nothing is written or read   -
// cut    the connection breaks, maybe within   after_bytes (of each connection
//        a frame; it may be made again         of the path; of the present one,
//                                              since the rule was added),
//                                              times, every_s
//
// Where: rank (who applies it), peer, path (connection index); absent means
// all, RDMA too. RDMA is not used where a rule names a connection. When: from_s
// or at_s, until_s or for_s (seconds since the engine's start; with only for_s,
// since the rule was added); from_step, until_step, at_step (a counter that the
// user advances). `until` is exclusive. All given conditions must hold. Delays
// of several rules add up, of several rates the lowest counts.
struct FaultRule {
  enum class Kind { kDelay, kRate, kStall, kCut, kDrop };

  uint64_t id = 0;
  std::string text;
  Kind kind = Kind::kDelay;
  std::optional<int64_t> rank, peer, path;
  Nanos from = Nanos::min(), until = Nanos::max(); // since the start
  int64_t fromStep = INT64_MIN, untilStep = INT64_MAX;
  Nanos delay{}, jitter{};
  double bytesPerS = 0;
  // Cuts, exactly one of them:
  std::optional<Nanos> cutAt; // since the start
  std::optional<int64_t> cutAtStep;
  std::optional<uint64_t> cutAfterBytes;
  bool addedLater = false; // while running: see add()
  Nanos cutEvery{}; // 0: once; with cutAt
  uint64_t cutTimes = UINT64_MAX; // per path; with cutAfterBytes
};

// All rules of a process. Thread: whoever owns it; not thread-safe. Its
// PathFaults read it at each call, so they need the same thread.
class FaultPlan {
 public:
  FaultPlan() = default;
  // Throws a StatusError (kInvalidArgument) that names the rule, the key and
  // what is allowed.
  static FaultPlan parse(const std::string& text);

  // The moment from which the rules count their seconds.
  void begin(TimePoint start) {
    start_ = start;
    ++version_;
  }
  // Adds one rule while running. `cut` without any condition, and a rule with
  // only for_s, begin at `now`; after_bytes leaves out what the present
  // connection has sent before. Throws as above.
  uint64_t add(const std::string& rule, TimePoint now);
  bool remove(uint64_t id);
  // Steps may be set to anything, but go forward in normal use.
  void setStep(int64_t step) {
    step_ = step;
  }

  bool empty() const {
    return rules_.empty();
  }
  // Whether a rule stands for the network between these two, now or later.
  bool concerns(int selfRank, int peerRank) const;
  const std::vector<FaultRule>& rules() const {
    return rules_;
  }
  TimePoint start() const {
    return start_;
  }
  int64_t step() const {
    return step_;
  }
  uint64_t seed() const {
    return seed_;
  }
  // Changes with every add, remove and begin.
  uint64_t version() const {
    return version_;
  }

 private:
  void addParsed(const std::string& text, size_t number, TimePoint* now);

  std::vector<FaultRule> rules_;
  TimePoint start_{};
  int64_t step_ = 0;
  uint64_t seed_ = 1;
  uint64_t nextId_ = 1;
  uint64_t version_ = 0;
};

// The plan's faults for one path of this rank. The path asks before it writes
// or reads. `now` never goes back between calls.
class PathFaults {
 public:
  // `plan` must outlive it and may change meanwhile.
  //
  // connection: the path's index; negative: it is no connection.
  PathFaults(const FaultPlan& plan, int selfRank, int peerRank, int connection);

  // False: no rule can concern this path now or later, ask nothing.
  bool any();
  // Rules for this peer name connections, and this path is none.
  bool namesOthers();
  // A connection of this path was made: cuts of the past do not concern it.
  void connectionOpened(TimePoint now);
  // When `bytes` handed over now may leave. Never before `now` nor before what
  // was handed over earlier.
  TimePoint release(TimePoint now, size_t bytes);
  // When a limited link will have sent all that was handed over so far; in the
  // past if it is idle or not limited.
  TimePoint linkFreeAt() const {
    return linkFree_;
  }
  bool stalled(TimePoint now);
  // If stalled: until when at least, kNever if no time ends it.
  TimePoint stalledUntil(TimePoint now);
  bool dropping(TimePoint now);
  // How many more bytes may be written before the connection breaks: 0 means
  // break it now and call cutDone. SIZE_MAX: no end known.
  size_t bytesUntilCut(uint64_t sentOnThisConnection, TimePoint now);
  void cutDone(uint64_t sentOnThisConnection, TimePoint now);
  // When one of the answers above changes by itself, after `now`; kNever if
  // only a new step, rule or byte can change one.
  TimePoint nextChange(TimePoint now);

 private:
  void refresh();
  bool active(const FaultRule& rule, TimePoint now) const;
  bool cutPending(const FaultRule& rule, TimePoint now) const;
  TimePoint nextCut(const FaultRule& rule, TimePoint after) const;
  TimePoint absolute(Nanos sinceStart) const;
  size_t bytesLeft(const FaultRule& rule, uint64_t sent, TimePoint now) const;

  const FaultPlan& plan_;
  int selfRank_, peerRank_, connection_;
  uint64_t version_ = UINT64_MAX; // of the plan that rules_ comes from
  std::vector<FaultRule> rules_; // that concern this path
  bool namesOthers_ = false;
  Prng random_;
  TimePoint lastRelease_ = TimePoint::min();
  TimePoint linkFree_ = TimePoint::min(); // when the slow link has sent all
  // Cuts up to here have happened or had nothing to cut.
  TimePoint cutsDone_ = TimePoint::min();
  int64_t stepCutsDone_ = INT64_MIN;
  std::map<uint64_t, uint64_t> byteCuts_; // by rule: how many
  // By rule: what the present connection had sent when the rule was added.
  std::map<uint64_t, uint64_t> sentBefore_;
};

} // namespace resilient
