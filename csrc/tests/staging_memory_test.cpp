#include "channel/staging_memory.h"

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {

namespace {

constexpr uint64_t kLarge = (3u << 20) + 1; // takes a block of 3.5 MiB
constexpr uint64_t kLargeBlock = 7u << 19;
const TimePoint kStart{std::chrono::hours(1)};

} // namespace

TEST(staging_memory_keeps_to_its_limit) {
  StagingMemory memory(100);
  CHECK(!memory.take(101));
  auto first = memory.take(60);
  CHECK(bool(first));
  CHECK(!memory.take(41));
  auto second = memory.take(40);
  CHECK(bool(second));
  CHECK_EQ(memory.used(), 100u);
  memory.giveBack(std::move(first), kStart);
  CHECK_EQ(memory.used(), 40u);
  CHECK_EQ(memory.kept(), 0u); // malloc() keeps small ones
  CHECK(memory.deadline() == kNever);
  CHECK(!memory.take(UINT64_MAX));
  memory.giveBack(std::move(second), kStart);
}

TEST(staging_memory_uses_a_large_block_again) {
  StagingMemory memory(64u << 20);
  auto block = memory.take(kLarge);
  std::memset(block.data.get(), 1, kLarge);
  const std::byte* const at = block.data.get();
  memory.giveBack(std::move(block), kStart);
  CHECK_EQ(memory.used(), 0u);
  CHECK_EQ(memory.kept(), kLargeBlock);
  auto other = memory.take(3u << 20); // a smaller block
  CHECK(other.data.get() != at);
  memory.giveBack(std::move(other), kStart);
  CHECK_EQ(memory.kept(), kLargeBlock + (3u << 20));
  auto same = memory.take(kLargeBlock);
  CHECK(same.data.get() == at);
  CHECK_EQ(memory.kept(), 3u << 20);
  std::memset(same.data.get(), 2, same.bytes);
  memory.giveBack(std::move(same), kStart);
}

// The memory counts, not the bytes of the copy: it may be a quarter larger.
TEST(staging_memory_counts_whole_blocks) {
  StagingMemory memory(10u << 20);
  auto first = memory.take(kLarge);
  auto second = memory.take(kLarge);
  CHECK_EQ(memory.used(), 2 * kLargeBlock);
  CHECK(!memory.take(kLarge));
  auto rest = memory.take((3u << 20) - 1); // rounded up it fits exactly
  CHECK_EQ(rest.bytes, 3u << 20);
  memory.giveBack(std::move(rest), kStart);
  memory.giveBack(std::move(second), kStart);
  // A block of 7 MiB would be too large.
  rest = memory.take((10u << 20) - kLargeBlock);
  CHECK_EQ(rest.bytes, (10u << 20) - kLargeBlock);
  CHECK_EQ(memory.used(), 10u << 20);
  memory.giveBack(std::move(rest), kStart);
  CHECK_EQ(memory.kept(), 0u);
  memory.giveBack(std::move(first), kStart);
}

TEST(staging_memory_frees_what_nobody_uses) {
  StagingMemory memory(64u << 20);
  auto first = memory.take(kLarge);
  auto second = memory.take(1u << 20);
  memory.giveBack(std::move(first), kStart);
  const TimePoint later = kStart + std::chrono::seconds(1);
  memory.giveBack(std::move(second), later);
  CHECK(memory.deadline() == kStart + StagingMemory::kKeptFor);
  memory.onTimer(memory.deadline());
  CHECK_EQ(memory.kept(), 1u << 20);
  CHECK(memory.deadline() == later + StagingMemory::kKeptFor);
  memory.onTimer(memory.deadline());
  CHECK_EQ(memory.kept(), 0u);
  CHECK(memory.deadline() == kNever);
}

TEST(staging_memory_frees_kept_blocks_before_it_exceeds_its_limit) {
  StagingMemory memory(10u << 20);
  memory.giveBack(memory.take(kLarge), kStart); // 3.5 MiB kept
  auto block = memory.take(7u << 20);
  CHECK(bool(block));
  CHECK_EQ(memory.kept(), 0u);
  memory.giveBack(std::move(block), kStart);
  CHECK_EQ(memory.kept(), 7u << 20);
  memory.setLimit(1u << 20);
  CHECK_EQ(memory.kept(), 0u);
}

// No two copies share a byte, and the limit holds, whatever the order.
TEST(staging_memory_is_consistent_in_any_order) {
  test::forSeeds(50, [](uint64_t seed) {
    Prng prng(seed);
    const uint64_t limit = 24u << 20;
    StagingMemory memory(limit);
    std::map<uint64_t, StagingMemory::Block> blocks; // by what is in them
    TimePoint now = kStart;
    uint64_t used = 0;
    for (uint64_t step = 1; step < 300; ++step) {
      now += std::chrono::seconds(prng.below(20));
      if (memory.deadline() <= now) {
        memory.onTimer(now);
      }
      if (prng.below(2) == 0) {
        const uint64_t bytes = 1 + prng.below(4u << prng.below(21));
        if (auto block = memory.take(bytes)) {
          std::memcpy(block.data.get(), &step, std::min<size_t>(bytes, 8));
          block.data[block.bytes - 1] = std::byte(step);
          CHECK(block.bytes >= bytes && block.bytes - bytes <= bytes / 4);
          used += block.bytes;
          blocks.emplace(step, std::move(block));
        } else {
          CHECK(used + bytes > limit);
        }
      } else if (!blocks.empty()) {
        auto at = blocks.lower_bound(prng.below(step));
        at = at == blocks.end() ? blocks.begin() : at;
        CHECK(at->second.data[at->second.bytes - 1] == std::byte(at->first));
        used -= at->second.bytes;
        memory.giveBack(std::move(at->second), now);
        blocks.erase(at);
      }
      CHECK_EQ(memory.used(), used);
      CHECK(used + memory.kept() <= limit);
    }
    for (auto& [step, block] : blocks) {
      memory.giveBack(std::move(block), now);
    }
    memory.onTimer(now + StagingMemory::kKeptFor);
    CHECK_EQ(memory.kept(), 0u);
  });
}

} // namespace resilient
