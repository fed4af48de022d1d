#include "transport/event_loop.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <string>

#include "base/random.h"
#include "tests/check.h"
#include "transport/socket.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

struct Recorder : Handler {
  std::function<void(uint32_t)> run;
  int calls = 0;
  void onEvents(uint32_t events) override {
    ++calls;
    if (run) {
      run(events);
    }
  }
};

struct Pair {
  FileDescriptor a, b;
  Pair() {
    int fds[2];
    checkSyscall(
        "socketpair",
        ::socketpair(
            AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
    a.reset(fds[0]);
    b.reset(fds[1]);
  }
  void poke() {
    CHECK_EQ(::write(b.get(), "x", 1), ssize_t{1});
  }
  // How many pokes have come.
  int drain() {
    char sink[256];
    return static_cast<int>(
        std::max<ssize_t>(::read(a.get(), sink, sizeof(sink)), 0));
  }
};

// A loop in a thread of its own, stopped at the end of the test.
struct Running {
  EventLoop loop;
  std::thread thread{[this] { loop.run(); }};
  ~Running() {
    loop.stop();
    thread.join();
  }
  // Runs `f` in the loop and waits for it.
  void sync(std::function<void()> f) {
    std::promise<void> done;
    CHECK(loop.post([&] {
      f();
      done.set_value();
    }));
    done.get_future().wait();
  }
};

TEST(posted_functions_run_in_the_loop_in_order) {
  Running r;
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) {
    CHECK(r.loop.post([&, i] {
      CHECK(r.loop.inLoop());
      seen.push_back(i);
    }));
  }
  r.sync([] {});
  CHECK(!r.loop.inLoop());
  CHECK_EQ(seen.size(), size_t{1000});
  for (int i = 0; i < 1000; ++i) {
    CHECK_EQ(seen[static_cast<size_t>(i)], i);
  }
}

TEST(many_posters_lose_nothing_and_the_loop_ends_with_all_run) {
  constexpr int kThreads = 4, kEach = 5000;
  std::vector<int> last(kThreads, -1);
  int count = 0;
  int taken = 0;
  {
    EventLoop loop;
    std::thread runner([&] { loop.run(); });
    std::vector<std::thread> posters;
    std::atomic<int> accepted{0};
    for (int t = 0; t < kThreads; ++t) {
      posters.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          accepted += loop.post([&, t, i] {
            CHECK(last[static_cast<size_t>(t)] < i);
            last[static_cast<size_t>(t)] = i;
            ++count;
          });
          if (t == 0 && i == kEach / 2) {
            loop.stop(); // in the midst of it
          }
        }
      });
    }
    for (auto& p : posters) {
      p.join();
    }
    runner.join();
    taken = accepted;
    CHECK(!loop.post([] { CHECK(false); }));
  }
  CHECK_EQ(count, taken);
  CHECK(count >= kEach / 2);
}

TEST(a_burst_wakes_the_loop_once) {
  Running r;
  r.sync([] {});
  std::promise<void> busy, go;
  r.loop.post([&] {
    busy.set_value();
    go.get_future().wait();
  });
  busy.get_future().wait();
  uint64_t before = r.loop.turns();
  int ran = 0;
  for (int i = 0; i < 1000; ++i) {
    r.loop.post([&] { ++ran; });
  }
  go.set_value();
  uint64_t after = 0;
  r.sync([&] { after = r.loop.turns(); });
  CHECK_EQ(ran, 1000);
  CHECK(after - before <= 3);
}

TEST(an_idle_loop_sleeps) {
  Running r;
  // Descriptors and a far timer are there, nothing happens.
  Pair pair;
  Recorder handler;
  r.sync([&] {
    r.loop.add(pair.a.get(), EPOLLIN, &handler);
    r.loop.after(1h, [] {});
  });
  uint64_t before = 0;
  r.sync([&] { before = r.loop.turns(); });
  ::usleep(100000); // the idle time that is measured
  uint64_t after = 0;
  r.sync([&] { after = r.loop.turns(); });
  CHECK(after - before <= 2);
  CHECK_EQ(handler.calls, 0);
  r.sync([&] { r.loop.remove(pair.a.get()); });
}

