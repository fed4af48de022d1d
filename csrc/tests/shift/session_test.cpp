// The library that `torch-resilient shift` preloads, from its entry points to
// its control thread, over devices in memory: many threads, and devices that do
// not answer.

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "shift/runtime.h"
#include "tests/check.h"
#include "tests/shift/fake_verbs.h"
#include "tests/shift/store_server.h"

namespace resilient::shift {
namespace {

using namespace std::chrono_literals;
using fake::Fault;

// Far more than anything takes: the machine may be busy.
constexpr auto kLimit = 30s;

void eventually(const char* what, const std::function<bool()>& condition) {
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) {
      throw test::Failure(std::string("not reached: ") + what);
    }
    std::this_thread::sleep_for(1ms);
  }
}

// ---- Objects of an application ----

std::string spoilFile() {
  return "/tmp/shift-test-spoil-" + std::to_string(getpid());
}

// The settings hold from the first device on, for the whole process.
void configure() {
  const std::string address = "127.0.0.1:" + std::to_string(fake::storePort());
  setenv("TORCH_RESILIENT_SHIFT_STORE", address.c_str(), 1);
  setenv("TORCH_RESILIENT_SHIFT_BACKUP", "a0=a1,b0=b1", 1);
  setenv("TORCH_RESILIENT_SHIFT_SPOIL_FILE", spoilFile().c_str(), 1);
  const std::lock_guard guard(runtime().mutex);
  runtime().silence = 300ms;
  runtime().holdDown = 50ms;
  runtime().fenceLimit = 300ms;
}

class Host {
 public:
  explicit Host(const char* device) {
    configure();
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(ibv_get_device_name(list[i]), device) == 0) {
        context = ibv_open_device(list[i]);
      }
    }
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    ibv_query_gid(context, 1, 0, &gid);
  }
  ~Host() {
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_gid gid{};
};

constexpr uint32_t kSlots = 8;
constexpr uint32_t kSlotBytes = 3000; // three packets
constexpr uint32_t kInlineBytes = 48;
// The macro ibv_reg_mr wants rights of one type.
constexpr int kLocalWrite = IBV_ACCESS_LOCAL_WRITE;
constexpr int kRemoteWrite = kLocalWrite | IBV_ACCESS_REMOTE_WRITE;

ibv_qp* makeQp(const Host& host, ibv_cq* cq) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap = {2 * kSlots, kSlots, 2, 1, kInlineBytes};
  return ibv_create_qp(host.pd, &wanted);
}

void modify(ibv_qp* qp, ibv_qp_state state) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  CHECK_EQ(ibv_modify_qp(qp, &attributes, IBV_QP_STATE), 0);
}

