#include "transport/key_exchange.h"

#include "transport/libcrypto.h"

namespace resilient {
namespace {

constexpr int kX25519 = 1034; // EVP_PKEY_X25519
constexpr size_t kAgreedBytes = 32;

// OpenSSL's EVP_PKEY interface, the same since 1.1.1.
struct Crypto {
  void (*freeKey)(void*) = nullptr;
  void* (*contextOfKind)(int, void*) = nullptr;
  void* (*contextOf)(void*, void*) = nullptr;
  void (*freeContext)(void*) = nullptr;
  int (*generateInit)(void*) = nullptr;
  int (*generate)(void*, void**) = nullptr;
  int (*publicKey)(const void*, unsigned char*, size_t*) = nullptr;
  void* (*keyOf)(int, void*, const unsigned char*, size_t) = nullptr;
  int (*deriveInit)(void*) = nullptr;
  int (*deriveWith)(void*, void*) = nullptr;
  int (*derive)(void*, unsigned char*, size_t*) = nullptr;
  Libcrypto libcrypto;

  Crypto() {
    libcrypto.find(freeKey, "EVP_PKEY_free");
    libcrypto.find(contextOfKind, "EVP_PKEY_CTX_new_id");
    libcrypto.find(contextOf, "EVP_PKEY_CTX_new");
    libcrypto.find(freeContext, "EVP_PKEY_CTX_free");
    libcrypto.find(generateInit, "EVP_PKEY_keygen_init");
    libcrypto.find(generate, "EVP_PKEY_keygen");
    libcrypto.find(publicKey, "EVP_PKEY_get_raw_public_key");
    libcrypto.find(keyOf, "EVP_PKEY_new_raw_public_key");
    libcrypto.find(deriveInit, "EVP_PKEY_derive_init");
    libcrypto.find(deriveWith, "EVP_PKEY_derive_set_peer");
    libcrypto.find(derive, "EVP_PKEY_derive");
  }
};

const Crypto& crypto() {
  static const Crypto loaded;
  return loaded;
}

} // namespace

std::unique_ptr<KeyExchange> KeyExchange::make(std::string& why) {
  const Crypto& c = crypto();
  why = c.libcrypto.missing();
  if (!why.empty()) {
    return nullptr;
  }
  std::unique_ptr<KeyExchange> made(new KeyExchange);
  void* const context = c.contextOfKind(kX25519, nullptr);
  size_t bytes = made->ours_.size();
  const bool done = context != nullptr && c.generateInit(context) == 1 &&
      c.generate(context, &made->pair_) == 1 &&
      c.publicKey(
          made->pair_,
          reinterpret_cast<unsigned char*>(made->ours_.data()),
          &bytes) == 1;
  c.freeContext(context);
  if (!done) {
    why = "libcrypto has no X25519";
    return nullptr;
  }
  return made;
}

KeyExchange::~KeyExchange() {
  if (pair_ != nullptr) {
    crypto().freeKey(pair_);
  }
}

std::optional<std::string> KeyExchange::agree(const PublicKey& theirs) const {
  const Crypto& c = crypto();
  void* const peer = c.keyOf(
      kX25519,
      nullptr,
      reinterpret_cast<const unsigned char*>(theirs.data()),
      theirs.size());
  void* const context = c.contextOf(pair_, nullptr);
  std::string agreed(kAgreedBytes, '\0');
  size_t bytes = agreed.size();
  const bool done = peer != nullptr && context != nullptr &&
      c.deriveInit(context) == 1 && c.deriveWith(context, peer) == 1 &&
      c.derive(
          context, reinterpret_cast<unsigned char*>(agreed.data()), &bytes) ==
          1 &&
      bytes == kAgreedBytes;
  c.freeContext(context);
  c.freeKey(peer);
  return done ? std::optional(agreed) : std::nullopt;
}

} // namespace resilient
