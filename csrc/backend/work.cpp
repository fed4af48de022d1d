#include "backend/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "backend/errors.h"
#include "backend/future_threads.h"
#include "backend/staging_thread.h"
#include "delegate/engine_control.h"

namespace resilient {

namespace {

std::atomic<void (*)()> interruptHook{nullptr};

// How long a waiting thread sleeps before it looks for Ctrl-C. Each look takes
// the GIL; most operations end before the first.
constexpr auto kFirstSlice = std::chrono::milliseconds(200);
constexpr auto kSlice = std::chrono::milliseconds(100);

TimePoint now() {
  return std::chrono::steady_clock::now();
}

} // namespace

void setInterruptHook(void (*hook)()) {
  interruptHook.store(hook);
}

void (*currentInterruptHook())() {
  return interruptHook.load();
}

WorkResilient::WorkResilient(
    int rank,
    c10d::OpType type,
    const char* title,
    const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, inputs),
      title_(title),
      outputs_(std::move(outputs)),
      started_(now()) {
  if (recordFunctionEndCallback_) {
    callerState_ = std::make_unique<at::ThreadLocalState>();
  }
}

WorkResilient::~WorkResilient() = default;

bool WorkResilient::isCompleted() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!completed_) {
      return false;
    }
    if (exception_ && tensors_.pieces() == nullptr) {
      return true;
    }
  }
  // A caller that sees true may read the results on any stream.
  for (const auto& part : parts_) {
    if (!part->isCompleted()) {
      return false;
    }
  }
  return tensors_.outputsReady();
}

bool WorkResilient::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

// Waits in slices. In each, the thread takes turns of the engine's loop if it
// can, else it sleeps on cv_; between two slices it looks for Ctrl-C. The lock
// is released while it helps: the loop ends this Work under the same lock.
bool WorkResilient::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout > kNoTimeout;
  const TimePoint deadline =
      limited ? now() + std::min(timeout, kLongestTimeout) : kNever;
  std::unique_lock<std::mutex> lock(mutex_);
  auto slice = kFirstSlice;
  while (!completed_) {
    auto until = now() + slice;
    slice = kSlice;
    // The waiting thread does the engine's work itself if it can: the message
    // it waits for then wakes it without a detour over the loop thread.
    helped_.store(true);
    lock.unlock();
    const bool helped = helpEngine(
        [this] {
          std::lock_guard<std::mutex> guard(mutex_);
          return completed_;
        },
        std::min(TimePoint(until), deadline));
    lock.lock();
    if (completed_) {
      break;
    }
    if (!helped &&
        cv_.wait_until(lock, std::min(TimePoint(until), deadline), [this] {
          return completed_;
        })) {
      break;
    }
    if (now() >= deadline) {
      // Only this wait() has failed. The operation goes on: its own timeout,
      // known to all ranks, decides about it.
      std::ostringstream text;
      text << "Timed out waiting " << timeout.count() << "ms for " << title_
           << " (sequence number " << getSequencenumber() << ", called "
           << toSeconds(now() - started_)
           << " s ago): wait(timeout) has expired, the operation is still "
              "pending and may be waited for again";
      lock.unlock();
      C10_THROW_ERROR(DistBackendError, text.str());
    }
    if (auto* hook = interruptHook.load()) {
      lock.unlock();
      hook();
      lock.lock();
    }
  }
  const std::exception_ptr error = exception_;
  lock.unlock();
  orderCurrentStreams();
  if (error) {
    std::rethrow_exception(error);
  }
  return true;
}

std::vector<std::pair<int64_t, int64_t>> WorkResilient::zeroFilled() const {
  std::lock_guard lock(mutex_);
  return zeroFilled_;
}

void WorkResilient::setZeroFilled(
    const std::vector<ByteRange>& ranges,
    int64_t elementBytes) {
  std::lock_guard lock(mutex_);
  for (const ByteRange& r : ranges) {
    const auto offset = static_cast<int64_t>(r.offset);
    const auto end = offset + static_cast<int64_t>(r.bytes);
    zeroFilled_.emplace_back(
        offset / elementBytes, (end + elementBytes - 1) / elementBytes);
  }
}

