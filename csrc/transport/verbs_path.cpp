#include "transport/verbs_path.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace resilient {
VerbsPath::VerbsPath(
    EventLoop& loop,
    Channel& channel,
    PathId id,
    std::unique_ptr<VerbsEnd> end,
    VerbsPathConfig config,
    PathOwner& owner)
    : RoutePath(PathKind::kVerbs, id, channel, owner),
      loop_(loop),
      end_(std::move(end)),
      config_(std::move(config)),
      device_(end_->port().device),
      reader_(channel, id),
      silenceLimit_(config_.silentAfter),
      startedAt_(loop.now()),
      heardAt_(loop.now()),
      reads_(
          channel,
          id,
          *end_,
          config_.loans,
          config_.remoteReads,
          pending_,
          counted_),
      sender_(
          loop,
          channel,
          id,
          *end_,
          config_.faults,
          config_.loans,
          !reads_.isOff(),
          pending_,
          counted_) {
  if (config_.loans != nullptr) {
    config_.loans->use(end_->sharedDevice());
  }
  counted_.device = device_;
  counted_.remoteDevice = config_.remoteDevice;
  counted_.port = end_->port().port;
  counted_.queuePair = end_->queuePair().address().queuePair;
  counted_.mtuBytes = config_.mtuBytes;
  counted_.receives = VerbsEnd::kSlots;
  channel_.addPath(id, loop_.now());
  channel_.setClasses(id, 0); // the owner's to give
  loop_.add(end_->queuePair().fd(), EPOLLIN, this);
  loop_.add(static_cast<Poller*>(this));
  // Not from here: the owner must not be called from its constructor.
  loop_.post([this, alive = std::weak_ptr(alive_)] {
    if (alive.lock() && !closed_ && config_.initiator) {
      // The far end is connected already. It is proven by this send.
      afterSending(sender_.greet(posted_));
    }
  });
  armTimer();
}

VerbsPath::~VerbsPath() {
  if (!closed_) {
    closed_ = true;
    this->end();
    channel_.removePath(id(), loop_.now());
  }
}

std::string VerbsPath::where() const {
  return device_ + " -> " + config_.remoteDevice;
}

std::string VerbsPath::about() const {
  return where() + ", MTU " + std::to_string(config_.mtuBytes);
}

void VerbsPath::fill(PathStats& stats) const {
  Path::fill(stats);
  const VerbsStats before = stats.verbs.value_or(VerbsStats());
  VerbsStats& sum = stats.verbs.emplace(counted_);
  sum.completed += before.completed;
  sum.failed += before.failed;
  sum.sends += before.sends;
  sum.receives += before.receives;
  sum.reads += before.reads;
  sum.copiedBytes += before.copiedBytes;
  sum.readBytes += before.readBytes;
  sum.placedBytes += before.placedBytes;
}

// The device may take its time to let go of the end, so a thread waits for it.
// A read may land until its completion has come. The channel
// outlives the loop's turns.
void VerbsPath::end() {
  loop_.cancel(timer_);
  loop_.cancel(faultTimer_);
  timer_ = faultTimer_ = 0;
  loop_.remove(static_cast<Poller*>(this));
  loop_.remove(end_->queuePair().fd());
  if (config_.loans == nullptr) {
    std::thread([end = std::move(end_)]() mutable { end.reset(); }).detach();
    return;
  }
  std::optional<uint64_t> lastRead = reads_.newest();
  const auto isLast = [&](const VerbsCompletion& c) {
    return c.request == lastRead;
  };
  if (std::ranges::any_of(completions_, isLast) ||
      std::ranges::any_of(taken_, isLast)) {
    lastRead.reset(); // polled already
  }
  config_.loans->destroy(
      std::shared_ptr<VerbsEnd>(std::move(end_)),
      lastRead,
      [&channel = channel_, id = id()] { channel.endPins(id); });
}

void VerbsPath::close(const Status& why) {
  if (closed_) {
    return;
  }
  closed_ = true;
  end();
  owner_.onPathClosed(*this, why); // may still ask the channel about it
  channel_.removePath(id(), loop_.now());
}

// Tells the owner if usable() has changed.
void VerbsPath::setUse(bool& flag, bool value) {
  const bool before = usable();
  flag = value;
  if (usable() != before) {
    owner_.onPathUse(*this);
  }
}

void VerbsPath::faultsChanged(bool concerned) {
  if (closed_) {
    return;
  }
  if (config_.faults != nullptr) {
    concerned = config_.faults->namesOthers();
    // Later: it may close the path, and the owner may not have it yet.
    loop_.post([this, alive = std::weak_ptr(alive_)] {
      if (alive.lock()) {
        lookAtFaults();
      }
    });
  }
  if (avoided_ != concerned) {
    setUse(avoided_, concerned);
  }
}

// --- writing

