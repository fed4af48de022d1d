#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/options.h"
#include "channel/mailbox.h"
#include "channel/operation.h"
#include "datagram/recovery.h"
#include "delegate/flight_recorder.h"
#include "delegate/group.h"
#include "delegate/link_host.h"
#include "delegate/peer_link.h"
#include "delegate/relay_service.h"
#include "delegate/signal_dump.h"
#include "delegate/unknown_callers.h"
#include "path/faults.h"
#include "path/uplink.h"
#include "transport/address.h"
#include "transport/event_loop.h"
#include "transport/link_watch.h"
#include "transport/listener.h"
#include "transport/shared_rendezvous.h"
#include "transport/used_names.h"
#include "transport/verbs_watch.h"
#include "wire/control.h"

namespace resilient {

class GroupImpl;
class Resolver;

// The one engine of a process: the delegate. One loop thread owns all
// channels, connections and running collectives of all groups; one listening
// port serves them. Starts with the first group, stops with the last.
// Paper: PIPEMORPH §5.2. There, processes take over once a link is slow, and
// several of them because each sends one message after another. Here one
// thread carries everything from the start, any number of messages at a time.
//
// Thread: methods under "any thread" from anywhere; all others on the loop
// thread.
//
// Lifecycle: acquire() for the first group makes an engine. It listens and
// knows its addresses before its thread starts, so wrong options throw in the
// caller. The last release() takes it out of the process, then stops it; a
// group that is joined meanwhile gets another engine. An engine that has ended
// never starts again.
//
// Failures do not leave the loop as exceptions: an operation ends with a
// Status, and a path or a link is closed with one.
class Engine final : public MailboxListener, public LinkHost {
 public:
  // --- any thread
  // The running engine, or a new one. `store` (the group's) tells the way to
  // the other ranks. Throws StatusError. Blocks while a port is opened and
  // while the name of the store's host is looked up. The options are those of
  // setDefaultOptions(), or else of the environment; an engine that runs
  // already keeps its own.
  static std::shared_ptr<Engine> acquire(
      const KeyValue& store,
      int32_t globalRank);
  // An engine that is not the process's, for tests of several in one process.
  // As if acquired once.
  static std::shared_ptr<Engine> start(
      EngineOptions options,
      const std::string& storeHost,
      int32_t globalRank);
  // Each acquire() is paid back by one release(); the last one stops it. The
  // thread that calls it waits for the loop, so it must not be the loop thread.
  static void release(const std::shared_ptr<Engine>& engine, Nanos linger);
  static std::shared_ptr<Engine> current(); // or null
  ~Engine() override;

  EventLoop& loop() override {
    return loop_;
  }
  const EngineOptions& options() const override {
    return options_;
  }
  // Except for its addresses, which may change: see addressText().
  //
  // In the loop the addresses may be read without a lock, since only the loop
  // thread writes them.
  const PeerAddress& self() const override {
    return self_;
  }
  // How other ranks reach this process, as it is now. `storeRoundTrip`: to the
  // store of a group, as PeerAddress has it.
  std::string addressText(Nanos storeRoundTrip) const;
  std::string addressText() const override {
    return addressText(Nanos(0));
  }
  FlightRecorder& recorder() {
    return recorder_;
  }
  Resolver& resolver() {
    return *resolver_;
  }
  // Runs `call` on the loop thread and waits for it. False (and not run) if the
  // loop has ended. Not from the loop thread. `call` may refer to the caller's
  // stack. A call that was posted before the loop ended is not lost: the loop
  // runs it before it ends.
  bool callInLoop(const std::function<void()>& call);
  // A group's secret becomes valid for callers. It stays valid until the engine
  // ends, also after its group: a link keeps the secret of the first group that
  // knew the peer.
  void addSecret(const std::string& secret);
  std::optional<std::string> secretOf(const KeyId& id) override; // any thread
  // The keys for TLS by the name of one of these secrets, once for each name;
  // any thread.
  std::optional<NamedKeys> keysOf(std::span<const uint8_t> name);
  // Those of the options, the present one first; empty if the store has the
  // secret. Any thread.
  const std::vector<std::string>& ownSecrets() const {
    return ownSecrets_;
  }
  Encryption encryption() const override {
    return encryption_;
  }
  const TlsCertificates* certificates() override;
  HandshakeCounters& handshakes() override {
    return handshakes_;
  }
  // Asks `condition` on the loop thread until it holds or `deadline` passes;
  // true if it holds. Calls `meanwhile`, which may throw, on this thread. Asks
  // at least once, also after the deadline. Between two looks it sleeps for 0.2
  // ms at first and 10 ms at last, so the end is noticed that much later. False
  // as well if the loop has ended.
  bool waitUntil(
      TimePoint deadline,
      const std::function<bool()>& condition,
      void (*meanwhile)() = nullptr);
  // Says goodbye to all peers and ends the threads. Idempotent; at most about
  // `linger`, and 1 s to end the threads. A second caller waits until the first
  // has finished. Groups that still exist stay usable as objects: their
  // operations end with kAborted.
  void stop(Nanos linger);
  // The process has forked: this is the child, which must not use the engine.
  static bool inForkedChild();
  void closeDescriptorsInChild();
  // Notices for a group that does not exist here yet.
  struct EarlyNotice {
    Uid sender;
    Notice notice;
  };
  // Loop thread. In the order of arrival; a notice is handed out once.
  std::vector<EarlyNotice> takeEarlyNotices(uint64_t group);

