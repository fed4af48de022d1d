#include "shift/data_path.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "shift/runtime.h"

namespace resilient::shift {
namespace {

// create_qp refuses to protect queue pairs with more.
constexpr size_t kPiecesMax = 64;
constexpr int kBatch = 16;

uint64_t keyOf(const void* handle) {
  return reinterpret_cast<uint64_t>(handle);
}

const ibv_context_ops& realOps(ibv_context* context) {
  return runtime().deviceByContext.find(keyOf(context))->real;
}

Operation operationOf(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_WRITE:
      return Operation::kWrite;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return Operation::kWriteWithImmediate;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
      return Operation::kSend;
    case IBV_WR_RDMA_READ:
      return Operation::kRead;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
      return Operation::kAtomic;
    default:
      return Operation::kOther;
  }
}

std::span<const Piece> piecesOf(const ibv_sge* list, int count) {
  static_assert(sizeof(Piece) == sizeof(ibv_sge));
  return {reinterpret_cast<const Piece*>(list), static_cast<size_t>(count)};
}

// Copies the bytes that the application may change after posting.
void keepInline(Qp& qp, SendRequest& request) {
  std::span<uint8_t> room = qp.core.inlineBytes(request);
  if (request.length > room.size()) {
    request.operation = Operation::kOther; // the library below will refuse it
    return;
  }
  size_t at = 0;
  for (const Piece& piece : qp.core.pieces(request)) {
    std::memcpy(
        room.data() + at,
        reinterpret_cast<const void*>(piece.address),
        piece.length);
    at += piece.length;
  }
}

bool record(Qp& qp, const ibv_send_wr& posted) {
  SendRequest* request =
      qp.core.pushSend(piecesOf(posted.sg_list, posted.num_sge));
  if (request == nullptr) {
    return false;
  }
  request->id = posted.wr_id;
  request->opcode = posted.opcode;
  request->flags = posted.send_flags & ~kNotAgain;
  request->immediate = posted.imm_data;
  request->remoteAddress = posted.wr.rdma.remote_addr;
  request->remoteKey = posted.wr.rdma.rkey;
  request->operation = operationOf(posted.opcode);
  request->isSignaled =
      qp.signalsAll || (posted.send_flags & IBV_SEND_SIGNALED) != 0;
  request->isMarked = (posted.send_flags & kNotAgain) != 0;
  request->isInline = (posted.send_flags & IBV_SEND_INLINE) != 0;
  if (request->isInline) {
    keepInline(qp, *request);
  }
  return true;
}

// Records the whole list or nothing.
bool recordAll(Qp& qp, ibv_send_wr* list, bool& isMarked) {
  size_t count = 0;
  for (ibv_send_wr* each = list; each != nullptr; each = each->next, ++count) {
    isMarked |= (each->send_flags & kNotAgain) != 0;
    if (!record(qp, *each)) {
      for (; count != 0; --count) {
        qp.core.undoSend();
      }
      return false;
    }
  }
  return true;
}

// Paper: SHIFT §5.1, inject WQE errors: one wrong field, which makes the
// request and the queue pair fail. It was recorded as the application posted
// it.
int postSpoiled(Qp& qp, ibv_send_wr* list, ibv_send_wr** bad) {
  ibv_send_wr* victim = list;
  while (victim != nullptr &&
         (victim->num_sge == 0 || victim->sg_list->length == 0 ||
          (victim->send_flags & IBV_SEND_INLINE) != 0)) {
    victim = victim->next;
  }
  if (victim == nullptr) {
    return qp.device->real.post_send(qp.app, list, bad);
  }
  std::array<ibv_sge, kPiecesMax> pieces;
  std::copy_n(victim->sg_list, victim->num_sge, pieces.begin());
  pieces.front().lkey = ~pieces.front().lkey;
  ibv_sge* const given = std::exchange(victim->sg_list, pieces.data());
  const int error = qp.device->real.post_send(qp.app, list, bad);
  victim->sg_list = given;
  qp.spoilsNext = false;
  qp.isSpoiled = true;
  return error;
}

int passSends(Qp& qp, ibv_send_wr* list, ibv_send_wr** bad, bool isMarked) {
  while (SendRequest* request = qp.core.firstHeldSend()) {
    qp.core.numberSend(*request);
    qp.core.sendPosted();
  }
  for (ibv_send_wr* each = isMarked ? list : nullptr; each != nullptr;
       each = each->next) {
    each->send_flags &= ~kNotAgain;
  }
  const int error = qp.spoilsNext
      ? postSpoiled(qp, list, bad)
      : qp.device->real.post_send(qp.app, list, bad);
  for (ibv_send_wr* each = error != 0 ? *bad : nullptr; each != nullptr;
       each = each->next) {
    qp.core.undoSend();
  }
  return error;
}

ibv_wc flushed(const Qp& qp, uint64_t id, bool isReceive) {
  ibv_wc completion{};
  completion.wr_id = id;
  completion.status = IBV_WC_WR_FLUSH_ERR;
  completion.opcode = isReceive ? IBV_WC_RECV : IBV_WC_SEND;
  completion.qp_num = qp.app->qp_num;
  return completion;
}

// A queue pair in the error state takes requests and flushes them.
template <typename Request>
int flushPosted(Qp& qp, Cq& cq, const Request* list, bool isReceive) {
  const DataGuard guard(cq.lock);
  for (; list != nullptr; list = list->next) {
    cq.ready.push_back(flushed(qp, list->wr_id, isReceive));
  }
  signalReady(cq);
  return 0;
}

// ---- Translation for the backup ----

// The local key on the backup, or none; the lock of the keys is held. Requests
// wait for a region that is being registered there.
std::optional<uint32_t> backupKeyOf(Qp& qp, uint32_t key, const char* without) {
  const auto found = qp.device->backupKeys.find(key);
  if (found != qp.device->backupKeys.end()) {
    return found->second;
  }
  if (!qp.device->pendingKeys.contains(key)) {
    qp.untranslatable = without;
  }
  return std::nullopt;
}

bool translatePieces(
    Qp& qp,
    std::span<const Piece> pieces,
    uint32_t skip,
    ibv_send_wr& out) {
  const std::lock_guard guard(qp.device->keysMutex);
  for (Piece piece : pieces) {
    const uint32_t skipped = std::min(skip, piece.length);
    skip -= skipped;
    if (skipped == piece.length && piece.length != 0) {
      continue;
    }
    std::optional<uint32_t> key = piece.key;
    if (qp.core.active() == 1) {
      key = backupKeyOf(
          qp, piece.key, "memory of a request is not registered on the backup");
      if (!key) {
        return false;
      }
    }
    out.sg_list[out.num_sge++] = {
        piece.address + skipped, piece.length - skipped, *key};
  }
  return true;
}

bool usesRemote(const SendRequest& request) {
  return request.operation != Operation::kSend &&
      request.length != request.landed;
}

// The key of the peer's memory on the active path, or none.
std::optional<uint32_t> remoteKeyOf(Qp& qp, const SendRequest& request) {
  if (qp.core.active() == 0 || !usesRemote(request)) {
    return request.remoteKey;
  }
  const auto found = qp.remoteRegions.find(request.remoteKey);
  if (found == qp.remoteRegions.end()) {
    qp.missingKey = request.remoteKey;
    return std::nullopt;
  }
  const RemoteRegion& region = found->second;
  const uint64_t offset = request.remoteAddress - region.address;
  if (offset > region.length || request.length > region.length - offset) {
    qp.untranslatable =
        "a request reaches beyond the memory that the peer has announced";
    return std::nullopt;
  }
  return region.key;
}

bool translateRemote(Qp& qp, const SendRequest& request, ibv_send_wr& out) {
  const std::optional<uint32_t> key = remoteKeyOf(qp, request);
  if (key) {
    out.wr.rdma = {request.remoteAddress + request.landed, *key};
  }
  return key.has_value();
}

bool translate(Qp& qp, SendRequest& request, ibv_send_wr& out) {
  out.wr_id = request.id;
  out.opcode = static_cast<ibv_wr_opcode>(request.opcode);
  out.send_flags = request.flags;
  out.imm_data = request.immediate;
  if (request.isInternal) {
    out.opcode = IBV_WR_RDMA_WRITE;
    out.send_flags = IBV_SEND_SIGNALED;
    return true;
  }
  if (request.operation == Operation::kAtomic ||
      request.operation == Operation::kOther) {
    // Operands and invalidated keys are not recorded: such a request cannot be
    // repeated safely, and one that was held must not run without them.
    qp.untranslatable = "an operation that cannot be sent later was held";
    return false;
  }
  if (!translateRemote(qp, request, out)) {
    return false;
  }
  if (request.length == request.landed) {
    out.send_flags &= ~static_cast<unsigned>(IBV_SEND_INLINE);
    return true;
  }
  if (request.isInline) {
    uint8_t* bytes = qp.core.inlineBytes(request).data() + request.landed;
    out.sg_list[out.num_sge++] = {
        reinterpret_cast<uint64_t>(bytes), request.length - request.landed, 0};
    return true;
  }
  return translatePieces(qp, qp.core.pieces(request), request.landed, out);
}

int postOn(Qp& qp, int path, ibv_send_wr& request) {
  ibv_send_wr* bad = nullptr;
  return path == 0 ? qp.device->real.post_send(qp.app, &request, &bad)
                   : ibv_post_send(qp.backup, &request, &bad);
}

// ---- Completions ----

// Errors that another path may mend; all others are the program's own.
bool isOfThePath(const Qp& qp, int path, ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_WR_FLUSH_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
      return true;
    case IBV_WC_LOC_QP_OP_ERR: // Soft-RoCE without its network device
      return !isPortActive(qp, path);
    case IBV_WC_LOC_PROT_ERR:
      return qp.isSpoiled;
    default:
      return false;
  }
}

