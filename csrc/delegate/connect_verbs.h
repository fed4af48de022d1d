#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
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
// and sends first: at that moment the far end can receive. To register memory
// and to connect may take a second, so a thread does both, and a timer looks
// whether it has ended.
//
// A device that has failed is no device until it is open again (VerbsWatch).
//
// An end that closes its queue pair says so over another path, by a "no" with
// the number of its offer: the far end then leaves the path at once, and need
// not wait for silence. The answering end asks for an offer when its port is
// back.
//
// Paper: SHIFT §4.2: connections on all NICs are made beforehand. Here each
// route has a queue pair of its own, so there is nothing to set up at a
// failure.
class VerbsConnector final : public RoutePathConnector {
 public:
  VerbsConnector(Link& link, TcpConnector& connections)
      : RoutePathConnector(
            link,
            connections,
            PathKind::kVerbs,
            "RDMA",
            /*returnDoublings=*/2) {}
  ~VerbsConnector() override {
    close();
  }

  // As DatagramConnector::onOffer(), but not while a frame is being read: it
  // may close the path that brought the offer.
  void onOffer(const VerbsOffer& offer);
  // One of our interfaces works, or does not any more.
  void onNic(const std::string& nic, bool works);
  // A device of ours reports something by itself.
  void onEvent(const std::string& device, const VerbsEvent& event);

  // Connector
  void offer() override;
  void onPathClosed(Path& path, const Status& why) override;
  void close() override;

 private:
  // An attempt, until a path comes of it.
  struct Attempt {
    size_t connection = 0; // beside which it is
    uint64_t number = 0; // an answer repeats it
    std::unique_ptr<VerbsEnd> end; // null while a thread has it
    std::string device, remoteDevice;
    bool isDeviceLost = false; // ours has failed meanwhile
    TimerId timer = 0; // looks whether the thread has ended
  };
  // The end of a path, while there is one.
  struct Live {
    size_t connection = 0;
    uint64_t number = 0; // of the offer
    VerbsPort port; // ours
    uint32_t queuePair = 0; // ours
  };
  // The part of an attempt that a thread has. It may outlive the connector.
  struct Work;
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
  void refuse(size_t connection, uint64_t number, const std::string& why);
  void closeWhere(
      const std::function<bool(size_t route, const Live& live)>& isLost,
      const std::string& why);
  void dropOffers(const std::string& device);
  // Without a word to the peer: it knows.
  void closeTold(size_t route, const std::string& why);
  void connectAgain(size_t route);
  // The one on the NIC of the connection.
  std::optional<VerbsPort> portOf(size_t connection) const;
  // Begins an attempt, whose end a thread makes; `then` has the result. Not ok:
  // there is none.
  Status begin(
      size_t route,
      size_t connection,
      uint64_t number,
      std::function<void(const Status& status)> then);
  void connect(size_t route, const VerbsOffer& remote, bool initiator);
  // Calls `done` in the loop when the thread has run `job`, unless the attempt
  // is over by then.
  void onThread(
      size_t route,
      const std::shared_ptr<Work>& work,
      std::function<void()> job,
      std::function<void()> done);
  void lookAt(
      size_t route,
      const std::shared_ptr<Work>& work,
      std::function<void()> done);
  void connected(size_t route, Connecting& connecting);

  std::map<size_t, Attempt> attempts_; // by route
  std::map<size_t, Live> live_; // by route
  std::map<size_t, PathFaults> faults_; // by route; they outlive the paths
  std::set<size_t> again_; // routes that wait for a connection to offer over
  std::vector<VerbsOffer> early_; // before the peer's address came
};

} // namespace resilient
