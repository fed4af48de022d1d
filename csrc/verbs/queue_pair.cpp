#include "verbs/queue_pair.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "verbs/ports.h"
#include "verbs/registered_memory.h"

namespace resilient {
namespace {

// Packet numbers and the numbers of queue pairs have 24 bits.
constexpr uint32_t kNumberMask = 0xffffff;
// As many routers as IP packets usually may cross; packets that cross more are
// lost.
constexpr uint8_t kHopLimit = 64;
// If a message finds no receive, the sender tries again after 0.64 ms (code
// 12), without end (7): the channel's own credits make this rare and short.
constexpr uint8_t kReceiverNotReadyTimer = 12, kReceiverNotReadyRetries = 7;
// Completions taken from the device at a time; more would only use more stack.
constexpr int kPollBatch = 32;
// A send of so many bytes goes to the device with its request, which saves the
// device a look into memory: a small message with its headers.
constexpr uint32_t kInlineBytes = 256;
// Notifications acknowledged at a time: each acknowledgement takes a lock.
constexpr unsigned kAcknowledgeBatch = 64;

// Enough for 100 Gbit/s over 300 us with chunks of 256 KiB. The device keeps a
// record of each.
constexpr int kReads = 16;

uint16_t readsOf(int limit) {
  return static_cast<uint16_t>(std::clamp(limit, 0, kReads));
}

VerbsCompletion::Result resultOf(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return VerbsCompletion::Result::kOk;
    case IBV_WC_WR_FLUSH_ERR:
      return VerbsCompletion::Result::kFlushed;
    default:
      return VerbsCompletion::Result::kFailed;
  }
}

// Of a failure, only the request and the status are valid.
VerbsCompletion completionOf(const ibv_wc& from) {
  VerbsCompletion completion;
  completion.request = from.wr_id;
  completion.result = resultOf(from.status);
  if (from.status != IBV_WC_SUCCESS) {
    completion.why = ibv_wc_status_str(from.status);
  } else if ((from.opcode & IBV_WC_RECV) != 0) {
    completion.received = true;
    completion.bytes = from.byte_len;
  }
  return completion;
}

class QueuePair final : public VerbsQueuePair {
 public:
  QueuePair(
      std::shared_ptr<OpenDevice> device,
      const VerbsPort& port,
      const VerbsQueuePairConfig& config)
      : device_(std::move(device)), port_(port), config_(config) {}

  ~QueuePair() override {
    queuePair_.reset();
    // Destroying a queue waits until its notifications are acknowledged.
    acknowledgeNotifications();
  }

  // Ready for receives to be posted.
  Status init();

  VerbsAddress address() const override {
    return address_;
  }
  Status connect(const VerbsAddress& remote) override;
  Status postReceive(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into) override;
  Status postSend(
      uint64_t request,
      VerbsMemory& memory,
      std::span<const std::byte> from) override;
  Status postRead(
      uint64_t request,
      VerbsMemory& memory,
      std::span<std::byte> into,
      uint64_t remoteAddress,
      uint32_t remoteKey) override;
  Status poll(std::vector<VerbsCompletion>& completions, size_t max) override;
  int fd() const override {
    return channel_->fd;
  }
  Status arm() override;
  void takeNotifications() override;
  Status fence() override;

 private:
  Status create();
  Status element(
      const VerbsMemory& memory,
      std::span<const std::byte> bytes,
      ibv_sge& element) const;
  Status postStatus(const char* attempt, int result) const;
  Status modify(const std::string& attempt, ibv_qp_attr& attributes, int mask);
  Status readyToReceive(
      const std::string& attempt,
      const VerbsAddress& remote,
      const DevicePort& own);
  Status readyToSend(const std::string& attempt, const VerbsAddress& remote);
  void acknowledgeNotifications();

