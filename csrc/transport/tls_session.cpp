#include "transport/tls_session.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include "transport/libssl.h"

namespace resilient {
namespace {

// The constants of OpenSSL's headers that are used here; the same from 1.1.1
// on. They are part of its binary interface.
constexpr int kErrorSsl = 1, kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr int kTls13 = 0x0304;
constexpr unsigned kNeverSubject = 0x20; // its "common name" is no host name
constexpr int kVerifyPeer = 1;
constexpr int kBioFlagsAll = 0x0f, kBioRetryRead = 0x01 | 0x08;
constexpr int kBioFlush = 11;
constexpr int kKeyUpdateNotRequested = 0, kKeyUpdateRequested = 1;
constexpr unsigned long kReasonMask = 0xfff;
constexpr unsigned long kReasonNoCertificate = 199; // the far end showed none
constexpr unsigned long kReasonAlertHandshakeFailure = 1000 + 40;
constexpr int kAlertUnknownName = 115; // unknown_psk_identity
constexpr unsigned long kReasonAlertUnknownName = 1000 + kAlertUnknownName;
constexpr unsigned kProtocols = 16; // the extension of RFC 7301
// In front of the one name in it: the bytes of all, and those of this one.
constexpr uint8_t kProtocolsHead[] = {0, 1 + kTlsNameBytes, kTlsNameBytes};
// The alerts about a certificate (RFC 8446, 6.2): bad_certificate to
// certificate_unknown, unknown_ca and certificate_required.
constexpr bool isCertificateAlert(unsigned long reason) {
  return (reason >= 1000 + 42 && reason <= 1000 + 46) || reason == 1000 + 48 ||
      reason == 1000 + 116;
}
// The results that depend on the clock: not yet valid and expired, of a
// certificate and of a revocation list.
constexpr bool isAboutTime(long verifyResult) {
  return verifyResult >= 9 && verifyResult <= 12;
}

// The results of SSL_read_early_data(), and one of SSL_get_early_data_status().
constexpr int kEarlyDataRead = 1, kEarlyDataEnd = 2, kEarlyDataAccepted = 2;

// The first byte of every record is one of these: change of cipher, alert,
// handshake, data.
constexpr uint8_t kFirstRecordType = 20, kLastRecordType = 23;

// Memory for output that is not in use. Sessions that have nothing to send keep
// none, and the next one to seal in this thread takes it.
std::vector<std::byte>& spareOutput() {
  thread_local std::vector<std::byte> bytes;
  return bytes;
}

// Where small parts of a record are put together.
std::byte* gathered() {
  thread_local std::unique_ptr<std::byte[]> bytes =
      std::make_unique_for_overwrite<std::byte[]>(TlsSession::kRecordBytes);
  return bytes.get();
}

} // namespace

// OpenSSL calls these from within the calls below; each finds its session in
// the data of the SSL or BIO object.
struct TlsSession::Callbacks {
  static TlsSession& ofSsl(const void* ssl) {
    return *static_cast<TlsSession*>(libssl().SSL_get_ex_data(ssl, 0));
  }
  static TlsSession& ofBio(void* bio) {
    return *static_cast<TlsSession*>(libssl().BIO_get_data(bio));
  }

  // Puts the key into the form of a session, which is how OpenSSL takes
  // external keys. Its suite seals early data, and tells the hash that the key
  // is for.
  static void* sessionOf(const void* suite, const TlsKeys& keys) {
    void* const session = libssl().SSL_SESSION_new();
    if (session == nullptr ||
        libssl().SSL_SESSION_set1_master_key(
            session, keys.key.data(), keys.key.size()) != 1 ||
        libssl().SSL_SESSION_set_cipher(session, suite) != 1 ||
        libssl().SSL_SESSION_set_protocol_version(session, kTls13) != 1 ||
        libssl().SSL_SESSION_set_max_early_data(session, kEarlyBytes) != 1) {
      libssl().SSL_SESSION_free(session);
      return nullptr;
    }
    return session;
  }

