#include "transport/tcp_path.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "path/congestion_choice.h"

namespace resilient {
namespace {

// The destination of unwanted bytes (repeats of chunks that have arrived).
// Written by the loop threads of one process without order: never read.
std::byte* scrap() {
  thread_local std::unique_ptr<std::byte[]> bytes =
      std::make_unique_for_overwrite<std::byte[]>(256 << 10);
  return bytes.get();
}
constexpr size_t kScrapBytes = 256 << 10;

// The time that a queue on the way may add to a round trip, beyond a multiple
// of it.
constexpr Nanos kMaxQueue = std::chrono::milliseconds(20);

} // namespace

TcpPath::TcpPath(
    EventLoop& loop,
    Channel& channel,
    PathId id,
    int index,
    StreamSocket socket,
    PathFaults& faults,
    PathOwner& owner)
    : Path(PathKind::kTcp, id, channel, owner),
      loop_(loop),
      index_(index),
      socket_(std::move(socket.fd)),
      tls_(std::move(socket.tls)),
      faults_(faults),
      localAddress_(resilient::localAddress(socket_.get()).toString()),
      remoteAddress_(resilient::remoteAddress(socket_.get()).toString()),
      restart_(loop.now()),
      heardAt_(loop.now()),
      reader_(channel, id),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kReadBuffer)) {
  local_ = isLocalConnection(socket_.get());
  if (local_) {
    tuneLocalConnection(socket_.get());
  }
  // Edge-triggered: no system call to change what is watched, and one wake-up
  // per arrival however many threads sleep in the loop.
  loop_.add(socket_.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, this);
  channel_.addPath(id, loop_.now());
  faults_.connectionOpened(loop_.now());
  applyFaultState();
  if (tls_) {
    readLater(EPOLLIN); // no event tells of what the handshake has read
  }
}

// onPathClosed() is not called: the owner that destroys an open path knows
// about it.
TcpPath::~TcpPath() {
  if (!closed_) {
    closed_ = true;
    loop_.cancel(faultTimer_);
    loop_.remove(socket_.get());
    channel_.removePath(id(), loop_.now());
  }
}

void TcpPath::reset(const Status& why) {
  if (!closed_) {
    resetOnClose(socket_.get());
    end(why);
  }
}

