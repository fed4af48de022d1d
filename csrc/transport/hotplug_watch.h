#pragma once

#include <functional>
#include <string_view>

#include "base/syscall.h"
#include "transport/event_loop.h"

namespace resilient {

// Tells when the kernel adds or removes an RDMA device (its uevents). It is the
// only news of a device that waits until nobody uses it any more before it
// goes, and the fastest of one that is back.
//
// Thread: the loop's. Without netlink (some sandboxes) it is silent. The
// callback runs in the loop and must not destroy this object.
class HotplugWatch final : private Handler {
 public:
  HotplugWatch(EventLoop& loop, std::function<void()> callback);
  ~HotplugWatch() override;
  HotplugWatch(const HotplugWatch&) = delete;
  HotplugWatch& operator=(const HotplugWatch&) = delete;

  // Whether a uevent is about an RDMA device. `message`: lines that end with 0.
  static bool concerns(std::string_view message);

 private:
  void onEvents(uint32_t events) override;

  EventLoop& loop_;
  const std::function<void()> callback_;
  FileDescriptor fd_;
};

} // namespace resilient
