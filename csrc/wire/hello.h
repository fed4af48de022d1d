#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "wire/tls_keys.h"
#include "wire/trust_fault.h"

namespace resilient {

// The first words on a connection: both ends prove that they know the job's
// secret, then agree on which path this is. Byte layout: docs/wire_handshake.md
// (the layout has its home there, in hello.cpp and in hello_test.cpp).
//
//   client                                   server
//   HELLO     who, whom, which path, nonce ->
//             <- nonce, proof of the server   CHALLENGE
//   PROOF     proof of the client          ->
//             <- verdict, signed              ACCEPT
//
// Both proofs cover all bytes said before, so nothing said can be changed or
// replayed. The rest of the connection is not protected: the handshake keeps
// out processes without the secret, it does not encrypt. Inside TLS, which has
// proved both ends before, there is no PROOF, and ACCEPT follows CHALLENGE. In
// a channel of its own (bindTo) PROOF follows HELLO, and both answers come
// together. By default the secret lies in torch's store, where every process
// that can connect to the store reads it.

// Raise it when any byte of the wire changes, here or in a frame.
inline constexpr uint16_t kWireVersion = 1;

inline constexpr size_t kHelloHeaderBytes = 8;
inline constexpr size_t kHelloBytes = 96;
inline constexpr size_t kChallengeBytes = 88;
inline constexpr size_t kProofBytes = 40;
inline constexpr size_t kAcceptBytes = 80;

using Uid = std::array<uint8_t, 16>; // of a process's engine, random
using KeyId = std::array<uint8_t, 8>;
using HelloNonce = std::array<uint8_t, 32>; // never used twice
// An end of a connection: an IPv6 address (an IPv4 one as ::ffff:a.b.c.d) in
// network order, then a port.
struct HelloEndpoint {
  std::array<uint8_t, 16> ip{};
  uint16_t port = 0;

  bool operator==(const HelloEndpoint&) const = default;
};

// The server's verdict, by wire value. Only kOk, kUnknownKey, kVersion and
// kEncryption may come in a CHALLENGE, which is not signed at that point. The
// others speak about a process and come signed, in ACCEPT
// (a_challenge_says_nothing_about_processes).
#define RESILIENT_HELLO_CODES(X)                                          \
  X(kOk, "ok")                                                            \
  X(kDuplicateConnection, "another attempt to connect that path goes on") \
  X(kWrongPeer, "another process answers at that address")                \
  X(kUnknownKey, "it does not know this job's secret")                    \
  X(kVersion, "it speaks another version of the protocol")                \
  X(kBusy, "it takes no more connections now")                            \
  X(kEncryption, "it takes encrypted connections only")                   \
  X(kCertificate, "the caller's certificate is for another host")

enum class HelloCode : uint16_t {
#define X(name, text) name,
  RESILIENT_HELLO_CODES(X)
#undef X
};

const char* helloCodeText(HelloCode code);

// Names a secret without telling it: the first 8 bytes of SHA-256("resilient
// key id" || secret). A secret must be long and random (the engine's has 32
// random bytes): an eavesdropper of a handshake can try guesses.
KeyId keyIdOf(const std::string& secret);

// The client's description of itself and of the path it wants. It is a claim,
// even after the proof: any holder of the secret can write any uid here.
struct HelloInfo {
  KeyId keyId{};
  Uid initiator{};
  Uid acceptor{}; // the process that it wants to reach
  uint16_t connectionIndex = 0;
  // The server makes room for as many connections.
  uint16_t pathsWanted = 1; // between these two processes, in all
  int32_t initiatorRank = -1; // in the default group, or -1
  // The bytes that may be sent to it before it asks: see channel flow control.
  uint64_t eagerBudgetBytes = 0;
  HelloNonce nonce{};

  bool operator==(const HelloInfo&) const = default;
};

// The server's verdict, and who signed it. After a refusal in a CHALLENGE only
// `code` is set.
struct AcceptInfo {
  HelloCode code = HelloCode::kOk;
  uint64_t eagerBudgetBytes = 0;
  // The process that signed the verdict, and the address at which the
  // connection reached it. Without them a verdict would prove nothing: a proxy
  // that connects the caller to any member gets one that is signed.
  Uid signer{};
  HelloEndpoint reachedAt;
};

// A side of the handshake: bytes in, bytes out, no I/O. Give it exactly what
// was read, never more than wanted(): the bytes after it belong to the path.
//
// The caller's loop: send output() until it is empty, stop if the state has
// ended, read at most wanted() bytes, give them to receive(). Output may remain
// after the end, and must still be sent: the last message of a side is written
// in the same step that ends it.
class Handshake {
 public:
  enum class State { kRunning, kDone, kFailed };

  State state() const {
    return state_;
  }
  // Why, once it has failed. A peer's malformed or unproven bytes are
  // kProtocol; a verdict against us is kNetwork.
  const Status& status() const {
    return status_;
  }
  // The kind of failure; empty also for a verdict that only tells to come
  // another time, or to go elsewhere.
  std::optional<TrustFault> fault() const {
    return fault_;
  }
  // How many more bytes it can take now; 0 once it has ended.
  size_t wanted() const {
    return state_ == State::kRunning ? expected_ - input_.size() : 0;
  }
  // Any pieces will do (torn_input_makes_no_difference). More bytes than
  // wanted() are a mistake of the caller and fail with kInternal. After a
  // failure input is ignored.
  void receive(const void* data, size_t bytes);
  // Bytes to send, in order; the caller removes what it has sent. Also a
  // failed side may have some: the reason for the other.
  std::vector<uint8_t>& output() {
    return output_;
  }
  // All proofs hold for one channel only: `channel` is fresh, and known to its
  // two ends alone. Both sides call it before the first byte is received, or
  // neither does. Else whoever stands between two channels could pass on the
  // messages. The client's proof needs no challenge then.
  void bindTo(std::span<const std::byte> channel);
  bool isBound() const {
    return isBound_;
  }

