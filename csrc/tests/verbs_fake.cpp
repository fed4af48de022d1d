#include "tests/verbs_fake.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>

#include "base/syscall.h"

namespace resilient::test {
namespace {

class Memory;
class QueuePair;

} // namespace

struct VerbsFake::World {
  struct Events {
    FileDescriptor fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    std::vector<VerbsEvent> events;
  };

  std::mutex mutex;
  std::map<std::string, Events> events; // by device; never removed
  std::vector<std::string> devices;
  std::map<uint32_t, QueuePair*> queuePairs;
  std::map<uint32_t, Memory*> memory; // by key
  uint32_t lastKey = 0x100;
  uint32_t last = 0x10; // queue pair
  std::vector<std::string> faults;
  uint64_t bytesRead = 0;
  uint64_t refusedReads = 0;
};

namespace {

using World = VerbsFake::World;
using Result = VerbsCompletion::Result;

constexpr uint16_t kReads = 4;

class Memory final : public VerbsMemory {
 public:
  Memory(
      std::shared_ptr<World> world,
      std::span<std::byte> b,
      std::string d,
      bool reads)
      : bytes(b),
        device(std::move(d)),
        forReads(reads),
        world_(std::move(world)) {
    std::lock_guard lock(world_->mutex);
    key_ = ++world_->lastKey;
    world_->memory[key_] = this;
  }
  ~Memory() override {
    std::lock_guard lock(world_->mutex);
    world_->memory.erase(key_);
  }
  uint32_t remoteKey() const override {
    return key_;
  }
  bool covers(const std::byte* at, size_t size) const {
    return at >= bytes.data() && at + size <= bytes.data() + bytes.size();
  }

  const std::span<std::byte> bytes;
  const std::string device;
  const bool forReads;

 private:
  const std::shared_ptr<World> world_;
  uint32_t key_ = 0;
};

class QueuePair final : public VerbsQueuePair {
 public:
  QueuePair(std::shared_ptr<World> world, VerbsPort port, uint32_t depth)
      : world_(std::move(world)),
        port_(std::move(port)),
        depth_(depth),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    std::lock_guard lock(world_->mutex);
    number_ = ++world_->last;
    world_->queuePairs[number_] = this;
  }
  ~QueuePair() override {
    std::lock_guard lock(world_->mutex);
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
    std::lock_guard lock(world_->mutex);
    fail(Result::kFlushed, "flushed");
    return Status();
  }

  // With the lock of the world.
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
    if (m.device != port_.device) {
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
        theirs->second->forReads &&
        theirs->second->device == far.port_.device &&
        theirs->second->covers(read.from, read.into.size());
    if (!allowed || !world_->memory.contains(read.localKey)) {
      ++world_->refusedReads;
      far.fail(Result::kFlushed, "flushed");
      fail(Result::kFailed, "remote access error");
      return false;
    }
    std::memcpy(read.into.data(), read.from, read.into.size());
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
  Device(std::shared_ptr<World> world, std::string name)
      : world_(std::move(world)), name_(std::move(name)) {}
  Status registerMemory(
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) override {
    memory = std::make_unique<Memory>(world_, bytes, name_, forReads);
    return Status();
  }
  Status makeQueuePair(
      const VerbsPort& port,
      const VerbsQueuePairConfig& config,
      std::unique_ptr<VerbsQueuePair>& queuePair) override {
    queuePair = std::make_unique<QueuePair>(world_, port, config.depth);
    return Status();
  }
  int eventsFd() const override {
    std::lock_guard lock(world_->mutex);
    return world_->events[name_].fd.get();
  }
  void takeEvents(std::vector<VerbsEvent>& events) override {
    std::lock_guard lock(world_->mutex);
    World::Events& own = world_->events[name_];
    uint64_t count = 0;
    (void)!::read(own.fd.get(), &count, sizeof(count));
    for (const VerbsEvent& event : std::exchange(own.events, {})) {
      events.push_back(event);
    }
  }

 private:
  const std::shared_ptr<World> world_;
  const std::string name_;
};

} // namespace

VerbsFake::VerbsFake(int devices) : world_(std::make_shared<World>()) {
  for (int i = 0; i < devices; ++i) {
    world_->devices.push_back("fake" + std::to_string(i));
  }
}

Status VerbsFake::ports(std::vector<VerbsPort>& ports) {
  for (size_t i = 0; i < world_->devices.size(); ++i) {
    VerbsPort port;
    port.device = world_->devices[i];
    port.gid[15] = static_cast<std::byte>(i + 1);
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
  if (std::ranges::count(world_->devices, name) == 0) {
    return Status(StatusCode::kInvalidArgument, "no device " + name);
  }
  device = std::make_shared<Device>(world_, name);
  return Status();
}

void VerbsFake::silence(uint32_t queuePair, bool silent) {
  std::lock_guard lock(world_->mutex);
  world_->queuePairs.at(queuePair)->setSilent(silent);
}

void VerbsFake::raise(const std::string& device, const VerbsEvent& event) {
  std::lock_guard lock(world_->mutex);
  World::Events& own = world_->events[device];
  own.events.push_back(event);
  const uint64_t one = 1;
  (void)!::write(own.fd.get(), &one, sizeof(one));
}

void VerbsFake::giveUp(uint32_t queuePair) {
  std::lock_guard lock(world_->mutex);
  world_->queuePairs.at(queuePair)->fail(
      Result::kFailed, "transport retry counter exceeded");
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

size_t VerbsFake::memories() const {
  std::lock_guard lock(world_->mutex);
  return world_->memory.size();
}

} // namespace resilient::test
