#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/status.h"
#include "transport/address.h"
#include "transport/verbs_api.h"

namespace resilient {

// Which ports of RDMA devices the options rdma, rdma_devices and rdma_gid_index
// allow. An immutable value.
class VerbsChoice {
 public:
  // Of valid options.
  explicit VerbsChoice(const EngineOptions& options);

  bool off() const {
    return off_;
  }
  // The options name something that may be missing, so look at the start.
  bool mustLook() const {
    return !off_ && (required_ || !devices_.empty() || gidIndex_.has_value());
  }
  // With an index of its own, a port is found by its interface: the address
  // with this index need not be the one of the connections.
  bool byInterface() const {
    return gidIndex_.has_value();
  }
  bool allows(const std::string& device) const {
    return devices_.empty() || devices_.contains(device);
  }
  std::vector<VerbsPort> of(const std::vector<VerbsPort>& ports) const;
  // Those of them with an address of this process, up or down.
  std::vector<VerbsPort> here(
      const std::vector<VerbsPort>& ports,
      const std::vector<NicAddress>& addresses) const;
  bool required() const {
    return required_;
  }
  // One sentence about what the options name or require and is not there, or
  // empty. `ports`: of all devices, none if there is a reason `why` for that;
  // `addresses`: of this process.
  std::string missing(
      const std::vector<VerbsPort>& ports,
      const std::string& why,
      const std::vector<NicAddress>& addresses) const;

 private:
  bool off_ = false;
  bool required_ = false;
  std::set<std::string> devices_; // empty: all
  std::optional<uint32_t> gidIndex_;
};

// Makes and destroys a queue pair on one of the ports, the least that a path
// takes: locked memory, rights, room in the device. Ok if one of the ports has
// it, else the reason of the first.
Status tryQueuePair(VerbsApi& api, const std::vector<VerbsPort>& ports);

// The form in which a device lists the IP address of its interface.
VerbsPort::Gid gidOf(const SocketAddress& address);
// As the kernel counts; 0, which is no interface, if there is none of the name.
uint32_t interfaceIndexOf(const std::string& nic);

} // namespace resilient
