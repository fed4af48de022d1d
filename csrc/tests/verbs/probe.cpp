// Shows how a queue pair notices faults: a program for the guests of a verbs
// lab.
//
//   RANK=0 MASTER_ADDR=... MASTER_PORT=... verbs_probe DEVICE [name=value...]
//   RANK=1 ...
//
// Rank 1 writes numbers 1, 2, 3... into memory of rank 0 over a reliable
// connection, one every interval_us with at most `depth` of them outstanding.
// Both print what happens as rows of JSON:
//
//   connected  mtu
//   progress   received: the last number that has come to rank 0; completed,
//              latency_s: the last one that has completed at rank 1, and how
//              long that took
//   failed     status, after_s: the first request that failed, and the time
//              since it was posted; the others of the queue are not reported
//   event      type, of the own port
//   error      text; the program ends
//
// The line "reconnect" on standard input of both makes new queue pairs, after
// which the numbers go on; "end", or the end of the input, ends the program.
// The control connection goes to MASTER_ADDR; no fault should concern it.

#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kPsnMask = 0xffffff;
constexpr auto kProgressEvery = std::chrono::milliseconds(50);
constexpr auto kConnectLimit = std::chrono::seconds(30);
constexpr int kWaitMs = 1;

struct Options {
  std::map<std::string, uint64_t> values = {
      {"timeout", 14}, // of an acknowledgement: 4.096 us x 2^timeout
      {"retries", 2},
      {"size", 4096},
      {"depth", 16},
      {"interval_us", 1000}};

  uint64_t operator[](const std::string& name) const {
    return values.at(name);
  }
};

// The message of one end to the other; both run on one machine.
struct Endpoint {
  ibv_gid gid;
  uint64_t address;
  uint32_t queuePair;
  uint32_t packetNumber;
  uint32_t key;
  uint32_t mtu;
};

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what);
}

void check(bool good, const char* what) {
  if (!good) {
    fail(std::string(what) + ": " + std::strerror(errno));
  }
}

// For the verbs that return an error number.
void checkVerb(int error, const char* what) {
  if (error != 0) {
    fail(std::string(what) + ": " + std::strerror(error));
  }
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    fail(std::string("expected the variable ") + name);
  }
  return value;
}

void print(const std::string& fields) {
  std::printf("{%s}\n", fields.c_str());
  std::fflush(stdout);
}

std::string quoted(const char* name, const std::string& value) {
  return std::string("\"") + name + "\": \"" + value + "\"";
}

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The connection over which the ends tell each other their queue pairs.
class Control {
 public:
  explicit Control(bool listens) {
    const std::string port = environment("MASTER_PORT");
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_family = AF_INET;
    addrinfo* found = nullptr;
    if (getaddrinfo(
            environment("MASTER_ADDR").c_str(), port.c_str(), &hints, &found) !=
        0) {
      fail("MASTER_ADDR is not an address");
    }
    const sockaddr address = *found->ai_addr;
    freeaddrinfo(found);
    listens ? accept(address) : connect(address);
  }
  ~Control() {
    close(socket_);
  }
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  Endpoint exchange(const Endpoint& own) const {
    check(
        send(socket_, &own, sizeof(own), MSG_NOSIGNAL) == sizeof(own), "send");
    Endpoint other;
    check(
        recv(socket_, &other, sizeof(other), MSG_WAITALL) == sizeof(other),
        "receive the other end's queue pair");
    return other;
  }

 private:
  void accept(const sockaddr& address) {
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    check(bind(server, &address, sizeof(address)) == 0, "bind");
    check(listen(server, 1) == 0, "listen");
    socket_ = ::accept(server, nullptr, nullptr);
    check(socket_ >= 0, "accept");
    close(server);
  }

