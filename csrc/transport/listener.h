#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/log.h"
#include "base/random.h"
#include "transport/event_loop.h"
#include "transport/handshake.h"
#include "transport/socket.h"

namespace resilient {

// All callbacks run in the loop. isMembers may be empty; the others may not.
struct ListenerConfig {
  // Addresses to listen on, or empty for all.
  std::vector<std::string> bindIps;
  uint16_t port = 0; // 0: any free one
  SocketOptions options;
  Nanos handshakeTimeout = std::chrono::seconds(10);
  // Callers that have not proved themselves yet. With more, one of those that
  // look least like a member is dropped, see Standing. Must exceed the number
  // of peers that call at once within a round trip; each costs a descriptor and
  // about 1 KiB, or 40 KiB with TLS.
  size_t maxPendingHandshakes = 1024;
  // Handshakes refer to it until the listener is destroyed.
  ServerIdentity identity;
  // Unless it is off, callers may speak TLS; where it is needed, they must.
  Encryption encryption = Encryption::kOff;
  // As in OutgoingSpec, asked for each caller; may be null.
  std::function<const TlsCertificates*()> certificates;
  // Counts callers, unless it is null; outlives the listener.
  HandshakeCounters* counters = nullptr;
  // Called once for each caller, and once more to seed the choice of callers to
  // drop. A nonce must never repeat.
  std::function<HelloNonce()> nonce;
  // Whether a member of the job has published this address as its own. Not
  // set: none has.
  std::function<bool(const SocketAddress&)> isMembers;
  // A caller that has proved itself and was let in by identity.decide. The
  // socket is connected, non-blocking and not watched. Bytes that came after
  // the handshake are still unread.
  std::function<void(HelloInfo, StreamSocket, SocketAddress remote)> onPeer;
  // A caller that decide() let in and that disconnected before the verdict
  // reached it: its reservation must be released.
  std::function<void(HelloInfo)> onPeerLost;
};

struct ListenerStats {
  uint64_t accepted = 0; // connections
  uint64_t admitted = 0; // handed to onPeer
  uint64_t refused = 0; // wrong proof, secret, version, bytes, or decide()
  uint64_t timedOut = 0;
  uint64_t brokenOff = 0; // by the caller
  uint64_t dropped = 0; // for being one of too many
  uint64_t outOfDescriptors = 0; // times that accept had none left
  size_t pending = 0;
};

// The process's one listening port, for IPv6 and IPv4 where there are both.
//
// A flood of strangers must not keep a member out. A member needs two round
// trips to prove itself and may be far away. Its first message is there when
// its connection is accepted, and is read then. It names the job's secret,
// which strangers do not know, and they are dropped first. A stranger who has
// learned that name can still call from many addresses; then callers from the
// addresses of members stay, and random ones of the others are dropped.
// Rejected: dropping the oldest, which favours strangers that call more often
// than a handshake takes.
//
// Thread: the loop's. The callbacks may not destroy it. Destroying it resets
// the callers that are not admitted yet, without onPeerLost.
class Listener final {
 public:
  // Throws StatusError; a busy port is named, with what to do.
  Listener(EventLoop& loop, ListenerConfig config);
  ~Listener();

  // The same for all addresses, and for the life of the listener.
  uint16_t port() const {
    return port_;
  }
  // Interfaces have got other addresses, in the order of bindIps: listens
  // there, on the same port, if it was bound to addresses at all. The status
  // names one that is not available. For that one nothing changes, and the
  // listener tries again until it succeeds or is moved elsewhere: an IPv6
  // address is not available while the kernel checks that no other host has it.
  Status moveTo(const std::vector<std::string>& ips);
  // False if only IPv4 callers can reach it.
  bool dualStack() const {
    return dualStack_;
  }
  ListenerStats stats() const;

 private:
  // How much a caller looks like a member, before it has proved to be one.
  enum class Standing { kNone, kMembersAddress, kNamedSecret, kBoth, kProved };
  struct Caller {
    std::unique_ptr<IncomingHandshake> handshake;
    uint64_t network = 0; // it comes from
    bool fromMember = false; // it comes from an address of one

    Standing standing() const;
  };
  // A list, since the callback of each handshake holds its iterator.
  using Pending = std::list<Caller>;

  // One listening socket.
  struct ListenSocket final : Handler {
    explicit ListenSocket(Listener& l) : listener(l) {}
    void onEvents(uint32_t) override {
      listener.onCallers(*this);
    }
    Listener& listener;
    FileDescriptor fd;
    std::string ip; // empty: all
    TimerId move = 0; // the next try to
  };

  void onCallers(const ListenSocket& socket);
  void openSockets();
  Status moveTo(ListenSocket& socket, const std::string& ip);
  FileDescriptor open(const SocketAddress& at);
  void openReserve();
  void admit(FileDescriptor fd, SocketAddress remote);
  void onResult(Pending::iterator which, IncomingHandshake::Result result);
  void dropExcess(const Caller& newest);
  bool drop(size_t max, std::optional<uint64_t> network);
  void erase(Pending::iterator which);
  void onDescriptorsExhausted(const ListenSocket& socket);
  template <typename MakeLine>
  void logRejected(MakeLine makeLine);

  EventLoop& loop_;
  ListenerConfig config_;
  std::vector<std::unique_ptr<ListenSocket>> sockets_;
  FileDescriptor reserve_;
  uint16_t port_ = 0;
  bool dualStack_ = false;
  Pending pending_;
  // By network, those that are not from a member's address.
  std::unordered_map<uint64_t, size_t> fromNetwork_;
  Prng chance_;
  ListenerStats stats_;
  TimerId resume_ = 0; // while paused
  LogRateLimit logLimit_;
};

} // namespace resilient
