#include "shift/shadow.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "shift/real_verbs.h"
#include "shift/runtime.h"

namespace resilient::shift {
namespace {

// Slots for a probe and a fence of our own.
constexpr uint32_t kOwnRequests = 2;

// For an end that only receives: its queue pair on the other path still has to
// send a probe. 67 ms, repeated 6 times.
constexpr uint8_t kTimeout = 14;
constexpr uint8_t kRetries = 6;

ibv_context* openByName(const std::string& name) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ibv_context* opened = nullptr;
  for (int i = 0; i < count && opened == nullptr; ++i) {
    if (name == ibv_get_device_name(list[i])) {
      opened = real().openDevice(list[i]);
    }
  }
  if (list != nullptr) {
    ibv_free_device_list(list);
  }
  return opened;
}

bool isRoceV2(const ibv_gid_entry& entry) {
  return entry.gid_type == IBV_GID_TYPE_ROCE_V2;
}

bool isMapped(const ibv_gid& gid) {
  static constexpr uint8_t kPrefix[12] = {
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

std::vector<ibv_gid_entry> gids(ibv_context* context, uint8_t port) {
  std::vector<ibv_gid_entry> table(64);
  const ssize_t count =
      ibv_query_gid_table(context, table.data(), table.size(), 0);
  table.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  std::erase_if(table, [port](const ibv_gid_entry& entry) {
    return entry.port_num != port || !isRoceV2(entry);
  });
  return table;
}

// IPv4 first: link-local addresses do not cross routers.
std::optional<ibv_gid_entry> bestGid(ibv_context* context, uint8_t port) {
  std::vector<ibv_gid_entry> table = gids(context, port);
  const auto found = std::ranges::find_if(
      table, [](const auto& e) { return isMapped(e.gid); });
  if (found != table.end()) {
    return *found;
  }
  return table.empty() ? std::nullopt : std::optional(table.front());
}

// The index of an address, which may have changed; -1 if there is none.
int indexOf(ibv_context* context, uint8_t port, const ibv_gid& address) {
  for (const ibv_gid_entry& entry : gids(context, port)) {
    if (addressText(entry.gid) == addressText(address)) {
      return static_cast<int>(entry.gid_index);
    }
  }
  return -1;
}

} // namespace

std::string addressText(const ibv_gid& gid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : gid.raw) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::vector<std::string> addressesOf(ibv_context* context, uint8_t port) {
  std::vector<std::string> texts;
  for (const ibv_gid_entry& entry : gids(context, port)) {
    texts.push_back(addressText(entry.gid));
  }
  // IPv4 first: publish() tells the peer the first one.
  std::ranges::sort(texts, std::greater(), [](const std::string& text) {
    return text.starts_with("00000000000000000000ffff");
  });
  return texts;
}

std::unique_ptr<Device> openShadow(ibv_context* app) {
  auto device = std::make_unique<Device>();
  static uint32_t lastId = 0;
  device->id = ++lastId;
  device->app = app;
  device->name = ibv_get_device_name(app->device);
  device->backupName = runtime().backupOf(device->name);
  if (device->backupName.empty()) {
    return nullptr;
  }
  device->backup = openByName(device->backupName);
  device->monitor = openByName(device->name);
  if (device->backup == nullptr || device->monitor == nullptr) {
    say("%s is not protected: the backup %s cannot be opened",
        device->name.c_str(),
        device->backupName.c_str());
    closeShadow(*device);
    return nullptr;
  }
  for (ibv_context* each : {device->backup, device->monitor}) {
    fcntl(each->async_fd, F_SETFL, fcntl(each->async_fd, F_GETFL) | O_NONBLOCK);
  }
  device->real = app->ops;
  return device;
}

void closeShadow(Device& device) {
  for (ibv_context* each : {device.backup, device.monitor}) {
    if (each != nullptr) {
      real().closeDevice(each);
    }
  }
}

bool makeBackupCq(Cq& cq) {
  ibv_comp_channel* channel =
      cq.channel == nullptr ? nullptr : cq.channel->backup;
  // An event of the backup names the queue that the application knows. Each
  // queue pair may add kOwnRequests to those of the application.
  ibv_cq* made = nullptr;
  for (const int more : {cq.cqe / 4 + 16, 16, 0}) {
    made = made != nullptr
        ? made
        : real().createCq(cq.device->backup, cq.cqe + more, cq.app, channel, 0);
  }
  if (made == nullptr) {
    return false;
  }
  const std::lock_guard guard(cq.lock);
  cq.backup = made;
  return true;
}

bool makeBackupQp(Qp& qp) {
  ibv_qp_init_attr attributes = qp.asked;
  attributes.send_cq = qp.sendCq->backup;
  attributes.recv_cq = qp.receiveCq->backup;
  attributes.cap.max_send_wr += kOwnRequests;
  if (attributes.send_cq == nullptr || attributes.recv_cq == nullptr ||
      qp.pd->backup == nullptr) {
    return false;
  }
  ibv_qp* made = real().createQp(qp.pd->backup, &attributes);
  const std::lock_guard guard(qp.lock);
  qp.backup = made;
  return made != nullptr;
}

bool isPortActive(const Qp& qp, int path) {
  ibv_context* context = path == 0 ? qp.device->monitor : qp.device->backup;
  ibv_port_attr port{};
  return ibv_query_port(context, qp.port, &port) == 0 &&
      port.state == IBV_PORT_ACTIVE;
}

PathControl::PathControl(const Qp& qp, int path)
    : target_(onPath(qp, path)),
      path_(path),
      context_(path == 0 ? qp.device->app : qp.device->backup),
      attributes_(qp.attributes),
      ownAddress_(qp.ownAddress),
      hasSendAttributes_(qp.hasSendAttributes) {}

int PathControl::initialize() const {
  ibv_qp_attr reset{};
  reset.qp_state = IBV_QPS_RESET;
  if (const int error = real().modifyQp(target_, &reset, IBV_QP_STATE);
      error != 0) {
    return error;
  }
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = attributes_.port_num;
  // The probe is a WRITE, which a program that only sends may not allow. Its
  // memory stays as protected as it was registered.
  init.qp_access_flags = attributes_.qp_access_flags | IBV_ACCESS_REMOTE_WRITE;
  init.pkey_index = path_ == 0 ? attributes_.pkey_index : uint16_t{0};
  return real().modifyQp(
      target_,
      &init,
      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int PathControl::connect(
    const Remote& remote,
    uint32_t ownPacket,
    uint32_t peerPacket) const {
  int index = attributes_.ah_attr.grh.sgid_index;
  if (path_ == 0) {
    const int found = indexOf(context_, attributes_.port_num, ownAddress_);
    index = found < 0 ? index : found;
  } else {
    const auto entry = bestGid(context_, attributes_.port_num);
    if (!entry) {
      return EADDRNOTAVAIL;
    }
    index = static_cast<int>(entry->gid_index);
  }
  ibv_qp_attr ready = attributes_;
  ready.qp_state = IBV_QPS_RTR;
  ready.ah_attr.is_global = 1;
  ready.ah_attr.grh.dgid = remote.gid;
  ready.ah_attr.grh.sgid_index = static_cast<uint8_t>(index);
  ready.dest_qp_num = remote.number;
  ready.rq_psn = peerPacket;
  const int toReceive = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
      IBV_QP_MIN_RNR_TIMER;
  if (const int error = real().modifyQp(target_, &ready, toReceive);
      error != 0) {
    return error;
  }
  ready.qp_state = IBV_QPS_RTS;
  ready.sq_psn = ownPacket;
  if (!hasSendAttributes_) {
    ready.timeout = kTimeout;
    ready.retry_cnt = kRetries;
    ready.rnr_retry = 7;
    ready.max_rd_atomic = 1;
  }
  const int toSend = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  return real().modifyQp(target_, &ready, toSend);
}

int PathControl::fence() const {
  ibv_qp_attr error{};
  error.qp_state = IBV_QPS_ERR;
  return target_ == nullptr ? 0
                            : real().modifyQp(target_, &error, IBV_QP_STATE);
}

std::optional<uint32_t> PathControl::nextPacket() const {
  const auto query = [this]() -> std::optional<uint32_t> {
    ibv_qp_attr attributes{};
    ibv_qp_init_attr ignored{};
    if (real().queryQp(target_, &attributes, IBV_QP_RQ_PSN, &ignored) != 0) {
      return std::nullopt;
    }
    return attributes.rq_psn & kPacketMask;
  };
  // A packet may still be in work in Soft-RoCE when the queue pair has changed
  // its state.
  std::optional<uint32_t> next = query();
  for (int i = 0; i < 10; ++i) {
    usleep(300);
    const std::optional<uint32_t> again = query();
    if (std::exchange(next, again) == again) {
      break;
    }
  }
  return next;
}

} // namespace resilient::shift
