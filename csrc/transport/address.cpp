#include "transport/address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <memory>
#include <span>

#include "base/file.h"
#include "base/options.h"
#include "base/sha256.h"

namespace resilient {

namespace {

bool isLinkLocal(const SocketAddress& a) {
  if (a.family() == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(a.raw());
    return IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(a.raw());
  return ntohl(v4->sin_addr.s_addr) >> 16 == 0xa9fe; // 169.254/16
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t from = 0;
  for (;;) {
    size_t to = text.find(separator, from);
    parts.push_back(text.substr(from, to - from));
    if (to == std::string::npos) {
      return parts;
    }
    from = to + 1;
  }
}

std::string trim(const std::string& text) {
  size_t from = text.find_first_not_of(" \t");
  size_t to = text.find_last_not_of(" \t");
  return from == std::string::npos ? "" : text.substr(from, to - from + 1);
}

std::string describe(const std::vector<InterfaceAddress>& list) {
  std::string text;
  for (const InterfaceAddress& i : list) {
    text += (text.empty() ? "" : ", ") + i.interface + " " + i.address.ip() +
        (i.up ? "" : " (down)");
  }
  return text.empty() ? "none" : text;
}

// The bytes of an address, in the network's order.
std::span<const uint8_t> bytesOf(const sockaddr* a) {
  if (a->sa_family == AF_INET6) {
    return reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr.s6_addr;
  }
  return {
      reinterpret_cast<const uint8_t*>(
          &reinterpret_cast<const sockaddr_in*>(a)->sin_addr),
      4};
}

int prefixOf(const sockaddr* netmask) {
  int bits = 0;
  if (netmask != nullptr) {
    for (uint8_t byte : bytesOf(netmask)) {
      bits += std::popcount(byte);
    }
  }
  return bits;
}

// Interfaces that lead to containers and virtual machines of this host, not to
// other hosts, by the names that their makers give them.
bool leadsInward(const std::string& interface) {
  for (const char* prefix :
       {"docker",
        "br-",
        "virbr",
        "veth",
        "vnet",
        "vmnet",
        "lxc",
        "lxd",
        "cni",
        "cali",
        "cilium",
        "flannel",
        "kube",
        "podman",
        "dummy",
        "nerdctl"}) {
    if (interface.starts_with(prefix)) {
      return true;
    }
  }
  return false;
}

const char* familyName(int family) {
  return family == AF_INET6 ? "IPv6" : "IPv4";
}

// One address per interface of the candidates, in order of appearance. The
// first address counts, but a later one of `family` replaces an earlier one of
// another family. The interface keeps its place in the order.
std::vector<InterfaceAddress> onePerInterface(
    const std::vector<InterfaceAddress>& candidates,
    int family) {
  std::vector<InterfaceAddress> chosen;
  for (const InterfaceAddress& c : candidates) {
    auto same = std::find_if(
        chosen.begin(), chosen.end(), [&](const InterfaceAddress& o) {
          return o.interface == c.interface;
        });
    if (same == chosen.end()) {
      chosen.push_back(c);
    } else if (
        same->address.family() != family && c.address.family() == family) {
      *same = c;
    }
  }
  return chosen;
}

// Adds the other interfaces that lead out of this host: more bandwidth, and an
// alternative if one fails.
void addOutward(
    const std::vector<InterfaceAddress>& interfaces,
    int family,
    AddressChoice& choice) {
  const size_t before = choice.addresses.size();
  for (const InterfaceAddress& i : onePerInterface(interfaces, family)) {
    const bool there = std::any_of(
        choice.addresses.begin(), choice.addresses.end(), [&](const auto& o) {
          return o.interface == i.interface || o.address.ip() == i.address.ip();
        });
    if (i.up && !i.loopback && !there && !leadsInward(i.interface) &&
        i.address.family() == family) {
      choice.addresses.push_back(i);
    }
  }
  if (choice.addresses.size() > before) {
    choice.reason += "; the others are up too";
  }
}

// The interfaces that one entry of the option means. A literal address and an
// exact name win over names that begin so; of those, only interfaces that are
// up count. Throws if there are none.
std::vector<InterfaceAddress> matching(
    const std::vector<InterfaceAddress>& interfaces,
    const std::string& want,
    int family) {
  const auto address = SocketAddress::parse(want, 0);
  std::vector<InterfaceAddress> exact, prefix;
  for (const InterfaceAddress& i : interfaces) {
    if (address ? i.address.ip() == address->ip() : i.interface == want) {
      exact.push_back(i);
    } else if (!address && i.up && i.interface.starts_with(want)) {
      prefix.push_back(i);
    }
  }
  if (exact.empty() && prefix.empty()) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "choose the addresses to listen on: no interface or address of "
        "this host is \"" +
            want + "\" or begins so; it has " + describe(interfaces)));
  }
  if (address) {
    // Taken as it is, also if its interface has another one already.
    return {exact.front()};
  }
  return onePerInterface(exact.empty() ? prefix : exact, family);
}

