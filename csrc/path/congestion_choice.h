#pragma once

#include <cstdint>

#include "base/time.h"

namespace resilient {

// Its name in the kernel.
inline constexpr char kLossyCongestionControl[] = "bbr";

// After some round trips without traffic, most congestion controls begin slowly
// again, unless the administrator has switched that off; BBR goes on at the
// rate that it knows. Bursts of up to 4 MiB, as of a training step, then take
// two to five times as long. With a shorter round trip than this it is lost in
// the noise.
inline constexpr Nanos kSlowStartCounts = std::chrono::milliseconds(2);

// A packet has waited on its way. Other traffic and kernel timers add a little
// to a round trip, too.
inline bool inQueue(Nanos roundTrip, Nanos minRoundTrip) {
  return roundTrip > minRoundTrip * 5 / 4 + std::chrono::milliseconds(2);
}

// Whether one connection would do better with a congestion control that does
// not take every lost packet for congestion (BBR). CUBIC at 1 % of random loss
// and 40 ms fills 3 Mbit/s of any link; then losses come without a queue: the
// round trip stays near its least. If packets are lost because a buffer is
// full, the round trip says so, and the system's choice stands.
// Paper: ATLAS §4.1 meets this with more connections; they help where windows
// are small, and little against loss.
class CongestionChoice {
 public:
  // Totals of the connection, as the kernel counts.
  struct Sample {
    uint32_t retransmits = 0; // segments
    uint32_t delivered = 0; // segments
    Nanos roundTrip{};
    Nanos minRoundTrip{};
    bool busy = false; // there was more to send than it took
  };

  // Called every now and then. True once: it should change now.
  bool observe(const Sample& s, TimePoint now) {
    if (!s.busy || s.minRoundTrip <= Nanos(0)) {
      restart(s, now);
      return false;
    }
    if (begunAt_ == TimePoint{}) {
      restart(s, now);
    }
    ++looks_;
    queueing_ += inQueue(s.roundTrip, s.minRoundTrip);
    const Nanos window =
        s.minRoundTrip * 8 > kMinWindow ? s.minRoundTrip * 8 : kMinWindow;
    if (now - begunAt_ < window || looks_ < kMinLooks) {
      return false;
    }
    const uint32_t lost = s.retransmits - retransmits_;
    const uint32_t delivered = s.delivered - delivered_;
    if (lost < kMinLost && now - begunAt_ < kLongestWindow) {
      return false; // too few to tell
    }
    // Single losses in many packets cost little.
    const bool lossy = lost >= kMinLost &&
        static_cast<double>(lost) >= kMinLoss * static_cast<double>(delivered);
    const bool short_ = queueing_ * 4 <= looks_;
    inARow_ = lossy && short_ ? inARow_ + 1 : 0;
    restart(s, now);
    if (inARow_ < kWindows || chosen_) {
      return false;
    }
    chosen_ = true;
    return true;
  }

 private:
  void restart(const Sample& s, TimePoint now) {
    begunAt_ = now;
    retransmits_ = s.retransmits;
    delivered_ = s.delivered;
    looks_ = queueing_ = 0;
  }

  static constexpr Nanos kMinWindow = std::chrono::milliseconds(200);
  static constexpr Nanos kLongestWindow = std::chrono::seconds(5);
  static constexpr int kMinLooks = 8;
  static constexpr uint32_t kMinLost = 3;
  static constexpr double kMinLoss = 1e-3;
  static constexpr int kWindows = 2; // in a row

  TimePoint begunAt_{};
  uint32_t retransmits_ = 0, delivered_ = 0;
  int looks_ = 0, queueing_ = 0;
  int inARow_ = 0;
  bool chosen_ = false;
};

} // namespace resilient