  void connect(const sockaddr& address) {
    const auto limit = Clock::now() + kConnectLimit;
    for (;;) {
      socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(socket_, &address, sizeof(address)) == 0) {
        return;
      }
      check(Clock::now() < limit, "connect");
      close(socket_);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  int socket_ = -1;
};

// A device with one registered region and one queue pair.
class Probe {
 public:
  Probe(const std::string& device, const Options& options, bool writes)
      : options_(options),
        writes_(writes),
        memory_(options["size"] * options["depth"]) {
    open(device);
    domain_ = ibv_alloc_pd(context_);
    check(domain_ != nullptr, "ibv_alloc_pd");
    region_ = ibv_reg_mr(
        domain_,
        memory_.data(),
        memory_.size(),
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    check(region_ != nullptr, "ibv_reg_mr");
    const int entries = static_cast<int>(options["depth"]) + 1;
    queue_ = ibv_create_cq(context_, entries, nullptr, nullptr, 0);
    check(queue_ != nullptr, "ibv_create_cq");
  }

  void connect(const Control& control) {
    if (pair_ != nullptr) {
      checkVerb(ibv_destroy_qp(pair_), "ibv_destroy_qp");
      ibv_wc done;
      while (ibv_poll_cq(queue_, 1, &done) > 0) {
      }
      posted_.clear();
      failed_ = false;
    }
    ibv_qp_init_attr initial{};
    initial.qp_type = IBV_QPT_RC;
    initial.send_cq = queue_;
    initial.recv_cq = queue_;
    initial.cap.max_send_wr = static_cast<uint32_t>(options_["depth"]);
    initial.cap.max_recv_wr = 1;
    initial.cap.max_send_sge = 1;
    initial.cap.max_recv_sge = 1;
    pair_ = ibv_create_qp(domain_, &initial);
    check(pair_ != nullptr, "ibv_create_qp");

    ibv_port_attr port;
    checkVerb(ibv_query_port(context_, kPort, &port), "ibv_query_port");
    const auto [gid, index] = findGid();
    Endpoint own{};
    own.gid = gid;
    own.address = reinterpret_cast<uintptr_t>(memory_.data());
    own.queuePair = pair_->qp_num;
    own.packetNumber =
        static_cast<uint32_t>(Clock::now().time_since_epoch().count()) &
        kPsnMask;
    own.key = region_->rkey;
    own.mtu = port.active_mtu;
    other_ = control.exchange(own);
    makeReady(own, index);
    // Nothing may be written before the other end can receive it.
    control.exchange(own);
    print(
        quoted("kind", "connected") +
        ", \"mtu\": " + std::to_string(128u << std::min(own.mtu, other_.mtu)));
  }

  // Writes the next number if it is time and there is room.
  void write() {
    const auto now = Clock::now();
    if (!writes_ || failed_ || now < nextPost_ ||
        posted_.size() >= options_["depth"]) {
      return;
    }
    nextPost_ = now + std::chrono::microseconds(options_["interval_us"]);
    ++number_;
    // A request that is repeated must still find its own number.
    uint8_t* source =
        memory_.data() + number_ % options_["depth"] * options_["size"];
    std::memcpy(source, &number_, sizeof(number_));
    ibv_sge piece{};
    piece.addr = reinterpret_cast<uintptr_t>(source);
    piece.length = static_cast<uint32_t>(options_["size"]);
    piece.lkey = region_->lkey;
    ibv_send_wr request{};
    request.wr_id = number_;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = other_.address;
    request.wr.rdma.rkey = other_.key;
    ibv_send_wr* bad = nullptr;
    checkVerb(ibv_post_send(pair_, &request, &bad), "ibv_post_send");
    posted_[number_] = now;
  }

  void poll() {
    ibv_wc done[16];
    const int count = ibv_poll_cq(queue_, 16, done);
    check(count >= 0, "ibv_poll_cq");
    for (int i = 0; i < count; ++i) {
      if (done[i].status == IBV_WC_SUCCESS) {
        completed_ = done[i].wr_id;
        latencyS_ = secondsSince(posted_[completed_]);
      } else if (!failed_) {
        failed_ = true;
        print(
            quoted("kind", "failed") + ", " +
            quoted("status", ibv_wc_status_str(done[i].status)) +
            ", \"number\": " + std::to_string(done[i].wr_id) +
            ", \"after_s\": " +
            std::to_string(secondsSince(posted_[done[i].wr_id])));
      }
      posted_.erase(done[i].wr_id);
    }
    if (Clock::now() >= nextProgress_) {
      nextProgress_ = Clock::now() + kProgressEvery;
      uint64_t received = 0;
      std::memcpy(&received, memory_.data(), sizeof(received));
      print(
          quoted("kind", "progress") + ", " +
          (writes_ ? "\"completed\": " + std::to_string(completed_) +
                   ", \"latency_s\": " + std::to_string(latencyS_)
                   : "\"received\": " + std::to_string(received)));
    }
  }

  void readEvents() {
    ibv_async_event event;
    while (ibv_get_async_event(context_, &event) == 0) {
      print(
          quoted("kind", "event") + ", " +
          quoted("type", ibv_event_type_str(event.event_type)));
      ibv_ack_async_event(&event);
    }
  }

  int eventDescriptor() const {
    return context_->async_fd;
  }

 private:
  static constexpr uint8_t kPort = 1;

  void open(const std::string& device) {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    for (int i = 0; i < count; ++i) {
      if (device == ibv_get_device_name(list[i])) {
        context_ = ibv_open_device(list[i]);
      }
    }
    ibv_free_device_list(list);
    if (context_ == nullptr) {
      fail("there is no RDMA device " + device);
    }
    const int flags = fcntl(context_->async_fd, F_GETFL);
    fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK);
  }

