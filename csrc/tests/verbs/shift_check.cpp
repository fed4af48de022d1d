// A verbs program that checks what it receives, for tests of the library that
// `torch-resilient shift` preloads. It knows nothing of that library.
//
//   shift_check MODE DEVICE GID_INDEX PORT COUNT QPS EVENTS [HOST]
//
// Without HOST it is the receiver and waits at PORT. Modes:
//   send    SEND and RECV, contents and order checked
//   simple  WRITE, WRITE_WITH_IMM, and credits that the receiver writes (as
//   NCCL Simple) flag    WRITE whose last bytes are a flag on which the
//   receiver polls (as NCCL LL); memory that
//           was read is filled with other bytes, which no packet may change
//   atomic  FETCH_AND_ADD one after another; ends at the first error
//   badkey  one WRITE with a wrong key after COUNT good ones; ends at the error
//
// Prints a line "progress N" from time to time and in the end "done N" or
// "failed STATUS N".

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t kSlots = 16;
constexpr uint32_t kSlotBytes = 40000; // ten packets of 4096 bytes
constexpr uint32_t kSignalEach = 4;
constexpr uint8_t kPoison = 0xee;
constexpr unsigned kSignaled = IBV_SEND_SIGNALED;
constexpr unsigned kInline = IBV_SEND_INLINE;

[[noreturn]] void die(const std::string& text) {
  std::printf("broken %s\n", text.c_str());
  std::fflush(stdout);
  std::exit(1);
}

void require(bool isGood, const std::string& text) {
  if (!isGood) {
    die(text);
  }
}

struct Address {
  ibv_gid gid;
  uint32_t number;
  uint32_t packet;
  uint32_t dataKey;
  uint32_t creditKey;
  uint64_t data;
  uint64_t credit;
};

struct Settings {
  std::string mode;
  std::string device;
  int gidIndex = 0;
  int port = 0;
  uint32_t count = 0;
  uint32_t qps = 1;
  bool usesEvents = false;
  std::string host;

  bool isSender() const {
    return !host.empty();
  }
};

// ---- The connection by which both ends tell their addresses ----

int meet(const Settings& settings) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = settings.isSender() ? 0 : AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(settings.port);
  const char* host = settings.isSender() ? settings.host.c_str() : nullptr;
  require(getaddrinfo(host, port.c_str(), &hints, &found) == 0, "address");
  for (int attempt = 0; attempt < 300; ++attempt) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!settings.isSender()) {
      const int one = 1;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
      require(
          bind(fd, found->ai_addr, found->ai_addrlen) == 0 &&
              listen(fd, 1) == 0,
          "listen");
      return accept(fd, nullptr, nullptr);
    }
    if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
      return fd;
    }
    close(fd);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  die("connect");
}

void exchange(int fd, const void* own, void* other, size_t bytes) {
  require(
      write(fd, own, bytes) == static_cast<ssize_t>(bytes),
      "write to the peer");
  require(
      recv(fd, other, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes),
      "read of the peer");
}

// ---- One queue pair ----

struct Pair {
  ibv_qp* qp = nullptr;
  Address peer{};
  std::vector<uint8_t> memory =
      std::vector<uint8_t>(size_t{kSlots} * kSlotBytes);
  // At the sender: how many messages the receiver allows. At the receiver: what
  // it last wrote.
  alignas(8) volatile uint64_t credit = 0;
  ibv_mr* data = nullptr;
  ibv_mr* credits = nullptr;
  uint64_t posted = 0;
  uint64_t completed = 0;
  uint64_t received = 0;
  uint64_t creditWrites = 0;

  uint8_t* slot(uint64_t number) {
    return memory.data() + (number % kSlots) * kSlotBytes;
  }
};

uint32_t lengthOf(uint64_t number) {
  return number % 5 == 4
      ? 48
      : kSlotBytes - static_cast<uint32_t>(number % 7) * 1000;
}

void fill(uint8_t* bytes, uint32_t length, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (uint32_t i = 0; i + 8 <= length; i += 8) {
    state = state * 6364136223846793005 + 1442695040888963407;
    std::memcpy(bytes + i, &state, 8);
  }
}

