#pragma once

#include <functional>

#include "transport/event_loop.h"

namespace resilient {

// Calls a function on the loop thread when the process gets SIGUSR1. It takes
// the signal only if the program leaves it at its default (which would end the
// process), and keeps it then: a signal that comes late must not kill.
//
// Thread: loop thread. One at a time in a process.
class SignalDump final : public Handler {
 public:
  SignalDump(EventLoop& loop, std::function<void()> call);
  ~SignalDump() override;
  void onEvents(uint32_t events) override;

 private:
  EventLoop& loop_;
  std::function<void()> call_;
};

} // namespace resilient
