#include "transport/verbs_path.h"

#include <cstring>
#include <thread>

#include "tests/path_contract.h"
#include "tests/verbs_fake.h"

namespace resilient {

using namespace std::chrono_literals;

namespace {

// Two devices in memory.
class VerbsHelper final : public test::PathHelper {
 public:
  ~VerbsHelper() override {
    CHECK(fake.faults().empty());
  }
  std::array<Maker, 2> connect() override {
    std::vector<VerbsPort> ports;
    CHECK(fake.ports(ports).ok());
    auto ends = std::make_shared<std::array<std::unique_ptr<VerbsEnd>, 2>>();
    for (size_t side = 0; side < 2; ++side) {
      CHECK(VerbsEnd::make(fake, ports[side], (*ends)[side]).ok());
      numbers_[side] = (*ends)[side]->queuePair().address().queuePair;
    }
    std::array<Maker, 2> makers;
    for (size_t side = 0; side < 2; ++side) {
      CHECK((*ends)[side]
                ->queuePair()
                .connect((*ends)[1 - side]->queuePair().address())
                .ok());
    }
    for (size_t side = 0; side < 2; ++side) {
      makers[side] = [ends, side](test::PathUser& user, PathId id) {
        VerbsPathConfig config;
        config.initiator = side == 0;
        config.proveWithin = 60s;
        return std::make_unique<VerbsPath>(
            user.loop,
            user.channel,
            id,
            std::move((*ends)[side]),
            config,
            user);
      };
    }
    return makers;
  }
  // All slots, and what is taken ahead of them.
  uint64_t mostUnread() const override {
    return VerbsEnd::kSlots * VerbsEnd::kSlotBytes + (2u << 20);
  }
  bool noticesEnd() const override {
    return false;
  }
  bool obeysRules() const override {
    return false;
  }
  bool silence(int to, bool silent) override {
    fake.silence(numbers_[to], silent);
    return true;
  }

  test::VerbsFake fake;

 private:
  uint32_t numbers_[2] = {0, 0};
};

} // namespace

PATH_CONTRACT(verbs, VerbsHelper)

namespace {

// A path in its loop, and a queue pair of the test at the far end.
struct Lone {
  Lone() {
    std::vector<VerbsPort> ports;
    CHECK(fake.ports(ports).ok());
    std::unique_ptr<VerbsEnd> mine;
    CHECK(VerbsEnd::make(fake, ports[0], mine).ok());
    CHECK(VerbsEnd::make(fake, ports[1], far).ok());
    number = mine->queuePair().address().queuePair;
    CHECK(mine->queuePair().connect(far->queuePair().address()).ok());
    CHECK(far->queuePair().connect(mine->queuePair().address()).ok());
    user.run([&] {
      VerbsPathConfig config;
      config.initiator = true;
      config.remoteDevice = "fake1";
      user.paths.push_back(
          std::make_unique<VerbsPath>(
              user.loop, user.channel, 1, std::move(mine), config, user));
    });
    user.until("it is proven", [this] { return user.path().usable(); });
  }
  // The far end says: so many receives posted, and then these bytes.
  void say(uint32_t posted, uint32_t zero = 0, size_t bytes = 8) {
    std::byte* const slot = far->sendSlot(0);
    std::memcpy(slot, &posted, 4);
    std::memcpy(slot + 4, &zero, 4);
    CHECK(far->send(0, bytes).ok());
  }
  std::string end() {
    user.until("it is closed", [this] { return user.closed != 0; });
    std::string why;
    user.run([&] { why = user.why.message(); });
    return why;
  }

  test::VerbsFake fake;
  std::unique_ptr<VerbsEnd> far;
  uint32_t number = 0;
  test::PathUser user{1};
};

} // namespace

TEST(verbs_path_ends_with_the_reason_of_a_failed_send) {
  Lone lone;
  lone.user.run([&] { CHECK(!lone.user.path().closed()); });
  lone.fake.silence(lone.number, true);
  lone.user.run([&] {
    lone.user.channel.setClasses(1, uint8_t{0xf});
    lone.user.send("lost");
  });
  lone.user.until(
      "the silence shows", [&] { return !lone.user.path().usable(); });
  lone.user.run([&] { CHECK_EQ(lone.user.closed.load(), 0); });
  lone.fake.giveUp(lone.number);
  CHECK_EQ(lone.end(), "fake0 -> fake1: transport retry counter exceeded");
}

TEST(verbs_path_believes_no_peer_that_counts_wrong) {
  {
    Lone lone;
    lone.say(VerbsEnd::kSlots + 2); // of two sends; there was one
    CHECK_CONTAINS(lone.end(), "posted more receives than it has slots");
  }
  {
    Lone lone;
    lone.say(VerbsEnd::kSlots - 1); // fewer than before
    CHECK_CONTAINS(lone.end(), "posted more receives than it has slots");
  }
  {
    Lone lone;
    lone.say(VerbsEnd::kSlots, /*zero=*/1);
    CHECK_CONTAINS(lone.end(), "posted more receives than it has slots");
  }
  {
    Lone lone;
    lone.say(VerbsEnd::kSlots, 0, /*bytes=*/7);
    CHECK_CONTAINS(lone.end(), "wrong size");
  }
  {
    Lone lone; // bytes that are no frame
    lone.say(VerbsEnd::kSlots, 0, 8 + kFrameHeaderBytes);
    lone.end();
  }
}

TEST(verbs_path_leaves_no_queue_pair_behind) {
  Lone lone;
  lone.user.run(
      [&] { lone.user.path().close(Status(StatusCode::kAborted, "over")); });
  lone.far.reset();
  const auto end = std::chrono::steady_clock::now() + 15s;
  while (lone.fake.queuePairs() != 0 &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  CHECK_EQ(lone.fake.queuePairs(), 0u);
}

TEST(verbs_path_that_nothing_comes_through_is_closed) {
  test::VerbsFake fake;
  std::vector<VerbsPort> ports;
  CHECK(fake.ports(ports).ok());
  std::unique_ptr<VerbsEnd> mine;
  CHECK(VerbsEnd::make(fake, ports[0], mine).ok());
  test::PathUser user{1};
  user.run([&] {
    VerbsPathConfig config;
    config.proveWithin = 20ms;
    config.remoteDevice = "fake1";
    user.paths.push_back(
        std::make_unique<VerbsPath>(
            user.loop, user.channel, 1, std::move(mine), config, user));
  });
  user.until("it is closed", [&] { return user.closed != 0; });
  user.run([&] {
    CHECK_EQ(user.why.message(), "nothing came through: fake0 -> fake1");
  });
}

} // namespace resilient
