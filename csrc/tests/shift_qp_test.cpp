// The states and requests of SHIFT under random schedules: two ends, two paths
// that deliver packet by packet, and faults.

#include <deque>
#include <string>
#include <vector>

#include "base/random.h"
#include "shift/failover_qp.h"
#include "shift/lookup.h"
#include "tests/check.h"

namespace resilient::shift {
namespace {

constexpr uint32_t kMtu = 1024;
constexpr uint32_t kWindow = 8;

Limits limits() {
  return {kWindow, kWindow, 2, 1, 0};
}

SendRequest* push(
    FailoverQp& qp,
    uint64_t id,
    Operation operation,
    uint32_t length,
    bool signaled) {
  const Piece piece{id, length, 0};
  SendRequest* request = qp.pushSend({&piece, 1});
  if (request != nullptr) {
    request->id = id;
    request->operation = operation;
    request->isSignaled = signaled;
    request->isMarked = false;
  }
  return request;
}

void give(FailoverQp& qp) {
  while (SendRequest* request = qp.firstHeldSend()) {
    qp.numberSend(*request);
    qp.sendPosted();
  }
}

TEST(shift_finds_objects_after_many_have_gone) {
  static Lookup<uint64_t> table;
  std::deque<uint64_t> present;
  Prng random(1);
  for (uint64_t i = 0; i < 100000; ++i) {
    present.push_back(mixBits(i) | 2);
    CHECK(table.insert(present.back(), &present.back()));
    if (present.size() > 1000 || random.chance(0.4)) {
      CHECK(table.find(present.front()) == &present.front());
      table.erase(present.front());
      CHECK(table.find(present.front()) == nullptr);
      present.pop_front();
    }
  }
  for (uint64_t& key : present) {
    CHECK(table.find(key) == &key);
    table.erase(key);
  }
  CHECK_EQ(table.used(), 0U);
}

TEST(shift_counts_packets) {
  CHECK_EQ(packetsOf(0, 1024), 1U);
  CHECK_EQ(packetsOf(1024, 1024), 1U);
  CHECK_EQ(packetsOf(1025, 1024), 2U);
  CHECK_EQ(packetsOf(UINT32_MAX, 256), 1U << 24);
}

TEST(shift_retires_unsignaled_requests_with_a_later_signaled_one) {
  FailoverQp qp(limits());
  qp.setPacketRules(kMtu, 5);
  for (uint64_t id = 0; id < 6; ++id) {
    push(qp, id, Operation::kSend, 10, id % 3 == 2);
  }
  give(qp);
  SendRequest done;
  CHECK(qp.completeSend(done));
  CHECK_EQ(done.id, 2U);
  CHECK(qp.completeSend(done));
  CHECK_EQ(done.id, 5U);
  CHECK(qp.isIdle());
  CHECK(!qp.completeSend(done));
}

TEST(shift_never_resends_atomics_and_marked_requests) {
  for (const bool isMarked : {false, true}) {
    FailoverQp qp(limits());
    CHECK(qp.unsafe().empty());
    push(qp, 0, Operation::kWrite, 10, true);
    push(qp, 1, isMarked ? Operation::kWrite : Operation::kAtomic, 8, true)
        ->isMarked = isMarked;
    // Not yet given to a NIC: nothing has happened to it.
    CHECK(qp.unsafe().empty());
    give(qp);
    CHECK(!qp.unsafe().empty());
  }
}

TEST(shift_refuses_progress_that_is_impossible) {
  FailoverQp qp(limits());
  qp.setPacketRules(kMtu, kPacketMask - 1);
  push(qp, 0, Operation::kSend, 3000, true); // packets 0xfffffe, 0xffffff and 0
  push(qp, 1, Operation::kWrite, 10, true); // packet 1
  give(qp);
  std::vector<SendRequest> completed;
  CHECK(!qp.applyProgress({2, 2}, completed).empty());
  CHECK(!qp.applyProgress({0, 3}, completed).empty());
  CHECK(!qp.applyProgress({0, kPacketMask - 2}, completed).empty());
  CHECK(completed.empty());
  CHECK(qp.applyProgress({1, 2}, completed).empty());
  CHECK_EQ(completed.size(), 1U);
  CHECK_EQ(qp.firstHeldSend(), nullptr);
}

TEST(shift_repeats_no_read_behind_a_write_that_has_landed) {
  for (const uint32_t next : {105U, 106U}) {
    FailoverQp qp(limits());
    qp.setPacketRules(kMtu, 100);
    push(qp, 0, Operation::kRead, 5000, true); // packets 100 to 104
    push(qp, 1, Operation::kWrite, 4000, true);
    give(qp);
    std::vector<SendRequest> completed;
    CHECK_EQ(qp.applyProgress({0, next}, completed).empty(), next == 105);
    CHECK(completed.empty());
  }
}

TEST(shift_continues_a_write_behind_the_bytes_that_landed) {
  FailoverQp qp(limits());
  qp.setPacketRules(kMtu, 100);
  push(qp, 0, Operation::kWrite, 4000, true);
  push(qp, 1, Operation::kSend, 4000, true);
  give(qp);
  qp.hold();
  qp.moveReceives();
  std::vector<SendRequest> completed;
  CHECK(qp.applyProgress({0, 106}, completed).empty());
  qp.endSwitch(7);
  CHECK_EQ(qp.firstHeldSend()->landed, 4000U);
  qp.numberSend(*qp.firstHeldSend());
  CHECK_EQ(
      qp.firstHeldSend()->packets,
      1U); // an empty WRITE keeps the order of completions
  qp.sendPosted();
  CHECK_EQ(qp.firstHeldSend()->landed, 0U); // a SEND is repeated whole
  qp.numberSend(*qp.firstHeldSend());
  CHECK_EQ(qp.firstHeldSend()->firstPacket, 8U);
}

// ---- Two ends ----

struct Packet {
  uint32_t number;
  uint64_t id;
  Operation operation;
  uint32_t offset; // in the message
  uint32_t bytes;
  bool isFirst;
  bool isLast;
};

// What a message of the application is, by its number alone.
Operation operationOf(uint64_t id) {
  constexpr Operation kKinds[] = {
      Operation::kWrite, Operation::kSend, Operation::kWriteWithImmediate};
  return kKinds[mixBits(id) % 3];
}

uint32_t lengthOf(uint64_t id) {
  return 8 + static_cast<uint32_t>(mixBits(id + 1) % 5000);
}

bool isSignaled(uint64_t id) {
  return mixBits(id + 2) % 3 == 0 || id % kWindow == kWindow - 1;
}

// A path from the sender to the receiver: packets in flight, and completions.
struct Path {
  std::deque<Packet> flight;
  std::deque<uint64_t>
      completions; // ids of signaled requests that were acknowledged
  uint32_t expected = 0;
  bool losesData = false;
  bool losesAcks = false;
  uint64_t serial = 0;
};

// Messages go one way; the receiver checks exactness.
class World {
 public:
  explicit World(uint64_t seed)
      : random_(seed), sender_(limits()), receiver_(limits()) {
    const auto first = static_cast<uint32_t>(random_.below(kPacketMask));
    sender_.setPacketRules(kMtu, first);
    paths_[0].expected = first;
    for (uint64_t i = 0; i < kWindow; ++i) {
      receiver_.pushReceive({});
    }
    postReceives();
  }