 protected:
  explicit Handshake(size_t firstBytes) : expected_(firstBytes) {}
  ~Handshake() = default;

  // Called with exactly `expected_` bytes in input_, which it may use up by
  // asking for more (expect) or ending (finish, fail). It must do one of these,
  // or the handshake never ends.
  virtual void onInput() = 0;
  virtual void onBound() {} // by bindTo()
  // Waits until input_ holds `total` bytes.
  void extend(size_t total) {
    expected_ = total;
  }
  // Starts a new message.
  void expect(size_t bytes) {
    input_.clear();
    expected_ = bytes;
  }
  void finish() {
    state_ = State::kDone;
  }
  void
  fail(StatusCode code, std::string reason, std::optional<TrustFault> fault) {
    state_ = State::kFailed;
    status_ = Status(code, std::move(reason));
    fault_ = fault;
  }

  std::vector<uint8_t> input_;
  std::vector<uint8_t> output_;
  std::vector<uint8_t> transcript_; // all bytes said, both ways
  bool insideTls_ = false;

 private:
  bool isBound_ = false;
  size_t expected_;
  State state_ = State::kRunning;
  Status status_;
  std::optional<TrustFault> fault_;
};

// The side that connected. Its HELLO is in output() from the start. It proves
// itself only to a server that has proved itself before, or that is at the end
// of a channel, so a stranger gets the HELLO and no proof.
class ClientHandshake final : public Handshake {
 public:
  // info.keyId is filled in from the secret.
  ClientHandshake(HelloInfo info, std::string secret, bool insideTls = false);
  // Valid if kDone; `code` also after a refusal, and with kWrongPeer, which is
  // always signed, all of it.
  const AcceptInfo& accepted() const {
    return accepted_;
  }

 private:
  void onInput() override;
  void onBound() override;
  void prove();
  void onChallenge();
  void onAccept();

  std::string secret_;
  HelloInfo info_;
  AcceptInfo accepted_;
  enum { kChallengeHeader, kChallenge, kAccept } stage_ = kChallengeHeader;
};

// Whether the caller's certificate is for a host of this name or address. Not
// set: it came without one.
using CertifiedFor = std::function<bool(const std::string& name)>;

// The server's knowledge; the callbacks must outlive the handshake.
struct ServerIdentity {
  Uid uid{};
  uint64_t eagerBudgetBytes = 0;
  // The secret by its id, or nothing.
  std::function<std::optional<std::string>(const KeyId&)> secretOf;
  // Asked once the client has proved that it knows the secret and wants us. A
  // reservation for kOk must be released if the handshake fails after all (the
  // connection may break before the verdict is out). It is not asked for a
  // client that wanted another process: the verdict is then kWrongPeer.
  std::function<HelloCode(const HelloInfo&, const CertifiedFor&)> decide;
  // The keys for TLS by the name of one of our secrets; nothing for others, and
  // for a name that was used before. Not needed without encryption.
  std::function<std::optional<NamedKeys>(std::span<const uint8_t> name)> keysOf;
};

// The side that was called. Bytes that are no hello get no answer at all.
// Outside of a channel it answers with a proof of its own before the client has
// proved anything, but over a nonce of that client, so a recorded answer is of
// no use.
class ServerHandshake final : public Handshake {
 public:
  // `identity` must outlive the handshake. `reachedAt` is the local end of the
  // connection.
  ServerHandshake(
      const ServerIdentity& identity,
      HelloNonce nonce,
      HelloEndpoint reachedAt);
  // Before the first byte: TLS has proved the client, or it has come in
  // plaintext where that is not enough.
  void setInsideTls() {
    insideTls_ = true;
  }
  void refusePlaintext() {
    plaintextRefused_ = true;
  }
  // Or TLS asks it for a certificate. Called until the verdict, at most.
  void setCertifiedFor(CertifiedFor certifiedFor) {
    certifiedFor_ = std::move(certifiedFor);
  }
  // The client's hello. Unproven unless authenticated().
  const HelloInfo& info() const {
    return info_;
  }
  // Stays true if the client is then refused.
  bool authenticated() const {
    return authenticated_;
  }
  // The client has named a secret of ours, and has still to prove that it knows
  // it. The name is no secret: a member tells it to every address it calls.
  bool namedSecret() const {
    return stage_ == kProof;
  }
  // The verdict given, if any was.
  const std::optional<HelloCode>& verdict() const {
    return verdict_;
  }

 private:
  void onInput() override;
  void onHello();
  void onProof();
  void sendVerdict();
  void sendChallenge(HelloCode code);

  const ServerIdentity& identity_;
  HelloNonce nonce_;
  HelloEndpoint reachedAt_;
  CertifiedFor certifiedFor_;
  HelloInfo info_;
  std::string secret_;
  bool plaintextRefused_ = false;
  bool authenticated_ = false;
  std::optional<HelloCode> verdict_;
  enum { kHelloHeader, kHello, kProof } stage_ = kHelloHeader;
};

} // namespace resilient
