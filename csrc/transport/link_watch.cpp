#include "transport/link_watch.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace resilient {

LinkWatch::LinkWatch(
    EventLoop& loop,
    Callback callback,
    std::function<void()> onAddresses)
    : loop_(loop),
      callback_(std::move(callback)),
      onAddresses_(std::move(onAddresses)) {
  FileDescriptor fd(
      ::socket(
          AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE));
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  address.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
  if (!fd ||
      ::bind(
          fd.get(),
          reinterpret_cast<const sockaddr*>(&address),
          sizeof(address)) != 0) {
    logMessage(
        LogLevel::kInfo,
        "no news of network interfaces (" + std::string(std::strerror(errno)) +
            "): a failure of our own shows as silence only");
    return;
  }
  fd_ = std::move(fd);
  loop_.add(fd_.get(), EPOLLIN, this);
}

LinkWatch::~LinkWatch() {
  if (fd_) {
    loop_.remove(fd_.get());
  }
}

void LinkWatch::onEvents(uint32_t) {
  alignas(nlmsghdr) char buffer[16 << 10];
  for (;;) {
    sockaddr_nl from{};
    socklen_t fromBytes = sizeof(from);
    const ssize_t n = ::recvfrom(
        fd_.get(),
        buffer,
        sizeof(buffer),
        0,
        reinterpret_cast<sockaddr*>(&from),
        &fromBytes);
    if (n < 0 && errno == ENOBUFS) { // some events are lost
      onAddresses_();
      continue;
    }
    if (n <= 0) {
      return;
    }
    if (from.nl_pid != 0) {
      continue; // only the kernel is believed
    }
    auto left = static_cast<unsigned>(n);
    for (auto* m = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(m, left);
         m = NLMSG_NEXT(m, left)) {
      if (m->nlmsg_type == RTM_NEWADDR || m->nlmsg_type == RTM_DELADDR) {
        onAddresses_();
      }
      if (m->nlmsg_type != RTM_NEWLINK && m->nlmsg_type != RTM_DELLINK) {
        continue;
      }
      const auto* link = static_cast<const ifinfomsg*>(NLMSG_DATA(m));
      auto attributes = static_cast<unsigned>(IFLA_PAYLOAD(m));
      for (auto* a = IFLA_RTA(link); RTA_OK(a, attributes);
           a = RTA_NEXT(a, attributes)) {
        if (a->rta_type == IFLA_IFNAME) {
          const auto* name = static_cast<const char*>(RTA_DATA(a));
          const bool usable = m->nlmsg_type == RTM_NEWLINK &&
              (link->ifi_flags & IFF_UP) != 0 &&
              (link->ifi_flags & IFF_RUNNING) != 0;
          callback_(std::string(name, ::strnlen(name, RTA_PAYLOAD(a))), usable);
        }
      }
    }
  }
}

} // namespace resilient