  const std::shared_ptr<OpenDevice> device_;
  const VerbsPort port_;
  const VerbsQueuePairConfig config_;
  VerbsAddress address_;
  uint32_t inlineBytes_ = 0;
  unsigned unacknowledged_ = 0;
  // Destroyed in the reverse order.
  ChannelHandle channel_;
  CompletionQueueHandle completions_;
  QueuePairHandle queuePair_;
};

Status QueuePair::init() {
  DevicePort own;
  if (Status status = findPort(*device_->context, port_, own); !status.ok()) {
    return status;
  }
  if (Status status = create(); !status.ok()) {
    return status;
  }
  fillRandom(&address_.firstPacket, sizeof(address_.firstPacket));
  address_.firstPacket &= kNumberMask;
  address_.gid = port_.gid;
  address_.queuePair = queuePair_->qp_num;
  address_.mtuBytes = own.port.mtuBytes;
  address_.lid = own.lid;
  address_.reads = readsOf(device_->limits.max_qp_rd_atom);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = 0;
  attributes.port_num = port_.port;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  return modify(
      "prepare a queue pair",
      attributes,
      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

Status QueuePair::create() {
  const uint32_t depth = config_.depth;
  const ibv_device_attr& limits = device_->limits;
  const int64_t most = std::min<int64_t>(limits.max_qp_wr, limits.max_cqe / 2);
  if (depth == 0 || depth > most) {
    return Status(
        StatusCode::kInvalidArgument,
        device_->name + ": make a queue pair for " + std::to_string(depth) +
            " requests of each kind: the device allows 1 to " +
            std::to_string(most));
  }
  channel_.reset(ibv_create_comp_channel(device_->context.get()));
  if (channel_ == nullptr) {
    return verbsStatus(device_->name, "make a completion channel", errno);
  }
  if (!setNonBlocking(channel_->fd)) {
    return verbsStatus(device_->name, "set up a completion channel", errno);
  }
  // Room for the completions of all sends and receives: an overflow would end
  // the connection.
  completions_.reset(ibv_create_cq(
      device_->context.get(),
      static_cast<int>(2 * depth),
      nullptr,
      channel_.get(),
      0));
  if (completions_ == nullptr) {
    return verbsStatus(device_->name, "make a completion queue", errno);
  }
  ibv_qp_init_attr wanted{};
  wanted.send_cq = completions_.get();
  wanted.recv_cq = completions_.get();
  wanted.cap.max_send_wr = depth;
  wanted.cap.max_recv_wr = depth;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  wanted.cap.max_inline_data = kInlineBytes;
  wanted.qp_type = IBV_QPT_RC;
  wanted.sq_sig_all = 1;
  queuePair_.reset(ibv_create_qp(device_->domain.get(), &wanted));
  while (queuePair_ == nullptr && wanted.cap.max_inline_data != 0) {
    wanted.cap.max_inline_data /= 2; // more than the device can
    queuePair_.reset(ibv_create_qp(device_->domain.get(), &wanted));
  }
  if (queuePair_ == nullptr) {
    return verbsStatus(device_->name, "make a queue pair", errno);
  }
  inlineBytes_ = wanted.cap.max_inline_data;
  return {};
}

Status QueuePair::modify(
    const std::string& attempt,
    ibv_qp_attr& attributes,
    int mask) {
  const int result = ibv_modify_qp(queuePair_.get(), &attributes, mask);
  return result == 0 ? Status()
                     : verbsStatus(device_->name, attempt, verbsError(result));
}

Status QueuePair::connect(const VerbsAddress& remote) {
  DevicePort own;
  if (Status status = findPort(*device_->context, port_, own); !status.ok()) {
    return status;
  }
  const std::string attempt = "connect " + gidText(port_.gid) + " to " +
      gidText(remote.gid) + ", queue pair " + std::to_string(remote.queuePair);
  if (mtuOfBytes(remote.mtuBytes) == 0 || (own.lid != 0) != (remote.lid != 0)) {
    return Status(
        StatusCode::kProtocol,
        device_->name + ": " + attempt + ": no device has an MTU of " +
            std::to_string(remote.mtuBytes) + " bytes and the LID " +
            std::to_string(remote.lid) + " in the network of this port");
  }
  Status status = readyToReceive(attempt, remote, own);
  return status.ok() ? readyToSend(attempt, remote) : status;
}

Status QueuePair::readyToReceive(
    const std::string& attempt,
    const VerbsAddress& remote,
    const DevicePort& own) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu =
      mtuOfBytes(std::min(own.port.mtuBytes, remote.mtuBytes));
  attributes.dest_qp_num = remote.queuePair & kNumberMask;
  attributes.rq_psn = remote.firstPacket & kNumberMask;
  attributes.max_dest_rd_atomic = static_cast<uint8_t>(address_.reads);
  attributes.min_rnr_timer = kReceiverNotReadyTimer;
  attributes.ah_attr.is_global = 1;
  attributes.ah_attr.dlid = remote.lid;
  attributes.ah_attr.port_num = port_.port;
  std::memcpy(
      attributes.ah_attr.grh.dgid.raw, remote.gid.data(), remote.gid.size());
  attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(own.port.gidIndex);
  attributes.ah_attr.grh.hop_limit = kHopLimit;
  return modify(
      attempt,
      attributes,
      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
          IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

Status QueuePair::readyToSend(
    const std::string& attempt,
    const VerbsAddress& remote) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = address_.firstPacket;
  attributes.timeout = config_.ackTimeout;
  attributes.retry_cnt = config_.retries;
  attributes.rnr_retry = kReceiverNotReadyRetries;
  attributes.max_rd_atomic = static_cast<uint8_t>(std::min<int>(
      readsOf(device_->limits.max_qp_init_rd_atom), remote.reads));
  return modify(
      attempt,
      attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

Status QueuePair::element(
    const VerbsMemory& memory,
    std::span<const std::byte> bytes,
    ibv_sge& element) const {
  const auto& registered = static_cast<const RegisteredMemory&>(memory);
  if (!registered.covers(bytes, device_->domain.get()) ||
      bytes.size() > std::numeric_limits<uint32_t>::max() / 2) {
    return Status(
        StatusCode::kInternal,
        device_->name + ": post " + std::to_string(bytes.size()) +
            " bytes: they are too many, or not in the registered memory");
  }
  element.addr = reinterpret_cast<uintptr_t>(bytes.data());
  element.length = static_cast<uint32_t>(bytes.size());
  element.lkey = registered.key();
  return {};
}

Status QueuePair::postStatus(const char* attempt, int result) const {
  if (result == 0) {
    return {};
  }
  const int error = verbsError(result);
  Status status = verbsStatus(device_->name, attempt, error);
  if (error != ENOMEM) {
    return status;
  }
  return Status(
      StatusCode::kInternal,
      status.message() + "; the queue is for " + std::to_string(config_.depth));
}

Status QueuePair::postReceive(
    uint64_t request,
    VerbsMemory& memory,
    std::span<std::byte> into) {
  ibv_sge part{};
  if (Status status = element(memory, into, part); !status.ok()) {
    return status;
  }
  ibv_recv_wr wanted{};
  wanted.wr_id = request;
  wanted.sg_list = &part;
  // Some devices take an element of length 0 for one of 2 GiB.
  wanted.num_sge = into.empty() ? 0 : 1;
  ibv_recv_wr* refused = nullptr;
  return postStatus(
      "post a receive", ibv_post_recv(queuePair_.get(), &wanted, &refused));
}

Status QueuePair::postSend(
    uint64_t request,
    VerbsMemory& memory,
    std::span<const std::byte> from) {
  ibv_sge part{};
  if (Status status = element(memory, from, part); !status.ok()) {
    return status;
  }
  ibv_send_wr wanted{};
  wanted.wr_id = request;
  wanted.sg_list = &part;
  wanted.num_sge = from.empty() ? 0 : 1;
  wanted.opcode = IBV_WR_SEND;
  wanted.send_flags = IBV_SEND_SIGNALED;
  if (from.size() <= inlineBytes_) {
    wanted.send_flags |= IBV_SEND_INLINE;
  }
  ibv_send_wr* refused = nullptr;
  return postStatus(
      "post a send", ibv_post_send(queuePair_.get(), &wanted, &refused));
}

Status QueuePair::postRead(
    uint64_t request,
    VerbsMemory& memory,
    std::span<std::byte> into,
    uint64_t remoteAddress,
    uint32_t remoteKey) {
  ibv_sge part{};
  if (Status status = element(memory, into, part); !status.ok()) {
    return status;
  }
  ibv_send_wr wanted{};
  wanted.wr_id = request;
  wanted.sg_list = &part;
  wanted.num_sge = 1;
  wanted.opcode = IBV_WR_RDMA_READ;
  wanted.send_flags = IBV_SEND_SIGNALED;
  wanted.wr.rdma.remote_addr = remoteAddress;
  wanted.wr.rdma.rkey = remoteKey;
  ibv_send_wr* refused = nullptr;
  return postStatus(
      "post a read", ibv_post_send(queuePair_.get(), &wanted, &refused));
}

Status QueuePair::poll(std::vector<VerbsCompletion>& completions, size_t max) {
  std::array<ibv_wc, kPollBatch> taken;
  while (max > 0) {
    const int wanted = static_cast<int>(std::min<size_t>(max, taken.size()));
    const int count = ibv_poll_cq(completions_.get(), wanted, taken.data());
    if (count < 0) {
      return verbsStatus(device_->name, "poll completions", verbsError(count));
    }
    for (int i = 0; i < count; ++i) {
      completions.push_back(completionOf(taken[static_cast<size_t>(i)]));
    }
    if (count < wanted) {
      break;
    }
    max -= static_cast<size_t>(count);
  }
  return {};
}

Status QueuePair::arm() {
  const int result = ibv_req_notify_cq(completions_.get(), 0);
  return result == 0
      ? Status()
      : verbsStatus(
            device_->name, "ask for a notification", verbsError(result));
}

void QueuePair::takeNotifications() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  // One for each arm(): should there be another, the descriptor stays readable.
  if (ibv_get_cq_event(channel_.get(), &queue, &context) == 0) {
    ++unacknowledged_;
  }
  if (unacknowledged_ >= kAcknowledgeBatch) {
    acknowledgeNotifications();
  }
}

void QueuePair::acknowledgeNotifications() {
  if (unacknowledged_ > 0) {
    ibv_ack_cq_events(completions_.get(), std::exchange(unacknowledged_, 0U));
  }
}

// The receiving side counts: in this state the device drops what arrives. Its
// requests come back in both directions.
Status QueuePair::fence() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  return modify("fence a queue pair", attributes, IBV_QP_STATE);
}

} // namespace

Status makeQueuePair(
    const std::shared_ptr<OpenDevice>& device,
    const VerbsPort& port,
    const VerbsQueuePairConfig& config,
    std::unique_ptr<VerbsQueuePair>& queuePair) {
  auto made = std::make_unique<QueuePair>(device, port, config);
  Status status = made->init();
  if (status.ok()) {
    queuePair = std::move(made);
  }
  return status;
}

} // namespace resilient
