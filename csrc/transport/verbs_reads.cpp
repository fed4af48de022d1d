#include "transport/verbs_reads.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "base/trusted_completions.h"

namespace resilient {

VerbsReads::VerbsReads(
    Channel& channel,
    PathId path,
    VerbsEnd& end,
    VerbsLoans* loans,
    uint16_t remoteReads,
    VerbsPending& pending,
    VerbsStats& counted)
    : channel_(channel),
      path_(path),
      end_(end),
      loans_(loans),
      pending_(pending),
      counted_(counted),
      max_(std::min<size_t>(remoteReads, end.queuePair().address().reads)) {}

// One at a time may use the memory of the path.
bool VerbsReads::hasRoom() const {
  return reads_.size() < std::max<size_t>(max_, 1) && !bufferInUse_;
}

std::optional<uint32_t> VerbsReads::oldest() const {
  const auto found =
      std::ranges::find_if(reads_, [](const Read& r) { return !r.done; });
  return found == reads_.end() ? std::nullopt
                               : std::optional(found->header.payloadBytes);
}

std::optional<uint64_t> VerbsReads::newest() const {
  return bytes_ == 0 ? std::nullopt : std::optional(next_ - 1);
}

// The claims of the far end: the size must fit the buffer, and the device
// checks the address and the key.
Status VerbsReads::start(const std::byte* data, TimePoint now) {
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
      size > VerbsEnd::kMaxReadBytes || isOff()) {
    return Status(
        StatusCode::kProtocol, "peer refers to a payload that cannot be one");
  }
  VerbsMemory* memory = nullptr;
  const std::optional<Channel::Place> found =
      channel_.pin(path_, read.header, [&](std::span<std::byte> at) {
        memory = loans_ == nullptr ? nullptr : loans_->find(end_.device(), at);
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
    memory = &end_.memory();
    into = end_.readBuffer().first(size);
    bufferInUse_ = true;
  }
  reads_.push_back(read);
  if (!read.wanted) {
    return Status();
  }
  bytes_ += size;
  ++counted_.reads;
  pending_.add(now);
  return end_.queuePair().postRead(
      next_++, *memory, into, read.from.address, read.from.key);
}

// Reads complete in the order in which they were posted.
std::optional<uint32_t> VerbsReads::complete() {
  const auto read = std::ranges::find_if(
      reads_, [](const Read& r) { return r.wanted && !r.done; });
  if (read == reads_.end()) {
    return std::nullopt;
  }
  read->done = true;
  counted_.readBytes += read->header.payloadBytes;
  bytes_ -= read->header.payloadBytes;
  return read->header.payloadBytes;
}

Status VerbsReads::finish(TimePoint heardAt) {
  const Read read = reads_.front();
  reads_.pop_front();
  Status status = channel_.onHeader(path_, read.header, heardAt);
  if (status.ok() && read.inBuffer) {
    std::byte* const to = channel_.destination(path_);
    if (to != nullptr) {
      std::memcpy(to, end_.readBuffer().data(), read.header.payloadBytes);
    }
    bufferInUse_ = false;
  }
  if (status.ok()) {
    status = channel_.onPayload(path_, heardAt);
  }
  if (status.ok() && read.pinned) {
    counted_.placedBytes += read.header.payloadBytes;
    if (!kTrustsCompletions) {
      channel_.unpin(path_);
    }
  }
  return status;
}

} // namespace resilient
