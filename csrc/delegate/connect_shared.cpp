#include "delegate/connect_shared.h"

#include "base/random.h"

namespace resilient {

// The token is expected before the offer is sent. Only the preferred process
// offers, or there would be two rings for each direction.
void SharedConnector::offer() {
  if (offered_ || link_.state() != Link::State::kUp || !link_.sameHost() ||
      !link_.preferredInitiator() || !link_.host().options().shared_memory) {
    return;
  }
  offered_ = true;
  SharedRendezvous* const rendezvous = link_.host().sharedRendezvous();
  if (rendezvous == nullptr) {
    return;
  }
  SharedOffer offer;
  offer.socketName = rendezvous->name();
  offer.token.resize(16);
  fillRandom(offer.token.data(), offer.token.size());
  rendezvous->expect(link_.uid(), offer.token);
  link_.channel().sendControl(encode(offer));
}

void SharedConnector::onOffer(const SharedOffer& offer) {
  const EngineOptions& options = link_.host().options();
  if (!link_.usable() || path_ != nullptr || visit_ || !options.shared_memory) {
    return;
  }
  visit_ = SharedVisit::start(
      link_.loop(),
      offer.socketName,
      offer.token,
      static_cast<size_t>(options.shared_ring_bytes),
      [this](const Status& status, SharedEnds ends) {
        link_.host().destroyLater(
            std::shared_ptr<SharedVisit>(std::move(visit_)));
        if (status.ok()) {
          onEnds(std::move(ends));
        } else {
          link_.host().noSharedMemory(
              link_.describe() + ": " + status.message());
        }
      });
}

// Both ends come here: the one that brings the memory, and the one that waited
// for it.
void SharedConnector::onEnds(SharedEnds ends) {
  if (!link_.usable() || path_ != nullptr) {
    return;
  }
  auto path = std::make_unique<SharedPath>(
      link_.loop(),
      link_.channel(),
      link_.host().nextPathId(),
      std::move(ends),
      link_.pathOwner());
  path_ = path.get();
  logMessage(LogLevel::kDebug, "memory is shared with " + link_.describe());
  path_->faultsChanged(link_.faultsConcern());
  link_.addPath(std::move(path));
  link_.useChanged();
}

void SharedConnector::onPathClosed(Path& path, const Status& why) {
  past_ = link_.channel().pathCounters(path.id()); // it comes once
  path_ = nullptr;
  if (link_.usable()) {
    link_.say(
        link_.levelOfLoss(why),
        "no more memory shared with " + link_.describe() + ": " +
            why.message());
  }
}

void SharedConnector::fillStats(PeerStats& stats) const {
  if (path_ == nullptr && !past_) {
    return;
  }
  PathStats p;
  p.kind = PathKind::kShared;
  p.nic = p.remoteNic = "shared memory";
  p.state = path_ == nullptr ? "down" : sharing() ? "up" : "reserve";
  if (past_) {
    p.add(*past_);
  }
  if (path_ != nullptr) {
    path_->fill(p);
  }
  stats.paths.push_back(std::move(p));
}

} // namespace resilient
