#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "base/time.h"
#include "path/link_statistics.h"

namespace resilient {

// The connections of one route together, as they are now.
struct StreamView {
  double roundTripS = 0; // the least; 0: unknown
  double firstBytes = 0; // what may leave in the first round trip
  bool paced = false; // these leave evenly over it, not at once
  double lossRate = 0; // of segments; those lost in a row count as one
  double mostBytesPerS = INFINITY; // if losses keep them from filling the link
};

// The datagram path of the route.
struct DatagramView {
  double roundTripS = 0;
  double bytesPerS = INFINITY; // that it may send; infinite: not found yet
  double overhead = 1.06; // bytes on the link for a byte of a message
};

// When the last byte of a burst would arrive, in seconds from now, if the route
// is idle. As in the slow start of TCP (RFC 5681), what may leave doubles with
// each round trip until the link is full. A lost segment comes a round trip and
// a half later, for it is noticed first; some of these are lost again.
inline double
streamArrivalS(const StreamView& s, double linkBytesPerS, double bytes) {
  constexpr double kSegmentBytes = 1448;
  constexpr double kRoundTripsPerLoss = 1.5;
  const double rate = std::min(linkBytesPerS, s.mostBytesPerS);
  double window = std::max(s.firstBytes, kSegmentBytes);
  double arrival = s.roundTripS / 2;
  double left = bytes;
  while (left > window && window < rate * s.roundTripS) {
    left -= window;
    window *= 2;
    arrival += s.roundTripS;
  }
  arrival += left / (s.paced ? std::min(rate, window / s.roundTripS) : rate);
  const double lost = s.lossRate * (bytes / kSegmentBytes + 1);
  const double anyLost = 1 - std::exp(-lost);
  const double lostAgain = 1 - std::exp(-lost * s.lossRate);
  return arrival + kRoundTripsPerLoss * s.roundTripS * (anyLost + lostAgain);
}

// Parity makes losses cost bytes only, and nothing begins slowly.
inline double
datagramArrivalS(const DatagramView& d, double linkBytesPerS, double bytes) {
  constexpr double kLaterS = 0.002; // until the last block is whole
  return d.roundTripS / 2 + kLaterS +
      bytes * d.overhead / std::min(linkBytesPerS, d.bytesPerS);
}

// When the far end's answer to the last byte is back.
inline double
streamAnswerS(const StreamView& s, double linkBytesPerS, double bytes) {
  return streamArrivalS(s, linkBytesPerS, bytes) + s.roundTripS / 2;
}
inline double
datagramAnswerS(const DatagramView& d, double linkBytesPerS, double bytes) {
  return datagramArrivalS(d, linkBytesPerS, bytes) + d.roundTripS / 2;
}

// Smaller bursts are as fast over either kind.
constexpr uint64_t kLeastBurstBytes = 16u << 10;

// Up to this size, a burst of messages arrives earlier as datagrams than over
// the connections of the same route, by more than the processor time that
// datagrams cost beyond. 0: none does; UINT64_MAX: all do. `linkBytesPerS`: of
// the link that both share; infinite: not known.
//
// A message goes over one kind or the other: over both at once it would arrive
// no sooner.
inline uint64_t datagramsUpTo(
    const StreamView& s,
    const DatagramView& d,
    double linkBytesPerS) {
  // Measured (benchmarks/wan_cost.py): 4.4 against 1.6 seconds for 1e9 bytes,
  // at both ends together. A third of the difference counts: the rest of the
  // process has other threads.
  constexpr double kProcessorSPerByte = 1e-9;
  constexpr uint64_t kMost = 256u << 20;
  if (s.roundTripS <= 0) {
    return 0;
  }
  uint64_t best = 0;
  for (uint64_t bytes = kLeastBurstBytes; bytes <= kMost; bytes *= 2) {
    const auto b = static_cast<double>(bytes);
    if (datagramArrivalS(d, linkBytesPerS, b) + kProcessorSPerByte * b <
        streamArrivalS(s, linkBytesPerS, b)) {
      best = bytes;
    }
  }
  return best == kMost ? UINT64_MAX : best;
}

// How many times as long as predicted bursts take: the lesser of the last two,
// since a pause of a process says nothing.
class Lateness {
 public:
  void observe(double tookS, double predictedS) {
    before_ = last_;
    last_ = tookS / predictedS;
  }
  bool known() const {
    return before_ > 0;
  }
  double factor() const { // 1 while unknown
    return known() ? std::min(before_, last_) : 1;
  }

 private:
  double before_ = 0, last_ = 0; // 0: none
};

// The share of packets that were lost lately although no queue was full, from
// totals.
class RecentLoss {
 public:
  // `queueing`: the round trip has grown, so losses show a full link.
  void observe(uint64_t packets, uint64_t lost, bool queueing) {
    const bool fewer = packets < packets_ || lost < lost_; // of other paths
    if (!fewer && !queueing) {
      const auto more = static_cast<double>(packets - packets_);
      const double kept = std::exp(-more / kMemory);
      seen_ = seen_ * kept + more;
      seenLost_ = seenLost_ * kept + static_cast<double>(lost - lost_);
    }
    packets_ = packets;
    lost_ = lost;
  }
  // Begins anew; the totals go on.
  void forget() {
    seen_ = seenLost_ = 0;
  }
  // Of the packets that count, less with time.
  double lost() const {
    return seenLost_;
  }
  // 0 while unknown. A single loss is chance, or a probe of the packet size.
  double rate() const {
    return seen_ < kEnough ? 0 : std::clamp((seenLost_ - 1) / seen_, 0.0, 1.0);
  }

