#pragma once

#include <cstddef>

namespace resilient::shift::fake {

// A key-value store as `torch-resilient shift --serve` runs it, for one client.
// Starts at the first call; returns its port.
int storePort();
size_t storedKeys();

} // namespace resilient::shift::fake
