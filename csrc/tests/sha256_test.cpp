#include "base/sha256.h"

#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {
namespace {

std::string hex(const Digest& digest) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (uint8_t b : digest) {
    text += digits[b >> 4];
    text += digits[b & 15];
  }
  return text;
}

std::string sha(const std::string& text) {
  return hex(Sha256::of(text.data(), text.size()));
}

std::string hmac(const std::string& key, const std::string& text) {
  return hex(HmacSha256(key).update(text).finish());
}

// NIST, "Secure Hashing" example values for SHA-256.
TEST(sha256_gives_the_values_of_nist) {
  CHECK_EQ(
      sha(""),
      "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(
      sha("abc"),
      "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(
      sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(
      sha("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
          "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(
      sha(std::string(1000000, 'a')),
      "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, test cases 1 to 4, 6 and 7.
TEST(hmac_gives_the_values_of_rfc_4231) {
  CHECK_EQ(
      hmac(std::string(20, '\x0b'), "Hi There"),
      "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(
      hmac("Jefe", "what do ya want for nothing?"),
      "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(
      hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
      "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (int i = 1; i <= 25; ++i) {
    key += static_cast<char>(i);
  }
  CHECK_EQ(
      hmac(key, std::string(50, '\xcd')),
      "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(
      hmac(
          std::string(131, '\xaa'),
          "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(
      hmac(
          std::string(131, '\xaa'),
          "This is a test using a larger than block-size key and a larger "
          "than block-size data. The key needs to be hashed before being "
          "used by the HMAC algorithm."),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

// RFC 5869, appendix A: the first 32 bytes of the output of test cases 1 and 3.
TEST(hkdf_gives_the_values_of_rfc_5869) {
  std::string salt, info;
  for (int i = 0; i <= 0x0c; ++i) {
    salt += static_cast<char>(i);
  }
  for (int i = 0xf0; i <= 0xf9; ++i) {
    info += static_cast<char>(i);
  }
  const std::string secret(22, '\x0b');
  CHECK_EQ(
      hex(hkdf(salt, secret, info)),
      "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
  CHECK_EQ(
      hex(hkdf("", secret, "")),
      "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d");
}

TEST(pieces_do_not_change_the_digest) {
  Prng random(1);
  for (size_t bytes = 0; bytes < 300; ++bytes) {
    std::vector<uint8_t> data(bytes);
    for (uint8_t& b : data) {
      b = static_cast<uint8_t>(random.next());
    }
    Digest whole = Sha256::of(data.data(), bytes);
    Sha256 pieces;
    for (size_t at = 0; at < bytes;) {
      size_t n = 1 + random.below(std::min<size_t>(bytes - at, 90));
      pieces.update(data.data() + at, n);
      at += n;
    }
    CHECK_EQ(hex(pieces.finish()), hex(whole));
  }
}

TEST(constant_time_compare_sees_every_bit) {
  std::vector<uint8_t> a(32, 0x5a), b = a;
  CHECK(equalConstantTime(a.data(), b.data(), 32));
  for (size_t bit = 0; bit < 256; ++bit) {
    b[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(!equalConstantTime(a.data(), b.data(), 32));
    b[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  CHECK(equalConstantTime(a.data(), b.data(), 0));
}

// The first value is the published one of splitmix64 for this seed; the rest
// pins the stream, so that a printed seed replays for ever.
TEST(seeded_streams_are_pinned_and_even) {
  CHECK_EQ(mixBits(1234567), uint64_t{6457827717110365317u});
  Prng a(42), b(42), c(43);
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    uint64_t x = a.next();
    CHECK_EQ(x, b.next());
    CHECK(x != c.next());
    CHECK(seen.insert(x).second);
  }
  std::vector<int> counts(6);
  for (int i = 0; i < 60000; ++i) {
    ++counts[a.below(6)];
    double u = a.uniform();
    CHECK(u >= 0 && u < 1);
  }
  for (int n : counts) {
    CHECK(n > 9500 && n < 10500); // 5 standard deviations
  }
}

TEST(kernel_randomness_does_not_repeat) {
  std::set<std::array<uint8_t, 16>> seen;
  for (int i = 0; i < 1000; ++i) {
    std::array<uint8_t, 16> bytes;
    fillRandom(bytes.data(), bytes.size());
    CHECK(seen.insert(bytes).second);
  }
}

} // namespace
} // namespace resilient
