// The kernels of csrc/cuda without a GPU: what each of their threads does, for
// all threads of a grid, against the CPU's functions, bit for bit.

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "base/random.h"
#include "cuda/thread_bodies.h"
#include "loss/parity_code.h"
#include "loss/priority.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

using namespace resilient::cuda;
using magnitude::OfBFloat16;
using magnitude::OfFloat16;
using magnitude::OfFloat32;
using magnitude::OfFloat64;

template <typename Function>
void forTypes(Function function) {
  function(DType::kFloat32, OfFloat32{});
  function(DType::kBFloat16, OfBFloat16{});
  function(DType::kFloat16, OfFloat16{});
  function(DType::kFloat64, OfFloat64{});
}

// Elements that begin anywhere within 16 bytes. `anything`: any bits, so with
// subnormals, infinities, NaNs of any sign and payload, sums that overflow;
// else magnitudes below 2. What stands around them is NaN.
template <typename Type>
class Elements {
 public:
  using Storage = typename Type::Storage;

  Elements(size_t count, bool anything, Prng& random)
      : count_(count), offset_(random.below(16)) {
    memory_.assign(offset_ + count + 16, Type::kMagnitude);
    for (size_t i = 0; i < count; ++i) {
      const auto bits = static_cast<Storage>(random.next());
      // Without the exponent's highest bit it is below 2.
      constexpr Storage kHighest = Type::kInfinity & ~(Type::kInfinity >> 1);
      const auto moderate = static_cast<Storage>(bits & ~kHighest);
      at(i) = anything ? bits : moderate;
    }
  }
  Storage& at(size_t i) {
    return memory_[offset_ + i];
  }
  const Storage* data() const {
    return memory_.data() + offset_;
  }
  const std::byte* bytes() const {
    return reinterpret_cast<const std::byte*>(data());
  }
  size_t count() const {
    return count_;
  }

 private:
  size_t count_;
  size_t offset_;
  std::vector<Storage> memory_;
};

// What all threads of a warp hold.
template <typename Sum>
struct Warp {
  Sum threads[kWarpThreads];
  Warp operator+(const Warp& other) const {
    Warp result;
    for (size_t i = 0; i < kWarpThreads; ++i) {
      result.threads[i] = threads[i] + other.threads[i];
    }
    return result;
  }
};

// __shfl_down_sync: beyond the warp each keeps its own.
struct Down {
  template <typename Sum>
  Warp<Sum> operator()(const Warp<Sum>& from, unsigned places) const {
    Warp<Sum> result = from;
    for (size_t i = 0; i + places < kWarpThreads; ++i) {
      result.threads[i] = from.threads[i + places];
    }
    return result;
  }
};

TEST(cuda_loss_means_are_the_cpus_bits) {
  forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    forTypes([&]<typename Type>(DType dtype, Type) {
      const Elements<Type> elements(
          random.below(3000), random.chance(0.3), random);
      const size_t each = 1 + random.below(700);
      const size_t first = random.below(each + 1);
      const size_t packets = packetCount(elements.count(), each, first);
      std::vector<float> expected(packets, -1);
      meanMagnitudes(
          dtype,
          elements.bytes(),
          elements.count(),
          each,
          first,
          expected.data());
      std::vector<float> means(packets, -2);
      const PacketMeans<Type> body{
          elements.data(),
          elements.count(),
          each,
          first,
          packets,
          means.data()};
      for (size_t packet = 0; packet < packets; ++packet) {
        Warp<typename Type::Sum> low;
        Warp<typename Type::Sum> high;
        for (size_t thread = 0; thread < kWarpThreads; ++thread) {
          const auto partial = body.partial(packet, thread);
          low.threads[thread] = partial.low;
          high.threads[thread] = partial.high;
        }
        body.put(packet, foldSums(low, high, Down()).threads[0]);
        CHECK_EQ(
            std::bit_cast<uint32_t>(means[packet]),
            std::bit_cast<uint32_t>(expected[packet]));
      }
    });
  });
}

TEST(cuda_loss_threshold_is_the_cpus) {
  forSeeds(60, [](uint64_t seed) {
    Prng random(seed);
    forTypes([&]<typename Type>(DType dtype, Type) {
      const Elements<Type> elements(
          1 + random.below(random.chance(0.5) ? 100 : 20000),
          random.chance(0.5),
          random);
      const double fraction = 0.001 + 0.999 * random.uniform();
      std::vector<double> sample(
          std::min(elements.count(), magnitude::kThresholdSample), -1);
      const ThresholdSample<Type> body{
          elements.data(),
          elements.count(),
          seed,
          sample.data(),
          sample.size()};
      for (size_t thread = 0; thread < body.threads(); ++thread) {
        body(thread);
      }
      CHECK_EQ(
          thresholdOf(sample, fraction),
          sampledThreshold(
              dtype, elements.bytes(), elements.count(), fraction, seed));
    });
  });
}

