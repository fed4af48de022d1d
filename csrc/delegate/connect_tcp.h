#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delegate/connector.h"
#include "delegate/route_tuning.h"
#include "failover/failover.h"
#include "path/congestion_choice.h"
#include "path/route_pacing.h"
#include "path/transport_choice.h"
#include "transport/handshake.h"
#include "transport/routes.h"
#include "transport/tcp_path.h"
#include "wire/control.h"

namespace resilient {

// The TCP connections to one peer: how each is made, by us or by the peer, from
// which NIC to which, and how many a route has. When, and what each is for, is
// decided by the Failover, whose wishes are carried out here.
//
// Connections have numbers that both ends know; see failover/failover.h. Who
// connects: whoever needs the peer first. If both try at once for one number,
// the process with the smaller uid wins; the other's attempt is refused with
// kDuplicateConnection.
//
// The number of connections only grows: those that a route does not need are
// kept in reserve. A peer may ask for more than we would make, up to a fixed
// maximum.
//
// Rejected: only one connection for each pair of NICs. With small windows or
// random drops it does not fill a long link (path/path_count.h).
class TcpConnector final : public Connector, private FailoverHost {
 public:
  explicit TcpConnector(Link& link);
  ~TcpConnector() override;

  // Connections may have been given frames.
  void onSent();
  Failover& failover() {
    return failover_;
  }
  const Failover& failover() const {
    return failover_;
  }
  // --- the ways
  // At least 1: pairs of NICs, or whatever way the system chooses.
  size_t routes() const {
    return failover_.routes();
  }
  // A connection of the route that stands. Returns the one with the lowest
  // index, which may be suspect.
  std::optional<size_t> anyOf(size_t route) const;
  TcpPath* path(size_t connection) const {
    return connections_[connection].path;
  }
  // Our interface, and the peer's, of a connection's (or route's) route; empty
  // if the system chooses.
  std::string nicOf(size_t connection) const;
  std::string remoteNicOf(size_t connection) const;
  // As measured on the connections of the route together.
  double capacityBytesPerS(size_t route) const;
  // Sets what is known of the connections of the route that carry. Losses are
  // totals of those that stand. Makes a few system calls for each.
  void observe(size_t route, RouteEvidence& e) const;
  // The least round trip of the route, 0 if it is unknown.
  Nanos minRoundTrip(size_t route) const;

  // --- what happens
  // The peer's address is known; what it has connected before is there already.
  void onAddress();
  // From the listener: may this caller have the connection? And: it has come,
  // or is lost on the way. kOk keeps the index for the caller until one of the
  // other two is called, or until the handshake timeout has passed.
  HelloCode decide(const HelloInfo& hello, const CertifiedFor& certifiedFor);
  void onIncoming(const HelloInfo& hello, StreamSocket socket);
  void onIncomingLost(const HelloInfo& hello);
  // The peer has seen connections of its own go down. It must not be called
  // while a frame is being read, since it may close the path that brought that
  // frame.
  void onPathsLost(const PathsLost& lost);
  // This process is about to leave: what it asks and answers from now on would
  // only be something to wait for.
  void endArrivals() {
    tellsArrivals_ = false;
  }
  void onArrivals(const Arrivals& arrivals);
  // An interface of ours has another address; and one of the peer's, which the
  // link has noted. Both keep the routes: the same NICs have other addresses.
  void onOurAddresses();
  void onPeerAddresses();
  bool anyAnswers() const;
  // "1 of 2 paths up; path 0 (eth0): silent for 19.0 s": the state in a few
  // words.
  std::string summary() const;

  // Connector
  void offer() override {}
  void onPathClosed(Path& path, const Status& why) override;
  void onPathUse(Path&) override {}
  uint8_t classes(const Path& path, const Roles& roles) const override {
    return roles.connections[static_cast<size_t>(
        static_cast<const TcpPath&>(path).index())];
  }
  void close() override;
  void fillStats(PeerStats& stats) const override;

 private:
  struct Connection {
    TcpPath* path = nullptr; // the link's
    std::unique_ptr<PathFaults> faults; // outlives the paths of this number
    std::unique_ptr<OutgoingHandshake> attempt;
    Status lastError;
    CongestionChoice congestion; // of this path
    PathCounters past; // of paths that are closed
    double pastBytesPerS = 0; // that the last one carried by its route
    // The peer says so: bytes that its kernel has received, and their growth
    // since the first time.
    std::optional<uint64_t> told;
    uint64_t arrived = 0;
  };

  void ensure(size_t count);
  void chooseRoutes();
  void aim(size_t c, const AttemptPlan& plan, OutgoingSpec& spec);
  void onAttempt(size_t c, OutgoingResult result);
  bool isOfPeer(const CertifiedFor& certifiedFor) const;
  void install(size_t c, StreamSocket socket, uint64_t eagerBytes, bool ours);
  void tuneNew(size_t c, int fd);
  bool byItsRoute(size_t c) const;
  void bindToNic(int fd) const;
  void onTimer();
  void tuneRoutes();
  void tunePaths();
  void askForArrivals(Nanos roundTrip);
  RouteTuning::View viewOf(size_t route, TimePoint now);
  void watchLoss(size_t c, const TcpInfo& view, TimePoint now);

  // FailoverHost
  ConnectionFacts facts(size_t c) const override;
  PathEvidence evidence(size_t c) const override;
  std::vector<ConnectionView> relays(TimePoint now) const override {
    return link_.relays(now);
  }
  void askRelays(Nanos age) override {
    link_.askRelays(age);
  }
  TimePoint relaysHeardAt() const override {
    return link_.relaysHeardAt();
  }
  std::optional<RoutePathFacts> routePath(size_t route) const override {
    return link_.routePath(route);
  }
  void askRoutePath(size_t route) override {
    link_.askRoutePath(route);
  }
  void doubtRoutePath(size_t route) override {
    link_.doubtRoutePath(route);
  }
  bool busy() const override;
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

  const bool slowStartsAfterIdle_ = slowStartsAfterIdle();
  Failover failover_;
  std::deque<Connection> connections_;
  std::vector<NicAddress> ourNics_; // those that this peer may see
  std::vector<Route> routes_; // empty: the system chooses the way
  RouteTuning tuning_;
  TimePoint routesTunedAt_{};
  bool wasBusy_ = true; // at all looks since then
  std::vector<RoutePacing> pacing_; // by route
  TimePoint arrivedAt_{}; // of Connection::arrived, by the peer's clock
  TimePoint askedAt_{}; // for it
  bool tellsArrivals_ = true; // until we leave
  TimePoint carriedAt_{}; // a look found that we had messages on the way
  bool paces_ = true; // BBR, on a long way; not known before the first look
  TimePoint tuneAt_ = kNever; // tunePaths(), while it paces what is under way
  TimePoint tunedAt_{}; // last
  static constexpr Nanos kTuneEvery = std::chrono::milliseconds(5); // or later
  Nanos tuneEvery_ = kTuneEvery; // as the last one has found
  // Set for failover_.deadline() and tuneAt_, or earlier.
  TimerId timer_ = 0;
  TimePoint timerAt_ = kNever;
};

} // namespace resilient
