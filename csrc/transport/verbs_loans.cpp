#include "transport/verbs_loans.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.h"

namespace resilient {

namespace {

Status deviceIsStuck() {
  return Status(
      StatusCode::kInternal,
      "an RDMA device does not answer: it may still access the memory of this "
      "operation");
}

} // namespace

// One thread registers and deregisters, in order. A device that does not answer
// holds it up, and with it all memory: other devices may have it, too.
struct VerbsLoans::Shared {
  std::mutex mutex;
  std::condition_variable work;
  EventLoop* loop = nullptr; // null: nobody is interested any more
  std::deque<std::function<void()>> jobs;
  bool running = false; // the thread

  // Calls it in the loop, if the loans are still there then. Any thread.
  static void post(
      const std::shared_ptr<Shared>& shared,
      std::function<void()> call) {
    const std::lock_guard lock(shared->mutex);
    if (shared->loop != nullptr) {
      shared->loop->post([shared, call = std::move(call)] {
        if (shared->loop != nullptr) { // changed in the loop only
          call();
        }
      });
    }
  }

  static void run(const std::shared_ptr<Shared>& shared) {
    // An idle thread costs little, but a process that uses RDMA no more should
    // not keep it.
    constexpr auto kIdle = std::chrono::seconds(10);
    std::unique_lock lock(shared->mutex);
    for (;;) {
      shared->work.wait_for(lock, kIdle, [&] {
        return !shared->jobs.empty() || shared->loop == nullptr;
      });
      if (shared->jobs.empty()) {
        shared->running = false;
        return;
      }
      const std::function<void()> job = std::move(shared->jobs.front());
      shared->jobs.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  static void add(
      const std::shared_ptr<Shared>& shared,
      std::function<void()> job) {
    const std::lock_guard lock(shared->mutex);
    shared->jobs.push_back(std::move(job));
    shared->work.notify_one();
    if (!std::exchange(shared->running, true)) {
      std::thread([shared] { run(shared); }).detach();
    }
  }
};

VerbsLoans::VerbsLoans(EventLoop& loop, Limits limits)
    : loop_(loop), limits_(limits), shared_(std::make_shared<Shared>()) {
  shared_->loop = &loop;
}

VerbsLoans::~VerbsLoans() {
  for (auto& [loan, lent] : loans_) {
    loop_.cancel(lent.timer);
    letGo(std::move(lent), nullptr);
  }
  const std::lock_guard lock(shared_->mutex);
  shared_->loop = nullptr;
  shared_->work.notify_one();
}

void VerbsLoans::use(const std::shared_ptr<VerbsDevice>& device) {
  if (std::ranges::find(devices_, device) == devices_.end()) {
    devices_.push_back(device);
  }
}

VerbsLoans::Loan VerbsLoans::lend(
    std::span<const std::span<std::byte>> memory) {
  if (devices_.empty()) {
    return 0;
  }
  Lent lent;
  for (const std::span<std::byte> each : memory) {
    if (each.size() >= limits_.fromBytes) {
      lent.bytes += each.size();
      Tensor& tensor = lent.memory.emplace_back();
      tensor.bytes = each;
      tensor.missing.assign(
          (each.size() + limits_.pieceBytes - 1) / limits_.pieceBytes,
          devices_.size());
    }
  }
  if (lent.bytes == 0 || lent.bytes > limits_.totalBytes - lentBytes_) {
    return 0;
  }
  const Loan loan = ++last_;
  lentBytes_ += lent.bytes;
  Lent& kept = loans_[loan] = std::move(lent);
  kept.timer = loop_.after(
      limits_.registerWithin, [this, loan] { giveUpWaiting(loan); });
  for (size_t i = 0; i < kept.memory.size(); ++i) {
    registerPieces(loan, i);
  }
  return loan;
}

// Each piece ends a little behind the beginning of the next one, so that
// whatever a path looks for lies in one of them.
void VerbsLoans::registerPieces(Loan loan, size_t tensor) {
  const Tensor& from = loans_.at(loan).memory[tensor];
  for (size_t piece = 0; piece < from.missing.size(); ++piece) {
    const uint64_t begin = piece * limits_.pieceBytes;
    const std::span<std::byte> bytes = from.bytes.subspan(
        begin,
        std::min(from.bytes.size() - begin, limits_.pieceBytes + kMaxFound));
    for (const std::shared_ptr<VerbsDevice>& device : devices_) {
      Shared::add(
          shared_,
          [this, shared = shared_, loan, tensor, piece, bytes, device] {
            auto made = std::make_shared<Registered>();
            made->device = device.get();
            made->bytes = bytes;
            const Status status =
                device->registerMemory(bytes, /*forReads=*/true, made->memory);
            // If nobody takes it, `made` deregisters it, on whichever thread.
            Shared::post(shared, [this, loan, tensor, piece, made, status] {
              registered(loan, tensor, piece, std::move(*made), status);
            });
          });
    }
  }
}

void VerbsLoans::registered(
    Loan loan,
    size_t tensor,
    size_t piece,
    Registered memory,
    const Status& status) {
  if (!status.ok() && !std::exchange(saidRefused_, true)) {
    logMessage(
        LogLevel::kWarning,
        "RDMA copies tensors that cannot be registered: " + status.message());
  }
  const auto found = loans_.find(loan);
  if (found == loans_.end()) {
    Lent late; // the operation was faster
    late.registered.push_back(std::move(memory));
    letGo(std::move(late), nullptr);
    return;
  }
  if (status.ok()) {
    found->second.registered.push_back(std::move(memory));
  }
  Tensor& of = found->second.memory[tensor];
  --of.missing[piece];
  if (of.missing[piece] == 0 && of.settled == piece) {
    while (of.settled < of.missing.size() && of.missing[of.settled] == 0) {
      ++of.settled;
    }
    tellSettled();
  }
}

void VerbsLoans::giveUpWaiting(Loan loan) {
  const auto found = loans_.find(loan);
  if (found == loans_.end()) {
    return;
  }
  found->second.timer = 0;
  for (Tensor& tensor : found->second.memory) {
    tensor.settled = tensor.missing.size();
  }
  tellSettled();
}

uint64_t VerbsLoans::settled(std::span<const std::byte> bytes) const {
  for (const auto& [loan, lent] : loans_) {
    for (const Tensor& tensor : lent.memory) {
      if (bytes.data() < tensor.bytes.data() ||
          bytes.data() + bytes.size() >
              tensor.bytes.data() + tensor.bytes.size()) {
        continue;
      }
      const auto begin =
          static_cast<uint64_t>(bytes.data() - tensor.bytes.data());
      const uint64_t end = tensor.settled == tensor.missing.size()
          ? tensor.bytes.size()
          : tensor.settled * limits_.pieceBytes;
      if (end < begin + bytes.size()) {
        return end < begin ? 0 : end - begin;
      }
    }
  }
  return bytes.size();
}

void VerbsLoans::watch(std::weak_ptr<std::function<void()>> onSettled) {
  std::erase_if(watchers_, [](const auto& each) { return each.expired(); });
  watchers_.push_back(std::move(onSettled));
}

// They may watch anew, and end others.
void VerbsLoans::tellSettled() {
  const auto watchers = watchers_;
  for (const auto& each : watchers) {
    if (const auto call = each.lock()) {
      (*call)();
    }
  }
}

VerbsMemory* VerbsLoans::find(
    const VerbsDevice& device,
    std::span<const std::byte> bytes) {
  for (const auto& [loan, lent] : loans_) {
    for (const Registered& each : lent.registered) {
      if (each.device == &device && bytes.data() >= each.bytes.data() &&
          bytes.data() + bytes.size() <=
              each.bytes.data() + each.bytes.size()) {
        return each.memory.get();
      }
    }
  }
  return nullptr;
}

// On the thread, behind all registrations of it that may still be under way.
void VerbsLoans::letGo(Lent lent, std::function<void()> gone) {
  if (lent.registered.empty() && !gone) {
    return;
  }
  auto held = std::make_shared<Lent>(std::move(lent));
  Shared::add(
      shared_,
      [held = std::move(held), shared = shared_, gone = std::move(gone)] {
        held->registered.clear();
        if (gone) {
          Shared::post(shared, gone);
        }
      });
}

void VerbsLoans::end(Loan loan) {
  const auto found = loans_.find(loan);
  if (found == loans_.end()) {
    return;
  }
  Lent lent = std::move(found->second);
  loans_.erase(found);
  loop_.cancel(lent.timer);
  lentBytes_ -= lent.bytes;
  // The same memory may be under way to others, who read it with our key.
  std::erase_if(lent.registered, [this](Registered& each) {
    const auto other = std::ranges::find_if(loans_, [&](const auto& entry) {
      return std::ranges::any_of(
          entry.second.memory, [&](const Tensor& tensor) {
            const std::span<std::byte> memory = tensor.bytes;
            return memory.data() < each.bytes.data() + each.bytes.size() &&
                each.bytes.data() < memory.data() + memory.size();
          });
    });
    if (other == loans_.end()) {
      return false;
    }
    other->second.registered.push_back(std::move(each));
    return true;
  });
  letGo(std::move(lent), nullptr);
}

// What the thread registers for it meanwhile is never used: registered() finds
// no loan.
void VerbsLoans::revoke(Loan loan, std::function<void(const Status&)> gone) {
  const uint64_t call = ++lastCall_;
  Waiting& waiting = waiting_[call];
  waiting.gone = std::move(gone);
  waiting.timer = loop_.after(
      limits_.letGoWithin, [this, call] { over(call, deviceIsStuck()); });
  Lent lent;
  if (const auto found = loans_.find(loan); found != loans_.end()) {
    lent = std::move(found->second);
    loans_.erase(found);
    loop_.cancel(lent.timer);
    lentBytes_ -= lent.bytes;
  }
  letGo(std::move(lent), [this, call] { over(call, Status()); });
}

void VerbsLoans::over(uint64_t call, const Status& status) {
  const auto found = waiting_.find(call);
  if (found == waiting_.end()) {
    return;
  }
  const Waiting waiting = std::move(found->second);
  waiting_.erase(found);
  loop_.cancel(waiting.timer);
  waiting.gone(status);
}

void VerbsLoans::giveUp() {
  while (!waiting_.empty()) {
    over(waiting_.begin()->first, deviceIsStuck());
  }
}

void VerbsLoans::destroy(
    std::shared_ptr<void> object,
    std::function<void()> gone) {
  std::thread([object = std::move(object),
               gone = std::move(gone),
               shared = shared_]() mutable {
    object.reset();
    Shared::post(shared, std::move(gone));
  }).detach();
}

} // namespace resilient
