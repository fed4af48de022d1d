#pragma once

#include <memory>
#include <optional>

#include "delegate/connector.h"
#include "transport/shared_path.h"
#include "transport/shared_rendezvous.h"
#include "wire/control.h"

namespace resilient {

// Memory shared with a peer on this host. The preferred process of the two says
// over a connection, which has proved the job's secret, at which Unix socket it
// waits and for which token; the other one brings the memory there. Memory is
// offered once in the life of a link. There is no second try: it is lost only
// with the peer, and if sharing fails, connections carry everything.
class SharedConnector final : public Connector {
 public:
  using Connector::Connector;

  // Usable, so that the network is in reserve.
  bool sharing() const {
    return path_ != nullptr && path_->usable();
  }
  // The peer invites us; and has come with memory.
  void onOffer(const SharedOffer& offer);
  void onEnds(SharedEnds ends);

  // Connector
  void offer() override;
  void onPathClosed(Path& path, const Status& why) override;
  void onPathUse(Path&) override {}
  uint8_t classes(const Path&, const Roles& roles) const override {
    return roles.sharedMemory;
  }
  void close() override {
    visit_.reset();
  }
  void fillStats(PeerStats& stats) const override;

 private:
  SharedPath* path_ = nullptr; // the link's
  std::unique_ptr<SharedVisit> visit_;
  bool offered_ = false;
  std::optional<PathCounters> past_; // of memory that was shared before
};

} // namespace resilient
