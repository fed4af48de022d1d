#pragma once

#include <vector>

#include "operation/task.h"

namespace resilient {

// Runs the tasks at the same time, on the one thread; ends when all have
// ended. The first error destroys the others, which cancels their transfers,
// and is thrown.
// The tasks are valid and not started. They start in their order, each up to
// its first wait. If one fails already then, those after it never start. The
// arguments that the tasks refer to must outlive this Task.
Task concurrently(std::vector<Task> tasks);

} // namespace resilient
