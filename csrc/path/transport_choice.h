#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace resilient {

// The connections of one route together, as they are now.
struct StreamView {
  double roundTripS = 0; // the least; 0: unknown
  double firstBytes = 0; // what may leave in the first round trip
  bool paced = false; // these leave evenly over it, not at once
  double lossRate = 0; // of segments
  double mostBytesPerS = INFINITY; // if losses keep them from filling the link
};

// The datagram path of the route.
struct DatagramView {
  double roundTripS = 0;
  double bytesPerS = INFINITY; // that it may send; infinite: not found yet
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
  constexpr double kHeaders = 1.06;
  constexpr double kLaterS = 0.002; // until the last block is whole
  return d.roundTripS / 2 + kLaterS +
      bytes * kHeaders / std::min(linkBytesPerS, d.bytesPerS);
}

// Up to which size bursts go as datagrams, since they arrive earlier than over
// the connections of the same route, by more than the processor time that
// datagrams cost beyond. A message goes over one kind or the other: over both
// at once it would arrive no sooner.
//
// How it works. Bursts are judged by size, in powers of two. For each size and
// kind counts what the last bursts have taken, and the forecast before there
// were some. A kind that is expected to be faster is thus tried, and kept if it
// is. Its first bursts do not count: connections and rates get going with
// them. The kind that is not used is tried again now and then, if the forecast
// still speaks for it. The bound is that with the least loss over all sizes
// that occur.
class TransportChoice {
 public:
  // A burst has been acknowledged whole, `tookS` after its first message was
  // posted.
  void observe(uint64_t bytes, double tookS, bool datagrams) {
    Size& size = sizes_[indexOf(bytes)];
    const auto b = static_cast<double>(bytes);
    size.bytes += (b - size.bytes) / (size.bursts == 0 ? 1 : 8);
    Kind& used = datagrams ? size.datagrams : size.streams;
    if (++used.bursts == kTrials) {
      used.meanS = tookS;
    } else if (used.bursts > kTrials) {
      used.meanS += (std::min(tookS, kFarOff * used.meanS) - used.meanS) / 8;
    }
    if (++size.bursts % kTryAgainAfter == 0) {
      (datagrams ? size.streams : size.datagrams) = Kind();
    }
  }
  // 0: none does; UINT64_MAX: all do. `linkBytesPerS`: of the link that both
  // share; infinite: not known.
  uint64_t datagramsUpTo(
      const StreamView& s,
      const DatagramView& d,
      double linkBytesPerS) const {
    if (s.roundTripS <= 0) {
      return 0;
    }
    // The loss by datagrams up to each size, and by connections beyond.
    double loss = 0;
    for (size_t i = 0; i < kSizes; ++i) {
      loss += lossOf(i, s, d, linkBytesPerS).streams;
    }
    double least = loss;
    uint64_t best = 0;
    for (size_t i = 0; i < kSizes; ++i) {
      const Loss of = lossOf(i, s, d, linkBytesPerS);
      loss += of.datagrams - of.streams;
      if (loss < least - kRounding) {
        least = loss;
        best = i + 1 == kSizes ? UINT64_MAX : kLeastBytes << i;
      }
    }
    return best;
  }

 private:
  static constexpr uint64_t kLeastBytes = 16u << 10;
  static constexpr size_t kSizes = 15; // up to 256 MiB
  static constexpr uint64_t kTrials = 4;
  static constexpr uint64_t kTryAgainAfter = 1000;
  static constexpr double kFarOff = 4; // one burst does not decide
  static constexpr double kRounding = 1e-9;
  // A size that has not occurred decides only where nothing else does.
  static constexpr double kUnseen = 1e-3;
  // Measured: 3.9 against 0.85 seconds for 1e9 bytes, at both ends together. A
  // third of the difference counts: the rest of the process has other threads.
  static constexpr double kProcessorSPerByte = 1e-9;
  // BBR in its start-up sends so much in a round trip, for what it has
  // delivered in one: after some bursts of a size it knows.
  static constexpr double kBbrGain = 2.89;

  struct Kind {
    uint64_t bursts = 0;
    double meanS = 0; // of late, once kTrials have ended
  };
  struct Size {
    Kind streams, datagrams;
    uint64_t bursts = 0;
    double bytes = 0; // mean of late
  };
  struct Loss {
    double streams = 0, datagrams = 0; // relative to the better one
  };

  static size_t indexOf(uint64_t bytes) {
    size_t i = 0;
    while (i + 1 < kSizes && bytes > kLeastBytes << i) {
      ++i;
    }
    return i;
  }
  Loss lossOf(
      size_t i,
      const StreamView& s,
      const DatagramView& d,
      double linkBytesPerS) const {
    const Size& size = sizes_[i];
    const double bytes =
        size.bursts > 0 ? size.bytes : static_cast<double>(kLeastBytes << i);
    const double back = s.roundTripS / 2; // the acknowledgement
    StreamView used = s;
    if (s.paced) {
      used.firstBytes = std::max(s.firstBytes, kBbrGain * bytes);
    }
    const double streams = size.streams.bursts >= kTrials
        ? size.streams.meanS
        : streamArrivalS(used, linkBytesPerS, bytes) + back;
    const double datagrams = kProcessorSPerByte * bytes +
        (size.datagrams.bursts >= kTrials
             ? size.datagrams.meanS
             : datagramArrivalS(d, linkBytesPerS, bytes) + back);
    const double least = std::min(streams, datagrams);
    const double weight = size.bursts > 0 ? 1 : kUnseen;
    return {weight * (streams / least - 1), weight * (datagrams / least - 1)};
  }

  std::array<Size, kSizes> sizes_;
};

// The share of packets that were lost lately although no queue was full, from
// totals.
class RecentLoss {
 public:
  // `queueing`: the round trip has grown, so losses show a full link.
  void observe(uint64_t packets, uint64_t lost, bool queueing) {
    const bool fewer = packets < packets_ || lost < lost_; // of other paths
    if (!fewer && !queueing) {
      if (packets - packets_ < kEnough) {
        return;
      }
      const double rate = std::min(
          1.0,
          static_cast<double>(lost - lost_) /
              static_cast<double>(packets - packets_));
      rate_ = known_ ? (rate_ + rate) / 2 : rate;
      known_ = true;
    }
    packets_ = packets;
    lost_ = lost;
  }
  double rate() const {
    return rate_;
  }

 private:
  static constexpr uint64_t kEnough = 300;

  uint64_t packets_ = 0, lost_ = 0;
  double rate_ = 0;
  bool known_ = false;
};

} // namespace resilient
