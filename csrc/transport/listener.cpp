#include "transport/listener.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace resilient {

namespace {

// Connections accepted per turn: a flood of them must leave time for data.
constexpr int kAcceptsPerTurn = 64;
// Rejected callers are written down this often; port scanners and health
// checks would fill the log otherwise.
constexpr uint64_t kLogBurst = 3;
constexpr Nanos kLogInterval = std::chrono::seconds(10);
// How long no connection is taken when the system has no descriptor left and
// nothing of ours could be closed. The kernel's queue holds callers meanwhile;
// shorter only costs wake-ups.
constexpr Nanos kPause = std::chrono::milliseconds(100);
// Time until the next try to listen at a new address. The kernel needs about a
// second to check that no other host has it; no caller can connect until then.
constexpr Nanos kMoveAgain = std::chrono::milliseconds(200);
// Ports tried until one is free at each of several addresses. The kernel gives
// one that is free at the first; with half of all ports taken at another one,
// not all of 64 are in use in any practical case.
constexpr int kPortTries = 64;

// One network may have this part of the waiting callers: a flood from one
// place then leaves room for all others. It must have room for the ranks of
// one host behind an address that no rank has published.
constexpr size_t kNetworkShare = 8;
// But at least this many.
constexpr size_t kMinOfNetwork = 64;

// To find those to drop takes a look at all of them. So this part of them is
// dropped at a time.
constexpr size_t kDroppedShare = 16;

uint64_t seedOf(const HelloNonce& nonce) {
  uint64_t seed = 0;
  std::memcpy(&seed, nonce.data(), sizeof(seed));
  return seed;
}

} // namespace

Listener::Standing Listener::Caller::standing() const {
  if (handshake->authenticated()) {
    return Standing::kProved;
  }
  if (handshake->namedSecret()) {
    return fromMember ? Standing::kBoth : Standing::kNamedSecret;
  }
  return fromMember ? Standing::kMembersAddress : Standing::kNone;
}

// With port 0 the kernel chooses a port at the first address. Another address
// may have that port in use, and then all sockets are opened anew. The sockets
// are watched only when all are open: an exception leaves nothing behind in the
// loop.
Listener::Listener(EventLoop& loop, ListenerConfig config)
    : loop_(loop),
      config_(std::move(config)),
      chance_(seedOf(config_.nonce())),
      logLimit_(kLogBurst, kLogInterval) {
  RESILIENT_IN_LOOP(loop);
  for (int tries = kPortTries;; --tries) {
    try {
      openSockets();
      break;
    } catch (const StatusError&) {
      if (config_.port != 0 || sockets_.size() < 2 || tries == 1) {
        throw;
      }
    }
  }
  openReserve();
  for (const auto& socket : sockets_) {
    loop_.add(socket->fd.get(), EPOLLIN, socket.get());
  }
}

// Without addresses, one socket for both families. Each socket after the first
// is bound to the port that the first one got.
void Listener::openSockets() {
  sockets_.clear();
  const size_t count = std::max<size_t>(config_.bindIps.size(), 1);
  port_ = config_.port;
  for (size_t i = 0; i < count; ++i) {
    ListenSocket& socket =
        *sockets_.emplace_back(std::make_unique<ListenSocket>(*this));
    if (config_.bindIps.empty()) {
      socket.fd = open(*SocketAddress::parse("::", port_));
      if (!socket.fd) { // there is no IPv6 on this machine
        socket.fd = open(*SocketAddress::parse("0.0.0.0", port_));
      }
    } else {
      socket.ip = config_.bindIps[i];
      auto at = SocketAddress::parse(socket.ip, port_);
      if (!at) {
        throw StatusError(Status(
            StatusCode::kInvalidArgument,
            "listen on \"" + socket.ip + "\": not an IP address"));
      }
      socket.fd = open(*at);
      if (!socket.fd) {
        throw StatusError(errnoStatus(
            StatusCode::kInvalidArgument,
            "listen on " + at->toString(),
            EAFNOSUPPORT));
      }
    }
    port_ = localAddress(socket.fd.get()).port();
  }
}

Listener::~Listener() {
  loop_.cancel(resume_);
  for (const auto& socket : sockets_) {
    loop_.cancel(socket->move);
    loop_.remove(socket->fd.get());
  }
}

Status Listener::moveTo(const std::vector<std::string>& ips) {
  RESILIENT_IN_LOOP(loop_);
  Status status;
  for (size_t i = 0; i < sockets_.size() && i < ips.size(); ++i) {
    if (const Status moved = moveTo(*sockets_[i], ips[i]); !moved.ok()) {
      status = moved;
    }
  }
  return status;
}

