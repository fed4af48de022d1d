#pragma once

#include <coroutine>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

namespace resilient {

// A lazily started coroutine without a value. Collective algorithms are
// written as Tasks: straight-line code that runs on the loop thread and never
// blocks it. Single-threaded; whoever holds the Task owns the frame, and
// destroying it unwinds the algorithm (its Transfers cancel themselves).
//
// A Task function does nothing until the Task is awaited or started. Its
// parameters are copied into the frame, so everything that is passed by
// reference or pointer must outlive the Task. No code of a Task may destroy
// that Task; only `onDone` may.
class [[nodiscard]] Task {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation; // the awaiting coroutine, or null
    std::exception_ptr error;
    std::function<void()> onDone; // set on a root task only

    Task get_return_object() {
      return Task(Handle::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept {
      return {};
    }
    struct FinalAwaiter {
      bool await_ready() noexcept {
        return false;
      }
      std::coroutine_handle<> await_suspend(
          std::coroutine_handle<promise_type> h) noexcept {
        promise_type& p = h.promise();
        if (p.continuation) {
          return p.continuation;
        }
        if (p.onDone) {
          // The callback may destroy the frame, hence the copy on our stack.
          auto done = std::move(p.onDone);
          done();
        }
        return std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    FinalAwaiter final_suspend() noexcept {
      return {};
    }
    void return_void() {}
    void unhandled_exception() {
      error = std::current_exception();
    }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  explicit Task(Handle h) : handle_(h) {}
  Task(Task&& o) noexcept : handle_(std::exchange(o.handle_, {})) {}
  Task& operator=(Task&& o) noexcept {
    if (this != &o) {
      reset();
      handle_ = std::exchange(o.handle_, {});
    }
    return *this;
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() {
    reset();
  }

  // Awaiting a Task runs it to its end, then rethrows what it threw.
  bool await_ready() const noexcept {
    return false;
  }
  // Call only on a valid Task that was neither started nor awaited before.
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> h) noexcept {
    handle_.promise().continuation = h;
    return handle_;
  }
  void await_resume() {
    if (handle_.promise().error) {
      std::rethrow_exception(handle_.promise().error);
    }
  }

  // Runs a root task; `onDone` is called once when it has ended, after which
  // error() tells how. It may be called before start() returns.
  // `onDone` may destroy this Task. A Task is started at most once and not
  // awaited as well.
  void start(std::function<void()> onDone) {
    handle_.promise().onDone = std::move(onDone);
    handle_.resume();
  }
  // The result is null while the Task runs and after it has ended well.
  std::exception_ptr error() const {
    return handle_.promise().error;
  }
  bool valid() const {
    return static_cast<bool>(handle_);
  }
  // Destroys the frame, and with it all Tasks that this one awaits.
  void reset() {
    if (handle_) {
      handle_.destroy();
      handle_ = {};
    }
  }

 private:
  Handle handle_;
};

} // namespace resilient
