#include "backend/device_staging.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace resilient {

namespace {

std::atomic<StagingFactory*> hostFactory{nullptr};

// Paper: PIPEMORPH §5.2, Figures 11 and 12. Pinned buffers, and behind the
// copies of one direction a signal on the same stream: an event, which a
// stream can wait for, where the paper sets flags in memory.
//
// The constructor makes the side stream wait for what the caller's stream has
// queued. Later work of the caller's stream is not waited for, because the
// caller must leave the tensors alone until the operation ends. The pool of
// side streams is the device's, so operations may share a stream and then copy
// one after the other.
class StreamStaging : public DeviceStaging {
 public:
  explicit StreamStaging(c10::Device device)
      : device_(device),
        impl_(device.type()),
        stream_(impl_.getStreamFromGlobalPool(device)),
        toHost_(device.type()),
        toDevice_(device.type()) {
    c10::OptionalDeviceGuard guard(device_);
    c10::Event called(device_.type());
    called.record(impl_.getStream(device_));
    called.block(stream_);
  }

  at::Tensor hostBuffer(const at::Tensor& tensor) override {
    return at::empty(
        tensor.sizes(),
        at::TensorOptions()
            .dtype(tensor.scalar_type())
            .device(at::kCPU)
            .pinned_memory(true));
  }

  void copyToHost(const at::Tensor& host, const at::Tensor& tensor) override {
    c10::StreamGuard guard(stream_);
    host.copy_(tensor, /*non_blocking=*/true);
    keepFor(tensor);
  }

  void copiesToHostIssued() override {
    toHost_.record(stream_);
    toHostIssued_ = true;
  }

  bool copiesToHostDone() override {
    return !toHostIssued_ || toHost_.query();
  }

  void copyToDevice(const at::Tensor& tensor, const at::Tensor& host) override {
    c10::StreamGuard guard(stream_);
    tensor.copy_(host, /*non_blocking=*/true);
    keepFor(tensor);
  }

  void copiesToDeviceIssued() override {
    toDevice_.record(stream_);
    toDeviceIssued_ = true;
  }

  bool copiesToDeviceDone() override {
    return !toDeviceIssued_ || toDevice_.query();
  }

  void blockCurrentStream() override {
    if (toDeviceIssued_) {
      c10::OptionalDeviceGuard guard(device_);
      toDevice_.block(impl_.getStream(device_));
    }
  }

  std::optional<c10::Stream> stream() const override {
    return stream_;
  }

 private:
  // Tells the caching allocator not to hand the memory to others before the
  // side stream is done with it.
  void keepFor(const at::Tensor& tensor) {
    if (tensor.numel() > 0) {
      impl_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    }
  }

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl impl_;
  const c10::Stream stream_;
  c10::Event toHost_;
  c10::Event toDevice_;
  // Set before the Work or the queue publishes us to another thread.
  bool toHostIssued_ = false;
  bool toDeviceIssued_ = false;
};

} // namespace

void setStagingFactory(StagingFactory* factory) {
  hostFactory.store(factory, std::memory_order_release);
}

bool onDevice(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return true;
  }
  StagingFactory* factory = hostFactory.load(std::memory_order_acquire);
  return factory != nullptr && factory->takes(tensor);
}

std::unique_ptr<DeviceStaging> makeDeviceStaging(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return hostFactory.load(std::memory_order_acquire)->make(tensor);
  }
  return std::make_unique<StreamStaging>(tensor.device());
}

} // namespace resilient