  static int useKey(
      void* ssl,
      const void*,
      const unsigned char** name,
      size_t* nameBytes,
      void** session) {
    const TlsSession& self = ofSsl(ssl);
    *session =
        sessionOf(libssl().SSL_CIPHER_find(ssl, preferredSuite()), self.keys_);
    *name = self.name_.data();
    *nameBytes = self.name_.size();
    return *session != nullptr ? 1 : 0;
  }

  // Before it chooses a suite, or computes anything.
  static int readHello(void* ssl, int* alert, void*) {
    constexpr int kFail = 0, kGoOn = 1;
    TlsSession& self = ofSsl(ssl);
    const unsigned char* suites = nullptr;
    if (libssl().SSL_client_hello_get0_ciphers(ssl, &suites) >= 2) {
      self.firstSuite_ = libssl().SSL_CIPHER_find(ssl, suites);
    }
    if (self.isCertified_) {
      self.named_ = self.find_(protocolOf(ssl)).has_value();
      self.unknownSecret_ = !self.named_;
    }
    *alert = kAlertUnknownName;
    return self.unknownSecret_ ? kFail : kGoOn;
  }

  // With certificates, the name of the secret takes the place of a protocol's
  // (ALPN). Empty: there is none, or another number of them.
  static std::span<const uint8_t> protocolOf(void* ssl) {
    const unsigned char* list = nullptr;
    size_t bytes = 0;
    constexpr size_t kHead = sizeof(kProtocolsHead);
    const bool isOne = libssl().SSL_client_hello_get0_ext(
                           ssl, kProtocols, &list, &bytes) == 1 &&
        bytes == kHead + kTlsNameBytes &&
        std::equal(list, list + kHead, kProtocolsHead);
    return isOne ? std::span(list + kHead, kTlsNameBytes)
                 : std::span<const uint8_t>();
  }

  // An unknown name is no error here: OpenSSL then has no way to go on, since
  // there is no certificate, and tells the client handshake_failure.
  static int findKey(
      void* ssl,
      const unsigned char* name,
      size_t nameBytes,
      void** session) {
    TlsSession& self = ofSsl(ssl);
    *session = nullptr;
    const auto found = self.find_({name, nameBytes});
    if (!found) {
      self.unknownSecret_ = true;
      return 1;
    }
    self.named_ = true;
    // Early data is sealed with the client's first choice.
    const void* const suite = libssl().SSL_get_pending_cipher(ssl);
    if (found->isFirstUse && suite == self.firstSuite_) {
      (void)libssl().SSL_set_max_early_data(ssl, kEarlyBytes);
    }
    *session = sessionOf(suite, found->keys);
    return *session != nullptr ? 1 : 0;
  }

  static int write(void* bio, const char* data, int bytes) {
    TlsSession& self = ofBio(bio);
    libssl().BIO_clear_flags(bio, kBioFlagsAll);
    const auto* const from = reinterpret_cast<const std::byte*>(data);
    self.out_.insert(self.out_.end(), from, from + bytes);
    return bytes;
  }

  static int read(void* bio, char* to, int bytes) {
    TlsSession& self = ofBio(bio);
    libssl().BIO_clear_flags(bio, kBioFlagsAll);
    const size_t take = std::min(
        static_cast<size_t>(std::max(bytes, 0)), self.inBytes_ - self.inUsed_);
    if (take == 0) {
      libssl().BIO_set_flags(bio, kBioRetryRead);
      return -1;
    }
    std::memcpy(to, self.in_.get() + self.inUsed_, take);
    self.inUsed_ += take;
    if (self.inUsed_ == self.inBytes_) {
      self.inUsed_ = self.inBytes_ = 0;
    }
    return static_cast<int>(take);
  }

  static long control(void*, int command, long, void*) {
    return command == kBioFlush ? 1 : 0;
  }

