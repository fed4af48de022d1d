#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/event_loop.h"
#include "transport/stream_socket.h"
#include "transport/tls_certificates.h"
#include "wire/hello.h"

namespace resilient {

// The reason why there is no connection.
struct ConnectFailure {
  // Every address answered that the peer is not there: connection refused, or
  // another process of this job that has the address now and said so with
  // proof. Then the peer's process is gone, not only the way to it.
  bool refusedEverywhere = false;
  // The last verdict of a server, if one spoke.
  std::optional<HelloCode> verdict;
  // "10.0.0.7:29511: Connection refused; 10.1.0.7:29511: timed out after 2 s"
  std::string attempts;
};

struct OutgoingResult {
  Status status;
  StreamSocket socket; // connected, non-blocking, not watched; if ok
  AcceptInfo accept; // if ok
  SocketAddress local, remote; // if ok
  ConnectFailure failure; // if not ok
};

struct OutgoingSpec {
  // Tried one after the other; at least one.
  std::vector<SocketAddress> candidates;
  // The local address, by choice of NIC. It applies to candidates of its
  // family; the kernel chooses for the others.
  std::optional<SocketAddress> source;
  SocketOptions options;
  HelloInfo hello;
  // A fresh nonce for each attempt: a nonce must not serve twice. Called when a
  // TCP connection is established, not before: an address that is silent uses
  // up no nonce.
  std::function<HelloNonce()> nonce;
  std::string secret;
  // A connection that must be encrypted is never made in plaintext.
  Encryption encryption = Encryption::kOff;
  // Not null: TLS uses these in place of the secret, and the far end's must be
  // for the address that is dialled or for `hostName`. They outlive the
  // handshake.
  const TlsCertificates* certificates = nullptr;
  std::string hostName;
  // Counts attempts, unless it is null; outlives the handshake.
  HandshakeCounters* counters = nullptr;
  // Whether this process of the job can have that address now, as far as the
  // caller knows. Not set: yes.
  std::function<bool(const Uid& process, const SocketAddress& at)> mayBeAt;
  // For connecting and the handshake, at each address. A blackholed address
  // costs this much before the next one is tried. If synTimeout is shorter,
  // this limit begins anew once the connection stands, and then covers the
  // handshake alone (the_timeout_of_the_syn_does_not_limit_the_handshake).
  Nanos attemptTimeout = std::chrono::seconds(5);
  // For the answer to the SYN alone, if shorter.
  Nanos synTimeout = Nanos::max();
};

// Connects to a peer and proves who we are. The callback comes exactly once,
// never from within start(), and may destroy the object; destroying it earlier
// gives up without a callback.
// Thread: the loop's.
//
// One candidate is tried at a time, in the order given. A signed verdict that
// would be the same at every address ends the attempt early.
class OutgoingHandshake final : private Handler {
 public:
  using Callback = std::function<void(OutgoingResult)>;

  static std::unique_ptr<OutgoingHandshake>
  start(EventLoop& loop, OutgoingSpec spec, Callback callback);
  ~OutgoingHandshake() override;

  // The time at which the TCP connection was established; empty before. It
  // belongs to the candidate that is being tried now.
  std::optional<TimePoint> connectedAt() const {
    return connectedAt_;
  }

 private:
  OutgoingHandshake(EventLoop& loop, OutgoingSpec spec, Callback callback);
  void onEvents(uint32_t events) override;
  void tryNext();
  void pump();
  void onRefused();
  void attemptFailed(
      Status status,
      bool refused,
      std::optional<TrustFault> fault = std::nullopt);
  void limitTo(Nanos timeout);
  void closeAttempt();
  void finish(OutgoingResult result);

  EventLoop& loop_;
  OutgoingSpec spec_;
  Callback callback_;
  size_t next_ = 0; // candidate
  SocketAddress remote_;
  FileDescriptor fd_; // watched while open
  bool connecting_ = false;
  std::optional<TimePoint> connectedAt_;
  std::unique_ptr<TlsSession> tls_; // if this connection is encrypted
  std::optional<ClientHandshake> handshake_;
  TimerId timer_ = 0; // the next attempt, or the limit of this one
  bool refusedEverywhere_ = true;
  ConnectFailure failure_;
  Status lastStatus_;
};

// Lets a caller prove who it is. As above: one callback, not from within the
// constructor, and destroying it earlier gives up without a callback: the
// caller gets a reset, which leaves nothing of the connection in the kernel.
// Thread: the loop's.
//
// The socket must be non-blocking. A caller that is refused still gets its
// verdict before the end, within the timeout. By its first byte a caller tells
// whether it speaks TLS: a hello begins with another one.
class IncomingHandshake final : private Handler {
 public:
  // `socket` and `info` are good if the status is ok. If it is not ok but
  // `verdict` is kOk, the caller was let in and then lost: the reservation of
  // decide() must be released. `info` is the caller's claim until
  // `authenticated`, and empty if no hello came.
  struct Result {
    Status status;
    StreamSocket socket;
    HelloInfo info;
    std::optional<HelloCode> verdict;
    bool authenticated = false;
    // The kind of failure, if it was one of trust.
    std::optional<TrustFault> fault;
    SocketAddress remote;
  };
  using Callback = std::function<void(Result)>;

  // `identity` must outlive it, and so must `certificates`; without them (null)
  // the secret takes their place.
  IncomingHandshake(
      EventLoop& loop,
      FileDescriptor fd,
      SocketAddress remote,
      const ServerIdentity& identity,
      Encryption encryption,
      const TlsCertificates* certificates,
      HelloNonce nonce,
      Nanos timeout,
      Callback callback);
  ~IncomingHandshake() override;

  // Reads the bytes that have come. False if that was the end: the callback has
  // run and may have destroyed the object. What follows the handshake belongs
  // to the path: it stays in the kernel, or in the session of TLS.
  bool advance();
  const SocketAddress& remote() const {
    return remote_;
  }
  bool authenticated() const {
    return handshake_.authenticated();
  }
  // It has named a secret of ours, which proves nothing.
  bool namedSecret() const {
    return tls_ ? tls_->namedSecret() : handshake_.namedSecret();
  }

 private:
  void onEvents(uint32_t) override {
    (void)advance();
  }
  Status exchange();
  void finish(Status status);

  EventLoop& loop_;
  FileDescriptor fd_;
  SocketAddress remote_;
  const ServerIdentity& identity_;
  const Encryption encryption_;
  const TlsCertificates* const certificates_;
  bool begun_ = false; // the first byte is there
  std::unique_ptr<TlsSession> tls_; // if the caller speaks it
  ServerHandshake handshake_;
  Callback callback_;
  TimerId timer_ = 0;
  uint32_t watched_ = 0; // the events waited for; 0: not any more
};

} // namespace resilient
