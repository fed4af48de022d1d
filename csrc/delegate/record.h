#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "channel/operation.h"
#include "delegate/peer_link.h"
#include "operation/staged_memory.h"

namespace resilient {

class GroupImpl;

// One message of an operation between being asked for and being over. It may
// first have to wait until the peer's address is known.
//
// Thread: loop thread.
//
// kWaiting: the group may hold a pointer to it. kPosted: the core does, and the
// link counts its interest, which keeps the connections under watch. kOver:
// neither does. A receive from any source belongs to no link and counts
// nothing.
class Record {
 public:
  enum class State { kWaiting, kPosted, kOver };

  Record(GroupImpl& group, int peer) : group_(group), peer_(peer) {}
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;
  virtual ~Record() = default;

  int peer() const {
    return peer_;
  }
  PeerLink* link() const {
    return link_;
  }
  // The peer is known: hand the message to the core. Call it once, and only
  // while the record waits.
  void post(PeerLink& link) {
    state_ = State::kPosted;
    link_ = &link;
    link.addInterest();
    onPost(link);
  }
  // The core must not touch the memory any more, nor call back.
  //
  // After that `done` is not called. Idempotent. Destructors of the derived
  // classes withdraw, because in this one the virtual onWithdraw() would be out
  // of reach.
  void withdraw(const std::string& reason);

 protected:
  virtual void onPost(PeerLink& link) = 0;
  virtual void onWithdraw(const std::string& reason) = 0;
  // With the peer as its subject, if the link was closed for this reason.
  //
  // A closed link gives all its operations one text without a subject; it is
  // recognised by that text.
  Status named(const Status& status) const;
  // The core is done with it.
  void over() {
    if (state_ == State::kPosted && link_ != nullptr) {
      link_->dropInterest();
    }
    state_ = State::kOver;
  }

  // RDMA carries messages of this link, and devices do not know all of the
  // memory yet: `onMore` is called when they know more.
  bool awaitsDevices(
      PeerLink& link,
      std::span<const std::byte> bytes,
      std::function<void()> onMore);

  GroupImpl& group_;
  State state_ = State::kWaiting;
  // Null: the memory needs no devices.
  std::shared_ptr<std::function<void()>> onMore_;

 private:
  const int peer_;
  PeerLink* link_ = nullptr;
};

using RecordDone = std::function<void(const Status&)>;

// The result of an operation: exactly one call of `done`, from the top of
// the loop, unless withdrawn. `done` may destroy the record.
//
// The owner fills in op() before the record is posted; this holds for a
// RecvRecord, too.
class SendRecord final : public Record, private SendOp {
 public:
  SendRecord(GroupImpl& group, int peer, RecordDone done)
      : Record(group, peer), done_(std::move(done)) {}
  ~SendRecord() override {
    withdraw("the operation ended");
  }
  SendOp& op() {
    return *this;
  }
  // The data is lent to RDMA devices: the peer may read it there.
  void setLent() {
    lent_ = true;
  }
  // Looks how much of the data is there now. Call it once before the record is
  // posted, and after each change of `memory`.
  void lookAt(const StagedMemory& memory);

 private:
  void onPost(PeerLink& link) override;
  void onMore();
  void onWithdraw(const std::string& reason) override;
  void finished(const Status& status) override;
  // How much is there, and known to devices that it waits for.
  uint64_t readable() const;
  RecordDone done_;
  bool lent_ = false;
  uint64_t copiedBytes_ = UINT64_MAX; // from a device, if it comes from one
};

class RecvRecord final : public Record, private RecvOp {
 public:
  // peer -1: from any source (point-to-point only); postAny() then.
  RecvRecord(GroupImpl& group, int peer, RecordDone done)
      : Record(group, peer), done_(std::move(done)) {}
  ~RecvRecord() override {
    withdraw("the operation ended");
  }
  RecvOp& op() {
    return *this;
  }
  const RecvOp& op() const {
    return *this;
  }
  void postAny();
  // Tells `memory`, which outlives the record, what has arrived. Null: nobody.
  void tell(StagedMemory* memory) {
    memory_ = memory;
  }

 private:
  void onPost(PeerLink& link) override;
  void onWithdraw(const std::string& reason) override;
  void finished(const Status& status) override;
  void arrived(uint64_t offset, uint64_t bytes) override {
    if (memory_ != nullptr) {
      memory_->resultIsFinal(data + offset, bytes);
    }
  }
  void onMore();
  RecordDone done_;
  StagedMemory* memory_ = nullptr;
};

} // namespace resilient
