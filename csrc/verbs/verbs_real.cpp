#include <infiniband/verbs.h>

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/verbs_api.h"
#include "verbs/handles.h"
#include "verbs/ports.h"
#include "verbs/queue_pair.h"
#include "verbs/registered_memory.h"

// The verbs of transport/verbs_api.h by libibverbs, in a library of their own
// (torch_resilient/_verbs*.so), which transport/verbs_system.cpp opens.

namespace resilient {
namespace {

class DeviceList {
 public:
  Status read() {
    list_.reset(ibv_get_device_list(&count_));
    // A kernel without RDMA (ENOSYS) has no devices.
    if (list_ == nullptr && errno != ENOSYS) {
      return errnoStatus(StatusCode::kNetwork, "list RDMA devices", errno);
    }
    return {};
  }
  ibv_device** begin() const {
    return list_.get();
  }
  ibv_device** end() const {
    return list_ == nullptr ? nullptr : list_.get() + count_;
  }

 private:
  std::unique_ptr<ibv_device*, VerbsDeleter<ibv_free_device_list>> list_;
  int count_ = 0;
};

Status openContext(ibv_device* device, ContextHandle& context) {
  context.reset(ibv_open_device(device));
  if (context != nullptr) {
    return {};
  }
  const Status status = verbsStatus(device->name, "open it", errno);
  return Status(
      status.code(),
      status.message() +
          "; the process needs read and write access to /dev/infiniband");
}

class RealDevice final : public VerbsDevice {
 public:
  explicit RealDevice(std::shared_ptr<OpenDevice> device)
      : device_(std::move(device)) {}

  const std::string& name() const override {
    return device_->name;
  }
  Status registerMemory(
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) override {
    return RegisteredMemory::make(device_, bytes, forReads, memory);
  }
  Status registerDmabuf(
      int dmabuf,
      uint64_t offset,
      std::span<std::byte> bytes,
      bool forReads,
      std::unique_ptr<VerbsMemory>& memory) override {
    return RegisteredMemory::fromDmabuf(
        device_, dmabuf, offset, bytes, forReads, memory);
  }
  Status makeQueuePair(
      const VerbsPort& port,
      const VerbsQueuePairConfig& config,
      std::unique_ptr<VerbsQueuePair>& queuePair) override {
    return resilient::makeQueuePair(device_, port, config, queuePair);
  }
  int eventsFd() const override {
    return device_->context->async_fd;
  }
  void takeEvents(std::vector<VerbsEvent>& events) override;

 private:
  const std::shared_ptr<OpenDevice> device_;
};

// Nothing if the transport has no use for it. A completion queue that fails
// (IBV_EVENT_CQ_ERR) takes its queue pair with it, which has an event too.
std::optional<VerbsEvent> eventOf(const ibv_async_event& from) {
  VerbsEvent event;
  switch (from.event_type) {
    case IBV_EVENT_PORT_ERR:
      event.kind = VerbsEvent::Kind::kPortDown;
      break;
    case IBV_EVENT_PORT_ACTIVE:
      event.kind = VerbsEvent::Kind::kPortUp;
      break;
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
      event.kind = VerbsEvent::Kind::kAddressesChanged;
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      event.kind = VerbsEvent::Kind::kQueuePairFailed;
      event.queuePair = from.element.qp->qp_num;
      return event;
    case IBV_EVENT_DEVICE_FATAL:
      return event;
    default:
      return std::nullopt;
  }
  event.port = static_cast<uint8_t>(from.element.port_num);
  return event;
}

// Each event is acknowledged at once: destroying a queue pair waits until its
// events are.
void RealDevice::takeEvents(std::vector<VerbsEvent>& events) {
  ibv_async_event taken{};
  while (ibv_get_async_event(device_->context.get(), &taken) == 0) {
    if (const auto event = eventOf(taken)) {
      events.push_back(*event);
    }
    ibv_ack_async_event(&taken);
  }
}

// Thread: any.
class RealVerbs final : public VerbsApi {
 public:
  RealVerbs() {
    // Before Linux 5.12, a forked child would take pages over that a device
    // writes to. Newer kernels need nothing, and this call does nothing there.
    ibv_fork_init();
  }

