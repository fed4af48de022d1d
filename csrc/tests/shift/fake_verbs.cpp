#include "tests/shift/fake_verbs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "shift/real_verbs.h"

#undef ibv_query_port
#undef ibv_query_gid_table

namespace resilient::shift::fake {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout(20);
constexpr uint32_t kPacketMask = 0xffffff;

struct Qp;

// The addresses by which requests name it.
struct Region {
  uint64_t begin = 0;
  uint64_t length = 0;
};

struct Device {
  ibv_device handle{};
  int host = 0;
  int network = 0;
  ibv_gid gid{};
  std::atomic<uint32_t> lastNumber{100};
  std::atomic<uint32_t> lastKey{0};
  std::atomic<bool> holdsFences{false};
  std::atomic<bool> holdsRegistrations{false};

  std::mutex mutex;
  // Guarded by the mutex.
  std::map<uint32_t, std::shared_ptr<Qp>> qps;
  std::map<uint32_t, Region> regions;
  std::vector<ibv_context*> contexts;
};

// Channels and contexts have the write end of their pipe behind them.
struct Channel {
  ibv_comp_channel handle{};
  int writeFd = -1;
};

struct Context {
  ibv_context handle{};
  int writeFd = -1;
};

struct Cq {
  ibv_cq handle{};
  std::mutex mutex;
  std::deque<ibv_wc> completions;
  bool isArmed = false;
};

struct Send {
  ibv_send_wr wanted{};
  std::vector<ibv_sge> pieces;
  std::vector<uint8_t> inlined;
  uint32_t length = 0;
};

struct Receive {
  uint64_t id = 0;
  std::vector<ibv_sge> pieces;
};

// Locked in the order of the addresses if two are.
struct Qp {
  ibv_qp handle{};
  ibv_qp_init_attr asked{};
  Device* device = nullptr;
  std::mutex mutex;
  // Guarded by the mutex.
  ibv_qp_state state = IBV_QPS_RESET;
  ibv_qp_attr attributes{};
  std::deque<Send> sends;
  std::deque<Receive> receives;
  uint32_t sentOfFirst = 0; // packets of the first send
  std::optional<Clock::time_point> stuckSince;
  Clock::time_point nextPacketAt{};
  uint32_t nextToSend = 0;
  uint32_t nextToReceive = 0;
};

struct World {
  std::array<Device, 4> devices;
  std::array<std::atomic<Fault>, 2> faults{};
  std::array<std::atomic<std::chrono::milliseconds>, 2> paces{};
  std::array<std::atomic<uint64_t>, 2> delivered{};
  std::atomic<uint64_t> fences{0};
  std::mutex holdMutex;
  std::condition_variable released;
  std::array<std::atomic<bool>, 2> holdsConnects{};
  std::atomic<int> heldCalls{0};

  World() {
    for (size_t i = 0; i < devices.size(); ++i) {
      Device& device = devices[i];
      device.host = static_cast<int>(i / 2);
      device.network = static_cast<int>(i % 2);
      device.handle.name[0] = device.host == 0 ? 'a' : 'b';
      device.handle.name[1] = device.network == 0 ? '0' : '1';
      // ::ffff:10.0.NETWORK.HOST
      device.gid.raw[10] = device.gid.raw[11] = 0xff;
      device.gid.raw[12] = 10;
      device.gid.raw[14] = static_cast<uint8_t>(device.network);
      device.gid.raw[15] = static_cast<uint8_t>(device.host + 1);
      device.lastKey = device.network == 0 ? 0 : 1000;
    }
    std::thread([this] { run(); }).detach();
  }

