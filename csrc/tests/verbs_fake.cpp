#include "tests/verbs_fake.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>

#include "base/syscall.h"

namespace resilient::test {
namespace {

class Device;
class Memory;
class QueuePair;

// A device from the time when it comes until it fails.
struct Life {
  explicit Life(std::string n) : name(std::move(n)) {}

  const std::string name;
  const FileDescriptor fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::vector<VerbsEvent> events;
  bool failed = false;
  bool removed = false; // from the list
  bool refusesOpen = false;
  bool hangs = false;
};

} // namespace

struct VerbsFake::World {
  // Returns when the device does not hang.
  void answer(std::unique_lock<std::mutex>& lock, const Life& life) {
    ++hanging;
    answers.wait(lock, [&] { return !life.hangs; });
    --hanging;
  }

  std::mutex mutex;
  std::condition_variable answers;
  size_t hanging = 0;
  bool keeps = false; // queue pairs
  std::vector<std::shared_ptr<Life>> devices, past;
  std::map<std::string, std::weak_ptr<Device>> open;
  size_t openDevices = 0;
  uint64_t refusedOpens = 0;
  std::optional<VerbsPort::Gid> address;
  std::map<uint32_t, QueuePair*> queuePairs;
  std::map<uint32_t, Memory*> memory; // by key
  uint32_t lastKey = 0x100;
  uint32_t last = 0x10; // queue pair
  std::vector<std::string> faults;
  uint64_t bytesRead = 0;
  uint64_t refusedReads = 0;
  Gpu gpu;
  uint64_t memoryLimit = UINT64_MAX;

  // With the lock.
  uint64_t registeredBytes(const Life& device) const;

  bool isOnGpu(std::span<const std::byte> bytes) { // with the lock
    return gpu.has && gpu.has(bytes.data());
  }
};

namespace {

using World = VerbsFake::World;
using Result = VerbsCompletion::Result;

constexpr uint16_t kReads = 4;

class Memory final : public VerbsMemory {
 public:
  // With the lock of the world.
  Memory(
      std::shared_ptr<World> world,
      std::span<std::byte> b,
      std::shared_ptr<Life> d,
      bool reads,
      std::byte* mapped = nullptr)
      : bytes(b),
        device(std::move(d)),
        forReads(reads),
        world_(std::move(world)),
        mapped_(mapped) {
    key_ = ++world_->lastKey;
    world_->memory[key_] = this;
  }
  ~Memory() override {
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *device);
    world_->memory.erase(key_);
    if (mapped_ != nullptr) {
      ::munmap(mapped_, bytes.size());
    }
  }
  // Where the device finds the byte that requests name so.
  std::byte* inDevice(const std::byte* at) const {
    return (mapped_ != nullptr ? mapped_ : bytes.data()) + (at - bytes.data());
  }
  uint32_t remoteKey() const override {
    return key_;
  }
  bool covers(const std::byte* at, size_t size) const {
    return at >= bytes.data() && at + size <= bytes.data() + bytes.size();
  }

  const std::span<std::byte> bytes;
  const std::shared_ptr<Life> device;
  const bool forReads;