bool acceptSuccess(Qp& qp, int path, ibv_wc& completion) {
  if ((completion.opcode & IBV_WC_RECV) != 0) {
    ReceiveRequest done;
    if (path != qp.core.receivePath() || !qp.core.completeReceive(done)) {
      return false;
    }
    completion.wr_id = done.id;
  } else if (path != qp.core.active()) {
    if (qp.isProbing) {
      qp.probeResult = true;
    }
    return false;
  } else {
    SendRequest done;
    if (qp.isFrozen || !qp.core.completeSend(done) || done.isInternal) {
      return false;
    }
    completion.wr_id = done.id;
  }
  completion.qp_num = qp.app->qp_num;
  return true;
}

bool acceptError(Qp& qp, int path, const ibv_wc& completion) {
  if (path != qp.core.active()) {
    if (qp.isProbing) {
      qp.probeResult = false;
    }
    return false;
  }
  if (qp.isSwitching || qp.firstError) {
    return false;
  }
  const bool isOwn = !isOfThePath(qp, path, completion.status);
  if (path == 0 && (isOwn || !qp.hasPeer)) {
    qp.protection = Protection::kOff;
    runtime().wake();
    return true;
  }
  qp.firstError = completion;
  runtime().wake();
  return false;
}

// Whether the application gets the completion.
bool accept(Cq& cq, int path, ibv_wc& completion) {
  Qp* qp =
      runtime().qpByNumber.find(numberKey(*cq.device, path, completion.qp_num));
  if (qp == nullptr) {
    return path == 0;
  }
  const DataGuard guard(qp->lock);
  if (qp->protection != Protection::kOn) {
    return qp->protection == Protection::kOff && path == 0;
  }
  return completion.status == IBV_WC_SUCCESS
      ? acceptSuccess(*qp, path, completion)
      : acceptError(*qp, path, completion);
}