void connectQp(
    ibv_qp* qp,
    const ibv_qp* peer,
    const ibv_gid& gid,
    bool writes) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  attributes.qp_access_flags = writes ? IBV_ACCESS_REMOTE_WRITE : 0;
  CHECK_EQ(
      ibv_modify_qp(
          qp,
          &attributes,
          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
      0);
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = IBV_MTU_1024;
  attributes.dest_qp_num = peer->qp_num;
  attributes.rq_psn = peer->qp_num * 7;
  attributes.ah_attr.is_global = 1;
  attributes.ah_attr.grh.dgid = gid;
  attributes.ah_attr.port_num = 1;
  CHECK_EQ(
      ibv_modify_qp(
          qp,
          &attributes,
          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
      0);
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = qp->qp_num * 7;
  attributes.timeout = 14;
  attributes.retry_cnt = 6;
  attributes.rnr_retry = 7;
  CHECK_EQ(
      ibv_modify_qp(
          qp,
          &attributes,
          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
      0);
}

// Whether all queue pairs can change to their other path.
bool areReady() {
  const std::lock_guard guard(runtime().mutex);
  for (const auto& [handle, qp] : runtime().qps) {
    if (!qp->isReady) {
      return false;
    }
  }
  return true;
}

bool areOn(int path) {
  const std::lock_guard guard(runtime().mutex);
  for (const auto& [handle, qp] : runtime().qps) {
    if (qp->core.active() != path) {
      return false;
    }
  }
  return true;
}

// ---- One connection, for a test in one thread ----

struct End {
  explicit End(Host& owner, ibv_comp_channel* channel = nullptr)
      : host(owner),
        cq(ibv_create_cq(owner.context, 64, nullptr, channel, 0)),
        qp(makeQp(owner, cq)),
        mr(ibv_reg_mr(owner.pd, memory.data(), memory.size(), kLocalWrite)) {}
  ~End() {
    if (qp != nullptr) {
      ibv_destroy_qp(qp);
    }
    ibv_destroy_cq(cq);
    ibv_dereg_mr(mr);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void send(uint64_t id, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_sge piece{reinterpret_cast<uint64_t>(memory.data()), 100, mr->lkey};
    ibv_send_wr wanted{};
    wanted.wr_id = id;
    wanted.sg_list = &piece;
    wanted.num_sge = 1;
    wanted.opcode = IBV_WR_SEND;
    wanted.send_flags = flags;
    ibv_send_wr* bad = nullptr;
    CHECK_EQ(ibv_post_send(qp, &wanted, &bad), 0);
  }
  void receive(uint64_t id) {
    ibv_sge piece{reinterpret_cast<uint64_t>(memory.data()), 100, mr->lkey};
    ibv_recv_wr wanted{id, nullptr, &piece, 1};
    ibv_recv_wr* bad = nullptr;
    CHECK_EQ(ibv_post_recv(qp, &wanted, &bad), 0);
  }
  ibv_wc completion() {
    ibv_wc one{};
    eventually("a completion", [&] { return ibv_poll_cq(cq, 1, &one) == 1; });
    return one;
  }

  Host& host;
  std::vector<uint8_t> memory = std::vector<uint8_t>(100);
  ibv_cq* cq;
  ibv_qp* qp;
  ibv_mr* mr;
};

struct Connection {
  explicit Connection(bool waits = true) {
    connectQp(a.qp, b.qp, hostB.gid, false);
    connectQp(b.qp, a.qp, hostA.gid, false);
    if (waits) {
      eventually("the backups are connected", areReady);
    }
  }
  ~Connection() {
    fake::setFault(0, Fault::kNone);
    fake::setFault(1, Fault::kNone);
    fake::setPace(1, 0ms);
    fake::holdConnects(0, false);
    fake::holdFences("a0", false);
    fake::holdRegistrations("a1", false);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void exchange(uint64_t id) {
    b.receive(id);
    a.send(id);
    CHECK_EQ(a.completion().status, IBV_WC_SUCCESS);
    CHECK_EQ(b.completion().wr_id, id);
  }
  void moveToBackup() {
    fake::setFault(0, Fault::kLoss);
    exchange(0);
    CHECK(areOn(1));
  }

  Host hostA{"a0"};
  Host hostB{"b0"};
  End a{hostA};
  End b{hostB};
};

TEST(shift_returns_for_a_program_that_allows_no_remote_writes) {
  Connection connection;
  connection.moveToBackup();
  fake::setFault(0, Fault::kNone);
  eventually("the default path", [] { return areOn(0); });
  connection.exchange(1);
}

// A line of /proc/self/task/*/status, for the threads of the library.
std::vector<std::string> ofOwnThreads(const std::string& name) {
  std::vector<std::string> found;
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    bool isOwn = false;
    for (std::string line; std::getline(status, line);) {
      isOwn |= line.starts_with("Name:\tshift") &&
          !line.starts_with("Name:\tshift_tests");
      if (isOwn && line.starts_with(name)) {
        found.push_back(line.substr(name.size()));
      }
    }
  }
  return found;
}

TEST(shift_takes_no_signals_from_the_program) {
  Connection connection;
  const std::vector<std::string> blocked = ofOwnThreads("SigBlk:\t");
  CHECK(blocked.size() >= 2);
  for (const std::string& each : blocked) {
    const uint64_t mask = std::stoull(each, nullptr, 16);
    for (const int signal : {SIGINT, SIGALRM, SIGUSR1, SIGTERM}) {
      CHECK((mask >> (signal - 1) & 1) != 0);
    }
  }
}

TEST(shift_returns_although_a_slow_path_takes_long_to_drain) {
  Connection connection;
  connection.moveToBackup();
  // 16 requests take longer than the first attempt waits.
  fake::setPace(1, 45ms);
  for (uint64_t i = 0; i < kSlots; ++i) {
    connection.b.receive(i);
  }
  for (uint64_t i = 0; i < uint64_t{2} * kSlots; ++i) {
    connection.a.send(i);
  }
  fake::setFault(0, Fault::kNone);
  eventually("the default path", [&] {
    ibv_wc one{};
    while (ibv_poll_cq(connection.b.cq, 1, &one) == 1) {
      connection.b.receive(0);
    }
    while (ibv_poll_cq(connection.a.cq, 1, &one) == 1) {
      connection.a.send(0);
    }
    return areOn(0);
  });
}

TEST(shift_control_verbs_do_not_wait_for_a_silent_neighbour) {
  Connection connection;
  fake::holdConnects(0, true);
  connection.moveToBackup();
  fake::setFault(0, Fault::kNone);
  eventually("a blocked call", [] { return fake::heldCalls() != 0; });
  auto verbs = std::async(std::launch::async, [&connection] {
    End other(connection.hostA);
    connection.exchange(1);
  });
  const bool isDone = verbs.wait_for(kLimit) == std::future_status::ready;
  fake::holdConnects(0, false);
  CHECK(isDone);
  verbs.get();
}

// Memory of its own, on the device of an end.
struct Region {
  explicit Region(const Host& host)
      : mr(ibv_reg_mr(host.pd, memory.data(), memory.size(), kLocalWrite)) {}
  ~Region() {
    if (mr != nullptr) {
      ibv_dereg_mr(mr);
    }
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::vector<uint8_t> memory = std::vector<uint8_t>(100);
  ibv_mr* mr;
};

TEST(shift_goes_on_while_memory_is_registered_on_the_backup) {
  Connection connection;
  connection.moveToBackup();
  fake::holdRegistrations("a1", true);
  std::optional<Region> region;
  auto verbs = std::async(std::launch::async, [&] {
    region.emplace(connection.hostA);
    eventually("a blocked call", [] { return fake::heldCalls() != 0; });
    ibv_cq* const other =
        ibv_create_cq(connection.hostA.context, 4, nullptr, nullptr, 0);
    ibv_destroy_cq(other);
    connection.exchange(1);
  });
  const bool isDone = verbs.wait_for(kLimit) == std::future_status::ready;
  if (!isDone) {
    fake::holdRegistrations("a1", false);
  }
  verbs.get();
  CHECK(isDone);
  // Requests in both directions that use it wait for it, in their order.
  std::swap(connection.a.mr, region->mr);
  std::swap(connection.a.memory, region->memory);
  connection.b.receive(2);
  connection.a.send(2);
  connection.a.receive(3);
  connection.b.send(3);
  std::this_thread::sleep_for(100ms);
  ibv_wc one{};
  CHECK_EQ(ibv_poll_cq(connection.a.cq, 1, &one), 0);
  fake::holdRegistrations("a1", false);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(connection.a.completion().status, IBV_WC_SUCCESS);
    CHECK_EQ(connection.b.completion().status, IBV_WC_SUCCESS);
  }
  CHECK(areOn(1));
}

// The memory of another device, mapped so that the fake can reach it.
struct Dmabuf {
  static constexpr size_t kBytes = 4096;
  static constexpr uint64_t kOffset = 4096;
  Dmabuf() {
    CHECK_EQ(ftruncate(fd, kOffset + kBytes), 0);
    CHECK(bytes != MAP_FAILED);
  }
  ~Dmabuf() {
    munmap(bytes, kBytes);
  }
  Dmabuf(const Dmabuf&) = delete;
  Dmabuf& operator=(const Dmabuf&) = delete;

  int fd = memfd_create("shift-test", MFD_CLOEXEC);
  void* bytes =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, kOffset);
};

size_t openFiles() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(shift_registers_a_dmabuf_on_the_backup) {
  Connection connection;
  Dmabuf dmabuf;
  fake::holdRegistrations("a1", true);
  const size_t before = openFiles();
  ibv_mr* mr = ibv_reg_dmabuf_mr(
      connection.hostA.pd,
      Dmabuf::kOffset,
      Dmabuf::kBytes,
      reinterpret_cast<uint64_t>(dmabuf.bytes),
      dmabuf.fd,
      kLocalWrite);
  CHECK(mr != nullptr);
  // The program needs its descriptor no longer, and the backup not for long.
  close(dmabuf.fd);
  fake::holdRegistrations("a1", false);
  eventually("no descriptor is left", [&] { return openFiles() < before; });
  connection.moveToBackup();
  ibv_sge piece{reinterpret_cast<uint64_t>(dmabuf.bytes), 100, mr->lkey};
  ibv_send_wr wanted{};
  wanted.sg_list = &piece;
  wanted.num_sge = 1;
  wanted.opcode = IBV_WR_SEND;
  wanted.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  std::memset(dmabuf.bytes, 'd', 100);
  connection.b.receive(7);
  CHECK_EQ(ibv_post_send(connection.a.qp, &wanted, &bad), 0);
  CHECK_EQ(connection.a.completion().status, IBV_WC_SUCCESS);
  CHECK_EQ(connection.b.completion().wr_id, 7U);
  CHECK(connection.b.memory == std::vector<uint8_t>(100, 'd'));
  CHECK_EQ(ibv_dereg_mr(mr), 0);
}

TEST(shift_deregisters_memory_that_is_being_registered) {
  Connection connection;
  fake::holdRegistrations("a1", true);
  std::optional<Region> region(std::in_place, connection.hostA);
  eventually("a blocked call", [] { return fake::heldCalls() != 0; });
  std::atomic<bool> isGone{false};
  std::thread end([&] {
    region.reset();
    isGone = true;
  });
  std::this_thread::sleep_for(50ms);
  const bool wasEarly = isGone;
  connection.exchange(1); // nobody else waits
  fake::holdRegistrations("a1", false);
  end.join();
  CHECK(!wasEarly);
  connection.exchange(2);
  // A device that does not answer at all holds the program for seconds only.
  fake::holdRegistrations("a1", true);
  region.emplace(connection.hostA);
  eventually("a blocked call", [] { return fake::heldCalls() != 0; });
  region.reset();
  const auto abandoned = [] {
    const std::lock_guard guard(runtime().mutex);
    return runtime().abandonedMrs.size();
  };
  CHECK_EQ(abandoned(), 1U);
  fake::holdRegistrations("a1", false);
  eventually("the late region is dropped", [&] { return abandoned() == 0; });
}

TEST(shift_changes_states_while_the_control_thread_is_busy) {
  Host hostA("a0");
  Host hostB("b0");
  End a(hostA);
  End b(hostB);
  std::unique_lock busy(runtime().mutex);
  auto states = std::async(std::launch::async, [&] {
    connectQp(a.qp, b.qp, hostB.gid, false);
    connectQp(b.qp, a.qp, hostA.gid, false);
  });
  const bool isDone = states.wait_for(kLimit) == std::future_status::ready;
  busy.unlock();
  CHECK(isDone);
  states.get();
  eventually("the backups are connected", areReady);
}

// What is written to event descriptors, and has not been read.
uint64_t unreadEvents() {
  uint64_t sum = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fdinfo")) {
    std::ifstream file(entry.path());
    const std::string name = "eventfd-count:";
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with(name)) {
        sum += std::stoull(line.substr(name.size()), nullptr, 16);
      }
    }
  }
  return sum;
}