TEST(cuda_loss_finds_what_is_not_finite) {
  forSeeds(200, [](uint64_t seed) {
    Prng random(seed);
    forTypes([&]<typename Type>(DType dtype, Type) {
      Elements<Type> elements(random.below(100), false, random);
      const auto finite = [&] {
        int32_t result = 1;
        const AllFinite<Type> body(elements.data(), elements.count(), &result);
        for (size_t thread = 0; thread < body.threads(); ++thread) {
          body(thread);
        }
        CHECK_EQ(
            result != 0, allFinite(dtype, elements.bytes(), elements.count()));
        return result != 0;
      };
      CHECK(finite()); // whatever stands around them
      for (size_t i = 0; i < elements.count(); ++i) {
        const auto before = elements.at(i);
        const auto sign = static_cast<typename Type::Storage>(
            random.chance(0.5) ? ~Type::kMagnitude : 0);
        elements.at(i) =
            sign | (random.chance(0.5) ? Type::kInfinity : Type::kMagnitude);
        CHECK(!finite());
        elements.at(i) = before;
      }
    });
  });
}

// Symbols one after the other, as words and as what the CPU's functions take.
template <typename Word>
struct Symbols {
  // One more: no symbol, however empty, is at nullptr.
  Symbols(size_t count, size_t words)
      : words(words), memory(count * words + 1) {}
  void fill(Prng& random) {
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    for (size_t i = 0; i < memory.size() * sizeof(Word); ++i) {
      bytes[i] = std::byte(random.next());
    }
  }
  std::byte* symbol(size_t i) {
    return reinterpret_cast<std::byte*>(memory.data() + i * words);
  }
  std::vector<std::byte*> symbols(size_t first, size_t count) {
    std::vector<std::byte*> result;
    for (size_t i = first; i < first + count; ++i) {
      result.push_back(symbol(i));
    }
    return result;
  }
  bool operator==(Symbols& other) {
    return std::equal(
        symbol(0),
        symbol(0) + (memory.size() - 1) * sizeof(Word),
        other.symbol(0));
  }
  size_t words;
  std::vector<Word> memory;
};

template <typename Word>
void checkXor(Prng& random) {
  const XorShape shape{
      random.below(5),
      1 + random.below(random.chance(0.2) ? 120 : 20),
      1 + random.below(12),
      random.below(10)};
  const BlockShape block{
      ParityKind::kXor,
      static_cast<int>(shape.data),
      static_cast<int>(shape.parity)};
  const size_t bytes = shape.words * sizeof(Word);
  const size_t symbols = shape.blocks * shape.data;
  const size_t rows = shape.blocks * shape.parity;
  Symbols<Word> data(symbols, shape.words);
  data.fill(random);
  Symbols<Word> parity(rows, shape.words);
  Symbols<Word> expectedParity(rows, shape.words);
  parity.fill(random);
  for (size_t b = 0; b < shape.blocks; ++b) {
    const auto from = data.symbols(b * shape.data, shape.data);
    encodeParity(
        block,
        std::vector<const std::byte*>(from.begin(), from.end()),
        expectedParity.symbols(b * shape.parity, shape.parity),
        bytes);
  }
  const EncodeXor<Word> encode{shape, data.memory.data(), parity.memory.data()};
  for (size_t thread = 0; thread < encode.threads(); ++thread) {
    encode(thread);
  }
  CHECK(parity == expectedParity);

  // From none to all of the symbols are lost.
  const double loss = random.chance(0.2) ? random.uniform() : 0.1;
  const std::unique_ptr<bool[]> have(new bool[symbols + 1]);
  const std::unique_ptr<bool[]> expectedHave(new bool[symbols + 1]);
  const std::unique_ptr<bool[]> here(new bool[rows + 1]);
  for (size_t i = 0; i < symbols; ++i) {
    have[i] = expectedHave[i] = !random.chance(loss);
    if (!have[i]) {
      std::fill_n(data.symbol(i), bytes, std::byte{0x5a});
    }
  }
  for (size_t i = 0; i < rows; ++i) {
    here[i] = !random.chance(loss);
  }
  Symbols<Word> expected = data;
  int expectedFilled = 0;
  for (size_t b = 0; b < shape.blocks; ++b) {
    std::vector<const std::byte*> repair;
    for (size_t j = b * shape.parity; j < (b + 1) * shape.parity; ++j) {
      repair.push_back(here[j] ? parity.symbol(j) : nullptr);
    }
    expectedFilled += recoverData(
        block,
        expected.symbols(b * shape.data, shape.data),
        {expectedHave.get() + b * shape.data, shape.data},
        repair,
        bytes);
  }
  const XorFlags flags{shape, have.get(), here.get()};
  const RecoverXor<Word> recover{
      flags, data.memory.data(), parity.memory.data()};
  for (size_t thread = 0; thread < recover.threads(); ++thread) {
    recover(thread);
  }
  const MarkRecovered mark{flags};
  int filled = 0;
  for (size_t thread = 0; thread < mark.threads(); ++thread) {
    filled += mark(thread) ? 1 : 0;
  }
  CHECK(data == expected);
  CHECK_EQ(filled, expectedFilled);
  CHECK(std::equal(have.get(), have.get() + symbols, expectedHave.get()));
}

TEST(cuda_loss_xor_gives_the_cpus_bytes) {
  forSeeds(300, [](uint64_t seed) {
    Prng random(seed);
    checkXor<Word16>(random);
    checkXor<uint32_t>(random);
    checkXor<uint8_t>(random);
  });
}

} // namespace
} // namespace resilient::test