// Whoever runs the loop at a time, nothing may be slept through: what is
// posted without a wake-up, what a descriptor brings, timers.
TEST(help_that_comes_and_goes_leaves_nothing_undone) {
  Running r;
  Pair pair;
  Recorder handler;
  std::atomic<int> arrived{0};
  handler.run = [&](uint32_t) { arrived += pair.drain(); };
  std::atomic<int> ticks{0};
  std::function<void()> tick = [&] {
    ++ticks;
    r.loop.after(300us, [&] { tick(); });
  };
  r.sync([&] {
    r.loop.add(pair.a.get(), EPOLLIN | EPOLLET, &handler);
    tick();
  });
  std::atomic<bool> over{false};
  std::atomic<int> poked{0};
  std::thread poker([&] {
    while (!over) {
      pair.poke();
      ++poked;
      ::usleep(50);
    }
  });
  const auto soon = [](const std::function<bool()>& condition) {
    const TimePoint limit = std::chrono::steady_clock::now() + 10s;
    while (!condition() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    return condition();
  };
  const auto callers = [&](int times) {
    for (int i = 0; i < times; ++i) {
      std::atomic<bool> done{false};
      CHECK(r.loop.postQuietly([&] { done = true; }));
      r.loop.runPosted(/*here=*/i % 2 == 0);
      if (i % 3 != 0) {
        r.loop.help([&] { return done.load(); }, kNever);
      }
      CHECK(soon([&] { return done.load(); }));
    }
  };
  callers(3000);
  const int before = ticks;
  CHECK(soon([&] { return ticks > before + 3; }));
  r.sync([&] { tick = [] {}; });
  // Nothing but descriptors: nobody helps when the last ones are due.
  const int seen = arrived;
  r.loop.help([&] { return arrived > seen + 500; }, kNever);
  over = true;
  poker.join();
  CHECK(soon([&] { return arrived == poked; }));
  pair.poke();
  CHECK(soon([&] { return arrived == poked + 1; }));
  r.sync([&] { r.loop.remove(pair.a.get()); });
}

// A helper sleeps until what it knows of is due; what another caller's turn
// leaves behind may be due earlier.
TEST(a_helper_learns_of_what_another_caller_leaves_behind) {
  Running r;
  Pair pair;
  Recorder handler;
  handler.run = [&](uint32_t) { pair.drain(); };
  r.sync([&] { r.loop.add(pair.a.get(), EPOLLIN | EPOLLET, &handler); });
  std::atomic<bool> over{false};
  std::thread helper([&] {
    while (!over) {
      r.loop.help([&] { return over.load(); }, kNever);
    }
  });
  for (int i = 0; i < 300; ++i) {
    for (int k = 0; k < 20; ++k) {
      pair.poke(); // in the helper's turns: wakes the thread in run(), too
    }
    std::promise<void> due;
    auto fired = due.get_future();
    CHECK(r.loop.postQuietly([&] {
      r.loop.after(500us, [&] {
        r.loop.post([&] { due.set_value(); }); // and what a turn posts
      });
    }));
    r.loop.runPosted(/*here=*/true);
    if (fired.wait_for(5s) != std::future_status::ready) {
      over = true;
      r.loop.wakeHelper();
      helper.join();
      fired.wait();
      CHECK(!"slept through a timer");
    }
  }
  over = true;
  r.loop.wakeHelper();
  helper.join();
  r.sync([&] { r.loop.remove(pair.a.get()); });
}

// To set a timer costs more than all else that a small message needs.
TEST(who_waits_again_and_again_seldom_sets_a_timer) {
  Running r;
  Pair pair;
  Recorder handler;
  std::atomic<int> arrived{0};
  handler.run = [&](uint32_t) {
    arrived += pair.drain();
    r.loop.wakeHelper();
  };
  r.sync([&] { r.loop.add(pair.a.get(), EPOLLIN | EPOLLET, &handler); });
  const TimePoint from = std::chrono::steady_clock::now();
  const uint64_t before = r.loop.wakeTimersSet();
  for (int i = 0; i < 4000; ++i) {
    std::atomic<bool> done{false};
    CHECK(r.loop.postQuietly([&] { done = true; }));
    r.loop.runPosted(/*here=*/true);
    if (i % 4 == 0) {
      pair.poke(); // wakes both threads that sleep
    }
    r.loop.help([&] { return done && arrived > i / 4; }, kNever);
    CHECK(done.load());
  }
  const auto took = std::chrono::steady_clock::now() - from;
  const uint64_t sets = r.loop.wakeTimersSet() - before;
  CHECK(sets * 25us <= took + 5ms); // each counts for 100 us or more
  r.sync([&] { r.loop.remove(pair.a.get()); });
}

TEST(what_is_posted_quietly_runs_without_help) {
  Running r;
  std::promise<void> ran;
  CHECK(r.loop.postQuietly([&] { ran.set_value(); }));
  r.loop.runPosted(/*here=*/false);
  CHECK(ran.get_future().wait_for(10s) == std::future_status::ready);
}

TEST(a_handler_removed_by_another_in_the_same_batch_is_not_called) {
  EventLoop loop;
  Pair one, two;
  auto first = std::make_unique<Recorder>();
  auto second = std::make_unique<Recorder>();
  int calls = 0;
  // Whichever comes first destroys both.
  auto run = [&](uint32_t) {
    ++calls;
    loop.remove(one.a.get());
    loop.remove(two.a.get());
    loop.post([&] {
      first.reset();
      second.reset();
      loop.stop();
    });
  };
  first->run = second->run = run;
  loop.add(one.a.get(), EPOLLIN, first.get());
  loop.add(two.a.get(), EPOLLIN, second.get());
  one.poke();
  two.poke();
  loop.run();
  CHECK_EQ(calls, 1);
}

TEST(a_stale_event_does_not_reach_the_successor_of_a_descriptor) {
  EventLoop loop;
  Pair one, two, fresh;
  Recorder first, second, successor;
  bool replaced = false;
  // The first handler closes the other's descriptor and puts a quiet one in
  // its place, with the same number.
  auto replace = [&](int victim) {
    if (replaced) {
      return;
    }
    replaced = true;
    loop.remove(victim);
    CHECK_EQ(::dup3(fresh.a.get(), victim, O_CLOEXEC), victim);
    loop.add(victim, EPOLLIN, &successor);
    loop.atEndOfTurn([&] { loop.stop(); });
  };
  first.run = [&](uint32_t) { replace(two.a.get()); };
  second.run = [&](uint32_t) { replace(one.a.get()); };
  loop.add(one.a.get(), EPOLLIN, &first);
  loop.add(two.a.get(), EPOLLIN, &second);
  one.poke();
  two.poke();
  loop.run();
  CHECK(replaced);
  CHECK_EQ(successor.calls, 0);
}

TEST(modify_and_remove_of_an_unwatched_descriptor_say_so) {
  EventLoop loop;
  try {
    loop.modify(77, EPOLLIN);
    CHECK(false);
  } catch (const StatusError& e) {
    CHECK(e.status().message().find("descriptor 77") != std::string::npos);
  }
}

TEST(timers_fire_in_order_not_early_and_cancel_works) {
  EventLoop loop;
  std::string order;
  TimePoint start = loop.now();
  TimerId cancelled = loop.at(start + 3ms, [&] { order += "X"; });
  loop.at(start + 5ms, [&] {
    order += "b";
    CHECK(std::chrono::steady_clock::now() >= start + 5ms);
  });
  loop.at(start + 5ms, [&] { order += "c"; });
  TimerId later = loop.at(start + 20ms, [&] { order += "Y"; });
  loop.at(start + 2ms, [&] {
    order += "a";
    loop.cancel(later);
  });
  loop.at(start + 30ms, [&] {
    order += "d";
    loop.stop();
  });
  loop.cancel(cancelled);
  loop.cancel(cancelled);
  loop.cancel(0);
  loop.cancel(~uint64_t{0});
  loop.run();
  CHECK_EQ(order, std::string("abcd"));
}

TEST(a_timer_that_rearms_itself_in_the_past_starves_nobody) {
  EventLoop loop;
  int spins = 0;
  std::function<void()> spin = [&] {
    ++spins;
    loop.at(TimePoint(), spin);
  };
  loop.at(TimePoint(), spin);
  Pair pair;
  Recorder handler;
  handler.run = [&](uint32_t) {
    loop.remove(pair.a.get());
    loop.after(1ms, [&] { loop.post([&] { loop.stop(); }); });
  };
  loop.add(pair.a.get(), EPOLLIN, &handler);
  pair.poke();
  loop.run();
  CHECK_EQ(handler.calls, 1);
  CHECK(spins > 1);
}

TEST(end_of_turn_comes_after_all_else_of_the_turn) {
  EventLoop loop;
  Pair pair;
  std::string order;
  Recorder handler;
  handler.run = [&](uint32_t) {
    order += "e";
    loop.remove(pair.a.get());
    loop.atEndOfTurn([&] {
      order += "f";
      // Asked for within: next turn, and the loop does not sleep before.
      loop.atEndOfTurn([&] {
        order += "g";
        loop.stop();
      });
    });
  };
  loop.add(pair.a.get(), EPOLLIN, &handler);
  loop.post([&] { order += "p"; });
  loop.at(TimePoint(), [&] { order += "t"; });
  pair.poke();
  loop.run();
  CHECK_EQ(order, std::string("eptfg"));
}

// The dumb twin: a multimap.
TEST(the_timer_queue_equals_a_sorted_map) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Prng random(seed);
    TimerQueue queue;
    std::map<std::pair<TimePoint, int>, TimerId> twin;
    std::vector<int> fired;
    int next = 0;
    TimePoint now{};
    std::vector<TimerId> gone;
    for (int step = 0; step < 500; ++step) {
      uint64_t what = random.below(10);
      if (what < 5) {
        TimePoint when = now + Nanos(random.below(50));
        int label = next++;
        twin[{when, label}] =
            queue.add(when, [&, label] { fired.push_back(label); });
      } else if (what < 7 && !twin.empty()) {
        auto it = twin.begin();
        std::advance(it, random.below(twin.size()));
        CHECK(queue.cancel(it->second));
        gone.push_back(it->second);
        twin.erase(it);
      } else if (what < 8 && !gone.empty()) {
        CHECK(!queue.cancel(gone[random.below(gone.size())]));
      } else {
        now += Nanos(random.below(30));
        while (auto run = queue.popDue(now, queue.added())) {
          run();
          CHECK(!twin.empty());
          CHECK_EQ(twin.begin()->first.second, fired.back());
          CHECK(twin.begin()->first.first <= now);
          gone.push_back(twin.begin()->second);
          twin.erase(twin.begin());
        }
      }
      CHECK_EQ(queue.size(), twin.size());
      CHECK(
          queue.next() == (twin.empty() ? kNever : twin.begin()->first.first));
    }
  }
}

