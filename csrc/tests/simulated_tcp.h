#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/time.h"

namespace resilient::test {

inline constexpr size_t kMaxNics = 3;
// In place of a NIC: a way between the processes that never fails.
inline constexpr size_t kInsideHost = kMaxNics;

// Two processes' kernels and the network between their NICs, in virtual time.
// TCP as far as failover sees it: a lost segment is retransmitted after 200 ms
// and ever later, the far kernel acknowledges what its process has not read,
// SYNs are lost or refused, and a reset may be lost as well.
//
// How it works. A segment that is sent arrives if the way carries at its
// arrival. It is acknowledged if it is the next one and the way back carries.
// Segments out of order are dropped: the sender goes back to the first.
//
// Thread: one. No real clock, no I/O.
class SimulatedTcp {
 public:
  // The calls of one kernel to its process.
  class User {
   public:
    virtual ~User() = default;
    virtual void onConnected(size_t socket) = 0; // by connect()
    virtual void onRefused(size_t socket) = 0;
    virtual void onReadable(size_t socket) = 0;
    virtual void onWritable(size_t socket) = 0;
    virtual void onReset(size_t socket) = 0;
  };
  struct Segment {
    uint32_t kind = 0; // as the user likes
    std::vector<std::byte> bytes;
  };
  // One end.
  struct Evidence {
    bool owes = false; // the far kernel has not acknowledged everything
    uint64_t acknowledged = 0; // segments
  };

  SimulatedTcp(uint64_t seed, Nanos latency, uint64_t bytesPerS);
  void setUser(int side, User* user) { // null: its process is gone
    users_[static_cast<size_t>(side)] = user;
  }

  // --- time
  TimePoint now() const {
    return now_;
  }
  void at(TimePoint when, std::function<void()> what);
  bool step();
  uint64_t events() const {
    return events_;
  }

  // --- the network
  void setNic(int side, size_t nic, bool works) {
    nicWorks_[static_cast<size_t>(side)][nic] = works;
  }
  // Nothing passes from that NIC of `side` to that one of the other.
  void block(int side, size_t from, size_t to, TimePoint until);
  // Connections between the two are refused by something in between.
  void refuse(size_t nic0, size_t nic1, TimePoint until);
  void heal();
  Nanos roundTrip() const {
    return 2 * latency_;
  }
  // By one connection without a fault: a window for each round trip, no faster
  // than its link.
  Nanos timeToCarry(uint64_t bytes) const;

  // --- sockets
  size_t connect(int side, size_t from, size_t to);
  // Both ends at once, between NICs of that number or inside the host.
  size_t connectAtOnce(size_t nic);
  bool open(size_t socket, int side) const {
    return sockets_[socket].open[static_cast<size_t>(side)];
  }
  std::pair<size_t, size_t> nics(size_t socket) const { // of sides 0 and 1
    return {sockets_[socket].nics[0], sockets_[socket].nics[1]};
  }
  bool hasRoom(size_t socket, int side) const;
  void write(size_t socket, int side, Segment segment);
  bool readable(size_t socket, int side) const;
  Segment read(size_t socket, int side);
  Evidence evidence(size_t socket, int side) const;
  // Ends this end; the other learns of it by a reset, if that arrives.
  void close(size_t socket, int side);
  // The kernel of a process that was killed.
  void closeAll(int side);

 private:
  // One direction, by the end that sends.
  struct Half {
    std::deque<Segment> unacknowledged;
    uint64_t first = 0; // number of the front
    uint64_t unacknowledgedBytes = 0;
    TimePoint linkFree{};
    TimePoint timerAt = kNever;
    Nanos timeout{};
    bool recovering = false;
    // at the far end
    uint64_t expected = 0;
    std::deque<Segment> unread;
    uint64_t unreadBytes = 0;
  };
  struct Socket {
    std::array<size_t, 2> nics{};
    std::array<bool, 2> open{};
    std::array<Half, 2> halves; // by the side that sends
    int caller = 0;
    bool connected = false; // as the caller knows
  };
  struct Event {
    TimePoint when;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& o) const {
      return when != o.when ? when > o.when : number > o.number;
    }
  };

  bool carries(const Socket& s, int from) const;
  bool refuses(const Socket& s) const;
  void sendSyn(size_t socket, Nanos retry);
  void transmit(size_t socket, int side, uint64_t number);
  void arrive(size_t socket, int side, uint64_t number);
  void acknowledge(size_t socket, int side, uint64_t upTo);
  void sendReset(size_t socket, int side);
  void armTimer(size_t socket, int side);

  Prng prng_;
  const Nanos latency_;
  const uint64_t bytesPerS_;
  TimePoint now_{std::chrono::seconds(1)};
  uint64_t events_ = 0;
  uint64_t eventNumber_ = 0;
  std::priority_queue<Event> queue_;
  std::array<User*, 2> users_{};
  std::array<std::array<bool, kMaxNics + 1>, 2> nicWorks_;
  // By side, its NIC, the other's.
  std::array<std::array<std::array<TimePoint, kMaxNics + 1>, kMaxNics + 1>, 2>
      blockedUntil_{};
  std::array<std::array<TimePoint, kMaxNics + 1>, kMaxNics + 1> refusedUntil_{};
  std::deque<Socket> sockets_;
};

} // namespace resilient::test
