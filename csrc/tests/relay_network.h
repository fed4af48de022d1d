#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <vector>

#include "base/random.h"
#include "delegate/peer_link.h"
#include "delegate/relay_service.h"
#include "path/uplink.h"
#include "tests/plain_link_host.h"

namespace resilient::test {

class RelayNetwork;

// A process with links to all others, in a loop whose time is that of the
// network. It ends a turn as the Engine does.
class SimulatedRank final : public PlainLinkHost {
 public:
  enum class State { kRuns, kStopped, kGone };

  // `declared`: the limit on what it sends to the other site.
  SimulatedRank(
      RelayNetwork& network,
      size_t rank,
      const EngineOptions& options,
      const std::string& site,
      std::optional<double> declared);
  ~SimulatedRank() override;
  void join(const std::vector<std::unique_ptr<SimulatedRank>>& all);

  size_t rank() const {
    return rank_;
  }
  State state() const {
    return state_;
  }
  void setState(State state) {
    state_ = state;
  }
  // Ends all links and what it relays, as the Engine does.
  void end(const std::string& how);
  PeerLink& link(size_t peer) {
    return *links_[peer];
  }
  RelayService& relays() {
    return *service_;
  }
  void setStagingBytes(uint64_t bytes) {
    staging_.setLimit(bytes);
  }
  bool drained();
  // A relay that has said that it is busy gets no chunks while a connection
  // carries them.
  void checkBusy(PeerLink& link, const Roles& roles);

  // LinkHost
  int32_t globalRank() const override {
    return static_cast<int32_t>(rank_);
  }
  PeerLink* linkTo(const Uid& uid) override;
  PeerLink* linkOf(const Channel& channel) override {
    return links_[channel.id() - 1].get();
  }
  Uplink* uplink(const std::string& site) override;
  void waitForTurn(const std::string& site) override;
  std::vector<Uid> relaysTo(const Link& peer) const override;
  void markDirty(PeerLink& link) override;
  void destroyLater(std::shared_ptr<void> object) override;
  void onControl(PeerLink& link, std::span<const std::byte> payload) override;
  void onLinkClosed(PeerLink& link, const Status& why) override;
  RecvOp* onRelayed(const FrameHeader& header, Channel& channel) override {
    return service_->receive(header, channel);
  }

 private:
  void scheduleTurn();
  void turn();
  void armTimer(PeerLink& link);

  RelayNetwork& network_;
  const size_t rank_;
  State state_ = State::kRuns;
  std::optional<Uplink> uplink_; // to the other site
  TimerId turnTimer_ = 0;
  std::map<RelayFlow, TimePoint> busyUntil_; // as relays have said
  std::unique_ptr<RelayService> service_;
  std::vector<std::unique_ptr<PeerLink>> links_; // by rank; its own: null
  std::vector<PeerLink*> dirty_;
  std::vector<TimePoint> timerAt_; // of channels, by rank
  bool scheduled_ = false;
};

// The hosts of some SimulatedRanks, and direct connections between them, which
// carry whole frames in order: with a latency, a rate and a window. They fall
// silent, break with frames in flight, and are made anew when that is possible.
// An end doubts a silent one only if another way works, as Failover does.
//
// Thread: one. No real clock, no I/O; the seed decides everything.
class RelayNetwork {
 public:
  struct Way {
    Nanos latency = std::chrono::milliseconds(5);
    Nanos jitter{};
    uint64_t bytesPerS = 100'000'000;
    uint64_t windowBytes = 256u << 10; // written and not read
  };
  using WayRef = size_t;

  explicit RelayNetwork(uint64_t seed) : prng_(seed) {}
  ~RelayNetwork();

  SimulatedRank& add(
      const EngineOptions& options,
      const std::string& site,
      uint64_t uplinkBytesPerS,
      std::optional<double> declared);
  // Both send to the other site over the uplink of the first one.
  void shareUplink(size_t r, size_t with) {
    uplinkOf_[with] = r;
  }
  void join();
  SimulatedRank& rank(size_t r) {
    return *ranks_[r];
  }
  size_t ranks() const {
    return ranks_.size();
  }
  bool runs(size_t r) const {
    return ranks_[r]->state() == SimulatedRank::State::kRuns;
  }
  bool crossesSites(size_t a, size_t b) const {
    return ranks_[a]->self().site != ranks_[b]->self().site;
  }

  // --- direct connections: each is up whenever it can be
  WayRef connect(size_t a, size_t b, const Way& way);
  std::vector<WayRef> between(size_t a, size_t b) const;
  // Nothing passes until then.
  void silence(WayRef way, TimePoint until);
  // It breaks now, and both ends notice within `notice`. Not made anew before
  // `until`.
  void cut(WayRef way, Nanos notice, TimePoint until);
  void heal();

