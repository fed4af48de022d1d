#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.h"
#include "path/recent_samples.h"

namespace resilient {

// The statistics of one path by its acknowledgements: round trip, goodput and
// capacity, all smoothed. Passive: it costs no traffic of its own.
// Paper: PIPEMORPH §6, what the profiler knows of communication.
class LinkStatistics {
 public:
  // The capacity that an earlier path had over the same link, 0 if unknown. It
  // is used until a higher one is measured, or a lower one while the path is
  // full or slow.
  void expectCapacity(double bytesPerS) {
    capacity_ = bytesPerS;
    onlyExpected_ = bytesPerS > 0;
  }
  void onRoundTrip(Nanos sample, TimePoint now) {
    const double s = toSeconds(sample);
    // RFC 6298's gain: one sample in eight.
    roundTripS_ = roundTripS_ == 0 ? s : roundTripS_ + (s - roundTripS_) / 8;
    recent_.add(s);
    minInWindow_ = minInWindow_ == 0 ? s : std::min(minInWindow_, s);
    if (now - minSince_ >= kMinWindow) {
      minBefore_ = min_;
      min_ = 0;
      minSince_ = now;
    }
    min_ = min_ == 0 ? s : std::min(min_, s);
  }

  // `busySince`: since when the path has had unacknowledged bytes. Idle time
  // must not count, or an unused path would look slow. `inFlight`: bytes that
  // are still unacknowledged after these. `postedAt`: when the last of all
  // bytes were there to be sent.
  void onAcknowledged(
      uint64_t bytes,
      TimePoint busySince,
      TimePoint now,
      uint64_t inFlight = 0,
      TimePoint postedAt = TimePoint()) {
    measureCapacity(bytes, busySince, now, inFlight);
    measureBurst(bytes, busySince, now, inFlight, postedAt);
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
  // The least of the last seconds: what the link itself takes, without our own
  // queue in front of it. 0 while unknown. A window is one second; the least of
  // the current and of the one before counts.
  double minRoundTripS() const {
    return minBefore_ == 0 ? min_
        : min_ == 0        ? minBefore_
                           : std::min(min_, minBefore_);
  }
  double goodputBytesPerS() const {
    return goodput_;
  }
  // The rate that the path would carry if it were saturated: unlike the goodput
  // it does not fall when the path is merely used less. 0 while unknown.
  double capacityBytesPerS() const {
    return capacity_;
  }
  // The capacity is that of expectCapacity(): none has been measured since.
  bool onlyExpected() const {
    return onlyExpected_;
  }
  // In seconds.
  const RecentSamples& roundTripsS() const {
    return recent_;
  }
  // A burst lasts from the first unacknowledged byte until none is left. Only
  // bursts whose bytes were all there at their beginning count: others may have
  // waited for the sender.
  struct Burst {
    uint64_t number = 0; // counts them; 0: there was none
    uint64_t bytes = 0;
    Nanos took{};
  };
  const Burst& lastBurst() const {
    return burst_;
  }

 private:
  // A higher rate than believed is always true. A lower one tells something
  // only if, all the while, more was in flight than the path was believed to
  // need: else the path was slow for want of data.
  void measureCapacity(
      uint64_t bytes,
      TimePoint busySince,
      TimePoint now,
      uint64_t inFlight) {
    if (capacityStart_ < busySince) {
      capacityStart_ = busySince;
      capacityBytes_ = 0;
      minInFlight_ = UINT64_MAX;
      minInWindow_ = 0;
      if (capacity_ > 0) {
        // The first answer comes after a round trip, and after all that the far
        // end sends: the time before it says nothing of the rate.
        capacityStart_ = now;
        if (now - busySince >= kFirstCapacityWindow) {
          raise(static_cast<double>(bytes) / toSeconds(now - busySince));
        }
        return;
      }
    }
    capacityBytes_ += bytes;
    minInFlight_ = std::min(minInFlight_, inFlight);
    const Nanos elapsed = now - capacityStart_;
    const Nanos roundTrip = fromSeconds(minRoundTripS());
    const Nanos window = capacity_ == 0 ? kFirstCapacityWindow : kWindow;
    // A burst is shorter than the window: its end counts.
    const bool over = inFlight == 0 &&
        elapsed >= std::max(kFirstCapacityWindow, roundTrip / 2);
    if (elapsed < std::max(window, roundTrip) && !over) {
      return;
    }
    const double rate =
        static_cast<double>(capacityBytes_) / toSeconds(elapsed);
    const bool full =
        static_cast<double>(minInFlight_) >= capacity_ * minRoundTripS();
    // All answers were late, although the path should have had little to do:
    // it has come back slower than it was.
    const bool slow = onlyExpected_ &&
        minInWindow_ > kLate * minRoundTripS() + toSeconds(kLateBy);
    if (slow) {
      capacity_ = rate;
      onlyExpected_ = false;
    } else if (full && capacity_ > 0) {
      capacity_ += (rate - capacity_) / 2;
      onlyExpected_ = false;
    } else {
      raise(rate);
    }
    capacityStart_ = now;
    capacityBytes_ = 0;
    minInFlight_ = UINT64_MAX;
    minInWindow_ = 0;
  }

  void measureBurst(
      uint64_t bytes,
      TimePoint busySince,
      TimePoint now,
      uint64_t inFlight,
      TimePoint postedAt) {
    burstBytes_ = burstSince_ == busySince ? burstBytes_ + bytes : bytes;
    burstSince_ = busySince;
    if (inFlight == 0 && postedAt <= busySince + kAtOnce) {
      burst_ = {burst_.number + 1, burstBytes_, now - busySince};
    }
  }

  void raise(double rate) {
    if (rate > capacity_) {
      capacity_ = capacity_ == 0 ? rate : capacity_ + (rate - capacity_) / 2;
      onlyExpected_ = false;
    }
  }

  // Long enough to hold several acknowledgements of a WAN path, short enough
  // to follow a change within a second.
  static constexpr Nanos kWindow = std::chrono::milliseconds(100);

  double roundTripS_ = 0;
  // Long enough to hold a sample of a quiet moment, short enough to notice a
  // link that has become slow.
  static constexpr Nanos kMinWindow = std::chrono::seconds(1);
  double min_ = 0; // since minSince_
  double minBefore_ = 0; // in the window before
  TimePoint minSince_{};
  RecentSamples recent_;
  double goodput_ = 0;
  TimePoint windowStart_{};
  uint64_t windowBytes_ = 0;
  // A new path gets an estimate soon, and with it its share.
  static constexpr Nanos kFirstCapacityWindow = std::chrono::milliseconds(10);
  // Larger than the delay that a busy receiver adds.
  static constexpr double kLate = 3;
  static constexpr Nanos kLateBy = std::chrono::milliseconds(20);
  double capacity_ = 0;
  bool onlyExpected_ = false;
  TimePoint capacityStart_{};
  uint64_t capacityBytes_ = 0;
  uint64_t minInFlight_ = UINT64_MAX;
  double minInWindow_ = 0; // round trip; 0: none
  static constexpr Nanos kAtOnce = std::chrono::milliseconds(1);
  TimePoint burstSince_{};
  uint64_t burstBytes_ = 0; // since then
  Burst burst_;
};

} // namespace resilient
