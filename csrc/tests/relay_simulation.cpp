#include "tests/relay_simulation.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "base/log.h"
#include "tests/relay_network.h"

namespace resilient::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Longer than the slowest network may need in virtual time, with the pauses
// after several failures of a relay.
constexpr Nanos kHealLimit = seconds(400);
// After that a relay holds nothing more (RelayService::look).
constexpr Nanos kQuiet = seconds(15);
constexpr uint64_t kEventLimit = 2'000'000;
constexpr uint64_t kGroup = 1;

// Words of a Status that only a broken peer, or a bug of ours, can cause.
constexpr const char* kProtocolWords[] = {
    "acknowledgement of frame",
    "malformed message",
    "does not agree with its description"};

class RelaySimulation {
 public:
  RelaySimulation(
      uint64_t seed,
      const std::function<void(const std::string&)>& trace)
      : seed_(seed), prng_(mixBits(seed)), network_(mixBits(~seed)) {
    if (trace) {
      network_.setTrace(trace);
    }
    network_.afterTurn = [this](size_t r) { checkMemory(r); };
    setLogLevel(LogLevel::kInfo);
    setLogSink([this, trace](std::string_view line) {
      if (trace) {
        trace("  " + std::string(line));
      }
      onLine(line);
    });
  }
  ~RelaySimulation() {
    setLogSink({});
    setLogLevel(LogLevel::kWarning);
  }

  RelaySimulationResult run() {
    plan();
    runUntil(network_.now() + duration_, [] { return false; });
    heal();
    runUntil(network_.now() + kHealLimit, [this] { return unended() == 0; });
    checkMessages();
    runUntil(network_.now() + kQuiet, [] { return false; });
    // A frame may be under way: relays are sought again now and then.
    runUntil(network_.now() + seconds(1), [this] { return drained(); });
    checkQuiet();
    result_.error = network_.error();
    result_.traceHash = network_.traceHash();
    result_.events = network_.events();
    return result_;
  }

 private:
  enum class Outcome { kUnstarted, kPending, kOk, kError };
  struct Message;
  struct Send final : SendOp {
    explicit Send(Message& m) : message(m) {}
    void finished(const Status& status) override {
      message.simulation.ended(message, message.sent, status, message.dst);
    }
    Message& message;
  };
  struct Recv final : RecvOp {
    explicit Recv(Message& m) : message(m) {}
    void finished(const Status& status) override {
      message.simulation.ended(message, message.received, status, message.src);
    }
    Message& message;
  };
  // One message, its send and the receive that gets it: the streams of a pair
  // of ranks have as many receives as sends, in the same order.
  struct Message {
    Message(RelaySimulation& s, size_t from, size_t to)
        : simulation(s), src(from), dst(to), send(*this), recv(*this) {}
    RelaySimulation& simulation;
    const size_t src, dst;
    uint64_t tag = 0, bytes = 0, hash = 0;
    std::vector<std::byte> out, in;
    Send send;
    Recv recv;
    Outcome sent = Outcome::kUnstarted, received = Outcome::kUnstarted;
    std::string error;
  };

  uint64_t below(uint64_t n) {
    return prng_.below(n);
  }
  Nanos upTo(Nanos most) {
    return Nanos(
        static_cast<int64_t>(below(static_cast<uint64_t>(most.count()) + 1)));
  }
  template <typename T>
  T oneOf(std::initializer_list<T> list) {
    return list.begin()[below(list.size())];
  }
  void fail(const std::string& what) {
    network_.fail(what);
  }

  void plan();
  void planWays();
  bool mayBeGateway(size_t a, size_t b);
  void planMessages(size_t src, size_t dst, bool large);
  void planFault();
  void planEnd(size_t r);
  void eachWayOf(size_t r, bool far, const std::function<void(size_t)>& call);
  void start(Message& m, bool sends);
  void ended(Message& m, Outcome& half, const Status& status, size_t peer);
  void heal();
  // Its operations must end well.
  bool stays(size_t r) {
    return network_.runs(r) && !left_.contains(r);
  }
  size_t unended();
  void checkMessages();
  bool drained();
  void checkQuiet();
  void checkLinks(size_t r, bool anyStopped);
  void checkMemory(size_t r);
  void onLine(std::string_view line);
  template <typename Done>
  void runUntil(TimePoint end, Done done);

