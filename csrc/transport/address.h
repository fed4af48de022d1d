#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "transport/socket.h"
#include "wire/hello.h"

namespace resilient {

// One address of one network interface of this host.
struct InterfaceAddress {
  std::string interface;
  SocketAddress address; // port 0
  bool up = false; // and running: it has a carrier
  bool loopback = false;
  int prefixBits = 0; // of its subnet; 0: unknown
};

// In the kernel's order. Link-local addresses are left out: they mean nothing
// on another host. Fails without a free descriptor, for example.
Status enumerateInterfaces(std::vector<InterfaceAddress>& interfaces);

// The local address that packets to `host` (a name or an address) leave from.
// Sends nothing; a name is looked up, which may block. Nothing if there is no
// route or no such name.
std::optional<SocketAddress> localAddressTowards(const std::string& host);

// The addresses to publish to the other ranks, and the reason, for one line of
// the log.
struct AddressChoice {
  std::vector<InterfaceAddress> addresses; // best first, at least one
  std::string reason;
};

// `option` is a comma-separated list, in order of preference, of interface
// names ("eth0"), beginnings of names ("eth") or literal addresses; or empty.
// If empty: the address `towardsStore`, else the first one that is up and not
// loopback, else loopback; and behind it every other interface that is up and
// leads out of this host, as far as its name tells (no bridges of containers).
// Each interface contributes one address, of the family of `towardsStore` (IPv4
// without it) if it has one. Throws a StatusError (kInvalidArgument) that lists
// what there is if the option matches nothing.
AddressChoice chooseAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    const std::string& option,
    const std::optional<SocketAddress>& towardsStore);

// Equal for two processes exactly if they share the kernel's uptime, the
// network namespace and the host name: then shared memory and loopback work
// between them. 32 hexadecimal digits.
std::string hostIdentity();
std::string hostName();

// One NIC of a process as others see it.
struct NicAddress {
  std::string nic; // "eth0"; for people, and to find our own
  SocketAddress address;
  int prefixBits = 0; // 0: unknown

  bool inSubnet(const SocketAddress& other) const;
  std::string toString() const; // "eth0@10.0.0.7/24:29511"
};

// Follows NICs that have got another address: an entry of `mine` with a lost
// address gets one that its interface has now, of the same family, if any. The
// order stays. True if anything has changed.
bool followAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    std::vector<NicAddress>& mine);

// How to reach a rank; what it puts into the store.
struct PeerAddress {
  Uid uid{};
  std::string hostId; // of hostIdentity()
  std::string hostName; // for people
  std::string site; // as declared (isSiteName), or empty
  int64_t pid = 0;
  // The kernel's shortest one to the group's store; 0: unknown, or not to be
  // used to infer sites.
  Nanos storeRoundTrip{};
  std::vector<NicAddress> addresses;

  // "resilient/3 uid=<32 hex> host=<hex> name=node-3 site=east pid=7 rtt=180
  // at=eth0@10.0.0.7/24:29511,eth0@[fd00::7]/64:29511", one line; rtt
  // is in microseconds.
  std::string toString() const;
  // kProtocol with the reason if `text` is not such a line. Bounded: the store
  // may hold text of any process.
  static Status parse(const std::string& text, PeerAddress& address);

  static constexpr size_t kTextBytesMax = 4096;
  static constexpr size_t kAddressesMax = 32;
};

} // namespace resilient
