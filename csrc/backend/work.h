#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/call_order.h"
#include "backend/host_tensors.h"
#include "base/status.h"
#include "base/time.h"
#include "wire/control.h"

namespace resilient {

// Called now and then by a thread that waits; may throw (Ctrl-C). Set once by
// the bindings; without it waiting cannot be interrupted.
void setInterruptHook(void (*hook)());
void (*currentInterruptHook())(); // or null

// The handle of one operation. It owns the operation's tensors until the
// engine is done with them, and it ends exactly once, always.
//
// Thread: any. The engine's loop ends it; the thread that waits is woken from
// there directly. Futures have user code as callbacks, so the completion
// threads (future_threads.h) complete them.
//
// Life: the process group makes it, adds its tensors, and starts the operation;
// end() is called once, in the loop or where the operation could not be
// started; finishNow() completes it for all who wait. The engine's reference
// keeps the Work alive until then, so a program may drop its own at once.
//
// A Work of all() has parts instead of an operation of its own. It never ends
// in end(), but when its last part ends.
class WorkResilient : public c10d::Work {
 public:
  // `title` ("resilient:all_reduce") names the operation for the profiler and
  // must be a literal.
  WorkResilient(
      int rank,
      c10d::OpType type,
      const char* title,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs);
  ~WorkResilient() override;

  // True for a failed Work, if no results are on their way to the device;
  // otherwise only when they are there. Throws if the device reports an error.
  bool isCompleted() override;
  bool isSuccess() const override;
  // Throws the operation's error, or DistBackendError if `timeout` expires
  // first; the operation then continues and can be waited for again. Without a
  // timeout of its own, the operation's bounds the wait. Any number of threads
  // may wait. Call without the GIL. The calling thread's current stream waits
  // for the copies to the device.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // As wait(), for a Work with tensors on a device: a stream cannot wait for
  // results that no copy writes yet. Else it does nothing.
  void synchronize() override;
  // Always the same future. Its value is the list of outputs. Callbacks that
  // were added before the end run on a completion thread, never on the loop
  // thread, with the thread-local state of the first caller of getFuture().
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // Throws before the end.
  std::vector<at::Tensor> result() override;
  // The rank that sent a message that was received, in this group; otherwise
  // -1.
  int sourceRank() const override;
  // 0 until the operation has been submitted, and for messages.
  uint64_t getSequencenumber() const override;

  const char* title() const {
    return title_;
  }

  // For the process group, before the operation is started.
  HostTensors& tensors() {
    return tensors_;
  }
  void setSequence(uint64_t sequence) {
    sequence_.store(sequence, std::memory_order_relaxed);
  }
  // For the engine, once the inputs are being copied; null if no tensor is
  // copied in pieces. Results that it names begin their way to the device.
  static std::shared_ptr<StagedMemory> stagedMemory(
      const c10::intrusive_ptr<WorkResilient>& work);
  // Tells the engine of pieces until all have come or the operation has ended.
  // Call it once the operation has been handed over.
  static void followPieces(const c10::intrusive_ptr<WorkResilient>& work);
  // Owns the tensors, and drops them on another thread in the end. Loop thread,
  // before end().
  std::shared_ptr<void> holdMemory() const;
  // For callbacks of the future.
  void setPlace(CallPlace place) {
    place_ = std::move(place);
  }
  // Runs on the staging thread after success, before the Work ends.
  void setEpilogue(std::function<void()> epilogue) {
    epilogue_ = std::move(epilogue);
  }

  // The index of the first of `works` that has ended, whether well or not; none
  // by `deadline`. Any thread may wait for any works; kNever is bounded by the
  // works' own time-outs.
  // An empty list gives none at once. If several have ended, the first in the
  // list counts. Throws only what the interrupt hook throws. Call without the
  // GIL.
  static std::optional<size_t> waitAny(
      const std::vector<c10::intrusive_ptr<WorkResilient>>& works,
      TimePoint deadline);

  // For a send that tolerates losses: the ranges of elements that the receiver
  // has zeros for. Empty before the end, and if nothing was lost.
  std::vector<std::pair<int64_t, int64_t>> zeroFilled() const;
  // Loop thread, before end(). Ranges are widened to whole elements.
  void setZeroFilled(
      const std::vector<ByteRange>& ranges,
      int64_t elementBytes);

  // When it ended, by the steady clock; none before.
  std::optional<TimePoint> endedAt() const;

  // Ends when all of `parts` have ended, with the error of the first one, in
  // their order, that failed. Its results are theirs, one after the other.
  // Parts may have ended before. Without parts it has ended at once.
  static c10::intrusive_ptr<WorkResilient> all(
      int rank,
      std::vector<c10::intrusive_ptr<WorkResilient>> parts);

  // The operation has ended: copies results to where they belong if need be,
  // then ends the Work. Exactly once, from any thread; never blocks, runs no
  // user code.
  // The caller gives its reference away; the tensors are dropped on another
  // thread if it was the last one.
  static void end(
      c10::intrusive_ptr<WorkResilient> work,
      const Status& status,
      int sourceRank = -1);

 private:
  // A thread in waitAny() sleeps on this.
  struct Waiter {
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<bool> woken{false};
  };

  // As isCompleted(), whatever the device still has to do.
  bool hasEnded() const;
  // Makes the Work complete and wakes all who wait. Called once; results must
  // be in their places, or on their way there on the staging stream.
  void finishNow(std::exception_ptr error);
  // Staging thread, after success.
  void writeResults();
  // Call once, without mutex_. Runs the callbacks that were added before.
  void completeFuture();
  // Makes the calling thread's current streams wait for the results, or for
  // what a failed operation has written of them. The Work has ended.
  void orderCurrentStreams();
  bool usesDevices() const;
  // Once for each part, and once by all().
  void partEnded();
  // Gives away a reference that may be the last one: see the .cpp.
  static void release(c10::intrusive_ptr<WorkResilient> work);

  const char* const title_;
  const std::vector<at::Tensor> outputs_;
  const TimePoint started_;
  HostTensors tensors_;
  CallPlace place_;
  std::function<void()> epilogue_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int> sourceRank_{-1};
  std::atomic<bool> helped_{false}; // a thread waits inside the engine
  std::vector<c10::intrusive_ptr<WorkResilient>> parts_; // see all()
  std::atomic<size_t> partsLeft_{0}; // that have not ended

  // The base class guards completed_ and exception_ with mutex_; these too.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Captured in the constructor for the profiler, else for callbacks once
  // somebody asks for the future: few do, and it costs 4 % of a small message.
  // By pointer: malloc() takes longer for objects of more than 1 KiB.
  std::unique_ptr<at::ThreadLocalState> callerState_;
  int futureLevel_ = 0;
  bool futureClaimed_ = false; // getFuture() completes it itself
  std::vector<std::shared_ptr<Waiter>> waiters_;
  std::vector<c10::intrusive_ptr<WorkResilient>> wholes_; // it is a part of
  TimePoint endedAt_{};
  std::vector<std::pair<int64_t, int64_t>> zeroFilled_;
};

} // namespace resilient
