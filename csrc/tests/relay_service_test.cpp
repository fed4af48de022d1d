#include "delegate/relay_service.h"

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/random.h"
#include "delegate/peer_link.h"
#include "tests/check.h"
#include "tests/plain_link_host.h"

namespace resilient::test {
namespace {

// A process with links to ranks 1, 2, ... whose frames the test reads and
// writes. Nothing connects: no address is known.
class RelayHost final : public PlainLinkHost {
 public:
  explicit RelayHost(uint64_t relayBytes = 64u << 20) {
    options_.relay_bytes = static_cast<int64_t>(relayBytes);
    self_.uid = uidOf(0);
    service = std::make_unique<RelayService>(*this);
  }
  ~RelayHost() override {
    for (auto& [uid, link] : links_) {
      link->close(Link::State::kLeft, StatusCode::kAborted, "is left: the end");
    }
    completions_.drain();
    service->close();
    CHECK_EQ(service->counters().heldBytes, 0u);
    service.reset(); // before the loop
    graveyard_.clear();
  }

  static Uid uidOf(uint8_t rank) {
    Uid uid{};
    uid[0] = rank;
    return uid;
  }
  PeerLink& peer(uint8_t rank) {
    auto& link = links_[uidOf(rank)];
    if (!link) {
      link = std::make_unique<PeerLink>(
          *this, uidOf(rank), static_cast<uint32_t>(byChannel_.size() + 1));
      byChannel_.push_back(link.get());
      link->channel().addPath(rank, loop_.now());
    }
    return *link;
  }
  // The next frame for that rank.
  struct Frame {
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  std::optional<Frame> next(uint8_t rank) {
    Channel& channel = peer(rank).channel();
    completions_.drain();
    const OutFrame* const f = channel.pull(rank, loop_.now());
    if (f == nullptr) {
      return std::nullopt;
    }
    Frame frame;
    CHECK(decodeFrame(f->header, frame.header).ok());
    if (f->payloadBytes != 0) {
      frame.payload.assign(f->payload, f->payload + f->payloadBytes);
    }
    channel.popWritten(rank);
    return frame;
  }
  std::optional<RelayNote> nextNote(uint8_t rank) {
    const auto frame = next(rank);
    return frame ? decodeRelayNote(frame->payload) : std::nullopt;
  }
  // What is due now; only once.
  void runOnce() {
    loop_.after(std::chrono::milliseconds(1), [this] { loop_.stop(); });
    loop_.run();
  }
  // Lets that rank send this; false if it is refused before it has come.
  bool give(
      uint8_t rank,
      const std::vector<std::byte>& content,
      TrafficClass cls = TrafficClass::kGradient,
      uint64_t order = 0) {
    FrameHeader header;
    header.group = kRelayGroup;
    header.totalBytes = content.size();
    header.trafficClass = cls;
    header.order = order;
    RecvOp* const op = service->receive(header, peer(rank).channel());
    if (op == nullptr) {
      return false;
    }
    CHECK_EQ(op->bytes, content.size());
    std::memcpy(op->data, content.data(), content.size());
    op->finished(Status());
    return true;
  }

  // LinkHost
  void onLinkClosed(PeerLink& link, const Status&) override {
    service->onLinkClosed(link);
  }
  PeerLink* linkTo(const Uid& uid) override {
    const auto found = links_.find(uid);
    return found == links_.end() ? nullptr : found->second.get();
  }
  PeerLink* linkOf(const Channel& channel) override {
    return byChannel_[channel.id() - 1];
  }
  std::vector<Uid> relaysTo(const Link&) const override {
    return neighbours;
  }

  std::unique_ptr<RelayService> service;
  std::vector<Uid> neighbours; // relays to all peers

