#include "collectives/concurrent.h"

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>

namespace resilient {
namespace {

// Suspends the awaiting coroutine and leaves its handle in *waiter.
struct Parked {
  std::coroutine_handle<>* waiter;

  bool await_ready() const noexcept {
    return false;
  }
  void await_suspend(std::coroutine_handle<> h) noexcept {
    *waiter = h;
  }
  void await_resume() const noexcept {}
};

} // namespace

// `running`, `error` and `waiter` live in this frame, and the callbacks refer
// to them. The references stay valid, because no callback comes after
// tasks.clear(), which destroys all tasks. The waiter is resumed once, by the
// last task to end or the first to fail; std::exchange clears it before the
// resumed code runs.
Task concurrently(std::vector<Task> tasks) {
  size_t running = tasks.size();
  std::exception_ptr error;
  std::coroutine_handle<> waiter;
  for (Task& task : tasks) {
    Task* const one = &task;
    // May be called before start() returns: then there is no waiter yet.
    task.start([&running, &error, &waiter, one] {
      --running;
      if (one->error() && !error) {
        error = one->error();
      }
      if (waiter && (running == 0 || error)) {
        // Destroys the tasks, and this one's callback with its frame: nothing
        // of it is used afterwards.
        std::exchange(waiter, {}).resume();
      }
    });
    if (error) {
      break;
    }
  }
  if (running > 0 && !error) {
    Parked parked{&waiter};
    co_await parked;
  }
  tasks.clear();
  if (error) {
    std::rethrow_exception(error);
  }
}

} // namespace resilient
