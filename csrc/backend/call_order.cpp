#include "backend/call_order.h"

#include <algorithm>
#include <atomic>

namespace resilient {

namespace {

// Not reused, unlike addresses: a Work may outlive its group.
std::atomic<uint64_t> groups{0};
// Counts the collectives of all groups. 0 is no stamp.
std::atomic<uint64_t> stamps{1};

// The place of the callbacks that run on this thread; null in other code.
thread_local CallPlace* current = nullptr;
thread_local CallPlace bucket; // of OrderedHook::begin()

void setCall(OrderedHook::Calls& calls, uint64_t group, uint64_t number) {
  for (auto& [known, last] : calls) {
    if (known == group) {
      last = number;
      return;
    }
  }
  calls.emplace_back(group, number);
}

std::string named(uint64_t number, const char* title) {
  return "collective #" + std::to_string(number) + " (" + title + ")";
}

} // namespace

OrderedHook::Calls OrderedHook::calls() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

void OrderedHook::called(uint64_t group, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  setCall(calls_, group, number);
}

void OrderedHook::begin(std::shared_ptr<OrderedHook> hook, uint64_t stamp) {
  bucket = CallPlace();
  bucket.stamp = stamp;
  bucket.hook = std::move(hook);
  bucket.isHookThread = true;
  current = &bucket;
}

void OrderedHook::end() {
  current = nullptr;
  bucket = CallPlace();
}

CallbackScope::CallbackScope(CallPlace place)
    : place_(std::move(place)), outer_(current) {
  current = place_.stamp == 0 ? nullptr : &place_;
}

CallbackScope::~CallbackScope() {
  current = outer_;
}

CallOrder::CallOrder() : id_(++groups) {}

// The thread of in_order() knows what its hook has called, also in callbacks.
// These compare only with what was called before them: two callbacks of one
// hook can run in another order.
CallOrder::Call::Call(CallOrder& order, const char* title)
    : lock_(order.mutex_) {
  if (current != nullptr) {
    if (current->isHookThread) {
      current->calls = current->hook->calls();
    }
    if (!order.mayFollow(*current)) {
      refusal_ = order.refusalText(*current);
    }
  }
  order.lastTitle_ = title;
  order.lastStamp_ = ++stamps;
  const uint64_t number = ++order.last_;
  if (current == nullptr) {
    place_.stamp = order.lastStamp_;
  } else {
    if (refusal_.empty()) {
      setCall(current->calls, order.id_, number);
      if (current->hook) {
        current->hook->called(order.id_, number);
      }
    }
    place_ = *current;
    place_.isHookThread = false;
  }
  place_.title = title;
  place_.group = order.id_;
  place_.number = number;
}

CallPlace CallOrder::message(const char* title) {
  CallPlace place;
  if (current == nullptr) {
    place.stamp = stampNow();
  } else {
    if (current->isHookThread) {
      current->calls = current->hook->calls();
    }
    place = *current;
    place.isHookThread = false;
  }
  place.title = title;
  place.number = 0;
  return place;
}

uint64_t CallOrder::stampNow() {
  return stamps.load();
}

bool CallOrder::mayFollow(const CallPlace& place) const {
  return lastStamp_ <= place.stamp ||
      std::ranges::count(place.calls, std::pair(id_, last_)) != 0;
}

std::string CallOrder::refusalText(const CallPlace& place) const {
  const std::string between = named(last_, lastTitle_);
  const std::string consequence =
      ". Their order depends on timing and can differ between ranks, so this "
      "collective fails on all of them. ";
  if (place.isHookThread) {
    return "a hook in torch_resilient.ddp.in_order() called this for a bucket "
           "that was handed over before " +
        between + " was called elsewhere" + consequence +
        "Give the hook a group of its own";
  }
  const std::string origin = place.number == 0
      ? std::string("a message (") + place.title + ")"
      : named(place.number, place.title) +
          (place.group == id_ ? "" : " of another group");
  return "called in a callback of " + origin + ", but " + between +
      " was called in between" + consequence +
      "A communication hook of DDP: use torch_resilient.ddp.in_order(hook), or "
      "one bucket, or a group of its own for the hook. Other programs: wait() "
      "for the first operation instead of adding a callback";
}

} // namespace resilient
