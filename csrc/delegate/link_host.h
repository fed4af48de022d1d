#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/traffic_class.h"
#include "channel/mailbox.h"
#include "channel/operation.h"
#include "datagram/recovery.h"
#include "path/faults.h"
#include "transport/address.h"
#include "transport/event_loop.h"
#include "transport/shared_rendezvous.h"
#include "transport/socket.h"
#include "transport/stream_socket.h"
#include "transport/tls_certificates.h"
#include "transport/verbs_api.h"
#include "transport/verbs_choice.h"
#include "transport/verbs_loans.h"
#include "wire/hello.h"

namespace resilient {

class Link;
class PeerLink;
class RelayService;
class Uplink;

// The state that all links of a process share, as a link and its connectors see
// it. The Engine implements it.
//
// Thread: loop thread. Lifetime: outlives the links. References and pointers
// that it returns are good until the host stops.
class LinkHost {
 public:
  virtual ~LinkHost() = default;

  // --- the process
  virtual EventLoop& loop() = 0;
  virtual const EngineOptions& options() const = 0;
  virtual const PeerAddress& self() const = 0;
  // self() as it is now, as text.
  virtual std::string addressText() const = 0;
  virtual int32_t globalRank() const = 0;
  // Which TCP connections of this process the job's secret encrypts.
  virtual Encryption encryption() const = 0;
  // For a new connection: by what TLS proves hosts; null: by the job's secret.
  virtual const TlsCertificates* certificates() = 0;
  // Counted by all links.
  virtual HandshakeCounters& handshakes() = 0;
  virtual Mailbox& mailbox() = 0;
  virtual CompletionQueue& completions() = 0;
  virtual StagingMemory& staging() = 0;
  virtual FaultPlan& faults() = 0;

  // --- the network, by the site of the peer
  // For connections to a host of that site, or to this one (null).
  virtual SocketOptions socketOptions(const std::string* site) const = 0;
  virtual int dscpOf(const std::string& site) const = 0;
  virtual WanTransport wanTo(const std::string& site) const = 0;
  // How datagrams to hosts there recover losses.
  virtual RecoverySchemes recoveryTo(const std::string& site) const = 0;
  // RDMA, or null if this process uses none.
  virtual VerbsApi* verbs() = 0;
  // The ports of its devices, as they were a moment ago, that options allow.
  virtual const std::vector<VerbsPort>& verbsPorts() = 0;
  // Memory of operations for its devices; null without RDMA, or if none may be
  // registered.
  virtual VerbsLoans* loans() = 0;
  virtual const VerbsChoice& verbsChoice() const = 0;
  // The way there, which all links share, if something limits it; null: no cap,
  // and no relays that share it.
  virtual Uplink* uplink(const std::string& site) = 0;
  // A link that has not got its turn there is pumped when it has.
  virtual void waitForTurn(const std::string& site) = 0;
  virtual const BufferLimits& bufferLimits() const = 0;
  // For connections to other hosts: empty for the system's.
  virtual const std::string& congestionControl() const = 0;
  // They may change to BBR by themselves.
  virtual bool mayChangeCongestionControl() const = 0;
  // By traffic class: the interface that it keeps to, or empty.
  virtual const std::array<std::string, kTrafficClassCount>& nicClasses()
      const = 0;

  // --- about peers
  // Nothing for a secret of a group that this process has not joined yet.
  virtual std::optional<std::string> secretOf(const KeyId& id) = 0;
  // Whether this process of the job can have that address now.
  virtual bool mayBeAt(const Uid& process, const SocketAddress& at) const = 0;
  // A peer's addresses are others now.
  virtual void membersMoved() = 0;
  // The link's address is known: who called from it before may come in.
  virtual void letIn(PeerLink& link) = 0;
  virtual void onLinkUp(PeerLink& link) = 0; // for the first time
  virtual void onLinkCut(PeerLink& link) = 0; // its last connection is lost
  virtual void onLinkClosed(PeerLink& link, const Status& why) = 0;
  virtual void onControl(
      PeerLink& link,
      std::span<const std::byte> payload) = 0;

  // The link with a process that a group has as a member, or null; and the one
  // with this channel.
  virtual PeerLink* linkTo(const Uid& uid) = 0;
  virtual PeerLink* linkOf(const Channel& channel) = 0;
  // Ranks that can relay to this peer, best first: on our site, on hosts that
  // are neither ours nor the peer's, one of each.
  virtual std::vector<Uid> relaysTo(const Link& peer) const = 0;

  // --- for paths
  virtual PathId nextPathId() = 0;
  // The link is pumped at the end of this turn.
  virtual void markDirty(PeerLink& link) = 0;
  // Destroyed at the next turn: objects whose code is on the stack. The host
  // destroys them when nothing else is on the stack.
  virtual void destroyLater(std::shared_ptr<void> object) = 0;
  // The meeting point of peers on this host; null if there is none.
  virtual SharedRendezvous* sharedRendezvous() = 0;
  // It cannot be shared with a peer; says so once.
  virtual void noSharedMemory(const std::string& why) = 0;
};

} // namespace resilient
