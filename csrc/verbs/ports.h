#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/verbs_api.h"

namespace resilient {

// A port as the device describes it at the moment.
struct DevicePort {
  VerbsPort port;
  uint16_t lid = 0; // InfiniBand: its address in the subnet; otherwise 0
};

// Adds the addresses of all ports of an open device. Devices other than RoCE
// and InfiniBand ones (iWARP) have none.
Status listPorts(ibv_context& context, std::vector<DevicePort>& ports);

// The port that has this address now. Indices of addresses change when the NIC
// gets or loses an address, so an index from an earlier list may be wrong.
Status
findPort(ibv_context& context, const VerbsPort& wanted, DevicePort& found);

// An MTU in bytes, and the largest MTU that is not above `bytes` as verbs write
// it; 0 if there is none.
uint32_t mtuBytes(ibv_mtu mtu);
ibv_mtu mtuOfBytes(uint32_t bytes);

// "10.0.0.1" or "fe80::1"
std::string gidText(const VerbsPort::Gid& gid);

} // namespace resilient