  // The GID of RoCE v2 with an IPv4 address. Its index may change.
  std::pair<ibv_gid, uint32_t> findGid() const {
    ibv_gid_entry entries[64];
    const ssize_t count = ibv_query_gid_table(context_, entries, 64, 0);
    for (ssize_t i = 0; i < count; ++i) {
      const uint8_t* raw = entries[i].gid.raw;
      if (entries[i].gid_type == IBV_GID_TYPE_ROCE_V2 && raw[0] == 0 &&
          raw[10] == 0xff && raw[11] == 0xff) {
        return {entries[i].gid, entries[i].gid_index};
      }
    }
    fail("the device has no IPv4 address");
  }

  void makeReady(const Endpoint& own, uint32_t gidIndex) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = kPort;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    checkVerb(
        ibv_modify_qp(
            pair_,
            &attr,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                IBV_QP_ACCESS_FLAGS),
        "ibv_modify_qp to INIT");
    attr = ibv_qp_attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = static_cast<ibv_mtu>(std::min(own.mtu, other_.mtu));
    attr.dest_qp_num = other_.queuePair;
    attr.rq_psn = other_.packetNumber;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = kPort;
    attr.ah_attr.grh.dgid = other_.gid;
    attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(gidIndex);
    attr.ah_attr.grh.hop_limit = 64;
    checkVerb(
        ibv_modify_qp(
            pair_,
            &attr,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                IBV_QP_MIN_RNR_TIMER),
        "ibv_modify_qp to RTR");
    attr = ibv_qp_attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = own.packetNumber;
    attr.timeout = static_cast<uint8_t>(options_["timeout"]);
    attr.retry_cnt = static_cast<uint8_t>(options_["retries"]);
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    checkVerb(
        ibv_modify_qp(
            pair_,
            &attr,
            IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC),
        "ibv_modify_qp to RTS");
  }

  const Options options_;
  const bool writes_;
  std::vector<uint8_t> memory_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_mr* region_ = nullptr;
  ibv_cq* queue_ = nullptr;
  ibv_qp* pair_ = nullptr;
  Endpoint other_{};
  uint64_t number_ = 0;
  uint64_t completed_ = 0;
  double latencyS_ = 0;
  bool failed_ = false;
  std::map<uint64_t, Clock::time_point> posted_;
  Clock::time_point nextPost_{};
  Clock::time_point nextProgress_{};
};

Options parse(int count, char** words) {
  Options options;
  for (int i = 2; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    const auto found = options.values.find(word.substr(0, equals));
    if (equals == std::string::npos || found == options.values.end()) {
      fail("expected name=value, got " + word);
    }
    found->second = std::stoull(word.substr(equals + 1));
  }
  return options;
}

void run(int count, char** words) {
  if (count < 2) {
    fail("expected a device");
  }
  const bool writes = environment("RANK") != "0";
  const Control control(!writes);
  Probe probe(words[1], parse(count, words), writes);
  probe.connect(control);
  std::string input;
  for (;;) {
    pollfd fds[] = {{0, POLLIN, 0}, {probe.eventDescriptor(), POLLIN, 0}};
    ::poll(fds, 2, kWaitMs);
    probe.write();
    probe.poll();
    probe.readEvents();
    if (fds[0].revents == 0) {
      continue;
    }
    char text[256];
    const ssize_t bytes = read(0, text, sizeof(text));
    if (bytes <= 0) {
      return;
    }
    input.append(text, static_cast<size_t>(bytes));
    for (size_t end; (end = input.find('\n')) != std::string::npos;) {
      const std::string line = input.substr(0, end);
      input.erase(0, end + 1);
      if (line == "end") {
        return;
      }
      if (line == "reconnect") {
        probe.connect(control);
      }
    }
  }
}

} // namespace

int main(int count, char** words) {
  try {
    run(count, words);
  } catch (const std::exception& error) {
    print(quoted("kind", "error") + ", " + quoted("text", error.what()));
    return 1;
  }
  return 0;
}
