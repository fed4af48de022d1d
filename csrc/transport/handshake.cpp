#include "transport/handshake.h"

#include <netinet/in.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/random.h"

namespace resilient {

namespace {

// The first byte of a TLS connection: the type of a record of its handshake
// (RFC 8446, 5.1).
constexpr uint8_t kTlsHandshake = 22;

// Read at a time while a connection with TLS is being made: its flights are
// shorter than this, and strangers cost so much memory.
constexpr size_t kTlsFlightBytes = 2048;

Status closedByOther() {
  return Status(StatusCode::kNetwork, "the other side closed the connection");
}

// Moves bytes between the socket and the handshake until the socket has no
// more to give or take, or the handshake has ended. Never reads a byte that
// comes after the handshake. Not ok if the connection broke. Output goes first,
// and a state that has ended is looked at only when all output has left: the
// last message of a side, a refusal too, is sent after its state has changed.
Status exchangeBytes(int fd, Handshake& handshake) {
  for (;;) {
    std::vector<uint8_t>& out = handshake.output();
    if (!out.empty()) {
      ssize_t n = retryInterrupted(
          [&] { return ::send(fd, out.data(), out.size(), MSG_NOSIGNAL); });
      if (n < 0) {
        if (errno == EAGAIN) {
          return Status();
        }
        return errnoStatus(StatusCode::kNetwork, "send", errno);
      }
      out.erase(out.begin(), out.begin() + n);
      continue;
    }
    if (handshake.state() != Handshake::State::kRunning) {
      return Status();
    }
    uint8_t buffer[128];
    size_t want = std::min(handshake.wanted(), sizeof(buffer));
    ssize_t n = retryInterrupted([&] { return ::recv(fd, buffer, want, 0); });
    if (n < 0) {
      if (errno == EAGAIN) {
        return Status();
      }
      return errnoStatus(StatusCode::kNetwork, "receive", errno);
    }
    if (n == 0) {
      return closedByOther();
    }
    handshake.receive(buffer, static_cast<size_t>(n));
  }
}

// TLS has ended its handshake with certificates. `names`: those that the far
// end may have; empty: any, since the end that accepts does not know yet who
// calls. ServerIdentity::decide() looks then.
void afterCertificates(
    TlsSession& tls,
    Handshake& handshake,
    const std::vector<std::string>& names) {
  if (!names.empty() &&
      std::ranges::none_of(
          names, [&](const std::string& name) { return tls.isFor(name); })) {
    std::string all;
    for (const std::string& name : names) {
      all += (all.empty() ? "" : " or ") + name;
    }
    tls.refuseCertificate("it is not for " + all);
    return;
  }
  handshake.bindTo(tls.exportKey("EXPORTER-torch_resilient-handshake", ""));
}

// The same with TLS in between, whose own handshake comes first. Bytes behind
// the handshake may have been read: they stay in the session.
Status exchangeBytes(
    int fd,
    TlsSession& tls,
    Handshake& handshake,
    const std::vector<std::string>& names) {
  for (;;) {
    if (const auto out = tls.output(); !out.empty()) {
      const ssize_t n = retryInterrupted(
          [&] { return ::send(fd, out.data(), out.size(), MSG_NOSIGNAL); });
      if (n < 0) {
        return errno == EAGAIN
            ? Status()
            : errnoStatus(StatusCode::kNetwork, "send", errno);
      }
      (void)tls.sent(static_cast<size_t>(n));
      continue;
    }
    if (tls.failed()) { // and has said so
      return tls.status();
    }
    if (tls.ended()) {
      return closedByOther();
    }
    if (!tls.handshaking() || tls.isEarly()) {
      if (tls.isCertified() && !handshake.isBound()) {
        afterCertificates(tls, handshake, names);
        continue;
      }
      std::vector<uint8_t>& out = handshake.output();
      const auto drop = [&](size_t bytes) {
        out.erase(out.begin(), out.begin() + static_cast<ptrdiff_t>(bytes));
      };
      drop(tls.takenEarly());
      if (!out.empty()) {
        const iovec part{out.data(), out.size()};
        drop(tls.seal({&part, 1}));
        continue;
      }
      // The client may still have to show that it has the server's part.
      if (handshake.state() != Handshake::State::kRunning &&
          !tls.handshaking()) {
        return Status();
      }
      std::byte buffer[128];
      if (const size_t n =
              tls.open(buffer, std::min(handshake.wanted(), sizeof(buffer)))) {
        handshake.receive(buffer, n);
        continue;
      }
      if (tls.ended() || tls.failed()) {
        continue; // what it says first
      }
    }
    const std::span<std::byte> room = tls.input(kTlsFlightBytes);
    const ssize_t n = retryInterrupted(
        [&] { return ::recv(fd, room.data(), room.size(), 0); });
    if (n < 0) {
      return errno == EAGAIN
          ? Status()
          : errnoStatus(StatusCode::kNetwork, "receive", errno);
    }
    if (n == 0) {
      return closedByOther();
    }
    tls.received(static_cast<size_t>(n));
    tls.proceed();
  }
}

// Closing a socket with unread bytes sends a reset, which may overtake the
// refusal just written. So what has come so far is read and dropped; best
// effort, and bounded since strangers send it.
void dropUnread(int fd) {
  uint8_t buffer[4096];
  for (int i = 0; i < 4; ++i) {
    if (::recv(fd, buffer, sizeof(buffer), 0) <= 0) {
      return;
    }
  }
}

HelloEndpoint endpointOf(const SocketAddress& address) {
  HelloEndpoint end;
  end.port = address.port();
  if (address.family() == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address.raw(), sizeof(v4));
    end.ip[10] = end.ip[11] = 0xff;
    std::memcpy(end.ip.data() + 12, &v4.sin_addr, 4);
  } else {
    sockaddr_in6 v6;
    std::memcpy(&v6, address.raw(), sizeof(v6));
    std::memcpy(end.ip.data(), &v6.sin6_addr, 16);
  }
  return end;
}

std::string endpointText(const HelloEndpoint& end) {
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(end.port);
  std::memcpy(&v6.sin6_addr, end.ip.data(), 16);
  return SocketAddress::from(reinterpret_cast<sockaddr*>(&v6), sizeof(v6))
      .toString();
}

// Something is still to be sent.
bool unsent(Handshake& handshake, const TlsSession* tls) {
  return !handshake.output().empty() ||
      (tls != nullptr && !tls->output().empty());
}

uint32_t eventsFor(Handshake& handshake, const TlsSession* tls) {
  // With TLS, what is not sealed yet waits for the far end's handshake.
  const bool out =
      tls != nullptr ? !tls->output().empty() : !handshake.output().empty();
  return out ? EPOLLOUT : EPOLLIN;
}

TlsNonce freshNonce() {
  TlsNonce nonce;
  fillRandom(nonce.data(), nonce.size());
  return nonce;
}

} // namespace

