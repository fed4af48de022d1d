#pragma once

#include <cstdint>
#include <vector>

#include "tests/device/strict_stream.h"

// An accelerator on the CPU for tests: tests/strict_device.py loads it into
// Python. It is PrivateUse1 of torch, with two devices, and follows
// CUDA's rules where a mistake shows only there: streams run late and
// independently, freed memory is poisoned, the host cannot touch the memory of
// the device, a copy with the bit of a negative or conjugate view computes on
// the host before the bytes have come, some calls create a context on the
// device to which they switch back, and queries of events are illegal while any
// thread captures a graph.

namespace resilient::strict {

// Before the first tensor; again, it does nothing.
void registerDevice();

// The current device of the calling thread.
int currentDeviceIndex();
// As cudaSetDevice since CUDA 12: the switch itself creates the context.
void setDeviceAndContext(int device);
Stream& currentStream(int device);

std::vector<int> devicesWithContext();
int64_t eventsMade(); // by all threads, since the process began

// From now on, everything that is queued on a device gets done between a query
// that finds an event pending and its answer.
void answerLate(bool late);

// On the current stream. endCapture() tells if the capture is valid: an event
// query by a thread that is not in relaxed mode makes it useless.
void beginCapture();
bool endCapture();

} // namespace resilient::strict
