#include "loss/parity_code.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "base/random.h"
#include "loss/galois.h"
#include "loss/parity_code_internal.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using kernels::Kernel;

std::vector<Kernel> kernelsHere() {
  std::vector<Kernel> found;
  for (Kernel kernel : kernels::kKernels) {
    if (kernels::supported(kernel)) {
      found.push_back(kernel);
    }
  }
  return found;
}

// std::vector<bool> has no span.
struct Flags {
  explicit Flags(size_t count, bool value = true)
      : size(count), values(new bool[count + 1]) {
    std::fill_n(values.get(), count, value);
  }
  std::span<bool> all() {
    return {values.get(), size};
  }
  bool& operator[](size_t i) {
    return values[i];
  }
  size_t size;
  std::unique_ptr<bool[]> values;
};

// Symbols of one length at any address; a guard byte after each shows writes
// that go too far, as does the address sanitizer at the end.
class Symbols {
 public:
  Symbols(size_t count, size_t bytes, Prng* random) : bytes_(bytes) {
    for (size_t i = 0; i < count; ++i) {
      const size_t offset = random == nullptr ? 0 : random->below(64);
      std::vector<std::byte>& memory = memory_.emplace_back(offset + bytes + 1);
      if (random != nullptr) {
        for (std::byte& each : memory) {
          each = std::byte(random->next());
        }
      }
      memory.back() = kGuard;
      pointers_.push_back(memory.data() + offset);
    }
  }
  std::span<std::byte* const> all() const {
    return pointers_;
  }
  std::vector<const std::byte*> constant() const {
    return {pointers_.begin(), pointers_.end()};
  }
  bool equal(size_t i, const Symbols& other) const {
    return std::equal(pointers_[i], pointers_[i] + bytes_, other.pointers_[i]);
  }
  void checkGuards() const {
    for (size_t i = 0; i < pointers_.size(); ++i) {
      CHECK(pointers_[i][bytes_] == kGuard);
    }
  }

 private:
  static constexpr std::byte kGuard{0xa5};
  size_t bytes_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> pointers_;
};

BlockShape anyShape(Prng& random) {
  if (random.chance(0.5)) {
    const int data =
        1 + static_cast<int>(random.below(random.chance(0.1) ? 400 : 40));
    return {
        ParityKind::kXor,
        data,
        static_cast<int>(random.below(static_cast<uint64_t>(data) + 3))};
  }
  const int data =
      1 + static_cast<int>(random.below(random.chance(0.2) ? 255 : 30));
  const auto max = static_cast<uint64_t>(
      std::min(kMaxBlockSymbols - data, random.chance(0.2) ? 255 : 26));
  return {
      ParityKind::kReedSolomon, data, static_cast<int>(random.below(max + 1))};
}

size_t anyLength(Prng& random) {
  constexpr size_t kLengths[] = {
      0, 1, 31, 32, 33, 64, 127, 128, 256, 1376, 1408};
  return random.chance(0.5) ? kLengths[random.below(std::size(kLengths))]
                            : random.below(600);
}

// The definition, byte by byte.
void encodeByDefinition(
    const BlockShape& shape,
    const Symbols& data,
    const Symbols& parity,
    size_t bytes) {
  for (int j = 0; j < shape.parity; ++j) {
    for (size_t at = 0; at < bytes; ++at) {
      uint8_t sum = 0;
      for (int i = 0; i < shape.data; ++i) {
        const auto value = static_cast<uint8_t>(data.all()[i][at]);
        if (shape.kind == ParityKind::kReedSolomon) {
          sum ^= galois::multiply(
              galois::inverse(static_cast<uint8_t>((shape.data + j) ^ i)),
              value);
        } else if (i % shape.parity == j) {
          sum ^= value;
        }
      }
      parity.all()[j][at] = std::byte(sum);
    }
  }
}

TEST(parity_code_field_has_inverses) {
  std::set<int> powers;
  uint8_t power = 1;
  for (int i = 0; i < 255; ++i) {
    powers.insert(power);
    power = galois::multiply(power, 2);
  }
  CHECK_EQ(powers.size(), 255u); // so 2 generates all
  for (int a = 1; a < 256; ++a) {
    const auto number = static_cast<uint8_t>(a);
    CHECK_EQ(galois::multiply(number, galois::inverse(number)), 1);
  }
}