bool VerbsPath::hasRoom() const {
  return usable() && sender_.hasRoom();
}

size_t VerbsPath::takeFrame(bool chunks) {
  return sender_.takeFrame(chunks);
}

// The far end may be waiting for receives while we have nothing to send.
bool VerbsPath::flush() {
  if (closed_ || !proven_) {
    return false;
  }
  const bool wasFull = sender_.isFull();
  Status status = sender_.writeFrames(posted_);
  if (status.ok()) {
    status = sender_.tellPosted(posted_);
  }
  afterSending(status);
  return !closed_ && wasFull && !sender_.isFull();
}

void VerbsPath::afterSending(const Status& status) {
  if (!status.ok()) {
    close(status);
    return;
  }
  if (timer_ == 0) {
    armTimer();
  }
  armFaultTimer();
}

// --- completions

// The loop then asks hasNews().
void VerbsPath::onEvents(uint32_t) {
  end_->queuePair().takeNotifications();
  armed_ = false;
}

void VerbsPath::setAsleep(bool asleep) {
  if (asleep && !armed_ && !closed_) {
    armed_ = true;
    if (const Status status = end_->queuePair().arm(); !status.ok()) {
      polled_ = status;
    }
  }
}

bool VerbsPath::hasNews() {
  if (!closed_ && completions_.empty() && polled_.ok() &&
      !sender_.isDropping()) {
    polled_ = end_->queuePair().poll(completions_, kCompletionsPerTurn);
  }
  return !closed_ && !(completions_.empty() && polled_.ok());
}

void VerbsPath::onNews() {
  taken_.clear();
  taken_.swap(completions_);
  for (const VerbsCompletion& completion : taken_) {
    if (closed_) {
      return;
    }
    onCompletion(completion);
  }
  if (closed_) {
    return;
  }
  // Slots may have waited while the path was silent.
  Status status = polled_;
  if (status.ok()) {
    status = readArrived();
  }
  if (!status.ok()) {
    close(status);
  }
  if (closed_) {
    return;
  }
  armTimer();
  sender_.setNotFull(); // flush() will tell
  owner_.onPathReady(*this);
}

void VerbsPath::onCompletion(const VerbsCompletion& completion) {
  if (completion.result != VerbsCompletion::Result::kOk) {
    ++counted_.failed;
    close(Status(StatusCode::kNetwork, where() + ": " + completion.why));
    return;
  }
  ++counted_.completed;
  heardAt_ = loop_.now();
  if (completion.request >= VerbsEnd::kFirstRead) {
    onRead();
    return;
  }
  if (completion.request >= VerbsEnd::kReceives) {
    const auto slot =
        static_cast<uint32_t>(completion.request - VerbsEnd::kReceives);
    prove();
    if (closed_) {
      return;
    }
    if (const Status status = onReceived(slot, completion.bytes);
        !status.ok()) {
      close(status);
    }
    return;
  }
  sender_.onSent(static_cast<uint32_t>(completion.request));
  answered();
}

// The NIC of the far end has answered.
void VerbsPath::answered() {
  if (!silent_) {
    silenceLimit_.onAnswer(loop_.now() - pending_.since);
  }
  pending_.completed(loop_.now());
  prove();
  if (!closed_ && silent_) {
    setUse(silent_, false);
  }
}

void VerbsPath::onRead() {
  const std::optional<uint32_t> bytes = reads_.complete();
  if (!bytes) {
    close(
        Status(StatusCode::kInternal, where() + ": a read that was not asked"));
    return;
  }
  readTime_.onRead(*bytes, loop_.now() - pending_.since);
  answered();
  if (closed_) {
    return;
  }
  Status status = finishReads();
  if (status.ok()) {
    status = readArrived();
  }
  if (!status.ok()) {
    close(status);
  }
}

Status VerbsPath::onReceived(uint32_t slot, size_t bytes) {
  VerbsSlotHeader header;
  if (bytes < sizeof(header) || bytes > VerbsEnd::kSlotBytes) {
    return Status(StatusCode::kProtocol, "peer sent a slot of a wrong size");
  }
  std::memcpy(&header, end_->receiveSlot(slot), sizeof(header));
  if (Status status = sender_.onHeader(header); !status.ok()) {
    return status;
  }
  arrived_.push_back({slot, bytes, sizeof(header)});
  return readArrived();
}

// In order, and no further than to a frame that must wait for a read. The slot
// of what waits is not free, so the sender cannot go on for ever.
Status VerbsPath::readArrived() {
  Status status;
  while (status.ok() && !closed_ && !arrived_.empty()) {
    Arrived& front = arrived_.front();
    status = readSlot(front);
    if (!status.ok() || closed_ || front.at < front.bytes) {
      break;
    }
    const uint32_t slot = front.slot;
    arrived_.pop_front();
    status = end_->receive(slot);
    ++posted_;
    ++counted_.receives;
  }
  return status;
}

