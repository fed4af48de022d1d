#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace resilient {

// True if the engine cannot read the tensor where it is.
inline bool onDevice(const at::Tensor& tensor) {
  return !tensor.is_cpu();
}

// The device side of one operation on tensors of one device: copies to pinned
// host buffers and back, on side streams, without holding up the caller, its
// stream or the engine. It uses the device-agnostic parts of c10 only, so the
// CPU build of torch compiles and loads it.
//
// Paper: PIPEMORPH §5.2, Figures 11 and 12. Pinned buffers, and behind the
// copies of one direction a signal on the same stream: an event, which a stream
// can wait for, where the paper sets flags in memory.
//
// The side streams first wait for the work that the caller's stream had queued
// when the operation was called: inputs are written by then, and no kernel
// still reads the old contents of outputs.
//
// No call changes the current device of its thread, and none creates a context
// on another device than its own: the threads of the backend have device 0
// current, whatever device the program uses.
//
// Threads as marked. Lifetime: until its operation has ended; any thread may
// drop the last reference.
class DeviceStaging {
 public:
  // Caller's thread, at the call. Throws CallError if the caller's current
  // stream is capturing a graph.
  explicit DeviceStaging(c10::Device device);
  ~DeviceStaging();
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  // A contiguous pinned buffer of the shape and type of `tensor`.
  static at::Tensor hostBuffer(const at::Tensor& tensor);

  // Caller's thread.
  void copyToHost(const at::Tensor& host, const at::Tensor& tensor);
  // The same in pieces that end at `ends`, in bytes, for a tensor whose copy
  // takes long. `buffer` is returned by takeCopied().
  void copyToHostInPieces(
      const at::Tensor& host,
      const at::Tensor& tensor,
      size_t buffer,
      const std::vector<size_t>& ends);
  // After the last of them. Without any, copiesToHostDone() tells when the
  // caller's stream has done what it had to do at the call.
  void copiesToHostIssued();
  // Any thread; does not block. True also if none were issued. Throws if the
  // device reports an error.
  bool copiesToHostDone() const;
  // The same for all tensors that are not copied in pieces, and the first
  // piece. The others follow at the speed of the device.
  bool copiesToHostBegun() const;
  // The next piece that has been copied, and was not returned before. Staging
  // thread. Throws as above.
  struct Copied {
    size_t buffer = 0;
    size_t end = 0;
  };
  std::optional<Copied> takeCopied();

  // Staging thread.
  void copyToDevice(const at::Tensor& tensor, const at::Tensor& host);
  // The elements [begin, end) of contiguous tensors.
  void copyToDevice(
      const at::Tensor& tensor,
      const at::Tensor& host,
      int64_t begin,
      int64_t end);
  // The same for sparse (COO) tensors; `host` is coalesced. `tensor` gets new
  // indices and values.
  void writeSparse(const at::Tensor& tensor, const at::Tensor& host);
  bool hasCopiesToDevice() const {
    return toDeviceFollows_;
  }
  void copiesToDeviceIssued();

  // As above.
  bool copiesToDeviceDone() const;
  // Makes the calling thread's current stream wait for the copies to the
  // device. Does nothing before copiesToDeviceIssued().
  void blockCurrentStream() const;

  c10::Device device() const {
    return device_;
  }
  // The side stream on which results are written.
  c10::Stream stream() const {
    return toDevice_;
  }
  // "cuda:0, stream 7": the caller's stream, for messages.
  std::string callerStream() const;

 private:
  // Before the first copy to the device.
  void followCaller();

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl impl_;
  const c10::Stream caller_;
  const c10::Stream toHost_;
  const c10::Stream toDevice_;
  c10::Event called_; // recorded on caller_ at the call
  c10::Event toHostDone_;
  c10::Event toDeviceDone_;
  bool toDeviceFollows_ = false; // toDevice_ waits for called_
  struct Piece {
    Copied copied;
    c10::Event done;
  };
  std::vector<Piece> pieces_; // in the order of their copies
  size_t nextPiece_ = 0;
  // Each is set when its event has been recorded and will not change again.
  std::atomic<bool> toHostIssued_{false};
  std::atomic<bool> toDeviceIssued_{false};
};

} // namespace resilient