  void run(uint64_t messages) {
    messages_ = messages;
    for (int step = 0; completed_ < messages || sender_.active() != 0; ++step) {
      CHECK(step < 400000);
      act();
    }
    CHECK_EQ(arrived_, twoSided_);
  }

 private:
  void act() {
    switch (random_.below(8)) {
      case 0:
        post();
        break;
      case 1:
      case 2:
      case 3:
        deliver();
        break;
      case 4:
        acknowledge();
        break;
      case 5:
        complete();
        break;
      case 6:
        breakOrSwitch();
        break;
      default:
        return_();
    }
  }

  Path& active() {
    return paths_[static_cast<size_t>(sender_.active())];
  }

  void post() {
    if (next_ == messages_ || next_ - completed_ >= kWindow) {
      return;
    }
    if (push(
            sender_,
            next_,
            operationOf(next_),
            lengthOf(next_),
            isSignaled(next_) || next_ + 1 == messages_) == nullptr) {
      return;
    }
    twoSided_ += operationOf(next_) == Operation::kWrite ? 0 : 1;
    ++next_;
    transmit();
  }

  void transmit() {
    while (SendRequest* request =
               sender_.isHeld() ? nullptr : sender_.firstHeldSend()) {
      sender_.numberSend(*request);
      sender_.sendPosted();
      for (uint32_t i = 0; i < request->packets; ++i) {
        const uint32_t offset = request->landed + i * kMtu;
        active().flight.push_back(
            {(request->firstPacket + i) & kPacketMask,
             request->isInternal ? kInternal : request->id,
             request->operation,
             offset,
             std::min(kMtu, request->length - offset),
             i == 0,
             i + 1 == request->packets});
      }
    }
  }

  void deliver() {
    Path& path = active();
    if (path.losesData || path.flight.empty()) {
      return;
    }
    const Packet packet = path.flight.front();
    if (packet.operation != Operation::kWrite && packet.isFirst &&
        receiver_.outstandingReceives() == 0) {
      return;
    }
    path.flight.pop_front();
    CHECK_EQ(packet.number, path.expected);
    path.expected = (path.expected + 1) & kPacketMask;
    if (packet.operation == Operation::kWrite && packet.id != kInternal) {
      land(packet);
    }
    if (packet.isLast) {
      landed(packet);
    }
  }

