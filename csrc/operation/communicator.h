#pragma once

#include <coroutine>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "operation/topology.h"

namespace resilient {

class Communicator;

// One message of a collective, started and not yet awaited. It lives in the
// frame of the algorithm that awaits it:
//
//   Transfer in, out;
//   comm.startRecv(in, left, slot, buffer, bytes);
//   comm.startSend(out, right, slot, data, bytes);
//   co_await in;
//   co_await out;
//
// The memory is lent until co_await returns or the Transfer is destroyed;
// destroying one that is pending cancels it (nothing touches the memory
// afterwards). co_await throws StatusError if the transfer failed. Loop
// thread only. Not movable: the communicator holds its address.
//
// A Transfer that was never begun counts as complete and ok. Algorithms
// therefore await whole arrays and begin only the entries that they need. A
// completed Transfer may be begun once more; one that is pending must not be,
// because its first record would then complete the second use. One coroutine
// awaits it at a time.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer(); // cancels if pending

  bool await_ready() const noexcept {
    return !pending_;
  }
  void await_suspend(std::coroutine_handle<> h) noexcept {
    waiter_ = h;
  }
  void await_resume() const {
    if (!status_.ok()) {
      throw StatusError(status_);
    }
  }
  bool pending() const {
    return pending_;
  }

  // For communicators. complete() resumes the waiter, if there is one, before
  // it returns; it must therefore come from the top of the loop, never from
  // inside startSend, startRecv or cancel.
  void begin(Communicator* owner, void* record) {
    owner_ = owner;
    record_ = record;
    pending_ = true;
    status_ = Status();
    waiter_ = nullptr;
  }
  // The resumed coroutine may destroy this Transfer: complete() accesses no
  // member after resume().
  void complete(Status status) {
    status_ = std::move(status);
    pending_ = false;
    record_ = nullptr;
    if (waiter_) {
      auto w = waiter_;
      waiter_ = nullptr;
      w.resume();
    }
  }
  void* record() const {
    return record_;
  }

 private:
  Communicator* owner_ = nullptr;
  void* record_ = nullptr; // the communicator's own bookkeeping
  bool pending_ = false;
  std::coroutine_handle<> waiter_;
  Status status_;
};

// The view that a collective algorithm has of its group: its rank, the group's
// size, and messages to the other ranks. One Communicator belongs to one
// operation (one sequence number of one group), so `slot` only has to
// distinguish the messages between one pair of ranks within that operation. An
// algorithm uses a slot once for each peer and direction, and sender and
// receiver name the same one. A send and a receive with one peer may share a
// slot. Messages of different slots arrive in any order. Zero bytes are allowed
// and travel like any message. peer == rank() is not allowed.
//
// Inputs may still be on their way from a device when the operation begins. A
// send waits for its bytes by itself. An algorithm that reads an input itself
// first asks available(), and awaits startFetch() if the bytes are not there;
// the functions of collectives/compute.h do so. It writes to no input that it
// has not read.
//
// Results may leave for a device before the operation ends: a receive into the
// memory of a result gives its final value, and resultIsFinal() names what has
// been computed there. Neither changes afterwards.
//
// Thread: the loop's. Lifetime: outlives the Task that uses it and every
// Transfer that was started on it. After the operation has failed, transfers
// that are started complete with its error in a later turn, yields included. An
// algorithm that catches an error and continues therefore still ends.
//
// csrc/tests/loopback_communicator.h implements these rules in memory and
// checks them.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // `bytes` of both ends must be equal, else both fail with kMismatch.
  // Both calls return at once. The message may wait for the list of members,
  // for a connection or for credit; the operation's timeout bounds all of that.
  virtual void startSend(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      const void* data,
      size_t bytes) = 0;
  virtual void startRecv(
      Transfer& transfer,
      int peer,
      uint64_t slot,
      void* data,
      size_t bytes) = 0;
  // For ~Transfer, which calls it only while the transfer is pending.
  // Afterwards the communicator neither accesses the memory nor calls
  // complete().
  virtual void cancel(Transfer& transfer) = 0;

  // How many of the bytes can be read, from the first on.
  virtual size_t available(const void* data, size_t bytes) const = 0;
  // `transfer` completes when all of them can be, at the earliest in the next
  // turn.
  virtual void
  startFetch(Transfer& transfer, const void* data, size_t bytes) = 0;
  // Any memory may be named; only that of results counts.
  virtual void resultIsFinal(const void* data, size_t bytes) = 0;

  // The places of the ranks; null until `transfer` of startLearning()
  // completes. Equal on all ranks for one operation, and for all its life.
  virtual const Topology* topology() const = 0;
  // Completes when the ranks' places are known, at the earliest in the next
  // turn. At most one such transfer may be pending.
  virtual void startLearning(Transfer& transfer) = 0;

  // `transfer` completes at the next turn of the loop. An algorithm that has
  // computed for about 100 us awaits it to let other traffic proceed.
  virtual void startYield(Transfer& transfer) = 0;
};

inline Transfer::~Transfer() {
  if (pending_) {
    owner_->cancel(*this);
  }
}

} // namespace resilient
