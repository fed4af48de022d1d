#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/engine_ranks.h"
#include "tests/verbs_fake.h"
#include "transport/address.h"
#include "transport/verbs_choice.h"
#include "transport/verbs_system.h"

// Two engines with RDMA devices in memory: what happens above the paths when a
// device fails. Each rank reads in the store that the other one is on another
// host, since ranks on one host share memory.

namespace resilient {

using namespace std::chrono_literals;

namespace {

class TwoHosts {
 public:
  TwoHosts() {
    fake.setAddress(gidOf(SocketAddress::parse("127.0.0.1", 0).value()));
    replaceSystemVerbs(&fake);
    auto map = std::make_shared<test::MapStore>();
    map->moved = hostIdentity();
    map->to = std::string(map->moved.size(), '0');
    ranks = test::startRanks(
        2,
        [](int rank) {
          EngineOptions options;
          options.interface = "lo";
          options.rdma_devices = "fake" + std::to_string(rank);
          options.rdma_zero_copy_from_bytes = 64 << 10;
          return options;
        },
        map);
  }
  ~TwoHosts() {
    test::leave(ranks);
    CHECK(fake.faults().empty());
    replaceSystemVerbs(nullptr);
  }

  PathStats rdma(int rank) const {
    const GroupStats stats = ranks[static_cast<size_t>(rank)].group->stats();
    for (const PathStats& path : stats.peers[0].paths) {
      if (path.kind == PathKind::kVerbs) {
        return path;
      }
    }
    return {};
  }
  // Messages in both directions, whose bytes are checked.
  void exchange(int rounds = 1) {
    test::onEach(ranks, [&](int r) {
      for (int i = 0; i < rounds; ++i) {
        test::Rank& rank = ranks[static_cast<size_t>(r)];
        std::vector<float> data(kCount);
        for (const int sender : {0, 1}) {
          const float first = static_cast<float>(1000 * sender + i);
          if (r == sender) {
            for (size_t k = 0; k < kCount; ++k) {
              data[k] = first + static_cast<float>(k % 1000);
            }
          }
          const Status status =
              rank.message(r == sender, 1 - r, 1, data, test::kLong);
          CHECK_EQ(status.message(), "");
          for (size_t k = 0; k < kCount; ++k) {
            CHECK_EQ(data[k], first + static_cast<float>(k % 1000));
          }
        }
      }
    });
  }
  // One message, in one direction.
  void send(int from) {
    test::onEach(ranks, [&](int r) {
      std::vector<float> data(kCount, r == from ? 7.0F : 0.0F);
      const Status status = ranks[static_cast<size_t>(r)].message(
          r == from, 1 - r, 2, data, test::kLong);
      CHECK_EQ(status.message(), "");
      CHECK(std::ranges::count(data, 7.0F) == ptrdiff_t(kCount));
    });
  }
  // Exchanges messages meanwhile.
  void until(const char* what, const std::function<bool()>& met) {
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (!met()) {
      if (std::chrono::steady_clock::now() > end) {
        CHECK_EQ(std::string("in time: ") + what, "");
      }
      exchange();
    }
  }
  bool carries() const {
    return rdma(0).state == "up" && rdma(1).state == "up";
  }
  void untilItCarries() {
    until("RDMA carries", [this] { return carries(); });
  }
  // Whether large messages are read over RDMA.
  bool isRead() {
    const uint64_t before = fake.bytesRead();
    exchange();
    return fake.bytesRead() - before > kCount * sizeof(float);
  }

