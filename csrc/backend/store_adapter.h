#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "delegate/group.h"

namespace resilient {

// A c10d store as the engine's KeyValue. One TCPStore client serialises its
// callers: a thread that waits for a key holds up all others. The adapter keeps
// the store alive and throws what the store throws.
// Nothing here waits for a key that another rank has yet to set.
std::unique_ptr<KeyValue> makeStoreAdapter(
    c10::intrusive_ptr<c10d::Store> store);

} // namespace resilient