// What gf_gen_cauchy1_matrix(a, 9, 5) of Intel's ISA-L 2.30 gives below the
// unit matrix. tests/test_parity_codes.py compares whole blocks where it is
// installed.
TEST(parity_code_has_the_matrix_of_isal) {
  constexpr uint8_t kMatrix[4][5] = {
      {167, 71, 186, 122, 1},
      {122, 186, 71, 167, 142},
      {186, 122, 167, 71, 244},
      {173, 157, 221, 152, 61}};
  const BlockShape shape{ParityKind::kReedSolomon, 5, 4};
  for (int i = 0; i < 5; ++i) {
    Symbols data(5, 1, nullptr);
    Symbols parity(4, 1, nullptr);
    data.all()[i][0] = std::byte{1};
    encodeParity(shape, data.constant(), parity.all(), 1);
    for (int j = 0; j < 4; ++j) {
      CHECK_EQ(static_cast<uint8_t>(parity.all()[j][0]), kMatrix[j][i]);
    }
  }
}

TEST(parity_code_every_kernel_encodes_as_defined) {
  for (Kernel kernel : kernelsHere()) {
    forSeeds(60, [&](uint64_t seed) {
      Prng random(seed);
      const BlockShape shape = anyShape(random);
      const size_t bytes = std::min<size_t>(anyLength(random), 300);
      const Symbols data(shape.data, bytes, &random);
      const Symbols expected(shape.parity, bytes, nullptr);
      const Symbols parity(shape.parity, bytes, &random);
      encodeByDefinition(shape, data, expected, bytes);
      kernels::encodeParity(
          kernel, shape, data.constant(), parity.all(), bytes);
      for (int j = 0; j < shape.parity; ++j) {
        CHECK(parity.equal(j, expected));
      }
      parity.checkGuards();
    });
  }
}

// Every kernel, sums of all numbers of sources and destinations, odd lengths.
TEST(parity_code_kernels_agree) {
  for (Kernel kernel : kernelsHere()) {
    forSeeds(300, [&](uint64_t seed) {
      Prng random(seed);
      const size_t count = random.below(60);
      const size_t rows = 1 + random.below(30);
      const size_t bytes = anyLength(random);
      const bool accumulate = random.chance(0.5);
      const Symbols sources(count, bytes, &random);
      std::vector<uint8_t> factors(count * rows);
      for (uint8_t& factor : factors) {
        factor = static_cast<uint8_t>(random.next());
      }
      const uint64_t same = random.next();
      Prng first(same);
      Prng second(same);
      const Symbols a(rows, bytes, &first);
      const Symbols b(rows, bytes, &second);
      const auto run = [&](Kernel which, const Symbols& to) {
        kernels::multiplySum(
            which,
            factors.data(),
            sources.constant().data(),
            count,
            to.all().data(),
            rows,
            bytes,
            accumulate);
        to.checkGuards();
      };
      run(kernel, a);
      run(Kernel::kScalar, b);
      for (size_t r = 0; r < rows; ++r) {
        CHECK(a.equal(r, b));
      }
    });
  }
}

// Whatever is lost: what comes back is what was there, have[] says the truth,
// nothing else is written, and recoverable() knew it before.
TEST(parity_code_recovers_what_it_says) {
  for (Kernel kernel : kernelsHere()) {
    forSeeds(300, [&](uint64_t seed) {
      Prng random(seed);
      const BlockShape shape = anyShape(random);
      const size_t bytes = anyLength(random);
      const Symbols original(shape.data, bytes, &random);
      const Symbols parity(shape.parity, bytes, &random);
      kernels::encodeParity(
          kernel, shape, original.constant(), parity.all(), bytes);
      const Symbols arrived(shape.data, bytes, &random); // garbage where lost
      const double rate = random.chance(0.5)
          ? 0.1
          : shape.parity / static_cast<double>(shape.data + shape.parity);
      Flags have(shape.data);
      std::vector<const std::byte*> repair = parity.constant();
      Flags repairHere(shape.parity);
      std::vector<std::vector<std::byte>> before(shape.data);
      int missing = 0;
      for (int i = 0; i < shape.data; ++i) {
        have[i] = !random.chance(rate);
        missing += !have[i];
        if (have[i]) {
          std::copy_n(original.all()[i], bytes, arrived.all()[i]);
        }
        before[i].assign(arrived.all()[i], arrived.all()[i] + bytes);
      }
      for (int j = 0; j < shape.parity; ++j) {
        repairHere[j] = !random.chance(rate);
        if (!repairHere[j]) {
          repair[j] = nullptr;
        }
      }
      const bool all = recoverable(shape, have.all(), repairHere.all());
      const int filled = kernels::recoverData(
          kernel, shape, arrived.all(), have.all(), repair, bytes);
      CHECK_EQ(all, filled == missing);
      int still = 0;
      for (int i = 0; i < shape.data; ++i) {
        still += !have[i];
        if (have[i]) {
          CHECK(arrived.equal(i, original));
        } else {
          CHECK(
              std::equal(before[i].begin(), before[i].end(), arrived.all()[i]));
        }
      }
      CHECK_EQ(still, missing - filled);
      arrived.checkGuards();
    });
  }
}