void TcpPath::close(const Status& why) {
  if (!closed_) {
    if (tls_) {
      tls_->close();
      const auto last = tls_->output(); // best effort, as the rest of it
      (void)::send(
          socket_.get(), last.data(), last.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    end(why);
  }
}

// The owner is called while the channel still knows the path, so it can keep
// the counters. Only then the channel takes the unacknowledged chunks back.
void TcpPath::end(const Status& why) {
  closed_ = true;
  loop_.cancel(faultTimer_);
  loop_.remove(socket_.get());
  socket_.reset();
  seen_ = {};
  owner_.onPathClosed(*this, why); // may still ask the channel about it
  channel_.removePath(id(), loop_.now());
}

const std::optional<TcpInfo>& TcpPath::kernelView() const {
  const TimePoint now = loop_.now();
  if (seen_.info && seen_.info->quiet() && seen_.sends == sends_) {
    seen_.info->sinceLastAck += now - seen_.at;
    seen_.info->sinceLastSent += now - seen_.at;
  } else if (seen_.at != now) {
    const bool mayBeBbr = !seen_.info || seen_.info->bbr;
    seen_.info = tcpInfo(socket_.get(), mayBeBbr);
    seen_.sends = sends_;
  }
  seen_.at = now;
  return seen_.info;
}

// How it works. If the kernel has unacknowledged segments, only
// acknowledgements count as progress: data from the peer says nothing about our
// direction. If not, anything that was read counts. Injected faults act before
// the kernel sees the bytes, so a frame that a fault holds back counts as owed,
// or as held on purpose while its delay runs.
PathEvidence TcpPath::evidence() const {
  PathEvidence e;
  const auto& info = kernelView();
  const bool held = faults_.any() && !releases_.empty();
  e.kernelOwes = info && info->unackedSegments > 0;
  if (held) {
    // An injected silence stands for one in the network.
    const TimePoint now = loop_.now();
    e.kernelOwes =
        e.kernelOwes || faults_.stalled(now) || faults_.dropping(now);
    e.heldOnPurpose = releases_.front() > now;
  }
  // Only acknowledgements are evidence about our sends. The other direction may
  // be quite well, or tell of nothing but itself.
  e.progress = info && e.kernelOwes
      ? info->bytesAcked + info->deliveredSegments
      : static_cast<uint64_t>(heardAt_.time_since_epoch().count());
  if (info) {
    // Recovery from an outage swells the kernel's estimate; it must not make
    // us slow to see the next one.
    e.roundTrip = std::min(
        info->roundTrip + 4 * info->roundTripVariance,
        4 * info->minRoundTrip + kMaxQueue);
  }
  return e;
}

void TcpPath::fill(PathStats& stats) const {
  Path::fill(stats);
  stats.localAddress = localAddress_;
  stats.remoteAddress = remoteAddress_;
  stats.encrypted = stats.forwardSecret = tls_ != nullptr;
  stats.cipher = tls_ ? tls_->cipher() : "";
}

std::optional<std::string> TcpPath::ownSecret() const {
  if (!tls_) {
    return std::nullopt;
  }
  const auto key = tls_->exportKey("EXPORTER-torch_resilient-paths", "");
  return std::string(reinterpret_cast<const char*>(key.data()), key.size());
}

// Frames are bound to this path once taken, so the limit is what the path sends
// in a few milliseconds. Under fault rules the limits are those of the
// simulated link: a delay holds many frames here, and a rate has a queue of
// fixed length.
bool TcpPath::hasRoom() const {
  if (closed_) {
    return false;
  }
  // While the socket is full there is no use in binding frames to it.
  if (faults_.any()) {
    return unwrittenBytes_ < kDelayedBytes &&
        faults_.linkFreeAt() <= loop_.now() + kLimitedQueue;
  }
  return unwrittenBytes_ < batchBytes() && releases_.size() < kBatchFrames &&
      !(socketFull_ && !releases_.empty());
}

// A slow path binds less: what is bound cannot go another way. On a long one
// the kernel must never run dry, or it takes us for the bottleneck.
size_t TcpPath::bytesAhead() const {
  const LinkStatistics& s = channel_.pathStatistics(id());
  const double seconds = std::max(toSeconds(kAheadTime), s.minRoundTripS() / 4);
  return static_cast<size_t>(s.capacityBytesPerS() * seconds);
}

size_t TcpPath::batchBytes() const {
  const size_t ahead = bytesAhead();
  return ahead == 0 ? kBatchBytes
                    : std::clamp(ahead, kMinBatchBytes, kBatchBytes);
}

// Sets how many unsent bytes the kernel may hold: few, since nothing overtakes
// them, but enough that the kernel never runs dry between two turns. Small
// changes are skipped.
std::optional<BbrView> TcpPath::tune() {
  if (local_) {
    return std::nullopt;
  }
  size_t wanted = std::clamp(bytesAhead(), kMinUnsent, kMaxUnsent);
  // Start-up only ends after rounds in which the kernel never ran dry. Until
  // then BBR sends nearly three times as fast as the link is, which fills its
  // queue and loses a tenth of the packets, for as long as the stream lasts.
  std::optional<BbrView> seen = bbr();
  if (seen) {
    if (!seen->startingUp) {
      beforeRestart_ = Known();
    } else if (
        seen->bytesAcked - beforeRestart_.bytesAcked < beforeRestart_.arrives) {
      seen->arrives = std::max(seen->arrives, beforeRestart_.arrives);
    } // else a second of it has shown what it is now
    restart_.observe(
        loop_.now(),
        carries(paced(*seen)),
        inQueue(seen->roundTrip, seen->minRoundTrip));
  }
  const BbrView view = seen.value_or(BbrView());
  startUpBytes_ = view.startingUp && !beforeRestart_.found
      ? std::min(
            static_cast<size_t>(
                static_cast<double>(view.sends) * toSeconds(kStartUpTime)),
            kMaxStartUpUnsent)
      : 0;
  wanted = std::max(wanted, startUpBytes_);
  if (wanted > unsentLimit_ * 5 / 4 || wanted < unsentLimit_ / 2) {
    unsentLimit_ = wanted;
    limitUnsent(socket_.get(), static_cast<int>(wanted));
  }
  return seen;
}

// By its gain of 1.25 BBR finds out whether there is more, and by one of nearly
// three while it starts up. After a restart, and without a limit of the route,
// it tries no more than it would have tried without the restart.
void TcpPath::limitPace(uint64_t bytesPerS, const BbrView& view) {
  if (beforeRestart_.sends != 0 && bytesPerS == 0) {
    const uint64_t tries =
        beforeRestart_.found ? view.arrives / 4 * 5 : view.arrives * 3;
    bytesPerS = std::max(beforeRestart_.sends, tries);
  }
  if (bytesPerS != paceLimit_) {
    paceLimit_ = bytesPerS;
    limitPacing(socket_.get(), bytesPerS);
  }
  auto most = static_cast<double>(std::max(view.sends, view.arrives / 4 * 5));
  if (bytesPerS != 0) {
    most = std::min(most, static_cast<double>(bytesPerS));
  }
  // Acknowledgements may wait in a queue of the other direction.
  const Nanos roundTrip = std::max(view.roundTrip, view.minRoundTrip);
  if (roundTrip > Nanos(0)) {
    most = std::min(
        most, static_cast<double>(view.windowBytes) / toSeconds(roundTrip));
  }
  channel_.setPace(id(), most);
}

void TcpPath::restartBbr(const BbrView& view) {
  if (!view.mayRestart || !restart_.due(loop_.now())) {
    return;
  }
  restart_.restarted(loop_.now());
  if (!setCongestionControl("reno")) { // any other one
    return;
  }
  if (!setCongestionControl("bbr")) {
    limitPacing(socket_.get(), 0);
    return;
  }
  beforeRestart_.found = beforeRestart_.found || !view.startingUp;
  beforeRestart_.arrives = view.arrives;
  beforeRestart_.sends =
      paceLimit_ == 0 ? view.sends : std::min(view.sends, paceLimit_);
  beforeRestart_.bytesAcked = view.bytesAcked;
  limitPace(paceLimit_, view);
}

size_t TcpPath::takeFrame(bool chunks) {
  const OutFrame* frame = channel_.pull(id(), loop_.now(), chunks);
  if (frame == nullptr) {
    return 0;
  }
  const size_t bytes = kFrameHeaderBytes + frame->payloadBytes;
  unwrittenBytes_ += bytes;
  releases_.push_back(
      faults_.any() ? faults_.release(loop_.now(), bytes) : TimePoint::min());
  return bytes;
}

// The unwritten bytes that may leave now, at most `limit`. Starts behind the
// frontWritten_ bytes that left before. Headers and payloads stay where they
// are, so nothing is copied. The payload pointer is read from the channel anew
// each time, since the channel may have moved it to a copy.
size_t TcpPath::gather(iovec* out, size_t capacity, size_t limit) const {
  size_t n = 0;
  size_t skip = frontWritten_;
  size_t index = 0;
  for (const OutFrame& f : channel_.unwritten(id())) {
    if (n + 2 > capacity || limit == 0 || releases_[index++] > loop_.now()) {
      break;
    }
    if (skip < kFrameHeaderBytes) {
      const size_t take = std::min(kFrameHeaderBytes - skip, limit);
      out[n++] = {const_cast<std::byte*>(f.header.data()) + skip, take};
      limit -= take;
      skip = 0;
    } else {
      skip -= kFrameHeaderBytes;
    }
    if (f.payloadBytes > skip && limit != 0) {
      const size_t take = std::min(f.payloadBytes - skip, limit);
      out[n++] = {const_cast<std::byte*>(f.payload) + skip, take};
      limit -= take;
    }
    skip = 0;
  }
  return n;
}

bool TcpPath::flush() {
  writeOut();
  return false; // EPOLLOUT tells of room
}

// Writes until the socket is full or no frame may leave. Each pass asks the
// fault rules first: silence or a stall stops everything, and a cut after a
// number of bytes limits what this pass may write. A failed write does not end
// the path at once: the peer may have sent its goodbye before it closed
// (resetWhenRead).
void TcpPath::writeOut() {
  while (!closed_ && !socketFull_ &&
         (!releases_.empty() || (tls_ && !tls_->output().empty()))) {
    size_t limit = SIZE_MAX;
    if (faults_.any()) {
      const TimePoint now = loop_.now();
      if (faults_.stalled(now) || faults_.dropping(now)) {
        applyFaultState();
        return;
      }
      limit = faults_.bytesUntilCut(writtenTotal_, now);
      if (limit == 0) {
        cut();
        return;
      }
    }
    size_t sent = 0;
    if (tls_ && !tls_->output().empty()) {
      const auto sealed = tls_->output();
      iovec part{const_cast<std::byte*>(sealed.data()), sealed.size()};
      if (!send(&part, 1, sent)) {
        return;
      }
      wrote(tls_->sent(sent));
      continue;
    }
    iovec parts[32];
    const size_t count = gather(parts, 32, limit);
    if (count == 0) {
      armFaultTimer(releases_.front());
      return;
    }
    if (tls_) {
      if (tls_->seal({parts, count}) == 0) {
        socketFull_ = true;
        resetWhenRead(tls_->status());
        return;
      }
      continue;
    }
    if (!send(parts, count, sent)) {
      return;
    }
    wrote(sent);
  }
}

// False if the socket takes nothing now, or never again.
bool TcpPath::send(iovec* parts, size_t count, size_t& sent) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t n =
      ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) {
    sent = static_cast<size_t>(n);
    ++sends_;
    return true;
  }
  socketFull_ = true; // until EPOLLOUT, or nothing more is bound to it
  if (errno != EAGAIN && errno != EINTR) {
    resetWhenRead(Status(
        StatusCode::kNetwork,
        "write to " + remoteAddress_ + ": " + std::strerror(errno)));
  }
  return false;
}

