#include "shift/shadow.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>

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

// The index of the own address on a path.
int ownGidIndex(const Qp& qp, int path) {
  if (path == 0) {
    for (const ibv_gid_entry& entry :
         gids(qp.device->app, qp.attributes.port_num)) {
      if (addressText(entry.gid) == addressText(qp.ownAddress)) {
        return static_cast<int>(entry.gid_index);
      }
    }
    return qp.attributes.ah_attr.grh.sgid_index;
  }
  const auto entry = bestGid(qp.device->backup, qp.attributes.port_num);
  return entry ? static_cast<int>(entry->gid_index) : -1;
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
  cq.backup = real().createCq(
      cq.device->backup,
      cq.cqe + static_cast<int>(8 * kOwnRequests),
      nullptr,
      channel,
      0);
  if (cq.backup != nullptr) {
    // An event of the backup names the queue that the application knows.
    cq.backup->cq_context = &cq;
  }
  return cq.backup != nullptr;
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
  qp.backup = real().createQp(qp.pd->backup, &attributes);
  return qp.backup != nullptr;
}

bool isPortActive(const Qp& qp, int path) {
  ibv_context* context = path == 0 ? qp.device->monitor : qp.device->backup;
  ibv_port_attr port{};
  return ibv_query_port(
             context, std::max<uint8_t>(qp.attributes.port_num, 1), &port) ==
      0 &&
      port.state == IBV_PORT_ACTIVE;
}

int initialize(Qp& qp, int path) {
  ibv_qp* target = onPath(qp, path);
  ibv_qp_attr reset{};
  reset.qp_state = IBV_QPS_RESET;
  if (const int error = real().modifyQp(target, &reset, IBV_QP_STATE);
      error != 0) {
    return error;
  }
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = qp.attributes.port_num;
  // The probe is a WRITE, which a program that only sends may not allow. Its
  // memory stays as protected as it was registered.
  init.qp_access_flags =
      qp.attributes.qp_access_flags | IBV_ACCESS_REMOTE_WRITE;
  if (path == 0) {
    init.pkey_index = qp.attributes.pkey_index;
  }
  return real().modifyQp(
      target,
      &init,
      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int connect(
    Qp& qp,
    int path,
    const Remote& remote,
    uint32_t ownPacket,
    uint32_t peerPacket) {
  ibv_qp* target = onPath(qp, path);
  const int index = ownGidIndex(qp, path);
  if (index < 0) {
    return EADDRNOTAVAIL;
  }
  ibv_qp_attr ready = qp.attributes;
  ready.qp_state = IBV_QPS_RTR;
  ready.ah_attr.is_global = 1;
  ready.ah_attr.grh.dgid = remote.gid;
  ready.ah_attr.grh.sgid_index = static_cast<uint8_t>(index);
  ready.dest_qp_num = remote.number;
  ready.rq_psn = peerPacket;
  const int toReceive = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
      IBV_QP_MIN_RNR_TIMER;
  if (const int error = real().modifyQp(target, &ready, toReceive);
      error != 0) {
    return error;
  }
  ready.qp_state = IBV_QPS_RTS;
  ready.sq_psn = ownPacket;
  if (!qp.hasSendAttributes) {
    ready.timeout = kTimeout;
    ready.retry_cnt = kRetries;
    ready.rnr_retry = 7;
    ready.max_rd_atomic = 1;
  }
  const int toSend = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  return real().modifyQp(target, &ready, toSend);
}

int fence(Qp& qp, int path) {
  ibv_qp_attr error{};
  error.qp_state = IBV_QPS_ERR;
  return real().modifyQp(onPath(qp, path), &error, IBV_QP_STATE);
}

std::optional<uint32_t> nextPacketOf(Qp& qp, int path) {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr ignored{};
  if (real().queryQp(onPath(qp, path), &attributes, IBV_QP_RQ_PSN, &ignored) !=
      0) {
    return std::nullopt;
  }
  return attributes.rq_psn & kPacketMask;
}

} // namespace resilient::shift
