#include "transport/link_watch.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>

#include <cstdio>
#include <functional>

#include "tests/check.h"

namespace resilient {
namespace {

// The only netlink socket of this process, or -1.
int netlinkSocket() {
  for (int fd = 0; fd < 1024; ++fd) {
    int domain = 0;
    socklen_t bytes = sizeof(domain);
    if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 &&
        domain == AF_NETLINK) {
      return fd;
    }
  }
  return -1;
}

void setReceiveBuffer(int fd, int bytes) {
  CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)), 0);
}

// The kernel answers requests that mean nothing. More answers than the receive
// buffer holds make it drop news, as changes of many interfaces at once do;
// those would need root.
TEST(link_watch_asks_for_links_again_after_lost_news) {
  EventLoop loop;
  bool loopbackSeen = false;
  int addresses = 0;
  LinkWatch watch(
      loop,
      [&](const std::string& nic, bool) {
        loopbackSeen = loopbackSeen || nic == "lo";
      },
      [&] { ++addresses; });
  const int fd = netlinkSocket();
  if (!watch.working() || fd < 0) {
    std::printf("skipped: there is no netlink here\n");
    return;
  }
  setReceiveBuffer(fd, 1);
  nlmsghdr request{};
  request.nlmsg_len = sizeof(request);
  request.nlmsg_type = RTM_GETLINK;
  request.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK;
  for (int i = 0; i < 1000; ++i) {
    (void)::send(fd, &request, sizeof(request), 0);
  }
  setReceiveBuffer(fd, 64 << 10);
  const TimePoint begin = loop.now();
  std::function<void()> look = [&] {
    if ((loopbackSeen && addresses > 0) ||
        loop.now() - begin > std::chrono::seconds(10)) {
      loop.stop();
    } else {
      loop.after(std::chrono::milliseconds(1), look);
    }
  };
  loop.after(Nanos(0), look);
  loop.run();
  if (addresses == 0) {
    std::printf("skipped: this kernel has dropped no news\n");
    return;
  }
  CHECK(loopbackSeen);
}

} // namespace
} // namespace resilient
