#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "shift/lookup.h"
#include "shift/shadow.h"
#include "shift/store.h"

namespace resilient::shift {

// One line on standard error.
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);

// The configuration, objects and control thread of a process.
class Runtime {
 public:
  // Whether a store was reached when the first device was opened.
  bool start();
  std::string backupOf(const std::string& device) const;
  bool isUsable() const {
    return !store.isLost();
  }
  // Runs a job on the control thread, in order. Needs no mutex.
  // Paper: SHIFT §4.2, shadow control verbs
  void later(std::function<void()> job);
  // The same for a job that the program does not wait for, at most kIdle later:
  // the call costs it no system call, and the thread does not take its
  // processor.
  void soon(std::function<void()> job);
  // Runs what is waiting now; the caller holds the mutex.
  void catchUp();
  void wake();
  // Runs a call that may block on a thread of its own without the mutex, then
  // `done` with it. An urgent call overtakes the others that wait for a thread.
  void
  aside(std::function<void()> call, std::function<void()> done, bool isUrgent);
  // The same, one after another: each waits for the `done` before it. The
  // mutex is held.
  void inTurn(std::function<void()> call, std::function<void()> done);
  // Waits until `condition` is true after some `done`, at most for so long.
  // Releases the mutex meanwhile; returns the condition.
  bool waitForCalls(
      std::unique_lock<std::recursive_mutex>& held,
      std::chrono::milliseconds limit,
      const std::function<bool()>& condition);

  // How often the control thread looks by itself.
  static constexpr std::chrono::milliseconds kIdle{20};

  // A path on which nothing completes for so long is given up.
  std::chrono::milliseconds silence{500};
  // A recovered path is used after this.
  std::chrono::milliseconds holdDown{500};
  // A device that does not change a state of a queue pair for so long is dead.
  std::chrono::milliseconds fenceLimit{2000};

  // For control verbs and the control thread, never for the data path.
  std::recursive_mutex mutex;
  Store store;
  std::map<ibv_context*, std::unique_ptr<Device>> devices;
  std::map<ibv_pd*, std::unique_ptr<Pd>> pds;
  std::map<ibv_mr*, std::unique_ptr<Mr>> mrs;
  std::map<ibv_comp_channel*, std::unique_ptr<Channel>> channels;
  std::map<ibv_cq*, std::unique_ptr<Cq>> cqs;
  std::map<ibv_qp*, std::unique_ptr<Qp>> qps;
  // Destroyed by the application while a device did not answer: a call uses
  // them still.
  std::vector<std::unique_ptr<Qp>> abandoned;
  std::vector<std::unique_ptr<Mr>> abandonedMrs;
  std::vector<std::unique_ptr<Device>> abandonedDevices;
  // For the data path.
  Lookup<Device> deviceByContext;
  Lookup<Cq> cqByHandle;
  Lookup<Qp> qpByHandle;
  Lookup<Qp> qpByNumber;

 private:
  void run();
  using Ready = std::set<int>; // descriptors
  Ready wait(int limitMs);
  bool takeEvents(Device& device, ibv_context* context, int path);
  void portDown(Device& device, int path);
  // Returns whether a session needs attention soon.
  bool tick();

  void help();
  void nextTurn();

  struct Call {
    std::function<void()> call;
    std::function<void()> done;
  };
  // Guarded by the mutex.
  std::deque<Call> turns_;
  bool isTurnUnderWay_ = false;

  std::condition_variable_any callDone_;
  std::mutex callsMutex_;
  std::condition_variable callWaits_;
  // Guarded by callsMutex_.
  std::deque<Call> calls_;
  size_t helpers_ = 0;
  size_t idleHelpers_ = 0;

  void spoilIfAsked();

  bool isStarted_ = false;
  // When this file appears, the next request of each queue pair fails.
  std::string spoilFile_;
  int wakeFd_ = -1;
  std::map<std::string, std::string> pairs_;
  std::mutex jobsMutex_;
  std::vector<std::function<void()>> jobs_; // guarded by jobsMutex_
};

Runtime& runtime();

// Completions name queue pairs by number, which only one device makes unique.
inline uint64_t numberKey(const Device& device, int path, uint32_t number) {
  return (uint64_t{device.id} * 2 + static_cast<uint64_t>(path)) << 32 | number;
}

} // namespace resilient::shift
