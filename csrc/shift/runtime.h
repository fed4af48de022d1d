#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
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
  // Runs a job on the control thread, in order.
  // Paper: SHIFT §4.2, shadow control verbs
  void later(std::function<void()> job);
  // Runs what is waiting now; the caller holds the mutex.
  void catchUp();
  void wake();

  // A path on which nothing completes for so long is given up.
  std::chrono::milliseconds silence{500};
  // A recovered path is used after this.
  std::chrono::milliseconds holdDown{500};

  // For control verbs and the control thread, never for the data path.
  std::recursive_mutex mutex;
  Store store;
  std::map<ibv_context*, std::unique_ptr<Device>> devices;
  std::map<ibv_pd*, std::unique_ptr<Pd>> pds;
  std::map<ibv_mr*, std::unique_ptr<Mr>> mrs;
  std::map<ibv_comp_channel*, std::unique_ptr<Channel>> channels;
  std::map<ibv_cq*, std::unique_ptr<Cq>> cqs;
  std::map<ibv_qp*, std::unique_ptr<Qp>> qps;
  // For the data path.
  Lookup<Device> deviceByContext;
  Lookup<Cq> cqByHandle;
  Lookup<Qp> qpByHandle;
  Lookup<Qp> qpByNumber;

 private:
  void run();
  void wait(int limitMs);
  bool takeEvents(Device& device, ibv_context* context, int path);
  void portDown(Device& device, int path);
  // Returns whether a session needs attention soon.
  bool tick();

  bool isStarted_ = false;
  int wakeFd_ = -1;
  std::map<std::string, std::string> pairs_;
  std::vector<std::function<void()>> jobs_;
};

Runtime& runtime();

// Completions name queue pairs by number, which only one device makes unique.
inline uint64_t numberKey(const ibv_context* context, uint32_t number) {
  return reinterpret_cast<uint64_t>(context) * 31 + number;
}

} // namespace resilient::shift
