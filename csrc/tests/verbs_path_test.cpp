#include "transport/verbs_path.h"

#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "base/random.h"
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
      CHECK(VerbsEnd::make(fake, ports[side], {}, (*ends)[side]).ok());
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
        config.faults = &user.faults;
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
    return true;
  }
  bool tellsEvidence() const override {
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
  explicit Lone(VerbsPathConfig config = {}) {
    std::vector<VerbsPort> ports;
    CHECK(fake.ports(ports).ok());
    std::unique_ptr<VerbsEnd> mine;
    CHECK(VerbsEnd::make(fake, ports[0], {}, mine).ok());
    CHECK(VerbsEnd::make(fake, ports[1], {}, far).ok());
    number = mine->queuePair().address().queuePair;
    CHECK(mine->queuePair().connect(far->queuePair().address()).ok());
    CHECK(far->queuePair().connect(mine->queuePair().address()).ok());
    user.run([&] {
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

// What it has sent is there, but the acknowledgement is lost with all that the
// far end sends: no send of ours is left to show it.
TEST(verbs_path_that_waits_for_an_acknowledgement_finds_silence) {
  Lone lone;
  const auto completed = [&] {
    PathStats stats;
    lone.user.path().fill(stats);
    return stats.verbs->completed;
  };
  lone.user.run([&] {
    lone.user.channel.setClasses(1, uint8_t{0xf});
    lone.user.send("not acknowledged");
  });
  lone.user.until("it is sent", [&] { return completed() >= 2; });
  lone.user.run([&] { CHECK(lone.user.path().usable()); });
  lone.fake.silence(lone.number, true);
  lone.user.until("it is silent", [&] { return !lone.user.path().usable(); });
  lone.fake.silence(lone.number, false);
  lone.user.until("it is heard", [&] { return lone.user.path().usable(); });
}

TEST(silence_limit_follows_slow_answers) {
  SilenceLimit silence(40ms);
  CHECK_EQ(silence.limit().count(), Nanos(40ms).count());
  silence.onAnswer(5us); // hardware
  CHECK_EQ(silence.limit().count(), Nanos(40ms).count());
  silence.onAnswer(25ms); // once
  silence.onAnswer(5us);
  CHECK(silence.limit() > 95ms && silence.limit() <= 100ms);
  for (int i = 0; i < 200; ++i) {
    silence.onAnswer(5us);
  }
  CHECK_EQ(silence.limit().count(), Nanos(40ms).count());
  silence.onAnswer(3s);
  CHECK_EQ(silence.limit().count(), Nanos(160ms).count());
}

// As some devices do after a failure.
TEST(verbs_path_that_never_completes_a_send_is_closed) {
  VerbsPathConfig config;
  config.silentAfter = 5ms;
  config.closeAfter = 20ms;
  Lone lone(config);
  lone.fake.silence(lone.number, true);
  lone.user.run([&] {
    lone.user.channel.setClasses(1, uint8_t{0xf});
    lone.user.send("lost");
  });
  CHECK_CONTAINS(lone.end(), "fake0 -> fake1: no send was completed for ");
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

// 32 receives and the sends under way come back with it.
TEST(verbs_path_counts_the_request_that_ended_it) {
  for (const bool isFlushed : {false, true}) {
    Lone lone;
    PathStats stats;
    lone.user.run([&] {
      lone.user.whenClosed = [&stats](Path& path) { path.fill(stats); };
      lone.fake.silence(lone.number, true);
      lone.user.channel.setClasses(1, uint8_t{0xf});
      lone.user.send("lost");
    });
    lone.user.until(
        "the silence shows", [&] { return !lone.user.path().usable(); });
    isFlushed ? lone.fake.fence(lone.number) : lone.fake.giveUp(lone.number);
    CHECK_CONTAINS(lone.end(), isFlushed ? "flushed" : "retry counter");
    CHECK_EQ(stats.verbs->failed, 1u);
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
  CHECK(VerbsEnd::make(fake, ports[0], {}, mine).ok());
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

namespace {

// Two processes with a path between them, and memory lent to its devices.
class ReadingPair {
 public:
  explicit ReadingPair(
      uint64_t fromBytes = 1,
      std::array<Nanos, 2> silentAfter = {40ms, 40ms})
      : silentAfter_(silentAfter) {
    std::vector<VerbsPort> ports;
    CHECK(fake.ports(ports).ok());
    for (size_t side = 0; side < 2; ++side) {
      VerbsLoans::Limits limits;
      limits.fromBytes = fromBytes;
      users[side].run([&] {
        loans[side] = std::make_unique<VerbsLoans>(users[side].loop, limits);
      });
    }
    connect();
  }
  ~ReadingPair() {
    for (size_t side = 0; side < 2; ++side) {
      users[side].run([&] {
        users[side].paths.clear();
        loans[side].reset();
      });
    }
  }

  void connect() {
    std::vector<VerbsPort> ports;
    CHECK(fake.ports(ports).ok());
    std::array<std::unique_ptr<VerbsEnd>, 2> ends;
    for (size_t side = 0; side < 2; ++side) {
      CHECK(VerbsEnd::make(fake, ports[side], {}, ends[side]).ok());
      numbers[side] = ends[side]->queuePair().address().queuePair;
    }
    for (size_t side = 0; side < 2; ++side) {
      CHECK(
          ends[side]
              ->queuePair()
              .connect(ends[1 - side]->queuePair().address())
              .ok());
    }
    ++lastPath;
    for (size_t side = 0; side < 2; ++side) {
      users[side].run([&] {
        VerbsPathConfig config;
        config.initiator = side == 0;
        config.silentAfter = silentAfter_[side];
        config.loans = loans[side].get();
        config.faults = &users[side].faults;
        config.remoteReads = ends[side]->queuePair().address().reads;
        users[side].paths.push_back(
            std::make_unique<VerbsPath>(
                users[side].loop,
                users[side].channel,
                lastPath,
                std::move(ends[side]),
                config,
                users[side]));
        users[side].channel.setClasses(lastPath, uint8_t{0xf});
      });
    }
  }
  // Lends memory, and waits until the device knows it.
  VerbsLoans::Loan lend(size_t side, void* data, size_t bytes) {
    const std::span<std::byte> memory(static_cast<std::byte*>(data), bytes);
    VerbsLoans::Loan loan = 0;
    users[side].run([&] { loan = loans[side]->lend({&memory, 1}); });
    users[side].until("the memory is registered", [&] {
      const auto& path = static_cast<VerbsPath&>(users[side].path());
      return loans[side]->find(path.device(), memory) != nullptr;
    });
    return loan;
  }

  test::VerbsFake fake;
  test::PathUser users[2] = {test::PathUser{1}, test::PathUser{2}};
  std::unique_ptr<VerbsLoans> loans[2];
  uint32_t numbers[2] = {0, 0};
  PathId lastPath = 0;

 private:
  const std::array<Nanos, 2> silentAfter_;
};

std::string pattern(size_t bytes, uint64_t seed) {
  std::string text(bytes, '?');
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = mixBits(seed ^ (i << 8));
    std::memcpy(text.data() + i, &word, std::min<size_t>(8, bytes - i));
  }
  return text;
}

} // namespace

TEST(verbs_path_reads_large_payloads_where_they_lie) {
  constexpr size_t kBytes = 8u << 20;
  for (const bool lentAtReceiver : {true, false}) {
    ReadingPair pair;
    const std::string content = pattern(kBytes, 1);
    test::TestSend* send = nullptr;
    test::TestRecv* recv = nullptr;
    // The receive first: its memory is known, and the message granted at once.
    pair.users[1].run([&] { recv = &pair.users[1].receive(kBytes); });
    if (lentAtReceiver) {
      pair.lend(1, recv->content.data(), kBytes);
    }
    pair.users[0].run(
        [&] { send = &pair.users[0].sends.emplace_back(content); });
    pair.lend(0, send->content.data(), kBytes);
    pair.users[0].run(
        [&] { pair.users[0].channel.send(send, pair.users[0].loop.now()); });
    pair.users[1].until("it is received", [&] { return recv->ends == 1; });
    pair.users[1].run([&] {
      CHECK(recv->status.ok());
      CHECK(recv->content == content);
    });
    pair.users[0].until("it is sent", [&] { return send->ends == 1; });
    // All but the first chunks, which had no grant yet.
    CHECK(pair.fake.bytesRead() > kBytes / 2);
    CHECK_EQ(pair.fake.refusedReads(), 0u);
    CHECK(pair.fake.faults().empty());
  }
}

// A rule acts on what is sent, and cannot hold back what the far end fetches.
TEST(verbs_path_refers_to_nothing_under_rules) {
  constexpr size_t kBytes = 4u << 20;
  ReadingPair pair;
  const std::string content = pattern(kBytes, 3);
  test::TestSend* send = nullptr;
  test::TestRecv* recv = nullptr;
  pair.users[1].run([&] { recv = &pair.users[1].receive(kBytes); });
  pair.lend(1, recv->content.data(), kBytes);
  pair.users[0].run([&] {
    pair.users[0].plan.add("rate bytes_per_s=1e9", pair.users[0].loop.now());
    pair.users[0].path().faultsChanged(true);
    send = &pair.users[0].sends.emplace_back(content);
  });
  pair.lend(0, send->content.data(), kBytes);
  pair.users[0].run(
      [&] { pair.users[0].channel.send(send, pair.users[0].loop.now()); });
  pair.users[1].until("it is received", [&] { return recv->ends == 1; });
  pair.users[1].run([&] { CHECK(recv->content == content); });
  CHECK_EQ(pair.fake.bytesRead(), 0u);
}

TEST(verbs_path_is_not_used_where_a_rule_names_a_connection) {
  FaultPlan plan;
  PathFaults faults(plan, 0, 1, -1);
  VerbsPathConfig config;
  config.faults = &faults;
  Lone lone(config);
  const auto usable = [&] {
    lone.user.path().faultsChanged(true);
    return lone.user.path().usable();
  };
  lone.user.run([&] {
    const uint64_t other =
        plan.add("stall peer=7 path=0", lone.user.loop.now());
    CHECK(usable());
    const uint64_t rule = plan.add("stall peer=1 path=0", lone.user.loop.now());
    CHECK(!usable());
    CHECK(plan.remove(rule));
    CHECK(usable());
    CHECK(plan.remove(other));
  });
}

TEST(verbs_path_ends_reads_that_nobody_answers) {
  constexpr size_t kBytes = 4u << 20;
  ReadingPair pair;
  const std::string content = pattern(kBytes, 2);
  test::TestSend* send = nullptr;
  test::TestRecv* recv = nullptr;
  pair.users[1].run([&] { recv = &pair.users[1].receive(kBytes); });
  pair.lend(1, recv->content.data(), kBytes);
  pair.users[0].run([&] { send = &pair.users[0].sends.emplace_back(content); });
  pair.lend(0, send->content.data(), kBytes);
  // What the receiver's device asks for does not come.
  pair.fake.silence(pair.numbers[1], true);
  pair.users[0].run(
      [&] { pair.users[0].channel.send(send, pair.users[0].loop.now()); });
  pair.users[0].until(
      "the sender notices", [&] { return !pair.users[0].path().usable(); });
  pair.users[1].run([&] { CHECK_EQ(recv->ends, 0); });
  // Another path, and the whole message arrives.
  pair.users[0].run([&] {
    pair.users[0].path().close(Status(StatusCode::kAborted, "silent"));
  });
  pair.users[1].run([&] {
    pair.users[1].path().close(Status(StatusCode::kAborted, "silent"));
  });
  pair.connect();
  pair.users[1].until("it is received", [&] { return recv->ends == 1; });
  pair.users[1].run([&] { CHECK(recv->content == content); });
  pair.users[0].until("it is sent", [&] { return send->ends == 1; });
}

// Keeps the loop of a user busy, until release().
class Busy {
 public:
  explicit Busy(test::PathUser& user) {
    user.loop.post([this] {
      begun_.set_value();
      ended_.get_future().wait();
    });
    begun_.get_future().wait();
  }
  void release() {
    ended_.set_value();
  }

 private:
  std::promise<void> begun_, ended_;
};

// A device may keep a queue pair for seconds, and flushes its requests at once.
TEST(verbs_path_that_is_closed_waits_for_no_device_to_let_go) {
  constexpr size_t kBytes = 1u << 20;
  ReadingPair pair(1, {60s, 60s});
  const auto sent = [&](size_t side) {
    PathStats stats;
    pair.users[side].path().fill(stats);
    return stats.verbs->sends;
  };
  const std::string content = pattern(kBytes, 3);
  test::TestSend* send = nullptr;
  test::TestRecv* recv = nullptr;
  pair.users[1].run([&] { recv = &pair.users[1].receive(kBytes); });
  pair.lend(1, recv->content.data(), kBytes);
  pair.users[0].run([&] { send = &pair.users[0].sends.emplace_back(content); });
  pair.lend(0, send->content.data(), kBytes);
  // From the grant on, nothing comes to the sender, and no read is answered.
  Busy receiver(pair.users[1]);
  const uint64_t before = sent(1);
  pair.users[0].run(
      [&] { pair.users[0].channel.send(send, pair.users[0].loop.now()); });
  pair.users[0].until("the offer is sent", [&] { return sent(0) > 1; });
  Busy sender(pair.users[0]);
  receiver.release();
  pair.users[1].until("it is granted", [&] { return sent(1) > before; });
  pair.fake.silence(pair.numbers[0], true);
  sender.release();
  pair.users[1].until("it reads", [&] {
    return static_cast<VerbsPath&>(pair.users[1].path()).inMidst();
  });
  pair.fake.keep(true);
  const Status why(StatusCode::kAborted, "its interface is down");
  for (test::PathUser& user : pair.users) {
    user.run([&] { user.path().close(why); });
  }
  try {
    pair.connect();
    pair.users[1].until("it is received", [&] { return recv->ends == 1; });
  } catch (...) {
    pair.fake.keep(false);
    throw;
  }
  pair.fake.keep(false);
  pair.users[1].run([&] { CHECK(recv->content == content); });
  pair.users[0].until("it is sent", [&] { return send->ends == 1; });
}

// All that the receiver sends is lost, and so would be its reads: they would
// keep their places until the path is closed, long after the chunks have come
// over another one.
TEST(verbs_path_reads_nothing_while_it_is_silent) {
  constexpr size_t kBytes = 4u << 20;
  ReadingPair pair(1, {60s, 5ms});
  const auto sent = [&](size_t side) {
    PathStats stats;
    pair.users[side].path().fill(stats);
    return stats.verbs->sends;
  };
  const std::string content = pattern(kBytes, 4);
  test::TestSend* send = nullptr;
  test::TestRecv* recv = nullptr;
  pair.users[1].run([&] { recv = &pair.users[1].receive(kBytes); });
  pair.lend(1, recv->content.data(), kBytes);
  pair.users[0].run([&] { send = &pair.users[0].sends.emplace_back(content); });
  pair.lend(0, send->content.data(), kBytes);
  pair.users[1].until(
      "it can be used", [&] { return pair.users[1].path().usable(); });
  // The sender has the grant, and refers to its memory when the receiver's path
  // is silent.
  Busy receiver(pair.users[1]);
  const uint64_t before = sent(1);
  pair.users[0].run(
      [&] { pair.users[0].channel.send(send, pair.users[0].loop.now()); });
  pair.users[0].until("the offer is sent", [&] { return sent(0) > 1; });
  Busy sender(pair.users[0]);
  receiver.release();
  pair.users[1].until("it is granted", [&] { return sent(1) > before; });
  pair.fake.silence(pair.numbers[0], true);
  pair.users[1].run([&] { pair.users[1].send("lost"); });
  pair.users[1].until(
      "it is silent", [&] { return !pair.users[1].path().usable(); });
  const uint64_t read = pair.fake.bytesRead();
  sender.release();
  pair.users[0].run([] {});
  pair.users[1].run([&] {
    const auto& path = static_cast<VerbsPath&>(pair.users[1].path());
    CHECK(!path.closed());
    CHECK(!path.inMidst());
  });
  // It goes on where it has stopped.
  pair.fake.silence(pair.numbers[0], false);
  pair.users[1].until("it is received", [&] { return recv->ends == 1; });
  pair.users[1].run([&] { CHECK(recv->content == content); });
  CHECK(pair.fake.bytesRead() > read);
}

// Messages of all sizes, with memory that is lent or not, over paths that fail
// at any moment. What is given back is overwritten at once.
TEST(verbs_path_reads_survive_failures) {
  test::forSeeds(6, [](uint64_t seed) {
    Prng prng(seed);
    ReadingPair pair;
    constexpr size_t kMessages = 12;
    std::vector<size_t> sizes;
    std::vector<test::TestSend*> sends;
    std::vector<test::TestRecv*> receives;
    for (size_t i = 0; i < kMessages; ++i) {
      sizes.push_back(1 + prng.below(prng.chance(0.5) ? 3u << 20 : 200'000));
      const std::string content = pattern(sizes[i], seed + i);
      pair.users[1].run([&] {
        receives.push_back(&pair.users[1].receives.emplace_back(
            &pair.users[1].channel, sizes[i], i));
      });
      pair.users[0].run([&] {
        sends.push_back(&pair.users[0].sends.emplace_back(content, i));
      });
      if (prng.chance(0.8)) {
        pair.lend(0, sends[i]->content.data(), sizes[i]);
      }
      if (prng.chance(0.8)) {
        pair.lend(1, receives[i]->content.data(), sizes[i]);
      }
      pair.users[1].run([&] { pair.users[1].mailbox.post(receives[i]); });
      pair.users[0].run([&] {
        pair.users[0].channel.send(sends[i], pair.users[0].loop.now());
      });
      if (prng.chance(0.5)) {
        const size_t side = prng.below(2);
        if (prng.chance(0.5)) {
          pair.fake.silence(pair.numbers[side], true);
        } else {
          pair.fake.giveUp(pair.numbers[side]);
        }
        // As their owners would: each end at its own time.
        for (const size_t end : {side, 1 - side}) {
          pair.users[end].run([&] {
            pair.users[end].path().close(
                Status(StatusCode::kNetwork, "it has failed"));
          });
        }
        pair.connect();
      }
    }
    // The last path stays.
    pair.connect();
    for (size_t i = 0; i < kMessages; ++i) {
      pair.users[1].until(
          "a message is received", [&] { return receives[i]->ends == 1; });
      pair.users[1].run([&] {
        CHECK(receives[i]->status.ok());
        CHECK(receives[i]->content == pattern(sizes[i], seed + i));
        std::ranges::fill(receives[i]->content, '!');
      });
      pair.users[0].until(
          "a message is sent", [&] { return sends[i]->ends == 1; });
      pair.users[0].run([&] { std::ranges::fill(sends[i]->content, '!'); });
    }
    pair.users[1].run([&] {
      for (const test::TestRecv* recv : receives) {
        CHECK(std::ranges::all_of(recv->content, [](char c) {
          return c == '!';
        }));
      }
    });
    CHECK(pair.fake.faults().empty());
  });
}

TEST(verbs_loans_are_of_their_operation_only) {
  ReadingPair pair;
  std::vector<std::byte> memory(4096);
  const auto known = [&](std::span<const std::byte> bytes) {
    bool is = false;
    pair.users[0].run([&] {
      std::shared_ptr<VerbsDevice> device;
      const auto& path = static_cast<VerbsPath&>(pair.users[0].path());
      is = pair.loans[0]->find(path.device(), bytes) != nullptr;
    });
    return is;
  };
  const size_t before = pair.fake.memories();
  const VerbsLoans::Loan loan = pair.lend(0, memory.data(), memory.size());
  CHECK(loan != 0);
  CHECK(known(memory));
  CHECK(known(std::span(memory).subspan(100, 5)));
  CHECK(!known({memory.data() + 4000, 97}));
  pair.users[0].run([&] { pair.loans[0]->end(loan); });
  CHECK(!known(memory)); // at once
  pair.users[0].until(
      "it is deregistered", [&] { return pair.fake.memories() == before; });

  // Another operation has the same memory: what its far end knows stays valid.
  const VerbsLoans::Loan first = pair.lend(0, memory.data(), memory.size());
  const VerbsLoans::Loan second = pair.lend(0, memory.data(), memory.size());
  pair.users[0].run([&] { pair.loans[0]->end(first); });
  CHECK(known(memory));
  pair.users[0].until("both are registered", [&] {
    return pair.fake.memories() == before + 2;
  });
  pair.users[0].run([&] { pair.loans[0]->end(second); });
  pair.users[0].until(
      "both are deregistered", [&] { return pair.fake.memories() == before; });

  // After a failure, the owner waits.
  const VerbsLoans::Loan failed = pair.lend(0, memory.data(), memory.size());
  std::atomic<bool> gone{false};
  pair.users[0].run([&] {
    pair.loans[0]->revoke(failed, [&](const Status& status) {
      CHECK(status.ok());
      CHECK_EQ(pair.fake.memories(), before);
      gone = true;
    });
    CHECK(!gone);
  });
  pair.users[0].until("it is gone", [&] { return gone.load(); });
  pair.users[0].run([&] { CHECK(pair.loans[0]->settled()); });
}

TEST(verbs_loans_settle_from_the_beginning) {
  ReadingPair pair;
  std::vector<std::byte> memory(50u << 20); // more than three pieces
  const std::span<std::byte> all(memory);
  VerbsLoans& loans = *pair.loans[0];
  std::atomic<int> told{0};
  const auto onSettled =
      std::make_shared<std::function<void()>>([&] { ++told; });
  pair.users[0].run([&] {
    CHECK_EQ(loans.settled(all), all.size()); // nobody has lent it
    loans.watch(onSettled);
    loans.lend({&all, 1});
    CHECK_EQ(loans.settled(all), 0u); // the thread's news comes in a turn
    CHECK_EQ(loans.settled(all.subspan(40u << 20)), 0u);
  });
  const auto known = [&](size_t offset, size_t bytes) {
    const auto& path = static_cast<VerbsPath&>(pair.users[0].path());
    return loans.find(path.device(), all.subspan(offset, bytes)) != nullptr;
  };
  pair.users[0].until("all of it is settled", [&] {
    const uint64_t settled = loans.settled(all);
    CHECK(settled == all.size() || settled % (16u << 20) == 0);
    CHECK(settled < (1u << 20) || known(settled - (1u << 20), 1u << 20));
    return settled == all.size();
  });
  CHECK(told > 0);
  // One piece has whatever a path looks for.
  pair.users[0].run([&] {
    for (size_t at = 0; at + VerbsLoans::kMaxFound <= all.size();
         at += 333333) {
      CHECK(known(at, VerbsLoans::kMaxFound));
    }
  });
}

TEST(verbs_path_reads_nothing_that_was_not_announced) {
  Lone lone;
  FrameHeader header;
  header.type = FrameType::kData;
  header.message = 7;
  header.chunkBytes = 4096;
  header.totalBytes = header.payloadBytes = 4096;
  header.flags = kFlagReference;
  FrameBytes bytes;
  encodeFrame(header, bytes);
  std::byte* const slot = lone.far->sendSlot(0);
  const uint32_t posted = VerbsEnd::kSlots;
  std::memset(slot, 0, 8);
  std::memcpy(slot, &posted, 4);
  std::memcpy(slot + 8, bytes.data(), bytes.size());
  std::memset(slot + 8 + bytes.size(), 0, 16);
  CHECK(lone.far->send(0, 8 + bytes.size() + 16).ok());
  CHECK_CONTAINS(lone.end(), "refers to a payload that cannot be one");
}

} // namespace resilient
