#include "transport/tls_session.h"

#include <dlfcn.h>
#ifdef __aarch64__
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace resilient {
namespace {

// The constants of OpenSSL's headers that are used here; the same from 1.1.1
// on. They are part of its binary interface.
constexpr int kErrorSsl = 1, kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlGroups = 92,
              kCtrlMinVersion = 123, kCtrlMaxVersion = 124;
constexpr long kTls13 = 0x0304;
constexpr long kCacheOff = 0;
constexpr long kModeReleaseBuffers = 0x10; // an idle session keeps none
constexpr uint64_t kOptionNoTicket = 1u << 14;
constexpr uint64_t kOptionMiddleboxCompat = 1u << 20;
constexpr uint64_t kOptionPreferChaCha = 1u << 21; // if the client does
constexpr uint64_t kOptionServerPreference = 1u << 22;
constexpr int kVerifyPeer = 1;
constexpr int kBioFlagsAll = 0x0f, kBioRetryRead = 0x01 | 0x08;
constexpr int kBioFlush = 11;
constexpr int kKeyUpdateNotRequested = 0, kKeyUpdateRequested = 1;
constexpr unsigned long kReasonMask = 0xfff;
constexpr unsigned long kReasonAlertHandshakeFailure = 1000 + 40;
constexpr uint64_t kInitNoAtexit = 0x80000;
constexpr unsigned long kVersion111 = 0x10101000;

// The number of the suite on the wire. Both are for SHA-256, as is the key.
constexpr unsigned char kAes128Gcm[2] = {0x13, 0x01};
constexpr const char* kAesFirst =
    "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kChaChaFirst =
    "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";

// The first byte of every record is one of these: change of cipher, alert,
// handshake, data.
constexpr uint8_t kFirstRecordType = 20, kLastRecordType = 23;

// The functions of libssl and libcrypto that are used, with their types; every
// pointer to one of OpenSSL's structures is a void*.
// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are parts of types
#define RESILIENT_SSL_FUNCTIONS(X)                                           \
  X(unsigned long, OpenSSL_version_num, ())                                  \
  X(int, OPENSSL_init_crypto, (uint64_t, const void*))                       \
  X(const char*, OpenSSL_version, (int))                                     \
  X(const void*, TLS_client_method, ())                                      \
  X(const void*, TLS_server_method, ())                                      \
  X(void*, SSL_CTX_new, (const void*))                                       \
  X(long, SSL_CTX_ctrl, (void*, int, long, void*))                           \
  X(uint64_t, SSL_CTX_set_options, (void*, uint64_t))                        \
  X(uint64_t, SSL_CTX_clear_options, (void*, uint64_t))                      \
  X(int, SSL_CTX_set_ciphersuites, (void*, const char*))                     \
  X(int, SSL_CTX_set_num_tickets, (void*, size_t))                           \
  X(void, SSL_CTX_set_verify, (void*, int, void*))                           \
  X(void,                                                                    \
    SSL_CTX_set_psk_use_session_callback,                                    \
    (void*,                                                                  \
     int (*)(void*, const void*, const unsigned char**, size_t*, void**)))   \
  X(void,                                                                    \
    SSL_CTX_set_psk_find_session_callback,                                   \
    (void*, int (*)(void*, const unsigned char*, size_t, void**)))           \
  X(void*, SSL_new, (void*))                                                 \
  X(void, SSL_free, (void*))                                                 \
  X(int, SSL_set_ex_data, (void*, int, void*))                               \
  X(void*, SSL_get_ex_data, (const void*, int))                              \
  X(void, SSL_set_bio, (void*, void*, void*))                                \
  X(void, SSL_set_connect_state, (void*))                                    \
  X(void, SSL_set_accept_state, (void*))                                     \
  X(int, SSL_do_handshake, (void*))                                          \
  X(int, SSL_read_ex, (void*, void*, size_t, size_t*))                       \
  X(int, SSL_write_ex, (void*, const void*, size_t, size_t*))                \
  X(int, SSL_get_error, (const void*, int))                                  \
  X(int, SSL_shutdown, (void*))                                              \
  X(int, SSL_version, (const void*))                                         \
  X(int, SSL_session_reused, (const void*))                                  \
  X(int, SSL_key_update, (void*, int))                                       \
  X(int,                                                                     \
    SSL_export_keying_material,                                              \
    (void*,                                                                  \
     unsigned char*,                                                         \
     size_t,                                                                 \
     const char*,                                                            \
     size_t,                                                                 \
     const unsigned char*,                                                   \
     size_t,                                                                 \
     int))                                                                   \
  X(const void*, SSL_get_current_cipher, (const void*))                      \
  X(const char*, SSL_CIPHER_get_name, (const void*))                         \
  X(const void*, SSL_CIPHER_find, (void*, const unsigned char*))             \
  X(void*, SSL_SESSION_new, ())                                              \
  X(void, SSL_SESSION_free, (void*))                                         \
  X(int, SSL_SESSION_set1_master_key, (void*, const unsigned char*, size_t)) \
  X(int, SSL_SESSION_set_cipher, (void*, const void*))                       \
  X(int, SSL_SESSION_set_protocol_version, (void*, int))                     \
  X(void*, BIO_meth_new, (int, const char*))                                 \
  X(int, BIO_meth_set_write, (void*, int (*)(void*, const char*, int)))      \
  X(int, BIO_meth_set_read, (void*, int (*)(void*, char*, int)))             \
  X(int, BIO_meth_set_ctrl, (void*, long (*)(void*, int, long, void*)))      \
  X(void*, BIO_new, (const void*))                                           \
  X(void, BIO_set_data, (void*, void*))                                      \
  X(void*, BIO_get_data, (void*))                                            \
  X(void, BIO_set_init, (void*, int))                                        \
  X(void, BIO_set_flags, (void*, int))                                       \
  X(void, BIO_clear_flags, (void*, int))                                     \
  X(unsigned long, ERR_get_error, ())                                        \
  X(void, ERR_clear_error, ())                                               \
  X(const char*, ERR_reason_error_string, (unsigned long))

struct Library {
#define X(result, name, arguments) result(*name) arguments = nullptr; // NOLINT
  RESILIENT_SSL_FUNCTIONS(X)
#undef X
  std::string missing;

  Library() {
    void* handle = nullptr;
    for (const char* name : {"libssl.so.3", "libssl.so.1.1", "libssl.so"}) {
      handle = handle != nullptr ? handle : ::dlopen(name, RTLD_NOW);
    }
    if (handle == nullptr) {
      missing = "OpenSSL's libssl was not found";
      return;
    }
    // The handle also leads to the libcrypto that this libssl was linked to.
#define X(result, name, arguments)                                         \
  name = reinterpret_cast<decltype(name)>(::dlsym(handle, #name));         \
  if (name == nullptr && missing.empty()) {                                \
    missing =                                                              \
        "libssl has no " #name ": OpenSSL 1.1.1 or a later one is needed"; \
  }
    RESILIENT_SSL_FUNCTIONS(X)
#undef X
    // OpenSSL must not free its state when the process ends: the loop may still
    // use it. (Who has loaded it before us may have decided otherwise.)
    if (missing.empty()) {
      OPENSSL_init_crypto(kInitNoAtexit, nullptr);
    }
    if (missing.empty() && OpenSSL_version_num() < kVersion111) {
      missing = std::string(OpenSSL_version(0)) +
          " is too old: 1.1.1 or a "
          "later one is needed";
    }
  }
};
// NOLINTEND(bugprone-macro-parentheses)

const Library& lib() {
  static const Library loaded;
  return loaded;
}

// Whether the processor has instructions for AES; without them ChaCha20 is
// several times as fast, and does not tell the key by its timing.
bool hasAes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") != 0 &&
      __builtin_cpu_supports("pclmul") != 0;
#elif defined(__aarch64__)
  constexpr unsigned long kAes = 1u << 3, kPmull = 1u << 4; // HWCAP_*
  const unsigned long has = ::getauxval(AT_HWCAP);
  return (has & kAes) != 0 && (has & kPmull) != 0;
#else
  return false;
#endif
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
    return *static_cast<TlsSession*>(lib().SSL_get_ex_data(ssl, 0));
  }
  static TlsSession& ofBio(void* bio) {
    return *static_cast<TlsSession*>(lib().BIO_get_data(bio));
  }

  // Puts the key into the form of a session, which is how OpenSSL takes
  // external keys. Its suite only tells the hash that the key is for.
  static void* sessionOf(void* ssl, const TlsKeys& keys) {
    void* const session = lib().SSL_SESSION_new();
    if (session == nullptr ||
        lib().SSL_SESSION_set1_master_key(
            session, keys.key.data(), keys.key.size()) != 1 ||
        lib().SSL_SESSION_set_cipher(
            session, lib().SSL_CIPHER_find(ssl, kAes128Gcm)) != 1 ||
        lib().SSL_SESSION_set_protocol_version(session, kTls13) != 1) {
      lib().SSL_SESSION_free(session);
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
    *session = sessionOf(ssl, self.keys_);
    *name = self.name_.data();
    *nameBytes = self.name_.size();
    return *session != nullptr ? 1 : 0;
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
    const auto keys = self.find_({name, nameBytes});
    if (!keys) {
      self.unknownSecret_ = true;
      return 1;
    }
    self.named_ = true;
    *session = sessionOf(ssl, *keys);
    return *session != nullptr ? 1 : 0;
  }

  static int write(void* bio, const char* data, int bytes) {
    TlsSession& self = ofBio(bio);
    lib().BIO_clear_flags(bio, kBioFlagsAll);
    const auto* const from = reinterpret_cast<const std::byte*>(data);
    self.out_.insert(self.out_.end(), from, from + bytes);
    return bytes;
  }

  static int read(void* bio, char* to, int bytes) {
    TlsSession& self = ofBio(bio);
    lib().BIO_clear_flags(bio, kBioFlagsAll);
    const size_t take = std::min(
        static_cast<size_t>(std::max(bytes, 0)), self.inBytes_ - self.inUsed_);
    if (take == 0) {
      lib().BIO_set_flags(bio, kBioRetryRead);
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
    const Library& l = lib();
    void* const context =
        l.SSL_CTX_new(isClient ? l.TLS_client_method() : l.TLS_server_method());
    if (context == nullptr) {
      return nullptr;
    }
    char groups[] = "X25519";
    const bool done =
        l.SSL_CTX_ctrl(context, kCtrlMinVersion, kTls13, nullptr) == 1 &&
        l.SSL_CTX_ctrl(context, kCtrlMaxVersion, kTls13, nullptr) == 1 &&
        l.SSL_CTX_ctrl(context, kCtrlGroups, 0, groups) == 1 &&
        l.SSL_CTX_set_ciphersuites(
            context, hasAes() ? kAesFirst : kChaChaFirst) == 1 &&
        l.SSL_CTX_set_num_tickets(context, 0) == 1;
    if (!done) {
      return nullptr;
    }
    l.SSL_CTX_ctrl(context, kCtrlSessionCache, kCacheOff, nullptr);
    l.SSL_CTX_ctrl(context, kCtrlMode, kModeReleaseBuffers, nullptr);
    l.SSL_CTX_set_options(
        context,
        kOptionNoTicket | kOptionServerPreference | kOptionPreferChaCha);
    l.SSL_CTX_clear_options(context, kOptionMiddleboxCompat);
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
    void* const method = lib().BIO_meth_new(kTypeSourceSink, "resilient");
    if (method != nullptr) {
      lib().BIO_meth_set_write(method, write);
      lib().BIO_meth_set_read(method, read);
      lib().BIO_meth_set_ctrl(method, control);
    }
    return method;
  }

  static void* newBio(TlsSession* self) {
    static void* const method = makeBioMethod();
    void* const bio = method != nullptr ? lib().BIO_new(method) : nullptr;
    if (bio != nullptr) {
      lib().BIO_set_data(bio, self);
      lib().BIO_set_init(bio, 1);
    }
    return bio;
  }
};

bool TlsSession::available(std::string& why) {
  why = lib().missing;
  if (why.empty() &&
      (Callbacks::context(true) == nullptr ||
       Callbacks::context(false) == nullptr)) {
    why = library() + " has no TLS 1.3 with X25519";
  }
  return why.empty();
}

std::string TlsSession::library() {
  return lib().missing.empty() ? lib().OpenSSL_version(0) : "";
}

TlsSession::TlsSession(bool isClient) : isClient_(isClient) {
  ssl_ = lib().SSL_new(Callbacks::context(isClient));
  void* const bio = ssl_ != nullptr ? Callbacks::newBio(this) : nullptr;
  if (bio == nullptr) {
    fail(StatusCode::kInternal, "OpenSSL has no memory");
    return;
  }
  lib().SSL_set_ex_data(ssl_, 0, this);
  lib().SSL_set_bio(ssl_, bio, bio); // which it owns now
  if (isClient) {
    lib().SSL_set_connect_state(ssl_);
  } else {
    lib().SSL_set_accept_state(ssl_);
  }
}

TlsSession::~TlsSession() {
  if (ssl_ != nullptr) {
    lib().SSL_free(ssl_);
  }
}

std::unique_ptr<TlsSession> TlsSession::client(
    const TlsKeys& keys,
    const TlsNonce& nonce) {
  std::unique_ptr<TlsSession> made(new TlsSession(/*isClient=*/true));
  made->keys_ = keys;
  made->name_ = tlsNameOf(keys, nonce);
  made->proceed();
  return made;
}

std::unique_ptr<TlsSession> TlsSession::server(FindKeys find) {
  std::unique_ptr<TlsSession> made(new TlsSession(/*isClient=*/false));
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
  const int error = lib().SSL_get_error(ssl_, result);
  if (error == kErrorWantRead) {
    return;
  }
  if (error == kErrorZeroReturn) {
    state_ = State::kEnded;
    return;
  }
  const unsigned long first = error == kErrorSsl ? lib().ERR_get_error() : 0;
  lib().ERR_clear_error(); // others in this thread use OpenSSL, too
  if (handshaking() &&
      (unknownSecret_ ||
       (isClient_ && (first & kReasonMask) == kReasonAlertHandshakeFailure))) {
    unknownSecret_ = true;
    fail(
        StatusCode::kProtocol,
        isClient_ ? "the far end does not know this job's secret"
                  : "the caller belongs to another job");
    return;
  }
  const char* const reason =
      first != 0 ? lib().ERR_reason_error_string(first) : nullptr;
  fail(
      StatusCode::kProtocol,
      std::string("TLS failed: ") +
          (reason != nullptr ? reason : "unknown reason"));
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
  lib().ERR_clear_error();
  const int result = lib().SSL_do_handshake(ssl_);
  if (result != 1) {
    failBy(result);
    return;
  }
  if (lib().SSL_session_reused(ssl_) != 1 ||
      lib().SSL_version(ssl_) != kTls13) {
    fail(StatusCode::kProtocol, "TLS has not used the job's secret");
    return;
  }
  keys_ = {};
  opened_ = true;
  state_ = State::kOpen;
}

size_t TlsSession::open(std::byte* to, size_t bytes) {
  if (state_ != State::kOpen || bytes == 0) {
    return 0;
  }
  if (output().size() > kOutputBytesMax) {
    fail(StatusCode::kProtocol, "the far end asks for new keys without end");
    return 0;
  }
  lib().ERR_clear_error();
  size_t read = 0;
  const int result = lib().SSL_read_ex(ssl_, to, bytes, &read);
  if (result != 1) {
    failBy(result);
    return 0;
  }
  return read;
}

size_t TlsSession::seal(std::span<const iovec> parts) {
  if (state_ != State::kOpen || !output().empty()) {
    return 0;
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
  lib().ERR_clear_error();
  if (++recordsOfKey_ > recordsPerKey_) {
    recordsOfKey_ = 1;
    if (const int result = lib().SSL_key_update(ssl_, kKeyUpdateNotRequested);
        result != 1) {
      failBy(result);
      return;
    }
  }
  size_t written = 0;
  const int result = lib().SSL_write_ex(ssl_, data, bytes, &written);
  if (result != 1) {
    failBy(result);
    return;
  }
  records_.push_back({sentTotal_ + output().size(), bytes});
}

void TlsSession::requestKeyUpdate() {
  (void)lib().SSL_key_update(ssl_, kKeyUpdateRequested);
}

void TlsSession::close() {
  if (state_ == State::kOpen) {
    lib().ERR_clear_error();
    (void)lib().SSL_shutdown(ssl_); // its result says whether the far end has
  }
}

std::array<std::byte, 32> TlsSession::exportKey(
    std::string_view label,
    std::string_view context) const {
  std::array<std::byte, 32> key{};
  const int result = lib().SSL_export_keying_material(
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
  const void* const suite = lib().SSL_get_current_cipher(ssl_);
  return suite != nullptr ? lib().SSL_CIPHER_get_name(suite) : "";
}

} // namespace resilient