void drainPath(Cq& cq, int path) {
  std::array<ibv_wc, kBatch> batch;
  ibv_cq* queue = path == 0 ? cq.app : cq.backup;
  while (queue != nullptr) {
    const int got = path == 0
        ? cq.device->real.poll_cq(queue, kBatch, batch.data())
        : ibv_poll_cq(queue, kBatch, batch.data());
    for (int i = 0; i < got; ++i) {
      if (accept(cq, path, batch[static_cast<size_t>(i)])) {
        cq.ready.push_back(batch[static_cast<size_t>(i)]);
      }
    }
    if (got < kBatch) {
      break;
    }
  }
}

int pollSlow(Cq& cq, int count, ibv_wc* completions) {
  drain(cq);
  int given = 0;
  while (given < count && !cq.ready.empty()) {
    completions[given++] = cq.ready.front();
    cq.ready.pop_front();
  }
  return given;
}

} // namespace

int postSend(ibv_qp* handle, ibv_send_wr* list, ibv_send_wr** bad) {
  Qp* qp = runtime().qpByHandle.find(keyOf(handle));
  if (qp == nullptr) {
    return realOps(handle->context).post_send(handle, list, bad);
  }
  DataGuard guard(qp->lock);
  if (qp->protection != Protection::kOn) {
    const bool isDead = qp->protection == Protection::kDead;
    guard.unlock();
    return isDead ? flushPosted(*qp, *qp->sendCq, list, false)
                  : qp->device->real.post_send(handle, list, bad);
  }
  bool isMarked = false;
  if (!recordAll(*qp, list, isMarked)) {
    *bad = list;
    return ENOMEM;
  }
  if (qp->core.active() == 0 && !qp->core.isHeld()) {
    return passSends(*qp, list, bad, isMarked);
  }
  // Paper: SHIFT §4.3.3: the doorbell is withheld while requests are held
  if (!qp->core.isHeld()) {
    postHeldSends(*qp);
  }
  return 0;
}

