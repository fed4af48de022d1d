#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace resilient {

// One end of a Diffie-Hellman exchange (X25519, RFC 7748) with a key pair made
// for it: who records everything, and learns the job's secret later, does not
// get what the two ends agree on. It does not tell who the far end is; the
// secret has to go into what is derived.
//
// The arithmetic is that of OpenSSL (libcrypto.h).
class KeyExchange {
 public:
  using PublicKey = std::array<std::byte, 32>;

  // Null where there is no libcrypto; `why` then says so.
  static std::unique_ptr<KeyExchange> make(std::string& why);
  ~KeyExchange();
  KeyExchange(const KeyExchange&) = delete;
  KeyExchange& operator=(const KeyExchange&) = delete;

  const PublicKey& ours() const {
    return ours_;
  }
  // The 32 bytes that both ends get. Nothing for one of the few keys that give
  // everybody the same.
  std::optional<std::string> agree(const PublicKey& theirs) const;

 private:
  KeyExchange() = default;

  void* pair_ = nullptr; // EVP_PKEY
  PublicKey ours_{};
};

} // namespace resilient
