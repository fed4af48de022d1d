#include "wire/hello.h"

#include <algorithm>
#include <concepts>
#include <cstring>
#include <type_traits>

namespace resilient {

namespace {

// The four messages, by the last byte of their magic "RSL?".
enum MessageKind : uint8_t {
  kHelloKind = 'H',
  kChallengeKind = 'C',
  kProofKind = 'P',
  kAcceptKind = 'A',
};

// The input of each of the two proofs and of the verdict begins with a label,
// so none of them can be sent back as another.
constexpr std::string_view kServerLabel = "resilient server";
constexpr std::string_view kClientLabel = "resilient client";
constexpr std::string_view kAcceptLabel = "resilient accept";
constexpr std::string_view kKeyIdLabel = "resilient key id";

// Writes one message: magic, version and length, then fields in little-endian
// order. Unlike in frame.cpp no byte order of the host is assumed.
class Writer {
 public:
  Writer(MessageKind kind, size_t bytes) {
    out_.reserve(bytes);
    put("RSL", 3);
    out_.push_back(kind);
    number(kWireVersion);
    number(static_cast<uint16_t>(bytes));
  }
  template <std::integral T>
  void number(T value) {
    auto v = static_cast<std::make_unsigned_t<T>>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<uint8_t>(v >> (8 * i)));
    }
  }
  template <size_t n>
  void bytes(const std::array<uint8_t, n>& data) {
    put(data.data(), n);
  }
  void zeros(size_t n) {
    out_.resize(out_.size() + n);
  }
  std::vector<uint8_t>& out() {
    return out_;
  }

 private:
  void put(const void* data, size_t n) {
    const auto* p = static_cast<const uint8_t*>(data);
    out_.insert(out_.end(), p, p + n);
  }
  std::vector<uint8_t> out_;
};

// Reads fields of a message of checked length.
//
// The length was checked against a constant of this file before, so reads have
// no bounds of their own.
class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& message)
      : at_(message.data() + kHelloHeaderBytes) {}
  template <std::integral T>
  T number() {
    std::make_unsigned_t<T> v = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      v = static_cast<std::make_unsigned_t<T>>(
          v | static_cast<std::make_unsigned_t<T>>(*at_++) << (8 * i));
    }
    return static_cast<T>(v);
  }
  template <size_t n>
  std::array<uint8_t, n> bytes() {
    std::array<uint8_t, n> data;
    std::copy_n(at_, n, data.begin());
    at_ += n;
    return data;
  }
  bool zeros(size_t n) {
    bool all = std::all_of(at_, at_ + n, [](uint8_t b) { return b == 0; });
    at_ += n;
    return all;
  }

 private:
  const uint8_t* at_;
};

// The version keeps its place in all versions, as does the code of CHALLENGE:
// two versions can always tell that they differ.
uint16_t versionOf(const std::vector<uint8_t>& message) {
  return static_cast<uint16_t>(message[4] | message[5] << 8);
}

// The fault in the first 8 bytes, except the version; empty if there is none.
std::string
headerError(const std::vector<uint8_t>& m, MessageKind kind, size_t bytes) {
  if (std::memcmp(m.data(), "RSL", 3) != 0 || m[3] != kind) {
    return "it does not begin like one of this protocol";
  }
  size_t length = static_cast<size_t>(m[6] | m[7] << 8);
  if (versionOf(m) == kWireVersion && length != bytes) {
    return "its length is given as " + std::to_string(length) +
        " bytes instead of " + std::to_string(bytes);
  }
  return "";
}

std::string versionText(uint16_t theirs) {
  return "the peer speaks version " + std::to_string(theirs) +
      " of the wire protocol, this process version " +
      std::to_string(kWireVersion) +
      "; install the same torch_resilient everywhere";
}

// The proof is an HMAC over a label and all bytes of both sides so far. The
// transcript holds both nonces, which makes a proof fresh; the label keeps it
// from being used in another place
// (a_proof_sent_back_as_the_other_sides_fails).
Digest proofOf(
    const std::string& secret,
    std::string_view label,
    const std::vector<uint8_t>& transcript) {
  return HmacSha256(secret)
      .update(label)
      .update(transcript.data(), transcript.size())
      .finish();
}

void append(std::vector<uint8_t>& to, const std::vector<uint8_t>& what) {
  to.insert(to.end(), what.begin(), what.end());
}

