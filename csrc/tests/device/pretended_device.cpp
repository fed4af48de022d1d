#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "backend/device_staging.h"
#include "base/time.h"

// A Python module for tests without a device: host tensors are treated as if
// they were on a device with slow copies. tests/pretended_device.py compiles
// and loads it; it is no part of the package.

namespace resilient {

namespace {

std::atomic<int64_t> copyNanos{0};

TimePoint now() {
  return std::chrono::steady_clock::now();
}

// Copies that are asked for and happen later: what reads their target too
// early sees the old bytes, as on a real device.
class LateCopies {
 public:
  void add(const at::Tensor& to, const at::Tensor& from) {
    copies_.emplace_back(to, from);
  }

  void issued() {
    // A fixed sequence: 1.7, 0.3, 1.2, 0.1, ... times the mean.
    static constexpr int kTenths[] = {17, 3, 12, 1, 20, 8, 0, 15};
    static std::atomic<unsigned> count{0};
    const int tenths = kTenths[count.fetch_add(1) % std::size(kTenths)];
    std::lock_guard<std::mutex> lock(mutex_);
    due_ = now() + Nanos(copyNanos.load() * tenths / 10);
    pending_ = true;
  }

  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pending_) {
      return true;
    }
    if (now() < due_) {
      return false;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& [to, from] : copies_) {
      to.copy_(from);
    }
    copies_.clear();
    pending_ = false;
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  TimePoint due_{};
  bool pending_ = false;
};

class PretendedStaging : public DeviceStaging {
 public:
  at::Tensor hostBuffer(const at::Tensor& tensor) override {
    return at::empty(
        tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
  }
  void copyToHost(const at::Tensor& host, const at::Tensor& tensor) override {
    toHost_.add(host, tensor);
  }
  void copiesToHostIssued() override {
    toHost_.issued();
  }
  bool copiesToHostDone() override {
    return toHost_.done();
  }
  void copyToDevice(const at::Tensor& tensor, const at::Tensor& host) override {
    toDevice_.add(tensor, host);
  }
  void copiesToDeviceIssued() override {
    toDevice_.issued();
  }
  bool copiesToDeviceDone() override {
    return toDevice_.done();
  }
  void blockCurrentStream() override {
    // There is no stream: the thread itself waits.
    while (!toDevice_.done()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::optional<c10::Stream> stream() const override {
    return std::nullopt;
  }

 private:
  LateCopies toHost_;
  LateCopies toDevice_;
};

class PretendedDevice : public StagingFactory {
 public:
  bool takes(const at::Tensor&) override {
    return copyNanos.load(std::memory_order_relaxed) > 0;
  }
  std::unique_ptr<DeviceStaging> make(const at::Tensor&) override {
    return std::make_unique<PretendedStaging>();
  }
};

} // namespace

} // namespace resilient

PYBIND11_MODULE(pretended_device, m) {
  using namespace resilient;
  namespace py = pybind11;
  // For torch_resilient._C._set_staging_factory.
  m.def("factory", [] {
    static PretendedDevice device;
    return py::capsule(&device);
  });
  // From now on, copies take between 0 and twice `copy_s` seconds, in an order
  // that differs from the calls'. With 0, host tensors are host tensors again.
  m.def(
      "set_copy_time",
      [](double copyS) { copyNanos.store(fromSeconds(copyS).count()); },
      py::arg("copy_s"));
}
