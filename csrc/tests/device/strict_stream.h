#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace resilient::strict {

// Something that happens once. Any thread.
class Signal {
 public:
  void set();
  bool isSet() const;
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable happened_;
  bool set_ = false;
};

using SignalPtr = std::shared_ptr<Signal>;

// A stream of a device: a thread that runs tasks in the order of enqueue().
// Streams live until the process ends, like those of torch's pools.
//
// Thread: any. A task must not touch tensors, only memory: a reference to a
// tensor would keep alive what a real device does not.
class Stream {
 public:
  Stream(int device, int64_t id, bool highPriority);

  // Throws if the stream is capturing: the calls of a capture are not run.
  void enqueue(std::function<void()> task);
  // A signal that happens when everything enqueued up to now is done.
  SignalPtr mark();
  // Tasks that are enqueued later run after `signal`.
  void waitFor(SignalPtr signal);
  bool idle() const;
  void synchronize();

  // Tasks after this one wait until release(). Nothing if it is held already.
  void hold();
  void release();

  // Between the two, enqueue() and synchronize() are illegal.
  void setCapturing(bool capturing);
  bool capturing() const;

  int device() const {
    return device_;
  }
  int64_t id() const {
    return id_;
  }
  bool highPriority() const {
    return highPriority_;
  }
  // How many tasks it has been given.
  int64_t tasks() const;

 private:
  void run();

  const int device_;
  const int64_t id_;
  const bool highPriority_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::function<void()>> queue_;
  SignalPtr held_;
  int64_t tasks_ = 0;
  bool started_ = false;
  bool running_ = false;
  bool capturing_ = false;
};

constexpr int kDevices = 2;

// The default stream of a device has id 0. The pools hand out theirs in turn,
// as torch's CUDA pools do: 32 of usual priority and 32 of high priority.
Stream& stream(int device, int64_t id);
Stream& nextPoolStream(int device, bool highPriority);
Stream& newStream(int device, bool highPriority);
std::vector<Stream*> allStreams(int device);

// Every copy on a stream takes between 0 and twice this long, in a fixed
// sequence that differs from the order of the calls.
void setCopyTime(double meanS);
// So many more copies begin, on all streams; none before the next call then.
// Negative: no limit, as at first.
void limitCopies(int64_t count);
// A copy takes as long as its bytes need, too. 0: no time, as at first.
void setCopyRate(double bytesPerS);
void takeCopyTime(uint64_t bytes); // in a task

// True while any thread of the process captures in the mode that forbids event
// queries in all threads that have not chosen the relaxed mode.
bool globalCapture();

} // namespace resilient::strict
