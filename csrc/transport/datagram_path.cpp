#include "transport/datagram_path.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

namespace resilient {
namespace {

// Headers of IP and UDP: version 6 has the larger ones.
constexpr size_t kIpBytes = 48;
// The MTU of any network; a usual Ethernet; one with jumbo frames.
constexpr size_t kMtus[] = {1280, 1500, 9000};
constexpr Nanos kProbeInterval = std::chrono::milliseconds(40);
constexpr int kProbeTries = 5; // for larger packets
constexpr Nanos kAskAgain = std::chrono::milliseconds(100); // an idle path

// A path that has been silent for so many times the sender's patience, and at
// least so long, is not usable: connections take over.
constexpr int kPatiences = 3;
constexpr Nanos kSilentMin = std::chrono::milliseconds(150);
// A path that fails for this long does not recover by itself.
constexpr Nanos kSilentMax = std::chrono::seconds(5);
// If for so many times the sender's patience, and at least so long, only small
// packets arrive, an MTU on the way has become smaller. Longer than silence,
// since what is lost is sent again in between.
constexpr int kStuckPatiences = 10;
constexpr Nanos kStuckMin = std::chrono::seconds(1);

// Objects that are not complete, of either end.
constexpr uint64_t kMaxIncoming = 256u << 20;
constexpr uint64_t kMaxHeld = 128u << 20;
// Taken from the channel ahead of time: what is bound to this path cannot be
// overtaken any more.
constexpr uint64_t kMinWaiting = 64u << 10, kMaxWaiting = 1u << 20;
constexpr double kWaitingS = 0.004;

constexpr int kMaxReads = 16; // system calls in one turn

// The largest piece that fits into a datagram of this size. Rounded down to
// whole units, so no element of a tensor lies in two packets.
size_t pieceFor(size_t datagramBytes) {
  const size_t room = datagramBytes - kSealOverheadBytes - kSymbolHeaderBytes;
  return std::min(room / kPieceUnit * kPieceUnit, kMaxPieceBytes);
}

} // namespace

DatagramPath::DatagramPath(
    EventLoop& loop,
    Channel& channel,
    PathId id,
    DatagramSocket socket,
    DatagramPathConfig config,
    PathOwner& owner)
    : RoutePath(PathKind::kDatagram, id, channel, owner),
      loop_(loop),
      socket_(std::move(socket)),
      config_(std::move(config)),
      startedAt_(loop.now()),
      heardAt_(loop.now()),
      receiver_(
          kMaxIncoming,
          [this](std::span<const std::byte> o, std::span<const Hole> h) {
            onObject(o, h);
          }) {
  for (const size_t mtu : kMtus) {
    probes_.push_back({mtu - kIpBytes, 0, false});
  }
  opened_.resize(65536);
  channel_.addPath(id, loop_.now());
  channel_.setSelfAcknowledging(id, /*ordered=*/false);
  channel_.setClasses(id, 0);
  loop_.add(socket_.fd(), EPOLLIN, this);
  probeAt_ = loop_.now();
  armTimer();
}

// onPathClosed() is not called: the owner that destroys an open path knows
// about it.
DatagramPath::~DatagramPath() {
  if (!closed_) {
    end();
    channel_.removePath(id(), loop_.now());
  }
}

void DatagramPath::end() {
  closed_ = true;
  loop_.cancel(timer_);
  loop_.remove(socket_.fd());
}

void DatagramPath::close(const Status& why) {
  if (!closed_) {
    end();
    owner_.onPathClosed(*this, why); // may still ask the channel about it
    channel_.removePath(id(), loop_.now());
  }
}

// Fault rules act on connections only (path.h). While one concerns the peer,
// the path sets itself aside, and the owner has to learn that.
void DatagramPath::faultsChanged(bool concerned) {
  const bool before = usable();
  avoided_ = concerned;
  if (usable() != before) {
    owner_.onPathUse(*this);
  }
}

std::string DatagramPath::localAddress() const {
  return resilient::localAddress(socket_.fd()).toString();
}
std::string DatagramPath::remoteAddress() const {
  return resilient::remoteAddress(socket_.fd()).toString();
}

// --- from the channel

// Two limits apply. Objects that have not left yet are bounded by a few
// milliseconds at the present rate, since nothing can overtake them here.
// Objects that are not acknowledged are bounded by memory.
bool DatagramPath::hasRoom() const {
  if (!usable() || full_) {
    return false;
  }
  const auto ahead =
      static_cast<uint64_t>(sender_->rate().bytesPerS() * kWaitingS);
  return sender_->waitingBytes() <
      std::clamp(ahead, kMinWaiting, kMaxWaiting) &&
      sender_->heldBytes() < kMaxHeld;
}

size_t DatagramPath::takeFrame(bool chunks) {
  const TimePoint now = loop_.now();
  const OutFrame* const f = channel_.pull(id(), now, chunks);
  if (f == nullptr) {
    return 0;
  }
  ObjectToSend what;
  what.header = f->header;
  what.payload = {f->payload, f->payloadBytes};
  what.offset = f->offset;
  what.trafficClass = f->trafficClass;
  what.tolerance = f->tolerance;
  what.dtype = f->dtype;
  const size_t bytes = kFrameHeaderBytes + f->payloadBytes;
  frames_.push_back({sender_->add(what, now), f->reliable, false});
  channel_.popWritten(id()); // it has been copied
  taken_ += bytes;
  return bytes;
}

void DatagramPath::onDone(uint64_t object) {
  const auto at = std::lower_bound(
      frames_.begin(), frames_.end(), object, [](const Frame& f, uint64_t n) {
        return f.object < n;
      });
  if (at != frames_.end() && at->object == object) {
    at->done = true;
  }
}

// --- sending

// Adds a packet, and a piece behind it, to the batch, under the number
// lastPacket_, which the caller has just taken. One system call sends a batch
// (UDP_SEGMENT), which requires datagrams of one size; only the last may be
// smaller. A smaller packet therefore closes the batch, and a larger one starts
// a new one.
//
// A packet that finds the socket full is dropped. The sender has recorded its
// number already, so the recovery treats it as one that the network has lost.
void DatagramPath::seal(
    std::span<const std::byte> packet,
    std::span<const std::byte> piece) {
  const size_t bytes = packet.size() + piece.size() + kSealOverheadBytes;
  // Larger than its predecessors, or behind a smaller one: a batch of its own.
  if (batchCount_ != 0 &&
      (!batchOpen_ || bytes > batchEach_ ||
       batchCount_ == DatagramSocket::kMaxBatch ||
       batch_.size() + bytes > DatagramSocket::kMaxBatchBytes)) {
    flushBatch();
  }
  if (full_) {
    return; // lost, as if in the network
  }
  if (batchCount_ == 0) {
    batchEach_ = bytes;
  }
  batchOpen_ = bytes == batchEach_;
  const size_t at = batch_.size();
  batch_.resize(at + bytes);
  const std::array parts{partOf(packet), partOf(piece)};
  config_.ours->seal(lastPacket_, parts, batch_.data() + at, loop_.now());
  ++batchCount_;
}

// True if the whole batch has left. Otherwise the rest stays in the batch, from
// batchSent_ on, and EPOLLOUT is watched until it has left.
bool DatagramPath::flushBatch() {
  if (batchCount_ == 0) {
    return true;
  }
  size_t sent = 0;
  const bool all = socket_.send(
      std::span<const std::byte>(batch_).subspan(batchSent_), batchEach_, sent);
  batchSent_ += sent;
  if (full_ == all) {
    full_ = !all;
    loop_.modify(socket_.fd(), EPOLLIN | (full_ ? uint32_t(EPOLLOUT) : 0u));
  }
  if (all) {
    batch_.clear();
    batchCount_ = batchSent_ = 0;
    batchOpen_ = true;
  }
  return all;
}

bool DatagramPath::flush() {
  if (!closed_) {
    if (!full_) {
      sendDue();
    }
    armTimer();
  }
  return false; // service() tells of room
}

// A report comes before the symbols and fits into the smallest MTU, so it
// arrives wherever the path works at all. Ranges that do not fit come with the
// next report. Symbols follow until the pace, the window or the socket stops
// them.
void DatagramPath::sendDue() {
  // Packets stamped here are sent now, not when this turn began.
  const TimePoint now = std::chrono::steady_clock::now();
  if (receiver_.reportDue(now)) {
    ++lastPacket_;
    if (sender_) {
      sender_->sentOther(lastPacket_);
    }
    const size_t max = probes_[0].datagramBytes - kSealOverheadBytes;
    seal(encodePacketReport(receiver_.takeReport(now), max));
  }
  PacketToSend packet;
  while (sender_ && !full_ && sender_->next(now, lastPacket_ + 1, packet)) {
    ++lastPacket_;
    seal(packet.header, packet.piece);
  }
  flushBatch();
}

uint64_t DatagramPath::takeUnpaid() {
  if (!sender_) {
    return 0;
  }
  const uint64_t bytes = sender_->counters().bytes;
  const uint64_t left = bytes - std::exchange(counted_, bytes);
  const uint64_t paid = std::min(left, taken_);
  taken_ -= paid;
  return left - paid;
}

void DatagramPath::fill(PathStats& stats) const {
  Path::fill(stats);
  stats.localAddress = localAddress();
  stats.remoteAddress = remoteAddress();
  stats.encrypted = true;
  stats.cipher = "AES-256-GCM";
  stats.forwardSecret = config_.forwardSecret;
  if (!stats.datagrams) {
    stats.datagrams.emplace();
  }
  DatagramStats& d = *stats.datagrams;
  const ReceiverCounters& r = receiver_.counters();
  d.recovered += r.recovered;
  d.zeroFilled += r.zeroFilled;
  d.duplicates += r.duplicates;
  d.forged += forged_;
  d.packetBytes = pieceBytes_;
  if (sender_ != nullptr) {
    const SenderCounters& c = sender_->counters();
    d.packets += c.packets;
    d.bytes += c.bytes;
    d.lost += c.lost;
    d.parity += c.repairSymbols;
    d.retransmitted += c.retransmitted;
    d.lossRate = sender_->loss().estimate().rate;
    d.burstPackets = sender_->loss().estimate().burstPackets;
    d.paceBytesPerS = sender_->rate().bytesPerS();
    d.carriesUpTo = channel_.bursts(id()).upTo;
    stats.minRoundTripS = toSeconds(sender_->rate().minRoundTrip());
  }
}

// How it works. The probe for the smallest MTU is repeated until it is
// answered; checkSilence() gives up on the path if it never is. Probes for
// larger packets start only then, and each is tried kProbeTries times. A probe
// travels in a system call of its own, so an answer of "too large" from our own
// interface belongs to it.
void DatagramPath::sendProbes(TimePoint now) {
  bool more = false;
  for (size_t i = 0; i < probes_.size() && probeAt_ <= now; ++i) {
    Probe& p = probes_[i];
    // Larger ones only once there is somebody.
    if (p.answered || (i > 0 && (!sender_ || p.tries == kProbeTries))) {
      continue;
    }
    ++p.tries;
    sendProbe(p.datagramBytes, now);
    if (socket_.takeTooLarge()) {
      p.tries = kProbeTries; // for our own interface
    }
    more = true;
  }
  if (probeAt_ <= now) {
    probeAt_ = more ? now + kProbeInterval : kNever;
  }
}

void DatagramPath::sendProbe(size_t datagramBytes, TimePoint now) {
  PacketProbe probe;
  probe.bytes = static_cast<uint32_t>(datagramBytes);
  probe.token = static_cast<uint64_t>(now.time_since_epoch().count());
  std::vector<std::byte> packet(datagramBytes - kSealOverheadBytes);
  encodeProbe(probe, packet.data());
  ++lastPacket_;
  if (sender_) {
    sender_->sentOther(lastPacket_);
  }
  flushBatch();
  seal(packet);
  flushBatch();
}

TimePoint DatagramPath::nextAsk() const {
  if (askedSince_ != kNever) {
    return askedAt_ + std::max(kAskAgain, sender_->patience());
  }
  // The socket may have been full when it was doubted.
  return doubted_ ? TimePoint{} : heardAt_ + config_.keepAlive;
}

void DatagramPath::keepAlive(TimePoint now) {
  if (sender_ && !full_ && nextAsk() <= now) {
    sendAsk(now);
  }
}

void DatagramPath::sendAsk(TimePoint now) {
  askedSince_ = std::min(askedSince_, now);
  askedAt_ = now;
  sendProbe(kProbeBytes + kSealOverheadBytes, now);
}

void DatagramPath::ask() {
  if (!closed_ && sender_ && !full_ && askedSince_ == kNever) {
    sendAsk(loop_.now());
    armTimer();
  }
}

void DatagramPath::doubt() {
  if (closed_ || !sender_) {
    return;
  }
  doubted_ = true;
  ask();
  checkSilence(loop_.now()); // its owner may close it
}

// An answer to an older probe may have been on its way when the network failed.
// A report may be of older packets, too, which is not looked up: the path then
// falls silent once more.
void DatagramPath::onAnswer(TimePoint sent) {
  answeredAt_ = loop_.now();
  if (sent >= askedSince_) {
    askedSince_ = kNever;
    doubted_ = false;
  }
}

PathEvidence DatagramPath::evidence() const {
  PathEvidence e;
  if (!sender_) {
    return e;
  }
  const TimePoint since = std::min(sender_->waitingSince(), askedSince_);
  e.owes = since != kNever;
  e.owesSince = e.owes ? since : TimePoint{};
  e.progress = static_cast<uint64_t>(answeredAt_.time_since_epoch().count());
  e.roundTrip =
      sender_->rate().roundTrip() + 4 * sender_->rate().roundTripVariation();
  return e;
}

// --- receiving

void DatagramPath::onEvents(uint32_t events) {
  if ((events & EPOLLOUT) != 0 && full_) {
    full_ = false;
    loop_.modify(socket_.fd(), EPOLLIN);
    flushBatch();
  }
  // Times are those of the kernel: that we get a processor late is no queue in
  // the network.
  const auto with = [this](std::span<const std::byte> d, TimePoint arrived) {
    arrivedAt_ = std::max(arrivedAt_, arrived);
    onDatagram(d, arrivedAt_);
  };
  for (int i = 0; i < kMaxReads && !closed_ && !socket_.receive(with); ++i) {
  }
  service();
}

// The order of the checks matters. The seal comes first, so nothing in a forged
// datagram is believed, its number included. Duplicates come next: a recorded
// datagram that is sent again must not count as a sign of life
// (datagram_path_is_not_heard_by_a_copy). After a failure all input is ignored
// until service() closes the path.
void DatagramPath::onDatagram(
    std::span<const std::byte> datagram,
    TimePoint now) {
  if (closed_ || !failure_.ok()) {
    return;
  }
  uint64_t number = 0;
  std::span<const std::byte> packet;
  if (!config_.theirs->open(
          datagram, number, opened_.data(), packet, loop_.now())) {
    ++forged_;
    return;
  }
  if (receiver_.onNumber(number, datagram.size() + kIpBytes, now)) {
    heardAt_ = loop_.now(); // not by a copy, which anybody can send again
    Status status = onPacket(packet, number, now);
    if (!status.ok() && failure_.ok()) {
      failure_ = status;
    }
  }
}

Status DatagramPath::onPacket(
    std::span<const std::byte> packet,
    uint64_t number,
    TimePoint now) {
  PacketType type{};
  Status status = packetType(packet, type);
  if (!status.ok()) {
    return status;
  }
  switch (type) {
    case PacketType::kSymbol:
    case PacketType::kEnd: {
      SymbolHeader header;
      std::span<const std::byte> symbol;
      status = decodeSymbol(packet, header, symbol);
      return status.ok() ? receiver_.onSymbol(header, symbol, number, now)
                         : status;
    }
    case PacketType::kReport: {
      PacketReport report;
      status = decodePacketReport(packet, report);
      if (status.ok()) {
        onAnswer(now);
      }
      return status.ok() && sender_ ? sender_->onReport(report, now) : status;
    }
    case PacketType::kProbe:
    case PacketType::kProbeReply: {
      PacketProbe probe;
      status = decodeProbe(packet, probe);
      if (status.ok()) {
        onProbe(probe, now);
      }
      return status;
    }
  }
  return Status();
}

// A request is answered with a short packet, whatever its size: the answer must
// not depend on the MTU of the way back. The token of an answer is the time of
// the request by our own clock. An answer from before this path or from the
// future is ignored.
void DatagramPath::onProbe(const PacketProbe& probe, TimePoint now) {
  if (probe.type == PacketType::kProbe) {
    PacketProbe reply = probe;
    reply.type = PacketType::kProbeReply;
    std::array<std::byte, kProbeBytes> packet;
    encodeProbe(reply, packet.data());
    ++lastPacket_;
    if (sender_) {
      sender_->sentOther(lastPacket_);
    }
    seal(packet);
    return;
  }
  const TimePoint sent{Nanos(static_cast<int64_t>(probe.token))};
  onAnswer(sent);
  for (Probe& p : probes_) {
    if (p.datagramBytes == probe.bytes && sent <= now && sent >= startedAt_) {
      p.answered = true;
      if (!sender_) {
        onProven(now - sent);
      }
      const size_t piece = pieceFor(p.datagramBytes);
      if (piece > pieceBytes_) {
        pieceBytes_ = piece;
        sender_->setPieceBytes(piece);
      }
    }
  }
}

void DatagramPath::onProven(Nanos roundTrip) {
  sender_ = std::make_unique<PacketSender>(
      config_.schemes,
      RateControl(roundTrip, config_.knownBytesPerS, config_.maxBytesPerS),
      [this](uint64_t object) { onDone(object); });
  sender_->sentOther(lastPacket_);
  probeAt_ = loop_.now(); // for larger packets
  owner_.onPathUse(*this);
}

// A complete frame, in any order. It goes through the channel's three calls
// (header, destination, payload) in one piece, so two frames never mix although
// they do not arrive as a stream. An object that is no sound frame is a fault
// of an authentic peer, and closes the path.
void DatagramPath::onObject(
    std::span<const std::byte> object,
    std::span<const Hole> holes) {
  if (!failure_.ok() || closed_) {
    return;
  }
  const TimePoint now = loop_.now();
  FrameHeader header;
  Status status(StatusCode::kProtocol, "an object without a frame");
  if (object.size() >= kFrameHeaderBytes) {
    status = decodeFrame(object.first<kFrameHeaderBytes>(), header);
  }
  const auto payload =
      object.subspan(std::min(object.size(), kFrameHeaderBytes));
  if (status.ok() && payload.size() != header.payloadBytes) {
    status = Status(StatusCode::kProtocol, "a frame of another size");
  }
  if (status.ok()) {
    status = channel_.onHeader(id(), header, now);
  }
  if (status.ok()) {
    std::byte* const to = channel_.destination(id());
    if (to != nullptr && !payload.empty()) {
      std::memcpy(to, payload.data(), payload.size());
    }
    std::vector<ByteRange> zeroFilled;
    for (const Hole& h : holes) {
      // The first piece, with the header, is never missing.
      zeroFilled.push_back({h.offset - kFrameHeaderBytes, h.bytes});
    }
    status = channel_.onPayload(id(), now, zeroFilled);
  }
  if (!status.ok()) {
    failure_ = status;
  }
}

// --- time

// After whatever has happened. The order: first what has become due at the
// receiver, which may deliver objects; then probes and silence; then the
// failure that any of these has found; then the acknowledgements for the
// channel; then sending; last onPathReady(). The owner may close the path in
// any of its calls, from within onPathUse() too, and the channel does not know
// a closed path any more (closes_from_within_on_path_use in the path contract).
void DatagramPath::service() {
  if (closed_) {
    return;
  }
  const TimePoint now = loop_.now();
  if (receiver_.deadline() <= now) {
    receiver_.onTimer(now);
  }
  if (failure_.ok()) {
    sendProbes(now);
    keepAlive(now);
    checkSilence(now);
    if (closed_) { // by its owner, told that it is not usable
      return;
    }
  }
  if (!failure_.ok()) {
    close(failure_);
    return;
  }
  if (sender_) {
    // Short chunks would lose what spreads a burst over several blocks.
    channel_.setCapacity(id(), sender_->rate().capacityBytesPerS());
  }
  const uint64_t before = framesDone_;
  while (!frames_.empty() && frames_.front().done) {
    framesDone_ += frames_.front().reliable;
    frames_.pop_front();
  }
  if (framesDone_ != before) {
    channel_.delivered(id(), framesDone_, now);
  }
  flush();
  if (usable() && hasRoom()) {
    owner_.onPathReady(*this);
  }
}

Nanos DatagramPath::silenceLimit() const {
  return std::max(kSilentMin, kPatiences * sender_->patience());
}

// The doubt has four stages. Not proven in time: the path is closed. Silent for
// a few patiences, or doubted by its owner: it is not usable, connections take
// over, and it recovers once the peer answers. Silent for seconds more: it is
// closed, and the connector tries another one. Not silent, but no large packet
// arrives: the MTU has shrunk, and the path is closed too, since a new one
// probes again.
void DatagramPath::checkSilence(TimePoint now) {
  if (!sender_) {
    if (now - startedAt_ > config_.proveWithin) {
      failure_ = Status(
          StatusCode::kNetwork,
          "no datagram came back from " + remoteAddress() +
              " (is UDP filtered between the two, or the MTU below 1280?)");
    }
    return;
  }
  const TimePoint since = std::min(sender_->waitingSince(), askedSince_);
  const Nanos limit = silenceLimit();
  const bool silent = since != kNever && (doubted_ || now - since > limit);
  if (silent && now - since > kSilentMax + limit) {
    failure_ = Status(
        StatusCode::kNetwork, "no datagram came back for several seconds");
  }
  const TimePoint stuck = sender_->stuckSince();
  if (!silent && stuck != kNever &&
      now - stuck >
          std::max(kStuckMin, kStuckPatiences * sender_->patience())) {
    failure_ = Status(
        StatusCode::kNetwork,
        "of packets of " + std::to_string(pieceBytes_) +
            " bytes none arrives any more, of small ones some do (has an MTU "
            "become smaller?)");
  }
  if (silent != silent_) {
    silent_ = silent;
    owner_.onPathUse(*this);
  }
}

// An earlier timer than needed is left alone: it finds nothing due and arms the
// next one, which is cheaper than moving it with every packet.
//
// While the socket is full, nothing can be sent, and a timer for a report or a
// symbol that is due would fire in every turn. EPOLLOUT tells of room.
void DatagramPath::armTimer() {
  TimePoint due = std::min(
      probeAt_, full_ ? receiver_.nextVerdict() : receiver_.deadline());
  if (!sender_) {
    due = std::min(due, startedAt_ + config_.proveWithin);
  } else if (!full_) {
    due = std::min({due, sender_->nextAt(), nextAsk()});
  } else if (const TimePoint since = sender_->waitingSince(); since != kNever) {
    // Nothing else would find out that the socket is stuck.
    due = std::min(
        due, since + silenceLimit() + (silent_ ? kSilentMax : Nanos(0)));
  }
  if (closed_ || due == kNever ||
      (timer_ != 0 && timerAt_ <= std::max(due, loop_.now()))) {
    return;
  }
  loop_.cancel(timer_);
  timerAt_ = due;
  timer_ = loop_.at(due, [this] {
    timer_ = 0;
    service();
  });
}

} // namespace resilient
