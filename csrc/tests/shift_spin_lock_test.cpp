#include "shift/spin_lock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace resilient::shift {
namespace {

TEST(a_spin_lock_excludes) {
  SpinLock lock;
  int64_t count = 0;
  constexpr int kTimes = 20'000;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kTimes; ++k) {
        DataGuard guard(lock);
        ++count;
        guard.unlock();
      }
    });
  }
  threads.emplace_back([&] {
    for (int k = 0; k < kTimes; ++k) {
      const std::lock_guard guard(lock);
      ++count;
    }
  });
  threads.clear();
  CHECK_EQ(count, int64_t{3} * kTimes);
}

// The first thread owns the lock, until the second one comes.
TEST(a_spin_lock_excludes_its_owner) {
  constexpr int kTimes = 2'000;
  for (int round = 0; round < 50; ++round) {
    SpinLock lock;
    int64_t count = 0;
    std::atomic<int> begun{0};
    std::vector<std::jthread> threads;
    const auto add = [&](auto guard) {
      for (int k = 0; k < kTimes; ++k) {
        auto held = guard();
        ++count;
      }
    };
    threads.emplace_back([&] {
      {
        const DataGuard first(lock);
      }
      ++begun;
      add([&] { return std::make_unique<DataGuard>(lock); });
    });
    while (begun == 0) {
      std::this_thread::yield();
    }
    threads.emplace_back([&] { add([&] { return std::unique_lock(lock); }); });
    if (round % 2 == 0) {
      threads.emplace_back(
          [&] { add([&] { return std::make_unique<DataGuard>(lock); }); });
    }
    const auto expected = static_cast<int64_t>(threads.size()) * kTimes;
    threads.clear();
    CHECK_EQ(count, expected);
  }
}

// A thread that locks before there is an owner asks for no barrier.
TEST(a_spin_lock_excludes_while_its_owner_comes) {
  for (int round = 0; round < 2'000; ++round) {
    SpinLock lock;
    int64_t count = 0;
    std::atomic<int> ready{0};
    const auto add = [&](auto guard) {
      ++ready;
      while (ready != 2) {
      }
      for (int k = 0; k < 20; ++k) {
        auto held = guard();
        ++count;
      }
    };
    std::vector<std::jthread> threads;
    threads.emplace_back(
        [&] { add([&] { return std::make_unique<DataGuard>(lock); }); });
    threads.emplace_back([&] { add([&] { return std::unique_lock(lock); }); });
    threads.clear();
    CHECK_EQ(count, int64_t{40});
  }
}

TEST(the_owner_of_a_spin_lock_locks_it_as_others_do) {
  SpinLock lock;
  for (int k = 0; k < 3; ++k) {
    {
      const DataGuard guard(lock);
    }
    const std::lock_guard guard(lock);
  }
}

// A program that polls a queue without end holds its lock most of the time. A
// switch to another path waited for it for 100 ms.
TEST(a_spin_lock_goes_to_the_control_thread_first) {
  SpinLock lock;
  std::atomic<uint64_t> polls{0};
  std::jthread poller([&](const std::stop_token& token) {
    while (!token.stop_requested()) {
      const DataGuard guard(lock);
      for (int i = 0; i < 200; ++i) {
        polls.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  std::vector<uint64_t> waited;
  for (int i = 0; i < 100; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    const uint64_t before = polls.load();
    const std::lock_guard guard(lock);
    waited.push_back(polls.load() - before);
  }
  std::ranges::sort(waited);
  // Less than a round of the poller. Single ones are longer: this thread may
  // lose its processor.
  CHECK(waited[waited.size() / 2] <= 1000);
}

} // namespace
} // namespace resilient::shift
