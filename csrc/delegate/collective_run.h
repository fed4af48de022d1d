#pragma once

#include <list>
#include <memory>
#include <string>

#include "delegate/group.h"
#include "delegate/group_impl.h"
#include "delegate/memory_watch.h"
#include "delegate/record.h"
#include "transport/verbs_loans.h"

namespace resilient {

// One collective on its way: the coroutine, its messages, its deadline.
//
// Thread: loop thread. Lifetime: shared by the group until finished, then kept
// by the engine until the turn is over (its code may be on the stack). The
// group outlives it while it runs. Items are pending transfers; their addresses
// are stable, because a Transfer keeps a pointer to its item. The memory of a
// transfer is lent to the core from startSend() or startRecv() until it
// completes or is cancelled.
class CollectiveRun final : public Communicator {
 public:
  CollectiveRun(
      GroupImpl& group,
      uint64_t sequence,
      CollectiveSpec spec,
      uint64_t recordId);
  ~CollectiveRun() override;

  void start();
  // Every pending transfer fails with `status`, and so does every later one.
  // From the top of the loop only. Only the first `status` counts. The
  // algorithm may catch the error; its further transfers then fail in turn, so
  // it soon ends. `tellOthers`: send the members a notice. False for news that
  // came from them.
  void fail(const Status& status, bool tellOthers);

  // When the group's watchdog is to call onCheck(): first to ask the others
  // what they are doing, then at the time-out. In between, shortly before it,
  // if inputs come from a device.
  TimePoint checkAt() const {
    return checkAt_;
  }
  void onCheck();
  // The group knows where its members are. From the top of the loop only.
  void onTopology();

  uint64_t sequence() const {
    return sequence_;
  }
  CollectiveSpec& spec() {
    return spec_;
  }
  const CollectiveSpec& spec() const {
    return spec_;
  }
  uint64_t recordId() const {
    return recordId_;
  }
  // Its memory, lent to RDMA devices.
  void setLoan(VerbsLoans::Loan loan) {
    loan_ = loan;
  }
  VerbsLoans::Loan loan() const {
    return loan_;
  }
  TimePoint startedAt() const {
    return startedAt_;
  }
  // A rank whose message it waits for, or -1. Prefers one that it receives from
  // to one that it sends to.
  int waitingFor() const;
  std::string describe() const; // "all_reduce(...) #5 of group g"

  // Communicator
  int rank() const override {
    return group_.rank();
  }
  int size() const override {
    return group_.size();
  }
  void startSend(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      const void* data,
      size_t bytes) override;
  void startRecv(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      void* data,
      size_t bytes) override;
  size_t available(const void* data, size_t bytes) const override;
  void startFetch(Transfer& transfer, const void* data, size_t bytes) override;
  void resultIsFinal(const void* data, size_t bytes) override;
  void startYield(Transfer& transfer) override;
  const Topology* topology() const override {
    return topology_.get();
  }
  void startLearning(Transfer& transfer) override;
  void cancel(Transfer& transfer) override;

  // Why the algorithm failed, without what this rank knows of the operation.
  // Once it has ended.
  Status failure() const;

 private:
  struct Item; // a transfer and its record

  Item& add(Transfer& transfer);
  void finish(Item& item, Status status);
  void failLater(Transfer& transfer);
  void onMemory();
  void armDeadline();
  void ended();
  std::string context() const;
  std::string givenUpText() const; // for the peers of its transfers

  GroupImpl& group_;
  const uint64_t sequence_;
  CollectiveSpec spec_;
  const uint64_t recordId_;
  VerbsLoans::Loan loan_ = 0;
  Task task_;
  TimePoint startedAt_{};
  TimePoint checkAt_ = kNever;
  bool copiesChecked_ = false;
  bool asked_ = false; // the others, what they are doing
  bool over_ = false;
  Status failure_; // given from outside
  bool tellOthers_ = true;
  int failedPeer_ = -1;
  std::string cause_; // why its transfer failed
  struct Bytes {
    uint64_t done = 0, started = 0;
  };
  Bytes sent_, received_;
  std::shared_ptr<const Topology> topology_; // as the operation began
  std::list<Item> items_; // pending
  MemoryWatch watch_;
};

} // namespace resilient
