#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>

#include "base/random.h"
#include "tests/channel_pair.h"
#include "tests/check.h"
#include "tests/path_contract.h"
#include "transport/shared_path.h"
#include "transport/shared_rendezvous.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;
using test::TestProcess;
using test::TestRecv;
using test::TestSend;

constexpr size_t kRing = SharedMemory::kMinRing;

// Both views of one piece of memory, as two processes would have them.
struct Both {
  SharedMemory a, b;
  explicit Both(size_t ringBytes = kRing) {
    FileDescriptor fd;
    CHECK(SharedMemory::make(ringBytes, a, fd).ok());
    CHECK(SharedMemory::map(fd.get(), b).ok());
  }
};

std::span<const std::byte> bytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(shared_ring_keeps_the_bytes_at_any_sizes) {
  Prng prng(11);
  Both both;
  RingWriter writer(both.a, 0);
  RingReader reader(both.b, 1);
  std::string sent, received;
  while (received.size() < 20 * kRing) {
    std::string piece(prng.below(kRing * 3 / 2), ' ');
    for (char& c : piece) {
      c = static_cast<char>(prng.below(256));
    }
    CHECK(writer.refresh());
    const size_t n = writer.put(bytesOf(piece).data(), piece.size());
    CHECK(n == piece.size() || writer.room() == 0);
    sent.append(piece, 0, n);
    writer.publish();
    for (uint64_t rounds = prng.below(4); rounds > 0; --rounds) {
      std::span<const std::byte> bytes;
      CHECK(reader.peek(bytes));
      bytes = bytes.first(prng.below(bytes.size() + 1));
      received.append(
          reinterpret_cast<const char*>(bytes.data()), bytes.size());
      reader.pop(bytes.size());
    }
  }
  CHECK(received == sent.substr(0, received.size()));
}

