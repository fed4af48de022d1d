#include "transport/packet_seal.h"

#include <algorithm>
#include <array>
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

// A packet in parts, some of them empty, is the same as in one piece.
TEST(packet_seal_joins_parts) {
  if (!available()) {
    return;
  }
  const auto seal = sealOf(deriveSealKey("s", kI, kA, true));
  const auto what = content(1420);
  const auto whole = sealed(*seal, 7, what);
  const auto bytes = std::span<const std::byte>(what);
  for (const size_t first : {0u, 16u, 44u, 1419u, 1420u}) {
    const std::array parts{
        partOf({}), partOf(bytes.first(first)), partOf(bytes.subspan(first))};
    std::vector<std::byte> datagram(whole.size());
    CHECK_EQ(seal->seal(7, parts, datagram.data()), whole.size());
    CHECK(datagram == whole);
  }
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

// --- phases of the key

constexpr TimePoint kBegin{};
constexpr Nanos kHour = std::chrono::hours(1);

struct Ends {
  std::unique_ptr<PacketSealer> sealer;
  std::unique_ptr<PacketOpener> opener;
  uint64_t last = 0;

  explicit Ends(SealLimits limits) {
    const SealKey key = deriveSealKey("s", kI, kA, true);
    std::string why;
    sealer = PacketSealer::make(key, limits, kBegin, why);
    opener = PacketOpener::make(key, why);
    CHECK(sealer && opener);
  }
  std::vector<std::byte> seal(TimePoint now = kBegin) {
    const auto what = content(40 + ++last % 7);
    std::vector<std::byte> datagram(what.size() + kSealOverheadBytes);
    sealer->seal(last, what, datagram.data(), now);
    return datagram;
  }
  // Its number, or 0.
  uint64_t open(std::span<const std::byte> datagram, TimePoint now = kBegin)
      const {
    uint64_t number = 0;
    std::vector<std::byte> out(datagram.size());
    std::span<const std::byte> packet;
    if (!opener->open(datagram, number, out.data(), packet, now)) {
      return 0;
    }
    const auto what = content(40 + number % 7);
    CHECK(std::equal(packet.begin(), packet.end(), what.begin(), what.end()));
    return number;
  }
};

TEST(packet_phases_change_by_packets_and_by_time) {
  if (!available()) {
    return;
  }
  Ends ends({.packets = 10, .age = kHour});
  for (uint64_t n = 1; n <= 25; ++n) {
    CHECK_EQ(ends.open(ends.seal()), n);
    CHECK_EQ(ends.sealer->phase(), (n - 1) / 10);
    CHECK_EQ(ends.opener->phase(), ends.sealer->phase());
  }
  ends.seal(kBegin + kHour - Nanos(1));
  CHECK_EQ(ends.sealer->phase(), 2u);
  const auto first = ends.seal(kBegin + kHour);
  CHECK_EQ(ends.sealer->phase(), 3u);
  CHECK_EQ(ends.open(first), ends.last);
  // One phase at a time, however long nothing was sent.
  CHECK_EQ(ends.open(ends.seal(kBegin + 9 * kHour)), ends.last);
  CHECK_EQ(ends.sealer->phase(), 4u);
}

// The key of a phase opens nothing of another one, and the phase that a packet
// names cannot be changed.
TEST(packet_phases_have_keys_of_their_own) {
  if (!available()) {
    return;
  }
  const SealKey key = deriveSealKey("s", kI, kA, true);
  CHECK(nextSealKey(key) != key);
  CHECK(nextSealKey(nextSealKey(key)) != nextSealKey(key));
  Ends ends({.packets = 1, .age = kHour});
  const auto zero = ends.seal(), one = ends.seal();
  const auto first = sealOf(key), second = sealOf(nextSealKey(key));
  CHECK(opens(*first, zero));
  CHECK(!opens(*first, one));
  CHECK(opens(*second, one));
  CHECK(!opens(*second, zero));
  for (int phase = 0; phase < 256; ++phase) {
    auto moved = zero;
    moved[3] = static_cast<std::byte>(phase);
    CHECK_EQ(ends.open(moved), phase == 0 ? 1u : 0u);
  }
  // Forgeries have moved nothing on.
  CHECK_EQ(ends.opener->phase(), 0u);
  CHECK_EQ(ends.open(one), 2u);
}

TEST(packet_phases_forget_old_keys_after_a_while) {
  if (!available()) {
    return;
  }
  Ends ends({.packets = 2, .age = kHour});
  std::vector<std::vector<std::byte>> sent;
  for (int i = 0; i < 12; ++i) {
    sent.push_back(ends.seal());
  }
  CHECK_EQ(ends.open(sent[0]), 1u);
  CHECK_EQ(ends.open(sent[2]), 3u);
  // Late, from the phase before.
  const TimePoint end = kBegin + PacketOpener::kPreviousFor;
  CHECK_EQ(ends.open(sent[1], end - Nanos(1)), 2u);
  CHECK_EQ(ends.open(sent[1], end), 0u);
  // A whole phase is lost; the one before the new one still counts.
  CHECK_EQ(ends.open(sent[7]), 8u);
  CHECK_EQ(ends.opener->phase(), 3u);
  CHECK_EQ(ends.open(sent[5]), 6u);
  CHECK_EQ(ends.open(sent[3]), 0u);
  // More are lost than are looked ahead.
  Ends behind({.packets = 2, .age = kHour});
  CHECK_EQ(behind.open(sent[6]), 0u);
  CHECK_EQ(behind.open(sent[4]), 5u);
  CHECK_EQ(behind.open(sent[6]), 7u);
}

// A network that loses, repeats and reorders, over many phases.
TEST(packet_phases_are_invisible_to_the_stream) {
  if (!available()) {
    return;
  }
  forSeeds(200, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    const uint64_t perKey = 20 + prng.below(60);
    Ends ends({.packets = perKey, .age = kHour});
    // Late by less than the packets of one phase.
    std::vector<std::vector<std::byte>> late;
    uint64_t delivered = 0, largest = 0;
    const auto deliver = [&](const std::vector<std::byte>& datagram) {
      uint64_t number = 0;
      std::memcpy(&number, datagram.data() + 4, sizeof(number));
      largest = std::max(largest, number);
      CHECK_EQ(ends.open(datagram), number);
      if (prng.below(8) == 0) {
        CHECK_EQ(ends.open(datagram), number); // a copy is for the window
      }
      ++delivered;
    };
    for (int i = 0; i < 1500; ++i) {
      auto datagram = ends.seal();
      if (prng.below(10) == 0) {
        continue; // lost
      }
      late.push_back(std::move(datagram));
      if (late.size() > 10) {
        const size_t at = prng.below(late.size());
        deliver(late[at]);
        late.erase(late.begin() + static_cast<ptrdiff_t>(at));
        // None waits for longer than a phase.
        uint64_t number = 0;
        std::memcpy(&number, late.front().data() + 4, sizeof(number));
        if (ends.last - number > perKey / 2) {
          deliver(late.front());
          late.erase(late.begin());
        }
      }
    }
    CHECK(delivered > 1000);
    CHECK_EQ(ends.opener->phase(), (largest - 1) / perKey);
    CHECK(ends.opener->phase() > 15);
  });
}

} // namespace
} // namespace resilient::test
