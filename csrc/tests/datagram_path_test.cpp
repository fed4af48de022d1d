#include "transport/datagram_path.h"

#include <cstdio>
#include <functional>

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

// A recorded datagram can be sent again and again. It is no sign of life.
TEST(datagram_path_is_not_heard_by_a_copy) {
  std::string why;
  if (!PacketSeal::available(why)) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  const SealKey key{};
  const SocketAddress any = *SocketAddress::parse("127.0.0.1", 0);
  DatagramSocket mine, far;
  CHECK(DatagramSocket::open(any, "", mine).ok());
  CHECK(DatagramSocket::open(any, "", far).ok());
  SocketAddress address = any;
  address.setPort(far.port());
  CHECK(mine.connect(address).ok());
  address.setPort(mine.port());
  CHECK(far.connect(address).ok());

  ChannelPair pair;
  EventLoop loop;
  Owner owner;
  DatagramPathConfig config;
  config.ours = PacketSeal::make(key, why);
  config.theirs = PacketSeal::make(key, why);
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
        config.ours = PacketSeal::make(keyOf(side), why);
        config.theirs = PacketSeal::make(keyOf(1 - side), why);
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
