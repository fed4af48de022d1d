#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "base/random.h"
#include "datagram/packet_receiver.h"
#include "datagram/packet_sender.h"
#include "tests/check.h"

// Two ends of a datagram path and the network between them, in virtual time.

namespace resilient::test {

// One direction of a link.
struct DatagramLink {
  double bytesPerS = 125e6;
  Nanos oneWay = std::chrono::milliseconds(20);
  uint64_t queueBytes = 8u << 20; // what does not fit is dropped
  size_t mtu = SIZE_MAX; // what is larger is dropped
  double loss = 0; // of packets
  double burst = 1; // mean length of a burst of lost ones (Gilbert-Elliott)
  double duplicate = 0;
  double reorder = 0; // of packets, later by up to reorderBy
  Nanos reorderBy = std::chrono::milliseconds(2);
  // Stands still now and then: the mean time between, and for up to how long.
  Nanos stallEvery{}, stallFor{};
  // Packets that arrive within each such time are handed over in a quarter of
  // it, afterwards, as by a host that shares its processor.
  Nanos clump{};
};

class DatagramPair {
 public:
  struct Delivery {
    std::vector<std::byte> bytes;
    std::vector<Hole> holes;
    TimePoint at;
  };

  DatagramPair(
      uint64_t seed,
      const RecoverySchemes& schemes,
      const DatagramLink& there,
      const DatagramLink& back,
      double knownBytesPerS = 0,
      size_t pieceBytes = 1376)
      : prng_(mixBits(seed)) {
    for (int side = 0; side < 2; ++side) {
      End& e = ends_[side];
      e.link = side == 0 ? there : back;
      e.sender = std::make_unique<PacketSender>(
          schemes,
          RateControl(there.oneWay + back.oneWay, knownBytesPerS, 0),
          [&e](uint64_t object) { e.done.push_back(object); });
      e.sender->setPieceBytes(pieceBytes);
      e.receiver = std::make_unique<PacketReceiver>(
          256u << 20,
          [&e, this](std::span<const std::byte> o, std::span<const Hole> h) {
            e.received.push_back(
                {{o.begin(), o.end()}, {h.begin(), h.end()}, now_});
            if (onDelivery) {
              onDelivery();
            }
          });
    }
  }

  uint64_t send(int side, const ObjectToSend& what) {
    const uint64_t number = ends_[side].sender->add(what, now_);
    service(side);
    return number;
  }
  PacketSender& sender(int side) {
    return *ends_[side].sender;
  }
  PacketReceiver& receiver(int side) {
    return *ends_[side].receiver;
  }
  std::vector<Delivery>& received(int side) {
    return ends_[side].received;
  }
  const std::vector<uint64_t>& done(int side) const {
    return ends_[side].done;
  }
  DatagramLink& link(int side) {
    return ends_[side].link;
  }
  TimePoint now() const {
    return now_;
  }
  const Status& error() const {
    return error_;
  }
  uint64_t wireBytes(int side) const {
    return ends_[side].wireBytes;
  }
  void at(TimePoint when, std::function<void()> what) {
    events_.push({when, ++eventNumber_, std::move(what)});
  }
  // Runs until `over`, at most for `most`; false if that was not enough.
  bool run(const std::function<bool()>& over, Nanos max) {
    const TimePoint end = now_ + max;
    while (!over()) {
      if (events_.empty() || events_.top().when > end || !error_.ok()) {
        now_ = events_.empty() ? now_ : std::min(end, events_.top().when);
        return false;
      }
      const Event e = events_.top();
      events_.pop();
      now_ = std::max(now_, e.when);
      e.what();
    }
    return true;
  }
  bool runUntilIdle(Nanos max) {
    return run(
        [this] { return ends_[0].sender->idle() && ends_[1].sender->idle(); },
        max);
  }

  std::function<void()> onDelivery;

 private:
  static constexpr TimePoint kBeginning{std::chrono::seconds(1000)};
  struct End {
    std::unique_ptr<PacketSender> sender;
    std::unique_ptr<PacketReceiver> receiver;
    DatagramLink link; // from here
    bool bad = false; // of the link: in a burst
    TimePoint linkFree{};
    TimePoint stallAt = kBeginning; // the next
    uint64_t lastPacket = 0;
    uint64_t wireBytes = 0;
    TimePoint wakeAt = kNever;
    std::vector<Delivery> received;
    std::vector<uint64_t> done;
  };
  struct Event {
    TimePoint when;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& o) const {
      return when != o.when ? when > o.when : number > o.number;
    }
  };

