#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <queue>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "lab/packet.h"

// The effects of a network on packets, without I/O, threads or a clock.
//
// A pipe is one direction between two NICs. A packet passes, in this order:
//
//   outage -> policer of UDP -> own rate -> shared rates -> loss -> corruption,
//   duplication, reordering -> delay -> outage
//
// A packet that the pipe loses has used the link's time before. Decisions are
// taken for each wire packet, from a seed of the pipe's own.
//
// How it works. Everything that happens later is an event in one queue: a
// limiter has sent its first packet, the first packet of a line arrives, a
// reordered packet arrives. A change of settings moves events by making the old
// ones void (the `version` of a limiter or a line) and scheduling new ones. An
// outage counts up the `epoch` of its pipe; a packet of an older epoch is
// dropped at its next step.
//
// Losses and other impairments depend on the seed and on the sequence of wire
// packets, not on how kernels group these to super-packets
// (lab_the_seed_decides_whatever_the_packets_look_like). Jitter is the
// exception: it is drawn once for each group.
namespace resilient::lab {

// Numbers are checked by who sets them (torch_resilient/testing/lab.py).
struct PipeSettings {
  Nanos delay{0};
  Nanos jitter{0}; // added, uniform in [0, jitter]; the order stays
  double rateBytesPerS = 0; // 0: no limit
  uint64_t queueBytes = 0; // behind the own rate; at least a packet fits
  double udpRateBytesPerS = 0; // of a policer, which has no queue; 0: none
  double loss = 0; // share of all packets
  double burstPackets = 0; // mean length of a run of losses; 0: independent
  double duplicate = 0;
  double corrupt = 0;
  double reorder = 0; // share of packets that are late by reorderDelay
  Nanos reorderDelay{0};
  bool down = false; // loses everything, also what is on its way
  std::vector<size_t> sharedRates = {}; // limiters, in this order
};

struct Amount {
  uint64_t packets = 0; // wire packets
  uint64_t bytes = 0; // of IP
};

// Each wire packet that entered, and each duplicate, ends as exactly one of
// delivered, lost, queueFull, outage, overrun and refused, or is still in
// flight (lab_random_networks_lose_no_account). Corrupted and reordered packets
// are also counted there.
struct PipeCounters {
  Amount entered;
  Amount delivered; // with duplicates
  Amount lost; // by chance
  // No room behind the own rate or a shared one, or beyond the policer's.
  Amount queueFull;
  Amount outage;
  Amount overrun; // more than kInFlightBytesMax on their way
  Amount refused; // by the receiving NIC
  Amount duplicated;
  Amount corrupted;
  Amount reordered;
};

// 10 Gbit/s with a delay of 100 ms are 125 MB. Lower would cap fast long
// links, higher only costs memory.
inline constexpr uint64_t kInFlightBytesMax = 256ull << 20;
// A policer lets so much pass at once after a pause.
inline constexpr double kPolicerBurstBytes = 32 << 10;
// A super-packet counts as arrived when its last byte has. It is cut to this
// much time on the link: its first bytes must not wait too long.
inline constexpr Nanos kPieceTimeMax = std::chrono::microseconds(500);
// A packet may arrive late by this part of its pipe's delay. Timers then fire
// for many packets at once; one for each packet took half of the carrier's
// processor time, and more than the ranks of benchmarks/geo_training.py.
inline constexpr int kLatePart = 128;

// Thread: the carrier's. Time must not go backwards between calls.
class Emulator {
 public:
  // Called for each packet that arrives; false if the NIC refused it. It runs
  // within advance(), or within offer() if nothing delays the packet, and must
  // not call the emulator.
  using Sink = std::function<bool(size_t pipe, const Packet&)>;

  explicit Emulator(Sink sink) : sink_(std::move(sink)) {}

  // Both return the next number; nothing is ever removed. A pipe has a limiter
  // of its own, so addPipe() also uses up a limiter's number.
  size_t addLimiter();
  size_t addPipe(uint64_t seed);
  size_t pipeCount() const {
    return pipes_.size();
  }
  size_t limiterCount() const {
    return limiters_.size();
  }