std::unique_ptr<OutgoingHandshake> OutgoingHandshake::start(
    EventLoop& loop,
    OutgoingSpec spec,
    Callback callback) {
  RESILIENT_IN_LOOP(loop);
  return std::unique_ptr<OutgoingHandshake>(
      new OutgoingHandshake(loop, std::move(spec), std::move(callback)));
}

OutgoingHandshake::OutgoingHandshake(
    EventLoop& loop,
    OutgoingSpec spec,
    Callback callback)
    : loop_(loop), spec_(std::move(spec)), callback_(std::move(callback)) {
  timer_ = loop_.at(loop_.now(), [this] { tryNext(); });
}

OutgoingHandshake::~OutgoingHandshake() {
  closeAttempt();
}

void OutgoingHandshake::closeAttempt() {
  loop_.cancel(timer_);
  timer_ = 0;
  handshake_.reset();
  tls_.reset();
  connectedAt_.reset();
  if (fd_) {
    loop_.remove(fd_.get());
    fd_.reset();
  }
}

// Tries one address after the other; each attempt ends in attemptFailed(),
// which leads back here, or in finish(). After the last one, the verdict over
// all of them is that the peer died only if every address refused.
void OutgoingHandshake::tryNext() {
  timer_ = 0;
  if (next_ == spec_.candidates.size()) {
    OutgoingResult result;
    failure_.refusedEverywhere = refusedEverywhere_ && next_ > 0;
    if (next_ == 0) {
      lastStatus_ = Status(
          StatusCode::kInvalidArgument, "the peer has published no address");
      failure_.attempts = lastStatus_.message();
    }
    result.status = Status(
        failure_.refusedEverywhere ? StatusCode::kPeerDied : lastStatus_.code(),
        "connect to " + failure_.attempts);
    result.failure = std::move(failure_);
    finish(std::move(result));
    return;
  }
  remote_ = spec_.candidates[next_++];
  std::optional<SocketAddress> source;
  if (spec_.source && spec_.source->family() == remote_.family()) {
    source = spec_.source;
  }
  FileDescriptor fd;
  bool connected = false;
  Status status = startConnect(remote_, source, spec_.options, fd, connected);
  if (!status.ok()) {
    attemptFailed(status, status.code() == StatusCode::kPeerDied);
    return;
  }
  fd_ = std::move(fd);
  connecting_ = true;
  loop_.add(fd_.get(), EPOLLOUT, this);
  limitTo(std::min(spec_.synTimeout, spec_.attemptTimeout));
}

