#include "shift/session.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/random.h"
#include "shift/data_path.h"
#include "shift/runtime.h"

namespace resilient::shift {
namespace {

using namespace std::chrono_literals;

constexpr auto kProbeLimit = 600ms;
constexpr auto kRoundPause = 200ms;
constexpr auto kAnswerLimit = 3s;
// How long a failed path waits for the other one. Both may have failed for a
// moment, or the machine may be too busy to connect it.
constexpr auto kReadyLimit = 10s;
// How long the first attempt to return waits for both ends to drain. The next
// ones wait longer, because a slow path needs it, but not for ever: what one
// end holds may be what the other end waits for.
constexpr auto kDrainLimit = 500ms;
constexpr int kDrainDoublings = 2;
// Each silent switch without progress doubles the silence before the next one,
// this many times at most: the receiver may just be busy for long.
constexpr int kSilenceDoublings = 7;
// The same for attempts to return after the first ones.
constexpr int kSoonReturns = 3;
constexpr int kReturnDoublings = 6;

uint64_t randomNumber() {
  uint64_t number = 0;
  fillRandom(&number, sizeof number);
  return number;
}

std::string randomName() {
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016" PRIx64, randomNumber());
  return text.data();
}

template <typename Number>
bool parseWhole(std::string_view text, Number& number, int base) {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number, base);
  return result.ec == std::errc() && result.ptr == end;
}

bool parseGid(std::string_view text, ibv_gid& gid) {
  bool isGood = text.size() == 2 * sizeof gid.raw;
  for (size_t i = 0; isGood && i < sizeof gid.raw; ++i) {
    isGood = parseWhole(text.substr(2 * i, 2), gid.raw[i], 16);
  }
  return isGood;
}

// Decimal numbers between colons, as many as asked for.
template <size_t count>
bool parseNumbers(std::string_view text, std::array<uint64_t, count>& numbers) {
  for (size_t i = 0; i < count; ++i) {
    const size_t end = text.find(':');
    if ((end == std::string_view::npos) != (i + 1 == count) ||
        !parseWhole(text.substr(0, end), numbers[i], 10)) {
      return false;
    }
    text.remove_prefix(std::min(end, text.size() - 1) + 1);
  }
  return true;
}

} // namespace

Session::Session(Qp& qp) : qp_(qp), name_(randomName()) {}

std::string Session::key(const char* kind, uint64_t number, int64_t turn)
    const {
  return name_ + "." + peer_ + "." + kind + "." + std::to_string(number) +
      (turn < 0 ? std::string() : "." + std::to_string(turn));
}

std::string Session::peerKey(const char* kind, uint64_t number, int64_t turn)
    const {
  return peer_ + "." + name_ + "." + kind + "." + std::to_string(number) +
      (turn < 0 ? std::string() : "." + std::to_string(turn));
}

void Session::ask(
    const std::string& name,
    void (Session::*answer)(std::string_view)) {
  runtime().store.get(
      name, [self = weak_from_this(), answer](std::string_view value) {
        if (const auto session = self.lock(); session && !session->isOver()) {
          (*session.*answer)(value);
        }
      });
}

void Session::state(const std::string& name, const std::string& value) {
  runtime().store.put(name, value);
  stated_.push_back(name);
}

Session::Seen Session::look() {
  const std::lock_guard guard(qp_.lock);
  return {
      qp_.protection,
      qp_.firstError.has_value(),
      qp_.firstError ? qp_.firstError->status : IBV_WC_RETRY_EXC_ERR,
      qp_.untranslatable,
      qp_.missingKey};
}

void Session::aside(
    std::function<void()> call,
    std::function<void()> done,
    bool isUrgent) {
  calls_.push_back({std::move(call), std::move(done), isUrgent});
  if (!isCalling_) {
    nextCall();
  }
}

