#include "transport/socket.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/file.h"

namespace resilient {

namespace {

const sockaddr_in* asV4(const sockaddr_storage& s) {
  return reinterpret_cast<const sockaddr_in*>(&s);
}
const sockaddr_in6* asV6(const sockaddr_storage& s) {
  return reinterpret_cast<const sockaddr_in6*>(&s);
}

Status
setOption(int fd, int level, int option, const char* name, int64_t value) {
  int v = static_cast<int>(std::min<int64_t>(value, INT32_MAX));
  if (::setsockopt(fd, level, option, &v, sizeof(v)) != 0) {
    return errnoStatus(
        StatusCode::kNetwork,
        std::string("set ") + name + " to " + std::to_string(v),
        errno);
  }
  return Status();
}

// At least 1: the kernel takes 0 for "the default".
int64_t wholeSeconds(Nanos d) {
  return std::max<int64_t>(
      1, std::chrono::ceil<std::chrono::seconds>(d).count());
}

} // namespace

std::optional<SocketAddress> SocketAddress::parse(
    const std::string& ip,
    uint16_t port) {
  SocketAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage_);
  if (::inet_pton(AF_INET, ip.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    return address;
  }
  address.storage_ = {};
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage_);
  size_t percent = ip.find('%');
  if (::inet_pton(AF_INET6, ip.substr(0, percent).c_str(), &v6->sin6_addr) !=
      1) {
    return std::nullopt;
  }
  if (percent != std::string::npos) {
    v6->sin6_scope_id = ::if_nametoindex(ip.c_str() + percent + 1);
    if (v6->sin6_scope_id == 0) {
      return std::nullopt;
    }
  }
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(port);
  return address;
}

SocketAddress SocketAddress::from(const sockaddr* raw, socklen_t bytes) {
  SocketAddress address;
  std::memcpy(
      &address.storage_,
      raw,
      std::min<size_t>(bytes, sizeof(address.storage_)));
  return address;
}

std::string SocketAddress::ip() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &asV4(storage_)->sin_addr, text, sizeof(text));
  } else if (family() == AF_INET6) {
    const in6_addr& a = asV6(storage_)->sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&a)) {
      ::inet_ntop(AF_INET, a.s6_addr + 12, text, sizeof(text));
      return text;
    }
    ::inet_ntop(AF_INET6, &a, text, sizeof(text));
    char name[IF_NAMESIZE];
    uint32_t scope = asV6(storage_)->sin6_scope_id;
    if (scope != 0 && ::if_indextoname(scope, name) != nullptr) {
      return std::string(text) + "%" + name;
    }
  }
  return text;
}

uint16_t SocketAddress::port() const {
  // At the same place in both forms.
  static_assert(
      offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  return ntohs(asV4(storage_)->sin_port);
}

void SocketAddress::setPort(uint16_t port) {
  reinterpret_cast<sockaddr_in*>(&storage_)->sin_port = htons(port);
}

bool SocketAddress::isLoopback() const {
  if (family() == AF_INET) {
    return ntohl(asV4(storage_)->sin_addr.s_addr) >> 24 == 127;
  }
  const in6_addr& a = asV6(storage_)->sin6_addr;
  return family() == AF_INET6 &&
      (IN6_IS_ADDR_LOOPBACK(&a) ||
       (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127));
}

// A machine can choose the lower half of its IPv6 address freely, and so could
// evade a limit that counted whole addresses (Listener::dropExcess).
uint64_t SocketAddress::network() const {
  uint32_t v4 = 0;
  if (family() == AF_INET) {
    v4 = asV4(storage_)->sin_addr.s_addr;
  } else {
    const in6_addr& a = asV6(storage_)->sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&a)) {
      uint64_t prefix = 0;
      std::memcpy(&prefix, a.s6_addr, sizeof(prefix));
      return prefix;
    }
    std::memcpy(&v4, a.s6_addr + 12, sizeof(v4));
  }
  constexpr uint64_t kNoPrefix = 0xff; // nothing is sent from ff00::/8
  return uint64_t{v4} << 32 | kNoPrefix;
}