TEST(shift_changes_states_without_waking_the_control_thread) {
  Host hostA("a0");
  Host hostB("b0");
  End a(hostA);
  End b(hostB);
  {
    const std::lock_guard busy(runtime().mutex); // it reads nothing meanwhile
    runtime().catchUp();
    const uint64_t before = unreadEvents();
    connectQp(a.qp, b.qp, hostB.gid, false);
    connectQp(b.qp, a.qp, hostA.gid, false);
    CHECK_EQ(unreadEvents(), before);
  }
  eventually("the backups are connected", areReady);
}

TEST(shift_repeats_a_request_that_was_spoiled_on_purpose) {
  Connection connection;
  CHECK(std::ofstream(spoilFile()).good());
  eventually("the file is taken", [] {
    return access(spoilFile().c_str(), F_OK) != 0;
  });
  connection.exchange(3);
  CHECK(areOn(1));
  connection.exchange(4);
}

TEST(shift_passes_errors_of_the_program_on) {
  Connection connection;
  connection.b.receive(3);
  ++connection.a.mr->lkey;
  connection.a.send(3);
  --connection.a.mr->lkey;
  CHECK_EQ(connection.a.completion().status, IBV_WC_LOC_PROT_ERR);
  CHECK(areOn(0));
}

TEST(shift_survives_a_failure_of_both_paths_that_ends) {
  Connection connection;
  connection.b.receive(1);
  fake::setFault(0, Fault::kLoss);
  fake::setFault(1, Fault::kLoss);
  connection.a.send(1);
  std::this_thread::sleep_for(4s);
  fake::setFault(0, Fault::kNone);
  CHECK_EQ(connection.a.completion().status, IBV_WC_SUCCESS);
  CHECK_EQ(connection.b.completion().wr_id, 1U);
}

