// Sends over real verbs in both directions, through transport/verbs_api.h: a
// program for machines with RDMA devices, such as the guests of a verbs lab.
//
//   verbs_pingpong                         prints the ports
//   RANK=0 MASTER_ADDR=... MASTER_PORT=... verbs_pingpong DEVICE [SENDS
//   [BYTES]] RANK=1 ...
//
// The ranks connect over the first IPv4 address of the device and follow lines
// on standard input, which both must get:
//
//   exchange   SENDS messages of BYTES each way; checks all contents
//   lose       sends until a request fails, which takes a fault
//   fence      rank 0 fences its end and counts what comes back
//   dmabuf     tries to register a file that is no dma-buf; prints the refusal
//   reconnect  new queue pairs
//   end        so does the end of the input
//
// They report in rows of JSON; a row with "error" ends the program.

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "base/syscall.h"
#include "transport/verbs_api.h"

namespace resilient {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kDepth = 32;
constexpr auto kLimit = std::chrono::seconds(60);
// Requests: receives count from 0, sends from here.
constexpr uint64_t kSends = uint64_t{1} << 32;

void check(const Status& status) {
  if (!status.ok()) {
    throw StatusError(status);
  }
}

void require(bool good, const std::string& what) {
  if (!good) {
    throw std::runtime_error(what);
  }
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  }
  return out + '"';
}

void row(const std::string& kind, const std::string& facts = "") {
  std::cout << "{\"kind\": " << quoted(kind)
            << (facts.empty() ? "" : ", " + facts) << "}" << std::endl;
}

std::string gidText(const VerbsPort::Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
  return text.data();
}

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  require(value != nullptr, std::string(name) + " is not set");
  return value;
}

