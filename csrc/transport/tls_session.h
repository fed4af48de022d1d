#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "wire/hello.h"
#include "wire/tls_keys.h"
#include "wire/trust_fault.h"

namespace resilient {

// One end of a TLS 1.3 connection (RFC 8446), without I/O: bytes of the socket
// go in and come out, and so do the bytes of the application.
//
// Both ends prove that they know the same secret of the job, as an external
// pre-shared key with a fresh X25519 exchange (psk_dhe_ke): a recording cannot
// be decrypted, not even by those who learn the secret later. Or both prove by
// certificates which hosts they are (TlsCertificates), with the same exchange;
// then the client names the secret, and the handshake inside proves it. There
// are no session tickets and no older versions of TLS.
//
// With a secret, the first bytes of a client can go with its first flight
// (early data, RFC 8446, 2.3), and the server's answer with its own: a round
// trip less. TLS warns that early data may be a recording, and that it has no
// forward secrecy. The server takes it with a key's name that was never used
// before; and it should tell little.
//
// The protocol is that of OpenSSL's libssl, looked for at run time as in
// packet_seal.h: only encrypted connections need it.
//
// How to use it. Read from the socket into input() and say so with received().
// Then, while handshaking(), call proceed(); afterwards, and while isEarly(),
// take what open() returns, until it returns 0. After each call send output(),
// and tell sent(). end() tells that the socket has no more bytes. Once
// failed(), output() may still hold the alert that tells the far end.
//
// Thread: one at a time.
class TlsSession {
 public:
  // The most plaintext in one record, and what sealing adds to it.
  static constexpr size_t kRecordBytes = 16384;
  static constexpr size_t kRecordOverheadBytes = 22;
  // A key may seal so many records: with AES-GCM, 2^24.5 full ones leave an
  // attacker a chance of 2^-57 (RFC 8446, 5.5). This is far below, and each new
  // key costs microseconds.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;
  // What input() takes at a time: two records.
  static constexpr size_t kInputBytes = 32u << 10;

  // False, and `why` says so, where libssl is missing or too old. The first
  // call loads it, and the result holds for the process.
  static bool available(std::string& why);
  // "OpenSSL 3.0.19 27 Jan 2026"; empty if it is not available.
  static std::string library();

  // The keys of the secret that a client has named, or null: it is not known.
  // A server asks before it computes anything for a client.
  using FindKeys =
      std::function<std::optional<NamedKeys>(std::span<const uint8_t> name)>;

  // The most early data.
  static constexpr size_t kEarlyBytes = 256;

  // Both must be available(). The nonce must not repeat, see wire/tls_keys.h.
  // `early` goes with the first flight, see takenEarly().
  static std::unique_ptr<TlsSession> client(
      const TlsKeys& keys,
      const TlsNonce& nonce,
      std::span<const uint8_t> early = {});
  // `find` must outlive the handshake.
  static std::unique_ptr<TlsSession> server(FindKeys find);
  // With certificates: those of TlsCertificates::context(), which is a
  // newContext() with certificates in it. The keys serve as a name only.
  static std::unique_ptr<TlsSession>
  client(void* certificates, const TlsKeys& keys, const TlsNonce& nonce);
  static std::unique_ptr<TlsSession> server(void* certificates, FindKeys find);
  // Null if this library cannot make one.
  static void* newContext(bool isClient);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // --- the side of the socket
  // The place for the next bytes, at most `most`; empty while received ones are
  // still unused.
  std::span<std::byte> input(size_t most = kInputBytes);
  void received(size_t bytes);
  // The far end has closed the socket. An error unless it had ended TLS before:
  // else whoever can cut a connection could cut a stream short unnoticed.
  void end();
  // To be sent, in order.
  std::span<const std::byte> output() const {
    return {out_.data() + outSent_, out_.size() - outSent_};
  }
  // So much of output() has been sent. Returns the bytes of plaintext in the
  // records that have left whole with it: the far end can read these, and none
  // beyond.
  size_t sent(size_t bytes);

  // --- the handshake
  bool handshaking() const {
    return state_ == State::kHandshake;
  }
  void proceed();
  // A server has got early data, and the handshake is not over. The client has
  // proved its secret with it, but not yet that it receives the answers.
  bool isEarly() const {
    return handshaking() && anyEarly_;
  }
  // How much of a client's early data the server has taken: all or nothing, and
  // nothing on a second call. The rest must be sent again. After the handshake.
  size_t takenEarly();
  // The client has named a secret that is known, which proves nothing yet.
  bool namedSecret() const {
    return named_;
  }
  bool isCertified() const {
    return isCertified_;
  }
  // The two ends have different secrets, as one of them has said.
  bool unknownSecret() const {
    return unknownSecret_;
  }

