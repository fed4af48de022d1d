#pragma once

namespace resilient {

// Before Python 3.14, a thread that wants the GIL back while the interpreter
// ends is unwound, which std::terminate()s the process if it comes from C++. So
// threads of the user (daemon threads: Python has joined the others) that come
// to us then, over and over since each operation fails at once, are held up.
// Not for ever: an atexit handler may join one.
//
// Call without the GIL.
void processEnds(); // from now on
// Called by a thread that is about to go back to Python. Returns at once until
// the process ends, and always on its main thread.
// Every wait and every call of a group goes through it.
void letProcessEnd();

} // namespace resilient
