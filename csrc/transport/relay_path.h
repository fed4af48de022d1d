#pragma once

#include <deque>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "channel/operation.h"
#include "path/number_set.h"
#include "path/relay_window.h"
#include "transport/event_loop.h"
#include "transport/path.h"
#include "transport/relay_seal.h"
#include "wire/control.h"
#include "wire/relay.h"

namespace resilient {

struct RelayPathConfig {
  RelayFlow flow;
  bool opener = true; // this end has opened the flow
  // That the far end has not told of: the relay keeps its copy as long.
  uint64_t maxUnderWayBytes = 32u << 20;
  // The least silence that is suspicious; the round trip adds to it.
  Nanos suspectAfter = std::chrono::milliseconds(50);
  std::string relay; // "rank 1 (host node7, ...)", for messages
  int relayRank = -1; // in the default group
  int ownRank = -1; // the same
  std::string relayHost;
};

// Another rank as a way to a peer. A frame becomes a message of the channel to
// that rank, which passes it on (delegate/relay_service.h). So it takes every
// path of that channel and of the relay's own, with their failover, classes and
// caps, and no connection is made for it.
//
// Frames arrive in any order. Each end numbers its reliable frames, and the far
// end tells up to which one they have arrived; that says nothing about the
// relay but that it works. So whatever becomes of the relay, the channel knows
// what to send again.
//
// The relay tells what it has passed on. Little waits there (RelayWindow), and
// so chunks leave by the NIC whose turn it is.
//
// It judges its own health: it is silent if frames are under way and no answer
// comes. Whether an idle one works is not known.
//
// Thread: loop thread. Lifetime: owned by its PeerLink. The channel to the
// relay outlives it.
class RelayPath final : public Path {
 public:
  // The far end of an open flow is ready; the opener waits for its answer. With
  // a seal, both wait for the other one's key; the end that answers has it.
  RelayPath(
      EventLoop& loop,
      Channel& channel,
      PathId id,
      Channel& toRelay,
      RelayPathConfig config,
      PathOwner& owner,
      std::unique_ptr<RelaySeal> seal = nullptr);
  ~RelayPath() override;

  const RelayFlow& flow() const {
    return config_.flow;
  }
  bool opener() const {
    return config_.opener;
  }
  const std::string& relay() const {
    return config_.relay;
  }
  bool sealed() const {
    return seal_ != nullptr;
  }
  // The far end has answered.
  bool proven() const {
    return proven_;
  }
  bool silent() const {
    return silent_;
  }
  // The relay needs its uplink itself: the path should only be used if there is
  // no other.
  bool busy() const {
    return busy_;
  }

  // What has come over the relay for this end of the flow.
  void onNote(const RelayNote& note);
  void onFrame(const RelayHeader& header, std::span<const std::byte> frame);

  // Path
  bool usable() const override {
    return !closed_ && proven_ && !silent_;
  }
  bool hasRoom() const override {
    return usable() && underWayBytes_ < config_.maxUnderWayBytes &&
        atRelayBytes_ < window_.bytes();
  }
  size_t takeFrame(bool chunks = true) override;
  bool flush() override;
  void close(const Status& why) override;
  TimePoint heardAt() const override {
    return heardAt_;
  }
  // Rules are about the way between the two ends, and this is another one.
  void faultsChanged(bool) override {}
  void fill(PathStats& stats) const override;

 private:
  // A frame as a message to the relay.
  struct Part : SendOp {
    explicit Part(RelayPath& p) : path(p) {}
    void finished(const Status& status) override;

    RelayPath& path;
    std::list<Part>::iterator self;
    std::unique_ptr<std::byte[]> content;
  };
  // A reliable frame that the far end has not told of.
  struct UnderWay {
    uint64_t bytes = 0;
    TimePoint at{};
  };
  // A message that the relay has not passed on yet, as far as it has told.
  struct AtRelay {
    uint64_t bytes = 0;
    TimePoint at{};
    bool full = false; // it has filled the window
  };

  void say(RelayNote::What what, const std::string& text = "");
  Status agree(const RelayNote& note);
  void onHeard();
  void onDelivered(uint64_t count);
  void onPassed(uint64_t bytes);
  void onBusy(bool busy);
  Status receive(const RelayHeader& header, std::span<const std::byte> frame);
  void owe(uint64_t bytes, bool now);
  void acknowledge();
  Nanos silenceLimit() const;
  void look();
  void arm();

  EventLoop& loop_;
  Channel& toRelay_;
  const RelayPathConfig config_;
  const std::unique_ptr<RelaySeal> seal_; // null: plaintext for the relay
  std::vector<std::byte> plain_; // the frame that is being sealed
  bool proven_;
  bool silent_ = false;
  bool busy_ = false;
  TimerId busyTimer_ = 0;
  Nanos busyFor_; // the next time
  int patience_ = 1; // grows with false alarms
  const TimePoint startedAt_;
  TimePoint heardAt_;
  TimePoint progressAt_; // the last answer to a frame
  TimerId timer_ = 0;
  TimePoint timerAt_ = kNever;

  // sending
  std::list<Part> parts_; // that the relay does not have yet
  std::deque<UnderWay> underWay_;
  uint64_t underWayBytes_ = 0;
  uint64_t lastNumber_ = 0, delivered_ = 0;
  std::deque<AtRelay> atRelay_;
  uint64_t atRelayBytes_ = 0;
  uint64_t givenBytes_ = 0; // to the relay, of all messages
  RelayWindow window_; // of atRelayBytes_
  Nanos roundTrip_{}; // smoothed; 0: unknown

  // receiving
  NumberSet received_;
  uint64_t arrived_ = 0; // without a gap
  uint64_t told_ = 0; // of these, to the far end
  uint64_t untoldBytes_ = 0;
  bool tellNow_ = false;
  TimerId tellTimer_ = 0;
};

} // namespace resilient
