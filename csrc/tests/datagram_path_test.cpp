#include "transport/datagram_path.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>

#include "tests/channel_pair.h"
#include "tests/path_contract.h"
#include "transport/packet_seal.h"

namespace resilient::test {
namespace {

struct Owner final : PathOwner {
  void onPathClosed(Path&, const Status&) override {}
  void onPathReady(Path&) override {}
  void onPathUse(Path&) override {}
};

std::array<DatagramSocket, 2> connectedSockets() {
  const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
  std::array<DatagramSocket, 2> sockets;
  for (DatagramSocket& socket : sockets) {
    CHECK(DatagramSocket::open(any, "", socket).ok());
  }
  for (size_t side = 0; side < 2; ++side) {
    SocketAddress far = any;
    far.setPort(sockets[1 - side].port());
    CHECK(sockets[side].connect(far).ok());
  }
  return sockets;
}

// A recorded datagram can be sent again and again. It is no sign of life.
TEST(datagram_path_is_not_heard_by_a_copy) {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  const SealKey key{};
  std::array<DatagramSocket, 2> sockets = connectedSockets();
  DatagramSocket& mine = sockets[0];
  DatagramSocket& far = sockets[1];

  ChannelPair pair;
  EventLoop loop;
  Owner owner;
  DatagramPathConfig config;
  config.ours = PacketSealer::make(key, {}, loop.now(), why);
  config.theirs = PacketOpener::make(key, why);
  config.proveWithin = std::chrono::seconds(60);
  DatagramPath path(
      loop, pair.a.channel, 1, std::move(mine), std::move(config), owner);

  PacketProbe probe;
  probe.bytes = 100;
  std::vector<std::byte> packet(probe.bytes - kSealOverheadBytes);
  encodeProbe(probe, packet.data());
  std::vector<std::byte> datagram(probe.bytes);
  PacketSeal::make(key, why)->seal(1, packet, datagram.data());
  const auto send = [&] {
    size_t sent = 0;
    CHECK(far.send(datagram, datagram.size(), sent));
  };
  const TimePoint begin = path.heardAt();
  TimePoint heard = begin;
  std::function<void()> look = [&] {
    const auto copies = path.receiver().counters().duplicates;
    if (copies == 1 || loop.now() - begin > std::chrono::seconds(60)) {
      loop.stop();
      return;
    }
    if (heard == begin && path.heardAt() > begin) {
      heard = path.heardAt();
      loop.after(std::chrono::milliseconds(5), send); // a later time
    }
    loop.after(std::chrono::milliseconds(1), look);
  };
  loop.after(std::chrono::milliseconds(1), send);
  loop.after(std::chrono::milliseconds(1), look);
  loop.run();
  CHECK(heard > begin);
  CHECK_EQ(path.receiver().counters().duplicates, 1u);
  CHECK(path.heardAt() == heard);
}

// A path, and a far end that answers probes if it wants to.
class ProbedPath {
 public:
  // Call it only if PacketSeal is available.
  explicit ProbedPath(Nanos keepAlive) : sockets_(connectedSockets()) {
    std::string why;
    const SealKey key{};
    seal_ = PacketSeal::make(key, why);
    DatagramPathConfig config;
    config.ours = PacketSealer::make(key, {}, loop_.now(), why);
    config.theirs = PacketOpener::make(key, why);
    config.proveWithin = std::chrono::seconds(60);
    config.keepAlive = keepAlive;
    path_.emplace(
        loop_,
        pair_.a.channel,
        1,
        std::move(sockets_[0]),
        std::move(config),
        owner_);
  }
  DatagramPath& path() {
    return *path_;
  }
  uint64_t asked() const { // since the path has been proven
    return asked_;
  }
  void sendProbe() {
    PacketProbe probe;
    probe.bytes = kProbeBytes + kSealOverheadBytes;
    send(probe);
  }
  // Calls `step` each millisecond until it says that all is done. Once only.
  bool run(const std::function<bool()>& step) {
    bool done = false;
    const TimePoint begin = loop_.now();
    std::function<void()> look = [&] {
      sockets_[1].receive(
          [this](std::span<const std::byte> d, TimePoint) { onDatagram(d); });
      done = step();
      if (done || loop_.now() - begin > std::chrono::seconds(60)) {
        loop_.stop();
        return;
      }
      loop_.after(std::chrono::milliseconds(1), look);
    };
    loop_.after(std::chrono::milliseconds(1), look);
    loop_.run();
    return done;
  }