// The new socket is open before the old one is closed. A failure therefore
// leaves the listener where it was, and a timer tries again.
Status Listener::moveTo(ListenSocket& socket, const std::string& ip) {
  loop_.cancel(socket.move);
  socket.move = 0;
  const auto at = SocketAddress::parse(ip, port_);
  if (socket.ip.empty() || socket.ip == ip || !at) {
    return Status();
  }
  FileDescriptor moved;
  try {
    moved = open(*at);
  } catch (const StatusError& error) {
    socket.move = loop_.after(kMoveAgain, [this, &socket, ip] {
      socket.move = 0;
      (void)moveTo(socket, ip);
    });
    return error.status();
  }
  if (!moved) {
    return Status();
  }
  loop_.remove(socket.fd.get());
  socket.fd = std::move(moved);
  loop_.add(socket.fd.get(), EPOLLIN, &socket);
  socket.ip = ip;
  return Status();
}

// Empty if the machine does not know this family.
//
// The order matters. The dual-stack option, SO_REUSEADDR and the buffer sizes
// have an effect only before bind() and listen().
FileDescriptor Listener::open(const SocketAddress& at) {
  bool v6 = at.family() == AF_INET6;
  FileDescriptor fd(
      ::socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    if (errno == EAFNOSUPPORT) {
      return fd;
    }
    throw StatusError(
        errnoStatus(StatusCode::kNetwork, "open a listening socket", errno));
  }
  int off = 0, on = 1;
  if (v6) {
    dualStack_ =
        ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)) ==
        0;
  }
  if (config_.port != 0) {
    // A restarted job must get its fixed port back although connections of
    // its predecessor are in TIME_WAIT. Not for any free port: the kernel
    // could then give out one that is in use.
    (void)::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  }
  // Connections inherit these, and buffer sizes must be known before the
  // window scale is agreed on.
  Status options = applySocketOptions(fd.get(), config_.options);
  if (!options.ok()) {
    throw StatusError(options);
  }
  // A caller is handed over with its first message: one that says nothing stays
  // in the kernel's queue for a second. Best effort.
  (void)::setsockopt(fd.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &on, sizeof(on));
  if (::bind(fd.get(), at.raw(), at.rawBytes()) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    int error = errno;
    if (v6 && (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) &&
        config_.bindIps.empty()) {
      return FileDescriptor(); // IPv6 is compiled in but switched off
    }
    std::string attempt = config_.bindIps.empty()
        ? "listen on port " + std::to_string(config_.port)
        : "listen on " + at.toString();
    Status status = errnoStatus(
        error == EADDRINUSE || error == EADDRNOTAVAIL || error == EACCES
            ? StatusCode::kInvalidArgument
            : StatusCode::kNetwork,
        attempt,
        error);
    const char* remedy = error == EADDRINUSE
        ? "; another process has that port: leave the port option unset (any "
          "free port is taken) or give each process of this host another one"
        : error == EADDRNOTAVAIL
        ? "; no interface of this host has that address"
        : error == EACCES ? "; ports below 1024 need privileges"
                          : "";
    throw StatusError(Status(status.code(), status.message() + remedy));
  }
  return fd;
}

void Listener::openReserve() {
  // Held to be closed when descriptors run out. A caller can then still be
  // accepted and dropped, and does not keep the socket readable for ever.
  reserve_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

ListenerStats Listener::stats() const {
  ListenerStats s = stats_;
  s.pending = pending_.size();
  return s;
}

void Listener::onCallers(const ListenSocket& socket) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    FileDescriptor fd;
    SocketAddress remote;
    int error = acceptConnection(socket.fd.get(), fd, remote);
    switch (error) {
      case 0:
        ++stats_.accepted;
        admit(std::move(fd), remote);
        continue;
      case EAGAIN:
        return;
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        ++stats_.outOfDescriptors;
        onDescriptorsExhausted(socket);
        return;
      default:
        // The caller has gone again (ECONNABORTED), or a network error that
        // waited on its connection, as accept(2) says: on to the next.
        continue;
    }
  }
}

// accept() has failed for want of a descriptor, and the socket stays readable:
// without an answer the loop would spin. First choice: drop a caller that has
// not proved itself. Second: use the reserve to accept one caller and reset it,
// then pause.
void Listener::onDescriptorsExhausted(const ListenSocket& socket) {
  logRejected([] {
    return "no descriptor is left for new connections: raise the limit on open "
           "files (ulimit -n)";
  });
  if (drop(1, std::nullopt)) {
    return; // the socket is still readable: accepted in the next turn
  }
  if (reserve_) {
    reserve_.reset();
    FileDescriptor fd;
    SocketAddress remote;
    if (acceptConnection(socket.fd.get(), fd, remote) == 0) {
      resetOnClose(fd.get());
    }
    fd.reset();
    openReserve();
  }
  // Rejects callers at this pace instead of at full speed: peers try again, and
  // the loop has other work.
  for (const auto& each : sockets_) {
    loop_.modify(each->fd.get(), 0);
  }
  loop_.cancel(resume_);
  resume_ = loop_.after(kPause, [this] {
    resume_ = 0;
    if (!reserve_) {
      openReserve();
    }
    for (const auto& each : sockets_) {
      loop_.modify(each->fd.get(), EPOLLIN);
    }
  });
}

