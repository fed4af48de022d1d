#include "backend/device_staging.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <dlfcn.h>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/errors.h"
#include "backend/fork_check.h"

namespace resilient {

namespace {

// Two side streams for all operations that are called on one stream of the
// user. Operations of one user stream become ready in its order, so none waits
// for another without need; those of different user streams never share a side
// stream while torch's pool has others. They have high priority, because a copy
// is short and the network waits for it, and because torch's pool of these is
// not the one that the user's streams come from.
//
// Both directions have their own: results of an early operation must not queue
// behind the inputs of a late one, which wait for the user's kernels.
//
// Results are enqueued in the order in which operations end. Each waits for the
// kernels before its own call. These cannot wait for results behind it in the
// stream: wait() returns only once the results that it waits for are enqueued.
// A wait() that does not block its thread would need a stream for each
// operation.
struct SideStreams {
  c10::Stream toHost;
  c10::Stream toDevice;
};

// What operations share.
struct Shared {
  std::mutex mutex;
  std::unordered_map<c10::Stream, SideStreams> streams; // by the user's stream
  // Those that no operation uses. To make or destroy one is a call to the
  // driver, and destroying needs the right current device.
  std::unordered_map<c10::Device, std::vector<c10::Event>> events;
};

// Never destroyed: the driver may be gone before static destruction. A forked
// child begins anew, since a device cannot be used in both.
Shared& shared() {
  static std::mutex mutex;
  static Shared* current = nullptr;
  static int generation = -1;
  std::lock_guard<std::mutex> lock(mutex);
  if (generation != forkGeneration()) {
    generation = forkGeneration();
    current = new Shared();
  }
  return *current;
}

SideStreams sideStreams(
    const c10::impl::VirtualGuardImpl& impl,
    const c10::Stream& caller) {
  Shared& all = shared();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto it = all.streams.find(caller);
  if (it == all.streams.end()) {
    const auto next = [&] {
      return impl.getStreamFromGlobalPool(
          caller.device(), /*isHighPriority=*/true);
    };
    it = all.streams.emplace(caller, SideStreams{next(), next()}).first;
  }
  return it->second;
}

c10::Event takeEvent(c10::Device device) {
  Shared& all = shared();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& events = all.events[device];
  if (events.empty()) {
    return c10::Event(device.type());
  }
  c10::Event event = std::move(events.back());
  events.pop_back();
  return event;
}

void returnEvents(c10::Device device, std::vector<c10::Event> events) {
  Shared& all = shared();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& pool = all.events[device];
  for (c10::Event& event : events) {
    pool.push_back(std::move(event));
  }
}

// While any thread of the process captures a CUDA graph in the default mode, a
// query of an event is illegal in all threads, and makes the capture invalid.
// In relaxed mode a thread says that it does not interfere: our streams and
// events are no part of the capture. The function is CUDA's, if CUDA is loaded;
// the CPU build of torch has none.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    if (exchange() != nullptr) {
      exchange()(&mode_);
    }
  }
  ~RelaxedCapture() {
    if (exchange() != nullptr) {
      exchange()(&mode_);
    }
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  using Exchange = int (*)(int*);
  static Exchange exchange() {
    static const auto found = reinterpret_cast<Exchange>(
        ::dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode"));
    return found;
  }

  int mode_ = 2; // cudaStreamCaptureModeRelaxed
};

bool done(const c10::Event& event) {
  const RelaxedCapture relaxed;
  return event.query();
}

// Tells the caching allocator not to hand the memory to others before the
// stream is done with it.
void keepFor(
    const c10::impl::VirtualGuardImpl& impl,
    const at::Tensor& tensor,
    const c10::Stream& stream) {
  if (tensor.numel() > 0) {
    impl.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

// torch 2.11 cannot tell, but CUDA can.
template <typename Impl>
bool capturing(const Impl& impl, const c10::Stream& stream) {
  if constexpr (requires { impl.isStreamCapturing(stream); }) {
    return impl.isStreamCapturing(stream);
  } else {
    using IsCapturing = int (*)(void* stream, int* status);
    static const auto found = reinterpret_cast<IsCapturing>(
        ::dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
    if (stream.device_type() != c10::DeviceType::CUDA || found == nullptr) {
      return false;
    }
    // A default stream is that of the current device.
    const c10::DeviceGuard guard(stream.device());
    int status = 0;
    return found(stream.native_handle(), &status) == 0 && status != 0;
  }
}

// The calling thread's current stream of the device.
c10::Stream callersStream(
    const c10::impl::VirtualGuardImpl& impl,
    c10::Device device) {
  const c10::Stream stream = impl.getStream(device);
  // The copies would become a part of the graph, and the network would not.
  if (capturing(impl, stream)) {
    throwCallError(
        "the current stream of " + device.str() +
        " is capturing a graph, and an operation over the network cannot be "
        "part of one: call it before or after the capture");
  }
  return stream;
}

} // namespace

DeviceStaging::DeviceStaging(c10::Device device)
    : device_(device),
      impl_(device.type()),
      caller_(callersStream(impl_, device)),
      toHost_(sideStreams(impl_, caller_).toHost),
      toDevice_(sideStreams(impl_, caller_).toDevice),
      called_(takeEvent(device)),
      toHostDone_(takeEvent(device)),
      toDeviceDone_(takeEvent(device)) {
  const c10::DeviceGuard guard(device_);
  called_.record(caller_);
  called_.block(toHost_);
}

// The events may still be pending: who waits for one waits for what it had
// recorded at that time, whatever it records next.
DeviceStaging::~DeviceStaging() {
  std::vector<c10::Event> events;
  events.push_back(std::move(called_));
  events.push_back(std::move(toHostDone_));
  events.push_back(std::move(toDeviceDone_));
  for (Piece& piece : pieces_) {
    events.push_back(std::move(piece.done));
  }
  returnEvents(device_, std::move(events));
}

at::Tensor DeviceStaging::hostBuffer(const at::Tensor& tensor) {
  // Unlike at::empty, this leaves the memory as it is under
  // use_deterministic_algorithms(): it is overwritten whole.
  return at::detail::empty_cpu(
      tensor.sizes(), tensor.scalar_type(), /*pin_memory=*/true);
}

void DeviceStaging::copyToHost(
    const at::Tensor& host,
    const at::Tensor& tensor) {
  const c10::StreamGuard guard(toHost_);
  // An asynchronous copy of a view with such a bit would compute on the host
  // buffer before the bytes have come (pytorch #146286).
  host.copy_(tensor.resolve_conj().resolve_neg(), /*non_blocking=*/true);
  keepFor(impl_, tensor, toHost_);
}

// A view with strange strides becomes contiguous on the device first: a copy of
// a part of it would have to find its elements anew.
void DeviceStaging::copyToHostInPieces(
    const at::Tensor& host,
    const at::Tensor& tensor,
    size_t buffer,
    const std::vector<size_t>& ends) {
  const c10::StreamGuard guard(toHost_);
  const at::Tensor from =
      tensor.resolve_conj().resolve_neg().contiguous().view(-1);
  const at::Tensor to = host.view(-1);
  const auto width = static_cast<size_t>(to.element_size());
  int64_t begin = 0;
  for (const size_t bytes : ends) {
    const auto end = static_cast<int64_t>(bytes / width);
    to.narrow(0, begin, end - begin)
        .copy_(from.narrow(0, begin, end - begin), /*non_blocking=*/true);
    pieces_.push_back({.copied = {buffer, bytes}, .done = takeEvent(device_)});
    pieces_.back().done.record(toHost_);
    begin = end;
  }
  keepFor(impl_, tensor, toHost_);
}

bool DeviceStaging::copiesToHostBegun() const {
  return pieces_.empty() ? copiesToHostDone() : done(pieces_.front().done);
}

std::optional<DeviceStaging::Copied> DeviceStaging::takeCopied() {
  if (nextPiece_ == pieces_.size() || !done(pieces_[nextPiece_].done)) {
    return std::nullopt;
  }
  return pieces_[nextPiece_++].copied;
}

void DeviceStaging::copiesToHostIssued() {
  const c10::DeviceGuard guard(device_);
  toHostDone_.record(toHost_);
  toHostIssued_.store(true, std::memory_order_release);
}

bool DeviceStaging::copiesToHostDone() const {
  return !toHostIssued_.load(std::memory_order_acquire) || done(toHostDone_);
}

void DeviceStaging::copyToDevice(
    const at::Tensor& tensor,
    const at::Tensor& host) {
  const c10::StreamGuard guard(toDevice_);
  followCaller();
  tensor.copy_(host, /*non_blocking=*/true);
  keepFor(impl_, tensor, toDevice_);
}

void DeviceStaging::copyToDevice(
    const at::Tensor& tensor,
    const at::Tensor& host,
    int64_t begin,
    int64_t end) {
  const c10::StreamGuard guard(toDevice_);
  followCaller();
  tensor.view(-1)
      .narrow(0, begin, end - begin)
      .copy_(host.view(-1).narrow(0, begin, end - begin), true);
  keepFor(impl_, tensor, toDevice_);
}

void DeviceStaging::writeSparse(
    const at::Tensor& tensor,
    const at::Tensor& host) {
  const c10::StreamGuard guard(toDevice_);
  followCaller();
  const auto copy = [&](const at::Tensor& part) {
    const at::Tensor pinned = hostBuffer(part).copy_(part);
    const at::Tensor there = at::empty(
        part.sizes(), part.options().device(device_).pinned_memory(false));
    // The allocator knows it as memory of the side stream.
    keepFor(impl_, there, caller_);
    return there.copy_(pinned, /*non_blocking=*/true);
  };
  auto* impl = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  impl->set_indices_and_values_unsafe(
      copy(host._indices()), copy(host._values()));
  impl->set_coalesced(true);
}

void DeviceStaging::followCaller() {
  if (!toDeviceFollows_) {
    called_.block(toDevice_);
    if (!pieces_.empty()) {
      // A result may lie where an input is still being read.
      toHostDone_.block(toDevice_);
    }
    toDeviceFollows_ = true;
  }
}

void DeviceStaging::copiesToDeviceIssued() {
  const c10::DeviceGuard guard(device_);
  toDeviceDone_.record(toDevice_);
  toDeviceIssued_.store(true, std::memory_order_release);
}

bool DeviceStaging::copiesToDeviceDone() const {
  return !toDeviceIssued_.load(std::memory_order_acquire) ||
      done(toDeviceDone_);
}

void DeviceStaging::blockCurrentStream() const {
  if (toDeviceIssued_.load(std::memory_order_acquire)) {
    const c10::DeviceGuard guard(device_);
    toDeviceDone_.block(impl_.getStream(device_));
  }
}

std::string DeviceStaging::callerStream() const {
  return device_.str() + ", stream " + std::to_string(caller_.id());
}

} // namespace resilient
