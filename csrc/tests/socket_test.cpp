#include "transport/socket.h"

#include "tests/check.h"
#include "tests/connection.h"

namespace resilient::test {
namespace {

// Setting a buffer ends the kernel's own tuning: only where it gives more.
TEST(socket_buffers_are_set_only_where_that_gives_more) {
  constexpr uint64_t kMiB = 1u << 20;
  // The limits of a plain Linux: 208 KiB, doubled.
  CHECK_EQ(sendBufferFor(25 * kMiB, 4 * kMiB, 416 << 10), 0u);
  CHECK_EQ(receiveBufferFor(25 * kMiB, 6 * kMiB, 416 << 10), 0u);
  // Autotuning has room for it anyway.
  CHECK_EQ(sendBufferFor(3 * kMiB, 4 * kMiB, UINT64_MAX), 0u);
  CHECK_EQ(receiveBufferFor(25 * kMiB, 64 * kMiB, UINT64_MAX), 0u);
  // As much as is needed, or as is allowed.
  CHECK_EQ(sendBufferFor(24 * kMiB, 4 * kMiB, UINT64_MAX), 30 * kMiB);
  CHECK_EQ(receiveBufferFor(24 * kMiB, 6 * kMiB, UINT64_MAX), 48 * kMiB);
  CHECK_EQ(sendBufferFor(24 * kMiB, 4 * kMiB, 8 * kMiB), 8 * kMiB);
  CHECK_EQ(receiveBufferFor(24 * kMiB, 6 * kMiB, 8 * kMiB), 8 * kMiB);
}

int optionOf(int fd, int option) {
  int value = 0;
  socklen_t bytes = sizeof(value);
  CHECK_EQ(::getsockopt(fd, SOL_SOCKET, option, &value, &bytes), 0);
  return value;
}

TEST(socket_buffers_are_raised_as_far_as_the_system_allows) {
  const BufferLimits system = systemBufferLimits();
  CHECK(system.windowBytes() > 0);
  // As if autotuning ended at 64 KiB; what the rest is, the kernel decides.
  BufferLimits small = system;
  small.sendTuned = small.receiveTuned = 64 << 10;
  Connection c;
  CHECK_EQ(raiseBuffers(c.first.get(), 32 << 10, small), 64u << 10);
  const int before = optionOf(c.first.get(), SO_SNDBUF);
  CHECK_EQ(raiseBuffers(c.first.get(), 32 << 10, small), 64u << 10);
  CHECK_EQ(optionOf(c.first.get(), SO_SNDBUF), before);
  // 208 KiB are the least that a Linux has.
  const uint64_t window = raiseBuffers(c.first.get(), 100 << 10, small);
  CHECK(window >= 99 << 10);
  CHECK_EQ(optionOf(c.first.get(), SO_SNDBUF), 125 << 10);
  CHECK_EQ(optionOf(c.first.get(), SO_RCVBUF), 200 << 10);
  if (system.forced) {
    CHECK(raiseBuffers(c.second.get(), 64 << 20, small) > small.sendTuned);
    CHECK(optionOf(c.second.get(), SO_SNDBUF) >= 64 << 20);
  }
}

TEST(socket_knows_which_congestion_control_it_may_use) {
  CHECK(mayUseCongestionControl("reno")); // always there
  CHECK(!mayUseCongestionControl("no-such-one"));
  CHECK_CONTAINS(availableCongestionControls(), "reno");
}

TEST(the_kernel_knows_the_round_trip_to_a_port) {
  uint16_t port = 0;
  {
    Connection c;
    const SocketAddress server = remoteAddress(c.first.get());
    port = server.port();
    const Nanos found = minRoundTripTo(port);
    CHECK(found > Nanos(0));
    CHECK(found < std::chrono::seconds(1));
    // A second server with this port: which one is meant?
    FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const SocketAddress other = *SocketAddress::parse("127.0.0.2", port);
    CHECK_EQ(::bind(listener.get(), other.raw(), other.rawBytes()), 0);
    CHECK_EQ(::listen(listener.get(), 1), 0);
    FileDescriptor client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_EQ(::connect(client.get(), other.raw(), other.rawBytes()), 0);
    CHECK(minRoundTripTo(port) == Nanos(0));
    client.reset();
    CHECK(minRoundTripTo(port) > Nanos(0));
  }
  CHECK(minRoundTripTo(port) == Nanos(0));
}

std::optional<BbrView> bbrOf(int fd) {
  const auto info = tcpInfo(fd);
  return info ? bbrView(*info) : std::nullopt;
}

TEST(socket_knows_when_bbr_starts_up) {
  Connection c;
  CHECK(setCongestionControl(c.first.get(), "reno"));
  CHECK(!bbrOf(c.first.get()));
  if (mayUseCongestionControl("bbr")) {
    CHECK(setCongestionControl(c.first.get(), "bbr"));
    // It is asked when data is acknowledged.
    CHECK_EQ(::send(c.first.get(), "x", 1, 0), 1);
    char x = 0;
    CHECK_EQ(::recv(c.second.get(), &x, 1, 0), 1);
    while (tcpInfo(c.first.get())->unackedSegments > 0) {
    }
    const auto view = bbrOf(c.first.get());
    CHECK(view && view->startingUp);
    CHECK(view->sends > 0);
    CHECK_EQ(view->inFlightBytes, 0u);
    // The kernel keeps to the limit.
    limitPacing(c.first.get(), 1'000'000);
    CHECK_EQ(::send(c.first.get(), "x", 1, 0), 1);
    CHECK_EQ(::recv(c.second.get(), &x, 1, 0), 1);
    while (tcpInfo(c.first.get())->unackedSegments > 0) {
    }
    CHECK(bbrOf(c.first.get())->sends <= 1'000'000);
    // Nothing has been acknowledged yet since it has begun anew.
    CHECK(setCongestionControl(c.first.get(), "reno"));
    CHECK(setCongestionControl(c.first.get(), "bbr"));
    CHECK(bbrOf(c.first.get())->startingUp);
  }
  CHECK(!bbrOf(-1));
}

TEST(socket_tells_what_bbr_has_in_flight) {
  Connection c;
  if (!mayUseCongestionControl("bbr")) {
    return;
  }
  CHECK(setCongestionControl(c.first.get(), "bbr"));
  // The far end does not read, so its window closes, and much is not sent. That
  // is not in flight.
  const std::string block(1 << 16, 'x');
  ssize_t sent = 0, n = 0;
  while ((n = ::send(c.first.get(), block.data(), block.size(), MSG_DONTWAIT)) >
         0) {
    sent += n;
  }
  const auto info = tcpInfo(c.first.get());
  CHECK(info && info->bbr && info->notSentBytes > 0);
  CHECK(
      info->bytesAcked + info->bbr->inFlightBytes + info->notSentBytes <=
      static_cast<uint64_t>(sent) + 1); // + SYN
  CHECK(!tcpInfo(c.first.get(), /*askForBbr=*/false)->bbr);
}

} // namespace
} // namespace resilient::test
