#include <algorithm>

#include "base/log.h"
#include "delegate/engine.h"
#include "delegate/peer_link.h"

// Which paths can be relied on. Witnesses: the kernel's news of our own
// interfaces, the peer's word for its own, errors of the socket, and silence
// of what should have answered. See path/health.h for the degrees of doubt.

namespace resilient {
namespace {

constexpr Nanos kHealthInterval = std::chrono::milliseconds(100);
// Where a pause would be noticed: another path could take over. A fraction of
// suspect_after_s, at most.
constexpr Nanos kCloseInterval = std::chrono::milliseconds(5);

// A path that has come back is asked this often, and must answer this often,
// before it carries anything.
constexpr Nanos kProbeInterval = std::chrono::milliseconds(40);
constexpr uint32_t kProbes = 3;

} // namespace

void PeerLink::faultsChanged() {
  for (Slot& slot : slots_) {
    if (slot.path) {
      slot.path->faultsChanged();
    }
  }
  if (shared_) { // a rule stands for the network
    shared_->avoid(
        engine_.faults().concerns(engine_.globalRank(), globalRank_));
  }
  assignRoles(); // rules stand for the network that connections have
  armHealthTimer();
  engine_.markDirty(*this);
}

// Runs only while somebody waits for this peer: an idle job has no timers.
void PeerLink::armHealthTimer() {
  lookIn(healthInterval());
}

// Frames have gone out. On a link that was idle the timer may be set for much
// later than the first silence can be noticed. Once it is set for that, further
// frames do not move it.
void PeerLink::watchOutgoing() {
  const Nanos first = fromSeconds(engine_.options().suspect_after_s);
  if (healthTimer_ != 0 && healthTimerAt_ <= engine_.loop().now() + first) {
    return;
  }
  if (const Nanos interval = healthInterval(); interval < kHealthInterval) {
    lookIn(std::max(first, interval));
  }
}

void PeerLink::lookIn(Nanos delay) {
  if (!usable()) {
    return;
  }
  EventLoop& loop = engine_.loop();
  const TimePoint due = loop.now() + delay;
  if (healthTimer_ != 0) {
    if (healthTimerAt_ <= due) {
      return;
    }
    loop.cancel(healthTimer_);
  }
  healthTimerAt_ = due;
  healthTimer_ = loop.at(due, [this] {
    healthTimer_ = 0;
    onHealthTimer();
  });
}

Nanos PeerLink::healthInterval() const {
  const bool spare = livePaths() > 1;
  for (const Slot& slot : slots_) {
    if (slot.path && spare &&
        (slot.pingAt != kNever || channel_.onProbation(slot.path->id()) ||
         channel_.waitingSince(slot.path->id()) != kNever)) {
      return kCloseInterval;
    }
  }
  return kHealthInterval;
}

void PeerLink::onHealthTimer() {
  const TimePoint now = engine_.loop().now();
  bool waiting = interest_ > 0 || !channel_.drained();
  for (size_t i = 0; i < slots_.size() && usable(); ++i) {
    if (slots_[i].path) {
      checkPath(i, now);
    }
    if (slots_[i].path) {
      checkProbation(i, now);
      slots_[i].path->tune();
      waiting = waiting || slots_[i].pingAt != kNever;
    }
  }
  checkNeverConnected();
  if (usable()) {
    countConnections(now);
  }
  if (waiting && usable()) {
    armHealthTimer();
  }
}

TimePoint PeerLink::othersAt(size_t index) const {
  TimePoint at{};
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (i != index && slots_[i].path) {
      at = std::max(at, slots_[i].path->heardAt());
    }
  }
  return at;
}

TimePoint PeerLink::neighboursAt(size_t index) const {
  TimePoint at{};
  for (size_t i = routeOf(index); i < slots_.size() && !routes_.empty();
       i += routeCount()) {
    if (i != index && slots_[i].path) {
      at = std::max(at, slots_[i].health.provenAt());
    }
  }
  return at;
}

void PeerLink::ping(size_t index, TimePoint now) {
  Slot& slot = slots_[index];
  slot.pingedAt = now;
  if (slot.pingAt == kNever) { // else it stays unanswered since then
    slot.pingAt = now;
  }
  channel_.ping(slot.path->id());
}

void PeerLink::setSuspect(size_t index, bool suspect) {
  Slot& slot = slots_[index];
  if (channel_.isSuspect(slot.path->id()) == suspect) {
    return;
  }
  channel_.setSuspect(slot.path->id(), suspect);
  logMessage(
      LogLevel::kDebug,
      "path " + std::to_string(index) + " to " + describe() +
          (suspect ? " is suspect" : " answers again"));
  assignRoles();
}

// The path is silent. Others of its route that have not answered lately would
// be the next: they must show that they live before they get anything.
void PeerLink::doubt(size_t index, TimePoint now) {
  const Nanos recent = fromSeconds(engine_.options().suspect_after_s) / 2;
  std::vector<size_t> unproven;
  bool others = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (i == index || !good(slots_[i])) {
      continue;
    }
    if (!routes_.empty() && routeOf(i) == routeOf(index) &&
        now - channel_.answeredUpTo(slots_[i].path->id()) >= recent) {
      unproven.push_back(i);
    } else {
      others = true;
    }
  }
  // If nobody could take over, it is the network or the peer that is silent.
  // Then nothing is gained by suspicion, and much is lost: all that is in
  // flight would go twice, and what came back would have to prove itself.
  if (!others) {
    for (const size_t i : unproven) {
      if (slots_[i].pingAt == kNever) {
        ping(i, now);
      }
    }
    return;
  }
  if (!channel_.isSuspect(slots_[index].path->id())) {
    for (const size_t i : unproven) {
      slots_[i].taintedAt = now;
      ping(i, now);
      setSuspect(i, true);
    }
  }
  if (!channel_.isSuspect(slots_[index].path->id())) {
    slots_[index].damping.onLost(now);
  }
  setSuspect(index, true);
}

