#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace resilient {

using Digest = std::array<uint8_t, 32>;

// SHA-256 (FIPS 180-4), fed in pieces. Used a few times per connection, never
// on the data path, hence plain portable code.
class Sha256 {
 public:
  static constexpr size_t kBlockBytes = 64;

  Sha256& update(const void* data, size_t bytes);
  Sha256& update(std::string_view text) {
    return update(text.data(), text.size());
  }
  // Ends the computation; the object must not be used afterwards.
  Digest finish();

  static Digest of(const void* data, size_t bytes) {
    return Sha256().update(data, bytes).finish();
  }

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {
      0x6a09e667,
      0xbb67ae85,
      0x3c6ef372,
      0xa54ff53a,
      0x510e527f,
      0x9b05688c,
      0x1f83d9ab,
      0x5be0cd19};
  std::array<uint8_t, kBlockBytes> block_{};
  size_t filled_ = 0; // of block_, always < kBlockBytes between calls
  uint64_t total_ = 0; // bytes
};

// HMAC-SHA256 (RFC 2104), fed in pieces.
//
// The key may have any length. finish() may be called once.
class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  HmacSha256& update(const void* data, size_t bytes) {
    inner_.update(data, bytes);
    return *this;
  }
  HmacSha256& update(std::string_view text) {
    return update(text.data(), text.size());
  }
  Digest finish();

 private:
  Sha256 inner_, outer_;
};

// HKDF with SHA-256 (RFC 5869), one block of output: a key for one purpose,
// named by `info`, from a secret of any length. Nothing about `secret` or about
// another key follows from it.
Digest
hkdf(std::string_view salt, std::string_view secret, std::string_view info);

// Takes the same time wherever the first difference is: a stranger cannot find
// a proof byte by byte. Compare lengths before: they are no secret.
bool equalConstantTime(const void* a, const void* b, size_t bytes);

} // namespace resilient
