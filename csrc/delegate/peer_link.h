#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "channel/channel.h"
#include "delegate/group.h"
#include "path/congestion_choice.h"
#include "path/connection_count.h"
#include "path/health.h"
#include "path/rate_limit.h"
#include "path/refusals.h"
#include "path/takeover.h"
#include "transport/address.h"
#include "transport/datagram_path.h"
#include "transport/handshake.h"
#include "transport/routes.h"
#include "transport/shared_door.h"
#include "transport/shared_path.h"
#include "transport/tcp_path.h"
#include "wire/control.h"

namespace resilient {

class Engine;

// Everything about one remote process: its channel, the connections that
// carry it, and their health. Makes connections, makes them again when they
// break, doubts and gives up ones that stall, and decides when the process
// itself is gone.
//
// Connections have slots, and a slot has a number that both ends know: its
// route (a pair of NICs, see transport/routes.h) is the number modulo the
// routes there are, its lane the rest. peer_link.cpp connects;
// peer_link_health.cpp watches; peer_link_roles.cpp says what each path is for;
// peer_link_shared.cpp shares memory with a peer on this host, which then takes
// what else the connections would carry; and peer_link_datagram.cpp exchanges
// datagrams with one on another host, where that is asked for.
//
// Who connects: whoever needs the peer first. If both try at once for one
// slot, the process with the smaller uid wins; the other's attempt is refused
// with kDuplicateSlot.
//
// Thread: loop thread. Lifetime: owned by the Engine until it stops.
class PeerLink final : public ChannelHost,
                       public TcpPathOwner,
                       public SharedPathOwner,
                       public DatagramPathOwner {
 public:
  enum class State { kUnconnected, kUp, kDead, kLeft };

  PeerLink(Engine& engine, Uid uid, uint32_t channelId);
  ~PeerLink() override;

  const Uid& uid() const {
    return uid_;
  }
  Channel& channel() {
    return channel_;
  }
  State state() const {
    return state_;
  }
  // Anything but kDead and kLeft: it may work, now or later.
  bool usable() const {
    return state_ == State::kUnconnected || state_ == State::kUp;
  }
  // The message lacks the subject, which is this peer: each group has a name
  // of its own for it.
  const Status& closedBecause() const {
    return closedBecause_;
  }
  const std::optional<PeerAddress>& address() const {
    return address_;
  }
  // By the first group, as in fault rules; -1 if unknown.
  int32_t globalRank() const {
    return globalRank_;
  }
  // "rank 3 (host node7, pid 4242, 10.0.0.7:29511)", by the rank in the newest
  // group. For messages about a group, see GroupImpl::describe().
  std::string describe() const;
  // Last time that any byte came from it; nothing: never.
  std::optional<TimePoint> heardAt() const;
  // "1 of 2 paths up; path 0 (eth0): silent for 19.0 s": the state in a few
  // words.
  std::string pathSummary() const;

  // Where it is and how to prove that we belong to its job. `globalRank` may
  // be -1 if unknown. Each group calls it; the later ones change nothing but
  // the rank in messages, since a job that forms its groups anew may give the
  // process another one.
  void setAddress(
      const PeerAddress& address,
      const std::string& secret,
      int32_t globalRank);
  bool hasAddress() const {
    return address_.has_value();
  }
  // Some operation needs this peer: connect, and watch over the connections
  // until dropInterest().
  void addInterest();
  void dropInterest();
  // We are going: say goodbye, after everything that was sent before.
  void leave();

  // From the listener: may this caller have the slot? And: it has come.
  HelloCode decide(const HelloInfo& hello);
  void onIncoming(const HelloInfo& hello, FileDescriptor fd);
  void onIncomingLost(const HelloInfo& hello);

  // Moves frames from the channel to the paths; the engine calls it once per
  // turn for links that have something.
  void pump();
  void armChannelTimer();
  // The peer is gone (or we are): everything pending fails. `how` completes a
  // sentence that begins with the peer: "has left: ...".
  void close(State state, StatusCode code, const std::string& how);
  // Faults have changed: paths look again.
  void faultsChanged();
  // One of our interfaces has gone down or come back.
  void onNic(const std::string& nic, bool usable);
  // The peer has seen paths of its own go down.
  void onPathsLost(const PathsLost& lost);
  // An interface of ours has another address; and one of the peer's.
  void onOurAddresses();
  void onPeerAddresses(const std::string& record);
  // The peer invites us to share memory; and has come to share its own.
  void onSharedOffer(const SharedOffer& offer);
  void onSharedEnds(SharedEnds ends);
  // The peer would have a datagram path with us, or answers.
  void onDatagramOffer(const DatagramOffer& offer);

  void fillStats(PeerStats& stats) const;
  // To the log, something that the peer can cause as often as it likes: beyond
  // a few lines in ten seconds they are counted only.
  void say(LogLevel level, const std::string& line);

  // ChannelHost
  void channelReady(Channel& channel) override;
  void onControl(Channel& channel, std::span<const std::byte> payload) override;
  void onBye(Channel& channel) override;
  // TcpPathOwner
  void onPathClosed(TcpPath& path, const Status& why) override;
  void onPathWritable(TcpPath& path) override;
  // SharedPathOwner
  void onSharedClosed(SharedPath& path, const Status& why) override;
  void onSharedReady(SharedPath& path) override;
  void onSharedUse(SharedPath& path) override;
  // DatagramPathOwner
  void onDatagramClosed(DatagramPath& path, const Status& why) override;
  void onDatagramReady(DatagramPath& path) override;
  void onDatagramUse(DatagramPath& path) override;

  bool dirty = false; // in the engine's list of links to pump

 private:
  // Paper: SHIFT §4.3. A table of states for a default and a backup becomes
  // four for each path alone: up, suspect (connected, in doubt), down (none),
  // and on probation once it is back.
  struct Slot {
    explicit Slot(Nanos longestHoldDown)
        : health(TimePoint{}), damping(longestHoldDown) {}

    std::unique_ptr<PathFaults> faults; // outlives the slot's connections
    std::unique_ptr<TcpPath> path;
    std::unique_ptr<OutgoingHandshake> attempt;
    TimePoint attemptAt{};
    TimePoint tryingSince{}; // the first attempt that has failed in a row
    TimePoint reservedUntil{}; // for a caller that was let in
    TimerId retryTimer = 0;
    int failures = 0; // in a row
    uint64_t connections = 0; // that were made, in all
    // Connected, or trying to, but not by its own route.
    bool astray = false, triesAstray = false;
    Status lastError;

    PathHealth health; // of this connection
    CongestionChoice congestion; // of this connection
    FlapDamping damping; // of the slot
    TimePoint upAt{};
    TimePoint pingAt = kNever; // unanswered ping since
    TimePoint pingedAt{}; // last
    // Another path of its route fell silent then, and nothing sent since has
    // been answered on it.
    TimePoint taintedAt = kNever;
    TimePoint suspectAt{}; // last became
    bool stalled = false; // silent for so long that it may be replaced
    // Stalled, and not even the peer's kernel answers: the process may be well.
    bool wayDead = false;
    bool nicDown = false; // ours; it is kept until another one can take over
    bool carried = false; // by its own route
    PathCounters past; // of connections that are closed
    Nanos pastRoundTrip{}; // of the last of these that was measured, or 0
    double pastBytesPerS = 0; // likewise, what it carried by the slot's route
  };

  Slot& slotOf(const TcpPath& path);
  size_t livePaths() const;
  // How much the loss of a connection or of shared memory matters: nothing
  // once this process is leaving, since then its peers leave, too.
  LogLevel levelOfLoss(const Status& why) const;
  ConnectionView viewOf(const Slot& slot) const;
  // There should be another connection in its place.
  bool mayReplace(const Slot& slot) const;
  std::vector<ConnectionView> views() const;
  // Some path's way is neither silent for long nor by a NIC of ours that is
  // down; the process at its end may be slow.
  bool anyWorks() const;
  // Whether the slot's connection is between the two NICs of its route.
  bool byItsRoute(size_t slot) const;
  bool preferredInitiator() const;
  void ensureSlots(size_t count);
  void chooseRoutes();
  void connectAll();
  size_t routeOf(size_t slot) const {
    return slot % routeCount();
  }
  size_t laneOf(size_t slot) const {
    return slot / routeCount();
  }
  size_t routeCount() const {
    return std::max<size_t>(routes_.size(), 1);
  }
  // Whether we ourselves would have this slot connected.
  bool wanted(size_t slot) const;
  // Our interface of a slot's route; empty if the system chooses.
  std::string nicOf(size_t slot) const;
  void aim(size_t slot, OutgoingSpec& spec);
  void connect(size_t slot);
  Nanos synTimeoutOf(size_t slot) const;
  void onAttempt(size_t slot, OutgoingResult result);
  void retryLater(size_t slot, Nanos delay);
  void install(size_t slot, FileDescriptor fd, uint64_t eagerBudget);
  Nanos longestRoundTrip(size_t slot) const;
  void countAttempt(size_t route, const ConnectFailure& failure);
  void checkNeverConnected();
  void bindToNic(int fd) const;

  void armHealthTimer();
  void watchOutgoing();
  void lookIn(Nanos delay);
  void onHealthTimer();
  Nanos healthInterval() const;
  void checkPath(size_t slot, TimePoint now);
  void checkProbation(size_t slot, TimePoint now);
  void ping(size_t slot, TimePoint now);
  // Life on any other path; and acknowledgements on others of its own route.
  TimePoint othersAt(size_t slot) const;
  TimePoint neighboursAt(size_t slot) const;
  bool anyOtherGood(size_t slot) const;
  void setSuspect(size_t slot, bool suspect);
  Nanos recentAnswer() const;
  void askOthers(size_t slot, TimePoint now);
  void doubt(size_t slot, TimePoint now);
  void leaveDownNics();
  // What the kernel says of the connections of one route.
  struct RouteView {
    Nanos leastRoundTrip{};
    int sending = 0, queueing = 0;
    bool startingUp = false;
    uint64_t ackedBytes = 0; // since the beginning of the link
  };
  RouteView lookAt(size_t route, TimePoint now);
  void watchLoss(size_t slot, const TcpInfo& view, TimePoint now);
  void countConnections(TimePoint now);
  std::string routeKey(size_t route) const;
  void tuneNew(size_t slot, int fd);
  void pumpRounds();
  bool mayTakeChunks();

  void offerSharedMemory();
  bool sharing() const;

  // The datagrams of one route.
  struct Datagrams {
    std::unique_ptr<DatagramPath> path;
    // Offered, and not answered yet: ours.
    std::optional<DatagramSocket> offered;
    size_t slot = 0; // whose connection they are beside
    std::string nonce;
    TimerId timer = 0; // the offer gets no answer, or the next one is due
    int failures = 0; // in a row
    TimePoint upAt{}; // proven then
    PathCounters past; // of paths that are closed
    DatagramStats pastDatagrams; // likewise, but for what is no sum
    // For the cap: what has left the path; of frames it took, charged before.
    uint64_t charged = 0, advanced = 0;
    std::string lastError;
  };
  void offerDatagrams();
  void offerDatagrams(size_t route);
  void chargeDatagrams(Datagrams& d);
  void offerDatagramsLater(size_t route, const std::string& why);
  Status openDatagrams(size_t slot, DatagramSocket& socket) const;
  void makeDatagramPath(
      size_t route,
      DatagramSocket socket,
      const std::string& secret,
      const std::string& initiatorNonce,
      const std::string& answererNonce,
      bool initiator);
  bool onDatagrams(size_t route) const;
  void closeDatagrams(const Status& why);
  void fillDatagramStats(PeerStats& stats) const;
  void fillMeasured(PathStats& stats, PathId path) const;

  void assignRoles();

  static constexpr Nanos kLogPeriod = std::chrono::seconds(10);
  static constexpr uint64_t kWarningsInPeriod = 3;
  // As many as when all connections of a long link break and come back.
  static constexpr uint64_t kLinesInPeriod = 64;

  Engine& engine_;
  const Uid uid_;
  Channel channel_;
  State state_ = State::kUnconnected;
  Status closedBecause_;
  std::optional<PeerAddress> address_;
  std::string secret_;
  int32_t globalRank_ = -1;
  int32_t newestRank_ = -1; // by the last group
  std::vector<NicAddress> ourNics_; // those that this peer may see
  std::vector<Route> routes_; // empty: the system chooses the way
  std::vector<ConnectionCount> counts_; // by route
  std::vector<int> found_; // of these, as the engine remembers it
  RateLimit* limit_ = nullptr; // the engine's, for the peer's site; or none
  bool backlogged_ = false; // at the last look
  std::deque<Slot> slots_;
  size_t nextSlot_ = 0; // round robin of pump()
  std::unique_ptr<SharedPath> shared_;
  std::unique_ptr<SharedKnock> knock_;
  std::optional<PathCounters> pastShared_; // of memory that was shared before
  bool offered_ = false;
  std::vector<Datagrams> datagrams_; // by route
  std::vector<DatagramOffer> earlyOffers_; // before the peer's address came
  int interest_ = 0;
  bool leaving_ = false;
  TimePoint neededSince_ = kNever; // interest, and never connected
  std::optional<TimePoint> heardAt_; // on paths that are closed now
  Refusals refusals_; // by route
  LogRateLimit warnings_{kWarningsInPeriod, kLogPeriod};
  LogRateLimit lines_{kLinesInPeriod, kLogPeriod};
  TimerId healthTimer_ = 0;
  TimePoint healthTimerAt_{};
  TimerId channelTimer_ = 0;
  TimePoint channelTimerAt_ = kNever;
};

} // namespace resilient