// The addresses of each entry in the order of the option. An address counts
// once, at its first place. Unlike the other two ways to choose, this one takes
// everything that the option names: loopback, bridges of containers and, by its
// exact name, an interface that is down.
AddressChoice chooseByOption(
    const std::vector<InterfaceAddress>& interfaces,
    const std::string& option,
    int family) {
  AddressChoice choice;
  for (const std::string& part : split(option, ',')) {
    const std::string want = trim(part);
    if (want.empty()) {
      continue;
    }
    for (InterfaceAddress& found : matching(interfaces, want, family)) {
      // "eth0,eth" names eth0 twice.
      const bool there = std::any_of(
          choice.addresses.begin(), choice.addresses.end(), [&](const auto& o) {
            return o.address.ip() == found.address.ip();
          });
      if (!there) {
        choice.addresses.push_back(std::move(found));
      }
    }
  }
  choice.reason = "as the option \"" + option + "\" asks";
  return choice;
}

// The address that leads to the store, then all others that lead outward.
AddressChoice chooseByStore(
    const std::vector<InterfaceAddress>& interfaces,
    const SocketAddress& towardsStore) {
  const auto it =
      std::find_if(interfaces.begin(), interfaces.end(), [&](const auto& i) {
        return i.address.ip() == towardsStore.ip();
      });
  InterfaceAddress a;
  a.address = towardsStore;
  a.interface = "?"; // gone since, or an address that is not listed
  a.up = true;
  a.loopback = towardsStore.isLoopback();
  AddressChoice choice;
  choice.addresses = {it == interfaces.end() ? a : *it};
  // With loopback, the store runs on this host, maybe under a name that means
  // loopback here only: other hosts need an address of ours as well.
  choice.reason =
      a.loopback ? "loopback leads to the store" : "it leads to the store";
  addOutward(interfaces, towardsStore.family(), choice);
  return choice;
}

// The route to the store is not known: the first interface that is up, then all
// others that lead outward. Throws if none is up.
AddressChoice chooseByState(const std::vector<InterfaceAddress>& interfaces) {
  std::vector<InterfaceAddress> up, loopback;
  for (const InterfaceAddress& i : interfaces) {
    if (i.up) {
      (i.loopback ? loopback : up).push_back(i);
    }
  }
  const auto& from = up.empty() ? loopback : up;
  if (from.empty()) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "choose the addresses to listen on: no interface of this host is "
        "up; it has " +
            describe(interfaces)));
  }
  AddressChoice choice;
  choice.addresses = onePerInterface(from, AF_INET);
  choice.addresses.resize(1);
  if (!up.empty()) {
    addOutward(interfaces, AF_INET, choice);
  }
  choice.reason = up.empty()
      ? "no interface but loopback is up: only this host can reach it"
      : std::string("it is the first interface that is up, ") +
          familyName(choice.addresses[0].address.family()) +
          "; the route to the store is not known";
  return choice;
}

} // namespace

Status enumerateInterfaces(std::vector<InterfaceAddress>& interfaces) {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) {
    return errnoStatus(
        StatusCode::kNetwork, "list the network interfaces", errno);
  }
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(raw, ::freeifaddrs);
  interfaces.clear();
  for (ifaddrs* i = raw; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr ||
        (i->ifa_addr->sa_family != AF_INET &&
         i->ifa_addr->sa_family != AF_INET6)) {
      continue;
    }
    InterfaceAddress a;
    a.interface = i->ifa_name;
    a.address = SocketAddress::from(
        i->ifa_addr,
        i->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in)
                                          : sizeof(sockaddr_in6));
    a.up = (i->ifa_flags & IFF_UP) != 0 && (i->ifa_flags & IFF_RUNNING) != 0;
    a.loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
    a.prefixBits = prefixOf(i->ifa_netmask);
    if (!isLinkLocal(a.address)) {
      interfaces.push_back(std::move(a));
    }
  }
  return Status();
}

std::optional<SocketAddress> localAddressTowards(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* raw = nullptr;
  // The port is not used: connecting a UDP socket sends nothing.
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &raw) != 0) {
    return std::nullopt;
  }
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(
      raw, ::freeaddrinfo);
  for (addrinfo* i = raw; i != nullptr; i = i->ai_next) {
    FileDescriptor fd(::socket(i->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd && ::connect(fd.get(), i->ai_addr, i->ai_addrlen) == 0) {
      SocketAddress local = localAddress(fd.get());
      local.setPort(0);
      return local;
    }
  }
  return std::nullopt;
}