// The present step of the attempt fails after this.
void OutgoingHandshake::limitTo(Nanos timeout) {
  loop_.cancel(timer_);
  timer_ = loop_.after(timeout, [this, timeout] {
    std::string what = connecting_ ? "no answer" : "no end of the handshake";
    attemptFailed(
        Status(StatusCode::kTimeout, what + " in " + durationText(timeout)),
        false,
        connecting_ ? std::nullopt : std::optional(TrustFault::kTimeout));
  });
}

void OutgoingHandshake::onEvents(uint32_t events) {
  if (connecting_) {
    int error = connectOutcome(fd_.get());
    if (error == ENOTCONN && (events & (EPOLLERR | EPOLLHUP)) == 0) {
      return; // woken too early
    }
    if (error != 0) {
      attemptFailed(
          Status(StatusCode::kNetwork, errnoText(error)),
          error == ECONNREFUSED);
      return;
    }
    connecting_ = false;
    connectedAt_ = loop_.now();
    if (spec_.synTimeout < spec_.attemptTimeout) {
      limitTo(spec_.attemptTimeout);
    }
    HelloInfo hello = spec_.hello;
    hello.nonce = spec_.nonce();
    const bool encrypts = mustEncrypt(spec_.encryption, fd_.get());
    // A certificate proves no secret.
    const bool byCertificate = encrypts && spec_.certificates != nullptr;
    handshake_.emplace(
        hello, spec_.secret, /*insideTls=*/encrypts && !byCertificate);
    if (byCertificate) {
      tls_ = TlsSession::client(
          spec_.certificates->context(/*isClient=*/true),
          TlsKeys::of(spec_.secret),
          freshNonce());
    } else if (encrypts) {
      tls_ = TlsSession::client(
          TlsKeys::of(spec_.secret), freshNonce(), handshake_->output());
    }
  }
  pump();
}

void OutgoingHandshake::pump() {
  std::vector<std::string> names{remote_.ip()};
  if (!spec_.hostName.empty()) {
    names.push_back(spec_.hostName);
  }
  const Status status = tls_
      ? exchangeBytes(fd_.get(), *tls_, *handshake_, names)
      : exchangeBytes(fd_.get(), *handshake_);
  if (!status.ok()) {
    if (tls_ && tls_->unknownSecret()) {
      failure_.verdict = HelloCode::kUnknownKey;
    }
    attemptFailed(
        Status(
            status.code(),
            "the connection stood, then the handshake failed: " +
                status.message()),
        false,
        tls_ && tls_->failed() ? std::optional(tls_->fault()) : std::nullopt);
    return;
  }
  switch (handshake_->state()) {
    case Handshake::State::kRunning:
      loop_.modify(fd_.get(), eventsFor(*handshake_, tls_.get()));
      return;
    case Handshake::State::kFailed:
      onRefused();
      return;
    case Handshake::State::kDone: {
      OutgoingResult result;
      result.accept = handshake_->accepted();
      result.local = localAddress(fd_.get());
      result.remote = remote_;
      loop_.remove(fd_.get());
      if (spec_.counters != nullptr) {
        spec_.counters->countDone(tls_ != nullptr);
      }
      result.socket = {std::move(fd_), std::move(tls_)};
      finish(std::move(result));
      return;
    }
  }
}

// A refusal is signed, but a signature does not say that nothing stands between
// us: a proxy, or a forwarded port, may have led us to any member of the job.
//
// The peer counts as gone in two cases. Its own process has signed WRONG_PEER:
// it has given us up. Or another member has signed it, was reached at the
// address that we dialled, and may live there as far as we know; then the port
// has a new owner. All other refusals only fail this attempt
// (another_process_proves_a_death_only_where_it_may_be).
void OutgoingHandshake::onRefused() {
  const AcceptInfo& said = handshake_->accepted();
  Status why = handshake_->status();
  if (said.code != HelloCode::kOk) {
    failure_.verdict = said.code;
  }
  bool gone = false;
  if (said.code == HelloCode::kWrongPeer) {
    const bool there = said.reachedAt == endpointOf(remote_);
    gone = said.signer == spec_.hello.acceptor || // it has given us up
        (there && (!spec_.mayBeAt || spec_.mayBeAt(said.signer, remote_)));
    if (!there) {
      why = Status(
          why.code(),
          why.message() + ", which was reached at " +
              endpointText(said.reachedAt) +
              ": something in between leads there");
    }
  }
  if (said.code == HelloCode::kDuplicateConnection ||
      said.code == HelloCode::kBusy) {
    // The peer itself has spoken; it would say the same elsewhere.
    next_ = spec_.candidates.size();
  }
  attemptFailed(why, gone, handshake_->fault());
}

