#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "channel/channel.h"
#include "channel/mailbox.h"
#include "channel/operation.h"
#include "tests/check.h"

namespace resilient::test {

// Two processes, each with a mailbox and one channel to the other, and paths
// on which the test moves every single frame by hand.

struct TestSend : SendOp {
  void finished(const Status& s) override {
    ++ends;
    status = s;
  }
  TestSend() = default;
  TestSend(
      std::string_view text,
      uint64_t tag = 0,
      TrafficClass cls = TrafficClass::kGradient)
      : content(text) {
    key.group = 1;
    key.stream = tag;
    pointToPoint = true;
    trafficClass = cls;
    sourceRank = 0;
    data = reinterpret_cast<const std::byte*>(content.data());
    bytes = content.size();
  }
  std::string content;
  int ends = 0;
  Status status;
};

struct TestRecv : RecvOp {
  void finished(const Status& s) override {
    ++ends;
    status = s;
  }
  TestRecv(Channel* from, size_t size, uint64_t tag = 0) : content(size, '?') {
    key.group = 1;
    key.stream = tag;
    ordered = true;
    source = from;
    data = reinterpret_cast<std::byte*>(content.data());
    bytes = size;
  }
  std::string content;
  int ends = 0;
  Status status;
};

struct TestProcess : ChannelHost, MailboxListener {
  explicit TestProcess(const ChannelConfig& config, uint32_t id = 1)
      : mailbox(completions, *this),
        channel(id, config, mailbox, completions, staging, *this) {
    staging.setLimit(1 << 20);
  }
  void channelReady(Channel&) override {}
  void onControl(Channel&, std::span<const std::byte> payload) override {
    controls.emplace_back(
        reinterpret_cast<const char*>(payload.data()), payload.size());
  }
  void onBye(Channel&) override {
    ++byes;
  }
  void onCollectiveMismatch(
      uint64_t,
      uint64_t,
      const OpSignature& local,
      const FrameHeader& remote,
      Channel&) override {
    ++mismatches;
    lastLocal = local;
    lastRemote = remote.signature;
  }

  CompletionQueue completions;
  StagingMemory staging;
  Mailbox mailbox;
  Channel channel;
  std::vector<std::string> controls;
  int byes = 0;
  int mismatches = 0;
  OpSignature lastLocal, lastRemote;
};

struct ChannelPair {
  explicit ChannelPair(ChannelConfig config = defaults())
      : a(config), b(config) {}
  static ChannelConfig defaults() {
    ChannelConfig c;
    c.chunkBytes = 100;
    c.ownEagerBytes = c.peerEagerBytes = 100'000;
    c.copyBytes = 0;
    return c;
  }
  // Both ends give a path the same number here.
  void up(PathId path) {
    a.channel.addPath(path, now);
    b.channel.addPath(path, now);
  }
  void down(PathId path) {
    a.channel.removePath(path, now);
    b.channel.removePath(path, now);
  }
  TestProcess& other(TestProcess& p) {
    return &p == &a ? b : a;
  }

  // Takes the next frame of `from` off the path, with its bytes.
  struct Frame {
    FrameBytes header;
    std::vector<std::byte> payload;
    FrameHeader fields() const {
      FrameHeader h;
      const Status s = decodeFrame(header, h);
      CHECK_EQ(s.toString(), "ok");
      return h;
    }
  };
  std::optional<Frame> take(TestProcess& from, PathId path) {
    if (from.channel.unwritten(path).empty() &&
        from.channel.pull(path, now) == nullptr) {
      return std::nullopt;
    }
    const OutFrame& f = from.channel.unwritten(path).front();
    Frame frame;
    frame.header = f.header;
    frame.payload.assign(f.payload, f.payload + f.payloadBytes);
    from.channel.popWritten(path);
    return frame;
  }
  Status give(TestProcess& to, PathId path, const Frame& frame) {
    Status s = begin(to, path, frame);
    return s.ok() ? finish(to, path, frame) : s;
  }
  Status begin(TestProcess& to, PathId path, const Frame& frame) {
    FrameHeader h;
    Status s = decodeFrame(frame.header, h);
    return s.ok() ? to.channel.onHeader(path, h, now) : s;
  }
  Status finish(TestProcess& to, PathId path, const Frame& frame) {
    std::byte* where = to.channel.destination(path);
    if (where != nullptr && !frame.payload.empty()) {
      std::memcpy(where, frame.payload.data(), frame.payload.size());
    }
    return to.channel.onPayload(path, now);
  }
  // One frame from end to end; nothing if there is none.
  std::optional<FrameHeader> move(TestProcess& from, PathId path) {
    auto frame = take(from, path);
    if (!frame) {
      return std::nullopt;
    }
    const Status s = give(other(from), path, *frame);
    CHECK_EQ(s.toString(), "ok");
    return frame->fields();
  }
  // All frames in both directions, time passing for acknowledgements.
  void settle(std::vector<PathId> paths) {
    for (int round = 0; round < 20; ++round) {
      bool any = true;
      while (any) {
        any = false;
        for (PathId p : paths) {
          any = move(a, p).has_value() || any;
          any = move(b, p).has_value() || any;
        }
      }
      now += std::chrono::milliseconds(10);
      a.channel.onTimer(now);
      b.channel.onTimer(now);
    }
    a.completions.drain();
    b.completions.drain();
  }
  // Both sides have nothing left of anything.
  void checkEmpty() {
    for (TestProcess* p : {&a, &b}) {
      CHECK_EQ(p->channel.openMessages(), 0u);
      CHECK_EQ(p->channel.incomingMessages(), 0u);
      CHECK_EQ(p->channel.bufferedBytes(), 0u);
      CHECK_EQ(p->channel.chargedBytes(), 0u);
      CHECK_EQ(p->staging.used(), 0u);
      CHECK(p->channel.drained());
    }
  }

  TimePoint now{std::chrono::seconds(1)};
  TestProcess a, b;
};

inline std::string text(size_t bytes, uint64_t seed = 1) {
  std::string s(bytes, ' ');
  for (size_t i = 0; i < bytes; ++i) {
    s[i] = static_cast<char>('a' + (i * 7 + seed * 13 + i / 100) % 26);
  }
  return s;
}

} // namespace resilient::test