 private:
  const std::shared_ptr<World> world_;
  std::byte* const mapped_; // of a dma-buf
  uint32_t key_ = 0;
};

class QueuePair final : public VerbsQueuePair {
 public:
  // With the lock of the world.
  QueuePair(
      std::shared_ptr<World> world,
      std::shared_ptr<Life> device,
      VerbsPort port,
      uint32_t depth)
      : world_(std::move(world)),
        device_(std::move(device)),
        port_(std::move(port)),
        depth_(depth),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    number_ = ++world_->last;
    world_->queuePairs[number_] = this;
  }
  ~QueuePair() override {
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *device_);
    world_->answers.wait(lock, [this] { return !world_->keeps; });
    world_->queuePairs.erase(number_);
  }

  VerbsAddress address() const override {
    return {
        port_.gid,
        number_,
        number_ * 7919 & 0xffffff,
        port_.mtuBytes,
        0,
        kReads};
  }
  Status connect(const VerbsAddress& remote) override {
    std::lock_guard lock(world_->mutex);
    remote_ = remote.queuePair;
    return Status();
  }
  Status postReceive(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into) override {
    std::lock_guard lock(world_->mutex);
    check(memory, into.data(), into.size(), receives_.size());
    if (broken_) {
      complete({request, true, 0, Result::kFlushed, "flushed"});
    } else {
      receives_.push_back({request, into});
    }
    return Status();
  }
  Status postSend(
      uint64_t request,
      VerbsMemory& memory,
      std::span<const std::byte> from) override {
    std::lock_guard lock(world_->mutex);
    check(memory, from.data(), from.size(), sends_.size());
    if (broken_) {
      complete({request, false, 0, Result::kFlushed, "flushed"});
    } else {
      sends_.push_back({request, from});
      deliver();
    }
    return Status();
  }
  Status postRead(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into,
      uint64_t remoteAddress,
      uint32_t remoteKey) override {
    std::lock_guard lock(world_->mutex);
    check(memory, into.data(), into.size(), sends_.size());
    const auto reads = std::ranges::count_if(
        sends_, [](const Send& send) { return !send.into.empty(); });
    if (reads >= kReads) {
      world_->faults.push_back("more reads than the far end answers");
    }
    if (broken_) {
      complete({request, false, 0, Result::kFlushed, "flushed"});
    } else {
      Send read;
      read.request = request;
      read.into = into;
      read.localKey = memory.remoteKey();
      // NOLINTNEXTLINE(performance-no-int-to-ptr): as it came from the far end
      read.from = reinterpret_cast<const std::byte*>(remoteAddress);
      read.remoteKey = remoteKey;
      sends_.push_back(read);
      deliver();
    }
    return Status();
  }
  Status poll(std::vector<VerbsCompletion>& completions, size_t max) override {
    std::lock_guard lock(world_->mutex);
    while (max-- > 0 && !done_.empty()) {
      completions.push_back(std::move(done_.front()));
      done_.pop_front();
    }
    return Status();
  }
  int fd() const override {
    return wake_.get();
  }
  Status arm() override {
    std::lock_guard lock(world_->mutex);
    armed_ = true;
    return Status();
  }
  void takeNotifications() override {
    uint64_t count = 0;
    (void)!::read(wake_.get(), &count, sizeof(count));
  }
  Status fence() override {
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *device_);
    fail(Result::kFlushed, "flushed");
    return Status();
  }

  // With the lock of the world.
  bool isOf(const Life& device) const {
    return device_.get() == &device;
  }
  void setSilent(bool silent) {
    silent_ = silent;
    for (auto& [number, other] : world_->queuePairs) {
      other->deliver();
    }
  }
  void fail(Result first, const std::string& why) {
    if (broken_) {
      return;
    }
    broken_ = true;
    for (const auto& send : std::exchange(sends_, {})) {
      complete({send.request, false, 0, first, why});
      first = Result::kFlushed;
    }
    for (const auto& receive : std::exchange(receives_, {})) {
      complete({receive.request, true, 0, Result::kFlushed, "flushed"});
    }
  }

 private:
  struct Send {
    uint64_t request;
    std::span<const std::byte> bytes;
    bool landed = false; // its answer has not come
    // of a read
    std::span<std::byte> into{};
    uint32_t localKey = 0;
    const std::byte* from = nullptr;
    uint32_t remoteKey = 0;
  };
  struct Receive {
    uint64_t request;
    std::span<std::byte> bytes;
  };

  void check(
      const VerbsMemory& memory,
      const void* data,
      size_t bytes,
      size_t posted) {
    const auto& m = static_cast<const Memory&>(memory);
    const auto* at = static_cast<const std::byte*>(data);
    if (m.device != device_) {
      world_->faults.push_back("memory of another device");
    }
    if (!m.covers(at, bytes)) {
      world_->faults.push_back("memory that is not registered");
    }
    if (posted >= depth_) {
      world_->faults.push_back("more requests than the queue holds");
    }
  }
  void complete(VerbsCompletion completion) {
    done_.push_back(std::move(completion));
    if (std::exchange(armed_, false)) {
      const uint64_t one = 1;
      (void)!::write(wake_.get(), &one, sizeof(one));
    }
  }
  // Both ends have failed if it may not.
  bool fetch(QueuePair& far, Send& read) {
    const auto theirs = world_->memory.find(read.remoteKey);
    const bool allowed = theirs != world_->memory.end() &&
        theirs->second->forReads && theirs->second->device == far.device_ &&
        theirs->second->covers(read.from, read.into.size());
    if (!allowed || !world_->memory.contains(read.localKey)) {
      ++world_->refusedReads;
      far.fail(Result::kFlushed, "flushed");
      fail(Result::kFailed, "remote access error");
      return false;
    }
    std::memcpy(
        world_->memory.at(read.localKey)->inDevice(read.into.data()),
        theirs->second->inDevice(read.from),
        read.into.size());
    read.landed = true;
    world_->bytesRead += read.into.size();
    return true;
  }
  // Delivers all that can arrive, in order, then answers all that can be.
  void deliver() {
    const auto found = world_->queuePairs.find(remote_);
    QueuePair* const far =
        found == world_->queuePairs.end() ? nullptr : found->second;
    if (far != nullptr && !far->silent_ && !far->broken_) {
      for (Send& send : sends_) {
        if (send.landed) {
          continue;
        }
        if (!send.into.empty()) {
          if (silent_) {
            break; // what it asks for does not come
          }
          if (!fetch(*far, send)) {
            return;
          }
          continue;
        }
        if (far->receives_.empty()) {
          world_->faults.push_back("a send without a receive");
          break;
        }
        const Receive receive = far->receives_.front();
        far->receives_.pop_front();
        if (receive.bytes.size() < send.bytes.size()) {
          world_->faults.push_back("a send larger than its receive");
          break;
        }
        std::memcpy(receive.bytes.data(), send.bytes.data(), send.bytes.size());
        send.landed = true;
        far->complete(
            {receive.request,
             true,
             static_cast<uint32_t>(send.bytes.size()),
             Result::kOk,
             ""});
      }
    }
    while (!silent_ && !sends_.empty() && sends_.front().landed) {
      complete({sends_.front().request, false, 0, Result::kOk, ""});
      sends_.pop_front();
    }
  }

  const std::shared_ptr<World> world_;
  const std::shared_ptr<Life> device_;
  const VerbsPort port_;
  const uint32_t depth_;
  const FileDescriptor wake_;
  uint32_t number_ = 0, remote_ = 0;
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  std::deque<VerbsCompletion> done_;
  bool armed_ = false;
  bool silent_ = false;
  bool broken_ = false;
};

