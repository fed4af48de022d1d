#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace resilient {

// Collectives match by their numbers, so all ranks must call them in one order.
// The program sees to that for its own threads. It cannot for callbacks of
// futures: when they run depends on the network. This file finds collectives of
// callbacks that could come in another order on another rank.
//
// The root of a callback's collective is the program's call of the operation
// that began the chain of callbacks. The rule: between the root and the
// collective, nothing is called on its group but collectives that the same
// chain has called before. Otherwise the collective fails, on all ranks.
//
// Why the rule finds every case, if the program's own calls have one order: let
// c and d be two collectives of one group that have another order on two ranks,
// and let the root of c be called before that of d. (A call of the program is
// its own root.) On the rank where d is called first, d comes after its root,
// so after the root of c, and before c. There c fails, unless the chain of c
// has called d before. But then d comes before c on all ranks. If both have the
// same root but stand on different branches, the later one fails as well.
//
// A callback that is added to an ended future runs at once, in the caller's
// thread, and is part of the program's order there. Where a completion thread
// runs it, its collectives directly follow the root, which is the same order,
// or they fail.
//
// The rule also refuses some programs whose order is always the same: a
// callback of collect_all() belongs to the future that ended last, and what a
// callback waits for may have callbacks with collectives itself.

// The hook of one torch_resilient.ddp.in_order(). Its buckets run one after the
// other on one thread, so each may follow what those before it have called.
// Thread-safe.
class OrderedHook {
 public:
  using Calls = std::vector<std::pair<uint64_t, uint64_t>>; // group, number

  Calls calls() const;
  void called(uint64_t group, uint64_t number);

  // Between the two, this thread runs the hook for a bucket that was handed
  // over at `stamp`, see CallOrder::stampNow(). Does not nest.
  static void begin(std::shared_ptr<OrderedHook> hook, uint64_t stamp);
  static void end();

 private:
  mutable std::mutex mutex_;
  Calls calls_; // the last one on each group
};

// The place of an operation's call, for the callbacks of its future.
struct CallPlace {
  // Of the root: counts the collectives of all groups in this process. 0: not
  // known, and nothing is checked.
  uint64_t stamp = 0;
  // The last collective on each group that the chain of callbacks has called.
  OrderedHook::Calls calls;
  // In the thread of in_order(): `stamp` is the bucket's, and `calls` the
  // hook's.
  std::shared_ptr<OrderedHook> hook;
  bool isHookThread = false;
  // For messages of errors. A point-to-point operation has no number.
  const char* title = "";
  uint64_t group = 0;
  uint64_t number = 0;

  // For operations that end together: the later of two, given in call order.
  static CallPlace later(const CallPlace& a, const CallPlace& b) {
    return b.stamp < a.stamp ? a : b;
  }
};

// Collectives that this thread begins during its life are those of callbacks of
// an operation that was called at `place`. Nests.
class CallbackScope {
 public:
  explicit CallbackScope(CallPlace place);
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

 private:
  CallPlace place_;
  CallPlace* const outer_;
};

// The order of the collectives of one group. Thread-safe.
class CallOrder {
 public:
  CallOrder();

  // One call of a collective. While it lives, no other collective of the group
  // takes a number, and its operation is to be queued meanwhile. `title` is a
  // literal.
  class Call {
   public:
    Call(CallOrder& order, const char* title);

    // Why it must fail; empty if it need not. It has its number all the same.
    const std::string& refusal() const {
      return refusal_;
    }
    const CallPlace& place() const {
      return place_;
    }

   private:
    const std::lock_guard<std::mutex> lock_;
    std::string refusal_;
    CallPlace place_;
  };

  // The place of a point-to-point operation that is called now.
  static CallPlace message(const char* title);
  // For a bucket that is handed over now, see OrderedHook.
  static uint64_t stampNow();

 private:
  bool mayFollow(const CallPlace& place) const;
  std::string refusalText(const CallPlace& place) const;

  const uint64_t id_;
  std::mutex mutex_; // see docs/threads.md
  uint64_t last_ = 0; // number of the last collective
  uint64_t lastStamp_ = 0;
  const char* lastTitle_ = "";
};

} // namespace resilient
