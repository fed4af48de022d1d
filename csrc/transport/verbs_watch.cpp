#include "transport/verbs_watch.h"

#include <sys/epoll.h>

#include <utility>

#include "base/log.h"

namespace resilient {

struct VerbsWatch::Watched final : Handler {
  Watched(
      const VerbsWatch& w,
      std::string n,
      std::shared_ptr<VerbsDevice> opened)
      : watch(w), name(std::move(n)), device(std::move(opened)) {}

  void onEvents(uint32_t mask) override {
    std::vector<VerbsEvent> events;
    device->takeEvents(events);
    if ((mask & (EPOLLERR | EPOLLHUP)) != 0) { // removed; it says so for ever
      watch.loop_.remove(device->eventsFd());
      watched = false;
      events.push_back({VerbsEvent::Kind::kDeviceFailed});
    }
    for (const VerbsEvent& event : events) {
      watch.callback_(name, event);
    }
  }

  const VerbsWatch& watch;
  const std::string name;
  const std::shared_ptr<VerbsDevice> device;
  bool watched = true;
};

VerbsWatch::VerbsWatch(
    EventLoop& loop,
    VerbsApi& api,
    const std::set<std::string>& devices,
    Callback callback)
    : loop_(loop), callback_(std::move(callback)) {
  for (const std::string& name : devices) {
    std::shared_ptr<VerbsDevice> device;
    if (const Status status = api.open(name, device); !status.ok()) {
      logMessage(
          LogLevel::kDebug, "no RDMA with a device: " + status.message());
      continue;
    }
    watched_.push_back(
        std::make_unique<Watched>(*this, name, std::move(device)));
    loop_.add(
        watched_.back()->device->eventsFd(), EPOLLIN, watched_.back().get());
  }
}

VerbsWatch::~VerbsWatch() {
  for (const auto& watched : watched_) {
    if (watched->watched) {
      loop_.remove(watched->device->eventsFd());
    }
  }
}

} // namespace resilient