Status VerbsPath::readSlot(Arrived& arrived) {
  const std::byte* const data = end_->receiveSlot(arrived.slot);
  while (!closed_ && arrived.at < arrived.bytes) {
    const std::byte* const next = data + arrived.at;
    const size_t left = arrived.bytes - arrived.at;
    if (reader_.betweenFrames() && left >= kVerbsReferenceBytes &&
        isReference(
            std::span<const std::byte, kFrameHeaderBytes>(
                next, kFrameHeaderBytes))) {
      // A path that is silent might not bring it, and would keep its place.
      if (!reads_.hasRoom() || silent_) {
        return Status();
      }
      if (Status status = startRead(next); !status.ok()) {
        return status;
      }
      arrived.at += kVerbsReferenceBytes;
      continue;
    }
    if (!reads_.isEmpty()) {
      return Status();
    }
    const size_t taken = std::min(left, reader_.wants());
    if (Status status = reader_.consume(next, taken, heardAt_); !status.ok()) {
      return status;
    }
    arrived.at += taken;
    counted_.copiedBytes += taken;
  }
  return Status();
}

Status VerbsPath::startRead(const std::byte* data) {
  Status status = reads_.start(data, loop_.now());
  if (status.ok()) {
    armTimer();
    status = finishReads(); // nobody may need it
  }
  return status;
}

// Those that are here, in the order of their frames.
Status VerbsPath::finishReads() {
  Status status;
  while (status.ok() && !closed_ && reads_.canFinish()) {
    status = reads_.finish(heardAt_);
  }
  return status;
}

void VerbsPath::prove() {
  if (!proven_) {
    setUse(proven_, true);
  }
}

// --- injected faults

void VerbsPath::armFaultTimer() {
  loop_.cancel(faultTimer_);
  faultTimer_ = 0;
  if (const TimePoint at = sender_.nextFault(); at != kNever) {
    faultTimer_ = loop_.at(at, [this] {
      faultTimer_ = 0;
      lookAtFaults();
    });
  }
}

void VerbsPath::lookAtFaults() {
  if (closed_) {
    return;
  }
  afterSending(sender_.lookAtFaults());
  if (!closed_) {
    owner_.onPathReady(*this); // there may be room again
  }
}

// --- time

Nanos VerbsPath::silentAfter() const {
  const Nanos limit = silenceLimit_.limit();
  const auto oldest = reads_.oldest();
  return oldest ? limit + readTime_.of(*oldest) : limit;
}

// All sends have completed, but the far end has not acknowledged their frames.
// It may be busy; or what it has sent since, or wants to read, is lost. Only
// another send tells which.
TimePoint VerbsPath::probeAt() const {
  if (!usable() || pending_.count != 0) {
    return kNever;
  }
  const TimePoint since = channel_.waitingSince(id());
  return since == kNever ? kNever
                         : std::max({since, pending_.since, probedAt_}) +
          silenceLimit_.limit() / 2;
}

void VerbsPath::armTimer() {
  loop_.cancel(timer_);
  timer_ = 0;
  TimePoint at = kNever;
  if (!proven_) {
    at = startedAt_ + config_.proveWithin;
  } else if (pending_.count != 0) {
    at = pending_.since + (silent_ ? config_.closeAfter : silentAfter());
  } else {
    at = probeAt();
  }
  if (at != kNever) {
    timer_ = loop_.at(at, [this] {
      timer_ = 0;
      onTimer();
    });
  }
}

// Completions that have come, and that nobody has looked at since this process
// was busy, are no silence.
void VerbsPath::onTimer() {
  if (hasNews()) {
    onNews();
  }
  if (closed_) {
    return;
  }
  const TimePoint now = loop_.now();
  if (!proven_ && now >= startedAt_ + config_.proveWithin) {
    close(Status(StatusCode::kNetwork, "nothing came through: " + where()));
    return;
  }
  if (probeAt() <= now) {
    probedAt_ = now;
    if (const Status status = sender_.probe(posted_); !status.ok()) {
      close(status);
      return;
    }
  }
  if (proven_ && !silent_ && pending_.count != 0 &&
      now >= pending_.since + silentAfter()) {
    if (reads_.bytesUnderWay() != 0) {
      // What is read may land at any time until the queue pair is fenced, and
      // its receives cannot end before.
      close(Status(StatusCode::kNetwork, where() + ": no answer to a read"));
      return;
    }
    setUse(silent_, true);
  }
  if (!closed_ && silent_ && pending_.count != 0 &&
      now >= pending_.since + config_.closeAfter) {
    close(Status(
        StatusCode::kNetwork,
        where() + ": no send was completed for " +
            durationText(now - pending_.since)));
  }
  if (!closed_) {
    armTimer();
  }
}

} // namespace resilient