TEST(shift_gives_up_a_device_that_cannot_be_fenced) {
  Connection connection;
  fake::holdFences("a0", true);
  fake::setFault(0, Fault::kLoss);
  connection.a.send(7);
  const ibv_wc completion = connection.a.completion();
  fake::holdFences("a0", false);
  CHECK_EQ(completion.wr_id, 7U);
  CHECK_EQ(completion.status, IBV_WC_RETRY_EXC_ERR);
}

TEST(shift_discards_the_completions_of_a_destroyed_queue_pair) {
  Connection connection;
  connection.moveToBackup();
  ibv_wc one{};
  for (uint64_t i = 0; i < 4; ++i) {
    connection.b.receive(i);
    connection.a.send(i);
  }
  for (int i = 0; i < 4; ++i) {
    connection.b.completion();
  }
  // One poll takes all from the device.
  eventually("completions", [&] {
    return ibv_poll_cq(connection.a.cq, 1, &one) == 1;
  });
  std::this_thread::sleep_for(50ms);
  CHECK_EQ(ibv_poll_cq(connection.a.cq, 1, &one), 1);
  ibv_destroy_qp(connection.a.qp);
  connection.a.qp = nullptr;
  CHECK_EQ(ibv_poll_cq(connection.a.cq, 1, &one), 0);
}

