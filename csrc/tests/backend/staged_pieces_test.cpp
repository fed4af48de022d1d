#include "backend/staged_pieces.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {

namespace {

constexpr size_t kMiB = 1u << 20;

} // namespace

TEST(staged_pieces_double_and_leave_no_small_rest) {
  const std::vector<size_t> ends = StagedPieces::pieceEnds(40 * kMiB + 16);
  const std::vector<size_t> expected = {
      kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB, 40 * kMiB + 16};
  CHECK(ends == expected);
  CHECK(StagedPieces::pieceEnds(2 * kMiB - 1) == std::vector{2 * kMiB - 1});
  test::forSeeds(200, [](uint64_t seed) {
    Prng random(seed);
    const size_t bytes = 1 + random.below(100 * kMiB);
    size_t begin = 0;
    for (const size_t end : StagedPieces::pieceEnds(bytes)) {
      CHECK(end > begin);
      CHECK(end == bytes || end % kMiB == 0);
      CHECK(end - begin >= std::min(bytes, StagedPieces::kMinPieceBytes));
      CHECK(
          end - begin <
          StagedPieces::kMaxPieceBytes + StagedPieces::kMinPieceBytes);
      begin = end;
    }
    CHECK_EQ(begin, bytes);
  });
}

TEST(staged_pieces_tell_what_can_be_read) {
  StagedPieces pieces;
  std::vector<char> input(100), result(50), other(10);
  const size_t number = pieces.add(input.data(), 100, true, false);
  pieces.add(result.data(), 50, false, true);
  pieces.setStreams("strict:0, stream 7");
  int told = 0;
  pieces.watch([&told] { ++told; });
  CHECK_EQ(pieces.available(input.data(), 100), 0u);
  CHECK_EQ(pieces.available(result.data() + 10, 40), 40u);
  CHECK_EQ(pieces.available(other.data(), 10), 10u);
  CHECK_EQ(pieces.waitsFor(), "strict:0, stream 7");
  pieces.arrived(number, 60);
  CHECK_EQ(pieces.available(input.data() + 20, 80), 40u);
  CHECK_EQ(pieces.available(input.data() + 70, 30), 0u);
  pieces.arrived(number, 100);
  CHECK_EQ(pieces.available(input.data() + 70, 30), 30u);
  CHECK_EQ(pieces.waitsFor(), "");
  CHECK_EQ(told, 2);
  pieces.failed(Status(StatusCode::kInternal, "broken"));
  CHECK_EQ(pieces.failure().message(), "broken");
  CHECK_EQ(told, 3);
  pieces.watch({});
  pieces.arrived(number, 100);
  CHECK_EQ(told, 3);
}

// Chunks overtake each other on different paths: a late one must not stay
// behind until the end because it is too short to be a piece.
TEST(staged_pieces_take_a_short_run_that_cannot_grow) {
  StagedPieces pieces;
  std::vector<char> result(8 * kMiB);
  pieces.add(result.data(), result.size(), false, true);
  int asked = 0;
  pieces.setTaker([&asked] { ++asked; });
  const auto take = [&](size_t begin, size_t end) {
    pieces.resultIsFinal(result.data() + begin, end - begin);
    size_t bytes = 0;
    for (const BufferRange& run : pieces.takeFinal()) {
      bytes += run.end - run.begin;
    }
    return bytes;
  };
  CHECK_EQ(take(kMiB / 2, 2 * kMiB), 3 * kMiB / 2);
  CHECK_EQ(take(3 * kMiB, 4 * kMiB), kMiB);
  CHECK_EQ(asked, 2);
  CHECK_EQ(take(0, kMiB / 2), kMiB / 2); // from the beginning
  CHECK_EQ(asked, 3);
  CHECK_EQ(take(2 * kMiB + 16, 2 * kMiB + 32), 0u);
  CHECK_EQ(take(4 * kMiB, 4 * kMiB + 16), 0u); // one side may still come
  CHECK_EQ(asked, 3);
  pieces.resultIsFinal(result.data() + 2 * kMiB, 16);
  CHECK_EQ(take(2 * kMiB + 32, 3 * kMiB), kMiB); // between two
  CHECK_EQ(asked, 4);
}

// Each byte is taken once, after it was named or at the end, in any order, and
// runs hold whole elements.
TEST(staged_pieces_give_each_result_once) {
  test::forSeeds(100, [](uint64_t seed) {
    Prng random(seed);
    StagedPieces pieces;
    const size_t bytes = (1 + random.below(8 * kMiB / 16)) * 16;
    std::vector<char> result(bytes);
    pieces.add(result.data(), bytes, false, true);
    int asked = 0;
    pieces.setTaker([&asked] { ++asked; });
    // 0: not named, 1: named, 2: taken; by kilobyte, the last one shorter.
    std::vector<char> state(bytes);
    std::vector<size_t> cuts = {0, bytes};
    for (int i = 0; i < 20; ++i) {
      cuts.push_back(random.below(bytes + 1));
    }
    std::ranges::sort(cuts);
    std::vector<size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random.below(i)]);
    }
    const size_t named = random.below(order.size() + 1);
    const auto take = [&](const std::vector<BufferRange>& runs, bool rest) {
      for (const BufferRange& run : runs) {
        CHECK(run.begin < run.end);
        CHECK_EQ(run.begin % 16, 0u);
        CHECK(run.end % 16 == 0 || run.end == bytes);
        for (size_t at = run.begin; at < run.end; ++at) {
          CHECK(state[at] == 1 || (rest && state[at] == 0));
          state[at] = 2;
        }
      }
    };
    for (size_t i = 0; i < named; ++i) {
      const size_t begin = cuts[order[i]];
      const size_t end = cuts[order[i] + 1];
      std::memset(state.data() + begin, 1, end - begin);
      pieces.resultIsFinal(result.data() + begin, end - begin);
      if (random.chance(0.5)) {
        take(pieces.takeFinal(), false);
      }
    }
    take(pieces.takeRest(), true);
    CHECK(std::ranges::all_of(state, [](char s) { return s == 2; }));
    CHECK(pieces.takeRest().empty());
    if (named == order.size() && bytes >= 4 * kMiB) {
      CHECK(asked > 0);
    }
  });
}

} // namespace resilient
