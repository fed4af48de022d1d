#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "path/faults.h"
#include "tests/channel_pair.h"
#include "transport/event_loop.h"
#include "transport/path.h"

// What every kind of path promises (transport/path.h), as tests that a new kind
// inherits: it writes a PathHelper and names it in PATH_CONTRACT.

namespace resilient::test {

// A process with one channel and its paths, which it pumps as PeerLink does.
// Its loop has a thread of its own, so that one process can stand still while
// the other one runs.
//
// Thread: the methods of the first group belong to the test's thread; the rest
// belongs to the loop.
class PathUser final : public TestProcess, public PathOwner {
 public:
  explicit PathUser(uint32_t id);
  ~PathUser() override;

  // Calls `f` in the loop, and throws what it throws.
  void run(const std::function<void()>& f);
  // Returns once `met` holds; it is asked in the loop, for 15 s at most.
  void until(const char* what, const std::function<bool()>& met);
  // The process does nothing, and above all reads nothing, until resume().
  void pause();
  void resume();

  // The newest path.
  Path& path() {
    return *paths.back();
  }
  TestSend& send(const std::string& content, uint64_t tag = 0);
  TestRecv& receive(size_t bytes, uint64_t tag = 0);
  // Every receive has ended.
  bool received() const;
  void pump();
  void pumpSoon(); // unless `pumps` is false

  // For helpers that keep something for a user: expired with it.
  const std::shared_ptr<void> life = std::make_shared<char>();
  EventLoop loop;
  FaultPlan plan;
  PathFaults faults{plan, 0, 1, 0}; // of the paths that obey rules
  std::vector<std::unique_ptr<Path>> paths; // closed ones, too
  std::deque<TestSend> sends;
  std::deque<TestRecv> receives;
  bool pumps = true; // by itself
  uint64_t taken = 0; // bytes of frames
  uint64_t unpaid = 0; // bytes that takeUnpaid() has told of
  int ready = 0, use = 0; // calls of PathOwner
  std::atomic<int> closed{0}; // likewise, also read by other threads
  int afterEnd = 0; // such calls of a path that was over
  Status why;
  std::function<void(Path&)> whenReady, whenUse, whenClosed;

 private:
  void channelReady(Channel& channel) override;
  void onPathClosed(Path& path, const Status& status) override;
  void onPathReady(Path& path) override;
  void onPathUse(Path& path) override;
  void armTimer();

  bool dirty_ = false;
  TimerId timer_ = 0;
  TimePoint timerAt_ = kNever;
  std::optional<std::promise<void>> go_; // ends a pause
  std::thread thread_;
};

// All that the contract has to know about a kind of path.
class PathHelper {
 public:
  virtual ~PathHelper() = default;

  // Why this machine has no such paths; empty: it has.
  virtual std::string unavailable() const {
    return "";
  }
  // Makes one end of a path, in the loop of its user.
  using Maker = std::function<std::unique_ptr<Path>(PathUser& user, PathId id)>;
  // Both ends of a new path.
  virtual std::array<Maker, 2> connect() = 0;
  // Bytes that a path takes at most while the far end reads nothing.
  virtual uint64_t mostUnread() const = 0;
  // It learns from the transport that the far end is closed.
  virtual bool noticesEnd() const = 0;
  // It obeys fault rules. Other kinds carry nothing while there is one.
  virtual bool obeysRules() const = 0;
  // Rules are about another network than the one that it uses.
  virtual bool ignoresRules() const {
    return false;
  }
  // The path's evidence shows what a rule holds back. Otherwise the path judges
  // by itself, and cannot be used.
  virtual bool tellsEvidence() const {
    return obeysRules();
  }
  // The network drops all that is for end `to` of the newest path. False: no
  // network lies between the ends.
  virtual bool silence(int to, bool silent) = 0;
};

// For helpers over sockets: makes the kernel drop what arrives at this one,
// as if the network did.
void dropArrivals(int fd, bool drop);

#define PATH_CONTRACT_CHECKS(X, kind, Helper)             \
  X(kind, Helper, delivers_whole_and_in_order)            \
  X(kind, Helper, stops_while_the_far_end_does_not_read)  \
  X(kind, Helper, closes_before_the_first_frame)          \
  X(kind, Helper, closes_with_frames_unflushed)           \
  X(kind, Helper, closes_in_the_middle_of_a_frame)        \
  X(kind, Helper, resets_in_the_middle_of_a_frame)        \
  X(kind, Helper, is_destroyed_without_a_word)            \
  X(kind, Helper, closes_when_the_far_end_does)           \
  X(kind, Helper, closes_from_within_on_path_ready)       \
  X(kind, Helper, closes_from_within_on_path_use)         \
  X(kind, Helper, is_heard_by_what_the_peer_sends)        \
  X(kind, Helper, owes_nothing_when_idle)                 \
  X(kind, Helper, shows_the_silence_of_the_network)       \
  X(kind, Helper, drops_by_rule)                          \
  X(kind, Helper, stalls_by_rule)                         \
  X(kind, Helper, delays_by_rule)                         \
  X(kind, Helper, is_cut_by_rule)                         \
  X(kind, Helper, is_not_used_under_rules_it_cannot_obey) \
  X(kind, Helper, takes_no_chunk_unless_allowed)          \
  X(kind, Helper, accounts_for_all_that_leaves)

namespace path_contract {
#define PATH_CONTRACT_DECLARE(kind, Helper, check) void check(PathHelper&);
PATH_CONTRACT_CHECKS(PATH_CONTRACT_DECLARE, , )
#undef PATH_CONTRACT_DECLARE
} // namespace path_contract

void checkPathContract(PathHelper& helper, void (*check)(PathHelper&));

#define PATH_CONTRACT_TEST(kind, Helper, check)           \
  TEST(kind##_path_##check) {                             \
    Helper helper;                                        \
    ::resilient::test::checkPathContract(                 \
        helper, ::resilient::test::path_contract::check); \
  }

// The whole contract for a kind, as tests "kind_path_...".
#define PATH_CONTRACT(kind, Helper) \
  PATH_CONTRACT_CHECKS(PATH_CONTRACT_TEST, kind, Helper)

} // namespace resilient::test