// The last that the far end has sent may not have been read yet, above all
// that it leaves. In a turn of its own: flush() is called from anywhere.
void TcpPath::resetWhenRead(const Status& why) {
  loop_.post([this, why, alive = std::weak_ptr<void>(alive_)] {
    if (alive.lock()) {
      size_t total = 0;
      while (!closed_ && !deaf_ && readSome(total) != Read::kNothing) {
      }
      reset(why);
    }
  });
}

void TcpPath::cut() {
  faults_.cutDone(writtenTotal_, loop_.now());
  reset(Status(StatusCode::kNetwork, "cut by fault injection"));
}

// A frame leaves the channel's queue only when its last byte is in the kernel:
// the peer can acknowledge no more than that. The rest is frontWritten_.
void TcpPath::wrote(size_t bytes) {
  writtenTotal_ += bytes;
  unwrittenBytes_ -= bytes;
  bytes += frontWritten_;
  while (!releases_.empty()) {
    const OutFrame& f = channel_.unwritten(id()).front();
    const size_t size = kFrameHeaderBytes + f.payloadBytes;
    if (bytes < size) {
      break;
    }
    bytes -= size;
    channel_.popWritten(id());
    releases_.pop_front();
  }
  frontWritten_ = bytes;
}

// A path that drops does not read either: its peer must see the same silence
// as behind a dead switch.
void TcpPath::applyFaultState() {
  if (!faults_.any() && !deaf_) {
    return;
  }
  const bool dropping = faults_.dropping(loop_.now());
  if (deaf_ && !dropping) {
    deaf_ = false;
    // Read everything that came meanwhile, the end of the stream included.
    readLater(EPOLLIN | EPOLLRDHUP);
  }
  deaf_ = dropping;
  armFaultTimer(kNever);
}

