#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/syscall.h"

namespace resilient {

// Memory of two processes on one host: a ring of bytes in each direction, and
// what they need to wake each other. The one who made it is side 0.
//
// A ring small enough to stay in the processors' caches carries as much as one
// copy from memory to memory (process_vm_readv) does in one thread, or more:
// while the receiver takes a piece out, the sender puts the next one in, and
// only the first and last of the four touches reach memory. It needs no right
// to look into another process, and a buffer that has been copied in is free.
// benchmarks/local_copy.py measures both.
//
// Nothing in here is trusted: the peer may write what it likes at any time.
//
// All accesses are sequentially consistent. A side that publishes something
// looks afterwards whether the other one sleeps. A side that falls asleep says
// so, then looks once more for something published. One of the two sees the
// other.
//
// The object owns the mapping, not the descriptor. RingWriter and RingReader
// borrow the mapping, which stays in place when the object is moved.
class SharedMemory {
 public:
  // Bytes of a ring: a power of two within these.
  static constexpr size_t kMinRing = 16u << 10;
  static constexpr size_t kMaxRing = 256u << 20;

  // The words of one side for the other.
  struct Side {
    // It sleeps, and wants its eventfd written when there is something for it.
    alignas(64) std::atomic<uint32_t> asleep;
    // The processor where it last woke up or wrote something, plus 1; 0:
    // unknown.
    std::atomic<uint32_t> processor;
    // There is something for it as well when the other side has read, or has
    // done with, this much of what it wrote.
    std::atomic<uint64_t> wakeAtRead, wakeAtDone;
    // It wants its messages to take the network (fault injection).
    std::atomic<uint32_t> avoids;
  };
  // Bytes ever written and read; the data begins at their remainder by size.
  // Bytes that have been read make room. They count as acknowledged when the
  // reader's answer to them, if any, is on its way: they are done.
  struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    std::atomic<uint64_t> done;
  };

  SharedMemory() = default;
  SharedMemory(SharedMemory&& o) noexcept;
  SharedMemory& operator=(SharedMemory&& o) noexcept;
  ~SharedMemory();

  // `ringBytes` is rounded up to a power of two. The descriptor is for the
  // peer. Clamped to kMinRing and kMaxRing first. Both results are set only on
  // success.
  static Status
  make(size_t ringBytes, SharedMemory& memory, FileDescriptor& descriptor);
  // Maps what a peer has made; refuses what could be taken away under us. The
  // descriptor may be closed afterwards.
  static Status map(int descriptor, SharedMemory& memory);

  explicit operator bool() const {
    return base_ != nullptr;
  }
  size_t ringBytes() const {
    return ringBytes_;
  }
  Side& side(int i) const {
    return layout()->sides[i];
  }
  Ring& ring(int writer) const {
    return layout()->rings[writer];
  }
  std::byte* data(int writer) const;

 private:
  struct Layout {
    uint64_t magic;
    uint64_t ringBytes;
    Side sides[2];
    Ring rings[2];
  };
  static constexpr uint64_t kMagic = 0x31474e4952525354; // "TSRRING1"
  static constexpr size_t kHeaderBytes = 4096;
  static_assert(sizeof(Layout) <= kHeaderBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  Layout* layout() const {
    return static_cast<Layout*>(base_);
  }
  Status mapBytes(int descriptor, size_t ringBytes);

  void* base_ = nullptr;
  size_t ringBytes_ = 0;
};

// One end's view of a ring. Positions are bytes ever written; those of the
// peer are checked at each look.
//
// Thread: one at a time for each end. Writer and reader of one ring are in two
// processes, and no lock lies between them.
class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(const SharedMemory& memory, int side);

  uint64_t written() const {
    return written_;
  }
  size_t capacity() const {
    return bytes_;
  }
  // The bytes that the peer has read and done with, as last seen by refresh().
  uint64_t read() const {
    return read_;
  }
  uint64_t done() const {
    return done_;
  }
  // False if the peer claims the impossible. Only the answers of the last
  // refresh() are used: the peer can change the words between two reads.
  bool refresh();
  // Whether refresh() would show one of these.
  bool reached(uint64_t read, uint64_t done) const {
    return ring_->read.load() >= read || ring_->done.load() >= done;
  }
  // As of the last refresh(): the peer may have made more since.
  size_t room() const {
    return bytes_ - static_cast<size_t>(written_ - read_);
  }
  // Copies as much as there is room for; returns how much. The peer sees it
  // with publish().
  size_t put(const std::byte* data, size_t bytes);
  void publish() {
    ring_->written.store(written_);
  }

 private:
  SharedMemory::Ring* ring_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t written_ = 0, read_ = 0, done_ = 0;
};

// The other direction. Its own counts are the truth; the words in the memory
// only tell the peer.
class RingReader {
 public:
  RingReader() = default;
  RingReader(const SharedMemory& memory, int side);

  bool empty() const {
    return ring_->written.load() == read_;
  }
  uint64_t read() const {
    return read_;
  }
  // The bytes that can be read in one piece. False if the peer claims the
  // impossible. Empty if there is nothing. At the end of the ring, the rest
  // follows with another call after pop(). The peer can still change these
  // bytes, so whatever is checked must be copied first.
  bool peek(std::span<const std::byte>& bytes) const;
  // The first `bytes` of it are done with: the peer may write there.
  void pop(size_t bytes) {
    read_ += bytes;
    ring_->read.store(read_);
  }
  // All that was popped is done with. False if that is nothing new.
  bool finish() {
    if (done_ == read_) {
      return false;
    }
    done_ = read_;
    ring_->done.store(done_);
    return true;
  }

 private:
  SharedMemory::Ring* ring_ = nullptr;
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t read_ = 0, done_ = 0;
};

} // namespace resilient