// Whether the last 32 bytes of `message` prove knowledge of the secret; they
// are not part of what they cover.
bool proves(
    const std::string& secret,
    std::string_view label,
    std::vector<uint8_t> transcript,
    const std::vector<uint8_t>& message) {
  size_t body = message.size() - sizeof(Digest);
  transcript.insert(
      transcript.end(),
      message.begin(),
      message.begin() + static_cast<ptrdiff_t>(body));
  Digest expected = proofOf(secret, label, transcript);
  return equalConstantTime(
      expected.data(), message.data() + body, expected.size());
}

// Appends the proof over transcript and message to the message.
void sign(
    Writer& message,
    const std::string& secret,
    std::string_view label,
    std::vector<uint8_t> transcript) {
  append(transcript, message.out());
  message.bytes(proofOf(secret, label, transcript));
}

std::optional<HelloCode> helloCodeOf(uint16_t value) {
  switch (static_cast<HelloCode>(value)) {
#define X(name, text)   \
  case HelloCode::name: \
    return HelloCode::name;
    RESILIENT_HELLO_CODES(X)
#undef X
  }
  return std::nullopt;
}

std::string refusalText(HelloCode code) {
  return std::string("the peer refused the connection: ") + helloCodeText(code);
}

std::optional<TrustFault> faultOf(HelloCode code) {
  switch (code) {
    case HelloCode::kUnknownKey:
      return TrustFault::kWrongSecret;
    case HelloCode::kVersion:
      return TrustFault::kVersion;
    case HelloCode::kEncryption:
      return TrustFault::kPlaintext;
    case HelloCode::kCertificate:
      return TrustFault::kCertificate;
    case HelloCode::kOk:
    case HelloCode::kDuplicateConnection:
    case HelloCode::kWrongPeer:
    case HelloCode::kBusy:
      return std::nullopt;
  }
  return std::nullopt;
}

} // namespace

const char* helloCodeText(HelloCode code) {
  switch (code) {
#define X(name, text)   \
  case HelloCode::name: \
    return text;
    RESILIENT_HELLO_CODES(X)
#undef X
  }
  return "unknown code";
}

KeyId keyIdOf(const std::string& secret) {
  Digest digest = Sha256().update(kKeyIdLabel).update(secret).finish();
  KeyId id;
  std::copy_n(digest.begin(), id.size(), id.begin());
  return id;
}

void Handshake::receive(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  while (bytes > 0 && state_ == State::kRunning) {
    size_t take = std::min(bytes, wanted());
    input_.insert(input_.end(), p, p + take);
    p += take;
    bytes -= take;
    if (input_.size() == expected_) {
      onInput();
    }
  }
  if (bytes > 0 && state_ == State::kDone) {
    fail(
        StatusCode::kInternal,
        "more bytes given than the handshake wanted",
        std::nullopt);
  }
}

void Handshake::bindTo(std::span<const std::byte> channel) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(channel.data());
  transcript_.insert(transcript_.begin(), bytes, bytes + channel.size());
  isBound_ = true;
  onBound();
}

ClientHandshake::ClientHandshake(
    HelloInfo info,
    std::string secret,
    bool insideTls)
    : Handshake(kHelloHeaderBytes),
      secret_(std::move(secret)),
      info_(std::move(info)) {
  insideTls_ = insideTls;
  info_.keyId = keyIdOf(secret_);
  Writer hello(kHelloKind, kHelloBytes);
  hello.bytes(info_.keyId);
  hello.bytes(info_.initiator);
  hello.bytes(info_.acceptor);
  hello.number(info_.connectionIndex);
  hello.number(info_.pathsWanted);
  hello.number(info_.initiatorRank);
  hello.number(info_.eagerBudgetBytes);
  hello.bytes(info_.nonce);
  append(transcript_, hello.out());
  append(output_, hello.out());
}

void ClientHandshake::onBound() {
  prove();
}

void ClientHandshake::prove() {
  Writer proof(kProofKind, kProofBytes);
  sign(proof, secret_, kClientLabel, transcript_);
  append(transcript_, proof.out());
  append(output_, proof.out());
}

