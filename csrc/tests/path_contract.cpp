#include "tests/path_contract.h"

#include <linux/filter.h>
#include <sys/socket.h>

#include <cstdio>

#include "base/random.h"
#include "failover/roles.h"

namespace resilient::test {
namespace {

using namespace std::chrono_literals;

constexpr PathId kPath = 1; // each path has the number of the one before
constexpr size_t kChunk = 64u << 10;
constexpr Nanos kPatience = 15s;

ChannelConfig channelConfig() {
  ChannelConfig config = ChannelPair::defaults();
  config.chunkBytes = kChunk;
  config.ownEagerBytes = config.peerEagerBytes = 256u << 20;
  return config;
}

} // namespace

// --- the user of a path

PathUser::PathUser(uint32_t id)
    : TestProcess(channelConfig(), id), thread_([this] { loop.run(); }) {}

PathUser::~PathUser() {
  resume();
  loop.post([this] {
    pumps = false;
    whenReady = whenUse = nullptr;
    loop.cancel(timer_);
    paths.clear();
    channel.fail(Status(StatusCode::kAborted, "the test is over"));
    completions.drain();
  });
  loop.stop();
  thread_.join();
}

void PathUser::run(const std::function<void()>& f) {
  auto done = std::make_shared<std::promise<void>>();
  loop.post([f, done] {
    try {
      f();
      done->set_value();
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  });
  auto result = done->get_future();
  CHECK(result.wait_for(kPatience) == std::future_status::ready);
  result.get();
}

void PathUser::until(const char* what, const std::function<bool()>& met) {
  auto done = std::make_shared<std::promise<bool>>();
  const TimePoint end = std::chrono::steady_clock::now() + kPatience;
  auto look = std::make_shared<std::function<void()>>();
  *look = [this, met, done, end, again = std::weak_ptr(look)] {
    bool is = false;
    try {
      is = met();
    } catch (...) {
      done->set_exception(std::current_exception());
      return;
    }
    if (is || loop.now() > end) {
      done->set_value(is);
      return;
    }
    loop.after(500us, [next = again.lock()] { (*next)(); });
  };
  loop.post(*look);
  auto result = done->get_future();
  CHECK(result.wait_for(2 * kPatience) == std::future_status::ready);
  if (!result.get()) {
    throw Failure(std::string("waited in vain: ") + what);
  }
}

void PathUser::pause() {
  go_.emplace();
  std::promise<void> paused;
  loop.post([&paused, go = go_->get_future().share()] {
    paused.set_value();
    go.wait();
  });
  paused.get_future().wait();
}

void PathUser::resume() {
  if (go_) {
    go_->set_value();
    go_.reset();
  }
}

TestSend& PathUser::send(const std::string& content, uint64_t tag) {
  TestSend& op = sends.emplace_back(content, tag);
  channel.send(&op, loop.now());
  return op;
}

TestRecv& PathUser::receive(size_t bytes, uint64_t tag) {
  TestRecv& op = receives.emplace_back(&channel, bytes, tag);
  mailbox.post(&op);
  return op;
}

bool PathUser::received() const {
  for (const TestRecv& op : receives) {
    if (op.ends == 0) {
      return false;
    }
  }
  return true;
}

void PathUser::pump() {
  bool any = true;
  for (int round = 0; any && round < 8; ++round) {
    any = false;
    for (const auto& path : paths) {
      while (path->hasRoom()) {
        const size_t bytes = path->takeFrame();
        taken += bytes;
        any = any || bytes != 0;
        if (bytes == 0) {
          break;
        }
      }
      any = path->flush() || any;
      unpaid += path->takeUnpaid();
    }
  }
  if (any) {
    loop.post([this] { pumpSoon(); });
  }
  completions.drain();
  armTimer();
}

void PathUser::pumpSoon() {
  if (pumps && !dirty_) {
    dirty_ = true;
    loop.atEndOfTurn([this] {
      dirty_ = false;
      if (pumps) {
        pump();
      }
    });
  }
}

void PathUser::armTimer() {
  const TimePoint due = channel.deadline();
  if (due == kNever || (timer_ != 0 && timerAt_ <= due)) {
    return;
  }
  loop.cancel(timer_);
  timerAt_ = due;
  timer_ = loop.at(due, [this] {
    timer_ = 0;
    channel.onTimer(loop.now());
    pumpSoon();
  });
}

void PathUser::channelReady(Channel&) {
  pumpSoon();
}

void PathUser::onPathClosed(Path& path, const Status& status) {
  ++closed;
  why = status;
  (void)channel.pathCounters(path.id()); // which still knows it
  if (whenClosed) {
    whenClosed(path);
  }
}

void PathUser::onPathReady(Path& path) {
  ++ready;
  afterEnd += path.closed();
  if (whenReady) {
    whenReady(path);
  }
  pumpSoon();
}

void PathUser::onPathUse(Path& path) {
  ++use;
  afterEnd += path.closed();
  if (whenUse) {
    whenUse(path);
  }
  pumpSoon();
}

// --- the contract

void dropArrivals(int fd, bool drop) {
  sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, 0)}; // keep 0 bytes
  const sock_fprog program{1, all};
  CHECK_EQ(
      ::setsockopt(
          fd,
          SOL_SOCKET,
          drop ? SO_ATTACH_FILTER : SO_DETACH_FILTER,
          &program,
          sizeof(program)),
      0);
}

