#include "lab/carrier.h"

#include <linux/if_tun.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/syscall.h"
#include "lab/emulator.h"

namespace resilient::lab {
namespace {

// Enough to be efficient, few enough that other NICs and timers wait less
// than about 100 us.
constexpr int kReadsPerTurn = 16;
// A message of the owner; its longest sets all pipes of a network.
constexpr size_t kMessageBytesMax = 128 * 1024;

// Markers in epoll's data; NICs are numbered from 0.
constexpr uint64_t kControl = UINT64_MAX;
constexpr uint64_t kOwner = UINT64_MAX - 1;
constexpr uint64_t kTimer = UINT64_MAX - 2;

using Address = std::array<uint8_t, 16>;

struct AddressHash {
  size_t operator()(const Address& address) const {
    uint64_t low;
    std::memcpy(&low, address.data() + 8, 8);
    return mixBits(low);
  }
};

struct Nic {
  FileDescriptor device; // a TUN device or a packet socket
  Link link;
  // Routes and pipes exist within one network.
  size_t network;
  std::unordered_map<size_t, size_t> pipeTo; // by the number of the other NIC
};

// One thread and one epoll set for the devices, the owner and a timer. The
// kernel's clock is read here and handed to the emulator, which has none.
class Carrier {
 public:
  Carrier(int control, int owner)
      : control_(control), emulator_([this](size_t pipe, const Packet& packet) {
          return write(pipe, packet);
        }) {
    epoll_.reset(checkSyscall("epoll_create1", epoll_create1(EPOLL_CLOEXEC)));
    timer_.reset(checkSyscall(
        "timerfd_create",
        timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)));
    watch(control, kControl);
    watch(owner, kOwner);
    watch(timer_.get(), kTimer);
    // Late by the length of another process's time slice is what the delays
    // would be otherwise.
    sched_param priority{};
    priority.sched_priority = 1;
    realTime_ = sched_setscheduler(0, SCHED_RR, &priority) == 0;
    mlockall(MCL_CURRENT);
  }

  // Time goes first in each turn: advance() runs before packets are read, so
  // packets that are due leave before new ones enter. Devices are
  // level-triggered, and a turn reads a few packets of each, so a busy one does
  // not starve the others.
  void run() {
    std::vector<epoll_event> events(64);
    for (;;) {
      arm();
      const int count = checkSyscall("epoll_wait", retryInterrupted([&] {
                                       return epoll_wait(
                                           epoll_.get(),
                                           events.data(),
                                           static_cast<int>(events.size()),
                                           -1);
                                     }));
      emulator_.advance(now());
      for (int i = 0; i < count; ++i) {
        const uint64_t what = events[i].data.u64;
        if (what == kOwner) {
          return;
        }
        if (what == kControl) {
          if (!answer()) {
            return;
          }
        } else if (what == kTimer) {
          fired_ = true; // until it is set again, which also clears it
        } else if ((events[i].events & EPOLLERR) != 0) {
          // The host has removed the device. The kernel reports that until we
          // close it.
          nics_[what].device.reset();
        } else {
          readFrom(what);
        }
      }
    }
  }

 private:
  static TimePoint now() {
    return std::chrono::steady_clock::now();
  }

