#include "base/time.h"

#include <array>
#include <cstdio>

namespace resilient {

namespace {

struct Unit {
  double seconds;
  double below; // seconds from which the next unit takes over
  const char* name;
};

// Three digits never round up to "1e+03".
constexpr std::array<Unit, 4> kUnits = {{
    {1e-6, 999.5e-6, "us"},
    {1e-3, 999.5e-3, "ms"},
    {1, 119.5, "s"},
    {60, 119.5 * 60, "min"},
}};
constexpr Unit kHours = {3600, 0, "h"};

} // namespace

std::string durationText(Nanos d) {
  const double seconds = toSeconds(d);
  Unit unit = kHours;
  for (const Unit& each : kUnits) {
    if (seconds < each.below) {
      unit = each;
      break;
    }
  }
  const double value = seconds / unit.seconds;
  std::array<char, 32> text;
  std::snprintf(
      text.data(),
      text.size(),
      value < 999.5 ? "%.3g %s" : "%.0f %s",
      value,
      unit.name);
  return text.data();
}

} // namespace resilient
