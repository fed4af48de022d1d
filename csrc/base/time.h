#pragma once

#include <chrono>
#include <string>

namespace resilient {

// The core never reads a clock: every call that depends on time takes a
// TimePoint. The real engine passes steady_clock, the simulation its own.
using Nanos = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Nanos>;

// Compare it, never add to it: the sum would overflow.
inline constexpr TimePoint kNever = TimePoint::max();

// Longer time-outs mean this one. A TimePoint ends after 292 years, and what
// is added to one must not go beyond.
inline constexpr std::chrono::milliseconds kLongestTimeout =
    std::chrono::hours(24 * 365 * 100);

inline double toSeconds(Nanos d) {
  return std::chrono::duration<double>(d).count();
}

// The value must fit: up to 292 years, no NaN. The bounds of the options keep
// to that.
inline Nanos fromSeconds(double s) {
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(s));
}

// For people, in the unit that suits: "98 us", "12.5 ms", "3.02 s", "25 min".
std::string durationText(Nanos d);

} // namespace resilient
