#include "base/log.h"
#include "base/random.h"
#include "delegate/engine.h"
#include "delegate/peer_link.h"

// Memory shared with a peer on this host.

namespace resilient {

// Called when the link is up and when the peer's address is known, whichever
// comes last. One of the two processes offers, the other one comes.
void PeerLink::offerSharedMemory() {
  if (offered_ || state_ != State::kUp || !address_ || !preferredInitiator() ||
      address_->hostId != engine_.self().hostId ||
      !engine_.options().shared_memory) {
    return;
  }
  offered_ = true;
  SharedDoor* const door = engine_.sharedDoor();
  if (door == nullptr) {
    return;
  }
  SharedOffer offer;
  offer.door = door->name();
  offer.token.resize(16);
  fillRandom(offer.token.data(), offer.token.size());
  door->expect(uid_, offer.token);
  channel_.sendControl(encode(offer));
}

void PeerLink::onSharedOffer(const SharedOffer& offer) {
  if (!usable() || shared_ || knock_ || !engine_.options().shared_memory) {
    return;
  }
  knock_ = SharedKnock::start(
      engine_.loop(),
      offer.door,
      offer.token,
      static_cast<size_t>(engine_.options().shared_ring_bytes),
      [this](const Status& status, SharedEnds ends) {
        engine_.destroyLater(std::shared_ptr<SharedKnock>(std::move(knock_)));
        if (status.ok()) {
          onSharedEnds(std::move(ends));
        } else {
          engine_.noSharedMemory(describe() + ": " + status.message());
        }
      });
}

void PeerLink::onSharedEnds(SharedEnds ends) {
  if (!usable() || shared_) {
    return;
  }
  shared_ = std::make_unique<SharedPath>(
      engine_.loop(), channel_, engine_.nextPathId(), std::move(ends), *this);
  logMessage(LogLevel::kDebug, "memory is shared with " + describe());
  shared_->avoid(engine_.faults().concerns(engine_.globalRank(), globalRank_));
  assignRoles();
  engine_.markDirty(*this);
}

bool PeerLink::sharing() const {
  return shared_ && shared_->usable();
}

void PeerLink::onSharedReady(SharedPath&) {
  engine_.markDirty(*this);
}

void PeerLink::onSharedUse(SharedPath&) {
  assignRoles();
  engine_.markDirty(*this);
}

void PeerLink::onSharedClosed(SharedPath& path, const Status& why) {
  heardAt_ = heardAt();
  pastShared_ = channel_.pathCounters(path.id()); // it comes once
  engine_.destroyLater(std::shared_ptr<SharedPath>(std::move(shared_)));
  assignRoles();
  engine_.markDirty(*this);
  if (usable()) {
    say(levelOfLoss(why),
        "no more memory shared with " + describe() + ": " + why.message());
  }
}

} // namespace resilient
