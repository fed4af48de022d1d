// A verbs program that checks what it receives, for tests of the library that
// `torch-resilient shift` preloads. It knows nothing of that library.
//
//   shift_check MODE DEVICE GID_INDEX PORT COUNT QPS THREADS DIRECTIONS EVENTS
//   [HOST]
//
// Without HOST it is the receiver and waits at PORT. With 2 DIRECTIONS, both
// ends send and receive on each queue pair. Each thread has a completion queue
// and a share of the queue pairs. Modes:
//   send    SEND and RECV, contents and order checked
//   simple  WRITE, WRITE_WITH_IMM, and credits that the receiver writes (as
//           NCCL Simple)
//   flag    WRITE whose last bytes are a flag on which the receiver polls (as
//           NCCL LL); memory that was read is filled with other bytes, which
//           no packet may change
//   atomic  FETCH_AND_ADD one after another; ends at the first error
//   badkey  one WRITE with a wrong key after COUNT good ones; ends at the error
//
// Prints how long a queue pair takes to connect (medians), a line "progress N"
// from time to time and in the end "done N" or "failed STATUS N".

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
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
  _exit(1); // other threads run still
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
  uint32_t threads = 1;
  uint32_t directions = 1;
  bool usesEvents = false;
  std::string host;

  bool isClient() const {
    return !host.empty();
  }
  bool sends() const {
    return isClient() || directions == 2;
  }
  bool receives() const {
    return !isClient() || directions == 2;
  }
};

// ---- The connection by which both ends tell their addresses ----

