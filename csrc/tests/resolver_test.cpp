#include "delegate/resolver.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/time.h"
#include "tests/check.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

TimePoint now() {
  return std::chrono::steady_clock::now();
}

void waitUntil(const std::function<bool()>& condition) {
  const TimePoint deadline = now() + 30s;
  while (!condition() && now() < deadline) {
    std::this_thread::yield();
  }
  CHECK(condition());
}

// A store of which only tryGet is used.
class OneKey : public KeyValue {
 public:
  void set(const std::string&, const std::string&) override {}
  int64_t add(const std::string&, int64_t) override {
    return 0;
  }
  std::string setIfAbsent(const std::string&, const std::string&) override {
    return "";
  }
  std::unique_ptr<KeyValue> clone() override {
    return nullptr;
  }
  std::string serverHost() const override {
    return "";
  }
};

class HangingStore final : public OneKey {
 public:
  bool tryGet(const std::string&, std::string&) override {
    std::unique_lock lock(mutex_);
    asked.store(true);
    changed_.wait(lock, [this] { return goesOn_; });
    return false;
  }
  void goOn() {
    std::lock_guard lock(mutex_);
    goesOn_ = true;
    changed_.notify_all();
  }
  std::atomic<bool> asked{false};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool goesOn_ = false;
};

// As in an engine: what is sought holds the owner of the resolver.
TEST(resolver_outlives_its_owner_in_a_call_that_hangs) {
  struct Owner {
    std::shared_ptr<int> last = std::make_shared<int>(); // destroyed last
    Resolver resolver;
  };
  auto owner = std::make_shared<Owner>();
  const std::weak_ptr<int> left = owner->last;
  const auto store = std::make_shared<HangingStore>();
  owner->resolver.seek(store, "key", 1, {[owner](const std::string&) {}, {}});
  waitUntil([&] { return store->asked.load(); });
  owner->resolver.forget(store);
  owner->resolver.stop();
  owner.reset();
  CHECK(!left.expired()); // the call has not returned
  store->goOn();
  waitUntil([&] { return left.expired(); });
  waitUntil([&] { return store.use_count() == 1; });
}

class FailingStore final : public OneKey {
 public:
  bool tryGet(const std::string&, std::string& value) override {
    const TimePoint at = now();
    if (at - askedAt_ >= 800ms && askedAt_ != TimePoint()) {
      patient.store(true);
    }
    askedAt_ = at;
    if (fails.load()) {
      throw std::runtime_error("Broken pipe\na long backtrace");
    }
    value = "found";
    return true;
  }
  std::atomic<bool> fails{true};
  std::atomic<bool> patient{false}; // it was left alone for a while

 private:
  TimePoint askedAt_{}; // resolver's thread
};

TEST(resolver_is_patient_with_a_store_that_fails_and_says_why) {
  Resolver resolver;
  const auto store = std::make_shared<FailingStore>();
  const auto other = std::make_shared<FailingStore>();
  CHECK_EQ(resolver.trouble(store), "");
  std::atomic<bool> found{false};
  resolver.seek(
      store,
      "key",
      1,
      {[&](const std::string& value) {
         CHECK_EQ(value, "found");
         found.store(true);
       },
       {}});
  waitUntil([&] { return resolver.trouble(store) == "Broken pipe"; });
  CHECK_EQ(resolver.trouble(other), "");
  waitUntil([&] { return store->patient.load(); });
  CHECK(!found.load());
  store->fails.store(false);
  waitUntil([&] { return found.load(); });
  CHECK_EQ(resolver.trouble(store), "");
}

TEST(resolver_reports_a_store_that_keeps_failing_as_lost) {
  Resolver resolver;
  const auto store = std::make_shared<FailingStore>();
  std::atomic<int> found{0}, lost{0};
  const TimePoint begun = now();
  const Resolver::Callbacks callbacks{
      [&](const std::string&) { ++found; },
      [&](const std::string& error) {
        CHECK_EQ(error, "Broken pipe");
        ++lost;
      }};
  resolver.seek(store, "key", 1, callbacks);
  waitUntil([&] { return lost.load() == 1; });
  CHECK(now() - begun >= Resolver::kLostAfter);
  CHECK_EQ(resolver.trouble(store), ""); // it is no longer sought
  store->fails.store(false);
  resolver.seek(store, "key", 1, callbacks);
  waitUntil([&] { return found.load() == 1; });
  CHECK_EQ(lost.load(), 1);
}

// The application waits in the store, and so keeps its connection busy; its
// clone answers.
class BusyStore final : public OneKey {
 public:
  bool tryGet(const std::string&, std::string& value) override {
    asked.store(true);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return free_; });
    value = "late";
    return true;
  }
  std::unique_ptr<KeyValue> clone() override {
    struct Clone final : OneKey {
      bool tryGet(const std::string&, std::string& value) override {
        value = "in time";
        return true;
      }
    };
    ++clones;
    return std::make_unique<Clone>();
  }
  void release() {
    std::lock_guard lock(mutex_);
    free_ = true;
    changed_.notify_all();
  }
  std::atomic<bool> asked{false};
  std::atomic<int> clones{0};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool free_ = false;
};

TEST(resolver_opens_a_connection_of_its_own_only_when_the_shared_one_is_busy) {
  Resolver resolver;
  const auto store = std::make_shared<BusyStore>();
  std::atomic<int> found{0};
  resolver.seek(
      store,
      "key",
      1,
      {[&](const std::string& value) {
         CHECK_EQ(value, "in time");
         ++found;
       },
       {}});
  waitUntil([&] { return store->asked.load(); });
  resolver.hurry();
  CHECK_EQ(store->clones.load(), 0); // it has had no time to answer
  waitUntil([&] {
    resolver.hurry();
    return found.load() == 1;
  });
  CHECK_EQ(store->clones.load(), 1);
  store->release();
  waitUntil([&] { return store.use_count() == 1; });
  CHECK_EQ(found.load(), 1); // not once more by the late answer
}

} // namespace
} // namespace resilient
