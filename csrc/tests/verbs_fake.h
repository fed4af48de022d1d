#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/verbs_api.h"

namespace resilient::test {

// RDMA devices in memory. A send lands in the far end's oldest receive at once,
// and both have a completion. The rules of real devices are checked: memory
// must be registered with the same device, no more may be posted than the depth
// allows, and a send must find a receive.
//
// Thread: any. Lifetime: queue pairs may outlive it.
class VerbsFake final : public VerbsApi {
 public:
  // Two devices by default: "fake0" and "fake1".
  explicit VerbsFake(int devices = 2);

  Status ports(std::vector<VerbsPort>& ports) override;
  Status open(const std::string& name, std::shared_ptr<VerbsDevice>& device)
      override;

  // The network drops all that is for this queue pair: what others send to it,
  // and the answers to what it sends. Both go on when it ends, as retries do.
  void silence(uint32_t queuePair, bool silent);
  // The device tells this event.
  void raise(const std::string& device, const VerbsEvent& event);
  // The retries of its sends are used up: they fail.
  void giveUp(uint32_t queuePair);
  // Breaches of the rules, in words.
  std::vector<std::string> faults() const;
  // Queue pairs that exist.
  size_t queuePairs() const;
  size_t memories() const; // registered
  uint64_t bytesRead() const; // from memory of far ends
  uint64_t refusedReads() const;

  struct World; // what the devices share

 private:
  std::shared_ptr<World> world_;
};

} // namespace resilient::test
