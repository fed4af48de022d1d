#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/sha256.h"

namespace resilient {

// What TLS needs of one secret of the job: the pre-shared key (RFC 8446, 2.2)
// that both ends prove to know, and the names by which a client tells which
// secret it uses. docs/wire_handshake.md has the derivation, byte for byte.
//
// The key is bound to the version of the wire protocol: two versions refuse
// each other before they exchange a byte of it.
struct TlsKeys {
  Digest key{};
  Digest naming{}; // for tlsNameOf() only

  static TlsKeys of(const std::string& secret);
};

// The "identity" of a pre-shared key: a fresh nonce and a MAC over it. It is
// readable on the wire. Thus it must tell nothing about the secret, and two of
// them must not show that they are for one secret.
inline constexpr size_t kTlsNonceBytes = 16;
inline constexpr size_t kTlsNameBytes = 32;
using TlsNonce = std::array<uint8_t, kTlsNonceBytes>;
using TlsName = std::array<uint8_t, kTlsNameBytes>;

// The keys that a name stands for.
struct NamedKeys {
  TlsKeys keys;
  // No connection has used this name before, beyond doubt. Then what comes with
  // it cannot be a recording.
  bool isFirstUse = false;
};

TlsName tlsNameOf(const TlsKeys& keys, const TlsNonce& nonce);
// It costs one HMAC, and proves nothing: a name can be recorded and repeated.
bool isTlsNameOf(const TlsKeys& keys, std::span<const uint8_t> name);

} // namespace resilient
