#include "transport/verbs_watch.h"

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/path_contract.h"
#include "tests/verbs_fake.h"

namespace resilient {
namespace {

// A loop that runs, and the events that it has seen.
struct Watching {
  explicit Watching(const std::set<std::string>& devices)
      : Watching(devices, devices) {}
  // `absent` comes later.
  Watching(
      const std::set<std::string>& devices,
      const std::set<std::string>& wanted,
      const std::string& absent = "") {
    if (!absent.empty()) {
      fake.remove(absent, true);
    }
    user.run([&] {
      watch = std::make_unique<VerbsWatch>(
          user.loop,
          fake,
          devices,
          [wanted](const std::string& name) { return wanted.contains(name); },
          [this](
              const std::string& name,
              const VerbsDevice&,
              const VerbsEvent& event) { seen.emplace_back(name, event); });
    });
  }
  ~Watching() {
    user.run([this] { watch.reset(); });
  }
  void until(size_t count) {
    user.until("the events came", [&] { return seen.size() >= count; });
  }

  test::VerbsFake fake{3};
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

TEST(verbs_watch_opens_a_device_anew_that_has_failed) {
  using Kind = VerbsEvent::Kind;
  Watching watching({"fake0", "fake1"});
  watching.fake.fail("fake1");
  watching.until(1);
  watching.user.run([&] {
    CHECK_EQ(watching.seen[0].first, "fake1");
    CHECK(watching.seen[0].second.kind == Kind::kDeviceFailed);
    CHECK(watching.watch->isFailed("fake1"));
    CHECK(!watching.watch->isFailed("fake0"));
  });
  watching.user.until(
      "it is closed", [&] { return watching.fake.openDevices() == 1; });
  watching.fake.bringBack("fake1");
  watching.until(2); // the watch looks by itself, after a pause
  watching.user.run([&] {
    CHECK_EQ(watching.seen[1].first, "fake1");
    CHECK(watching.seen[1].second.kind == Kind::kDeviceBack);
    CHECK(!watching.watch->isFailed("fake1"));
  });
  watching.fake.raise("fake1", {.kind = Kind::kPortDown, .port = 1});
  watching.until(3);
  watching.user.run(
      [&] { CHECK(watching.seen[2].second.kind == Kind::kPortDown); });
}

// Soft-RoCE removes a device only when nobody has it open.
TEST(verbs_watch_lets_go_of_a_device_that_is_being_removed) {
  using Kind = VerbsEvent::Kind;
  Watching watching({"fake0"});
  const auto look = [&] { watching.user.run([&] { watching.watch->look(); }); };
  look(); // in vain
  watching.fake.remove("fake0", true);
  look();
  watching.until(1);
  watching.user.run(
      [&] { CHECK(watching.seen[0].second.kind == Kind::kDeviceFailed); });
  watching.user.until(
      "it is closed", [&] { return watching.fake.openDevices() == 0; });
  watching.fake.remove("fake0", false);
  look();
  watching.until(2);
  watching.user.run(
      [&] { CHECK(watching.seen[1].second.kind == Kind::kDeviceBack); });
}

TEST(verbs_watch_finds_a_device_that_comes_later) {
  using Kind = VerbsEvent::Kind;
  Watching watching({"fake0"}, {"fake0", "fake2"}, "fake2");
  const auto look = [&] { watching.user.run([&] { watching.watch->look(); }); };
  look(); // fake1 is there, and not wanted
  watching.fake.remove("fake2", false);
  look();
  watching.until(1);
  watching.user.run([&] {
    CHECK_EQ(watching.seen[0].first, "fake2");
    CHECK(watching.seen[0].second.kind == Kind::kDeviceBack);
    CHECK(!watching.watch->isFailed("fake2"));
  });
  CHECK_EQ(watching.fake.openDevices(), 2u);
  look(); // it is known
  watching.fake.raise("fake2", {.kind = Kind::kPortDown, .port = 1});
  watching.until(2);
  watching.user.run(
      [&] { CHECK(watching.seen[1].second.kind == Kind::kPortDown); });
  watching.fake.remove("fake2", true);
  look();
  watching.until(3);
  watching.user.run(
      [&] { CHECK(watching.seen[2].second.kind == Kind::kDeviceFailed); });
}

TEST(verbs_watch_tries_again_to_open_a_device_that_comes_later) {
  Watching watching({"fake0"}, {"fake0", "fake2"}, "fake2");
  watching.fake.refuseOpen("fake2", true);
  watching.fake.remove("fake2", false);
  watching.user.run([&] { watching.watch->look(); });
  watching.user.until("it is refused", [&] {
    return watching.watch->isFailed("fake2") &&
        watching.fake.refusedOpens() != 0;
  });
  watching.fake.refuseOpen("fake2", false);
  watching.until(1); // the watch looks by itself, after a pause
  watching.user.run([&] {
    CHECK(watching.seen[0].second.kind == VerbsEvent::Kind::kDeviceBack);
    CHECK(!watching.watch->isFailed("fake2"));
  });
}

TEST(hotplug_watch_knows_rdma_devices) {
  using namespace std::string_view_literals;
  CHECK(
      HotplugWatch::concerns(
          "remove@/devices/virtual/infiniband_verbs/uverbs0\0ACTION=remove\0"
          "SUBSYSTEM=infiniband_verbs\0SEQNUM=7\0"sv));
  CHECK(HotplugWatch::concerns("add@/x\0SUBSYSTEM=infiniband"sv));
  CHECK(!HotplugWatch::concerns("add@/x\0SUBSYSTEM=infiniband_mad\0"sv));
  CHECK(!HotplugWatch::concerns("add@/x\0OTHER_SUBSYSTEM=infiniband\0"sv));
  CHECK(!HotplugWatch::concerns(""sv));
}

} // namespace
} // namespace resilient
