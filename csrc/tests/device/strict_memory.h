#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "tests/device/strict_stream.h"

namespace resilient::strict {

// Bytes that a block holds before its owner writes and after it is freed.
constexpr int kPoison = 0xCB;

// The memory of one device: a file in memory that is mapped twice. Tensors have
// addresses in the first mapping, which no thread of the process may touch; the
// device's own tasks use the second one.
//
// A caching allocator by the rules of torch's for CUDA: a block belongs to the
// stream that was current at its allocation. After free() it goes to the next
// allocation of that stream at once, because the stream runs in order. It is
// held back only for other streams that recordUse() has named. A freed block is
// poisoned in the order of its stream, so that who reads or writes it too late
// is found.
//
// Thread: any.
class DeviceMemory {
 public:
  DeviceMemory();

  void* allocate(size_t bytes, Stream& stream);
  void free(void* pointer);
  void recordUse(void* pointer, Stream& stream);

  bool contains(const void* pointer) const;
  // The address at which a task finds the byte that a tensor has at `pointer`.
  char* inTask(const void* pointer) const;
  // The block that an address lies in, or nothing.
  struct Range {
    char* begin = nullptr;
    size_t bytes = 0;
  };
  std::optional<Range> blockOf(const void* pointer) const;
  // A new descriptor of the memory, which stands at that byte: so the device
  // exports a block. -1 with errno if there is none.
  int openAt(const void* pointer) const;

 private:
  struct Block {
    void* pointer;
    size_t bytes;
    Stream* stream;
    std::set<Stream*> users;
  };
  struct Waiting {
    Block block;
    std::vector<SignalPtr> signals;
  };

  void poison(const Block& block);
  void reclaim();

  int file_ = -1; // kept open
  char* visible_ = nullptr; // to tensors; no access
  char* task_ = nullptr; // the same bytes, for tasks
  mutable std::mutex mutex_;
  size_t used_ = 0;
  std::map<void*, Block> live_;
  std::vector<Waiting> waiting_;
  std::map<Stream*, std::map<size_t, std::vector<void*>>> free_;
};

DeviceMemory& memory(int device);
// The device whose memory it is, or -1.
int deviceOf(const void* pointer);

// Pinned host memory. A freed block is given back when the copies that streams
// were doing with it are done, as torch's caching host allocator sees to it.
//
// Thread: any.
class PinnedMemory {
 public:
  void* allocate(size_t bytes);
  void free(void* pointer);
  // The pointer may be inside a block.
  void recordUse(const void* pointer, Stream& stream);
  bool contains(const void* pointer) const;

  size_t liveBytes() const;

 private:
  struct Block {
    size_t bytes;
    std::set<Stream*> users;
  };
  struct Waiting {
    void* pointer;
    size_t bytes;
    std::vector<SignalPtr> signals;
  };

  std::map<void*, Block>::iterator find(const void* pointer);
  void reclaim();

  mutable std::mutex mutex_;
  std::map<void*, Block> live_;
  std::vector<Waiting> waiting_;
};

PinnedMemory& pinned();

} // namespace resilient::strict
