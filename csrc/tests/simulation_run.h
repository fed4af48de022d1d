#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "tests/simulated.h"
#include "tests/simulation.h"

// One simulated schedule: what happens is decided in simulation.cpp, what must
// have come of it in simulation_check.cpp. For these two files only.

namespace resilient::test {

// Marks memory that has been given back: what the core still reads from there
// shows as corruption, what it still writes shows at the end.
constexpr std::byte kGarbage{0xdb};

constexpr uint64_t kAnySourceTag = 2;
constexpr int kAny = -1;

// Longer than the slowest network of a schedule may need in virtual time.
constexpr Nanos kHealLimit = std::chrono::seconds(2000);
constexpr uint64_t kEventLimit = 3'000'000;

// Messages of one source that must keep their order.
struct StreamId {
  size_t src, dst;
  uint64_t group, tag;
  auto operator<=>(const StreamId&) const = default;
};

enum class Outcome { kPending, kOk, kError, kCancelled };

class Simulation final : public SimulatedNetwork::Listener {
 public:
  Simulation(
      uint64_t seed,
      const std::function<void(const std::string&)>& trace)
      : seed_(seed), prng_(mixBits(seed)), net_(mixBits(~seed), *this) {
    if (trace) {
      net_.setTrace(trace);
    }
  }

  SimulationResult run() {
    plan();
    const TimePoint end = net_.now() + duration_;
    runUntil(end);
    if (result_.error.empty()) {
      net_.at(net_.now(), [this] { heal(); });
      runUntil(net_.now() + kHealLimit);
    }
    if (result_.error.empty()) {
      checkEnd();
      sayBye();
    }
    result_.traceHash = net_.traceHash();
    result_.events = net_.events();
    return result_;
  }

 private:
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    uint64_t bytes = 0;
    bool registered = false; // paths may access it
  };

  struct Send;
  struct Recv;

  // One message and its send.
  struct Message {
    size_t src, dst;
    uint64_t group, stream, order; // order: index for streams of a tag
    uint64_t bytes;
    DType dtype;
    bool collective;
    std::unique_ptr<Send> op;
    Buffer buffer;
    Outcome outcome = Outcome::kPending;
    Status status;
    bool tolerant = false;
    std::vector<ByteRange> zeroFilled; // as its sender was told
  };

  struct Receive {
    size_t dst;
    int src; // kAny
    uint64_t group, stream, order;
    uint64_t bytes;
    DType dtype;
    bool collective;
    std::unique_ptr<Recv> op;
    Buffer buffer;
    Outcome outcome = Outcome::kPending;
    int matched = kAny; // source, once it is known at its end
    Status status;
    std::vector<std::byte> content;
  };

  struct Send final : SendOp {
    Send(Simulation& s, size_t i) : simulation(s), index(i) {}
    void finished(const Status& status) override {
      simulation.sendFinished(index, status);
    }
    Simulation& simulation;
    size_t index;
  };

  struct Recv final : RecvOp {
    Recv(Simulation& s, size_t i) : simulation(s), index(i) {}
    void finished(const Status& status) override {
      simulation.receiveFinished(index, status);
    }
    void arrived(uint64_t offset, uint64_t bytes) override {
      simulation.chunkArrived(index, offset, bytes);
    }
    Simulation& simulation;
    size_t index;
    std::vector<std::byte> seen; // the bytes as they arrived
    uint64_t arrivedBytes = 0;
  };

  // One process's part of one collective.
  struct Part {
    bool started = false, ended = false;
    std::vector<size_t> sends, receives;
    size_t open = 0;
  };
  struct Collective {
    uint64_t group, sequence;
    bool broken = false; // some operations of it may fail
    int strange = kAny; // the process that calls something else
    uint64_t orders = 1; // messages from each to each
    std::vector<Part> parts;
  };