// A connection between the ranks, for what they must know of one another.
FileDescriptor connectRanks(bool isFirst) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  require(
      ::getaddrinfo(
          environment("MASTER_ADDR").c_str(),
          environment("MASTER_PORT").c_str(),
          &hints,
          &found) == 0,
      "MASTER_ADDR is unknown");
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(
      found, &::freeaddrinfo);
  const auto limit = Clock::now() + kLimit;
  for (;;) {
    FileDescriptor made(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (isFirst) {
      const int yes = 1;
      ::setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      checkSyscall(
          "bind", ::bind(made.get(), found->ai_addr, found->ai_addrlen));
      checkSyscall("listen", ::listen(made.get(), 1));
      return FileDescriptor(
          checkSyscall("accept", ::accept(made.get(), nullptr, nullptr)));
    }
    if (::connect(made.get(), found->ai_addr, found->ai_addrlen) == 0) {
      return made;
    }
    require(Clock::now() < limit, "rank 0 does not listen");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

class Rank {
 public:
  Rank(VerbsApi& api, const std::string& device, uint64_t sends, size_t bytes)
      : isFirst_(environment("RANK") == "0"),
        sends_(sends),
        bytes_(bytes),
        control_(connectRanks(isFirst_)),
        buffers_(2 * kDepth * bytes) {
    std::vector<VerbsPort> ports;
    check(api.ports(ports));
    for (const VerbsPort& each : ports) {
      if (each.device == device && port_.device.empty() &&
          gidText(each.gid).starts_with("::ffff:")) {
        port_ = each;
      }
    }
    require(!port_.device.empty(), device + " has no IPv4 address");
    check(api.open(device, device_));
    std::shared_ptr<VerbsDevice> again;
    check(api.open(device, again));
    require(again == device_, "the device was opened twice");
    check(device_->registerMemory(buffers_, false, memory_));
    connect();
  }

  // Soft-RoCE knows no dma-buf, and says so.
  void tryDmabuf() {
    const FileDescriptor file(::memfd_create("not-a-dmabuf", MFD_CLOEXEC));
    std::unique_ptr<VerbsMemory> memory;
    const Status status =
        device_->registerDmabuf(file.get(), 0, buffer(0), true, memory);
    row("dmabuf", "\"why\": " + quoted(status.message()));
  }

  void connect();
  void exchange();
  void lose();
  void fence();

 private:
  // Both have come this far.
  void meet() {
    char mark = 'm';
    require(::send(control_.get(), &mark, 1, MSG_NOSIGNAL) == 1, "peer left");
    require(::recv(control_.get(), &mark, 1, MSG_WAITALL) == 1, "peer left");
  }
  std::span<std::byte> buffer(uint64_t index) {
    return std::span(buffers_).subspan(index * bytes_, bytes_);
  }
  std::span<std::byte> receiveBuffer(uint64_t number) {
    return buffer(number % kDepth);
  }
  std::span<std::byte> sendBuffer(uint64_t number) {
    return buffer(kDepth + number % kDepth);
  }
  static uint64_t word(bool ofFirst, uint64_t number, size_t index) {
    return mixBits((ofFirst ? 1ULL << 62 : 0) ^ number << 32 ^ index);
  }
  void postReceive(uint64_t number) {
    check(queuePair_->postReceive(number, *memory_, receiveBuffer(number)));
  }
  void postSend(uint64_t number) {
    const std::span<std::byte> into = sendBuffer(number);
    for (size_t i = 0; i + 8 <= into.size(); i += 8) {
      const uint64_t value = word(isFirst_, number, i);
      std::memcpy(into.data() + i, &value, 8);
    }
    check(queuePair_->postSend(kSends + number, *memory_, into));
  }
  size_t wrongWords(uint64_t number) {
    const std::span<const std::byte> from = receiveBuffer(number);
    size_t wrong = 0;
    for (size_t i = 0; i + 8 <= from.size(); i += 8) {
      const uint64_t value = word(!isFirst_, number, i);
      wrong += std::memcmp(from.data() + i, &value, 8) != 0;
    }
    return wrong;
  }
  // Some completions; sleeps until one comes.
  std::vector<VerbsCompletion> wait();

  const bool isFirst_;
  const uint64_t sends_;
  const size_t bytes_;
  FileDescriptor control_;
  std::vector<std::byte> buffers_;
  VerbsPort port_;
  std::shared_ptr<VerbsDevice> device_;
  std::unique_ptr<VerbsMemory> memory_;
  std::unique_ptr<VerbsQueuePair> queuePair_;
  uint64_t sleeps_ = 0;
};

void Rank::connect() {
  queuePair_.reset();
  check(device_->makeQueuePair(port_, {.depth = kDepth}, queuePair_));
  for (uint64_t i = 0; i < kDepth; ++i) {
    postReceive(i);
  }
  const VerbsAddress own = queuePair_->address();
  VerbsAddress remote;
  require(
      ::send(control_.get(), &own, sizeof(own), MSG_NOSIGNAL) == sizeof(own),
      "peer left");
  require(
      ::recv(control_.get(), &remote, sizeof(remote), MSG_WAITALL) ==
          sizeof(remote),
      "peer left");
  const Status status = queuePair_->connect(remote);
  meet();
  if (!status.ok()) {
    row("refused", "\"why\": " + quoted(status.message()));
    return;
  }
  row("connected",
      "\"own\": " + quoted(gidText(own.gid)) +
          ", \"remote\": " + quoted(gidText(remote.gid)) +
          ", \"mtu\": " + std::to_string(own.mtuBytes));
}

std::vector<VerbsCompletion> Rank::wait() {
  std::vector<VerbsCompletion> found;
  const auto limit = Clock::now() + kLimit;
  for (;;) {
    check(queuePair_->poll(found, 2 * kDepth));
    if (!found.empty()) {
      return found;
    }
    check(queuePair_->arm());
    check(queuePair_->poll(found, 2 * kDepth));
    if (!found.empty()) {
      return found;
    }
    require(Clock::now() < limit, "no completion for too long");
    pollfd asleep{queuePair_->fd(), POLLIN, 0};
    ++sleeps_;
    if (::poll(&asleep, 1, 1000) == 1) {
      queuePair_->takeNotifications();
    }
  }
}

void Rank::exchange() {
  const auto start = Clock::now();
  sleeps_ = 0;
  uint64_t posted = 0, sent = 0, received = 0, wrong = 0;
  while (sent < sends_ || received < sends_) {
    while (posted < std::min<uint64_t>(sends_, sent + kDepth)) {
      postSend(posted++);
    }
    for (const VerbsCompletion& each : wait()) {
      require(each.result == VerbsCompletion::Result::kOk, each.why);
      require(each.received == (each.request < kSends), "wrong kind");
      if (!each.received) {
        require(each.request == kSends + sent, "a send is out of order");
        ++sent;
        continue;
      }
      require(each.request == received % kDepth, "a receive is out of order");
      require(each.bytes == bytes_, "wrong length");
      wrong += wrongWords(received);
      postReceive(received % kDepth);
      ++received;
    }
  }
  row("exchanged",
      "\"sends\": " + std::to_string(sent) +
          ", \"received\": " + std::to_string(received) +
          ", \"wrong_words\": " + std::to_string(wrong) +
          ", \"sleeps\": " + std::to_string(sleeps_) +
          ", \"s\": " + std::to_string(secondsSince(start)));
  // The receives that are posted now are for number 0 and up again.
  meet();
  connect();
}

// One request at a time. Receives run out at the far end, which is no failure.
void Rank::lose() {
  row("losing");
  for (uint64_t number = 0;; ++number) {
    const auto start = Clock::now();
    postSend(number);
    for (bool isDone = false; !isDone;) {
      for (const VerbsCompletion& each : wait()) {
        if (each.result != VerbsCompletion::Result::kOk) {
          row("failed",
              "\"number\": " + std::to_string(number) + ", \"is_send\": " +
                  (each.request == kSends + number ? "true" : "false") +
                  ", \"is_flush\": " +
                  (each.result == VerbsCompletion::Result::kFlushed ? "true"
                                                                    : "false") +
                  ", \"why\": " + quoted(each.why) +
                  ", \"after_s\": " + std::to_string(secondsSince(start)));
          return;
        }
        if (each.received) {
          postReceive(each.request);
        } else {
          isDone = true;
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Rank 1 then sends to an end that drops everything.
void Rank::fence() {
  const auto start = Clock::now();
  if (isFirst_) {
    check(queuePair_->fence());
  }
  meet();
  if (!isFirst_) {
    postSend(0);
  }
  uint64_t flushed = 0, failed = 0;
  std::string why;
  // The receives, and rank 1's send, which fails; its receives follow.
  const uint64_t posted = kDepth + (isFirst_ ? 0 : 1);
  while (flushed + failed < posted) {
    for (const VerbsCompletion& each : wait()) {
      require(each.result != VerbsCompletion::Result::kOk, "nothing may pass");
      const bool isFlush = each.result == VerbsCompletion::Result::kFlushed;
      flushed += isFlush;
      failed += !isFlush;
      why = isFlush && !why.empty() ? why : each.why;
    }
  }
  row("fenced",
      "\"flushed\": " + std::to_string(flushed) + ", \"failed\": " +
          std::to_string(failed) + ", \"why\": " + quoted(why) +
          ", \"s\": " + std::to_string(secondsSince(start)));
}

void printPorts(VerbsApi& api) {
  std::vector<VerbsPort> ports;
  check(api.ports(ports));
  for (const VerbsPort& each : ports) {
    row("port",
        "\"device\": " + quoted(each.device) +
            ", \"port\": " + std::to_string(each.port) +
            ", \"index\": " + std::to_string(each.gidIndex) +
            ", \"gid\": " + quoted(gidText(each.gid)) +
            ", \"interface\": " + std::to_string(each.interfaceIndex) +
            ", \"mtu\": " + std::to_string(each.mtuBytes) +
            ", \"active\": " + (each.active ? "true" : "false"));
  }
  row("ports", "\"count\": " + std::to_string(ports.size()));
}

void runRank(VerbsApi& api, int count, char** arguments) {
  const uint64_t sends = count > 2 ? std::stoull(arguments[2]) : 1000;
  const size_t bytes = count > 3 ? std::stoull(arguments[3]) : size_t{64} << 10;
  Rank rank(api, arguments[1], sends, bytes);
  for (std::string line; std::getline(std::cin, line) && line != "end";) {
    if (line == "exchange") {
      rank.exchange();
    } else if (line == "lose") {
      rank.lose();
    } else if (line == "fence") {
      rank.fence();
    } else if (line == "dmabuf") {
      rank.tryDmabuf();
    } else if (line == "reconnect") {
      rank.connect();
    } else {
      throw std::runtime_error("unknown command: " + line);
    }
  }
}

} // namespace
} // namespace resilient

int main(int count, char** arguments) {
  using namespace resilient;
  try {
    std::string why;
    VerbsApi* const api = systemVerbs(why);
    require(api != nullptr, why);
    if (count == 1) {
      printPorts(*api);
    } else {
      runRank(*api, count, arguments);
    }
  } catch (const std::exception& error) {
    row("error", "\"error\": " + quoted(error.what()));
    return 1;
  }
  return 0;
}
