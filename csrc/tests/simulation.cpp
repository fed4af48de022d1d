#include "tests/simulation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "transport/simulated.h"

namespace resilient::test {
namespace {

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
    Simulation& simulation;
    size_t index;
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

  void plan();
  void planPaths(size_t a, size_t b);
  void planMessages(size_t src, size_t dst);
  void planCollectives();
  SimulatedLink randomLink();
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
  void receiveFinished(size_t index, const Status& status);
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
      if (net_.staging(a).used > net_.staging(a).limit) {
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
  std::vector<Buffer> graveyard_;
  std::set<std::tuple<size_t, size_t, uint64_t>> controlReceived_;
  std::set<std::tuple<size_t, size_t, uint64_t>> controlSent_;
  std::map<std::pair<size_t, size_t>, int> byes_;
  bool healing_ = false;
};

// --- the plan

SimulatedLink Simulation::randomLink() {
  SimulatedLink l;
  l.latency = Nanos(1000) +
      upTo(oneOf<Nanos>(
          {std::chrono::microseconds(50),
           std::chrono::milliseconds(2),
           std::chrono::milliseconds(40)}));
  l.jitter = oneOf<Nanos>(
      {Nanos(0),
       std::chrono::microseconds(100),
       std::chrono::milliseconds(10)});
  l.bytesPerS = oneOf<uint64_t>({20'000, 1'000'000, 100'000'000});
  l.windowBytes = oneOf<uint64_t>({100, 500, 3000, 60'000});
  return l;
}

void Simulation::plan() {
  processes_ = 2 + below(3);
  groups_ = 1 + below(2);
  chunkBytes_ = oneOf<uint32_t>({64, 100, 256, 1000, 4096});
  duration_ = std::chrono::milliseconds(oneOf<int>({20, 200, 1000}));
  cancelChance_ = oneOf<double>({0, 0, 0.1, 0.4});
  mismatchChance_ = oneOf<double>({0, 0, 0.1});
  ChannelConfig config;
  config.chunkBytes = chunkBytes_;
  config.starvationBytes = 1 + below(20'000);
  for (size_t i = 0; i < processes_; ++i) {
    config.copyBytes = oneOf<uint64_t>({0, 32, 512, 8192});
    config.stageAfter = oneOf<Nanos>(
        {std::chrono::microseconds(100),
         std::chrono::milliseconds(2),
         std::chrono::milliseconds(100)});
    config.ownEagerBytes =
        oneOf<uint64_t>({0, chunkBytes_ / 2, chunkBytes_ * 3, 3000, 1 << 20});
    eagerBytes_.push_back(config.ownEagerBytes);
    net_.addProcess(config, oneOf<uint64_t>({0, 1000, 10'000, 1 << 20}));
  }
  net_.join();
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = 0; b < processes_; ++b) {
      if (a < b) {
        planPaths(a, b);
      }
      if (a != b) {
        planMessages(a, b);
      }
    }
  }
  planCollectives();
  if (below(10) == 0) {
    const size_t p = below(processes_);
    const uint64_t g = below(groups_);
    net_.at(net_.now() + upTo(duration_), [this, p, g] { closeGroup(p, g); });
  }
  if (below(10) == 0) {
    const size_t a = below(processes_);
    const size_t b = (a + 1) % processes_;
    net_.at(net_.now() + upTo(duration_), [this, a, b] { failChannel(a, b); });
  }
}

void Simulation::planPaths(size_t a, size_t b) {
  const TimePoint start = net_.now();
  for (uint64_t i = below(4); i > 0; --i) {
    const auto when = below(2) == 0 ? Nanos(0) : upTo(duration_);
    net_.at(start + when, [this, a, b] {
      if (!dead(a, b)) {
        net_.connect(a, b, randomLink());
      }
    });
  }
  for (uint64_t i = below(8); i > 0; --i) {
    const uint64_t kind = below(8);
    net_.at(start + upTo(duration_), [this, a, b, kind] {
      const auto open = net_.pathsBetween(a, b);
      const Nanos notice =
          below(3) == 0 ? Nanos(0) : upTo(std::chrono::milliseconds(60));
      if (kind == 0) { // all at once, for a while
        for (auto p : open) {
          ++result_.cuts;
          net_.cut(p, notice);
        }
        return;
      }
      if (kind <= 3) {
        if (!open.empty()) {
          ++result_.cuts;
          net_.cut(open[below(open.size())], notice);
        }
        return;
      }
      if (kind <= 5) {
        if (!open.empty()) {
          net_.stall(
              open[below(open.size())],
              net_.now() + upTo(std::chrono::milliseconds(300)));
        }
        return;
      }
      if (!dead(a, b) && open.size() < 4) {
        net_.connect(a, b, randomLink());
      }
    });
  }
  for (uint64_t i = below(4); i > 0; --i) {
    const bool turn = below(2) == 0;
    const uint64_t number = i;
    net_.at(start + upTo(duration_), [this, a, b, turn, number] {
      const size_t from = turn ? a : b;
      const size_t to = turn ? b : a;
      std::vector<std::byte> payload(8 + below(300));
      std::memcpy(payload.data(), &number, 8);
      if (net_.channel(from, to).failure().ok()) {
        controlSent_.insert({from, to, number});
      }
      net_.channel(from, to).sendControl(std::move(payload));
    });
  }
}

void Simulation::planMessages(size_t src, size_t dst) {
  const TimePoint start = net_.now();
  const uint64_t count = below(oneOf<uint64_t>({2, 8, 20}));
  const uint64_t early = below(4); // 0: receives first; 1: late; else mixed
  for (uint64_t i = 0; i < count; ++i) {
    const StreamId id{src, dst, below(groups_), below(3)};
    net_.at(start + upTo(duration_), [this, id] { sendNext(id); });
    Nanos when = upTo(duration_);
    if (early == 0) {
      when /= 10;
    } else if (early == 1) {
      when = duration_ - when / 10;
    }
    const bool any = id.tag == kAnySourceTag && below(2) == 0;
    if (below(10) != 0) { // else it is received in the end
      net_.at(start + when, [this, id, any] {
        receiveNext(id, any, /*mayMismatch=*/true);
      });
    }
  }
}

void Simulation::planCollectives() {
  const TimePoint start = net_.now();
  for (uint64_t g = 0; g < groups_; ++g) {
    const uint64_t count = below(4);
    std::vector<Nanos> when(processes_);
    for (uint64_t sequence = 0; sequence < count; ++sequence) {
      const size_t c = collectives_.size();
      Collective& x = collectives_.emplace_back();
      x.group = g;
      x.sequence = sequence;
      x.orders = 1 + below(3);
      x.parts.resize(processes_);
      if (prng_.chance(mismatchChance_)) {
        x.strange = static_cast<int>(below(processes_));
        x.broken = true;
      }
      for (size_t p = 0; p < processes_; ++p) {
        when[p] += upTo(duration_ / 5);
        net_.at(start + when[p], [this, c, p] { startPart(c, p); });
        if (prng_.chance(cancelChance_ / 4)) {
          net_.at(start + when[p] + upTo(duration_ / 5), [this, c, p] {
            endPart(c, p, Status(StatusCode::kAborted, "given up"));
          });
        }
      }
    }
  }
}

// --- operations

void Simulation::send(
    size_t src,
    size_t dst,
    uint64_t group,
    uint64_t stream,
    uint64_t order,
    bool collective,
    const OpSignature& signature) {
  const size_t index = messages_.size();
  Message& m = messages_.emplace_back();
  const uint64_t h = collective ? hashOf(src, dst, group, stream, order)
                                : messageHash(src, dst, group, stream, order);
  m.src = src;
  m.dst = dst;
  m.group = group;
  m.stream = stream;
  m.order = order;
  m.bytes = bytesOf(h);
  m.dtype = dtypeOf(h);
  m.collective = collective;
  m.op = std::make_unique<Send>(*this, index);
  m.buffer.data = std::make_unique<std::byte[]>(m.bytes);
  m.buffer.bytes = m.bytes;
  fill(m.buffer.data.get(), m.bytes, contentHash(m));
  Send& op = *m.op;
  op.key = MessageKey{group, stream, order};
  op.pointToPoint = !collective;
  op.signature = signature;
  if (!collective) {
    op.signature.dtype = m.dtype;
  }
  op.trafficClass = static_cast<TrafficClass>(below(kTrafficClassCount));
  op.sourceRank = static_cast<int32_t>(src);
  op.data = m.buffer.data.get();
  op.bytes = m.bytes;
  if (!collective) {
    sent_[{src, dst, group, stream}].push_back(index);
  }
  net_.note(10, index, m.bytes, "send of message with bytes");
  net_.note(10, src, dst, "  from and to");
  net_.note(10, group, stream, "  in group and stream");
  net_.channel(src, dst).send(&op, net_.now());
  if (!collective && prng_.chance(cancelChance_)) {
    const Nanos after = upTo(duration_ / oneOf<int>({2, 20, 1000}));
    net_.at(net_.now() + after, [this, index] { cancelSend(index); });
  }
}

void Simulation::sendNext(const StreamId& id) {
  send(
      id.src,
      id.dst,
      id.group,
      id.tag,
      sent_[id].size(),
      /*collective=*/false,
      OpSignature());
}

void Simulation::receive(
    size_t dst,
    int src,
    uint64_t group,
    uint64_t stream,
    uint64_t order,
    bool collective,
    uint64_t bytes,
    DType dtype,
    const OpSignature& signature) {
  const size_t index = receives_.size();
  Receive& r = receives_.emplace_back();
  r.dst = dst;
  r.src = src;
  r.group = group;
  r.stream = stream;
  r.order = order;
  r.bytes = bytes;
  r.dtype = dtype;
  r.collective = collective;
  r.op = std::make_unique<Recv>(*this, index);
  r.buffer.data = std::make_unique<std::byte[]>(bytes);
  r.buffer.bytes = bytes;
  Recv& op = *r.op;
  op.key = MessageKey{group, stream, order};
  op.ordered = !collective;
  op.source =
      src == kAny ? nullptr : &net_.channel(dst, static_cast<size_t>(src));
  op.signature = signature;
  if (!collective) {
    op.signature.dtype = dtype;
    posted_[{dst, group, stream}].push_back(index);
  }
  op.data = r.buffer.data.get();
  op.bytes = bytes;
  net_.note(11, index, bytes, "post of receive with bytes");
  net_.note(11, static_cast<uint64_t>(src), dst, "  from and to");
  net_.note(11, group, stream, "  in group and stream");
  net_.mailbox(dst).post(&op);
  if (!collective && !healing_ && prng_.chance(cancelChance_)) {
    const Nanos after = upTo(duration_ / oneOf<int>({2, 20, 1000}));
    net_.at(net_.now() + after, [this, index] {
      if (!healing_) { // then there is no other receive for its message
        cancelReceive(index);
      }
    });
  }
}

// The receive expects the message that must come to it, unless receives
// before it are cancelled or take from any source.
void Simulation::receiveNext(const StreamId& id, bool any, bool mayMismatch) {
  if (dead(id.src, id.dst) && below(2) == 0) {
    return;
  }
  uint64_t k = 0;
  for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
    const Receive& r = receives_[i];
    const int from = r.op && r.outcome == Outcome::kPending
        ? (r.op->matchedSource != nullptr
               ? static_cast<int>(net_.ownerOf(*r.op->matchedSource).second)
               : r.src)
        : r.matched;
    k += from == static_cast<int>(id.src);
  }
  const uint64_t h = messageHash(id.src, id.dst, id.group, id.tag, k);
  uint64_t bytes = bytesOf(h);
  DType dtype = dtypeOf(h);
  if (mayMismatch && prng_.chance(mismatchChance_)) {
    if (below(2) == 0) {
      bytes += 1;
    } else {
      dtype = DType::kFloat64;
    }
  }
  receive(
      id.dst,
      any ? kAny : static_cast<int>(id.src),
      id.group,
      id.tag,
      0,
      /*collective=*/false,
      bytes,
      dtype,
      OpSignature());
}

// The owner does with its memory what it likes: at once, and roughly.
void Simulation::giveBack(Buffer& buffer) {
  std::memset(buffer.data.get(), static_cast<int>(kGarbage), buffer.bytes);
  if (below(2) == 0) {
    graveyard_.push_back(std::move(buffer)); // checked at the end
  } else {
    buffer.data.reset(); // address sanitizer watches it
  }
}

void Simulation::cancelSend(size_t index) {
  Message& m = messages_[index];
  if (m.outcome != Outcome::kPending) {
    return;
  }
  net_.note(12, index, 0, "cancel of message");
  net_.channel(m.src, m.dst).cancelSend(m.op.get(), "cancelled", net_.now());
  m.outcome = Outcome::kCancelled;
  ++result_.cancelled;
  m.op.reset();
  giveBack(m.buffer);
}

void Simulation::cancelReceive(size_t index) {
  Receive& r = receives_[index];
  if (r.outcome != Outcome::kPending) {
    return;
  }
  net_.note(13, index, 0, "cancel of receive");
  if (r.op->matchedSource != nullptr) {
    r.matched = static_cast<int>(net_.ownerOf(*r.op->matchedSource).second);
  }
  net_.mailbox(r.dst).cancel(r.op.get(), "cancelled");
  r.outcome = Outcome::kCancelled;
  ++result_.cancelled;
  r.op.reset();
  giveBack(r.buffer);
}

void Simulation::sendFinished(size_t index, const Status& status) {
  Message& m = messages_[index];
  net_.note(14, index, static_cast<uint64_t>(status.code()), "sent");
  if (m.outcome != Outcome::kPending) {
    fail("message " + std::to_string(index) + " ended twice");
    return;
  }
  m.outcome = status.ok() ? Outcome::kOk : Outcome::kError;
  m.status = status;
  result_.failed += !status.ok();
  std::unique_ptr<Send> gone;
  if (below(2) == 0) {
    gone = std::move(m.op); // its memory is its owner's again
  }
  giveBack(m.buffer);
  auto c = collectiveOfSend_.find(index);
  if (c != collectiveOfSend_.end()) {
    partProgress(c->second, m.src, status);
  }
}

void Simulation::receiveFinished(size_t index, const Status& status) {
  Receive& r = receives_[index];
  net_.note(15, index, static_cast<uint64_t>(status.code()), "received");
  if (r.outcome != Outcome::kPending) {
    fail("receive " + std::to_string(index) + " ended twice");
    return;
  }
  r.outcome = status.ok() ? Outcome::kOk : Outcome::kError;
  r.status = status;
  if (r.op->matchedSource != nullptr) {
    r.matched = static_cast<int>(net_.ownerOf(*r.op->matchedSource).second);
  }
  if (status.ok()) {
    ++result_.delivered;
    r.content.assign(r.buffer.data.get(), r.buffer.data.get() + r.buffer.bytes);
  } else {
    ++result_.failed;
  }
  std::unique_ptr<Recv> gone;
  if (below(2) == 0) {
    gone = std::move(r.op);
  }
  giveBack(r.buffer);
  auto c = collectiveOfReceive_.find(index);
  if (c != collectiveOfReceive_.end()) {
    partProgress(c->second, r.dst, status);
  }
}

// --- collectives

void Simulation::startPart(size_t c, size_t process) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  if (part.ended || closed_.contains({process, x.group})) {
    return;
  }
  part.started = true;
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  signature.count = 10 + x.sequence;
  if (x.strange == static_cast<int>(process)) {
    signature.kind = OpKind::kBroadcast;
    signature.root = 0;
  }
  net_.note(16, c, process, "collective begins at process");
  net_.mailbox(process).begin(x.group, x.sequence, signature);
  const uint64_t stream = kCollectiveBit | x.sequence;
  const bool receivesFirst = below(2) == 0;
  for (int step = 0; step < 2; ++step) {
    for (uint64_t order = 0; order < x.orders; ++order) {
      for (size_t peer = 0; peer < processes_; ++peer) {
        if (peer == process) {
          continue;
        }
        ++part.open;
        if ((step == 0) == receivesFirst) {
          const uint64_t h = hashOf(peer, process, x.group, stream, order);
          part.receives.push_back(receives_.size());
          collectiveOfReceive_[receives_.size()] = c;
          receive(
              process,
              static_cast<int>(peer),
              x.group,
              stream,
              order,
              /*collective=*/true,
              bytesOf(h),
              dtypeOf(h),
              signature);
        } else {
          part.sends.push_back(messages_.size());
          collectiveOfSend_[messages_.size()] = c;
          send(
              process,
              peer,
              x.group,
              stream,
              order,
              /*collective=*/true,
              signature);
        }
      }
    }
  }
}

// One operation of it has ended: with the last, or the first error, it ends.
void Simulation::partProgress(size_t c, size_t process, const Status& status) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  --part.open;
  if (part.ended) {
    return;
  }
  if (!status.ok()) {
    bool excused = x.broken;
    for (size_t p = 0; p < processes_; ++p) {
      excused = excused || closed_.contains({p, x.group});
      for (size_t q = 0; q < processes_; ++q) {
        excused = excused || (p != q && dead(p, q));
      }
    }
    if (!excused) {
      fail(
          "collective " + std::to_string(c) + " failed at process " +
          std::to_string(process) + ": " + status.toString());
    }
  }
  if (!status.ok() || part.open == 0) {
    net_.at(net_.now(), [this, c, process, status] {
      endPart(c, process, status);
    });
  }
}

void Simulation::endPart(size_t c, size_t process, const Status& status) {
  Collective& x = collectives_[c];
  Part& part = x.parts[process];
  if (part.ended || closed_.contains({process, x.group})) {
    part.ended = true;
    return;
  }
  if (!part.started && status.ok()) {
    return;
  }
  part.ended = true;
  if (!status.ok()) {
    x.broken = true;
  }
  net_.note(17, c, process, "collective ends at process");
  for (size_t i : part.sends) {
    cancelSend(i);
  }
  if (below(2) == 0) {
    for (size_t i : part.receives) {
      cancelReceive(i);
    }
    net_.mailbox(process).end(x.group, x.sequence, status);
    return;
  }
  // Also in the other order: what is posted and not matched then ends.
  net_.mailbox(process).end(x.group, x.sequence, status);
  net_.at(net_.now(), [this, c, process] {
    for (size_t i : collectives_[c].parts[process].receives) {
      cancelReceive(i);
    }
  });
}

void Simulation::closeGroup(size_t process, uint64_t group) {
  net_.note(18, process, group, "process closes group");
  closed_.insert({process, group});
  for (Collective& x : collectives_) {
    if (x.group == group) {
      x.broken = true;
      for (size_t i : x.parts[process].sends) {
        cancelSend(i);
      }
    }
  }
  net_.mailbox(process).closeGroup(group);
}

void Simulation::failChannel(size_t a, size_t b) {
  net_.note(19, a, b, "channel fails");
  dead_.insert({std::min(a, b), std::max(a, b)});
  for (Collective& x : collectives_) {
    x.broken = true; // it may have needed the channel
  }
  net_.channel(a, b).fail(Status(StatusCode::kNetwork, "channel failed"));
  for (auto p : net_.pathsBetween(a, b)) {
    net_.cut(p, std::chrono::milliseconds(50));
  }
  net_.at(net_.now() + upTo(std::chrono::milliseconds(100)), [this, a, b] {
    net_.channel(b, a).fail(Status(StatusCode::kNetwork, "channel failed"));
    for (auto p : net_.pathsBetween(a, b)) {
      net_.cut(p, Nanos(0));
    }
  });
}

// --- the end

// From now on the network works, and every message gets its receive: then
// everything must end by itself.
void Simulation::heal() {
  healing_ = true;
  net_.note(20, 0, 0, "healing");
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = a + 1; b < processes_; ++b) {
      if (!dead(a, b)) {
        net_.connect(a, b, SimulatedLink());
      }
    }
  }
  for (size_t c = 0; c < collectives_.size(); ++c) {
    for (size_t p = 0; p < processes_; ++p) {
      Part& part = collectives_[c].parts[p];
      if (!part.started || collectives_[c].broken) {
        if (!part.started) {
          collectives_[c].broken = true;
        }
        endPart(c, p, Status(StatusCode::kAborted, "given up at the end"));
        for (size_t i : part.receives) {
          cancelReceive(i);
        }
        for (size_t i : part.sends) {
          cancelSend(i);
        }
      }
    }
  }
  // Receives from any source would take what others need.
  for (size_t i = 0; i < receives_.size(); ++i) {
    const Receive& r = receives_[i];
    if (!r.collective && r.src == kAny && r.outcome == Outcome::kPending &&
        r.op->matchedSource == nullptr) {
      cancelReceive(i);
    }
  }
  std::set<StreamId> streams;
  for (const auto& [id, list] : sent_) {
    streams.insert(id);
  }
  for (const Receive& r : receives_) {
    if (!r.collective && r.src != kAny) {
      streams.insert({static_cast<size_t>(r.src), r.dst, r.group, r.stream});
    }
  }
  for (const StreamId& id : streams) {
    if (closed_.contains({id.dst, id.group}) || dead(id.src, id.dst)) {
      continue;
    }
    size_t taken = 0;
    std::vector<size_t> waiting;
    for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
      const Receive& r = receives_[i];
      const bool pending = r.outcome == Outcome::kPending;
      if (pending && r.op->matchedSource == nullptr) {
        if (r.src == static_cast<int>(id.src)) {
          waiting.push_back(i);
        }
        continue;
      }
      const int from = pending
          ? static_cast<int>(net_.ownerOf(*r.op->matchedSource).second)
          : r.matched;
      taken += from == static_cast<int>(id.src);
    }
    const size_t sent = sent_[id].size();
    if (taken > sent) {
      fail("more messages were received than sent");
      return;
    }
    while (waiting.size() > sent - taken) {
      cancelReceive(waiting.back());
      waiting.pop_back();
    }
    for (size_t n = waiting.size(); n < sent - taken; ++n) {
      receiveNext(id, /*any=*/false, /*mayMismatch=*/false);
    }
  }
}

void Simulation::checkEnd() {
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Message& m = messages_[i];
    if (m.outcome == Outcome::kPending) {
      fail(
          "message " + std::to_string(i) + " from " + std::to_string(m.src) +
          " to " + std::to_string(m.dst) + " never ended");
    }
  }
  for (size_t i = 0; i < receives_.size(); ++i) {
    if (receives_[i].outcome == Outcome::kPending) {
      fail(
          "receive " + std::to_string(i) + " of " +
          std::to_string(receives_[i].dst) + " from " +
          std::to_string(receives_[i].src) + " never ended");
    }
  }
  checkStreams();
  for (const Receive& r : receives_) {
    if (!r.collective || r.outcome != Outcome::kOk) {
      continue;
    }
    std::vector<std::byte> expected(r.bytes);
    fill(
        expected.data(),
        r.bytes,
        hashOf(
            static_cast<uint64_t>(r.src) + 1000,
            r.dst,
            r.group,
            r.stream,
            r.order));
    if (r.content != expected) {
      fail("a collective received wrong bytes");
    }
  }
  for (const Collective& x : collectives_) {
    for (const Part& part : x.parts) {
      if (!x.broken && !part.ended) {
        fail("a collective never ended");
      }
    }
  }
  for (const Buffer& b : graveyard_) {
    if (!std::all_of(b.data.get(), b.data.get() + b.bytes, [](std::byte x) {
          return x == kGarbage;
        })) {
      fail("memory was written after it had been given back");
    }
  }
  for (size_t a = 0; a < processes_; ++a) {
    if (net_.staging(a).used != 0) {
      fail("staging memory was not given back");
    }
    for (size_t b = 0; b < processes_; ++b) {
      if (a == b) {
        continue;
      }
      const Channel& c = net_.channel(a, b);
      const std::string name =
          "channel " + std::to_string(a) + " to " + std::to_string(b) + ": ";
      if (c.openMessages() != 0 || !c.drained()) {
        fail(name + "messages remain open at the sender");
      }
      if (c.chargedBytes() != 0) {
        fail(name + "credit was not given back");
      }
      if (!dead(a, b) && c.incomingMessages() != 0) {
        fail(name + "messages remain open at the receiver");
      }
      if (c.bufferedBytes() != 0 && !dead(a, b)) {
        fail(name + "bytes remain buffered at the receiver");
      }
      result_.duplicates += c.counters().duplicateChunks;
    }
  }
  for (const auto& [from, to, number] : controlSent_) {
    if (!dead(from, to) && !controlReceived_.contains({from, to, number})) {
      fail("a control message was lost");
    }
  }
}

// The receives that took a message of one source, in the order in which they
// were posted, must have taken its messages in the order of their sends.
void Simulation::checkStreams() {
  for (const auto& [id, list] : sent_) {
    std::vector<const Receive*> took;
    for (size_t i : posted_[{id.dst, id.group, id.tag}]) {
      if (receives_[i].matched == static_cast<int>(id.src)) {
        took.push_back(&receives_[i]);
      }
    }
    const bool excused =
        closed_.contains({id.dst, id.group}) || dead(id.src, id.dst);
    if (took.size() > list.size() || (!excused && took.size() != list.size())) {
      fail(
          std::to_string(list.size()) + " messages were sent from " +
          std::to_string(id.src) + " to " + std::to_string(id.dst) +
          ", group " + std::to_string(id.group) + ", tag " +
          std::to_string(id.tag) + ", and " + std::to_string(took.size()) +
          " received");
      return;
    }
    for (size_t k = 0; k < list.size(); ++k) {
      const Message& m = messages_[list[k]];
      const std::string name = "message " + std::to_string(list[k]) + " (" +
          std::to_string(id.src) + " to " + std::to_string(id.dst) + ", tag " +
          std::to_string(id.tag) + ", #" + std::to_string(k) + "): ";
      const Receive* r = k < took.size() ? took[k] : nullptr;
      const bool fits =
          r == nullptr || (r->bytes == m.bytes && r->dtype == m.dtype);
      if (r != nullptr && r->outcome == Outcome::kOk) {
        std::vector<std::byte> expected(m.bytes);
        fill(expected.data(), m.bytes, contentHash(m));
        if (!fits || r->content != expected) {
          fail(name + "received with wrong bytes");
        }
      }
      if (r != nullptr && r->outcome == Outcome::kError && !excused) {
        const bool right = m.outcome == Outcome::kCancelled
            ? true
            : !fits && r->status.code() == StatusCode::kMismatch;
        if (!right) {
          fail(name + "its receive failed: " + r->status.toString());
        }
      }
      if (m.outcome == Outcome::kError && !excused) {
        const bool right =
            (!fits && m.status.code() == StatusCode::kMismatch) ||
            (r->outcome == Outcome::kCancelled &&
             m.status.code() == StatusCode::kAborted);
        if (!right) {
          fail(name + "its send failed: " + m.status.toString());
        }
      }
    }
  }
}

void Simulation::sayBye() {
  if (!result_.error.empty()) {
    return;
  }
  net_.at(net_.now(), [this] {
    for (size_t a = 0; a < processes_; ++a) {
      for (size_t b = 0; b < processes_; ++b) {
        if (a != b && !dead(a, b)) {
          net_.channel(a, b).sendBye();
        }
      }
    }
  });
  runUntil(net_.now() + kHealLimit);
  for (size_t a = 0; a < processes_; ++a) {
    for (size_t b = 0; b < processes_; ++b) {
      if (a != b && !dead(a, b) && byes_[{a, b}] != 1) {
        fail("a goodbye came " + std::to_string(byes_[{a, b}]) + " times");
      }
    }
  }
}

} // namespace

SimulationResult simulate(
    uint64_t seed,
    const std::function<void(const std::string&)>& trace) {
  return Simulation(seed, trace).run();
}

} // namespace resilient::test
