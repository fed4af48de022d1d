#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delegate/connector.h"
#include "failover/roles.h"
#include "failover/route_return.h"
#include "transport/route_path.h"

namespace resilient {

class TcpConnector;

// Paths of one kind to a peer on another host, one for each route beside its
// connections. The preferred process of the two offers it over a connection of
// the route, and the other one answers. The derived classes know the
// content of an offer.
//
// A path that is closed is offered again, at first after a second and later
// after up to 64 s; ten seconds of use reset the pause. offerSoon() shortens it
// when the cause of the failure has gone; a path that is lost again and again
// then waits longer each time (RouteReturn). Only the offering side retries.
// Meanwhile the connections carry everything, so a failure here costs no
// message. A path that was only silent rests as long.
class RoutePathConnector : public Connector {
 public:
  // The path of the route carries, so its connections are in reserve.
  bool carries(size_t route) const {
    return route < routes_.size() && routes_[route].path != nullptr &&
        routes_[route].path->usable() && routes_[route].rest == 0;
  }
  size_t routes() const {
    return routes_.size();
  }
  bool carriesAny() const {
    for (size_t route = 0; route < routes_.size(); ++route) {
      if (carries(route)) {
        return true;
      }
    }
    return false;
  }

  // A path of any kind works, or does not any more. If none is left, one that
  // rests carries at once.
  void onUseChanged();

  // How a path of ours is used: alone, or beside the connections of its route.
  virtual RoutePathUse use() const {
    return RoutePathUse::kAlone;
  }

  // Connector
  void offer() override;
  void onPathClosed(Path& path, const Status& why) override;
  void onPathUse(Path& path) override;
  uint8_t classes(const Path& path, const Roles& roles) const override {
    const size_t route = static_cast<const RoutePath&>(path).route();
    return route < roles.routePaths.size() ? roles.routePaths[route]
                                           : uint8_t{0};
  }
  void close() override;
  void fillStats(PeerStats& stats) const override;

 protected:
  // `name`: of the kind, for messages. `returnDoublings`: as for RouteReturn.
  RoutePathConnector(
      Link& link,
      TcpConnector& connections,
      PathKind kind,
      const char* name,
      int returnDoublings)
      : Connector(link),
        connections_(connections),
        kind_(kind),
        name_(name),
        returnDoublings_(returnDoublings) {}

  // Whether such paths to this peer are wanted at all.
  virtual bool wanted() const = 0;
  // Whether this end can have one beside the connection. If not, there is
  // nothing to say about it.
  virtual bool possible(size_t connection) const = 0;
  // Sends an offer over this connection. If that fails, it is tried later.
  virtual Status sendOffer(size_t route, size_t connection) = 0;
  // Drops what belongs to an offer that is over.
  virtual void forgetOffer(size_t route) = 0;
  // Offers that came before the peer's address did.
  virtual void readEarlyOffers() = 0;

  // The open offer has its answer.
  void answered(size_t route);
  // No path came of an offer or an answer, or it is over.
  void offerLater(size_t route, const std::string& why);
  // What stood against a path of the route has gone: offers it without the
  // pause after failures, as soon as the hold-down has passed.
  void offerSoon(size_t route);
  // Makes room for the routes that are known now.
  void learnRoutes();
  RoutePath* path(size_t route) const {
    return routes_[route].path;
  }
  void add(std::unique_ptr<RoutePath> path);

  TcpConnector& connections_;

 private:
  struct Route {
    explicit Route(const RouteReturn& r) : returns(r) {}

    RoutePath* path = nullptr; // the link's
    TimerId timer = 0; // the offer gets no answer, or the next one is due
    bool isPausing = false; // the timer is for the next offer
    int failures = 0; // in a row
    TimePoint upAt{}; // proven then
    uint64_t timesUp = 0; // of all its paths
    TimerId rest = 0; // ends the rest of the path, which was silent
    RouteReturn returns;
    PathStats past; // of paths that are closed
    double pastBytesPerS = 0; // that the last one carried
    std::string lastError; // kept when a path works again
    bool errorIsSaid = false; // since one has last worked
  };

  void offer(size_t route);
  void offerAt(size_t route, TimePoint when);
  bool isAlone() const;
  void heardAgain(RoutePath& path);
  void carryAgain(size_t route);

  const PathKind kind_;
  const std::string name_;
  const int returnDoublings_;
  std::vector<Route> routes_;
};

} // namespace resilient
