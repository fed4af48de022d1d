#pragma once

#include <vector>

#include "operation/task.h"

namespace resilient {

// Runs the tasks at the same time, on the one thread; ends when all have
// ended. The first error destroys the others, which cancels their transfers,
// and is thrown.
Task concurrently(std::vector<Task> tasks);

} // namespace resilient