 private:
  std::map<Uid, std::unique_ptr<PeerLink>> links_;
  std::vector<PeerLink*> byChannel_;
};

RelayFlow flow(uint8_t opener, uint8_t other, uint64_t number = 1) {
  return {RelayHost::uidOf(opener), RelayHost::uidOf(other), number};
}

RelayNote noteOf(
    RelayNote::What what,
    const RelayFlow& flow,
    bool fromOpener = true,
    RelayHop hop = RelayHop::kToRelay) {
  RelayNote note;
  note.what = what;
  note.hop = hop;
  note.fromOpener = fromOpener;
  note.flow = flow;
  return note;
}

// A PING that travels over a relay.
std::vector<std::byte> messageOf(
    const RelayFlow& flow,
    bool fromOpener = true,
    RelayHop hop = RelayHop::kToRelay,
    uint64_t burstBytes = 0) {
  RelayHeader header;
  header.burstBytes = burstBytes;
  header.hop = hop;
  header.fromOpener = fromOpener;
  header.flow = flow;
  std::vector<std::byte> content(kRelayHeaderBytes + kFrameHeaderBytes);
  encodeRelay(header, std::span(content).first<kRelayHeaderBytes>());
  FrameHeader ping;
  ping.type = FrameType::kPing;
  FrameBytes bytes;
  encodeFrame(ping, bytes);
  std::memcpy(&content[kRelayHeaderBytes], bytes.data(), bytes.size());
  return content;
}

using What = RelayNote::What;

// Between ranks 1 and 2, both of which have heard of it.
void openFlow(RelayHost& host) {
  PeerLink& opener = host.peer(1);
  PeerLink& other = host.peer(2);
  host.service->onNote(opener, noteOf(What::kOpen, flow(1, 2)));
  CHECK(host.nextNote(2).has_value());
  host.service->onNote(
      other, noteOf(What::kAccept, flow(1, 2), /*fromOpener=*/false));
  CHECK(host.nextNote(1).has_value());
}

TEST(relay_service_passes_on_what_belongs_to_a_flow) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  PeerLink& b = host.peer(2);
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  auto note = host.nextNote(2);
  CHECK(note && note->what == What::kOpen);
  CHECK(note->hop == RelayHop::kFromRelay && note->flow == flow(1, 2));
  host.service->onNote(b, noteOf(What::kAccept, flow(1, 2), false));
  note = host.nextNote(1);
  CHECK(note && note->what == What::kAccept && !note->fromOpener);

  const auto content = messageOf(flow(1, 2));
  CHECK(host.give(1, content));
  const auto frame = host.next(2);
  CHECK(frame.has_value());
  CHECK_EQ(frame->header.group, kRelayGroup);
  CHECK(frame->header.trafficClass == TrafficClass::kGradient);
  CHECK(frame->payload == messageOf(flow(1, 2), true, RelayHop::kFromRelay));
  CHECK(host.give(2, messageOf(flow(1, 2), false)));
  CHECK(host.next(1).has_value());
  RelayCounters counters = host.service->counters();
  CHECK_EQ(counters.flows, 1u);
  CHECK_EQ(counters.messages, 2u);
  CHECK_EQ(counters.bytes, 2 * content.size());
  CHECK_EQ(counters.refused, 0u);

