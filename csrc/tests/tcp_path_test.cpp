#include "transport/tcp_path.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <functional>

#include "tests/channel_pair.h"
#include "tests/connection.h"
#include "tests/path_contract.h"
#include "tests/tls_pair.h"

namespace resilient::test {
namespace {

constexpr PathId kPath = 1;

struct Owner : PathOwner {
  explicit Owner(EventLoop& of) : loop(of) {}
  void onPathClosed(Path&, const Status& s) override {
    ++closed;
    why = s;
    loop.stop();
  }
  void onPathReady(Path&) override {}
  void onPathUse(Path&) override {}
  EventLoop& loop;
  int closed = 0;
  Status why;
};

// A peer that leaves says so and closes, with bytes of ours unread: our next
// write fails before we have read its last words.
TEST(tcp_path_reads_what_has_come_before_it_gives_up) {
  ChannelPair pair;
  Connection connection;
  const int far = connection.second.get();
  EventLoop loop;
  Owner owner(loop);
  const FaultPlan none;
  PathFaults faults(none, 0, 1, 0);
  TcpPath path(
      loop,
      pair.a.channel,
      kPath,
      0,
      std::move(connection.first),
      faults,
      owner);
  pair.b.channel.addPath(kPath, pair.now);
  TestSend early("never read"), late("never written");

  pair.a.channel.send(&early, loop.now());
  CHECK(path.takeFrame() != 0);
  path.flush();
  pair.b.channel.sendBye();
  while (const auto frame = pair.take(pair.b, kPath)) {
    CHECK_EQ(
        ::write(far, frame->header.data(), frame->header.size()),
        static_cast<ssize_t>(frame->header.size()));
  }
  pollfd unread{far, POLLIN, 0};
  CHECK_EQ(::poll(&unread, 1, 10'000), 1);
  connection.second.reset();

  pair.a.channel.send(&late, loop.now());
  CHECK(path.takeFrame() != 0);
  path.flush();
  loop.after(std::chrono::seconds(10), [&] { loop.stop(); });
  loop.run();
  CHECK_EQ(owner.closed, 1);
  CHECK(!owner.why.ok());
  CHECK_EQ(pair.a.byes, 1);
  pair.a.channel.fail(owner.why);
  pair.a.completions.drain();
}

// Over loopback.
class TcpHelper : public PathHelper {
 public:
  std::array<Maker, 2> connect() override {
    Connection connection;
    FileDescriptor* const sockets[] = {&connection.first, &connection.second};
    std::array<std::unique_ptr<TlsSession>, 2> sessions = makeSessions();
    std::array<Maker, 2> makers;
    for (size_t side = 0; side < 2; ++side) {
      fds_[side] = sockets[side]->get();
      CHECK_EQ(::fcntl(fds_[side], F_SETFL, O_NONBLOCK), 0);
      auto socket = std::make_shared<StreamSocket>(
          std::move(*sockets[side]), std::move(sessions[side]));
      makers[side] = [socket](PathUser& user, PathId id) {
        return std::make_unique<TcpPath>(
            user.loop,
            user.channel,
            id,
            /*slot=*/0,
            std::move(*socket),
            user.faults,
            user);
      };
    }
    return makers;
  }
  // The kernel's buffers of both ends.
  uint64_t mostUnread() const override {
    return 32u << 20;
  }
  bool noticesEnd() const override {
    return true;
  }
  bool obeysRules() const override {
    return true;
  }
  bool silence(int to, bool silent) override {
    dropArrivals(fds_[to], silent);
    return true;
  }

 protected:
  virtual std::array<std::unique_ptr<TlsSession>, 2> makeSessions() {
    return {};
  }

 private:
  int fds_[2] = {-1, -1};
};

PATH_CONTRACT(tcp, TcpHelper)

// The same, encrypted. A new key follows every few records, so that changes of
// keys meet everything else.
class TlsHelper final : public TcpHelper {
 public:
  std::string unavailable() const override {
    std::string why;
    (void)TlsSession::available(why);
    return why;
  }

 private:
  std::array<std::unique_ptr<TlsSession>, 2> makeSessions() override {
    TlsPair pair;
    pair.exchange();
    CHECK(pair.open());
    pair.client->setRecordsPerKey(20);
    pair.server->setRecordsPerKey(3);
    return {std::move(pair.client), std::move(pair.server)};
  }
};

PATH_CONTRACT(tls, TlsHelper)

// Whoever closes the socket of a connection with TLS, without TLS's own end,
// has cut it.
TEST(tls_path_tells_a_cut_from_an_end) {
  if (!tlsAvailable()) {
    return;
  }
  for (const bool said : {true, false}) {
    ChannelPair pair;
    Connection connection;
    TlsPair sessions;
    sessions.exchange();
    EventLoop loop;
    Owner owner(loop);
    const FaultPlan none;
    PathFaults faults(none, 0, 1, 0);
    TcpPath path(
        loop,
        pair.a.channel,
        kPath,
        0,
        {std::move(connection.first), std::move(sessions.client)},
        faults,
        owner);
    if (said) {
      sessions.server->close();
      const auto last = sessions.server->output();
      CHECK_EQ(
          ::write(connection.second.get(), last.data(), last.size()),
          last.size());
    }
    connection.second.reset();
    loop.after(std::chrono::seconds(10), [&] { loop.stop(); });
    loop.run();
    CHECK_EQ(owner.closed, 1);
    CHECK_CONTAINS(
        owner.why.message(), said ? "closed by the other end" : "was cut");
    CHECK_EQ(path.tlsFailed(), !said); // which is counted
  }
}

// What the handshake has read beyond its own end belongs to the path.
TEST(tls_path_takes_over_what_the_handshake_has_read) {
  if (!tlsAvailable()) {
    return;
  }
  ChannelPair pair;
  Connection connection;
  TlsPair sessions;
  sessions.exchange();
  pair.b.channel.addPath(kPath, pair.now);
  pair.b.channel.sendBye();
  TlsBytes frames;
  while (const auto frame = pair.take(pair.b, kPath)) {
    frames.insert(frames.end(), frame->header.begin(), frame->header.end());
  }
  CHECK(!frames.empty());
  const iovec part{frames.data(), frames.size()};
  CHECK_EQ(sessions.server->seal({&part, 1}), frames.size());
  const TlsBytes sealed = takeOutput(*sessions.server);
  const auto room = sessions.client->input();
  std::copy(sealed.begin(), sealed.end(), room.begin());
  sessions.client->received(sealed.size());
  CHECK_EQ(::fcntl(connection.first.get(), F_SETFL, O_NONBLOCK), 0);

  EventLoop loop;
  Owner owner(loop);
  const FaultPlan none;
  PathFaults faults(none, 0, 1, 0);
  TcpPath path(
      loop,
      pair.a.channel,
      kPath,
      0,
      {std::move(connection.first), std::move(sessions.client)},
      faults,
      owner);
  std::function<void()> look = [&] {
    if (pair.a.byes != 0) {
      loop.stop();
    }
    loop.after(std::chrono::milliseconds(1), look);
  };
  look();
  loop.after(std::chrono::seconds(10), [&] { loop.stop(); });
  loop.run();
  CHECK_EQ(pair.a.byes, 1);
}

} // namespace
} // namespace resilient::test
