#pragma once

#include <optional>
#include <string>

#include "delegate/group.h"
#include "delegate/memory_watch.h"
#include "delegate/record.h"
#include "transport/verbs_loans.h"

namespace resilient {

class GroupImpl;

// One send or receive of the application, with its deadline. Thread and
// lifetime: as CollectiveRun. Its one record is made in start(); exactly one of
// send_ and recv_ is set after that.
class PointToPointRun final {
 public:
  PointToPointRun(
      GroupImpl& group,
      uint64_t id,
      std::shared_ptr<PointToPointSpec> spec,
      uint64_t recordId,
      TimePoint startedAt);
  ~PointToPointRun();

  void start();
  // When the group's watchdog is to call onCheck(): first to ask the others
  // what they are doing, then at the time-out. In between, shortly before it,
  // if inputs come from a device.
  TimePoint checkAt() const {
    return checkAt_;
  }
  void onCheck();
  // Without effect once it has ended. The memory is free at return.
  void fail(const Status& status);
  // A receive from any source that no message has answered: it fails when
  // nobody is left. One that has its message ends with that message.
  bool waitsForAnyRank() const {
    return recv_ && spec_->peer < 0 && recv_->op().matchedSource == nullptr;
  }

  uint64_t id() const {
    return id_;
  }
  PointToPointSpec& spec() {
    return *spec_;
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
  std::string describe() const; // "recv of float32[8] from rank 2, tag 0"

 private:
  void armDeadline();
  void end(const Status& cause, int sourceRank);
  void onMemory();
  std::string target() const;

  GroupImpl& group_;
  const uint64_t id_;
  const std::shared_ptr<PointToPointSpec> spec_;
  const uint64_t recordId_;
  VerbsLoans::Loan loan_ = 0;
  const TimePoint startedAt_;
  std::optional<SendRecord> send_;
  std::optional<RecvRecord> recv_;
  TimePoint checkAt_ = kNever;
  bool copiesChecked_ = false;
  bool asked_ = false;
  bool over_ = false;
  MemoryWatch watch_;
};

} // namespace resilient