  void run();
  bool step(Qp& from);
  bool deliver(Qp& from, Qp& to);
};

World& world() {
  // Never destroyed: its thread may outlive main().
  static World* const one = new World;
  return *one;
}

Device& deviceOf(const ibv_context* context) {
  return *reinterpret_cast<Device*>(context->device);
}

Qp& qpOf(ibv_qp* handle) {
  return *reinterpret_cast<Qp*>(handle);
}

Cq& cqOf(ibv_cq* handle) {
  return *reinterpret_cast<Cq*>(handle);
}

void complete(ibv_cq* handle, const ibv_wc& completion) {
  Cq& cq = cqOf(handle);
  const std::lock_guard guard(cq.mutex);
  cq.completions.push_back(completion);
  if (cq.isArmed && handle->channel != nullptr) {
    cq.isArmed = false;
    [[maybe_unused]] const ssize_t written = write(
        reinterpret_cast<Channel*>(handle->channel)->writeFd,
        &handle,
        sizeof handle);
  }
}

ibv_wc completionOf(const Qp& qp, uint64_t id, ibv_wc_status status) {
  ibv_wc completion{};
  completion.wr_id = id;
  completion.status = status;
  completion.qp_num = qp.handle.qp_num;
  return completion;
}

// ---- With the mutex of the queue pair held ----

void completeSend(Qp& qp, ibv_wc_status status) {
  const Send& first = qp.sends.front();
  const bool isSignaled = qp.asked.sq_sig_all != 0 ||
      (first.wanted.send_flags & IBV_SEND_SIGNALED) != 0;
  if (isSignaled || status != IBV_WC_SUCCESS) {
    ibv_wc completion = completionOf(qp, first.wanted.wr_id, status);
    completion.opcode =
        first.wanted.opcode == IBV_WR_SEND ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
    complete(qp.asked.send_cq, completion);
  }
  qp.sends.pop_front();
  qp.sentOfFirst = 0;
  qp.stuckSince.reset();
}

void toError(Qp& qp) {
  qp.state = IBV_QPS_ERR;
  while (!qp.sends.empty()) {
    completeSend(qp, IBV_WC_WR_FLUSH_ERR);
  }
  for (const Receive& each : qp.receives) {
    ibv_wc completion = completionOf(qp, each.id, IBV_WC_WR_FLUSH_ERR);
    completion.opcode = IBV_WC_RECV;
    complete(qp.asked.recv_cq, completion);
  }
  qp.receives.clear();
}

bool isKnown(Device& device, uint32_t key, uint64_t address, uint64_t length) {
  const std::lock_guard guard(device.mutex);
  const auto found = device.regions.find(key);
  if (found == device.regions.end()) {
    return false;
  }
  const auto [begin, bytes] = found->second;
  return address >= begin && address + length <= begin + bytes;
}

// The bytes of a message from `offset`, or nothing if a key is wrong.
bool gather(Qp& qp, const Send& send, uint32_t offset, std::span<uint8_t> out) {
  if ((send.wanted.send_flags & IBV_SEND_INLINE) != 0) {
    std::memcpy(out.data(), send.inlined.data() + offset, out.size());
    return true;
  }
  size_t done = 0;
  for (const ibv_sge& piece : send.pieces) {
    if (!isKnown(*qp.device, piece.lkey, piece.addr, piece.length)) {
      return false;
    }
    if (offset >= piece.length) {
      offset -= piece.length;
      continue;
    }
    const size_t bytes =
        std::min<size_t>(piece.length - offset, out.size() - done);
    std::memcpy(
        out.data() + done,
        reinterpret_cast<const void*>(piece.addr + offset),
        bytes);
    done += bytes;
    offset = 0;
  }
  return true;
}

bool scatter(Qp& qp, uint32_t offset, std::span<const uint8_t> bytes) {
  const Receive& receive = qp.receives.front();
  for (const ibv_sge& piece : receive.pieces) {
    if (!isKnown(*qp.device, piece.lkey, piece.addr, piece.length) ||
        offset + bytes.size() > piece.length) {
      return false;
    }
    std::memcpy(
        reinterpret_cast<void*>(piece.addr + offset),
        bytes.data(),
        bytes.size());
    return true; // the tests use one piece
  }
  return bytes.empty();
}

uint32_t mtuOf(const Qp& qp) {
  return 128U << qp.attributes.path_mtu;
}

bool isWrite(const Send& send) {
  return send.wanted.opcode != IBV_WR_SEND;
}

bool needsReceive(const Send& send) {
  return send.wanted.opcode != IBV_WR_RDMA_WRITE;
}

// The receiver's part of a packet. False if it does not answer.
bool World::deliver(Qp& from, Qp& to) {
  const Send& send = from.sends.front();
  if ((to.state != IBV_QPS_RTR && to.state != IBV_QPS_RTS) ||
      to.attributes.dest_qp_num != from.handle.qp_num ||
      std::memcmp(&to.attributes.ah_attr.grh.dgid, &from.device->gid, 16) !=
          0 ||
      to.nextToReceive != from.nextToSend) {
    return false;
  }
  if (needsReceive(send) && to.receives.empty()) {
    from.stuckSince.reset(); // receiver not ready: repeated without end
    return false;
  }
  const uint32_t mtu = mtuOf(from);
  const uint32_t offset = from.sentOfFirst * mtu;
  const uint32_t length = std::min(mtu, send.length - offset);
  std::vector<uint8_t> bytes(length);
  if (!gather(from, send, offset, bytes)) {
    completeSend(from, IBV_WC_LOC_PROT_ERR);
    toError(from);
    return false;
  }
  const uint64_t address = send.wanted.wr.rdma.remote_addr + offset;
  bool isGood = true;
  if (isWrite(send)) {
    isGood = (to.attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0 &&
        (length == 0 ||
         isKnown(*to.device, send.wanted.wr.rdma.rkey, address, length));
    if (isGood && length != 0) {
      std::memcpy(reinterpret_cast<void*>(address), bytes.data(), length);
    }
  } else {
    isGood = scatter(to, offset, bytes);
  }
  if (!isGood) {
    completeSend(from, IBV_WC_REM_ACCESS_ERR);
    toError(from);
    toError(to);
    return false;
  }
  to.nextToReceive = (to.nextToReceive + 1) & kPacketMask;
  from.nextToSend = (from.nextToSend + 1) & kPacketMask;
  ++from.sentOfFirst;
  ++delivered[static_cast<size_t>(from.device->network)];
  if (offset + length == send.length && needsReceive(send)) {
    ibv_wc completion =
        completionOf(to, to.receives.front().id, IBV_WC_SUCCESS);
    completion.opcode = isWrite(send) ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    completion.byte_len = send.length;
    completion.imm_data = send.wanted.imm_data;
    completion.wc_flags = isWrite(send) ? IBV_WC_WITH_IMM : 0;
    to.receives.pop_front();
    complete(to.asked.recv_cq, completion);
  }
  return true;
}

// Moves one packet; returns whether one moved.
bool World::step(Qp& from) {
  std::shared_ptr<Qp> to;
  {
    const std::lock_guard guard(from.mutex);
    if (from.state != IBV_QPS_RTS || from.sends.empty()) {
      return false;
    }
    for (Device& device : devices) {
      if (std::memcmp(&device.gid, &from.attributes.ah_attr.grh.dgid, 16) ==
          0) {
        const std::lock_guard inside(device.mutex);
        const auto found = device.qps.find(from.attributes.dest_qp_num);
        to = found == device.qps.end() ? nullptr : found->second;
      }
    }
  }
  std::unique_lock<std::mutex> first(from.mutex, std::defer_lock);
  std::unique_lock<std::mutex> second;
  if (to != nullptr) {
    second = std::unique_lock(to->mutex, std::defer_lock);
    std::lock(first, second);
  } else {
    first.lock();
  }
  if (from.state != IBV_QPS_RTS || from.sends.empty()) {
    return false;
  }
  const auto network = static_cast<size_t>(from.device->network);
  if (Clock::now() < from.nextPacketAt) {
    return false;
  }
  from.nextPacketAt = Clock::now() + paces[network].load();
  const Fault fault = faults[network];
  const bool isAnswered = fault == Fault::kNone;
  const bool isWhole = from.sentOfFirst != 0 &&
      from.sentOfFirst * mtuOf(from) >= from.sends.front().length;
  bool hasMoved = isWhole;
  if (!isWhole && (isAnswered || fault == Fault::kAcknowledgements) &&
      to != nullptr) {
    hasMoved = deliver(from, *to);
    if (from.state != IBV_QPS_RTS || from.sends.empty()) {
      return true;
    }
  }
  if (hasMoved && isAnswered) {
    if (from.sentOfFirst * mtuOf(from) >= from.sends.front().length) {
      completeSend(from, IBV_WC_SUCCESS);
    }
    return true;
  }
  const auto now = Clock::now();
  if (!from.stuckSince) {
    from.stuckSince = now;
  } else if (now - *from.stuckSince > kTimeout && fault != Fault::kSilence) {
    completeSend(from, IBV_WC_RETRY_EXC_ERR);
    toError(from);
  }
  return false;
}

void World::run() {
  for (;;) {
    std::vector<std::shared_ptr<Qp>> all;
    for (Device& device : devices) {
      const std::lock_guard guard(device.mutex);
      for (const auto& [number, qp] : device.qps) {
        all.push_back(qp);
      }
    }
    bool hasMoved = false;
    for (const auto& qp : all) {
      for (int i = 0; i < 8 && step(*qp); ++i) {
        hasMoved = true;
      }
    }
    if (!hasMoved) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

// ---- The data path of a context ----

int postSend(ibv_qp* handle, ibv_send_wr* list, ibv_send_wr** bad) {
  Qp& qp = qpOf(handle);
  const std::lock_guard guard(qp.mutex);
  for (; list != nullptr; list = list->next) {
    if (qp.sends.size() >= qp.asked.cap.max_send_wr) {
      *bad = list;
      return ENOMEM;
    }
    Send made;
    made.wanted = *list;
    made.pieces.assign(list->sg_list, list->sg_list + list->num_sge);
    for (const ibv_sge& piece : made.pieces) {
      made.length += piece.length;
      if ((list->send_flags & IBV_SEND_INLINE) != 0) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(piece.addr);
        made.inlined.insert(made.inlined.end(), bytes, bytes + piece.length);
      }
    }
    qp.sends.push_back(std::move(made));
    if (qp.state == IBV_QPS_ERR) {
      completeSend(qp, IBV_WC_WR_FLUSH_ERR);
    }
  }
  return 0;
}

int postReceive(ibv_qp* handle, ibv_recv_wr* list, ibv_recv_wr** bad) {
  Qp& qp = qpOf(handle);
  const std::lock_guard guard(qp.mutex);
  for (; list != nullptr; list = list->next) {
    if (qp.receives.size() >= qp.asked.cap.max_recv_wr) {
      *bad = list;
      return ENOMEM;
    }
    qp.receives.push_back(
        {list->wr_id, {list->sg_list, list->sg_list + list->num_sge}});
  }
  if (qp.state == IBV_QPS_ERR) {
    toError(qp);
  }
  return 0;
}

int pollCq(ibv_cq* handle, int count, ibv_wc* out) {
  Cq& cq = cqOf(handle);
  const std::lock_guard guard(cq.mutex);
  int given = 0;
  while (given < count && !cq.completions.empty()) {
    out[given++] = cq.completions.front();
    cq.completions.pop_front();
  }
  return given;
}

int requestNotify(ibv_cq* handle, int) {
  Cq& cq = cqOf(handle);
  const std::lock_guard guard(cq.mutex);
  cq.isArmed = true;
  return 0;
}

// ---- Control verbs ----

ibv_context* openDevice(ibv_device* handle) {
  auto* made = new Context;
  std::array<int, 2> fds{};
  if (pipe(fds.data()) != 0) {
    return nullptr;
  }
  made->handle.device = handle;
  made->handle.async_fd = fds[0];
  made->writeFd = fds[1];
  made->handle.ops.post_send = postSend;
  made->handle.ops.post_recv = postReceive;
  made->handle.ops.poll_cq = pollCq;
  made->handle.ops.req_notify_cq = requestNotify;
  pthread_mutex_init(&made->handle.mutex, nullptr);
  Device& device = deviceOf(&made->handle);
  const std::lock_guard guard(device.mutex);
  device.contexts.push_back(&made->handle);
  return &made->handle;
}

int closeDevice(ibv_context* context) {
  Device& device = deviceOf(context);
  {
    const std::lock_guard guard(device.mutex);
    std::erase(device.contexts, context);
  }
  auto* own = reinterpret_cast<Context*>(context);
  close(own->handle.async_fd);
  close(own->writeFd);
  delete own;
  return 0;
}

ibv_pd* allocPd(ibv_context* context) {
  auto* made = new ibv_pd{};
  made->context = context;
  return made;
}

int deallocPd(ibv_pd* pd) {
  delete pd;
  return 0;
}

void waitWhile(const std::atomic<bool>& isHeld) {
  std::unique_lock guard(world().holdMutex);
  if (isHeld) {
    ++world().heldCalls;
    world().released.wait(guard, [&isHeld] { return !isHeld; });
    --world().heldCalls;
  }
}

ibv_mr* makeMr(ibv_pd* pd, void* address, size_t length, uint64_t iova) {
  Device& device = deviceOf(pd->context);
  waitWhile(device.holdsRegistrations);
  auto* made = new ibv_mr{};
  made->context = pd->context;
  made->pd = pd;
  made->addr = address;
  made->length = length;
  made->lkey = made->rkey = ++device.lastKey;
  const std::lock_guard guard(device.mutex);
  device.regions[made->lkey] = {iova, length};
  return made;
}

ibv_mr* regMr(ibv_pd* pd, void* address, size_t length, int) {
  return makeMr(pd, address, length, reinterpret_cast<uint64_t>(address));
}

// The tests have the memory mapped at the address that they give it, so the
// descriptor only has to be that of a file.
ibv_mr* regDmabufMr(
    ibv_pd* pd,
    uint64_t offset,
    size_t length,
    uint64_t iova,
    int fd,
    int) {
  struct stat file{};
  if (fstat(fd, &file) != 0 ||
      offset + length > static_cast<uint64_t>(file.st_size)) {
    errno = EBADF;
    return nullptr;
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as libibverbs does
  return makeMr(pd, reinterpret_cast<void*>(offset), length, iova);
}

ibv_mr* regMrIova(ibv_pd* pd, void* address, size_t length, uint64_t, int) {
  return regMr(pd, address, length, 0);
}

ibv_mr*
regMrIova2(ibv_pd* pd, void* address, size_t length, uint64_t, unsigned) {
  return regMr(pd, address, length, 0);
}

int deregMr(ibv_mr* mr) {
  Device& device = deviceOf(mr->context);
  {
    const std::lock_guard guard(device.mutex);
    device.regions.erase(mr->lkey);
  }
  delete mr;
  return 0;
}

ibv_comp_channel* createChannel(ibv_context* context) {
  auto* made = new Channel;
  std::array<int, 2> fds{};
  if (pipe(fds.data()) != 0) {
    return nullptr;
  }
  made->handle.context = context;
  made->handle.fd = fds[0];
  made->writeFd = fds[1];
  return &made->handle;
}

int destroyChannel(ibv_comp_channel* channel) {
  auto* own = reinterpret_cast<Channel*>(channel);
  close(own->handle.fd);
  close(own->writeFd);
  delete own;
  return 0;
}

ibv_cq* createCq(
    ibv_context* context,
    int cqe,
    void* cqContext,
    ibv_comp_channel* channel,
    int) {
  auto* made = new Cq;
  made->handle.context = context;
  made->handle.cq_context = cqContext;
  made->handle.channel = channel;
  made->handle.cqe = cqe;
  if (channel != nullptr) {
    pthread_mutex_lock(&context->mutex);
    ++channel->refcnt;
    pthread_mutex_unlock(&context->mutex);
  }
  return &made->handle;
}

int destroyCq(ibv_cq* handle) {
  if (handle->channel != nullptr) {
    pthread_mutex_lock(&handle->context->mutex);
    --handle->channel->refcnt;
    pthread_mutex_unlock(&handle->context->mutex);
  }
  delete &cqOf(handle);
  return 0;
}

int getCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cqContext) {
  if (read(channel->fd, cq, sizeof(ibv_cq*)) != sizeof(ibv_cq*)) {
    return -1;
  }
  *cqContext = (*cq)->cq_context;
  return 0;
}

void ackCqEvents(ibv_cq*, unsigned) {}

ibv_qp* createQp(ibv_pd* pd, ibv_qp_init_attr* asked) {
  auto made = std::make_shared<Qp>();
  Device& device = deviceOf(pd->context);
  made->device = &device;
  made->asked = *asked;
  made->handle.context = pd->context;
  made->handle.pd = pd;
  made->handle.send_cq = asked->send_cq;
  made->handle.recv_cq = asked->recv_cq;
  made->handle.qp_type = asked->qp_type;
  made->handle.qp_num = ++device.lastNumber;
  const std::lock_guard guard(device.mutex);
  device.qps[made->handle.qp_num] = made;
  return &made->handle;
}

int modifyQp(ibv_qp* handle, ibv_qp_attr* set, int mask) {
  Qp& qp = qpOf(handle);
  if (set->qp_state == IBV_QPS_RTR) {
    waitWhile(world().holdsConnects[static_cast<size_t>(qp.device->network)]);
  } else if (set->qp_state == IBV_QPS_ERR) {
    waitWhile(qp.device->holdsFences);
  }
  const std::lock_guard guard(qp.mutex);
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) {
    qp.attributes.qp_access_flags = set->qp_access_flags;
  }
  qp.stuckSince.reset();
  switch (set->qp_state) {
    case IBV_QPS_RESET:
      qp.sends.clear();
      qp.receives.clear();
      qp.sentOfFirst = 0;
      break;
    case IBV_QPS_RTR:
      qp.attributes.ah_attr = set->ah_attr;
      qp.attributes.path_mtu = set->path_mtu;
      qp.attributes.dest_qp_num = set->dest_qp_num;
      qp.nextToReceive = set->rq_psn;
      break;
    case IBV_QPS_RTS:
      qp.nextToSend = set->sq_psn;
      break;
    case IBV_QPS_ERR:
      ++world().fences;
      toError(qp);
      break;
    default:
      break;
  }
  qp.state = set->qp_state;
  return 0;
}

int queryQp(ibv_qp* handle, ibv_qp_attr* out, int, ibv_qp_init_attr*) {
  Qp& qp = qpOf(handle);
  const std::lock_guard guard(qp.mutex);
  out->qp_state = out->cur_qp_state = qp.state;
  out->rq_psn = qp.nextToReceive;
  return 0;
}

int destroyQp(ibv_qp* handle) {
  Qp& qp = qpOf(handle);
  std::shared_ptr<Qp> held;
  {
    const std::lock_guard guard(qp.device->mutex);
    const auto found = qp.device->qps.find(handle->qp_num);
    held = std::move(found->second);
    qp.device->qps.erase(found);
  }
  const std::lock_guard guard(held->mutex);
  held->state = IBV_QPS_RESET;
  return 0;
}

} // namespace

void setFault(int network, Fault fault) {
  World& all = world();
  const Fault before = all.faults[static_cast<size_t>(network)].exchange(fault);
  if (fault != Fault::kPorts || before == fault) {
    return;
  }
  for (Device& device : all.devices) {
    if (device.network == network) {
      const std::lock_guard guard(device.mutex);
      for (ibv_context* context : device.contexts) {
        const int event = IBV_EVENT_PORT_ERR;
        [[maybe_unused]] const ssize_t written = write(
            reinterpret_cast<Context*>(context)->writeFd, &event, sizeof event);
      }
    }
  }
}

void setPace(int network, std::chrono::milliseconds pace) {
  world().paces[static_cast<size_t>(network)] = pace;
}

uint64_t delivered(int network) {
  return world().delivered[static_cast<size_t>(network)];
}

uint64_t fences() {
  return world().fences;
}

void holdConnects(int network, bool isHeld) {
  const std::lock_guard guard(world().holdMutex);
  world().holdsConnects[static_cast<size_t>(network)] = isHeld;
  world().released.notify_all();
}

int heldCalls() {
  return world().heldCalls;
}

void holdRegistrations(const char* device, bool isHeld) {
  const std::lock_guard guard(world().holdMutex);
  for (Device& each : world().devices) {
    if (std::strcmp(each.handle.name, device) == 0) {
      each.holdsRegistrations = isHeld;
    }
  }
  world().released.notify_all();
}

void holdFences(const char* device, bool isHeld) {
  const std::lock_guard guard(world().holdMutex);
  for (Device& each : world().devices) {
    if (std::strcmp(each.handle.name, device) == 0) {
      each.holdsFences = isHeld;
    }
  }
  world().released.notify_all();
}

} // namespace resilient::shift::fake

