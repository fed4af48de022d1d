#include "transport/verbs_choice.h"

#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "transport/verbs_path.h"

namespace resilient {
namespace {

// "rxe0, rxe1"
template <typename Range>
std::string listText(const Range& range) {
  std::string text;
  for (const auto& each : range) {
    text += (text.empty() ? "" : ", ") + each;
  }
  return text;
}

std::set<std::string> devicesOf(const std::vector<VerbsPort>& ports) {
  std::set<std::string> names;
  for (const VerbsPort& port : ports) {
    names.insert(port.device);
  }
  return names;
}

} // namespace

VerbsPort::Gid gidOf(const SocketAddress& address) {
  VerbsPort::Gid gid{};
  if (address.family() == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address.raw());
    gid[10] = gid[11] = std::byte(0xff);
    std::memcpy(&gid[12], &v4->sin_addr, 4);
  } else {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address.raw());
    std::memcpy(gid.data(), &v6->sin6_addr, gid.size());
  }
  return gid;
}

uint32_t interfaceIndexOf(const std::string& nic) {
  return ::if_nametoindex(nic.c_str());
}

VerbsChoice::VerbsChoice(const EngineOptions& options)
    : off_(options.rdma == "off" || options.encryption == "required"),
      required_(options.rdma == "required"),
      gidIndex_(options.gidIndex()) {
  std::string name;
  for (const char c : options.rdma_devices + ',') {
    if (c != ',') {
      name += c == ' ' ? "" : std::string(1, c);
    } else if (!name.empty()) {
      devices_.insert(std::exchange(name, ""));
    }
  }
}

std::vector<VerbsPort> VerbsChoice::of(
    const std::vector<VerbsPort>& ports) const {
  std::vector<VerbsPort> allowed;
  std::ranges::copy_if(
      ports, std::back_inserter(allowed), [&](const VerbsPort& port) {
        return allows(port.device) &&
            (!gidIndex_ || *gidIndex_ == port.gidIndex);
      });
  return allowed;
}

std::string VerbsChoice::missing(
    const std::vector<VerbsPort>& ports,
    const std::string& why,
    const std::vector<NicAddress>& addresses) const {
  if (!mustLook()) {
    return "";
  }
  const std::set<std::string> there = devicesOf(ports);
  for (const std::string& name : devices_) {
    if (!there.contains(name)) {
      return "TORCH_RESILIENT_RDMA_DEVICES=\"" + listText(devices_) +
          "\": there is no RDMA device " + name + " with RoCE v2" +
          (!why.empty()         ? ": " + why
               : !there.empty() ? ", but " + listText(there)
                                : "");
    }
  }
  const std::vector<VerbsPort> allowed = of(ports);
  if (gidIndex_ && !ports.empty() && allowed.empty()) {
    std::set<uint32_t> indices;
    for (const VerbsPort& port : ports) {
      indices.insert(port.gidIndex);
    }
    std::vector<std::string> texts;
    for (const uint32_t index : indices) {
      texts.push_back(std::to_string(index));
    }
    return "TORCH_RESILIENT_RDMA_GID_INDEX=" + std::to_string(*gidIndex_) +
        ": no RDMA device has a RoCE v2 address with this index, but with " +
        listText(texts);
  }
  const std::string required = "TORCH_RESILIENT_RDMA=required: ";
  if (!required_) {
    return "";
  }
  if (allowed.empty()) {
    return required +
        (!why.empty()
             ? why
             : "this host has no RDMA device with RoCE v2 (a container needs "
               "--device=/dev/infiniband)");
  }
  std::string down;
  for (const VerbsPort& port : here(ports, addresses)) {
    if (port.active) {
      return "";
    }
    down = port.device;
  }
  std::set<std::string> nics;
  for (const NicAddress& nic : addresses) {
    nics.insert(nic.nic);
  }
  return required +
      (!down.empty() ? "the port of " + down + " is down"
                     : "no RDMA device has an address of " + listText(nics) +
               " (TORCH_RESILIENT_INTERFACE), but there is " +
               listText(devicesOf(allowed)));
}

std::vector<VerbsPort> VerbsChoice::here(
    const std::vector<VerbsPort>& ports,
    const std::vector<NicAddress>& addresses) const {
  std::vector<VerbsPort> found = of(ports);
  std::erase_if(found, [&](const VerbsPort& port) {
    return std::ranges::none_of(addresses, [&](const NicAddress& nic) {
      return byInterface() ? port.interfaceIndex == interfaceIndexOf(nic.nic)
                           : port.gid == gidOf(nic.address);
    });
  });
  return found;
}

Status tryQueuePair(VerbsApi& api, const std::vector<VerbsPort>& ports) {
  Status first;
  for (const VerbsPort& port : ports) {
    std::unique_ptr<VerbsEnd> end;
    const Status status = VerbsEnd::make(api, port, {}, end);
    if (status.ok()) {
      return status;
    }
    first = first.ok() ? status : first;
  }
  return first;
}

} // namespace resilient