  const uint64_t seed_;
  Prng prng_;
  RelaySimulationResult result_;
  Nanos duration_{};
  EngineOptions options_;
  bool gateways_ = false; // some pairs have no connection
  bool large_ = false; // some messages are
  bool healed_ = false;
  std::vector<size_t> sites_; // by rank
  std::set<size_t> victims_; // are killed, stopped, or leave
  std::set<size_t> left_;
  // By (src, dst, tag): the sends in order. Receives are posted in that order.
  std::map<std::tuple<size_t, size_t, uint64_t>, std::vector<Message*>>
      streams_;
  std::map<std::tuple<size_t, size_t, uint64_t>, size_t> sent_, posted_;
  std::vector<std::unique_ptr<Message>> messages_;
  RelayNetwork network_; // before all that it calls
};

// --- the plan

void RelaySimulation::plan() {
  duration_ = milliseconds(oneOf<int>({300, 2000, 16000}));
  options_.relay = below(10) < 7 ? "auto" : "failover";
  options_.relays_per_peer = static_cast<int64_t>(1 + below(3));
  // The least window of a path does not fit into less than some MiB. Then
  // relays refuse, and a pair without a connection would wait for ever.
  gateways_ = below(2) == 0;
  options_.relay_bytes = static_cast<int64_t>(
      gateways_ ? oneOf<uint64_t>({4u << 20, 64u << 20})
                : oneOf<uint64_t>({128u << 10, 512u << 10, 4u << 20}));
  options_.chunk_bytes =
      static_cast<int64_t>(oneOf<uint64_t>({1024, 8192, 65536}));
  options_.copy_bytes = static_cast<int64_t>(oneOf<uint64_t>({0, 4096, 65536}));
  options_.eager_bytes =
      static_cast<int64_t>(oneOf<uint64_t>({256u << 10, 64u << 20}));
  options_.wan_connections = 1; // nothing is tuned: there are no connections
  const size_t near = 2 + below(2), far = 1 + below(3);
  const uint64_t uplink = oneOf<uint64_t>({1'000'000, 10'000'000, 100'000'000});
  std::optional<double> declared;
  if (below(3) == 0) {
    declared = 0.8 * static_cast<double>(uplink);
    ++result_.limits;
  }
  for (size_t r = 0; r < near + far; ++r) {
    sites_.push_back(r < near ? 0 : 1);
    network_.add(options_, r < near ? "near" : "far", uplink, declared)
        .setStagingBytes(oneOf<uint64_t>({0, 1u << 20, 64u << 20}));
  }
  for (uint64_t i = below(3); i > 0; --i) {
    victims_.insert(below(sites_.size()));
  }
  if (below(8) == 0 && !victims_.empty()) {
    network_.rank(*victims_.begin()).options_.relay = "off";
  }
  large_ = below(4) == 0;
  planWays();
  network_.join();
  for (size_t src = 0; src < sites_.size(); ++src) {
    for (size_t dst = 0; dst < sites_.size(); ++dst) {
      if (src != dst && (sites_[src] != sites_[dst] || below(4) == 0)) {
        planMessages(src, dst, large_ && below(2) == 0);
      }
    }
  }
  for (uint64_t i = below(6); i > 0; --i) {
    planFault();
  }
  for (const size_t r : victims_) {
    planEnd(r);
  }
}

// Every pair of ranks, but for some on different sites: these have no way but
// relays, ever.
void RelaySimulation::planWays() {
  const size_t n = sites_.size();
  std::set<std::pair<size_t, size_t>> without;
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = a + 1; b < n; ++b) {
      const bool alone = std::ranges::none_of(without, [&](const auto& pair) {
        return pair.second == b || pair.first == a;
      });
      if (gateways_ && sites_[a] != sites_[b] && alone && below(3) == 0 &&
          mayBeGateway(a, b)) {
        without.insert({a, b});
        ++result_.gateways;
        continue;
      }
      RelayNetwork::Way way;
      const bool far = sites_[a] != sites_[b];
      way.latency = far ? milliseconds(1) + upTo(milliseconds(40))
                        : std::chrono::microseconds(50) +
              upTo(oneOf<Nanos>({milliseconds(1), milliseconds(20)}));
      way.jitter = oneOf<Nanos>({Nanos(0), milliseconds(1), milliseconds(20)});
      way.bytesPerS = oneOf<uint64_t>({1'000'000, 20'000'000, 100'000'000});
      way.windowBytes =
          oneOf<uint64_t>({large_ ? 32u << 10 : 2000, 64u << 10, 1u << 20});
      for (uint64_t i = 1 + below(2); i > 0; --i) {
        network_.connect(a, b, way);
      }
    }
  }
}

