// Random programs whose callbacks begin collectives, on two ranks with other
// timing: if no call is refused, both have called the same, in one order.

#include "backend/call_order.h"

#include <deque>
#include <optional>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {

namespace {

constexpr int kGroups = 2;
constexpr int kMessage = -1;
constexpr int kBucket = -2; // for a hook in in_order()

struct Operation {
  int group = 0; // or kMessage, kBucket
  int id = 0;
  // The collectives of its callbacks, or of the hook.
  std::vector<Operation> followers;
};

std::vector<Operation>
operations(Prng& random, int depth, uint64_t most, int& ids, bool buckets) {
  std::vector<Operation> made;
  const uint64_t count = random.below(most + 1);
  for (uint64_t i = 0; i < count; ++i) {
    Operation operation;
    operation.id = ++ids;
    if (buckets && random.chance(0.3)) {
      operation.group = kBucket;
    } else {
      operation.group = random.chance(0.15)
          ? kMessage
          : static_cast<int>(random.below(kGroups));
    }
    if (depth > 0) {
      operation.followers = operations(random, depth - 1, 2, ids, false);
    }
    made.push_back(std::move(operation));
  }
  return made;
}

// One rank runs the program. What runs "at the same time" is nested: between
// two steps of a callback, the program or another callback may take some.
class Rank {
 public:
  Rank(const std::vector<Operation>& program, uint64_t seed, bool prompt)
      : program_(program), random_(seed), prompt_(prompt) {}

  void run() {
    while (!refused && step()) {
    }
  }

  std::vector<int> order[kGroups]; // what was called on each group
  bool refused = false;

 private:
  struct Waiting {
    CallPlace place;
    const Operation* operation;
  };

  // False if there is nothing to do but what runs already.
  bool step() {
    const bool hook = !buckets_.empty() && !hookRuns_;
    const bool program = next_ < program_.size() && !programRuns_;
    const uint64_t choices =
        waiting_.size() + (hook ? 1 : 0) + (program ? 1 : 0);
    if (choices == 0) {
      return false;
    }
    const uint64_t choice = random_.below(choices);
    if (choice < waiting_.size()) {
      const auto at = waiting_.begin() + static_cast<int64_t>(choice);
      const Operation& ended = *at->operation;
      const CallbackScope scope(std::move(at->place));
      waiting_.erase(at);
      runAll(ended.followers);
    } else if (hook && choice == waiting_.size()) {
      const auto [stamp, bucket] = buckets_.front();
      buckets_.pop_front();
      const CallbackScope other{CallPlace()};
      hookRuns_ = true;
      OrderedHook::begin(hook_, stamp);
      runAll(bucket->followers);
      OrderedHook::end();
      hookRuns_ = false;
    } else {
      const CallbackScope own{CallPlace()};
      programRuns_ = true;
      call(program_[next_++]);
      programRuns_ = false;
    }
    return true;
  }

  void runAll(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      if (refused) {
        return;
      }
      call(operation);
      if (!prompt_ && depth_ < 6) {
        ++depth_;
        while (!refused && random_.chance(0.4) && step()) {
        }
        --depth_;
      }
    }
  }

  void call(const Operation& operation) {
    if (operation.group == kBucket) {
      buckets_.emplace_back(CallOrder::stampNow(), &operation);
      if (prompt_) {
        step();
      }
      return;
    }
    CallPlace place;
    if (operation.group == kMessage) {
      place = CallOrder::message("send");
    } else {
      const CallOrder::Call call(orders_[operation.group], "all_reduce");
      if (!call.refusal().empty()) {
        refused = true;
        return;
      }
      order[operation.group].push_back(operation.id);
      place = call.place();
    }
    if (prompt_) {
      const CallbackScope scope(std::move(place));
      runAll(operation.followers);
    } else if (random_.chance(0.3)) { // ended before the callback is added
      runAll(operation.followers);
    } else {
      waiting_.push_back({std::move(place), &operation});
    }
  }

  const std::vector<Operation>& program_;
  Prng random_;
  const bool prompt_; // callbacks run at once, before anything else
  size_t next_ = 0;
  bool programRuns_ = false;
  int depth_ = 0;
  CallOrder orders_[kGroups];
  std::vector<Waiting> waiting_;
  std::deque<std::pair<uint64_t, const Operation*>> buckets_;
  const std::shared_ptr<OrderedHook> hook_ = std::make_shared<OrderedHook>();
  bool hookRuns_ = false;
};

} // namespace

TEST(another_order_of_collectives_is_refused_on_a_rank) {
  uint64_t refused = 0, passed = 0, cases = 0;
  test::forSeeds(20'000, [&](uint64_t seed) {
    ++cases;
    Prng random(seed);
    int ids = 0;
    const auto program =
        operations(random, 2, 1 + random.below(5), ids, random.chance(0.3));
    Rank first(program, random.next(), false);
    Rank second(program, random.next(), false);
    first.run();
    second.run();
    if (first.refused || second.refused) {
      ++refused;
      return;
    }
    passed += ids > 3 ? 1 : 0;
    for (int group = 0; group < kGroups; ++group) {
      CHECK_EQ(first.order[group], second.order[group]);
    }
  });
  // Both happen often enough to prove something.
  if (cases > 1000) {
    CHECK(refused > cases / 10);
    CHECK(passed > cases / 100);
  }
}

TEST(collectives_of_prompt_callbacks_are_not_refused) {
  test::forSeeds(2'000, [](uint64_t seed) {
    Prng random(seed);
    int ids = 0;
    const auto program = operations(random, 1, 6, ids, true);
    Rank rank(program, random.next(), true);
    rank.run();
    CHECK(!rank.refused);
  });
}

TEST(a_refusal_names_both_collectives) {
  CallOrder group;
  CallPlace place = CallOrder::Call(group, "resilient:all_reduce").place();
  (void)CallOrder::Call(group, "resilient:broadcast");
  const CallbackScope scope(place);
  const CallOrder::Call call(group, "resilient:all_gather");
  CHECK_CONTAINS(
      call.refusal(), "callback of collective #1 (resilient:all_reduce)");
  CHECK_CONTAINS(
      call.refusal(),
      "but collective #2 (resilient:broadcast) was called in between");
  CHECK_CONTAINS(call.refusal(), "torch_resilient.ddp.in_order(hook)");
  CHECK_EQ(call.place().number, 3);
}

} // namespace resilient
