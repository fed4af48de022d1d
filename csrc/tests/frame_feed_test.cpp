#include "tests/fuzz/frame_feed.h"

#include <string_view>

#include "base/random.h"
#include "tests/check.h"

// The fuzzer's target on fixed and on seeded random input: a peer's bytes may
// never crash, hang, or make us keep more than the budgets. (The fuzzer itself
// looks further: `make -C csrc fuzz`.) A failure aborts; sanitizers see more.

namespace resilient::test {
namespace {

void feed(const std::vector<uint8_t>& input) {
  FrameFeed(input).run();
}

void append(std::vector<uint8_t>& to, const FrameHeader& h) {
  FrameBytes bytes;
  encodeFrame(h, bytes);
  const auto* p = reinterpret_cast<const uint8_t*>(bytes.data());
  to.insert(to.end(), p, p + bytes.size());
  to.insert(to.end(), h.payloadBytes, 'x');
}

// A sane conversation, to be spoiled by the tests.
std::vector<uint8_t> goldenStream() {
  std::vector<uint8_t> s = {0};
  FrameHeader h;
  h.type = FrameType::kData;
  h.message = 1;
  h.group = 1;
  h.chunkBytes = 100;
  h.totalBytes = 250;
  for (uint32_t chunk = 0; chunk < 3; ++chunk) {
    h.offset = chunk * 100;
    h.payloadBytes = chunk == 2 ? 50 : 100;
    append(s, h);
  }
  h.message = 2;
  h.flags = kFlagOffer;
  h.offset = 0;
  h.payloadBytes = 0;
  append(s, h);
  for (FrameType t :
       {FrameType::kGrant,
        FrameType::kReject,
        FrameType::kCancel,
        FrameType::kControl,
        FrameType::kBye,
        FrameType::kAck,
        FrameType::kPing,
        FrameType::kPong}) {
    FrameHeader c;
    c.type = t;
    c.message = 3;
    c.payloadBytes =
        t <= FrameType::kControl && t != FrameType::kGrant ? 16 : 0;
    append(s, c);
  }
  return s;
}

TEST(frame_feed_golden_stream) {
  feed(goldenStream());
}

// Cut after any byte.
TEST(frame_feed_torn_stream) {
  const std::vector<uint8_t> golden = goldenStream();
  for (size_t n = 0; n < golden.size(); ++n) {
    feed({golden.begin(), golden.begin() + static_cast<ptrdiff_t>(n)});
  }
}

TEST(frame_feed_spoiled_stream) {
  const std::vector<uint8_t> golden = goldenStream();
  forSeeds(5000, [&](uint64_t seed) {
    Prng prng(seed);
    std::vector<uint8_t> bad = golden;
    for (uint64_t i = 1 + prng.below(4); i > 0; --i) {
      const size_t at = 1 + prng.below(bad.size() - 1);
      switch (prng.below(3)) {
        case 0:
          bad[at] = static_cast<uint8_t>(prng.next());
          break;
        case 1:
          bad.erase(bad.begin() + static_cast<ptrdiff_t>(at));
          break;
        case 2:
          bad.insert(bad.begin() + static_cast<ptrdiff_t>(at), 1, 0);
          break;
      }
    }
    feed(bad);
  });
}

TEST(frame_feed_random_programs) {
  forSeeds(20'000, [](uint64_t seed) {
    Prng prng(seed);
    std::vector<uint8_t> program(1 + prng.below(1500));
    for (uint8_t& b : program) {
      // Small numbers meet more often.
      b = static_cast<uint8_t>(prng.chance(0.5) ? prng.below(8) : prng.next());
    }
    program[0] = 1;
    feed(program);
  });
}

} // namespace
} // namespace resilient::test