void checkPathContract(PathHelper& helper, void (*check)(PathHelper&)) {
  if (const std::string reason = helper.unavailable(); !reason.empty()) {
    std::printf("skipped: %s\n", reason.c_str());
    return;
  }
  check(helper);
}

namespace {

const Status kOver(StatusCode::kNetwork, "closed by the test");

// Two processes with a path between them.
struct Ends {
  explicit Ends(PathHelper& h) : helper(h) {
    connect();
  }

  // A new path, once it can carry.
  void connect() {
    const auto makers = helper.connect();
    for (const int side : {0, 1}) {
      PathUser& user = side == 0 ? a : b;
      user.run([&] {
        user.paths.push_back(makers[static_cast<size_t>(side)](user, kPath));
        // Nothing is left of the path before it.
        CHECK_EQ(user.channel.pathCounters(kPath).chunksSent, 0u);
        CHECK(!user.path().closed());
        CHECK_EQ(user.path().id(), kPath);
      });
    }
    for (PathUser* user : {&a, &b}) {
      user->until(
          "the path is usable", [user] { return user->path().usable(); });
      user->run([user] { // its role, which is the owner's to give
        user->channel.setClasses(kPath, resilient::kAllClasses);
        user->pumpSoon();
      });
    }
  }
  // Sends a message from `from` to the other one, with a receive for it.
  void send(PathUser& from, size_t bytes) {
    const std::string content = expect(from, bytes);
    from.run([&] { from.send(content); });
  }
  // The content of the next message of `from`, for which there is a receive.
  std::string expect(PathUser& from, size_t bytes) {
    PathUser& to = &from == &a ? b : a;
    const std::string content = text(bytes, ++lastSeed);
    to.run([&] { to.receive(bytes); });
    expected[&from == &a].push_back(content);
    return content;
  }
  // All messages have arrived, whole and in order, and once.
  void settle() {
    for (PathUser* user : {&a, &b}) {
      user->until("the messages arrive", [user] { return user->received(); });
    }
    for (PathUser* user : {&a, &b}) {
      user->run([&] {
        const auto& contents = expected[user == &b];
        CHECK_EQ(user->receives.size(), contents.size());
        for (size_t i = 0; i < contents.size(); ++i) {
          CHECK_EQ(user->receives[i].status.toString(), "ok");
          CHECK_EQ(user->receives[i].ends, 1);
          CHECK(user->receives[i].content == contents[i]);
        }
        CHECK_EQ(user->afterEnd, 0);
      });
      user->until("the sends end", [user] { return user->channel.drained(); });
    }
  }
  // What is to be seen of the end of `user` once its path is over.
  void checkClosed(PathUser& user, int times = 1) {
    user.run([&] {
      Path& path = user.path();
      CHECK(path.closed());
      CHECK(!path.usable());
      CHECK(!path.hasRoom());
      CHECK(!path.flush());
      path.close(kOver);
      path.reset(kOver);
      path.faultsChanged(true);
      path.faultsChanged(false);
      CHECK_EQ(user.closed.load(), times);
    });
  }
  // End `a` is over. Then b's is, and the messages arrive over a second path.
  void arriveOverSecondPath() {
    if (!helper.noticesEnd()) {
      b.run([&] { b.path().close(kOver); });
    }
    b.until("the far end is closed", [&] { return b.closed == 1; });
    checkClosed(b);
    send(a, kChunk);
    send(b, kChunk);
    connect();
    settle();
    CHECK_EQ(b.closed.load(), 1);
  }
  // b reads nothing, and a has taken all that it can.
  void fill(size_t bytes) {
    send(a, 16u << 20); // the channel trusts the path with more from then on
    settle();
    const std::string content = expect(a, bytes);
    b.pause(); // before the first byte
    a.run([&] { a.send(content); });
    const auto seen = std::make_shared<std::pair<uint64_t, int>>();
    a.until("the path is full", [this, seen] {
      const bool still = !a.path().hasRoom() && a.taken == seen->first;
      *seen = {a.taken, still ? seen->second + 1 : 0};
      return seen->second >= 20;
    });
  }

