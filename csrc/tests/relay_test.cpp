#include <array>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/random.h"
#include "path/relay_window.h"
#include "tests/path_contract.h"
#include "transport/relay_path.h"
#include "wire/control.h"
#include "wire/relay.h"

namespace resilient::test {
namespace {

using namespace std::chrono_literals;

RelayFlow flowOf(uint8_t opener, uint8_t other, uint64_t number) {
  RelayFlow flow;
  flow.opener.fill(opener);
  flow.other.fill(other);
  flow.number = number;
  return flow;
}

// --- bytes

std::vector<std::byte> encoded(const RelayHeader& header, size_t frameBytes) {
  std::vector<std::byte> bytes(kRelayHeaderBytes + frameBytes);
  encodeRelay(header, std::span(bytes).first<kRelayHeaderBytes>());
  return bytes;
}

TEST(relay_header_survives_the_wire) {
  RelayHeader header;
  header.hop = RelayHop::kFromRelay;
  header.fromOpener = false;
  header.flow = flowOf(0x11, 0x22, 0x0807060504030201);
  header.number = 0x0a09;
  header.delivered = 0x0c0b;
  header.burstBytes = 0x0d << 10;
  const auto bytes = encoded(header, kFrameHeaderBytes + 3);
  const std::string expected =
      std::string("\x02\0\0\0\x0d\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08", 16) +
      std::string("\x09\x0a\0\0\0\0\0\0\x0b\x0c\0\0\0\0\0\0", 16) +
      std::string(16, '\x11') + std::string(16, '\x22');
  CHECK(std::memcmp(bytes.data(), expected.data(), expected.size()) == 0);
  RelayHeader back;
  std::span<const std::byte> frame;
  CHECK(decodeRelay(bytes, back, frame).ok());
  CHECK(back.hop == header.hop && !back.fromOpener);
  CHECK(back.flow == header.flow);
  CHECK_EQ(back.number, header.number);
  CHECK_EQ(back.delivered, header.delivered);
  CHECK_EQ(back.burstBytes, header.burstBytes);
  CHECK_EQ(frame.size(), kFrameHeaderBytes + 3);
}

TEST(relay_header_rounds_bursts_up) {
  const std::pair<uint64_t, uint64_t> bursts[] = {
      {0, 0},
      {1, 1024},
      {1025, 2048},
      {UINT64_MAX, uint64_t{UINT32_MAX} << 10}};
  for (const auto& [sent, told] : bursts) {
    RelayHeader header, back;
    header.flow = flowOf(1, 2, 3);
    header.burstBytes = sent;
    std::span<const std::byte> frame;
    CHECK(decodeRelay(encoded(header, kFrameHeaderBytes), back, frame).ok());
    CHECK_EQ(back.burstBytes, told);
  }
}

TEST(relay_header_claims_are_checked) {
  const auto good = encoded({.flow = flowOf(1, 2, 3)}, kFrameHeaderBytes);
  RelayHeader header;
  std::span<const std::byte> frame;
  CHECK(decodeRelay(good, header, frame).ok());
  for (size_t n = 0; n < good.size(); ++n) {
    CHECK_EQ(
        decodeRelay(std::span(good).first(n), header, frame).code(),
        StatusCode::kProtocol);
  }
  // (byte, value): hop, direction, reserved bytes.
  const std::pair<size_t, int> bad[] = {
      {0, 0}, {0, 3}, {0, 255}, {1, 2}, {2, 1}, {3, 128}};
  for (const auto& [at, value] : bad) {
    auto bytes = good;
    bytes[at] = static_cast<std::byte>(value);
    CHECK_EQ(decodeRelay(bytes, header, frame).code(), StatusCode::kProtocol);
  }
  CHECK(
      !decodeRelay(
           encoded({.flow = flowOf(1, 1, 3)}, kFrameHeaderBytes), header, frame)
           .ok());
}

TEST(relay_note_survives_the_wire) {
  RelayNote note;
  note.what = RelayNote::What::kClose;
  note.hop = RelayHop::kFromRelay;
  note.fromOpener = false;
  note.flow = flowOf(3, 4, 5);
  note.delivered = 6;
  note.passedBytes = 7;
  note.bytesPerS = 8;
  note.busy = true;
  note.key.secret = 9;
  note.key.publicKey.back() = std::byte{10};
  note.text = "no way";
  const auto payload = encode(note);
  CHECK(controlKind(payload) == ControlKind::kRelayNote);
  const auto back = decodeRelayNote(payload);
  CHECK(back.has_value());
  CHECK(back->what == note.what && back->hop == note.hop);
  CHECK(!back->fromOpener);
  CHECK(back->flow == note.flow);
  CHECK_EQ(back->delivered, 6u);
  CHECK_EQ(back->passedBytes, 7u);
  CHECK_EQ(back->bytesPerS, 8u);
  CHECK(back->busy);
  CHECK(back->key == note.key);
  CHECK_EQ(back->text, "no way");
  for (size_t n = 0; n < payload.size(); ++n) {
    CHECK(!decodeRelayNote(std::span(payload).first(n)).has_value());
  }
  // (byte, value): what, hop, direction, busy.
  const std::pair<size_t, int> bad[] = {
      {1, 0}, {1, 6}, {2, 0}, {2, 3}, {3, 2}, {68, 2}};
  for (const auto& [at, value] : bad) {
    auto bytes = payload;
    bytes[at] = static_cast<std::byte>(value);
    CHECK(!decodeRelayNote(bytes).has_value());
  }
  note.flow.other = note.flow.opener;
  CHECK(!decodeRelayNote(encode(note)).has_value());
}

// --- the window

// A relay that passes on `bytesPerS`, behind a way of `roundTrip`: the window
// after some seconds, and the longest queue in the last of them, in seconds.
std::pair<uint64_t, double>
windowOver(double bytesPerS, double roundTripS, uint64_t most) {
  constexpr uint64_t kFrame = 64u << 10;
  RelayWindow window(most);
  struct Sent {
    double at, done;
    bool full;
  };
  std::deque<Sent> sent;
  double now = 0, free = 0, longest = 0;
  uint64_t underWay = 0;
  while (now < 20) {
    while (underWay < window.bytes()) {
      underWay += kFrame;
      free = std::max(free, now) + kFrame / bytesPerS;
      sent.push_back({now, free + roundTripS, underWay >= window.bytes()});
    }
    const Sent first = sent.front();
    sent.pop_front();
    now = first.done;
    underWay -= kFrame;
    window.onPassed(kFrame, fromSeconds(now - first.at), first.full);
    if (now > 19) {
      longest = std::max(longest, now - first.at - roundTripS);
    }
  }
  return {window.bytes(), longest};
}

TEST(relay_window_fills_the_way_and_not_the_relay) {
  for (const double bytesPerS : {1e6, 10e6, 100e6, 1e9}) {
    for (const double roundTripS : {0.0005, 0.02, 0.1}) {
      const auto [bytes, queueS] =
          windowOver(bytesPerS, roundTripS, uint64_t(1) << 30);
      const double fills = bytesPerS * roundTripS;
      CHECK(static_cast<double>(bytes) >= 0.9 * fills);
      CHECK(
          static_cast<double>(bytes) <=
          std::max(2 * fills, 1.4 * fills + (512 << 10)));
      CHECK(queueS * bytesPerS <= std::max(fills, 1.5 * (256 << 10)));
    }
  }
}

TEST(relay_window_keeps_to_its_limit) {
  const auto [bytes, queueS] = windowOver(1e9, 0.1, 4u << 20);
  CHECK_EQ(bytes, uint64_t(4u << 20));
  (void)queueS;
}

// --- the path

// A process's channel to the relay, and the frames on it. There is no relay in
// between: what one end sends as for a relay, the other one gets as from one.
//
// Thread: the loop of its user. It outlives that, and so may the other end:
// frames lie in an inbox, at which each end looks by itself.
class ToRelay final : public TestProcess {
 public:
  ToRelay(PathUser& u, uint32_t id)
      : TestProcess(config(), id), user(u), loop(u.loop) {
    channel.addPath(kOnly, loop.now());
    look();
  }