bool isFilled(const uint8_t* bytes, uint32_t length, uint64_t seed) {
  std::vector<uint8_t> expected(length);
  fill(expected.data(), length, seed);
  return std::memcmp(expected.data(), bytes, length & ~7U) == 0;
}

class Check {
 public:
  explicit Check(Settings settings)
      : settings_(std::move(settings)), pairs_(settings_.qps) {
    openDevice();
    fd_ = meet(settings_);
    for (Pair& pair : pairs_) {
      make(pair);
    }
    for (Pair& pair : pairs_) {
      connectPair(pair);
    }
    char ignored = 0;
    exchange(fd_, &ignored, &ignored, 1);
  }

  int run() {
    if (settings_.mode == "atomic" || settings_.mode == "badkey") {
      settings_.isSender() ? sendUntilError() : waitForEnd();
    } else {
      settings_.isSender() ? sendAll() : receiveAll();
    }
    return 0;
  }

  void clean() {
    for (Pair& pair : pairs_) {
      require(ibv_destroy_qp(pair.qp) == 0, "destroy_qp");
      require(
          ibv_dereg_mr(pair.data) == 0 && ibv_dereg_mr(pair.credits) == 0,
          "dereg_mr");
    }
    require(ibv_destroy_cq(cq_) == 0, "destroy_cq");
    require(
        channel_ == nullptr || ibv_destroy_comp_channel(channel_) == 0,
        "channel");
    require(
        ibv_dealloc_pd(pd_) == 0 && ibv_close_device(context_) == 0, "close");
  }

 private:
  void openDevice() {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    for (int i = 0; i < count && context_ == nullptr; ++i) {
      if (settings_.device == ibv_get_device_name(list[i])) {
        context_ = ibv_open_device(list[i]);
      }
    }
    require(context_ != nullptr, "device");
    ibv_free_device_list(list);
    pd_ = ibv_alloc_pd(context_);
    channel_ =
        settings_.usesEvents ? ibv_create_comp_channel(context_) : nullptr;
    cq_ = ibv_create_cq(
        context_,
        static_cast<int>(settings_.qps * kSlots * 4),
        nullptr,
        channel_,
        0);
    require(
        cq_ != nullptr &&
            (channel_ == nullptr || ibv_req_notify_cq(cq_, 0) == 0),
        "cq");
  }

  void make(Pair& pair) {
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    pair.data = ibv_reg_mr(pd_, pair.memory.data(), pair.memory.size(), access);
    pair.credits =
        ibv_reg_mr(pd_, const_cast<uint64_t*>(&pair.credit), 8, access);
    require(pair.data != nullptr && pair.credits != nullptr, "reg_mr");
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = cq_;
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap = {kSlots * 2, kSlots, 2, 1, 48};
    pair.qp = ibv_create_qp(pd_, &wanted);
    require(pair.qp != nullptr, "create_qp");
    ibv_qp_attr init{};
    init.qp_state = IBV_QPS_INIT;
    init.port_num = 1;
    init.qp_access_flags = static_cast<unsigned>(access);
    require(
        ibv_modify_qp(
            pair.qp,
            &init,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                IBV_QP_ACCESS_FLAGS) == 0,
        "INIT");
    if (!settings_.isSender()) {
      std::memset(pair.memory.data(), kPoison, pair.memory.size());
      for (uint32_t i = 0; i < kSlots; ++i) {
        postReceive(pair, i);
      }
    }
  }

