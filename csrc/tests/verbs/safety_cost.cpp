// What memory safety costs while nothing fails: messages over an RDMA path
// between two channels in one loop, with devices in memory that complete at
// once. benchmarks/verbs_safety.py compares this program with the same one of a
// build that trusts completions (base/trusted_completions.h).
//
//   verbs_safety KIND BYTES FRAMES ROUNDS
//
// KIND is "point" (point-to-point), "collective", or "read" (collective, and
// the far end reads from memory that is lent). Prints a line for each round:
// nanoseconds of the thread for each frame with data, the same by the clock,
// and how often the thread has slept. Fails if a byte is wrong.

#include <malloc.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/trusted_completions.h"
#include "tests/channel_pair.h"
#include "tests/verbs_fake.h"
#include "transport/verbs_path.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

// Messages under way. Both builds must be limited by the path, and not by when
// memory is free again: with less, they move other amounts at a time, and what
// is measured is the cache.
constexpr uint64_t kUnderWayBytes = 8u << 20;
constexpr size_t kMinUnderWay = 16;
// The mailbox looks through the receives of a tag.
constexpr size_t kMaxPointToPoint = 256;
constexpr uint64_t kStagingBytes = 256u << 20;

struct Job {
  bool pointToPoint = false;
  bool reads = false;
  size_t bytes = 0;
  uint64_t frames = 0; // of a round
  int rounds = 0;
};

double nowNs(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e9 +
      static_cast<double>(time.tv_nsec);
}

// A moment of the thread.
struct Moment {
  static Moment now(uint64_t frames) {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return {
        frames,
        nowNs(CLOCK_THREAD_CPUTIME_ID),
        nowNs(CLOCK_MONOTONIC),
        usage.ru_nvcsw};
  }

  uint64_t frames = 0;
  double threadNs = 0;
  double clockNs = 0;
  long sleeps = 0;
};

// A process with one path, which it pumps as PeerLink does.
class Process final : public test::TestProcess, public PathOwner {
 public:
  Process(EventLoop& loop, uint32_t id)
      : TestProcess(config(), id), loop_(loop) {
    staging.setLimit(kStagingBytes);
    completions.setWake([this] { pumpSoon(); });
  }

  std::unique_ptr<VerbsPath> path;
  std::unique_ptr<VerbsLoans> loans;

 private:
  static ChannelConfig config() {
    ChannelConfig config;
    config.ownEagerBytes = config.peerEagerBytes = 256u << 20;
    return config;
  }
  void channelReady(Channel&) override {
    pumpSoon();
  }
  void onPathClosed(Path&, const Status& why) override {
    std::fprintf(stderr, "the path has failed: %s\n", why.toString().c_str());
    std::exit(2);
  }
  void onPathReady(Path&) override {
    pumpSoon();
  }
  void onPathUse(Path&) override {
    channel.setClasses(path->id(), uint8_t{0xf});
    pumpSoon();
  }
  void pumpSoon() {
    if (!dirty_) {
      dirty_ = true;
      loop_.atEndOfTurn([this] {
        dirty_ = false;
        pump();
      });
    }
  }
  void pump() {
    bool any = true;
    for (int round = 0; any && round < 8; ++round) {
      any = false;
      while (path->hasRoom() && path->takeFrame() != 0) {
        any = true;
      }
      any = path->flush() || any;
    }
    if (any) {
      loop_.post([this] { pumpSoon(); });
    }
    completions.drain();
    armTimer();
  }
  void armTimer() {
    const TimePoint due = channel.deadline();
    if (due == kNever || (timer_ != 0 && timerAt_ <= due)) {
      return;
    }
    loop_.cancel(timer_);
    timerAt_ = due;
    timer_ = loop_.at(due, [this] {
      timer_ = 0;
      channel.onTimer(loop_.now());
      pumpSoon();
    });
  }

  EventLoop& loop_;
  bool dirty_ = false;
  TimerId timer_ = 0;
  TimePoint timerAt_ = kNever;
};

// Sends messages until all rounds are measured.
class Run {
 public:
  explicit Run(const Job& job) : job_(job) {
    const size_t count = std::clamp<size_t>(
        kUnderWayBytes / job.bytes,
        kMinUnderWay,
        job.pointToPoint ? kMaxPointToPoint : SIZE_MAX);
    memory_[0].resize(count * job.bytes);
    memory_[1].resize(count * job.bytes);
    for (size_t i = 0; i < memory_[0].size(); ++i) {
      memory_[0][i] = std::byte(i * 7 + i / 251);
    }
    for (size_t i = 0; i < count; ++i) {
      sends_.emplace_back(*this, memory_[0].data() + i * job.bytes);
      receives_.emplace_back(*this, memory_[1].data() + i * job.bytes);
    }
    connect();
  }

  int run() {
    loop_.post([this] { begin(); });
    loop_.run();
    for (Process& process : ends_) {
      process.path.reset();
      process.loans.reset();
    }
    for (size_t i = 1; i < moments_.size(); ++i) {
      const Moment& from = moments_[i - 1];
      const Moment& to = moments_[i];
      const auto frames = static_cast<double>(to.frames - from.frames);
      std::printf(
          "%.2f %.2f %ld\n",
          (to.threadNs - from.threadNs) / frames,
          (to.clockNs - from.clockNs) / frames,
          to.sleeps - from.sleeps);
    }
    if (memory_[0] != memory_[1] || !fake_.faults().empty() ||
        fake_.refusedReads() != 0 || job_.reads != (fake_.bytesRead() != 0)) {
      std::fprintf(stderr, "what has arrived is wrong\n");
      return 2;
    }
    return 0;
  }