void Session::nextCall() {
  isCalling_ = !calls_.empty();
  if (!isCalling_) {
    return;
  }
  Call next = std::move(calls_.front());
  calls_.pop_front();
  runtime().aside(
      std::move(next.call),
      [self = shared_from_this(), done = std::move(next.done)] {
        if (!self->isEnded_) {
          done();
        }
        self->nextCall();
      },
      next.isUrgent);
}

// Paper: SHIFT §4.2: default QP route attributes -> backup QP route attributes
void Session::publish() {
  const auto own = addressesOf(qp_.device->app, 1);
  const auto backup = addressesOf(qp_.device->backup, 1);
  if (own.empty() || backup.empty()) {
    say("%s is not protected: a device has no RoCE v2 address",
        qp_.device->name.c_str());
    return;
  }
  isPublished_ = true;
  const std::string value =
      name_ + ":" + backup.front() + ":" + std::to_string(qp_.backup->qp_num);
  for (const std::string& address : own) {
    runtime().store.put(
        "qp." + address + "." + std::to_string(qp_.app->qp_num), value);
  }
  if (isMeeting_) {
    meetPeer();
  }
}

void Session::meetPeer() {
  isMeeting_ = true;
  if (!isPublished_) {
    return;
  }
  peerDefault_ = {qp_.attributes.ah_attr.grh.dgid, qp_.attributes.dest_qp_num};
  peerAddress_ = addressText(peerDefault_.gid);
  (void)ibv_query_gid(
      qp_.device->app,
      qp_.attributes.port_num,
      qp_.attributes.ah_attr.grh.sgid_index,
      &qp_.ownAddress);
  ask("qp." + peerAddress_ + "." + std::to_string(peerDefault_.number),
      &Session::peerFound);
}

void Session::peerFound(std::string_view value) {
  const size_t first = value.find(':');
  const size_t second = value.rfind(':');
  if (first != 16 || second <= first ||
      !parseGid(value.substr(first + 1, second - first - 1), peerBackup_.gid) ||
      !parseWhole(value.substr(second + 1), peerBackup_.number, 10) ||
      peerBackup_.number > kPacketMask) {
    say("the store has no sensible record of the peer: not protected");
    return;
  }
  peer_ = value.substr(0, first);
  ask(peerKey("f", epoch_), &Session::peerFenced);
  build_ = Build::kPause;
  qp_.hasPeer = true;
}

int Session::idlePath() const {
  return 1 - qp_.core.active();
}

Remote Session::remoteOn(int path) const {
  return path == 0 ? peerDefault_ : peerBackup_;
}

bool Session::tick(Clock::time_point now) {
  if (isFailing_ && now - failSince_ > runtime().fenceLimit) {
    say("queue pair %u of %s: a device does not answer",
        qp_.app->qp_num,
        qp_.device->name.c_str());
    tellFailure();
  }
  if (isOver() || peer_.empty()) {
    return isFailing_;
  }
  const Seen seen = look();
  if (seen.protection != Protection::kOn) {
    if (seen.protection == Protection::kOff) {
      refuse();
      isEnded_ = true;
    }
    return false;
  }
  if (build_ == Build::kPause && now >= deadline_ &&
      isPortActive(qp_, idlePath())) {
    startRound();
  }
  if (build_ == Build::kProbe) {
    tickProbe(now);
  }
  if (isSwitching_) {
    tickSwitch(now);
  } else {
    watch(now, seen);
    tickReturn(now, seen);
  }
  return isSwitching_ || isReturning_ || isFailing_ ||
      build_ == Build::kProbe || seen.missingKey.has_value();
}

// ---- The idle path. Paper: SHIFT §4.3.3, probing for default path recovery
// ----

void Session::startRound() {
  ownVerdict_.reset();
  peerVerdict_.reset();
  ownPacket_ = static_cast<uint32_t>(randomNumber()) & kPacketMask;
  build_ = Build::kInitialize;
  const auto error = std::make_shared<int>(0);
  aside(
      [control = PathControl(qp_, idlePath()), error] {
        *error = control.initialize();
      },
      [this, error] { initialized(*error); });
}