  void onHeld(const FrameHeader& header, std::vector<std::byte> content) {
    (void)header;
    RelayHeader relay;
    std::span<const std::byte> frame;
    CHECK(decodeRelay(content, relay, frame).ok());
    FrameHeader within;
    if (decodeFrame(frame.first<kFrameHeaderBytes>(), within)
            .ok() && // not sealed
        within.type == FrameType::kData) {
      CHECK(relay.burstBytes >= within.totalBytes);
    }
    RelayNote note; // what the relay would have told when it left there
    note.what = RelayNote::What::kPassed;
    note.hop = RelayHop::kFromRelay;
    note.fromOpener = !relay.fromOpener;
    note.flow = relay.flow;
    note.passedBytes = passed[relay.flow] += content.size();
    channel.sendControl(encode(note), /*direct=*/true);
    if (RelayPath* const path = find(relay.flow)) {
      path->onFrame(relay, frame);
    }
  }
  void joins(const ToRelay& other) {
    out = other.in;
    pump();
  }
  void setSilent(bool now) {
    silent = now;
    for (auto& frame : std::exchange(kept, {})) {
      read(std::move(frame));
    }
  }

  PathUser& user;
  EventLoop& loop;
  bool silent = false; // what arrives waits

 private:
  static constexpr PathId kOnly = 1;
  struct Inbox {
    std::mutex mutex;
    std::vector<std::vector<std::byte>> frames; // by mutex
  };
  struct Held : RecvOp {
    void finished(const Status& status) override {
      if (status.ok()) {
        owner->onHeld(header, std::move(content));
      }
      owner->held.erase(self);
    }
    ToRelay* owner = nullptr;
    FrameHeader header;
    std::vector<std::byte> content;
    std::list<Held>::iterator self;
  };

