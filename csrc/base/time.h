#pragma once

#include <chrono>

namespace resilient {

// The core never reads a clock: every call that depends on time takes a
// TimePoint. The real engine passes steady_clock, the simulation its own.
using Nanos = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Nanos>;

inline constexpr TimePoint kNever = TimePoint::max();

// Longer time-outs mean this one. A TimePoint ends after 292 years, and what
// is added to one must not go beyond.
inline constexpr std::chrono::milliseconds kLongestTimeout =
    std::chrono::hours(24 * 365 * 100);

inline double toSeconds(Nanos d) {
  return std::chrono::duration<double>(d).count();
}

inline Nanos fromSeconds(double s) {
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(s));
}

} // namespace resilient
