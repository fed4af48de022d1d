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

struct ConnectedSockets {
  ConnectedSockets() {
    const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
    CHECK(DatagramSocket::open(any, "", from).ok());
    CHECK(DatagramSocket::open(any, "", to).ok());
    SocketAddress address = any;
    address.setPort(to.port());
    CHECK(from.connect(address).ok());
    address.setPort(from.port());
    CHECK(to.connect(address).ok());
  }
  DatagramSocket from, to;
};

// A receiver that gets a processor late learns when the datagram had come: its
// own delay is no queue of the network's.
TEST(datagram_socket_tells_how_long_ago_it_came) {
  ConnectedSockets s;
  auto& [from, to] = s;
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
    to.receive([&](std::span<const std::byte> d, TimePoint arrived) {
      ++count;
      CHECK_EQ(d.size(), data.size());
      // The clocks differ by what one of them is slewed meanwhile.
      CHECK(arrived > begin - kLate / 2);
      told = arrived < std::chrono::steady_clock::now() - kLate / 2;
    });
    CHECK_EQ(count, 1);
  }
  CHECK(told);
}

// What takes its time over each datagram learns of none that it came before it
// was sent: a round trip would be shorter than the link's.
TEST(datagram_socket_lets_nothing_come_before_it_was_sent) {
  ConnectedSockets s;
  constexpr int kCount = 40; // more than one call gives
  constexpr Nanos kEach = std::chrono::milliseconds(1);
  std::array<TimePoint, kCount> sentAt;
  for (int i = 0; i < kCount; ++i) {
    const std::array<std::byte, 1> data{std::byte(i)};
    size_t sent = 0;
    sentAt[i] = std::chrono::steady_clock::now();
    CHECK(s.from.send(data, data.size(), sent));
  }
  int count = 0;
  const auto with = [&](std::span<const std::byte> d, TimePoint arrived) {
    ++count;
    CHECK(arrived >= sentAt[static_cast<size_t>(d[0])]);
    const TimePoint until = std::chrono::steady_clock::now() + kEach;
    while (std::chrono::steady_clock::now() < until) {
    }
  };
  while (count < kCount) {
    pollfd readable{s.to.fd(), POLLIN, 0};
    CHECK_EQ(::poll(&readable, 1, 10'000), 1);
    s.to.receive(with);
  }
}

} // namespace
} // namespace resilient::test
