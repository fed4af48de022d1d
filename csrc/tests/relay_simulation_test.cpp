#include "tests/relay_simulation.h"

#include <functional>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "tests/check.h"
#include "tests/relay_network.h"
#include "tests/simulation_seeds.h"

namespace resilient::test {
namespace {

struct Send final : SendOp {
  void finished(const Status& status) override {
    ok = status.ok();
    over = true;
  }
  bool ok = false, over = true;
};

struct Recv final : RecvOp {
  void finished(const Status& status) override {
    ok = status.ok();
    over = true;
    at = ok && network != nullptr ? network->now() : TimePoint();
  }
  RelayNetwork* network = nullptr; // whose clock is read
  bool ok = false, over = true;
  TimePoint at{};
};

void print(const RelaySimulationResult& sum, uint64_t networks) {
  std::cout << "relay simulation: " << networks << " networks, " << sum.events
            << " events, " << sum.messages << " messages (" << sum.excused
            << " more with an end that was lost), " << sum.relayed
            << " frames (" << (sum.relayedBytes >> 20) << " MiB) over "
            << sum.relayFlows << " paths, " << sum.silentRelays
            << " times silent, " << sum.relayFailures << " lost, "
            << sum.refusals << " refusals, " << sum.passedNotes
            << " notes of what has passed, " << sum.busyNotes
            << " of them busy; " << sum.limits << " with a limit, "
            << sum.gateways << " pairs with relays only, " << sum.uplinkSilences
            << " silent and " << sum.uplinkLosses << " lost uplinks, "
            << sum.cuts << " cuts, " << sum.kills << " kills, " << sum.stops
            << " stops, " << sum.leaves << " leaves; the fullest relay "
            << sum.fullest << " of its memory\n";
}

TEST(relay_simulation_holds_its_promises) {
  const auto trace = simulationTrace();
  RelaySimulationResult sum;
  const uint64_t networks = simulateSeeds(1000, [&](uint64_t seed) {
    const RelaySimulationResult r = simulateRelays(seed, trace);
    if (!r.error.empty()) {
      throw Failure(
          "seed " + std::to_string(seed) + ": " + r.error +
          replayLine(seed, "relay_simulation_holds"));
    }
    using R = RelaySimulationResult;
    for (uint64_t R::* count :
         {&R::events,
          &R::messages,
          &R::excused,
          &R::relayed,
          &R::relayedBytes,
          &R::relayFlows,
          &R::relayFailures,
          &R::silentRelays,
          &R::refusals,
          &R::passedNotes,
          &R::busyNotes,
          &R::limits,
          &R::uplinkSilences,
          &R::uplinkLosses,
          &R::cuts,
          &R::kills,
          &R::stops,
          &R::leaves,
          &R::gateways}) {
      sum.*count += r.*count;
    }
    sum.fullest = std::max(sum.fullest, r.fullest);
  });
  if (networks == 0) {
    return;
  }
  print(sum, networks);
  // A simulation in which nothing happens shows nothing.
  if (networks >= 200) {
    CHECK(sum.messages > networks * 10);
    CHECK(sum.relayed > networks * 20);
    CHECK(sum.relayFlows > networks);
    CHECK(sum.relayFailures > networks / 4);
    CHECK(sum.silentRelays > networks / 4);
    CHECK(sum.refusals > networks / 10);
    CHECK(sum.passedNotes > networks * 10);
    CHECK(sum.busyNotes > networks);
    CHECK(sum.limits > networks / 10);
    CHECK(sum.uplinkSilences > networks / 4);
    CHECK(sum.uplinkLosses > networks / 4);
    CHECK(sum.cuts > networks / 4);
    CHECK(sum.kills > networks / 10);
    CHECK(sum.stops > networks / 10);
    CHECK(sum.leaves > networks / 10);
    CHECK(sum.gateways > networks / 10);
    CHECK(sum.fullest > 0.5);
  }
}

// The first answer over a relay takes a round trip between the sites, and more
// if what it answers waits at the relay.
TEST(relay_path_waits_for_its_first_answer) {
  int relayed = 0, silent = 0;
  const struct Log {
    ~Log() {
      setLogSink({});
      setLogLevel(LogLevel::kWarning);
    }
  } log;
  setLogLevel(LogLevel::kInfo);
  setLogSink([&](std::string_view line) {
    relayed += line.find("can be reached over") != line.npos;
    silent += line.find("nothing comes back") != line.npos;
  });
  constexpr uint64_t kBytesPerS = 10'000'000, kBytes = 4u << 20;
  Send send;
  Recv recv;
  std::vector<std::byte> out(kBytes), in(kBytes);
  EngineOptions options;
  options.relay = "auto";
  options.wan_connections = 1; // nothing is tuned: there are no connections
  RelayNetwork network(1);
  network.afterTurn = [](size_t) {};
  for (const char* site : {"near", "near", "far"}) {
    network.add(options, site, kBytesPerS, std::nullopt);
  }
  RelayNetwork::Way way;
  way.bytesPerS = kBytesPerS;
  way.latency = std::chrono::milliseconds(50);
  way.windowBytes = 1u << 20;
  network.connect(0, 2, way);
  network.connect(1, 2, way);
  way.latency = std::chrono::microseconds(50);
  network.connect(0, 1, way);
  network.join();
  const auto run = [&](Nanos most, const auto& done) {
    for (const TimePoint end = network.now() + most;
         network.now() < end && !done() && network.step();) {
    }
    return done();
  };
  for (const size_t r : {0, 1, 2}) {
    network.in(r, [&network, r] {
      network.rank(r).link(r == 2 ? 0 : 2).addInterest();
    });
  }
  CHECK(run(std::chrono::seconds(10), [&] { return relayed != 0; }));
  network.in(2, [&] {
    recv.key = MessageKey{1, 0, 0};
    recv.ordered = true;
    recv.source = &network.rank(2).link(0).channel();
    recv.data = in.data();
    recv.bytes = kBytes;
    network.rank(2).mailbox().post(&recv);
  });
  network.in(0, [&] {
    send.key = MessageKey{1, 0, 0};
    send.pointToPoint = true;
    send.data = out.data();
    send.bytes = kBytes;
    Channel& channel = network.rank(0).link(2).channel();
    channel.send(&send, network.rank(0).loop().now());
  });
  CHECK(run(std::chrono::seconds(10), [&] { return send.ok && recv.ok; }));
  CHECK(network.rank(1).relays().counters().bytes > 512u << 10);
  CHECK_EQ(network.error(), "");
  CHECK_EQ(silent, 0);
  for (const size_t r : {0, 1, 2}) {
    network.in(r, [&network, r] {
      network.rank(r).link(r == 2 ? 0 : 2).dropInterest();
    });
  }
  run(std::chrono::milliseconds(1), [] { return false; });
}

// Three hosts send over one uplink, or over three. Bytes per second from the
// first of them in the last second of 40, and the relays that share its
// load.
struct Streamed {
  double bytesPerS = 0;
  int relays = 0;
};

Streamed streamOverRelays(bool oneUplink, uint64_t seed) {
  constexpr uint64_t kUplinkBytesPerS = 10'000'000, kBytes = 1u << 20;
  constexpr size_t kAtOnce = 16; // messages
  std::vector<std::byte> out(kBytes);
  std::vector<Send> sends(kAtOnce);
  std::vector<Recv> recvs(kAtOnce);
  std::vector<std::vector<std::byte>> in(kAtOnce, out);
  EngineOptions options;
  options.relay = "auto";
  options.wan_connections = 1; // nothing is tuned: there are no connections
  RelayNetwork network(seed);
  network.afterTurn = [](size_t) {};
  for (const char* site : {"near", "near", "near", "far"}) {
    network.add(options, site, kUplinkBytesPerS, std::nullopt);
  }
  RelayNetwork::Way way;
  way.latency = std::chrono::milliseconds(10);
  way.jitter = std::chrono::milliseconds(1);
  way.windowBytes = 512u << 10;
  for (const size_t r : {0, 1, 2}) {
    network.connect(r, 3, way);
    if (oneUplink) {
      network.shareUplink(0, r);
    }
  }
  way.latency = way.jitter = std::chrono::microseconds(50);
  network.connect(0, 1, way);
  network.connect(0, 2, way);
  network.join();
  bool stop = false;
  std::function<void()> post = [&] {
    Channel& from = network.rank(3).link(0).channel();
    for (size_t i = 0; i < kAtOnce && !stop; ++i) {
      if (std::exchange(recvs[i].over, false)) {
        recvs[i].key = MessageKey{1, 0, i};
        recvs[i].ordered = true;
        recvs[i].source = &from;
        recvs[i].data = in[i].data();
        recvs[i].bytes = kBytes;
        network.rank(3).mailbox().post(&recvs[i]);
      }
    }
  };
  std::function<void()> send = [&] {
    Channel& to = network.rank(0).link(3).channel();
    for (size_t i = 0; i < kAtOnce && !stop; ++i) {
      if (std::exchange(sends[i].over, false)) {
        sends[i].key = MessageKey{1, 0, i};
        sends[i].pointToPoint = true;
        sends[i].data = out.data();
        sends[i].bytes = kBytes;
        to.send(&sends[i], network.rank(0).loop().now());
      }
    }
  };
  for (const size_t r : {0, 3}) {
    network.in(r, [&network, r] { network.rank(r).link(3 - r).addInterest(); });
  }
  std::function<void()> again = [&] {
    network.in(3, post);
    network.in(0, send);
    if (!stop) {
      network.at(network.now() + std::chrono::milliseconds(2), again);
    }
  };
  const auto runFor = [&](Nanos duration) {
    const TimePoint end = network.now() + duration;
    while (network.now() < end && network.step()) {
    }
  };
  PeerLink& link = network.rank(0).link(3);
  network.at(network.now() + std::chrono::seconds(1), again); // links are up
  runFor(std::chrono::seconds(40));
  const uint64_t before = link.channel().counters().bytesSent;
  runFor(std::chrono::seconds(1));
  Streamed streamed;
  streamed.bytesPerS =
      static_cast<double>(link.channel().counters().bytesSent - before);
  PeerStats stats;
  link.relays().fillStats(stats);
  for (const PathStats& path : stats.paths) {
    streamed.relays += path.state == "up";
  }
  stop = true;
  runFor(std::chrono::seconds(10));
  for (size_t i = 0; i < kAtOnce; ++i) {
    CHECK(sends[i].ok && sends[i].over);
  }
  for (const size_t r : {0, 3}) {
    network.in(
        r, [&network, r] { network.rank(r).link(3 - r).dropInterest(); });
  }
  runFor(std::chrono::milliseconds(1));
  CHECK_EQ(network.error(), "");
  return streamed;
}

TEST(relays_are_used_while_they_raise_the_goodput) {
  simulateSeeds(5, [](uint64_t seed) {
    for (const bool oneUplink : {false, true}) {
      const int uplinks = oneUplink ? 1 : 3;
      const Streamed s = streamOverRelays(oneUplink, seed);
      if (s.relays != uplinks - 1 || s.bytesPerS < 0.9 * uplinks * 10e6) {
        throw Failure(
            std::to_string(s.relays) + " relays and " +
            std::to_string(s.bytesPerS) + " bytes per second over " +
            std::to_string(uplinks) + " uplinks, seed " + std::to_string(seed) +
            replayLine(seed, "relays_are_used_while"));
      }
    }
  });
}

// A host whose uplink is dead reaches the neighbours of the peer no more than
// the peer itself.
TEST(relays_of_our_own_site_stand_in_for_a_dead_uplink) {
  constexpr size_t kCount = 60, kBytes = 64u << 10, kBefore = 20;
  constexpr Nanos kEvery = std::chrono::milliseconds(20);
  std::vector<std::byte> out(kBytes), in(kBytes);
  simulateSeeds(5, [&](uint64_t seed) {
    std::vector<Send> sends(kCount);
    std::vector<Recv> recvs(kCount);
    EngineOptions options;
    options.relay = "auto";
    options.wan_connections = 1; // nothing is tuned: there are no connections
    RelayNetwork network(seed);
    network.afterTurn = [](size_t) {};
    for (const char* site : {"near", "near", "far", "far"}) {
      network.add(options, site, 10'000'000, std::nullopt);
    }
    RelayNetwork::Way way;
    way.latency = std::chrono::milliseconds(20);
    std::vector<RelayNetwork::WayRef> uplink;
    for (const size_t far : {2, 3}) {
      uplink.push_back(network.connect(0, far, way));
      network.connect(1, far, way);
    }
    way.latency = std::chrono::microseconds(50);
    network.connect(0, 1, way);
    network.connect(2, 3, way);
    network.join();
    for (const size_t r : {0, 1, 2, 3}) {
      network.in(r, [&network, r] {
        network.rank(r).link((r + 2) % 4).addInterest();
      });
    }
    const TimePoint begin = network.now() + std::chrono::seconds(2);
    for (size_t i = 0; i < kCount; ++i) {
      network.at(begin + static_cast<int64_t>(i) * kEvery, [&, i] {
        network.in(2, [&, i] {
          Recv& recv = recvs[i];
          recv.network = &network;
          recv.key = MessageKey{1, 0, i};
          recv.ordered = true;
          recv.source = &network.rank(2).link(0).channel();
          recv.data = in.data();
          recv.bytes = kBytes;
          network.rank(2).mailbox().post(&recv);
        });
        network.in(0, [&, i] {
          Send& send = sends[i];
          send.key = MessageKey{1, 0, i};
          send.pointToPoint = true;
          send.data = out.data();
          send.bytes = kBytes;
          Channel& to = network.rank(0).link(2).channel();
          to.send(&send, network.rank(0).loop().now());
        });
        for (const auto ref : uplink) {
          if (i == kBefore) {
            network.silence(ref, begin + std::chrono::minutes(1));
          }
        }
      });
    }
    const TimePoint end = begin + std::chrono::seconds(5);
    while (network.now() < end && network.step()) {
    }
    Nanos longest{};
    for (size_t i = 1; i < kCount; ++i) {
      CHECK(recvs[i].at != TimePoint());
      longest = std::max(longest, recvs[i].at - recvs[i - 1].at);
    }
    if (longest > std::chrono::milliseconds(300)) {
      throw Failure(
          "a pause of " + std::to_string(toSeconds(longest)) + " s" +
          replayLine(seed, "relays_of_our_own_site"));
    }
    network.heal();
    for (const size_t r : {0, 1, 2, 3}) {
      network.in(r, [&network, r] {
        network.rank(r).link((r + 2) % 4).dropInterest();
      });
    }
    for (const TimePoint over = network.now() + std::chrono::seconds(1);
         network.now() < over && network.step();) {
    }
    CHECK_EQ(network.error(), "");
  });
}

TEST(relay_simulation_is_decided_by_its_seed) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CHECK_EQ(simulateRelays(seed).traceHash, simulateRelays(seed).traceHash);
  }
  CHECK(simulateRelays(1).traceHash != simulateRelays(2).traceHash);
}

} // namespace
} // namespace resilient::test
