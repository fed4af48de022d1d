#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "transport/event_loop.h"

namespace resilient {

// Lets other threads call into the loop while the owner exists.
class LoopCalls {
 public:
  explicit LoopCalls(EventLoop& loop) : loop_(&loop) {}

  // Any thread. Runs `call` in a later turn, unless end() comes first: then it
  // is destroyed without a call, on whichever thread holds it.
  static void post(
      const std::shared_ptr<LoopCalls>& calls,
      std::function<void()> call);
  // Loop thread. No call runs afterwards.
  void end();

 private:
  std::mutex mutex_;
  EventLoop* loop_; // written in the loop, under the mutex; null: ended
};

// Runs jobs that may block, in order, on a thread of its own: the calls to one
// RDMA device. A device that does not answer holds up its own jobs only.
//
// The thread is detached, and exists while there are jobs and for some seconds
// after. A job that never returns therefore holds up no end of the process.
//
// Thread: any.
class DeviceThread {
 public:
  DeviceThread();
  // Jobs that are queued still run.
  ~DeviceThread();
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;

  // The job is destroyed on the thread, too.
  void run(std::function<void()> job);

 private:
  struct Queue; // shared with the thread
  const std::shared_ptr<Queue> queue_;
};

} // namespace resilient