// Drops up to `most` callers, chosen at random among those that look least like
// a member; with `network`, among those from there. One that is let in and only
// waits to hear so is no stranger: its place is reserved already. False if
// there is none to drop.
bool Listener::drop(size_t max, std::optional<uint64_t> network) {
  std::vector<Pending::iterator> strangers;
  Standing min = Standing::kProved;
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    const Standing standing = it->standing();
    if (standing > min || standing == Standing::kProved ||
        (network && it->network != *network)) {
      continue;
    }
    if (standing < min) {
      min = standing;
      strangers.clear();
    }
    strangers.push_back(it);
  }
  if (strangers.empty()) {
    return false;
  }
  for (; max > 0 && !strangers.empty(); --max) {
    std::swap(strangers[chance_.below(strangers.size())], strangers.back());
    logRejected([&] {
      return "connection from " +
          strangers.back()->handshake->remote().toString() +
          ": dropped, too many callers are waiting";
    });
    erase(strangers.back());
    strangers.pop_back();
    ++stats_.dropped;
  }
  return true;
}

// Drops callers if there are too many of them, in all or from the network of
// the newest one. The share of a network is looked at first, so a flood from
// one place drops its own callers before anyone else's.
void Listener::dropExcess(const Caller& newest) {
  const size_t max = config_.maxPendingHandshakes;
  const size_t ofNetwork = std::max(kMinOfNetwork, max / kNetworkShare);
  if (!newest.fromMember && fromNetwork_[newest.network] > ofNetwork) {
    drop(std::max<size_t>(1, ofNetwork / kDroppedShare), newest.network);
  }
  if (pending_.size() > max) {
    drop(std::max<size_t>(1, max / kDroppedShare), std::nullopt);
  }
}

void Listener::erase(Pending::iterator which) {
  if (!which->fromMember && --fromNetwork_[which->network] == 0) {
    fromNetwork_.erase(which->network);
  }
  pending_.erase(which);
}

// The caller is in the list before its handshake exists, because the callback
// holds its place. advance() may end the handshake: onResult() has then erased
// the place, and `which` must not be used.
void Listener::admit(FileDescriptor fd, SocketAddress remote) {
  const auto which = pending_.emplace(pending_.end());
  which->network = remote.network();
  which->fromMember = config_.isMembers && config_.isMembers(remote);
  if (!which->fromMember) {
    ++fromNetwork_[which->network];
  }
  which->handshake = std::make_unique<IncomingHandshake>(
      loop_,
      std::move(fd),
      remote,
      config_.identity,
      config_.encryption,
      config_.certificates ? config_.certificates() : nullptr,
      config_.nonce(),
      config_.handshakeTimeout,
      [this, which](IncomingHandshake::Result result) {
        onResult(which, std::move(result));
      });
  // Now, not in the next turn: who has named the secret is no longer one of the
  // crowd.
  if (which->handshake->advance()) {
    dropExcess(*which);
  }
}

// The place is free before the owner is called: onPeer may make the owner look
// at stats(). A caller that decide() let in holds a reservation until onPeer or
// onPeerLost. Exactly one of the two is called for it, unless the listener is
// destroyed first.
void Listener::onResult(
    Pending::iterator which,
    IncomingHandshake::Result result) {
  // Destroyed at the end: this is called by it.
  const auto handshake = std::move(which->handshake);
  erase(which);
  bool suspicious = false;
  if (config_.counters != nullptr) {
    if (result.status.ok()) {
      config_.counters->countDone(result.socket.tls != nullptr);
    } else if (result.fault) {
      config_.counters->count(*result.fault);
    }
  }
  if (result.status.ok()) {
    ++stats_.admitted;
    config_.onPeer(
        std::move(result.info), std::move(result.socket), result.remote);
    return;
  }
  if (result.verdict == HelloCode::kOk) {
    ++stats_.brokenOff;
    config_.onPeerLost(std::move(result.info));
  } else if (result.status.code() == StatusCode::kTimeout) {
    ++stats_.timedOut;
    suspicious = true;
  } else if (result.verdict || result.status.code() == StatusCode::kProtocol) {
    ++stats_.refused;
    suspicious = true;
  } else {
    ++stats_.brokenOff;
  }
  if (!suspicious || (result.authenticated && !result.fault)) {
    // Told to go elsewhere, or gone again: a matter of course when two ranks
    // call each other at the same time.
    logMessage(LogLevel::kDebug, "listener: " + result.status.message());
    return;
  }
  logRejected([&] { return result.status.message(); });
}

template <typename MakeLine>
void Listener::logRejected(MakeLine makeLine) {
  if (auto dropped = logLimit_.pass(loop_.now())) {
    logMessage(
        LogLevel::kWarning,
        "listener: " + std::string(makeLine()) +
            LogRateLimit::suffix(*dropped));
  }
}

} // namespace resilient
