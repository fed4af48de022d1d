#pragma once

#include <string>

#include "base/time.h"

namespace resilient {

// "Timed out waiting 10000ms: ", as gloo begins.
std::string timedOutText(Nanos timeout);

// Why an operation cannot go on whose inputs wait for `what`, a stream of a
// device. Empty if `what` is.
std::string lateCopyText(const std::string& what);

// How long before its time-out an operation gives up whose inputs have not been
// copied from the device: the others hear the reason before they time out
// themselves.
Nanos lateCopyAhead(Nanos timeout);

// How long before its time-out an operation asks the others what they are
// doing: long enough for an answer over a WAN, and at most a quarter of the
// time-out itself.
Nanos askAhead(Nanos timeout);

} // namespace resilient