class Device final : public VerbsDevice {
 public:
  // With the lock of the world.
  Device(std::shared_ptr<World> world, std::shared_ptr<Life> life)
      : world_(std::move(world)), life_(std::move(life)) {
    ++world_->openDevices;
  }
  ~Device() override {
    std::lock_guard lock(world_->mutex);
    --world_->openDevices;
  }
  const std::string& name() const override {
    return life_->name;
  }
  Status registerMemory(
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) override {
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *life_);
    if (life_->failed) {
      return failure();
    }
    if (world_->isOnGpu(bytes) && !world_->gpu.takesPeerMemory) {
      return Status(StatusCode::kNetwork, life_->name + ": Bad address");
    }
    if (world_->registeredBytes(*life_) + bytes.size() > world_->memoryLimit) {
      return Status(
          StatusCode::kNetwork,
          life_->name + ": register " + std::to_string(bytes.size()) +
              " bytes: Cannot allocate memory");
    }
    memory = std::make_unique<Memory>(world_, bytes, life_, forReads);
    return Status();
  }
  Status registerDmabuf(
      int dmabuf,
      uint64_t offset,
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) override {
    if (!world_->gpu.takesDmabuf) {
      return Status(
          StatusCode::kNetwork, life_->name + ": Operation not supported");
    }
    const off_t begin = ::lseek(dmabuf, 0, SEEK_CUR);
    void* const mapped = ::mmap(
        nullptr,
        bytes.size(),
        PROT_READ | PROT_WRITE,
        MAP_SHARED,
        dmabuf,
        begin + static_cast<off_t>(offset));
    if (begin < 0 || mapped == MAP_FAILED) {
      return Status(StatusCode::kNetwork, life_->name + ": Invalid argument");
    }
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *life_);
    memory = std::make_unique<Memory>(
        world_, bytes, life_, forReads, static_cast<std::byte*>(mapped));
    return Status();
  }
  Status makeQueuePair(
      const VerbsPort& port,
      const VerbsQueuePairConfig& config,
      std::unique_ptr<VerbsQueuePair>& queuePair) override {
    std::unique_lock lock(world_->mutex);
    world_->answer(lock, *life_);
    if (life_->failed) {
      return failure();
    }
    queuePair = std::make_unique<QueuePair>(world_, life_, port, config.depth);
    return Status();
  }
  int eventsFd() const override {
    return life_->fd.get();
  }
  void takeEvents(std::vector<VerbsEvent>& events) override {
    std::lock_guard lock(world_->mutex);
    uint64_t count = 0;
    (void)!::read(life_->fd.get(), &count, sizeof(count));
    for (const VerbsEvent& event : std::exchange(life_->events, {})) {
      events.push_back(event);
    }
  }

 private:
  Status failure() const {
    return Status(StatusCode::kNetwork, life_->name + " has failed");
  }

  const std::shared_ptr<World> world_;
  const std::shared_ptr<Life> life_;
};