  bool answers = true;

 private:
  void onDatagram(std::span<const std::byte> datagram) {
    std::array<std::byte, 16384> opened;
    uint64_t theirs = 0;
    std::span<const std::byte> packet;
    PacketProbe probe;
    if (datagram.size() > opened.size() ||
        !seal_->open(datagram, theirs, opened.data(), packet) ||
        !decodeProbe(packet, probe).ok() || probe.type != PacketType::kProbe) {
      return;
    }
    asked_ += packet.size() == kProbeBytes ? 1 : 0;
    if (answers) {
      probe.type = PacketType::kProbeReply;
      send(probe);
    }
  }
  void send(const PacketProbe& probe) {
    std::array<std::byte, kProbeBytes> packet;
    encodeProbe(probe, packet.data());
    std::array<std::byte, kProbeBytes + kSealOverheadBytes> sealed;
    seal_->seal(++number_, packet, sealed.data());
    size_t sent = 0;
    sockets_[1].send(sealed, sealed.size(), sent);
  }

  std::array<DatagramSocket, 2> sockets_; // the path's, before; the far end's
  ChannelPair pair_;
  EventLoop loop_;
  Owner owner_;
  std::unique_ptr<PacketSeal> seal_;
  std::optional<DatagramPath> path_;
  uint64_t number_ = 0, asked_ = 0;
};

// Nothing is sent. A firewall that has forgotten the flow is found out all the
// same, and that it lets packets pass again.
TEST(datagram_path_finds_out_that_it_is_silent_while_it_is_idle) {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  ProbedPath far(std::chrono::milliseconds(20));
  int stage = 0; // answered while idle, silent, heard again
  CHECK(far.run([&] {
    if (stage == 0 && far.path().usable() && far.asked() >= 3) {
      far.answers = false;
      stage = 1;
    } else if (stage == 1 && !far.path().usable()) {
      far.answers = true;
      stage = 2;
    } else if (stage == 2 && far.path().usable()) {
      stage = 3;
    }
    return stage == 3;
  }));
}

// Its owner knows before the path itself that it is silent. It asks, and what
// comes from the far end is no answer: the other direction may be dead.
TEST(datagram_path_is_silent_until_its_owner_has_an_answer) {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  ProbedPath far(std::chrono::seconds(60));
  DatagramPath& path = far.path();
  uint64_t asked = 0;
  TimePoint doubtedAt{};
  int stage = 0; // proven, doubted, heard without an answer, answered
  CHECK(far.run([&] {
    if (stage == 0 && path.usable()) {
      stage = 1;
      asked = far.asked();
      far.answers = false;
      CHECK(!path.evidence().owes);
      doubtedAt = path.heardAt();
      path.doubt();
      CHECK(!path.usable());
      CHECK(path.evidence().owes);
    } else if (stage == 1) {
      far.sendProbe();
      CHECK(!path.usable());
      // It has asked again as well.
      if (far.asked() > asked + 1 && path.heardAt() > doubtedAt) {
        stage = 2;
        far.answers = true;
      }
    } else if (stage == 2 && path.usable()) {
      stage = 3;
    }
    return stage == 3;
  }));
}

// A report that is due cannot leave while the socket is full. The loop must
// sleep until there is room, and the report leaves then.
//
// UDP over loopback never fills the socket. A pair of Unix sockets does, so one
// of them takes the place of the UDP socket.
TEST(datagram_path_sleeps_while_its_socket_is_full) {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  const SealKey key{};
  DatagramSocket mine;
  CHECK(
      DatagramSocket::open(*SocketAddress::parse("127.0.0.1", 0), "", mine)
          .ok());
  int pairOfSockets[2];
  CHECK_EQ(
      ::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, pairOfSockets), 0);
  FileDescriptor near(pairOfSockets[0]), far(pairOfSockets[1]);
  CHECK(::dup2(near.get(), mine.fd()) >= 0);
  const std::array<std::byte, 1000> filling{};
  while (::send(near.get(), filling.data(), filling.size(), 0) > 0) {
  }
  CHECK_EQ(errno, EAGAIN);

  ChannelPair pair;
  EventLoop loop;
  Owner owner;
  DatagramPathConfig config;
  config.ours = PacketSealer::make(key, {}, loop.now(), why);
  config.theirs = PacketOpener::make(key, why);
  config.proveWithin = std::chrono::seconds(60);
  DatagramPath path(
      loop, pair.a.channel, 1, std::move(mine), std::move(config), owner);

