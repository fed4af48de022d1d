#include "transport/relay_path.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/planted_bugs.h"

namespace resilient {
namespace {

// The far end of a new flow has to answer within this time.
constexpr Nanos kAnswerWithin = std::chrono::seconds(5);
// A path that is silent for so long is given up.
constexpr Nanos kGiveUpAfter = std::chrono::seconds(2);
// An answer is late after so many round trips: the queue at the relay grows
// when somebody else begins to send.
constexpr int kRoundTrips = 3;
// The round trip of a flow that has not measured one. The first answer may come
// from the far side of the world, behind a full window at a slow relay.
constexpr Nanos kUnknownRoundTrip = std::chrono::milliseconds(200);
constexpr int kMaxPatience = 4;
// A relay that needs its uplink itself is left alone for so long, and twice as
// long each time. In between it gets a few chunks, which wait behind its own,
// and says whether it still does.
constexpr Nanos kBusyFor = std::chrono::seconds(10);
constexpr Nanos kBusyAtMost = std::chrono::minutes(10);

// Tell of frames at the latest after so many bytes, or this long.
constexpr uint64_t kTellEveryBytes = 256u << 10;
constexpr Nanos kTellAfter = std::chrono::milliseconds(5);

// Frames that may overtake a missing one. More than any window holds.
constexpr uint64_t kMaxGap = 1u << 20;

} // namespace

RelayPath::RelayPath(
    EventLoop& loop,
    Channel& channel,
    PathId id,
    Channel& toRelay,
    RelayPathConfig config,
    PathOwner& owner,
    std::unique_ptr<RelaySeal> seal)
    : Path(PathKind::kRelay, id, channel, owner),
      loop_(loop),
      toRelay_(toRelay),
      config_(std::move(config)),
      seal_(std::move(seal)),
      proven_(!config_.opener && !seal_),
      busyFor_(kBusyFor),
      startedAt_(loop.now()),
      heardAt_(loop.now()),
      progressAt_(loop.now()),
      window_(config_.maxUnderWayBytes) {
  channel_.addPath(id, loop_.now());
  channel_.setSelfAcknowledging(id, /*ordered=*/false);
  channel_.setOverRelay(id);
  channel_.setClasses(id, 0); // until its owner assigns some
  say(config_.opener ? RelayNote::What::kOpen : RelayNote::What::kAccept);
  arm();
}

RelayPath::~RelayPath() {
  if (!closed_) {
    closed_ = true;
    loop_.cancel(timer_);
    loop_.cancel(tellTimer_);
    loop_.cancel(busyTimer_);
    say(RelayNote::What::kClose, "the far end is gone");
    channel_.removePath(id(), loop_.now());
  }
  for (Part& part : parts_) {
    toRelay_.cancelSend(&part, "its path is gone", loop_.now());
  }
}

void RelayPath::say(RelayNote::What what, const std::string& text) {
  RelayNote note;
  note.what = what;
  note.fromOpener = config_.opener;
  note.flow = config_.flow;
  note.delivered = arrived_;
  if (seal_ && what <= RelayNote::What::kAccept) {
    note.key = seal_->ours();
  }
  note.text = text;
  toRelay_.sendControl(encode(note), /*direct=*/true);
}

// What the relay has not been given yet goes over another path.
void RelayPath::close(const Status& why) {
  if (closed_) {
    return;
  }
  closed_ = true;
  loop_.cancel(std::exchange(timer_, 0));
  loop_.cancel(std::exchange(tellTimer_, 0));
  loop_.cancel(std::exchange(busyTimer_, 0));
  if (RESILIENT_PLANTED(noRelayRequeue)) {
    channel_.delivered(id(), lastNumber_, loop_.now());
  }
  for (Part& part : parts_) {
    toRelay_.cancelSend(&part, why.message(), loop_.now());
  }
  parts_.clear();
  say(RelayNote::What::kClose, why.message());
  owner_.onPathClosed(*this, why); // may still ask the channel about it
  channel_.removePath(id(), loop_.now());
}

// --- sending

void RelayPath::Part::finished(const Status& status) {
  RelayPath& owner = path;
  owner.parts_.erase(self); // destroys this
  if (RESILIENT_PLANTED(relayAcknowledges) && status.ok()) {
    owner.onDelivered(std::min(owner.delivered_ + 1, owner.lastNumber_));
  }
  if (!status.ok()) {
    owner.close(Status(
        StatusCode::kNetwork,
        owner.config_.relay + " does not take frames: " + status.message()));
  }
}

size_t RelayPath::takeFrame(bool chunks) {
  const OutFrame* const f = channel_.pull(id(), loop_.now(), chunks);
  if (f == nullptr) {
    return 0;
  }
  const size_t frameBytes = kFrameHeaderBytes + f->payloadBytes;
  RelayHeader header;
  header.fromOpener = config_.opener;
  header.flow = config_.flow;
  header.delivered = arrived_;
  header.burstBytes = f->burstBytes;
  if (f->reliable) {
    header.number = ++lastNumber_;
    underWayBytes_ += frameBytes;
    if (underWay_.empty()) {
      progressAt_ = loop_.now();
    }
    underWay_.push_back({frameBytes, loop_.now()});
    arm();
  }
  Part& part = parts_.emplace_back(*this);
  part.self = std::prev(parts_.end());
  part.bytes =
      kRelayHeaderBytes + frameBytes + (seal_ ? kSealOverheadBytes : 0);
  part.content = std::make_unique_for_overwrite<std::byte[]>(part.bytes);
  givenBytes_ += part.bytes;
  atRelayBytes_ += part.bytes;
  atRelay_.push_back(
      {part.bytes, loop_.now(), atRelayBytes_ >= window_.bytes()});
  std::byte* const to = part.content.get();
  encodeRelay(
      header, std::span<std::byte, kRelayHeaderBytes>(to, kRelayHeaderBytes));
  plain_.resize(seal_ ? frameBytes : 0);
  std::byte* const frame = seal_ ? plain_.data() : to + kRelayHeaderBytes;
  std::memcpy(frame, f->header.data(), kFrameHeaderBytes);
  if (f->payloadBytes != 0) {
    std::memcpy(frame + kFrameHeaderBytes, f->payload, f->payloadBytes);
  }
  if (seal_) {
    seal_->seal(header, plain_, to + kRelayHeaderBytes, loop_.now());
  }
  part.data = to;
  part.neverCopied = true;
  part.key.group = kRelayGroup;
  part.key.order = f->order;
  part.burstBytes = f->burstBytes;
  part.sourceRank = config_.ownRank;
  part.trafficClass = f->trafficClass;
  channel_.popWritten(id()); // it has been copied
  told_ = arrived_;
  untoldBytes_ = 0;
  tellNow_ = false;
  toRelay_.send(&part, loop_.now());
  return frameBytes;
}

bool RelayPath::flush() {
  if (!closed_ && tellNow_) {
    acknowledge();
  }
  return false;
}

// The count covers the oldest frames. A round trip is that of the newest of
// them, and of its place in the window.
void RelayPath::onDelivered(uint64_t count) {
  if (count <= delivered_) {
    return; // an older message
  }
  uint64_t bytes = 0;
  UnderWay last;
  for (; delivered_ < count; ++delivered_) {
    last = underWay_.front();
    underWay_.pop_front();
    bytes += last.bytes;
  }
  const TimePoint now = loop_.now();
  const bool hadRoom = hasRoom();
  underWayBytes_ -= bytes;
  const Nanos took = now - last.at;
  roundTrip_ = roundTrip_ == Nanos(0) ? took : (7 * roundTrip_ + took) / 8;
  progressAt_ = now;
  channel_.delivered(id(), count, now);
  if (!closed_ && !hadRoom && hasRoom()) {
    owner_.onPathReady(*this);
  }
}

// The relay may pass on a later message first, an urgent one. That does not
// matter here: what counts is how much waits.
void RelayPath::onPassed(uint64_t bytes) {
  const bool hadRoom = hasRoom();
  uint64_t passed = 0;
  AtRelay last;
  while (!atRelay_.empty() &&
         givenBytes_ - atRelayBytes_ + atRelay_.front().bytes <= bytes) {
    last = atRelay_.front();
    atRelay_.pop_front();
    atRelayBytes_ -= last.bytes;
    passed += last.bytes;
  }
  if (passed != 0) {
    window_.onPassed(passed, loop_.now() - last.at, last.full);
  }
  if (!hadRoom && hasRoom()) {
    owner_.onPathReady(*this);
  }
}

void RelayPath::onBusy(bool busy) {
  if (closed_ || busy_ || RESILIENT_PLANTED(ignoreBusy)) {
    return;
  }
  if (!busy) {
    busyFor_ = kBusyFor;
    return;
  }
  busy_ = true;
  busyTimer_ = loop_.after(busyFor_, [this] {
    busyTimer_ = 0;
    busy_ = false;
    owner_.onPathUse(*this);
  });
  busyFor_ = std::min(2 * busyFor_, kBusyAtMost);
  owner_.onPathUse(*this);
}

// --- receiving

// The opener learns the other end's key with the first note from it, and tells
// that it may send.
Status RelayPath::agree(const RelayNote& note) {
  if (!seal_ || seal_->agreed()) {
    return Status();
  }
  const Status status = seal_->agree(note.key, loop_.now());
  if (status.ok()) {
    say(RelayNote::What::kDelivered);
  }
  return status;
}

void RelayPath::onHeard() {
  heardAt_ = loop_.now();
  if (!std::exchange(proven_, true)) {
    owner_.onPathUse(*this);
  }
}

void RelayPath::onNote(const RelayNote& note) {
  // An open flow does not show that the far end has our key.
  if (closed_ || (seal_ && note.what == RelayNote::What::kOpen)) {
    return;
  }
  if (note.what == RelayNote::What::kClose) {
    close(Status(StatusCode::kNetwork, note.text));
    return;
  }
  if (note.what == RelayNote::What::kPassed) { // tells nothing of the far end
    if (note.passedBytes > givenBytes_) {
      close(Status(
          StatusCode::kProtocol,
          config_.relay + " has passed on " + std::to_string(note.passedBytes) +
              " bytes of " + std::to_string(givenBytes_)));
      return;
    }
    channel_.setCapacity(id(), static_cast<double>(note.bytesPerS));
    onPassed(note.passedBytes);
    onBusy(note.busy);
    return;
  }
  if (const Status status = agree(note); !status.ok()) {
    close(status);
    return;
  }
  onHeard();
  if (note.delivered > lastNumber_) {
    close(Status(
        StatusCode::kProtocol,
        "acknowledgement of frame " + std::to_string(note.delivered) + " of " +
            std::to_string(lastNumber_)));
    return;
  }
  onDelivered(note.delivered);
  look();
}

void RelayPath::onFrame(
    const RelayHeader& header,
    std::span<const std::byte> frame) {
  if (closed_) {
    return;
  }
  Status status;
  if (seal_) {
    const auto opened = seal_->agreed()
        ? seal_->open(header, frame, loop_.now())
        : std::nullopt;
    frame = opened.value_or(std::span<const std::byte>());
    status = opened ? Status()
                    : Status(
                          StatusCode::kProtocol,
                          "a frame over " + config_.relay +
                              " that the far end has not sealed");
  }
  if (status.ok()) {
    onHeard();
    status = receive(header, frame);
  }
  if (!closed_ && !status.ok()) {
    close(status);
    return;
  }
  look();
}

// The order as at any path: what is acknowledged first, then the frame. A frame
// that comes twice (no sane relay does that) is dropped here, as the channel
// counts frames by path.
Status RelayPath::receive(
    const RelayHeader& header,
    std::span<const std::byte> frame) {
  if (header.delivered > lastNumber_) {
    return Status(
        StatusCode::kProtocol,
        "acknowledgement of frame " + std::to_string(header.delivered) +
            " of " + std::to_string(lastNumber_));
  }
  FrameHeader h;
  Status status = decodeFrame(frame.first<kFrameHeaderBytes>(), h);
  const std::span<const std::byte> payload = frame.subspan(kFrameHeaderBytes);
  if (status.ok() &&
      (payload.size() != h.payloadBytes ||
       isReliable(h.type) != (header.number != 0) ||
       header.number > arrived_ + kMaxGap)) {
    status = Status(
        StatusCode::kProtocol,
        "a frame over a relay that does not agree with its description");
  }
  if (!status.ok()) {
    return status;
  }
  onDelivered(header.delivered);
  if (closed_ ||
      (header.number != 0 &&
       (header.number <= arrived_ || !received_.insert(header.number)))) {
    return Status();
  }
  status = channel_.onHeader(id(), h, loop_.now());
  if (!status.ok()) {
    return status;
  }
  if (std::byte* const to = channel_.destination(id());
      to != nullptr && !payload.empty()) {
    std::memcpy(to, payload.data(), payload.size());
  }
  status = channel_.onPayload(id(), loop_.now());
  if (status.ok() && !closed_ && header.number != 0) {
    arrived_ = RESILIENT_PLANTED(acknowledgeOverGaps)
        ? std::max(arrived_, header.number)
        : received_.firstGap(arrived_ + 1) - 1;
    owe(frame.size(), (h.flags & kFlagAckNow) != 0);
  }
  return status;
}

// The far end waits for its buffer or its window, or will not mind a moment.
void RelayPath::owe(uint64_t bytes, bool now) {
  untoldBytes_ += bytes;
  if (now || untoldBytes_ >= kTellEveryBytes) {
    if (!std::exchange(tellNow_, true)) {
      owner_.onPathReady(*this); // leads to flush()
    }
  } else if (tellTimer_ == 0) {
    tellTimer_ = loop_.after(kTellAfter, [this] {
      tellTimer_ = 0;
      if (arrived_ != told_) {
        acknowledge();
      }
    });
  }
}

void RelayPath::acknowledge() {
  told_ = arrived_;
  untoldBytes_ = 0;
  tellNow_ = false;
  say(RelayNote::What::kDelivered);
}

// --- health

Nanos RelayPath::silenceLimit() const {
  const Nanos roundTrip =
      roundTrip_ == Nanos(0) ? kUnknownRoundTrip : roundTrip_;
  return patience_ * (2 * config_.suspectAfter + kRoundTrips * roundTrip);
}

// Three stages of doubt: a flow that nobody answers is over; frames without an
// answer make the path silent, and others take over; if it stays so, it is
// given up.
void RelayPath::look() {
  if (closed_ || (proven_ && RESILIENT_PLANTED(neverSilentRelay))) {
    return;
  }
  const TimePoint now = loop_.now();
  if (!proven_) {
    if (now - startedAt_ >= kAnswerWithin) {
      close(Status(StatusCode::kNetwork, "no answer over " + config_.relay));
      return;
    }
  } else {
    const Nanos quiet = underWay_.empty() ? Nanos(0) : now - progressAt_;
    if (quiet >= silenceLimit() + kGiveUpAfter) {
      close(Status(
          StatusCode::kNetwork,
          "nothing was answered over " + config_.relay + " for " +
              std::to_string(toSeconds(quiet)).substr(0, 4) + " s"));
      return;
    }
    const bool silent = quiet >= silenceLimit();
    if (silent != silent_) {
      if (!silent) {
        patience_ = std::min(2 * patience_, kMaxPatience);
      }
      silent_ = silent;
      owner_.onPathUse(*this);
      if (!closed_ && usable()) {
        owner_.onPathReady(*this);
      }
    }
  }
  arm();
}

// While something is owed. It fires when the next stage is due at the earliest.
void RelayPath::arm() {
  if (closed_ || (proven_ && underWay_.empty())) {
    return;
  }
  const TimePoint due = !proven_ ? startedAt_ + kAnswerWithin
      : silent_                  ? progressAt_ + silenceLimit() + kGiveUpAfter
                                 : progressAt_ + silenceLimit();
  if (timer_ != 0 && timerAt_ <= due) {
    return; // early is harmless
  }
  loop_.cancel(timer_);
  timerAt_ = std::max(due, loop_.now() + std::chrono::milliseconds(1));
  timer_ = loop_.at(timerAt_, [this] {
    timer_ = 0;
    look();
  });
}

void RelayPath::fill(PathStats& stats) const {
  Path::fill(stats);
  stats.encrypted = stats.forwardSecret = sealed();
  stats.cipher = sealed() ? "AES-256-GCM" : "";
  stats.relay = RelayStats{
      config_.relayRank, config_.relayHost, config_.opener, window_.bytes()};
}

} // namespace resilient