void Session::initialized(int error) {
  if (isOver() || build_ != Build::kInitialize) {
    return;
  }
  if (error != 0) {
    // The peer waits for this round; it is tried again.
    build_ = Build::kPause;
    deadline_ = Clock::now() + kRoundPause;
    return;
  }
  build_ = Build::kExchange;
  oldStated_.insert(oldStated_.end(), stated_.begin(), stated_.end());
  stated_.clear();
  state(key("r", epoch_, round_), std::to_string(ownPacket_));
  ask(peerKey("r", epoch_, round_), &Session::peerPacketKnown);
}

void Session::peerPacketKnown(std::string_view value) {
  uint64_t packet = 0;
  if (!parseWhole(value, packet, 10) || packet > kPacketMask ||
      build_ != Build::kExchange) {
    return;
  }
  // The peer is in this round, so it has read what belongs to former ones.
  for (const std::string& name : oldStated_) {
    runtime().store.remove(name);
  }
  oldStated_.clear();
  peerPacket_ = static_cast<uint32_t>(packet);
  {
    const std::lock_guard guard(qp_.lock);
    qp_.probeResult.reset();
    qp_.isProbing = true;
  }
  build_ = Build::kConnect;
  const auto error = std::make_shared<int>(0);
  const int path = idlePath();
  aside(
      [control = PathControl(qp_, path),
       remote = remoteOn(path),
       own = ownPacket_,
       peer = peerPacket_,
       error] { *error = control.connect(remote, own, peer); },
      [this, error] { connected(*error); });
}

void Session::connected(int error) {
  if (isOver() || build_ != Build::kConnect) {
    return;
  }
  build_ = Build::kProbe;
  deadline_ = Clock::now() + kProbeLimit;
  if (error != 0 || postProbe(qp_, idlePath()) != 0) {
    stateVerdict(false);
  }
}

void Session::tickProbe(Clock::time_point now) {
  {
    const std::lock_guard guard(qp_.sendCq->lock);
    // In the default state only this thread polls the backup.
    qp_.sendCq->isSlow ? drain(*qp_.sendCq) : drainBackup(*qp_.sendCq);
    signalReady(*qp_.sendCq);
  }
  std::optional<bool> result;
  {
    const std::lock_guard guard(qp_.lock);
    result = qp_.probeResult;
  }
  if (result) {
    stateVerdict(*result);
  } else if (now >= deadline_) {
    stateVerdict(false);
  }
}

void Session::stateVerdict(bool isGood) {
  {
    const std::lock_guard guard(qp_.lock);
    qp_.isProbing = false;
  }
  ownVerdict_ = isGood;
  build_ = Build::kVerdict;
  state(key("p", epoch_, round_), isGood ? "1" : "0");
  ask(peerKey("p", epoch_, round_), &Session::peerProbed);
}

void Session::peerProbed(std::string_view value) {
  if (build_ == Build::kVerdict) {
    peerVerdict_ = value == "1";
    roundDone();
  }
}

void Session::roundDone() {
  if (*ownVerdict_ && *peerVerdict_) {
    build_ = Build::kReady;
    readySince_ = Clock::now();
    qp_.isReady = true;
    if (qp_.core.active() == 1 && name_ > peer_) {
      ask(peerKey("w", epoch_, try_), &Session::returnWanted);
    }
    return;
  }
  ++round_;
  build_ = Build::kPause;
  deadline_ = Clock::now() + kRoundPause;
}

// ---- Detection ----