  // "Object 1 has been sent", of which nothing has come: it is asked for.
  SymbolHeader end;
  end.type = PacketType::kEnd;
  end.object = end.count = end.must = 1;
  end.objectBytes = end.pieceBytes = 256;
  std::array<std::byte, kSymbolHeaderBytes> packet{};
  encodeSymbolHeader(end, packet.data());
  std::array<std::byte, kSymbolHeaderBytes + kSealOverheadBytes> datagram{};
  const auto seal = PacketSeal::make(key, why);
  seal->seal(1, packet, datagram.data());

  const TimePoint begin = loop.now();
  uint64_t turnsWhileFull = 0;
  bool reported = false;
  std::function<void()> drain = [&] {
    std::array<std::byte, 65536> buffer, opened;
    for (;;) {
      const ssize_t n = ::recv(far.get(), buffer.data(), buffer.size(), 0);
      if (n <= 0) {
        break;
      }
      uint64_t number = 0;
      std::span<const std::byte> inner;
      PacketType type{};
      reported = reported ||
          (seal->open(
               std::span<const std::byte>(buffer).first(size_t(n)),
               number,
               opened.data(),
               inner) &&
           packetType(inner, type).ok() && type == PacketType::kReport);
    }
    if (reported || loop.now() - begin > std::chrono::seconds(60)) {
      loop.stop();
    } else {
      loop.after(std::chrono::milliseconds(1), drain);
    }
  };
  std::function<void()> look = [&] {
    if (path.receiver().deadline() > loop.now() &&
        loop.now() - begin < std::chrono::seconds(60)) {
      loop.after(std::chrono::milliseconds(1), look);
      return;
    }
    const uint64_t before = loop.turns();
    loop.after(std::chrono::milliseconds(100), [&, before] {
      turnsWhileFull = loop.turns() - before;
      CHECK(path.receiver().deadline() < loop.now()); // it is still due
      drain();
    });
  };
  loop.after(std::chrono::milliseconds(1), [&] {
    CHECK(::send(far.get(), datagram.data(), datagram.size(), 0) > 0);
  });
  loop.after(std::chrono::milliseconds(2), look);
  loop.run();
  CHECK_EQ(path.receiver().numbers().packets(), 1u);
  CHECK(turnsWhileFull < 50);
  CHECK(reported);
}

// Over loopback.
class DatagramHelper final : public PathHelper {
 public:
  std::string unavailable() const override {
    std::string why;
    return PacketSeal::available(why) ? "" : why;
  }
  std::array<Maker, 2> connect() override {
    const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
    auto sockets = std::make_shared<std::array<DatagramSocket, 2>>();
    for (DatagramSocket& socket : *sockets) {
      CHECK(DatagramSocket::open(any, "", socket).ok());
    }
    std::array<Maker, 2> makers;
    for (size_t side = 0; side < 2; ++side) {
      SocketAddress far = any;
      far.setPort((*sockets)[1 - side].port());
      CHECK((*sockets)[side].connect(far).ok());
      fds_[side] = (*sockets)[side].fd();
      makers[side] = [sockets, side](PathUser& user, PathId id) {
        DatagramPathConfig config;
        std::string why;
        // Far fewer packets for each key than in use: keys change all the time.
        SealLimits limits;
        limits.packets = 1000;
        config.ours =
            PacketSealer::make(keyOf(side), limits, user.loop.now(), why);
        config.theirs = PacketOpener::make(keyOf(1 - side), why);
        config.proveWithin = std::chrono::seconds(60);
        return std::make_unique<DatagramPath>(
            user.loop,
            user.channel,
            id,
            std::move((*sockets)[side]),
            std::move(config),
            user);
      };
    }
    return makers;
  }
  // What its rate control lets out without an answer, and what waits for it.
  uint64_t mostUnread() const override {
    return 32u << 20;
  }
  bool noticesEnd() const override {
    return false;
  }
  bool obeysRules() const override {
    return false;
  }
  bool silence(int to, bool silent) override {
    dropArrivals(fds_[to], silent);
    return true;
  }

 private:
  static SealKey keyOf(size_t side) {
    SealKey key{};
    key[0] = static_cast<std::byte>(side);
    return key;
  }
  int fds_[2] = {-1, -1};
};

PATH_CONTRACT(datagram, DatagramHelper)

} // namespace
} // namespace resilient::test