// Systems too large to be solved in one stretch of memory.
TEST(parity_code_recovers_the_most_that_can_be_missing) {
  for (Kernel kernel : kernelsHere()) {
    for (const BlockShape& shape :
         {BlockShape{ParityKind::kReedSolomon, 128, 127},
          BlockShape{ParityKind::kReedSolomon, 127, 128},
          BlockShape{ParityKind::kReedSolomon, 20, 15}}) {
      constexpr size_t kBytes = 1400;
      Prng random(9);
      const auto data = static_cast<size_t>(shape.data);
      const auto lost = static_cast<size_t>(std::min(shape.data, shape.parity));
      const Symbols original(data, kBytes, &random);
      const Symbols parity(static_cast<size_t>(shape.parity), kBytes, &random);
      kernels::encodeParity(
          kernel, shape, original.constant(), parity.all(), kBytes);
      const Symbols arrived(data, kBytes, nullptr);
      Flags have(data);
      for (size_t i = 0; i < data; ++i) {
        have[i] = i >= lost;
        if (have[i]) {
          std::copy_n(original.all()[i], kBytes, arrived.all()[i]);
        }
      }
      CHECK_EQ(
          kernels::recoverData(
              kernel,
              shape,
              arrived.all(),
              have.all(),
              parity.constant(),
              kBytes),
          lost);
      for (size_t i = 0; i < data; ++i) {
        CHECK(have[i] && arrived.equal(i, original));
      }
      arrived.checkGuards();
    }
  }
}

// Paper: SMART §3.2: a burst of up to c symbols costs each sequence at most
// one. Reed-Solomon: any m losses at all.
TEST(parity_code_survives_bursts) {
  for (ParityKind kind : {ParityKind::kXor, ParityKind::kReedSolomon}) {
    const BlockShape shape{kind, 100, 10};
    Prng random(1);
    const Symbols data(100, 24, &random);
    const Symbols parity(10, 24, &random);
    encodeParity(shape, data.constant(), parity.all(), 24);
    const auto survives = [&](auto lost) {
      const Symbols arrived(100, 24, nullptr);
      Flags have(100);
      std::vector<const std::byte*> repair = parity.constant();
      for (int i = 0; i < 110; ++i) {
        if (i >= 100) {
          repair[i - 100] = lost(i) ? nullptr : repair[i - 100];
        } else if ((have[i] = !lost(i))) {
          std::copy_n(data.all()[i], 24, arrived.all()[i]);
        }
      }
      recoverData(shape, arrived.all(), have.all(), repair, 24);
      for (int i = 0; i < 100; ++i) {
        if (!have[i]) {
          return false;
        }
        CHECK(arrived.equal(i, data));
      }
      return true;
    };
    for (int first = 0; first <= 100; ++first) {
      CHECK(survives([&](int i) { return i >= first && i < first + 10; }));
    }
    CHECK(!survives([](int i) { return i < 11; }));
    // Two of one sequence, far apart: only the XOR fails.
    CHECK_EQ(
        survives([](int i) { return i == 3 || i == 93; }),
        kind == ParityKind::kReedSolomon);
  }
}