  PathHelper& helper;
  std::vector<std::string> expected[2]; // at a, at b
  uint64_t lastSeed = 0;
  PathUser a{1}, b{2};
};

void closeInTheMiddle(PathHelper& helper, bool reset) {
  Ends ends(helper);
  ends.fill(48u << 20);
  ends.a.run([&] {
    if (reset) {
      ends.a.path().reset(kOver);
    } else {
      ends.a.path().close(kOver);
    }
    CHECK_EQ(ends.a.closed.load(), 1); // from within the call
    CHECK_EQ(ends.a.why.message(), kOver.message());
  });
  ends.checkClosed(ends.a);
  ends.b.resume();
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 1);
}

// In the loop of `user`; returns the number of the rule.
uint64_t addRule(PathUser& user, const std::string& rule) {
  uint64_t id = 0;
  user.run([&] {
    id = user.plan.add(rule, user.loop.now());
    user.path().faultsChanged(true);
  });
  return id;
}

void removeRule(PathUser& user, uint64_t id) {
  user.run([&] {
    CHECK(user.plan.remove(id));
    user.path().faultsChanged(false);
  });
}

void passTime(PathUser& user, Nanos time) {
  const TimePoint end = std::chrono::steady_clock::now() + time;
  user.until("time passes", [&user, end] { return user.loop.now() >= end; });
}

// The path shows no life for a while. Answers to what was sent before may come
// first.
void standsStill(PathUser& user) {
  using Life = std::pair<uint64_t, TimePoint>;
  const auto seen = std::make_shared<std::pair<Life, int>>();
  user.until("it stands still", [&user, seen] {
    const Life life{user.path().evidence().progress, user.path().heardAt()};
    const bool same = life == seen->first;
    *seen = {life, same ? seen->second + 1 : 0};
    return seen->second >= 100;
  });
}

} // namespace