  // Queued packets leave at the new rate from now on. A rate of 0 is no limit.
  // Less room in the queue drops nothing that is queued.
  void setLimiter(
      TimePoint now,
      size_t limiter,
      double rateBytesPerS,
      uint64_t queueBytes);
  // A new delay holds for packets on their way, too, within their order. The
  // others hold from a packet's next step on. Going down drops everything that
  // is on its way in this pipe.
  void setPipe(TimePoint now, size_t pipe, const PipeSettings& settings);
  const PipeSettings& settings(size_t pipe) const {
    return pipes_[pipe].settings;
  }
  const PipeCounters& counters(size_t pipe) const {
    return pipes_[pipe].counters;
  }
  uint64_t inFlightBytes(size_t pipe) const {
    return pipes_[pipe].inFlightBytes;
  }

  // A packet enters. advance(now) must have been called.
  void offer(TimePoint now, size_t pipe, Packet packet);
  // Does everything that is due until `now`, in the order of its time.
  void advance(TimePoint now);
  // The time of the next event; kNever if nothing is on its way.
  // Also removes void events, so it is not const.
  TimePoint nextEvent();
  // When to call advance() again at the latest: no packet then arrives later
  // than kLatePart allows. Limiters may wait for that.
  TimePoint wakeBy();

 private:
  // A packet on its way through limiters.
  struct Traveller {
    size_t pipe;
    uint64_t epoch; // of the pipe when it entered
    size_t stage; // limiters passed
    Packet packet;
  };
  // A queue in front of a rate. Several pipes may share one; their packets
  // leave in the order of arrival.
  struct Limiter {
    double rateBytesPerS = 0;
    uint64_t queueBytes = 0;
    std::deque<Traveller> queue; // the first is being sent
    uint64_t queuedBytes = 0;
    TimePoint firstDone{};
    uint64_t version = 0; // events of older versions are void
  };
  struct OnLine {
    TimePoint entered; // with its jitter
    Packet packet;
  };
  struct Pipe {
    PipeSettings settings;
    PipeCounters counters;
    Prng prng;
    bool inBurst = false;
    uint64_t epoch = 0; // counts outages
    size_t ownLimiter;
    // The policer's, as of `udpCreditAt`.
    double udpCreditBytes = kPolicerBurstBytes;
    TimePoint udpCreditAt{};
    // Packets within the delay, in the order of arrival. Only the first has an
    // event; the others follow it, which keeps the order under jitter and new
    // delays.
    std::deque<OnLine> line;
    uint64_t lineVersion = 0;
    uint64_t inFlightBytes = 0;
  };
  enum class EventKind { kLimiter, kLine, kLate };
  struct Event {
    TimePoint time;
    uint64_t order; // first come, first served among equal times
    EventKind kind;
    size_t index; // of the limiter, the pipe, or in late_
    uint64_t version;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct Wake {
    TimePoint by;
    Event event; // void, or over: nothing to wake for
    bool operator>(const Wake& other) const {
      return by > other.by;
    }
  };

  // An event may be handled late by `slack`.
  void schedule(
      TimePoint time,
      Nanos slack,
      EventKind kind,
      size_t index,
      uint64_t version);
  void scheduleDone(size_t limiter);
  void wakeForLimiter(size_t limiter, Nanos delay);
  bool isVoid(const Event& event) const;
  void proceed(TimePoint now, Traveller traveller);
  std::optional<Packet> police(TimePoint now, Pipe& pipe, Packet packet);
  void enqueue(TimePoint now, size_t limiter, Traveller traveller);
  void startFirst(TimePoint now, size_t limiter);
  void limiterDone(TimePoint now, size_t limiter);
  void impair(TimePoint now, Traveller traveller);
  bool losesNext(Pipe& pipe);
  void enterLine(TimePoint now, size_t pipe, Packet packet);
  void armLine(TimePoint now, size_t pipe);
  void lineArrived(TimePoint now, size_t pipe);
  void deliver(size_t pipe, Packet packet);
  void drop(Pipe& pipe, Amount& cause, const Packet& packet);
  void flush(size_t pipe);

  Sink sink_;
  // Deques: what they hold cannot be copied, and stays where it is.
  std::deque<Limiter> limiters_;
  std::deque<Pipe> pipes_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes_;
  TimePoint advancedTo_{};
  std::vector<std::optional<Traveller>> late_; // reordered ones
  std::vector<size_t> lateFree_;
  uint64_t nextOrder_ = 0;
};

} // namespace resilient::lab
