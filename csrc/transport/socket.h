#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "base/syscall.h"
#include "base/time.h"

namespace resilient {

// An IPv4 or IPv6 address and port. A default-constructed one stands for "no
// address"; its port is 0.
class SocketAddress {
 public:
  SocketAddress() = default;
  // From numbers, "10.0.0.7" or "fd00::7" ("fe80::7%eth0" for link-local
  // ones); no name look-up. Nothing if `ip` is not an address.
  static std::optional<SocketAddress> parse(
      const std::string& ip,
      uint16_t port);
  static SocketAddress from(const sockaddr* address, socklen_t bytes);

  int family() const {
    return storage_.ss_family;
  }
  // Without brackets; an IPv4 address inside an IPv6 one (as a dual-stack
  // listener sees it) is written as IPv4.
  std::string ip() const;
  uint16_t port() const;
  void setPort(uint16_t port);
  bool isLoopback() const;
  // The part of the address that one machine cannot choose: all of an IPv4
  // address, the first 64 bits of an IPv6 one. Values of the two families never
  // collide. An IPv4 address inside an IPv6 one counts as IPv4.
  uint64_t network() const;
  // "10.0.0.7:29511", "[fd00::7]:29511"
  std::string toString() const;

  const sockaddr* raw() const {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  socklen_t rawBytes() const;

 private:
  sockaddr_storage storage_{};
};

// Applied before connect() or listen(): buffer sizes decide the window scale,
// which is fixed by the first packets.
struct SocketOptions {
  // Our frames are whole when written: waiting for more only adds latency.
  bool noDelay = true;
  // Bytes that may wait unsent in the kernel before the socket stops being
  // writable. Low, because what waits there cannot change path or priority;
  // too low costs throughput on a slow scheduler. 0: the system's own.
  int notSentLowatBytes = 128 << 10;
  // The kernel gives a connection up if sent data stays unacknowledged this
  // long: a backstop below the path's own health checks. 0: the system's own
  // (about 15 min).
  Nanos userTimeout = std::chrono::seconds(30);
  // Probes on an idle connection find a peer that vanished without a word.
  // 0: none.
  Nanos keepaliveIdle = std::chrono::seconds(10);
  Nanos keepaliveInterval = std::chrono::seconds(5);
  int keepaliveProbes = 3;
  // 0: the kernel tunes them itself, which is right except on long fat links
  // with low system limits.
  int sendBufferBytes = 0;
  int receiveBufferBytes = 0;
  // Packets leave by this one; empty: as the kernel routes.
  std::string interface;
  // The mark by which routers tell kinds of traffic apart (RFC 2474); 0: none.
  int dscp = 0;
};

// TCP_NOTSENT_LOWAT, see SocketOptions. Best effort. May be called at any time
// in the life of a connection (TcpPath::tune).
void limitUnsent(int fd, int bytes);

// Packets leave by this interface only, whatever the routing table says: with
// two NICs in one subnet they would all leave by the first. Best effort.
void bindToInterface(int fd, const std::string& interface);

// How large the buffers of a TCP connection can be, in the kernel's bytes.
struct BufferLimits {
  // By its autotuning.
  uint64_t sendTuned = 4u << 20, receiveTuned = 6u << 20;
  // If they are set, which ends the autotuning of that socket.
  uint64_t sendSet = 0, receiveSet = 0;
  bool forced = false; // beyond net.core.[rw]mem_max, with CAP_NET_ADMIN

