#include "transport/verbs_path.h"

#include <sys/epoll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace resilient {
namespace {

static_assert(VerbsEnd::kMaxReadBytes <= VerbsLoans::kMaxFound);

constexpr size_t kMemoryBytes = 2 * VerbsEnd::kSlots * VerbsEnd::kSlotBytes;

} // namespace

// --- one end

void VerbsEnd::Free::operator()(std::byte* memory) const {
  ::munmap(memory, kMemoryBytes);
}

Status VerbsEnd::make(
    VerbsApi& api,
    const VerbsPort& port,
    VerbsQueuePairConfig config,
    std::unique_ptr<VerbsEnd>& end) {
  config.depth = kSlots + kReads;
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
        {made->memory_.get(), kMemoryBytes},
        /*forReads=*/false,
        made->registered_);
  }
  if (status.ok()) {
    status = made->device_->makeQueuePair(port, config, made->queuePair_);
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

Status VerbsEnd::readBuffer(std::span<std::byte>& bytes, VerbsMemory*& memory) {
  if (readBufferMemory_ == nullptr) {
    readBuffer_ = std::make_unique_for_overwrite<std::byte[]>(kMaxReadBytes);
    const Status status = device_->registerMemory(
        {readBuffer_.get(), kMaxReadBytes},
        /*forReads=*/false,
        readBufferMemory_);
    if (!status.ok()) {
      return status;
    }
  }
  bytes = {readBuffer_.get(), kMaxReadBytes};
  memory = readBufferMemory_.get();
  return Status();
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
      silenceLimit_(config_.silentAfter),
      startedAt_(loop.now()),
      heardAt_(loop.now()),
      maxReads_(
          std::min<size_t>(
              config_.remoteReads,
              end_->queuePair().address().reads)) {
  if (config_.loans != nullptr) {
    config_.loans->use(end_->sharedDevice());
  }
  for (uint32_t slot = VerbsEnd::kSlots; slot-- > 0;) {
    freeSlots_.push_back(slot);
  }
  counted_.device = device_;
  counted_.remoteDevice = config_.remoteDevice;
  counted_.port = end_->port().port;
  counted_.queuePair = end_->queuePair().address().queuePair;
  counted_.mtuBytes = config_.mtuBytes;
  counted_.receives = VerbsEnd::kSlots;
  if (config_.faults != nullptr) {
    config_.faults->connectionOpened(loop_.now());
  }
  channel_.addPath(id, loop_.now());
  channel_.setClasses(id, 0); // the owner's to give
  loop_.add(end_->queuePair().fd(), EPOLLIN, this);
  loop_.add(static_cast<Poller*>(this));
  // Not from here: the owner must not be called from its constructor.
  loop_.post([this, alive = std::weak_ptr(alive_)] {
    if (alive.lock() && !closed_) {
      if (config_.initiator) {
        // The far end is connected already. It is proven by this send.
        openSlot();
        if (const Status status = postSlot(); !status.ok()) {
          close(status);
        }
      }
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
  sum.flushed += before.flushed;
  sum.failed += before.failed;
  sum.sends += before.sends;
  sum.receives += before.receives;
  sum.reads += before.reads;
  sum.copiedBytes += before.copiedBytes;
  sum.readBytes += before.readBytes;
  sum.placedBytes += before.placedBytes;
}

// The device may take its time to let go of the end, so a thread waits for it.
// Until then, what was being read may still land. The channel outlives the
// loop's turns.
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
  config_.loans->destroy(
      std::shared_ptr<VerbsEnd>(std::move(end_)),
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
  if (hasFaults() &&
      config_.faults->linkFreeAt() > loop_.now() + kLimitedQueue) {
    return false;
  }
  return usable() && unwrittenBytes_ < kBatchBytes &&
      !(full_ && unwrittenBytes_ != 0) &&
      channel_.inFlightBytes(id()) < kReferAhead;
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
  ++sent_;
  counted_.copiedBytes += slotBytes_ - sizeof(header);
  if (hasFaults() || !held_.empty()) {
    held_.push_back({slot, slotBytes_, loop_.now()});
    if (hasFaults()) {
      held_.back().due = config_.faults->release(loop_.now(), slotBytes_);
    }
    return releaseHeld();
  }
  addPending();
  return post(slot, slotBytes_);
}

void VerbsPath::addPending() {
  if (pending_++ == 0) {
    pendingSince_ = loop_.now();
    armTimer();
  }
}

Status VerbsPath::post(uint32_t slot, size_t bytes) {
  ++counted_.sends;
  postedBytes_ += bytes;
  return end_->send(slot, bytes);
}

// Writes a reference to the payload of the frame, which is the next. False: it
// goes as it is.
bool VerbsPath::refer(const OutFrame& frame, Status& status) {
  if (!frame.mayRefer || hasFaults() || frame.payloadBytes < kReferFrom ||
      frame.payloadBytes > VerbsEnd::kMaxReadBytes || maxReads_ == 0 ||
      config_.loans == nullptr) {
    return false;
  }
  VerbsMemory* const memory =
      config_.loans->find(end_->device(), {frame.payload, frame.payloadBytes});
  if (memory == nullptr) {
    return false;
  }
  if (VerbsEnd::kSlotBytes - slotBytes_ < kReferenceBytes) {
    status = postSlot(); // it must be whole in one
    if (!status.ok() || !mayPost(1)) {
      full_ = full_ || status.ok();
      return true;
    }
    openSlot();
  }
  Reference reference;
  reference.address = reinterpret_cast<uintptr_t>(frame.payload);
  reference.key = memory->remoteKey();
  const FrameBytes header = asReference(frame.header);
  std::byte* const to =
      end_->sendSlot(static_cast<uint32_t>(slot_)) + slotBytes_;
  std::memcpy(to, header.data(), kFrameHeaderBytes);
  std::memcpy(to + kFrameHeaderBytes, &reference, sizeof(reference));
  slotBytes_ += kReferenceBytes;
  unwrittenBytes_ -= kFrameHeaderBytes + frame.payloadBytes;
  channel_.popReferred(id());
  return true;
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
    if (frontWritten_ == 0 && refer(f, status)) {
      if (full_) {
        break;
      }
      if (status.ok() && slotBytes_ == VerbsEnd::kSlotBytes) {
        status = postSlot();
      }
      continue;
    }
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
  if (!closed_ && completions_.empty() && polled_.ok() && !isDropping()) {
    polled_ = end_->queuePair().poll(completions_, kCompletionsPerTurn);
  }
  return !closed_ && !(completions_.empty() && polled_.ok());
}

void VerbsPath::onNews() {
  const bool full = full_;
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
  if (!polled_.ok()) {
    close(polled_);
    return;
  }
  armTimer();
  if (full) {
    full_ = false; // flush() will tell
  }
  owner_.onPathReady(*this);
}

void VerbsPath::onCompletion(const VerbsCompletion& completion) {
  switch (completion.result) {
    case VerbsCompletion::Result::kOk:
      ++counted_.completed;
      break;
    case VerbsCompletion::Result::kFlushed:
      ++counted_.flushed;
      break;
    case VerbsCompletion::Result::kFailed:
      ++counted_.failed;
      break;
  }
  if (completion.result != VerbsCompletion::Result::kOk) {
    close(Status(StatusCode::kNetwork, where() + ": " + completion.why));
    return;
  }
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
  freeSlots_.push_back(static_cast<uint32_t>(completion.request));
  answered();
}

// The NIC of the far end has answered.
void VerbsPath::answered() {
  --pending_;
  if (!silent_) {
    silenceLimit_.onAnswer(loop_.now() - pendingSince_);
  }
  pendingSince_ = loop_.now();
  prove();
  if (!closed_ && silent_) {
    setUse(silent_, false);
  }
}

// Reads complete in the order in which they were posted.
void VerbsPath::onRead() {
  const auto read = std::ranges::find_if(
      reads_, [](const Read& r) { return r.wanted && !r.done; });
  if (read == reads_.end()) {
    close(
        Status(StatusCode::kInternal, where() + ": a read that was not asked"));
    return;
  }
  read->done = true;
  counted_.readBytes += read->header.payloadBytes;
  readingBytes_ -= read->header.payloadBytes;
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
    if (reader_.betweenFrames() && left >= kReferenceBytes &&
        isReference(
            std::span<const std::byte, kFrameHeaderBytes>(
                next, kFrameHeaderBytes))) {
      if (reads_.size() >= std::max<size_t>(maxReads_, 1) || bufferInUse_) {
        return Status();
      }
      if (Status status = startRead(next); !status.ok()) {
        return status;
      }
      arrived.at += kReferenceBytes;
      continue;
    }
    if (!reads_.empty()) {
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

// The claims of the far end: the size must fit the buffer, and the device
// checks the address and the key.
Status VerbsPath::startRead(const std::byte* data) {
  FrameBytes bytes;
  std::memcpy(bytes.data(), data, kFrameHeaderBytes);
  Read read;
  if (Status status = decodeFrame(bytes, read.header); !status.ok()) {
    return status;
  }
  std::memcpy(&read.from, data + kFrameHeaderBytes, sizeof(read.from));
  const uint32_t size = read.header.payloadBytes;
  if (read.header.type != FrameType::kData || read.from.zero != 0 ||
      (read.header.flags & kFlagOffer) != 0 || size == 0 ||
      size > VerbsEnd::kMaxReadBytes || maxReads_ == 0) {
    return Status(
        StatusCode::kProtocol, "peer refers to a payload that cannot be one");
  }
  VerbsMemory* memory = nullptr;
  const std::optional<Channel::Place> found =
      channel_.pin(id(), read.header, [&](std::span<std::byte> at) {
        memory = config_.loans == nullptr
            ? nullptr
            : config_.loans->find(end_->device(), at);
        return memory != nullptr;
      });
  if (!found) {
    return Status(
        StatusCode::kProtocol,
        "peer refers to message " + std::to_string(read.header.message) +
            ", which it has not announced");
  }
  const Channel::Place place = *found;
  read.wanted = place.wanted;
  read.pinned = place.pinned != nullptr;
  read.inBuffer = read.wanted && !read.pinned;
  std::span<std::byte> into(place.pinned, size);
  if (read.inBuffer) {
    std::span<std::byte> buffer;
    if (Status status = end_->readBuffer(buffer, memory); !status.ok()) {
      return status;
    }
    into = buffer.first(size);
    bufferInUse_ = true;
  }
  reads_.push_back(read);
  if (!read.wanted) {
    return finishReads();
  }
  readingBytes_ += size;
  ++counted_.reads;
  addPending();
  const Status status = end_->queuePair().postRead(
      nextRead_++, *memory, into, read.from.address, read.from.key);
  armTimer();
  return status;
}

// Tells the channel of payloads that are here, in the order of their frames.
Status VerbsPath::finishReads() {
  while (!closed_ && !reads_.empty() &&
         (reads_.front().done || !reads_.front().wanted)) {
    const Read read = reads_.front();
    reads_.pop_front();
    Status status = channel_.onHeader(id(), read.header, heardAt_);
    if (status.ok() && read.inBuffer) {
      std::span<std::byte> buffer;
      VerbsMemory* memory = nullptr;
      status = end_->readBuffer(buffer, memory);
      std::byte* const to = channel_.destination(id());
      if (to != nullptr && status.ok()) {
        std::memcpy(to, buffer.data(), read.header.payloadBytes);
      }
      bufferInUse_ = false;
    }
    if (status.ok()) {
      status = channel_.onPayload(id(), heardAt_);
    }
    if (!status.ok()) {
      return status;
    }
    if (read.pinned) {
      counted_.placedBytes += read.header.payloadBytes;
      channel_.unpin(id());
    }
  }
  return Status();
}

void VerbsPath::prove() {
  if (!proven_) {
    setUse(proven_, true);
  }
}

// --- injected faults

// Posts slots in their order. Those that a stall or silence holds back are due,
// and have no answer: so it shows as silence.
Status VerbsPath::releaseHeld() {
  Status status;
  while (status.ok() && !held_.empty()) {
    Held& next = held_.front();
    const TimePoint now = loop_.now();
    size_t most = SIZE_MAX;
    if (hasFaults()) {
      if (next.due > now) {
        break;
      }
      most = config_.faults->bytesUntilCut(postedBytes_, now);
    }
    if (!next.pending) {
      next.pending = true;
      addPending();
    }
    if (hasFaults() &&
        (config_.faults->stalled(now) || config_.faults->dropping(now))) {
      break;
    }
    const Held slot = next;
    held_.pop_front();
    if (most < slot.bytes) {
      if (most > sizeof(SlotHeader)) {
        (void)post(slot.slot, most); // within a frame
      }
      return cut();
    }
    status = post(slot.slot, slot.bytes);
  }
  armFaultTimer();
  return status;
}

Status VerbsPath::cut() {
  config_.faults->cutDone(postedBytes_, loop_.now());
  return Status(StatusCode::kNetwork, "cut by fault injection");
}

void VerbsPath::armFaultTimer() {
  loop_.cancel(faultTimer_);
  faultTimer_ = 0;
  if (!hasFaults()) {
    return;
  }
  TimePoint at = config_.faults->nextChange(loop_.now());
  if (!held_.empty() && held_.front().due > loop_.now()) {
    at = std::min(at, held_.front().due);
  }
  if (at != kNever) {
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
  const bool cutNow = hasFaults() &&
      config_.faults->bytesUntilCut(postedBytes_, loop_.now()) == 0;
  if (const Status status = cutNow ? cut() : releaseHeld(); !status.ok()) {
    close(status);
    return;
  }
  owner_.onPathReady(*this); // there may be room again
}

// --- time

Nanos VerbsPath::silentAfter() const {
  const Nanos limit = silenceLimit_.limit();
  const auto oldest =
      std::ranges::find_if(reads_, [](const Read& r) { return !r.done; });
  return oldest == reads_.end()
      ? limit
      : limit + fromSeconds(oldest->header.payloadBytes / kSlowestBytesPerS);
}

void VerbsPath::armTimer() {
  loop_.cancel(timer_);
  timer_ = 0;
  TimePoint at = kNever;
  if (!proven_) {
    at = startedAt_ + config_.proveWithin;
  } else if (pending_ != 0) {
    at = pendingSince_ + (silent_ ? config_.closeAfter : silentAfter());
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
  if (proven_ && !silent_ && pending_ != 0 &&
      now >= pendingSince_ + silentAfter()) {
    if (readingBytes_ != 0) {
      // What is read may land at any time until the queue pair is fenced, and
      // its receives cannot end before.
      close(Status(StatusCode::kNetwork, where() + ": no answer to a read"));
      return;
    }
    setUse(silent_, true);
  }
  if (!closed_ && silent_ && pending_ != 0 &&
      now >= pendingSince_ + config_.closeAfter) {
    close(Status(
        StatusCode::kNetwork,
        where() + ": no send was completed for " +
            durationText(now - pendingSince_)));
  }
  if (!closed_) {
    armTimer();
  }
}

} // namespace resilient