  // --- chance
  uint64_t below(uint64_t n) {
    return prng_.below(n);
  }
  Nanos upTo(Nanos d) {
    return Nanos(
        static_cast<int64_t>(below(static_cast<uint64_t>(d.count()) + 1)));
  }
  template <typename T>
  T oneOf(std::initializer_list<T> list) {
    return list.begin()[below(list.size())];
  }
  void fail(const std::string& what) {
    if (result_.error.empty()) {
      result_.error = what;
    }
  }

  // --- what messages are: pure functions of the seed, known to both ends
  uint64_t hashOf(
      uint64_t src,
      uint64_t dst,
      uint64_t group,
      uint64_t stream,
      uint64_t order) const {
    uint64_t h = seed_;
    for (uint64_t x : {src, dst, group, stream, order}) {
      h = mixBits(h ^ x);
    }
    return h;
  }
  uint64_t bytesOf(uint64_t h) const {
    const uint64_t r = mixBits(h ^ 1);
    switch (r % 8) {
      case 0:
        return 0;
      case 1:
      case 2:
        return (r >> 8) % (chunkBytes_ + 1);
      case 3:
        return chunkBytes_ * (1 + (r >> 8) % 4);
      default:
        return (r >> 8) % (chunkBytes_ * 7 + 1);
    }
  }
  static DType dtypeOf(uint64_t h) {
    return static_cast<DType>(mixBits(h ^ 2) % 4);
  }
  uint64_t messageHash(
      size_t src,
      size_t dst,
      uint64_t group,
      uint64_t tag,
      uint64_t k) const {
    // With any source, messages must be alike, or they would not fit.
    return tag == kAnySourceTag ? hashOf(99, dst, group, tag, 0)
                                : hashOf(src, dst, group, tag, k);
  }
  static void fill(std::byte* data, uint64_t bytes, uint64_t h) {
    for (uint64_t at = 0; at < bytes; at += 8) {
      const uint64_t word = mixBits(h ^ (at << 8));
      std::memcpy(data + at, &word, std::min<uint64_t>(8, bytes - at));
    }
  }
  uint64_t contentHash(const Message& m) const {
    return hashOf(m.src + 1000, m.dst, m.group, m.stream, m.order);
  }
  bool arrivedRight(const Message& m, const std::vector<std::byte>& got) const;

  void plan();
  void planPaths(size_t a, size_t b);
  void planMessages(size_t src, size_t dst);
  void planCollectives();
  SimulatedLink randomLink();
  BurstRange randomBursts();
  void heal();
  void checkEnd();
  void checkStreams();
  void sayBye();

  void send(
      size_t src,
      size_t dst,
      uint64_t group,
      uint64_t stream,
      uint64_t order,
      bool collective,
      const OpSignature& signature);
  void planSource(size_t index);
  void growSource(size_t index, uint64_t end);
  void settle(size_t index);
  void sendNext(const StreamId& id);
  void receive(
      size_t dst,
      int src,
      uint64_t group,
      uint64_t stream,
      uint64_t order,
      bool collective,
      uint64_t bytes,
      DType dtype,
      const OpSignature& signature);
  void receiveNext(const StreamId& id, bool any, bool mayMismatch);
  void cancelSend(size_t index);
  void cancelReceive(size_t index);
  void sendFinished(size_t index, const Status& status);
  void chunkArrived(size_t index, uint64_t offset, uint64_t bytes);
  void receiveFinished(size_t index, const Status& status);
  Buffer newBuffer(uint64_t bytes);
  void takeBack(Buffer& buffer);
  void giveBack(Buffer& buffer);

  void startPart(size_t c, size_t process);
  void partProgress(size_t c, size_t process, const Status& status);
  void endPart(size_t c, size_t process, const Status& status);
  void closeGroup(size_t process, uint64_t group);
  void failChannel(size_t a, size_t b);

  bool dead(size_t a, size_t b) const {
    return dead_.contains({std::min(a, b), std::max(a, b)});
  }