  Status devices(std::set<std::string>& names) override;
  Status ports(std::vector<VerbsPort>& ports) override;
  Status open(const std::string& name, std::shared_ptr<VerbsDevice>& device)
      override;
  void forget(const VerbsDevice& device) override;

 private:
  static Status openNew(
      const std::string& name,
      std::shared_ptr<VerbsDevice>& device);

  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<VerbsDevice>> open_; // under mutex_
};

Status RealVerbs::devices(std::set<std::string>& names) {
  DeviceList devices;
  if (Status status = devices.read(); !status.ok()) {
    return status;
  }
  for (const ibv_device* device : devices) {
    names.insert(device->name);
  }
  return {};
}

// A device that cannot be opened or read is left out, unless all are like that.
Status RealVerbs::ports(std::vector<VerbsPort>& ports) {
  DeviceList devices;
  if (Status status = devices.read(); !status.ok()) {
    return status;
  }
  Status failure;
  bool isAnyReadable = false;
  for (ibv_device* device : devices) {
    ContextHandle context;
    std::vector<DevicePort> found;
    Status status = openContext(device, context);
    if (status.ok()) {
      status = listPorts(*context, found);
    }
    for (const DevicePort& each : found) {
      ports.push_back(each.port);
    }
    isAnyReadable = isAnyReadable || status.ok();
    if (failure.ok()) {
      failure = status;
    }
  }
  return isAnyReadable ? Status() : failure;
}

// Not under the mutex while it opens one: a device that does not answer must
// not hold up the others. If two threads open one at a time, the first wins.
Status RealVerbs::open(
    const std::string& name,
    std::shared_ptr<VerbsDevice>& device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    device = open_[name].lock();
  }
  if (device != nullptr) {
    return {};
  }
  if (Status status = openNew(name, device); !status.ok()) {
    return status;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<VerbsDevice>& known = open_[name];
  if (std::shared_ptr<VerbsDevice> other = known.lock()) {
    device = std::move(other);
  } else {
    known = device;
  }
  return {};
}

void RealVerbs::forget(const VerbsDevice& device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(open_, [&](const auto& entry) {
    return entry.second.lock().get() == &device;
  });
}

Status RealVerbs::openNew(
    const std::string& name,
    std::shared_ptr<VerbsDevice>& device) {
  DeviceList devices;
  if (Status status = devices.read(); !status.ok()) {
    return status;
  }
  for (ibv_device* each : devices) {
    if (name != each->name) {
      continue;
    }
    auto made = std::make_shared<OpenDevice>();
    made->name = name;
    if (Status status = openContext(each, made->context); !status.ok()) {
      return status;
    }
    if (!setNonBlocking(made->context->async_fd)) {
      return verbsStatus(name, "prepare to hear of its events", errno);
    }
    if (const int r = ibv_query_device(made->context.get(), &made->limits);
        r != 0) {
      return verbsStatus(name, "read its properties", verbsError(r));
    }
    made->domain.reset(ibv_alloc_pd(made->context.get()));
    if (made->domain == nullptr) {
      return verbsStatus(name, "make a protection domain", errno);
    }
    device = std::make_shared<RealDevice>(std::move(made));
    return {};
  }
  return verbsStatus(name, "open it", ENODEV);
}

} // namespace
} // namespace resilient

extern "C" __attribute__((visibility("default"))) resilient::VerbsApi*
resilient_verbs_open(uint32_t version) { // NOLINT: a name of C
  if (version != resilient::kVerbsApiVersion) {
    return nullptr;
  }
  // Never destroyed: other threads may use it until the process has ended.
  static auto* const api = new resilient::RealVerbs;
  return api;
}