namespace path_contract {

void delivers_whole_and_in_order(PathHelper& helper) {
  forSeeds(3, [&helper](uint64_t seed) {
    Prng prng(mixBits(seed));
    Ends ends(helper);
    for (int i = 0; i < 200; ++i) {
      const size_t bytes = prng.chance(0.2) ? prng.below(3)
          : prng.chance(0.5)                ? prng.below(2000)
                                            : prng.below(4 * kChunk);
      ends.send(prng.chance(0.5) ? ends.a : ends.b, bytes);
    }
    ends.settle();
  });
}

void stops_while_the_far_end_does_not_read(PathHelper& helper) {
  Ends ends(helper);
  uint64_t before = 0;
  ends.a.run([&] { before = ends.a.taken; });
  const size_t bytes = 2 * helper.mostUnread();
  ends.fill(bytes);
  int ready = 0;
  ends.a.run([&] {
    const uint64_t warmUp = 16u << 20;
    CHECK(ends.a.taken - before - warmUp <= helper.mostUnread());
    CHECK_EQ(ends.a.closed.load(), 0);
    ready = ends.a.ready;
  });
  ends.b.resume();
  ends.settle();
  ends.a.run([&] { CHECK(ends.a.ready > ready); });
  CHECK_EQ(ends.a.closed.load() + ends.b.closed.load(), 0);
}

void closes_before_the_first_frame(PathHelper& helper) {
  Ends ends(helper);
  ends.a.run([&] {
    ends.a.pumps = false;
    ends.a.path().close(kOver);
  });
  ends.checkClosed(ends.a);
  ends.a.run([&] { ends.a.pumps = true; });
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 1);
}

void closes_with_frames_unflushed(PathHelper& helper) {
  Ends ends(helper);
  ends.a.run([&] { ends.a.pumps = false; });
  ends.send(ends.a, 3 * kChunk);
  ends.a.run([&] {
    CHECK(ends.a.path().takeFrame() > 0);
    (void)ends.a.path().takeFrame();
    ends.a.path().close(kOver);
    ends.a.pumps = true;
  });
  ends.checkClosed(ends.a);
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 1);
}

void closes_in_the_middle_of_a_frame(PathHelper& helper) {
  closeInTheMiddle(helper, false);
}

void resets_in_the_middle_of_a_frame(PathHelper& helper) {
  closeInTheMiddle(helper, true);
}

// Its owner is gone: nobody is told, but the channel has its frames back.
void is_destroyed_without_a_word(PathHelper& helper) {
  Ends ends(helper);
  ends.fill(24u << 20);
  ends.a.run([&] { ends.a.paths.pop_back(); });
  ends.b.resume();
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 0);
}

void closes_when_the_far_end_does(PathHelper& helper) {
  if (!helper.noticesEnd()) {
    return;
  }
  Ends ends(helper);
  ends.send(ends.a, 4 * kChunk);
  ends.settle();
  ends.b.run([&] { ends.b.path().close(kOver); });
  ends.a.until("the end is noticed", [&] { return ends.a.closed != 0; });
  ends.checkClosed(ends.a);
  ends.a.run([&] { CHECK(!ends.a.why.ok()); });
  ends.send(ends.a, 4 * kChunk);
  ends.connect();
  ends.settle();
}

void closes_from_within_on_path_ready(PathHelper& helper) {
  Ends ends(helper);
  ends.fill(48u << 20);
  ends.a.run([&] {
    ends.a.whenReady = [&ends](Path& path) {
      ends.a.whenReady = nullptr;
      path.close(kOver);
    };
  });
  ends.b.resume();
  ends.a.until("it is closed", [&] { return ends.a.closed != 0; });
  ends.checkClosed(ends.a);
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 1);
}

void closes_from_within_on_path_use(PathHelper& helper) {
  if (helper.obeysRules()) {
    return; // it can always be used
  }
  for (const bool bySilence : {false, true}) {
    if (!bySilence && helper.ignoresRules()) {
      continue;
    }
    Ends ends(helper);
    ends.a.run([&] { ends.a.whenUse = [](Path& path) { path.close(kOver); }; });
    if (!bySilence) {
      ends.a.run([&] { ends.a.path().faultsChanged(true); });
    } else if (helper.silence(1, true)) {
      ends.send(ends.a, 4 * kChunk);
    } else {
      break;
    }
    ends.a.until("it is closed", [&] { return ends.a.closed != 0; });
    ends.checkClosed(ends.a);
    ends.a.run([&] { ends.a.whenUse = nullptr; });
    ends.arriveOverSecondPath();
    CHECK_EQ(ends.a.closed.load(), 1);
  }
}