// Share of the data still missing after random loss of each symbol, by the
// real codec on short symbols.
double residualLoss(
    const BlockShape& shape,
    double rate,
    uint64_t packets,
    uint64_t seed) {
  constexpr size_t kBytes = 4;
  Prng random(seed);
  const Symbols data(shape.data, kBytes, &random);
  const Symbols parity(shape.parity, kBytes, &random);
  encodeParity(shape, data.constant(), parity.all(), kBytes);
  const std::vector<const std::byte*> sent = parity.constant();
  const Symbols arrived(shape.data, kBytes, nullptr);
  for (int i = 0; i < shape.data; ++i) {
    std::copy_n(data.all()[i], kBytes, arrived.all()[i]);
  }
  std::vector<const std::byte*> repair = sent;
  Flags have(shape.data);
  uint64_t seen = 0;
  uint64_t missing = 0;
  for (; seen < packets; seen += static_cast<uint64_t>(shape.data)) {
    int lost = 0;
    for (int i = 0; i < shape.data; ++i) {
      have[i] = !random.chance(rate);
      if (!have[i]) {
        ++lost;
        std::memset(arrived.all()[i], 0xee, kBytes);
      }
    }
    for (int j = 0; j < shape.parity; ++j) {
      repair[j] = random.chance(rate) ? nullptr : sent[j];
    }
    if (lost == 0) {
      continue;
    }
    missing += static_cast<uint64_t>(
        lost - recoverData(shape, arrived.all(), have.all(), repair, kBytes));
    for (int i = 0; i < shape.data; ++i) {
      if (have[i]) {
        CHECK(arrived.equal(i, data));
      } else {
        std::copy_n(data.all()[i], kBytes, arrived.all()[i]);
      }
    }
  }
  return static_cast<double>(missing) / static_cast<double>(seen);
}

TEST(parity_code_residual_loss_is_that_of_theory) {
  // Lost, and one of the 10 others of its sequence, too.
  const double theory = 0.01 * (1 - std::pow(0.99, 10));
  CHECK(std::abs(theory / 1.0e-3 - 1) < 0.1);
  const double alone =
      residualLoss({ParityKind::kXor, 10, 1}, 0.01, 5'000'000, 1);
  CHECK(std::abs(alone / theory - 1) < 0.1);
  // Interleaving does nothing against random loss.
  const double interleaved =
      residualLoss({ParityKind::kXor, 100, 10}, 0.01, 5'000'000, 2);
  CHECK(std::abs(interleaved / theory - 1) < 0.1);
  // More than 10 of 110: expected in 0.14 of these 10,000 blocks.
  CHECK_EQ(
      residualLoss({ParityKind::kReedSolomon, 100, 10}, 0.02, 1'000'000, 5),
      0.0);
  // 2.4e-3 at 5 %, where it no longer suffices.
  const double beyond =
      residualLoss({ParityKind::kReedSolomon, 100, 10}, 0.05, 1'000'000, 4);
  CHECK(beyond > 1.8e-3 && beyond < 3.0e-3);
}

TEST(parity_code_refuses_wrong_shapes) {
  std::array<const std::byte*, 3> data{};
  std::array<std::byte*, 3> writable{};
  std::array<std::byte*, 2> parity{};
  std::array<const std::byte*, 2> repair{};
  const auto encode = [&](ParityKind kind, int k, int m) {
    encodeParity({kind, k, m}, data, parity, 0);
  };
  encode(ParityKind::kXor, 3, 2); // nothing to do, nothing wrong
  CHECK_THROWS(
      std::invalid_argument,
      "unknown kind",
      encode(static_cast<ParityKind>(3), 3, 2));
  CHECK_THROWS(
      std::invalid_argument, "at least 1 data", encode(ParityKind::kXor, 0, 2));
  CHECK_THROWS(
      std::invalid_argument,
      "at least 1 data",
      encode(ParityKind::kXor, 3, -1));
  CHECK_THROWS(
      std::invalid_argument, "no kind", encode(ParityKind::kNone, 3, 2));
  CHECK_THROWS(
      std::invalid_argument,
      "at most 255",
      encode(ParityKind::kReedSolomon, 254, 2));
  CHECK_THROWS(
      std::invalid_argument,
      "at most 255",
      encode(ParityKind::kReedSolomon, 1, 2147483647));
  CHECK_THROWS(
      std::invalid_argument,
      "got 3 and 2 buffers",
      encode(ParityKind::kXor, 4, 2));
  Flags two(2);
  CHECK_THROWS(
      std::invalid_argument,
      "got 2 and 2 buffers",
      recoverData({ParityKind::kXor, 3, 2}, writable, two.all(), repair, 0));
  CHECK_THROWS(
      std::invalid_argument,
      "got 2 and 2 buffers",
      recoverable({ParityKind::kXor, 3, 2}, two.all(), two.all()));
}

} // namespace
} // namespace resilient::test