TEST(shared_ring_sizes_are_powers_of_two) {
  CHECK_EQ(Both(1).a.ringBytes(), SharedMemory::kMinRing);
  CHECK_EQ(Both(100'000).b.ringBytes(), size_t{1} << 17);
}

TEST(shared_ring_refuses_impossible_claims) {
  Both both;
  RingWriter writer(both.a, 0);
  RingReader reader(both.a, 0);
  std::span<const std::byte> bytes;
  auto& out = both.b.ring(0);
  for (const uint64_t lie : {uint64_t{1}, uint64_t{1} << 63, UINT64_MAX}) {
    out.read.store(lie);
    CHECK(!writer.refresh()); // more than was written
  }
  out.read.store(0);
  CHECK(writer.refresh());
  const std::string text(100, 'x');
  CHECK_EQ(writer.put(bytesOf(text).data(), text.size()), text.size());
  out.read.store(60);
  CHECK(writer.refresh());
  for (const uint64_t lie : {uint64_t{59}, uint64_t{0}, uint64_t{101}}) {
    out.read.store(lie);
    CHECK(!writer.refresh()); // it goes back, or too far
  }
  out.read.store(60);
  out.done.store(61);
  CHECK(!writer.refresh()); // done with what it has not read
  for (const uint64_t lie : {kRing + 1, ~size_t{0}}) {
    both.b.ring(1).written.store(lie);
    CHECK(!reader.peek(bytes)); // more than there is room for
  }
}

TEST(shared_memory_that_could_be_cut_is_refused) {
  SharedMemory memory;
  const auto refused = [&](off_t bytes, int seals) {
    FileDescriptor fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK_EQ(::ftruncate(fd.get(), bytes), 0);
    CHECK_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return SharedMemory::map(fd.get(), memory).message();
  };
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const auto whole = static_cast<off_t>(4096 + 2 * kRing);
  CHECK_EQ(refused(whole, 0), "shared memory of a peer could be cut");
  CHECK_EQ(refused(whole, F_SEAL_GROW), "shared memory of a peer could be cut");
  for (const off_t bytes : {off_t{0}, off_t{4096}, whole - 1, whole + 4096}) {
    CHECK_EQ(
        refused(bytes, kAll), "shared memory of a peer has a strange size");
  }
  CHECK_EQ(refused(whole, kAll), "shared memory of a peer is none of ours");
  CHECK_EQ(
      SharedMemory::map(STDIN_FILENO, memory).message(),
      "shared memory of a peer could be cut");
}

// --- meeting

struct Running {
  EventLoop loop;
  std::thread thread{[this] { loop.run(); }};
  ~Running() {
    loop.stop();
    thread.join();
  }
  void sync(const std::function<void()>& f) {
    std::promise<void> done;
    loop.post([&] {
      f();
      done.set_value();
    });
    done.get_future().wait();
  }
  void waitUntil(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    bool met = false;
    while (!met && std::chrono::steady_clock::now() < deadline) {
      sync([&] { met = condition(); });
    }
    CHECK(met);
  }
};

struct Meeting {
  Running running;
  std::unique_ptr<SharedRendezvous> rendezvous;
  std::unique_ptr<SharedVisit> visit;
  std::optional<SharedEnds> came, got;
  Uid whose{};
  std::string error = "none yet";

  Meeting() {
    running.sync([this] {
      rendezvous = std::make_unique<SharedRendezvous>(
          running.loop, [this](const Uid& peer, SharedEnds ends) {
            whose = peer;
            came = std::move(ends);
          });
    });
  }
  ~Meeting() {
    running.sync([this] {
      visit.reset();
      rendezvous.reset();
    });
  }
  // Returns the error, or nothing.
  std::string meet(const std::string& name, const std::string& token) {
    running.sync([&] {
      error = "none yet";
      visit = SharedVisit::start(
          running.loop,
          name,
          token,
          kRing,
          [this](const Status& status, SharedEnds ends) {
            error = status.message();
            got = std::move(ends);
          });
    });
    running.waitUntil([this] { return error != "none yet"; });
    return error;
  }
};

TEST(shared_rendezvous_opens_to_the_token_once) {
  Meeting m;
  Uid peer{};
  peer[3] = 7;
  m.running.sync([&] { m.rendezvous->expect(peer, "the right token"); });
  CHECK_EQ(
      m.meet(m.rendezvous->name(), "a wrong one"), "the other process refused");
  CHECK(!m.came);
  CHECK_EQ(m.meet(m.rendezvous->name(), "the right token"), "");
  CHECK(m.came.has_value());
  CHECK(m.whose == peer);
  CHECK_EQ(m.came->side + m.got->side, 1);
  m.came->memory.side(0).avoids.store(5); // it is the same memory
  CHECK_EQ(m.got->memory.side(0).avoids.load(), 5u);
  const uint64_t one = 1;
  uint64_t read = 0;
  CHECK_EQ(::write(m.came->wakeTheirs.get(), &one, 8), ssize_t{8});
  CHECK_EQ(::read(m.got->wakeMine.get(), &read, 8), ssize_t{8});
  CHECK_EQ(::write(m.got->wakeTheirs.get(), &one, 8), ssize_t{8});
  CHECK_EQ(::read(m.came->wakeMine.get(), &read, 8), ssize_t{8});
  CHECK_EQ(
      m.meet(m.rendezvous->name(), "the right token"),
      "the other process refused");
}

TEST(shared_rendezvous_that_is_not_there_is_an_error) {
  Meeting m;
  CHECK(
      m.meet("torch_resilient-nobody", "x").find("connect to a process") !=
      std::string::npos);
}

// While there is no descriptor for a caller, it waits at the rendezvous, which
// must not keep the loop busy; and is let in later.
TEST(shared_rendezvous_waits_for_descriptors) {
  Meeting m;
  FileDescriptor caller(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const timeval patience{30, 0};
  CHECK_EQ(
      ::setsockopt(
          caller.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)),
      0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = m.rendezvous->name();
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  CHECK_EQ(
      ::connect(
          caller.get(),
          reinterpret_cast<sockaddr*>(&address),
          static_cast<socklen_t>(
              offsetof(sockaddr_un, sun_path) + 1 + name.size())),
      0);
  std::promise<void> later;
  m.running.sync(
      [&] { m.running.loop.after(300ms, [&] { later.set_value(); }); });
  const uint64_t turns = m.running.loop.turns();
  later.get_future().wait();
  CHECK(m.running.loop.turns() - turns < 20);
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK_EQ(::send(caller.get(), "nobody", 6, MSG_NOSIGNAL), ssize_t{6});
  char answer = 0;
  CHECK_EQ(::recv(caller.get(), &answer, 1, 0), ssize_t{0}); // let in, refused
}

// --- as a path

// One end is a path; the other one is the test, byte by byte.
struct PathAndPeer final : PathOwner {
  Running running;
  TestProcess process{test::ChannelPair::defaults()};
  SharedMemory theirs;
  FileDescriptor theirSocket;
  std::unique_ptr<SharedPath> path;
  RingWriter writer;
  RingReader reader;
  std::string closed;
  bool usable = true;

  PathAndPeer() {
    SharedEnds ends;
    FileDescriptor fd;
    CHECK(SharedMemory::make(kRing, ends.memory, fd).ok());
    CHECK(SharedMemory::map(fd.get(), theirs).ok());
    int fds[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    ends.socket.reset(fds[0]);
    theirSocket.reset(fds[1]);
    ends.wakeMine.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    ends.wakeTheirs.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    writer = RingWriter(theirs, 1);
    reader = RingReader(theirs, 1);
    running.sync([&] {
      path = std::make_unique<SharedPath>(
          running.loop, process.channel, 1, std::move(ends), *this);
    });
  }
  ~PathAndPeer() {
    running.sync([this] { path.reset(); });
  }
  void onPathClosed(Path&, const Status& why) override {
    closed = why.message();
  }
  void onPathReady(Path&) override {
    running.loop.post([this] {
      if (path && !path->closed()) {
        pump();
      }
    });
  }
  void onPathUse(Path& p) override {
    usable = p.usable();
  }
  void pump() {
    while (path->hasRoom() && path->takeFrame()) {
    }
    path->flush();
    process.completions.drain();
  }
  // Not at once seen: the loop sleeps, and the test wakes it by any turn.
  void write(std::span<const std::byte> bytes) {
    CHECK(writer.refresh());
    CHECK_EQ(writer.put(bytes.data(), bytes.size()), bytes.size());
    writer.publish();
  }
  std::string frameOf(const std::string& text) {
    FrameHeader h;
    h.type = FrameType::kData;
    h.message = ++lastMessage;
    h.group = 1;
    h.order = lastMessage - 1;
    h.totalBytes = h.payloadBytes = static_cast<uint32_t>(text.size());
    h.chunkBytes = 100;
    FrameBytes bytes;
    encodeFrame(h, bytes);
    return std::string(reinterpret_cast<char*>(bytes.data()), bytes.size()) +
        text;
  }
  uint64_t lastMessage = 0;
};

TEST(shared_path_acknowledges_by_the_ring) {
  PathAndPeer p;
  TestSend send("hello");
  send.pointToPoint = false; // else it is copied, and ends at once
  p.running.sync([&] {
    p.process.channel.send(&send, p.running.loop.now());
    p.pump();
  });
  std::span<const std::byte> bytes;
  CHECK(p.reader.peek(bytes));
  CHECK_EQ(bytes.size(), kFrameHeaderBytes + 5);
  p.reader.pop(bytes.size());
  // Room again; but the answer might still refuse it.
  p.running.sync([] {});
  CHECK_EQ(send.ends, 0);
  CHECK(p.reader.finish());
  p.running.waitUntil([&] { return send.ends == 1; });
  CHECK(send.status.ok());
}

TEST(shared_path_delivers_what_was_written_before_the_peer_died) {
  PathAndPeer p;
  TestRecv first(&p.process.channel, 5), second(&p.process.channel, 5);
  p.running.sync([&] {
    p.process.mailbox.post(&first);
    p.process.mailbox.post(&second);
  });
  const std::string whole = p.frameOf("first"), cut = p.frameOf("other");
  p.write(bytesOf(whole));
  p.write(bytesOf(cut).first(cut.size() - 2));
  p.theirSocket.reset();
  p.running.waitUntil([&] { return !p.closed.empty(); });
  p.running.sync([&] { p.process.completions.drain(); });
  CHECK_EQ(p.closed, "shared memory was closed by the other end");
  CHECK_EQ(first.content, "first");
  CHECK_EQ(first.ends, 1);
  CHECK_EQ(second.ends, 0); // nobody sees half a message
}

TEST(shared_path_survives_a_peer_that_writes_rubbish) {
  for (const bool inRing : {true, false}) {
    PathAndPeer p;
    if (inRing) {
      const std::string rubbish(200, 'x');
      p.write(bytesOf(rubbish));
    } else {
      p.theirs.ring(1).written.store(kRing * 5);
    }
    p.running.waitUntil([&] { return !p.closed.empty(); });
    CHECK(p.closed != "shared memory was closed by the other end");
  }
}

// By the other process.
TEST(shared_path_is_avoided_if_the_far_end_says_so) {
  PathAndPeer p;
  p.theirs.side(1).avoids.store(1);
  p.running.waitUntil([&] { return !p.usable; });
  p.theirs.side(1).avoids.store(0);
  p.running.waitUntil([&] { return p.usable; });
}

class SharedHelper final : public test::PathHelper {
 public:
  std::array<Maker, 2> connect() override {
    auto ends = std::make_shared<std::array<SharedEnds, 2>>();
    FileDescriptor memory;
    CHECK(SharedMemory::make(kRing, (*ends)[0].memory, memory).ok());
    CHECK(SharedMemory::map(memory.get(), (*ends)[1].memory).ok());
    int sockets[2];
    CHECK_EQ(
        ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    std::array<Maker, 2> makers;
    for (size_t side = 0; side < 2; ++side) {
      SharedEnds& mine = (*ends)[side];
      mine.side = static_cast<int>(side);
      mine.socket.reset(sockets[side]);
      mine.wakeMine.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      (*ends)[1 - side].wakeTheirs.reset(::dup(mine.wakeMine.get()));
      makers[side] = [ends, side](test::PathUser& user, PathId id) {
        return std::make_unique<SharedPath>(
            user.loop, user.channel, id, std::move((*ends)[side]), user);
      };
    }
    return makers;
  }
  // The ring, and what is taken ahead of it.
  uint64_t mostUnread() const override {
    return kRing + (2u << 20);
  }
  bool noticesEnd() const override {
    return true;
  }
  bool obeysRules() const override {
    return false;
  }
  bool silence(int, bool) override {
    return false;
  }
};

PATH_CONTRACT(shared, SharedHelper)

// --- in the loop

// News come from another thread, which wakes the loop only if it sleeps.
struct Counter final : Poller, Handler {
  std::atomic<uint64_t> given{0};
  std::atomic<bool> asleep{false};
  std::atomic<uint64_t> taken{0};
  bool here = false; // the writer, wherever we are
  mutable std::atomic<int> looks{0}; // since it is awake
  std::atomic<int> nap{0}; // after so many looks
  bool hasNews() override {
    ++looks;
    return given.load(std::memory_order_relaxed) != taken.load();
  }
  void onNews() override {
    taken.store(given.load());
  }
  bool inMidst() const override {
    return false;
  }
  bool hasWriterHere() const override {
    return true;
  }
  bool writerIsOn(int) const override {
    return here;
  }
  void setAsleep(bool sleeps) override {
    if (!sleeps) {
      looks.store(0);
    } else if (!asleep.load()) {
      nap.store(looks.load());
    }
    asleep.store(sleeps);
  }
  void onEvents(uint32_t) override {}
};

TEST(pollers_miss_no_news_whoever_waits) {
  Running running;
  Counter counter;
  FileDescriptor wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  running.sync([&] {
    running.loop.add(wake.get(), EPOLLIN | EPOLLET, &counter);
    running.loop.add(&counter);
  });
  Prng prng(5);
  uint64_t woken = 0;
  for (uint64_t i = 1; i <= 3000; ++i) {
    counter.given.store(i);
    if (counter.asleep.exchange(false)) {
      ++woken;
      const uint64_t one = 1;
      CHECK_EQ(::write(wake.get(), &one, sizeof(one)), ssize_t{8});
    }
    const auto seen = [&] { return counter.taken.load() == i; };
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    if (prng.below(2) == 0) {
      running.loop.help(seen, deadline);
    }
    while (!seen() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    CHECK_EQ(counter.taken.load(), i); // else its wake-up was lost
  }
  CHECK(woken > 0);
  running.sync([&] {
    running.loop.remove(&counter);
    running.loop.remove(wake.get());
  });
}

// It would not let the writer go on, and only who sleeps is put elsewhere.
TEST(who_waits_on_the_processor_of_the_writer_sleeps_soon) {
  Running running;
  Counter counter;
  counter.here = true;
  running.sync([&] { running.loop.add(&counter); });
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  CHECK(running.loop.help([&] { return counter.nap > 0; }, deadline));
  CHECK(counter.nap > 0);
  CHECK(counter.nap <= 16); // looks, where a whole spin has some hundred
  running.sync([&] { running.loop.remove(&counter); });
}

TEST(shared_path_says_on_which_processor_it_is_while_awake) {
  PathAndPeer p;
  const auto said = [&] { return p.theirs.side(0).processor.load(); };
  cpu_set_t before, one;
  CHECK_EQ(::sched_getaffinity(0, sizeof(before), &before), 0);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (!CPU_ISSET(i, &before)) {
      continue;
    }
    CPU_ZERO(&one);
    CPU_SET(i, &one);
    CHECK_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    const auto at = static_cast<uint32_t>(i + 1);
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    CHECK(p.running.loop.help([&] { return said() == at; }, deadline));
    p.theirs.side(1).processor.store(at);
    bool shared = false, apart = true;
    p.running.sync([&] {
      shared = p.path->writerIsOn(i);
      apart = !p.path->writerIsOn(i + 1);
    });
    CHECK(shared && apart);
  }
  CHECK_EQ(::sched_setaffinity(0, sizeof(before), &before), 0);
  p.running.waitUntil([&] { return said() == 0; });
}

} // namespace
} // namespace resilient
