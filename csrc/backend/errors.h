#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#include "base/status.h"

namespace resilient {

// The exception a user sees for a failed operation:
// torch.distributed.DistBackendError, a RuntimeError.
std::exception_ptr exceptionFor(const Status& status);

[[noreturn]] void throwStatus(const Status& status);

// A caller's mistake, found before a byte was sent: ValueError in Python.
[[noreturn]] void throwInvalid(const std::string& message);

} // namespace resilient
