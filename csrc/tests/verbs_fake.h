#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transport/verbs_api.h"

namespace resilient::test {

// RDMA devices in memory. A send lands in the far end's oldest receive at once,
// and both have a completion. The rules of real devices are checked: memory
// must be registered with the same device, no more may be posted than the depth
// allows, and a send must find a receive. A dma-buf is any file that can be
// mapped; its first byte is where its descriptor stands.
//
// A device can fail and come back: it is then another device of the same name,
// and nothing that was made from the former one works with it.
//
// Thread: any. Lifetime: queue pairs may outlive it.
class VerbsFake final : public VerbsApi {
 public:
  // Two devices by default: "fake0" and "fake1".
  explicit VerbsFake(int devices = 2);

  Status devices(std::set<std::string>& names) override;
  Status ports(std::vector<VerbsPort>& ports) override;
  Status open(const std::string& name, std::shared_ptr<VerbsDevice>& device)
      override;
  void forget(const VerbsDevice& device) override;

  // All devices have this address, instead of one each.
  void setAddress(const VerbsPort::Gid& gid);
  // The device fails: nothing that was made from it answers any more, and it
  // cannot be opened until it is back. The event is raised.
  void fail(const std::string& device);
  void bringBack(const std::string& device);
  // The host removes the device, which works as long as somebody has it open.
  void remove(const std::string& device, bool removed);
  // It is listed, and the process may not open it.
  void refuseOpen(const std::string& device, bool refuses);
  uint64_t refusedOpens() const;
  // Calls that make, register, deregister, fence or destroy something of the
  // device, as it is now, do not return until this is false again.
  void hang(const std::string& device, bool hangs);
  // Calls that do not return now.
  size_t hanging() const;

  // Destroying a queue pair does not return until this is false again.
  void keep(bool keeps);

  // The network drops all that is for this queue pair: what others send to it,
  // and the answers to what it sends. Both go on when it ends, as retries do.
  void silence(uint32_t queuePair, bool silent);
  // The device tells this event.
  void raise(const std::string& device, const VerbsEvent& event);
  // The retries of its sends are used up: they fail.
  void giveUp(uint32_t queuePair);
  // The queue pair is in the error state without a request that has failed.
  void fence(uint32_t queuePair);
  // Breaches of the rules, in words.
  std::vector<std::string> faults() const;
  // Queue pairs that exist.
  size_t queuePairs() const;
  size_t memories() const; // registered
  // Devices that are open, failed ones included.
  size_t openDevices() const;
  uint64_t bytesRead() const; // from memory of far ends
  uint64_t refusedReads() const;
  // The address lies in the memory of a GPU: it can be registered only in these
  // ways, and the process itself must not touch it.
  struct Gpu {
    std::function<bool(const void* address)> has;
    bool takesDmabuf = false;
    bool takesPeerMemory = false;
  };
  void setGpu(Gpu gpu);
  // No more can be registered at a time with a device.
  void setMemoryLimit(uint64_t bytes);

  struct World; // what the devices share

 private:
  std::shared_ptr<World> world_;
};

} // namespace resilient::test
