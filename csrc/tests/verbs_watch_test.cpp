#include "transport/verbs_watch.h"

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/path_contract.h"
#include "tests/verbs_fake.h"

namespace resilient {
namespace {

// A loop that runs, and the events that it has seen.
struct Watching {
  explicit Watching(const std::set<std::string>& devices) {
    user.run([&] {
      watch = std::make_unique<VerbsWatch>(
          user.loop,
          fake,
          devices,
          [this](const std::string& device, const VerbsEvent& event) {
            seen.emplace_back(device, event);
          });
    });
  }
  ~Watching() {
    user.run([this] { watch.reset(); });
  }
  void until(size_t count) {
    user.until("the events came", [&] { return seen.size() >= count; });
  }

  test::VerbsFake fake;
  test::PathUser user{1};
  std::unique_ptr<VerbsWatch> watch;
  std::vector<std::pair<std::string, VerbsEvent>> seen; // loop thread
};

TEST(verbs_watch_tells_the_events_of_each_device) {
  using Kind = VerbsEvent::Kind;
  Watching watching({"fake0", "fake1", "gone"});
  watching.fake.raise("fake1", {.kind = Kind::kPortDown, .port = 1});
  watching.until(1);
  watching.fake.raise("fake0", {.kind = Kind::kPortUp, .port = 2});
  watching.fake.raise(
      "fake0", {.kind = Kind::kQueuePairFailed, .queuePair = 7});
  watching.until(3);
  watching.user.run([&] {
    const auto& seen = watching.seen;
    CHECK_EQ(seen.size(), 3u);
    CHECK_EQ(seen[0].first, "fake1");
    CHECK(seen[0].second.kind == Kind::kPortDown);
    CHECK_EQ(seen[1].first, "fake0");
    CHECK(seen[1].second.kind == Kind::kPortUp);
    CHECK_EQ(int{seen[1].second.port}, 2);
    CHECK(seen[2].second.kind == Kind::kQueuePairFailed);
    CHECK_EQ(seen[2].second.queuePair, 7u);
  });
}

} // namespace
} // namespace resilient