std::string SocketAddress::toString() const {
  std::string host = ip();
  if (host.find(':') != std::string::npos) {
    host = "[" + host + "]";
  }
  return host + ":" + std::to_string(port());
}

socklen_t SocketAddress::rawBytes() const {
  return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

// The first failure is reported, and the options after it are skipped, except
// the interface and the DSCP mark.
Status applySocketOptions(int fd, const SocketOptions& options) {
  Status status;
  auto set = [&](int level, int option, const char* name, int64_t value) {
    if (status.ok()) {
      status = setOption(fd, level, option, name, value);
    }
  };
  if (options.noDelay) {
    set(IPPROTO_TCP, TCP_NODELAY, "TCP_NODELAY", 1);
  }
  if (options.notSentLowatBytes > 0) {
    set(IPPROTO_TCP,
        TCP_NOTSENT_LOWAT,
        "TCP_NOTSENT_LOWAT",
        options.notSentLowatBytes);
  }
  if (options.userTimeout.count() > 0) {
    set(IPPROTO_TCP,
        TCP_USER_TIMEOUT,
        "TCP_USER_TIMEOUT",
        std::chrono::ceil<std::chrono::milliseconds>(options.userTimeout)
            .count());
  }
  if (options.keepaliveIdle.count() > 0) {
    set(SOL_SOCKET, SO_KEEPALIVE, "SO_KEEPALIVE", 1);
    set(IPPROTO_TCP,
        TCP_KEEPIDLE,
        "TCP_KEEPIDLE",
        wholeSeconds(options.keepaliveIdle));
    set(IPPROTO_TCP,
        TCP_KEEPINTVL,
        "TCP_KEEPINTVL",
        wholeSeconds(options.keepaliveInterval));
    set(IPPROTO_TCP, TCP_KEEPCNT, "TCP_KEEPCNT", options.keepaliveProbes);
  }
  if (!options.interface.empty()) {
    bindToInterface(fd, options.interface);
  }
  if (options.dscp > 0 && !setDscp(fd, options.dscp) && status.ok()) {
    status = errnoStatus(StatusCode::kNetwork, "set the DSCP mark", errno);
  }
  if (options.sendBufferBytes > 0) {
    set(SOL_SOCKET, SO_SNDBUF, "SO_SNDBUF", options.sendBufferBytes);
  }
  if (options.receiveBufferBytes > 0) {
    set(SOL_SOCKET, SO_RCVBUF, "SO_RCVBUF", options.receiveBufferBytes);
  }
  return status;
}

void limitUnsent(int fd, int bytes) {
  (void)setOption(
      fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, "TCP_NOTSENT_LOWAT", bytes);
}

void bindToInterface(int fd, const std::string& interface) {
  (void)::setsockopt(
      fd,
      SOL_SOCKET,
      SO_BINDTODEVICE,
      interface.c_str(),
      static_cast<socklen_t>(interface.size() + 1));
}

namespace {

// The last of up to three numbers in a file of /proc, or 0.
uint64_t lastNumber(const char* path) {
  const std::string text = kernelText(path);
  const size_t before = text.find_last_of(" \t");
  return std::strtoull(
      text.c_str() + (before == std::string::npos ? 0 : before), nullptr, 10);
}

// setsockopt takes half of what the kernel then counts.
bool setBuffer(int fd, int option, int forcedOption, bool force, uint64_t to) {
  const int half = static_cast<int>(std::min<uint64_t>(to / 2, INT32_MAX / 2));
  return (force &&
          ::setsockopt(fd, SOL_SOCKET, forcedOption, &half, sizeof(half)) ==
              0) ||
      ::setsockopt(fd, SOL_SOCKET, option, &half, sizeof(half)) == 0;
}

} // namespace

uint64_t BufferLimits::windowBytes() const {
  return std::min(sendTuned, receiveTuned);
}

BufferLimits systemBufferLimits() {
  BufferLimits limits;
  if (const auto n = lastNumber("/proc/sys/net/ipv4/tcp_wmem")) {
    limits.sendTuned = n;
  }
  if (const auto n = lastNumber("/proc/sys/net/ipv4/tcp_rmem")) {
    limits.receiveTuned = n;
  }
  // In a network namespace these two may not be shown; they hold all the same.
  limits.sendSet = 2 * lastNumber("/proc/sys/net/core/wmem_max");
  limits.receiveSet = 2 * lastNumber("/proc/sys/net/core/rmem_max");
  const FileDescriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int some = 1 << 20;
  if (probe &&
      ::setsockopt(
          probe.get(), SOL_SOCKET, SO_SNDBUFFORCE, &some, sizeof(some)) == 0) {
    limits.forced = true;
    limits.sendSet = limits.receiveSet = UINT64_MAX;
  }
  return limits;
}

namespace {

uint64_t bufferFor(uint64_t need, uint64_t tuned, uint64_t allowed) {
  const uint64_t buffer = std::min(need, allowed);
  return buffer > tuned ? buffer : 0;
}

// 82 % of a send buffer of 4 MiB were in flight.
uint64_t sendBufferOf(uint64_t windowBytes) {
  return windowBytes + windowBytes / 4;
}
// The kernel announces half of a receive buffer, or more.
uint64_t receiveBufferOf(uint64_t windowBytes) {
  return 2 * windowBytes;
}

} // namespace

uint64_t sendBufferFor(uint64_t windowBytes, uint64_t tuned, uint64_t allowed) {
  return bufferFor(sendBufferOf(windowBytes), tuned, allowed);
}

uint64_t
receiveBufferFor(uint64_t windowBytes, uint64_t tuned, uint64_t allowed) {
  return bufferFor(receiveBufferOf(windowBytes), tuned, allowed);
}

// How it works. Each direction is raised only if that gives more than
// autotuning, which ends for a buffer that is set. The send side keeps four
// fifths for data, the inverse of sendBufferOf(). On the receive side the
// window scale of this connection is a second limit. The result is the smallest
// of all limits, the peer's window scale included: more cannot be in flight.
uint64_t
raiseBuffers(int fd, uint64_t windowBytes, const BufferLimits& limits) {
  uint64_t send = limits.sendTuned, receive = limits.receiveTuned;
  if (const uint64_t to =
          sendBufferFor(windowBytes, limits.sendTuned, limits.sendSet);
      to != 0 && setBuffer(fd, SO_SNDBUF, SO_SNDBUFFORCE, limits.forced, to)) {
    send = to / 5 * 4;
  }
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) {
    return std::min(send, receive);
  }
  // The scale of windows was fixed by the first packets: beyond it a larger
  // buffer is of no use.
  const uint64_t maxWindow = uint64_t{UINT16_MAX} << info.tcpi_rcv_wscale;
  if (const uint64_t to = receiveBufferFor(
          std::min(windowBytes, maxWindow),
          limits.receiveTuned,
          limits.receiveSet);
      to != 0 && setBuffer(fd, SO_RCVBUF, SO_RCVBUFFORCE, limits.forced, to)) {
    // Else the window stays what the first buffer allowed.
    (void)setOption(
        fd,
        IPPROTO_TCP,
        TCP_WINDOW_CLAMP,
        "TCP_WINDOW_CLAMP",
        static_cast<int64_t>(to));
    receive = to / 2;
  }
  return std::min(
      {send, receive, uint64_t{UINT16_MAX} << info.tcpi_snd_wscale});
}

