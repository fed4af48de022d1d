#pragma once

#include <string>

#include "transport/verbs_api.h"

namespace resilient {

// Opens the library for systemVerbs(), which has it beside the file that this
// code is in. Returns null if it cannot; `why` is then a sentence for people:
// what is missing, and which package has it. The library is never closed.
VerbsApi* openVerbsLibrary(const std::string& path, std::string& why);

// Whether the kernel lists RDMA devices. Cheap: no library is loaded.
bool hasRdmaDevices();

// The path of the library beside `module`: "/a/_verbs.so" for "/a/program", and
// "/a/_verbs.cpython-311.so" for "/a/_C.cpython-311.so".
std::string verbsLibraryBeside(const std::string& module);

// From now on, systemVerbs() gives this one: devices in memory, for tests of
// what is above them. Null: the library again. Any thread.
void replaceSystemVerbs(VerbsApi* api);

} // namespace resilient
