#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backend/call_order.h"
#include "backend/group_options.h"
#include "backend/staging_thread.h"
#include "backend/work.h"
#include "collectives/collectives.h"
#include "delegate/group.h"

namespace resilient {

// The c10d backend: checks arguments, finds host memory for every tensor, and
// hands operations to the Group. By family, its methods are in
// process_group_{reduce,gather,p2p,sync}.cpp; process_group.cpp has the life
// cycle and the way into the engine.
//
// Thread: any; the order of calls on one group is the user's business, as in
// c10d. A caller's mistake throws before a byte is sent.
// Tensors belong to the operation from the call until its Work ends.
//
// Methods that start an operation do not wait for the network. They wait for a
// device only if a tensor is sparse or a factor of PREMUL_SUM. An error after
// the start is in the Work. In a forked child every method that uses the engine
// throws, because the engine's threads are in the parent. After shutdown() an
// operation still gives a Work, which fails with kAborted.
class ProcessGroupResilient : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // May block for store round trips; call without the GIL.
  // `store` may be used from other threads until the group ends. `options` are
  // the group's from now on. Throws StatusError for settings that do not fit
  // together, and if joining fails.
  ProcessGroupResilient(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<GroupOptions> options);
  // Calls shutdown(), so it must run without the GIL (NoGil in bindings.cpp).
  // Works may outlive the group.
  ~ProcessGroupResilient() override;

  const std::string getBackendName() const override {
    return "resilient";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  const c10::intrusive_ptr<GroupOptions>& groupOptions() const {
    return options_;
  }
  // For later operations. Those that have started keep their timeout.
  void setTimeout(std::chrono::milliseconds timeout) override;
  void eagerConnectSingleDevice(at::Device) override {} // connects on use

  // Operations that the calling thread starts between these two run at once
  // and at the same time. endCoalescing() gives one Work for all. Until then,
  // an operation gives a Work of its own only if it is a collective that was
  // asked for as asynchronous; a synchronous call does not wait.
  // supportsCoalescing() remains false: with it, batch_isend_irecv() would
  // give one Work for all messages, and pipelines wait for single ones.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  bool supportsSplitting() const override {
    return true;
  }
  // All members of the new group call it, with the same `ranks` in the same
  // order; their positions are the new ranks. On other ranks the result is
  // null.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  // Fails all pending operations here and, with this rank's name, on the other
  // ranks. Does not wait for peers. The group cannot be used again.
  void abort() override;
  // Waits at most linger_s for copies from devices and for peers to
  // acknowledge. Pending operations fail. The last group of the
  // process also says goodbye and ends the loop thread. A second call does
  // nothing.
  void shutdown() override;
  c10d::ErrorType getError() override;

  // All members begin with the same number, so there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  // Counts collectives that still wait for their copies.
  uint64_t getSequenceNumberForGroup() override;

  // Waits for a turn of the loop.
  GroupStats stats();
  // Group::recordSeal(). Does not wait.
  std::shared_ptr<const RecordSeal> recordSeal();
  // Group::topology within the group's time-out, and Group::setTopology with
  // the site of each rank and the choice of algorithms.
  std::shared_ptr<const Topology> topology();
  bool declaresSite() const {
    return !options_->engine.declaredSite().empty();
  }
  // All ranks must call setTopology() between the same two collectives.
  void setTopology(std::vector<std::string> sites, AlgorithmChoice choice);

  // Tensors that are not contiguous are copied. Operands may share memory, see
  // host_tensors.h. process_group_reduce.cpp
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& opts) override;

  // process_group_gather.cpp
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts)
      override;
  WorkPtr allgather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& outputSplitSizes,
      std::vector<int64_t>& inputSplitSizes,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& opts) override;

  // process_group_p2p.cpp
  // The Work of a send ends when its tensor may be reused. The engine copies
  // small messages and those that take long, so this may be before the message
  // has arrived. A send that tolerates drops ends when the receiver has
  // reported what it has.
  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // process_group_sync.cpp
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Blocks until all ranks have arrived. On rank 0 the error names the missing
  // ones.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks)
      override;

 private:
  using Body = std::function<Task(Communicator&)>;

  // The members that the options of all collectives share.
  struct CallOptions {
    template <typename Options>
    CallOptions(const Options& opts) // NOLINT: converts implicitly
        : timeout(opts.timeout), asyncOp(opts.asyncOp) {}
    std::chrono::milliseconds timeout;
    bool asyncOp;
  };

  // Starts a collective: from here on nothing throws, the Work tells. `body`
  // may use host addresses that work->tensors() gave. If these refuse an
  // output, or the call order can differ between ranks, the collective fails on
  // all ranks, and this call throws.
  WorkPtr launch(
      c10::intrusive_ptr<WorkResilient> work,
      const OpSignature& signature,
      const CallOptions& opts,
      Body body);
  WorkPtr launch(
      c10::intrusive_ptr<WorkResilient> work,
      int peer, // -1: from any source
      int tag,
      bool isSend,
      const at::Tensor& tensor);

  // The return value of a call that has started `work`: see startCoalescing().
  WorkPtr started(c10::intrusive_ptr<WorkResilient> work, bool wanted);

  // The parts of a coalesced call as one body.
  static Body combine(std::vector<Body> parts);

  c10::intrusive_ptr<WorkResilient> makeWork(
      c10d::OpType type,
      const char* title,
      const Tensors& inputs,
      Tensors outputs);
  Nanos timeoutOr(std::chrono::milliseconds timeout) const;
  // Every method calls it first.
  void checkUsable(const char* operation) const;

  // Parts of a collective over one tensor (or list); each checks, adds to the
  // work's tensors, and returns what to run.
  Body allReducePart(
      WorkResilient& work,
      const at::Tensor& tensor,
      const Reduction& reduction);
  Body reduceScatterPart(
      WorkResilient& work,
      const at::Tensor& output,
      const Tensors& inputs,
      const Reduction& reduction);
  Body reduceScatterPart(
      WorkResilient& work,
      const at::Tensor& output,
      const at::Tensor& input,
      const Reduction& reduction);
  // outputs[rank][i] is for inputs[i].
  std::vector<Body> allGatherParts(
      WorkResilient& work,
      const TensorLists& outputs,
      const Tensors& inputs);
  Body allGatherPart(
      WorkResilient& work,
      const at::Tensor& output,
      const at::Tensor& input);

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<GroupOptions> options_;
  const int forkGeneration_;
  std::atomic<int64_t> timeoutMs_;
  std::shared_ptr<Group> group_;
  std::unique_ptr<SubmitQueue> queue_;
  const std::unique_ptr<CallOrder> order_ = std::make_unique<CallOrder>();
  std::atomic<bool> ended_{false}; // shut down or aborted

  // The thread between startCoalescing() and endCoalescing(), and what it has
  // started; changed under the mutex.
  std::mutex coalescingMutex_;
  std::atomic<std::thread::id> coalescingThread_{};
  std::vector<c10::intrusive_ptr<WorkResilient>> coalesced_;
};

} // namespace resilient