  void connectPair(Pair& pair) {
    Address own{};
    require(
        ibv_query_gid(context_, 1, settings_.gidIndex, &own.gid) == 0, "gid");
    own.number = pair.qp->qp_num;
    own.packet =
        (pair.qp->qp_num * 7919 + static_cast<uint32_t>(getpid())) & 0xffffff;
    own.dataKey = pair.data->rkey;
    own.creditKey = pair.credits->rkey;
    own.data = reinterpret_cast<uint64_t>(pair.memory.data());
    own.credit = reinterpret_cast<uint64_t>(&pair.credit);
    exchange(fd_, &own, &pair.peer, sizeof own);
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = IBV_MTU_4096;
    attributes.dest_qp_num = pair.peer.number;
    attributes.rq_psn = pair.peer.packet;
    attributes.max_dest_rd_atomic = 1;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.grh.dgid = pair.peer.gid;
    attributes.ah_attr.grh.sgid_index =
        static_cast<uint8_t>(settings_.gidIndex);
    attributes.ah_attr.grh.hop_limit = 64;
    attributes.ah_attr.port_num = 1;
    require(
        ibv_modify_qp(
            pair.qp,
            &attributes,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                IBV_QP_MIN_RNR_TIMER) == 0,
        "RTR");
    attributes.qp_state = IBV_QPS_RTS;
    attributes.sq_psn = own.packet;
    attributes.timeout = 14;
    attributes.retry_cnt = 6;
    attributes.rnr_retry = 7;
    attributes.max_rd_atomic = 1;
    require(
        ibv_modify_qp(
            pair.qp,
            &attributes,
            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) ==
            0,
        "RTS");
  }

  void postReceive(Pair& pair, uint64_t number) {
    ibv_sge piece{
        reinterpret_cast<uint64_t>(pair.slot(number)),
        kSlotBytes,
        pair.data->lkey};
    ibv_recv_wr wanted{number, nullptr, &piece, 1};
    ibv_recv_wr* bad = nullptr;
    require(ibv_post_recv(pair.qp, &wanted, &bad) == 0, "post_recv");
  }

  // ---- The sender ----

  bool mayPost(const Pair& pair) const {
    const bool isAllowed =
        settings_.mode == "send" || pair.posted < pair.credit + kSlots;
    return pair.posted < settings_.count &&
        pair.posted < pair.completed + kSlots && isAllowed;
  }

  void sendAll() {
    uint64_t unfinished = 0;
    do {
      unfinished = 0;
      for (Pair& pair : pairs_) {
        while (mayPost(pair)) {
          post(pair, pair.posted++);
        }
        unfinished += settings_.count - pair.completed;
      }
      if (take() == 0) {
        std::this_thread::yield();
      }
    } while (unfinished != 0);
    end(settings_.count);
  }

  void post(Pair& pair, uint64_t number) {
    const uint32_t length = lengthOf(number);
    uint8_t* bytes = pair.slot(number);
    fill(bytes, length, seedOf(pair, number));
    // Two pieces, unsignaled but for each fourth and the last, inline if short.
    ibv_sge pieces[2] = {
        {reinterpret_cast<uint64_t>(bytes), 16, pair.data->lkey},
        {reinterpret_cast<uint64_t>(bytes) + 16, length - 16, pair.data->lkey}};
    ibv_send_wr wanted{};
    wanted.wr_id = number;
    wanted.sg_list = pieces;
    wanted.num_sge = 2;
    const bool isSignaled = number % kSignalEach == kSignalEach - 1 ||
        number + 1 == settings_.count;
    wanted.send_flags =
        (isSignaled ? kSignaled : 0U) | (length <= 48 ? kInline : 0U);
    wanted.wr.rdma.remote_addr =
        pair.peer.data + (number % kSlots) * kSlotBytes;
    wanted.wr.rdma.rkey = pair.peer.dataKey;
    ibv_send_wr* bad = nullptr;
    if (settings_.mode == "send") {
      wanted.opcode = IBV_WR_SEND;
    } else if (settings_.mode == "flag") {
      wanted.opcode = IBV_WR_RDMA_WRITE;
    } else {
      wanted.opcode = IBV_WR_RDMA_WRITE;
      wanted.send_flags &= ~static_cast<unsigned>(IBV_SEND_SIGNALED);
      require(ibv_post_send(pair.qp, &wanted, &bad) == 0, "post_send");
      wanted.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wanted.imm_data = htonl(static_cast<uint32_t>(number));
      wanted.num_sge = 0;
      wanted.send_flags = isSignaled ? kSignaled : 0U;
    }
    require(ibv_post_send(pair.qp, &wanted, &bad) == 0, "post_send");
    if ((wanted.send_flags & IBV_SEND_INLINE) != 0) {
      std::memset(bytes, 0, length); // it was copied
    }
  }

