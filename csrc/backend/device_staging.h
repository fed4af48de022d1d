#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace resilient {

// The device side of one operation on device tensors: copies to host buffers
// and back, without holding up the caller, its stream or the engine.
//
// The real one (device_staging.cpp) copies to pinned memory on a side stream,
// with the device-agnostic parts of c10 only: the CPU build of torch compiles
// and loads it. The side stream first waits for the work that the caller's
// stream had queued when the operation was called: inputs are written by then,
// and no kernel still reads the old contents of outputs.
//
// Threads as marked. Lifetime: until its operation has ended; any thread may
// drop the last reference.
//
// Calls come in this order: hostBuffer() for each tensor, copyToHost() for each
// input, copiesToHostIssued() once, copiesToHostDone() until it is true; after
// the operation the same for outputs and the way back. If a direction has no
// copies, only its ...Done() is called. The caller keeps tensors and host
// buffers alive until the copies are done.
class DeviceStaging {
 public:
  virtual ~DeviceStaging() = default;

  // A contiguous host buffer of the shape and type of `tensor`.
  // Its contents are undefined. Caller's thread.
  virtual at::Tensor hostBuffer(const at::Tensor& tensor) = 0;

  // Caller's thread.
  // Only begins the copy; the host buffer is valid when copiesToHostDone().
  virtual void copyToHost(const at::Tensor& host, const at::Tensor& tensor) = 0;
  virtual void copiesToHostIssued() = 0; // after the last of them
  // Any thread; does not block. True also if there are none. Throws if the
  // device reports an error.
  virtual bool copiesToHostDone() = 0;

  // Staging thread.
  virtual void copyToDevice(
      const at::Tensor& tensor,
      const at::Tensor& host) = 0;
  virtual void copiesToDeviceIssued() = 0;

  // As above.
  virtual bool copiesToDeviceDone() = 0;
  // Makes the calling thread's current stream wait for the copies to the
  // device.
  // Does not block the thread itself where the device has streams.
  virtual void blockCurrentStream() = 0;

  // The side stream.
  // None if the device has no streams: readers then call blockCurrentStream().
  virtual std::optional<c10::Stream> stream() const = 0;
};

// True if the engine cannot read the tensor where it is.
bool onDevice(const at::Tensor& tensor);
// For an operation called now, with all tensors on the device of this one.
// Call on the thread that starts the operation, since the copies wait for the
// current stream of that thread. Precondition: onDevice(tensor).
std::unique_ptr<DeviceStaging> makeDeviceStaging(const at::Tensor& tensor);

// Makes host tensors pass for tensors of a device: for the pretended device of
// the tests (csrc/tests/device), which is not in the shipped module. Called
// from any thread.
class StagingFactory {
 public:
  virtual ~StagingFactory() = default;
  // True if operations on this host tensor are to be staged by make().
  virtual bool takes(const at::Tensor& tensor) = 0;
  // Never null. Called only for tensors that takes() accepts.
  virtual std::unique_ptr<DeviceStaging> make(const at::Tensor& tensor) = 0;
};

// The factory for host tensors from now on; null (the default) for none. It is
// not owned and must live until the process ends.
void setStagingFactory(StagingFactory* factory);

} // namespace resilient