// One waiter for all works. It is registered with each work under that work's
// lock, where the work either has ended or will find it: no end is missed. The
// loop is that of wait(), but it looks at one flag instead of all works. The
// waiter is shared, because finishNow() may still use it when this thread has
// left.
std::optional<size_t> WorkResilient::waitAny(
    const std::vector<c10::intrusive_ptr<WorkResilient>>& works,
    TimePoint deadline) {
  const auto ended = [&works]() -> std::optional<size_t> {
    for (size_t i = 0; i < works.size(); ++i) {
      std::lock_guard<std::mutex> lock(works[i]->mutex_);
      if (works[i]->completed_) {
        return i;
      }
    }
    return std::nullopt;
  };
  if (const auto found = ended(); found || works.empty() || deadline <= now()) {
    return found;
  }
  auto waiter = std::make_shared<Waiter>();
  for (const auto& work : works) {
    std::lock_guard<std::mutex> lock(work->mutex_);
    work->helped_.store(true);
    if (work->completed_) {
      waiter->woken.store(true);
    } else {
      work->waiters_.push_back(waiter);
    }
  }
  const auto forget = [&] {
    for (const auto& work : works) {
      std::lock_guard<std::mutex> lock(work->mutex_);
      std::erase(work->waiters_, waiter);
    }
  };
  auto slice = kFirstSlice;
  while (!waiter->woken.load()) {
    const TimePoint until = std::min(TimePoint(now() + slice), deadline);
    slice = kSlice;
    const bool helped =
        helpEngine([&waiter] { return waiter->woken.load(); }, until);
    if (!helped) {
      std::unique_lock<std::mutex> lock(waiter->mutex);
      waiter->wake.wait_until(
          lock, until, [&waiter] { return waiter->woken.load(); });
    }
    if (waiter->woken.load() || now() >= deadline) {
      break;
    }
    if (auto* hook = interruptHook.load()) {
      try {
        hook();
      } catch (...) {
        forget();
        throw;
      }
    }
  }
  forget();
  return ended();
}

// partsLeft_ counts one more than there are parts: parts may end while the
// others are still being registered, and the extra count keeps the whole open
// until the end of this function.
c10::intrusive_ptr<WorkResilient> WorkResilient::all(
    int rank,
    std::vector<c10::intrusive_ptr<WorkResilient>> parts) {
  std::vector<at::Tensor> outputs;
  CallPlace place;
  for (const auto& part : parts) {
    outputs.insert(outputs.end(), part->outputs_.begin(), part->outputs_.end());
    place = CallPlace::later(place, part->place_);
  }
  auto whole = c10::make_intrusive<WorkResilient>(
      rank,
      c10d::OpType::COALESCED,
      "resilient:coalesced",
      std::vector<at::Tensor>{},
      std::move(outputs));
  whole->setPlace(std::move(place));
  whole->parts_ = std::move(parts);
  whole->partsLeft_.store(whole->parts_.size() + 1);
  for (const auto& part : whole->parts_) {
    std::unique_lock<std::mutex> lock(part->mutex_);
    if (part->completed_) {
      lock.unlock();
      whole->partEnded();
    } else {
      part->wholes_.push_back(whole);
    }
  }
  if (!whole->parts_.empty()) {
    whole->setSequence(whole->parts_.back()->getSequencenumber());
  }
  whole->partEnded(); // so it cannot end before all parts are known
  return whole;
}

void WorkResilient::partEnded() {
  if (partsLeft_.fetch_sub(1) != 1) {
    return;
  }
  std::exception_ptr error;
  for (const auto& part : parts_) {
    std::lock_guard<std::mutex> lock(part->mutex_);
    if (!error) {
      error = part->exception_;
    }
  }
  finishNow(error);
}

bool WorkResilient::usesDevices() const {
  return !tensors_.devices().empty() ||
      std::ranges::any_of(
          parts_, [](const auto& part) { return part->usesDevices(); });
}

void WorkResilient::synchronize() {
  if (usesDevices()) {
    wait();
  }
}

void WorkResilient::orderCurrentStreams() {
  for (const auto& part : parts_) {
    part->orderCurrentStreams();
  }
  for (const auto& staging : tensors_.devices()) {
    staging->blockCurrentStream();
  }
}