// Some rank on the site of `a` relays to `b`, whatever becomes of the others.
bool RelaySimulation::mayBeGateway(size_t a, size_t b) {
  if (victims_.contains(a) || victims_.contains(b)) {
    return false;
  }
  for (size_t r = 0; r < sites_.size(); ++r) {
    if (sites_[r] == sites_[a] && r != a && !victims_.contains(r)) {
      return true;
    }
  }
  return false;
}

void RelaySimulation::planMessages(size_t src, size_t dst, bool large) {
  const auto chunk = static_cast<uint64_t>(options_.chunk_bytes);
  for (uint64_t i = below(oneOf<uint64_t>({3, 8, 16})); i > 0; --i) {
    auto owned = std::make_unique<Message>(*this, src, dst);
    Message& m = *owned;
    m.tag = below(2);
    auto& stream = streams_[{src, dst, m.tag}];
    m.hash = seed_;
    for (const uint64_t x : {src, dst, m.tag, stream.size()}) {
      m.hash = mixBits(m.hash ^ x);
    }
    m.bytes = below(6 * chunk + 1);
    if (large) {
      m.bytes = below(1u << 20);
    } else if (below(3) == 0) {
      m.bytes = below(2000);
    }
    stream.push_back(&m);
    messages_.push_back(std::move(owned));
    const Nanos sendAt = upTo(duration_), receiveAt = upTo(duration_);
    for (const bool sends : {true, false}) {
      network_.at(
          network_.now() + (sends ? sendAt : receiveAt),
          [this, sends, key = std::tuple(src, dst, m.tag)] {
            const auto [from, to, tag] = key;
            network_.in(sends ? from : to, [this, sends, key] {
              auto& count = (sends ? sent_ : posted_)[key];
              start(*streams_[key][count++], sends);
            });
          });
    }
  }
}

void RelaySimulation::eachWayOf(
    size_t r,
    bool far,
    const std::function<void(size_t)>& call) {
  for (size_t other = 0; other < sites_.size(); ++other) {
    if (other != r && (sites_[other] != sites_[r]) == far) {
      for (const auto way : network_.between(r, other)) {
        call(way);
      }
    }
  }
}

void RelaySimulation::planFault() {
  const TimePoint when = network_.now() + upTo(duration_);
  const Nanos lasts =
      oneOf<Nanos>({milliseconds(100), milliseconds(700), seconds(12)});
  const size_t r = below(sites_.size());
  const uint64_t kind = below(8);
  const size_t other = (r + 1 + below(sites_.size() - 1)) % sites_.size();
  network_.at(when, [this, r, other, kind, lasts] {
    const TimePoint until = network_.now() + upTo(lasts);
    const Nanos notice = below(3) == 0 ? Nanos(0) : upTo(milliseconds(60));
    if (kind < 3) { // the uplink drops everything
      ++result_.uplinkSilences;
      eachWayOf(r, true, [&](size_t way) { network_.silence(way, until); });
    } else if (kind < 5) { // its NIC goes down
      ++result_.uplinkLosses;
      eachWayOf(r, true, [&](size_t way) { network_.cut(way, notice, until); });
    } else if (kind == 5) { // within the site, too
      ++result_.uplinkLosses;
      for (const bool far : {true, false}) {
        eachWayOf(
            r, far, [&](size_t way) { network_.cut(way, notice, until); });
      }
    } else {
      for (const auto way : network_.between(r, other)) {
        ++result_.cuts;
        kind == 6 ? network_.cut(way, notice, until)
                  : network_.silence(way, until);
      }
    }
  });
}

