#include "transport/device_thread.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

namespace resilient {

void LoopCalls::post(
    const std::shared_ptr<LoopCalls>& calls,
    std::function<void()> call) {
  const std::lock_guard lock(calls->mutex_);
  if (calls->loop_ != nullptr) {
    calls->loop_->post([calls, call = std::move(call)] {
      if (calls->loop_ != nullptr) {
        call();
      }
    });
  }
}

void LoopCalls::end() {
  const std::lock_guard lock(mutex_);
  loop_ = nullptr;
}

struct DeviceThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool running = false; // the thread
  bool ended = false; // no more jobs will come

  void run() {
    // An idle thread costs little, but a process that uses RDMA no more should
    // not keep it.
    constexpr auto kIdle = std::chrono::seconds(10);
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait_for(lock, kIdle, [&] { return !jobs.empty() || ended; });
      if (jobs.empty()) {
        running = false;
        return;
      }
      std::function<void()> job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr; // may block, too
      lock.lock();
    }
  }
};

DeviceThread::DeviceThread() : queue_(std::make_shared<Queue>()) {}

DeviceThread::~DeviceThread() {
  const std::lock_guard lock(queue_->mutex);
  queue_->ended = true;
  queue_->changed.notify_one();
}

void DeviceThread::run(std::function<void()> job) {
  const std::lock_guard lock(queue_->mutex);
  queue_->jobs.push_back(std::move(job));
  queue_->changed.notify_one();
  if (!std::exchange(queue_->running, true)) {
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
}

} // namespace resilient