bool setDscp(int fd, int dscp) {
  // The upper six bits. Which of the two holds depends on the family, also of
  // a mapped address.
  const int mark = dscp << 2;
  const bool v4 =
      ::setsockopt(fd, IPPROTO_IP, IP_TOS, &mark, sizeof(mark)) == 0;
  const bool v6 =
      ::setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &mark, sizeof(mark)) == 0;
  return v4 || v6;
}

bool setCongestionControl(int fd, const std::string& name) {
  return ::setsockopt(
             fd,
             IPPROTO_TCP,
             TCP_CONGESTION,
             name.c_str(),
             static_cast<socklen_t>(name.size())) == 0;
}

bool mayUseCongestionControl(const std::string& name) {
  const FileDescriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return probe && setCongestionControl(probe.get(), name);
}

std::string availableCongestionControls() {
  return kernelText("/proc/sys/net/ipv4/tcp_available_congestion_control");
}

// Only a refusal maps to kPeerDied. Every other error may be a fault of the
// network or of this host, and proves nothing about the peer.
Status startConnect(
    const SocketAddress& remote,
    const std::optional<SocketAddress>& source,
    const SocketOptions& options,
    FileDescriptor& fd,
    bool& connected) {
  std::string attempt = "connect to " + remote.toString();
  if (source) {
    attempt += " from " + source->ip();
  }
  FileDescriptor s(
      ::socket(remote.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!s) {
    return errnoStatus(StatusCode::kNetwork, attempt + ": socket", errno);
  }
  // Before connecting: buffer sizes decide the window scale of the SYN.
  Status status = applySocketOptions(s.get(), options);
  if (!status.ok()) {
    return Status(status.code(), attempt + ": " + status.message());
  }
  if (source) {
    // connect() chooses the port: connections to different peers may share one.
    // Best effort: without it there are fewer ports.
    (void)setOption(
        s.get(),
        IPPROTO_IP,
        IP_BIND_ADDRESS_NO_PORT,
        "IP_BIND_ADDRESS_NO_PORT",
        source->port() == 0);
    if (::bind(s.get(), source->raw(), source->rawBytes()) != 0) {
      return errnoStatus(StatusCode::kNetwork, attempt + ": bind", errno);
    }
  }
  int result = ::connect(s.get(), remote.raw(), remote.rawBytes());
  // After EINTR the connection goes on in the background, as after
  // EINPROGRESS.
  if (result != 0 && errno != EINPROGRESS && errno != EINTR) {
    return errnoStatus(
        errno == ECONNREFUSED ? StatusCode::kPeerDied : StatusCode::kNetwork,
        attempt,
        errno);
  }
  connected = result == 0;
  fd = std::move(s);
  return Status();
}

int connectOutcome(int fd) {
  int error = 0;
  socklen_t bytes = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) {
    return errno;
  }
  if (error != 0) {
    return error;
  }
  sockaddr_storage remote{};
  bytes = sizeof(remote);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &bytes) != 0) {
    return errno;
  }
  SocketAddress a =
      SocketAddress::from(reinterpret_cast<sockaddr*>(&remote), bytes);
  SocketAddress b = localAddress(fd);
  return a.port() == b.port() && a.ip() == b.ip() ? ECONNREFUSED : 0;
}