namespace resilient::shift {

// This replaces csrc/shift/real_verbs.cpp.
const RealVerbs& real() {
  static const RealVerbs functions{
      fake::openDevice,
      fake::closeDevice,
      fake::allocPd,
      fake::deallocPd,
      fake::regMr,
      fake::regMrIova,
      fake::regMrIova2,
      fake::regDmabufMr,
      fake::deregMr,
      fake::createChannel,
      fake::destroyChannel,
      fake::createCq,
      fake::destroyCq,
      fake::getCqEvent,
      fake::ackCqEvents,
      fake::createQp,
      fake::modifyQp,
      fake::queryQp,
      fake::destroyQp};
  return functions;
}

} // namespace resilient::shift

// The functions of libibverbs that the library does not replace.
extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  auto& devices = resilient::shift::fake::world().devices;
  auto** list = new ibv_device*[devices.size() + 1]();
  for (size_t i = 0; i < devices.size(); ++i) {
    list[i] = &devices[i].handle;
  }
  if (count != nullptr) {
    *count = static_cast<int>(devices.size());
  }
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  delete[] list;
}

const char* ibv_get_device_name(ibv_device* device) {
  return device->name;
}

int ibv_query_gid(ibv_context* context, uint8_t, int, ibv_gid* gid) {
  *gid = resilient::shift::fake::deviceOf(context).gid;
  return 0;
}

ssize_t _ibv_query_gid_table(
    ibv_context* context,
    ibv_gid_entry* entries,
    size_t count,
    uint32_t,
    size_t) {
  if (count == 0) {
    return 0;
  }
  entries[0] = {};
  entries[0].gid = resilient::shift::fake::deviceOf(context).gid;
  entries[0].gid_index = 0;
  entries[0].port_num = 1;
  entries[0].gid_type = IBV_GID_TYPE_ROCE_V2;
  return 1;
}

int ibv_query_port(ibv_context* context, uint8_t, _compat_ibv_port_attr* out) {
  using resilient::shift::fake::Fault;
  auto& world = resilient::shift::fake::world();
  const int network = resilient::shift::fake::deviceOf(context).network;
  const Fault fault = world.faults[static_cast<size_t>(network)];
  reinterpret_cast<ibv_port_attr*>(out)->state =
      fault == Fault::kPorts ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  int type = 0;
  if (read(context->async_fd, &type, sizeof type) != sizeof type) {
    return -1;
  }
  event->event_type = static_cast<ibv_event_type>(type);
  return 0;
}

void ibv_ack_async_event(ibv_async_event*) {}

} // extern "C"