TEST(shift_flushes_a_queue_pair_that_is_taken_down_on_the_backup) {
  Connection connection;
  connection.moveToBackup();
  connection.a.receive(5);
  modify(connection.a.qp, IBV_QPS_ERR);
  const ibv_wc completion = connection.a.completion();
  CHECK_EQ(completion.wr_id, 5U);
  CHECK_EQ(completion.status, IBV_WC_WR_FLUSH_ERR);
}

TEST(shift_does_not_alternate_between_paths_for_a_slow_receiver) {
  Connection connection;
  {
    const std::lock_guard guard(runtime().mutex);
    runtime().silence = 50ms;
  }
  const uint64_t before = fake::fences();
  connection.a.send(1);
  std::this_thread::sleep_for(3s);
  // Two for each switch: after 50, 100, 200, 400 and 800 ms.
  CHECK(fake::fences() - before <= 12);
  connection.b.receive(1);
  CHECK_EQ(connection.b.completion().wr_id, 1U);
  CHECK_EQ(connection.a.completion().status, IBV_WC_SUCCESS);
}

TEST(shift_removes_keys_that_the_peer_has_read) {
  fake::setFault(1, Fault::kLoss);
  const size_t before = fake::storedKeys();
  Connection connection(false);
  const uint64_t packets = fake::delivered(1);
  std::this_thread::sleep_for(3s);
  CHECK_EQ(fake::delivered(1), packets);
  // At most two rounds of both ends, memory and queue pairs.
  CHECK(fake::storedKeys() - before <= 12);
}

TEST(shift_keeps_a_queue_until_its_events_are_acknowledged) {
  Host host("a0");
  Host other("b0");
  ibv_comp_channel* channel = ibv_create_comp_channel(host.context);
  {
    End a(host, channel);
    End b(other);
    connectQp(a.qp, b.qp, other.gid, false);
    connectQp(b.qp, a.qp, host.gid, false);
    ibv_req_notify_cq(a.cq, 0);
    b.receive(1);
    a.send(1);
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    CHECK_EQ(ibv_get_cq_event(channel, &cq, &context), 0);
    CHECK_EQ(cq, a.cq);
    ibv_destroy_qp(a.qp);
    a.qp = nullptr;
    std::atomic<bool> isGone{false};
    std::thread destroyer([&] {
      ibv_destroy_cq(cq);
      isGone = true;
    });
    std::this_thread::sleep_for(50ms);
    const bool wasEarly = isGone;
    ibv_ack_cq_events(cq, 1);
    destroyer.join();
    a.cq = ibv_create_cq(host.context, 1, nullptr, channel, 0);
    CHECK(!wasEarly);
  }
  CHECK_EQ(ibv_destroy_comp_channel(channel), 0);
}

