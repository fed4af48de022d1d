#include "tests/device/strict_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/device/strict_memory.h"
#include "tests/device/strict_stream.h"

namespace resilient::strict {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// --- Devices and contexts

thread_local int currentDevice = 0;
thread_local std::array<Stream*, kDevices> currentStreams{};
thread_local bool relaxedCapture = false;

std::array<std::atomic<bool>, kDevices> contexts{};

void needContext(int device) {
  contexts.at(device).store(true);
}

} // namespace

int currentDeviceIndex() {
  return currentDevice;
}

void setDeviceAndContext(int device) {
  if (device != currentDevice) {
    currentDevice = device;
    needContext(device);
  }
}

Stream& currentStream(int device) {
  Stream* current = currentStreams.at(device);
  return current != nullptr ? *current : stream(device, 0);
}

namespace {

c10::Device asDevice(int device) {
  return {kType, static_cast<c10::DeviceIndex>(device)};
}

c10::Stream wrap(const Stream& s) {
  return c10::Stream(c10::Stream::UNSAFE, asDevice(s.device()), s.id());
}

Stream& unwrap(const c10::Stream& s) {
  return stream(s.device_index(), s.id());
}

// --- Events and the guard

// Not thread-safe, as c10::Event is not: the thread sanitizer finds misuse.
struct Event {
  int device;
  SignalPtr recorded;
};

std::atomic<int64_t> madeEvents{0};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    if (device.index() >= 0) {
      setDeviceAndContext(device.index());
    }
    return old;
  }
  c10::Device getDevice() const override {
    return asDevice(currentDevice);
  }
  void setDevice(c10::Device device) const override {
    setDeviceAndContext(device.index());
  }
  // As c10::cuda::MaybeSetDevice: no context comes from switching back.
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    currentDevice = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = device.has_index() ? device.index() : currentDevice;
    return wrap(currentStream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return wrap(stream(device.index(), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool isHighPriority)
      const override {
    const int index = device.has_index() ? device.index() : currentDevice;
    return wrap(nextPoolStream(index, isHighPriority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const int index = device.has_index() ? device.index() : currentDevice;
    return wrap(newStream(index, priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    Stream& old = currentStream(next.device_index());
    currentStreams.at(next.device_index()) = &unwrap(next);
    return wrap(old);
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event == nullptr) {
      return;
    }
    auto* e = static_cast<Event*>(event);
    const int before = currentDevice;
    setDeviceAndContext(e->device);
    delete e;
    setDeviceAndContext(before);
  }
  void record(
      void** event,
      const c10::Stream& s,
      c10::DeviceIndex,
      c10::EventFlag) const override {
    const int before = currentDevice;
    setDeviceAndContext(s.device_index());
    if (*event == nullptr) {
      *event = new Event{s.device_index(), nullptr};
      madeEvents.fetch_add(1);
    }
    static_cast<Event*>(*event)->recorded = unwrap(s).mark();
    setDeviceAndContext(before);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr || !static_cast<Event*>(event)->recorded) {
      return;
    }
    const int before = currentDevice;
    setDeviceAndContext(s.device_index());
    unwrap(s).waitFor(static_cast<Event*>(event)->recorded);
    setDeviceAndContext(before);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || !static_cast<Event*>(event)->recorded) {
      return true;
    }
    if (globalCapture() && !relaxedCapture) {
      invalidated.store(true);
      throw std::runtime_error(
          "strict device: operation not permitted while a stream is "
          "capturing: the capture is invalid");
    }
    const auto* e = static_cast<Event*>(event);
    const bool set = e->recorded->isSet();
    if (!set && lateAnswers.load()) {
      synchronizeDevice(e->device);
    }
    return set;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && static_cast<Event*>(event)->recorded) {
      static_cast<Event*>(event)->recorded->wait();
    }
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& s) const override {
    return unwrap(s).idle();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    unwrap(s).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (Stream* s : allStreams(device)) {
      s->synchronize();
    }
  }
  // Overrides torch's from 2.12 on; 2.11 has none.
  bool isStreamCapturing(const c10::Stream& s) const {
    return unwrap(s).capturing();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s)
      const override {
    memory(s.device_index()).recordUse(data.get(), unwrap(s));
  }

  // A query was made that makes the capture in progress useless.
  static std::atomic<bool> invalidated;
  static std::atomic<bool> lateAnswers;
};

std::atomic<bool> Guard::invalidated{false};
std::atomic<bool> Guard::lateAnswers{false};

// --- Allocators

void freeDevice(void* pointer) {
  if (const int device = deviceOf(pointer); device >= 0) {
    memory(device).free(pointer);
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = currentDevice;
    needContext(device);
    void* data = memory(device).allocate(bytes, currentStream(device));
    return {data, data, &freeDevice, asDevice(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &freeDevice;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    throw std::runtime_error("strict device: copy_data");
  }
};

DeviceAllocator deviceAllocator;

void freePinned(void* pointer) {
  if (pointer != nullptr) {
    pinned().free(pointer);
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = pinned().allocate(bytes);
    return {data, data, &freePinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &freePinned;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinnedAllocator;

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return contexts.at(device).load();
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned().contains(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinnedAllocator;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return asDevice(deviceOf(data));
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(currentDevice);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    setDeviceAndContext(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int old = currentDevice;
    setDeviceAndContext(device);
    return static_cast<c10::DeviceIndex>(old);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const int old = currentDevice;
    currentDevice = device;
    return static_cast<c10::DeviceIndex>(old);
  }
};

// --- Kernels

// The elements of a tensor for a task: addresses, without a reference.
struct Elements {
  explicit Elements(const at::Tensor& t)
      : data(const_cast<void*>(t.const_data_ptr())),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        type(t.scalar_type()) {
    if (t.is_privateuseone()) {
      data = memory(t.get_device()).inTask(data);
    }
  }

  at::Tensor tensor() const {
    return at::from_blob(
        data, sizes, strides, at::TensorOptions().dtype(type).device(at::kCPU));
  }

  void* data;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType type;
};

Stream& streamFor(const at::Tensor& t) {
  needContext(t.get_device());
  return currentStream(t.get_device());
}

// True if the host side of a copy may be read or written later.
bool mayBeLate(const at::Tensor& t, Stream& s) {
  if (t.is_privateuseone()) {
    return true;
  }
  if (!pinned().contains(t.const_data_ptr())) {
    return false;
  }
  pinned().recordUse(t.const_data_ptr(), s);
  return true;
}

void negateOrConjugate(const Elements& to, bool negate, bool conjugate) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (conjugate) {
    to.tensor().conj_physical_();
  }
  if (negate) {
    to.tensor().neg_();
  }
}

at::Tensor
copyFrom(const at::Tensor& self, const at::Tensor& target, bool nonBlocking) {
  if (target.numel() == 0) {
    return target;
  }
  Stream& s = streamFor(self.is_privateuseone() ? self : target);
  const bool two = self.is_privateuseone() && target.is_privateuseone();
  const bool late =
      (nonBlocking || two) && mayBeLate(self, s) && mayBeLate(target, s);
  if (two && self.get_device() != target.get_device()) {
    s.waitFor(streamFor(target).mark());
  }
  const Elements from(self);
  const Elements to(target);
  s.enqueue([from, to, bytes = self.nbytes()] {
    takeCopyTime(bytes);
    at::AutoDispatchBelowADInplaceOrView below;
    to.tensor().copy_(from.tensor());
  });
  if (two && self.get_device() != target.get_device()) {
    streamFor(target).waitFor(s.mark());
  }
  if (!late) {
    s.synchronize();
  }
  const bool negate = self.is_neg() != target.is_neg();
  const bool conjugate = self.is_conj() != target.is_conj();
  if (negate || conjugate) {
    // On the host it happens now, even if the bytes come later: as in
    // copy_kernel_cuda.
    if (target.is_cpu()) {
      negateOrConjugate(to, negate, conjugate);
    } else {
      s.enqueue([to, negate, conjugate] {
        negateOrConjugate(to, negate, conjugate);
      });
    }
  }
  return target;
}

at::Tensor copyFromAndResize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) {
    target.resize_(self.sizes());
  }
  return copyFrom(self, target, false);
}

at::Tensor emptyMemoryFormat(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(
      device && device->has_index() ? *device : asDevice(currentDevice));
  return at::detail::empty_generic(
      size,
      &deviceAllocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor emptyStrided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(
      device && device->has_index() ? *device : asDevice(currentDevice));
  return at::detail::empty_strided_generic(
      size,
      stride,
      &deviceAllocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() > 0) {
    const Elements to(self);
    streamFor(self).enqueue([to, value] {
      at::AutoDispatchBelowADInplaceOrView below;
      to.tensor().fill_(value);
    });
  }
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  return fill(self, 0);
}

at::Scalar item(const at::Tensor& self) {
  Stream& s = streamFor(self);
  s.synchronize();
  return Elements(self).tensor().item();
}

// The storage of an output of another size, for the CPU fallback.
const at::Tensor& resize(
    const at::Tensor& self,
    c10::IntArrayRef size,
    std::optional<c10::MemoryFormat>) {
  if (self.sizes() == size) {
    return self;
  }
  const at::Tensor fresh = at::empty(size, self.options());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(fresh.storage(), fresh.dtype());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides());
  return self;
}

at::Tensor& setStorage(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(std::move(storage), self.dtype());
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

// Tensor.record_stream()
void recordStream(at::Tensor& self, at::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  memory(stream.device_index()).recordUse(data.get(), unwrap(stream));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(emptyMemoryFormat));
  m.impl("empty_strided", TORCH_FN(emptyStrided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(setStorage));
  m.impl("_copy_from", TORCH_FN(copyFrom));
  m.impl("_copy_from_and_resize", TORCH_FN(copyFromAndResize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("fill_.Scalar", TORCH_FN(fill));
  m.impl("zero_", TORCH_FN(zero));
  m.impl("record_stream", TORCH_FN(recordStream));
}

// Sparse tensors hold two dense ones; only what a collective needs.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl(
      "_sparse_coo_tensor_with_dims_and_tensors",
      TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  m.impl("_values", TORCH_FN(at::native::_values_sparse));
  m.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  m.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  m.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
}

// Copies see the bits of views, as those of CUDA do.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace resilient::strict

namespace resilient::strict {

void registerDevice() {
  static Hooks hooks;
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("strict");
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(kType, &deviceAllocator);
  });
}

std::vector<int> devicesWithContext() {
  std::vector<int> found;
  for (int device = 0; device < kDevices; ++device) {
    if (contexts.at(device).load()) {
      found.push_back(device);
    }
  }
  return found;
}

int64_t eventsMade() {
  return madeEvents.load();
}

void answerLate(bool late) {
  Guard::lateAnswers.store(late);
}

void beginCapture() {
  Guard::invalidated.store(false);
  currentStream(currentDevice).setCapturing(true);
}

bool endCapture() {
  currentStream(currentDevice).setCapturing(false);
  return !Guard::invalidated.load();
}

} // namespace resilient::strict

// Found by dlsym() as the function of CUDA's runtime would be: sets the mode of
// the calling thread and returns the old one. 2 is relaxed.
extern "C" __attribute__((visibility("default"))) int
cudaThreadExchangeStreamCaptureMode(int* mode) {
  const bool relaxed = *mode == 2;
  *mode = resilient::strict::relaxedCapture ? 2 : 0;
  resilient::strict::relaxedCapture = relaxed;
  return 0;
}