// Exactly one side completes the future. If the Work had ended before the
// future existed, futureClaimed_ assigns that to this function; otherwise
// finishNow() finds future_ and posts it. Both decide under mutex_. A future of
// the first kind has a callback only if another thread has added it since. Such
// a callback runs on this thread, which is a caller's and not the loop's.
//
// The level of the completion thread is that of the thread that asks first, not
// of the thread that ends the Work: see future_threads.h.
c10::intrusive_ptr<c10::ivalue::Future> WorkResilient::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (future_) {
    return future_;
  }
  std::vector<c10::Device> devices;
  const auto addDevices = [&devices](const WorkResilient& work) {
    for (const auto& staging : work.tensors_.devices()) {
      if (std::ranges::count(devices, staging->device()) == 0) {
        devices.push_back(staging->device());
      }
    }
  };
  addDevices(*this);
  for (const auto& part : parts_) {
    addDevices(*part);
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::move(devices));
  futureLevel_ = FutureThreads::levelForCaller();
  if (!callerState_) {
    callerState_ = std::make_unique<at::ThreadLocalState>();
  }
  auto future = future_;
  const bool done = completed_;
  futureClaimed_ = done;
  lock.unlock();
  if (done) {
    completeFuture(); // no other thread has it yet: no callbacks run here
  }
  return future;
}

std::vector<at::Tensor> WorkResilient::result() {
  TORCH_CHECK(
      isCompleted(),
      "Work needs to be completed before calling result(). Should call wait() "
      "before result().");
  return outputs_;
}

std::optional<TimePoint> WorkResilient::endedAt() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ ? std::optional(endedAt_) : std::nullopt;
}

int WorkResilient::sourceRank() const {
  return sourceRank_.load(std::memory_order_acquire);
}

uint64_t WorkResilient::getSequencenumber() const {
  return sequence_.load(std::memory_order_relaxed);
}

std::shared_ptr<StagedMemory> WorkResilient::stagedMemory(
    const c10::intrusive_ptr<WorkResilient>& work) {
  const auto& pieces = work->tensors_.pieces();
  if (pieces) {
    // The engine must not own the Work: see release().
    pieces->setTaker([weak = c10::weak_intrusive_ptr<WorkResilient>(work)] {
      if (auto self = weak.lock()) {
        StagingThread::post([self = std::move(self)]() mutable {
          self->tensors_.copyFinalBack();
          release(std::move(self));
        });
      }
    });
  }
  return pieces;
}

std::shared_ptr<void> WorkResilient::holdMemory() const {
  auto tensors = std::make_shared<std::vector<at::Tensor>>(tensors_.hosts());
  auto* const all = tensors.get();
  return {all, [tensors = std::move(tensors)](void*) mutable {
            FutureThreads::post(0, [held = std::move(tensors)] {});
          }};
}

bool WorkResilient::hasEnded() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

void WorkResilient::followPieces(
    const c10::intrusive_ptr<WorkResilient>& work) {
  if (work->tensors_.pieces()) {
    StagingThread::pollUntil([self = work]() mutable {
      // A stream that never gets on must not be asked for ever.
      const bool over = self->hasEnded() || self->tensors_.pollPieces();
      if (over) {
        release(std::move(self));
      }
      return over;
    });
  }
}

// Results that already lie in the user's memory end the Work here. Others are
// copied by the staging thread, since neither the loop nor the thread that
// submits may wait for a device or copy large tensors. A failed operation
// copies nothing: its outputs are undefined. If pieces of results are on their
// way, it ends behind them all the same, and so do streams that wait for it:
// nothing may be written to the tensors later.
void WorkResilient::end(
    c10::intrusive_ptr<WorkResilient> work,
    const Status& status,
    int sourceRank) {
  work->sourceRank_.store(sourceRank, std::memory_order_release);
  const bool pieces = work->tensors_.pieces() != nullptr;
  const bool results =
      status.ok() && (work->epilogue_ || work->tensors_.needsCopyBack());
  if (pieces || results) {
    StagingThread::post([work = std::move(work), status]() mutable {
      std::exception_ptr error;
      try {
        if (status.ok()) {
          work->writeResults();
        } else {
          work->tensors_.leaveResults();
          error = exceptionFor(status);
        }
        work->tensors_.dropTemporaries();
      } catch (...) {
        error = std::current_exception();
      }
      work->finishNow(error);
      release(std::move(work));
    });
    return;
  }
  work->finishNow(status.ok() ? nullptr : exceptionFor(status));
  if (!work->tensors_.devices().empty()) {
    // Pinned memory is scarce, and a user may keep a Work. Giving it back
    // calls the driver, which is not for the loop thread.
    StagingThread::post([work = std::move(work)]() mutable {
      work->tensors_.dropTemporaries();
      release(std::move(work));
    });
    return;
  }
  release(std::move(work));
}

