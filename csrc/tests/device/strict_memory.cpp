#include "tests/device/strict_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace resilient::strict {

namespace {

// Of one device. Pages that no block has held cost nothing.
constexpr size_t kMemoryBytes = size_t{1} << 30;
constexpr size_t kGranule = 512;

bool allSet(const std::vector<SignalPtr>& signals) {
  return std::ranges::all_of(
      signals, [](const SignalPtr& signal) { return signal->isSet(); });
}

char* map(int file, int protection) {
  void* address =
      ::mmap(nullptr, kMemoryBytes, protection, MAP_SHARED, file, 0);
  if (address == MAP_FAILED) {
    throw std::runtime_error("strict device: no memory to map");
  }
  return static_cast<char*>(address);
}

} // namespace

DeviceMemory::DeviceMemory() {
  file_ = ::memfd_create("strict-device", MFD_CLOEXEC);
  if (file_ < 0 || ::ftruncate(file_, kMemoryBytes) != 0) {
    throw std::runtime_error("strict device: no file for its memory");
  }
  visible_ = map(file_, PROT_NONE);
  task_ = map(file_, PROT_READ | PROT_WRITE);
}

void* DeviceMemory::allocate(size_t bytes, Stream& stream) {
  if (bytes == 0) {
    return nullptr;
  }
  bytes = (bytes + kGranule - 1) / kGranule * kGranule;
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  Block block{nullptr, bytes, &stream, {}};
  auto& cached = free_[&stream][bytes];
  if (!cached.empty()) {
    block.pointer = cached.back();
    cached.pop_back();
  } else {
    if (used_ + bytes > kMemoryBytes) {
      throw std::runtime_error("strict device: out of memory");
    }
    block.pointer = visible_ + used_;
    std::memset(task_ + used_, kPoison, bytes);
    used_ += bytes;
  }
  live_.emplace(block.pointer, block);
  return block.pointer;
}

void DeviceMemory::free(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto node = live_.extract(pointer);
  if (node.empty()) {
    std::abort(); // a double free
  }
  Block block = std::move(node.mapped());
  block.users.erase(block.stream);
  std::vector<SignalPtr> signals;
  for (Stream* user : block.users) {
    signals.push_back(user->mark());
  }
  waiting_.push_back({std::move(block), std::move(signals)});
  reclaim();
}

void DeviceMemory::reclaim() {
  std::erase_if(waiting_, [this](const Waiting& waiting) {
    if (!allSet(waiting.signals)) {
      return false;
    }
    poison(waiting.block);
    free_[waiting.block.stream][waiting.block.bytes].push_back(
        waiting.block.pointer);
    return true;
  });
}

void DeviceMemory::poison(const Block& block) {
  block.stream->enqueue([at = inTask(block.pointer), bytes = block.bytes] {
    std::memset(at, kPoison, bytes);
  });
}

void DeviceMemory::recordUse(void* pointer, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto it = live_.find(pointer); it != live_.end()) {
    it->second.users.insert(&stream);
  }
}

bool DeviceMemory::contains(const void* pointer) const {
  const auto* p = static_cast<const char*>(pointer);
  return p >= visible_ && p < visible_ + kMemoryBytes;
}

char* DeviceMemory::inTask(const void* pointer) const {
  return task_ + (static_cast<const char*>(pointer) - visible_);
}

std::optional<DeviceMemory::Range> DeviceMemory::blockOf(
    const void* pointer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto it = live_.upper_bound(const_cast<void*>(pointer));
  if (it == live_.begin()) {
    return std::nullopt;
  }
  --it;
  auto* const begin = static_cast<char*>(it->first);
  if (static_cast<const char*>(pointer) >= begin + it->second.bytes) {
    return std::nullopt;
  }
  return Range{begin, it->second.bytes};
}

int DeviceMemory::openAt(const void* pointer) const {
  const std::string path = "/proc/self/fd/" + std::to_string(file_);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file >= 0) {
    ::lseek(file, static_cast<const char*>(pointer) - visible_, SEEK_SET);
  }
  return file;
}

DeviceMemory& memory(int device) {
  static auto* all = new std::array<DeviceMemory, kDevices>;
  return all->at(device);
}

int deviceOf(const void* pointer) {
  for (int device = 0; device < kDevices; ++device) {
    if (memory(device).contains(pointer)) {
      return device;
    }
  }
  return -1;
}

void* PinnedMemory::allocate(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  void* pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (pointer == nullptr) {
    throw std::bad_alloc();
  }
  std::memset(pointer, kPoison, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  reclaim();
  live_.emplace(pointer, Block{bytes, {}});
  return pointer;
}

void PinnedMemory::free(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto node = live_.extract(pointer);
  if (node.empty()) {
    std::abort(); // a double free
  }
  std::vector<SignalPtr> signals;
  for (Stream* user : node.mapped().users) {
    signals.push_back(user->mark());
  }
  waiting_.push_back({pointer, node.mapped().bytes, std::move(signals)});
  reclaim();
}

void PinnedMemory::reclaim() {
  std::erase_if(waiting_, [](const Waiting& waiting) {
    if (!allSet(waiting.signals)) {
      return false;
    }
    std::memset(waiting.pointer, kPoison, waiting.bytes);
    std::free(waiting.pointer);
    return true;
  });
}

std::map<void*, PinnedMemory::Block>::iterator PinnedMemory::find(
    const void* pointer) {
  auto it = live_.upper_bound(const_cast<void*>(pointer));
  if (it == live_.begin()) {
    return live_.end();
  }
  --it;
  const auto* begin = static_cast<const char*>(it->first);
  return static_cast<const char*>(pointer) < begin + it->second.bytes
      ? it
      : live_.end();
}

void PinnedMemory::recordUse(const void* pointer, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto it = find(pointer); it != live_.end()) {
    it->second.users.insert(&stream);
  }
}

bool PinnedMemory::contains(const void* pointer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return const_cast<PinnedMemory*>(this)->find(pointer) != live_.end();
}

size_t PinnedMemory::liveBytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t sum = 0;
  for (const auto& [pointer, block] : live_) {
    sum += block.bytes;
  }
  return sum;
}

PinnedMemory& pinned() {
  static auto* all = new PinnedMemory();
  return *all;
}

} // namespace resilient::strict
