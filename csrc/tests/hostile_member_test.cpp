#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"
#include "tests/engine_ranks.h"
#include "tests/fake_peer.h"
#include "wire/control.h"
#include "wire/frame.h"

// Two ranks that work, and a member of their job that means them harm.

namespace resilient::test {
namespace {

// A member of the job that sends whatever passes the first checks: frames with
// right checksums, and whole control messages, with fields that chance and what
// it knows of the job decide.
class HostileMember : public FakePeer {
 public:
  HostileMember(uint64_t seed, const std::vector<Rank>& ranks)
      : prng_(mixBits(seed)) {
    for (const Rank& rank : ranks) {
      uids_.push_back(rank.engine->self().uid);
      groups_.push_back(rank.group->id());
    }
    uids_.push_back(config.identity.uid);
    config.onPeer = [this](HelloInfo, StreamSocket socket, SocketAddress) {
      attack(socket);
    };
    listen();
  }
  ~HostileMember() {
    stop();
  }
  // Connections on which it has spoken.
  int attacks() const {
    return attacks_;
  }

 private:
  // Returns when the engine has hung up, or after some time.
  void attack(const StreamSocket& socket) {
    for (int i = 0; i < 40; ++i) {
      std::vector<std::byte> payload;
      const FrameHeader header = frame(payload);
      FrameBytes bytes;
      encodeFrame(header, bytes);
      if (!said(socket, bytes) || !said(socket, payload)) {
        break;
      }
    }
    ++attacks_;
  }
  static bool said(const StreamSocket& socket, std::span<const std::byte> all) {
    pollfd polled{socket.get(), POLLOUT, 0};
    while (!all.empty() && ::poll(&polled, 1, 1000) == 1) {
      const ssize_t n =
          ::send(socket.get(), all.data(), all.size(), MSG_NOSIGNAL);
      if (n <= 0) {
        return false;
      }
      all = all.subspan(static_cast<size_t>(n));
    }
    return all.empty();
  }

  uint64_t number() {
    switch (prng_.below(6)) {
      case 0:
        return prng_.next();
      case 1:
        return UINT64_MAX - prng_.below(3);
      case 2:
        return uint64_t{1} << prng_.below(64);
      default:
        return prng_.below(20);
    }
  }
  template <typename T>
  void set(T& field) {
    field = static_cast<T>(number());
  }
  std::string text() {
    std::string t(prng_.below(prng_.chance(0.1) ? 5000 : 40), 0);
    for (char& c : t) {
      c = static_cast<char>(prng_.next());
    }
    return t;
  }
  Uid uid() {
    return uids_[prng_.below(uids_.size())];
  }
  uint64_t group() {
    return prng_.chance(0.7) ? groups_[prng_.below(groups_.size())] : number();
  }
  OpSignature signature() { // of a kind and a type that exist
    OpSignature s;
    s.kind = static_cast<OpKind>(prng_.below(12));
    s.dtype = static_cast<DType>(prng_.below(25));
    set(s.count);
    return s;
  }

