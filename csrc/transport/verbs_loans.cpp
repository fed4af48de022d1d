#include "transport/verbs_loans.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/log.h"
#include "transport/verbs_end.h"

namespace resilient {

namespace {

Status deviceIsStuck() {
  return Status(
      StatusCode::kInternal,
      "an RDMA device does not answer: it may still access the memory of this "
      "operation");
}

} // namespace

VerbsLoans::VerbsLoans(EventLoop& loop, Limits limits, GpuTrial trial)
    : loop_(loop),
      limits_(limits),
      gpuTrial_(std::move(trial)),
      calls_(std::make_shared<LoopCalls>(loop)) {}

VerbsLoans::~VerbsLoans() {
  for (auto& [loan, lent] : loans_) {
    loop_.cancel(lent.timer);
    letGo(std::move(lent), nullptr);
  }
  calls_->end();
}

void VerbsLoans::use(const std::shared_ptr<VerbsDevice>& device) {
  if (std::ranges::find(devices_, device, &Device::device) == devices_.end()) {
    devices_.push_back(
        {++lastDevice_, device, std::make_shared<DeviceThread>()});
  }
}

// The threads of the device hold what is left of it, and end with it.
void VerbsLoans::drop(const VerbsDevice& device) {
  const auto found = std::ranges::find_if(
      devices_, [&](const Device& d) { return d.device.get() == &device; });
  if (found == devices_.end()) {
    return;
  }
  Device dropped = std::move(*found);
  devices_.erase(found);
  for (auto& [loan, lent] : loans_) {
    Lent failed;
    failed.threads = {dropped.thread};
    std::erase_if(lent.registered, [&](Registered& each) {
      const bool isOfDevice = each.device == &device;
      if (isOfDevice) {
        failed.registered.push_back(std::move(each));
      }
      return isOfDevice;
    });
    letGo(std::move(failed), nullptr);
    for (Tensor& tensor : lent.memory) {
      for (std::set<uint64_t>& missing : tensor.missing) {
        missing.erase(dropped.id);
      }
      settle(tensor);
    }
  }
  // Closing it may block.
  dropped.thread->run([held = std::move(dropped.device)] {});
  tellSettled();
}

// Not on the thread that registers: a driver that does not answer must not hold
// up other memory.
void VerbsLoans::meetGpu(const GpuAddress& where) {
  if (where.gpu < 0 || !gpuTrial_) {
    return;
  }
  for (const Device& each : devices_) {
    const std::shared_ptr<VerbsDevice> device = each.device;
    if (gpusTried_.emplace(device->name(), where.gpu).second) {
      std::thread([trial = gpuTrial_, device, where] {
        logMessage(LogLevel::kInfo, trial(*device, where));
      }).detach();
    }
  }
}

VerbsLoans::Loan VerbsLoans::lend(
    std::span<const std::span<std::byte>> memory) {
  if (devices_.empty()) {
    return 0;
  }
  Lent lent;
  std::set<uint64_t> asked;
  for (const Device& device : devices_) {
    lent.threads.insert(device.thread);
    if (!device.isLate) {
      asked.insert(device.id);
    }
  }
  for (const std::span<std::byte> each : memory) {
    if (each.size() >= limits_.fromBytes) {
      lent.bytes += each.size();
      Tensor& tensor = lent.memory.emplace_back();
      tensor.bytes = each;
      tensor.missing.assign(
          (each.size() + limits_.pieceBytes - 1) / limits_.pieceBytes, asked);
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
    for (const Device& device : devices_) {
      device.thread->run([this,
                          calls = calls_,
                          loan,
                          tensor,
                          piece,
                          bytes,
                          id = device.id,
                          thread = device.thread,
                          device = device.device] {
        auto made = std::make_shared<Registered>();
        made->device = device.get();
        made->thread = thread;
        made->bytes = bytes;
        const Status status =
            device->registerMemory(bytes, /*forReads=*/true, made->memory);
        // If nobody takes it, `made` deregisters it, on whichever thread.
        LoopCalls::post(calls, [this, loan, tensor, piece, id, made, status] {
          registered(loan, tensor, piece, id, std::move(*made), status);
        });
      });
    }
  }
}

void VerbsLoans::registered(
    Loan loan,
    size_t tensor,
    size_t piece,
    uint64_t device,
    Registered memory,
    const Status& status) {
  if (!status.ok() && !std::exchange(saidRefused_, true)) {
    logMessage(
        LogLevel::kWarning,
        "RDMA copies tensors that cannot be registered: " + status.message());
  }
  const auto found = loans_.find(loan);
  const auto answering = std::ranges::find(devices_, device, &Device::id);
  if (answering != devices_.end()) {
    answering->isLate = false;
  }
  if (found == loans_.end() || answering == devices_.end()) {
    Lent late; // the operation was faster, or the device has failed
    late.threads = {memory.thread};
    late.registered.push_back(std::move(memory));
    letGo(std::move(late), nullptr);
    return;
  }
  if (status.ok()) {
    found->second.registered.push_back(std::move(memory));
  }
  Tensor& of = found->second.memory[tensor];
  of.missing[piece].erase(device);
  if (settle(of)) {
    tellSettled();
  }
}

// Counts the first pieces that all devices know or have refused. True if there
// are more than before.
bool VerbsLoans::settle(Tensor& tensor) {
  const size_t before = tensor.settled;
  while (tensor.settled < tensor.missing.size() &&
         tensor.missing[tensor.settled].empty()) {
    ++tensor.settled;
  }
  return tensor.settled != before;
}

void VerbsLoans::giveUpWaiting(Loan loan) {
  const auto found = loans_.find(loan);
  if (found == loans_.end()) {
    return;
  }
  found->second.timer = 0;
  for (Tensor& tensor : found->second.memory) {
    tensor.settled = tensor.missing.size();
    for (const std::set<uint64_t>& missing : tensor.missing) {
      for (Device& device : devices_) {
        device.isLate = device.isLate || missing.contains(device.id);
      }
    }
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

// On the threads, behind all registrations of it that may still be under way.
// Each of them holds `kept` until its device has let go.
void VerbsLoans::letGo(
    Lent lent,
    std::function<void()> gone,
    std::shared_ptr<void> kept) {
  // Destroyed with the last of the jobs.
  const std::shared_ptr<void> last(nullptr, [calls = calls_, gone](void*) {
    if (gone) {
      LoopCalls::post(calls, gone);
    }
  });
  for (const std::shared_ptr<DeviceThread>& thread : lent.threads) {
    auto held = std::make_shared<std::vector<std::unique_ptr<VerbsMemory>>>();
    for (Registered& each : lent.registered) {
      if (each.thread == thread) {
        held->push_back(std::move(each.memory));
      }
    }
    if (!held->empty() || gone) {
      thread->run([held, kept, last] { held->clear(); });
    }
  }
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
    other->second.threads.insert(each.thread);
    other->second.registered.push_back(std::move(each));
    return true;
  });
  letGo(std::move(lent), nullptr);
}

// What the threads register for it meanwhile is never used: registered() finds
// no loan.
void VerbsLoans::revoke(
    Loan loan,
    std::function<void(const Status&)> gone,
    std::function<std::shared_ptr<void>()> hold) {
  const uint64_t call = ++lastCall_;
  Waiting& waiting = waiting_[call];
  waiting.gone = std::move(gone);
  waiting.hold = std::move(hold);
  waiting.kept = std::make_shared<std::shared_ptr<void>>();
  waiting.timer = loop_.after(
      limits_.letGoWithin, [this, call] { over(call, deviceIsStuck()); });
  Lent lent;
  if (const auto found = loans_.find(loan); found != loans_.end()) {
    lent = std::move(found->second);
    loans_.erase(found);
    loop_.cancel(lent.timer);
    lentBytes_ -= lent.bytes;
  }
  letGo(std::move(lent), [this, call] { over(call, Status()); }, waiting.kept);
}

void VerbsLoans::over(uint64_t call, const Status& status) {
  const auto found = waiting_.find(call);
  if (found == waiting_.end()) {
    return;
  }
  const Waiting waiting = std::move(found->second);
  waiting_.erase(found);
  loop_.cancel(waiting.timer);
  if (!status.ok() && waiting.hold) {
    *waiting.kept = waiting.hold();
  }
  waiting.gone(status);
}

void VerbsLoans::giveUp() {
  while (!waiting_.empty()) {
    over(waiting_.begin()->first, deviceIsStuck());
  }
}

// To destroy a queue pair may take seconds: the kernel's own devices wait for
// the packets that an interface without a carrier keeps.
void VerbsLoans::destroy(
    std::shared_ptr<VerbsEnd> end,
    std::optional<uint64_t> lastRead,
    std::function<void()> settled) {
  static constexpr Nanos kSettleWithin = std::chrono::seconds(1);
  std::thread([end = std::move(end),
               lastRead,
               settled = std::move(settled),
               calls = calls_]() mutable {
    if (lastRead && !end->settle(*lastRead, kSettleWithin)) {
      end.reset();
    }
    LoopCalls::post(calls, std::move(settled));
    end.reset();
  }).detach();
}

} // namespace resilient
