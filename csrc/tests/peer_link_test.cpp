#include "delegate/peer_link.h"

#include "tests/check.h"
#include "tests/plain_link_host.h"

namespace resilient::test {
namespace {

// The host of one link, which connects to nothing.
class LinkHostOfOne final : public PlainLinkHost {
 public:
  ~LinkHostOfOne() override {
    completions_.drain();
    graveyard_.clear();
  }

  // LinkHost
  PeerLink* linkTo(const Uid&) override {
    return nullptr;
  }
  PeerLink* linkOf(const Channel&) override {
    return nullptr;
  }
};

PeerAddress addressOf(const std::string& ip) {
  PeerAddress address;
  address.uid[0] = 7;
  address.hostId = "853d462fd0f17179ff357d077a7288b0";
  address.pid = 7;
  address.hostName = "b";
  address.addresses = {{"eth0", *SocketAddress::parse(ip, 29500), 24}};
  return address;
}

// They may be older than what the peer has said itself, in particular if its
// store is gone.
TEST(peer_link_believes_the_store_only_if_it_has_news) {
  LinkHostOfOne host;
  PeerLink link(host, addressOf("10.0.0.1").uid, 1);
  link.connections().close();
  link.setAddress(addressOf("10.0.0.1"), "secret", 1);
  CHECK(link.cut());
  const auto ip = [&] { return link.address()->addresses[0].address.ip(); };
  link.onPeerAddresses(addressOf("10.0.0.2").toString());
  CHECK_EQ(ip(), "10.0.0.2");
  link.onStoredAddresses(addressOf("10.0.0.1").toString());
  CHECK_EQ(ip(), "10.0.0.2");
  link.onStoredAddresses(addressOf("10.0.0.3").toString());
  CHECK_EQ(ip(), "10.0.0.3");
  link.onPeerAddresses(addressOf("10.0.0.4").toString());
  link.onStoredAddresses(addressOf("10.0.0.3").toString());
  CHECK_EQ(ip(), "10.0.0.4");
  link.close(Link::State::kLeft, StatusCode::kAborted, "is left: the end");
}

} // namespace
} // namespace resilient::test
