#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <latch>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/random.h"
#include "collectives/collectives.h"
#include "collectives/reduce.h"
#include "delegate/engine.h"
#include "delegate/group_impl.h"
#include "tests/check.h"
#include "tests/engine_ranks.h"
#include "tests/fake_peer.h"
#include "tests/test_authority.h"
#include "transport/listener.h"

// Several engines in one process, over real sockets, used from several
// threads: what the thread sanitizer is to see. Behaviour between processes
// is tested from Python.

namespace resilient {
namespace {

using test::FakePeer;
using test::kLong;
using test::leave;
using test::MapKeyValue;
using test::MapStore;
using test::onEach;
using test::Rank;
using test::startRanks;
using test::Waiter;

TEST(engineReducesAndSendsFromManyThreads) {
  EngineOptions options;
  std::vector<Rank> ranks = startRanks(3, options);
  onEach(ranks, [&](int r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    // A second thread sends around the ring, beside the collectives.
    std::thread ring([&] {
      const int next = (r + 1) % 3;
      const int previous = (r + 2) % 3;
      for (int i = 0; i < 20; ++i) {
        std::vector<float> out(1 + 7000 * static_cast<size_t>(i % 3));
        std::vector<float> in(out.size());
        out.back() = static_cast<float>(100 * r + i);
        std::thread sender([&] {
          CHECK_EQ(rank.message(true, next, 5, out, kLong).message(), "");
        });
        CHECK(rank.message(false, previous, 5, in, kLong).ok());
        CHECK_EQ(in.back(), static_cast<float>(100 * previous + i));
        sender.join();
      }
    });
    for (int i = 0; i < 20; ++i) {
      std::vector<float> data(
          i % 2 == 0 ? 10 : 300000, static_cast<float>(r + i));
      CHECK(rank.allReduce(data, kLong).ok());
      CHECK_EQ(data.front(), static_cast<float>(3 + 3 * i));
      CHECK_EQ(data.back(), static_cast<float>(3 + 3 * i));
    }
    ring.join();
    CHECK_EQ(rank.group->stats().operationsPending, 0u);
  });
  leave(ranks);
}

// Small rings, so that both ends wait for each other all the time; and waiting
// threads that come and go.
TEST(engineSharesMemoryOnOneHost) {
  for (const int64_t ring : {16 << 10, 512 << 10}) {
    EngineOptions options;
    options.shared_ring_bytes = ring;
    std::vector<Rank> ranks = startRanks(2, options);
    onEach(ranks, [&](int r) {
      Rank& rank = ranks[static_cast<size_t>(r)];
      for (int i = 0; i < 40; ++i) {
        const size_t count = i % 8 == 0 ? 1 << 20 : 1 + 997 * size_t(i % 7);
        std::vector<float> data(count);
        for (size_t k = 0; k < count; ++k) {
          data[k] = static_cast<float>(k % 1000 + size_t(i));
        }
        std::vector<float> back(count);
        if (r == 0) {
          CHECK_EQ(rank.message(true, 1, 1, data, kLong).message(), "");
          CHECK_EQ(rank.message(false, 1, 1, back, kLong).message(), "");
          CHECK(back == data);
        } else {
          CHECK_EQ(rank.message(false, 0, 1, back, kLong).message(), "");
          CHECK_EQ(rank.message(true, 0, 1, back, kLong).message(), "");
        }
        // Both directions at a time.
        CHECK(rank.allReduce(back, kLong).ok());
        CHECK_EQ(back.back(), 2 * data.back());
      }
    });
    for (Rank& rank : ranks) {
      const GroupStats stats = rank.group->stats();
      const PathStats& shared = stats.peers[0].paths[0];
      CHECK_EQ(shared.nic, "shared memory");
      CHECK(shared.bytesSent > stats.peers[0].bytesSent / 2);
    }
    leave(ranks);
  }
}

TEST(engineSurvivesCutsOfItsPaths) {
  EngineOptions options;
  options.paths_same_host = 3;
  options.chunk_bytes = 16 << 10;
  options.faults =
      "cut rank=0 after_bytes=500000; "
      "cut rank=1 path=1 after_bytes=90000; seed=3";
  std::vector<Rank> ranks = startRanks(2, options);
  onEach(ranks, [&](int r) {
    for (int i = 0; i < 10; ++i) {
      std::vector<float> data(200000);
      for (size_t k = 0; k < data.size(); ++k) {
        data[k] = static_cast<float>((k * 7 + static_cast<size_t>(r)) % 1000);
      }
      CHECK_EQ(
          ranks[static_cast<size_t>(r)].allReduce(data, kLong).message(),
          std::string());
      for (size_t k = 0; k < data.size(); ++k) {
        const float want = static_cast<float>((k * 7) % 1000) +
            static_cast<float>((k * 7 + 1) % 1000);
        CHECK_EQ(data[k], want);
      }
    }
  });
  uint64_t reconnects = 0;
  const GroupStats stats = ranks[0].group->stats();
  for (const PathStats& p : stats.peers[0].paths) {
    reconnects += p.reconnects;
  }
  CHECK(reconnects > 0); // or the faults were none
  leave(ranks);
}

// A path that has failed often is on probation for long. It must not keep the
// job waiting when the others fail: without it, they would be left after
// stall_timeout_s only.
TEST(engineGoesOnOverAPathThatIsOnProbation) {
  EngineOptions options;
  options.paths_same_host = 3;
  options.shared_memory = false;
  options.log_level = "warning";
  options.suspect_after_s = 0.1; // a busy machine is no silent path
  options.stall_timeout_s = 30;
  std::vector<Rank> ranks = startRanks(2, options);
  const auto addRules = [&](const std::string& rules) {
    for (Rank& rank : ranks) {
      rank.engine->callInLoop([&] {
        rank.engine->faults().add(rules, rank.engine->loop().now());
        rank.engine->faultsChanged();
      });
    }
  };
  const auto exchange = [&] {
    const TimePoint begin = std::chrono::steady_clock::now();
    onEach(ranks, [&](int r) {
      std::vector<float> data(50000, 1);
      CHECK_EQ(
          ranks[static_cast<size_t>(r)]
              .message(r == 0, 1 - r, 1, data, kLong)
              .message(),
          "");
    });
    return std::chrono::steady_clock::now() - begin;
  };
  const auto path = [&](int r, size_t slot) {
    const auto paths =
        ranks[static_cast<size_t>(r)].group->stats().peers.at(0).paths;
    return slot < paths.size() ? paths[slot] : PathStats();
  };
  const auto until = [&](const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kLong;
    while (!condition()) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      exchange();
    }
  };
  exchange();
  until([&] { return path(0, 2).state == "up" && path(1, 2).state == "up"; });
  for (uint64_t cuts = 1; cuts <= 10; ++cuts) { // the last time for 60 s
    addRules("cut rank=0 path=2");
    until([&] { return path(0, 2).reconnects >= cuts; });
  }
  until([&] {
    return path(0, 2).state == "proving" && path(1, 2).state == "proving";
  });
  addRules("drop path=0");
  addRules("drop path=1");
  CHECK(exchange() < std::chrono::seconds(15));
  leave(ranks);
}

// Before its SYN is answered, the peer cannot have let us in: then it may be
// lost, and the peer's attempt is the one that works.
TEST(engineLetsThePeerConnectWhileItsOwnSynIsNotAnswered) {
  const FileDescriptor server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto at = *SocketAddress::parse("127.0.0.1", 0);
  CHECK_EQ(::bind(server.get(), at.raw(), at.rawBytes()), 0);
  CHECK_EQ(::listen(server.get(), 0), 0);
  at = localAddress(server.get());
  // Its queue is full now: the kernel drops further SYNs.
  FileDescriptor first(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQ(::connect(first.get(), at.raw(), at.rawBytes()), 0);

  EngineOptions options;
  options.shared_memory = false;
  const auto engine = Engine::start(options, "127.0.0.1", 0);
  FakePeer peer;
  const Uid& uid = peer.config.identity.uid;
  peer.introduceTo(*engine, at.port());
  HelloInfo hello;
  hello.initiator = uid;
  const auto verdict = [&] {
    HelloCode code{};
    engine->callInLoop(
        [&] { code = engine->link(uid).connections().decide(hello, {}); });
    return code;
  };
  CHECK(verdict() == HelloCode::kOk);
  // Now there is room, and the peer's attempt is lost: ours is made again.
  first.reset();
  const FileDescriptor taken(::accept(server.get(), nullptr, nullptr));
  engine->callInLoop(
      [&] { engine->link(uid).connections().onIncomingLost(hello); });
  // The first to speak has noticed that its connection stands. What is left of
  // the attempt before it, if anything, is closed.
  FileDescriptor ours;
  char begin = 0;
  do {
    ours.reset(::accept(server.get(), nullptr, nullptr));
  } while (::recv(ours.get(), &begin, 1, MSG_PEEK) != 1);
  CHECK(verdict() == HelloCode::kDuplicateConnection);
  Engine::release(engine, Nanos(0));
}

// A path that is silent has a new connection in its place; whoever is told that
// another attempt goes on leaves it a second.
TEST(engineKeepsThePauseBetweenAttemptsAtASilentPath) {
  std::mutex mutex;
  std::vector<TimePoint> calls;
  std::vector<StreamSocket> held;
  FakePeer peer;
  peer.config.identity.decide = [&](const HelloInfo&, const CertifiedFor&) {
    std::lock_guard lock(mutex);
    calls.push_back(std::chrono::steady_clock::now());
    return calls.size() == 1 ? HelloCode::kOk : HelloCode::kDuplicateConnection;
  };
  peer.config.onPeer = [&](HelloInfo, StreamSocket socket, SocketAddress) {
    held.push_back(std::move(socket)); // and says no word on it
  };
  peer.listen();
  EngineOptions options;
  options.shared_memory = false;
  options.log_level = "error";
  options.stall_timeout_s = 0.05;
  const auto engine = Engine::start(options, "127.0.0.1", 0);
  peer.introduceTo(*engine, peer.listener->port());
  const auto called = [&](size_t times) {
    std::lock_guard lock(mutex);
    return calls.size() >= times;
  };
  const TimePoint deadline = std::chrono::steady_clock::now() + kLong;
  CHECK(engine->waitUntil(deadline, [&] { return called(1); }));
  engine->callInLoop([&] {
    engine->link(peer.config.identity.uid)
        .channel()
        .sendControl(encode(Query{1, 1})); // never answered
  });
  CHECK(engine->waitUntil(deadline, [&] { return called(3); }));
  Engine::release(engine, Nanos(0));
  std::lock_guard lock(mutex);
  CHECK(calls[2] - calls[1] >= std::chrono::milliseconds(900));
}

TEST(engineTimeOutNamesTheRankThatDidNotCall) {
  std::vector<Rank> ranks = startRanks(3, EngineOptions());
  onEach(ranks, [&](int r) {
    std::vector<float> data(100);
    Rank& rank = ranks[static_cast<size_t>(r)];
    CHECK(rank.allReduce(data, kLong).ok());
    if (r == 1) {
      return;
    }
    // Those that live have a second, the most there is, to say so.
    const Status status = rank.allReduce(data, std::chrono::seconds(4));
    CHECK(!status.ok());
    CHECK(status.message().find("rank 1") != std::string::npos);
    CHECK_CONTAINS(status.message(), "not called by all");
  });
  leave(ranks);
}

// The process that serves the store ends while a rank still waits for others.
TEST(engineFailsAtOnceWhatNeedsAStoreThatIsGone) {
  const auto map = std::make_shared<MapStore>();
  std::vector<Rank> ranks = startRanks(3, EngineOptions(), map, /*joining=*/2);
  map->gone.store(true);
  std::vector<float> data(10);
  const TimePoint begun = std::chrono::steady_clock::now();
  std::thread other([&] {
    std::vector<float> more(10);
    const Status reduced = ranks[1].allReduce(more, kLong);
    CHECK_CONTAINS(
        reduced.message(),
        "the addresses of the other ranks are not known, since the store "
        "fails (Broken pipe): the process that serves it, usually that of "
        "rank 0, has most likely ended");
  });
  const Status received = ranks[0].message(false, 2, 0, data, kLong);
  CHECK_CONTAINS(
      received.message(),
      "the address of rank 2 is not known, since the store fails");
  other.join();
  CHECK(std::chrono::steady_clock::now() - begun < kLong / 2);
  leave(ranks);
}

// Rank 0 serves the store, say, and leaves as soon as its part has ended: by
// then, all must have found each other.
TEST(engineEndsNoCollectiveBeforeAllRanksKnowAllMembers) {
  const auto map = std::make_shared<MapStore>();
  map->holdsLists = true;
  std::vector<Rank> ranks = startRanks(3, EngineOptions(), map);
  // Rank 2 joined last and wrote the list; the others cannot read it yet.
  std::atomic<int> ended{0};
  std::thread reducing([&] {
    onEach(ranks, [&](int r) {
      std::vector<float> data(4, 1);
      CHECK_EQ(ranks[size_t(r)].allReduce(data, kLong).message(), "");
      CHECK_EQ(data[0], 3.0f);
      ++ended;
    });
  });
  // Ranks 0 and 1 could go by each other's own key; see onLook().
  const auto lookedUp = [&] {
    std::lock_guard lock(map->mutex);
    return map->addressesRead >= 2;
  };
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  while (!lookedUp() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  CHECK(lookedUp());
  CHECK_EQ(ended.load(), 0);
  {
    std::lock_guard lock(map->mutex);
    map->holdsLists = false;
  }
  reducing.join();
  map->gone.store(true); // nobody needs it any more
  onEach(ranks, [&](int r) {
    std::vector<float> data(4, 1);
    CHECK_EQ(ranks[size_t(r)].allReduce(data, kLong).message(), "");
    const int next = (r + 1) % 3, previous = (r + 2) % 3;
    std::thread sender([&] {
      CHECK_EQ(
          ranks[size_t(r)].message(true, next, 1, data, kLong).message(), "");
    });
    std::vector<float> got(4);
    CHECK_EQ(
        ranks[size_t(r)].message(false, previous, 1, got, kLong).message(), "");
    sender.join();
  });
  leave(ranks);
}

// Two of three are there: they need not wait for the third.
TEST(engineDeliversMessagesBetweenRanksThatHaveJoined) {
  const auto map = std::make_shared<MapStore>();
  std::vector<Rank> ranks = startRanks(3, EngineOptions(), map, /*joining=*/2);
  std::vector<Rank> two = {ranks[0], ranks[1]};
  onEach(two, [&](int r) {
    std::vector<float> data(4, 7);
    CHECK_EQ(
        two[size_t(r)].message(r == 0, 1 - r, 1, data, kLong).message(), "");
    CHECK_EQ(data[3], 7.0f);
  });
  std::vector<float> data(4);
  const Status status =
      ranks[0].message(false, 2, 0, data, std::chrono::seconds(1));
  CHECK_CONTAINS(status.message(), "rank 2 has not joined the group yet");
  leave(ranks);
}

// The message comes while the loop of its receiver stands still, until after
// the time-out: it is there all the same.
TEST(engineTakesWhatHasComeBeforeItLooksAtTheTime) {
  using std::chrono::milliseconds;
  std::vector<Rank> ranks = startRanks(2, EngineOptions());
  std::latch standing(1), sent(1);
  onEach(ranks, [&](int r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    std::vector<float> data(10);
    CHECK(rank.allReduce(data, kLong).ok());
    if (r == 0) {
      standing.wait();
      CHECK(rank.message(true, 1, 1, data, kLong).ok());
      (void)rank.group->stats(); // in a later turn: it has been written, too
      sent.count_down();
      return;
    }
    const TimePoint begin = std::chrono::steady_clock::now();
    bool inTime = false;
    std::thread stop([&] {
      // After the question what the others do, which is another timer.
      std::this_thread::sleep_until(begin + milliseconds(850));
      rank.engine->loop().post([&, begin] { // it may outlive this function
        inTime = std::chrono::steady_clock::now() < begin + milliseconds(1000);
        standing.count_down();
        sent.wait();
        std::this_thread::sleep_until(begin + milliseconds(1100));
      });
    });
    const Status status = rank.message(false, 0, 1, data, milliseconds(1000));
    stop.join();
    sent.wait();
    CHECK(status.ok() || !inTime); // a machine so slow proves nothing
  });
  leave(ranks);
}

// Both are roots of different broadcasts, which wait for nobody. Their messages
// and those of the next operation come in one turn of the loop.
TEST(engineEndsNothingWellBehindAMismatch) {
  std::vector<Rank> ranks = startRanks(2, EngineOptions());
  std::latch submitted(2);
  std::array<std::string, 2> ends;
  onEach(ranks, [&](int r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    std::vector<float> data(10), other(10);
    CHECK(rank.allReduce(data, kLong).ok());
    std::latch busy(1);
    rank.engine->loop().post([&] { // the loop sees all of it at once
      busy.count_down();
      submitted.wait();
    });
    busy.wait();
    auto first = std::make_shared<Waiter>(*rank.engine);
    CollectiveSpec spec;
    spec.signature.kind = OpKind::kBroadcast;
    spec.signature.dtype = DType::kFloat32;
    spec.signature.count = other.size();
    spec.signature.root = r;
    spec.timeout = kLong;
    spec.body = [&](Communicator& comm) {
      return broadcast(comm, other.data(), other.size() * sizeof(float), r);
    };
    spec.done = [first](const Status& status) { first->end(status); };
    rank.group->submit(std::move(spec));
    auto next = std::make_shared<Waiter>(*rank.engine);
    CollectiveSpec reduce;
    reduce.signature.kind = OpKind::kAllReduce;
    reduce.signature.dtype = DType::kFloat32;
    reduce.signature.reduceOp = ReduceOp::kSum;
    reduce.signature.count = data.size();
    reduce.timeout = kLong;
    reduce.body = [&](Communicator& comm) {
      return allReduce(comm, data.data(), data.size(), Reduction{});
    };
    reduce.done = [next](const Status& status) { next->end(status); };
    rank.group->submit(std::move(reduce));
    submitted.count_down();
    // Whichever the mismatch is found in.
    const Status status = first->wait();
    const Status after = next->wait();
    ends[static_cast<size_t>(r)] = (status.ok() ? after : status).message();
  });
  for (const std::string& end : ends) {
    CHECK_CONTAINS(end, "called broadcast");
  }
  leave(ranks);
}

TEST(engineLimitsWhatAPeerWritesIntoTheLog) {
  std::vector<Rank> ranks = startRanks(1, EngineOptions());
  size_t lines = 0;
  setLogSink([&](std::string_view) { ++lines; });
  ranks[0].engine->callInLoop([&] {
    PeerLink& link = ranks[0].engine->link(Uid{1});
    for (int i = 0; i < 1000; ++i) {
      link.say(LogLevel::kWarning, "a line of a peer");
    }
  });
  setLogSink({});
  CHECK_EQ(lines, 3u);
  leave(ranks);
}

// The peer's goodbye and the end of its connection come in one turn.
TEST(engineReportsNoLostPathOfAPeerThatLeaves) {
  std::vector<Rank> ranks = startRanks(2, EngineOptions());
  onEach(ranks, [&](int r) {
    std::vector<float> data(10, 1);
    CHECK_EQ(ranks[size_t(r)].allReduce(data, kLong).message(), "");
  });
  std::string lines, losses;
  setLogLevel(LogLevel::kInfo);
  setLogSink([&](std::string_view line) {
    (lines += line) += '\n';
    // Rank 1 has not really left, and may report its own end. On a busy machine
    // a path may also prove itself just now.
    if (line.find("path 0 to rank 1") != std::string::npos &&
        line.find(" is down") != std::string::npos) {
      losses += line;
    }
  });
  ranks[0].engine->callInLoop([&] {
    PeerLink& link = ranks[0].engine->link(ranks[1].engine->self().uid);
    link.onBye(link.channel());
    link.connections().path(0)->close(
        Status(StatusCode::kNetwork, "closed by the other end"));
  });
  CHECK(
      ranks[0].engine->waitUntil(std::chrono::steady_clock::now() + kLong, [&] {
        return ranks[0].engine->link(ranks[1].engine->self().uid).state() ==
            Link::State::kLeft;
      }));
  setLogSink({});
  setLogLevel(LogLevel::kWarning);
  CHECK(lines.find("has left: it destroyed") != std::string::npos);
  CHECK_EQ(losses, "");
  leave(ranks);
}

// Its connections are closed again and again, with what it has sent unread.
TEST(engineLosesNothingOfAPeerThatItGetsToKnowLate) {
  EngineOptions options;
  options.handshake_timeout_s = 0.05; // a tenth of a second to get to know it
  options.shared_memory = false;
  const auto map = std::make_shared<MapStore>();
  map->behind.store(true);
  std::vector<Rank> ranks = startRanks(2, options, map);
  constexpr int kMessages = 20;
  std::vector<std::vector<float>> sent;
  for (int i = 0; i < kMessages; ++i) {
    // Some end at once, as copies; others are lent until they have arrived.
    sent.emplace_back(i % 4 == 3 ? 1u << 20 : 10, static_cast<float>(i));
  }
  std::thread sender([&] {
    for (int i = 0; i < kMessages; ++i) {
      CHECK_EQ(
          ranks[1].message(true, 0, 7, sent[size_t(i)], kLong).message(), "");
    }
  });
  const auto reconnects = [&] {
    const PeerStats peer = ranks[1].group->stats().peers[0];
    return peer.paths.empty() ? 0 : peer.paths[0].reconnects;
  };
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  while (reconnects() < 3 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(reconnects() >= 3);
  CHECK_EQ(ranks[0].group->stats().peers[0].bytesReceived, 0u);
  map->behind.store(false);
  for (int i = 0; i < kMessages; ++i) {
    std::vector<float> data(sent[size_t(i)].size());
    CHECK_EQ(ranks[0].message(false, 1, 7, data, kLong).message(), "");
    CHECK(data == sent[size_t(i)]);
  }
  sender.join();
  leave(ranks);
}

TEST(engineAbortReachesTheOthers) {
  std::vector<Rank> ranks = startRanks(2, EngineOptions());
  std::latch reduced(2);
  onEach(ranks, [&](int r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    std::vector<float> data(10);
    CHECK(rank.allReduce(data, kLong).ok());
    reduced.arrive_and_wait(); // the abort may pass what is under way
    if (r == 0) {
      rank.group->abort("the test says so");
      return;
    }
    const Status status = rank.message(false, 0, 1, data, kLong);
    CHECK_EQ(status.code(), StatusCode::kAborted);
    CHECK(status.message().find("the test says so") != std::string::npos);
  });
  leave(ranks);
}

// "@127.0.0.1/8:4711", as in the record of a rank.
std::string placeIn(const Engine& engine) {
  const std::string& record = engine.addressText();
  return record.substr(record.find('@', record.find(" at=")));
}

uint16_t portOf(const Engine& engine) {
  return engine.self().addresses.front().address.port();
}

// Takes connections and leads the nth to a port of this host that `target`
// names. Knows no secret, reads nothing.
class BlindProxy {
 public:
  explicit BlindProxy(std::function<uint16_t(int)> target)
      : target_(std::move(target)),
        listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
    CHECK_EQ(::bind(listener_.get(), any.raw(), any.rawBytes()), 0);
    CHECK_EQ(::listen(listener_.get(), 64), 0);
    thread_ = std::thread([this] { run(); });
  }
  ~BlindProxy() {
    ending_.store(true);
    thread_.join();
  }
  uint16_t port() const {
    return localAddress(listener_.get()).port();
  }
  int connections() const {
    return connections_.load();
  }

 private:
  void run() {
    std::vector<std::pair<FileDescriptor, FileDescriptor>> pairs;
    while (!ending_.load()) {
      std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
      for (const auto& [in, out] : pairs) {
        polled.push_back({in.get(), POLLIN, 0});
        polled.push_back({out.get(), POLLIN, 0});
      }
      if (::poll(polled.data(), polled.size(), 10) <= 0) {
        continue;
      }
      for (size_t i = pairs.size(); i-- > 0;) {
        const bool open = (polled[1 + 2 * i].revents == 0 ||
                           copy(pairs[i].first, pairs[i].second)) &&
            (polled[2 + 2 * i].revents == 0 ||
             copy(pairs[i].second, pairs[i].first));
        if (!open) {
          pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(i));
        }
      }
      if (polled[0].revents != 0) {
        FileDescriptor in(::accept(listener_.get(), nullptr, nullptr));
        FileDescriptor out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const SocketAddress to =
            *SocketAddress::parse("127.0.0.1", target_(connections_.load()));
        if (::connect(out.get(), to.raw(), to.rawBytes()) == 0) {
          pairs.emplace_back(std::move(in), std::move(out));
        }
        connections_.fetch_add(1);
      }
    }
  }
  static bool copy(const FileDescriptor& from, const FileDescriptor& to) {
    char buffer[4096];
    const ssize_t n = ::recv(from.get(), buffer, sizeof(buffer), 0);
    return n > 0 && ::send(to.get(), buffer, size_t(n), MSG_NOSIGNAL) == n;
  }

  const std::function<uint16_t(int)> target_;
  FileDescriptor listener_;
  std::atomic<int> connections_{0};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

// A proxy makes members of the job sign that they are not the one that was
// called.
TEST(engineTakesNoProxiedRefusalForADeath) {
  constexpr int kMisled = 16; // four in a row are a death
  const auto map = std::make_shared<MapStore>();
  EngineOptions options;
  options.interface = "lo"; // one address for each
  options.reconnect_max_s = options.reconnect_min_s;
  std::array<std::atomic<uint16_t>, 3> ports;
  BlindProxy proxy([&](int nth) -> uint16_t {
    return nth < kMisled / 2 ? ports[0] : nth < kMisled ? ports[2] : ports[1];
  });
  std::vector<Rank> ranks =
      startRanks(3, options, map, 3, [&](std::vector<Rank>& started) {
        for (size_t r = 0; r < 3; ++r) {
          ports[r] = portOf(*started[r].engine);
        }
        map->moved = placeIn(*started[1].engine);
        map->to = map->moved.substr(0, map->moved.rfind(':') + 1) +
            std::to_string(proxy.port());
      });
  std::vector<float> data(10, 7), received(10);
  std::atomic<bool> ended{false};
  Status status;
  std::thread receiver([&] {
    status = ranks[0].message(false, 1, 5, received, kLong);
    ended.store(true);
  });
  const auto limit = std::chrono::steady_clock::now() + kLong;
  while (!ended.load() && proxy.connections() <= kMisled &&
         std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK_EQ(ranks[1].message(true, 0, 5, data, kLong).message(), "");
  receiver.join();
  CHECK_EQ(status.message(), "");
  CHECK(received == data);
  CHECK(proxy.connections() > kMisled);
  leave(ranks);
}

TEST(engineTakesAnotherProcessAtThePeersAddressForItsDeath) {
  const auto map = std::make_shared<MapStore>();
  EngineOptions options;
  options.interface = "lo";
  std::vector<Rank> ranks =
      startRanks(3, options, map, 3, [&](std::vector<Rank>& started) {
        map->moved = placeIn(*started[1].engine);
        map->to = placeIn(*started[2].engine);
      });
  std::vector<float> data(10);
  const Status status = ranks[0].message(false, 1, 5, data, kLong);
  CHECK(status.code() == StatusCode::kPeerDied);
  CHECK_CONTAINS(status.message(), "another process has its address now");
  leave(ranks);
}

// Failures are news of those that they happened to.
TEST(engineHearsNoNoticeInTheNameOfAnother) {
  const auto map = std::make_shared<MapStore>();
  std::vector<Rank> ranks = startRanks(3, EngineOptions(), map);
  // With the job's secret, which whoever reads the store has.
  const auto impostor = Engine::start(EngineOptions(), "127.0.0.1", 1);
  PeerAddress target;
  CHECK(PeerAddress::parse(ranks[0].engine->addressText(), target).ok());
  std::string secret;
  for (const auto& [key, value] : map->values) {
    if (key.starts_with("resilient/job/")) {
      secret = value.substr(value.rfind(' ') + 1);
    }
  }
  Notice notice;
  notice.group = ranks[0].group->id();
  notice.sequence = Notice::kWholeGroup;
  notice.code = StatusCode::kAborted;
  notice.reporter = notice.origin = 1;
  notice.text = "hello from the neighbour";
  const auto tell = [&](const std::shared_ptr<Engine>& from) {
    const auto link = [&]() -> PeerLink& { return from->link(target.uid); };
    from->callInLoop([&] {
      link().setAddress(target, secret, 0);
      link().addInterest();
      link().channel().sendControl(encode(notice));
    });
    const auto limit = std::chrono::steady_clock::now() + kLong;
    // Nothing is read from a process that no group knows.
    CHECK(from->waitUntil(limit, [&] {
      return link().state() == PeerLink::State::kUp &&
          (from == impostor || link().channel().drained());
    }));
    from->callInLoop([&] { link().dropInterest(); });
  };
  for (int round = 0; round < 2; ++round) {
    tell(impostor); // before rank 0 knows where rank 1 is, and after that
    onEach(ranks, [&](int r) {
      std::vector<float> data(10, 1);
      CHECK_EQ(ranks[size_t(r)].allReduce(data, kLong).message(), "");
      CHECK_EQ(data[0], 3.0f);
    });
  }
  tell(ranks[2].engine); // a member, but another one
  onEach(ranks, [&](int r) {
    std::vector<float> data(10, 1);
    CHECK_EQ(ranks[size_t(r)].allReduce(data, kLong).message(), "");
  });
  Engine::release(impostor, std::chrono::seconds(1));
  leave(ranks);
}

// A notice may come before its group exists here. A peer may also make up
// groups, with numbers above all others.
TEST(engineKeepsTheLatestOfTheEarlyNotices) {
  const auto engine = Engine::start(EngineOptions(), "127.0.0.1", 0);
  constexpr uint64_t kMadeUp = UINT64_MAX - 1000;
  constexpr uint64_t kReal = 7;
  std::vector<Engine::EarlyNotice> real, again, oldest, latest, other;
  engine->callInLoop([&] {
    PeerLink& link = engine->link(Uid{1});
    Notice notice;
    notice.code = StatusCode::kAborted;
    const auto tell = [&](uint64_t group, const char* text) {
      notice.group = group;
      notice.text = text;
      engine->onControl(link, encode(notice));
    };
    for (uint64_t i = 0; i < 1000; ++i) {
      tell(kMadeUp + i, "made up");
    }
    tell(kReal, "first");
    tell(kMadeUp, "made up");
    tell(kReal, "second");
    real = engine->takeEarlyNotices(kReal);
    again = engine->takeEarlyNotices(kReal);
    oldest = engine->takeEarlyNotices(kMadeUp + 1);
    latest = engine->takeEarlyNotices(kMadeUp);
    other = engine->takeEarlyNotices(kMadeUp + 999);
  });
  Engine::release(engine, std::chrono::seconds(1));
  CHECK_EQ(real.size(), 2u);
  CHECK_EQ(real[0].notice.text, "first");
  CHECK_EQ(real[1].notice.text, "second");
  CHECK(again.empty());
  CHECK(oldest.empty());
  CHECK_EQ(latest.size(), 1u);
  CHECK_EQ(other.size(), 1u); // taking removes only those of the group
}

// What an engine says that does not start, since its options are wrong.
template <typename Change>
std::string errorOf(Change change) {
  EngineOptions options;
  change(options);
  try {
    Engine::release(
        Engine::start(options, "127.0.0.1", 0), std::chrono::seconds(1));
  } catch (const StatusError& error) {
    CHECK_EQ(error.status().code(), StatusCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

// A folder of its own, gone with all that is in it.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/resilient-test-XXXXXX";
    CHECK(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::filesystem::remove_all(path_);
  }
  std::string operator/(const std::string& name) const {
    return path_ + '/' + name;
  }
  const std::string& path() const {
    return path_;
  }

 private:
  std::string path_;
};

std::string contentOf(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(engineTakesASecretFromAFileThatOnlyItsUserReads) {
  const Folder folder;
  const auto refusal = [](const std::string& path) {
    return errorOf([&](EngineOptions& o) { o.secret_file = path; });
  };
  const auto file = [&](const std::string& text, mode_t mode) {
    const std::string path = folder / "secret";
    std::ofstream(path) << text;
    CHECK_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  };
  const std::string good = "0123456789abcdef\n";
  CHECK_EQ(refusal(file(good, 0600)), "");
  CHECK_EQ(refusal(file(good, 0440)), ""); // by its group, in Kubernetes
  CHECK_EQ(::symlink("secret", (folder / "link").c_str()), 0);
  CHECK_EQ(refusal(folder / "link"), ""); // likewise
  for (mode_t mode : {0644, 0604, 0602}) {
    const std::string error = refusal(file(good, mode));
    CHECK_CONTAINS(error, "TORCH_RESILIENT_SECRET_FILE=" + folder.path());
    CHECK_CONTAINS(error, "chmod 600");
    CHECK_CONTAINS(error, "defaultMode: 0400");
    CHECK_CONTAINS(refusal(folder / "link"), "chmod 600");
  }
  CHECK_CONTAINS(refusal(file("0123456789abcde\n", 0600)), "at least 16");
  CHECK_EQ(refusal(file(std::string(4096, 'x'), 0600)), "");
  CHECK_CONTAINS(
      refusal(file(std::string(4097, 'x'), 0600)), "longer than 4096 bytes");
  // These give bytes without end, or none before somebody comes.
  CHECK_CONTAINS(refusal("/dev/zero"), "not a regular file");
  CHECK_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  CHECK_CONTAINS(refusal(folder / "pipe"), "not a regular file");
  CHECK_CONTAINS(refusal(folder.path()), "not a regular file");
  CHECK_CONTAINS(refusal(folder / "none"), "No such file");
}

TEST(engineWritesDumpsToFilesOfItsOwnOnly) {
  const Folder folder;
  EngineOptions options;
  options.dump_dir = folder / "dumps";
  const std::string path = folder / "dumps/rank0.txt";
  const auto dump = [&](const std::string& reason) {
    const auto engine = Engine::start(options, "127.0.0.1", 0);
    engine->callInLoop([&] { engine->writeDump(reason); });
    engine->callInLoop([&] { engine->writeDump(reason + " again"); });
    Engine::release(engine, std::chrono::seconds(1));
  };
  dump("first");
  dump("second"); // another process may have had the rank
  const std::string text = contentOf(path);
  for (const char* reason : {"(first)", "(first again)", "(second)"}) {
    CHECK_CONTAINS(text, reason);
  }
  struct stat about{};
  CHECK_EQ(::stat(path.c_str(), &about), 0);
  CHECK_EQ(about.st_mode & 0777u, 0600u);
  // Somebody else makes the name lead to what is ours.
  const std::string victim = folder / "victim";
  std::ofstream(victim) << "mine";
  for (const auto& plant : {&::symlink, &::link}) {
    CHECK_EQ(::unlink(path.c_str()), 0);
    CHECK_EQ(plant(victim.c_str(), path.c_str()), 0);
    dump("third");
    CHECK_EQ(contentOf(victim), "mine");
  }
  CHECK_EQ(::unlink(path.c_str()), 0);
  CHECK_EQ(::mkfifo(path.c_str(), 0600), 0);
  dump("fourth"); // and does not wait for a reader
}

TEST(engineListensOnTheInterfacesOfItsOptionOnly) {
  EngineOptions options;
  options.interface = "127.0.0.1,::1";
  std::vector<InterfaceAddress> interfaces;
  CHECK(enumerateInterfaces(interfaces).ok());
  if (std::ranges::none_of(interfaces, [](const InterfaceAddress& i) {
        return i.address.ip() == "::1";
      })) {
    std::printf("skipped: no IPv6 on this machine\n");
    return;
  }
  const auto engine = Engine::start(options, "127.0.0.1", 0);
  const auto connects = [&](const char* ip) {
    const SocketAddress at = *SocketAddress::parse(ip, portOf(*engine));
    FileDescriptor fd(::socket(at.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    return ::connect(fd.get(), at.raw(), at.rawBytes()) == 0;
  };
  CHECK(connects("127.0.0.1") && connects("::1"));
  CHECK(!connects("127.0.0.2")); // an address of this host as well
  Engine::release(engine, std::chrono::seconds(1));
}

// As at the end of a process that has threads which go on waiting.
TEST(engineStopsWhileCallersComeToHelp) {
  std::vector<Rank> ranks = startRanks(2, EngineOptions());
  onEach(ranks, [&](int r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    std::vector<float> data(100);
    CHECK(rank.allReduce(data, kLong).ok());
    std::latch helping(1);
    std::atomic<bool> stopped{false};
    std::thread caller([&] {
      while (!stopped.load()) {
        const auto soon =
            std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
        rank.engine->loop().help([&] { return stopped.load(); }, soon);
        if (!helping.try_wait()) {
          helping.count_down();
        }
      }
    });
    helping.wait();
    rank.engine->stop(Nanos(0));
    stopped.store(true);
    caller.join();
  });
}

// A typo would take the preference away without a word.
TEST(engineRefusesInterfacesForClassesThatItDoesNotUse) {
  const auto classes = [](const char* text) {
    return errorOf([&](EngineOptions& o) { o.nic_classes = text; });
  };
  CHECK_EQ(classes("gradient=lo, bulk=lo"), "");
  CHECK_CONTAINS(
      classes("bulk=lo,gradient=eht1"),
      "TORCH_RESILIENT_NIC_CLASSES=\"bulk=lo,gradient=eht1\": this rank does "
      "not use an interface eht1, but lo");
  CHECK_CONTAINS(classes("bulk=lo,bulk=lo"), "bulk is there twice");
}

TEST(engineSharesMemoryWithOthersAfterOneRendezvousHasFailed) {
  EngineOptions options;
  options.log_level = "error";
  const auto engine = Engine::start(options, "127.0.0.1", 0);
  SharedRendezvous* rendezvous = nullptr;
  engine->callInLoop([&] {
    engine->noSharedMemory("a peer: its socket is closed");
    rendezvous = engine->sharedRendezvous();
  });
  CHECK(rendezvous != nullptr);
  Engine::release(engine, std::chrono::seconds(1));
}

// One clear error at the start, that names the variable and its value.
TEST(engineRefusesWhatItCannotReadAboutDatagrams) {
  for (const char* text : {"none", "uniform_fec:10:11", "us/all=semantic"}) {
    const std::string error =
        errorOf([&](EngineOptions& o) { o.wan_recovery = text; });
    CHECK_CONTAINS(error, "TORCH_RESILIENT_WAN_RECOVERY");
    CHECK_CONTAINS(error, std::string("\"") + text + "\"");
    CHECK_CONTAINS(error, "uniform_fec:data:parity");
  }
  const std::string error =
      errorOf([](EngineOptions& o) { o.wan = "us=sctp"; });
  CHECK_CONTAINS(error, "TORCH_RESILIENT_WAN)");
  CHECK_CONTAINS(error, "\"us=sctp\"");
}

// The answer of an engine to a call in the name of `member`, whose caller has
// the job's secret and these certificates. Keeps the connection.
HelloCode callEngine(
    Engine& engine,
    const Uid& member,
    const TlsCertificates& certificates,
    OutgoingResult& result) {
  EventLoop loop;
  OutgoingSpec spec;
  spec.candidates = {*SocketAddress::parse(
      "127.0.0.1", engine.self().addresses.at(0).address.port())};
  spec.hello.initiator = member;
  spec.hello.acceptor = engine.self().uid;
  spec.hello.initiatorRank = 1;
  spec.nonce = [] {
    HelloNonce nonce;
    fillRandom(nonce.data(), nonce.size());
    return nonce;
  };
  spec.secret = engine.options().secret;
  spec.encryption = Encryption::kAlways;
  spec.certificates = &certificates;
  spec.hostName = hostName();
  const auto handshake =
      OutgoingHandshake::start(loop, std::move(spec), [&](OutgoingResult r) {
        result = std::move(r);
        loop.stop();
      });
  loop.run();
  return result.status.ok() ? HelloCode::kOk : result.failure.verdict.value();
}

// A host that has the secret cannot call itself a rank of another host, whether
// that rank is known when it calls or only later.
TEST(engineRefusesAMemberWithTheCertificateOfAnotherHost) {
  if (!test::tlsAvailable()) {
    return;
  }
  const test::TestAuthority authority;
  EngineOptions options;
  options.log_level = "error";
  options.secret = std::string(32, 's');
  options.encryption = "required";
  const auto files = authority.issue(hostName());
  options.tls_cert = files.certificate;
  options.tls_key = files.key;
  options.tls_ca = files.authorities;
  const auto engine = Engine::start(options, "127.0.0.1", 0);
  const TlsCertificates right(authority.issue("rank-1"), "rank-1", {});
  const TlsCertificates wrong(authority.issue("rank-2"), "rank-2", {});
  const auto introduce = [&](const Uid& uid) {
    engine->callInLoop([&] {
      PeerAddress address;
      address.uid = uid;
      address.hostName = "rank-1";
      address.addresses = {{"", *SocketAddress::parse("192.0.2.7", 1)}};
      engine->link(uid).setAddress(address, options.secret, 1);
    });
  };
  const auto refused = [&] {
    uint64_t count = 0;
    engine->callInLoop(
        [&] { count = engine->handshakes().of(TrustFault::kCertificate); });
    return count;
  };
  OutgoingResult first, second;
  introduce(Uid{1});
  CHECK(callEngine(*engine, Uid{1}, wrong, first) == HelloCode::kCertificate);
  CHECK_EQ(refused(), 1u);
  CHECK(callEngine(*engine, Uid{1}, right, first) == HelloCode::kOk);

  // The engine cannot tell yet who these are.
  CHECK(callEngine(*engine, Uid{2}, wrong, first) == HelloCode::kOk);
  CHECK(callEngine(*engine, Uid{3}, right, second) == HelloCode::kOk);
  introduce(Uid{2});
  introduce(Uid{3});
  const TimePoint limit = std::chrono::steady_clock::now() + kLong;
  CHECK(engine->waitUntil(limit, [&] {
    return engine->link(Uid{3}).state() == PeerLink::State::kUp;
  }));
  CHECK_EQ(refused(), 2u);
  Engine::release(engine, Nanos(0));
}

} // namespace
} // namespace resilient