  FrameHeader frame(std::vector<std::byte>& payload) {
    FrameHeader h;
    do {
      h.type = static_cast<FrameType>(1 + prng_.below(10));
    } while (h.type == FrameType::kBye); // nobody would call it again
    h.trafficClass = static_cast<TrafficClass>(prng_.below(4));
    h.flags = static_cast<uint16_t>(prng_.below(8));
    h.message = ++messages_;
    h.signature = signature();
    h.group = group();
    set(h.stream);
    set(h.order);
    set(h.sourceRank);
    if (prng_.chance(0.02)) { // most of these end the connection
      set(h.ack);
      set(h.message);
      set(h.trafficClass);
    }
    if (h.type == FrameType::kData) {
      h.chunkBytes = static_cast<uint32_t>(64 + prng_.below(4000));
      h.totalBytes = prng_.chance(0.1) ? number() : prng_.below(10'000);
      h.offset = h.chunkBytes * prng_.below(1 + h.totalBytes / h.chunkBytes);
      const uint64_t rest = h.totalBytes - std::min(h.totalBytes, h.offset);
      payload.resize(
          (h.flags & kFlagOffer) != 0 ? 0
                                      : std::min<uint64_t>(rest, h.chunkBytes));
    } else if (h.type == FrameType::kControl) {
      payload = control();
    } else if (
        h.type == FrameType::kReject || h.type == FrameType::kCancel ||
        prng_.chance(0.02)) {
      payload = encodeReason(static_cast<StatusCode>(prng_.below(12)), text());
    } else if (h.type == FrameType::kGrant) {
      payload.resize(prng_.chance(0.1) ? 8 * prng_.below(20) : 0);
    } else if (h.type == FrameType::kResidual) {
      payload.resize(8 + 16 * prng_.below(4));
    }
    for (size_t i = 0; i < payload.size(); ++i) {
      const bool isNumbers =
          h.type == FrameType::kData || h.type == FrameType::kGrant;
      if (isNumbers || prng_.chance(0.0002)) {
        payload[i] = static_cast<std::byte>(prng_.next());
      }
    }
    h.payloadBytes = static_cast<uint32_t>(payload.size());
    return h;
  }

  std::vector<std::byte> control() {
    switch (prng_.below(10)) {
      case 0: {
        Notice n;
        n.group = group();
        set(n.sequence);
        set(n.reporter);
        set(n.origin);
        set(n.culprit);
        n.text = text();
        return encode(n);
      }
      case 1: {
        Query q;
        q.group = group();
        set(q.asker);
        return encode(q);
      }
      case 2: {
        Report r;
        r.group = group();
        set(r.reporter);
        set(r.lastSequence);
        set(r.runningSequence);
        set(r.waitingFor);
        set(r.silentNanos);
        r.running = prng_.chance(0.5);
        r.signature = signature();
        r.pending = text();
        return encode(r);
      }
      case 3: {
        PathsLost p;
        p.reason = text();
        p.connections.resize(prng_.below(5));
        for (uint16_t& c : p.connections) {
          set(c);
        }
        return encode(p);
      }
      case 4:
        return encode(SharedOffer{text(), text()});
      case 5: {
        PeerAddress address;
        address.uid = uid();
        address.hostName = text();
        address.addresses = {
            {"lo",
             *SocketAddress::parse(
                 "127.0.0.1", static_cast<uint16_t>(prng_.next()))}};
        return encode(
            Addresses{prng_.chance(0.5) ? text() : address.toString()});
      }
      case 6: {
        DatagramOffer o;
        set(o.connection);
        set(o.port);
        set(o.key);
        o.answer = prng_.chance(0.5);
        o.nonce = std::string(DatagramOffer::kNonceBytes, 'n');
        return encode(o);
      }
      case 7: {
        VerbsOffer o;
        set(o.connection);
        set(o.number);
        set(o.mtuBytes);
        set(o.reads);
        o.queuePair = static_cast<uint32_t>(prng_.below(1u << 24));
        o.answer = prng_.chance(0.5);
        o.text = text();
        return encode(o);
      }
      case 8: {
        RelayNote n;
        n.what = static_cast<RelayNote::What>(1 + prng_.below(5));
        n.hop = static_cast<RelayHop>(1 + prng_.below(2));
        n.fromOpener = prng_.chance(0.5);
        n.flow.opener = uid();
        n.flow.other = uid();
        set(n.flow.number);
        set(n.delivered);
        set(n.passedBytes);
        set(n.bytesPerS);
        n.busy = prng_.chance(0.5);
        n.text = text();
        return encode(n);
      }
      default: {
        Arrivals a;
        a.answer = prng_.chance(0.5);
        set(a.clockNanos);
        a.connections.resize(prng_.below(5));
        for (Arrivals::Connection& c : a.connections) {
          set(c.index);
          set(c.bytes);
        }
        return encode(a);
      }
    }
  }

  Prng prng_;
  std::vector<Uid> uids_;
  std::vector<uint64_t> groups_;
  uint64_t messages_ = 0;
  std::atomic<int> attacks_{0};
};

// Members are not protected from each other, but one of them makes no rank
// crash or hang, and gives no other numbers to operations in which it has no
// part. `make nightly` has many of these, under the address sanitizer.
TEST(engineOutlivesAHostileMember) {
  forSeeds(2, [](uint64_t seed) {
    EngineOptions options;
    options.shared_memory = false;
    options.log_level = "error";
    std::vector<Rank> ranks = startRanks(2, options);
    auto member = std::make_unique<HostileMember>(seed, ranks);
    for (Rank& rank : ranks) {
      member->introduceTo(*rank.engine, member->listener->port());
    }
    const TimePoint deadline = std::chrono::steady_clock::now() + kLong;
    for (int round = 0; member->attacks() < 20; ++round) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      onEach(ranks, [&](int r) {
        std::vector<float> data(5000, static_cast<float>(r + round));
        const Status status =
            ranks[static_cast<size_t>(r)].allReduce(data, kLong);
        const auto sum = static_cast<float>(2 * round + 1);
        if (!status.ok() || data != std::vector<float>(data.size(), sum)) {
          std::fprintf(stderr, "%s\n", status.message().c_str());
          std::abort();
        }
      });
    }
    member.reset();
    leave(ranks);
  });
}

} // namespace
} // namespace resilient::test