// The fate of one rank.
void RelaySimulation::planEnd(size_t r) {
  const TimePoint when = network_.now() + upTo(duration_);
  const uint64_t kind = below(4);
  const Nanos stopped = oneOf<Nanos>({milliseconds(300), seconds(12)});
  network_.at(when, [this, r, kind, stopped] {
    if (kind == 0) {
      ++result_.kills;
      network_.kill(r);
    } else if (kind == 1) {
      ++result_.leaves;
      left_.insert(r);
      network_.leave(r);
    } else {
      ++result_.stops;
      network_.stop(r);
      if (kind == 2) {
        network_.at(network_.now() + upTo(stopped), [this, r] {
          if (!healed_) {
            network_.resume(r);
          }
        });
      }
    }
  });
}

// --- messages

void fill(std::vector<std::byte>& data, uint64_t hash) {
  for (uint64_t at = 0; at < data.size(); at += 8) {
    const uint64_t word = mixBits(hash ^ (at << 8));
    std::memcpy(
        data.data() + at, &word, std::min<uint64_t>(8, data.size() - at));
  }
}

void RelaySimulation::start(Message& m, bool sends) {
  const size_t self = sends ? m.src : m.dst, peer = sends ? m.dst : m.src;
  SimulatedRank& rank = network_.rank(self);
  PeerLink& link = rank.link(peer);
  network_.note(20 + sends, self, peer, sends ? "send" : "receive");
  link.addInterest();
  (sends ? m.sent : m.received) = Outcome::kPending;
  if (sends) {
    m.out.resize(m.bytes);
    fill(m.out, m.hash);
    m.send.key = MessageKey{kGroup, m.tag, 0};
    m.send.pointToPoint = true;
    m.send.trafficClass = static_cast<TrafficClass>(below(kTrafficClassCount));
    m.send.sourceRank = static_cast<int32_t>(self);
    m.send.data = m.out.data();
    m.send.bytes = m.bytes;
    link.channel().send(&m.send, rank.loop().now());
    return;
  }
  if (!link.usable()) {
    m.recv.finished(link.closedBecause());
    return;
  }
  m.in.resize(m.bytes);
  m.recv.key = MessageKey{kGroup, m.tag, 0};
  m.recv.ordered = true;
  m.recv.source = &link.channel();
  m.recv.data = m.in.data();
  m.recv.bytes = m.bytes;
  rank.mailbox().post(&m.recv);
}

void RelaySimulation::ended(
    Message& m,
    Outcome& half,
    const Status& status,
    size_t peer) {
  const bool sends = &half == &m.sent;
  network_.note(22 + sends, m.src, m.dst, sends ? "sent" : "received");
  if (half != Outcome::kPending) {
    fail("an operation ended twice");
  }
  half = status.ok() ? Outcome::kOk : Outcome::kError;
  if (!status.ok()) {
    m.error = status.toString();
  } else if (!sends) {
    std::vector<std::byte> expected(m.bytes);
    fill(expected, m.hash);
    if (m.in != expected) {
      fail(
          "wrong bytes from " + std::to_string(m.src) + " to " +
          std::to_string(m.dst));
    }
    ++result_.messages;
  }
  network_.rank(sends ? m.src : m.dst).link(peer).dropInterest();
}

// --- the end

// Some that were stopped stay so for ever.
void RelaySimulation::heal() {
  network_.heal();
  healed_ = true;
  for (const size_t r : victims_) {
    if (below(2) == 0) {
      network_.resume(r);
    }
  }
}

// Halves of messages between ranks that run which have not ended.
size_t RelaySimulation::unended() {
  const auto open = [](Outcome outcome) {
    return outcome == Outcome::kUnstarted || outcome == Outcome::kPending;
  };
  size_t count = 0;
  for (const auto& m : messages_) {
    if (stays(m->src) && stays(m->dst)) {
      count += open(m->sent) + open(m->received);
    }
  }
  return count;
}

void RelaySimulation::checkMessages() {
  for (const auto& m : messages_) {
    if (!stays(m->src) || !stays(m->dst)) {
      ++result_.excused;
      continue;
    }
    if (m->sent != Outcome::kOk || m->received != Outcome::kOk) {
      const auto number = [](Outcome o) {
        return std::to_string(static_cast<int>(o));
      };
      fail(
          "a message of " + std::to_string(m->bytes) + " bytes from " +
          std::to_string(m->src) + " to " + std::to_string(m->dst) +
          " has not arrived: send " + number(m->sent) + ", receive " +
          number(m->received) + ' ' + m->error);
    }
  }
}