  static constexpr size_t kCount = 256 << 10;
  test::VerbsFake fake;
  std::vector<test::Rank> ranks;
};

} // namespace

TEST(engine_leaves_an_rdma_device_that_fails_and_returns_to_it) {
  TwoHosts hosts;
  hosts.untilItCarries();
  hosts.until("tensors are read", [&] { return hosts.isRead(); });
  const uint32_t before = hosts.rdma(1).verbs->queuePair;
  std::atomic<bool> ended{false};
  std::thread messages([&] {
    while (!ended) {
      hosts.exchange();
    }
  });
  std::this_thread::sleep_for(5ms); // anywhere in a message
  hosts.fake.fail("fake1");
  const auto until = [&](const std::function<bool()>& met) {
    const auto end = std::chrono::steady_clock::now() + 30s;
    while (!met() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
    }
    return met();
  };
  // Nothing of it is left. The other device stays open.
  const bool isLeft = until([&] {
    return hosts.fake.openDevices() == 1 && hosts.fake.queuePairs() == 0;
  });
  ended = true;
  messages.join();
  CHECK(isLeft);
  CHECK_EQ(hosts.fake.memories(), 0u);
  CHECK_EQ(hosts.rdma(0).state, "down");
  CHECK_EQ(hosts.rdma(1).lastError, "fake1 failed");
  CHECK(!hosts.isRead()); // connections carry
  hosts.fake.bringBack("fake1");
  hosts.untilItCarries();
  hosts.until("tensors are read", [&] { return hosts.isRead(); });
  CHECK_EQ(hosts.fake.openDevices(), 2u);
  CHECK(hosts.rdma(1).verbs->queuePair != before);
}

TEST(engine_makes_a_queue_pair_anew_that_has_failed) {
  TwoHosts hosts;
  hosts.untilItCarries();
  const uint32_t before = hosts.rdma(0).verbs->queuePair;
  hosts.fake.raise(
      "fake0",
      {.kind = VerbsEvent::Kind::kQueuePairFailed, .queuePair = before});
  hosts.until("both ends know", [&] {
    return hosts.rdma(0).lastError == "a queue pair of fake0 failed" &&
        hosts.rdma(1).lastError.find("says: a queue pair of fake0 failed") !=
        std::string::npos;
  });
  hosts.untilItCarries();
  CHECK(hosts.rdma(0).verbs->queuePair != before);
  hosts.until("tensors are read", [&] { return hosts.isRead(); });
}

TEST(engine_copies_what_an_rdma_device_does_not_register) {
  TwoHosts hosts;
  hosts.untilItCarries();
  hosts.until("tensors are read", [&] { return hosts.isRead(); });
  hosts.fake.hang("fake0", true);
  const uint64_t read = hosts.fake.bytesRead();
  const uint64_t sent = hosts.rdma(0).bytesSent;
  hosts.send(0);
  CHECK_EQ(hosts.fake.bytesRead(), read);
  CHECK(hosts.rdma(0).bytesSent > sent); // in slots
  hosts.fake.hang("fake0", false);
  hosts.until("tensors are read again", [&] { return hosts.isRead(); });
}

TEST(engine_goes_on_while_an_rdma_device_makes_a_queue_pair) {
  for (const int rank : {0, 1}) { // the one that offers, and the other
    TwoHosts hosts;
    hosts.untilItCarries();
    const std::string device = "fake" + std::to_string(rank);
    hosts.until("tensors are read", [&] { return hosts.isRead(); });
    hosts.fake.hang(device, true);
    hosts.fake.raise(
        device,
        {.kind = VerbsEvent::Kind::kQueuePairFailed,
         .queuePair = hosts.rdma(rank).verbs->queuePair});
    // A tensor, the end that was, and the memory of the next one.
    hosts.until("all wait", [&] { return hosts.fake.hanging() >= 3; });
    hosts.exchange(2); // connections carry
    hosts.fake.hang(device, false);
    hosts.untilItCarries();
    hosts.until("tensors are read again", [&] { return hosts.isRead(); });
  }
}

TEST(engine_lets_an_rdma_path_rest_that_was_silent) {
  TwoHosts hosts;
  hosts.untilItCarries();
  const uint32_t number = hosts.rdma(0).verbs->queuePair;
  std::string state;
  for (int outage = 0; outage < 3; ++outage) {
    hosts.untilItCarries();
    hosts.fake.silence(number, true);
    hosts.until(
        "it is silent", [&] { return hosts.rdma(0).state == "suspect"; });
    std::this_thread::sleep_for(150ms); // longer than a late answer
    CHECK_EQ(hosts.rdma(0).verbs->queuePair, number);
    hosts.fake.silence(number, false);
    hosts.until("it is heard", [&] {
      state = hosts.rdma(0).state;
      return state != "suspect";
    });
  }
  CHECK_EQ(state, "proving"); // for 2.4 s
  hosts.untilItCarries();
  CHECK_EQ(hosts.rdma(0).verbs->queuePair, number);
}

TEST(engine_keeps_memory_of_an_rdma_device_that_does_not_answer) {
  TwoHosts hosts;
  hosts.untilItCarries();
  // A receive that nobody sends to.
  auto memory = std::make_shared<std::vector<float>>(hosts.kCount);
  const std::weak_ptr<std::vector<float>> kept = memory;
  test::Rank& rank = hosts.ranks[1];
  const size_t before = hosts.fake.memories();
  auto waiter = std::make_shared<test::Waiter>(*rank.engine);
  auto spec = std::make_shared<PointToPointSpec>();
  spec->isSend = false;
  spec->peer = 0;
  spec->tag = 7;
  spec->signature.dtype = DType::kFloat32;
  spec->signature.count = memory->size();
  spec->timeout = 1s;
  spec->data = memory->data();
  spec->bytes = memory->size() * sizeof(float);
  spec->hold = [held = std::exchange(memory, nullptr)] { return held; };
  spec->done = [waiter](const Status& status, int) { waiter->end(status); };
  rank.group->submit(std::move(spec));
  hosts.until(
      "it is registered", [&] { return hosts.fake.memories() > before; });
  hosts.fake.hang("fake1", true);
  hosts.fake.fail("fake1");
  CHECK_CONTAINS(waiter->wait().message(), "an RDMA device does not answer");
  CHECK(!kept.expired());
  // The loop has not waited for it, and the new device owes nothing to it.
  hosts.fake.bringBack("fake1");
  hosts.untilItCarries();
  hosts.until("tensors are read", [&] { return hosts.isRead(); });
  CHECK(!kept.expired());
  CHECK_EQ(hosts.fake.openDevices(), 3u);
  hosts.fake.hang("fake1", false);
  hosts.until("the memory is free", [&] {
    return kept.expired() && hosts.fake.openDevices() == 2;
  });
}

} // namespace resilient
