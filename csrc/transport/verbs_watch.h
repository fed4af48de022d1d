#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transport/device_thread.h"
#include "transport/event_loop.h"
#include "transport/hotplug_watch.h"
#include "transport/verbs_api.h"

namespace resilient {

// Tells what RDMA devices report by themselves: that a port goes down or comes
// back, has other addresses, or that something has failed. Together with
// LinkWatch the fastest witness of a failure, of our own devices only.
// Paper: SHIFT §4.3.2, the port event.
//
// It keeps the devices open, since the event that a port is back comes while no
// path uses the device. A device that has failed, or that the host is about to
// remove, is let go of, and opened anew: when the kernel adds it again, and
// after growing pauses. A thread for each device does that, because both may
// block. A device that the host has got since the start is watched, too.
//
// Thread: the loop's. The callback runs in the loop; it must not destroy this
// object.
class VerbsWatch final {
 public:
  // `device` is open; after kDeviceFailed it is the failed one, for the time of
  // the call.
  using Callback = std::function<void(
      const std::string& name,
      const VerbsDevice& device,
      const VerbsEvent& event)>;

  using Filter = std::function<bool(const std::string& name)>;

  // Of these devices, one that cannot be opened is left out: then no path uses
  // it either. `isWanted`: of those that come later.
  VerbsWatch(
      EventLoop& loop,
      VerbsApi& api,
      const std::set<std::string>& devices,
      Filter isWanted,
      Callback callback);
  ~VerbsWatch();
  VerbsWatch(const VerbsWatch&) = delete;
  VerbsWatch& operator=(const VerbsWatch&) = delete;

  // Looks soon whether devices have come or gone, as when the kernel says so.
  void look();
  // The device has failed, and is not open again yet.
  bool isFailed(const std::string& name) const;

 private:
  struct Watched;

  void add(Watched& watched, std::shared_ptr<VerbsDevice> device);
  void fail(Watched& watched, const std::string& why);
  void openLater(Watched& watched);
  void open(Watched& watched);
  void opened(
      Watched& watched,
      const std::shared_ptr<VerbsDevice>& device,
      const Status& status);
  void listed(const std::set<std::string>& names);

  EventLoop& loop_;
  VerbsApi& api_;
  const Filter isWanted_;
  const Callback callback_;
  const std::shared_ptr<LoopCalls> calls_;
  std::vector<std::unique_ptr<Watched>> watched_;
  DeviceThread lister_;
  HotplugWatch hotplug_;
};

} // namespace resilient