void is_heard_by_what_the_peer_sends(PathHelper& helper) {
  Ends ends(helper);
  TimePoint before{};
  ends.a.run([&] { before = ends.a.path().heardAt(); });
  CHECK(before != TimePoint{});
  passTime(ends.a, 2ms);
  ends.send(ends.b, 10);
  ends.settle();
  ends.a.run([&] {
    CHECK(ends.a.path().heardAt() > before);
    CHECK(ends.a.path().heardAt() <= ends.a.loop.now());
  });
}

void owes_nothing_when_idle(PathHelper& helper) {
  Ends ends(helper);
  ends.send(ends.a, 4 * kChunk);
  ends.send(ends.b, 4 * kChunk);
  ends.settle();
  for (PathUser* user : {&ends.a, &ends.b}) {
    user->until("nothing is unanswered", [user] {
      const PathEvidence e = user->path().evidence();
      CHECK(!e.owes);
      CHECK(!e.heldOnPurpose);
      return !e.kernelOwes;
    });
  }
}

// A path either shows the silence as evidence, or judges by itself that it
// cannot be used. It goes on when the network does.
void shows_the_silence_of_the_network(PathHelper& helper) {
  Ends ends(helper);
  ends.send(ends.a, 10);
  ends.settle();
  if (!helper.silence(0, true) || !helper.silence(1, true)) {
    return;
  }
  PathUser& a = ends.a;
  int use = 0;
  a.run([&] { use = a.use; });
  ends.send(a, 10);
  a.until("the silence shows", [&a] {
    return a.path().evidence().kernelOwes || !a.path().usable();
  });
  bool usable = false;
  a.run([&] {
    usable = a.path().usable();
    CHECK_EQ(a.use, use + !usable);
  });
  standsStill(a);
  a.run([&] {
    CHECK(a.path().evidence().kernelOwes || !usable);
    CHECK_EQ(a.path().usable(), usable);
  });
  ends.b.run([&] { CHECK(!ends.b.received()); });
  CHECK(helper.silence(0, false) && helper.silence(1, false));
  ends.settle();
  a.until("the silence is over", [&a] {
    return !a.path().evidence().kernelOwes && a.path().usable();
  });
  a.run([&] { CHECK_EQ(a.use, use + 2 * !usable); });
  CHECK_EQ(a.closed.load(), 0);
}

// A rule that holds data back looks like a network that loses it.
bool showsSilence(PathHelper& helper, PathUser& user) {
  return helper.tellsEvidence() ? user.path().evidence().kernelOwes
                                : !user.path().usable();
}

// Neither written nor read, as if a switch were dead.
void drops_by_rule(PathHelper& helper) {
  if (!helper.obeysRules()) {
    return;
  }
  Ends ends(helper);
  ends.send(ends.a, 10);
  ends.settle();
  PathUser& a = ends.a;
  const uint64_t rule = addRule(a, "drop");
  ends.send(a, 10);
  ends.send(ends.b, 10);
  a.until("it shows", [&] { return showsSilence(helper, a); });
  standsStill(a);
  a.run([&] {
    CHECK(!a.received());
    CHECK(showsSilence(helper, a));
  });
  ends.b.run([&] { CHECK(!ends.b.received()); });
  const int ready = a.ready;
  removeRule(a, rule);
  ends.settle();
  CHECK(a.ready > ready);
}

// Nothing is written, but what comes is read.
void stalls_by_rule(PathHelper& helper) {
  if (!helper.obeysRules()) {
    return;
  }
  Ends ends(helper);
  const uint64_t rule = addRule(ends.a, "stall");
  ends.send(ends.a, 10);
  ends.send(ends.b, 10);
  ends.a.until("it reads", [&] { return ends.a.received(); });
  ends.a.until("it shows", [&] { return showsSilence(helper, ends.a); });
  ends.b.run([&] { CHECK(!ends.b.received()); });
  removeRule(ends.a, rule);
  ends.settle();
}

