#pragma once

#include <cstdint>

#include "base/time.h"

namespace resilient {

// What acknowledgements tell about one path: round trip and goodput, both
// smoothed. Passive: it costs no traffic of its own.
class LinkStatistics {
 public:
  void onRoundTrip(Nanos sample) {
    const double s = toSeconds(sample);
    // RFC 6298's gain: one sample in eight.
    roundTripS_ = roundTripS_ == 0 ? s : roundTripS_ + (s - roundTripS_) / 8;
    if (minRoundTripS_ == 0 || s < minRoundTripS_) {
      minRoundTripS_ = s;
    }
  }

  // `busySince`: since when the path has had unacknowledged bytes. Idle time
  // must not count, or a path would look slow because nobody used it.
  void onAcknowledged(uint64_t bytes, TimePoint busySince, TimePoint now) {
    if (windowStart_ < busySince) {
      windowStart_ = busySince;
      windowBytes_ = 0;
    }
    windowBytes_ += bytes;
    const Nanos elapsed = now - windowStart_;
    if (elapsed < kWindow) {
      return;
    }
    const double rate = static_cast<double>(windowBytes_) / toSeconds(elapsed);
    goodput_ = goodput_ == 0 ? rate : goodput_ + (rate - goodput_) / 4;
    windowStart_ = now;
    windowBytes_ = 0;
  }

  double roundTripS() const {
    return roundTripS_;
  }
  double minRoundTripS() const {
    return minRoundTripS_;
  }
  double goodputBytesPerS() const {
    return goodput_;
  }

 private:
  // Long enough to hold several acknowledgements of a WAN path, short enough
  // to follow a change within a second.
  static constexpr Nanos kWindow = std::chrono::milliseconds(100);

  double roundTripS_ = 0;
  double minRoundTripS_ = 0;
  double goodput_ = 0;
  TimePoint windowStart_{};
  uint64_t windowBytes_ = 0;
};

} // namespace resilient
