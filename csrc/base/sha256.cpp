#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace resilient {

namespace {

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube
// roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t loadBigEndian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 |
      uint32_t{p[3]};
}

} // namespace

void Sha256::compress(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) {
    w[i] = loadBigEndian(block + 4 * i);
  }
  for (size_t i = 16; i < 64; ++i) {
    uint32_t s0 =
        std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t s1 =
        std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    uint32_t choice = (e & f) ^ (~e & g);
    uint32_t t1 = h + s1 + choice + kRound[i] + w[i];
    uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    uint32_t t2 = s0 + majority;
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) {
    state_[i] += add[i];
  }
}

Sha256& Sha256::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  total_ += bytes;
  while (bytes > 0) {
    if (filled_ == 0 && bytes >= kBlockBytes) {
      compress(p);
      p += kBlockBytes;
      bytes -= kBlockBytes;
      continue;
    }
    size_t take = std::min(bytes, kBlockBytes - filled_);
    std::memcpy(block_.data() + filled_, p, take);
    filled_ += take;
    p += take;
    bytes -= take;
    if (filled_ == kBlockBytes) {
      compress(block_.data());
      filled_ = 0;
    }
  }
  return *this;
}

Digest Sha256::finish() {
  uint64_t bits = total_ * 8;
  std::array<uint8_t, kBlockBytes + 8> tail{};
  tail[0] = 0x80;
  // One 0x80, zeros up to 8 bytes before the end of a block, the length.
  size_t padding = 1 + (kBlockBytes * 2 - 1 - 8 - filled_) % kBlockBytes;
  for (size_t i = 0; i < 8; ++i) {
    tail[padding + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  }
  update(tail.data(), padding + 8);
  Digest digest;
  for (size_t i = 0; i < 32; ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

HmacSha256::HmacSha256(std::string_view key) {
  std::array<uint8_t, Sha256::kBlockBytes> block{};
  if (key.size() > block.size()) {
    Digest digest = Sha256::of(key.data(), key.size());
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  for (uint8_t& b : block) {
    b ^= 0x36;
  }
  inner_.update(block.data(), block.size());
  for (uint8_t& b : block) {
    b ^= 0x36 ^ 0x5c;
  }
  outer_.update(block.data(), block.size());
}

Digest HmacSha256::finish() {
  Digest digest = inner_.finish();
  return outer_.update(digest.data(), digest.size()).finish();
}

Digest
hkdf(std::string_view salt, std::string_view secret, std::string_view info) {
  const Digest extracted = HmacSha256(salt).update(secret).finish();
  const uint8_t first = 1; // the number of the block
  return HmacSha256({reinterpret_cast<const char*>(extracted.data()),
                     extracted.size()})
      .update(info)
      .update(&first, 1)
      .finish();
}

bool equalConstantTime(const void* a, const void* b, size_t bytes) {
  const auto* x = static_cast<const volatile uint8_t*>(a);
  const auto* y = static_cast<const volatile uint8_t*>(b);
  uint8_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) {
    difference = static_cast<uint8_t>(difference | (x[i] ^ y[i]));
  }
  return difference == 0;
}

} // namespace resilient
