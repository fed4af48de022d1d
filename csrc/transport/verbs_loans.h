#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/device_thread.h"
#include "transport/event_loop.h"
#include "transport/gpu_driver.h"
#include "transport/verbs_api.h"

namespace resilient {

class VerbsEnd;

// The memory of operations, lent to RDMA devices while the operations run.
// There it lies for the devices of other ranks to read, and for ours to write
// to.
//
// How it works. lend() returns at once, and a thread for each device in use
// registers the memory, piece by piece. Messages wait for their pieces: that
// takes a fraction of the time of a copy. Memory is registered anew for each
// operation: a registration pins pages, and nothing tells when the program
// unmaps them and maps others at the same address. So none outlives its
// operation, and none can be stale.
//
// An operation that has ended well takes its memory back at once: no device
// accesses it any more (see Channel::pin), so deregistering may take its time.
// After an error, late packets may still read or write, and the memory is free
// when the devices have let go of it. If a device does not answer, the memory
// is kept until it does, at worst as long as the process lives.
//
// Thread: loop thread. It outlives the paths that use it.
class VerbsLoans {
 public:
  struct Limits {
    uint64_t fromBytes = 1u << 20; // smaller memory is not worth it
    uint64_t totalBytes = uint64_t(4) << 30;
    // Large memory is registered in pieces of this size.
    uint64_t pieceBytes = 16u << 20;
    // Messages wait no longer for their memory, and are copied. They do not
    // wait again for a device that was late, until it has answered.
    Nanos registerWithin = std::chrono::seconds(1);
    // How long a device may take to let go of memory.
    Nanos letGoWithin = std::chrono::seconds(5);
  };
  using Loan = uint64_t; // 0: none
  // Tries how a device can register the memory of a GPU; returns a line for the
  // log. May block; called on a thread of its own.
  using GpuTrial =
      std::function<std::string(VerbsDevice& device, const GpuAddress& where)>;

  VerbsLoans(EventLoop& loop, Limits limits, GpuTrial trial = {});
  // Nothing is called any more. Threads that wait for a device go on.
  ~VerbsLoans();
  VerbsLoans(const VerbsLoans&) = delete;
  VerbsLoans& operator=(const VerbsLoans&) = delete;

  // From now on, memory is registered with the device, too.
  void use(const std::shared_ptr<VerbsDevice>& device);
  // The device has failed. Memory is not registered with it any more, and what
  // is registered is deregistered; revoke() still waits for that. No path of
  // the device may be left.
  void drop(const VerbsDevice& device);
  // An operation has a tensor there. Each device in use tries each GPU once.
  void meetGpu(const GpuAddress& where);
  // 0 if no device is in use, the memory is too small, or too much is lent.
  Loan lend(std::span<const std::span<std::byte>> memory);
  // How many of the first bytes the devices know by now, or never will: all, if
  // they are in no loan.
  uint64_t settled(std::span<const std::byte> bytes) const;
  // Calls it, while it exists, each time that settled() may have grown.
  void watch(std::weak_ptr<std::function<void()>> onSettled);
  // Null if no loan has these bytes, or the device does not know them yet. No
  // more than kMaxFound.
  VerbsMemory* find(
      const VerbsDevice& device,
      std::span<const std::byte> bytes);
  // The operation has ended well.
  void end(Loan loan);
  // The operation has failed: calls `gone` when no device can access the
  // memory, in a later turn. Not ok: a device has not let go of it in time.
  // Then `hold`, unless it is null, is called just before, and its result lives
  // until the device has: it owns the memory.
  void revoke(
      Loan loan,
      std::function<void(const Status&)> gone,
      std::function<std::shared_ptr<void>()> hold = nullptr);
  // Destroys an end on a thread of its own. Calls `settled` when nothing lands
  // any more of what it has been asked to read: after the completion of the
  // last read, which nobody else may take, or at once if there is none.
  void destroy(
      std::shared_ptr<VerbsEnd> end,
      std::optional<uint64_t> lastRead,
      std::function<void()> settled);
  // No call of revoke() is open.
  bool settled() const {
    return waiting_.empty();
  }
  static constexpr uint64_t kMaxFound = 1u << 20;
  // Ends the open calls of revoke(), as if their time were over.
  void giveUp();

 private:
  struct Device {
    uint64_t id = 0; // an address may come again
    std::shared_ptr<VerbsDevice> device;
    std::shared_ptr<DeviceThread> thread;
    bool isLate = false; // it has not answered in time, and not since
  };
  struct Registered {
    const VerbsDevice* device = nullptr; // in use
    std::shared_ptr<DeviceThread> thread; // the device's
    std::span<std::byte> bytes;
    std::unique_ptr<VerbsMemory> memory;
  };
  struct Tensor {
    std::span<std::byte> bytes;
    // Of each piece: devices that have not answered yet.
    std::vector<std::set<uint64_t>> missing;
    size_t settled = 0; // pieces, from the first on
  };
  struct Lent {
    uint64_t bytes = 0;
    std::vector<Tensor> memory;
    std::vector<Registered> registered;
    // Of all devices that may have to do with it.
    std::set<std::shared_ptr<DeviceThread>> threads;
    TimerId timer = 0; // gives up waiting
  };
  struct Waiting { // of revoke()
    std::function<void(const Status&)> gone;
    std::function<std::shared_ptr<void>()> hold;
    // Also held by the threads, until the devices have let go.
    std::shared_ptr<std::shared_ptr<void>> kept;
    TimerId timer = 0;
  };

  void registerPieces(Loan loan, size_t tensor);
  void registered(
      Loan loan,
      size_t tensor,
      size_t piece,
      uint64_t device,
      Registered memory,
      const Status& status);
  static bool settle(Tensor& tensor);
  void giveUpWaiting(Loan loan);
  void tellSettled();
  void letGo(
      Lent lent,
      std::function<void()> gone,
      std::shared_ptr<void> kept = nullptr);
  void over(uint64_t call, const Status& status);

  EventLoop& loop_;
  const Limits limits_;
  const GpuTrial gpuTrial_;
  const std::shared_ptr<LoopCalls> calls_;
  std::vector<Device> devices_;
  uint64_t lastDevice_ = 0;
  std::set<std::pair<std::string, int>> gpusTried_; // device, GPU
  std::map<Loan, Lent> loans_;
  Loan last_ = 0;
  uint64_t lentBytes_ = 0;
  std::map<uint64_t, Waiting> waiting_;
  std::vector<std::weak_ptr<std::function<void()>>> watchers_;
  uint64_t lastCall_ = 0;
  bool saidRefused_ = false;
};

} // namespace resilient
