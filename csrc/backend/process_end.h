#pragma once

namespace resilient {

// Before Python 3.14, a thread that wants the GIL back while the interpreter
// finalizes is unwound by pthread_exit(), and std::terminate() ends the process
// if the thread comes from C++: pybind11 takes the GIL back in a destructor.
// Threads of the user (daemon threads: Python has joined the others) come to
// that whenever they call torch in a loop. From this call on they sleep
// instead, until the process is gone, as they do in Python 3.14.
void sleepInsteadOfUnwinding();

} // namespace resilient