  // The bytes that one connection may have in flight: the smaller of the tuned
  // ones.
  uint64_t windowBytes() const;
};
// Reads files of /proc and opens a probe socket: once per process is enough.
BufferLimits systemBufferLimits();

// The size of a buffer that allows this much in flight; 0: leave it to
// autotuning, which gives as much, up to `tuned`. In the kernel's bytes, which
// count its own records of packets too.
uint64_t sendBufferFor(uint64_t windowBytes, uint64_t tuned, uint64_t allowed);
uint64_t
receiveBufferFor(uint64_t windowBytes, uint64_t tuned, uint64_t allowed);

// Gives an established connection buffers for so much in flight, where that is
// allowed and more than autotuning's. Returns what it may have in flight now,
// if the far end does the same. Never below what autotuning would give: a
// buffer that is set stays as it is.
uint64_t raiseBuffers(int fd, uint64_t windowBytes, const BufferLimits& limits);

// The mark of SocketOptions::dscp on a connection. False: errno says why not.
bool setDscp(int fd, int dscp);

// The congestion control of one connection; its name in the kernel. False:
// errno says why not.
bool setCongestionControl(int fd, const std::string& name);
// Whether the kernel has it and lets this process use it.
bool mayUseCongestionControl(const std::string& name);
// "reno cubic bbr", what the kernel has.
std::string availableCongestionControls();

// Both ends are on this host: no link has a queue that could fill, so keeping
// little unsent in the kernel gains nothing, nor does a congestion window. Best
// effort. The two addresses of the connection decide, not the identity of the
// host.
bool isLocalConnection(int fd);
void tuneLocalConnection(int fd);

// Sets what is asked for; the error names the option.
Status applySocketOptions(int fd, const SocketOptions& options);

// A non-blocking, close-on-exec TCP socket that has begun to connect, from
// `source` (its port 0: any) if given. `connected` tells whether the
// connection stands already; otherwise wait until it is writable and ask
// connectOutcome. Errors name the attempt.
Status startConnect(
    const SocketAddress& remote,
    const std::optional<SocketAddress>& source,
    const SocketOptions& options,
    FileDescriptor& fd,
    bool& connected);

// 0 if the connection stands, else its errno. A connection to ourselves counts
// as ECONNREFUSED: TCP makes one if no process listens on a local port that the
// kernel has just chosen as our own. Ask once: reading the error clears it.
// ENOTCONN means that the connection is not established yet.
int connectOutcome(int fd);

// The next connection of a listening socket, non-blocking and close-on-exec.
// 0, or an errno: EAGAIN if there is none now. On an error, `fd` and `remote`
// are unchanged. Some errors belong to a connection in the queue, not to the
// listener: call again.
int acceptConnection(int listener, FileDescriptor& fd, SocketAddress& remote);

// close() will drop what is unsent and send a reset: for a path that is given
// up. Its bytes must not linger in the kernel.
void resetOnClose(int fd);

// Both return a default-constructed address if the kernel has none, such as
// after a reset.
SocketAddress localAddress(int fd);
SocketAddress remoteAddress(int fd);

// The state of BBR on a connection.
struct BbrInfo {
  bool startingUp = false; // it has not found the link's rate
  bool measuring = false; // the round trip, with a window of four segments
  uint64_t bytesPerS = 0; // arriving: the highest of the last round trips
  uint64_t inFlightBytes = 0; // sent, not acknowledged
};

// A snapshot of the kernel's counters. Fields that this kernel does not know
// are 0.
struct TcpInfo {
  Nanos roundTrip{}; // smoothed
  Nanos roundTripVariance{};
  // With BBR it is of the last ten seconds, and BBR empties its own queue to
  // find it. Otherwise it is of the last five minutes. 0: unknown.
  Nanos minRoundTrip{};
  uint32_t unackedSegments = 0;
  uint32_t retransmits = 0; // of the segment at the head, in a row
  uint32_t totalRetransmits = 0;
  uint32_t congestionWindowSegments = 0;
  uint64_t deliveryRateBytesPerS = 0;
  uint64_t bytesAcked = 0;
  uint64_t bytesReceived = 0; // in order, whether read or not
  uint64_t pacingBytesPerS = 0;
  uint32_t segmentBytes = 0; // of a full one that it sends
  uint32_t deliveredSegments = 0; // selectively acknowledged ones included
  uint64_t notSentBytes = 0;
  Nanos sinceLastAck{};
  Nanos sinceLastSent{}; // data
  bool recovering = false; // from a loss, or from reordering
  Nanos kernelMinRoundTrip{}; // of the last five minutes; 0: unknown
  std::optional<BbrInfo> bbr; // nothing with another congestion control

  // With nothing under way, and until something is sent, all of it stays the
  // same but bytesReceived and the times since.
  bool quiet() const {
    return unackedSegments == 0 && notSentBytes == 0;
  }
};
// Nothing if the socket is not a TCP connection (any more). It makes a system
// call; another one to ask for BBR, and a third if BBR has something under way.
std::optional<TcpInfo> tcpInfo(int fd, bool askForBbr = true);

// The shortest round trip of all TCP connections of this process to `port` of
// another process, as the kernel has measured it: a busy process at either end
// does not make it longer. 0 if there is none, or if they lead to several
// addresses. Looks at every open descriptor of the process, with a system call
// or more each: for rare use.
Nanos minRoundTripTo(uint16_t port);

// A connection with BBR.
struct BbrView {
  bool startingUp = false; // it has not found the link's rate
  uint64_t sends = 0; // bytes per second
  uint64_t arrives = 0; // the same: the highest of the last round trips
  uint64_t bytesAcked = 0; // total
  uint32_t deliveredSegments = 0, retransmits = 0; // total
  uint64_t windowBytes = 0;
  // Nothing that it does just now would be lost if BBR began anew: it recovers
  // from no loss, and does not measure the round trip, for which the window is
  // of four segments. It would begin with the kernel's shortest round trip, so
  // false as well if the route was a quarter shorter in the last five minutes.
  bool mayRestart = false;
  uint64_t inFlightBytes = 0;
  // As TcpInfo has them.
  Nanos roundTrip{}, minRoundTrip{}, sinceLastAck{}, sinceLastSent{};
};
// Nothing if the connection has another congestion control.
std::optional<BbrView> bbrView(const TcpInfo& info);
// 0: no limit.
void limitPacing(int fd, uint64_t bytesPerS);
// net.ipv4.tcp_slow_start_after_idle of this host; true if it cannot be read.
bool slowStartsAfterIdle();

} // namespace resilient