  // --- loop thread
  Mailbox& mailbox() override {
    return mailbox_;
  }
  CompletionQueue& completions() override {
    return completions_;
  }
  StagingMemory& staging() override {
    return staging_;
  }
  FaultPlan& faults() override {
    return faults_;
  }
  int32_t globalRank() const override {
    return globalRank_;
  }
  // Made if need be, for a process that a group has found in its store: there
  // are no links with others, see UnknownCallers. The reference is good until
  // the engine stops. A link that is dead or has been left stays in the table:
  // its uid never comes back, and callers with that uid are refused.
  PeerLink& link(const Uid& uid);
  // The link's address is known: who called from it before may come in. The
  // link must have its address and its routes: the connections are installed in
  // this call.
  void letIn(PeerLink& link) override;
  // A group has learned who its members are: callers among them may come in.
  void membersKnown();
  // A peer's addresses are others now.
  //
  // The addresses of members are gathered again when the listener asks next.
  void membersMoved() override {
    memberIps_.reset();
  }
  // Whether this process of the job can have that address now: it is not this
  // process, nor one that is known to be elsewhere.
  bool mayBeAt(const Uid& process, const SocketAddress& at) const override;
  PeerLink* linkTo(const Uid& uid) override {
    return knownLink(uid);
  }
  PeerLink* linkOf(const Channel& channel) override;
  std::vector<Uid> relaysTo(const Link& peer) const override;
  RelayCounters relayCounters() const {
    return relays_->counters();
  }
  PathId nextPathId() override {
    return ++lastPathId_;
  }
  ListenerCounters listenerCounters() const;
  TrustStats trustStats() const;
  // For connections to a host of that site, or to this one (null).
  SocketOptions socketOptions(const std::string* site) const override;
  // Without a word for it, a declared site has connections within.
  WanTransport wanTo(const std::string& site) const override {
    const bool within = site == self_.site && !site.empty();
    const auto found = wanSites_.beyond(self_.site, site);
    return found ? static_cast<WanTransport>(*found)
        : within ? WanTransport::kTcp
                 : WanTransport::kAuto;
  }
  VerbsApi* verbs() override;
  const std::vector<VerbsPort>& verbsPorts() override;
  VerbsLoans* loans() override {
    return loans_.get();
  }
  const VerbsChoice& verbsChoice() const override {
    return verbsChoice_;
  }
  RecoverySchemes recoveryTo(const std::string& site) const override {
    return recovery_.of(site);
  }
  // Options name sites that have not been compared with those of the ranks.
  bool namesSites() const;
  // Warns, once, of sites in options where none of these, of all ranks, is.
  void checkSites(const std::vector<std::string>& sites);
  int dscpOf(const std::string& site) const override {
    return static_cast<int>(dscps_.of(site).value_or(0));
  }
  const BufferLimits& bufferLimits() const override {
    return bufferLimits_;
  }
  // For connections to other hosts: empty for the system's.
  const std::string& congestionControl() const override {
    return congestionControl_;
  }
  // They may change to BBR by themselves.
  bool mayChangeCongestionControl() const override {
    return mayChangeCongestionControl_;
  }
  // The cap on what goes to that site, shared by all links to it; null: none.
  // A link that has not got its turn is pumped when it has.
  //
  // The pointer is good until the engine ends.
  Uplink* uplink(const std::string& site) override;
  // To be called when a user has joined the queue, has used its turn or has
  // given it up: sets the timer for the next one, unless it is set.
  void waitForTurn(const std::string& site) override;
  // By traffic class: the interface it keeps to, or empty.
  const std::array<std::string, kTrafficClassCount>& nicClasses()
      const override {
    return nicClasses_;
  }
  TimePoint startedAt() const {
    return startedAt_;
  }
  // The meeting point of peers on this host; null if there is none.
  SharedRendezvous* sharedRendezvous() override;
  // It cannot be shared with a peer; says so once.
  void noSharedMemory(const std::string& why) override;
  // Borrowed until unregisterGroup(), which must come before the group dies.
  void registerGroup(uint64_t id, GroupImpl* group);
  void unregisterGroup(uint64_t id);
  // Cheap, and without effect for a link that is marked already.
  void markDirty(PeerLink& link) override;
  void onControl(PeerLink& link, std::span<const std::byte> payload) override;
  void onLinkUp(PeerLink& link) override; // for the first time
  void onLinkCut(PeerLink& link) override;
  void onLinkClosed(PeerLink& link, const Status& why) override;
  void eachLink(const std::function<void(PeerLink&)>& call);
  // Destroyed at the next turn: objects whose code is on the stack. No event
  // may reach the object any more: only its memory waits.
  void destroyLater(std::shared_ptr<void> object) override;
  void faultsChanged();
  // Writes the recent operations to standard error, or to a file of this
  // process in dump_dir. The loop stands still while the file is written.
  void writeDump(const std::string& reason);
  // An operation has failed: the first one makes a dump, if there is a folder.
  void onFirstFailure(const Status& status);

