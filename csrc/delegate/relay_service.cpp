#include "delegate/relay_service.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "base/planted_bugs.h"
#include "delegate/link_host.h"
#include "delegate/peer_link.h"
#include "path/uplink.h"

namespace resilient {
namespace {

// Beyond what pairs of ranks need: it bounds what a faulty member makes us
// keep.
constexpr size_t kMaxFlows = 16u << 10;
// A flow that is not accepted by then, and a message that its target has not
// taken by then, end. Its sender has given up the flow long before.
constexpr Nanos kTakesAtMost = std::chrono::seconds(10);
constexpr Nanos kLookEvery = std::chrono::seconds(1);
// A sender hears what has left, or that nothing waits any more. This is a part
// of what may wait.
constexpr uint64_t kTellEveryBytes = 64u << 10;
// While a connection to the far end of a new flow is being made.
constexpr Nanos kLookSoon = std::chrono::milliseconds(50);

} // namespace

// A message on its way in.
struct RelayService::Held : RecvOp {
  Held(RelayService& s, const FrameHeader& header, Uid sender)
      : service(s),
        cls(header.trafficClass),
        order(header.order),
        from(sender) {
    content = std::make_unique_for_overwrite<std::byte[]>(header.totalBytes);
    data = content.get();
    bytes = header.totalBytes;
    s.heldBytes_ += bytes;
    s.counters_.heldMaxBytes = std::max(s.counters_.heldMaxBytes, s.heldBytes_);
  }
  ~Held() override {
    service.heldBytes_ -= bytes;
  }
  void finished(const Status& status) override {
    service.arrived(*this, status);
  }

  RelayService& service;
  const TrafficClass cls;
  const uint64_t order; // of what travels in it
  const Uid from;
  std::list<Held>::iterator self;
  std::unique_ptr<std::byte[]> content;
};

// The same on its way out.
struct RelayService::Forward : SendOp {
  explicit Forward(RelayService& s) : service(s) {}
  ~Forward() override {
    service.heldBytes_ -= RESILIENT_PLANTED(uncountedForwards) ? 0 : bytes;
  }
  void finished(const Status& status) override {
    RelayService& owner = service;
    PeerLink& to = *target;
    const RelayFlow of = flow;
    owner.forwards_.erase(self); // destroys this
    to.dropInterest();
    if (!status.ok()) {
      if (const auto found = owner.flows_.find(of);
          found != owner.flows_.end()) {
        owner.endBoth(found, status.message());
      }
    }
  }

  void handedOut() override {
    service.onHandedOut(*this);
  }

