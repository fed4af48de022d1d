#include "delegate/record.h"

#include "delegate/group_impl.h"

namespace resilient {

void Record::withdraw(const std::string& reason) {
  if (state_ == State::kWaiting) {
    group_.forgetWaiting(*this);
  } else if (state_ == State::kPosted) {
    onWithdraw(reason);
  }
  over();
}

Status Record::named(const Status& status) const {
  const bool closed = link_ != nullptr && !link_->usable() &&
      status.message() == link_->closedBecause().message();
  return closed ? Status(status.code(), group_.closedText(peer_)) : status;
}

void SendRecord::onPost(PeerLink& link) {
  // Smaller ones are copied in the time of the round trip.
  constexpr uint64_t kWorthAwaiting = 256u << 10;
  awaitReceive = lent_ && bytes >= kWorthAwaiting && link.verbs().carriesAny();
  link.channel().send(this, group_.engine().loop().now());
}

void SendRecord::onWithdraw(const std::string& reason) {
  link()->channel().cancelSend(this, reason, group_.engine().loop().now());
}

void SendRecord::finished(const Status& status) {
  const Status named = this->named(status);
  over();
  // `done` may destroy this record, and with it the function.
  const RecordDone done = std::move(done_);
  if (status.code() == StatusCode::kMismatch) {
    // The receiver's words do not say which rank it is.
    done(Status(
        status.code(),
        "rank " + std::to_string(peer()) + " refused it: " + status.message()));
    return;
  }
  done(named);
}

void SendRecord::lookAt(const StagedMemory& memory) {
  const uint64_t there = memory.available(data, bytes);
  if (state_ == State::kPosted) {
    link()->channel().sourceGrew(this, there, group_.engine().loop().now());
  } else {
    availableBytes = there;
  }
}

void RecvRecord::onPost(PeerLink& link) {
  source = &link.channel();
  group_.engine().mailbox().post(this);
}

void RecvRecord::postAny() {
  group_.forgetWaiting(*this);
  state_ = State::kPosted;
  source = nullptr;
  group_.engine().mailbox().post(this);
}

void RecvRecord::onWithdraw(const std::string& reason) {
  group_.engine().mailbox().cancel(this, reason);
}

void RecvRecord::finished(const Status& status) {
  const Status named = this->named(status);
  over();
  const RecordDone done = std::move(done_);
  done(named);
}

} // namespace resilient