void ClientHandshake::onInput() {
  switch (stage_) {
    case kChallengeHeader: {
      auto error = headerError(input_, kChallengeKind, kChallengeBytes);
      if (!error.empty()) {
        fail(
            StatusCode::kProtocol,
            "the answer to the handshake is not one: " + error,
            TrustFault::kMalformed);
        return;
      }
      if (versionOf(input_) != kWireVersion) {
        accepted_.code = HelloCode::kVersion;
        fail(
            StatusCode::kProtocol,
            versionText(versionOf(input_)),
            TrustFault::kVersion);
        return;
      }
      stage_ = kChallenge;
      extend(kChallengeBytes);
      return;
    }
    case kChallenge:
      onChallenge();
      return;
    case kAccept:
      onAccept();
      return;
  }
}

// The order matters. A refusal is looked at first, since it has no proof. Then
// the server must prove that it knows the secret. Only then the client writes
// its own proof (unless it has given one before, here or in TLS), and only then
// `eagerBudgetBytes` counts.
void ClientHandshake::onChallenge() {
  Reader in(input_);
  auto code = helloCodeOf(in.number<uint16_t>());
  bool reserved = in.zeros(6);
  // The other codes say something of a process, and only an ACCEPT is signed.
  const bool here = code == HelloCode::kOk || code == HelloCode::kUnknownKey ||
      code == HelloCode::kVersion || code == HelloCode::kEncryption;
  if (!here || !reserved) {
    fail(
        StatusCode::kProtocol,
        "the server's challenge is malformed",
        TrustFault::kMalformed);
    return;
  }
  if (*code != HelloCode::kOk) {
    accepted_.code = *code;
    fail(
        // Not signed: anyone may have said so, so the peer is not given up.
        StatusCode::kNetwork,
        refusalText(*code),
        faultOf(*code));
    return;
  }
  if (!proves(secret_, kServerLabel, transcript_, input_)) {
    fail(
        StatusCode::kProtocol,
        "the server's proof is wrong: it does not know this job's secret",
        TrustFault::kWrongSecret);
    return;
  }
  accepted_.eagerBudgetBytes = in.number<uint64_t>();
  append(transcript_, input_);
  if (!insideTls_ && !isBound()) {
    prove();
  }
  stage_ = kAccept;
  expect(kAcceptBytes);
}

// Everything is checked before anything is taken over: a verdict with a wrong
// signature leaves accepted() as it was. An acceptance must also be signed by
// the process that was asked for; a proxy could have led us to another member
// (only_the_process_that_was_asked_for_can_accept).
void ClientHandshake::onAccept() {
  auto error = headerError(input_, kAcceptKind, kAcceptBytes);
  Reader in(input_);
  auto code = helloCodeOf(in.number<uint16_t>());
  const auto port = in.number<uint16_t>();
  bool reserved = in.zeros(4);
  if (!error.empty() || versionOf(input_) != kWireVersion || !code ||
      !reserved || !proves(secret_, kAcceptLabel, transcript_, input_)) {
    fail(
        StatusCode::kProtocol,
        "the server's verdict is malformed or not signed by it",
        TrustFault::kMalformed);
    return;
  }
  accepted_.code = *code;
  accepted_.signer = in.bytes<sizeof(Uid)>();
  accepted_.reachedAt.ip = in.bytes<sizeof(HelloEndpoint::ip)>();
  accepted_.reachedAt.port = port;
  if (*code != HelloCode::kOk) {
    fail(StatusCode::kNetwork, refusalText(*code), faultOf(*code));
    return;
  }
  if (accepted_.signer != info_.acceptor) {
    fail(
        StatusCode::kProtocol,
        "a process that was not asked for accepts the connection",
        TrustFault::kMalformed);
    return;
  }
  finish();
}

ServerHandshake::ServerHandshake(
    const ServerIdentity& identity,
    HelloNonce nonce,
    HelloEndpoint reachedAt)
    : Handshake(kHelloHeaderBytes),
      identity_(identity),
      nonce_(nonce),
      reachedAt_(reachedAt) {}

void ServerHandshake::onInput() {
  switch (stage_) {
    case kHelloHeader: {
      auto error = headerError(input_, kHelloKind, kHelloBytes);
      if (!error.empty()) {
        // No answer: what called is none of ours.
        fail(
            StatusCode::kProtocol,
            "the first message is no hello: " + error,
            TrustFault::kMalformed);
        return;
      }
      if (versionOf(input_) != kWireVersion) {
        sendChallenge(HelloCode::kVersion);
        fail(
            StatusCode::kProtocol,
            versionText(versionOf(input_)),
            TrustFault::kVersion);
        return;
      }
      stage_ = kHello;
      extend(kHelloBytes);
      return;
    }
    case kHello:
      onHello();
      return;
    case kProof:
      onProof();
      return;
  }
}

