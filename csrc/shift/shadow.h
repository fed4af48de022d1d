#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shift/failover_qp.h"
#include "shift/spin_lock.h"

namespace resilient::shift {

class Session;

// A device that the application opened, and its backup. The members are set
// before the device is in a table, except the keys, which have a lock.
struct Device {
  // Differs from those of all other devices of the process; never 0.
  uint32_t id = 0;
  ibv_context* app = nullptr;
  ibv_context* backup = nullptr;
  // Opened a second time for its port events, which the application also gets.
  ibv_context* monitor = nullptr;
  // The functions of the application's context before they were replaced.
  ibv_context_ops real{};
  std::string name;
  std::string backupName;
  // Local keys of memory regions on the backup, by those of the application,
  // and the application's keys whose regions are being registered there.
  std::mutex keysMutex;
  std::map<uint32_t, uint32_t> backupKeys;
  std::set<uint32_t> pendingKeys;
};

struct Pd {
  Device* device = nullptr;
  ibv_pd* app = nullptr;
  ibv_pd* backup = nullptr;
};

struct Mr {
  Device* device = nullptr;
  ibv_mr* app = nullptr;
  ibv_mr* backup = nullptr;
  const ibv_pd* backupPd = nullptr;
  // A thread registers it on the backup.
  bool isRegistering = false;
  // The application has deregistered it meanwhile.
  bool isAbandoned = false;
};

// The application waits on one descriptor for both devices.
struct Channel {
  ibv_comp_channel* app = nullptr;
  ibv_comp_channel* backup = nullptr;
  int realFd = -1;
  int eventFd = -1;
  int epollFd = -1;
  // Guards the members below and the counters of events in the queues.
  std::mutex mutex;
  std::condition_variable acknowledged;
  // Events of our own: completions wait in the buffer of this queue.
  std::deque<ibv_cq*> pending;
};

struct Cq {
  // Constant after the queue is in a table.
  Device* device = nullptr;
  ibv_cq* app = nullptr;
  Channel* channel = nullptr;
  int cqe = 0;

  // Events that the application has got and not acknowledged; guarded by the
  // mutex of the channel.
  unsigned events = 0;

  // Guards the members below and searches for queue pairs by their numbers.
  SpinLock lock;
  // Written once, with the control mutex held as well: read with either.
  ibv_cq* backup = nullptr;
  // Both devices are polled and completions go through `ready`.
  bool isSlow = false;
  bool isArmed = false;
  // Paper: SHIFT §4.3.2, WC buffer of Appendix B
  std::deque<ibv_wc> ready;
};

enum class Protection : uint8_t {
  // Requests are recorded and completions examined.
  kOn,
  // Everything passes through.
  kOff,
  // Given up after the application had been shielded: posts are flushed.
  kDead,
};

// A memory region of the peer on its backup device.
struct RemoteRegion {
  uint32_t key = 0;
  uint64_t address = 0;
  uint64_t length = 0;
};

// Locks are taken in this order: the control mutex (Runtime::mutex), those of
// the completion queues (QueuesLock), that of the queue pair, Device::keysMutex
// or Channel::mutex. The data path never takes the control mutex.
struct Qp {
  explicit Qp(const Limits& limits) : core(limits) {}

  // ---- Constant after the queue pair is in a table ----
  Device* device = nullptr;
  Pd* pd = nullptr;
  ibv_qp* app = nullptr;
  Cq* sendCq = nullptr;
  Cq* receiveCq = nullptr;
  ibv_qp_init_attr asked{};
  bool signalsAll = false;

  // ---- Guarded by the control mutex ----
  std::shared_ptr<Session> session;
  // Attributes that the application has set, as recorded, not queried.
  ibv_qp_attr attributes{};
  // The address behind sgid_index, which may get another index.
  ibv_gid ownAddress{};
  // Whether it has reached RTS, and so the attributes of that are known.
  bool hasSendAttributes = false;

  SpinLock lock;
  // ---- Written with the control mutex and the lock held: read with either.
  // The state of `core` (paths, and the states of the paper) belongs here ----
  ibv_qp* backup = nullptr;
  uint8_t port = 1;
  // The progress has been stated: completions of the old path are void.
  bool isFrozen = false;
  // A switch has begun and not ended.
  bool isSwitching = false;
  bool isProbing = false;
  // Regions of the peer, by the keys that the application uses.
  std::map<uint32_t, RemoteRegion> remoteRegions;

  // ---- Guarded by the lock ----
  FailoverQp core;
  Protection protection = Protection::kOn;
  // The first error that the application has not seen.
  std::optional<ibv_wc> firstError;
  // The result of the probe on the path that carries no data.
  std::optional<bool> probeResult;
  // A key that has to be looked up before more can be sent.
  std::optional<uint32_t> missingKey;
  // Why a held request can never be sent; a literal.
  const char* untranslatable = nullptr;
  // The next request is to fail on purpose, or one has been made to.
  bool spoilsNext = false;
  bool isSpoiled = false;

  // ---- Atomic: written by the control thread ----
  // The peer's session is known, so an error may be held back until the other
  // path is ready; written by the control thread, as is isReady.
  std::atomic<bool> hasPeer{false};
  // The other path can take over.
  std::atomic<bool> isReady{false};
};

// ---- shadow.cpp: everything below is called with the control mutex held ----

// Null if the device has no backup.
std::unique_ptr<Device> openShadow(ibv_context* app);
void closeShadow(Device& device);
bool makeBackupCq(Cq& cq);
bool makeBackupQp(Qp& qp);
// The queue pair of a path.
inline ibv_qp* onPath(const Qp& qp, int path) {
  return path == 0 ? qp.app : qp.backup;
}
// Whether the port that a path uses at this end is active. The data path may
// ask with the lock of the queue pair held.
bool isPortActive(const Qp& qp, int path);
// The RoCE v2 addresses of a device as 32 hexadecimal digits.
std::vector<std::string> addressesOf(ibv_context* context, uint8_t port);
std::string addressText(const ibv_gid& gid);

struct Remote {
  ibv_gid gid{};
  uint32_t number = 0;
};

// The states of a queue pair on one path, with attributes that were copied when
// the object was made. The calls need no lock, because they may block:
// connect() for a second if the neighbour does not answer, and any of them for
// longer if the device is dead.
class PathControl {
 public:
  // The control mutex is held.
  PathControl(const Qp& qp, int path);

  // RESET and INIT, with the attributes that the application has used.
  int initialize() const;
  // RTR and RTS.
  int connect(const Remote& remote, uint32_t ownPacket, uint32_t peerPacket)
      const;
  // Nothing is sent, and nothing arrives in memory, when it has returned 0.
  int fence() const;
  // The number of the next packet that a fenced queue pair would have accepted.
  std::optional<uint32_t> nextPacket() const;

 private:
  ibv_qp* target_;
  int path_;
  ibv_context* context_;
  ibv_qp_attr attributes_;
  ibv_gid ownAddress_;
  bool hasSendAttributes_;
};

} // namespace resilient::shift
