#include "transport/packet_seal.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

const std::string kI(16, 'i'), kA(16, 'a');

// False, with the reason printed, where there is no libcrypto.
bool available() {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return false;
  }
  return true;
}

std::unique_ptr<PacketSeal> sealOf(const SealKey& key) {
  std::string why;
  auto seal = PacketSeal::make(key, why);
  CHECK(seal != nullptr);
  return seal;
}

std::vector<std::byte> content(size_t n) {
  Prng prng(n);
  std::vector<std::byte> bytes(n);
  for (auto& b : bytes) {
    b = static_cast<std::byte>(prng.next());
  }
  return bytes;
}

std::vector<std::byte>
sealed(PacketSeal& seal, uint64_t number, const std::vector<std::byte>& what) {
  std::vector<std::byte> datagram(what.size() + kSealOverheadBytes);
  CHECK_EQ(seal.seal(number, what, datagram.data()), datagram.size());
  return datagram;
}

bool opens(PacketSeal& seal, std::span<const std::byte> datagram) {
  uint64_t number = 0;
  std::vector<std::byte> out(datagram.size() + 1);
  std::span<const std::byte> packet;
  return seal.open(datagram, number, out.data(), packet);
}

TEST(packet_seal_keys_differ) {
  const SealKey key = deriveSealKey("secret", kI, kA, true);
  CHECK(key == deriveSealKey("secret", kI, kA, true));
  CHECK(key != deriveSealKey("secret", kI, kA, false));
  CHECK(key != deriveSealKey("Secret", kI, kA, true));
  CHECK(key != deriveSealKey("", kI, kA, true));
  CHECK(key != deriveSealKey("secret", kA, kI, true));
  CHECK(key != deriveSealKey("secret", std::string(16, 'j'), kA, true));
  CHECK(key != deriveSealKey("secret", kI, std::string(16, 'b'), true));
}

TEST(packet_seal_opens_with_its_key) {
  if (!available()) {
    return;
  }
  const auto ours = sealOf(deriveSealKey("s", kI, kA, true));
  const auto same = sealOf(deriveSealKey("s", kI, kA, true));
  const auto otherDirection = sealOf(deriveSealKey("s", kI, kA, false));
  const auto otherSecret = sealOf(deriveSealKey("t", kI, kA, true));
  const auto otherPath =
      sealOf(deriveSealKey("s", std::string(16, 'j'), kA, true));
  for (const size_t n : {1u, 2u, 15u, 16u, 17u, 92u, 1420u, 9228u}) {
    for (const uint64_t number :
         {uint64_t(1), uint64_t(77), uint64_t(1) << 32, UINT64_MAX}) {
      const auto what = content(n);
      const auto datagram = sealed(*ours, number, what);
      // Nothing of it can be read.
      CHECK(
          n < 16 ||
          std::memcmp(datagram.data() + kDatagramHeaderBytes, what.data(), n) !=
              0);
      for (PacketSeal* opening : {same.get(), ours.get()}) {
        uint64_t found = 0;
        std::vector<std::byte> out(datagram.size());
        std::span<const std::byte> packet;
        CHECK(opening->open(datagram, found, out.data(), packet));
        CHECK_EQ(found, number);
        CHECK(std::vector(packet.begin(), packet.end()) == what);
        CHECK(
            packet.data() >= out.data() &&
            packet.data() + packet.size() <= out.data() + out.size());
      }
      CHECK(!opens(*otherDirection, datagram));
      CHECK(!opens(*otherSecret, datagram));
      CHECK(!opens(*otherPath, datagram));
    }
  }
  // The same content under two numbers is not the same to whoever listens.
  const auto what = content(64);
  const auto first = sealed(*ours, 1, what), second = sealed(*ours, 2, what);
  CHECK(
      std::memcmp(
          first.data() + kDatagramHeaderBytes,
          second.data() + kDatagramHeaderBytes,
          64) != 0);
}

TEST(packet_seal_refuses_what_was_changed) {
  if (!available()) {
    return;
  }
  const auto seal = sealOf(deriveSealKey("s", kI, kA, true));
  const auto datagram = sealed(*seal, 300, content(100));
  // Any bit: of the magic, the number, the content, the seal.
  for (size_t bit = 0; bit < 8 * datagram.size(); ++bit) {
    auto bad = datagram;
    bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    CHECK(!opens(*seal, bad));
  }
  for (size_t n = 0; n < datagram.size(); ++n) {
    CHECK(!opens(*seal, std::span(datagram).first(n)));
    CHECK(!opens(*seal, std::span(datagram).last(n)));
  }
  auto longer = datagram;
  longer.push_back(std::byte(0));
  CHECK(!opens(*seal, longer));
  // The number of another datagram of the same path.
  auto other = datagram;
  const uint64_t number = 301;
  std::memcpy(other.data() + 4, &number, sizeof(number));
  CHECK(!opens(*seal, other));
  // The seal of another one.
  auto mixed = datagram;
  const auto second = sealed(*seal, 301, content(100));
  std::copy(second.end() - kSealBytes, second.end(), mixed.end() - kSealBytes);
  CHECK(!opens(*seal, mixed));
  // A failure spoils nothing for the next one.
  CHECK(opens(*seal, datagram));
  CHECK(opens(*seal, second));
}

TEST(packet_seal_refuses_random_bytes) {
  if (!available()) {
    return;
  }
  const auto seal = sealOf(deriveSealKey("s", kI, kA, true));
  const auto good = sealed(*seal, 1, content(64));
  forSeeds(2000, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    std::vector<std::byte> bytes(prng.below(200));
    for (auto& b : bytes) {
      b = static_cast<std::byte>(prng.next());
    }
    const size_t n = std::min<size_t>(bytes.size(), 4); // the right magic
    std::copy_n(good.begin(), n, bytes.begin());
    CHECK(!opens(*seal, bytes));
  });
}

} // namespace
} // namespace resilient::test