TEST(socket_addresses_read_and_write_themselves) {
  auto text = [](const char* ip) {
    auto a = SocketAddress::parse(ip, 29511);
    return a ? a->toString() : std::string("no");
  };
  CHECK_EQ(text("10.0.0.7"), std::string("10.0.0.7:29511"));
  CHECK_EQ(text("fd00::7"), std::string("[fd00::7]:29511"));
  CHECK_EQ(text("::ffff:10.0.0.7"), std::string("10.0.0.7:29511"));
  CHECK_EQ(text("fe80::1%lo"), std::string("[fe80::1%lo]:29511"));
  for (const char* bad :
       {"", "10.0.0", "10.0.0.256", "host", "fe80::1%no-such-nic", "::g"}) {
    CHECK_EQ(text(bad), std::string("no"));
  }
  CHECK(SocketAddress::parse("127.0.0.9", 1)->isLoopback());
  CHECK(SocketAddress::parse("::1", 1)->isLoopback());
  CHECK(SocketAddress::parse("::ffff:127.0.0.1", 1)->isLoopback());
  CHECK(!SocketAddress::parse("128.0.0.1", 1)->isLoopback());
}

FileDescriptor listenOnLoopback(SocketAddress& at) {
  FileDescriptor fd(checkSyscall(
      "socket",
      ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)));
  at = *SocketAddress::parse("127.0.0.1", 0);
  checkSyscall("bind", ::bind(fd.get(), at.raw(), at.rawBytes()));
  checkSyscall("listen", ::listen(fd.get(), 16));
  at = localAddress(fd.get());
  return fd;
}