void Session::watch(Clock::time_point now, const Seen& seen) {
  if (seen.hasFailed) {
    switchWhenReady(now);
    return;
  }
  if (seen.untranslatable != nullptr) {
    fail(seen.untranslatable);
    return;
  }
  if (seen.missingKey) {
    lookUpKey(*seen.missingKey);
  }
  noteProgress(now);
  const auto limit =
      runtime().silence * (1 << std::min(silentSwitches_, kSilenceDoublings));
  if (now - lastProgress_ > limit && build_ == Build::kReady) {
    nothingCompletes(now);
  }
}

void Session::noteProgress(Clock::time_point now) {
  const std::lock_guard guard(qp_.lock);
  if (!qp_.core.isHeld()) {
    postHeldSends(qp_);
  }
  postHeldReceives(qp_);
  const bool hasCompleted = qp_.core.completedSends() !=
      std::exchange(lastCompleted_, qp_.core.completedSends());
  if (hasCompleted) {
    silentSwitches_ = 0;
  }
  if (hasCompleted || qp_.core.isIdle() ||
      lastProgress_ == Clock::time_point{}) {
    lastProgress_ = now;
  }
}

// Beyond the paper: a path that is silent gives no error completion, but an
// application that does not poll is not a silent path.
void Session::nothingCompletes(Clock::time_point now) {
  lastProgress_ = now;
  bool isAwaited = false;
  {
    const std::lock_guard guard(qp_.lock);
    isAwaited = qp_.core.awaitsCompletion();
  }
  if (!isAwaited) {
    askForCompletion();
  } else if (!observeCompletions()) {
    ++silentSwitches_;
    beginSwitch("nothing completes");
  }
}

// The application has posted only unsignaled requests, whose success is never
// told: a signaled one of our own shows whether the path works.
void Session::askForCompletion() {
  const QueuesLock queues(qp_);
  enterSlow(*qp_.sendCq);
  const std::lock_guard guard(qp_.lock);
  if (qp_.core.isHeld() || qp_.core.firstHeldSend() != nullptr) {
    return;
  }
  qp_.core.pushFence();
  postHeldSends(qp_);
  if (qp_.core.firstHeldSend() != nullptr) {
    qp_.core.undoSend(); // the queue is full
  }
}

// The other path may be about to be connected, for example soon after a switch.
void Session::switchWhenReady(Clock::time_point now) {
  if (!failedSince_) {
    failedSince_ = now;
  }
  if (qp_.isReady || isPeerRefusing_ || !runtime().isUsable() ||
      now - *failedSince_ > kReadyLimit) {
    failedSince_.reset();
    beginSwitch("a request failed");
  }
}

// Looks for completions that the application has not polled.
bool Session::observeCompletions() {
  const QueuesLock queues(qp_);
  for (Cq* cq : {qp_.sendCq, qp_.receiveCq}) {
    enterSlow(*cq);
    drain(*cq);
    signalReady(*cq);
  }
  const std::lock_guard guard(qp_.lock);
  return qp_.core.completedSends() != lastCompleted_ || qp_.core.isIdle();
}

void Session::portDown(int path) {
  if (!isOver() && qp_.isReady && path == qp_.core.active()) {
    beginSwitch("the port went down");
  }
}

// ---- A switch. Paper: SHIFT §4.3.2, overall RDMA fallback procedure ----

void Session::beginSwitch(const char* reason) {
  if (isSwitching_ || isOver() || look().protection != Protection::kOn) {
    return;
  }
  reason_ = reason;
  if (isPeerRefusing_ || !qp_.isReady || !runtime().isUsable()) {
    fail(
        isPeerRefusing_   ? "the peer has given up"
            : qp_.isReady ? "the store cannot be reached"
                          : "the other path is not ready");
    return;
  }
  if (const std::string_view problem = holdSends(); !problem.empty()) {
    fail(std::string(problem));
    return;
  }
  if (!qp_.isSwitching) {
    return; // not safe, and no error yet that would have to be told
  }
  isSwitching_ = true;
  isStated_ = false;
  switchSince_ = Clock::now();
  freeze(qp_.core.active());
}