int postReceive(ibv_qp* handle, ibv_recv_wr* list, ibv_recv_wr** bad) {
  Qp* qp = runtime().qpByHandle.find(keyOf(handle));
  if (qp == nullptr) {
    return realOps(handle->context).post_recv(handle, list, bad);
  }
  DataGuard guard(qp->lock);
  if (qp->protection != Protection::kOn) {
    const bool isDead = qp->protection == Protection::kDead;
    guard.unlock();
    return isDead ? flushPosted(*qp, *qp->receiveCq, list, true)
                  : qp->device->real.post_recv(handle, list, bad);
  }
  for (ibv_recv_wr* each = list; each != nullptr; each = each->next) {
    ReceiveRequest* request =
        qp->core.pushReceive(piecesOf(each->sg_list, each->num_sge));
    if (request == nullptr) {
      *bad = each;
      postHeldReceives(*qp);
      return ENOMEM;
    }
    request->id = each->wr_id;
  }
  if (qp->core.receivePath() != 0) {
    postHeldReceives(*qp);
    return 0;
  }
  while (qp->core.firstHeldReceive() != nullptr) {
    qp->core.receivePosted();
  }
  const int error = qp->device->real.post_recv(handle, list, bad);
  for (ibv_recv_wr* each = error != 0 ? *bad : nullptr; each != nullptr;
       each = each->next) {
    qp->core.undoReceive();
  }
  return error;
}

int pollCq(ibv_cq* handle, int count, ibv_wc* completions) {
  Cq* cq = runtime().cqByHandle.find(keyOf(handle));
  if (cq == nullptr) {
    return realOps(handle->context).poll_cq(handle, count, completions);
  }
  const DataGuard guard(cq->lock);
  if (cq->isSlow) {
    return pollSlow(*cq, count, completions);
  }
  const int got = cq->device->real.poll_cq(handle, count, completions);
  int kept = 0;
  for (int i = 0; i < got; ++i) {
    if (accept(*cq, 0, completions[i])) {
      if (kept != i) {
        completions[kept] = completions[i];
      }
      ++kept;
    }
  }
  return got < 0 ? got : kept;
}

int requestNotify(ibv_cq* handle, int isSolicitedOnly) {
  Cq* cq = runtime().cqByHandle.find(keyOf(handle));
  if (cq == nullptr) {
    return realOps(handle->context).req_notify_cq(handle, isSolicitedOnly);
  }
  const DataGuard guard(cq->lock);
  cq->isArmed = true;
  if (cq->isSlow) {
    if (cq->backup != nullptr) {
      ibv_req_notify_cq(cq->backup, isSolicitedOnly);
    }
    signalReady(*cq);
  }
  return cq->device->real.req_notify_cq(handle, isSolicitedOnly);
}

void drain(Cq& cq) {
  drainPath(cq, 0);
  drainPath(cq, 1);
}

void drainBackup(Cq& cq) {
  drainPath(cq, 1);
}

void enterSlow(Cq& cq) {
  cq.isSlow = true;
  if (cq.isArmed && cq.backup != nullptr) {
    ibv_req_notify_cq(cq.backup, 0);
  }
}

