#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delegate/connect_route_path.h"
#include "transport/verbs_path.h"
#include "wire/control.h"

namespace resilient {

// RDMA with a peer on another host, where both ends of a route have a device on
// the NIC of that route.
//
// How it works. An offer names a queue pair of ours that has receives posted.
// The other end makes one, connects it, and only then answers with its own;
// queue pair 0 says no, with the reason. Then the offering end connects, too,
// and sends first: at that moment the far end can receive. Connecting may take
// a second, so a thread does it, and a timer looks whether it has ended.
//
// An end that closes its path says so, with a no of the same number. The other
// end may wait for nothing on that path but the far end's reads, and would not
// notice.
//
// Paper: SHIFT §4.2: connections on all NICs are made beforehand. Here each
// route has a queue pair of its own, so there is nothing to set up at a
// failure.
class VerbsConnector final : public RoutePathConnector {
 public:
  VerbsConnector(Link& link, TcpConnector& connections)
      : RoutePathConnector(link, connections, PathKind::kVerbs, "RDMA") {}
  ~VerbsConnector() override {
    close();
  }

  // As DatagramConnector::onOffer().
  void onOffer(const VerbsOffer& offer);

  // Connector
  void onPathClosed(Path& path, const Status& why) override;
  void close() override;

 private:
  // An attempt, until a path comes of it.
  struct Attempt {
    size_t connection = 0; // beside which it is
    uint64_t number = 0; // an answer repeats it
    std::unique_ptr<VerbsEnd> end; // null while it is being connected
    std::string remoteDevice;
    TimerId timer = 0; // looks for the end of connecting
  };
  // A thread connects an end. It may outlive the connector.
  struct Connecting;

  // RoutePathConnector
  bool wanted() const override;
  bool possible(size_t connection) const override {
    return portOf(connection).has_value();
  }
  Status sendOffer(size_t route, size_t connection) override;
  void forgetOffer(size_t route) override;
  void readEarlyOffers() override;

  void onAnswer(const VerbsOffer& answer, size_t route);
  void answer(const VerbsOffer& offer, size_t route);
  void refuse(const VerbsOffer& offer, const std::string& why);
  // The one on the NIC of the connection.
  std::optional<VerbsPort> portOf(size_t connection) const;
  Status makeEnd(size_t connection, std::unique_ptr<VerbsEnd>& end) const;
  void connect(size_t route, const VerbsOffer& remote, bool initiator);
  void lookAtConnecting(
      size_t route,
      const std::shared_ptr<Connecting>& connecting);
  void connected(size_t route, Connecting& connecting);

  std::map<size_t, Attempt> attempts_; // by route
  // What has become a path, by route: as the offer said it.
  struct Made {
    size_t connection = 0;
    uint64_t number = 0;
  };
  std::map<size_t, Made> made_;
  std::vector<VerbsOffer> early_; // before the peer's address came
};

} // namespace resilient
