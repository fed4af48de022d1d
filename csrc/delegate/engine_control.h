#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/options.h"
#include "base/time.h"

namespace resilient {

// Calls to the engine of the process as a whole, apart from any group. All
// functions are thread-safe and none of them starts the engine.

// The options of an engine that starts later; a running one keeps its own.
void setDefaultOptions(const EngineOptions& options);

bool engineRunning();

// Fault injection (see path/faults.h for the text of a rule). Throws
// StatusError with kInvalidArgument if the rule cannot be read. Rules given
// before the engine starts are kept for it.
uint64_t addFault(const std::string& rule);
void removeFault(uint64_t id); // unknown ids are ignored
// The training step that rules with a step condition compare with.
void setFaultStep(int64_t step);

// Lets a thread that waits do the engine's work meanwhile, so that what it
// waits for needs no other thread to be woken. Returns when `done` is true or
// `until` has come; false at once if it cannot help: then wait as usual. What
// makes `done` true must call wakeEngineHelper().
bool helpEngine(const std::function<bool()>& done, TimePoint until);
void wakeEngineHelper();

// Called once, when the interpreter is about to end: pending operations fail,
// members are told, the engine's threads end. Returns within `limit`; what has
// not ended then is left to the end of the process.
void shutdownEngineAtExit(Nanos limit);

} // namespace resilient