  void sendUntilError() {
    Pair& pair = pairs_.front();
    for (uint64_t number = 0;; ++number) {
      const bool isAtomic = settings_.mode == "atomic";
      ibv_sge piece{
          reinterpret_cast<uint64_t>(pair.memory.data()), 8, pair.data->lkey};
      ibv_send_wr wanted{};
      wanted.wr_id = number;
      wanted.sg_list = &piece;
      wanted.num_sge = 1;
      wanted.send_flags = IBV_SEND_SIGNALED;
      if (isAtomic) {
        wanted.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        wanted.wr.atomic = {pair.peer.data, 1, 0, pair.peer.dataKey};
      } else {
        wanted.opcode = IBV_WR_RDMA_WRITE;
        wanted.wr.rdma = {
            pair.peer.data,
            pair.peer.dataKey + (number == settings_.count ? 77 : 0)};
      }
      ibv_send_wr* bad = nullptr;
      require(ibv_post_send(pair.qp, &wanted, &bad) == 0, "post_send");
      const uint64_t before = pair.completed;
      while (pair.completed == before && !hasFailed_) {
        take();
      }
      if (hasFailed_) {
        return;
      }
      if (number % 50 == 0) {
        progress(number);
      }
    }
  }

  // ---- The receiver ----

  void receiveAll() {
    bool isDone = false;
    while (!isDone) {
      const int got = take();
      isDone = true;
      for (Pair& pair : pairs_) {
        if (settings_.mode == "flag") {
          pollFlag(pair);
        }
        isDone &= pair.received == settings_.count;
      }
      if (got == 0) {
        std::this_thread::yield();
      }
    }
    end(settings_.count);
  }

  // RDMA writes in order here, so the last bytes tell that all are there.
  void pollFlag(Pair& pair) {
    if (pair.received == settings_.count) {
      return;
    }
    const uint64_t number = pair.received;
    const uint32_t length = lengthOf(number) & ~7U;
    std::vector<uint8_t> expected(length);
    fill(expected.data(), length, seedOf(pair, number));
    uint8_t* bytes = pair.slot(number);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (std::memcmp(bytes + length - 8, expected.data() + length - 8, 8) != 0) {
      return;
    }
    require(
        std::memcmp(bytes, expected.data(), length) == 0,
        "contents of " + std::to_string(number));
    std::memset(bytes, kPoison, kSlotBytes);
    ++pair.received;
    // The slot before last stays as it is until the sender may use it again.
    if (pair.received > kSlots / 2) {
      const uint64_t released = pair.received - kSlots / 2;
      const uint8_t* old = pair.slot(released - 1);
      for (uint32_t i = 0; i < kSlotBytes; ++i) {
        require(old[i] == kPoison, "overwritten after it was read");
      }
      allow(pair, released);
    }
    if (pair.received == settings_.count) {
      allow(pair, pair.received);
    }
    if (pair.received % 100 == 0) {
      progress(pair.received);
    }
  }

  void arrived(Pair& pair, const ibv_wc& completion) {
    const uint64_t number = pair.received++;
    require(completion.wr_id == number % kSlots, "order of receives");
    const uint32_t length = lengthOf(number);
    if (settings_.mode == "send") {
      require(
          completion.byte_len == length, "length of " + std::to_string(number));
    } else {
      require(
          ntohl(completion.imm_data) == number,
          "immediate of " + std::to_string(number));
    }
    require(
        isFilled(pair.slot(number), length, seedOf(pair, number)),
        "contents of " + std::to_string(number));
    std::memset(pair.slot(number), kPoison, kSlotBytes);
    postReceive(pair, number % kSlots);
    if (settings_.mode != "send") {
      allow(pair, pair.received);
    }
    if (pair.received % 100 == 0) {
      progress(pair.received);
    }
  }