 private:
  struct Send : SendOp {
    Send(Run& r, const std::byte* from) : run(r) {
      data = from;
      bytes = r.job_.bytes;
      pointToPoint = r.job_.pointToPoint;
      awaitReceive = r.job_.reads;
      r.setKey(key);
    }
    void finished(const Status& status) override {
      check(status);
      isFree = true;
      run.next();
    }
    Run& run;
    bool isFree = true;
  };
  struct Receive : RecvOp {
    Receive(Run& r, std::byte* into) : run(r) {
      data = into;
      bytes = r.job_.bytes;
      ordered = r.job_.pointToPoint;
      source = &r.ends_[1].channel;
      r.setKey(key);
    }
    void finished(const Status& status) override {
      check(status);
      run.received();
    }
    Run& run;
  };

  static void check(const Status& status) {
    if (!status.ok()) {
      std::fprintf(stderr, "a message failed: %s\n", status.toString().c_str());
      std::exit(2);
    }
  }
  void setKey(MessageKey& key) const {
    key.group = 1;
    key.stream = job_.pointToPoint ? 1 : kCollectiveBit | 1;
  }

  void connect() {
    std::vector<VerbsPort> ports;
    check(fake_.ports(ports));
    std::array<std::unique_ptr<VerbsEnd>, 2> ends;
    for (size_t side = 0; side < 2; ++side) {
      check(VerbsEnd::make(fake_, ports[side], {}, ends[side]));
    }
    for (size_t side = 0; side < 2; ++side) {
      check(
          ends[side]->queuePair().connect(
              ends[1 - side]->queuePair().address()));
    }
    for (size_t side = 0; side < 2; ++side) {
      Process& process = ends_[side];
      VerbsPathConfig config;
      config.initiator = side == 0;
      // A machine with other work must not end the measurement.
      config.silentAfter = config.proveWithin = 60s;
      config.remoteReads = ends[side]->queuePair().address().reads;
      if (job_.reads) {
        process.loans =
            std::make_unique<VerbsLoans>(loop_, VerbsLoans::Limits());
        config.loans = process.loans.get();
      }
      process.path = std::make_unique<VerbsPath>(
          loop_, process.channel, 1, std::move(ends[side]), config, process);
      if (job_.reads) {
        const std::span<std::byte> memory(memory_[side]);
        process.loans->lend({&memory, 1});
      }
    }
    for (Process& process : ends_) {
      process.mailbox.begin(1, 1, OpSignature());
    }
  }

  // Once both ends may send, and devices know all the memory.
  void begin() {
    for (size_t side = 0; side < 2; ++side) {
      const Process& process = ends_[side];
      if (!process.path->usable() ||
          (job_.reads &&
           process.loans->settled(memory_[side]) != memory_[side].size())) {
        loop_.after(1ms, [this] { begin(); });
        return;
      }
    }
    for (Receive& receive : receives_) {
      post(receive);
    }
    next();
  }

  void post(Receive& receive) {
    receive.key.order = posted_++;
    ends_[1].mailbox.post(&receive);
  }

  // A message may leave when the one before it in its memory has arrived.
  void next() {
    while (sent_ < received_ + sends_.size() && moments_.size() <= rounds()) {
      Send& send = sends_[sent_ % sends_.size()];
      if (!send.isFree) {
        return;
      }
      send.isFree = false;
      send.key.order = sent_++;
      ends_[0].channel.send(&send, loop_.now());
    }
  }

  // Receives end in their order.
  void received() {
    Receive& receive = receives_[received_++ % receives_.size()];
    if (moments_.size() > rounds()) {
      if (received_ == sent_) {
        loop_.stop();
      }
      return;
    }
    post(receive);
    const uint64_t frames = ends_[0].channel.pathCounters(1).chunksSent;
    // The first round warms up.
    if (frames >= (moments_.size() + 1) * job_.frames) {
      moments_.push_back(Moment::now(frames));
    }
    next();
  }

  size_t rounds() const {
    return static_cast<size_t>(job_.rounds);
  }

  const Job job_;
  test::VerbsFake fake_;
  EventLoop loop_;
  Process ends_[2] = {Process(loop_, 1), Process(loop_, 2)};
  std::vector<std::byte> memory_[2];
  std::deque<Send> sends_;
  std::deque<Receive> receives_;
  uint64_t posted_ = 0, sent_ = 0, received_ = 0;
  std::vector<Moment> moments_;
};

} // namespace
} // namespace resilient

int main(int count, char** words) {
  using namespace resilient;
  if (count == 2 && std::strcmp(words[1], "--trusts") == 0) {
    std::puts(kTrustsCompletions ? "yes" : "no");
    return 0;
  }
  const std::string kind = count == 5 ? words[1] : "";
  Job job;
  job.pointToPoint = kind == "point";
  job.reads = kind == "read";
  if (count == 5) {
    job.bytes = std::strtoull(words[2], nullptr, 10);
    job.frames = std::strtoull(words[3], nullptr, 10);
    job.rounds = std::atoi(words[4]);
  }
  if ((!job.pointToPoint && !job.reads && kind != "collective") ||
      job.bytes == 0 || job.frames == 0 || job.rounds < 1) {
    std::fprintf(
        stderr,
        "usage: verbs_safety point|collective|read BYTES FRAMES ROUNDS\n");
    return 2;
  }
  // Memory that one build gives back to the system, and the other one keeps by
  // chance, would be all that is seen.
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  return Run(job).run();
}
