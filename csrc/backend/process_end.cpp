#include "backend/process_end.h"

#include <Python.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace resilient {

namespace {

std::terminate_handler previous = nullptr;

bool interpreterFinalizes() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Unwinding by pthread_exit() is not an exception. One that is handled here is
// a mistake in the program, which keeps its message.
[[noreturn]] void terminateOrSleep() {
  if (interpreterFinalizes() && gettid() != getpid() &&
      std::current_exception() == nullptr) {
    for (;;) {
      pause();
    }
  }
  if (previous != nullptr) {
    previous();
  }
  std::abort();
}

} // namespace

void sleepInsteadOfUnwinding() {
  if (std::get_terminate() != terminateOrSleep) {
    previous = std::set_terminate(terminateOrSleep);
  }
}

} // namespace resilient