  // MailboxListener
  RecvOp* onRelayed(const FrameHeader& header, Channel& channel) override {
    return relays_->receive(header, channel);
  }
  void onCollectiveMismatch(
      uint64_t group,
      uint64_t sequence,
      const OpSignature& local,
      const FrameHeader& remote,
      Channel& channel) override;

 private:
  Engine(
      EngineOptions options,
      std::vector<std::string> ownSecrets,
      const std::string& storeHost,
      int32_t globalRank);
  static std::shared_ptr<Engine>
  make(EngineOptions options, const std::string& storeHost, int32_t globalRank);
  void startThread();
  void chooseEncryption();
  void readCertificates();
  void chooseDatagrams();
  void checkVerbs();
  void useVerbs(VerbsApi& api);
  void onVerbs(
      VerbsApi& api,
      const std::string& name,
      const VerbsDevice& device,
      const VerbsEvent& event);
  void onNotice(PeerLink& link, const Notice& notice);
  void chooseCongestionControl();
  void startListening(const std::string& storeHost);
  void onAddresses();
  void scheduleTurn();
  void tellMismatches();
  void turn();
  HelloCode decide(const HelloInfo& hello, const CertifiedFor& certifiedFor);
  void onCaller(const HelloInfo& hello, StreamSocket socket);
  void seek(const HelloInfo& unknown);
  bool isMembers(const SocketAddress& address);
  // With a member of a group, or null.
  //
  // A member whose address is known and that nothing has needed yet gets its
  // link in this call.
  PeerLink* knownLink(const Uid& uid);