std::shared_ptr<Life>& deviceOf(World& world, const std::string& name) {
  const auto found = std::ranges::find(
      world.devices, name, [](const auto& d) { return d->name; });
  if (found == world.devices.end()) {
    throw std::out_of_range("no device " + name);
  }
  return *found;
}

void raiseOn(Life& device, const VerbsEvent& event) {
  device.events.push_back(event);
  const uint64_t one = 1;
  (void)!::write(device.fd.get(), &one, sizeof(one));
}

} // namespace

uint64_t VerbsFake::World::registeredBytes(const Life& device) const {
  uint64_t sum = 0;
  for (const auto& [key, each] : memory) {
    sum += each->device.get() == &device ? each->bytes.size() : 0;
  }
  return sum;
}

VerbsFake::VerbsFake(int devices) : world_(std::make_shared<World>()) {
  for (int i = 0; i < devices; ++i) {
    world_->devices.push_back(
        std::make_shared<Life>("fake" + std::to_string(i)));
  }
}

Status VerbsFake::devices(std::set<std::string>& names) {
  std::lock_guard lock(world_->mutex);
  for (const auto& device : world_->devices) {
    if (!device->failed && !device->removed) {
      names.insert(device->name);
    }
  }
  return Status();
}

Status VerbsFake::ports(std::vector<VerbsPort>& ports) {
  std::lock_guard lock(world_->mutex);
  for (size_t i = 0; i < world_->devices.size(); ++i) {
    if (world_->devices[i]->failed || world_->devices[i]->removed) {
      continue;
    }
    VerbsPort port;
    port.device = world_->devices[i]->name;
    port.gid[15] = static_cast<std::byte>(i + 1);
    port.gid = world_->address.value_or(port.gid);
    port.interfaceIndex = static_cast<uint32_t>(i + 1);
    port.mtuBytes = 4096;
    port.active = true;
    ports.push_back(port);
  }
  return Status();
}

Status VerbsFake::open(
    const std::string& name,
    std::shared_ptr<VerbsDevice>& device) {
  std::lock_guard lock(world_->mutex);
  std::shared_ptr<Device> known = world_->open[name].lock();
  if (known == nullptr) {
    const auto found =
        std::ranges::find_if(world_->devices, [&](const auto& d) {
          return d->name == name && !d->failed && !d->removed;
        });
    if (found == world_->devices.end()) {
      return Status(StatusCode::kInvalidArgument, "no device " + name);
    }
    if ((*found)->refusesOpen) {
      ++world_->refusedOpens;
      return Status(StatusCode::kNetwork, name + ": Permission denied");
    }
    known = std::make_shared<Device>(world_, *found);
    world_->open[name] = known;
  }
  device = known;
  return Status();
}

