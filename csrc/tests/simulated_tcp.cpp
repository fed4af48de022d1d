#include "tests/simulated_tcp.h"

#include <algorithm>

namespace resilient::test {
namespace {

constexpr uint64_t kWindowBytes = 256u << 10;
constexpr uint64_t kOverheadBytes = 60;
constexpr Nanos kMinTimeout = std::chrono::milliseconds(200);
constexpr Nanos kMaxTimeout = std::chrono::seconds(120);
constexpr Nanos kSynTimeout = std::chrono::seconds(1);
constexpr Nanos kKeepAlive = std::chrono::seconds(10); // as socket.h has it

} // namespace

SimulatedTcp::SimulatedTcp(uint64_t seed, Nanos latency, uint64_t bytesPerS)
    : prng_(seed), latency_(latency), bytesPerS_(bytesPerS) {
  heal();
}

// --- time

void SimulatedTcp::at(TimePoint when, std::function<void()> what) {
  queue_.push(Event{std::max(when, now_), eventNumber_++, std::move(what)});
}

bool SimulatedTcp::step() {
  if (queue_.empty()) {
    return false;
  }
  // The top is const only to protect the order, which moving leaves alone.
  const auto what = std::move(const_cast<Event&>(queue_.top()).what);
  now_ = queue_.top().when;
  queue_.pop();
  ++events_;
  what();
  return true;
}

// --- the network

void SimulatedTcp::block(int side, size_t from, size_t to, TimePoint until) {
  TimePoint& b = blockedUntil_[static_cast<size_t>(side)][from][to];
  b = std::max(b, until);
}

void SimulatedTcp::refuse(size_t nic0, size_t nic1, TimePoint until) {
  refusedUntil_[nic0][nic1] = until;
}

void SimulatedTcp::heal() {
  for (auto& nics : nicWorks_) {
    nics.fill(true);
  }
  blockedUntil_ = {};
  refusedUntil_ = {};
}

Nanos SimulatedTcp::timeToCarry(uint64_t bytes) const {
  const auto windows = static_cast<double>(bytes) / kWindowBytes;
  const auto seconds =
      static_cast<double>(bytes) / static_cast<double>(bytesPerS_);
  return std::max(
      fromSeconds(windows * toSeconds(roundTrip())), fromSeconds(seconds));
}

bool SimulatedTcp::carries(const Socket& s, int from) const {
  const auto side = static_cast<size_t>(from);
  return nicWorks_[0][s.nics[0]] && nicWorks_[1][s.nics[1]] &&
      blockedUntil_[side][s.nics[side]][s.nics[1 - side]] <= now_;
}

bool SimulatedTcp::refuses(const Socket& s) const {
  return refusedUntil_[s.nics[0]][s.nics[1]] > now_;
}

// --- connecting

size_t SimulatedTcp::connect(int side, size_t from, size_t to) {
  const size_t socket = sockets_.size();
  Socket& s = sockets_.emplace_back();
  s.caller = side;
  s.nics = side == 0 ? std::array{from, to} : std::array{to, from};
  s.open[static_cast<size_t>(side)] = true;
  sendSyn(socket, kSynTimeout);
  return socket;
}

size_t SimulatedTcp::connectAtOnce(size_t nic) {
  Socket& s = sockets_.emplace_back();
  s.nics = {nic, nic};
  s.open = {true, true};
  s.connected = true;
  return sockets_.size() - 1;
}

void SimulatedTcp::sendSyn(size_t socket, Nanos retry) {
  const int caller = sockets_[socket].caller;
  at(now_ + latency_, [this, socket, caller] {
    Socket& s = sockets_[socket];
    if (!carries(s, caller)) {
      return;
    }
    const bool refused =
        users_[static_cast<size_t>(1 - caller)] == nullptr || refuses(s);
    if (!refused && !s.connected) {
      s.open[static_cast<size_t>(1 - caller)] = true;
    }
    at(now_ + latency_, [this, socket, caller, refused] {
      Socket& answered = sockets_[socket];
      const auto us = static_cast<size_t>(caller);
      if (!carries(answered, 1 - caller) || answered.connected ||
          users_[us] == nullptr) {
        return;
      }
      if (!answered.open[us]) {
        sendReset(socket, caller);
      } else if (refused) {
        answered.open[us] = false;
        users_[us]->onRefused(socket);
      } else {
        answered.connected = true;
        users_[us]->onConnected(socket);
      }
    });
  });
  at(now_ + retry, [this, socket, caller, retry] {
    const Socket& s = sockets_[socket];
    if (!s.connected && s.open[static_cast<size_t>(caller)]) {
      sendSyn(socket, 2 * retry);
    }
  });
}

// --- sending

bool SimulatedTcp::hasRoom(size_t socket, int side) const {
  const Half& h = sockets_[socket].halves[static_cast<size_t>(side)];
  return open(socket, side) &&
      h.unacknowledgedBytes + h.unreadBytes < kWindowBytes;
}

void SimulatedTcp::write(size_t socket, int side, Segment segment) {
  Half& h = sockets_[socket].halves[static_cast<size_t>(side)];
  if (h.unacknowledged.empty()) {
    h.timeout = kMinTimeout + 2 * roundTrip();
  }
  h.unacknowledgedBytes += segment.bytes.size();
  h.unacknowledged.push_back(std::move(segment));
  if (!h.recovering) {
    transmit(socket, side, h.first + h.unacknowledged.size() - 1);
  }
  armTimer(socket, side);
}

void SimulatedTcp::transmit(size_t socket, int side, uint64_t number) {
  Half& h = sockets_[socket].halves[static_cast<size_t>(side)];
  const uint64_t bytes =
      h.unacknowledged[number - h.first].bytes.size() + kOverheadBytes;
  h.linkFree = std::max(h.linkFree, now_) +
      Nanos(static_cast<int64_t>(bytes * 1'000'000'000 / bytesPerS_));
  at(h.linkFree + latency_,
     [this, socket, side, number] { arrive(socket, side, number); });
}

void SimulatedTcp::arrive(size_t socket, int side, uint64_t number) {
  Socket& s = sockets_[socket];
  Half& h = s.halves[static_cast<size_t>(side)];
  const auto far = static_cast<size_t>(1 - side);
  if (!carries(s, side)) {
    return;
  }
  if (!s.open[far]) {
    sendReset(socket, 1 - side);
    return;
  }
  if (number == h.expected && number >= h.first) {
    // Kept by the sender until it is acknowledged, so this is a copy.
    h.unread.push_back(h.unacknowledged[number - h.first]);
    h.unreadBytes += h.unread.back().bytes.size();
    ++h.expected;
    users_[far]->onReadable(socket);
  }
  at(now_ + latency_, [this, socket, side, upTo = h.expected] {
    if (carries(sockets_[socket], 1 - side)) {
      acknowledge(socket, side, upTo);
    }
  });
}

void SimulatedTcp::acknowledge(size_t socket, int side, uint64_t upTo) {
  Socket& s = sockets_[socket];
  Half& h = s.halves[static_cast<size_t>(side)];
  if (upTo <= h.first || !s.open[static_cast<size_t>(side)]) {
    return;
  }
  for (; h.first < upTo; ++h.first) {
    h.unacknowledgedBytes -= h.unacknowledged.front().bytes.size();
    h.unacknowledged.pop_front();
  }
  h.timeout = kMinTimeout + 2 * roundTrip();
  h.timerAt = kNever;
  if (std::exchange(h.recovering, false)) {
    for (uint64_t i = 0; i < h.unacknowledged.size(); ++i) {
      transmit(socket, side, h.first + i);
    }
  }
  armTimer(socket, side);
  users_[static_cast<size_t>(side)]->onWritable(socket);
}

void SimulatedTcp::armTimer(size_t socket, int side) {
  Half& h = sockets_[socket].halves[static_cast<size_t>(side)];
  if (h.timerAt != kNever || h.unacknowledged.empty()) {
    return;
  }
  const TimePoint due = h.timerAt = std::max(h.linkFree, now_) + h.timeout;
  at(due, [this, socket, side, due] {
    Half& late = sockets_[socket].halves[static_cast<size_t>(side)];
    if (late.timerAt != due || !open(socket, side)) {
      return; // another one has taken its place
    }
    late.timerAt = kNever;
    late.timeout = std::min(2 * late.timeout, kMaxTimeout);
    late.recovering = true;
    transmit(socket, side, late.first);
    armTimer(socket, side);
  });
}

// --- receiving, and the end

bool SimulatedTcp::readable(size_t socket, int side) const {
  return open(socket, side) &&
      !sockets_[socket].halves[static_cast<size_t>(1 - side)].unread.empty();
}

SimulatedTcp::Segment SimulatedTcp::read(size_t socket, int side) {
  Half& h = sockets_[socket].halves[static_cast<size_t>(1 - side)];
  Segment segment = std::move(h.unread.front());
  h.unread.pop_front();
  const bool wasFull = h.unacknowledgedBytes + h.unreadBytes >= kWindowBytes;
  h.unreadBytes -= segment.bytes.size();
  if (wasFull) {
    at(now_ + latency_, [this, socket, side] {
      if (open(socket, 1 - side)) {
        users_[static_cast<size_t>(1 - side)]->onWritable(socket);
      }
    });
  }
  return segment;
}

SimulatedTcp::Evidence SimulatedTcp::evidence(size_t socket, int side) const {
  const Half& h = sockets_[socket].halves[static_cast<size_t>(side)];
  return {!h.unacknowledged.empty(), h.first};
}

void SimulatedTcp::close(size_t socket, int side) {
  Socket& s = sockets_[socket];
  if (!std::exchange(s.open[static_cast<size_t>(side)], false)) {
    return;
  }
  sendReset(socket, side);
}

// If it is lost, another one answers the far kernel's next keep-alive.
void SimulatedTcp::sendReset(size_t socket, int side) {
  at(now_ + latency_, [this, socket, side] {
    Socket& s = sockets_[socket];
    const auto far = static_cast<size_t>(1 - side);
    if (!s.open[far]) {
      return;
    }
    if (!carries(s, side)) {
      at(now_ + kKeepAlive, [this, socket, side] { sendReset(socket, side); });
      return;
    }
    s.open[far] = false;
    if (users_[far] != nullptr) {
      users_[far]->onReset(socket);
    }
  });
}

void SimulatedTcp::closeAll(int side) {
  for (size_t socket = 0; socket < sockets_.size(); ++socket) {
    close(socket, side);
  }
}

} // namespace resilient::test
