#include "transport/verbs_watch.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace resilient {
namespace {

// Between two attempts to open a failed device: twice as long after each.
constexpr Nanos kOpenAgain = std::chrono::seconds(1);
constexpr int kMaxDoublings = 6;
// A device that has worked for less counts as one that has not come back.
constexpr Nanos kWorthTrying = std::chrono::seconds(10);

} // namespace

struct VerbsWatch::Watched final : Handler {
  Watched(VerbsWatch& w, std::string n) : watch(w), name(std::move(n)) {}

  void onEvents(uint32_t mask) override {
    if (device == nullptr) {
      return;
    }
    std::vector<VerbsEvent> events;
    device->takeEvents(events);
    if ((mask & (EPOLLERR | EPOLLHUP)) != 0) { // removed
      events.push_back({VerbsEvent::Kind::kDeviceFailed});
    }
    for (const VerbsEvent& event : events) {
      if (event.kind == VerbsEvent::Kind::kDeviceFailed) {
        watch.fail(*this, "has failed");
        return;
      }
      watch.callback_(name, *device, event);
    }
  }

  VerbsWatch& watch;
  const std::string name;
  std::shared_ptr<VerbsDevice> device; // null: failed, or not open yet
  bool opening = false;
  int failures = 0; // in a row
  TimePoint openedAt{}; // 0: never
  TimerId timer = 0; // opens it
  DeviceThread thread;
};

VerbsWatch::VerbsWatch(
    EventLoop& loop,
    VerbsApi& api,
    const std::set<std::string>& devices,
    Filter isWanted,
    Callback callback)
    : loop_(loop),
      api_(api),
      isWanted_(std::move(isWanted)),
      callback_(std::move(callback)),
      calls_(std::make_shared<LoopCalls>(loop)),
      hotplug_(loop, [this] { look(); }) {
  for (const std::string& name : devices) {
    std::shared_ptr<VerbsDevice> device;
    if (const Status status = api.open(name, device); !status.ok()) {
      logMessage(
          LogLevel::kDebug, "no RDMA with a device: " + status.message());
      continue;
    }
    watched_.push_back(std::make_unique<Watched>(*this, name));
    add(*watched_.back(), std::move(device));
  }
}

VerbsWatch::~VerbsWatch() {
  calls_->end();
  for (const auto& watched : watched_) {
    loop_.cancel(watched->timer);
    if (watched->device != nullptr) {
      loop_.remove(watched->device->eventsFd());
    }
  }
}

bool VerbsWatch::isFailed(const std::string& name) const {
  return std::ranges::any_of(watched_, [&](const auto& watched) {
    return watched->name == name && watched->device == nullptr;
  });
}

void VerbsWatch::add(Watched& watched, std::shared_ptr<VerbsDevice> device) {
  watched.device = std::move(device);
  watched.openedAt = loop_.now();
  loop_.add(watched.device->eventsFd(), EPOLLIN, &watched);
}

// Others let go of the device when they hear of it. The last of them closes it,
// which may block: so none of them does that in the loop.
void VerbsWatch::fail(Watched& watched, const std::string& why) {
  std::shared_ptr<VerbsDevice> device = std::move(watched.device);
  loop_.remove(device->eventsFd());
  api_.forget(*device);
  if (loop_.now() - watched.openedAt > kWorthTrying) {
    watched.failures = 0;
  }
  logMessage(
      LogLevel::kWarning,
      "the RDMA device " + watched.name + ' ' + why +
          ": connections carry until it is back");
  callback_(watched.name, *device, {.kind = VerbsEvent::Kind::kDeviceFailed});
  watched.thread.run([device = std::move(device)] {});
  openLater(watched);
}

void VerbsWatch::openLater(Watched& watched) {
  const int doublings = std::min(watched.failures++, kMaxDoublings);
  watched.timer = loop_.after(kOpenAgain * (1 << doublings), [this, &watched] {
    watched.timer = 0;
    open(watched);
  });
}

void VerbsWatch::open(Watched& watched) {
  loop_.cancel(watched.timer);
  watched.timer = 0;
  watched.opening = true;
  watched.thread.run(
      [this, &watched, &api = api_, name = watched.name, calls = calls_] {
        std::shared_ptr<VerbsDevice> device;
        const Status status = api.open(name, device);
        LoopCalls::post(calls, [this, &watched, device, status] {
          opened(watched, device, status);
        });
      });
}

void VerbsWatch::opened(
    Watched& watched,
    const std::shared_ptr<VerbsDevice>& device,
    const Status& status) {
  watched.opening = false;
  if (!status.ok()) {
    logMessage(
        LogLevel::kDebug,
        "the RDMA device " + watched.name +
            " cannot be opened: " + status.message());
    openLater(watched);
    return;
  }
  const bool isNew = watched.openedAt == TimePoint();
  add(watched, device);
  logMessage(
      LogLevel::kInfo,
      "the RDMA device " + watched.name + (isNew ? " is there" : " is back"));
  callback_(watched.name, *device, {.kind = VerbsEvent::Kind::kDeviceBack});
}

void VerbsWatch::look() {
  lister_.run([this, &api = api_, calls = calls_] {
    std::set<std::string> names;
    if (api.devices(names).ok()) {
      LoopCalls::post(calls, [this, names] { listed(names); });
    }
  });
}

void VerbsWatch::listed(const std::set<std::string>& names) {
  for (const std::string& name : names) {
    const bool isKnown = std::ranges::any_of(
        watched_, [&](const auto& watched) { return watched->name == name; });
    if (!isKnown && isWanted_(name)) {
      watched_.push_back(std::make_unique<Watched>(*this, name));
    }
  }
  for (const auto& watched : watched_) {
    const bool isThere = names.contains(watched->name);
    if (watched->device != nullptr && !isThere) {
      fail(*watched, "is being removed");
    } else if (watched->device == nullptr && !watched->opening && isThere) {
      open(*watched);
    }
  }
}

} // namespace resilient