// ---- Many threads ----

class Party;

// One direction and its acknowledgement. Written by the poster and the poller
// of its group, read by those of the peer.
struct Stream {
  uint64_t id = 0;
  bool writes = false;
  Stream* peer = nullptr;
  ibv_qp* qp = nullptr;
  std::vector<uint8_t> out = std::vector<uint8_t>(kSlots * kSlotBytes);
  std::vector<uint8_t> in = std::vector<uint8_t>(kSlots * kSlotBytes);
  ibv_mr* outMr = nullptr;
  ibv_mr* inMr = nullptr;
  std::atomic<uint64_t> posted{0};
  std::atomic<uint64_t> completed{0};
  std::atomic<uint64_t> received{0};
  std::atomic<uint64_t> last{UINT64_MAX};

  uint32_t lengthOf(uint64_t number) const {
    return number % 5 == 4
        ? kInlineBytes
        : 1 + static_cast<uint32_t>(mixBits(number + id) % kSlotBytes);
  }
  static uint8_t byteOf(uint64_t id, uint64_t number, uint32_t index) {
    return static_cast<uint8_t>(mixBits(id * 1000003 + number) + index * 7);
  }
};

struct Failures {
  std::mutex mutex;
  std::string first;
  std::atomic<bool> isStopping{false};

  void note(const std::string& what) {
    const std::lock_guard guard(mutex);
    if (first.empty()) {
      first = what;
    }
    isStopping = true;
  }
};

