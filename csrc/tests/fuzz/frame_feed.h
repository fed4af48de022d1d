#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "channel/channel_state.h"
#include "tests/channel_pair.h"
#include "tests/fuzz/fuzz_input.h"

namespace resilient::test {

// Feeds what a peer may send, decided by arbitrary bytes, to one process, and
// lets the process do things in between. Nothing may crash, hang, end an
// operation twice, or exceed a budget; a protocol error closes the path, as
// the engine does.
//
// First byte: even: the rest is the stream of one path, as it is. Odd: the
// rest is a program of steps, among them frames with right checksums, which
// chance would not find.
class FrameFeed : private FuzzInput {
 public:
  explicit FrameFeed(std::span<const uint8_t> input)
      : FuzzInput("frame feed", input),
        config_(makeConfig()),
        process_(config_) {
    process_.staging.setLimit(300);
  }

  void run() {
    path(0);
    if (byte() % 2 == 0) {
      post(250, 0);
      raw();
    } else {
      while (!input_.empty()) {
        step();
        check();
      }
    }
    finish();
  }

 private:
  static constexpr size_t kPaths = 3;

  static ChannelConfig makeConfig() {
    ChannelConfig c;
    c.chunkBytes = 100;
    c.ownEagerBytes = 2000;
    c.peerEagerBytes = 1000;
    c.copyBytes = 40;
    return c;
  }

  uint64_t number() {
    return numberOr([](uint64_t b) { return kCollectiveBit | b; });
  }

  Channel& channel() {
    return process_.channel;
  }

  // --- paths

  struct Path {
    PathId id = 0;
    bool open = false;
    FrameBytes header;
    size_t headerRead = 0;
    FrameHeader frame;
    size_t payloadRead = 0;
    size_t written = 0; // of the front frame
  };

  Path& path(size_t i) {
    Path& p = paths_[i % kPaths];
    if (!p.open) {
      p = Path{};
      p.id = ++lastPath_;
      p.open = true;
      channel().addPath(p.id, now_);
    }
    return p;
  }
  void close(Path& p) {
    if (p.open) {
      p.open = false;
      channel().removePath(p.id, now_);
    }
  }

  // As a transport reads, in whatever pieces.
  void read(Path& p, std::span<const uint8_t> data) {
    while (p.open) {
      Status status;
      if (p.headerRead < kFrameHeaderBytes) {
        const size_t n =
            std::min(data.size(), kFrameHeaderBytes - p.headerRead);
        std::memcpy(p.header.data() + p.headerRead, data.data(), n);
        p.headerRead += n;
        data = data.subspan(n);
        if (p.headerRead < kFrameHeaderBytes) {
          return;
        }
        p.payloadRead = 0;
        status = decodeFrame(p.header, p.frame);
        if (status.ok()) {
          status = channel().onHeader(p.id, p.frame, now_);
        }
        if (!status.ok()) {
          close(p);
          return;
        }
      }
      const size_t n =
          std::min(data.size(), p.frame.payloadBytes - p.payloadRead);
      std::byte* to = channel().destination(p.id);
      if (to != nullptr && n > 0) {
        std::memcpy(to + p.payloadRead, data.data(), n);
      }
      p.payloadRead += n;
      data = data.subspan(n);
      if (p.payloadRead < p.frame.payloadBytes) {
        return;
      }
      p.headerRead = 0;
      status = channel().onPayload(p.id, now_);
      if (!status.ok()) {
        close(p);
        return;
      }
      check();
      if (data.empty()) {
        return;
      }
    }
  }

  // As a transport writes; reading the payload is what finds dangling ones.
  void write(Path& p, size_t bytes) {
    while (p.open && bytes > 0) {
      if (channel().unwritten(p.id).empty() &&
          channel().pull(p.id, now_) == nullptr) {
        return;
      }
      const OutFrame& f = channel().unwritten(p.id).front();
      for (; bytes > 0 && p.written < kFrameHeaderBytes + f.payloadBytes;
           --bytes, ++p.written) {
        if (p.written >= kFrameHeaderBytes) {
          sum_ +=
              static_cast<uint8_t>(f.payload[p.written - kFrameHeaderBytes]);
        }
      }
      if (p.written < kFrameHeaderBytes + f.payloadBytes) {
        return;
      }
      p.written = 0;
      channel().popWritten(p.id);
    }
  }

  void raw() {
    while (!input_.empty()) {
      const size_t n = std::min<size_t>(input_.size(), 1 + input_[0] % 150);
      read(path(0), input_.first(n));
      input_ = input_.subspan(n);
      write(path(0), 1000);
    }
  }

  // --- steps

  FrameHeader header() {
    FrameHeader h;
    const uint8_t kind = byte();
    h.type = static_cast<FrameType>(1 + kind % 11); // 11: unknown
    h.trafficClass = static_cast<TrafficClass>(byte() % 5);
    h.flags = byte() % 8;
    h.ack = number();
    h.message = number();
    h.group = byte() % 3;
    h.stream = number();
    h.order = number();
    h.sourceRank = byte();
    h.signature.kind = static_cast<OpKind>(byte() % 13);
    h.signature.dtype = static_cast<DType>(byte() % 26);
    if (h.type == FrameType::kData) {
      h.chunkBytes = kind >= 128 ? 100 : static_cast<uint32_t>(number());
      h.totalBytes = kind >= 128 ? 250 : number();
      h.offset = h.chunkBytes * number();
      const uint64_t rest =
          h.totalBytes > h.offset ? h.totalBytes - h.offset : 0;
      h.payloadBytes = (h.flags & kFlagOffer) != 0
          ? 0
          : static_cast<uint32_t>(std::min<uint64_t>(rest, h.chunkBytes));
    } else if (h.type <= FrameType::kControl) {
      h.payloadBytes = byte() & 0xf8;
    } else if (h.type == FrameType::kResidual) {
      h.payloadBytes = 16u * (byte() % 8) + 8;
    }
    return h;
  }