  // --- processes
  void stop(size_t r);
  void resume(size_t r);
  void kill(size_t r);
  void leave(size_t r);

  // --- time
  TimePoint now() const {
    return now_;
  }
  void at(TimePoint when, std::function<void()> what);
  // Calls in the loop of that rank: now, or when it runs again.
  void in(size_t r, std::function<void()> what);
  bool step();
  uint64_t events() const {
    return events_;
  }
  // Notes of relays about what they have passed on.
  uint64_t passedNotes() const {
    return passedNotes_;
  }
  uint64_t busyNotes() const {
    return busyNotes_;
  }
  // The first thing that went wrong; empty: nothing.
  const std::string& error() const {
    return error_;
  }
  void fail(const std::string& what);

  uint64_t traceHash() const {
    return traceHash_;
  }
  void setTrace(std::function<void(const std::string&)> sink) {
    trace_ = std::move(sink);
  }
  void note(uint64_t what, uint64_t a, uint64_t b, const char* text);

  // --- from ranks
  // Moves frames of a link to its ways.
  void pump(SimulatedRank& rank, PeerLink& link);
  void onPassed(const RelayNote& note) {
    ++passedNotes_;
    busyNotes_ += note.busy;
  }
  void onLinkClosed(SimulatedRank& rank, PeerLink& link);

  std::function<void(size_t)> afterTurn; // of a rank

 private:
  struct Frame {
    TimePoint at; // of its arrival
    std::vector<std::byte> bytes; // header and payload
  };
  // One direction of a connection.
  struct Direction {
    std::deque<Frame> frames;
    uint64_t bytes = 0; // of frames
    TimePoint linkFree{}, lastArrival{};
    bool ended = false; // nothing follows the last frame
  };
  struct Connection {
    Way way;
    std::array<size_t, 2> ranks{};
    std::array<PathId, 2> ids{};
    std::array<bool, 2> open{}; // the channel of that end knows it
    std::array<bool, 2> suspect{};
    std::array<Direction, 2> directions; // by writer
    bool made = false; // from then on until both ends are closed
    bool broken = false; // what is written is lost
    bool opening = false; // about to be made
    uint64_t generation = 0; // how often it was made
    TimePoint silentUntil{}, notBefore{};
  };
  struct Event {
    TimePoint when;
    uint64_t number; // keeps events of one time in order
    std::function<void()> what;
    bool operator<(const Event& o) const {
      return when != o.when ? when > o.when : number > o.number;
    }
  };

  Nanos upTo(Nanos most) {
    return Nanos(
        static_cast<int64_t>(
            prng_.below(static_cast<uint64_t>(most.count()) + 1)));
  }
  void wake(size_t r, TimePoint when);
  void run(size_t r);
  void readAll(size_t r);
  void read(Connection& c, size_t side, const std::vector<std::byte>& bytes);
  TimePoint nextArrival(size_t r) const;
  bool write(Connection& c, size_t side, RateLimit* limit);
  void assign(SimulatedRank& rank, PeerLink& link);
  void openLater(WayRef ref);
  void open(WayRef ref);
  void closeEnd(WayRef ref, size_t side);
  void breakDirections(Connection& c);
  void doubt(WayRef ref, size_t side, uint64_t generation);
  void setSuspect(WayRef ref, size_t side, bool suspect);
  void endSilence(WayRef ref);
  void leaveWhenDrained(size_t r, TimePoint limit, bool saidBye);
  PeerLink& linkOf(const Connection& c, size_t side) {
    return ranks_[c.ranks[side]]->link(c.ranks[1 - side]);
  }
  size_t sideOf(const Connection& c, size_t r) const {
    return c.ranks[0] == r ? 0 : 1;
  }

  Prng prng_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  std::vector<uint64_t> uplinkBytesPerS_; // by rank: to the other site
  std::vector<TimePoint> uplinkFree_;
  std::vector<size_t> uplinkOf_; // by rank
  std::vector<TimePoint> wakeAt_; // by rank
  std::deque<Connection> connections_;
  bool ending_ = false;
  TimePoint now_{std::chrono::seconds(1)};
  std::priority_queue<Event> queue_;
  uint64_t events_ = 0, eventNumber_ = 0;
  uint64_t passedNotes_ = 0, busyNotes_ = 0;
  std::string error_;
  uint64_t traceHash_ = 0;
  std::function<void(const std::string&)> trace_;
};

} // namespace resilient::test