void signalReady(Cq& cq) {
  if (cq.channel == nullptr || !cq.isArmed || cq.ready.empty()) {
    return;
  }
  cq.isArmed = false;
  const std::lock_guard guard(cq.channel->mutex);
  cq.channel->pending.push_back(cq.app);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(cq.channel->eventFd, &one, sizeof one);
}

void addReady(Qp& qp, const SendRequest& request, ibv_wc_status status) {
  if (request.isInternal) {
    return;
  }
  ibv_wc completion = flushed(qp, request.id, false);
  completion.status = status;
  switch (request.operation) {
    case Operation::kWrite:
    case Operation::kWriteWithImmediate:
      completion.opcode = IBV_WC_RDMA_WRITE;
      break;
    case Operation::kRead:
      completion.opcode = IBV_WC_RDMA_READ;
      break;
    default:
      break;
  }
  qp.sendCq->ready.push_back(completion);
}

void postHeldSends(Qp& qp) {
  std::array<ibv_sge, kPiecesMax> pieces;
  while (SendRequest* request = qp.core.firstHeldSend()) {
    ibv_send_wr out{};
    out.sg_list = pieces.data();
    if (!translate(qp, *request, out)) {
      if (qp.missingKey || qp.untranslatable != nullptr) {
        qp.core.hold();
        runtime().wake();
      }
      return; // or again when its memory is registered
    }
    if (postOn(qp, qp.core.active(), out) != 0) {
      return; // full: again when something has completed
    }
    qp.core.numberSend(*request);
    qp.core.sendPosted();
  }
}

void postHeldReceives(Qp& qp) {
  std::array<ibv_sge, kPiecesMax> pieces;
  while (ReceiveRequest* request = qp.core.firstHeldReceive()) {
    ibv_send_wr translated{};
    translated.sg_list = pieces.data();
    // Receives may be on the other path than sends while a switch is under way.
    const std::span<const Piece> given = qp.core.pieces(*request);
    const std::lock_guard guard(qp.device->keysMutex);
    for (const Piece& piece : given) {
      std::optional<uint32_t> key = piece.key;
      if (qp.core.receivePath() == 1) {
        key = backupKeyOf(
            qp,
            piece.key,
            "memory of a receive is not registered on the backup");
      }
      if (!key) {
        if (qp.untranslatable != nullptr) {
          runtime().wake();
        }
        return;
      }
      translated.sg_list[translated.num_sge++] = {
          piece.address, piece.length, *key};
    }
    ibv_recv_wr out{
        request->id, nullptr, translated.sg_list, translated.num_sge};
    ibv_recv_wr* bad = nullptr;
    const int error = qp.core.receivePath() == 0
        ? qp.device->real.post_recv(qp.app, &out, &bad)
        : ibv_post_recv(qp.backup, &out, &bad);
    if (error != 0) {
      return;
    }
    qp.core.receivePosted();
  }
}

void failAll(Qp& qp, ibv_wc_status status) {
  SendRequest send;
  while (qp.core.popSend(send)) {
    addReady(qp, send, status);
    status = IBV_WC_WR_FLUSH_ERR;
  }
  ReceiveRequest receive;
  while (qp.core.popReceive(receive)) {
    qp.receiveCq->ready.push_back(flushed(qp, receive.id, true));
  }
  qp.protection = Protection::kDead;
  for (Cq* cq : {qp.sendCq, qp.receiveCq}) {
    enterSlow(*cq);
    signalReady(*cq);
  }
}

int postProbe(Qp& qp, int path) {
  // Paper: SHIFT §4.3.3, an empty write
  ibv_send_wr probe{};
  probe.opcode = IBV_WR_RDMA_WRITE;
  probe.send_flags = IBV_SEND_SIGNALED;
  return postOn(qp, path, probe);
}

QueuesLock::QueuesLock(Qp& qp)
    : first_(std::min(qp.sendCq, qp.receiveCq)),
      second_(
          qp.sendCq == qp.receiveCq ? nullptr
                                    : std::max(qp.sendCq, qp.receiveCq)) {
  first_->lock.lock();
  if (second_ != nullptr) {
    second_->lock.lock();
  }
}

QueuesLock::~QueuesLock() {
  if (second_ != nullptr) {
    second_->lock.unlock();
  }
  first_->lock.unlock();
}

} // namespace resilient::shift
