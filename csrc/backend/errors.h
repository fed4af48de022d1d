#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#include "base/status.h"

namespace resilient {

// The exception a user sees for a failed operation:
// torch.distributed.DistBackendError, a RuntimeError.
// The text is the Status's message, or its code if there is none. `status` is
// not ok.
std::exception_ptr exceptionFor(const Status& status);

// The reason of an operation whose inputs a device could not give.
Status copyFailed(const std::exception& error);

// For calls that fail on their own thread: kInvalidArgument becomes
// throwInvalid(), all others DistBackendError.
[[noreturn]] void throwStatus(const Status& status);

// A setting that cannot be used: ValueError in Python.
[[noreturn]] void throwInvalid(const std::string& message);

// A mistake in the arguments of an operation. gloo raises RuntimeError for
// these, NCCL ValueError for most, and programs catch either. In Python it is
// torch_resilient._C.CallError, a subclass of both; a caller that translates
// C++ exceptions without our translator makes a ValueError of it.
class CallError : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};
[[noreturn]] void throwCallError(const std::string& message);

} // namespace resilient
