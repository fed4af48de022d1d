#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "channel/channel.h"
#include "channel/mailbox.h"
#include "failover/failover.h"
#include "failover/route_return.h"
#include "tests/failover_simulation.h"
#include "tests/simulated_tcp.h"

namespace resilient::test {

// How the processes of one simulated network are set up.
struct FailoverSetup {
  size_t nics = 1; // and routes: NIC r of one side belongs to r of the other
  size_t lanes = 1; // connections of a route
  uint32_t chunkBytes = 16 << 10;
  // Datagrams carry messages in bursts up to this size, beside the connections
  // of their route; 0: all messages, alone.
  uint64_t besideUpTo = 0;
  FailoverConfig config;
  RolePolicy policy;
};

// Shared by all processes of a simulated network.
struct FailoverWorld {
  FailoverWorld(uint64_t seed, Nanos latency, uint64_t bytesPerS)
      : prng(mixBits(seed)), net(mixBits(~seed), latency, bytesPerS) {}
  void fail(const std::string& what) {
    if (result.error.empty()) {
      result.error = what;
    }
  }
  void note(int side, const char* text, uint64_t a, uint64_t b = 0);

  Prng prng;
  FailoverSetup setup;
  SimulatedTcp net;
  FailoverSimulationResult result;
  std::function<void(const std::string&)> trace;
  // Processes pause and nothing else fails: no connection may be doubted or
  // lost then.
  bool onlyPauses = false;
  bool expectDeath = false; // a process was killed
};

// One process: a Channel and a Failover, with the work that TcpConnector and
// PeerLink do for them. Each request of the Failover is checked against its
// promises.
class FailoverProcess final : public SimulatedTcp::User,
                              public FailoverHost,
                              public ChannelHost,
                              public MailboxListener {
 public:
  FailoverProcess(FailoverWorld& world, int side);
  ~FailoverProcess() override;
  void setPeer(FailoverProcess& peer) {
    peer_ = &peer;
  }

  // --- for the scenario
  void begin();
  void send(uint64_t bytes, TrafficClass trafficClass);
  // The kernel's news of a NIC.
  void onNicNews(size_t nic, bool works);
  void setWanted(size_t route, size_t count);
  // The process does nothing until then; its kernel goes on.
  void pause(TimePoint until);
  void kill();
  // The connection breaks here, as by a reset from outside.
  void breakConnection(size_t connection);
  // A path that is no connection: shared memory (route: none), or datagrams.
  void addOtherPath(std::optional<size_t> route, size_t socket);
  void removeOtherPath(std::optional<size_t> route);

  // --- state
  Failover& failover() {
    return failover_;
  }
  bool dead() const { // by its own judgement, or killed
    return dead_;
  }
  bool connected(size_t c) const {
    return c < connections_.size() && connections_[c].socket.has_value();
  }
  // Everything that was sent has arrived.
  bool allArrived() const;
  // All that is wanted carries, or could.
  std::string notHealed() const;
  uint64_t received() const {
    return receivedCount_;
  }
  // From now on a message must arrive within `limit` and the time that it and
  // what went before it take; 0: no limit.
  void limitDelivery(Nanos limit) {
    deliveryLimit_ = limit;
  }

  // SimulatedTcp::User
  void onConnected(size_t socket) override;
  void onRefused(size_t socket) override;
  void onReadable(size_t socket) override;
  void onWritable(size_t socket) override;
  void onReset(size_t socket) override;

 private:
  struct Attempt {
    size_t socket = 0;
    std::optional<TimePoint> connectedAt;
    bool offRoute = false;
  };
  struct Connection {
    std::optional<size_t> socket;
    PathId path = 0;
    TimePoint heardAt{};
    uint64_t heard = 0;
    std::optional<Attempt> attempt;
    // For the checks.
    uint64_t times = 0; // connected
    bool proving = false;
    bool suspect = false;
    TimePoint upAt{};
    TimePoint taintedAt = kNever;
    int losses = 0; // in a row, each soon after it came up
    std::optional<TimePoint> trustedAt;
  };
  struct Caller { // a connection that is not proved yet
    std::optional<size_t> reserved; // for this connection
  };
  struct OtherPath {
    std::optional<size_t> socket;
    PathId path = 0;
    // Of datagrams.
    TimePoint heardAt{};
    TimePoint askedAt = kNever; // unanswered since
    bool silent = false; // or rests after that
    TimePoint doubtedAt{};
    std::optional<RouteReturn> returns;
  };
  struct Send;
  struct Receive;
  struct Sent {
    TimePoint at;
    uint64_t bytes = 0;
    uint64_t arrivedBefore = 0; // arrivedBytes() then
  };
  struct Stream { // the messages of one traffic class
    uint64_t sent = 0, posted = 0;
    uint64_t arrivedBytes = 0;
    std::deque<std::unique_ptr<Send>> sends;
    std::deque<std::unique_ptr<Receive>> receives;
    std::deque<Sent> underWay; // to here, by number
  };

  // --- turns of the loop
  void enter(std::function<void()> what, bool timer = false);
  void settle();
  void pump();
  bool pumpPath(size_t socket, PathId path, std::optional<size_t> connection);
  void armTimers();
  void checkFrame(const OutFrame& frame, PathId path, std::optional<size_t> c);

  // --- connections
  size_t routes() const {
    return world_.setup.nics;
  }
  std::pair<size_t, size_t> otherPair(size_t route, size_t index) const;
  void readAll(size_t socket);
  void readFrame(size_t socket, const SimulatedTcp::Segment& segment);
  void onHandshake(size_t socket, const SimulatedTcp::Segment& segment);
  void sayHandshake(size_t socket, uint32_t kind, size_t connection);
  std::optional<size_t> attemptOf(size_t socket) const;
  std::optional<size_t> connectionOf(size_t socket) const;
  void failAttempt(size_t c, const AttemptFailure& how);
  void loseCaller(size_t socket);
  void install(size_t c, size_t socket, bool ours);
  void closePath(size_t c, const std::string& why);
  void ensure(size_t count);
  void useChanged();
  bool isBeside() const {
    return world_.setup.besideUpTo > 0;
  }
  void shareBursts(size_t route);
  OtherPath& otherPath(std::optional<size_t> route);
  bool datagramsWork(size_t route) const {
    return otherPaths_[route].socket && !otherPaths_[route].silent;
  }
  void datagramsHeard(size_t route);
  void datagramsCarry(size_t route, PathId path);
  std::string text(size_t c) const;

  // --- checks
  bool good(size_t c) const;
  bool anotherGood(size_t c) const;
  bool another(size_t c, const std::function<bool(size_t)>& what) const;
  bool answeredLately(size_t c, Nanos age) const;
  // Some way other than that connection, or those datagrams.
  bool anyAnsweredLately(
      std::optional<size_t> butConnection,
      std::optional<size_t> butRoute) const;
  void checkRoles(const Roles& roles);
  void noteLoss(Connection& x, bool counts);
  void messageArrived(size_t cls);
  uint64_t arrivedBytes(size_t cls) const;

  // FailoverHost
  ConnectionFacts facts(size_t c) const override;
  PathEvidence evidence(size_t c) const override;
  std::optional<RoutePathFacts> routePath(size_t route) const override;
  void askRoutePath(size_t route) override;
  void doubtRoutePath(size_t route) override;
  bool busy() const override {
    return true;
  }
  void wakeAt(TimePoint when) override;
  void attempt(size_t c, const AttemptPlan& plan) override;
  void giveUpAttempt(size_t c) override;
  std::optional<TimePoint> attemptConnectedAt(size_t c) const override;
  size_t otherPairs(size_t c) const override;
  void ping(size_t c) override;
  void putOnProbation(size_t c) override;
  void trust(size_t c) override;
  void setSuspect(size_t c, bool suspect) override;
  void reset(size_t c, const std::string& why) override;
  void tellLost(const std::vector<size_t>& connections, const std::string& nic)
      override;
  void rolesAssigned(const Roles& roles) override;
  void onPeerGone(const AttemptFailure& last) override;
  void note(size_t c, ConnectionNote what) override;

  // ChannelHost, MailboxListener
  void channelReady(Channel&) override {
    dirty_ = true;
  }
  void onControl(Channel&, std::span<const std::byte> payload) override;
  void onBye(Channel&) override {}
  void onCollectiveMismatch(
      uint64_t,
      uint64_t,
      const OpSignature&,
      const FrameHeader&,
      Channel&) override {}

  FailoverWorld& world_;
  SimulatedTcp& net_;
  const int side_;
  FailoverProcess* peer_ = nullptr;
  CompletionQueue completions_;
  StagingMemory staging_;
  Mailbox mailbox_;
  Channel channel_;
  Failover failover_;
  std::deque<Connection> connections_;
  std::map<size_t, Caller> callers_; // by socket
  std::vector<OtherPath> otherPaths_; // datagrams by route, then shared memory
  PathId lastPath_ = 0;
  size_t turn_ = 0;
  bool begun_ = false;
  bool dirty_ = false;
  bool dead_ = false;
  bool killed_ = false;
  bool settling_ = false;
  TimePoint pausedUntil_{};
  std::deque<std::function<void()>> waiting_, waitingTimers_; // while paused
  TimePoint timerAt_ = kNever; // of the failover
  TimePoint channelTimerAt_ = kNever;
  mutable std::optional<size_t> checking_; // whose evidence was asked for last
  std::vector<Stream> streams_; // by class
  uint64_t receivedCount_ = 0;
  Nanos deliveryLimit_{};
};

} // namespace resilient::test
