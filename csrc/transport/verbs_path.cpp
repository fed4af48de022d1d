#include "transport/verbs_path.h"

#include <sys/epoll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace resilient {
namespace {

constexpr size_t kMemoryBytes = 2 * VerbsEnd::kSlots * VerbsEnd::kSlotBytes;

} // namespace

// --- one end

void VerbsEnd::Free::operator()(std::byte* memory) const {
  ::munmap(memory, kMemoryBytes);
}

Status VerbsEnd::make(
    VerbsApi& api,
    const VerbsPort& port,
    std::unique_ptr<VerbsEnd>& end) {
  std::unique_ptr<VerbsEnd> made(new VerbsEnd());
  made->port_ = port;
  void* const memory = ::mmap(
      nullptr,
      kMemoryBytes,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (memory == MAP_FAILED) {
    return Status(StatusCode::kInternal, "no memory for an RDMA connection");
  }
  made->memory_.reset(static_cast<std::byte*>(memory));
  // A child has no use for it. Kernels before 5.12 would give the pages that
  // the device knows to whichever process writes first after a fork.
  (void)::madvise(memory, kMemoryBytes, MADV_DONTFORK);
  Status status = api.open(port.device, made->device_);
  if (status.ok()) {
    status = made->device_->registerMemory(
        {made->memory_.get(), kMemoryBytes}, made->registered_);
  }
  if (status.ok()) {
    status = made->device_->makeQueuePair(port, kSlots, made->queuePair_);
  }
  for (uint32_t slot = 0; status.ok() && slot < kSlots; ++slot) {
    status = made->receive(slot);
  }
  if (status.ok()) {
    end = std::move(made);
  }
  return status;
}

// The queue pair must be gone before its memory is deregistered.
VerbsEnd::~VerbsEnd() {
  if (queuePair_) {
    (void)queuePair_->fence();
    queuePair_.reset();
  }
}

Status VerbsEnd::send(uint32_t slot, size_t bytes) {
  return queuePair_->postSend(slot, *registered_, {sendSlot(slot), bytes});
}

Status VerbsEnd::receive(uint32_t slot) {
  return queuePair_->postReceive(
      kReceives + slot, *registered_, {receiveSlot(slot), kSlotBytes});
}

// --- the path

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
      startedAt_(loop.now()),
      heardAt_(loop.now()) {
  for (uint32_t slot = VerbsEnd::kSlots; slot-- > 0;) {
    freeSlots_.push_back(slot);
  }
  channel_.addPath(id, loop_.now());
  channel_.setClasses(id, 0); // the owner's to give
  loop_.add(end_->queuePair().fd(), EPOLLIN, this);
  // Not from here: the owner must not be called from its constructor.
  loop_.post([this, alive = std::weak_ptr(alive_)] {
    if (alive.lock() && !closed_) {
      if (config_.initiator) {
        // The far end is connected already. It is proven by this send.
        openSlot();
        if (const Status status = postSlot(); !status.ok()) {
          close(status);
          return;
        }
      }
      look();
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

// The device may take its time to let go of the end, so a thread waits for it.
// Memory of others is not involved.
void VerbsPath::end() {
  loop_.cancel(timer_);
  timer_ = 0;
  loop_.remove(end_->queuePair().fd());
  std::thread([end = std::move(end_)]() mutable { end.reset(); }).detach();
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
  if (!closed_ && avoided_ != concerned) {
    setUse(avoided_, concerned);
  }
}

// --- writing

bool VerbsPath::hasRoom() const {
  return usable() && unwrittenBytes_ < kBatchBytes &&
      !(full_ && unwrittenBytes_ != 0);
}

size_t VerbsPath::takeFrame(bool chunks) {
  const OutFrame* const frame = channel_.pull(id(), loop_.now(), chunks);
  if (frame == nullptr) {
    return 0;
  }
  const size_t bytes = kFrameHeaderBytes + frame->payloadBytes;
  unwrittenBytes_ += bytes;
  return bytes;
}

// `reserve`: receives of the far end that must be left.
bool VerbsPath::mayPost(uint32_t reserve) const {
  return !freeSlots_.empty() && peerPosted_ - sent_ > reserve;
}

void VerbsPath::openSlot() {
  slot_ = static_cast<int>(freeSlots_.back());
  freeSlots_.pop_back();
  slotBytes_ = sizeof(SlotHeader);
}

Status VerbsPath::postSlot() {
  SlotHeader header;
  header.posted = told_ = posted_;
  const auto slot = static_cast<uint32_t>(std::exchange(slot_, -1));
  std::memcpy(end_->sendSlot(slot), &header, sizeof(header));
  if (pending_++ == 0) {
    pendingSince_ = loop_.now();
    armTimer();
  }
  ++sent_;
  return end_->send(slot, slotBytes_);
}

// Fills slots with frames until there are no more of one or the other. The
// channel may forget a frame as soon as it is copied.
void VerbsPath::writeOut() {
  full_ = false;
  Status status;
  while (status.ok() && !channel_.unwritten(id()).empty()) {
    if (slot_ < 0) {
      if (!mayPost(1)) {
        full_ = true;
        break;
      }
      openSlot();
    }
    const OutFrame& f = channel_.unwritten(id()).front();
    const size_t size = kFrameHeaderBytes + f.payloadBytes;
    std::byte* const to =
        end_->sendSlot(static_cast<uint32_t>(slot_)) + slotBytes_;
    const size_t room = VerbsEnd::kSlotBytes - slotBytes_;
    size_t taken = 0;
    if (frontWritten_ < kFrameHeaderBytes) {
      taken = std::min(room, kFrameHeaderBytes - frontWritten_);
      std::memcpy(to, f.header.data() + frontWritten_, taken);
    }
    const size_t payload = std::min(room - taken, size - frontWritten_ - taken);
    if (payload != 0) {
      std::memcpy(
          to + taken,
          f.payload + (frontWritten_ + taken - kFrameHeaderBytes),
          payload);
    }
    slotBytes_ += taken + payload;
    frontWritten_ += taken + payload;
    if (frontWritten_ == size) {
      frontWritten_ = 0;
      unwrittenBytes_ -= size;
      channel_.popWritten(id());
    }
    if (slotBytes_ == VerbsEnd::kSlotBytes) {
      status = postSlot();
    }
  }
  if (status.ok() && slot_ >= 0) {
    status = postSlot();
  }
  if (!status.ok()) {
    close(status);
  }
}

// The far end may be waiting for receives while we have nothing to send.
void VerbsPath::tellPosted() {
  if (!closed_ && posted_ - told_ >= VerbsEnd::kSlots / 2 && mayPost(0)) {
    openSlot();
    if (const Status status = postSlot(); !status.ok()) {
      close(status);
    }
  }
}

bool VerbsPath::flush() {
  if (closed_ || !proven_) {
    return false;
  }
  const bool wasFull = full_;
  writeOut();
  tellPosted();
  return !closed_ && wasFull && !full_;
}

// --- completions

void VerbsPath::onEvents(uint32_t) {
  end_->queuePair().takeNotifications();
  look();
}

// Notifications are asked for before the last look: a completion that comes in
// between is seen by one of the two.
void VerbsPath::look() {
  VerbsQueuePair& queuePair = end_->queuePair();
  Status status = queuePair.arm();
  if (status.ok()) {
    completions_.clear();
    status = queuePair.poll(completions_, kCompletionsPerTurn);
  }
  const bool full = full_;
  for (const VerbsCompletion& completion : completions_) {
    if (closed_) {
      return;
    }
    onCompletion(completion);
  }
  if (closed_) {
    return;
  }
  if (!status.ok()) {
    close(status);
    return;
  }
  if (completions_.size() == kCompletionsPerTurn) {
    loop_.post([this, alive = std::weak_ptr(alive_)] {
      if (alive.lock() && !closed_) {
        look();
      }
    });
  }
  if (!completions_.empty()) {
    armTimer();
    if (full) {
      full_ = false; // flush() will tell
    }
    owner_.onPathReady(*this);
  }
}

void VerbsPath::onCompletion(const VerbsCompletion& completion) {
  if (completion.result != VerbsCompletion::Result::kOk) {
    close(Status(StatusCode::kNetwork, where() + ": " + completion.why));
    return;
  }
  heardAt_ = loop_.now();
  if (completion.request >= VerbsEnd::kReceives) {
    const auto slot =
        static_cast<uint32_t>(completion.request - VerbsEnd::kReceives);
    prove();
    if (closed_) {
      return;
    }
    Status status = onReceived(slot, completion.bytes);
    if (status.ok()) {
      status = end_->receive(slot);
      ++posted_;
    }
    if (!status.ok()) {
      close(status);
    }
    return;
  }
  freeSlots_.push_back(static_cast<uint32_t>(completion.request));
  --pending_;
  pendingSince_ = loop_.now();
  prove();
  if (!closed_ && silent_) {
    setUse(silent_, false);
  }
}

// The word of the far end is checked: it cannot have seen more sends than
// there were.
Status VerbsPath::onReceived(uint32_t slot, size_t bytes) {
  SlotHeader header;
  if (bytes < sizeof(header) || bytes > VerbsEnd::kSlotBytes) {
    return Status(StatusCode::kProtocol, "peer sent a slot of a wrong size");
  }
  const std::byte* const data = end_->receiveSlot(slot);
  std::memcpy(&header, data, sizeof(header));
  if (header.zero != 0 || header.posted - VerbsEnd::kSlots > sent_ ||
      header.posted - peerPosted_ > VerbsEnd::kSlots) {
    return Status(
        StatusCode::kProtocol, "peer posted more receives than it has slots");
  }
  peerPosted_ = header.posted;
  return reader_.consume(
      data + sizeof(header), bytes - sizeof(header), heardAt_);
}

void VerbsPath::prove() {
  if (!proven_) {
    setUse(proven_, true);
  }
}

// --- time

void VerbsPath::armTimer() {
  loop_.cancel(timer_);
  timer_ = 0;
  TimePoint at = kNever;
  if (!proven_) {
    at = startedAt_ + config_.proveWithin;
  } else if (pending_ != 0 && !silent_) {
    at = pendingSince_ + config_.silentAfter;
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
  look();
  if (closed_) {
    return;
  }
  const TimePoint now = loop_.now();
  if (!proven_ && now >= startedAt_ + config_.proveWithin) {
    close(Status(StatusCode::kNetwork, "nothing came through: " + where()));
    return;
  }
  if (proven_ && !silent_ && pending_ != 0 &&
      now >= pendingSince_ + config_.silentAfter) {
    setUse(silent_, true);
  }
  if (!closed_) {
    armTimer();
  }
}

} // namespace resilient