  RelayService& service;
  PeerLink* target = nullptr;
  RelayFlow flow;
  bool fromOpener = true;
  TimePoint since{};
  std::list<Forward>::iterator self;
  std::unique_ptr<std::byte[]> content;
};

RelayService::RelayService(LinkHost& host) : host_(host) {}

RelayService::~RelayService() {
  close();
}

// A note goes over connections only. An end without one sends nothing over us,
// and its note would keep us from leaving.
void RelayService::leave() {
  leaving_ = true;
  for (auto& [flow, state] : flows_) {
    for (const bool opener : {true, false}) {
      PeerLink* const end = host_.linkTo(opener ? flow.opener : flow.other);
      if (end != nullptr && end->channel().takesChunksDirectly() &&
          (opener || state.announced)) {
        tell(flow, opener, state.passed[opener]);
      }
    }
  }
}

void RelayService::close() {
  host_.loop().cancel(std::exchange(timer_, 0));
  host_.loop().cancel(std::exchange(tellTimer_, 0));
  for (Held& held : held_) {
    host_.mailbox().cancel(&held, "the receiver is leaving");
  }
  held_.clear();
  for (Forward& forward : forwards_) {
    forward.target->channel().cancelSend(
        &forward, "the relay is leaving", host_.loop().now());
  }
  forwards_.clear();
  flows_.clear();
}

// --- messages

// Whether the flow is known shows when the message is here: then its header
// can be read.
RecvOp* RelayService::receive(const FrameHeader& header, Channel& channel) {
  PeerLink* const from = host_.linkOf(channel);
  const auto most = static_cast<uint64_t>(host_.options().relay_bytes);
  if (from == nullptr || header.totalBytes < kRelayHeaderBytes ||
      header.totalBytes > most ||
      (heldBytes_ > most - header.totalBytes &&
       !RESILIENT_PLANTED(forgetRelayLimit))) {
    ++counters_.refused;
    return nullptr;
  }
  Held& held = held_.emplace_back(*this, header, from->uid());
  held.self = std::prev(held_.end());
  held.key.group = kRelayGroup;
  held.source = &channel;
  return &held;
}

void RelayService::arrived(Held& held, const Status& status) {
  const auto done = held.self;
  PeerLink* const from = host_.linkTo(held.from);
  if (!status.ok() || from == nullptr) {
    held_.erase(done);
    return; // its sender has given it up, or is gone
  }
  RelayHeader header;
  std::span<const std::byte> frame;
  const Status read =
      decodeRelay({held.content.get(), held.bytes}, header, frame);
  if (!read.ok()) {
    ++counters_.refused;
    from->say(
        LogLevel::kWarning, "from " + from->describe() + ": " + read.message());
  } else if (header.hop == RelayHop::kToRelay) {
    passOn(*from, header, held);
  } else {
    const Uid& self = host_.self().uid;
    const RelayFlow& flow = header.flow;
    PeerLink* const source =
        header.target() == self ? host_.linkTo(header.source()) : nullptr;
    if (source == nullptr ||
        !source->relays().onFrame(held.from, header, frame)) {
      ++counters_.refused;
      answer(
          *from,
          flow,
          !header.fromOpener,
          RelayHop::kToRelay,
          "the far end does not know the flow");
    }
  }
  held_.erase(done);
}

// The content moves from one message to the other; only the hop changes.
void RelayService::passOn(
    PeerLink& from,
    const RelayHeader& header,
    Held& held) {
  const RelayFlow& flow = header.flow;
  const auto found = flows_.find(flow);
  PeerLink* const target = host_.linkTo(header.target());
  if (found == flows_.end() || header.source() != from.uid() ||
      target == nullptr || !target->usable()) {
    ++counters_.refused;
    answer(
        from,
        flow,
        !header.fromOpener,
        RelayHop::kFromRelay,
        "the relay does not know the flow");
    return;
  }
  accepted(found);
  RelayHeader onward = header;
  onward.hop = RelayHop::kFromRelay;
  encodeRelay(
      onward,
      std::span<std::byte, kRelayHeaderBytes>(
          held.content.get(), kRelayHeaderBytes));
  Forward& forward = forwards_.emplace_back(*this);
  forward.self = std::prev(forwards_.end());
  forward.target = target;
  forward.flow = flow;
  forward.fromOpener = header.fromOpener;
  forward.since = host_.loop().now();
  forward.content = std::move(held.content);
  forward.data = forward.content.get();
  forward.bytes = held.bytes;
  if (!RESILIENT_PLANTED(uncountedForwards)) {
    heldBytes_ += forward.bytes; // held's leave with it
  }
  forward.neverCopied = true;
  forward.key.group = kRelayGroup;
  forward.key.order = held.order;
  forward.burstBytes = header.burstBytes;
  forward.sourceRank = from.globalRank();
  forward.trafficClass = held.cls;
  ++counters_.messages;
  counters_.bytes += forward.bytes;
  found->second.passed[header.fromOpener].waitingBytes += forward.bytes;
  target->addInterest();
  target->channel().send(&forward, host_.loop().now());
  look();
}

// The core is at work: the notes leave later in this turn.
void RelayService::onHandedOut(const Forward& forward) {
  const auto found = flows_.find(forward.flow);
  if (found == flows_.end()) {
    return;
  }
  Flow::Passed& passed = found->second.passed[forward.fromOpener];
  passed.waitingBytes -= forward.bytes;
  passed.bytes += forward.bytes;
  if (untold_.empty() || untold_.back() != forward.flow) {
    untold_.push_back(forward.flow);
  }
  if (tellTimer_ == 0) {
    tellTimer_ = host_.loop().after(Nanos(0), [this] {
      tellTimer_ = 0;
      tell();
    });
  }
}

// Tells the senders what has left, so that they can give more.
void RelayService::tell() {
  for (const RelayFlow& flow : std::exchange(untold_, {})) {
    const auto found = flows_.find(flow);
    if (found == flows_.end()) {
      continue;
    }
    for (const bool fromOpener : {true, false}) {
      Flow::Passed& passed = found->second.passed[fromOpener];
      const uint64_t untold = passed.bytes - passed.toldBytes;
      if (untold != 0 && !RESILIENT_PLANTED(neverTellPassed) &&
          (untold >= kTellEveryBytes || passed.waitingBytes == 0)) {
        tell(flow, fromOpener, passed);
      }
    }
  }
}

void RelayService::tell(
    const RelayFlow& flow,
    bool fromOpener,
    Flow::Passed& passed) {
  PeerLink* const to = host_.linkTo(fromOpener ? flow.opener : flow.other);
  if (to == nullptr || !to->usable()) {
    return;
  }
  passed.toldBytes = passed.bytes;
  RelayNote note;
  note.what = RelayNote::What::kPassed;
  note.hop = RelayHop::kFromRelay;
  note.fromOpener = !fromOpener;
  note.flow = flow;
  note.passedBytes = passed.bytes;
  note.busy = leaving_;
  const PeerLink* const target =
      host_.linkTo(fromOpener ? flow.other : flow.opener);
  if (target != nullptr && target->uplink() != nullptr) {
    const Uplink& uplink = *target->uplink();
    note.bytesPerS = static_cast<uint64_t>(uplink.bytesPerS());
    note.busy = note.busy || uplink.needsItself(host_.loop().now());
  }
  to->channel().sendControl(encode(note), /*direct=*/true);
}

// --- notes

void RelayService::onNote(PeerLink& from, const RelayNote& note) {
  if (note.hop == RelayHop::kToRelay) {
    pass(from, note);
    return;
  }
  const RelayFlow& flow = note.flow;
  const Uid& self = host_.self().uid;
  const Uid& source = note.source();
  const bool forUs = note.target() == self;
  PeerLink* const link = forUs ? host_.linkTo(source) : nullptr;
  const std::string why = link == nullptr
      ? "the far end does not know this rank, or not yet"
      : link->relays().onNote(from.uid(), note);
  if (!why.empty() && note.what != RelayNote::What::kClose &&
      note.what != RelayNote::What::kPassed) {
    counters_.refused += note.what == RelayNote::What::kOpen;
    answer(from, flow, !note.fromOpener, RelayHop::kToRelay, why);
  }
}

// Why the note is not passed on; empty: it is.
std::string RelayService::whyNot(PeerLink& from, const RelayNote& note) const {
  const RelayFlow& flow = note.flow;
  const Uid& source = note.source();
  if (host_.options().relay == "off") {
    return "it does not relay (TORCH_RESILIENT_RELAY=off)";
  }
  if (source != from.uid()) {
    return "the flow is another rank's";
  }
  if (note.what == RelayNote::What::kPassed) {
    return "only a relay tells what it has passed on";
  }
  if (note.what == RelayNote::What::kOpen && !note.fromOpener) {
    return "a flow is opened by its opener only";
  }
  PeerLink* const target = host_.linkTo(note.target());
  if (target == nullptr) {
    return "it does not know the far end, or not yet";
  }
  if (!target->usable()) {
    return target->describe() + ' ' + target->closedBecause().message();
  }
  const bool isNew = !flows_.contains(flow);
  if (isNew && note.what != RelayNote::What::kOpen) {
    return "it does not know the flow";
  }
  if (isNew && leaving_) {
    return "it is leaving";
  }
  if (isNew && flows_.size() >= kMaxFlows) {
    return "it has too many flows";
  }
  return "";
}

void RelayService::pass(PeerLink& from, const RelayNote& note) {
  const std::string why = whyNot(from, note);
  if (!why.empty()) {
    if (note.what != RelayNote::What::kClose) {
      ++counters_.refused;
      answer(from, note.flow, !note.fromOpener, RelayHop::kFromRelay, why);
    }
    return;
  }
  if (note.what == RelayNote::What::kOpen) {
    open(note);
  }
  const auto flow = flows_.find(note.flow);
  if (note.what == RelayNote::What::kAccept) {
    accepted(flow);
  }
  // The far end need not know of a flow that was not announced.
  if (note.what != RelayNote::What::kOpen &&
      (!note.fromOpener || flow->second.announced)) {
    RelayNote onward = note;
    onward.hop = RelayHop::kFromRelay;
    host_.linkTo(note.target())
        ->channel()
        .sendControl(encode(onward), /*direct=*/true);
  }
  if (note.what == RelayNote::What::kClose) {
    end(flow);
  }
  look();
}

// A word of our own about a flow, as if it came from its other end.
void RelayService::answer(
    PeerLink& to,
    const RelayFlow& flow,
    bool fromOpener,
    RelayHop hop,
    const std::string& why) {
  RelayNote note;
  note.what = RelayNote::What::kClose;
  note.hop = hop;
  note.fromOpener = fromOpener;
  note.flow = flow;
  note.text = why;
  to.channel().sendControl(encode(note), /*direct=*/true);
}

// --- flows

void RelayService::open(const RelayNote& note) {
  const RelayFlow& flow = note.flow;
  const auto [at, isNew] = flows_.try_emplace(flow);
  if (isNew) {
    at->second.key = note.key;
    at->second.openedAt = host_.loop().now();
    setInterest(flow, true);
    announce(at);
    if (!at->second.announced) {
      host_.loop().cancel(std::exchange(timer_, 0)); // look() sooner
    }
  }
}

// Once there is a connection to the other end. A note that waited for one in
// the channel could not be taken back when the flow ends, and would hold up the
// end of this process.
void RelayService::announce(Flows::iterator flow) {
  PeerLink* const target = host_.linkTo(flow->first.other);
  if (!flow->second.announced && target != nullptr && target->usable() &&
      target->channel().takesChunksDirectly()) {
    RelayNote note;
    note.what = RelayNote::What::kOpen;
    note.hop = RelayHop::kFromRelay;
    note.flow = flow->first;
    note.key = flow->second.key;
    target->channel().sendControl(encode(note), /*direct=*/true);
    flow->second.announced = true;
    if (leaving_) {
      tell(flow->first, /*fromOpener=*/false, flow->second.passed[false]);
    }
  }
}

void RelayService::accepted(Flows::iterator flow) {
  if (!std::exchange(flow->second.accepted, true)) {
    setInterest(flow->first, false);
  }
}

void RelayService::end(Flows::iterator flow) {
  accepted(flow);
  const RelayFlow of = flow->first;
  flows_.erase(flow);
  for (auto at = forwards_.begin(); at != forwards_.end();) {
    const auto next = std::next(at);
    if (at->flow == of) {
      PeerLink& target = *at->target;
      heldBytes_ += RESILIENT_PLANTED(keepRelayCredit) ? at->bytes : 0;
      target.channel().cancelSend(&*at, "its flow is over", host_.loop().now());
      forwards_.erase(at);
      target.dropInterest();
    }
    at = next;
  }
}

void RelayService::endBoth(Flows::iterator flow, const std::string& why) {
  const RelayFlow of = flow->first;
  const bool announced = flow->second.announced;
  end(flow);
  for (const bool toOpener : {true, false}) {
    PeerLink* const to = host_.linkTo(toOpener ? of.opener : of.other);
    if (to != nullptr && to->usable() && (toOpener || announced)) {
      answer(*to, of, !toOpener, RelayHop::kFromRelay, why);
    }
  }
}

// The way to the target, which nobody else may need.
void RelayService::setInterest(const RelayFlow& flow, bool needed) {
  if (PeerLink* const target = host_.linkTo(flow.other)) {
    needed ? target->addInterest() : target->dropInterest();
  }
}

void RelayService::onLinkClosed(PeerLink& link) {
  std::vector<RelayFlow> over;
  for (const auto& [flow, state] : flows_) {
    if (flow.opener == link.uid() || flow.other == link.uid()) {
      over.push_back(flow);
    }
  }
  for (const RelayFlow& flow : over) {
    if (const auto found = flows_.find(flow); found != flows_.end()) {
      endBoth(found, link.describe() + ' ' + link.closedBecause().message());
    }
  }
}

// Ends what takes too long, and comes back while there may be more of it.
void RelayService::look() {
  if (timer_ != 0) {
    return;
  }
  const bool soon = std::ranges::any_of(
      flows_, [](const auto& each) { return !each.second.announced; });
  timer_ = host_.loop().after(soon ? kLookSoon : kLookEvery, [this] {
    timer_ = 0;
    const TimePoint now = host_.loop().now();
    std::vector<RelayFlow> late;
    bool more = !forwards_.empty();
    for (const Forward& forward : forwards_) {
      if (now - forward.since > kTakesAtMost) {
        late.push_back(forward.flow);
      }
    }
    for (auto at = flows_.begin(); at != flows_.end(); ++at) {
      announce(at);
      const auto& [flow, state] = *at;
      more = more || !state.accepted;
      if (!state.accepted && now - state.openedAt > kTakesAtMost) {
        late.push_back(flow);
      }
    }
    for (const RelayFlow& flow : late) {
      if (const auto found = flows_.find(flow); found != flows_.end()) {
        endBoth(found, "the relay could not reach the far end");
      }
    }
    if (more) {
      look();
    }
  });
}

uint64_t RelayService::countHeldBytes() const {
  const auto add = [](uint64_t sum, const auto& each) {
    return sum + each.bytes;
  };
  return std::accumulate(
      forwards_.begin(),
      forwards_.end(),
      std::accumulate(held_.begin(), held_.end(), uint64_t{0}, add),
      add);
}

RelayCounters RelayService::counters() const {
  RelayCounters now = counters_;
  now.flows = flows_.size();
  now.heldBytes = heldBytes_;
  return now;
}

} // namespace resilient
