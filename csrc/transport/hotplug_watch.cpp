#include "transport/hotplug_watch.h"

#include <linux/netlink.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace resilient {

// Group 1 has the kernel's own messages; those of udev are in another one.
HotplugWatch::HotplugWatch(EventLoop& loop, std::function<void()> callback)
    : loop_(loop), callback_(std::move(callback)) {
  FileDescriptor fd(
      ::socket(
          AF_NETLINK,
          SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC,
          NETLINK_KOBJECT_UEVENT));
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  address.nl_groups = 1;
  if (!fd ||
      ::bind(
          fd.get(),
          reinterpret_cast<const sockaddr*>(&address),
          sizeof(address)) != 0) {
    logMessage(
        LogLevel::kInfo,
        "no news of RDMA devices that come or go (" + errnoText(errno) + ')');
    return;
  }
  fd_ = std::move(fd);
  loop_.add(fd_.get(), EPOLLIN, this);
}

HotplugWatch::~HotplugWatch() {
  if (fd_) {
    loop_.remove(fd_.get());
  }
}

bool HotplugWatch::concerns(std::string_view message) {
  // The device itself, and the file that programs open.
  constexpr std::array<std::string_view, 2> kLines = {
      "SUBSYSTEM=infiniband", "SUBSYSTEM=infiniband_verbs"};
  while (!message.empty()) {
    const std::string_view line = message.substr(0, message.find('\0'));
    if (line == kLines[0] || line == kLines[1]) {
      return true;
    }
    message.remove_prefix(std::min(line.size() + 1, message.size()));
  }
  return false;
}

// Messages that were lost (ENOBUFS) may have been about RDMA devices.
void HotplugWatch::onEvents(uint32_t) {
  std::array<char, 8 << 10> buffer; // the kernel's own are at most 2 KiB
  bool concerned = false;
  for (;;) {
    sockaddr_nl from{};
    socklen_t fromBytes = sizeof(from);
    const ssize_t n = ::recvfrom(
        fd_.get(),
        buffer.data(),
        buffer.size(),
        0,
        reinterpret_cast<sockaddr*>(&from),
        &fromBytes);
    if (n < 0 && errno == ENOBUFS) {
      concerned = true;
      continue;
    }
    if (n <= 0) {
      break;
    }
    if (from.nl_pid == 0) { // only the kernel is believed
      concerned =
          concerned || concerns({buffer.data(), static_cast<size_t>(n)});
    }
  }
  if (concerned) {
    callback_();
  }
}

} // namespace resilient
