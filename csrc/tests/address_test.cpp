#include "transport/address.h"

#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {
namespace {

InterfaceAddress at(
    const char* interface,
    const char* ip,
    bool up = true,
    bool loopback = false) {
  return {interface, *SocketAddress::parse(ip, 0), up, loopback};
}

const std::vector<InterfaceAddress>& host() {
  static const std::vector<InterfaceAddress> list = {
      at("lo", "127.0.0.1", true, true),
      at("lo", "::1", true, true),
      at("docker0", "172.17.0.1", false),
      at("eth0", "10.0.0.7"),
      at("eth0", "10.0.0.8"),
      at("eth0", "fd00::7"),
      at("eth1", "fd01::7"),
      at("eth1", "10.1.0.7"),
      at("eth10", "10.9.0.7"),
      at("ib0", "fd02::7"),
  };
  return list;
}

std::string chosen(const std::string& option, const char* store = nullptr) {
  std::optional<SocketAddress> towards;
  if (store != nullptr) {
    towards = SocketAddress::parse(store, 0);
  }
  std::string text;
  for (auto& a : chooseAddresses(host(), option, towards).addresses) {
    text += (text.empty() ? "" : " ") + a.interface + "/" + a.address.ip();
  }
  return text;
}

TEST(an_option_chooses_by_name_beginning_or_number) {
  CHECK_EQ(chosen("eth1"), std::string("eth1/10.1.0.7"));
  CHECK_EQ(
      chosen("eth"), std::string("eth0/10.0.0.7 eth1/10.1.0.7 eth10/10.9.0.7"));
  CHECK_EQ(chosen("eth1,eth0"), std::string("eth1/10.1.0.7 eth0/10.0.0.7"));
  CHECK_EQ(
      chosen(" 10.0.0.8 , ib0 ,"), std::string("eth0/10.0.0.8 ib0/fd02::7"));
  // Not twice, and an exact name is no beginning of another one.
  CHECK_EQ(chosen("eth0,10.0.0.7"), std::string("eth0/10.0.0.7"));
  CHECK_EQ(chosen("docker0"), std::string("docker0/172.17.0.1"));
  // The family that leads to the store is taken where there is a choice.
  CHECK_EQ(
      chosen("eth0,eth1,ib", "fd00::7"),
      std::string("eth0/fd00::7 eth1/fd01::7 ib0/fd02::7"));
}

TEST(an_option_that_matches_nothing_lists_what_there_is) {
  for (const char* option : {"eth7", "10.0.0.9", "eth0,wlan"}) {
    try {
      chosen(option);
      CHECK(false);
    } catch (const StatusError& e) {
      CHECK(e.status().code() == StatusCode::kInvalidArgument);
      CHECK_CONTAINS(e.what(), "eth0 10.0.0.7");
      CHECK_CONTAINS(e.what(), "docker0 172.17.0.1 (down)");
    }
  }
}

TEST(without_an_option_the_route_to_the_store_decides) {
  // The others of its family come behind it.
  CHECK_EQ(
      chosen("", "10.1.0.7"),
      std::string("eth1/10.1.0.7 eth0/10.0.0.7 eth10/10.9.0.7"));
  CHECK_EQ(
      chosen("", "fd00::7"),
      std::string("eth0/fd00::7 eth1/fd01::7 ib0/fd02::7"));
  // Other hosts cannot use our loopback.
  const std::string all = "eth0/10.0.0.7 eth1/10.1.0.7 eth10/10.9.0.7";
  CHECK_EQ(chosen("", "127.0.0.1"), "lo/127.0.0.1 " + all);
  CHECK_EQ(chosen("", "10.77.0.1"), "?/10.77.0.1 " + all);
  CHECK_EQ(chosen(""), all);
  auto reason = chooseAddresses(host(), "", std::nullopt).reason;
  CHECK_CONTAINS(reason, "eth10 10.9.0.7: it is the first interface");
}

TEST(bridges_of_containers_are_taken_only_on_request) {
  const std::vector<InterfaceAddress> list = {
      at("eth0", "10.0.0.7"),
      at("docker0", "172.17.0.1"),
      at("br-12ab", "172.18.0.1"),
      at("vethf00", "10.3.0.1"),
      at("eth1", "10.1.0.7", /*up=*/false),
      at("tun0", "10.8.0.7")};
  AddressChoice choice = chooseAddresses(list, "", std::nullopt);
  CHECK_EQ(choice.addresses.size(), 2u);
  CHECK_EQ(choice.addresses[1].interface, std::string("tun0"));
  choice = chooseAddresses(list, "docker0", std::nullopt);
  CHECK_EQ(choice.addresses[0].address.ip(), std::string("172.17.0.1"));
}

// Peers refuse the text of a rank with more addresses than the maximum.
TEST(no_more_addresses_are_chosen_than_peers_accept) {
  constexpr size_t kMax = PeerAddress::kAddressesMax;
  std::vector<InterfaceAddress> list;
  for (size_t i = 0; i < kMax + 8; ++i) {
    const std::string n = std::to_string(i);
    list.push_back(at(("vlan" + n).c_str(), ("10.0." + n + ".7").c_str()));
  }
  const auto last = SocketAddress::parse("10.0.39.7", 0);
  for (const char* option : {"", "vlan39,vlan"}) {
    for (const auto& store : {std::optional<SocketAddress>(), last}) {
      const AddressChoice choice = chooseAddresses(list, option, store);
      CHECK_EQ(choice.addresses.size(), kMax);
      CHECK_CONTAINS(choice.reason, "; 8 more are left out");
      // The order of choice stays: the preferred address, then the others.
      const bool preferred = *option != '\0' || store;
      const auto& chosen = choice.addresses;
      CHECK_EQ(chosen[0].interface, preferred ? "vlan39" : "vlan0");
      CHECK_EQ(chosen[kMax - 1].interface, preferred ? "vlan30" : "vlan31");

      PeerAddress mine, theirs;
      mine.hostId = std::string(32, '0');
      mine.hostName = "node-3";
      mine.pid = 7;
      for (InterfaceAddress a : chosen) {
        a.address.setPort(29511);
        mine.addresses.push_back({a.interface, a.address, 24});
      }
      CHECK_EQ(PeerAddress::parse(mine.toString(), theirs).message(), "");
    }
  }
  list.resize(kMax);
  const AddressChoice all = chooseAddresses(list, "", std::nullopt);
  CHECK_EQ(all.addresses.size(), kMax);
  CHECK(all.reason.find("left out") == std::string::npos);
}

TEST(a_subnet_is_told_by_its_prefix) {
  const auto nic = [](const char* ip, int bits) {
    return NicAddress{"eth0", *SocketAddress::parse(ip, 1), bits};
  };
  const auto ip = [](const char* text) {
    return *SocketAddress::parse(text, 2);
  };
  CHECK(nic("10.1.2.3", 24).inSubnet(ip("10.1.2.200")));
  CHECK(!nic("10.1.2.3", 24).inSubnet(ip("10.1.3.3")));
  CHECK(nic("10.1.2.3", 23).inSubnet(ip("10.1.3.3")));
  CHECK(nic("10.1.2.1", 30).inSubnet(ip("10.1.2.2")));
  CHECK(!nic("10.1.2.1", 30).inSubnet(ip("10.1.2.5")));
  CHECK(!nic("10.1.2.3", 32).inSubnet(ip("10.1.2.4")));
  CHECK(!nic("10.1.2.3", 0).inSubnet(ip("10.1.2.4"))); // unknown
  CHECK(nic("fd00::1", 64).inSubnet(ip("fd00::2:0:0:3")));
  CHECK(!nic("fd00::1", 64).inSubnet(ip("fd00:0:0:1::1")));
  CHECK(!nic("fd00::1", 64).inSubnet(ip("10.1.2.3")));
}

TEST(loopback_is_the_last_resort_and_says_so) {
  std::vector<InterfaceAddress> list(host().begin(), host().begin() + 3);
  AddressChoice choice = chooseAddresses(list, "", std::nullopt);
  CHECK_EQ(choice.addresses[0].interface, std::string("lo"));
  CHECK_CONTAINS(choice.reason, "only this host can reach it");
  CHECK_THROWS(
      StatusError,
      "no interface of this host is up",
      chooseAddresses({}, "", std::nullopt));
}

TEST(this_host_has_loopback_a_route_to_it_and_an_identity) {
  bool loopback = false;
  std::vector<InterfaceAddress> interfaces;
  CHECK(enumerateInterfaces(interfaces).ok());
  for (const InterfaceAddress& i : interfaces) {
    loopback = loopback || (i.loopback && i.address.ip() == "127.0.0.1");
  }
  CHECK(loopback);
  auto local = localAddressTowards("127.0.0.1");
  CHECK(local.has_value());
  CHECK_EQ(local->toString(), std::string("127.0.0.1:0"));
  CHECK(!localAddressTowards("").has_value());
  CHECK_EQ(hostIdentity().size(), 32);
  CHECK_EQ(hostIdentity(), hostIdentity());
  CHECK(!hostName().empty());
}

PeerAddress sample() {
  PeerAddress a;
  for (size_t i = 0; i < a.uid.size(); ++i) {
    a.uid[i] = static_cast<uint8_t>(0xf0 + i);
  }
  a.hostId = "0123456789abcdef0123456789abcdef";
  a.hostName = "node-3";
  a.site = "east-1";
  a.pid = 4711;
  a.storeRoundTrip = std::chrono::microseconds(180);
  a.rdma = RdmaUse::kPossible;
  a.addresses = {
      {"eth0", *SocketAddress::parse("10.0.0.7", 29511), 24},
      {"eth0", *SocketAddress::parse("fd00::7", 29511), 64}};
  return a;
}

const char* const kSampleText =
    "resilient/4 uid=f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff "
    "host=0123456789abcdef0123456789abcdef name=node-3 site=east-1 "
    "pid=4711 rtt=180 rdma=possible "
    "at=eth0@10.0.0.7/24:29511,eth0@[fd00::7]/64:29511";

TEST(a_peer_address_survives_the_store) {
  CHECK_EQ(sample().toString(), std::string(kSampleText));
  PeerAddress back;
  Status status = PeerAddress::parse(kSampleText, back);
  CHECK(status.ok());
  CHECK_EQ(back.toString(), std::string(kSampleText));
  CHECK(back.uid == sample().uid);
  CHECK_EQ(back.site, std::string("east-1"));
  CHECK(back.storeRoundTrip == std::chrono::microseconds(180));
  PeerAddress nowhere = sample();
  nowhere.site.clear();
  CHECK(PeerAddress::parse(nowhere.toString(), back).ok());
  CHECK(back.site.empty());
  PeerAddress odd = sample();
  odd.hostName = "my host=\n\xc3\xa9" + std::string(300, 'x');
  CHECK(PeerAddress::parse(odd.toString(), back).ok());
  CHECK_EQ(back.hostName.substr(0, 11), std::string("my?host????"));
}

TEST(what_is_no_peer_address_is_refused_with_a_reason) {
  std::string good = kSampleText;
  auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  std::string many = good;
  for (int i = 0; i < 31; ++i) {
    many += ",e@10.0.0.1/8:1";
  }
  for (const std::string& text : std::vector<std::string>{
           "",
           " ",
           "hello",
           good + " more",
           replaced("resilient/4", "resilient/3"),
           replaced("uid=f0", "uid=f"),
           replaced("uid=f0", "uid=F0"),
           replaced(
               "uid=",
               "uid="
               "00"),
           replaced("host=01", "host=zz"),
           replaced("host=01", "host="),
           replaced("node-3", ""),
           replaced("node-3", "a\nb"),
           replaced("node-3", std::string(256, 'a')),
           replaced("east-1", "east,1"),
           replaced("east-1", "\xc3\xa9"),
           replaced("east-1", std::string(65, 'a')),
           replaced("rdma=possible", "rdma="),
           replaced("rdma=possible", "rdma=maybe"),
           replaced(" rdma=possible", ""),
           replaced("rtt=180", "rtt="),
           replaced("rtt=180", "rtt=-1"),
           replaced("rtt=180", "rtt=3600000001"),
           replaced("site=", "place="),
           replaced("4711", "0"),
           replaced("4711", "-5"),
           replaced("4711", "99999999999999999999"),
           replaced("4711", "7x"),
           replaced("10.0.0.7/24:29511", ""),
           replaced("10.0.0.7/24:29511", "10.0.0.7"),
           replaced("10.0.0.7/24:29511", "10.0.0.7:29511"),
           replaced("10.0.0.7/24:29511", "10.0.0.7/24:0"),
           replaced("10.0.0.7/24:29511", "10.0.0.7/24:65536"),
           replaced("10.0.0.7/24:29511", "10.0.0.7/33:29511"),
           replaced("10.0.0.7/24:29511", "10.0.0.7/-1:29511"),
           replaced("10.0.0.7/24:29511", "10.0.0.7:29511/24"),
           replaced("10.0.0.7/24:29511", "example.org/24:29511"),
           replaced("10.0.0.7/24:29511", "[10.0.0.7]/24:29511"),
           replaced("eth0@10", "10"),
           replaced("eth0@10", "@10"),
           replaced("eth0@10", "a_name_of_16_let@10"),
           replaced("eth0@10", "et=0@10"),
           replaced("[fd00::7]/64", "fd00::7/64"),
           replaced("[fd00::7]/64", "[fd00::7/64"),
           many,
           good + std::string(PeerAddress::kTextBytesMax, 'x'),
       }) {
    PeerAddress address;
    address.pid = -1;
    Status status = PeerAddress::parse(text, address);
    CHECK(status.code() == StatusCode::kProtocol);
    CHECK_EQ(address.pid, -1); // untouched
    CHECK(status.message().size() < 600);
  }
}

TEST(changed_text_never_crashes_the_parser) {
  test::forSeeds(3000, [](uint64_t seed) {
    Prng random(seed);
    std::string text = kSampleText;
    for (uint64_t i = 1 + random.below(4); i > 0; --i) {
      size_t where = random.below(text.size());
      switch (random.below(3)) {
        case 0:
          text[where] = static_cast<char>(random.next());
          break;
        case 1:
          text.erase(where, random.below(9));
          break;
        default:
          text.insert(where, text.substr(random.below(text.size()), 7));
      }
      if (text.empty()) {
        text = "x";
      }
    }
    PeerAddress address;
    if (PeerAddress::parse(text, address).ok()) {
      PeerAddress again;
      CHECK(PeerAddress::parse(address.toString(), again).ok());
      CHECK_EQ(again.toString(), address.toString());
    }
  });
}

TEST(nics_are_followed_to_their_new_addresses) {
  const auto at = [](const char* ip) {
    return SocketAddress::parse(ip, 0).value();
  };
  const auto nic = [](const char* name, const char* ip) {
    return NicAddress{name, SocketAddress::parse(ip, 4000).value(), 24};
  };
  std::vector<NicAddress> mine{
      nic("eth0", "10.0.0.1"), nic("eth1", "10.0.1.1"), nic("eth2", "fd00::2")};
  std::vector<InterfaceAddress> now{
      {"eth0", at("10.0.0.1"), true, false, 24},
      {"eth0", at("10.0.0.9"), true, false, 24}, // one more
      {"eth1", at("fd00::1"), true, false, 64}, // another family
      {"eth2", at("fd00::2"), true, false, 64}};
  CHECK(!followAddresses(now, mine)); // eth1 has none yet
  now.push_back({"eth1", at("10.0.5.7"), false, false, 16});
  CHECK(!followAddresses(now, mine)); // and is down
  now.back().up = true;
  CHECK(followAddresses(now, mine));
  CHECK_EQ(mine[0].toString(), "eth0@10.0.0.1/24:4000");
  CHECK_EQ(mine[1].toString(), "eth1@10.0.5.7/16:4000");
  CHECK_EQ(mine[2].toString(), "eth2@[fd00::2]/24:4000");
  CHECK(!followAddresses(now, mine));
}

} // namespace
} // namespace resilient