  static ChannelConfig config() {
    ChannelConfig c = ChannelPair::defaults();
    c.chunkBytes = 64u << 10;
    c.ownEagerBytes = c.peerEagerBytes = 256u << 20;
    return c;
  }

  RecvOp* onRelayed(const FrameHeader& header, Channel& from) override {
    Held& op = held.emplace_back();
    op.self = std::prev(held.end());
    op.owner = this;
    op.header = header;
    op.content.resize(header.totalBytes);
    op.data = op.content.data();
    op.bytes = header.totalBytes;
    op.source = &from;
    return &op;
  }
  void onControl(Channel&, std::span<const std::byte> payload) override {
    const auto note = decodeRelayNote(payload);
    CHECK(note.has_value());
    loop.post([this, note = *note] {
      if (RelayPath* const path = find(note.flow)) {
        path->onNote(note);
      }
    });
  }
  void channelReady(Channel&) override {
    if (!std::exchange(dirty, true)) {
      loop.atEndOfTurn([this] {
        dirty = false;
        pump();
      });
    }
  }
  void pump() {
    while (out) {
      const OutFrame* const f = channel.pull(kOnly, loop.now());
      if (f == nullptr) {
        break;
      }
      std::vector<std::byte> bytes(kFrameHeaderBytes + f->payloadBytes);
      std::memcpy(bytes.data(), f->header.data(), kFrameHeaderBytes);
      if (f->payloadBytes != 0) {
        std::memcpy(&bytes[kFrameHeaderBytes], f->payload, f->payloadBytes);
      }
      channel.popWritten(kOnly);
      const std::lock_guard lock(out->mutex);
      out->frames.push_back(std::move(bytes));
    }
    completions.drain();
    if (timer == 0 && channel.deadline() != kNever) {
      timer = loop.at(channel.deadline(), [this] {
        timer = 0;
        channel.onTimer(loop.now());
        pump();
      });
    }
  }
  // The user's, unless it has been destroyed.
  RelayPath* find(const RelayFlow& flow) const {
    for (const auto& each : user.paths) {
      auto* const path = static_cast<RelayPath*>(each.get());
      if (path->flow() == flow) {
        return path;
      }
    }
    return nullptr;
  }
  void look() {
    std::unique_lock lock(in->mutex);
    const auto frames = std::exchange(in->frames, {});
    lock.unlock();
    for (const auto& frame : frames) {
      read(frame);
    }
    loop.after(100us, [this] { look(); });
  }
  void read(std::vector<std::byte> bytes) {
    if (silent) {
      kept.push_back(std::move(bytes));
      return;
    }
    FrameHeader h;
    CHECK(decodeFrame(std::span(bytes).first<kFrameHeaderBytes>(), h).ok());
    CHECK(channel.onHeader(kOnly, h, loop.now()).ok());
    std::byte* const to = channel.destination(kOnly);
    if (to != nullptr && h.payloadBytes != 0) {
      std::memcpy(to, &bytes[kFrameHeaderBytes], h.payloadBytes);
    }
    CHECK(channel.onPayload(kOnly, loop.now()).ok());
    channelReady(channel);
  }

