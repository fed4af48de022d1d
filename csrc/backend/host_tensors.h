#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/device_staging.h"
#include "base/signature.h"

namespace resilient {

// The engine's name for an element type; types it cannot reduce are moved as
// opaque bytes of their size. Throws for sub-byte types.
DType dtypeOf(const at::Tensor& tensor);

// How an operation uses a tensor.
enum class Use { kInput, kOutput, kInputOutput };

// The tensors of one operation and the contiguous host memory that stands for
// each: its own if it lives there, else a temporary. Kept alive by the
// operation's Work until the operation is done.
class HostTensors {
 public:
  // Returns the host address. `temporary`: use a temporary although the tensor
  // itself would do (because it overlaps another operand).
  void* add(const at::Tensor& tensor, Use use, bool temporary = false);

  // That the operation reads and writes.
  uint64_t bytes() const;

  // Anything else that must live as long.
  void keep(std::shared_ptr<void> thing) {
    kept_.push_back(std::move(thing));
  }

  // Once, when all tensors are known, on the caller's thread: fills the
  // temporaries of inputs; those of device tensors are filled asynchronously.
  void copyIn();
  // True (from then on) when all inputs are in host memory. Any thread.
  bool inputsReady() {
    return !device_ || device_->copiesToHostDone();
  }
  bool needsCopyBack() const;
  // Fills output tensors from their temporaries. Staging thread. Device copies
  // are only enqueued; device() tells when they are done.
  void copyBack();

  // Null if all tensors are on the host.
  DeviceStaging* device() const {
    return device_.get();
  }

 private:
  struct Slot {
    at::Tensor user;
    at::Tensor host;
    Use use;
    bool direct; // host is user
    bool staged; // user is on a device
  };
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<DeviceStaging> device_;
};

// True if the two tensors' elements may share memory. Storage ranges are
// compared, so interleaved views count as overlapping.
bool mayOverlap(const at::Tensor& a, const at::Tensor& b);

// True if `a` begins at the same address and is laid out the same.
bool sameMemory(const at::Tensor& a, const at::Tensor& b);

} // namespace resilient
