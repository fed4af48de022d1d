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

// One address of one network interface of this host. An interface with several
// addresses has one entry for each of them.
struct InterfaceAddress {
  std::string interface;
  SocketAddress address; // port 0
  bool up = false; // and running: it has a carrier
  bool loopback = false;
  int prefixBits = 0; // of its subnet; 0: unknown
};

// In the kernel's order. Link-local addresses are left out: they mean nothing
// on another host. Fails without a free descriptor, for example. Replaces
// `interfaces`; on failure leaves it as it was.
Status enumerateInterfaces(std::vector<InterfaceAddress>& interfaces);

// The local address that packets to `host` (a name or an address) leave from.
// Sends nothing; a name is looked up, which may block. Nothing if there is no
// route or no such name. The port of the result is 0. No limit bounds the
// look-up but the resolver's own, so the engine calls it once, before its loop
// runs.
std::optional<SocketAddress> localAddressTowards(const std::string& host);

// The addresses to publish to the other ranks, and the reason, for one line of
// the log.
struct AddressChoice {
  // Best first, at least one and at most PeerAddress::kAddressesMax.
  std::vector<InterfaceAddress> addresses;
  std::string reason;
};

// `option` is a comma-separated list, in order of preference, of interface
// names ("eth0"), beginnings of names ("eth") or literal addresses; or empty.
// If empty: the address `towardsStore`, else the first one that is up and not
// loopback, else loopback; and behind it every other interface that is up and
// leads out of this host, as far as its name tells (no bridges of containers).
// Each interface contributes one address, of the family of `towardsStore` (IPv4
// without it) if it has one. The first PeerAddress::kAddressesMax addresses are
// taken, since peers refuse a longer list; the reason says how many are left
// out. Throws a StatusError (kInvalidArgument) that lists what there is if the
// option matches nothing.
//
// A pure function of its arguments: it asks the system nothing.
AddressChoice chooseAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    const std::string& option,
    const std::optional<SocketAddress>& towardsStore);

// Equal for two processes exactly if they share the kernel's uptime, the
// network namespace and the host name: then shared memory and loopback work
// between them. 32 hexadecimal digits. Two containers with network namespaces
// of their own differ, although they run under one kernel: they could not
// connect over loopback.
std::string hostIdentity();
std::string hostName();

// One NIC of a process as others see it.
struct NicAddress {
  std::string nic; // "eth0"; for people, and to find our own
  SocketAddress address;
  int prefixBits = 0; // 0: unknown

  // False for an address of the other family, and while the prefix is unknown.
  bool inSubnet(const SocketAddress& other) const;
  std::string toString() const; // "eth0@10.0.0.7/24:29511"
};

// Follows NICs that have got another address: an entry of `mine` with a lost
// address gets one that its interface has now, of the same family, if any. The
// order stays. True if anything has changed.
//
// The length and the order are part of a contract with the peers: routes name
// NICs by their places in the two lists (routes.h), and a peer ignores a new
// list of another length. A NIC without any address keeps the lost one.
bool followAddresses(
    const std::vector<InterfaceAddress>& interfaces,
    std::vector<NicAddress>& mine);

// Whether a process can use RDMA with other hosts, as it found at its start.
enum class RdmaUse : uint8_t {
  kOff, // by its options
  kNone, // no device has an address of its interfaces
  kPossible,
  kRequired, // possible, and its options insist on it
};

// How to reach a rank; what it puts into the store. The order of `addresses` is
// the order of preference, and the same for all peers.
struct PeerAddress {
  Uid uid{};
  std::string hostId; // of hostIdentity()
  std::string hostName; // for people
  std::string site; // as declared (isSiteName), or empty
  int64_t pid = 0;
  // The kernel's shortest one to the group's store; 0: unknown, or not to be
  // used to infer sites.
  Nanos storeRoundTrip{};
  RdmaUse rdma = RdmaUse::kOff;
  std::vector<NicAddress> addresses;

  // "resilient/4 uid=<32 hex> host=<hex> name=node-3 site=east pid=7 rtt=180
  // rdma=off at=eth0@10.0.0.7/24:29511,eth0@[fd00::7]/64:29511", one line; rtt
  // is in microseconds.
  std::string toString() const;
  // kProtocol with the reason if `text` is not such a line. Bounded: the store
  // may hold text of any process. On failure `address` is unchanged. Fields are
  // checked by their own grammar, so no text of another process reaches a log
  // or a connection unchecked.
  static Status parse(const std::string& text, PeerAddress& address);

  static constexpr size_t kTextBytesMax = 4096;
  // The text of so many addresses fits into kTextBytesMax.
  static constexpr size_t kAddressesMax = 32;
};

} // namespace resilient
