#include "transport/link_watch.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

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

// After it has dropped news, the kernel drops all further ones until the socket
// is empty. Only then is a look at the present state sure to miss nothing.
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
      missed_ = true;
      continue;
    }
    if (n <= 0) {
      break;
    }
    if (from.nl_pid != 0) {
      continue; // only the kernel is believed
    }
    auto left = static_cast<unsigned>(n);
    for (auto* m = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(m, left);
         m = NLMSG_NEXT(m, left)) {
      onMessage(*m);
    }
  }
  if (std::exchange(missed_, false)) {
    askForLinks();
    onAddresses_();
  }
}

// News, or a part of the answer to askForLinks(): both look the same.
void LinkWatch::onMessage(const nlmsghdr& message) {
  if (message.nlmsg_type == RTM_NEWADDR || message.nlmsg_type == RTM_DELADDR) {
    onAddresses_();
  }
  if (message.nlmsg_type != RTM_NEWLINK && message.nlmsg_type != RTM_DELLINK) {
    return;
  }
  const auto* link = static_cast<const ifinfomsg*>(NLMSG_DATA(&message));
  auto attributes = static_cast<unsigned>(IFLA_PAYLOAD(&message));
  for (auto* a = IFLA_RTA(link); RTA_OK(a, attributes);
       a = RTA_NEXT(a, attributes)) {
    if (a->rta_type == IFLA_IFNAME) {
      const auto* name = static_cast<const char*>(RTA_DATA(a));
      const bool usable = message.nlmsg_type == RTM_NEWLINK &&
          (link->ifi_flags & IFF_UP) != 0 &&
          (link->ifi_flags & IFF_RUNNING) != 0;
      callback_(std::string(name, ::strnlen(name, RTA_PAYLOAD(a))), usable);
    }
  }
}

// The answer comes to the same socket, one RTM_NEWLINK for each interface.
// Should the kernel refuse, the next event of an interface tells its state.
void LinkWatch::askForLinks() {
  struct {
    nlmsghdr header;
    ifinfomsg link;
  } request{};
  request.header.nlmsg_len = sizeof(request);
  request.header.nlmsg_type = RTM_GETLINK;
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  request.link.ifi_family = AF_UNSPEC;
  (void)::send(fd_.get(), &request, sizeof(request), 0);
}

} // namespace resilient