void WorkResilient::writeResults() {
  if (epilogue_) {
    epilogue_();
    epilogue_ = nullptr;
  }
  tensors_.copyBack();
}

void WorkResilient::release(c10::intrusive_ptr<WorkResilient> work) {
  // A tensor that has been seen by Python needs the GIL to die. The engine's
  // loop must never wait for the GIL, so the last reference goes elsewhere.
  // If another thread drops its reference between the test and ours, we take
  // the GIL here after all: slow once, not wrong.
  if (work.use_count() == 1) {
    FutureThreads::post(
        0, [work = std::move(work)]() mutable { work.reset(); });
  }
}

// The order of the steps: the time of the end is set before finish() lets
// others see completed_. finish() wakes wait(); afterwards no new waiter and no
// new whole can be added, so those that are taken out are all. The helper in
// the loop is woken after that, because its condition reads completed_ or the
// flag of a waiter. Futures and wholes come last: they may end in other threads
// before this function returns.
//
// helped_ is set by a waiter before it looks at completed_, and read here after
// finish(): one of the two always notices the other.
void WorkResilient::finishNow(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    // The base class calls the profiler's callback from finish().
    std::optional<at::ThreadLocalStateGuard> state;
    if (recordFunctionEndCallback_) {
      state.emplace(*callerState_);
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      endedAt_ = now();
    }
    try {
      finish(std::move(error));
    } catch (const std::exception& e) {
      // The profiler's callback; the Work has ended before it was called.
      TORCH_WARN("the profiler failed at the end of ", title_, ": ", e.what());
      cv_.notify_all();
    }
  }
  std::vector<std::shared_ptr<Waiter>> waiters;
  std::vector<c10::intrusive_ptr<WorkResilient>> wholes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiters.swap(waiters_);
    wholes.swap(wholes_);
    // A getFuture() after finish() completes its future itself.
    if (!futureClaimed_) {
      future = future_;
    }
  }
  for (const auto& waiter : waiters) {
    std::lock_guard<std::mutex> lock(waiter->mutex);
    waiter->woken.store(true);
    waiter->wake.notify_all();
  }
  if (helped_.load()) {
    wakeEngineHelper();
  }
  if (future) {
    auto self = c10::intrusive_ptr<WorkResilient>::reclaim_copy(this);
    FutureThreads::post(futureLevel_, [self] { self->completeFuture(); });
  }
  for (auto& whole : wholes) {
    whole->partEnded();
    release(std::move(whole));
  }
}

// Runs user code: on a completion thread, or before the future has callbacks.
// The stream guard makes the future record its event behind the copies to the
// device; callbacks and waiters then find the results.
void WorkResilient::completeFuture() {
  const at::ThreadLocalStateGuard state(*callerState_);
  const CallbackScope scope(place_);
  try {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error = exception_;
    }
    if (error) {
      future_->setErrorIfNeeded(error);
      return;
    }
    // The future records an event on the current stream of each device, behind
    // which users read the results.
    std::vector<c10::Stream> streams;
    for (const auto& staging : tensors_.devices()) {
      streams.push_back(staging->stream());
    }
    // Recording switches to a stream's device and back to the current one of
    // this thread, which would make a context there.
    const c10::OptionalDeviceGuard device(
        streams.empty() ? std::nullopt
                        : std::optional(streams.front().device()));
    const c10::MultiStreamGuard guard(streams);
    for (const auto& part : parts_) {
      part->orderCurrentStreams();
    }
    future_->markCompleted(c10::IValue(outputs_));
  } catch (const std::exception& e) {
    // Only a callback that throws a foreign exception gets here.
    TORCH_WARN("a callback on a future of ", title_, " failed: ", e.what());
  }
}

} // namespace resilient