  void step() {
    const uint8_t what = byte();
    switch (what % 16) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: { // a frame, perhaps torn, or completed elsewhere
        Path& p = path(what / 16);
        if (p.headerRead == kFrameHeaderBytes) {
          std::vector<uint8_t> rest(
              p.frame.payloadBytes - p.payloadRead, byte());
          read(p, rest);
        }
        FrameBytes bytes;
        encodeFrame(header(), bytes);
        read(p, {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
        size_t n = byte();
        n = std::min(n, input_.size());
        if (p.open && p.headerRead == kFrameHeaderBytes) {
          const size_t max = p.frame.payloadBytes - p.payloadRead;
          read(p, input_.first(std::min(n, max)));
          input_ = input_.subspan(std::min(n, max));
        }
        break;
      }
      case 5:
        write(path(what / 16), 1 + 2 * byte());
        break;
      case 6:
        close(path(what / 16));
        break;
      case 7:
        now_ += std::chrono::microseconds(100) * byte();
        channel().onTimer(now_);
        break;
      case 8:
        send(what >= 128 ? 250 : what, byte() % 3);
        break;
      case 9:
        post(what >= 128 ? 250 : what, byte() % 3);
        break;
      case 10:
        if (!sends_.empty()) {
          const size_t i = byte() % sends_.size();
          if (sends_[i]->ends == 0) {
            channel().cancelSend(sends_[i].get(), "cancel", now_);
          }
          sends_.erase(sends_.begin() + static_cast<ptrdiff_t>(i));
        }
        break;
      case 11:
        if (!receives_.empty()) {
          const size_t i = byte() % receives_.size();
          if (receives_[i]->ends == 0) {
            process_.mailbox.cancel(receives_[i].get(), "cancel");
          }
          receives_.erase(receives_.begin() + static_cast<ptrdiff_t>(i));
        }
        break;
      case 12:
        collective(byte() % 4, what / 16);
        break;
      case 13:
        channel().ping(path(what / 16).id);
        break;
      case 14:
        process_.completions.drain();
        break;
      case 15:
        if (what == 255) {
          channel().fail(Status(StatusCode::kNetwork, "failed"));
          for (Path& p : paths_) {
            close(p);
          }
        } else if (what == 239) {
          process_.mailbox.closeGroup(2);
        } else {
          channel().sendControl(std::vector<std::byte>(byte()));
        }
        break;
    }
  }

  void send(size_t bytes, uint64_t tag) {
    if (sends_.size() < 100) {
      sends_.push_back(std::make_unique<TestSend>(text(bytes), tag));
      if (tag == 2) {
        sends_.back()->tolerance.maxLost = 0.5f;
      }
      channel().send(sends_.back().get(), now_);
    }
  }
  void post(size_t bytes, uint64_t tag) {
    if (receives_.size() < 100) {
      receives_.push_back(
          std::make_unique<TestRecv>(
              tag == 1 ? nullptr : &channel(), bytes, tag));
      process_.mailbox.post(receives_.back().get());
    }
  }
  void collective(uint64_t sequence, int what) {
    const uint64_t stream = kCollectiveBit | sequence;
    OpSignature signature;
    signature.kind = OpKind::kAllReduce;
    if (what % 4 == 0) {
      process_.mailbox.begin(1, sequence, signature);
    } else if (what % 4 == 1) {
      process_.mailbox.end(1, sequence, Status());
    } else if (receives_.size() < 100 && posted_.insert(stream).second) {
      receives_.push_back(std::make_unique<TestRecv>(&channel(), 250, stream));
      receives_.back()->ordered = false;
      process_.mailbox.post(receives_.back().get());
    }
  }

  void check() {
    require(
        channel().bufferedBytes() <= config_.ownEagerBytes,
        "the budget is exceeded");
    require(
        channel().incomingMessages() <= 2 * kMaxOffers + 200,
        "too many records");
    require(process_.staging.used() <= 300, "the staging budget is exceeded");
    for (const auto& s : sends_) {
      require(s->ends <= 1, "a send ended twice");
    }
    for (const auto& r : receives_) {
      require(r->ends <= 1, "a receive ended twice");
    }
  }

  void finish() {
    process_.completions.drain();
    for (Path& p : paths_) {
      close(p);
    }
    for (auto& r : receives_) {
      if (r->ends == 0) {
        process_.mailbox.cancel(r.get(), "over");
      }
    }
    receives_.clear();
    channel().fail(Status(StatusCode::kAborted, "over"));
    process_.completions.drain();
    check();
    for (auto& s : sends_) {
      require(s->ends == 1, "a send never ended");
    }
    require(process_.staging.used() == 0, "staging memory is lost");
  }

  const ChannelConfig config_;
  std::vector<std::unique_ptr<TestSend>> sends_;
  std::vector<std::unique_ptr<TestRecv>> receives_;
  std::set<uint64_t> posted_; // streams of collectives
  TestProcess process_;
  Path paths_[kPaths];
  PathId lastPath_ = 0;
  TimePoint now_{std::chrono::seconds(1)};
  uint64_t sum_ = 0;
};

} // namespace resilient::test