// Returns why the switch is impossible. Sets qp_.isSwitching if it begins.
std::string_view Session::holdSends() {
  const QueuesLock queues(qp_);
  for (Cq* cq : {qp_.sendCq, qp_.receiveCq}) {
    enterSlow(*cq);
    drain(*cq);
    signalReady(*cq);
  }
  const std::lock_guard guard(qp_.lock);
  // Paper: SHIFT §4.3.2, retransmission-safe check
  const std::string_view problem = qp_.core.unsafe();
  if (!problem.empty()) {
    return qp_.firstError || peerProgress_ ? problem : std::string_view();
  }
  qp_.core.hold();
  qp_.isSwitching = true;
  return {};
}

void Session::freeze(int oldPath) {
  // Beyond the paper: nothing arrives here after this, so what is stated now is
  // final and a late packet cannot reach memory that is in use again.
  const auto next = std::make_shared<std::optional<uint32_t>>();
  aside(
      [control = PathControl(qp_, oldPath), next] {
        if (control.fence() == 0) {
          *next = control.nextPacket();
        }
      },
      [this, next] { fenced(*next); },
      true);
}

void Session::fenced(std::optional<uint32_t> nextPacket) {
  if (!isSwitching_) {
    return;
  }
  if (!nextPacket) {
    fail("the failed queue pair does not tell its packet number");
    return;
  }
  uint64_t received = 0;
  {
    const QueuesLock queues(qp_);
    for (Cq* cq : {qp_.sendCq, qp_.receiveCq}) {
      drain(*cq);
      signalReady(*cq);
    }
    const std::lock_guard guard(qp_.lock);
    qp_.isFrozen = true;
    received = qp_.core.received();
    // Paper: SHIFT §4.3.2, step 1
    qp_.core.moveReceives();
    postHeldReceives(qp_);
  }
  isStated_ = true;
  state(
      key("f", epoch_),
      std::to_string(received) + ":" + std::to_string(*nextPacket));
  if (peerProgress_) {
    finishSwitch();
  }
}

void Session::peerFenced(std::string_view value) {
  std::array<uint64_t, 2> numbers{};
  if (!parseNumbers(value, numbers) || numbers[1] > kPacketMask) {
    // It has ended, or an error of its own ended its queue pair.
    isPeerRefusing_ = true;
    qp_.isReady = qp_.hasPeer = false;
    if (isSwitching_) {
      fail("the peer has given up");
    }
    return;
  }
  peerProgress_ = {numbers[0], static_cast<uint32_t>(numbers[1])};
  if (!isSwitching_) {
    beginSwitch("the peer has fenced its end");
  } else if (isStated_) {
    finishSwitch();
  }
}

void Session::finishSwitch() {
  std::string_view problem;
  {
    const QueuesLock queues(qp_);
    const std::lock_guard guard(qp_.lock);
    std::vector<SendRequest> completed;
    problem = qp_.core.applyProgress(*peerProgress_, completed);
    if (problem.empty()) {
      for (const SendRequest& request : completed) {
        addReady(qp_, request, IBV_WC_SUCCESS);
      }
      // Paper: SHIFT §4.3.2, step 3
      qp_.core.endSwitch(ownPacket_ + 1);
      qp_.isFrozen = qp_.isSwitching = qp_.isReady = false;
      qp_.spoilsNext = qp_.isSpoiled = false;
      qp_.firstError.reset();
      qp_.remoteRegions.clear();
      qp_.missingKey.reset();
      qp_.core.releaseSends();
      postHeldSends(qp_);
      postHeldReceives(qp_);
      signalReady(*qp_.sendCq);
    }
  }
  if (!problem.empty()) {
    fail(std::string(problem));
    return;
  }
  const std::chrono::duration<double, std::milli> took =
      Clock::now() - switchSince_;
  say("queue pair %u of %s now uses %s (%s; switched in %.1f ms)",
      qp_.app->qp_num,
      qp_.device->name.c_str(),
      (qp_.core.active() == 0 ? qp_.device->name : qp_.device->backupName)
          .c_str(),
      reason_,
      took.count());
  settle();
}