  // Beyond the paper: no byte of a plain WRITE is written twice.
  void land(const Packet& packet) {
    if (packet.bytes == 0) {
      return;
    }
    CHECK(
        packet.id > wroteId_ ||
        (packet.id == wroteId_ && packet.offset == wroteBytes_) ||
        (wroteNothing_ && packet.id == wroteId_));
    wroteNothing_ = false;
    if (packet.id != wroteId_) {
      wroteId_ = packet.id;
      wroteBytes_ = 0;
    }
    CHECK_EQ(packet.offset, wroteBytes_);
    wroteBytes_ += packet.bytes;
  }

  void landed(const Packet& packet) {
    if (packet.operation != Operation::kWrite) {
      ReceiveRequest done;
      CHECK(receiver_.completeReceive(done));
      CHECK(packet.id >= expectedId_); // in order, and never twice
      expectedId_ = packet.id + 1;
      ++arrived_;
      receiver_.pushReceive({});
      postReceives();
    }
    acknowledged_.push_back(packet.id);
  }

  void postReceives() {
    while (receiver_.firstHeldReceive() != nullptr) {
      receiver_.receivePosted();
    }
  }

  void acknowledge() {
    while (!active().losesAcks && !acknowledged_.empty()) {
      const uint64_t id = acknowledged_.front();
      acknowledged_.pop_front();
      if (id == kInternal || isSignaled(id) || id + 1 == messages_) {
        active().completions.push_back(id);
      }
    }
  }

  void complete() {
    if (active().completions.empty()) {
      return;
    }
    const uint64_t id = active().completions.front();
    active().completions.pop_front();
    SendRequest done;
    CHECK(sender_.completeSend(done));
    if (id == kInternal) {
      CHECK(done.isInternal);
    } else {
      told(done);
    }
  }

  void told(const SendRequest& done) {
    CHECK(!done.isInternal);
    CHECK(done.id >= completed_);
    completed_ = done.id + 1;
  }

  void breakOrSwitch() {
    Path& path = active();
    if (path.losesData || path.losesAcks) {
      if (random_.chance(0.2)) {
        switchPaths();
      }
    } else if (random_.chance(0.02)) {
      path.losesData = random_.chance(0.7);
      path.losesAcks = !path.losesData || random_.chance(0.5);
    }
  }

  void switchPaths() {
    CHECK(sender_.unsafe().empty());
    sender_.hold();
    // Both ends are fenced: what is in flight is lost.
    Path& old = active();
    while (!old.completions.empty()) {
      complete();
    }
    const Progress progress{receiver_.received(), old.expected};
    old = {};
    acknowledged_.clear();
    receiver_.hold();
    receiver_.moveReceives();
    postReceives();
    sender_.moveReceives();
    std::vector<SendRequest> completed;
    CHECK(sender_.applyProgress(progress, completed).empty());
    for (const SendRequest& each : completed) {
      if (!each.isInternal) {
        told(each);
      }
    }
    const auto first = static_cast<uint32_t>(random_.below(kPacketMask));
    for (FailoverQp* each : {&sender_, &receiver_}) {
      each->endSwitch(first);
      each->releaseSends();
    }
    active().expected = first;
    CHECK(
        sender_.sendState() ==
        (sender_.active() == 0 ? SendState::kDefault : SendState::kFallback));
    CHECK(receiver_.receivePath() == sender_.active());
    transmit();
  }

  void return_() {
    if (sender_.active() == 0) {
      return;
    }
    if (sender_.sendState() == SendState::kFallback) {
      if (!sender_.isHeld() && random_.chance(0.05)) {
        sender_.beginReturn();
        CHECK(sender_.sendState() == SendState::kWaitSignaled);
        if (!sender_.isIdle()) {
          sender_.pushFence();
          transmit();
        }
        sender_.fencePosted();
        CHECK(sender_.sendState() == SendState::kWaitDrained);
      }
    } else if (sender_.isDrained()) {
      switchPaths();
    } else if (random_.chance(0.01)) {
      sender_.cancelReturn();
      transmit();
    }
  }

  static constexpr uint64_t kInternal = UINT64_MAX;

  Prng random_;
  FailoverQp sender_;
  FailoverQp receiver_;
  Path paths_[2];
  std::deque<uint64_t> acknowledged_;
  uint64_t messages_ = 0;
  uint64_t next_ = 0;
  uint64_t completed_ = 0;
  uint64_t twoSided_ = 0;
  uint64_t arrived_ = 0;
  uint64_t expectedId_ = 0;
  uint64_t wroteId_ = 0;
  uint32_t wroteBytes_ = 0;
  bool wroteNothing_ = true;
};

TEST(shift_is_exact_under_random_schedules) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    World(seed).run(150);
  }
}

} // namespace
} // namespace resilient::shift
