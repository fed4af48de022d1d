#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/options.h"
#include "base/time.h"

namespace resilient {

// Calls to the engine of the process as a whole, apart from any group. All
// functions are thread-safe and none of them starts the engine.

// The options of an engine that starts later; a running one keeps its own. They
// are not validated here: joinGroup() throws if they cannot be used.
void setDefaultOptions(const EngineOptions& options);

// Also true after shutdownEngineAtExit(), until the last group is gone.
bool engineRunning();

// Fault injection (see path/faults.h for the text of a rule). Throws
// StatusError with kInvalidArgument if the rule cannot be read. Rules given
// before the engine starts are kept for it. The rule holds when the call
// returns. It is kept until removeFault(), for later engines as well. Waits for
// a turn of the loop, as the next two do; so none of the three may be called in
// the loop.
uint64_t addFault(const std::string& rule);
void removeFault(uint64_t id); // unknown ids are ignored
// The training step that rules with a step condition compare with.
void setFaultStep(int64_t step);

// Lets a thread that waits do the engine's work meanwhile, so that what it
// waits for needs no other thread to be woken. Returns when `done` is true or
// `until` has come; false at once if it cannot help: then wait as usual. What
// makes `done` true must call wakeEngineHelper(). `done` is called often, in
// the calling thread and never within a turn, so it may take a lock that the
// loop takes. Only one thread helps at a time.
bool helpEngine(const std::function<bool()>& done, TimePoint until);
// From any thread; without a helper in another thread it costs no system call.
void wakeEngineHelper();

// Called once, when the interpreter is about to end: pending operations fail,
// members are told, the engine's threads end. Returns within `limit`; what has
// not ended then is left to the end of the process.
void shutdownEngineAtExit(Nanos limit);

} // namespace resilient
