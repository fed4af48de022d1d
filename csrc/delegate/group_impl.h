#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "delegate/engine.h"
#include "delegate/group.h"
#include "delegate/membership.h"
#include "delegate/record.h"

namespace resilient {

class CollectiveRun;
class PointToPointRun;

// A group of ranks on the engine: who they are, and what is pending among
// them. Collectives run as coroutines (collective_run.h), point-to-point
// operations as single messages (point_to_point_run.h).
//
// Thread: methods of Group from any thread; all others on the loop thread.
//
// How it works. Each member has a link as soon as its address is known and
// something needs it. An operation is a run: it makes Records, one for each of
// its messages, and a record waits in the Member until the link is known. The
// run ends in finished(), the only place in the loop that calls `done`.
// Deadlines of all runs share one timer, the watchdog.
//
// A failure has one of three reaches. It ends one run (fail()), one collective
// on all ranks (tell(), told_), or the group for good (failure_).
//
// Ownership: an operation that is posted holds the group. The callbacks of the
// resolver and the timer for looking hold it weakly, so a group can die while
// it still looks for members. The watchdog has a bare pointer; shutdown()
// cancels it.
class GroupImpl final : public Group,
                        public std::enable_shared_from_this<GroupImpl> {
 public:
  GroupImpl(GroupConfig config, std::shared_ptr<Engine> engine);
  ~GroupImpl() override;
  // Throws StatusError. The destructor undoes a join that has failed halfway.
  void join(); // once, after construction

  uint64_t submit(CollectiveSpec spec) override;
  void submit(std::shared_ptr<PointToPointSpec> spec) override;
  uint64_t sequence() const override;
  void setSequence(uint64_t sequence) override;
  void abort(const std::string& reason) override;
  void shutdown(Nanos linger) override;
  GroupStats stats() override;
  std::shared_ptr<const RecordSeal> recordSeal() const override;
  std::shared_ptr<const Topology> topology(Nanos timeout, void (*meanwhile)())
      override;
  void setTopology(std::shared_ptr<const Topology> topology) override;

  // --- for operations
  Engine& engine() {
    return *engine_;
  }
  uint64_t id() const {
    return id_;
  }
  const std::string& name() const {
    return name_;
  }
  int rank() const {
    return rank_;
  }
  int size() const {
    return static_cast<int>(members_.size());
  }
  // The operation wants its onCheck() called at `at`. The timer may also fire
  // for an operation that has ended; onCheck() is called only for those whose
  // checkAt() has passed.
  void watch(TimePoint at);
  // The topology, or null: then learn() reads the list of members, and every
  // collective on its way is told. It may change later (setTopology()); a
  // collective keeps the one that it has begun with.
  const std::shared_ptr<const Topology>& knownTopology() const {
    return topology_;
  }
  void learn();
  // Calls record.post(link) as soon as the peer is known; for a collective, as
  // soon as all members are. Otherwise a rank could end its part, and with it
  // the process that serves the store, before the others have found each other.
  // It may do so before it returns. The group borrows the record until then:
  // Record::withdraw() calls forgetWaiting() if it is destroyed earlier.
  void postWhenKnown(Record& record, bool collective);
  void forgetWaiting(Record& record);
  std::string describe(int rank) const; // "rank 2 (host node7, pid 42, ...)"
  // Why the link to `rank` was closed: "rank 2 (host node7, ...) died: ...".
  // Call it only if the member has a link and that is closed.
  std::string closedText(int rank) const;
  std::string groupText() const; // "" for the default group, or " of group g"
  // Asks `rank` (or all, -1) what they are doing, for a time-out to come.
  // Answers come as reports, see onReport(). A member whose address is unknown
  // is asked as soon as it is found.
  void query(int rank);
  // The known reason why `rank` does not answer, as a sentence. Call it after
  // query(), and not for this rank.
  std::string silence(int rank) const;
  // The rank that holds up collective `sequence`, as far as the reports tell,
  // and why. Call it some time after query(), when answers may have come.
  // `waitingFor` is a rank that this one waits for, or -1. The rank in the
  // result is -1 if none is known to be the cause, and this rank itself if
  // ranks wait for each other.
  std::pair<int, std::string> blame(uint64_t sequence, int waitingFor) const;
  std::string pathSummary(int rank) const;
  // The end of a run, once: notes the result, moves the run to the engine's
  // graveyard and calls `done` last. The run dies at the end of the turn.
  void finished(
      CollectiveRun& run,
      const Status& status,
      int culprit,
      bool tellOthers);
  void finished(PointToPointRun& run, const Status& status, int sourceRank);
  // Reports about this sequence before it began here. Removes what it returns,
  // so it is for the start of that collective only.
  std::optional<Status> earlyFailure(uint64_t sequence);

  // --- from the engine
  // Makes the link with a member that is known and that none was needed with
  // yet; false if there is none.
  bool meet(const Uid& process);
  // A process calls that says it has this rank in the default group: looks it
  // up, unless all members are known.
  void lookUp(int64_t globalRank);
  // Adds the addresses of members that are known and have no link.
  void addMemberIps(std::set<std::string>& ips) const;
  // Those that are known, without this rank.
  void eachMember(
      const std::function<void(const PeerAddress&, int64_t globalRank)>& call)
      const;
  // Counts if it comes from the member that it names as its reporter. Acts in a
  // later turn, because the frame is still being read.
  void onNotice(const Uid& sender, const Notice& notice);
  void onOurAddresses();
  void onMismatch(
      uint64_t sequence,
      const OpSignature& local,
      const FrameHeader& remote);
  void onReport(const PeerLink& sender, const Report& report);
  // Ends what is pending, not what is started later: for that, set failure_
  // first. From the top of the loop only.
  void failAll(const Status& status);
  // For a member that asks. The oldest collective is the one that counts.
  Report report() const;
  // A first connection to this process: it may have missed some news.
  void onLinkUp(PeerLink& link);
  void onLinkCut(const PeerLink& link);
  void onLinkClosed(const PeerLink& link);

 private:
  struct Member {
    PeerLink* link = nullptr; // made when it is needed first
    std::unique_ptr<PeerAddress> address; // known, and no link yet
    bool needed = false; // some operation waits or has waited for it
    bool asking = false; // the store, for its own key
    int64_t globalRank = 0;
    // Not owned. A record is in one of the two lists at most, and in none once
    // it is posted.
    std::vector<Record*> waiting; // for the link
    std::vector<Record*> waitingForAll; // for the addresses of all members
    bool queryWaiting = false; // ask it as soon as the link is known
    TimePoint askedAt = kNever; // for the last time
    bool eager = false; // holds interest in the link for eager connect
    std::optional<Report> report;
    TimePoint reportAt{};
    // Sent in its name before we knew its uid; the last kUnprovenMax.
    std::deque<Engine::EarlyNotice> unproven;
  };
  // A member says so much at most before its first look-up ends; a process
  // that only pretends to be it costs no more memory than that.
  static constexpr size_t kUnprovenMax = 16;
  // A report older than this says nothing about now.
  static constexpr Nanos kFreshReport = std::chrono::milliseconds(1500);
  // When an operation that has not reached a rank looks at the store again,
  // for the first time and at most.
  static constexpr Nanos kFirstLook = std::chrono::milliseconds(500);
  static constexpr Nanos kMaxLook = std::chrono::seconds(4);
  static constexpr size_t kEarlyFailuresMax = 256;
  // News of failures further back than this many are not passed on. It only
  // has to exceed the failures that ranks learn of in different orders; a
  // notice takes some hundred bytes.
  static constexpr size_t kToldMax = 256;
  static constexpr size_t kListedInReport = 8;

  void learned(const std::string& list);
  void onStoreLost(const std::string& error);
  void need(int rank);
  void reach(int rank, const PeerAddress& address);
  void lookIn(Nanos pause);
  void onLook();
  void askForAddress(int rank);
  void onAddressText(int rank, const std::string& text);
  void failWhole(const Status& status);
  void endByMismatch(uint64_t sequence, const std::string& cause);
  void takeBack(
      VerbsLoans::Loan loan,
      const Status& status,
      std::function<void(const Status&)> done,
      std::function<std::shared_ptr<void>()> hold);
  void start(std::shared_ptr<CollectiveRun> run);
  void start(std::shared_ptr<PointToPointRun> run);
  void onWatchdog();
  void hear(const Engine::EarlyNotice& heard);
  void act(const Notice& notice);
  void ask(Member& member);
  void tell(const Notice& notice);
  void tell(const Notice& notice, PeerLink& link);
  bool drained() const;
  bool allOthersGone() const;

  const std::string name_;
  const int rank_;
  const std::shared_ptr<Engine> engine_;
  const bool eagerConnect_;
  const bool wholeJob_; // the default group
  const std::shared_ptr<KeyValue> store_;
  Membership membership_; // by joinGroup's thread; then constant
  uint64_t id_ = 0;
  std::string secret_;

  // Held from numbering an operation until it is posted, so operations reach
  // the loop in the order of their numbers. It is released before the caller
  // takes a turn.
  mutable std::mutex mutex_;
  uint64_t sequence_ = 0; // by mutex_
  bool closed_ = false; // by mutex_

  // Loop thread only.
  std::vector<Member> members_;
  std::map<uint64_t, std::shared_ptr<CollectiveRun>> collectives_;
  std::map<uint64_t, std::shared_ptr<PointToPointRun>> pointToPoints_;
  uint64_t lastPointToPoint_ = 0;
  std::shared_ptr<const Topology> topology_;
  bool membersKnown_ = false;
  bool learning_ = false;
  TimerId lookTimer_ = 0;
  Nanos lookPause_{};
  TimerId watchdog_ = 0;
  TimePoint watchdogAt_ = kNever;
  // The highest number so far. A notice above it is for a collective that has
  // not begun here; see act().
  uint64_t lastStarted_ = 0;
  OpSignature lastSignature_;
  // Never cleared: later operations end with it.
  Status failure_; // of the group as a whole
  std::map<uint64_t, Status> earlyFailures_; // by sequence
  // A sequence number is passed on once. A link that comes up later gets all of
  // told_, since it may have missed them.
  std::map<uint64_t, Notice> told_; // by sequence: failures passed on,
  uint64_t toldUpTo_ = 0; // apart from those up to here
  std::set<uint64_t> failedHere_; // collectives, the last kToldMax
  std::set<int64_t> globalRanks_; // of all members
};

} // namespace resilient