AddressChoice chooseAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    const std::string& option,
    const std::optional<SocketAddress>& towardsStore) {
  AddressChoice choice;
  if (!trim(option).empty()) {
    const int family = towardsStore ? towardsStore->family() : AF_INET;
    choice = chooseByOption(interfaces, option, family);
  } else if (towardsStore) {
    choice = chooseByStore(interfaces, *towardsStore);
  } else {
    choice = chooseByState(interfaces);
  }
  // Those that are left out are the last ones in the order of choice.
  constexpr size_t kMax = PeerAddress::kAddressesMax;
  if (choice.addresses.size() > kMax) {
    choice.reason += "; " + std::to_string(choice.addresses.size() - kMax) +
        " more are left out, since a rank publishes at most " +
        std::to_string(kMax) + " addresses";
    choice.addresses.resize(kMax);
  }
  choice.reason = "using " + describe(choice.addresses) + ": " + choice.reason;
  return choice;
}

std::string hostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') {
    return "unknown";
  }
  return name;
}

namespace {

std::string toHex(const uint8_t* data, size_t bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    text += digits[data[i] >> 4];
    text += digits[data[i] & 15];
  }
  return text;
}

bool isHex(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
}

// Host names as they come: what could end a field is replaced.
std::string printable(const std::string& name) {
  std::string text = name.substr(0, 255);
  for (char& c : text) {
    if (c <= ' ' || c > '~' || c == '=' || c == ',' || c == '@') {
      c = '?';
    }
  }
  return text;
}

// An interface's name has 15 characters at most.
constexpr size_t kNicNameMax = 15;

template <typename T>
bool parseNumber(const std::string& text, T& value) {
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// "eth0@10.0.0.7/24:29511" or "eth0@[fd00::7]/64:29511". The last colon
// separates the port and the last slash the prefix, since an IPv6 address has
// colons of its own. Brackets must be there for IPv6 and only there.
std::optional<NicAddress> parseAddress(const std::string& text) {
  NicAddress result;
  const size_t at = text.find('@');
  const size_t colon = text.rfind(':');
  const size_t slash = text.rfind('/');
  uint16_t port = 0;
  if (at == std::string::npos || at == 0 || at > kNicNameMax ||
      colon == std::string::npos || slash == std::string::npos || slash < at ||
      colon < slash || !parseNumber(text.substr(colon + 1), port) ||
      port == 0 ||
      !parseNumber(
          text.substr(slash + 1, colon - slash - 1), result.prefixBits)) {
    return std::nullopt;
  }
  result.nic = text.substr(0, at);
  std::string ip = text.substr(at + 1, slash - at - 1);
  bool v6 = ip.size() >= 2 && ip.front() == '[' && ip.back() == ']';
  if (v6) {
    ip = ip.substr(1, ip.size() - 2);
  }
  auto address = SocketAddress::parse(ip, port);
  if (!address || (address->family() == AF_INET6) != v6 ||
      result.prefixBits < 0 || result.prefixBits > (v6 ? 128 : 32) ||
      result.nic != printable(result.nic)) {
    return std::nullopt;
  }
  result.address = *address;
  return result;
}

// One hour: far from overflow, and nothing waits that long for an answer.
constexpr int64_t kRoundTripMaxMicroseconds = 3'600'000'000;
constexpr const char* kFirstWord = "resilient/4";
// By RdmaUse.
constexpr std::array kRdmaUses = {"off", "none", "possible", "required"};

} // namespace

std::string hostIdentity() {
  const std::string bootId = kernelText("/proc/sys/kernel/random/boot_id");
  struct stat netns{};
  // Without /proc the rest must do; the worst is loopback tried in vain.
  (void)::stat("/proc/self/ns/net", &netns);
  std::string all = bootId + "\n" + std::to_string(netns.st_dev) + ":" +
      std::to_string(netns.st_ino) + "\n" + hostName();
  Digest digest = Sha256::of(all.data(), all.size());
  return toHex(digest.data(), 16);
}

// How it works. An entry is left alone if its interface still has its address.
// Otherwise it takes the first address of the same family of an interface with
// the same name that is up. The family must stay: a route joins two NICs of one
// family. An entry with the name "?" (chooseByStore) matches no interface and
// keeps its address.
bool followAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    std::vector<NicAddress>& mine) {
  bool changed = false;
  for (NicAddress& nic : mine) {
    const InterfaceAddress* other = nullptr;
    bool there = false;
    for (const InterfaceAddress& i : interfaces) {
      if (i.interface == nic.nic) {
        there = there || i.address.ip() == nic.address.ip();
        if (other == nullptr && i.up &&
            i.address.family() == nic.address.family()) {
          other = &i;
        }
      }
    }
    if (!there && other != nullptr) {
      const uint16_t port = nic.address.port();
      nic.address = other->address;
      nic.address.setPort(port);
      nic.prefixBits = other->prefixBits;
      changed = true;
    }
  }
  return changed;
}

