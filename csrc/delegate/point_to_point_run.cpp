#include "delegate/point_to_point_run.h"

#include "delegate/diagnosis.h"
#include "delegate/group_impl.h"

namespace resilient {

PointToPointRun::PointToPointRun(
    GroupImpl& group,
    uint64_t id,
    std::shared_ptr<PointToPointSpec> spec,
    uint64_t recordId,
    TimePoint startedAt)
    : group_(group),
      id_(id),
      spec_(std::move(spec)),
      recordId_(recordId),
      startedAt_(startedAt),
      watch_(group.engine().loop(), spec_->memory, [this] { onMemory(); }) {}

PointToPointRun::~PointToPointRun() = default;

std::string PointToPointRun::target() const {
  return spec_->peer < 0 ? std::string("any rank")
                         : "rank " + std::to_string(spec_->peer);
}

std::string PointToPointRun::describe() const {
  return std::string(spec_->isSend ? "send of " : "recv of ") +
      dtypeName(spec_->signature.dtype) + '[' +
      std::to_string(spec_->signature.count) + ']' +
      (spec_->isSend ? " to " : " from ") + target() + ", tag " +
      std::to_string(spec_->tag) + group_.groupText();
}

void PointToPointRun::start() {
  armDeadline();
  const OpSignature& signature = spec_->signature;
  if (spec_->isSend) {
    send_.emplace(group_, spec_->peer, [this](const Status& status) {
      if (status.ok() && spec_->zeroFilled) {
        spec_->zeroFilled(std::move(send_->op().zeroFilled));
      }
      end(status, -1);
    });
    SendOp& op = send_->op();
    op.key = {group_.id(), spec_->tag, 0};
    op.pointToPoint = true;
    op.signature = signature;
    op.trafficClass = spec_->trafficClass;
    op.tolerance = spec_->tolerance;
    op.sourceRank = group_.rank();
    op.data = static_cast<const std::byte*>(spec_->data);
    op.bytes = spec_->bytes;
    op.failure = spec_->failure;
    if (loan_ != 0) {
      send_->setLent();
    }
    if (spec_->memory) {
      send_->lookAt(*spec_->memory);
    }
    group_.postWhenKnown(*send_, /*collective=*/false);
    return;
  }
  recv_.emplace(group_, spec_->peer, [this](const Status& status) {
    const RecvOp& op = recv_->op();
    end(status, op.matchedSource != nullptr ? op.matchedRank : spec_->peer);
  });
  RecvOp& op = recv_->op();
  op.key = {group_.id(), spec_->tag, 0};
  op.ordered = true;
  op.signature = signature;
  op.data = static_cast<std::byte*>(spec_->data);
  op.bytes = spec_->bytes;
  recv_->tell(spec_->memory.get());
  if (spec_->peer < 0) {
    recv_->postAny();
  } else {
    group_.postWhenKnown(*recv_, /*collective=*/false);
  }
}

void PointToPointRun::onMemory() {
  if (over_) {
    return;
  }
  if (const Status failed = spec_->memory->failure(); !failed.ok()) {
    fail(failed);
  } else if (send_) {
    send_->lookAt(*spec_->memory);
  }
}

void PointToPointRun::armDeadline() {
  Nanos ahead(0);
  if (!asked_) {
    ahead = askAhead(spec_->timeout);
  } else if (!copiesChecked_) {
    ahead = lateCopyAhead(spec_->timeout);
  }
  checkAt_ = startedAt_ + spec_->timeout - ahead;
  group_.watch(checkAt_);
}

void PointToPointRun::onCheck() {
  if (over_) {
    return;
  }
  if (!asked_) {
    asked_ = true;
    copiesChecked_ = spec_->memory == nullptr;
    group_.query(spec_->peer);
    armDeadline();
    return;
  }
  if (!copiesChecked_) {
    copiesChecked_ = true;
    const std::string late = lateCopyText(spec_->memory->waitsFor());
    if (late.empty()) {
      armDeadline();
      return;
    }
    fail(Status(StatusCode::kTimeout, timedOutText(spec_->timeout) + late));
    return;
  }
  const std::string why = spec_->peer < 0
      ? std::string("no rank sent a message with this tag")
      : group_.silence(spec_->peer);
  fail(Status(StatusCode::kTimeout, timedOutText(spec_->timeout) + why));
}

void PointToPointRun::fail(const Status& status) {
  if (over_) {
    return;
  }
  if (send_) {
    send_->withdraw(status.message());
  }
  if (recv_) {
    recv_->withdraw(status.message());
  }
  end(status, -1);
}

void PointToPointRun::end(const Status& cause, int sourceRank) {
  over_ = true;
  Status status = cause;
  if (!cause.ok()) {
    status = Status(
        cause.code(),
        describe() + " failed on rank " + std::to_string(group_.rank()) + ": " +
            cause.message() + " [" + std::to_string(spec_->bytes) + " bytes, " +
            durationText(group_.engine().loop().now() - startedAt_) +
            " elapsed" +
            (spec_->peer >= 0 ? ", " + group_.pathSummary(spec_->peer)
                              : std::string()) +
            ']');
  }
  group_.finished(*this, status, sourceRank);
}

} // namespace resilient
