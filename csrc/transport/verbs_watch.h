#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transport/event_loop.h"
#include "transport/verbs_api.h"

namespace resilient {

// Tells what RDMA devices report by themselves: that a port goes down or comes
// back, has other addresses, or that something has failed. Together with
// LinkWatch the fastest witness of a failure, of our own devices only.
// Paper: SHIFT §4.3.2, the port event.
//
// It keeps the devices open, since the event that a port is back comes while no
// path uses the device.
//
// Thread: the loop's. The callback runs in the loop; it must not destroy this
// object.
class VerbsWatch final {
 public:
  using Callback =
      std::function<void(const std::string& device, const VerbsEvent& event)>;

  // A device that cannot be opened is left out: then no path uses it either.
  VerbsWatch(
      EventLoop& loop,
      VerbsApi& api,
      const std::set<std::string>& devices,
      Callback callback);
  ~VerbsWatch();
  VerbsWatch(const VerbsWatch&) = delete;
  VerbsWatch& operator=(const VerbsWatch&) = delete;

 private:
  struct Watched;

  EventLoop& loop_;
  const Callback callback_;
  std::vector<std::unique_ptr<Watched>> watched_;
};

} // namespace resilient