TEST(a_connection_carries_its_options_and_tells_its_state) {
  SocketAddress at;
  FileDescriptor listener = listenOnLoopback(at);
  SocketOptions options;
  options.sendBufferBytes = 64 << 10;
  options.receiveBufferBytes = 64 << 10;
  FileDescriptor client, server;
  bool connected = false;
  auto source = SocketAddress::parse("127.0.0.2", 0);
  Status status = startConnect(at, source, options, client, connected);
  CHECK(status.ok());
  EventLoop loop;
  Recorder handler;
  handler.run = [&](uint32_t) { loop.stop(); };
  loop.add(listener.get(), EPOLLIN, &handler);
  loop.run();
  SocketAddress remote;
  CHECK_EQ(acceptConnection(listener.get(), server, remote), 0);
  CHECK_EQ(connectOutcome(client.get()), 0);
  CHECK_EQ(remote.toString(), localAddress(client.get()).toString());
  CHECK_EQ(remote.ip(), std::string("127.0.0.2"));
  CHECK_EQ(remoteAddress(client.get()).toString(), at.toString());
  FileDescriptor none;
  CHECK_EQ(acceptConnection(listener.get(), none, remote), EAGAIN);

  CHECK_EQ(::write(client.get(), "hello", 5), ssize_t{5});
  auto info = tcpInfo(client.get());
  CHECK(info.has_value());
  CHECK(info->roundTrip.count() > 0);
  CHECK(info->notSentBytes <= 5);
  // Nobody reads: the queue fills and is counted.
  std::string block(1 << 16, 'x');
  while (::write(client.get(), block.data(), block.size()) > 0) {
  }
  info = tcpInfo(client.get());
  CHECK(info->notSentBytes > 0);

  // A reset drops what is queued; the far end sees it as such.
  resetOnClose(client.get());
  client.reset();
  char sink[1 << 16];
  ssize_t n;
  while ((n = ::read(server.get(), sink, sizeof(sink))) > 0) {
  }
  CHECK(n == -1 && errno == ECONNRESET);
}