int acceptConnection(int listener, FileDescriptor& fd, SocketAddress& remote) {
  sockaddr_storage raw{};
  socklen_t bytes = sizeof(raw);
  int result = retryInterrupted([&] {
    bytes = sizeof(raw);
    return ::accept4(
        listener,
        reinterpret_cast<sockaddr*>(&raw),
        &bytes,
        SOCK_NONBLOCK | SOCK_CLOEXEC);
  });
  if (result < 0) {
    return errno;
  }
  fd.reset(result);
  remote = SocketAddress::from(reinterpret_cast<sockaddr*>(&raw), bytes);
  return 0;
}

void resetOnClose(int fd) {
  linger value{};
  value.l_onoff = 1;
  value.l_linger = 0;
  // Fails only on what is not a socket.
  (void)::setsockopt(fd, SOL_SOCKET, SO_LINGER, &value, sizeof(value));
}

namespace {

template <typename Call>
SocketAddress addressOf(int fd, Call call) {
  sockaddr_storage raw{};
  socklen_t bytes = sizeof(raw);
  if (call(fd, reinterpret_cast<sockaddr*>(&raw), &bytes) != 0) {
    return SocketAddress();
  }
  return SocketAddress::from(reinterpret_cast<sockaddr*>(&raw), bytes);
}

} // namespace

