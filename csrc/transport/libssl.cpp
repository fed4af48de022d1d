#include "transport/libssl.h"

#include <dlfcn.h>
#ifdef __aarch64__
#include <sys/auxv.h>
#endif

namespace resilient {
namespace {

// The constants of OpenSSL's headers that are used here; the same from 1.1.1
// on. They are part of its binary interface.
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlGroups = 92,
              kCtrlMinVersion = 123, kCtrlMaxVersion = 124;
constexpr long kTls13 = 0x0304;
constexpr long kCacheOff = 0;
constexpr long kModeReleaseBuffers = 0x10; // an idle session keeps none
constexpr uint64_t kOptionNoTicket = 1u << 14;
constexpr uint64_t kOptionMiddleboxCompat = 1u << 20;
constexpr uint64_t kOptionPreferChaCha = 1u << 21; // if the client does
constexpr uint64_t kOptionServerPreference = 1u << 22;
constexpr uint64_t kInitNoAtexit = 0x80000;
constexpr unsigned long kVersion111 = 0x10101000;

constexpr const char* kAesFirst =
    "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kChaChaFirst =
    "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";

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

} // namespace

// NOLINTBEGIN(bugprone-macro-parentheses): a name, not an expression
Libssl::Libssl() {
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
// NOLINTEND(bugprone-macro-parentheses)

const Libssl& libssl() {
  static const Libssl loaded;
  return loaded;
}

const unsigned char* preferredSuite() {
  static constexpr unsigned char kAes[] = {0x13, 0x01};
  static constexpr unsigned char kChaCha[] = {0x13, 0x03};
  return hasAes() ? kAes : kChaCha;
}

void* newTlsContext(bool isClient) {
  const Libssl& l = libssl();
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
      context, kOptionNoTicket | kOptionServerPreference | kOptionPreferChaCha);
  l.SSL_CTX_clear_options(context, kOptionMiddleboxCompat);
  return context;
}

} // namespace resilient
