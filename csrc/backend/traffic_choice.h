#pragma once

#include <optional>

#include "base/tolerance.h"
#include "base/traffic_class.h"

namespace resilient {

// The traffic class that the calling thread has chosen for the operations it
// starts; nothing: the default of each operation. -1 in Python.
inline thread_local std::optional<TrafficClass> chosenTrafficClass;

// The parts that may be missing of messages that the calling thread sends.
inline thread_local Tolerance chosenTolerance;

} // namespace resilient