// Prepares for the next switch.
void Session::settle() {
  ++epoch_;
  round_ = try_ = 0;
  isSwitching_ = isReturning_ = isDrainedStated_ = isPeerDrained_ = false;
  peerProgress_.reset();
  keyAsked_.reset();
  lastProgress_ = Clock::now();
  build_ = Build::kPause;
  deadline_ = Clock::now();
  ask(peerKey("f", epoch_), &Session::peerFenced);
}

void Session::tickSwitch(Clock::time_point now) {
  if (!isStated_ && now - switchSince_ > runtime().fenceLimit) {
    fail("the device does not answer");
  } else if (now - switchSince_ > kAnswerLimit) {
    fail("the peer does not answer");
  } else if (!runtime().isUsable()) {
    fail("the store cannot be reached");
  }
}

// Paper: SHIFT §4.2, memory region attributes are looked up on demand
void Session::lookUpKey(uint32_t missing) {
  if (keyAsked_ == missing) {
    if (Clock::now() - switchSince_ > kAnswerLimit) {
      fail("the peer has not announced memory that a request uses");
    }
    return;
  }
  keyAsked_ = missing;
  switchSince_ = Clock::now();
  ask("mr." + peerAddress_ + "." + std::to_string(*keyAsked_),
      &Session::regionKnown);
}

void Session::regionKnown(std::string_view value) {
  std::array<uint64_t, 4> numbers{};
  if (!parseNumbers(value, numbers) || numbers[0] > UINT32_MAX ||
      numbers[1] > UINT32_MAX || keyAsked_ != numbers[0]) {
    return;
  }
  const auto original = static_cast<uint32_t>(numbers[0]);
  const RemoteRegion region{
      static_cast<uint32_t>(numbers[1]), numbers[2], numbers[3]};
  const std::lock_guard guard(qp_.lock);
  qp_.remoteRegions[original] = region;
  if (qp_.missingKey == original) {
    qp_.missingKey.reset();
    if (!isSwitching_ && !isReturning_) {
      qp_.core.releaseSends();
      postHeldSends(qp_);
    }
  }
}

void Session::fail(const std::string& reason) {
  if (isOver()) {
    return;
  }
  say("queue pair %u of %s fails (%s): %s",
      qp_.app->qp_num,
      qp_.device->name.c_str(),
      reason_,
      reason.c_str());
  giveUp(look().error);
}

void Session::takeDown() {
  if (!isOver()) {
    giveUp(IBV_WC_WR_FLUSH_ERR);
  }
}

void Session::giveUp(ibv_wc_status status) {
  isFailing_ = true;
  isSwitching_ = isReturning_ = false;
  failSince_ = Clock::now();
  failStatus_ = status;
  {
    const std::lock_guard guard(qp_.lock);
    qp_.core.hold();
    qp_.isSwitching = true; // the outcome of the requests is decided
  }
  refuse();
  // The application may use its memory as soon as it has the errors.
  aside(
      [first = PathControl(qp_, 0), second = PathControl(qp_, 1)] {
        first.fence();
        second.fence();
      },
      [this] { tellFailure(); },
      true);
}

void Session::tellFailure() {
  if (!std::exchange(isFailing_, false)) {
    return;
  }
  isEnded_ = true;
  const QueuesLock queues(qp_);
  const std::lock_guard guard(qp_.lock);
  failAll(qp_, failStatus_);
}

// The peer must not wait for this end.
void Session::refuse() {
  if (!peer_.empty()) {
    runtime().store.put(key("f", isStated_ ? epoch_ + 1 : epoch_), "no");
  }
}