  // The credit of NCCL: a short WRITE in the other direction.
  void allow(Pair& pair, uint64_t number) {
    pair.credit = number;
    ibv_sge piece{
        reinterpret_cast<uint64_t>(&pair.credit), 8, pair.credits->lkey};
    ibv_send_wr wanted{};
    wanted.wr_id = kCreditId;
    wanted.sg_list = &piece;
    wanted.num_sge = 1;
    wanted.opcode = IBV_WR_RDMA_WRITE;
    wanted.send_flags = IBV_SEND_INLINE |
        (++pair.creditWrites % kSignalEach == 0 ? kSignaled : 0U);
    wanted.wr.rdma = {pair.peer.credit, pair.peer.creditKey};
    ibv_send_wr* bad = nullptr;
    require(ibv_post_send(pair.qp, &wanted, &bad) == 0, "post of a credit");
  }

  // ---- Completions ----

  int take() {
    if (channel_ != nullptr) {
      waitForEvent();
    }
    ibv_wc completions[8];
    const int got = ibv_poll_cq(cq_, 8, completions);
    require(got >= 0, "poll_cq");
    for (int i = 0; i < got; ++i) {
      taken(completions[i]);
    }
    return got;
  }

  // As a program does that sleeps; not for ever, since credits and flags give
  // no event.
  void waitForEvent() {
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (poll(&waiting, 1, settings_.mode == "send" ? 100 : 1) == 1) {
      ibv_cq* cq = nullptr;
      void* context = nullptr;
      require(
          ibv_get_cq_event(channel_, &cq, &context) == 0 && cq == cq_, "event");
      ibv_ack_cq_events(cq, 1);
      require(ibv_req_notify_cq(cq, 0) == 0, "req_notify_cq");
    }
  }

  void taken(const ibv_wc& completion) {
    Pair* pair = nullptr;
    for (Pair& each : pairs_) {
      pair = each.qp->qp_num == completion.qp_num ? &each : pair;
    }
    require(pair != nullptr, "completion of an unknown queue pair");
    if (completion.status != IBV_WC_SUCCESS) {
      if (!hasFailed_) {
        std::printf(
            "failed %d %s\n",
            completion.status,
            ibv_wc_status_str(completion.status));
        std::fflush(stdout);
      }
      hasFailed_ = true;
      if (settings_.mode != "atomic" && settings_.mode != "badkey") {
        std::exit(3);
      }
    } else if ((completion.opcode & IBV_WC_RECV) != 0) {
      arrived(*pair, completion);
    } else if (completion.wr_id != kCreditId) {
      require(completion.wr_id + 1 > pair->completed, "order of completions");
      pair->completed = completion.wr_id + 1;
      if (settings_.isSender() && pair->completed % 100 == 0) {
        progress(pair->completed);
      }
    }
  }

  void progress(uint64_t number) {
    std::printf("progress %llu\n", static_cast<unsigned long long>(number));
    std::fflush(stdout);
  }

  // Nobody leaves while the other still needs its queue pair.
  void end(uint64_t number) {
    char ignored = 0;
    require(write(fd_, &ignored, 1) == 1, "goodbye");
    while (recv(fd_, &ignored, 1, MSG_DONTWAIT) < 0) {
      take();
    }
    std::printf("done %llu\n", static_cast<unsigned long long>(number));
    std::fflush(stdout);
  }

  void waitForEnd() {
    char ignored = 0;
    while (recv(fd_, &ignored, 1, MSG_DONTWAIT) < 0 && !hasFailed_) {
      take();
    }
  }

  uint64_t seedOf(const Pair& pair, uint64_t number) const {
    return number * 64 + static_cast<uint64_t>(&pair - pairs_.data());
  }

  static constexpr uint64_t kCreditId = uint64_t{1} << 40;

  Settings settings_;
  std::vector<Pair> pairs_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  int fd_ = -1;
  bool hasFailed_ = false;
};

} // namespace

int main(int count, char** words) {
  if (count < 8) {
    std::fprintf(
        stderr,
        "%s MODE DEVICE GID_INDEX PORT COUNT QPS EVENTS [HOST]\n",
        words[0]);
    return 2;
  }
  Settings settings{
      words[1],
      words[2],
      std::atoi(words[3]),
      std::atoi(words[4]),
      static_cast<uint32_t>(std::atoi(words[5])),
      static_cast<uint32_t>(std::atoi(words[6])),
      std::atoi(words[7]) != 0,
      count > 8 ? words[8] : ""};
  Check check(settings);
  const int status = check.run();
  check.clean();
  return status;
}
