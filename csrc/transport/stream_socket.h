#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/syscall.h"
#include "transport/socket.h"
#include "transport/tls_session.h"

namespace resilient {

// Which TCP connections of a process are encrypted.
enum class Encryption : uint8_t {
  kOff,
  kBetweenHosts, // those that leave this host
  kAlways,
};

// "off", "between_hosts" or "always".
inline const char* nameOf(Encryption encryption) {
  switch (encryption) {
    case Encryption::kOff:
      return "off";
    case Encryption::kBetweenHosts:
      return "between_hosts";
    case Encryption::kAlways:
      return "always";
  }
  return "";
}

// Whether this connection has to be. The kernel's word decides, not that of the
// store or of the peer, which may be forged: a connection stays on this host
// only if both its ends have the same address.
inline bool mustEncrypt(Encryption encryption, int fd) {
  return encryption == Encryption::kAlways ||
      (encryption == Encryption::kBetweenHosts && !isLocalConnection(fd));
}

// An established connection: its socket and, if it is encrypted, the state of
// TLS, which may hold bytes that were received and not used yet.
struct StreamSocket {
  StreamSocket() = default;
  StreamSocket( // NOLINT(google-explicit-constructor): in plaintext
      FileDescriptor plain)
      : fd(std::move(plain)) {}
  StreamSocket(FileDescriptor socket, std::unique_ptr<TlsSession> session)
      : fd(std::move(socket)), tls(std::move(session)) {}

  int get() const {
    return fd.get();
  }
  explicit operator bool() const {
    return static_cast<bool>(fd);
  }

  FileDescriptor fd;
  std::unique_ptr<TlsSession> tls;
};

} // namespace resilient