void TcpPath::readLater(uint32_t events) {
  loop_.post([this, events, alive = std::weak_ptr<void>(alive_)] {
    if (alive.lock() && !closed_) {
      onEvents(events);
    }
  });
}

// Looks again at `at`, or when a fault changes by itself.
void TcpPath::armFaultTimer(TimePoint at) {
  loop_.cancel(faultTimer_);
  faultTimer_ = 0;
  at = std::min(at, faults_.nextChange(loop_.now()));
  if (at == kNever) {
    return;
  }
  faultTimer_ = loop_.at(at, [this] {
    faultTimer_ = 0;
    lookAtFaults();
  });
}

void TcpPath::faultsChanged(bool) {
  lookAtFaults();
}

void TcpPath::lookAtFaults() {
  if (closed_) {
    return;
  }
  applyFaultState();
  if (faults_.any() && faults_.bytesUntilCut(writtenTotal_, loop_.now()) == 0) {
    cut();
    return;
  }
  flush();
  if (!closed_) {
    owner_.onPathReady(*this);
  }
}

// How it works. Reading comes first. It goes on while each read is full, up to
// the share of one path in a turn, and to the end of the stream if the peer has
// closed. Writing follows if the socket was full: EPOLLOUT, or while BBR starts
// up any event, opens it again. Each step may close the path, so each asks
// closed_ anew.
void TcpPath::onEvents(uint32_t events) {
  if ((events & ~uint32_t(EPOLLOUT)) != 0 && !deaf_) {
    // A short read means that there is no more now, unless the end of the
    // stream has come with the data: no further event would announce that.
    const bool toTheEnd = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    size_t total = 0;
    Read last = Read::kFull;
    while (!closed_ && total < kReadPerTurn &&
           (last == Read::kFull || (toTheEnd && last == Read::kShort))) {
      last = readSome(total);
    }
    if (!closed_ &&
        (last == Read::kFull || (toTheEnd && last == Read::kShort))) {
      readLater(events); // the others first
    }
  }
  // The kernel says that there is room when a third of the buffer is free: in
  // a start-up that fills it, too late.
  if (!closed_ && socketFull_ &&
      ((events & EPOLLOUT) != 0 || startUpBytes_ != 0)) {
    socketFull_ = false;
    flush();
    if (!closed_) {
      owner_.onPathReady(*this);
    }
  }
}