  host.service->onNote(a, noteOf(What::kClose, flow(1, 2)));
  note = host.nextNote(2);
  CHECK(note && note->what == What::kClose);
  CHECK_EQ(host.service->counters().flows, 0u);
}

// Little of a burst waits at the relay: too little to tell how large it is.
TEST(relay_service_sends_a_burst_as_its_sender_would) {
  RelayHost host;
  openFlow(host);
  Channel& channel = host.peer(2).channel();
  constexpr PathId kSmall = 2, kLarge = 99;
  channel.addPath(kLarge, host.loop().now());
  channel.setBursts(kSmall, BurstRange::ofAtMost(1u << 20));
  channel.setBursts(kLarge, {1u << 20, UINT64_MAX});
  const auto give = [&](uint64_t burstBytes) {
    CHECK(host.give(
        1, messageOf(flow(1, 2), true, RelayHop::kToRelay, burstBytes)));
  };
  give(1u << 20);
  CHECK(channel.pull(kLarge, host.loop().now()) == nullptr);
  CHECK(host.next(kSmall).has_value());
  give(16u << 20);
  CHECK(channel.pull(kLarge, host.loop().now()) != nullptr);
  channel.popWritten(kLarge);
}

// Its sender gives it more when something has left, not when it has come.
TEST(relay_service_tells_what_it_has_passed_on) {
  RelayHost host;
  openFlow(host);
  const auto content = messageOf(flow(1, 2));
  CHECK(host.give(1, content));
  CHECK(host.give(1, content));
  CHECK(!host.nextNote(1).has_value());
  CHECK(host.next(2).has_value());
  CHECK(host.next(2).has_value());
  host.runOnce();
  const auto note = host.nextNote(1);
  CHECK(note && note->what == What::kPassed);
  CHECK(note->hop == RelayHop::kFromRelay && !note->fromOpener);
  CHECK(note->flow == flow(1, 2));
  CHECK_EQ(note->passedBytes, 2 * content.size());
  CHECK(!note->busy);
  CHECK(!host.nextNote(1).has_value());
  // An end has nothing of the kind to tell.
  host.service->onNote(host.peer(1), noteOf(What::kPassed, flow(1, 2)));
  CHECK_EQ(host.service->counters().refused, 1u);
  const auto answer = host.nextNote(1);
  CHECK(answer && answer->what == What::kClose);
  CHECK(!host.nextNote(2).has_value());
}

// It still passes on what it holds, and takes what has no other way.
TEST(relay_service_asks_for_nothing_more_before_it_leaves) {
  RelayHost host;
  openFlow(host);
  const auto content = messageOf(flow(1, 2));
  CHECK(host.give(1, content));
  host.service->leave();
  CHECK_EQ(host.service->counters().heldBytes, content.size());
  for (const bool opener : {true, false}) {
    const auto note = host.nextNote(opener ? 1 : 2);
    CHECK(note && note->what == What::kPassed && note->busy);
    CHECK_EQ(note->fromOpener, !opener);
    CHECK_EQ(note->passedBytes, 0u);
  }
  CHECK(host.next(2).has_value()); // what it held
  CHECK(host.give(1, content)); // it has no other way
  CHECK(host.next(2).has_value());
  host.runOnce();
  const auto note = host.nextNote(1);
  CHECK(note && note->what == What::kPassed && note->busy);
  CHECK_EQ(note->passedBytes, 2 * content.size());
  CHECK(!host.nextNote(1).has_value());
}

TEST(relay_service_takes_no_new_flow_before_it_leaves) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  PeerLink& b = host.peer(2);
  b.channel().removePath(2, TimePoint());
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  host.service->leave();
  CHECK(host.nextNote(1)->busy);
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2, 2)));
  const auto refused = host.nextNote(1);
  CHECK(refused && refused->what == What::kClose);
  CHECK_EQ(refused->text, "it is leaving");
  // The other end of the first one is reached only now.
  b.channel().addPath(2, TimePoint());
  host.loop().turnAt(host.loop().now() + std::chrono::milliseconds(100));
  for (const What what : {What::kOpen, What::kPassed}) {
    const auto note = host.nextNote(2);
    CHECK(note && note->what == what);
    CHECK_EQ(note->busy, what == What::kPassed);
  }
}

// A note to an end that is reached over another relay only would wait until the
// process ends.
TEST(relay_service_waits_for_no_end_that_it_cannot_reach) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  PeerLink& b = host.peer(2);
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  CHECK(host.nextNote(2).has_value());
  b.channel().removePath(2, TimePoint());
  CHECK(b.usable());
  host.service->leave();
  const auto note = host.nextNote(1);
  CHECK(note && note->busy);
  b.channel().addPath(2, TimePoint());
  const auto open = host.nextNote(2); // not acknowledged yet
  CHECK(open && open->what == What::kOpen);
  CHECK(!host.nextNote(2).has_value());
}

// At a relay, messages for others have the place that they have in their own
// stream, and so have ours.
TEST(relay_service_keeps_places_in_streams) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  (void)host.peer(2);
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  CHECK(host.nextNote(2).has_value());
  CHECK(host.give(1, messageOf(flow(1, 2)), TrafficClass::kActivation, 42));

  const auto urgency = [&] { return host.peer(2).channel().mostUrgent(3); };
  CHECK(urgency() == (Urgency{TrafficClass::kActivation, 42, -1}));
  CHECK(host.peer(2).channel().backloggedActivations(true));
  CHECK(!host.peer(2).channel().backloggedActivations(false));
  struct Own : SendOp {
    void finished(const Status&) override {}
  } ops[2];
  for (Own& op : ops) {
    op.pointToPoint = true;
    op.key.stream = 7;
    op.trafficClass = TrafficClass::kActivation;
    host.peer(2).channel().send(&op, host.loop().now());
  }
  CHECK(urgency() == (Urgency{TrafficClass::kActivation, 0, 3}));
  CHECK(host.next(2).has_value());
  CHECK(urgency() == (Urgency{TrafficClass::kActivation, 1, 3}));
  CHECK(host.next(2).has_value());
  CHECK(host.next(2).has_value());
  CHECK(!host.next(2).has_value());
  CHECK(!urgency().has_value());
}

