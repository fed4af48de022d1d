#pragma once

#include "shift/shadow.h"

namespace resilient::shift {

// The functions that replace those of an application's context.
int postSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad);
int postReceive(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad);
int pollCq(ibv_cq* cq, int count, ibv_wc* completions);
int requestNotify(ibv_cq* cq, int isSolicitedOnly);

// ---- For the control thread ----

// The bit of ibv_send_wr::send_flags that marks a request as not to be sent
// again. Paper: SHIFT §3.1, the optional hint
inline constexpr uint32_t kNotAgain = 1U << 30;

// Takes completions of both devices into the buffer. The lock of `cq` is held.
void drain(Cq& cq);
// Only those of the backup, which is polled by nobody else in the default
// state.
void drainBackup(Cq& cq);
void enterSlow(Cq& cq);
// Wakes an application that waits for an event. The lock of `cq` is held.
void signalReady(Cq& cq);
void addReady(Qp& qp, const SendRequest& request, ibv_wc_status status);
// Gives held requests to the NIC as far as it takes them and their keys are
// known. The lock of `qp` is held.
void postHeldSends(Qp& qp);
void postHeldReceives(Qp& qp);
// All outstanding requests fail. The locks of the queues and of `qp` are held.
void failAll(Qp& qp, ibv_wc_status status);
int postProbe(Qp& qp, int path);

// Locks the completion queues of a queue pair, which may be one.
class QueuesLock {
 public:
  explicit QueuesLock(Qp& qp);
  ~QueuesLock();
  QueuesLock(const QueuesLock&) = delete;
  QueuesLock& operator=(const QueuesLock&) = delete;

 private:
  Cq* first_;
  Cq* second_;
};

} // namespace resilient::shift