void VerbsFake::forget(const VerbsDevice& device) {
  std::vector<std::shared_ptr<Device>> held; // the last ones take the lock
  std::lock_guard lock(world_->mutex);
  std::erase_if(world_->open, [&](const auto& entry) {
    return held.emplace_back(entry.second.lock()).get() == &device;
  });
}

void VerbsFake::setAddress(const VerbsPort::Gid& gid) {
  std::lock_guard lock(world_->mutex);
  world_->address = gid;
}

void VerbsFake::fail(const std::string& device) {
  std::lock_guard lock(world_->mutex);
  Life& failing = *deviceOf(*world_, device);
  failing.failed = true;
  for (auto& [number, queuePair] : world_->queuePairs) {
    if (queuePair->isOf(failing)) {
      queuePair->setSilent(true);
    }
  }
  raiseOn(failing, {.kind = VerbsEvent::Kind::kDeviceFailed});
}

void VerbsFake::bringBack(const std::string& device) {
  std::lock_guard lock(world_->mutex);
  std::shared_ptr<Life>& life = deviceOf(*world_, device);
  world_->past.push_back(std::exchange(life, std::make_shared<Life>(device)));
}

void VerbsFake::remove(const std::string& device, bool removed) {
  std::lock_guard lock(world_->mutex);
  deviceOf(*world_, device)->removed = removed;
}

void VerbsFake::refuseOpen(const std::string& device, bool refuses) {
  std::lock_guard lock(world_->mutex);
  deviceOf(*world_, device)->refusesOpen = refuses;
}

uint64_t VerbsFake::refusedOpens() const {
  std::lock_guard lock(world_->mutex);
  return world_->refusedOpens;
}

void VerbsFake::hang(const std::string& device, bool hangs) {
  std::lock_guard lock(world_->mutex);
  deviceOf(*world_, device)->hangs = hangs;
  for (const std::shared_ptr<Life>& life : world_->past) {
    life->hangs = life->hangs && (hangs || life->name != device);
  }
  world_->answers.notify_all();
}

size_t VerbsFake::hanging() const {
  std::lock_guard lock(world_->mutex);
  return world_->hanging;
}

void VerbsFake::keep(bool keeps) {
  std::lock_guard lock(world_->mutex);
  world_->keeps = keeps;
  world_->answers.notify_all();
}

void VerbsFake::silence(uint32_t queuePair, bool silent) {
  std::lock_guard lock(world_->mutex);
  world_->queuePairs.at(queuePair)->setSilent(silent);
}

void VerbsFake::raise(const std::string& device, const VerbsEvent& event) {
  std::lock_guard lock(world_->mutex);
  raiseOn(*deviceOf(*world_, device), event);
}

void VerbsFake::giveUp(uint32_t queuePair) {
  std::lock_guard lock(world_->mutex);
  world_->queuePairs.at(queuePair)->fail(
      Result::kFailed, "transport retry counter exceeded");
}

void VerbsFake::fence(uint32_t queuePair) {
  std::lock_guard lock(world_->mutex);
  world_->queuePairs.at(queuePair)->fail(Result::kFlushed, "flushed");
}

std::vector<std::string> VerbsFake::faults() const {
  std::lock_guard lock(world_->mutex);
  return world_->faults;
}

size_t VerbsFake::queuePairs() const {
  std::lock_guard lock(world_->mutex);
  return world_->queuePairs.size();
}

uint64_t VerbsFake::bytesRead() const {
  std::lock_guard lock(world_->mutex);
  return world_->bytesRead;
}

uint64_t VerbsFake::refusedReads() const {
  std::lock_guard lock(world_->mutex);
  return world_->refusedReads;
}

size_t VerbsFake::openDevices() const {
  std::lock_guard lock(world_->mutex);
  return world_->openDevices;
}

void VerbsFake::setMemoryLimit(uint64_t bytes) {
  std::lock_guard lock(world_->mutex);
  world_->memoryLimit = bytes;
}

void VerbsFake::setGpu(Gpu gpu) {
  std::lock_guard lock(world_->mutex);
  world_->gpu = std::move(gpu);
}

size_t VerbsFake::memories() const {
  std::lock_guard lock(world_->mutex);
  return world_->memory.size();
}

} // namespace resilient::test
