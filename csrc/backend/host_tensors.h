#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/device_staging.h"
#include "backend/staged_pieces.h"
#include "base/signature.h"
#include "transport/gpu_driver.h"

namespace resilient {

// The engine's name for an element type; types it cannot reduce are moved as
// opaque bytes of their size. Throws for sub-byte types.
DType dtypeOf(const at::Tensor& tensor);

// How an operation uses a tensor.
enum class Use { kInput, kOutput, kInputOutput };

// The tensors of one operation and the contiguous host memory that stands for
// each: its own if it lives there, else a temporary. Kept alive by the
// operation's Work until the operation is done.
//
// Operands may share memory. All inputs are read before any output is written,
// and outputs are written in the order of their add() calls, so the last one
// determines shared elements. A tensor that shares memory with an earlier one
// gets a temporary if either of them is written.
//
// Order of calls: add() for every tensor, refusal(), copyIn(), inputsReady()
// until true, then the operation, copyBack(). Thread: the caller's until the
// operation has started, afterwards one thread at a time: the loop or the
// staging thread. Only inputsReady() and device() come from any thread.
//
// Device tensors never conflict: each has a host buffer of its own, all inputs
// are copied to host memory before a result is copied to the device, and
// results are copied back in order.
//
// Large device tensors are copied in pieces, while the operation runs: see
// pieces(). Paper: PIPEMORPH §5.2, Figure 12.
class HostTensors {
 public:
  // Returns the host address.
  // It is valid for the lifetime of this object, and may be null for a tensor
  // without elements. A temporary has undefined contents until its input has
  // been copied. Use::kInput gives an address that must not be written,
  // although the type allows it.
  void* add(const at::Tensor& tensor, Use use);

  // Why an output cannot be written, or empty. The operation must not run then.
  const std::string& refusal() const {
    return refusal_;
  }

  // Whether two of the tensors share memory, as far as their ranges tell.
  // Two tensors that interleave without a common element count as sharing. The
  // mistake costs a copy, never a wrong result.
  static bool anyOverlap(const std::vector<at::Tensor>& tensors);

  // The bytes that the operation reads and writes.
  // An operand that is both counts twice.
  uint64_t bytes() const;

  // The memory that add() has given out, of tensors that are not small.
  std::vector<std::span<std::byte>> memory() const;
  // The first one of these that lies on a GPU.
  GpuAddress gpu() const;

  // The tensors with that memory: the user's, or temporaries.
  std::vector<at::Tensor> hosts() const;

  // Anything else that must live as long.
  void keep(std::shared_ptr<void> thing) {
    kept_.push_back(std::move(thing));
  }

  // The operation also waits for what the current stream of the device has to
  // do at the call. Caller's thread, before copyIn(). Throws CallError as
  // DeviceStaging does.
  void waitForDevice(c10::Device device);

  // Once, when all tensors are known, on the caller's thread: fills the
  // temporaries of inputs; those of device tensors are filled asynchronously.
  void copyIn();
  // True (from then on) when the operation can start: all inputs are in host
  // memory, or the first piece of those that come in pieces. Any thread. Throws
  // if a device reports an error.
  bool inputsReady() const;
  // What the engine must know of tensors that are copied in pieces; null if
  // there are none. Complete once copyIn() has run.
  const std::shared_ptr<StagedPieces>& pieces() const {
    return pieces_;
  }
  // Tells pieces() what has been copied; true when nothing more will come.
  // Staging thread.
  bool pollPieces();
  // Enqueues the copies of results that are final. Staging thread.
  void copyFinalBack();
  // The streams whose work the inputs still wait for, for messages.
  std::string waitsFor() const;
  // False if the operation wrote all results to the user's memory itself.
  bool needsCopyBack() const;
  // Fills output tensors from their temporaries. Staging thread. Device copies
  // are only enqueued; outputsReady() tells when they are done.
  void copyBack();
  // After a failure instead: a stream that waits for the operation waits for
  // the results that are on their way to a device, too.
  void leaveResults();
  // Whether outputs on devices are written. Any thread; throws as above.
  bool outputsReady() const;
  // Gives the temporaries back. Nothing may use the addresses from add() any
  // more; copies under way keep their pinned memory.
  void dropTemporaries();

  // One for each device that has tensors; complete once copyIn() has run.
  const std::vector<std::unique_ptr<DeviceStaging>>& devices() const {
    return devices_;
  }

 private:
  struct Slot {
    at::Tensor user;
    at::Tensor host;
    Use use;
    bool direct; // host is user
    bool staged; // user is on a device
    // Its number in pieces_, if it is copied in pieces in any direction.
    std::optional<size_t> buffer = std::nullopt;
    bool resultInPieces = false;
  };
  // Disjoint ranges of host memory.
  class Ranges {
   public:
    bool overlaps(const char* begin, const char* end) const;
    void add(const char* begin, const char* end);

   private:
    std::map<const char*, const char*> ends_; // by begin
  };
  DeviceStaging& stagingFor(c10::Device device);
  void choosePieces();
  void copyRangesBack(const std::vector<BufferRange>& ranges);
  // Records the memory of a host tensor; true if an earlier one conflicts.
  // Only for tensors in host memory. Reading the same memory twice is no
  // conflict.
  bool conflicts(const at::Tensor& tensor, Use use);

  std::vector<Slot> slots_;
  Ranges read_; // by the operands up to now
  Ranges written_;
  std::string refusal_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<std::unique_ptr<DeviceStaging>> devices_;
  std::shared_ptr<StagedPieces> pieces_;
  bool waitsForDevices_ = false; // without a copy, too
};

// True if both are contiguous tensors in host memory that an operation can use
// directly, and `part` begins `offset` bytes after the first byte of `whole`.
bool isInPlace(const at::Tensor& whole, size_t offset, const at::Tensor& part);

} // namespace resilient
