#include "delegate/record.h"

#include <algorithm>

#include "delegate/group_impl.h"

namespace resilient {
namespace {

// Smaller messages are copied in the time of a round trip.
constexpr uint64_t kWorthAwaiting = 256u << 10;
// A message may begin to arrive when devices know so much of its place: they
// learn of the rest faster than it comes.
constexpr uint64_t kPlaceToBegin = 8u << 20;

} // namespace

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

bool Record::awaitsDevices(
    PeerLink& link,
    std::span<const std::byte> bytes,
    std::function<void()> onMore) {
  VerbsLoans* const loans = group_.engine().loans();
  if (loans == nullptr || bytes.size() < kWorthAwaiting ||
      !link.verbs().carriesAny() || loans->settled(bytes) == bytes.size()) {
    return false;
  }
  onMore_ = std::make_shared<std::function<void()>>(std::move(onMore));
  loans->watch(onMore_);
  return true;
}

void SendRecord::onPost(PeerLink& link) {
  awaitReceive = lent_ && bytes >= kWorthAwaiting && link.verbs().carriesAny();
  if (awaitReceive) {
    awaitsDevices(link, {data, bytes}, [this] { onMore(); });
  }
  availableBytes = readable();
  link.channel().send(this, group_.engine().loop().now());
}

uint64_t SendRecord::readable() const {
  const uint64_t known = onMore_ == nullptr
      ? UINT64_MAX
      : group_.engine().loans()->settled({data, bytes});
  return std::min(copiedBytes_, known);
}

void SendRecord::onMore() {
  if (state_ != State::kPosted) {
    return;
  }
  link()->channel().sourceGrew(this, readable(), group_.engine().loop().now());
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
  copiedBytes_ = memory.available(data, bytes);
  onMore();
}

void RecvRecord::onPost(PeerLink& link) {
  source = &link.channel();
  settling = awaitsDevices(link, {data, bytes}, [this] { onMore(); });
  group_.engine().mailbox().post(this);
}

void RecvRecord::onMore() {
  if (state_ == State::kPosted && settling &&
      group_.engine().loans()->settled({data, bytes}) >=
          std::min(bytes, kPlaceToBegin)) {
    source->receiveReady(this, group_.engine().loop().now());
  }
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
