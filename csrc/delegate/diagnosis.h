#pragma once

#include <string>

#include "base/time.h"

namespace resilient {

// "Timed out waiting 10000ms: ", as gloo begins.
std::string timedOutText(Nanos timeout);

// How long before its time-out an operation asks the others what they are
// doing: long enough for an answer over a WAN, and at most a quarter of the
// time-out itself.
Nanos askAhead(Nanos timeout);

} // namespace resilient