namespace {

// Unsent bytes in the kernel on a connection within one host: measured 5 to
// 10 % faster than the 128 KiB that a network path has.
constexpr int kLocalNotSentBytes = 1 << 20;
// CUBIC's HyStart takes the jitter of two busy processes for a queue and ends
// slow start at 8 to 24 segments: the writer then waits for every second
// acknowledgement. Measured within one host, 512 KiB and 1 MiB writes: 5.8 to
// 6.4 GB/s with Reno, which has no HyStart, against 3.0 to 5.9 with CUBIC.
constexpr char kLocalCongestionControl[] = "reno";

} // namespace

bool isLocalConnection(int fd) {
  return localAddress(fd).ip() == remoteAddress(fd).ip();
}

void tuneLocalConnection(int fd) {
  (void)::setsockopt(
      fd,
      IPPROTO_TCP,
      TCP_NOTSENT_LOWAT,
      &kLocalNotSentBytes,
      sizeof(kLocalNotSentBytes));
  (void)::setsockopt(
      fd,
      IPPROTO_TCP,
      TCP_CONGESTION,
      kLocalCongestionControl,
      sizeof(kLocalCongestionControl) - 1);
}

SocketAddress localAddress(int fd) {
  return addressOf(fd, ::getsockname);
}

SocketAddress remoteAddress(int fd) {
  return addressOf(fd, ::getpeername);
}

// Other congestion controls have less to tell, or nothing. Adds the round trip
// that BBR has measured to `info`.
static std::optional<BbrInfo> bbrInfo(int fd, TcpInfo& info) {
  constexpr uint32_t kUnknown = UINT32_MAX;
  // Gains are in 1/256: 2.89 while it starts up, at most 1.25 later, and 0
  // before the first acknowledgement. While it measures the round trip, the
  // window's gain is 1, otherwise at least 2.
  constexpr uint32_t kStartsUp = 512, kMeasures = 256;
  tcp_cc_info control{};
  socklen_t bytes = sizeof(control);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CC_INFO, &control, &bytes) != 0 ||
      bytes < sizeof(control.bbr)) {
    return std::nullopt;
  }
  const tcp_bbr_info& raw = control.bbr;
  if (raw.bbr_min_rtt != 0 && raw.bbr_min_rtt != kUnknown) {
    info.minRoundTrip = std::chrono::microseconds(raw.bbr_min_rtt);
  }
  BbrInfo bbr;
  bbr.startingUp = raw.bbr_pacing_gain == 0 || raw.bbr_pacing_gain > kStartsUp;
  bbr.measuring = raw.bbr_cwnd_gain == kMeasures;
  bbr.bytesPerS = uint64_t(raw.bbr_bw_hi) << 32 | raw.bbr_bw_lo;
  // Segments may be short, so their number says little about bytes.
  int queued = 0; // sent or not, and not acknowledged
  if (!info.quiet() && ::ioctl(fd, SIOCOUTQ, &queued) != 0) {
    return std::nullopt;
  }
  const auto unacked = static_cast<uint64_t>(std::max(queued, 0));
  bbr.inFlightBytes = unacked - std::min(unacked, info.notSentBytes);
  return bbr;
}

