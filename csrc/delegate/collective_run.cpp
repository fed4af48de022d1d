#include "delegate/collective_run.h"

#include <algorithm>
#include <optional>

#include "delegate/diagnosis.h"

namespace resilient {
struct CollectiveRun::Item {
  Transfer* transfer = nullptr;
  std::optional<SendRecord> send;
  std::optional<RecvRecord> recv;
  std::shared_ptr<bool> yielding; // false: withdrawn
  bool learning = false; // waits for the topology
  const void* fetched = nullptr; // waits for `bytes` there
  uint64_t bytes = 0;
  std::list<Item>::iterator self;

  Record* record() {
    if (send) {
      return &*send;
    }
    return recv ? &*recv : nullptr;
  }
};

CollectiveRun::CollectiveRun(
    GroupImpl& group,
    uint64_t sequence,
    CollectiveSpec spec,
    uint64_t recordId)
    : group_(group),
      sequence_(sequence),
      spec_(std::move(spec)),
      recordId_(recordId),
      startedAt_(group.engine().loop().now()),
      watch_(group.engine().loop(), spec_.memory, [this] { onMemory(); }) {}

CollectiveRun::~CollectiveRun() {
  task_.reset(); // before items_: its transfers withdraw themselves
}

// The mailbox begins before the algorithm does: a message that came early is
// compared with the signature before it can match. A failure that was reported
// before the operation began fails its first transfer, so the algorithm ends in
// its usual way.
void CollectiveRun::start() {
  armDeadline();
  topology_ = group_.knownTopology();
  if (auto early = group_.earlyFailure(sequence_)) {
    failure_ = *early;
    tellOthers_ = false;
  }
  group_.engine().mailbox().begin(group_.id(), sequence_, spec_.signature);
  task_ = spec_.body(*this);
  task_.start([this] { ended(); });
}

void CollectiveRun::armDeadline() {
  Nanos ahead(0);
  if (!asked_) {
    ahead = askAhead(spec_.timeout);
  } else if (!copiesChecked_) {
    ahead = lateCopyAhead(spec_.timeout);
  }
  checkAt_ = startedAt_ + spec_.timeout - ahead;
  group_.watch(checkAt_);
}

// Called three times at most: to query the members; if there are copies, to see
// whether they are late; and at the timeout, when the answers show who holds up
// the operation.
void CollectiveRun::onCheck() {
  if (over_) {
    return;
  }
  if (!asked_) {
    asked_ = true;
    copiesChecked_ = spec_.memory == nullptr;
    group_.query(-1);
    armDeadline();
    return;
  }
  if (!copiesChecked_) {
    copiesChecked_ = true;
    const std::string late = lateCopyText(spec_.memory->waitsFor());
    if (late.empty()) {
      armDeadline();
      return;
    }
    fail(
        Status(StatusCode::kTimeout, timedOutText(spec_.timeout) + late),
        /*tellOthers=*/true);
    return;
  }
  const auto [culprit, why] = group_.blame(sequence_, waitingFor());
  // Ranks that wait for each other: then the path to the one we wait for.
  failedPeer_ = culprit == rank() ? waitingFor() : culprit;
  fail(
      Status(StatusCode::kTimeout, timedOutText(spec_.timeout) + why),
      /*tellOthers=*/true);
}

int CollectiveRun::waitingFor() const {
  int peer = -1;
  for (const Item& item : items_) {
    if (item.recv) {
      return item.recv->peer();
    }
    if (item.send) {
      peer = item.send->peer();
    }
  }
  return peer;
}

std::string CollectiveRun::describe() const {
  return spec_.signature.toString() + " #" + std::to_string(sequence_) +
      group_.groupText();
}

CollectiveRun::Item& CollectiveRun::add(Transfer& transfer) {
  items_.emplace_back();
  Item& item = items_.back();
  item.self = std::prev(items_.end());
  item.transfer = &transfer;
  transfer.begin(this, &item);
  return item;
}

// complete() comes last. It resumes the algorithm, which may start or cancel
// other transfers, or end the run.
void CollectiveRun::finish(Item& item, Status status) {
  Transfer* transfer = item.transfer;
  if (status.ok()) {
    received_.done += item.recv ? item.bytes : 0;
    sent_.done += item.send ? item.bytes : 0;
  } else if (failedPeer_ < 0 && item.record() != nullptr) {
    failedPeer_ = item.record()->peer();
    cause_ = status.message();
  }
  items_.erase(item.self);
  transfer->complete(std::move(status));
}

void CollectiveRun::startSend(
    Transfer& transfer,
    int peer,
    uint64_t slot,
    const void* data,
    size_t bytes) {
  if (!failure_.ok()) {
    failLater(transfer);
    return;
  }
  Item& item = add(transfer);
  item.bytes = bytes;
  sent_.started += bytes;
  item.send.emplace(group_, peer, [this, &item](const Status& status) {
    finish(item, status);
  });
  SendOp& op = item.send->op();
  op.key = {group_.id(), kCollectiveBit | sequence_, slot};
  op.signature = spec_.signature;
  op.trafficClass = spec_.trafficClass;
  op.sourceRank = rank();
  op.data = static_cast<const std::byte*>(data);
  op.bytes = bytes;
  op.burstBytes = spec_.bytes / 2; // it sends about as much as it receives
  if (loan_ != 0) {
    item.send->setLent();
  }
  if (spec_.memory) {
    item.send->lookAt(*spec_.memory);
  }
  group_.postWhenKnown(*item.send, /*collective=*/true);
}

void CollectiveRun::startRecv(
    Transfer& transfer,
    int peer,
    uint64_t slot,
    void* data,
    size_t bytes) {
  if (!failure_.ok()) {
    failLater(transfer);
    return;
  }
  Item& item = add(transfer);
  item.bytes = bytes;
  received_.started += bytes;
  item.recv.emplace(group_, peer, [this, &item](const Status& status) {
    finish(item, status);
  });
  RecvOp& op = item.recv->op();
  op.key = {group_.id(), kCollectiveBit | sequence_, slot};
  op.signature = spec_.signature;
  op.data = static_cast<std::byte*>(data);
  op.bytes = bytes;
  item.recv->tell(spec_.memory.get());
  group_.postWhenKnown(*item.recv, /*collective=*/true);
}

size_t CollectiveRun::available(const void* data, size_t bytes) const {
  return spec_.memory ? spec_.memory->available(data, bytes) : bytes;
}

void CollectiveRun::startFetch(
    Transfer& transfer,
    const void* data,
    size_t bytes) {
  if (!failure_.ok() || available(data, bytes) == bytes) {
    startYield(transfer);
    return;
  }
  Item& item = add(transfer);
  item.fetched = data;
  item.bytes = bytes;
}

void CollectiveRun::resultIsFinal(const void* data, size_t bytes) {
  if (spec_.memory) {
    spec_.memory->resultIsFinal(data, bytes);
  }
}

// Sends go on first, since they call nobody back. A fetch that completes
// resumes the algorithm, which may change items_ at will, so the search for the
// next one begins anew.
void CollectiveRun::onMemory() {
  if (over_) {
    return;
  }
  const StagedMemory& memory = *spec_.memory;
  if (const Status failed = memory.failure(); !failed.ok()) {
    fail(failed, /*tellOthers=*/true);
    return;
  }
  for (Item& item : items_) {
    if (item.send) {
      item.send->lookAt(memory);
    }
  }
  const auto there = [&memory](const Item& item) {
    return item.fetched != nullptr &&
        memory.available(item.fetched, item.bytes) == item.bytes;
  };
  while (!over_) {
    const auto found = std::ranges::find_if(items_, there);
    if (found == items_.end()) {
      return;
    }
    finish(*found, Status());
  }
}

void CollectiveRun::startYield(Transfer& transfer) {
  Item& item = add(transfer);
  auto alive = std::make_shared<bool>(true);
  item.yielding = alive;
  group_.engine().loop().post([this, &item, alive] {
    if (*alive) {
      finish(item, failure_);
    }
  });
}

void CollectiveRun::startLearning(Transfer& transfer) {
  if (!failure_.ok() || topology_) {
    startYield(transfer);
    return;
  }
  add(transfer).learning = true;
  group_.learn();
}

void CollectiveRun::onTopology() {
  if (over_ || topology_) {
    return;
  }
  topology_ = group_.knownTopology();
  for (auto i = items_.begin(); i != items_.end(); ++i) {
    if (i->learning) {
      finish(*i, Status()); // there is one at most
      return;
    }
  }
}

// A transfer after the operation has failed: fails in the next turn. It does
// not fail in this call, since Transfer::complete() must not run inside
// startSend().
void CollectiveRun::failLater(Transfer& transfer) {
  startYield(transfer);
}

// Comes from the destructor of a pending Transfer. The memory is free at
// return.
void CollectiveRun::cancel(Transfer& transfer) {
  Item& item = *static_cast<Item*>(transfer.record());
  if (item.yielding) {
    *item.yielding = false;
  }
  if (Record* record = item.record()) {
    record->withdraw(givenUpText());
  }
  items_.erase(item.self);
}

std::string CollectiveRun::givenUpText() const {
  const std::string cause = failure_.ok() ? cause_ : failure_.message();
  return "rank " + std::to_string(rank()) + " gave up " + describe() +
      (cause.empty() ? "" : ": " + cause);
}

// Each record is withdrawn before its transfer completes: when the algorithm
// resumes, the core no longer touches the memory.
void CollectiveRun::fail(const Status& status, bool tellOthers) {
  if (over_) {
    return;
  }
  if (failure_.ok()) {
    failure_ = status;
    tellOthers_ = tellOthers;
  }
  // Completing one resumes the algorithm, which may withdraw all others, or
  // catch the error and wait for the next one.
  while (!over_ && !items_.empty()) {
    Item& item = items_.front();
    if (item.yielding) {
      *item.yielding = false;
    }
    if (Record* record = item.record()) {
      record->withdraw(givenUpText());
    }
    finish(item, failure_);
  }
}

void CollectiveRun::ended() {
  over_ = true;
  const Status why = failure();
  group_.finished(
      *this,
      why.ok() ? why
               : Status(
                     why.code(),
                     describe() + " failed on rank " + std::to_string(rank()) +
                         ": " + why.message() + context()),
      failedPeer_,
      tellOthers_);
}

Status CollectiveRun::failure() const {
  if (!task_.error()) {
    return Status();
  }
  try {
    std::rethrow_exception(task_.error());
  } catch (const StatusError& e) {
    return e.status();
  } catch (const std::exception& e) {
    return Status(StatusCode::kInternal, e.what());
  }
}

// The facts of invariant 1 that the cause does not name.
std::string CollectiveRun::context() const {
  const auto part = [](const Bytes& bytes) {
    return std::to_string(bytes.done) + " of " + std::to_string(bytes.started) +
        " bytes ";
  };
  std::string s = " [this rank: " + part(sent_) + "sent, " + part(received_) +
      "received, " + durationText(group_.engine().loop().now() - startedAt_) +
      " elapsed";
  if (failedPeer_ >= 0) {
    s += ", " + group_.pathSummary(failedPeer_);
  }
  return s + ']';
}

} // namespace resilient
