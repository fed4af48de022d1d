#pragma once

#include <optional>

#include "base/tolerance.h"
#include "base/traffic_class.h"

namespace resilient {

// The traffic class that the calling thread has chosen for the operations it
// starts; nothing: the default of each operation. -1 in Python.
// Operations read both variables when they start; a later change does not
// concern them. The thread is the one that calls the group, not the loop's.
inline thread_local std::optional<TrafficClass> chosenTrafficClass;

// The parts that may be missing of messages that the calling thread sends.
// Only point-to-point sends use it; collectives are exact.
inline thread_local Tolerance chosenTolerance;

} // namespace resilient
