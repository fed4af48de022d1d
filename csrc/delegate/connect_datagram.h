#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "delegate/connect_route_path.h"
#include "failover/roles.h"
#include "path/transport_choice.h"
#include "transport/datagram_path.h"
#include "wire/control.h"

namespace resilient {

// Datagrams with a peer on another host, where the option wan asks for them.
// A secret and nonces of both ends make the keys of a path. The secret is that
// of the connection by which the path is agreed, if it is encrypted: with it
// ends what could decrypt a recording. Else it is the job's.
//
// How it works. An offer opens a socket from the interface of the connection,
// and names its port, the secret to use and a nonce. The other end opens a
// socket as well, makes its path and answers with its own nonce; port 0 says
// no. Both derive one key for each direction. The new path must prove itself
// before it carries.
class DatagramConnector final : public RoutePathConnector {
 public:
  DatagramConnector(Link& link, TcpConnector& connections)
      : RoutePathConnector(
            link,
            connections,
            PathKind::kDatagram,
            "datagrams",
            /*returnDoublings=*/1) {}
  ~DatagramConnector() override {
    close();
  }

  RoutePathUse use() const override {
    return transport() == WanTransport::kAuto ? RoutePathUse::kBeside
                                              : RoutePathUse::kAlone;
  }
  // Before frames are handed to paths: which messages go as datagrams.
  void chooseBursts(TimePoint now);
  // As in FailoverHost.
  std::optional<RoutePathFacts> facts(size_t route) const;
  void ask(size_t route);
  void doubt(size_t route);
  // The peer would have a path with us, or answers. Offers of a connection
  // index that does not exist are ignored; an answer counts only for the offer
  // that is open.
  void onOffer(const DatagramOffer& offer);
  // Those on the routes of the connections are lost as well: the peer has
  // closed its ends.
  void onPathsLost(const PathsLost& lost);
  // One of our interfaces works, or does not any more.
  void onNic(const std::string& nic, bool works);

 private:
  // Offered, and not answered yet: ours.
  struct Offered {
    DatagramSocket socket;
    size_t connection = 0; // beside which it is
    std::string secret, nonce;
    bool forwardSecret = false;
  };
  struct Keys {
    std::string secret, initiatorNonce, answererNonce;
    bool initiator = false; // ours is the initiator's
    bool forwardSecret = false; // the secret is that of a connection
  };

  // RoutePathConnector
  bool wanted() const override;
  // A short round trip leaves nothing to gain.
  bool possible(size_t connection) const override;
  Status sendOffer(size_t route, size_t connection) override;
  void forgetOffer(size_t route) override {
    offered_.erase(route);
  }
  void readEarlyOffers() override;

  void onAnswer(const DatagramOffer& answer, size_t route);
  void answer(const DatagramOffer& offer, size_t route);
  // The secret that the offer names, if this end has it for that connection.
  std::optional<std::string> secretOf(const DatagramOffer& offer) const;
  Status open(size_t connection, DatagramSocket& socket) const;
  Status connect(size_t connection, uint16_t port, DatagramSocket& socket)
      const;
  void makePath(size_t route, DatagramSocket socket, const Keys& keys);

  // Null: there is none, or it has not shown yet that it works.
  DatagramPath* provenPath(size_t route) const;

  // The part of a route's messages that goes as datagrams.
  struct Share {
    TimePoint chosenAt{};
    TransportChoice choice;
  };

  WanTransport transport() const;
  void chooseFor(size_t route, Share& share, TimePoint now);
  void setShare(size_t route, uint64_t upTo);

  std::map<size_t, Share> shares_; // by route
  std::map<size_t, Offered> offered_; // by route
  // One for each connection at most.
  std::vector<DatagramOffer> early_; // before the peer's address came
};

} // namespace resilient
