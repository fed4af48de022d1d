#pragma once

#include "tests/check.h"
#include "transport/socket.h"

namespace resilient::test {

// Two ends of a TCP connection on loopback.
struct Connection {
  Connection() {
    FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
    CHECK_EQ(::bind(listener.get(), any.raw(), any.rawBytes()), 0);
    CHECK_EQ(::listen(listener.get(), 1), 0);
    const SocketAddress at = localAddress(listener.get());
    first.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_EQ(::connect(first.get(), at.raw(), at.rawBytes()), 0);
    second.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    CHECK(static_cast<bool>(second));
  }
  FileDescriptor first, second;
};

} // namespace resilient::test
