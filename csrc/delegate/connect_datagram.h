#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "delegate/connector.h"
#include "transport/datagram_path.h"
#include "wire/control.h"

namespace resilient {

class TcpConnector;

// Datagrams with a peer on another host, where the option wan asks for them: on
// each route one path beside its connections, which are in reserve as long as
// it works. The preferred process of the two offers it over a connection of the
// route; nonces of both ends make its keys.
//
// How it works. An offer opens a socket from the interface of the connection,
// and names its port, the secret to use and a nonce. The other end opens a
// socket as well, makes its path and answers with its own nonce; port 0 says
// no. Both derive one key for each direction. The new path must prove itself
// before it carries.
//
// A path that is closed is offered again, at first after a second and later
// after up to 64 s; ten seconds of use reset the pause. Only the offering side
// retries. Meanwhile the connections carry everything, so a failure here costs
// no message.
class DatagramConnector final : public Connector {
 public:
  DatagramConnector(Link& link, TcpConnector& connections)
      : Connector(link), connections_(connections) {}
  ~DatagramConnector() override {
    close();
  }

  // The peer would have a path with us, or answers. Offers of a connection
  // index that does not exist are ignored; an answer counts only for the offer
  // that is open.
  void onOffer(const DatagramOffer& offer);
  // The path of the route carries, so its connections are in reserve.
  bool carries(size_t route) const {
    return route < routes_.size() && routes_[route].path != nullptr &&
        routes_[route].path->usable();
  }
  size_t routes() const {
    return routes_.size();
  }

  // Connector
  void offer() override;
  void onPathClosed(Path& path, const Status& why) override;
  void onPathUse(Path& path) override;
  uint8_t classes(const Path& path, const Roles& roles) const override {
    const size_t route = static_cast<const DatagramPath&>(path).route();
    return route < roles.routePaths.size() ? roles.routePaths[route]
                                           : uint8_t{0};
  }
  void close() override;
  void fillStats(PeerStats& stats) const override;

 private:
  struct Route {
    DatagramPath* path = nullptr; // the link's
    // Offered, and not answered yet: ours.
    std::optional<DatagramSocket> offered;
    size_t connection = 0; // beside which it is
    std::string nonce;
    TimerId timer = 0; // the offer gets no answer, or the next one is due
    int failures = 0; // in a row
    TimePoint upAt{}; // proven then
    PathStats past; // of paths that are closed
    std::string lastError;
  };
  struct Keys {
    std::string secret, initiatorNonce, answererNonce;
    bool initiator = false; // ours is the initiator's
  };

  void offer(size_t route);
  void offerLater(size_t route, const std::string& why);
  void onAnswer(const DatagramOffer& answer, Route& r, size_t route);
  void answer(const DatagramOffer& offer, Route& r, size_t route);
  Status open(size_t connection, DatagramSocket& socket) const;
  Status connect(size_t connection, uint16_t port, DatagramSocket& socket)
      const;
  void makePath(size_t route, DatagramSocket socket, const Keys& keys);

  TcpConnector& connections_;
  std::vector<Route> routes_;
  // One for each connection at most.
  std::vector<DatagramOffer> early_; // before the peer's address came
};

} // namespace resilient
