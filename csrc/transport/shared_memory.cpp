#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

namespace resilient {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

} // namespace

SharedMemory::SharedMemory(SharedMemory&& o) noexcept
    : base_(std::exchange(o.base_, nullptr)), ringBytes_(o.ringBytes_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& o) noexcept {
  std::swap(base_, o.base_);
  std::swap(ringBytes_, o.ringBytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) {
    ::munmap(base_, kHeaderBytes + 2 * ringBytes_);
  }
}

std::byte* SharedMemory::data(int writer) const {
  return static_cast<std::byte*>(base_) + kHeaderBytes +
      static_cast<size_t>(writer) * ringBytes_;
}

Status SharedMemory::mapBytes(int descriptor, size_t ringBytes) {
  void* const at = ::mmap(
      nullptr,
      kHeaderBytes + 2 * ringBytes,
      PROT_READ | PROT_WRITE,
      MAP_SHARED,
      descriptor,
      0);
  if (at == MAP_FAILED) {
    return errnoStatus(StatusCode::kNetwork, "mmap", errno);
  }
  base_ = at;
  ringBytes_ = ringBytes;
  return Status();
}

Status SharedMemory::make(
    size_t ringBytes,
    SharedMemory& memory,
    FileDescriptor& descriptor) {
  ringBytes = std::bit_ceil(std::clamp(ringBytes, kMinRing, kMaxRing));
  FileDescriptor fd(
      ::memfd_create("torch_resilient", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    return errnoStatus(StatusCode::kNetwork, "memfd_create", errno);
  }
  // Without the seals a peer could cut it, and our next access would be fatal.
  if (::ftruncate(fd.get(), static_cast<off_t>(kHeaderBytes + 2 * ringBytes)) !=
          0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return errnoStatus(StatusCode::kNetwork, "set the size of a memfd", errno);
  }
  SharedMemory made;
  Status status = made.mapBytes(fd.get(), ringBytes);
  if (status.ok()) {
    // A new memfd is all zeros.
    made.layout()->magic = kMagic;
    made.layout()->ringBytes = ringBytes;
    memory = std::move(made);
    descriptor = std::move(fd);
  }
  return status;
}

// The seals are checked before the size: a sealed memfd cannot change its size
// any more, so the size that is read next stays true. Without that, a peer
// could cut the file after the check, and an access to the missing pages would
// end this process with SIGBUS.
Status SharedMemory::map(int descriptor, SharedMemory& memory) {
  const auto refuse = [](const char* why) {
    return Status(
        StatusCode::kProtocol, std::string("shared memory of a peer ") + why);
  };
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  struct stat about{};
  if (seals < 0 || (seals & kSeals) != kSeals ||
      ::fstat(descriptor, &about) != 0) {
    return refuse("could be cut");
  }
  const auto data = static_cast<uint64_t>(about.st_size) - kHeaderBytes;
  if (about.st_size < static_cast<off_t>(kHeaderBytes + 2 * kMinRing) ||
      data > 2 * kMaxRing || !std::has_single_bit(data)) {
    return refuse("has a strange size");
  }
  SharedMemory mapped;
  Status status = mapped.mapBytes(descriptor, data / 2);
  if (status.ok() &&
      (mapped.layout()->magic != kMagic ||
       mapped.layout()->ringBytes != data / 2)) {
    status = refuse("is none of ours");
  }
  if (status.ok()) {
    memory = std::move(mapped);
  }
  return status;
}

RingWriter::RingWriter(const SharedMemory& memory, int side)
    : ring_(&memory.ring(side)),
      data_(memory.data(side)),
      bytes_(memory.ringBytes()) {}

// The peer's words must obey done_ <= done <= read <= written_ and read_ <=
// read. Otherwise room() would be larger than the ring, and put() would write
// behind it.
bool RingWriter::refresh() {
  const uint64_t done = ring_->done.load();
  const uint64_t read = ring_->read.load();
  // As differences: nothing can wrap around.
  if (read - read_ > written_ - read_ || done - done_ > read - done_) {
    return false;
  }
  read_ = read;
  done_ = done;
  return true;
}

size_t RingWriter::put(const std::byte* data, size_t bytes) {
  bytes = std::min(bytes, room());
  const size_t at = static_cast<size_t>(written_) & (bytes_ - 1);
  const size_t first = std::min(bytes, bytes_ - at);
  std::memcpy(data_ + at, data, first);
  std::memcpy(data_, data + first, bytes - first);
  written_ += bytes;
  return bytes;
}

RingReader::RingReader(const SharedMemory& memory, int side)
    : ring_(&memory.ring(1 - side)),
      data_(memory.data(1 - side)),
      bytes_(memory.ringBytes()) {}

bool RingReader::peek(std::span<const std::byte>& bytes) const {
  const uint64_t ready = ring_->written.load() - read_;
  if (ready > bytes_) {
    return false;
  }
  const size_t at = static_cast<size_t>(read_) & (bytes_ - 1);
  bytes = {data_ + at, std::min(static_cast<size_t>(ready), bytes_ - at)};
  return true;
}

} // namespace resilient