void Session::end() {
  if (isPublished_) {
    for (const std::string& address : addressesOf(qp_.device->app, 1)) {
      runtime().store.remove(
          "qp." + address + "." + std::to_string(qp_.app->qp_num));
    }
  }
  if (!isOver()) {
    refuse();
  }
  for (const auto* names : {&stated_, &oldStated_}) {
    for (const std::string& name : *names) {
      runtime().store.remove(name);
    }
  }
  isEnded_ = true;
  isFailing_ = false;
  qp_.isReady = qp_.hasPeer = false;
  calls_.clear();
  if (epoch_ > 1) {
    // Its queue on the default device may still hold requests of this library.
    aside(
        [first = PathControl(qp_, 0), second = PathControl(qp_, 1)] {
          first.fence();
          second.fence();
        },
        [] {},
        true);
  }
}

// ---- The return. Paper: SHIFT §4.3.3, seamless recovery with ordering ----

void Session::tickReturn(Clock::time_point now, const Seen& seen) {
  if (qp_.core.active() == 0 || isSwitching_ || isOver()) {
    return;
  }
  if (isReturning_) {
    tickDraining(now);
    return;
  }
  if (name_ < peer_ && build_ == Build::kReady &&
      now - readySince_ > runtime().holdDown && now >= returnSince_ &&
      !seen.missingKey && !isPeerRefusing_) {
    state(key("w", epoch_, try_), "1");
    ask(peerKey("d", epoch_, try_), &Session::peerDrained);
    startReturn();
  }
}

void Session::tickDraining(Clock::time_point now) {
  const bool isLeader = name_ < peer_;
  const auto drainLimit =
      kDrainLimit * (1 << std::min<int64_t>(try_, kDrainDoublings));
  bool isDrained = false;
  {
    const QueuesLock queues(qp_);
    drain(*qp_.sendCq);
    signalReady(*qp_.sendCq);
    const std::lock_guard guard(qp_.lock);
    isDrained = qp_.core.isDrained();
  }
  if (isDrained && isLeader && isPeerDrained_) {
    beginSwitch("the default path works again");
  } else if (isDrained && !isLeader && !isDrainedStated_) {
    isDrainedStated_ = true;
    state(key("d", epoch_, try_), "1");
  } else if (isLeader && now - returnSince_ > drainLimit) {
    // The receiver may be waiting for what is held here.
    state(key("x", epoch_, try_), "1");
    cancelReturn();
  }
}

void Session::returnWanted(std::string_view) {
  if (!isSwitching_ && qp_.core.active() == 1) {
    ask(peerKey("x", epoch_, try_), &Session::returnCancelled);
    startReturn();
  }
}

void Session::startReturn() {
  isReturning_ = true;
  isDrainedStated_ = isPeerDrained_ = false;
  returnSince_ = Clock::now();
  const std::lock_guard guard(qp_.lock);
  qp_.core.beginReturn();
  // Beyond the paper: a fence of our own, so that the return needs no signaled
  // request of the application, which may be waiting for the peer.
  if (!qp_.core.isIdle()) {
    qp_.core.pushFence();
    postHeldSends(qp_);
  }
  qp_.core.fencePosted();
}

void Session::peerDrained(std::string_view) {
  isPeerDrained_ = true;
}

void Session::returnCancelled(std::string_view) {
  if (isReturning_ && !isSwitching_) {
    cancelReturn();
    ask(peerKey("w", epoch_, try_), &Session::returnWanted);
  }
}

void Session::cancelReturn() {
  isReturning_ = false;
  ++try_;
  const int64_t doublings =
      std::clamp<int64_t>(try_ - kSoonReturns, 0, kReturnDoublings);
  returnSince_ = Clock::now() + 1s * (1 << doublings);
  const std::lock_guard guard(qp_.lock);
  qp_.core.cancelReturn();
  postHeldSends(qp_);
}

} // namespace resilient::shift