void ServerHandshake::sendChallenge(HelloCode code) {
  Writer challenge(kChallengeKind, kChallengeBytes);
  challenge.number(static_cast<uint16_t>(code));
  challenge.zeros(6);
  if (code == HelloCode::kOk) {
    challenge.number(identity_.eagerBudgetBytes);
    challenge.bytes(nonce_);
    sign(challenge, secret_, kServerLabel, transcript_);
    append(transcript_, challenge.out());
  } else {
    verdict_ = code;
    // A stranger learns the code, nothing else.
    challenge.zeros(kChallengeBytes - challenge.out().size());
  }
  append(output_, challenge.out());
}

// The secret is chosen by the key id, before anything is proved. The record of
// the hello's fields is a claim at this point, and decide() does not see it
// yet.
void ServerHandshake::onHello() {
  Reader in(input_);
  info_.keyId = in.bytes<sizeof(KeyId)>();
  info_.initiator = in.bytes<sizeof(Uid)>();
  info_.acceptor = in.bytes<sizeof(Uid)>();
  info_.connectionIndex = in.number<uint16_t>();
  info_.pathsWanted = in.number<uint16_t>();
  info_.initiatorRank = in.number<int32_t>();
  info_.eagerBudgetBytes = in.number<uint64_t>();
  info_.nonce = in.bytes<sizeof(HelloNonce)>();
  auto secret = identity_.secretOf(info_.keyId);
  if (!secret) {
    sendChallenge(HelloCode::kUnknownKey);
    fail(
        StatusCode::kProtocol,
        "the caller belongs to another job",
        TrustFault::kWrongSecret);
    return;
  }
  if (plaintextRefused_) {
    sendChallenge(HelloCode::kEncryption);
    fail(
        StatusCode::kProtocol,
        "the caller came in plaintext, and this process takes encrypted "
        "connections only: set TORCH_RESILIENT_ENCRYPTION alike on all ranks",
        TrustFault::kPlaintext);
    return;
  }
  secret_ = std::move(*secret);
  append(transcript_, input_);
  if (!isBound()) {
    sendChallenge(HelloCode::kOk);
  }
  if (insideTls_) {
    sendVerdict();
    return;
  }
  stage_ = kProof;
  expect(kProofBytes);
}

// The transcript grows in the order of the messages, equally on both sides:
// HELLO, CHALLENGE, and PROOF if there is one; in a channel HELLO, PROOF,
// CHALLENGE. decide() has side effects (a reservation), so a client without the
// secret must not reach it.
void ServerHandshake::onProof() {
  auto error = headerError(input_, kProofKind, kProofBytes);
  if (!error.empty() || versionOf(input_) != kWireVersion ||
      !proves(secret_, kClientLabel, transcript_, input_)) {
    fail(
        StatusCode::kProtocol,
        "the caller's proof is wrong",
        TrustFault::kWrongSecret);
    return;
  }
  append(transcript_, input_);
  if (isBound()) {
    sendChallenge(HelloCode::kOk);
  }
  sendVerdict();
}

// The client has proved that it knows the secret, by its PROOF or in TLS.
void ServerHandshake::sendVerdict() {
  authenticated_ = true;
  // Only now: an answer about who lives here is for members of the job.
  verdict_ = info_.acceptor == identity_.uid
      ? identity_.decide(info_, certifiedFor_)
      : HelloCode::kWrongPeer;
  Writer accept(kAcceptKind, kAcceptBytes);
  accept.number(static_cast<uint16_t>(*verdict_));
  accept.number(reachedAt_.port);
  accept.zeros(4);
  accept.bytes(identity_.uid);
  accept.bytes(reachedAt_.ip);
  sign(accept, secret_, kAcceptLabel, transcript_);
  append(output_, accept.out());
  if (*verdict_ == HelloCode::kOk) {
    finish();
  } else {
    fail(
        StatusCode::kNetwork,
        std::string("refused the caller: ") + helloCodeText(*verdict_),
        faultOf(*verdict_));
  }
}

} // namespace resilient
