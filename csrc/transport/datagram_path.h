#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "channel/channel.h"
#include "datagram/packet_receiver.h"
#include "datagram/packet_sender.h"
#include "transport/datagram_socket.h"
#include "transport/event_loop.h"
#include "transport/packet_seal.h"
#include "transport/route_path.h"

namespace resilient {

// The agreement of the two ends, from the exchange of offers in
// delegate/connect_datagram.cpp.
struct DatagramPathConfig {
  size_t route = 0; // on which it is, for the owner
  std::unique_ptr<PacketSealer> ours;
  std::unique_ptr<PacketOpener> theirs;
  bool forwardSecret = false; // the keys are not those of the job's secret
  RecoverySchemes schemes;
  // As measured on the connections of the same route; 0: unknown.
  double knownBytesPerS = 0;
  double maxBytesPerS = 0; // 0: no limit
  // The path is closed if no probe has come back after this time. The end that
  // answers an offer adds the time that its answer may take.
  Nanos proveWithin = std::chrono::seconds(3);
  // After so long without a datagram of the peer, one is asked for. Firewalls
  // and NATs forget a flow after 30 s at the earliest.
  Nanos keepAlive = std::chrono::seconds(15);
};

// Datagrams between two NICs as a path of a channel. A frame becomes an object
// of packets (see datagram/packet_sender.h); what is lost comes back by parity,
// or is sent again, or stays away where the message tolerates it. Frames arrive
// in any order.
//
// First it must show that it works: a probe has to come back, larger ones find
// out how large packets may be. A path that falls silent is not usable until
// it is heard again; if that takes long, it is closed. An idle path is probed,
// so that it stays known to firewalls, or is found silent before a message is.
//
// Thread: loop thread. Lifetime: owned by its PeerLink.
//
// The constructor expects a connected socket and both seals. It registers the
// path with the channel without any traffic class: the owner assigns roles once
// onPathUse() says that the path is proven.
//
// Errors are kept in failure_ and acted on in service(). Packets are decoded
// from within DatagramSocket::receive() and PacketReceiver: if the path closed
// there, the rest of the packets would act on a closed path.
class DatagramPath final : public RoutePath, public Handler {
 public:
  DatagramPath(
      EventLoop& loop,
      Channel& channel,
      PathId id,
      DatagramSocket socket,
      DatagramPathConfig config,
      PathOwner& owner);
  ~DatagramPath() override;

  // RoutePath
  size_t route() const override {
    return config_.route;
  }
  // A probe has come back, so it can carry frames.
  bool proven() const override {
    return sender_ != nullptr;
  }
  bool silent() const override {
    return silent_;
  }
  std::string where() const override {
    return localAddress() + " -> " + remoteAddress();
  }

  // Path
  // Proven, not silent, and no fault rule concerns the peer.
  bool usable() const override {
    return !closed_ && proven() && !silent_ && !avoided_;
  }
  bool hasRoom() const override;
  // Copies the payload: nothing of the frame is borrowed after the call.
  size_t takeFrame(bool chunks = true) override;
  bool flush() override;
  void close(const Status& why) override;
  TimePoint heardAt() const override {
    return heardAt_;
  }
  PathEvidence evidence() const override;
  void faultsChanged(bool concerned) override;
  // All that has left beyond the frames taken: parity, headers, repeats.
  uint64_t takeUnpaid() override;
  // Adds to stats.datagrams what this path has counted.
  void fill(PathStats& stats) const override;

