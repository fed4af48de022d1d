#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "channel/channel.h"
#include "delegate/connect_datagram.h"
#include "delegate/connect_relay.h"
#include "delegate/connect_shared.h"
#include "delegate/connect_tcp.h"
#include "delegate/connect_verbs.h"
#include "delegate/connector.h"
#include "delegate/group.h"
#include "delegate/path_set.h"
#include "transport/path.h"

namespace resilient {

// Everything about one remote process: its channel, the paths that carry it,
// and the connectors that make them. Pumps frames from the channel to the
// paths, and decides when the process itself is gone.
//
// Thread: loop thread. Lifetime: owned by the Engine until it stops.
//
// One process may be a member of several groups; they share this link, its
// connections and its channel. The group in a message's key tells them apart.
class PeerLink final : public Link, public ChannelHost, private PathOwner {
 public:
  PeerLink(LinkHost& host, const Uid& uid, uint32_t channelId);
  ~PeerLink() override;

  Channel& channel() override {
    return channel_;
  }
  TcpConnector& connections() {
    return tcp_;
  }
  SharedConnector& sharedMemory() {
    return shared_;
  }
  DatagramConnector& datagrams() {
    return datagrams_;
  }
  VerbsConnector& verbs() {
    return verbs_;
  }
  RelayConnector& relays() {
    return relays_;
  }
  // The message lacks the subject, which is this peer: each group has a name
  // of its own for it.
  const Status& closedBecause() const {
    return closedBecause_;
  }
  // Last time that any byte came from it; nothing: never.
  std::optional<TimePoint> heardAt() const;
  // The state of its connections, and of other ways, in a few words.
  std::string pathSummary() const;

  // Its addresses and the secret that proves our membership. `globalRank` may
  // be -1 if unknown. Each group calls it; the later ones change nothing but
  // the rank in messages, since a job that forms its groups anew may give the
  // process another one.
  void setAddress(
      const PeerAddress& address,
      const std::string& secret,
      int32_t globalRank);
  // Some operation needs this peer: connect, and watch over the connections
  // until dropInterest(). The calls are counted. The last dropInterest() closes
  // nothing, and attempts that are under way go on.
  void addInterest();
  void dropInterest();
  // We are going: say goodbye, after everything that was sent before. Without
  // effect unless the link is up. From then on, lost paths are logged for
  // debugging only.
  void leave();
  // A caller has proved that it is this peer, and its connection is here.
  void onIncoming(const HelloInfo& hello, StreamSocket socket);
  // Whether no connection stands: none has so far, or the last one is lost.
  bool cut() const;
  // The peer says that its addresses are these now. The text counts only with
  // the same uid and as many addresses as before: routes are pairs of places in
  // the two lists.
  void onPeerAddresses(const std::string& text);
  // The same in the store's words. They count only if the store has not said
  // them before: they may be older than the peer's own.
  void onStoredAddresses(const std::string& text);

  // Moves frames from the channel to the paths; the engine calls it once per
  // turn for links that have something. One call moves a limited share, and
  // posts another call for the rest.
  void pump();
  // The peer is gone (or we are): everything pending fails. `how` completes a
  // sentence that begins with the peer: "has left: ...". Final: a closed link
  // is never up again. From the top of the loop only, since it closes paths and
  // ends operations.
  void close(State state, StatusCode code, const std::string& how);
  // Faults have changed: paths look again.
  void faultsChanged();

  void fillStats(PeerStats& stats) const;

  // ChannelHost
  void channelReady(Channel& channel) override;
  void onControl(Channel& channel, std::span<const std::byte> payload) override;
  void onBye(Channel& channel) override;

  // Link
  void addPath(std::unique_ptr<Path> path) override;
  PathOwner& pathOwner() override {
    return *this;
  }
  void changed() override;
  void useChanged() override;
  void onConnection() override;
  void onNoConnection() override;
  void onPeerGone(const AttemptFailure& last) override;
  void onRoles(const Roles& roles) override;
  std::vector<ConnectionView> relays(TimePoint now) const override {
    return relays_.views(now);
  }
  void askRelays(Nanos age) override {
    relays_.ask(age);
  }
  TimePoint relaysHeardAt() const override {
    return relays_.heardAt();
  }
  std::optional<RoutePathFacts> routePath(size_t route) const override {
    return datagrams_.facts(route);
  }
  void askRoutePath(size_t route) override {
    datagrams_.ask(route);
  }
  void doubtRoutePath(size_t route) override {
    datagrams_.doubt(route);
  }

  bool dirty = false; // in the engine's list of links to pump

 private:
  // PathOwner
  void onPathClosed(Path& path, const Status& why) override;
  void onPathReady(Path& path) override;
  void onPathUse(Path& path) override;

  Connector& connectorOf(const Path& path);
  void setPaced();
  void armChannelTimer();

  Channel channel_;
  Status closedBecause_;
  std::optional<TimePoint> heardAt_; // on paths that are closed now
  std::string storedAddresses_; // what the store said last
  TimePoint neededSince_ = kNever; // interest, and never connected
  TimerId channelTimer_ = 0;
  TimePoint channelTimerAt_ = kNever;
  // For calls that are posted to the loop and may come too late. They hold it
  // weakly, and do nothing without it.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);

  TcpConnector tcp_;
  SharedConnector shared_;
  DatagramConnector datagrams_;
  VerbsConnector verbs_;
  RelayConnector relays_;
  PathSet paths_; // destroyed first: connectors hold parts of them
};

} // namespace resilient