// A refusal reaches the sender with its reason, and the message nobody.
TEST(relay_service_is_no_open_proxy) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  (void)host.peer(2);
  PeerLink& c = host.peer(3);
  uint64_t refused = 0;
  const auto isRefused = [&](uint8_t sender) {
    const auto answer = host.nextNote(sender);
    CHECK(answer && answer->what == What::kClose);
    CHECK(!answer->text.empty());
    CHECK_EQ(host.service->counters().refused, ++refused);
    for (uint8_t rank = 1; rank <= 3; ++rank) {
      CHECK(!host.next(rank).has_value());
    }
  };
  // To nobody that a group knows, and in another's name.
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 9)));
  isRefused(1);
  host.service->onNote(c, noteOf(What::kOpen, flow(1, 2)));
  isRefused(3);
  host.service->onNote(c, noteOf(What::kOpen, flow(1, 3), false));
  isRefused(3);
  CHECK(host.give(1, messageOf(flow(1, 2)))); // not open
  isRefused(1);

  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  CHECK(host.nextNote(2).has_value());
  CHECK(host.give(1, messageOf(flow(1, 2, 77)))); // another number
  isRefused(1);
  CHECK(host.give(3, messageOf(flow(1, 2)))); // another sender
  isRefused(3);
  CHECK(host.give(1, messageOf(flow(1, 2), false))); // as the other end
  isRefused(1);
  // A message from a relay goes no further, and is for its target only.
  CHECK(host.give(1, messageOf(flow(1, 2), true, RelayHop::kFromRelay)));
  isRefused(1);
  CHECK(host.give(1, messageOf(flow(3, 0), true, RelayHop::kFromRelay)));
  isRefused(1);

  host.options_.relay = "off";
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2, 5)));
  isRefused(1);
  // Nonsense has no answer: it names no flow.
  CHECK(host.give(1, std::vector<std::byte>(200, std::byte(7))));
  CHECK_EQ(host.service->counters().refused, refused + 1);
  CHECK(!host.next(1).has_value());
}

TEST(relay_service_bounds_its_memory) {
  constexpr uint64_t kLimit = 4u << 20;
  RelayHost host(kLimit);
  (void)host.peer(1);
  FrameHeader header;
  header.group = kRelayGroup;
  for (const uint64_t bytes : {uint64_t(0), uint64_t(63), kLimit + 1}) {
    header.totalBytes = bytes;
    CHECK(host.service->receive(header, host.peer(1).channel()) == nullptr);
  }
  header.totalBytes = kLimit / 2;
  RecvOp* const one = host.service->receive(header, host.peer(1).channel());
  RecvOp* const two = host.service->receive(header, host.peer(1).channel());
  CHECK(one != nullptr && two != nullptr);
  header.totalBytes = kRelayHeaderBytes;
  CHECK(host.service->receive(header, host.peer(1).channel()) == nullptr);
  one->finished(Status(StatusCode::kAborted, "given up"));
  CHECK_EQ(host.service->counters().heldBytes, kLimit / 2);
  two->finished(Status(StatusCode::kAborted, "given up"));
  CHECK_EQ(host.service->counters().heldBytes, 0u);
}

TEST(relay_service_tells_both_ends_when_a_link_closes) {
  RelayHost host;
  PeerLink& a = host.peer(1);
  PeerLink& b = host.peer(2);
  host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
  CHECK(host.nextNote(2).has_value());
  CHECK(host.give(1, messageOf(flow(1, 2))));
  b.close(Link::State::kDead, StatusCode::kPeerDied, "died: for the test");
  const auto note = host.nextNote(1);
  CHECK(note && note->what == What::kClose && !note->fromOpener);
  CHECK_CONTAINS(note->text, "died: for the test");
  CHECK_EQ(host.service->counters().flows, 0u);
  CHECK_EQ(host.service->counters().heldBytes, 0u);
}