  // The payload of one packet, by the largest probe that was answered; 0 before
  // the path is proven.
  size_t pieceBytes() const {
    return pieceBytes_;
  }
  const PacketSender* sender() const { // null before it is proven
    return sender_.get();
  }
  // Asks the far end for an answer.
  void ask();
  // It is silent until it answers, says its owner, who has seen that other ways
  // do. Asks for that answer. The owner may be called from within.
  void doubt();
  // These five need a path that is proven. `bytesPerS`: as other paths have
  // measured the link.
  void expectRate(double bytesPerS) {
    sender_->rate().expect(bytesPerS);
  }
  bool rateIsKnown() const {
    return sender_->rate().known();
  }
  double burstBytesPerS() const { // at which it would send one
    return sender_->rate().burstBytesPerS();
  }
  double capacityBytesPerS() const {
    return sender_->rate().capacityBytesPerS();
  }
  Nanos minRoundTrip() const {
    return sender_->rate().minRoundTrip();
  }
  // When the latest answer came to anything that was sent.
  TimePoint answeredAt() const {
    return answeredAt_;
  }
  const PacketReceiver& receiver() const {
    return receiver_;
  }
  uint64_t forged() const { // datagrams that nobody had sealed
    return forged_;
  }
  std::string localAddress() const;
  std::string remoteAddress() const;

  void onEvents(uint32_t events) override;

 private:
  // A frame that the sender holds as an object. The channel counts reliable
  // frames in the order of taking, while objects end in any order. A frame that
  // is done therefore waits until all frames before it are done.
  struct Frame {
    uint64_t object = 0;
    bool reliable = false;
    bool done = false;
  };
  struct Probe {
    size_t datagramBytes = 0;
    int tries = 0;
    bool answered = false;
  };

  void onDatagram(std::span<const std::byte> datagram, TimePoint now);
  Status
  onPacket(std::span<const std::byte> packet, uint64_t number, TimePoint now);
  void onProbe(const PacketProbe& probe, TimePoint now);
  // The first probe has come back. Only now the sender exists, since its rate
  // control begins with a measured round trip.
  void onProven(Nanos roundTrip);
  void onDone(uint64_t object);
  void onObject(std::span<const std::byte> object, std::span<const Hole> holes);
  void sendProbe(size_t datagramBytes, TimePoint now);
  void sendProbes(TimePoint now);
  TimePoint nextAsk() const;
  void keepAlive(TimePoint now);
  void sendAsk(TimePoint now);
  void onAnswer(TimePoint sent);
  void seal(
      std::span<const std::byte> packet,
      std::span<const std::byte> piece = {});
  bool flushBatch();
  void sendDue();
  void service();
  Nanos silenceLimit() const;
  void checkSilence(TimePoint now);
  void armTimer();
  void end();

  EventLoop& loop_;
  DatagramSocket socket_;
  const DatagramPathConfig config_;
  bool avoided_ = false;
  // takeFrame() reports the bytes of a frame when it is taken, long before its
  // packets leave. These two keep takeUnpaid() from reporting them again.
  uint64_t taken_ = 0; // bytes of frames, less what has left of them
  uint64_t counted_ = 0; // of what has left, at the last takeUnpaid()
  bool silent_ = false;
  bool doubted_ = false; // silent, says the owner
  TimePoint startedAt_, heardAt_;
  TimePoint answeredAt_{};
  TimePoint arrivedAt_{}; // of the latest datagram, as the kernel saw it
  Status failure_; // of the channel, about what has arrived

  std::unique_ptr<PacketSender> sender_;
  PacketReceiver receiver_;
  size_t pieceBytes_ = 0;
  uint64_t lastPacket_ = 0;
  std::deque<Frame> frames_; // handed to the sender, in order
  uint64_t framesDone_ = 0; // reliable ones, in order

  std::vector<Probe> probes_;
  TimePoint probeAt_ = kNever;
  // The first and the last probe of an idle path that are not answered.
  TimePoint askedSince_ = kNever, askedAt_{};

  std::vector<std::byte> opened_;
  // Sealed datagrams of one size, but for the last; those before batchSent_
  // are gone.
  std::vector<std::byte> batch_;
  size_t batchEach_ = 0, batchCount_ = 0, batchSent_ = 0;
  bool batchOpen_ = true; // another of its size may follow
  // While it is set, seal() discards packets and no frame is taken.
  bool full_ = false; // the socket; EPOLLOUT will come
  TimerId timer_ = 0;
  TimePoint timerAt_ = kNever;
  uint64_t forged_ = 0;
};

} // namespace resilient
