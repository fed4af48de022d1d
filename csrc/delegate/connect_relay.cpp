#include "delegate/connect_relay.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "base/planted_bugs.h"
#include "delegate/peer_link.h"
#include "path/uplink.h"

namespace resilient {
namespace {

// The peer is first sought directly.
constexpr Nanos kDirectFirst = std::chrono::seconds(1);
// Between two attempts to find a relay.
constexpr Nanos kLookEvery = std::chrono::seconds(1);
// Between two looks at the goodput, while there is always more to send.
constexpr Nanos kMeasureEvery = std::chrono::milliseconds(50);
// Bytes that wait at relays move when their number changes, and must not count
// for much.
constexpr Nanos kMeasureFor = std::chrono::seconds(1);
// A trial may take the best way from a stream for a second or two.
constexpr Nanos kFirstTrial = std::chrono::seconds(10);
// A relay costs processor time on another host: it must add this much.
constexpr double kWorth = 1.05;
constexpr int kMaxDoublings = 6;
// A path that has worked for less counts as a failure.
constexpr Nanos kWorthTrying = std::chrono::seconds(10);
// Flows that the peer may have open to us.
constexpr size_t kMaxFromPeer = 64;
// The memory of a relay is for many flows.
constexpr uint64_t kFlowShare = 8;

} // namespace

RelayConnector::~RelayConnector() {
  link_.loop().cancel(timer_);
  link_.loop().cancel(lookTimer_);
}

// --- opening

bool RelayConnector::wanted() const {
  const std::string& option = link_.host().options().relay;
  if (option == "off" || !link_.address() || !link_.usable() ||
      link_.leaving() || link_.sameHost()) {
    return false;
  }
  const std::string& ours = link_.host().self().site;
  return option == "failover" ||
      (!ours.empty() && link_.address()->site != ours);
}

// A send that has ended by a copy may still wait for a way.
bool RelayConnector::matters() const {
  return link_.needed() || !link_.channel().drained();
}

bool RelayConnector::shares() const {
  return link_.host().options().relay == "auto";
}

size_t RelayConnector::count() const {
  return shares() ? static_cast<size_t>(link_.host().options().relays_per_peer)
                  : 1;
}

// Those that are busy do not count, up to as many more.
size_t RelayConnector::opened() const {
  size_t idle = 0, busy = 0;
  for (const Flow& flow : flows_) {
    if (flow.path->opener()) {
      ++(flow.path->busy() ? busy : idle);
    }
  }
  return idle + (busy > count() ? busy - count() : 0);
}

void RelayConnector::offer() {
  if (!wanted() || (link_.state() != Link::State::kUp && !matters())) {
    return;
  }
  const TimePoint now = link_.loop().now();
  size_t open = opened();
  for (const Uid& relay : link_.host().relaysTo(link_)) {
    if (open >= count()) {
      return;
    }
    const bool used = std::ranges::any_of(flows_, [&](const Flow& flow) {
      return flow.path->opener() && flow.relay == relay;
    });
    if (!used && relays_[relay].notBefore <= now) {
      open += this->open(relay);
    }
  }
  if (open < count()) {
    lookAgain(kLookEvery);
  }
}

void RelayConnector::onNeeded() {
  if (wanted() && opened() < count()) {
    lookAgain(
        link_.state() == Link::State::kUnconnected ? kDirectFirst : kLookEvery);
  }
}

// Only while the peer matters: an idle job has no timers.
void RelayConnector::lookAgain(Nanos delay) {
  if (timer_ == 0) {
    timer_ = link_.loop().after(delay, [this] {
      timer_ = 0;
      if (matters()) {
        offer();
      }
    });
  }
}

// False if that rank is gone.
bool RelayConnector::open(const Uid& relay) {
  PeerLink* const to = link_.host().linkTo(relay);
  if (to == nullptr || !to->usable()) {
    return false;
  }
  RelayFlow flow;
  flow.opener = link_.host().self().uid;
  flow.other = link_.uid();
  flow.number = link_.host().nextPathId();
  std::unique_ptr<RelaySeal> seal;
  if (link_.host().encryption() != Encryption::kOff) {
    std::string why;
    seal = RelaySeal::make(flow, /*opener=*/true, link_.secret(), why);
    if (!seal) {
      relays_[relay].lastError = why;
      return false;
    }
  }
  add(relay, flow, /*opener=*/true, std::move(seal));
  return true;
}

void RelayConnector::add(
    const Uid& relay,
    const RelayFlow& flow,
    bool opener,
    std::unique_ptr<RelaySeal> seal) {
  PeerLink* const to = link_.host().linkTo(relay);
  const EngineOptions& options = link_.host().options();
  RelayPathConfig config;
  config.flow = flow;
  config.opener = opener;
  config.maxUnderWayBytes =
      static_cast<uint64_t>(options.relay_bytes) / kFlowShare;
  config.suspectAfter = fromSeconds(options.suspect_after_s);
  config.relay = to->describe();
  config.relayRank = to->globalRank();
  config.ownRank = link_.host().globalRank();
  config.relayHost = to->address() ? to->address()->hostName : "";
  to->addInterest();
  auto path = std::make_unique<RelayPath>(
      link_.loop(),
      link_.channel(),
      link_.host().nextPathId(),
      to->channel(),
      std::move(config),
      link_.pathOwner(),
      std::move(seal));
  flows_.push_back({path.get(), relay, {}, true});
  link_.addPath(std::move(path));
}

// The relay is needed until the flow is open; afterwards by what is under way.
void RelayConnector::settle(Flow& flow) {
  if (std::exchange(flow.seeksRelay, false)) {
    link_.host().linkTo(flow.relay)->dropInterest();
  }
}

RelayConnector::Flow* RelayConnector::find(const RelayFlow& flow) {
  const auto at = std::ranges::find_if(
      flows_, [&](const Flow& f) { return f.path->flow() == flow; });
  return at == flows_.end() ? nullptr : &*at;
}

const RelayPath* RelayConnector::pathOf(const RelayFlow& flow) const {
  const auto at = std::ranges::find_if(
      flows_, [&](const Flow& f) { return f.path->flow() == flow; });
  return at == flows_.end() ? nullptr : at->path;
}

// --- what comes over a relay

std::string RelayConnector::onNote(const Uid& relay, const RelayNote& note) {
  if (Flow* const flow = find(note.flow)) {
    // Its own relay alone may speak about it; another one says nothing of it.
    if (flow->relay == relay && note.fromOpener != flow->path->opener()) {
      flow->path->onNote(note);
    }
    return "";
  }
  if (note.what != RelayNote::What::kOpen) {
    return "the far end does not know the flow";
  }
  if (!note.fromOpener || link_.host().options().relay == "off") {
    return "the far end uses no relays (TORCH_RESILIENT_RELAY=off)";
  }
  if (!link_.usable() || link_.leaving() || !link_.address()) {
    return "the far end does not know this rank, or not yet";
  }
  if (flows_.size() >= kMaxFromPeer) {
    return "the far end has too many flows";
  }
  std::unique_ptr<RelaySeal> seal;
  if (const std::string why = agree(note, seal); !why.empty()) {
    return why;
  }
  add(relay, note.flow, /*opener=*/false, std::move(seal));
  onPathUse(*flows_.back().path); // the answer is on its way
  return "";
}

// Both ends seal, or neither does.
std::string RelayConnector::agree(
    const RelayNote& note,
    std::unique_ptr<RelaySeal>& seal) const {
  const bool encrypts = link_.host().encryption() != Encryption::kOff;
  const bool wanted = note.key != RelayKey();
  if (encrypts != wanted) {
    return encrypts ? "the far end takes encrypted frames only"
                    : "the far end does not encrypt";
  }
  if (!encrypts) {
    return "";
  }
  const auto secret =
      link_.host().secretOf(std::bit_cast<KeyId>(note.key.secret));
  if (!secret) {
    return "the far end does not know the secret of this rank";
  }
  std::string why;
  seal = RelaySeal::make(note.flow, /*opener=*/false, *secret, why);
  return seal ? seal->agree(note.key, link_.loop().now()).message() : why;
}

bool RelayConnector::onFrame(
    const Uid& relay,
    const RelayHeader& header,
    std::span<const std::byte> frame) {
  Flow* flow = find(header.flow);
  if (RESILIENT_PLANTED(anyFlowNumber) && flow == nullptr) {
    const auto other = std::ranges::find_if(flows_, [&](const Flow& f) {
      return f.relay == relay && f.path->flow().opener == header.flow.opener;
    });
    flow = other == flows_.end() ? nullptr : &*other;
  }
  if (flow == nullptr || flow->relay != relay ||
      header.fromOpener == flow->path->opener()) {
    return false;
  }
  flow->path->onFrame(header, frame);
  return true;
}

void RelayConnector::onRelayClosed(const Uid& relay, const std::string& why) {
  for (size_t i = 0; i < flows_.size();) {
    RelayPath* const path = flows_[i].path;
    if (flows_[i].relay == relay) {
      path->close(Status(StatusCode::kNetwork, why)); // removes it
    } else {
      ++i;
    }
  }
}

// --- paths

bool RelayConnector::usable() const {
  return std::ranges::any_of(
      flows_, [](const Flow& flow) { return flow.path->usable(); });
}

std::vector<ConnectionView> RelayConnector::views(TimePoint now) const {
  std::vector<ConnectionView> all;
  for (const Flow& flow : flows_) {
    if (!flow.path->proven()) {
      continue;
    }
    ConnectionView view;
    view.connected = true;
    view.suspect = flow.path->silent();
    const TimePoint answered = link_.channel().answeredUpTo(flow.path->id());
    view.answerAge = now - std::max(answered, flow.upAt);
    const double s =
        link_.channel().pathStatistics(flow.path->id()).roundTripS();
    view.roundTrip = fromSeconds(s);
    all.push_back(view);
  }
  return all;
}

void RelayConnector::ask(Nanos age) {
  const TimePoint now = link_.loop().now();
  for (const Flow& flow : flows_) {
    const TimePoint answered = link_.channel().answeredUpTo(flow.path->id());
    if (flow.path->usable() && now - std::max(answered, flow.upAt) >= age) {
      link_.channel().ping(flow.path->id());
    }
  }
}

TimePoint RelayConnector::heardAt() const {
  TimePoint at{};
  for (const Flow& flow : flows_) {
    at = std::max(at, flow.path->heardAt());
  }
  return at;
}

// Our own neighbours share the load, and all of them carry if no path of ours
// works. Those of the peer come last: what goes over them leaves by our own
// NIC, which may be why nothing else works.
uint8_t RelayConnector::classes(const Path& path, const Roles& roles) const {
  const auto flow = std::ranges::find(flows_, &path, &Flow::path);
  if (!flow->path->usable()) {
    return 0;
  }
  if (!flow->path->opener() && ownUsable()) {
    return 0;
  }
  return mayShare(*flow) && flow->helps ? kAllClasses : roles.relays;
}

// --- how many share the load

// Some path over a neighbour of ours works, as far as it is known.
bool RelayConnector::ownUsable() const {
  return std::ranges::any_of(flows_, [](const Flow& flow) {
    return flow.path->opener() && flow.path->usable();
  });
}

bool RelayConnector::mayShare(const Flow& flow) const {
  return shares() && flow.path->opener() && flow.path->usable() &&
      !flow.path->busy();
}

// A count that was found for other relays is void.
void RelayConnector::beginCount() {
  const auto most = static_cast<int>(std::ranges::count_if(
      flows_, [this](const Flow& flow) { return mayShare(flow); }));
  if (std::exchange(mayShare_, most) != most) {
    count_ = PathCount(
        {.min = 0, .max = most, .mayCost = kWorth, .leastWindow = kMeasureFor});
    count_.beginWith(most);
    count_.restUntil(link_.loop().now() + kFirstTrial);
    applyCount();
  }
}

// Those that carry the most come first.
void RelayConnector::applyCount() {
  std::vector<Flow*> all;
  for (Flow& flow : flows_) {
    flow.helps = true;
    if (mayShare(flow)) {
      all.push_back(&flow);
    }
  }
  const Channel& channel = link_.channel();
  std::ranges::sort(all, std::greater(), [&](const Flow* flow) {
    return channel.capacityBytesPerS(flow->path->id());
  });
  for (size_t i = static_cast<size_t>(count_.count()); i < all.size(); ++i) {
    all[i]->helps = false;
  }
}

void RelayConnector::onSent() {
  if (lookTimer_ == 0 && mayShare_ > 0 && link_.usable() &&
      link_.channel().backloggedByOurs()) {
    lookTimer_ = link_.loop().after(kMeasureEvery, [this] {
      lookTimer_ = 0;
      look();
    });
  }
}

// Nothing is tried under a declared limit, nor where our own paths do not work:
// then all relays are needed.
void RelayConnector::look() {
  const Channel& channel = link_.channel();
  const bool declared =
      link_.uplink() != nullptr && link_.uplink()->bytesPerS() > 0;
  const bool backlogged =
      !declared && channel.takesChunksDirectly() && channel.backloggedByOurs();
  double roundTripS = 0;
  for (const Flow& flow : flows_) {
    if (mayShare(flow)) {
      const LinkStatistics& path = channel.pathStatistics(flow.path->id());
      roundTripS = std::max(roundTripS, path.minRoundTripS());
    }
  }
  count_.onRoundTrip(fromSeconds(roundTripS));
  PathCount::View seen;
  seen.ackedBytes = channel.counters().bytesSent;
  seen.busy = std::exchange(backlogged_, backlogged) && backlogged;
  const int before = count_.count();
  if (count_.observe(seen, link_.loop().now())) {
    applyCount();
    logMessage(
        LogLevel::kDebug,
        std::to_string(count_.count()) + " relays instead of " +
            std::to_string(before) + " to " + link_.describe());
    link_.useChanged();
  }
  onSent();
}

void RelayConnector::onPathUse(Path& path) {
  auto& p = static_cast<RelayPath&>(path);
  const auto flow = std::ranges::find(flows_, &p, &Flow::path);
  const TimePoint now = link_.loop().now();
  if (p.usable() && flow->upAt == TimePoint()) {
    flow->upAt = now;
    settle(*flow);
    ++relays_[flow->relay].timesUp;
    link_.say(
        LogLevel::kInfo,
        link_.describe() + " can be reached over " + p.relay() + ", too");
    if (link_.state() == Link::State::kUnconnected) {
      link_.onConnection();
    }
  } else if (p.silent()) {
    link_.say(
        LogLevel::kWarning,
        "over " + p.relay() + " nothing comes back from " + link_.describe() +
            ": other ways take over");
  }
  link_.channel().setSuspect(p.id(), p.silent());
  beginCount();
  if (p.busy()) {
    lookAgain(std::chrono::milliseconds(1)); // for one that is not
  }
}

void RelayConnector::onPathClosed(Path& path, const Status& why) {
  auto& p = static_cast<RelayPath&>(path);
  const auto flow = std::ranges::find(flows_, &p, &Flow::path);
  const TimePoint now = link_.loop().now();
  Relay& relay = relays_[flow->relay];
  const bool wasUp = flow->upAt != TimePoint();
  relay.failures =
      wasUp && now - flow->upAt > kWorthTrying ? 0 : relay.failures;
  if (p.opener() && link_.usable()) {
    relay.notBefore =
        now + kLookEvery * (1 << std::min(relay.failures++, kMaxDoublings));
    if (wasUp || relay.lastError != why.message()) {
      link_.say(
          wasUp ? link_.levelOfLoss(why) : LogLevel::kInfo,
          "no way to " + link_.describe() + " over " + p.relay() +
              " for now: " + why.message());
    }
    lookAgain(std::chrono::milliseconds(1)); // another one, at once
  }
  relay.lastError = why.message();
  settle(*flow);
  flows_.erase(flow);
  beginCount();
}

void RelayConnector::close() {
  link_.loop().cancel(std::exchange(timer_, 0));
  link_.loop().cancel(std::exchange(lookTimer_, 0));
}

// --- for people

std::string RelayConnector::summary() const {
  std::string text;
  for (const auto& [uid, relay] : relays_) {
    const auto flow = std::ranges::find(flows_, uid, &Flow::relay);
    PeerLink* const to = link_.host().linkTo(uid);
    if (to == nullptr) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + to->describe() + ": ";
    text += flow == flows_.end() ? relay.lastError
        : flow->path->usable()   ? "works"
        : flow->path->silent()   ? "silent"
                                 : "no answer yet";
  }
  return text.empty() ? text : "over relays: " + text;
}

void RelayConnector::fillStats(PeerStats& stats) const {
  int index = 0;
  for (const Flow& flow : flows_) {
    PathStats p;
    p.index = index++;
    flow.path->fill(p);
    const bool inReserve = link_.channel().classes(flow.path->id()) == 0;
    p.state = !flow.path->proven() ? "proving"
        : flow.path->silent()      ? "suspect"
        : inReserve                ? "reserve"
                                   : "up";
    if (const auto relay = relays_.find(flow.relay); relay != relays_.end()) {
      p.reconnects = std::max<uint64_t>(relay->second.timesUp, 1) - 1;
      p.lastError = relay->second.lastError;
    }
    stats.paths.push_back(std::move(p));
  }
}

} // namespace resilient