void OutgoingHandshake::attemptFailed(
    Status status,
    bool refused,
    std::optional<TrustFault> fault) {
  if (fault && spec_.counters != nullptr) {
    spec_.counters->count(*fault);
  }
  closeAttempt();
  refusedEverywhere_ = refusedEverywhere_ && refused;
  // "connect to 10.0.0.7:29511: " is said once, in front of all attempts.
  std::string reason = status.message();
  std::string prefix = "connect to ";
  if (reason.compare(0, prefix.size(), prefix) == 0) {
    reason = reason.substr(prefix.size());
  } else {
    reason = remote_.toString() + ": " + reason;
  }
  if (!failure_.attempts.empty()) {
    failure_.attempts += "; ";
  }
  failure_.attempts += reason;
  lastStatus_ = std::move(status);
  // By way of the loop: a long list of refusals must not hold it up.
  timer_ = loop_.at(loop_.now(), [this] { tryNext(); });
}

void OutgoingHandshake::finish(OutgoingResult result) {
  closeAttempt();
  auto callback = std::exchange(callback_, nullptr);
  callback(std::move(result)); // may destroy this
}

IncomingHandshake::IncomingHandshake(
    EventLoop& loop,
    FileDescriptor fd,
    SocketAddress remote,
    const ServerIdentity& identity,
    Encryption encryption,
    const TlsCertificates* certificates,
    HelloNonce nonce,
    Nanos timeout,
    Callback callback)
    : loop_(loop),
      fd_(std::move(fd)),
      remote_(remote),
      identity_(identity),
      encryption_(encryption),
      certificates_(certificates),
      handshake_(identity, nonce, endpointOf(localAddress(fd_.get()))),
      callback_(std::move(callback)) {
  RESILIENT_IN_LOOP(loop);
  loop_.add(fd_.get(), EPOLLIN, this);
  watched_ = EPOLLIN;
  timer_ = loop_.after(timeout, [this, timeout] {
    finish(Status(
        StatusCode::kTimeout,
        "no end of the handshake in " + durationText(timeout)));
  });
}

IncomingHandshake::~IncomingHandshake() {
  loop_.cancel(timer_);
  if (watched_ != 0) {
    loop_.remove(fd_.get());
    resetOnClose(fd_.get());
  }
}

// A handshake that has failed keeps running until its output is sent. The
// caller learns the reason, if it reads, or the timeout ends the wait.
bool IncomingHandshake::advance() {
  Status status = exchange();
  if (status.ok() &&
      (unsent(handshake_, tls_.get()) || (tls_ && tls_->handshaking()) ||
       handshake_.state() == Handshake::State::kRunning)) {
    if (const uint32_t events = eventsFor(handshake_, tls_.get());
        events != watched_) {
      watched_ = events;
      loop_.modify(fd_.get(), events);
    }
    return true;
  }
  finish(status.ok() ? handshake_.status() : status);
  return false;
}

// Nothing is decided before the first byte: it may be long in coming.
Status IncomingHandshake::exchange() {
  if (!begun_ && encryption_ != Encryption::kOff) {
    uint8_t first = 0;
    const ssize_t n = retryInterrupted(
        [&] { return ::recv(fd_.get(), &first, 1, MSG_PEEK); });
    if (n < 0) {
      return errno == EAGAIN
          ? Status()
          : errnoStatus(StatusCode::kNetwork, "receive", errno);
    }
    if (n == 0) {
      return closedByOther();
    }
    if (first == kTlsHandshake) {
      if (certificates_ != nullptr) {
        tls_ = TlsSession::server(
            certificates_->context(/*isClient=*/false), identity_.keysOf);
        handshake_.setCertifiedFor(tls_->certifiedFor());
      } else {
        tls_ = TlsSession::server(identity_.keysOf);
        handshake_.setInsideTls();
      }
    } else if (mustEncrypt(encryption_, fd_.get())) {
      handshake_.refusePlaintext();
    }
  }
  begun_ = true;
  return tls_ ? exchangeBytes(fd_.get(), *tls_, handshake_, {})
              : exchangeBytes(fd_.get(), handshake_);
}

// watched_ is cleared before the callback, so the destructor does not reset a
// connection that was admitted.
void IncomingHandshake::finish(Status status) {
  loop_.cancel(timer_);
  loop_.remove(fd_.get());
  watched_ = 0;
  Result result;
  result.info = handshake_.info();
  result.verdict = handshake_.verdict();
  result.authenticated = handshake_.authenticated();
  result.remote = remote_;
  if (status.ok()) {
    result.socket = {std::move(fd_), std::move(tls_)};
  } else {
    result.fault = handshake_.fault();
    if (tls_ && tls_->failed()) {
      result.fault = tls_->fault();
    } else if (status.code() == StatusCode::kTimeout) {
      result.fault = TrustFault::kTimeout;
    }
    result.status = Status(
        status.code(),
        "connection from " + remote_.toString() + ": " + status.message());
    dropUnread(fd_.get());
    fd_.reset();
  }
  auto callback = std::exchange(callback_, nullptr);
  callback(std::move(result)); // may destroy this
}

} // namespace resilient