TEST(a_refused_connection_names_the_attempt) {
  SocketAddress at;
  listenOnLoopback(at); // closed again: nobody listens there
  FileDescriptor fd;
  bool connected = false;
  Status status = startConnect(at, {}, SocketOptions(), fd, connected);
  if (status.ok()) { // refused a moment later
    EventLoop loop;
    Recorder handler;
    handler.run = [&](uint32_t) { loop.stop(); };
    loop.add(fd.get(), EPOLLOUT, &handler);
    loop.run();
    CHECK_EQ(connectOutcome(fd.get()), ECONNREFUSED);
  } else {
    CHECK(status.code() == StatusCode::kPeerDied);
    CHECK_EQ(
        status.message(),
        "connect to " + at.toString() + ": Connection refused");
  }
}

TEST(a_connection_to_itself_counts_as_refused) {
  // Bound to the port that it connects to, a socket reaches itself.
  SocketAddress at;
  listenOnLoopback(at);
  FileDescriptor fd;
  bool connected = false;
  Status status = startConnect(at, at, SocketOptions(), fd, connected);
  CHECK(status.ok());
  EventLoop loop;
  Recorder handler;
  handler.run = [&](uint32_t) { loop.stop(); };
  loop.add(fd.get(), EPOLLOUT, &handler);
  loop.run();
  CHECK_EQ(connectOutcome(fd.get()), ECONNREFUSED);
}

TEST(spin_time_is_at_most_half_of_a_wait) {
  SpinTime spin;
  for (const Nanos wait : {1us, 30us, 100us, 130us, 1000us, 5000us}) {
    for (int i = 0; i < 20; ++i) {
      spin.onNews(wait);
    }
    CHECK(
        spin.budget() == SpinTime::kMax ? wait <= 2 * SpinTime::kMax
                                        : spin.budget() <= wait / 2);
  }
  CHECK_EQ(spin.budget().count(), SpinTime::kMin.count());
  spin.onNews(100us); // both ends sleep, and it still was soon
  CHECK_EQ(spin.budget().count(), SpinTime::kMax.count());
  spin.onOther();
  CHECK_EQ(spin.budget().count(), SpinTime::kMax.count() / 2);
}

TEST(spin_time_is_longer_where_system_calls_are_slow) {
  CHECK_EQ(SpinTime(1us).budget().count(), SpinTime::kMax.count());
  SpinTime spin(20us);
  CHECK_EQ(spin.budget().count(), Nanos(500us).count());
  spin.onNews(900us);
  CHECK_EQ(spin.budget().count(), Nanos(500us).count());
  CHECK_EQ(SpinTime(1s).budget().count(), SpinTime::kMaxSlow.count());
}

} // namespace
} // namespace resilient
