#include "transport/shared_path.h"

#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

namespace resilient {

SharedPath::SharedPath(
    EventLoop& loop,
    Channel& channel,
    PathId id,
    SharedEnds ends,
    PathOwner& owner)
    : Path(PathKind::kShared, id, channel, owner),
      loop_(loop),
      ends_(std::move(ends)),
      mine_(ends_.memory.side(ends_.side)),
      theirs_(ends_.memory.side(1 - ends_.side)),
      out_(ends_.memory, ends_.side),
      in_(ends_.memory, ends_.side),
      reader_(channel, id),
      end_(*this),
      heardAt_(loop.now()) {
  channel_.addPath(id, loop_.now());
  channel_.setSelfAcknowledging(id);
  setWakeAt();
  loop_.add(ends_.wakeMine.get(), EPOLLIN | EPOLLET, &wake_);
  loop_.add(ends_.socket.get(), EPOLLRDHUP, &end_);
  loop_.add(this);
}

SharedPath::~SharedPath() {
  if (!closed_) {
    closed_ = true;
    loop_.cancel(lookTimer_);
    loop_.remove(this);
    loop_.remove(ends_.wakeMine.get());
    loop_.remove(ends_.socket.get());
    channel_.removePath(id(), loop_.now());
  }
}

void SharedPath::close(const Status& why) {
  if (closed_) {
    return;
  }
  closed_ = true;
  loop_.cancel(lookTimer_);
  loop_.remove(this);
  loop_.remove(ends_.wakeMine.get());
  loop_.remove(ends_.socket.get());
  ends_.socket.reset();
  owner_.onPathClosed(*this, why); // may still ask the channel about it
  channel_.removePath(id(), loop_.now());
}

// The peer has closed its end: what it wrote before is still here.
void SharedPath::End::onEvents(uint32_t) {
  while (!path.closed_ && !path.in_.empty()) {
    path.read();
  }
  path.close(Status(
      StatusCode::kNetwork, "shared memory was closed by the other end"));
}

// --- waking

// Always after something was published: see shared_memory.h. The exchange makes
// one of several wakers write; the eventfd is never read, because it is watched
// edge-triggered.
void SharedPath::wakePeer() {
  if (theirs_.asleep.load() != 0 && theirs_.asleep.exchange(0) != 0) {
    const uint64_t one = 1;
    (void)!::write(ends_.wakeTheirs.get(), &one, sizeof(one));
  }
}

void SharedPath::wakePeerForRoom() {
  if (in_.read() >= theirs_.wakeAtRead.load()) {
    wakePeer();
  }
}

void SharedPath::setAsleep(bool asleep) {
  if (asleep) {
    mine_.processor.store(0, std::memory_order_relaxed);
  } else {
    sayWhere();
  }
  mine_.asleep.store(asleep);
}

void SharedPath::sayWhere() {
  mine_.processor.store(
      static_cast<uint32_t>(::sched_getcpu() + 1), std::memory_order_relaxed);
}

bool SharedPath::writerIsOn(int processor) const {
  const uint32_t at = theirs_.processor.load(std::memory_order_relaxed);
  return at != 0 && at == static_cast<uint32_t>(processor + 1);
}

bool SharedPath::hasNews() {
  return !in_.empty() || out_.reached(wakeAtRead_, wakeAtDone_) ||
      ((theirs_.avoids.load() | mine_.avoids.load()) != 0) != avoided_;
}

// Frames wait for room, or half a frame has been read: the peer is at work on
// it.
bool SharedPath::inMidst() const {
  return full_ || reader_.missing() != 0;
}

void SharedPath::onNews() {
  lookAtAvoidance();
  // A refusal is written before what it refuses is done: so it is read first.
  if (refresh()) {
    read();
    acknowledge();
  }
}

// --- avoiding it

void SharedPath::avoid(bool avoid) {
  if (!closed_ && (mine_.avoids.load() != 0) != avoid) {
    mine_.avoids.store(avoid);
    wakePeer();
    lookAtAvoidance();
  }
}

void SharedPath::lookAtAvoidance() {
  const bool avoided = (theirs_.avoids.load() | mine_.avoids.load()) != 0;
  if (avoided != avoided_) {
    avoided_ = avoided;
    owner_.onPathUse(*this);
  }
}

// --- writing

bool SharedPath::hasRoom() const {
  return !closed_ && !avoided_ && unwrittenBytes_ < kBatchBytes &&
      !(full_ && unwrittenBytes_ != 0);
}

size_t SharedPath::takeFrame(bool chunks) {
  const OutFrame* const frame = channel_.pull(id(), loop_.now(), chunks);
  if (frame == nullptr) {
    return 0;
  }
  const size_t bytes = kFrameHeaderBytes + frame->payloadBytes;
  unwrittenBytes_ += bytes;
  return bytes;
}

// All of it, or until the ring is full.
//
// The bytes are published after each piece, so the peer copies one piece while
// this side writes the next. The last piece is left to writeOut(), which
// publishes once for all frames.
bool SharedPath::put(const std::byte* data, size_t bytes) {
  while (bytes != 0) {
    const size_t n = out_.put(data, std::min(bytes, kPiece));
    frontWritten_ += n;
    data += n;
    bytes -= n;
    if (n == 0) {
      const uint64_t before = out_.read();
      if (!refresh() || out_.read() == before) {
        return false;
      }
    } else if (bytes != 0) {
      out_.publish();
      wakePeer();
    }
  }
  return true;
}

bool SharedPath::flush() {
  const bool wasFull = full_;
  writeOut();
  finish();
  return wasFull && !full_;
}

// How it works. Frames stay with the channel until they lie in the ring whole;
// the front one may be there in part, frontWritten_ bytes of it. Each whole
// frame is noted with its end in the ring, by which acknowledge() finds it. At
// the end come publish and wakePeer, in that order, and then the positions for
// which the peer shall wake us.
void SharedPath::writeOut() {
  if (closed_) {
    return;
  }
  full_ = false;
  const uint64_t before = out_.written();
  while (!channel_.unwritten(id()).empty()) {
    const OutFrame& f = channel_.unwritten(id()).front();
    const size_t size = kFrameHeaderBytes + f.payloadBytes;
    if ((frontWritten_ < kFrameHeaderBytes &&
         !put(
             f.header.data() + frontWritten_,
             kFrameHeaderBytes - frontWritten_)) ||
        !put(
            f.payload + (frontWritten_ - kFrameHeaderBytes),
            size - frontWritten_)) {
      full_ = true;
      break;
    }
    frontWritten_ = 0;
    unwrittenBytes_ -= size;
    undone_.push_back({out_.written(), f.reliable});
    if (f.ackNow) {
      asked_.push_back(out_.written());
    }
    channel_.popWritten(id());
  }
  if (closed_) {
    return;
  }
  if (out_.written() != before) {
    sayWhere();
    out_.publish();
    wakePeer();
  }
  setWakeAt();
  lookLater();
}

// The answers to what was read, if any, have been written.
void SharedPath::finish() {
  if (!closed_ && in_.finish()) {
    if (in_.read() >= theirs_.wakeAtDone.load()) {
      wakePeer();
    }
  }
}

bool SharedPath::refresh() {
  if (!closed_ && !out_.refresh()) {
    close(Status(StatusCode::kProtocol, "peer broke the shared memory"));
  }
  return !closed_;
}

// By what refresh() has shown.
void SharedPath::acknowledge() {
  if (closed_) {
    return;
  }
  const uint64_t before = framesDone_;
  while (!undone_.empty() && undone_.front().end <= out_.done()) {
    framesDone_ += undone_.front().reliable;
    undone_.pop_front();
  }
  while (!asked_.empty() && asked_.front() <= out_.done()) {
    asked_.pop_front();
  }
  const bool writable = full_ && out_.room() != 0;
  setWakeAt();
  if (framesDone_ != before) {
    lookAfter_ = kLookAfter;
    channel_.delivered(id(), framesDone_, loop_.now());
  }
  if (writable) {
    writeOut();
    owner_.onPathReady(*this);
  }
}

// The peer wakes us only for these positions. An acknowledgement that no
// operation waits for costs no wake-up; lookLater() finds it.
void SharedPath::setWakeAt() {
  wakeAtDone_ = asked_.empty() ? kNowhere : asked_.front();
  // Room for a quarter of the ring: worth a wake-up.
  wakeAtRead_ = full_ ? out_.written() - out_.capacity() / 4 * 3 : kNowhere;
  mine_.wakeAtDone.store(wakeAtDone_);
  mine_.wakeAtRead.store(wakeAtRead_);
}

// Backs off while nothing moves. A peer that stands still then costs one
// wake-up a second.
void SharedPath::lookLater() {
  if (closed_ || lookTimer_ != 0 || undone_.empty()) {
    return;
  }
  lookTimer_ = loop_.after(lookAfter_, [this] {
    lookTimer_ = 0;
    lookAfter_ = std::min(2 * lookAfter_, kLookAtLast);
    if (refresh()) {
      acknowledge();
      lookLater();
    }
  });
}

// --- reading

// Reads at most kReadPerTurn bytes; the rest is still news in the next turn.
// Room is announced after every piece, `done` only at the end of the turn, by
// flush().
void SharedPath::read() {
  size_t total = 0;
  owner_.onPathReady(*this); // flush() says that it is done with
  while (!closed_ && total < kReadPerTurn) {
    std::span<const std::byte> bytes;
    Status status;
    if (!in_.peek(bytes)) {
      status = Status(StatusCode::kProtocol, "peer broke the shared memory");
    } else if (bytes.empty()) {
      return;
    } else {
      bytes = bytes.first(std::min(bytes.size(), kPiece));
      heardAt_ = loop_.now();
      status = reader_.consume(bytes.data(), bytes.size(), heardAt_);
      total += bytes.size();
      in_.pop(bytes.size());
      wakePeerForRoom();
    }
    if (!status.ok()) {
      close(status);
    }
  }
}

} // namespace resilient