  // One for clients and one for servers, for the life of the process.
  //
  // A client must not be content with a certificate, which any server could
  // present: it verifies them, and knows no authority. Besides, proceed() looks
  // whether the key was used.
  static void* makeContext(bool isClient) {
    const Libssl& l = libssl();
    void* const context = newContext(isClient);
    if (context == nullptr) {
      return nullptr;
    }
    if (isClient) {
      l.SSL_CTX_set_verify(context, kVerifyPeer, nullptr);
      l.SSL_CTX_set_psk_use_session_callback(context, useKey);
    } else {
      l.SSL_CTX_set_psk_find_session_callback(context, findKey);
    }
    return context;
  }

  static void* context(bool isClient) {
    static void* const client = makeContext(true);
    static void* const server = makeContext(false);
    return isClient ? client : server;
  }

  static void* makeBioMethod() {
    constexpr int kTypeSourceSink = 0x0400;
    void* const method = libssl().BIO_meth_new(kTypeSourceSink, "resilient");
    if (method != nullptr) {
      libssl().BIO_meth_set_write(method, write);
      libssl().BIO_meth_set_read(method, read);
      libssl().BIO_meth_set_ctrl(method, control);
    }
    return method;
  }

  static void* newBio(TlsSession* self) {
    static void* const method = makeBioMethod();
    void* const bio = method != nullptr ? libssl().BIO_new(method) : nullptr;
    if (bio != nullptr) {
      libssl().BIO_set_data(bio, self);
      libssl().BIO_set_init(bio, 1);
    }
    return bio;
  }
};

bool TlsSession::available(std::string& why) {
  why = libssl().missing;
  if (why.empty() &&
      (Callbacks::context(true) == nullptr ||
       Callbacks::context(false) == nullptr)) {
    why = library() + " has no TLS 1.3 with X25519";
  }
  return why.empty();
}

void* TlsSession::newContext(bool isClient) {
  void* const context = newTlsContext(isClient);
  if (context != nullptr && !isClient) {
    libssl().SSL_CTX_set_client_hello_cb(
        context, Callbacks::readHello, nullptr);
  }
  return context;
}

std::string TlsSession::library() {
  return libssl().missing.empty() ? libssl().OpenSSL_version(0) : "";
}

TlsSession::TlsSession(bool isClient, void* certified)
    : isClient_(isClient), isCertified_(certified != nullptr) {
  ssl_ = libssl().SSL_new(
      certified != nullptr ? certified : Callbacks::context(isClient));
  void* const bio = ssl_ != nullptr ? Callbacks::newBio(this) : nullptr;
  if (bio == nullptr) {
    fail(StatusCode::kInternal, "OpenSSL has no memory");
    return;
  }
  libssl().SSL_set_ex_data(ssl_, 0, this);
  libssl().SSL_set_bio(ssl_, bio, bio); // which it owns now
  if (isClient) {
    libssl().SSL_set_connect_state(ssl_);
  } else {
    libssl().SSL_set_accept_state(ssl_);
  }
}

TlsSession::~TlsSession() {
  if (ssl_ != nullptr) {
    libssl().SSL_free(ssl_);
  }
}

std::unique_ptr<TlsSession> TlsSession::client(
    const TlsKeys& keys,
    const TlsNonce& nonce,
    std::span<const uint8_t> early) {
  std::unique_ptr<TlsSession> made(new TlsSession(/*isClient=*/true, nullptr));
  made->keys_ = keys;
  made->name_ = tlsNameOf(keys, nonce);
  if (!early.empty() && !made->failed()) {
    // All of it or nothing; without it the handshake goes on as usual.
    (void)libssl().SSL_write_early_data(
        made->ssl_, early.data(), early.size(), &made->sentEarly_);
  }
  made->proceed();
  return made;
}

std::unique_ptr<TlsSession> TlsSession::server(FindKeys find) {
  std::unique_ptr<TlsSession> made(new TlsSession(/*isClient=*/false, nullptr));
  made->find_ = std::move(find);
  made->mayBeEarly_ = true;
  return made;
}

std::unique_ptr<TlsSession> TlsSession::client(
    void* certificates,
    const TlsKeys& keys,
    const TlsNonce& nonce) {
  std::unique_ptr<TlsSession> made(
      new TlsSession(/*isClient=*/true, certificates));
  if (!made->failed()) {
    // Without the bytes of all, which OpenSSL adds.
    std::array<uint8_t, 1 + kTlsNameBytes> name{kTlsNameBytes};
    std::ranges::copy(tlsNameOf(keys, nonce), name.begin() + 1);
    if (libssl().SSL_set_alpn_protos(made->ssl_, name.data(), name.size()) !=
        0) {
      made->fail(StatusCode::kInternal, "OpenSSL has no memory");
    }
  }
  made->proceed();
  return made;
}

std::unique_ptr<TlsSession> TlsSession::server(
    void* certificates,
    FindKeys find) {
  std::unique_ptr<TlsSession> made(
      new TlsSession(/*isClient=*/false, certificates));
  made->find_ = std::move(find);
  return made;
}

void TlsSession::fail(StatusCode code, std::string why) {
  if (!failed()) {
    state_ = State::kFailed;
    status_ = Status(code, std::move(why));
  }
}

// What a call of OpenSSL that has not succeeded means for the session.
void TlsSession::failBy(int result) {
  const int error = libssl().SSL_get_error(ssl_, result);
  if (error == kErrorWantRead) {
    return;
  }
  if (error == kErrorZeroReturn) {
    state_ = State::kEnded;
    return;
  }
  const unsigned long first = error == kErrorSsl ? libssl().ERR_get_error() : 0;
  libssl().ERR_clear_error(); // others in this thread use OpenSSL, too
  const unsigned long alert =
      isCertified_ ? kReasonAlertUnknownName : kReasonAlertHandshakeFailure;
  if (handshaking() &&
      (unknownSecret_ || (isClient_ && (first & kReasonMask) == alert))) {
    unknownSecret_ = true;
    fail(
        StatusCode::kProtocol,
        isClient_ ? "the far end does not know this job's secret"
                  : "the caller belongs to another job, or repeats a "
                    "handshake");
    return;
  }
  const char* const reason =
      first != 0 ? libssl().ERR_reason_error_string(first) : nullptr;
  const long verified =
      isCertified_ && handshaking() ? libssl().SSL_get_verify_result(ssl_) : 0;
  if (verified != 0) {
    certificateFault_ = libssl().X509_verify_cert_error_string(verified);
    if (isAboutTime(verified)) {
      char clock[32] = "";
      const std::time_t now = std::time(nullptr);
      std::tm parts{};
      (void)std::strftime(
          clock, sizeof(clock), "%F %T UTC", ::gmtime_r(&now, &parts));
      certificateFault_ += std::string(" (the clock here says ") + clock + ')';
    }
    refuseCertificate(certificateFault_);
    return;
  }
  const std::string what = reason != nullptr ? reason : "unknown reason";
  if (isCertified_ && (first & kReasonMask) == kReasonNoCertificate) {
    refuseCertificate("it has shown none");
    return;
  }
  if (isCertified_ && isCertificateAlert(first & kReasonMask)) {
    certificateFault_ = what;
    fail(
        StatusCode::kProtocol,
        "the far end refuses this host's certificate: " + what);
    return;
  }
  fail(StatusCode::kProtocol, "TLS failed: " + what);
}

void TlsSession::refuseCertificate(const std::string& why) {
  certificateFault_ = why;
  fail(
      StatusCode::kProtocol,
      "the far end's certificate is refused: " + certificateFault_);
}

// A name that begins with a dot would match all below it.
bool TlsSession::isFor(const std::string& name) const {
  const Libssl& l = libssl();
  void* const chain = opened_ ? l.SSL_get0_verified_chain(ssl_) : nullptr;
  void* const theirs =
      chain != nullptr ? l.OPENSSL_sk_value(chain, 0) : nullptr;
  if (theirs == nullptr || name.empty() || name.front() == '.') {
    return false;
  }
  in6_addr address;
  const bool isAddress = ::inet_pton(AF_INET, name.c_str(), &address) == 1 ||
      ::inet_pton(AF_INET6, name.c_str(), &address) == 1;
  return isAddress
      ? l.X509_check_ip_asc(theirs, name.c_str(), 0) == 1
      : l.X509_check_host(
            theirs, name.data(), name.size(), kNeverSubject, nullptr) == 1;
}

std::span<std::byte> TlsSession::input(size_t most) {
  if (inBytes_ != 0) {
    return {};
  }
  if (inCapacity_ < most) {
    in_ = std::make_unique_for_overwrite<std::byte[]>(most);
    inCapacity_ = most;
  }
  return {in_.get(), most};
}

void TlsSession::received(size_t bytes) {
  inBytes_ = bytes;
  if (!anyInput_ && bytes != 0) {
    anyInput_ = true;
    const auto type = static_cast<uint8_t>(in_[0]);
    if (type < kFirstRecordType || type > kLastRecordType) {
      fail(
          StatusCode::kProtocol,
          "the far end does not answer in TLS: its encryption is off, or "
          "something else listens there");
    }
  }
}

void TlsSession::end() {
  if (state_ == State::kHandshake) {
    fail(StatusCode::kNetwork, "the other side closed the connection");
  } else if (state_ == State::kOpen) {
    fail(
        StatusCode::kNetwork,
        "the connection was cut: it ended without the far end's word");
  }
}

// The records that have left whole; the last one may still be on its way out.
size_t TlsSession::sent(size_t bytes) {
  sentTotal_ += bytes;
  outSent_ += bytes;
  if (outSent_ == out_.size()) {
    out_.clear();
    outSent_ = 0;
    if (spareOutput().capacity() < out_.capacity()) {
      spareOutput().swap(out_);
    }
    out_ = std::vector<std::byte>();
  }
  size_t plaintext = 0;
  while (!records_.empty() && records_.front().end <= sentTotal_) {
    plaintext += records_.front().plaintext;
    records_.pop_front();
  }
  return plaintext;
}

void TlsSession::proceed() {
  if (!handshaking()) {
    return;
  }
  if (mayBeEarly_ && !readEarly()) {
    return;
  }
  libssl().ERR_clear_error();
  const int result = libssl().SSL_do_handshake(ssl_);
  if (result != 1) {
    failBy(result);
    return;
  }
  const bool isProved = isCertified_
      ? libssl().SSL_get_verify_result(ssl_) == 0 &&
          libssl().SSL_get0_verified_chain(ssl_) != nullptr
      : libssl().SSL_session_reused(ssl_) == 1;
  if (!isProved || libssl().SSL_version(ssl_) != kTls13) {
    fail(
        StatusCode::kProtocol,
        isCertified_ ? "TLS has not checked a certificate"
                     : "TLS has not used the job's secret");
    return;
  }
  keys_ = {};
  opened_ = true;
  state_ = State::kOpen;
}

// False: its end has not come yet, or it failed.
bool TlsSession::readEarly() {
  for (;;) {
    libssl().ERR_clear_error();
    std::byte piece[kEarlyBytes];
    size_t bytes = 0;
    const int result =
        libssl().SSL_read_early_data(ssl_, piece, sizeof(piece), &bytes);
    if (result != kEarlyDataRead && result != kEarlyDataEnd) {
      failBy(result);
      return false;
    }
    early_.insert(early_.end(), piece, piece + bytes);
    anyEarly_ |= bytes != 0;
    if (result == kEarlyDataEnd) {
      mayBeEarly_ = false;
      return true;
    }
  }
}

size_t TlsSession::takenEarly() {
  const size_t sent = std::exchange(sentEarly_, 0);
  return libssl().SSL_get_early_data_status(ssl_) == kEarlyDataAccepted ? sent
                                                                        : 0;
}

size_t TlsSession::open(std::byte* to, size_t bytes) {
  if (!early_.empty() && !failed()) {
    const size_t take = std::min(bytes, early_.size());
    std::copy_n(early_.begin(), take, to);
    early_.erase(early_.begin(), early_.begin() + static_cast<ptrdiff_t>(take));
    return take;
  }
  if (state_ != State::kOpen || bytes == 0) {
    return 0;
  }
  if (output().size() > kOutputBytesMax) {
    fail(StatusCode::kProtocol, "the far end asks for new keys without end");
    return 0;
  }
  // Nothing is left: to ask would cost as much as opening a small record.
  if (inBytes_ == 0 && libssl().SSL_has_pending(ssl_) == 0) {
    return 0;
  }
  libssl().ERR_clear_error();
  size_t read = 0;
  const int result = libssl().SSL_read_ex(ssl_, to, bytes, &read);
  if (result != 1) {
    failBy(result);
    return 0;
  }
  return read;
}

size_t TlsSession::seal(std::span<const iovec> parts) {
  if ((state_ != State::kOpen && !isEarly()) || !output().empty()) {
    return 0;
  }
  if (out_.capacity() < spareOutput().capacity()) {
    out_ = std::exchange(spareOutput(), {});
  }
  out_.reserve(kBatchRecords * (kRecordBytes + kRecordOverheadBytes));
  size_t taken = 0, filled = 0, sealed = 0;
  for (const iovec& part : parts) {
    const auto* from = static_cast<const std::byte*>(part.iov_base);
    size_t left = part.iov_len;
    while (left != 0 && sealed < kBatchRecords) {
      const size_t take = std::min(left, kRecordBytes - filled);
      if (take == kRecordBytes) { // needs no copy
        record(from, take);
        ++sealed;
      } else {
        std::memcpy(gathered() + filled, from, take);
        filled += take;
        if (filled == kRecordBytes) {
          record(gathered(), filled);
          ++sealed;
          filled = 0;
        }
      }
      from += take;
      left -= take;
      taken += take;
    }
  }
  if (filled != 0) {
    record(gathered(), filled);
  }
  return failed() ? 0 : taken;
}

// A new key is announced by a record of its own, in front of the first that it
// seals. The two directions have their own.
void TlsSession::record(const std::byte* data, size_t bytes) {
  if (failed()) {
    return;
  }
  libssl().ERR_clear_error();
  if (++recordsOfKey_ > recordsPerKey_) {
    recordsOfKey_ = 1;
    if (const int result =
            libssl().SSL_key_update(ssl_, kKeyUpdateNotRequested);
        result != 1) {
      failBy(result);
      return;
    }
  }
  size_t written = 0;
  const int result = handshaking()
      ? libssl().SSL_write_early_data(ssl_, data, bytes, &written)
      : libssl().SSL_write_ex(ssl_, data, bytes, &written);
  if (result != 1) {
    failBy(result);
    return;
  }
  records_.push_back({sentTotal_ + output().size(), bytes});
}

void TlsSession::setSuites(const char* names) {
  (void)libssl().SSL_set_ciphersuites(ssl_, names);
}

void TlsSession::requestKeyUpdate() {
  (void)libssl().SSL_key_update(ssl_, kKeyUpdateRequested);
}

void TlsSession::close() {
  if (state_ == State::kOpen) {
    libssl().ERR_clear_error();
    (void)libssl().SSL_shutdown(
        ssl_); // its result says whether the far end has
  }
}

std::array<std::byte, 32> TlsSession::exportKey(
    std::string_view label,
    std::string_view context) const {
  std::array<std::byte, 32> key{};
  const int result = libssl().SSL_export_keying_material(
      ssl_,
      reinterpret_cast<unsigned char*>(key.data()),
      key.size(),
      label.data(),
      label.size(),
      reinterpret_cast<const unsigned char*>(context.data()),
      context.size(),
      /*use_context=*/1);
  if (result != 1) { // a key of zeros would be no secret
    throw StatusError(
        Status(StatusCode::kInternal, "TLS could not derive a key"));
  }
  return key;
}

std::string TlsSession::cipher() const {
  const void* const suite = libssl().SSL_get_current_cipher(ssl_);
  return suite != nullptr ? libssl().SSL_CIPHER_get_name(suite) : "";
}

} // namespace resilient
