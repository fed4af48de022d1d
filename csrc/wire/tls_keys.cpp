#include "wire/tls_keys.h"

#include <algorithm>

#include "wire/hello.h"

namespace resilient {
namespace {

constexpr std::string_view kSalt = "torch_resilient tls";
constexpr std::string_view kKeyLabel = "pre-shared key";
constexpr std::string_view kNamingLabel = "pre-shared key name";

// The version behind the label, in little-endian order.
std::string labelOf(std::string_view label) {
  std::string text(label);
  text += static_cast<char>(kWireVersion & 0xff);
  text += static_cast<char>(kWireVersion >> 8);
  return text;
}

} // namespace

TlsKeys TlsKeys::of(const std::string& secret) {
  return {
      hkdf(kSalt, secret, labelOf(kKeyLabel)),
      hkdf(kSalt, secret, labelOf(kNamingLabel))};
}

TlsName tlsNameOf(const TlsKeys& keys, const TlsNonce& nonce) {
  const Digest mac =
      HmacSha256({reinterpret_cast<const char*>(keys.naming.data()),
                  keys.naming.size()})
          .update(nonce.data(), nonce.size())
          .finish();
  TlsName name;
  auto* const rest = std::copy(nonce.begin(), nonce.end(), name.begin());
  std::copy_n(mac.begin(), kTlsNameBytes - kTlsNonceBytes, rest);
  return name;
}

bool isTlsNameOf(const TlsKeys& keys, std::span<const uint8_t> name) {
  if (name.size() != kTlsNameBytes) {
    return false;
  }
  TlsNonce nonce;
  std::copy_n(name.begin(), nonce.size(), nonce.begin());
  const TlsName expected = tlsNameOf(keys, nonce);
  return equalConstantTime(expected.data(), name.data(), expected.size());
}

} // namespace resilient