// A path owes us something if frames are unacknowledged or a ping is
// unanswered. If then nothing moves on it, it is suspect as soon as another
// path could take over what it has. It is given up if it stays silent while
// the peer is heard of elsewhere, or when a new connection in its place
// stands; until then (the peer may be stopped, the network down) it is kept,
// and may simply go on.
void PeerLink::checkPath(size_t index, TimePoint now) {
  Slot& slot = slots_[index];
  TcpPath& path = *slot.path;
  // Only an answer tells of our direction. The other one may be quite well.
  const TimePoint answered = channel_.answeredUpTo(path.id());
  if (slot.pingAt != kNever && answered >= slot.pingAt) {
    slot.pingAt = kNever;
  }
  if (slot.taintedAt != kNever && answered >= slot.taintedAt) {
    slot.taintedAt = kNever;
  }
  PathEvidence evidence = path.evidence();
  const TimePoint owesSince =
      std::min(channel_.waitingSince(path.id()), slot.pingAt);
  evidence.owes = owesSince != kNever;
  evidence.owesSince = evidence.owes ? owesSince : TimePoint{};
  evidence.othersAt = othersAt(index);
  evidence.neighboursAt = neighboursAt(index);
  const PathHealth::Limits limits{
      fromSeconds(engine_.options().suspect_after_s),
      fromSeconds(engine_.options().stall_timeout_s)};
  switch (slot.health.observe(evidence, limits, now)) {
    case PathVerdict::kGood:
      slot.stalled = slot.wayDead = false;
      if (slot.taintedAt == kNever && channel_.isSuspect(path.id())) {
        if (slot.health.wasOutage()) {
          // As if it had been lost and made again: it may be flapping.
          slot.damping.onUp(now);
          slot.upAt = now;
          channel_.putOnProbation(path.id());
        }
        setSuspect(index, false);
      }
      if (interest_ > 0 && slot.pingAt == kNever &&
          now - path.heardAt() >= fromSeconds(engine_.options().heartbeat_s)) {
        ping(index, now);
      }
      return;
    case PathVerdict::kUncertain:
      for (size_t i = 0; i < slots_.size(); ++i) {
        if (i != index && good(slots_[i]) && slots_[i].pingAt == kNever) {
          ping(i, now);
        }
      }
      return;
    case PathVerdict::kSuspect:
      doubt(index, now);
      return;
    case PathVerdict::kStalled:
      doubt(index, now);
      if (evidence.othersAt + limits.stalledAfter > now) {
        path.reset(Status(
            StatusCode::kNetwork, "stalled while other paths made progress"));
        return;
      }
      slot.wayDead = evidence.kernelOwes;
      if (!slot.stalled) {
        slot.stalled = true;
        logMessage(
            LogLevel::kInfo,
            "path " + std::to_string(index) + " to " + describe() +
                " stalls; trying another way");
        ping(index, now);
      }
      connect(index);
      return;
  }
}

// Paper: SHIFT §4.3.3. A path that has come back shows that it works before it
// carries anything; then the channel lets a little through, and more with each
// acknowledgement.
void PeerLink::checkProbation(size_t index, TimePoint now) {
  Slot& slot = slots_[index];
  const PathId id = slot.path->id();
  if (!channel_.onProbation(id)) {
    return;
  }
  if (slot.pingAt == kNever && now - slot.pingedAt >= kProbeInterval) {
    ping(index, now);
  }
  if (channel_.pingsAnswered(id) >= kProbes &&
      now - slot.upAt >= slot.damping.holdDown()) {
    channel_.trust(id);
    logMessage(
        LogLevel::kInfo,
        "path " + std::to_string(index) + " to " + describe() +
            " has proved itself and carries data again");
    assignRoles();
  }
}

void PeerLink::onNic(const std::string& nic, bool works) {
  if (!usable() || routes_.empty()) {
    return;
  }
  const std::string reason = "its NIC " + nic + " went down";
  PathsLost lost;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (nicOf(i) != nic) {
      continue;
    }
    Slot& slot = slots_[i];
    if (works) {
      // Whatever the pause between attempts was: now is the time.
      slot.failures = 0;
      slot.nicDown = false;
      connect(i);
    } else if (slot.path) {
      lost.slots.push_back(static_cast<uint16_t>(i));
    }
  }
  if (lost.slots.empty()) {
    return;
  }
  lost.reason = reason;
  const auto affected = [&](size_t i) {
    return std::find(lost.slots.begin(), lost.slots.end(), i) !=
        lost.slots.end();
  };
  bool another = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    another = another || (!affected(i) && good(slots_[i]));
  }
  if (!another) {
    // The connections may survive. Meanwhile another pair of NICs may do.
    for (uint16_t i : lost.slots) {
      slots_[i].nicDown = true;
    }
    connectAll();
    return;
  }
  for (uint16_t i : lost.slots) {
    slots_[i].path->reset(
        Status(StatusCode::kNetwork, "our NIC " + nic + " went down"));
  }
  channel_.sendControl(encode(lost));
}

void PeerLink::onPathsLost(const PathsLost& lost) {
  for (uint16_t i : lost.slots) {
    if (usable() && i < slots_.size() && slots_[i].path && anyOtherGood(i)) {
      slots_[i].path->reset(
          Status(StatusCode::kNetwork, describe() + " says: " + lost.reason));
    }
  }
}

} // namespace resilient
