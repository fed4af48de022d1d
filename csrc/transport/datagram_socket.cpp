#include "transport/datagram_socket.h"

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace resilient {
namespace {

// Linux's numbers, which old headers lack.
constexpr int kUdpSegment = 103, kUdpGro = 104;
constexpr Nanos kMaxAgo = std::chrono::seconds(1);
constexpr int kIpMtuDiscover = 10, kIpv6MtuDiscover = 23, kPmtuProbe = 3;

// At 10 Gbit/s, 13 ms without a read.
constexpr int kBufferBytes = 16 << 20;

void setInt(int fd, int level, int name, int value) {
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

} // namespace

Status DatagramSocket::open(
    const SocketAddress& local,
    const std::string& interface,
    DatagramSocket& socket) {
  FileDescriptor fd(
      ::socket(local.family(), SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    return errnoStatus(StatusCode::kNetwork, "make a UDP socket", errno);
  }
  if (::bind(fd.get(), local.raw(), local.rawBytes()) != 0) {
    return errnoStatus(
        StatusCode::kNetwork, "bind UDP to " + local.toString(), errno);
  }
  if (!interface.empty()) {
    bindToInterface(fd.get(), interface);
  }
  // As large as the system allows: by force, else up to its limit.
  for (const int name :
       {SO_RCVBUF, SO_RCVBUFFORCE, SO_SNDBUF, SO_SNDBUFFORCE}) {
    setInt(fd.get(), SOL_SOCKET, name, kBufferBytes);
  }
  setInt(fd.get(), SOL_UDP, kUdpGro, 1);
  setInt(fd.get(), SOL_SOCKET, SO_TIMESTAMPNS, 1);
  // Never cut packets into fragments: each of those may be lost. A socket of
  // version 6 sends packets of version 4, too, to a mapped address. "Probe"
  // sets the don't-fragment bit and ignores the path MTU that the kernel has
  // learned. A path finds its MTU by probes of its own.
  setInt(fd.get(), IPPROTO_IP, kIpMtuDiscover, kPmtuProbe);
  if (local.family() == AF_INET6) {
    setInt(fd.get(), IPPROTO_IPV6, kIpv6MtuDiscover, kPmtuProbe);
  }
  socket.fd_ = std::move(fd);
  socket.buffers_ = std::make_unique_for_overwrite<std::byte[]>(
      kReceiveBuffer * kReceiveBuffers);
  return Status();
}

Status DatagramSocket::connect(const SocketAddress& remote) {
  if (::connect(fd_.get(), remote.raw(), remote.rawBytes()) != 0) {
    return errnoStatus(
        StatusCode::kNetwork, "connect UDP to " + remote.toString(), errno);
  }
  return Status();
}

uint16_t DatagramSocket::port() const {
  return localAddress(fd_.get()).port();
}

// Sends everything with one sendmsg() and UDP_SEGMENT. If the kernel refuses,
// the datagrams go one by one, which tells a bad datagram (it alone is lost)
// from a kernel or an interface without segmentation (all go, and batching ends
// for this socket).
bool DatagramSocket::send(
    std::span<const std::byte> data,
    size_t each,
    size_t& sent) {
  sent = 0;
  if (!segments_ || data.size() <= each) {
    return sendEach(data, each, sent);
  }
  iovec iov{const_cast<std::byte*>(data.data()), data.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(uint16_t))> control{};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_UDP;
  c->cmsg_type = kUdpSegment;
  c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
  const auto segment = static_cast<uint16_t>(each);
  std::memcpy(CMSG_DATA(c), &segment, sizeof(segment));
  if (::sendmsg(fd_.get(), &message, 0) >= 0) {
    sent = data.size();
    return true;
  }
  switch (errno) {
    case EAGAIN:
    case ENOBUFS:
      return false;
    default: {
      // Which of them does not go, only one by one can tell. If all do, it was
      // this call that the kernel, or the interface, does not know.
      const bool unknown = errno == EINVAL || errno == EIO ||
          errno == EOPNOTSUPP || errno == ENOPROTOOPT;
      const uint64_t failed = failed_;
      const bool done = sendEach(data, each, sent);
      segments_ = failed_ != failed || !unknown;
      return done;
    }
  }
}

// A failed datagram counts as sent: the path above recovers it like any loss.
// An error that stopped here would keep the rest from ever leaving.
bool DatagramSocket::sendEach(
    std::span<const std::byte> data,
    size_t each,
    size_t& sent) {
  std::array<mmsghdr, kMaxBatch> messages;
  std::array<iovec, kMaxBatch> pieces;
  while (sent < data.size()) {
    size_t n = 0;
    for (size_t at = sent; at < data.size() && n < kMaxBatch; at += each, ++n) {
      pieces[n] = {
          const_cast<std::byte*>(data.data() + at),
          std::min(each, data.size() - at)};
      messages[n] = {};
      messages[n].msg_hdr.msg_iov = &pieces[n];
      messages[n].msg_hdr.msg_iovlen = 1;
    }
    const int done =
        ::sendmmsg(fd_.get(), messages.data(), static_cast<unsigned>(n), 0);
    if (done > 0) {
      for (int i = 0; i < done; ++i) {
        sent += pieces[static_cast<size_t>(i)].iov_len;
      }
      continue;
    }
    if (errno == EAGAIN || errno == ENOBUFS) {
      return false;
    }
    tooLarge_ = tooLarge_ || errno == EMSGSIZE;
    ++failed_;
    // An error of an earlier datagram (ECONNREFUSED: ICMP says that no process
    // listens), or of this one: it counts as lost.
    sent += pieces[0].iov_len;
  }
  return true;
}

// Reads up to kReceiveBuffers messages with one recvmmsg(). Each may hold many
// datagrams that the kernel has joined (UDP_GRO); the control message then has
// their size. Joined datagrams share one time stamp.
bool DatagramSocket::receive(const Receiver& with) {
  std::array<mmsghdr, kReceiveBuffers> messages;
  std::array<iovec, kReceiveBuffers> pieces;
  struct alignas(cmsghdr) Control {
    std::array<char, CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(timespec))>
        bytes;
  };
  std::array<Control, kReceiveBuffers> controls;
  for (size_t i = 0; i < kReceiveBuffers; ++i) {
    pieces[i] = {buffers_.get() + i * kReceiveBuffer, kReceiveBuffer};
    messages[i] = {};
    msghdr& m = messages[i].msg_hdr;
    m.msg_iov = &pieces[i];
    m.msg_iovlen = 1;
    m.msg_control = controls[i].bytes.data();
    m.msg_controllen = controls[i].bytes.size();
  }
  const int n = ::recvmmsg(
      fd_.get(), messages.data(), kReceiveBuffers, MSG_DONTWAIT, nullptr);
  // The clock of the kernel's stamps, and then ours: if we lose the processor
  // in between, the datagrams seem to come later. Too early would make the
  // round trip shorter than it can be, and that is believed for long.
  const Nanos wallNow = std::chrono::system_clock::now().time_since_epoch();
  const TimePoint now = std::chrono::steady_clock::now();
  for (int i = 0; i < n; ++i) {
    const auto k = static_cast<size_t>(i);
    msghdr& m = messages[k].msg_hdr;
    const size_t bytes = messages[k].msg_len;
    size_t each = bytes;
    Nanos ago{};
    for (cmsghdr* c = CMSG_FIRSTHDR(&m); c != nullptr; c = CMSG_NXTHDR(&m, c)) {
      if (c->cmsg_level == SOL_UDP && c->cmsg_type == kUdpGro) {
        int segment = 0;
        std::memcpy(&segment, CMSG_DATA(c), sizeof(segment));
        each = segment > 0 ? static_cast<size_t>(segment) : bytes;
      } else if (
          c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
        timespec stamp{};
        std::memcpy(&stamp, CMSG_DATA(c), sizeof(stamp));
        ago = wallNow - std::chrono::seconds(stamp.tv_sec) -
            std::chrono::nanoseconds(stamp.tv_nsec);
        // The wall clock may be set meanwhile.
        ago = std::clamp(ago, Nanos(0), kMaxAgo);
      }
    }
    const std::byte* const data = buffers_.get() + k * kReceiveBuffer;
    for (size_t at = 0; at < bytes; at += each) {
      with({data + at, std::min(each, bytes - at)}, now - ago);
    }
  }
  // An error is that of a datagram we sent, and has been taken by this call.
  return n >= 0 ? n < static_cast<int>(kReceiveBuffers) : errno == EAGAIN;
}

} // namespace resilient
