#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/log.h"
#include "channel/channel.h"
#include "delegate/group.h"
#include "delegate/link_host.h"
#include "failover/failover.h"
#include "transport/path.h"

namespace resilient {

// A link to a remote process as its connectors see it: who the peer is, and
// what they may do to the link. PeerLink implements it.
//
// Thread: loop thread. Lifetime: outlives its connectors.
//
// States: kUnconnected, until a connection stands for the first time; kUp from
// then on, even while no path works; kDead or kLeft for good.
class Link {
 public:
  enum class State { kUnconnected, kUp, kDead, kLeft };

  Link(LinkHost& host, const Uid& uid) : host_(host), uid_(uid) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  LinkHost& host() const {
    return host_;
  }
  EventLoop& loop() const {
    return host_.loop();
  }
  const Uid& uid() const {
    return uid_;
  }
  // As long-lived as the link. Once the link is closed, sends fail at once.
  virtual Channel& channel() = 0;
  State state() const {
    return state_;
  }
  // Anything but kDead and kLeft: it may work, now or later.
  bool usable() const {
    return state_ == State::kUnconnected || state_ == State::kUp;
  }
  // One of the two ends is going, so both are: lost paths are no news.
  bool leaving() const {
    return leaving_;
  }
  // Empty until a group has found the peer in its store. Addresses may change
  // later, never their number or order.
  const std::optional<PeerAddress>& address() const {
    return address_;
  }
  // The job's, as the first group gave it. Empty before the address is known.
  const std::string& secret() const {
    return secret_;
  }
  bool sameHost() const {
    return address_ && address_->hostId == host_.self().hostId;
  }
  // This process begins where only one of the two may.
  bool preferredInitiator() const {
    return host_.self().uid < uid_;
  }
  // By the first group, as in fault rules; -1 if unknown.
  int32_t globalRank() const {
    return globalRank_;
  }
  // Whether injected faults apply to this peer.
  bool faultsConcern() const {
    return host_.faults().concerns(host_.globalRank(), globalRank_);
  }
  // Some operation needs this peer.
  bool needed() const {
    return interest_ > 0;
  }
  // The way to the peer's site if something limits it, or null. Null again once
  // the link is closed.
  Uplink* uplink() const {
    return uplink_;
  }
  // "rank 3 (host node7, pid 4242, 10.0.0.7:29511)", by the rank in the newest
  // group. For messages about a group, see GroupImpl::describe().
  std::string describe() const;
  // To the log, something that the peer can cause as often as it likes: beyond
  // a few lines in ten seconds they are counted only.
  void say(LogLevel level, const std::string& line);
  // How much the loss of a path matters.
  LogLevel levelOfLoss(const Status& why) const;

  // --- for connectors
  // The link owns and pumps the path until it is closed.
  //
  // The path must have been made with channel() and pathOwner(). A pointer to
  // it is good until onPathClosed() of the connector.
  virtual void addPath(std::unique_ptr<Path> path) = 0;
  virtual PathOwner& pathOwner() = 0;
  // Something to send, or a path has changed: pump at the end of this turn.
  // Cheap; may be called any number of times in a turn.
  virtual void changed() = 0;
  // A path can carry messages, or cannot any more.
  virtual void useChanged() = 0;
  // A connection stands; the path is there.
  virtual void onConnection() = 0;
  // An attempt has failed: is the peer to be given up? It may close the link,
  // and with it the paths and attempts of the caller.
  virtual void onNoConnection() = 0;
  // There is evidence that the process has died: closes the link.
  virtual void onPeerGone(const AttemptFailure& last) = 0;
  // The classes of the paths have changed.
  virtual void onRoles(const Roles& roles) = 0;
  // As in FailoverHost.
  virtual std::vector<ConnectionView> relays(TimePoint now) const = 0;
  virtual void askRelays(Nanos age) = 0;
  virtual TimePoint relaysHeardAt() const = 0;
  virtual std::optional<RoutePathFacts> routePath(size_t route) const = 0;
  virtual void askRoutePath(size_t route) = 0;
  virtual void doubtRoutePath(size_t route) = 0;

 protected:
  static constexpr Nanos kLogPeriod = std::chrono::seconds(10);
  static constexpr uint64_t kWarningsInPeriod = 3;
  // As many as when all connections of a long link break and come back.
  static constexpr uint64_t kLinesInPeriod = 64;

  LinkHost& host_;
  const Uid uid_;
  State state_ = State::kUnconnected;
  bool leaving_ = false;
  std::optional<PeerAddress> address_;
  std::string secret_;
  int32_t globalRank_ = -1;
  int32_t newestRank_ = -1; // by the last group
  int interest_ = 0;
  Uplink* uplink_ = nullptr;

 private:
  LogRateLimit warnings_{kWarningsInPeriod, kLogPeriod};
  LogRateLimit lines_{kLinesInPeriod, kLogPeriod};
};

// How paths of one kind to one peer come about: offered, connected, retried. A
// new kind of path is a Path, a connector and a helper of the contract suite.
//
// Thread: loop thread. Lifetime: its link's.
//
// It keeps pointers to paths that the link owns, and drops each in
// onPathClosed().
class Connector {
 public:
  explicit Connector(Link& link) : link_(link) {}
  virtual ~Connector() = default;
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // The link is up, or the peer's address has come, or a connection: called at
  // each, in any order.
  virtual void offer() = 0;
  // A path of this kind is over, or its usable() has changed.
  //
  // The channel still knows the path during this call, for the last time.
  virtual void onPathClosed(Path& path, const Status& why) = 0;
  virtual void onPathUse(Path& path) = 0;
  // Those of `roles` that concern the path.
  virtual uint8_t classes(const Path& path, const Roles& roles) const = 0;
  // The link is over: no attempt goes on. The link closes its paths after this.
  // onPathClosed() follows for each path.
  virtual void close() = 0;
  virtual void fillStats(PeerStats& stats) const = 0;

 protected:
  Link& link_;
};

} // namespace resilient
