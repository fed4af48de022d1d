// The entry points of libibverbs that a preloaded library replaces.

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/syscall.h"
#include "shift/data_path.h"
#include "shift/real_verbs.h"
#include "shift/runtime.h"
#include "shift/session.h"

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace {

using namespace resilient::shift;

constexpr uint32_t kPiecesMax = 64;
// How long the destruction of a queue pair waits for a device.
constexpr std::chrono::seconds kCallLimit(5);

template <typename Map, typename Key>
auto* findIn(const Map& map, Key key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : found->second.get();
}

uint64_t keyOf(const void* handle) {
  return reinterpret_cast<uint64_t>(handle);
}

using Guard = std::lock_guard<std::recursive_mutex>;

// ---- Memory ----

using Registration = std::function<ibv_mr*(ibv_pd* backup)>;

// The region is registered on the backup, or is not; the control mutex is held.
void mrRegistered(
    Mr& shadow,
    ibv_mr* backup,
    const ibv_mr& app,
    uint64_t iova) {
  Device& device = *shadow.device;
  shadow.isRegistering = false;
  if (shadow.isAbandoned) {
    if (backup != nullptr) {
      real().deregMr(backup);
    }
    std::erase_if(runtime().abandonedMrs, [&shadow](const auto& each) {
      return each.get() == &shadow;
    });
    return;
  }
  shadow.backup = backup;
  {
    const std::lock_guard keys(device.keysMutex);
    device.pendingKeys.erase(app.lkey);
    if (backup != nullptr) {
      device.backupKeys[app.lkey] = backup->lkey;
    }
  }
  if (backup == nullptr) {
    say("memory of %zu bytes cannot be registered on %s",
        app.length,
        device.backupName.c_str());
    return;
  }
  const std::string value = std::to_string(app.rkey) + ":" +
      std::to_string(backup->rkey) + ":" + std::to_string(iova) + ":" +
      std::to_string(app.length);
  for (const std::string& address : addressesOf(device.app, 1)) {
    runtime().store.put(
        "mr." + address + "." + std::to_string(app.rkey), value);
  }
}

// Registers on the backup on another thread, without the mutex: it takes long
// for many gigabytes. Requests that use the region before wait for it.
void shadowMr(ibv_mr* mr, uint64_t iova, Registration registration) {
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  const Pd* pd = findIn(all.pds, mr->pd);
  // One entry point of libibverbs may call another, which is ours, too.
  if (pd == nullptr || pd->backup == nullptr ||
      findIn(all.mrs, mr) != nullptr) {
    return;
  }
  auto made = std::make_unique<Mr>();
  made->device = pd->device;
  made->app = mr;
  made->isRegistering = true;
  Mr* shadow = made.get();
  all.mrs[mr] = std::move(made);
  shadow->backupPd = pd->backup;
  {
    const std::lock_guard keys(pd->device->keysMutex);
    pd->device->pendingKeys.insert(mr->lkey);
  }
  const auto backup = std::make_shared<ibv_mr*>(nullptr);
  // A copy: the application may have deregistered it when this is done.
  all.inTurn(
      [registration = std::move(registration), on = pd->backup, backup] {
        *backup = registration(on);
      },
      [shadow, backup, app = *mr, iova] {
        mrRegistered(*shadow, *backup, app, iova);
      });
}

// The application may close its descriptor at once.
Registration
sameDmabuf(uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  const auto own = std::make_shared<resilient::FileDescriptor>(
      fcntl(fd, F_DUPFD_CLOEXEC, 0)); // a failure shows at the registration
  return [offset, length, iova, own, access](ibv_pd* backup) {
    ibv_mr* const mr =
        real().regDmabufMr(backup, offset, length, iova, own->get(), access);
    own->reset();
    return mr;
  };
}

// Whether a region of that kind is being registered on a backup.
template <typename Predicate>
bool isRegistering(Predicate isOfKind) {
  const auto is = [&isOfKind](const Mr& mr) {
    return mr.isRegistering && isOfKind(mr);
  };
  const Runtime& all = runtime();
  return std::ranges::any_of(
             all.mrs, [&is](const auto& each) { return is(*each.second); }) ||
      std::ranges::any_of(
             all.abandonedMrs, [&is](const auto& each) { return is(*each); });
}

Registration sameOn(const ibv_mr& mr, uint64_t iova, int access) {
  return [address = mr.addr, length = mr.length, iova, access](ibv_pd* backup) {
    return real().regMrIova2(
        backup, address, length, iova, static_cast<unsigned>(access));
  };
}

// Returns the region on the backup, which the caller deregisters without the
// mutex.
ibv_mr* dropMr(ibv_mr* mr) {
  Runtime& all = runtime();
  std::unique_lock held(all.mutex);
  Mr* shadow = findIn(all.mrs, mr);
  if (shadow == nullptr) {
    return nullptr;
  }
  const bool isFree = all.waitForCalls(
      held, kCallLimit, [shadow] { return !shadow->isRegistering; });
  auto gone = all.mrs.extract(mr);
  {
    const std::lock_guard keys(shadow->device->keysMutex);
    shadow->device->pendingKeys.erase(mr->lkey);
    shadow->device->backupKeys.erase(mr->lkey);
  }
  if (!isFree) {
    say("a device does not answer: memory of %zu bytes is still being "
        "registered on %s",
        mr->length,
        shadow->device->backupName.c_str());
    shadow->isAbandoned = true;
    all.abandonedMrs.push_back(std::move(gone.mapped()));
    return nullptr;
  }
  if (shadow->backup != nullptr) {
    for (const std::string& address : addressesOf(shadow->device->app, 1)) {
      all.store.remove("mr." + address + "." + std::to_string(mr->rkey));
    }
  }
  return shadow->backup;
}

// ---- Completion channels ----

void watchFd(int epollFd, int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  epoll_ctl(epollFd, EPOLL_CTL_ADD, fd, &event);
}

// The channel with another descriptor. Not a copy: other threads count queues
// in the channel.
ibv_comp_channel viewOf(const ibv_comp_channel& channel, int fd) {
  ibv_comp_channel view{};
  view.context = channel.context;
  view.fd = fd;
  return view;
}

// Takes one event of the library below. It is acknowledged there at once: the
// number of events that the application acknowledges is not that of one device.
Cq* takeEvent(ibv_comp_channel* channel, int fd, bool isBackup) {
  ibv_comp_channel view = viewOf(*channel, fd);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (real().getCqEvent(&view, &cq, &context) != 0) {
    return nullptr;
  }
  Cq* found = runtime().cqByHandle.find(keyOf(isBackup ? context : cq));
  real().ackCqEvents(cq, 1);
  return found;
}

Cq* takeOwnEvent(Channel& channel) {
  if (channel.pending.empty()) {
    return nullptr;
  }
  Cq* cq = runtime().cqByHandle.find(keyOf(channel.pending.front()));
  channel.pending.pop_front();
  uint64_t ignored = 0;
  if (channel.pending.empty()) {
    [[maybe_unused]] const ssize_t got =
        read(channel.eventFd, &ignored, sizeof ignored);
  }
  return cq;
}

// The kernel wants the descriptor that it has made, and other threads may be
// waiting on the one that the application knows: so it sees a copy.
ibv_cq* createCqOn(
    const Channel& channel,
    ibv_context* context,
    int cqe,
    void* cqContext,
    int vector) {
  ibv_comp_channel view = viewOf(*channel.app, channel.realFd);
  ibv_cq* cq = real().createCq(context, cqe, cqContext, &view, vector);
  if (cq != nullptr) {
    // ibv_destroy_cq takes this back.
    cq->channel = channel.app;
    pthread_mutex_lock(&context->mutex);
    ++channel.app->refcnt;
    pthread_mutex_unlock(&context->mutex);
  }
  return cq;
}

// The queue stays valid until the application has acknowledged the event.
Cq* takeAnyEvent(Channel& channel) {
  const std::lock_guard guard(channel.mutex);
  Cq* cq = takeOwnEvent(channel);
  if (cq == nullptr) {
    cq = takeEvent(channel.app, channel.realFd, false);
  }
  if (cq == nullptr) {
    cq = takeEvent(channel.backup, channel.backup->fd, true);
  }
  if (cq != nullptr) {
    ++cq->events;
  }
  return cq;
}

// Waits until the application has acknowledged all events, as ibv_destroy_cq of
// libibverbs does. No thread finds the queue afterwards.
void forgetCq(Cq& cq) {
  if (cq.channel == nullptr) {
    runtime().cqByHandle.erase(keyOf(cq.app));
    return;
  }
  std::unique_lock guard(cq.channel->mutex);
  cq.channel->acknowledged.wait(guard, [&cq] { return cq.events == 0; });
  std::erase(cq.channel->pending, cq.app);
  runtime().cqByHandle.erase(keyOf(cq.app));
}

// ---- Queue pairs ----

const char* whyUnprotected(
    const ibv_qp_init_attr& asked,
    const Cq* send,
    const Cq* receive) {
  if (asked.qp_type != IBV_QPT_RC) {
    return "it is not a reliable connection";
  }
  if (asked.srq != nullptr) {
    return "it uses a shared receive queue";
  }
  if (send == nullptr || receive == nullptr) {
    return "its completion queue is not protected";
  }
  if (asked.cap.max_send_sge > kPiecesMax ||
      asked.cap.max_recv_sge > kPiecesMax) {
    return "it allows more than 64 pieces of memory in a request";
  }
  return runtime().isUsable() ? nullptr : "the store cannot be reached";
}

void shadowQp(Qp* qp) {
  if (!makeBackupQp(*qp)) {
    say("queue pair %u of %s is not protected: no backup",
        qp->app->qp_num,
        qp->device->name.c_str());
    return;
  }
  runtime().qpByNumber.insert(
      numberKey(*qp->device, 1, qp->backup->qp_num), qp);
  qp->session->publish();
}

void protectQp(
    ibv_qp* handle,
    Pd* pd,
    const ibv_qp_init_attr& asked,
    Cq* send,
    Cq* receive) {
  Runtime& all = runtime();
  auto made = std::make_unique<Qp>(Limits{
      asked.cap.max_send_wr,
      asked.cap.max_recv_wr,
      asked.cap.max_send_sge,
      asked.cap.max_recv_sge,
      asked.cap.max_inline_data});
  Qp* qp = made.get();
  qp->device = pd->device;
  qp->pd = pd;
  qp->app = handle;
  qp->asked = asked;
  qp->sendCq = send;
  qp->receiveCq = receive;
  qp->signalsAll = asked.sq_sig_all != 0;
  qp->session = std::make_shared<Session>(*qp);
  if (!all.qpByHandle.insert(keyOf(handle), qp) ||
      !all.qpByNumber.insert(numberKey(*pd->device, 0, handle->qp_num), qp)) {
    say("queue pair %u is not protected: there are too many", handle->qp_num);
    all.qpByHandle.erase(keyOf(handle));
    return;
  }
  all.qps[handle] = std::move(made);
  all.later([qp] { shadowQp(qp); });
}

// Attributes are recorded when they are set: no query, no second system call.
// The control thread alone needs them.
void recordAttributes(Qp& qp, const ibv_qp_attr& set, int mask) {
  ibv_qp_attr& kept = qp.attributes;
  const auto take = [&](int bit, auto member) {
    if ((mask & bit) != 0) {
      kept.*member = set.*member;
    }
  };
  take(IBV_QP_PORT, &ibv_qp_attr::port_num);
  take(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
  take(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
  take(IBV_QP_AV, &ibv_qp_attr::ah_attr);
  take(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
  take(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
  take(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
  take(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
  take(IBV_QP_MAX_DEST_RD_ATOMIC, &ibv_qp_attr::max_dest_rd_atomic);
  take(IBV_QP_MAX_QP_RD_ATOMIC, &ibv_qp_attr::max_rd_atomic);
  take(IBV_QP_MIN_RNR_TIMER, &ibv_qp_attr::min_rnr_timer);
  take(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
  take(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
  take(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
}

// Whether the state of the application's queue pair is not what it should see:
// another one carries its requests, or will.
bool hidesState(Qp& qp, ibv_qp_state state) {
  const std::lock_guard guard(qp.lock);
  return qp.protection == Protection::kOn &&
      (qp.core.active() == 1 || qp.isSwitching ||
       (qp.hasPeer && state == IBV_QPS_ERR));
}

// Tells posts and completions what they need at once. Returns whether the
// application takes down a queue pair whose requests are elsewhere.
bool followState(Qp& qp, const ibv_qp_attr& set, int mask) {
  const std::lock_guard guard(qp.lock);
  if ((mask & IBV_QP_PORT) != 0) {
    qp.port = std::max<uint8_t>(set.port_num, 1);
  }
  if ((mask & IBV_QP_STATE) == 0 || qp.protection != Protection::kOn) {
    return false;
  }
  const bool isElsewhere = qp.core.active() == 1 || qp.isSwitching;
  switch (set.qp_state) {
    case IBV_QPS_RTR: // an end that only receives may stay in this state
      qp.core.setPacketRules(128U << set.path_mtu, 0);
      return false;
    case IBV_QPS_RTS:
      if ((mask & IBV_QP_SQ_PSN) != 0) {
        qp.core.setNextPacket(set.sq_psn);
      }
      return false;
    case IBV_QPS_ERR:
    case IBV_QPS_RESET:
      // The application takes it down: what comes back is its own affair.
      if (!isElsewhere) {
        qp.protection = Protection::kOff;
      }
      return isElsewhere;
    default:
      return false;
  }
}

// Keeps what the control thread needs.
void recordState(Qp& qp, const ibv_qp_attr& set, int mask) {
  recordAttributes(qp, set, mask);
  if ((mask & IBV_QP_STATE) == 0) {
    return;
  }
  if (set.qp_state == IBV_QPS_RTS) {
    qp.hasSendAttributes = true;
  } else if (set.qp_state == IBV_QPS_RTR) {
    if (qp.attributes.ah_attr.is_global == 0) {
      say("queue pair %u is not protected: it is addressed without a GID",
          qp.app->qp_num);
    } else {
      qp.session->meetPeer();
    }
  }
}

// Completions of the queue pair must not reach the application any more: they
// may be of our own requests, and their numbers may be given to a new one.
void discardCompletions(Qp& qp) {
  const QueuesLock queues(qp);
  {
    const std::lock_guard guard(qp.lock);
    qp.protection = Protection::kDead;
  }
  for (Cq* cq : {qp.sendCq, qp.receiveCq}) {
    // In the default state, the application's queue holds nothing of ours.
    cq->isSlow ? drain(*cq) : drainBackup(*cq);
    std::erase_if(cq->ready, [&qp](const ibv_wc& completion) {
      return completion.qp_num == qp.app->qp_num;
    });
  }
  Runtime& all = runtime();
  all.qpByHandle.erase(keyOf(qp.app));
  all.qpByNumber.erase(numberKey(*qp.device, 0, qp.app->qp_num));
  if (qp.backup != nullptr) {
    all.qpByNumber.erase(numberKey(*qp.device, 1, qp.backup->qp_num));
  }
}

// The queue pairs that the application has not destroyed before it closes the
// device.
std::vector<ibv_qp*> queuePairsOf(const Device& device) {
  std::vector<ibv_qp*> found;
  for (const auto& [handle, qp] : runtime().qps) {
    if (qp->device == &device) {
      found.push_back(handle);
    }
  }
  return found;
}

// Returns the backup, which the caller destroys without the mutex.
ibv_qp* dropQp(std::unique_lock<std::recursive_mutex>& held, ibv_qp* handle) {
  Runtime& all = runtime();
  Qp* qp = findIn(all.qps, handle);
  if (qp == nullptr) {
    return nullptr;
  }
  all.catchUp();
  qp->session->end();
  const bool isFree = all.waitForCalls(
      held, kCallLimit, [qp] { return !qp->session->isCalling(); });
  discardCompletions(*qp);
  ibv_qp* backup = isFree ? qp->backup : nullptr;
  auto gone = all.qps.extract(handle);
  if (!isFree) {
    say("a device does not answer: the backup of queue pair %u stays",
        handle->qp_num);
    all.abandoned.push_back(std::move(gone.mapped()));
  }
  return backup;
}

} // namespace

extern "C" {

// Tells other libraries of this process that SHIFT is loaded.
// NOLINTNEXTLINE(readability-identifier-naming)
[[gnu::visibility("default")]] int torch_resilient_shift = 1;

#define EXPORT [[gnu::visibility("default")]]

EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* context = real().openDevice(device);
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  if (context == nullptr || !all.start()) {
    return context;
  }
  auto shadow = openShadow(context);
  if (shadow == nullptr ||
      !all.deviceByContext.insert(keyOf(context), shadow.get())) {
    return context;
  }
  context->ops.post_send = postSend;
  context->ops.post_recv = postReceive;
  context->ops.poll_cq = pollCq;
  context->ops.req_notify_cq = requestNotify;
  all.devices[context] = std::move(shadow);
  return context;
}

EXPORT int ibv_close_device(ibv_context* context) {
  Runtime& all = runtime();
  std::unique_lock guard(all.mutex);
  if (Device* device = findIn(all.devices, context); device != nullptr) {
    all.catchUp();
    for (ibv_qp* left : queuePairsOf(*device)) {
      if (ibv_qp* backup = dropQp(guard, left); backup != nullptr) {
        real().destroyQp(backup);
      }
    }
    const bool isFree = all.waitForCalls(guard, kCallLimit, [device] {
      return !isRegistering(
          [device](const Mr& mr) { return mr.device == device; });
    });
    all.deviceByContext.erase(keyOf(context));
    auto gone = all.devices.extract(context);
    if (isFree) {
      closeShadow(*device);
    } else {
      all.abandonedDevices.push_back(std::move(gone.mapped()));
    }
  }
  return real().closeDevice(context);
}

EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  ibv_pd* pd = real().allocPd(context);
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  if (Device* device = findIn(all.devices, context);
      pd != nullptr && device != nullptr) {
    all.pds[pd] =
        std::make_unique<Pd>(Pd{device, pd, real().allocPd(device->backup)});
  }
  return pd;
}

EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
  Runtime& all = runtime();
  std::unique_lock guard(all.mutex);
  if (Pd* shadow = findIn(all.pds, pd); shadow != nullptr) {
    all.catchUp();
    const bool isFree =
        all.waitForCalls(guard, kCallLimit, [backup = shadow->backup] {
          return !isRegistering(
              [backup](const Mr& mr) { return mr.backupPd == backup; });
        });
    if (isFree && shadow->backup != nullptr) {
      real().deallocPd(shadow->backup);
    }
    all.pds.erase(pd);
  }
  return real().deallocPd(pd);
}

EXPORT ibv_mr*
ibv_reg_mr(ibv_pd* pd, void* address, size_t length, int access) {
  ibv_mr* mr = real().regMr(pd, address, length, access);
  if (mr != nullptr) {
    shadowMr(mr, keyOf(address), sameOn(*mr, keyOf(address), access));
  }
  return mr;
}

EXPORT ibv_mr* ibv_reg_mr_iova(
    ibv_pd* pd,
    void* address,
    size_t length,
    uint64_t iova,
    int access) {
  ibv_mr* mr = real().regMrIova(pd, address, length, iova, access);
  if (mr != nullptr) {
    shadowMr(mr, iova, sameOn(*mr, iova, access));
  }
  return mr;
}

EXPORT ibv_mr* ibv_reg_mr_iova2(
    ibv_pd* pd,
    void* address,
    size_t length,
    uint64_t iova,
    unsigned access) {
  ibv_mr* mr = real().regMrIova2(pd, address, length, iova, access);
  if (mr != nullptr) {
    shadowMr(mr, iova, sameOn(*mr, iova, static_cast<int>(access)));
  }
  return mr;
}

EXPORT ibv_mr* ibv_reg_dmabuf_mr(
    ibv_pd* pd,
    uint64_t offset,
    size_t length,
    uint64_t iova,
    int fd,
    int access) {
  if (real().regDmabufMr == nullptr) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  ibv_mr* mr = real().regDmabufMr(pd, offset, length, iova, fd, access);
  if (mr != nullptr) {
    shadowMr(mr, iova, sameDmabuf(offset, length, iova, fd, access));
  }
  return mr;
}

EXPORT int ibv_dereg_mr(ibv_mr* mr) {
  if (ibv_mr* backup = dropMr(mr); backup != nullptr) {
    real().deregMr(backup);
  }
  return real().deregMr(mr);
}

EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  ibv_comp_channel* channel = real().createChannel(context);
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  Device* device = findIn(all.devices, context);
  if (channel == nullptr || device == nullptr) {
    return channel;
  }
  auto made = std::make_unique<Channel>();
  made->backup = real().createChannel(device->backup);
  if (made->backup == nullptr) {
    return channel;
  }
  made->app = channel;
  made->realFd = channel->fd;
  made->eventFd = eventfd(0, EFD_CLOEXEC);
  made->epollFd = epoll_create1(EPOLL_CLOEXEC);
  for (const int fd : {made->realFd, made->backup->fd, made->eventFd}) {
    watchFd(made->epollFd, fd);
  }
  // The application waits on this descriptor, or asks for its flags.
  channel->fd = made->epollFd;
  all.channels[channel] = std::move(made);
  return channel;
}

EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  if (Channel* shadow = findIn(all.channels, channel); shadow != nullptr) {
    if (channel->refcnt != 0) {
      return EBUSY;
    }
    real().destroyChannel(shadow->backup);
    close(shadow->epollFd);
    close(shadow->eventFd);
    channel->fd = shadow->realFd;
    all.channels.erase(channel);
  }
  return real().destroyChannel(channel);
}

EXPORT ibv_cq* ibv_create_cq(
    ibv_context* context,
    int cqe,
    void* cqContext,
    ibv_comp_channel* channel,
    int vector) {
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  Channel* shadowChannel =
      channel == nullptr ? nullptr : findIn(all.channels, channel);
  ibv_cq* cq = shadowChannel == nullptr
      ? real().createCq(context, cqe, cqContext, channel, vector)
      : createCqOn(*shadowChannel, context, cqe, cqContext, vector);
  Device* device = findIn(all.devices, context);
  if (cq == nullptr || device == nullptr) {
    return cq;
  }
  auto made = std::make_unique<Cq>();
  made->device = device;
  made->app = cq;
  made->cqe = cqe;
  made->channel = shadowChannel;
  Cq* shadow = made.get();
  if (all.cqByHandle.insert(keyOf(cq), shadow)) {
    all.cqs[cq] = std::move(made);
    all.later([shadow] { makeBackupCq(*shadow); });
  }
  return cq;
}

EXPORT int ibv_destroy_cq(ibv_cq* cq) {
  Runtime& all = runtime();
  // This takes no mutex: the thread that acknowledges may need it.
  if (Cq* shadow = all.cqByHandle.find(keyOf(cq)); shadow != nullptr) {
    forgetCq(*shadow);
  }
  const Guard guard(all.mutex);
  if (Cq* shadow = findIn(all.cqs, cq); shadow != nullptr) {
    all.catchUp();
    if (shadow->backup != nullptr) {
      real().destroyCq(shadow->backup);
    }
    all.cqs.erase(cq);
  }
  return real().destroyCq(cq);
}

EXPORT int
ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cqContext) {
  Channel* shadow = nullptr;
  {
    const Guard guard(runtime().mutex);
    shadow = findIn(runtime().channels, channel);
  }
  if (shadow == nullptr) {
    return real().getCqEvent(channel, cq, cqContext);
  }
  const bool mayWait = (fcntl(shadow->epollFd, F_GETFL) & O_NONBLOCK) == 0;
  for (;;) {
    if (Cq* found = takeAnyEvent(*shadow); found != nullptr) {
      *cq = found->app;
      *cqContext = found->app->cq_context;
      return 0;
    }
    if (!mayWait) {
      errno = EAGAIN;
      return -1;
    }
    pollfd waiting{shadow->epollFd, POLLIN, 0};
    if (poll(&waiting, 1, -1) < 0) {
      return -1;
    }
  }
}

EXPORT void ibv_ack_cq_events(ibv_cq* cq, unsigned count) {
  Cq* shadow = runtime().cqByHandle.find(keyOf(cq));
  if (shadow == nullptr || shadow->channel == nullptr) {
    real().ackCqEvents(cq, count);
    return;
  }
  const std::lock_guard guard(shadow->channel->mutex);
  shadow->events -= std::min(shadow->events, count);
  shadow->channel->acknowledged.notify_all();
}

EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  ibv_qp* qp = real().createQp(pd, attributes);
  Runtime& all = runtime();
  const Guard guard(all.mutex);
  Pd* shadow = findIn(all.pds, pd);
  if (qp == nullptr || shadow == nullptr) {
    return qp;
  }
  Cq* send = findIn(all.cqs, attributes->send_cq);
  Cq* receive = findIn(all.cqs, attributes->recv_cq);
  if (const char* reason = whyUnprotected(*attributes, send, receive);
      reason != nullptr) {
    say("queue pair %u is not protected: %s", qp->qp_num, reason);
  } else {
    protectQp(qp, shadow, *attributes, send, receive);
  }
  return qp;
}

// Takes no mutex: the control thread may hold it while it makes the backups.
EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  const int error = real().modifyQp(qp, attributes, mask);
  Qp* shadow = error == 0 ? runtime().qpByHandle.find(keyOf(qp)) : nullptr;
  if (shadow == nullptr) {
    return error;
  }
  if (followState(*shadow, *attributes, mask)) {
    const Guard guard(runtime().mutex);
    shadow->session->takeDown();
  } else {
    runtime().soon(
        [shadow, set = *attributes, mask] { recordState(*shadow, set, mask); });
  }
  return 0;
}

EXPORT int ibv_query_qp(
    ibv_qp* qp,
    ibv_qp_attr* attributes,
    int mask,
    ibv_qp_init_attr* init) {
  const int error = real().queryQp(qp, attributes, mask, init);
  Qp* shadow = error == 0 ? runtime().qpByHandle.find(keyOf(qp)) : nullptr;
  if (shadow != nullptr && hidesState(*shadow, attributes->qp_state)) {
    // The failed queue pair is not what the application uses now.
    attributes->qp_state = attributes->cur_qp_state = IBV_QPS_RTS;
    qp->state = IBV_QPS_RTS;
  }
  return error;
}

EXPORT int ibv_destroy_qp(ibv_qp* qp) {
  ibv_qp* backup = nullptr;
  {
    std::unique_lock guard(runtime().mutex);
    backup = dropQp(guard, qp);
  }
  if (backup != nullptr) {
    real().destroyQp(backup);
  }
  return real().destroyQp(qp);
}

} // extern "C"