 private:
  static constexpr double kEnough = 300;
  // Packets. A burst of them has too few to tell a loss of 0.1 % from none, or
  // 1 % from 5 %.
  static constexpr double kMemory = 16384;

  uint64_t packets_ = 0, lost_ = 0;
  double seen_ = 0, seenLost_ = 0; // a packet counts less with time
};

// Whether the packets of one kind, datagrams or those of connections, are lost
// as often as those of the other kind on the same route. If they are not, the
// link is not to blame: a provider polices UDP or treats it worse, or
// connections were too fast for a queue.
class LossComparison {
 public:
  enum class Verdict { kUnknown, kShared, kOneAlone };

  // `rate`, `burstPackets`: of the one kind. `packets`, `lost`: of the other,
  // totals. Losses in a row count as few.
  void
  observe(double rate, double burstPackets, uint64_t packets, uint64_t lost) {
    // The verdict comes after so many expected losses, and so many bursts of
    // them: an eighth or less then occurs on few lossy links
    // (loss_comparison_tells_policed_datagrams_from_a_lossy_link).
    constexpr double kEnough = 12, kEnoughBursts = 4, kBurstMost = 20;
    if (packets >= packets_ && lost >= lost_) { // else of other paths
      expected_ += rate * static_cast<double>(packets - packets_);
      found_ += static_cast<double>(lost - lost_);
    }
    packets_ = packets;
    lost_ = lost;
    if (expected_ >=
        kEnough + kEnoughBursts * std::clamp(burstPackets, 0.0, kBurstMost)) {
      verdict_ = found_ * 8 < expected_ ? Verdict::kOneAlone : Verdict::kShared;
      expected_ = found_ = 0;
    }
  }
  void forget() {
    verdict_ = Verdict::kUnknown;
    expected_ = found_ = 0;
  }
  Verdict verdict() const {
    return verdict_;
  }

 private:
  uint64_t packets_ = 0, lost_ = 0;
  double expected_ = 0, found_ = 0; // losses of the other since the verdict
  Verdict verdict_ = Verdict::kUnknown;
};

// The state of a route at one moment.
struct RouteEvidence {
  // The connections together. The losses of the view are not set.
  StreamView stream;
  uint64_t segments = 0, segmentsLost = 0; // totals
  bool streamQueueing = false; // their round trip has grown
  bool streamIdle = true; // nothing is in flight
  LinkStatistics::Burst streamBurst; // the last
  double streamBytesPerS = 0; // that they have shown to carry

  // The datagram path.
  DatagramView datagrams;
  double datagramBytesPerS = 0; // that it has shown to carry; 0: not known
  // Totals, of times without a queue; packets lost in a row are one burst.
  uint64_t packets = 0, packetsLost = 0, lossBursts = 0;
  double lossBurstPackets = 1; // lost in a row
  bool datagramsIdle = true;
  LinkStatistics::Burst datagramBurst;

  // A limit that is ours, for which bursts also wait: bytes per second, and how
  // much of it has been used lately, 0 to 1.
  double limitBytesPerS = INFINITY;
  double limitUse = 0;
};

// Which bursts go as datagrams on one route, and which over its connections.
//
// How it works. Models of both kinds say which brings a burst there first, by
// what is measured (datagramsUpTo). Two things are in no model, as a provider
// may police UDP or treat it worse: datagrams have losses that connections do
// not have (LossComparison), or arrive later than their rate and their losses
// explain (Lateness). Then the connections carry everything for a time that
// doubles, and datagrams are tried anew. The other way round, losses that only
// connections have are forgotten. Nor do the models see that connections begin
// faster if they are used: where a limit is busy and nothing is lost, they
// carry everything, with fewer bytes.
class TransportChoice {
 public:
  struct Choice {
    uint64_t upTo = 0; // bytes of a burst
    std::string news; // for people: "messages up to ..."; empty: none
  };
  Choice choose(const RouteEvidence& e, TimePoint now);

 private:
  struct View {
    StreamView stream;
    DatagramView datagrams;
    double linkBytesPerS = INFINITY;
  };

  View view(const RouteEvidence& e) const;
  double datagramLossRate() const;
  void observeBursts(const RouteEvidence& e);
  bool isLate() const;
  bool avoids(std::string& news, TimePoint now);
  void
  avoid(bool late, const std::string& why, std::string& news, TimePoint now);

  RecentLoss streamLoss_, datagramLoss_, datagramBurstsLost_;
  LossComparison datagramLosses_, streamLosses_; // of the one named
  // The forecast when the route was idle last, and how much later than that its
  // bursts came.
  std::optional<View> idleView_;
  Lateness streamLateness_, datagramLateness_;
  uint64_t streamBursts_ = 0, datagramBursts_ = 0; // the last that were seen
  double datagramBytes_ = 0; // of the last that counted
  uint64_t upTo_ = 0; // the last choice
  bool limitIsBusy_ = false;
  bool streamsTried_ = false; // connections have carried such bursts
  // Since when the connections carry all.
  TimePoint avoidedSince_{};
  Nanos avoidedFor_{0};
  bool avoidedAsLate_ = false;
  bool said_ = false;
};

} // namespace resilient