  // --- the side of the application, after the handshake or while isEarly()
  // The next bytes, at most `bytes`; 0: none until more are received, or the
  // far end has ended the stream, or it failed.
  size_t open(std::byte* to, size_t bytes);
  // Seals from the front of `parts` into output(), which must be empty, up to
  // kBatchRecords records. Returns the bytes taken. Few large parts are best:
  // smaller ones are copied together first.
  size_t seal(std::span<const iovec> parts);
  // Says that nothing more follows (close_notify).
  void close();

  // The far end has said so.
  bool ended() const {
    return state_ == State::kEnded;
  }
  bool failed() const {
    return state_ == State::kFailed;
  }
  // Why it failed: kProtocol, or kNetwork for a stream that was cut.
  const Status& status() const {
    return status_;
  }
  // The kind of failure.
  TrustFault fault() const {
    return unknownSecret_            ? TrustFault::kWrongSecret
        : !certificateFault_.empty() ? TrustFault::kCertificate
        : opened_                    ? TrustFault::kRecord
                                     : TrustFault::kTls;
  }
  // The reason why one end has refused the certificate of the other, in the
  // words of OpenSSL; empty if that is not the failure.
  const std::string& certificateFault() const {
    return certificateFault_;
  }
  // Whether the far end's certificate is for this host name or address (its
  // subjectAltName alone counts). After a handshake with certificates.
  bool isFor(const std::string& name) const;
  // The same as a function; not set without certificates. It must not outlive
  // the session.
  CertifiedFor certifiedFor() const {
    return isCertified_
        ? [this](const std::string& name) { return isFor(name); }
        : CertifiedFor();
  }
  // Fails: the far end's certificate will not do.
  void refuseCertificate(const std::string& why);
  // A key that only the two ends know, for `label` and `context` (RFC 8446,
  // 7.5). Both get the same one. After the handshake; throws StatusError.
  std::array<std::byte, 32> exportKey(
      std::string_view label,
      std::string_view context) const;
  // "TLS_AES_128_GCM_SHA256"
  std::string cipher() const;

  // For tests: the suites of a server in its order, before any input; another
  // number than kRecordsPerKey; and a new key with the next record, which asks
  // the far end for one, too.
  void setSuites(const char* names);
  void setRecordsPerKey(uint64_t records) {
    recordsPerKey_ = records;
  }
  void requestKeyUpdate();

 private:
  enum class State { kHandshake, kOpen, kEnded, kFailed };
  struct Callbacks; // of OpenSSL

  // One system call for three records, which take ten times as long to seal.
  static constexpr size_t kBatchRecords = 3;
  // Beyond what one batch can leave unsent. Answers to the far end's requests
  // for new keys count, too: a peer that asks without end and reads nothing is
  // given up.
  static constexpr size_t kOutputBytesMax = 128u << 10;

  TlsSession(bool isClient, void* certificates);
  bool readEarly();
  void fail(StatusCode code, std::string why);
  void failBy(int result);
  void record(const std::byte* data, size_t bytes);

  void* ssl_ = nullptr;
  const bool isClient_;
  const bool isCertified_; // by certificates
  State state_ = State::kHandshake;
  Status status_;
  bool named_ = false;
  bool unknownSecret_ = false;
  bool opened_ = false; // the handshake has ended well
  std::string certificateFault_;
  bool anyInput_ = false;

  // Of a client.
  TlsKeys keys_;
  TlsName name_{};
  size_t sentEarly_ = 0;
  // Of a server.
  FindKeys find_;
  const void* firstSuite_ = nullptr; // that the client wants most
  bool mayBeEarly_ = false; // more early data may come
  bool anyEarly_ = false;
  std::vector<std::byte> early_; // not opened yet

  std::unique_ptr<std::byte[]> in_;
  size_t inCapacity_ = 0; // of it: small until the handshake is over
  size_t inUsed_ = 0, inBytes_ = 0;
  std::vector<std::byte> out_;
  size_t outSent_ = 0;

  // Records in output(): where each ends, counted over the life of the session,
  // and the plaintext in it.
  struct Record {
    uint64_t end;
    size_t plaintext;
  };
  std::deque<Record> records_;
  uint64_t sentTotal_ = 0;
  uint64_t recordsPerKey_ = kRecordsPerKey;
  uint64_t recordsOfKey_ = 0;
};

} // namespace resilient
