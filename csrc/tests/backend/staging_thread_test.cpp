// The torch-free part of the backend: order of submission, threads of futures.

#include "backend/staging_thread.h"

#include <atomic>
#include <future>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backend/future_threads.h"
#include "base/log.h"
#include "base/random.h"
#include "tests/check.h"

namespace resilient {

namespace {

constexpr auto kPatience = std::chrono::seconds(20);

// A copy from a device that ends when the test says so.
struct Copy {
  std::shared_ptr<std::atomic<bool>> done =
      std::make_shared<std::atomic<bool>>(false);
  std::function<bool()> ready() const {
    return [done = done] { return done->load(); };
  }
};

struct Log {
  std::mutex mutex;
  std::vector<int> numbers;
  SubmitQueue::Submit note(int number) {
    return [this, number](SubmitQueue::Handover how) {
      std::lock_guard<std::mutex> lock(mutex);
      numbers.push_back(
          how == SubmitQueue::Handover::kReady      ? number
              : how == SubmitQueue::Handover::kLate ? 100 * number
                                                    : -number);
    };
  }
  std::vector<int> get() {
    std::lock_guard<std::mutex> lock(mutex);
    return numbers;
  }
};

} // namespace

TEST(submit_queue_hands_over_at_once_what_is_ready) {
  Log log;
  SubmitQueue queue;
  queue.push(0, {}, kNever, log.note(1));
  CHECK(log.get() == std::vector<int>{1});
  Copy copy;
  copy.done->store(true);
  queue.push(0, copy.ready(), kNever, log.note(2));
  CHECK((log.get() == std::vector<int>{1, 2}));
}

TEST(submit_queue_keeps_call_order_behind_a_slow_copy) {
  Log log;
  SubmitQueue queue;
  Copy slow;
  Copy fast;
  queue.push(0, slow.ready(), kNever, log.note(1));
  queue.push(0, fast.ready(), kNever, log.note(2));
  queue.push(
      0, {}, kNever, log.note(3)); // a host operation waits its turn as well
  fast.done->store(true);
  CHECK_EQ(queue.waiting(0), size_t{3});
  CHECK(!queue.drain(std::chrono::milliseconds(20)));
  CHECK(log.get().empty());
  slow.done->store(true);
  CHECK(queue.drain(kPatience));
  CHECK((log.get() == std::vector<int>{1, 2, 3}));
}

TEST(submit_queue_keys_do_not_hold_up_each_other) {
  Log log;
  SubmitQueue queue;
  Copy never;
  queue.push(7, never.ready(), kNever, log.note(1));
  queue.push(8, {}, kNever, log.note(2));
  Copy soon;
  queue.push(9, soon.ready(), kNever, log.note(3));
  soon.done->store(true);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (log.get().size() < 2 && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  CHECK((log.get() == std::vector<int>{2, 3}));
  never.done->store(true);
  CHECK(queue.drain(kPatience));
}

TEST(submit_queue_close_fails_what_is_not_ready_and_passes_the_rest) {
  Log log;
  SubmitQueue queue;
  Copy never;
  queue.push(0, never.ready(), kNever, log.note(1));
  queue.push(0, {}, kNever, log.note(2));
  queue.close();
  CHECK((log.get() == std::vector<int>{-1, 2}));
  queue.push(0, never.ready(), kNever, log.note(3)); // after close(): at once
  queue.push(0, {}, kNever, log.note(4));
  CHECK((log.get() == std::vector<int>{-1, 2, -3, 4}));
}

TEST(submit_queue_hands_over_what_is_late_and_then_what_is_behind_it) {
  Log log;
  SubmitQueue queue;
  Copy never;
  Copy soon;
  const auto now = std::chrono::steady_clock::now();
  queue.push(
      0, never.ready(), now + std::chrono::milliseconds(20), log.note(1));
  queue.push(0, soon.ready(), kNever, log.note(2));
  queue.push(0, {}, kNever, log.note(3));
  const auto enough = [&] { return log.get().size() == 1; };
  while (!enough() && std::chrono::steady_clock::now() < now + kPatience) {
    std::this_thread::yield();
  }
  CHECK(
      std::chrono::steady_clock::now() >= now + std::chrono::milliseconds(20));
  CHECK(log.get() == std::vector<int>{100});
  soon.done->store(true);
  CHECK(queue.drain(kPatience));
  CHECK((log.get() == std::vector<int>{100, 2, 3}));
}

TEST(staging_thread_goes_on_after_a_task_that_throws) {
  std::atomic<int> lines{0};
  setLogSink([&](std::string_view) { ++lines; });
  StagingThread::post([] { throw std::runtime_error("no"); });
  StagingThread::pollUntil([]() -> bool { throw std::runtime_error("no"); });
  Log log;
  SubmitQueue queue;
  Copy copy;
  queue.push(0, copy.ready(), kNever, [](SubmitQueue::Handover) {
    throw std::runtime_error("no");
  });
  queue.push(0, {}, kNever, log.note(2));
  copy.done->store(true);
  CHECK(queue.drain(kPatience));
  CHECK(log.get() == std::vector<int>{2});
  std::promise<void> ran;
  StagingThread::post([&] { ran.set_value(); });
  CHECK(ran.get_future().wait_for(kPatience) == std::future_status::ready);
  setLogSink({});
  CHECK_EQ(lines.load(), 3);
}

TEST(submit_queue_order_holds_for_random_copies) {
  test::forSeeds(20, [](uint64_t seed) {
    Prng random(seed);
    Log log;
    SubmitQueue queue;
    std::vector<Copy> copies(50);
    std::vector<size_t> finish(copies.size());
    std::iota(finish.begin(), finish.end(), size_t{0});
    for (size_t i = finish.size(); i > 1; --i) {
      std::swap(finish[i - 1], finish[random.below(i)]);
    }
    std::thread device([&] {
      for (const size_t i : finish) {
        copies[i].done->store(true);
        std::this_thread::yield();
      }
    });
    std::vector<int> expected;
    for (size_t i = 0; i < copies.size(); ++i) {
      queue.push(
          0, copies[i].ready(), kNever, log.note(static_cast<int>(i) + 1));
      expected.push_back(static_cast<int>(i) + 1);
    }
    device.join();
    CHECK(queue.drain(kPatience));
    CHECK(log.get() == expected);
  });
}

TEST(future_threads_keep_order_within_a_level) {
  std::mutex mutex;
  std::vector<int> seen;
  std::promise<void> last;
  for (int i = 0; i < 100; ++i) {
    FutureThreads::post(0, [&, i] {
      std::lock_guard<std::mutex> lock(mutex);
      seen.push_back(i);
      if (i == 99) {
        last.set_value();
      }
    });
  }
  CHECK(last.get_future().wait_for(kPatience) == std::future_status::ready);
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  std::lock_guard<std::mutex> lock(mutex);
  CHECK(seen == expected);
}

// A communication hook that waits, inside a callback, for an operation it has
// started there: with one thread only it would wait for itself.
TEST(future_threads_callback_may_wait_for_a_future_of_its_own) {
  CHECK_EQ(FutureThreads::levelForCaller(), 0);
  std::promise<bool> outer;
  FutureThreads::post(0, [&] {
    auto inner = std::make_shared<std::promise<void>>();
    auto waiting = inner->get_future();
    FutureThreads::post(
        FutureThreads::levelForCaller(), [inner] { inner->set_value(); });
    outer.set_value(waiting.wait_for(kPatience) == std::future_status::ready);
  });
  auto result = outer.get_future();
  CHECK(result.wait_for(2 * kPatience) == std::future_status::ready);
  CHECK(result.get());
}

} // namespace resilient
