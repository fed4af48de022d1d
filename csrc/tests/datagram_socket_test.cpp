#include "transport/datagram_socket.h"

#include <netinet/in.h>
#include <poll.h>

#include <thread>

#include "tests/check.h"

namespace resilient::test {
namespace {

// A process whose listener takes both versions has mapped addresses.
TEST(datagram_socket_never_sends_fragments) {
  for (const char* const ip : {"127.0.0.1", "::ffff:127.0.0.1", "::1"}) {
    DatagramSocket socket;
    const auto local = SocketAddress::parse(ip, 0);
    CHECK(local.has_value());
    if (const Status s = DatagramSocket::open(*local, "", socket); !s.ok()) {
      CHECK_EQ(local->family(), AF_INET6); // not on this host
      continue;
    }
    int value = 0;
    socklen_t bytes = sizeof(value);
    CHECK_EQ(
        ::getsockopt(socket.fd(), IPPROTO_IP, IP_MTU_DISCOVER, &value, &bytes),
        0);
    CHECK_EQ(value, IP_PMTUDISC_PROBE);
  }
}

// A receiver that gets a processor late learns when the datagram had come: its
// own delay is no queue of the network's.
TEST(datagram_socket_tells_how_long_ago_it_came) {
  const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
  DatagramSocket from, to;
  CHECK(DatagramSocket::open(any, "", from).ok());
  CHECK(DatagramSocket::open(any, "", to).ok());
  SocketAddress address = any;
  address.setPort(to.port());
  CHECK(from.connect(address).ok());
  address.setPort(from.port());
  CHECK(to.connect(address).ok());
  constexpr Nanos kLate = std::chrono::milliseconds(30);
  // The kernel begins to stamp some time after the first socket asks for it.
  bool told = false;
  for (int round = 0; round < 100 && !told; ++round) {
    const std::array<std::byte, 3> data{};
    size_t sent = 0;
    const TimePoint begin = std::chrono::steady_clock::now();
    CHECK(from.send(data, data.size(), sent));
    pollfd readable{to.fd(), POLLIN, 0};
    CHECK_EQ(::poll(&readable, 1, 10'000), 1);
    std::this_thread::sleep_for(kLate);
    int count = 0;
    to.receive([&](std::span<const std::byte> d, Nanos ago) {
      ++count;
      CHECK_EQ(d.size(), data.size());
      // The clocks differ by what one of them is slewed meanwhile.
      CHECK(ago < std::chrono::steady_clock::now() - begin + kLate / 2);
      told = ago > kLate / 2;
    });
    CHECK_EQ(count, 1);
  }
  CHECK(told);
}

} // namespace
} // namespace resilient::test