bool RelaySimulation::drained() {
  for (size_t r = 0; r < sites_.size(); ++r) {
    for (size_t peer = 0; peer < sites_.size(); ++peer) {
      if (peer != r && network_.runs(r) && network_.runs(peer) &&
          !network_.rank(r).link(peer).channel().drained()) {
        return false;
      }
    }
  }
  return true;
}

void RelaySimulation::checkQuiet() {
  bool anyStopped = false;
  for (size_t r = 0; r < sites_.size(); ++r) {
    anyStopped = anyStopped ||
        network_.rank(r).state() == SimulatedRank::State::kStopped;
  }
  result_.passedNotes = network_.passedNotes();
  result_.busyNotes = network_.busyNotes();
  // A rank that stands still may be in the middle of a message, and others go
  // on looking for ways to it.
  for (size_t r = 0; r < sites_.size(); ++r) {
    SimulatedRank& rank = network_.rank(r);
    const RelayCounters counters = rank.relays().counters();
    result_.relayed += counters.messages;
    result_.relayedBytes += counters.bytes;
    result_.refusals += counters.refused;
    // Nor does anybody hear of the end of a rank to which no way is left.
    bool unaware = anyStopped;
    for (size_t peer = 0; peer < sites_.size(); ++peer) {
      unaware =
          unaware || (peer != r && !stays(peer) && rank.link(peer).usable());
    }
    if (network_.runs(r) && !unaware && counters.heldBytes != 0) {
      fail(
          "relay " + std::to_string(r) + " still holds " +
          std::to_string(counters.heldBytes) + " bytes");
    }
    if (network_.runs(r)) {
      checkLinks(r, anyStopped);
    }
  }
}

void RelaySimulation::checkLinks(size_t r, bool anyStopped) {
  for (size_t peer = 0; peer < sites_.size(); ++peer) {
    if (peer == r || !network_.runs(peer)) {
      continue;
    }
    PeerLink& link = network_.rank(r).link(peer);
    const std::string name =
        "link " + std::to_string(r) + " to " + std::to_string(peer) + ": ";
    if (!link.usable()) {
      fail(name + link.closedBecause().toString());
    } else if (anyStopped) {
      continue;
    } else if (!link.channel().drained() || link.channel().openMessages()) {
      fail(
          name + std::to_string(link.channel().openMessages()) +
          " messages, or frames, remain open at the sender");
    } else if (
        link.channel().incomingMessages() || link.channel().bufferedBytes()) {
      fail(name + "messages remain open at the receiver");
    }
  }
}

// No relay ever holds more than it may, and it knows how much that is.
void RelaySimulation::checkMemory(size_t r) {
  RelayService& relays = network_.rank(r).relays();
  const uint64_t held = relays.countHeldBytes();
  const auto limit = static_cast<uint64_t>(options_.relay_bytes);
  if (held != relays.counters().heldBytes) {
    fail(
        "relay " + std::to_string(r) + " holds " + std::to_string(held) +
        " bytes, and counts " + std::to_string(relays.counters().heldBytes));
  }
  if (held > limit) {
    fail("relay " + std::to_string(r) + " holds more than it may");
  }
  result_.fullest = std::max(
      result_.fullest, static_cast<double>(held) / static_cast<double>(limit));
}

// Counts what the log tells of relays.
void RelaySimulation::onLine(std::string_view line) {
  const auto has = [&](const char* words) {
    return line.find(words) != std::string_view::npos;
  };
  result_.relayFlows += has("can be reached over");
  result_.relayFailures += has("no way to");
  result_.silentRelays += has("nothing comes back");
  for (const char* words : kProtocolWords) {
    if (has(words)) {
      fail("a protocol error: " + std::string(line));
    }
  }
}

template <typename Done>
void RelaySimulation::runUntil(TimePoint end, Done done) {
  const auto over = std::make_shared<bool>(false);
  network_.at(end, [over] { *over = true; });
  while (network_.error().empty() && !*over && !done()) {
    if (network_.events() > kEventLimit) {
      fail("no end in sight after " + std::to_string(kEventLimit) + " events");
    }
    network_.step();
  }
}

} // namespace

RelaySimulationResult simulateRelays(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace) {
  return RelaySimulation(seed, trace).run();
}

} // namespace resilient::test