bool NicAddress::inSubnet(const SocketAddress& other) const {
  if (other.family() != address.family() || prefixBits == 0) {
    return false;
  }
  const auto mine = bytesOf(address.raw());
  const auto theirs = bytesOf(other.raw());
  for (size_t i = 0; i < mine.size(); ++i) {
    const int bits = std::clamp(prefixBits - 8 * static_cast<int>(i), 0, 8);
    const auto mask = static_cast<uint8_t>(0xff00 >> bits);
    if (((mine[i] ^ theirs[i]) & mask) != 0) {
      return false;
    }
  }
  return true;
}

std::string NicAddress::toString() const {
  const std::string where = address.toString();
  const size_t colon = where.rfind(':');
  return printable(nic).substr(0, kNicNameMax) + "@" + where.substr(0, colon) +
      "/" + std::to_string(prefixBits) + where.substr(colon);
}

std::string PeerAddress::toString() const {
  std::string text =
      std::string(kFirstWord) + " uid=" + toHex(uid.data(), uid.size()) +
      " host=" + hostId + " name=" + printable(hostName) + " site=" + site +
      " pid=" + std::to_string(pid) + " rtt=" +
      std::to_string(
          std::chrono::duration_cast<std::chrono::microseconds>(storeRoundTrip)
              .count()) +
      " rdma=" + kRdmaUses[static_cast<size_t>(rdma)] + " at=";
  for (size_t i = 0; i < addresses.size(); ++i) {
    text += (i == 0 ? "" : ",") + addresses[i].toString();
  }
  return text;
}

// The words come in one fixed order, and each key must be in its place. The
// first word carries the version of this text. Ranks of another version fail
// here, with a message that asks about versions.
Status PeerAddress::parse(const std::string& text, PeerAddress& address) {
  auto bad = [&](const std::string& why) {
    return Status(
        StatusCode::kProtocol,
        "read a peer's address from the store: " + why + ": \"" +
            printable(text.substr(0, 80)) +
            "\"; do all ranks run the same version of torch_resilient, and "
            "does this store belong to this job alone?");
  };
  if (text.size() > kTextBytesMax) {
    return bad("longer than " + std::to_string(kTextBytesMax) + " bytes");
  }
  std::vector<std::string> words = split(text, ' ');
  const char* keys[] = {
      "uid=", "host=", "name=", "site=", "pid=", "rtt=", "rdma=", "at="};
  if (words.size() != std::size(keys) + 1 || words[0] != kFirstWord) {
    return bad("not nine words of version 4");
  }
  std::string values[std::size(keys)];
  for (size_t i = 0; i < std::size(keys); ++i) {
    std::string key = keys[i];
    if (words[i + 1].compare(0, key.size(), key) != 0) {
      return bad("no " + key);
    }
    values[i] = words[i + 1].substr(key.size());
  }
  PeerAddress result;
  if (values[0].size() != 2 * sizeof(Uid) || !isHex(values[0])) {
    return bad("its uid is not 32 hexadecimal digits");
  }
  for (size_t i = 0; i < sizeof(Uid); ++i) {
    std::from_chars(
        values[0].data() + 2 * i,
        values[0].data() + 2 * i + 2,
        result.uid[i],
        16);
  }
  if (values[1].size() != 32 || !isHex(values[1])) {
    return bad("its host is not 32 hexadecimal digits");
  }
  result.hostId = values[1];
  if (values[2].empty() || values[2].size() > 255 ||
      values[2] != printable(values[2])) {
    return bad("its name is not one of a host");
  }
  result.hostName = values[2];
  if (!values[3].empty() && !isSiteName(values[3])) {
    return bad("its site is not a name");
  }
  result.site = values[3];
  if (!parseNumber(values[4], result.pid) || result.pid <= 0) {
    return bad("its pid is not a number above 0");
  }
  int64_t microseconds = 0;
  if (!parseNumber(values[5], microseconds) || microseconds < 0 ||
      microseconds > kRoundTripMaxMicroseconds) {
    return bad("its round trip is not a number of microseconds");
  }
  result.storeRoundTrip = std::chrono::microseconds(microseconds);
  const auto use = std::ranges::find(kRdmaUses, values[6]);
  if (use == kRdmaUses.end()) {
    return bad("its use of RDMA is unknown");
  }
  result.rdma = static_cast<RdmaUse>(use - kRdmaUses.begin());
  for (const std::string& item : split(values[7], ',')) {
    auto a = parseAddress(item);
    if (!a) {
      return bad("\"" + printable(item) + "\" is not an address and port");
    }
    if (result.addresses.size() == kAddressesMax) {
      return bad("more than " + std::to_string(kAddressesMax) + " addresses");
    }
    result.addresses.push_back(*a);
  }
  address = std::move(result);
  return Status();
}

} // namespace resilient
