#include "verbs/ports.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "verbs/handles.h"

namespace resilient {
namespace {

constexpr uint32_t kMinMtuBytes = 256, kMaxMtuBytes = 4096;

VerbsPort::Gid gidOf(const ibv_gid& gid) {
  VerbsPort::Gid bytes;
  static_assert(sizeof(bytes) == sizeof(gid.raw));
  std::memcpy(bytes.data(), gid.raw, sizeof(gid.raw));
  return bytes;
}

// RoCE v1 has no IP addresses and does not cross routers. On InfiniBand, entry
// 0 is the one that every port has.
bool isUsed(const ibv_gid_entry& entry, const ibv_port_attr& port) {
  if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
    return entry.gid_type == IBV_GID_TYPE_ROCE_V2;
  }
  return entry.gid_index == 0;
}

} // namespace

uint32_t mtuBytes(ibv_mtu mtu) {
  return mtu < IBV_MTU_256 || mtu > IBV_MTU_4096 ? 0 : 128U << mtu;
}

ibv_mtu mtuOfBytes(uint32_t bytes) {
  int mtu = 0;
  for (uint32_t size = kMinMtuBytes; size <= std::min(bytes, kMaxMtuBytes);
       size *= 2) {
    ++mtu;
  }
  return static_cast<ibv_mtu>(mtu);
}

std::string gidText(const VerbsPort::Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
  const std::string address = text.data();
  const std::string mapped = "::ffff:";
  const bool isIpv4 =
      address.starts_with(mapped) && address.find('.') != std::string::npos;
  return isIpv4 ? address.substr(mapped.size()) : address;
}

Status listPorts(ibv_context& context, std::vector<DevicePort>& ports) {
  const ibv_device& device = *context.device;
  if (device.transport_type != IBV_TRANSPORT_IB) {
    return {};
  }
  ibv_device_attr limits;
  if (const int r = ibv_query_device(&context, &limits); r != 0) {
    return verbsStatus(device.name, "read its properties", verbsError(r));
  }
  std::vector<ibv_port_attr> attributes(limits.phys_port_cnt);
  size_t gids = 0;
  for (size_t i = 0; i < attributes.size(); ++i) {
    const uint8_t number = static_cast<uint8_t>(i + 1);
    if (const int r = ibv_query_port(&context, number, &attributes[i]);
        r != 0) {
      return verbsStatus(
          device.name, "read port " + std::to_string(number), verbsError(r));
    }
    gids += static_cast<size_t>(std::max(attributes[i].gid_tbl_len, 0));
  }
  std::vector<ibv_gid_entry> entries(gids);
  const ssize_t count =
      ibv_query_gid_table(&context, entries.data(), entries.size(), 0);
  if (count < 0) {
    return verbsStatus(
        device.name, "read its addresses", verbsError(static_cast<int>(count)));
  }
  entries.resize(static_cast<size_t>(count));
  for (const ibv_gid_entry& entry : entries) {
    if (entry.port_num == 0 || entry.port_num > attributes.size()) {
      continue;
    }
    const ibv_port_attr& attribute = attributes[entry.port_num - 1];
    if (isUsed(entry, attribute)) {
      VerbsPort port;
      port.device = device.name;
      port.port = static_cast<uint8_t>(entry.port_num);
      port.gidIndex = entry.gid_index;
      port.gid = gidOf(entry.gid);
      port.interfaceIndex = entry.ndev_ifindex;
      port.mtuBytes = mtuBytes(attribute.active_mtu);
      port.active = attribute.state == IBV_PORT_ACTIVE;
      const bool isEthernet = attribute.link_layer == IBV_LINK_LAYER_ETHERNET;
      ports.push_back({port, isEthernet ? uint16_t{0} : attribute.lid});
    }
  }
  return {};
}

Status
findPort(ibv_context& context, const VerbsPort& wanted, DevicePort& found) {
  std::vector<DevicePort> ports;
  if (Status status = listPorts(context, ports); !status.ok()) {
    return status;
  }
  for (const DevicePort& each : ports) {
    if (each.port.port == wanted.port && each.port.gid == wanted.gid) {
      found = each;
      return {};
    }
  }
  return Status(
      StatusCode::kNetwork,
      wanted.device + ": port " + std::to_string(wanted.port) +
          " no longer has the address " + gidText(wanted.gid));
}

} // namespace resilient
