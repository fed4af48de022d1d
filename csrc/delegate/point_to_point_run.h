#pragma once

#include <optional>
#include <string>

#include "delegate/group.h"
#include "delegate/record.h"

namespace resilient {

class GroupImpl;

// One send or receive of the application, with its deadline.
// Thread and lifetime: as CollectiveRun.
class PointToPointRun final {
 public:
  PointToPointRun(
      GroupImpl& group,
      uint64_t id,
      PointToPointSpec spec,
      uint64_t recordId,
      TimePoint startedAt);
  ~PointToPointRun();

  void start();
  void fail(const Status& status);

  uint64_t id() const {
    return id_;
  }
  PointToPointSpec& spec() {
    return spec_;
  }
  uint64_t recordId() const {
    return recordId_;
  }
  TimePoint startedAt() const {
    return startedAt_;
  }
  std::string describe() const; // "recv of float32[8] from rank 2, tag 0"

 private:
  void armDeadline();
  void onDeadline();
  void end(const Status& cause, int sourceRank);
  std::string target() const;

  GroupImpl& group_;
  const uint64_t id_;
  PointToPointSpec spec_;
  const uint64_t recordId_;
  const TimePoint startedAt_;
  std::optional<SendRecord> send_;
  std::optional<RecvRecord> recv_;
  TimerId timer_ = 0;
  bool asked_ = false;
  bool over_ = false;
};

} // namespace resilient
