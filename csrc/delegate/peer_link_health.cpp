#include <algorithm>
#include <map>

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
  leaveDownNics();
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
  slot.suspectAt = suspect ? engine_.loop().now() : slot.suspectAt;
  logMessage(
      LogLevel::kDebug,
      "path " + std::to_string(index) + " to " + describe() +
          (suspect ? " is suspect" : " answers again"));
  assignRoles();
}

// An answer to something that was sent so long ago, and a round trip, shows
// that a path works.
Nanos PeerLink::recentAnswer() const {
  return std::max(
      fromSeconds(engine_.options().suspect_after_s) / 2, 4 * kCloseInterval);
}

// Asks the other paths, if they have not answered lately, whether they work.
void PeerLink::askOthers(size_t index, TimePoint now) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const ConnectionView view = viewOf(slots_[i]);
    if (i != index && answers(view) && !answeredWithin(view, recentAnswer()) &&
        slots_[i].pingAt == kNever) {
      ping(i, now);
    }
  }
}

// The path is silent. Others that have not answered lately would be the next:
// they must show that they work before they get anything.
void PeerLink::doubt(size_t index, TimePoint now) {
  const SilenceVerdict verdict = judgeSilence(views(), index, recentAnswer());
  // If no path can take over, it is the network or the peer that is silent.
  // Then nothing is gained by suspicion, and much is lost: all that is in
  // flight would go twice, and what came back would have to prove itself.
  if (!verdict.takenOver) {
    askOthers(index, now);
    return;
  }
  if (!channel_.isSuspect(slots_[index].path->id())) {
    for (const size_t i : verdict.doubtful) {
      slots_[i].taintedAt = now;
      ping(i, now);
      setSuspect(i, true);
    }
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
      if (mayReplace(slot)) { // it has come back by itself
        slot.failures = 0;
        if (slot.attempt && !slot.attempt->connectedAt()) {
          slot.attempt.reset();
        }
      }
      if (slot.stalled) {
        slot.stalled = slot.wayDead = false;
        assignRoles();
      }
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
      askOthers(index, now);
      return;
    case PathVerdict::kSuspect:
      doubt(index, now);
      if (slot.retryTimer == 0) { // else the pause after the last attempt
        connect(index);
      }
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
        assignRoles();
        logMessage(
            LogLevel::kInfo,
            "path " + std::to_string(index) + " to " + describe() +
                " stalls; trying another way");
        ping(index, now);
      }
      if (slot.retryTimer == 0) {
        connect(index);
      }
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
  bool lost = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (nicOf(i) != nic) {
      continue;
    }
    Slot& slot = slots_[i];
    if (works) {
      // Skip the pause between attempts. An unanswered SYN was lost, and the
      // kernel retransmits it late.
      slot.failures = 0;
      if (slot.attempt && !slot.attempt->connectedAt()) {
        slot.attempt.reset();
      }
      if (slot.path && slot.nicDown) {
        slot.stalled = slot.stalled || slot.pingAt != kNever ||
            channel_.waitingSince(slot.path->id()) != kNever;
      }
      slot.nicDown = false;
      connect(i);
    } else if (slot.path) {
      slot.nicDown = lost = true;
    }
  }
  leaveDownNics();
  if (usable()) {
    assignRoles();
  }
  if (lost) {
    // Another pair of NICs may do.
    connectAll();
  }
}

// Closes the connections of our NICs that are down, once another one can take
// over, and tells the peer. Until then they are kept: the NIC may come back
// soon.
void PeerLink::leaveDownNics() {
  const bool down =
      std::any_of(slots_.begin(), slots_.end(), [](const Slot& s) {
        return s.path && s.nicDown;
      });
  if (!down || !anyCanTakeOver(views())) {
    return;
  }
  std::map<std::string, PathsLost> lost; // by NIC
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].path && slots_[i].nicDown) {
      lost[nicOf(i)].slots.push_back(static_cast<uint16_t>(i));
    }
  }
  for (auto& [nic, paths] : lost) {
    for (const uint16_t i : paths.slots) {
      slots_[i].path->reset(
          Status(StatusCode::kNetwork, "our NIC " + nic + " went down"));
    }
    paths.reason = "its NIC " + nic + " went down";
    channel_.sendControl(encode(paths));
  }
}

// The peer has closed its ends of these paths, so ours are of no use, whether
// or not another one works.
void PeerLink::onPathsLost(const PathsLost& lost) {
  for (uint16_t i : lost.slots) {
    if (usable() && i < slots_.size() && slots_[i].path) {
      slots_[i].path->reset(
          Status(StatusCode::kNetwork, describe() + " says: " + lost.reason));
    }
  }
}

} // namespace resilient
