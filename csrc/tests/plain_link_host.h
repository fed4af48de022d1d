#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "channel/mailbox.h"
#include "delegate/link_host.h"

namespace resilient::test {

// The parts of a process that links need, without a network: no sockets, no
// shared memory, no RDMA, no limits. Tests add the links, and what becomes of
// them.
class PlainLinkHost : public LinkHost, public MailboxListener {
 public:
  EventLoop& loop() override {
    return loop_;
  }
  const EngineOptions& options() const override {
    return options_;
  }
  const PeerAddress& self() const override {
    return self_;
  }
  std::string addressText() const override {
    return "";
  }
  int32_t globalRank() const override {
    return 0;
  }
  Encryption encryption() const override {
    return Encryption::kOff;
  }
  const TlsCertificates* certificates() override {
    return nullptr;
  }
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
  SocketOptions socketOptions(const std::string*) const override {
    return {};
  }
  int dscpOf(const std::string&) const override {
    return 0;
  }
  WanTransport wanTo(const std::string&) const override {
    return WanTransport::kTcp;
  }
  RecoverySchemes recoveryTo(const std::string&) const override {
    return {};
  }
  VerbsApi* verbs() override {
    return nullptr;
  }
  const std::vector<VerbsPort>& verbsPorts() override {
    return ports_;
  }
  VerbsLoans* loans() override {
    return nullptr;
  }
  HandshakeCounters& handshakes() override {
    return handshakes_;
  }
  const VerbsChoice& verbsChoice() const override {
    return verbsChoice_;
  }
  Uplink* uplink(const std::string&) override {
    return nullptr;
  }
  void waitForTurn(const std::string&) override {}
  const BufferLimits& bufferLimits() const override {
    return limits_;
  }
  const std::string& congestionControl() const override {
    return none_;
  }
  bool mayChangeCongestionControl() const override {
    return false;
  }
  const std::array<std::string, kTrafficClassCount>& nicClasses()
      const override {
    return nicClasses_;
  }
  std::optional<std::string> secretOf(const KeyId&) override {
    return std::nullopt;
  }
  bool mayBeAt(const Uid&, const SocketAddress&) const override {
    return true;
  }
  void membersMoved() override {}
  void letIn(PeerLink&) override {}
  void onLinkUp(PeerLink&) override {}
  void onLinkCut(PeerLink&) override {}
  void onLinkClosed(PeerLink&, const Status&) override {}
  void onControl(PeerLink&, std::span<const std::byte>) override {}
  std::vector<Uid> relaysTo(const Link&) const override {
    return {};
  }
  PathId nextPathId() override {
    return ++lastPath_;
  }
  void markDirty(PeerLink&) override {}
  void destroyLater(std::shared_ptr<void> object) override {
    graveyard_.push_back(std::move(object));
  }
  SharedRendezvous* sharedRendezvous() override {
    return nullptr;
  }
  void noSharedMemory(const std::string&) override {}

  // MailboxListener
  void onCollectiveMismatch(
      uint64_t,
      uint64_t,
      const OpSignature&,
      const FrameHeader&,
      Channel&) override {}

  EngineOptions options_;

 protected:
  EventLoop loop_;
  PeerAddress self_;
  CompletionQueue completions_;
  StagingMemory staging_;
  Mailbox mailbox_{completions_, *this};
  std::vector<std::shared_ptr<void>> graveyard_;
  PathId lastPath_ = 1000;

 private:
  FaultPlan faults_;
  std::vector<VerbsPort> ports_;
  HandshakeCounters handshakes_;
  VerbsChoice verbsChoice_{EngineOptions()};
  BufferLimits limits_;
  std::string none_;
  std::array<std::string, kTrafficClassCount> nicClasses_;
};

} // namespace resilient::test