// A completion queue with two queue pairs, a thread that posts and one that
// polls.
class Group {
 public:
  Group(Host& host, Failures& failures, bool usesEvents)
      : failures_(failures),
        channel_(usesEvents ? ibv_create_comp_channel(host.context) : nullptr),
        cq_(ibv_create_cq(host.context, 256, nullptr, channel_, 0)) {
    for (Stream& stream : streams) {
      stream.qp = makeQp(host, cq_);
      stream.outMr = ibv_reg_mr(
          host.pd, stream.out.data(), stream.out.size(), kLocalWrite);
      stream.inMr =
          ibv_reg_mr(host.pd, stream.in.data(), stream.in.size(), kRemoteWrite);
    }
  }
  ~Group() {
    for (Stream& stream : streams) {
      ibv_destroy_qp(stream.qp);
      ibv_dereg_mr(stream.outMr);
      ibv_dereg_mr(stream.inMr);
    }
    ibv_destroy_cq(cq_);
    if (channel_ != nullptr) {
      ibv_destroy_comp_channel(channel_);
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void start() {
    for (Stream& stream : streams) {
      for (uint64_t i = 0; i < kSlots; ++i) {
        postReceive(stream, i);
      }
    }
    if (channel_ != nullptr) {
      ibv_req_notify_cq(cq_, 0);
    }
    threads_.emplace_back([this] { post(); });
    threads_.emplace_back([this] { poll(); });
  }
  void join() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  std::array<Stream, 2> streams;

 private:
  void post() {
    bool isDone = false;
    while (!isDone) {
      isDone = true;
      for (Stream& stream : streams) {
        if (stream.last != UINT64_MAX) {
          continue;
        }
        const uint64_t number = stream.posted;
        // The last request is a signaled one.
        if (failures_.isStopping && number % 4 == 0) {
          stream.last = number;
          continue;
        }
        isDone = false;
        if (number < stream.completed + kSlots &&
            number < stream.peer->received + kSlots) {
          postOne(stream, number);
          ++stream.posted;
        }
      }
      std::this_thread::yield();
    }
  }

  void postOne(Stream& stream, uint64_t number) {
    const uint32_t length = stream.lengthOf(number);
    uint8_t* bytes = stream.out.data() + number % kSlots * kSlotBytes;
    for (uint32_t i = 0; i < length; ++i) {
      bytes[i] = Stream::byteOf(stream.id, number, i);
    }
    const uint32_t half = length / 2;
    ibv_sge pieces[2] = {
        {reinterpret_cast<uint64_t>(bytes), half, stream.outMr->lkey},
        {reinterpret_cast<uint64_t>(bytes) + half,
         length - half,
         stream.outMr->lkey}};
    ibv_send_wr wanted{};
    wanted.wr_id = number;
    wanted.sg_list = pieces;
    wanted.num_sge = 2;
    wanted.opcode = stream.writes ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
    const unsigned signal = number % 4 == 3 ? unsigned{IBV_SEND_SIGNALED} : 0U;
    const unsigned inlined =
        length <= kInlineBytes ? unsigned{IBV_SEND_INLINE} : 0U;
    wanted.send_flags = inlined | (stream.writes ? 0U : signal);
    ibv_send_wr told{};
    if (stream.writes) {
      wanted.wr.rdma = {
          reinterpret_cast<uint64_t>(
              stream.peer->in.data() + number % kSlots * kSlotBytes),
          stream.peer->inMr->rkey};
      told.wr_id = number;
      told.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      told.imm_data = static_cast<uint32_t>(number);
      told.send_flags = signal;
      told.wr.rdma = wanted.wr.rdma;
      wanted.next = &told;
    }
    ibv_send_wr* bad = nullptr;
    if (ibv_post_send(stream.qp, &wanted, &bad) != 0) {
      failures_.note("post_send");
    }
    if (inlined != 0) {
      std::memset(bytes, 0, length);
    }
  }

  void postReceive(Stream& stream, uint64_t slot) {
    ibv_sge piece{
        reinterpret_cast<uint64_t>(stream.in.data() + slot * kSlotBytes),
        kSlotBytes,
        stream.inMr->lkey};
    ibv_recv_wr wanted{slot, nullptr, &piece, 1};
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(stream.qp, &wanted, &bad) != 0) {
      failures_.note("post_recv");
    }
  }

  bool isDone() const {
    for (const Stream& stream : streams) {
      if (stream.completed != stream.last ||
          stream.received != stream.peer->last) {
        return false;
      }
    }
    return true;
  }

  void poll() {
    const auto limit = std::chrono::steady_clock::now() + 6 * kLimit;
    bool hasEvent = false;
    while (!isDone()) {
      if (std::chrono::steady_clock::now() > limit) {
        failures_.note("a stream does not end");
        return;
      }
      hasEvent = hasEvent || (channel_ != nullptr && takeEvent(20));
      const bool hasTaken = takeAll();
      // An armed queue tells of each completion that comes after the last poll.
      const bool isAwaited = channel_ != nullptr && hasTaken && !hasEvent;
      hasEvent = isAwaited && takeEvent(2000);
      if (isAwaited && !hasEvent) {
        failures_.note("an event is missing");
      }
      if (!hasTaken) {
        std::this_thread::yield();
      }
    }
  }

  bool takeAll() {
    ibv_wc completions[4];
    bool hasTaken = false;
    while (const int got = ibv_poll_cq(cq_, 4, completions)) {
      for (int i = 0; i < got; ++i) {
        take(completions[i]);
      }
      hasTaken = true;
    }
    return hasTaken;
  }

  bool takeEvent(int limitMs) {
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (::poll(&waiting, 1, limitMs) != 1) {
      return false;
    }
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(channel_, &cq, &context) != 0) {
      failures_.note("get_cq_event");
      return false;
    }
    ibv_ack_cq_events(cq, 1);
    ibv_req_notify_cq(cq, 0);
    return true;
  }

  void take(const ibv_wc& completion) {
    Stream& stream =
        completion.qp_num == streams[0].qp->qp_num ? streams[0] : streams[1];
    if (completion.status != IBV_WC_SUCCESS) {
      failures_.note("status " + std::to_string(completion.status));
    } else if ((completion.opcode & IBV_WC_RECV) != 0) {
      arrived(stream, completion);
    } else if (
        completion.wr_id < stream.completed || completion.wr_id % 4 != 3) {
      failures_.note("order of completions");
    } else {
      stream.completed = completion.wr_id + 1;
    }
  }

  void arrived(Stream& stream, const ibv_wc& completion) {
    const uint64_t number = stream.received;
    const uint8_t* bytes = stream.in.data() + number % kSlots * kSlotBytes;
    if (completion.wr_id != number % kSlots ||
        (stream.writes && completion.imm_data != number)) {
      failures_.note("order of receives");
    }
    const uint32_t length = stream.peer->lengthOf(number);
    for (uint32_t i = 0; i < length; ++i) {
      if (bytes[i] != Stream::byteOf(stream.peer->id, number, i)) {
        failures_.note("contents of " + std::to_string(number));
        break;
      }
    }
    postReceive(stream, completion.wr_id);
    ++stream.received;
  }