  // --- SimulatedNetwork::Listener
  void onControl(
      size_t process,
      size_t peer,
      std::span<const std::byte> payload) override {
    uint64_t number = 0;
    if (payload.size() < 8) {
      fail("a control message was cut");
      return;
    }
    std::memcpy(&number, payload.data(), 8);
    if (!controlReceived_.insert({peer, process, number}).second) {
      fail("a control message came twice");
    }
  }
  void onBye(size_t process, size_t peer) override {
    ++byes_[{peer, process}];
  }
  void onProtocolError(size_t process, size_t peer, const Status& status)
      override {
    fail(
        "process " + std::to_string(process) + " refused bytes of " +
        std::to_string(peer) + ": " + status.toString());
  }
  void onCollectiveMismatch(
      uint64_t group,
      uint64_t sequence,
      const OpSignature& local,
      const FrameHeader& remote,
      Channel& channel) override {
    const auto [process, peer] = net_.ownerOf(channel);
    if (local == remote.signature) {
      fail("a mismatch was reported of equal signatures");
    }
    for (size_t c = 0; c < collectives_.size(); ++c) {
      if (collectives_[c].group == group &&
          collectives_[c].sequence == sequence) {
        if (collectives_[c].strange == kAny) {
          fail("a mismatch was reported where there is none");
        }
        net_.at(net_.now(), [this, c, p = process] {
          endPart(c, p, Status(StatusCode::kMismatch, "mismatch"));
        });
      }
    }
  }
  void onSettled() override {
    for (size_t a = 0; a < processes_; ++a) {
      if (net_.staging(a).used() > net_.staging(a).limit()) {
        fail("the staging budget was exceeded");
      }
      for (size_t b = 0; b < processes_; ++b) {
        if (a == b) {
          continue;
        }
        const Channel& c = net_.channel(a, b);
        if (c.bufferedBytes() > eagerBytes_[a]) {
          fail(
              "process " + std::to_string(a) + " holds " +
              std::to_string(c.bufferedBytes()) + " bytes for " +
              std::to_string(b) + ", budget " + std::to_string(eagerBytes_[a]));
        }
      }
    }
  }

  void runUntil(TimePoint end) {
    bool over = false; // outlived by the event only if nothing runs any more
    net_.at(end, [&over] { over = true; });
    while (result_.error.empty() && !over) {
      if (net_.events() > kEventLimit) {
        fail(
            "no end in sight after " + std::to_string(kEventLimit) + " events");
      }
      net_.step();
    }
  }

  const uint64_t seed_;
  Prng prng_;
  SimulatedNetwork net_;
  SimulationResult result_;

  size_t processes_ = 2;
  uint64_t groups_ = 1;
  uint32_t chunkBytes_ = 64;
  std::vector<uint64_t> eagerBytes_;
  Nanos duration_{};
  double cancelChance_ = 0;
  double mismatchChance_ = 0;

  std::vector<Message> messages_;
  std::vector<Receive> receives_;
  std::map<StreamId, std::vector<size_t>> sent_; // messages_, in order
  // By (dst, group, tag): receives_ in order of post.
  std::map<std::tuple<size_t, uint64_t, uint64_t>, std::vector<size_t>> posted_;
  std::vector<Collective> collectives_;
  // Which part an operation belongs to.
  std::map<size_t, size_t> collectiveOfSend_, collectiveOfReceive_;
  std::set<std::pair<size_t, uint64_t>> closed_; // process, group
  std::set<std::pair<size_t, size_t>> dead_; // pairs whose channel failed
  std::vector<Buffer> graveyard_, spare_;
  std::set<std::tuple<size_t, size_t, uint64_t>> controlReceived_;
  std::set<std::tuple<size_t, size_t, uint64_t>> controlSent_;
  std::map<std::pair<size_t, size_t>, int> byes_;
  bool healing_ = false;
};

} // namespace resilient::test