  bool lost(End& e) {
    if (e.link.loss <= 0) {
      return false;
    }
    // Two states: all is lost in the bad one.
    if (e.bad) {
      e.bad = !prng_.chance(1 / e.link.burst);
    } else {
      const double p = e.link.loss;
      e.bad = prng_.chance(p / (1 - p) / e.link.burst);
    }
    return e.bad;
  }

  void transmit(int side, std::vector<std::byte> packet, uint64_t number) {
    End& e = ends_[side];
    const double onWire = static_cast<double>(packet.size() + 60);
    e.wireBytes += packet.size() + 60;
    while (e.link.stallEvery > Nanos(0) && e.stallAt <= now_) {
      e.linkFree = std::max(e.linkFree, e.stallAt) +
          fromSeconds(prng_.uniform() * toSeconds(e.link.stallFor));
      e.stallAt += fromSeconds(
          -std::log(1 - prng_.uniform()) * toSeconds(e.link.stallEvery));
    }
    const Nanos queued = std::max(e.linkFree, now_) - now_;
    if (toSeconds(queued) * e.link.bytesPerS >
        static_cast<double>(e.link.queueBytes)) {
      return;
    }
    e.linkFree =
        std::max(e.linkFree, now_) + fromSeconds(onWire / e.link.bytesPerS);
    if (lost(e) || packet.size() + 60 > e.link.mtu) {
      return;
    }
    const int times = 1 + prng_.chance(e.link.duplicate);
    for (int i = 0; i < times; ++i) {
      Nanos later{};
      if (prng_.chance(e.link.reorder)) {
        later = fromSeconds(prng_.uniform() * toSeconds(e.link.reorderBy));
      }
      TimePoint arrival = e.linkFree + e.link.oneWay + later;
      if (e.link.clump > Nanos(0)) {
        const Nanos within = arrival.time_since_epoch() % e.link.clump;
        arrival += e.link.clump - within + within / 4;
      }
      at(arrival,
         [this, side, packet, number] { arrive(1 - side, packet, number); });
    }
  }

  void arrive(int side, const std::vector<std::byte>& packet, uint64_t number) {
    End& e = ends_[side];
    if (!e.receiver->onNumber(number, packet.size() + 60, now_)) {
      return;
    }
    PacketType type{};
    Status status = packetType(packet, type);
    if (status.ok() && type == PacketType::kReport) {
      PacketReport report;
      status = decodePacketReport(packet, report);
      if (status.ok()) {
        status = e.sender->onReport(report, now_);
      }
    } else if (status.ok()) {
      SymbolHeader header;
      std::span<const std::byte> symbol;
      status = decodeSymbol(packet, header, symbol);
      if (status.ok()) {
        status = e.receiver->onSymbol(header, symbol, number, now_);
      }
    }
    if (!status.ok() && error_.ok()) {
      error_ = status;
    }
    service(side);
  }

  void service(int side) {
    End& e = ends_[side];
    if (e.receiver->deadline() <= now_) {
      e.receiver->onTimer(now_);
    }
    if (e.receiver->reportDue(now_)) {
      const uint64_t number = ++e.lastPacket;
      e.sender->sentOther(number);
      transmit(
          side, encodePacketReport(e.receiver->takeReport(now_), 1200), number);
    }
    PacketToSend next;
    while (e.sender->next(now_, e.lastPacket + 1, next)) {
      std::vector<std::byte> packet(next.header.begin(), next.header.end());
      packet.insert(packet.end(), next.piece.begin(), next.piece.end());
      transmit(side, std::move(packet), ++e.lastPacket);
    }
    const TimePoint wake = std::min(e.sender->nextAt(), e.receiver->deadline());
    if (wake != kNever && (wake < e.wakeAt || e.wakeAt <= now_)) {
      e.wakeAt = std::max(wake, now_ + std::chrono::microseconds(10));
      at(e.wakeAt, [this, side] { service(side); });
    }
  }

  Prng prng_;
  TimePoint now_ = kBeginning;
  std::priority_queue<Event> events_;
  uint64_t eventNumber_ = 0;
  std::array<End, 2> ends_;
  Status error_;
};

} // namespace resilient::test