void delays_by_rule(PathHelper& helper) {
  if (!helper.obeysRules()) {
    return;
  }
  Ends ends(helper);
  const uint64_t rule = addRule(ends.a, "delay ms=50");
  const TimePoint begin = std::chrono::steady_clock::now();
  ends.send(ends.a, 10);
  if (helper.tellsEvidence()) {
    ends.a.until(
        "it is held", [&] { return ends.a.path().evidence().heldOnPurpose; });
  }
  ends.b.until("it arrives", [&] { return ends.b.received(); });
  CHECK(std::chrono::steady_clock::now() - begin >= 50ms);
  ends.settle();
  removeRule(ends.a, rule);
}

void is_cut_by_rule(PathHelper& helper) {
  if (!helper.obeysRules()) {
    return;
  }
  Ends ends(helper);
  const uint64_t rule = addRule(ends.a, "cut after_bytes=100000 times=1");
  ends.send(ends.a, 1u << 20);
  ends.a.until("it is cut", [&] { return ends.a.closed != 0; });
  ends.checkClosed(ends.a);
  ends.a.run([&] { CHECK_CONTAINS(ends.a.why.message(), "fault injection"); });
  ends.arriveOverSecondPath();
  CHECK_EQ(ends.a.closed.load(), 1);
  removeRule(ends.a, rule);
}

void is_not_used_under_rules_it_cannot_obey(PathHelper& helper) {
  if (helper.obeysRules() || helper.ignoresRules()) {
    return;
  }
  Ends ends(helper);
  PathUser& a = ends.a;
  int use = 0;
  a.run([&] {
    use = a.use;
    a.path().faultsChanged(false);
    CHECK_EQ(a.use, use); // nothing new
    a.path().faultsChanged(true);
    CHECK_EQ(a.use, use + 1);
    CHECK(!a.path().usable());
    CHECK(!a.path().hasRoom());
    a.path().faultsChanged(true);
    CHECK_EQ(a.use, use + 1);
  });
  ends.send(a, 4 * kChunk);
  passTime(a, 20ms);
  ends.b.run([&] { CHECK(!ends.b.received()); });
  a.run([&] {
    a.path().faultsChanged(false);
    CHECK_EQ(a.use, use + 2);
    CHECK(a.path().usable());
  });
  ends.settle();
}

void takes_no_chunk_unless_allowed(PathHelper& helper) {
  Ends ends(helper);
  PathUser& a = ends.a;
  a.run([&] { a.pumps = false; });
  ends.send(a, 4 * kChunk);
  a.run([&] {
    const auto chunks = [&] {
      return a.channel.pathCounters(kPath).chunksSent;
    };
    Path& path = a.path();
    a.channel.sendControl(std::vector<std::byte>(10));
    bool control = false;
    while (const size_t bytes = path.takeFrame(/*chunks=*/false)) {
      control = control || bytes >= kFrameHeaderBytes + 10;
      CHECK_EQ(chunks(), 0u);
    }
    CHECK(control);
    CHECK(path.hasRoom());
    CHECK(path.takeFrame() > kFrameHeaderBytes);
    CHECK_EQ(chunks(), 1u);
    a.pumps = true;
    a.pump();
  });
  ends.settle();
}

// A cap on the rate charges what takeFrame() returned and takeUnpaid() adds.
void accounts_for_all_that_leaves(PathHelper& helper) {
  Ends ends(helper);
  PathUser& a = ends.a;
  const size_t bytes = 8 * kChunk;
  ends.send(a, bytes);
  ends.settle();
  a.run([&] {
    a.unpaid += a.path().takeUnpaid();
    CHECK_EQ(a.path().takeUnpaid(), 0u);
    CHECK(a.taken >= bytes + 8 * kFrameHeaderBytes);
    PathStats stats;
    a.path().fill(stats);
    CHECK(stats.kind == a.path().kind());
    CHECK_EQ(stats.bytesSent, bytes);
    if (stats.datagrams) {
      CHECK(a.unpaid > 0);
      CHECK(a.taken + a.unpaid >= stats.datagrams->bytes);
    } else {
      CHECK_EQ(a.unpaid, 0u);
    }
  });
}

} // namespace path_contract
} // namespace resilient::test