  const std::shared_ptr<Inbox> in = std::make_shared<Inbox>();
  std::shared_ptr<Inbox> out; // of the other end
  std::list<Held> held;
  std::vector<std::vector<std::byte>> kept;
  std::map<RelayFlow, uint64_t> passed; // bytes that have come
  bool dirty = false;
  TimerId timer = 0;
};

class RelayHelper : public PathHelper {
 public:
  explicit RelayHelper(bool sealed = false) : sealed_(sealed) {}

  std::array<Maker, 2> connect() override {
    ++number_;
    for (const int side : {0, 1}) { // the silence was that of the old path
      if (!lives_[static_cast<size_t>(side)].expired()) {
        silence(side, false);
      }
    }
    std::array<Maker, 2> makers;
    for (size_t side = 0; side < 2; ++side) {
      makers[side] = [this, side](PathUser& user, PathId id) {
        if (lives_[side].expired()) {
          lives_[side] = user.life;
          ways_[side] =
              std::make_unique<ToRelay>(user, static_cast<uint32_t>(10 + side));
          loops_[side] = &user;
        }
        RelayPathConfig config;
        config.flow = flowOf(1, 2, number_);
        config.opener = side == 0; // the other one answers when it is made
        config.relay = "a relay";
        std::unique_ptr<RelaySeal> seal;
        if (sealed_) {
          std::string why;
          seal = RelaySeal::make(config.flow, config.opener, "the secret", why);
          CHECK(seal != nullptr);
          if (config.opener) {
            openersKey_ = seal->ours();
          } else {
            CHECK(seal->agree(openersKey_, user.loop.now()).ok());
          }
        }
        auto path = std::make_unique<RelayPath>(
            user.loop,
            user.channel,
            id,
            ways_[side]->channel,
            config,
            user,
            std::move(seal));
        if (side == 1) {
          ways_[1]->joins(*ways_[0]);
          ways_[0]->loop.post([this] { ways_[0]->joins(*ways_[1]); });
        }
        return path;
      };
    }
    return makers;
  }
  // Its window lets out so much without an answer.
  uint64_t mostUnread() const override {
    return 34u << 20;
  }
  bool noticesEnd() const override {
    return !silent_;
  }
  bool obeysRules() const override {
    return false;
  }
  bool ignoresRules() const override {
    return true;
  }
  bool silence(int to, bool silent) override {
    const auto side = static_cast<size_t>(to);
    silent_ = silent;
    loops_[side]->run([&] { ways_[side]->setSilent(silent); });
    return true;
  }

 private:
  const bool sealed_;
  RelayKey openersKey_; // of the last flow
  uint64_t number_ = 0;
  bool silent_ = false;
  std::array<std::unique_ptr<ToRelay>, 2> ways_;
  std::array<PathUser*, 2> loops_{};
  std::array<std::weak_ptr<void>, 2> lives_;
};

PATH_CONTRACT(relay, RelayHelper)

struct SealedRelayHelper final : RelayHelper {
  SealedRelayHelper() : RelayHelper(/*sealed=*/true) {}
};

PATH_CONTRACT(sealed_relay, SealedRelayHelper)

} // namespace
} // namespace resilient::test