int meet(const Settings& settings) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = settings.isClient() ? 0 : AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(settings.port);
  const char* host = settings.isClient() ? settings.host.c_str() : nullptr;
  require(getaddrinfo(host, port.c_str(), &hints, &found) == 0, "address");
  for (int attempt = 0; attempt < 300; ++attempt) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (!settings.isClient()) {
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
  uint32_t index = 0;
  // The bytes to send, and those received.
  std::vector<uint8_t> out = std::vector<uint8_t>(size_t{kSlots} * kSlotBytes);
  std::vector<uint8_t> in = std::vector<uint8_t>(size_t{kSlots} * kSlotBytes);
  // How many messages the peer allows, which it writes, and how many it is
  // allowed.
  alignas(8) volatile uint64_t credit = 0;
  uint64_t granted = 0;
  ibv_mr* source = nullptr;
  ibv_mr* data = nullptr;
  ibv_mr* credits = nullptr;
  uint64_t posted = 0;
  uint64_t completed = 0;
  uint64_t received = 0;
  uint64_t creditWrites = 0;

  uint8_t* outSlot(uint64_t number) {
    return out.data() + (number % kSlots) * kSlotBytes;
  }
  uint8_t* inSlot(uint64_t number) {
    return in.data() + (number % kSlots) * kSlotBytes;
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

// A completion queue and the thread that polls it and posts.
class Worker {
 public:
  Worker(const Settings& settings, ibv_context* context)
      : settings_(settings),
        channel_(
            settings.usesEvents ? ibv_create_comp_channel(context) : nullptr),
        cq_(ibv_create_cq(
            context,
            static_cast<int>(settings.qps * kSlots * 8),
            nullptr,
            channel_,
            0)) {
    require(
        cq_ != nullptr &&
            (channel_ == nullptr || ibv_req_notify_cq(cq_, 0) == 0),
        "cq");
  }

  ibv_cq* cq() {
    return cq_;
  }
  void add(Pair& pair) {
    pairs_.push_back(&pair);
  }
  void clean() {
    require(ibv_destroy_cq(cq_) == 0, "destroy_cq");
    require(
        channel_ == nullptr || ibv_destroy_comp_channel(channel_) == 0,
        "channel");
  }

  void postReceive(Pair& pair, uint64_t number) {
    ibv_sge piece{
        reinterpret_cast<uint64_t>(pair.inSlot(number)),
        kSlotBytes,
        pair.data->lkey};
    ibv_recv_wr wanted{number, nullptr, &piece, 1};
    ibv_recv_wr* bad = nullptr;
    require(ibv_post_recv(pair.qp, &wanted, &bad) == 0, "post_recv");
  }

  // Returns after the last message. The peer may still need the queue pairs.
  void exchangeAll() {
    while (!isDone()) {
      for (Pair* pair : pairs_) {
        while (settings_.sends() && mayPost(*pair)) {
          post(*pair, pair->posted++);
        }
        if (settings_.receives() && settings_.mode == "flag") {
          pollFlag(*pair);
        }
      }
      if (take() == 0) {
        std::this_thread::yield();
      }
    }
  }
  void takeUntil(const std::atomic<bool>& isOver) {
    while (!isOver && !hasFailed_) {
      take();
    }
  }

  void sendUntilError() {
    Pair& pair = *pairs_.front();
    for (uint64_t number = 0;; ++number) {
      const bool isAtomic = settings_.mode == "atomic";
      ibv_sge piece{
          reinterpret_cast<uint64_t>(pair.out.data()), 8, pair.source->lkey};
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

 private:
  bool isDone() const {
    for (const Pair* pair : pairs_) {
      if ((settings_.sends() && pair->completed != settings_.count) ||
          (settings_.receives() && pair->received != settings_.count)) {
        return false;
      }
    }
    return true;
  }

  // ---- The sender ----

  bool mayPost(const Pair& pair) const {
    const bool isAllowed =
        settings_.mode == "send" || pair.posted < pair.credit + kSlots;
    return pair.posted < settings_.count &&
        pair.posted < pair.completed + kSlots && isAllowed;
  }

  void post(Pair& pair, uint64_t number) {
    const uint32_t length = lengthOf(number);
    uint8_t* bytes = pair.outSlot(number);
    fill(bytes, length, seedOf(pair, number, settings_.isClient()));
    // Two pieces, unsignaled but for each fourth and the last, inline if short.
    ibv_sge pieces[2] = {
        {reinterpret_cast<uint64_t>(bytes), 16, pair.source->lkey},
        {reinterpret_cast<uint64_t>(bytes) + 16,
         length - 16,
         pair.source->lkey}};
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

  // ---- The receiver ----

  // RDMA writes in order here, so the last bytes tell that all are there.
  void pollFlag(Pair& pair) {
    if (pair.received == settings_.count) {
      return;
    }
    const uint64_t number = pair.received;
    const uint32_t length = lengthOf(number) & ~7U;
    std::vector<uint8_t> expected(length);
    fill(expected.data(), length, seedOf(pair, number, !settings_.isClient()));
    uint8_t* bytes = pair.inSlot(number);
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
      const uint8_t* old = pair.inSlot(released - 1);
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
        isFilled(
            pair.inSlot(number),
            length,
            seedOf(pair, number, !settings_.isClient())),
        "contents of " + std::to_string(number));
    std::memset(pair.inSlot(number), kPoison, kSlotBytes);
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
    pair.granted = number;
    ibv_sge piece{reinterpret_cast<uint64_t>(&pair.granted), 8, 0};
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
    for (Pair* each : pairs_) {
      pair = each->qp->qp_num == completion.qp_num ? each : pair;
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
        _exit(3);
      }
    } else if ((completion.opcode & IBV_WC_RECV) != 0) {
      arrived(*pair, completion);
    } else if (completion.wr_id != kCreditId) {
      require(completion.wr_id + 1 > pair->completed, "order of completions");
      pair->completed = completion.wr_id + 1;
      if (settings_.sends() && pair->completed % 100 == 0) {
        progress(pair->completed);
      }
    }
  }

  static void progress(uint64_t number) {
    std::printf("progress %llu\n", static_cast<unsigned long long>(number));
    std::fflush(stdout);
  }

  // Messages of the two ends differ.
  static uint64_t seedOf(const Pair& pair, uint64_t number, bool isFromClient) {
    return (number * 64 + pair.index) * 2 + (isFromClient ? 0 : 1);
  }

  static constexpr uint64_t kCreditId = uint64_t{1} << 40;

  const Settings& settings_;
  ibv_comp_channel* channel_;
  ibv_cq* cq_;
  std::vector<Pair*> pairs_;
  bool hasFailed_ = false;
};

class Check {
 public:
  explicit Check(Settings settings)
      : settings_(std::move(settings)), pairs_(settings_.qps) {
    openDevice();
    fd_ = meet(settings_);
    for (uint32_t i = 0; i < settings_.threads; ++i) {
      workers_.emplace_back(settings_, context_);
    }
    for (Pair& pair : pairs_) {
      pair.index = static_cast<uint32_t>(&pair - pairs_.data());
      Worker& worker = workers_[pair.index % settings_.threads];
      make(pair, worker);
      worker.add(pair);
    }
    for (Pair& pair : pairs_) {
      connectPair(pair);
    }
    std::printf(
        "connect RTR %.1f us RTS %.1f us\n",
        medianMicroseconds(toReceive_),
        medianMicroseconds(toSend_));
    char ignored = 0;
    exchange(fd_, &ignored, &ignored, 1);
  }

  void run() {
    if (settings_.mode == "atomic" || settings_.mode == "badkey") {
      runUntilError();
      return;
    }
    std::atomic<uint32_t> working{settings_.threads};
    std::atomic<bool> isOver{false};
    std::vector<std::thread> threads;
    for (Worker& worker : workers_) {
      threads.emplace_back([&] {
        worker.exchangeAll();
        --working;
        // The other end may still need the queue pairs.
        worker.takeUntil(isOver);
      });
    }
    while (working != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    char ignored = 0;
    require(write(fd_, &ignored, 1) == 1, "goodbye");
    require(recv(fd_, &ignored, 1, 0) == 1, "goodbye of the peer");
    isOver = true;
    for (std::thread& thread : threads) {
      thread.join();
    }
    std::printf("done %u\n", settings_.count);
    std::fflush(stdout);
  }

  void clean() {
    for (Pair& pair : pairs_) {
      require(ibv_destroy_qp(pair.qp) == 0, "destroy_qp");
      for (ibv_mr* mr : {pair.source, pair.data, pair.credits}) {
        require(ibv_dereg_mr(mr) == 0, "dereg_mr");
      }
    }
    for (Worker& worker : workers_) {
      worker.clean();
    }
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
  }

  void make(Pair& pair, Worker& worker) {
    const int local = IBV_ACCESS_LOCAL_WRITE;
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    pair.source = ibv_reg_mr(pd_, pair.out.data(), pair.out.size(), local);
    pair.data = ibv_reg_mr(pd_, pair.in.data(), pair.in.size(), access);
    pair.credits =
        ibv_reg_mr(pd_, const_cast<uint64_t*>(&pair.credit), 8, access);
    require(
        pair.source != nullptr && pair.data != nullptr &&
            pair.credits != nullptr,
        "reg_mr");
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = worker.cq();
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap = {kSlots * 4, kSlots, 2, 1, 48};
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
    if (settings_.receives()) {
      std::memset(pair.in.data(), kPoison, pair.in.size());
      for (uint32_t i = 0; i < kSlots; ++i) {
        worker.postReceive(pair, i);
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
    own.data = reinterpret_cast<uint64_t>(pair.in.data());
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
    const auto begin = std::chrono::steady_clock::now();
    require(
        ibv_modify_qp(
            pair.qp,
            &attributes,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                IBV_QP_MIN_RNR_TIMER) == 0,
        "RTR");
    const auto middle = std::chrono::steady_clock::now();
    attributes.qp_state = IBV_QPS_RTS;
    attributes.sq_psn = own.packet;
    // 67 ms. With threads that spin, a busy machine may need more than 7 times
    // that to answer: then 268 ms.
    attributes.timeout = settings_.threads == 1 ? 14 : 16;
    attributes.retry_cnt = 6;
    attributes.rnr_retry = 7;
    attributes.max_rd_atomic = 1;
    const auto again = std::chrono::steady_clock::now();
    require(
        ibv_modify_qp(
            pair.qp,
            &attributes,
            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) ==
            0,
        "RTS");
    toReceive_.push_back(middle - begin);
    toSend_.push_back(std::chrono::steady_clock::now() - again);
  }

  void runUntilError() {
    if (settings_.isClient()) {
      workers_.front().sendUntilError();
      return;
    }
    std::atomic<bool> isOver{false};
    std::thread watcher([&] {
      char ignored = 0;
      (void)recv(fd_, &ignored, 1, 0);
      isOver = true;
    });
    workers_.front().takeUntil(isOver);
    shutdown(fd_, SHUT_RD);
    watcher.join();
  }

  using Times = std::vector<std::chrono::steady_clock::duration>;

  static double medianMicroseconds(Times& times) {
    std::ranges::sort(times);
    return std::chrono::duration<double, std::micro>(times[times.size() / 2])
        .count();
  }

  Settings settings_;
  std::vector<Pair> pairs_;
  std::deque<Worker> workers_;
  // The time to connect a queue pair.
  Times toReceive_;
  Times toSend_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  int fd_ = -1;
};

} // namespace

int main(int count, char** words) {
  if (count < 10) {
    std::fprintf(
        stderr,
        "%s MODE DEVICE GID_INDEX PORT COUNT QPS THREADS DIRECTIONS EVENTS "
        "[HOST]\n",
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
      static_cast<uint32_t>(std::atoi(words[7])),
      static_cast<uint32_t>(std::atoi(words[8])),
      std::atoi(words[9]) != 0,
      count > 10 ? words[10] : ""};
  Check check(settings);
  check.run();
  check.clean();
  return 0;
}