  const EngineOptions options_;
  const std::vector<std::string> ownSecrets_;
  Encryption encryption_ = Encryption::kOff; // constant after construction
  std::unique_ptr<TlsCertificates> certificates_; // null: not given
  HandshakeCounters handshakes_; // outlives the listener and the links
  const int32_t globalRank_;
  PeerAddress self_;
  EventLoop loop_;
  FlightRecorder recorder_;
  CompletionQueue completions_;
  struct Mismatch {
    uint64_t group = 0;
    uint64_t sequence = 0;
    OpSignature local;
    FrameHeader remote;
  };
  std::vector<Mismatch> mismatches_; // not told to their groups yet
  StagingMemory staging_;
  Mailbox mailbox_;
  FaultPlan faults_;
  TimePoint startedAt_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<LinkWatch> linkWatch_;
  TimerId lookAgainTimer_ = 0; // what our addresses are
  std::unique_ptr<SharedRendezvous> sharedRendezvous_;
  bool noRendezvous_ = false; // it cannot be made
  bool saidNoSharedMemory_ = false;
  BufferLimits bufferLimits_;
  SiteNumbers rateLimits_, dscps_, wanSites_;
  const VerbsChoice verbsChoice_;
  bool lookedForVerbs_ = false;
  VerbsApi* verbs_ = nullptr; // once this process has a device
  std::unique_ptr<VerbsLoans> loans_; // with verbs_, if memory may be lent
  std::vector<VerbsPort> verbsPorts_;
  TimePoint verbsPortsAt_{}; // the time of that list
  std::unique_ptr<VerbsWatch> verbsWatch_;
  bool checkedSites_ = false;
  RecoveryTable recovery_;
  std::string congestionControl_;
  bool mayChangeCongestionControl_ = false;
  struct SharedUplink {
    SharedUplink(std::optional<double> declared, uint64_t starvationBytes)
        : uplink(declared, starvationBytes) {}
    Uplink uplink;
    TimerId timer = 0;
  };
  std::map<std::string, SharedUplink> uplinks_; // by site
  std::array<std::string, kTrafficClassCount> nicClasses_;
  std::unique_ptr<SignalDump> signalDump_;
  bool failureDumped_ = false;
  // Grows only: by one link for each process that a group has found in its
  // store.
  std::map<Uid, std::unique_ptr<PeerLink>> links_;
  std::vector<PeerLink*> byChannel_; // by the id of the channel, less 1
  std::unique_ptr<RelayService> relays_;
  std::unique_ptr<UnknownCallers> unknown_;
  std::optional<std::set<std::string>> memberIps_; // none: to be gathered
  // By number. Not owned; a group removes itself in shutdown().
  std::map<uint64_t, GroupImpl*> groups_;
  static constexpr size_t kEarlyNoticesMax = 256;
  std::deque<EarlyNotice> earlyNotices_; // oldest first
  // Links that turn() has to pump, each once (PeerLink::dirty), and objects
  // that it destroys when nothing else is on the stack.
  std::vector<PeerLink*> dirty_;
  std::vector<std::shared_ptr<void>> graveyard_;
  // turn() works on these, and leaves them empty: it keeps their memory.
  std::vector<PeerLink*> pumping_;
  std::vector<std::shared_ptr<void>> dying_;
  bool turnScheduled_ = false;
  PathId lastPathId_ = 0;
  uint32_t lastChannelId_ = 0;

  mutable std::mutex addressesMutex_; // of self_.addresses, to write or from
                                      // another thread
  struct Secret {
    KeyId id;
    std::string text;
    TlsKeys keys; // used only with encryption
  };
  std::mutex secretsMutex_;
  // Each distinct secret once: those of the options, then of the groups, in the
  // order of joining.
  std::vector<Secret> secrets_; // by secretsMutex_
  UsedNames usedNames_; // likewise

  std::unique_ptr<Resolver> resolver_;
  std::mutex stopMutex_;
  bool stopped_ = false; // by stopMutex_
  std::atomic<bool> ended_{false};
  int groupsOpen_ = 0; // by the process's mutex
  std::thread thread_;
};

} // namespace resilient