// One system call: the rest of the current payload straight to its place,
// and what follows into the buffer.
//
// The buffer is small next to a chunk: most payload bytes are read straight to
// their place, and only headers and small frames are copied.
TcpPath::Read TcpPath::readSome(size_t& total) {
  if (tls_) {
    return readSealed(total);
  }
  iovec parts[2];
  size_t count = 0;
  size_t direct = reader_.missing();
  // Behind a piece of scrap the stream goes on with scrap.
  bool goesOn = true;
  if (direct != 0) {
    std::byte* to = reader_.destination();
    if (to == nullptr) {
      to = scrap();
      goesOn = direct <= kScrapBytes;
      direct = std::min(direct, kScrapBytes);
    }
    parts[count++] = {to, direct};
  }
  if (goesOn) {
    // Behind a large chunk there is mostly another one: its header only, so
    // that its payload needs no copy.
    parts[count++] = {
        buffer_.get(), direct >= kReadBuffer ? kFrameHeaderBytes : kReadBuffer};
  }
  size_t asked = 0;
  for (size_t i = 0; i < count; ++i) {
    asked += parts[i].iov_len;
  }
  const ssize_t n = ::readv(socket_.get(), parts, static_cast<int>(count));
  if (n < 0) {
    return readFailed();
  }
  if (n == 0) {
    reset(closedByOther());
    return Read::kNothing;
  }
  heardAt_ = loop_.now();
  const auto bytes = static_cast<size_t>(n);
  total += bytes;
  const size_t placed = std::min(bytes, direct);
  Status status;
  if (placed != 0) {
    status = reader_.placed(placed, heardAt_);
  }
  if (status.ok() && bytes > placed) {
    status = reader_.consume(buffer_.get(), bytes - placed, heardAt_);
  }
  if (!status.ok()) {
    reset(status);
    return Read::kNothing;
  }
  return bytes == asked ? Read::kFull : Read::kShort;
}

// By errno of a read.
TcpPath::Read TcpPath::readFailed() {
  if (errno != EAGAIN && errno != EINTR) {
    reset(Status(
        StatusCode::kNetwork,
        "read from " + remoteAddress_ + ": " + std::strerror(errno)));
  }
  return Read::kNothing;
}

Status TcpPath::closedByOther() const {
  return Status(
      StatusCode::kNetwork,
      "connection to " + remoteAddress_ + " was closed by the other end");
}

// One system call. Then all records that are there whole are opened, so that
// the next one finds room.
TcpPath::Read TcpPath::readSealed(size_t& total) {
  const std::span<std::byte> room = tls_->input();
  ssize_t n = 0;
  if (!room.empty()) { // else the handshake has left something
    n = ::recv(socket_.get(), room.data(), room.size(), 0);
    if (n < 0) {
      const Read read = readFailed();
      if (!closed_) {
        openRecords();
      }
      return read;
    }
    if (n == 0) {
      tls_->end();
      reset(
          tls_->failed() ? Status(
                               tls_->status().code(),
                               "connection to " + remoteAddress_ + ": " +
                                   tls_->status().message())
                         : closedByOther());
      return Read::kNothing;
    }
    heardAt_ = loop_.now();
    tls_->received(static_cast<size_t>(n));
    total += static_cast<size_t>(n);
  }
  openRecords();
  if (closed_) {
    return Read::kNothing;
  }
  return static_cast<size_t>(n) == room.size() ? Read::kFull : Read::kShort;
}

// Headers are opened alone, so that a payload goes from its record straight to
// its place.
void TcpPath::openRecords() {
  const TimePoint now = loop_.now();
  for (;;) {
    std::byte* to = buffer_.get();
    size_t most = std::min(reader_.wants(), kReadBuffer);
    const bool payload = reader_.missing() != 0;
    if (payload) {
      to = reader_.destination();
      most = reader_.missing();
      if (to == nullptr) {
        to = scrap();
        most = std::min(most, kScrapBytes);
      }
    }
    const size_t n = tls_->open(to, most);
    if (n == 0) {
      break;
    }
    const Status status = payload ? reader_.placed(n, now)
                                  : reader_.consume(buffer_.get(), n, now);
    if (!status.ok()) {
      reset(status);
    }
    if (closed_) {
      return;
    }
  }
  if (tls_->failed()) {
    reset(Status(
        tls_->status().code(),
        "connection to " + remoteAddress_ + ": " + tls_->status().message()));
  } else if (tls_->ended()) {
    reset(closedByOther());
  } else if (!tls_->output().empty()) { // its answer to a request for a new key
    writeOut();
  }
}

} // namespace resilient