  Failures& failures_;
  ibv_comp_channel* channel_;
  ibv_cq* cq_;
  std::vector<std::thread> threads_;
};

class Party {
 public:
  Party() {
    for (size_t i = 0; i < kGroups; ++i) {
      a_.push_back(std::make_unique<Group>(hostA_, failures, i == 0));
      b_.push_back(std::make_unique<Group>(hostB_, failures, i == 0));
      for (size_t k = 0; k < 2; ++k) {
        Stream& a = a_[i]->streams[k];
        Stream& b = b_[i]->streams[k];
        a.id = i * 4 + k * 2;
        b.id = a.id + 1;
        a.writes = b.writes = k == 1;
        a.peer = &b;
        b.peer = &a;
        connectQp(a.qp, b.qp, hostB_.gid, a.writes);
        connectQp(b.qp, a.qp, hostA_.gid, b.writes);
      }
    }
    eventually("the backups are connected", areReady);
    for (const auto* groups : {&a_, &b_}) {
      for (const auto& group : *groups) {
        group->start();
      }
    }
  }

  // Waits until each stream has moved on by so many messages.
  void progress(uint64_t messages) {
    std::vector<uint64_t> goals;
    for (const Stream* stream : all()) {
      goals.push_back(stream->received + messages);
    }
    eventually("progress of all streams", [&] {
      size_t i = 0;
      for (const Stream* stream : all()) {
        if (stream->received < goals[i++] && !failures.isStopping) {
          return false;
        }
      }
      return true;
    });
    check();
  }
  void check() {
    const std::lock_guard guard(failures.mutex);
    CHECK_EQ(failures.first, std::string());
  }
  void join() {
    for (auto* groups : {&a_, &b_}) {
      for (const auto& group : *groups) {
        group->join();
      }
    }
    check();
  }
  Host& host() {
    return hostA_;
  }
  ibv_qp* anyQp() {
    return a_[0]->streams[0].qp;
  }

  Failures failures;

 private:
  static constexpr size_t kGroups = 4;

  std::vector<Stream*> all() {
    std::vector<Stream*> found;
    for (auto* groups : {&a_, &b_}) {
      for (const auto& group : *groups) {
        found.push_back(&group->streams[0]);
        found.push_back(&group->streams[1]);
      }
    }
    return found;
  }

  Host hostA_{"a0"};
  Host hostB_{"b0"};
  std::vector<std::unique_ptr<Group>> a_;
  std::vector<std::unique_ptr<Group>> b_;
};

// Control verbs beside the traffic.
void churn(Party& party) {
  while (!party.failures.isStopping) {
    End other(party.host());
    ibv_qp_attr attributes{};
    ibv_qp_init_attr ignored{};
    if (ibv_query_qp(party.anyQp(), &attributes, IBV_QP_STATE, &ignored) != 0 ||
        attributes.qp_state != IBV_QPS_RTS) {
      party.failures.note("state of a queue pair");
    }
    std::this_thread::sleep_for(3ms);
  }
}

TEST(shift_carries_many_threads_through_faults) {
  {
    Party party;
    std::thread control([&party] { churn(party); });
    try {
      party.progress(20);
      for (const Fault fault :
           {Fault::kLoss,
            Fault::kPorts,
            Fault::kAcknowledgements,
            Fault::kSilence}) {
        fake::setFault(0, fault);
        party.progress(20);
        fake::setFault(0, Fault::kNone);
        uint64_t before = 0;
        eventually("the return to the default path", [&] {
          before = fake::delivered(0);
          party.progress(1);
          return fake::delivered(0) - before > 16;
        });
        eventually("the backups are connected again", [&] {
          return areReady() || party.failures.isStopping;
        });
      }
    } catch (const test::Failure& failure) {
      party.failures.note(failure.what());
    }
    fake::setFault(0, Fault::kNone);
    party.failures.isStopping = true;
    control.join();
    party.join();
  }
  const std::lock_guard guard(runtime().mutex);
  CHECK(runtime().qps.empty() && runtime().cqs.empty());
  CHECK(runtime().mrs.empty() && runtime().devices.empty());
  CHECK_EQ(runtime().qpByHandle.used(), 0U);
  CHECK_EQ(runtime().qpByNumber.used(), 0U);
  CHECK_EQ(runtime().cqByHandle.used(), 0U);
}

} // namespace
} // namespace resilient::shift
