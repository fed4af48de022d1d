#include "tests/device/strict_stream.h"

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <thread>

namespace resilient::strict {

namespace {

constexpr int64_t kPoolSize = 32;

std::atomic<int64_t> copyNanos{0};
std::atomic<double> copyBytesPerS{0};
std::atomic<int> captures{0};

// Never destroyed: threads of streams may outlive static destruction.
struct Streams {
  std::mutex mutex;
  std::array<std::map<int64_t, std::unique_ptr<Stream>>, kDevices> byId;
  std::array<std::array<int64_t, 2>, kDevices> next{};
  int64_t nextNew = 2 * kPoolSize + 1;
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

struct CopyLimit {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t left = -1;
};

CopyLimit& copyLimit() {
  static auto* limit = new CopyLimit(); // streams may outlive static objects
  return *limit;
}

Stream& find(Streams& all, int device, int64_t id, bool highPriority) {
  auto& slot = all.byId.at(device)[id];
  if (!slot) {
    slot = std::make_unique<Stream>(device, id, highPriority);
  }
  return *slot;
}

} // namespace

void Signal::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  happened_.notify_all();
}

bool Signal::isSet() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

void Signal::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  happened_.wait(lock, [this] { return set_; });
}

Stream::Stream(int device, int64_t id, bool highPriority)
    : device_(device), id_(id), highPriority_(highPriority) {}

void Stream::enqueue(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capturing_) {
    throw std::runtime_error(
        "strict device: operation not permitted when stream is capturing");
  }
  queue_.push_back(std::move(task));
  ++tasks_;
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  work_.notify_one();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return !queue_.empty(); });
    auto task = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    running_ = false;
  }
}

SignalPtr Stream::mark() {
  auto signal = std::make_shared<Signal>();
  enqueue([signal] { signal->set(); });
  return signal;
}

void Stream::waitFor(SignalPtr signal) {
  enqueue([signal = std::move(signal)] { signal->wait(); });
}

bool Stream::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !running_;
}

void Stream::synchronize() {
  mark()->wait();
}

void Stream::hold() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (held_) {
      return;
    }
    held_ = std::make_shared<Signal>();
  }
  waitFor(held_);
}

void Stream::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (held_) {
    held_->set();
    held_ = nullptr;
  }
}

void Stream::setCapturing(bool capturing) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capturing_ != capturing) {
    captures.fetch_add(capturing ? 1 : -1);
  }
  capturing_ = capturing;
}

bool Stream::capturing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return capturing_;
}

int64_t Stream::tasks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_;
}

Stream& stream(int device, int64_t id) {
  Streams& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  return find(all, device, id, id > kPoolSize && id <= 2 * kPoolSize);
}

Stream& nextPoolStream(int device, bool highPriority) {
  Streams& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t& next = all.next.at(device).at(highPriority ? 1 : 0);
  const int64_t id = 1 + (highPriority ? kPoolSize : 0) + next++ % kPoolSize;
  return find(all, device, id, highPriority);
}

Stream& newStream(int device, bool highPriority) {
  Streams& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  return find(all, device, all.nextNew++, highPriority);
}

std::vector<Stream*> allStreams(int device) {
  Streams& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Stream*> found;
  for (auto& [id, stream] : all.byId.at(device)) {
    found.push_back(stream.get());
  }
  return found;
}

void setCopyTime(double meanS) {
  copyNanos.store(static_cast<int64_t>(meanS * 1e9));
}

void limitCopies(int64_t count) {
  CopyLimit& limit = copyLimit();
  std::lock_guard<std::mutex> lock(limit.mutex);
  limit.left = count;
  limit.changed.notify_all();
}

void setCopyRate(double bytesPerS) {
  copyBytesPerS.store(bytesPerS);
}

void takeCopyTime(uint64_t bytes) {
  {
    CopyLimit& limit = copyLimit();
    std::unique_lock<std::mutex> lock(limit.mutex);
    limit.changed.wait(lock, [&limit] { return limit.left != 0; });
    limit.left -= limit.left > 0;
  }
  static constexpr std::array<int, 8> kTenths = {17, 3, 12, 1, 20, 8, 0, 15};
  static std::atomic<unsigned> count{0};
  const int tenths = kTenths[count.fetch_add(1) % kTenths.size()];
  const double rate = copyBytesPerS.load();
  const double paced = rate > 0 ? static_cast<double>(bytes) / rate * 1e9 : 0;
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(
          copyNanos.load() * tenths / 10 + static_cast<int64_t>(paced)));
}

bool globalCapture() {
  return captures.load() > 0;
}

} // namespace resilient::strict
