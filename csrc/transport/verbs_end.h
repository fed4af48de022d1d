#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/time.h"
#include "transport/verbs_api.h"

namespace resilient {

// One end of a queue pair, with the memory that it sends from and receives to:
// a packet that is late lands there and harms nobody. Only reads access other
// memory, see VerbsPath.
//
// Thread: one at a time: the loop, or a thread that connects or ends it.
class VerbsEnd {
 public:
  // A slot holds one send or receive: 64 KiB fill a packet of any size many
  // times, and the sender fills the next while one is on its way. 32 of them
  // carry 2 MiB, 10 Gbit/s for 1.6 ms.
  static constexpr size_t kSlotBytes = 64u << 10;
  static constexpr uint32_t kSlots = 32;
  // Reads that are under way; a device may allow fewer.
  static constexpr uint32_t kReads = 16;
  // A payload that is read to memory of the path is no larger.
  static constexpr size_t kMaxReadBytes = 1u << 20;

  // Registers the memory, which may take its time, and posts all receives.
  // Throws nothing; `end` is set if the status is ok.
  static Status make(
      std::shared_ptr<VerbsDevice> device, // of the port
      const VerbsPort& port,
      VerbsQueuePairConfig config, // but for its depth
      std::unique_ptr<VerbsEnd>& end);
  // Opens the device first.
  static Status make(
      VerbsApi& api,
      const VerbsPort& port,
      VerbsQueuePairConfig config,
      std::unique_ptr<VerbsEnd>& end);
  // Fences the queue pair first. May block if the device does not answer, and
  // some devices keep a queue pair for seconds.
  ~VerbsEnd();
  VerbsEnd(const VerbsEnd&) = delete;
  VerbsEnd& operator=(const VerbsEnd&) = delete;

  VerbsQueuePair& queuePair() {
    return *queuePair_;
  }
  const VerbsPort& port() const {
    return port_;
  }
  const VerbsDevice& device() const {
    return *device_;
  }
  const std::shared_ptr<VerbsDevice>& sharedDevice() const {
    return device_;
  }
  std::byte* sendSlot(uint32_t slot) {
    return memory_.get() + size_t(slot) * kSlotBytes;
  }
  std::byte* receiveSlot(uint32_t slot) {
    return sendSlot(kSlots + slot);
  }
  // The first bytes of a slot.
  Status send(uint32_t slot, size_t bytes);
  Status receive(uint32_t slot);
  // For payloads that are read and have no other place. Registered with the
  // slots: that may take long, and nothing else of a read does.
  std::span<std::byte> readBuffer() {
    return {sendSlot(2 * kSlots), kMaxReadBytes};
  }
  VerbsMemory& memory() {
    return *registered_;
  }
  // Fences the queue pair, and waits for the completion of this request, which
  // nobody else may take. True: it has come, so the device is done with all
  // that was posted up to it. Blocks.
  bool settle(uint64_t request, Nanos limit);

  // The request numbers of receives and of reads begin here, those of sends
  // with 0.
  static constexpr uint64_t kReceives = kSlots;
  static constexpr uint64_t kFirstRead = 2 * kSlots;

 private:
  VerbsEnd() = default;

  struct Free {
    void operator()(std::byte* memory) const;
  };
  // Destroyed from the last to the first.
  VerbsPort port_;
  std::unique_ptr<std::byte, Free> memory_;
  std::shared_ptr<VerbsDevice> device_;
  std::unique_ptr<VerbsMemory> registered_;
  std::unique_ptr<VerbsQueuePair> queuePair_;
};

} // namespace resilient