  void watch(int fd, uint64_t what) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = what;
    checkSyscall(
        "epoll_ctl", epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event));
  }

  // A timer that fires too early is left alone: to set one costs more than
  // most of what a turn does. steady_clock is CLOCK_MONOTONIC.
  void arm() {
    const TimePoint next = emulator_.wakeBy();
    if (!fired_ && armed_ <= next) {
      return;
    }
    fired_ = false;
    armed_ = next;
    itimerspec when{};
    if (next != kNever) {
      const int64_t ns = std::max<int64_t>(1, next.time_since_epoch().count());
      when.it_value.tv_sec = ns / 1'000'000'000;
      when.it_value.tv_nsec = ns % 1'000'000'000;
    }
    checkSyscall(
        "timerfd_settime",
        timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr));
  }

  // The pipe of a packet follows from the network of its NIC and its
  // destination. A packet to an address that no NIC has is counted and dropped.
  // A frame for a group of NICs goes to all others of the network.
  void readFrom(size_t nic) {
    for (int i = 0; i < kReadsPerTurn; ++i) {
      const ssize_t bytes =
          ::read(nics_[nic].device.get(), buffer_.data(), buffer_.size());
      if (bytes < 0) {
        return; // nothing more, or the interface is down
      }
      Packet packet(
          {buffer_.data(), static_cast<size_t>(bytes)}, nics_[nic].link);
      if (!packet.valid()) {
        ++unroutable_;
        continue;
      }
      if (packet.isForGroup()) {
        const TimePoint at = now();
        emulator_.advance(at);
        for (const auto& [target, pipe] : nics_[nic].pipeTo) {
          emulator_.offer(at, pipe, packet.copy());
        }
        continue;
      }
      Address address;
      uint8_t raw[16];
      packet.destination(raw);
      std::memcpy(address.data(), raw, 16);
      const auto& routes = routes_[nics_[nic].network];
      const auto target = routes.find(address);
      // Multicast that the hosts' kernels send ends here, too.
      if (target == routes.end()) {
        ++unroutable_;
        continue;
      }
      const auto pipe = nics_[nic].pipeTo.find(target->second);
      if (pipe == nics_[nic].pipeTo.end()) {
        ++unroutable_;
        continue;
      }
      const TimePoint at = now();
      emulator_.advance(at);
      emulator_.offer(at, pipe->second, std::move(packet));
    }
  }

  // A device that is down or removed refuses the packet, which is counted. The
  // lab never waits for a host.
  bool write(size_t pipe, const Packet& packet) {
    const std::span<const uint8_t> bytes = packet.bytes();
    return ::write(
               nics_[targets_[pipe]].device.get(),
               bytes.data(),
               bytes.size()) == static_cast<ssize_t>(bytes.size());
  }

  // False if the owner has closed its end. Lines before a failed one have been
  // done. The owner is trusted, so the checks here only name its mistakes.
  bool answer() {
    std::string text(kMessageBytesMax, '\0');
    alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int))];
    iovec vector{text.data(), text.size()};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = ancillary;
    message.msg_controllen = sizeof(ancillary);
    const ssize_t bytes = retryInterrupted(
        [&] { return recvmsg(control_, &message, MSG_CMSG_CLOEXEC); });
    if (bytes <= 0) {
      return false;
    }
    text.resize(static_cast<size_t>(bytes));
    FileDescriptor fd;
    if (cmsghdr* header = CMSG_FIRSTHDR(&message);
        header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int received;
      std::memcpy(&received, CMSG_DATA(header), sizeof(int));
      fd.reset(received);
    }
    std::string reply = "ok";
    std::istringstream lines(text);
    std::string line;
    try {
      while (std::getline(lines, line)) {
        reply += execute(line, fd);
      }
    } catch (const std::exception& error) {
      reply = "error " + line + ": " + error.what();
    }
    return retryInterrupted([&] {
             return send(control_, reply.data(), reply.size(), MSG_NOSIGNAL);
           }) == static_cast<ssize_t>(reply.size());
  }

  static size_t index(std::istringstream& words, size_t limit) {
    size_t value;
    if (!(words >> value) || value >= limit) {
      throw std::invalid_argument("no such number");
    }
    return value;
  }

  std::string execute(const std::string& line, FileDescriptor& fd) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "nic") {
      addNic(words, fd, Link::kNone);
    } else if (verb == "ethernet") {
      addNic(words, fd, Link::kEthernet);
    } else if (verb == "address") {
      const size_t nic = index(words, nics_.size());
      addAddresses(words, nic, nics_[nic].network);
    } else if (verb == "pipe") {
      if (index(words, emulator_.pipeCount() + 1) != emulator_.pipeCount()) {
        throw std::invalid_argument("want the next number");
      }
      const size_t source = index(words, nics_.size());
      const size_t target = index(words, nics_.size());
      uint64_t seed;
      if (!(words >> seed)) {
        throw std::invalid_argument("want a SEED below 2^64");
      }
      const size_t pipe = emulator_.addPipe(seed);
      nics_[source].pipeTo[target] = pipe;
      targets_.push_back(target);
    } else if (verb == "set") {
      set(words);
    } else if (verb == "limiter") {
      const size_t limiter = index(words, shared_.size() + 1);
      double rate = 0;
      uint64_t queueBytes = 0;
      if (!(words >> rate >> queueBytes)) {
        throw std::invalid_argument("want RATE QUEUE");
      }
      if (limiter == shared_.size()) {
        shared_.push_back(emulator_.addLimiter());
      }
      emulator_.setLimiter(now(), shared_[limiter], rate, queueBytes);
    } else if (verb == "carrier") {
      const Nic& nic = nics_[index(words, nics_.size())];
      int on = static_cast<int>(index(words, 2));
      checkSyscall(
          "TUNSETCARRIER", ioctl(nic.device.get(), TUNSETCARRIER, &on));
    } else if (verb == "counters") {
      return counters(words);
    } else {
      throw std::invalid_argument("no such verb");
    }
    return "";
  }

  void addAddresses(std::istringstream& words, size_t nic, size_t network) {
    std::string text;
    while (words >> text) {
      Address address;
      if (text.size() != 32) {
        throw std::invalid_argument("want addresses of 32 hex digits");
      }
      for (size_t i = 0; i < 16; ++i) {
        address[i] = static_cast<uint8_t>(
            std::stoul(text.substr(2 * i, 2), nullptr, 16));
      }
      routes_[network][address] = nic;
    }
  }

  void addNic(std::istringstream& words, FileDescriptor& fd, Link link) {
    if (index(words, nics_.size() + 1) != nics_.size() || !fd) {
      throw std::invalid_argument("want the next number and its device");
    }
    Nic nic;
    nic.link = link;
    nic.network = index(words, SIZE_MAX);
    addAddresses(words, nics_.size(), nic.network);
    watch(fd.get(), nics_.size());
    nic.device = std::move(fd);
    nics_.push_back(std::move(nic));
  }

  void set(std::istringstream& words) {
    const size_t pipe = index(words, emulator_.pipeCount());
    PipeSettings s = emulator_.settings(pipe);
    std::string word;
    while (words >> word) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) {
        throw std::invalid_argument("want name=value, got " + word);
      }
      const std::string name = word.substr(0, equals);
      const std::string value = word.substr(equals + 1);
      if (name == "shared") {
        s.sharedRates.clear();
        std::istringstream numbers(value);
        std::string number;
        while (std::getline(numbers, number, ',')) {
          s.sharedRates.push_back(shared_.at(std::stoul(number)));
        }
        continue;
      }
      const double v = std::stod(value);
      if (name == "delay") {
        s.delay = fromSeconds(v);
      } else if (name == "jitter") {
        s.jitter = fromSeconds(v);
      } else if (name == "rate") {
        s.rateBytesPerS = v;
      } else if (name == "queue") {
        s.queueBytes = static_cast<uint64_t>(v);
      } else if (name == "udp_rate") {
        s.udpRateBytesPerS = v;
      } else if (name == "loss") {
        s.loss = v;
      } else if (name == "burst") {
        s.burstPackets = v;
      } else if (name == "duplicate") {
        s.duplicate = v;
      } else if (name == "corrupt") {
        s.corrupt = v;
      } else if (name == "reorder") {
        s.reorder = v;
      } else if (name == "reorder_delay") {
        s.reorderDelay = fromSeconds(v);
      } else if (name == "down") {
        s.down = v != 0;
      } else {
        throw std::invalid_argument("no setting " + name);
      }
    }
    emulator_.setPipe(now(), pipe, s);
  }

  // " realtime=1 unroutable=N", then a line of numbers for each pipe that is
  // asked for, in the order of PipeCounters, packets before bytes.
  std::string counters(std::istringstream& words) {
    std::ostringstream out;
    out << " realtime=" << realTime_ << " unroutable=" << unroutable_;
    while (!(words >> std::ws).eof()) {
      const size_t pipe = index(words, emulator_.pipeCount());
      const PipeCounters& c = emulator_.counters(pipe);
      out << '\n';
      for (const Amount& amount :
           {c.entered,
            c.delivered,
            c.lost,
            c.queueFull,
            c.outage,
            c.overrun,
            c.refused,
            c.duplicated,
            c.corrupted,
            c.reordered}) {
        out << amount.packets << ' ' << amount.bytes << ' ';
      }
      out << emulator_.inFlightBytes(pipe);
    }
    return out.str();
  }

  const int control_;
  FileDescriptor epoll_;
  FileDescriptor timer_;
  TimePoint armed_ = kNever;
  bool fired_ = false;
  bool realTime_ = false;
  std::vector<Nic> nics_;
  std::map<size_t, std::unordered_map<Address, size_t, AddressHash>> routes_;
  std::vector<size_t> targets_; // the NIC at the end of each pipe
  std::vector<size_t> shared_; // limiters that the owner has made
  Emulator emulator_;
  uint64_t unroutable_ = 0;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kPacketBytesMax);
};

} // namespace

void carrier(int control, int owner) {
  // This process is the first of the lab's PID namespace, so it inherits
  // orphans; the kernel then buries them.
  std::signal(SIGCHLD, SIG_IGN);
  Carrier(control, owner).run();
}

} // namespace resilient::lab
