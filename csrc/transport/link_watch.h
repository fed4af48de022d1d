#pragma once

#include <functional>
#include <string>

#include "transport/event_loop.h"

struct nlmsghdr; // NOLINT(readability-identifier-naming): the kernel's

namespace resilient {

// Tells at once when a network interface of this host goes down, loses its
// carrier or comes back, or when addresses change, as the kernel says
// (rtnetlink): the fastest witness of a failure, of our own NICs only.
// Paper: SHIFT §4.3.2, the port event.
//
// Thread: the loop's. Without netlink (some sandboxes) it is silent, and
// working() is false.
//
// The callbacks run in the loop, from within a loop over messages: they must
// not destroy this object. One change may lead to several calls.
class LinkWatch final : private Handler {
 public:
  // `usable`: up and with a carrier. Also called for interfaces that are gone.
  using Callback = std::function<void(const std::string& nic, bool usable)>;

  // `onAddresses` carries no data: the callee reads the list of interfaces
  // itself.
  //
  // If the kernel has dropped news (ENOBUFS), `onAddresses` is called, and
  // `callback` with the present state of every interface, changed or not. An
  // interface that has gone meanwhile is not among them, and shows as silence.
  LinkWatch(
      EventLoop& loop,
      Callback callback,
      std::function<void()> onAddresses);
  ~LinkWatch() override;

  bool working() const {
    return static_cast<bool>(fd_);
  }

 private:
  void onEvents(uint32_t events) override;
  void onMessage(const nlmsghdr& message);
  void askForLinks();

  EventLoop& loop_;
  Callback callback_;
  std::function<void()> onAddresses_;
  FileDescriptor fd_;
  bool missed_ = false; // the kernel has dropped news
};

} // namespace resilient