// Nothing waits for a way to the far end that may never come: it could not be
// taken back, and would hold up the end of the process.
TEST(relay_service_announces_a_flow_once_the_far_end_is_connected) {
  for (const bool connects : {true, false}) {
    RelayHost host;
    PeerLink& a = host.peer(1);
    Channel& toB = host.peer(2).channel();
    toB.removePath(2, host.loop().now());
    host.service->onNote(a, noteOf(What::kOpen, flow(1, 2)));
    CHECK(toB.drained());
    if (connects) {
      toB.addPath(2, host.loop().now());
      host.loop().turnAt(host.loop().now() + std::chrono::milliseconds(100));
      const auto note = host.nextNote(2);
      CHECK(note && note->what == What::kOpen && note->flow == flow(1, 2));
    }
    host.service->onNote(a, noteOf(What::kClose, flow(1, 2)));
    CHECK_EQ(toB.drained(), !connects);
    if (connects) {
      const auto note = host.nextNote(2);
      CHECK(note && note->what == What::kClose);
    }
    CHECK_EQ(host.service->counters().flows, 0u);
  }
}

// A neighbour that has left does not take the place of one that is there.
TEST(relay_connector_passes_over_ranks_that_are_gone) {
  RelayHost host;
  host.options_.relay = "failover"; // one relay at a time
  host.options_.wan_connections = 1;
  PeerLink& gone = host.peer(1);
  gone.close(Link::State::kLeft, StatusCode::kPeerLeft, "has left");
  (void)host.peer(2);
  host.neighbours = {RelayHost::uidOf(1), RelayHost::uidOf(2)};
  PeerLink& far = host.peer(3);
  far.connections().close(); // no sockets
  PeerAddress address;
  address.uid = RelayHost::uidOf(3);
  address.hostId = address.hostName = "far";
  far.setAddress(address, "secret", 3);
  far.onConnection();
  const auto note = host.nextNote(2);
  CHECK(note && note->what == What::kOpen);
  CHECK(note->flow.other == RelayHost::uidOf(3));
}

// Any notes and messages of members, in any order: nothing crashes, leaks, or
// reaches a rank that is neither an end of its flow nor its sender.
TEST(relay_service_bears_anything) {
  forSeeds(300, [](uint64_t seed) {
    Prng prng(seed);
    RelayHost host(8u << 20);
    for (uint8_t rank = 1; rank <= 3; ++rank) {
      (void)host.peer(rank);
    }
    for (int i = 0; i < 200; ++i) {
      const auto rank = static_cast<uint8_t>(1 + prng.below(3));
      const auto some = [&] { return static_cast<uint8_t>(prng.below(5)); };
      RelayFlow f = flow(some(), some(), prng.below(3));
      const bool fromOpener = prng.chance(0.6);
      const auto hop =
          prng.chance(0.8) ? RelayHop::kToRelay : RelayHop::kFromRelay;
      if (f.opener == f.other) {
        continue; // no bytes decode to that
      }
      if (prng.chance(0.5)) {
        const auto what = static_cast<What>(1 + prng.below(4));
        host.service->onNote(host.peer(rank), noteOf(what, f, fromOpener, hop));
      } else {
        auto content = messageOf(f, fromOpener, hop);
        if (prng.chance(0.2)) {
          content[prng.below(content.size())] = std::byte(prng.below(256));
        }
        (void)host.give(rank, content);
      }
      if (prng.chance(0.02)) {
        host.peer(rank).close(
            Link::State::kDead, StatusCode::kPeerDied, "died");
      }
      for (uint8_t to = 1; to <= 3; ++to) {
        while (const auto frame = host.next(to)) {
          RelayHeader header;
          std::span<const std::byte> rest;
          if (frame->header.type == FrameType::kData) {
            CHECK(decodeRelay(frame->payload, header, rest).ok());
            CHECK(header.target() == RelayHost::uidOf(to));
            CHECK(header.hop == RelayHop::kFromRelay);
          }
        }
      }
    }
  });
}

} // namespace
} // namespace resilient::test