// The kernel's shortest round trip is of the last five minutes. If a route
// became longer meanwhile, all of a round trip beyond it would count as a
// queue. BBR's own is therefore better.
std::optional<TcpInfo> tcpInfo(int fd, bool askForBbr) {
  constexpr uint32_t kUnknown = UINT32_MAX;
  constexpr uint8_t kOpen = 0; // TCP_CA_Open of linux/tcp.h
  tcp_info raw{}; // an older kernel fills the front only, the rest stays 0
  socklen_t bytes = sizeof(raw);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &raw, &bytes) != 0) {
    return std::nullopt;
  }
  TcpInfo info;
  info.roundTrip = std::chrono::microseconds(raw.tcpi_rtt);
  info.roundTripVariance = std::chrono::microseconds(raw.tcpi_rttvar);
  info.kernelMinRoundTrip = std::chrono::microseconds(
      raw.tcpi_min_rtt == kUnknown ? 0 : raw.tcpi_min_rtt);
  info.minRoundTrip = info.kernelMinRoundTrip;
  info.unackedSegments = raw.tcpi_unacked;
  info.retransmits = raw.tcpi_retransmits;
  info.totalRetransmits = raw.tcpi_total_retrans;
  info.congestionWindowSegments = raw.tcpi_snd_cwnd;
  info.segmentBytes = raw.tcpi_snd_mss;
  info.pacingBytesPerS = raw.tcpi_pacing_rate;
  info.deliveryRateBytesPerS = raw.tcpi_delivery_rate;
  info.bytesAcked = raw.tcpi_bytes_acked;
  info.bytesReceived = raw.tcpi_bytes_received;
  info.deliveredSegments = raw.tcpi_delivered;
  info.notSentBytes = raw.tcpi_notsent_bytes;
  info.recovering = raw.tcpi_ca_state != kOpen;
  info.sinceLastAck = std::chrono::milliseconds(raw.tcpi_last_ack_recv);
  info.sinceLastSent = std::chrono::milliseconds(raw.tcpi_last_data_sent);
  if (askForBbr) {
    info.bbr = bbrInfo(fd, info);
  }
  return info;
}

// The caller knows the port of the store only, so connections are found by
// their remote port. Two addresses with that port make the answer ambiguous,
// and then there is none.
Nanos minRoundTripTo(uint16_t port) {
  std::string server;
  Nanos min(0);
  std::error_code ignored; // without /proc nothing is known
  for (std::filesystem::directory_iterator entry("/proc/self/fd", ignored), end;
       !ignored && entry != end;
       entry.increment(ignored)) {
    // The names in this folder are numbers.
    // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion)
    const int fd = std::atoi(entry->path().filename().c_str());
    const SocketAddress remote = remoteAddress(fd);
    if (remote.port() != port) {
      continue;
    }
    const auto info = tcpInfo(fd);
    if (!info || info->minRoundTrip == Nanos(0)) {
      continue;
    }
    if (min != Nanos(0) && remote.ip() != server) {
      return Nanos(0);
    }
    server = remote.ip();
    min = min == Nanos(0) ? info->minRoundTrip
                          : std::min(min, info->minRoundTrip);
  }
  return min;
}

std::optional<BbrView> bbrView(const TcpInfo& info) {
  if (!info.bbr) {
    return std::nullopt;
  }
  BbrView view;
  view.startingUp = info.bbr->startingUp;
  view.sends = info.pacingBytesPerS;
  view.arrives = info.bbr->bytesPerS;
  view.bytesAcked = info.bytesAcked;
  view.deliveredSegments = info.deliveredSegments;
  view.retransmits = info.totalRetransmits;
  view.windowBytes =
      uint64_t{info.congestionWindowSegments} * info.segmentBytes;
  view.inFlightBytes = info.bbr->inFlightBytes;
  view.roundTrip = info.roundTrip;
  view.minRoundTrip = info.minRoundTrip;
  view.sinceLastAck = info.sinceLastAck;
  view.sinceLastSent = info.sinceLastSent;
  view.mayRestart = !info.recovering && !info.bbr->measuring &&
      info.minRoundTrip <= info.kernelMinRoundTrip * 5 / 4;
  return view;
}

void limitPacing(int fd, uint64_t bytesPerS) {
  const uint64_t rate = bytesPerS == 0 ? UINT64_MAX : bytesPerS;
  (void)::setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof(rate));
}

bool slowStartsAfterIdle() {
  return kernelText("/proc/sys/net/ipv4/tcp_slow_start_after_idle") != "0";
}

} // namespace resilient
