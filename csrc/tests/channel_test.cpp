#include "channel/channel.h"

#include <limits>
#include <set>

#include "channel/channel_state.h"
#include "tests/channel_pair.h"
#include "wire/control.h"

namespace resilient::test {
namespace {

TEST(channel_carries_a_message) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(250));
  TestRecv recv(&pair.b.channel, 250);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(!pair.a.channel.drained());
  pair.settle({1});
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(recv.ends, 1);
  CHECK_EQ(recv.content, text(250));
  CHECK_EQ(recv.matchedSource == &pair.b.channel, true);
  CHECK_EQ(pair.a.channel.counters().messagesSent, 1u);
  CHECK_EQ(pair.a.channel.counters().bytesSent, 250u);
  CHECK_EQ(pair.b.channel.counters().bytesReceived, 250u);
  pair.checkEmpty();
}

TEST(channel_stripes_over_all_paths) {
  ChannelPair pair;
  for (PathId p : {1, 2, 3}) {
    pair.up(p);
  }
  TestSend send(text(950));
  TestRecv recv(&pair.b.channel, 950);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  // Whoever asks gets the next chunk.
  uint64_t offset = 0;
  for (int i = 0; i < 3; ++i) {
    for (PathId p : {1, 2, 3}) {
      const auto h = pair.take(pair.a, p);
      CHECK(h.has_value());
      CHECK_EQ(h->fields().offset, offset);
      offset += 100;
      // Out of order: the third path is fastest.
      CHECK(pair.give(pair.b, p, *h).ok());
    }
  }
  pair.settle({1, 2, 3});
  CHECK_EQ(recv.content, text(950));
  CHECK_EQ(pair.a.channel.pathCounters(1).chunksSent, 4u);
  CHECK_EQ(pair.a.channel.pathCounters(3).chunksSent, 3u);
  pair.checkEmpty();
}

TEST(channel_sends_again_what_a_dead_path_had) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(400));
  TestRecv recv(&pair.b.channel, 400);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto lost = pair.take(pair.a, 1);
  const auto arrives = pair.take(pair.a, 1);
  CHECK(lost && arrives);
  CHECK_EQ(pair.a.channel.inFlightBytes(1), 200u);
  pair.down(1);
  // The oldest goes first.
  CHECK_EQ(pair.move(pair.a, 2)->offset, 0u);
  CHECK_EQ(pair.move(pair.a, 2)->offset, 100u);
  pair.settle({2});
  CHECK_EQ(recv.content, text(400));
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(pair.a.channel.pathCounters(2).chunksRetransmitted, 2u);
  pair.checkEmpty();
}

// A repeat of the only chunk was once counted as a first sending.
TEST(channel_counts_repeats_of_the_last_chunk) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(50));
  TestRecv recv(&pair.b.channel, 50);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.take(pair.a, 1).has_value());
  pair.down(1);
  pair.settle({2});
  CHECK_EQ(pair.a.channel.pathCounters(2).chunksRetransmitted, 1u);
}

TEST(channel_discards_what_comes_twice) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(200));
  TestRecv recv(&pair.b.channel, 200);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto first = pair.take(pair.a, 1);
  CHECK(pair.give(pair.b, 1, *first).ok());
  // Only the sender has noticed that path 1 is dead.
  pair.a.channel.removePath(1, pair.now);
  pair.settle({2});
  CHECK_EQ(recv.content, text(200));
  CHECK_EQ(recv.ends, 1);
  CHECK_EQ(pair.b.channel.counters().duplicateChunks, 1u);
  CHECK_EQ(pair.b.channel.counters().bytesReceived, 200u);
  pair.b.channel.removePath(1, pair.now);
  pair.checkEmpty();
}

// The same chunk half read on a stalled path and whole from another one.
TEST(channel_gives_no_place_to_a_chunk_that_is_here) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto slow = pair.take(pair.a, 1);
  CHECK(pair.begin(pair.b, 1, *slow).ok());
  CHECK(pair.b.channel.destination(1) != nullptr);
  pair.a.channel.removePath(1, pair.now);
  pair.settle({2});
  CHECK_EQ(recv.ends, 1);
  CHECK(pair.b.channel.destination(1) == nullptr); // the buffer is not ours
  CHECK(pair.b.channel.onPayload(1, pair.now).ok());
  pair.b.channel.removePath(1, pair.now);
  pair.checkEmpty();
}

TEST(channel_without_credit_offers_and_waits) {
  ChannelConfig config = ChannelPair::defaults();
  config.ownEagerBytes = config.peerEagerBytes = 0;
  ChannelPair pair(config);
  pair.up(1);
  TestSend send(text(300));
  pair.a.channel.send(&send, pair.now);
  const auto offer = pair.move(pair.a, 1);
  CHECK(offer.has_value());
  CHECK_EQ(offer->flags & kFlagOffer, kFlagOffer);
  CHECK_EQ(offer->totalBytes, 300u);
  CHECK(!pair.move(pair.a, 1).has_value());
  CHECK_EQ(pair.b.channel.bufferedBytes(), 0u);
  CHECK_EQ(pair.b.channel.incomingMessages(), 1u);
  TestRecv recv(&pair.b.channel, 300);
  pair.b.mailbox.post(&recv);
  // Granted at once, without waiting for a batch.
  CHECK_EQ(pair.move(pair.b, 1)->type, FrameType::kGrant);
  CHECK_EQ(pair.move(pair.a, 1)->offset, 0u);
  pair.settle({1});
  CHECK_EQ(recv.content, text(300));
  CHECK_EQ(send.ends, 1);
  pair.checkEmpty();
}

TEST(channel_keeps_to_the_credit) {
  ChannelConfig config = ChannelPair::defaults();
  config.ownEagerBytes = config.peerEagerBytes = 2 * (100 + 256);
  ChannelPair pair(config);
  pair.up(1);
  TestSend send(text(1000)), second(text(80));
  pair.a.channel.send(&send, pair.now);
  pair.a.channel.send(&second, pair.now);
  CHECK_EQ(pair.move(pair.a, 1)->payloadBytes, 100u);
  CHECK_EQ(pair.move(pair.a, 1)->payloadBytes, 100u);
  // The first is known to the receiver; the second needs an offer.
  const auto offer = pair.move(pair.a, 1);
  CHECK_EQ(offer->message, 2u);
  CHECK_EQ(offer->flags & kFlagOffer, kFlagOffer);
  CHECK(!pair.move(pair.a, 1).has_value());
  CHECK_EQ(pair.b.channel.bufferedBytes(), config.ownEagerBytes);
  CHECK_EQ(pair.a.channel.chargedBytes(), config.ownEagerBytes);
  TestRecv r1(&pair.b.channel, 1000), r2(&pair.b.channel, 80);
  pair.b.mailbox.post(&r1);
  CHECK_EQ(pair.b.channel.bufferedBytes(), 0u);
  pair.b.mailbox.post(&r2);
  pair.settle({1});
  CHECK_EQ(r1.content, text(1000));
  CHECK_EQ(r2.content, text(80));
  pair.checkEmpty();
}

TEST(channel_refuses_bytes_beyond_the_credit) {
  ChannelConfig config = ChannelPair::defaults();
  ChannelPair pair(config);
  pair.a.channel.setPeerEagerBytes(1 << 20); // believes in more
  pair.up(1);
  std::vector<std::unique_ptr<TestSend>> sends;
  Status refused;
  for (int i = 0; i < 2000 && refused.ok(); ++i) {
    sends.push_back(std::make_unique<TestSend>(text(100), 0));
    pair.a.channel.send(sends.back().get(), pair.now);
    const auto frame = pair.take(pair.a, 1);
    CHECK(frame.has_value());
    refused = pair.give(pair.b, 1, *frame);
    CHECK(pair.b.channel.bufferedBytes() <= config.ownEagerBytes);
  }
  CHECK_EQ(refused.code(), StatusCode::kProtocol);
  CHECK_CONTAINS(refused.message(), "credit");
}

TEST(channel_priority_goes_first) {
  ChannelPair pair;
  pair.up(1);
  TestSend bulk(text(300), 1, TrafficClass::kBulk);
  TestSend urgent(text(100), 2, TrafficClass::kActivation);
  pair.a.channel.send(&bulk, pair.now);
  CHECK_EQ(pair.move(pair.a, 1)->message, 1u);
  pair.a.channel.send(&urgent, pair.now);
  CHECK_EQ(pair.move(pair.a, 1)->message, 2u); // overtakes between chunks
  CHECK_EQ(pair.move(pair.a, 1)->message, 1u);
  for (TestSend* s : {&bulk, &urgent}) {
    pair.a.channel.cancelSend(s, "over", pair.now);
  }
}

TEST(channel_small_sends_end_at_once) {
  ChannelConfig config = ChannelPair::defaults();
  config.copyBytes = 64;
  ChannelPair pair(config);
  pair.a.staging.setLimit(100);
  {
    TestSend small(text(60)), noRoom(text(60, 2));
    pair.a.channel.send(&small, pair.now);
    pair.a.channel.send(&noRoom, pair.now);
    pair.a.completions.drain();
    CHECK_EQ(small.ends, 1);
    CHECK_EQ(noRoom.ends, 0);
    CHECK_EQ(pair.a.staging.used(), 60u);
    small.content.assign(60, 'X'); // its owner's again
    pair.up(1);
    TestRecv r1(&pair.b.channel, 60), r2(&pair.b.channel, 60);
    pair.b.mailbox.post(&r1);
    pair.b.mailbox.post(&r2);
    pair.settle({1});
    CHECK_EQ(r1.content, text(60));
    CHECK_EQ(r2.content, text(60, 2));
    CHECK_EQ(noRoom.ends, 1);
  }
  pair.checkEmpty();
}

// Paper: PIPEMORPH §5.2: a slow link must not hold the trainer's buffer.
TEST(channel_copies_what_waits_long) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(150));
  pair.a.channel.send(&send, pair.now);
  // Half of the second chunk's frame is written; then it waits.
  auto first = pair.take(pair.a, 1);
  const OutFrame* f = pair.a.channel.pull(1, pair.now);
  CHECK(f != nullptr);
  const std::byte* before = pair.a.channel.unwritten(1).front().payload;
  for (int i = 0; i < 10 && send.ends == 0; ++i) {
    CHECK(pair.a.channel.deadline() != kNever);
    pair.now = std::max(pair.now, pair.a.channel.deadline());
    pair.a.channel.onTimer(pair.now);
    pair.a.completions.drain();
  }
  CHECK_EQ(send.ends, 1);
  CHECK(send.status.ok());
  const OutFrame& after = pair.a.channel.unwritten(1).front();
  CHECK(after.payload != before);
  send.content.assign(150, 'X');
  CHECK_EQ(
      std::string(reinterpret_cast<const char*>(after.payload), 50),
      text(150).substr(100));
  TestRecv recv(&pair.b.channel, 150);
  pair.b.mailbox.post(&recv);
  CHECK(pair.give(pair.b, 1, *first).ok());
  pair.settle({1});
  CHECK_EQ(recv.content, text(150));
  pair.checkEmpty();
}

// A pair with one path, on which a message has measured this round trip.
struct MeasuredPair : ChannelPair {
  explicit MeasuredPair(Nanos roundTrip, ChannelConfig config = defaults())
      : ChannelPair(config) {
    up(1);
    a.channel.ping(1);
    CHECK(move(a, 1).has_value());
    now += roundTrip;
    CHECK(move(b, 1)->type == FrameType::kPong);
    CHECK_EQ(
        a.channel.pathStatistics(1).minRoundTripS(),
        static_cast<double>(roundTrip.count()) / 1e9);
  }
  // Until nothing is due within `time`.
  void pass(Nanos time) {
    const TimePoint end = now + time;
    while (a.channel.deadline() <= end) {
      now = std::max(now, a.channel.deadline());
      a.channel.onTimer(now);
      a.completions.drain();
    }
    now = end;
  }
};

TEST(channel_copies_what_a_long_link_has_not_acknowledged) {
  MeasuredPair pair(std::chrono::milliseconds(40));
  TestSend send(text(450));
  send.pointToPoint = false;
  TestRecv recv(&pair.b.channel, 450);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK(pair.take(pair.a, 1).has_value());
  pair.pass(std::chrono::milliseconds(100));
  CHECK(pair.move(pair.b, 1).has_value()); // acknowledges two chunks
  CHECK_EQ(send.ends, 0); // not handed out whole
  CHECK(pair.take(pair.a, 1).has_value());
  CHECK(pair.take(pair.a, 1).has_value());
  pair.pass(ChannelPair::defaults().stageAfter);
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(pair.a.staging.used(), 250u);
  send.content.assign(450, 'X'); // its owner's again
  pair.up(2);
  pair.down(1); // three frames are lost
  pair.settle({2});
  CHECK_EQ(recv.content, text(450));
  pair.checkEmpty();
}

TEST(channel_frees_the_memory_of_copies_when_no_other_needs_it) {
  ChannelConfig config = ChannelPair::defaults();
  config.copyBytes = 256u << 10;
  ChannelPair pair(config);
  pair.up(1);
  TestSend send(text(256u << 10));
  pair.a.channel.send(&send, pair.now);
  TestRecv recv(&pair.b.channel, send.content.size());
  pair.b.mailbox.post(&recv);
  pair.settle({1});
  CHECK_EQ(recv.content, send.content);
  CHECK_EQ(pair.a.staging.used(), 0u);
  CHECK_EQ(pair.a.staging.kept(), 256u << 10);
  CHECK(pair.a.channel.deadline() != kNever);
  pair.a.channel.onTimer(pair.a.channel.deadline());
  CHECK_EQ(pair.a.staging.kept(), 0u);
  CHECK(pair.a.channel.deadline() == kNever);
  pair.checkEmpty();
}

TEST(channel_copies_in_pieces) {
  ChannelConfig config = ChannelPair::defaults();
  config.copyPieceBytes = 120;
  MeasuredPair pair(std::chrono::milliseconds(40), config);
  TestSend send(text(300));
  send.pointToPoint = false;
  pair.a.channel.send(&send, pair.now);
  while (pair.take(pair.a, 1)) {
  }
  pair.now += config.stageAfter;
  for (int piece = 1; piece <= 3; ++piece) {
    CHECK_EQ(send.ends, 0);
    CHECK(pair.a.channel.deadline() <= pair.now);
    CHECK_EQ(pair.a.staging.used(), piece == 1 ? 0u : 300u);
    pair.a.channel.onTimer(pair.now);
    pair.a.completions.drain();
  }
  CHECK_EQ(send.ends, 1);
  send.content.assign(300, 'X');
  pair.up(2);
  pair.down(1);
  TestRecv recv(&pair.b.channel, 300);
  pair.b.mailbox.post(&recv);
  pair.settle({2});
  CHECK_EQ(recv.content, text(300));
  pair.checkEmpty();
}

TEST(channel_copies_no_collective_on_a_short_link) {
  MeasuredPair pair(std::chrono::milliseconds(1));
  TestSend send(text(300));
  send.pointToPoint = false;
  TestRecv recv(&pair.b.channel, 300);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto first = pair.take(pair.a, 1);
  pair.pass(std::chrono::seconds(10));
  CHECK_EQ(send.ends, 0);
  CHECK_EQ(pair.a.staging.used(), 0u);
  CHECK(pair.give(pair.b, 1, *first).ok());
  pair.settle({1});
  CHECK_EQ(send.ends, 1);
  pair.checkEmpty();
}

// The far end is not asked to hurry: it has better things to do.
TEST(channel_copies_a_small_message_once_it_is_written) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(90));
  pair.a.channel.send(&send, pair.now);
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 0); // not before: the copy takes time
  const auto frame = pair.take(pair.a, 1);
  CHECK_EQ(frame->fields().flags & kFlagAckNow, 0);
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(pair.a.staging.used(), 90u);
  send.content.assign(90, 'X'); // its owner's again
  pair.down(1); // the frame is lost
  TestRecv recv(&pair.b.channel, 90);
  pair.b.mailbox.post(&recv);
  pair.settle({2});
  CHECK_EQ(recv.content, text(90));
  pair.checkEmpty();
}

// Messages that are copied need no quick acknowledgement, so that some must ask
// for one lest nobody knew how long the link takes.
TEST(channel_measures_a_path_that_carries_small_messages_only) {
  ChannelPair pair;
  pair.up(1);
  TestSend first(text(90));
  TestSend second(text(90));
  TestRecv firstRecv(&pair.b.channel, 90);
  TestRecv secondRecv(&pair.b.channel, 90);
  pair.b.mailbox.post(&firstRecv);
  pair.b.mailbox.post(&secondRecv);
  pair.a.channel.send(&first, pair.now);
  pair.settle({1});
  CHECK_EQ(pair.a.channel.pathStatistics(1).roundTripsS().count(), 0u);
  pair.now += kMeasureEvery;
  pair.a.channel.send(&second, pair.now);
  pair.settle({1});
  CHECK_EQ(pair.a.channel.pathStatistics(1).roundTripsS().count(), 1u);
  CHECK_EQ(pair.a.channel.pathStatistics(1).roundTripsS().last().size(), 1u);
  pair.checkEmpty();
}

TEST(channel_without_room_for_copies_asks_for_the_acknowledgement) {
  ChannelPair pair;
  pair.a.staging.setLimit(0);
  pair.up(1);
  TestSend send(text(90));
  TestRecv recv(&pair.b.channel, 90);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  // No time passes: what follows was asked for.
  CHECK(pair.move(pair.a, 1)->type == FrameType::kPing);
  CHECK(pair.move(pair.b, 1).has_value());
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 1);
  pair.settle({1});
  pair.checkEmpty();
}

TEST(channel_opens_a_new_path_by_acknowledgements) {
  constexpr uint32_t kChunk = 16u << 10;
  ChannelConfig config = ChannelPair::defaults();
  config.chunkBytes = kChunk;
  ChannelPair pair(config);
  pair.up(1);
  TestSend send(text(4 * kFirstWindowBytes));
  TestRecv recv(&pair.b.channel, send.bytes);
  pair.b.mailbox.post(&recv);
  pair.b.channel.onTimer(pair.now); // grants, in case there are any
  pair.a.channel.send(&send, pair.now);
  uint64_t expected = kFirstWindowBytes;
  for (int burst = 0; burst < 2; ++burst) {
    uint64_t bytes = 0;
    uint16_t lastFlags = 0;
    while (const auto header = pair.move(pair.a, 1)) {
      bytes += header->payloadBytes;
      lastFlags = header->flags;
    }
    CHECK_EQ(bytes, expected);
    CHECK((lastFlags & kFlagAckNow) != 0); // or nothing would go on
    while (pair.move(pair.b, 1)) {
    }
    expected = 2 * kFirstWindowBytes;
  }
  pair.settle({1});
  CHECK_EQ(recv.content, send.content);
  pair.checkEmpty();
}

// Each connection breaks soon. Had it been given all there is at once, its
// acknowledgements would never come back, and each would begin from the start.
TEST(channel_makes_progress_over_short_lived_paths) {
  ChannelConfig config = ChannelPair::defaults();
  config.chunkBytes = 16u << 10;
  ChannelPair pair(config);
  TestSend send(text(1 << 20));
  TestRecv recv(&pair.b.channel, send.bytes);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  PathId life = 0;
  while (recv.ends == 0) {
    CHECK(++life < 40);
    pair.up(life);
    // The sender hands over all that it may before the first answer comes.
    std::vector<ChannelPair::Frame> wire;
    while (auto frame = pair.take(pair.a, life)) {
      wire.push_back(std::move(*frame));
    }
    uint64_t carried = 0;
    for (const auto& frame : wire) {
      carried += frame.payload.size();
      if (carried > 2 * kFirstWindowBytes) {
        break; // cut
      }
      CHECK(pair.give(pair.b, life, frame).ok());
    }
    while (carried <= 2 * kFirstWindowBytes && pair.move(pair.b, life)) {
    }
    pair.down(life);
    pair.b.completions.drain();
  }
  pair.up(++life);
  pair.settle({life});
  CHECK_EQ(recv.content, send.content);
  CHECK_EQ(send.ends, 1);
  pair.checkEmpty();
}

// Over path 1.
int chunksUntilReceived(ChannelPair& pair, const TestRecv& recv) {
  int frames = 0;
  for (int round = 0; round < 100 && recv.ends == 0; ++round) {
    while (const auto header = pair.move(pair.a, 1)) {
      frames += header->payloadBytes > 0;
    }
    while (pair.move(pair.b, 1)) {
    }
    pair.b.completions.drain();
  }
  return frames;
}

// What goes over a path now and then shows little of it; its transport may know
// better.
TEST(channel_cuts_messages_by_what_a_path_is_known_to_carry) {
  for (const auto& [bytesPerS, chunks] :
       {std::pair(1e9, 1), std::pair(5e6, 8), std::pair(1e3, 32)}) {
    ChannelConfig config = ChannelPair::defaults();
    config.chunkBytes = 512u << 10;
    ChannelPair pair(config);
    pair.up(1);
    pair.a.channel.setCapacity(1, bytesPerS);
    TestSend send(text(512u << 10));
    TestRecv recv(&pair.b.channel, send.bytes);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    CHECK_EQ(chunksUntilReceived(pair, recv), chunks);
    CHECK_EQ(recv.content, send.content);
    pair.settle({1});
    pair.checkEmpty();
  }
}

// A chunk of another channel, with its headers: what is left over would be a
// second chunk of a few bytes.
TEST(channel_cuts_no_message_that_is_hardly_larger_than_a_chunk) {
  for (const auto& [bytes, chunks] :
       {std::pair((64u << 10) + 144, 1), std::pair(96u << 10, 2)}) {
    ChannelConfig config = ChannelPair::defaults();
    config.chunkBytes = 512u << 10;
    ChannelPair pair(config);
    pair.up(1);
    pair.a.channel.setCapacity(1, 5e6); // chunks of 64 KiB
    TestSend send(text(bytes));
    TestRecv recv(&pair.b.channel, send.bytes);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    CHECK_EQ(chunksUntilReceived(pair, recv), chunks);
    CHECK_EQ(recv.content, send.content);
    pair.settle({1});
    pair.checkEmpty();
  }
}

TEST(channel_probes_a_path_that_came_back) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.putOnProbation(2);
  TestSend send(text(300));
  TestRecv recv(&pair.b.channel, 300);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 2)->type == FrameType::kPing);
  CHECK(!pair.move(pair.a, 2)); // that is all
  CHECK(pair.move(pair.a, 1)->type == FrameType::kData);
  CHECK(pair.a.channel.onProbation(2));
  while (pair.move(pair.b, 2)) {
  }
  CHECK_EQ(pair.a.channel.pingsAnswered(2), 1u);
  CHECK(pair.a.channel.onProbation(2)); // how many are enough: the owner knows
  pair.a.channel.trust(2);
  CHECK(pair.move(pair.a, 2)->type == FrameType::kData);
  pair.settle({1, 2});
  CHECK_EQ(recv.content, text(300));
  pair.checkEmpty();
}

TEST(channel_sends_what_a_suspect_path_has_once_more) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend send(text(400));
  TestRecv recv(&pair.b.channel, 400);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto first = pair.take(pair.a, 1);
  const auto second = pair.take(pair.a, 1);
  pair.a.channel.setSuspect(1, true);
  CHECK(!pair.move(pair.a, 1)); // nothing that must arrive
  pair.settle({2});
  CHECK_EQ(recv.ends, 1); // without waiting for path 1 to die
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(recv.content, text(400));
  CHECK_EQ(pair.a.channel.pathCounters(2).chunksRetransmitted, 2u);
  // It was only slow: what it had comes in vain, and it goes on.
  CHECK(pair.give(pair.b, 1, *first).ok());
  CHECK(pair.give(pair.b, 1, *second).ok());
  pair.a.channel.setSuspect(1, false);
  TestSend more(text(100));
  TestRecv last(&pair.b.channel, 100);
  pair.b.mailbox.post(&last);
  pair.a.channel.send(&more, pair.now);
  CHECK(pair.move(pair.a, 1)->type == FrameType::kData);
  pair.settle({1, 2});
  CHECK_EQ(last.content, text(100));
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(pair.b.channel.counters().duplicateChunks, 2u);
  pair.checkEmpty();
}

// The first copy may be acknowledged after all, before or after the second was
// sent, and the path of the second may die: each chunk counts once.
TEST(channel_counts_a_chunk_once_however_many_copies_arrive) {
  for (int variant = 0; variant < 3; ++variant) {
    ChannelPair pair;
    pair.up(1);
    pair.up(2);
    TestSend send(text(300));
    TestRecv recv(&pair.b.channel, 300);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    const auto first = pair.take(pair.a, 1);
    pair.a.channel.setSuspect(1, true);
    if (variant > 0) { // the copy is under way
      CHECK_EQ(pair.take(pair.a, 2)->fields().offset, 0u);
    }
    CHECK(pair.give(pair.b, 1, *first).ok());
    pair.b.channel.ping(1);
    while (pair.move(pair.b, 1)) { // with the acknowledgement
    }
    if (variant == 2) {
      pair.down(2); // and is lost
      pair.up(3);
    }
    CHECK_EQ(send.ends, 0);
    pair.a.channel.setSuspect(1, false);
    if (variant == 0) { // nothing is sent in vain
      CHECK_EQ(pair.take(pair.a, 2)->fields().offset, 100u);
      pair.down(2);
      pair.up(3);
    } else if (variant == 1) {
      pair.down(2);
      pair.up(3);
    }
    pair.settle({1, 3});
    CHECK_EQ(recv.content, text(300));
    CHECK_EQ(send.ends, 1);
    CHECK_EQ(recv.ends, 1);
    CHECK_EQ(pair.b.channel.counters().duplicateChunks, 0u);
    pair.checkEmpty();
  }
}

// A send is over as soon as a copy of each chunk has arrived; what a suspect
// path has not written by then must not be read from the owner's memory.
TEST(channel_suspect_path_keeps_no_hold_on_a_finished_buffer) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  auto send = std::make_unique<TestSend>(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(send.get(), pair.now);
  CHECK(pair.a.channel.pull(1, pair.now) != nullptr); // and not written
  pair.a.channel.setSuspect(1, true);
  pair.settle({2});
  CHECK_EQ(send->ends, 1);
  send->content.assign(100, 'X');
  send.reset();
  const auto late = pair.take(pair.a, 1);
  CHECK_EQ(
      std::string(
          reinterpret_cast<const char*>(late->payload.data()),
          late->payload.size()),
      text(100));
  CHECK(pair.give(pair.b, 1, *late).ok());
  pair.settle({1, 2});
  pair.checkEmpty();
}

// Also what is not data: a grant that a suspect path swallowed would leave its
// message waiting for ever.
TEST(channel_repeats_the_control_frames_of_a_suspect_path) {
  auto config = ChannelPair::defaults();
  config.ownEagerBytes = config.peerEagerBytes = 0; // every message asks first
  ChannelPair pair(config);
  pair.up(1);
  pair.up(2);
  TestSend send(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const auto offer = pair.take(pair.a, 1);
  pair.a.channel.setSuspect(1, true);
  CHECK((pair.move(pair.a, 2)->flags & kFlagOffer) != 0);
  const auto grant = pair.take(pair.b, 1);
  CHECK(grant && grant->fields().type == FrameType::kGrant);
  pair.b.channel.setSuspect(1, true);
  pair.settle({2});
  CHECK_EQ(recv.content, text(100));
  CHECK(pair.give(pair.b, 1, *offer).ok());
  CHECK(pair.give(pair.a, 1, *grant).ok());
  pair.settle({1, 2});
  CHECK(pair.a.channel.drained() && pair.b.channel.drained());
  pair.checkEmpty();
}

// Over another path, the refusal might come behind the acknowledgement of what
// was refused, and the send would have succeeded. The refusal also goes over a
// path that leaves control frames to others.
TEST(channel_refuses_on_the_path_of_what_it_refuses) {
  enum class Kind { kUsual, kForNoBursts, kOverRelay };
  for (const auto& [kind, lost] :
       {std::pair(Kind::kUsual, false),
        {Kind::kUsual, true},
        {Kind::kForNoBursts, false},
        {Kind::kForNoBursts, true},
        {Kind::kOverRelay, false},
        {Kind::kOverRelay, true}}) {
    ChannelPair pair;
    pair.a.staging.setLimit(0); // it ends with its acknowledgement
    pair.up(1);
    pair.up(2);
    if (kind == Kind::kForNoBursts) {
      pair.b.channel.setBursts(2, BurstRange::none());
    } else if (kind == Kind::kOverRelay) {
      pair.b.channel.setOverRelay(2);
    }
    TestSend send(text(90));
    TestRecv recv(&pair.b.channel, 80);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    CHECK(pair.move(pair.a, 2).has_value());
    CHECK(!pair.b.channel.hasFrames(1));
    CHECK(!pair.take(pair.b, 1));
    if (lost) {
      pair.down(2);
      pair.settle({1});
    } else {
      CHECK(pair.move(pair.b, 2)->type == FrameType::kReject);
      pair.settle({1, 2});
    }
    CHECK_EQ(send.ends, 1);
    CHECK(send.status.code() == StatusCode::kMismatch);
    CHECK(recv.status.code() == StatusCode::kMismatch);
    pair.checkEmpty();
  }
}

// The refusal goes over another path, since its own has died, and so does a
// copy of what is refused, which is faster.
TEST(channel_refuses_what_is_sent_again_once_more) {
  ChannelPair pair;
  pair.a.staging.setLimit(0);
  for (const PathId path : {1, 2, 3}) {
    pair.up(path);
  }
  TestSend send(text(90));
  TestRecv recv(&pair.b.channel, 80);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 2).has_value());
  pair.down(2);
  const auto refusal = pair.take(pair.b, 1); // on its way, slowly
  CHECK(refusal && refusal->fields().type == FrameType::kReject);
  CHECK(pair.move(pair.a, 3).has_value());
  pair.settle({3});
  CHECK_EQ(send.ends, 1);
  CHECK(send.status.code() == StatusCode::kMismatch);
  pair.down(1);
  pair.settle({3});
  pair.checkEmpty();
}

TEST(channel_path_carries_its_classes_only) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.setClasses(
      1, 1u << static_cast<int>(TrafficClass::kActivation));
  pair.a.channel.setClasses(2, 0); // in reserve
  TestSend gradient(text(100), 0, TrafficClass::kGradient);
  TestSend activation(text(100), 1, TrafficClass::kActivation);
  pair.a.channel.send(&gradient, pair.now);
  pair.a.channel.send(&activation, pair.now);
  CHECK(pair.take(pair.a, 1)->fields().stream == 1);
  CHECK(!pair.take(pair.a, 1));
  CHECK(!pair.take(pair.a, 2));
  pair.a.channel.setClasses(2, 0xff);
  CHECK(pair.take(pair.a, 2)->fields().stream == 0);
}

// Small bursts over path 1, large ones over path 2: what counts is all that is
// not acknowledged when a message is posted.
TEST(channel_message_goes_over_the_path_for_its_burst) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.setBursts(1, {0, 1000});
  pair.a.channel.setBursts(2, {1000, UINT64_MAX});
  TestSend large(text(1200), 0), behind(text(100), 1);
  pair.a.channel.send(&large, pair.now);
  pair.a.channel.send(&behind, pair.now);
  CHECK(!pair.take(pair.a, 1));
  std::set<uint64_t> streams;
  while (const auto frame = pair.take(pair.a, 2)) {
    streams.insert(frame->fields().stream);
  }
  CHECK_EQ(streams.size(), 2u);

  ChannelPair idle;
  idle.up(1);
  idle.up(2);
  idle.a.channel.setBursts(1, {0, 1000});
  idle.a.channel.setBursts(2, {1000, UINT64_MAX});
  TestSend small(text(900), 2);
  idle.a.channel.send(&small, idle.now);
  CHECK(!idle.take(idle.a, 2));
  CHECK(idle.take(idle.a, 1)->fields().stream == 2);
}

TEST(channel_operation_names_the_burst_that_its_message_begins) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.setBursts(1, {0, 1000});
  pair.a.channel.setBursts(2, {1000, UINT64_MAX});
  TestSend first(text(100));
  first.burstBytes = 2000;
  pair.a.channel.send(&first, pair.now);
  CHECK(!pair.take(pair.a, 1));
  CHECK(pair.take(pair.a, 2).has_value());
}

// A small message overtakes a large one that another path has begun.
TEST(channel_path_takes_what_suits_it_from_behind_the_front) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend large(text(5000), 0), small(text(100), 1);
  pair.a.channel.send(&large, pair.now);
  pair.a.channel.send(&small, pair.now);
  pair.a.channel.setBursts(1, {0, 5000});
  pair.a.channel.setBursts(2, {5000, UINT64_MAX});
  CHECK(pair.take(pair.a, 2)->fields().stream == 1);
  CHECK(!pair.take(pair.a, 2));
  CHECK(pair.take(pair.a, 1)->fields().stream == 0);
}

TEST(channel_any_path_carries_a_burst_that_suits_none) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.setBursts(1, {0, 1000});
  pair.a.channel.setBursts(2, {1000, UINT64_MAX});
  TestSend large(text(1200), 0);
  pair.a.channel.send(&large, pair.now);
  CHECK(!pair.take(pair.a, 1));
  pair.a.channel.setSuspect(2, true);
  CHECK(pair.take(pair.a, 1)->fields().stream == 0);
}

// The other kind of path may be slow even for what is small: UDP that is
// policed.
TEST(channel_path_for_no_bursts_takes_no_control_frames) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  pair.a.channel.setBursts(1, BurstRange::none());
  pair.a.channel.sendControl({std::byte{1}});
  CHECK(!pair.a.channel.hasFrames(1));
  CHECK(!pair.take(pair.a, 1));
  pair.a.channel.setSuspect(2, true);
  CHECK(pair.a.channel.hasFrames(1));
  CHECK(pair.take(pair.a, 1)->fields().type == FrameType::kControl);

  pair.a.channel.setSuspect(2, false);
  pair.a.channel.sendControl({std::byte{2}});
  CHECK(!pair.take(pair.a, 1));
  CHECK(pair.take(pair.a, 2)->fields().type == FrameType::kControl);

  // Nothing answers, and no one doubts it.
  pair.a.channel.sendControl({std::byte{3}});
  pair.now += std::chrono::seconds(2);
  CHECK(pair.take(pair.a, 1)->fields().type == FrameType::kControl);
}

TEST(channel_cancelled_send_keeps_its_half_written_frame) {
  ChannelPair pair;
  pair.up(1);
  auto send = std::make_unique<TestSend>(text(100));
  pair.a.channel.send(send.get(), pair.now);
  CHECK(pair.a.channel.pull(1, pair.now) != nullptr);
  pair.a.channel.cancelSend(send.get(), "changed my mind", pair.now);
  send->content.assign(100, 'X');
  send.reset();
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.settle({1});
  CHECK_EQ(recv.ends, 1);
  CHECK_EQ(recv.content, text(100)); // whole, so it counts
  pair.checkEmpty();
}

TEST(channel_cancel_reaches_the_receiver) {
  ChannelPair pair;
  pair.up(1);
  TestSend never(text(500)), half(text(500));
  TestRecv r1(&pair.b.channel, 500), r2(&pair.b.channel, 500);
  pair.a.channel.send(&half, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  pair.a.channel.cancelSend(&half, "changed my mind", pair.now);
  pair.a.channel.send(&never, pair.now);
  pair.a.channel.cancelSend(&never, "again", pair.now);
  pair.settle({1});
  CHECK_EQ(pair.b.channel.bufferedBytes(), 0u);
  pair.b.mailbox.post(&r1);
  pair.b.mailbox.post(&r2);
  pair.settle({1});
  CHECK_EQ(r1.status.message(), "changed my mind");
  CHECK_EQ(r2.status.message(), "again");
  CHECK_EQ(half.ends + never.ends, 0);
  pair.checkEmpty();
}

TEST(channel_send_that_has_failed_already_keeps_its_place) {
  ChannelPair pair;
  pair.up(1);
  TestSend failed(text(100)), good(text(50));
  failed.failure = Status(StatusCode::kTimeout, "there is no data");
  pair.a.channel.send(&failed, pair.now);
  pair.a.channel.send(&good, pair.now);
  TestRecv r1(&pair.b.channel, 100), r2(&pair.b.channel, 50);
  pair.b.mailbox.post(&r1);
  pair.b.mailbox.post(&r2);
  pair.settle({1});
  CHECK_EQ(r1.status.message(), "there is no data");
  CHECK_EQ(r2.content, text(50));
  CHECK_EQ(failed.ends, 1);
  CHECK(failed.status.code() == StatusCode::kTimeout);
  CHECK_EQ(good.ends, 1);
  pair.checkEmpty();
}

// The sender does not know that the message is whole, and its own operation has
// failed. Only a message that is matched as well stays.
TEST(channel_cancel_fails_a_receive_that_comes_after_it) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(100));
  send.pointToPoint = false; // or the channel would finish it with a copy
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK_EQ(pair.b.channel.bufferedBytes(), 100 + kChunkOverheadBytes); // whole
  pair.a.channel.cancelSend(&send, "changed my mind", pair.now);
  CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kCancel);
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.settle({1});
  CHECK_EQ(recv.status.message(), "changed my mind");
  CHECK_EQ(send.ends, 0);
  pair.checkEmpty();
}

TEST(channel_acknowledges_on_time) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(250));
  TestRecv recv(&pair.b.channel, 250);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  // The message is matched, so the sender may go on: that answer is urgent.
  CHECK_EQ(pair.move(pair.b, 1)->type, FrameType::kGrant);
  CHECK(pair.move(pair.a, 1).has_value());
  // Nobody waits for the second chunk's acknowledgement: it may be late.
  CHECK(!pair.move(pair.b, 1).has_value());
  CHECK_EQ((pair.b.channel.deadline() - pair.now).count(), kAckDelay.count());
  const auto last = pair.move(pair.a, 1);
  CHECK_EQ(last->flags & kFlagAckNow, kFlagAckNow); // the owner waits
  CHECK(pair.b.channel.hasFrames(1));
  const auto answer = pair.move(pair.b, 1);
  CHECK_EQ(answer->ack, 3u);
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(pair.a.channel.waitingSince(1), kNever);
}

TEST(channel_refuses_acknowledgement_of_what_is_not_written) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(200));
  pair.a.channel.send(&send, pair.now);
  // Handed to the path, which has written nothing: the payload is still ours
  // to send, so a peer must not make us give it back.
  CHECK(pair.a.channel.pull(1, pair.now) != nullptr);
  FrameHeader lie;
  lie.type = FrameType::kAck;
  lie.ack = 1;
  CHECK_EQ(
      pair.a.channel.onHeader(1, lie, pair.now).code(), StatusCode::kProtocol);
  pair.a.channel.popWritten(1);
  CHECK(pair.a.channel.onHeader(1, lie, pair.now).ok());
  lie.ack = 2;
  CHECK_EQ(
      pair.a.channel.onHeader(1, lie, pair.now).code(), StatusCode::kProtocol);
  pair.a.channel.cancelSend(&send, "over", pair.now);
}

TEST(channel_failure_ends_everything_once) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(200)), late(text(10));
  TestRecv recv(&pair.a.channel, 10);
  pair.a.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.take(pair.a, 1).has_value());
  CHECK(pair.take(pair.a, 1).has_value());
  pair.a.channel.fail(Status(StatusCode::kPeerDied, "it died"));
  pair.a.channel.fail(Status(StatusCode::kNetwork, "and again"));
  pair.a.channel.send(&late, pair.now);
  pair.a.completions.drain();
  for (const Status& s : {send.status, recv.status, late.status}) {
    CHECK_EQ(s.message(), "it died");
  }
  CHECK_EQ(send.ends + recv.ends + late.ends, 3);
  CHECK(pair.a.channel.drained());
  // An acknowledgement still on its way once found an empty list.
  FrameHeader ack;
  ack.type = FrameType::kAck;
  ack.ack = 2;
  CHECK(pair.a.channel.onHeader(1, ack, pair.now).ok());
  CHECK(pair.a.channel.onPayload(1, pair.now).ok());
  CHECK(pair.a.channel.pull(1, pair.now) == nullptr);
}

TEST(channel_delivers_control_once) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  const auto bytes = encodeReason(StatusCode::kAborted, "hello");
  pair.a.channel.sendControl(bytes);
  pair.a.channel.sendBye();
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK_EQ(pair.b.controls.size(), 1u);
  CHECK_EQ(pair.b.byes, 1);
  // The path dies before the acknowledgement: both go again.
  pair.a.channel.removePath(1, pair.now);
  CHECK_EQ(pair.move(pair.a, 2)->type, FrameType::kControl);
  pair.settle({2});
  CHECK_EQ(pair.b.controls.size(), 1u);
  CHECK_EQ(pair.b.byes, 1);
  CHECK(pair.a.channel.drained());
}

// An acknowledgement was lost on its connection and waited for TCP to repeat
// it, while the goodbye came over another one: "has left", for a message that
// the peer had got.
TEST(channel_learns_from_a_goodbye_what_has_arrived) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TestSend whole(text(350), 7), half(text(350), 8), unasked(text(200), 9);
  TestRecv first(&pair.b.channel, 350, 7), second(&pair.b.channel, 350, 8);
  pair.b.mailbox.post(&first);
  pair.b.mailbox.post(&second);
  for (TestSend* send : {&whole, &half, &unasked}) {
    pair.a.channel.send(send, pair.now);
  }
  for (int chunk = 0; chunk < 4 + 3; ++chunk) {
    CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kData);
  }
  pair.b.completions.drain();
  CHECK_EQ(first.ends, 1);
  CHECK_EQ(whole.ends, 0); // path 1 is mute in the other direction
  CHECK(pair.take(pair.a, 1).has_value()); // the rest of `half` is lost
  CHECK(pair.move(pair.a, 1).has_value());
  CHECK(pair.move(pair.a, 1).has_value());
  pair.b.channel.sendBye();
  while (pair.move(pair.b, 2)) {
  }
  CHECK_EQ(pair.a.byes, 1);
  pair.a.channel.fail(Status(StatusCode::kPeerLeft, "has left"));
  pair.a.completions.drain();
  CHECK_EQ(whole.status.message(), "");
  CHECK_EQ(half.status.message(), "has left");
  CHECK_EQ(unasked.status.message(), "has left");
  CHECK_EQ(whole.ends + half.ends + unasked.ends, 3);
}

TEST(channel_believes_no_goodbye_about_what_it_has_not_sent) {
  const auto told = [](const std::vector<std::byte>& payload) {
    ChannelPair pair;
    pair.up(1);
    TestSend send(text(200)); // two chunks, one of them on its way
    pair.a.channel.send(&send, pair.now);
    CHECK(pair.take(pair.a, 1).has_value());
    FrameHeader bye;
    bye.type = FrameType::kBye;
    bye.message = 1;
    bye.payloadBytes = static_cast<uint32_t>(payload.size());
    CHECK(pair.a.channel.onHeader(1, bye, pair.now).ok());
    std::ranges::copy(payload, pair.a.channel.destination(1));
    const Status status = pair.a.channel.onPayload(1, pair.now);
    pair.a.completions.drain();
    CHECK_EQ(send.ends, 0);
    CHECK_EQ(pair.a.byes, status.ok() ? 1 : 0);
    return status.message();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK_EQ(told({}), "");
  CHECK(has(told(encodeBye({{1, 1}})), "has not been sent whole"));
  CHECK(has(told(encodeBye({{2, 9}})), "unknown message 9"));
  CHECK(has(told(encodeBye({{0, 1}})), "goodbye of 16 bytes"));
  CHECK(has(told(encodeBye({{2, 1}})), "goodbye of 16 bytes"));
  CHECK(has(told(encodeBye({{1, 1}, {2, 2}})), "goodbye of 32 bytes"));
  CHECK(has(told(std::vector<std::byte>(15)), "goodbye of 15 bytes"));
}

// What a pipeline's planner needs to know of a link: when the last byte of such
// a message is there, whatever its first chunk's round trip was.
TEST(channel_measures_how_long_messages_take) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(350)); // four chunks
  TestRecv recv(&pair.b.channel, 350);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  for (int chunk = 0; chunk < 4; ++chunk) {
    CHECK(pair.a.channel.deliveriesS().last().empty());
    pair.now += std::chrono::milliseconds(10);
    CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kData);
  }
  pair.now += std::chrono::milliseconds(5);
  CHECK(pair.move(pair.b, 1).has_value());
  CHECK_EQ(pair.a.channel.deliveriesS().count(), 1u);
  CHECK_EQ(pair.a.channel.deliveriesS().last().front(), 0.045);
  pair.settle({1});
  pair.checkEmpty();
}

// Such a one is acknowledged when it suits the peer: that is no measurement.
TEST(channel_does_not_measure_messages_that_nobody_waits_for) {
  ChannelConfig config = ChannelPair::defaults();
  config.copyBytes = 1000;
  ChannelPair pair(config);
  pair.up(1);
  TestSend send(text(90));
  TestRecv recv(&pair.b.channel, 90);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  pair.settle({1});
  CHECK_EQ(recv.content, text(90));
  CHECK(pair.a.channel.drained());
  CHECK_EQ(pair.a.channel.deliveriesS().count(), 0u);
}

TEST(channel_measures_its_own_pings_only) {
  ChannelPair pair;
  pair.up(1);
  FrameHeader pong;
  pong.type = FrameType::kPong;
  // Such a time stamp once overflowed.
  for (uint64_t stamp : {uint64_t(1) << 63, uint64_t(0), UINT64_MAX}) {
    pong.message = stamp;
    CHECK(pair.a.channel.onHeader(1, pong, pair.now).ok());
    CHECK(pair.a.channel.onPayload(1, pair.now).ok());
  }
  CHECK_EQ(pair.a.channel.pathStatistics(1).roundTripS(), 0.0);
  pair.a.channel.ping(1);
  CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kPing);
  pair.now += std::chrono::milliseconds(20);
  CHECK_EQ(pair.move(pair.b, 1)->type, FrameType::kPong);
  CHECK_EQ(pair.a.channel.pathStatistics(1).roundTripS(), 0.02);
}

// What comes in says nothing of the way out: only an answer does.
TEST(channel_knows_what_has_been_answered_on_a_path) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  const TimePoint begin = pair.now;
  CHECK(pair.a.channel.answeredUpTo(1) == TimePoint{});
  pair.a.channel.ping(1);
  const auto lost = pair.take(pair.a, 1);
  CHECK(lost->fields().type == FrameType::kPing);
  pair.now += std::chrono::milliseconds(20);
  pair.b.channel.ping(1);
  CHECK_EQ(pair.move(pair.b, 1)->type, FrameType::kPing);
  TestSend send(text(50));
  TestRecv recv(&pair.a.channel, 50);
  pair.a.mailbox.post(&recv);
  pair.b.channel.send(&send, pair.now);
  CHECK_EQ(pair.move(pair.b, 1)->type, FrameType::kData);
  CHECK(pair.a.channel.answeredUpTo(1) == TimePoint{});
  // A pong answers its ping, an acknowledgement what it counts.
  CHECK(pair.give(pair.b, 1, *lost).ok());
  pair.now += std::chrono::milliseconds(20);
  while (pair.move(pair.b, 1)) {
  }
  CHECK(pair.a.channel.answeredUpTo(1) == begin);
  const TimePoint sent = pair.now;
  TestSend answer(text(50));
  TestRecv taken(&pair.b.channel, 50);
  pair.b.mailbox.post(&taken);
  pair.a.channel.send(&answer, pair.now);
  const auto data = pair.take(pair.a, 1);
  pair.now += std::chrono::milliseconds(20);
  CHECK(pair.give(pair.b, 1, *data).ok());
  CHECK(pair.a.channel.answeredUpTo(1) == begin);
  pair.settle({1, 2});
  CHECK(pair.a.channel.answeredUpTo(1) >= sent);
  CHECK(pair.a.channel.answeredUpTo(2) == TimePoint{});
}

// A cap on the rate holds up messages, not what keeps a path alive.
TEST(channel_gives_a_path_no_chunk_that_must_wait) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(50));
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.a.channel.pull(1, pair.now, /*chunks=*/false) == nullptr);
  pair.a.channel.ping(1);
  CHECK(pair.a.channel.pull(1, pair.now, /*chunks=*/false) != nullptr);
  CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kPing);
  CHECK_EQ(pair.move(pair.a, 1)->type, FrameType::kData);
}

TEST(channel_refuses_a_message_too_large_for_the_wire) {
  ChannelPair pair;
  TestSend send("x");
  send.bytes = kMaxMessageBytes + 1;
  pair.a.channel.send(&send, pair.now);
  pair.a.completions.drain();
  CHECK_EQ(send.status.code(), StatusCode::kInvalidArgument);
}

// What a peer makes us remember must end somewhere.

FrameHeader offer(uint64_t message) {
  FrameHeader h;
  h.type = FrameType::kData;
  h.flags = kFlagOffer;
  h.message = message;
  h.group = 1;
  h.order = message - 1;
  h.chunkBytes = 100;
  h.totalBytes = 1000;
  return h;
}

Status feed(ChannelPair& pair, const FrameHeader& h) {
  FrameBytes bytes;
  encodeFrame(h, bytes);
  FrameHeader back;
  Status s = decodeFrame(bytes, back);
  CHECK_EQ(s.toString(), "ok");
  s = pair.b.channel.onHeader(1, back, pair.now);
  return s.ok() ? pair.b.channel.onPayload(1, pair.now) : s;
}

Status feedMany(ChannelPair& pair, FrameHeader h, uint64_t step) {
  for (uint64_t i = 1; i <= 3'000'000; ++i) {
    h.message = i * step;
    h.order = i - 1;
    if (Status s = feed(pair, h); !s.ok()) {
      CHECK_EQ(s.code(), StatusCode::kProtocol);
      return s;
    }
  }
  throw Failure("the peer was never stopped");
}

TEST(channel_bounds_offers_of_a_peer) {
  ChannelPair pair;
  pair.up(1);
  const Status s = feedMany(pair, offer(1), 1);
  CHECK_CONTAINS(s.message(), "nobody has asked for");
  CHECK(pair.b.channel.incomingMessages() <= 2 * kMaxOffers + 400);
}

TEST(channel_bounds_cancels_of_a_peer) {
  ChannelPair pair;
  pair.up(1);
  FrameHeader h;
  h.type = FrameType::kCancel;
  h.group = 1;
  CHECK_CONTAINS(feedMany(pair, h, 1).message(), "nobody has asked for");
}

TEST(channel_bounds_refused_messages_of_a_peer) {
  ChannelPair pair;
  pair.up(1);
  pair.b.mailbox.closeGroup(1);
  CHECK_CONTAINS(feedMany(pair, offer(1), 1).message(), "refused messages");
}

TEST(channel_bounds_gaps_of_a_peer) {
  ChannelPair pair;
  pair.up(1);
  FrameHeader h;
  h.type = FrameType::kControl;
  CHECK_CONTAINS(feedMany(pair, h, 2).message(), "gaps");
}

// Tiny chunks far out in huge messages: records, not bytes, are what costs.
TEST(channel_charges_records_of_chunks) {
  ChannelPair pair;
  pair.up(1);
  FrameHeader h;
  h.type = FrameType::kData;
  h.group = 1;
  h.chunkBytes = kMinChunkBytes;
  h.totalBytes = kMinChunkBytes * (kMaxChunksPerMessage - 1);
  h.payloadBytes = kMinChunkBytes;
  Status s;
  uint64_t taken = 0;
  for (; s.ok(); ++taken) {
    h.message = taken + 1;
    h.order = taken;
    h.offset = h.totalBytes - kMinChunkBytes * (1 + taken % 100);
    s = feed(pair, h);
    CHECK(taken < 100'000);
  }
  CHECK_EQ(taken - 1, 100'000u / (kMinChunkBytes + kChunkOverheadBytes));
}

TEST(channel_refuses_a_message_that_changes) {
  ChannelPair pair;
  pair.up(1);
  CHECK(feed(pair, offer(1)).ok());
  FrameHeader h = offer(1);
  h.totalBytes = 2000;
  CHECK_EQ(feed(pair, h).code(), StatusCode::kProtocol);
}

TEST(channel_refuses_grants_of_what_was_never_sent) {
  ChannelPair pair;
  pair.up(1);
  FrameHeader h;
  h.type = FrameType::kGrant;
  h.payloadBytes = 8;
  CHECK(pair.b.channel.onHeader(1, h, pair.now).ok());
  const uint64_t number = 7;
  std::memcpy(pair.b.channel.destination(1), &number, 8);
  CHECK_EQ(pair.b.channel.onPayload(1, pair.now).code(), StatusCode::kProtocol);
}

// From a to b, with receives that wait for them.
struct Messages {
  ChannelPair& net;
  std::deque<TestSend> sends{};
  std::deque<TestRecv> recvs{};
  void post(size_t bytes) {
    sends.emplace_back(text(bytes));
    recvs.emplace_back(&net.b.channel, bytes);
    net.b.mailbox.post(&recvs.back());
    net.a.channel.send(&sends.back(), net.now);
  }
  // The channel learns what paths 1 and 2 carry.
  void learnPaths() {
    for (int i = 0; i < 20; ++i) {
      post(400);
      net.settle(
          i % 2 == 0 ? std::vector<PathId>{1, 2} : std::vector<PathId>{2, 1});
    }
  }
};

// Acknowledgements show what the transport did, not what it does now.
TEST(channel_leaves_chunks_to_paths_whose_transport_sends_faster) {
  ChannelPair net;
  for (const PathId path : {PathId(1), PathId(2)}) {
    net.up(path);
    net.a.channel.setSharedLink(path, 7);
  }
  Messages messages{net};
  messages.learnPaths();
  // One link, measured once.
  const double link = net.a.channel.linkBytesPerS(1);
  CHECK(link > 0);
  CHECK_EQ(net.a.channel.linkBytesPerS(2), link);
  net.a.channel.setPace(2, 1);
  messages.post(400);
  CHECK(!net.take(net.a, 2).has_value());
  net.a.channel.setPace(2, 0); // not known
  CHECK(net.take(net.a, 2).has_value());
}

// In place of a lost connection there is a new one. Its transport sends slowly
// as yet, and would never get going if the other one took everything.
TEST(channel_gives_chunks_to_a_new_connection_that_is_expected_to_be_fast) {
  ChannelPair net;
  net.up(1);
  net.up(2);
  Messages messages{net};
  messages.learnPaths();
  const double past = net.a.channel.pathStatistics(2).capacityBytesPerS();
  CHECK(past > 0);
  net.down(2);
  net.up(3);
  net.a.channel.setPace(3, 1);
  net.a.channel.expectCapacity(3, past);
  messages.post(400);
  CHECK(net.take(net.a, 3).has_value());
}

// The answers of an outage come late and slowly.
TEST(channel_expects_of_a_path_what_it_carried_before_it_was_silent) {
  ChannelPair net;
  net.up(1);
  net.up(2);
  Messages messages{net};
  messages.learnPaths();
  const LinkStatistics& path = net.a.channel.pathStatistics(1);
  const double before = path.capacityBytesPerS();
  CHECK(before > 0);
  messages.post(40'000);
  std::vector<ChannelPair::Frame> late;
  while (auto frame = net.take(net.a, 1)) {
    late.push_back(std::move(*frame));
  }
  CHECK(!late.empty());
  net.a.channel.setSuspect(1, true);
  net.now += std::chrono::seconds(1);
  for (size_t i = 0; i < late.size(); ++i) {
    if (i == late.size() / 2) {
      net.now += std::chrono::seconds(2); // round trips are kept for no longer
    }
    CHECK(net.give(net.b, 1, late[i]).ok());
    if (i % 8 == 0) {
      net.settle({1, 2});
    }
  }
  net.settle({1, 2});
  CHECK(path.capacityBytesPerS() < before);
  CHECK_EQ(net.a.channel.capacityBytesPerS(1), before);
  net.a.channel.setSuspect(1, false);
  CHECK_EQ(path.capacityBytesPerS(), before);
  CHECK(path.onlyExpected());
  CHECK(path.minRoundTripS() < 1);
}

// A chunk delays what waits at a relay, which matters less on a long way.
TEST(channel_cuts_messages_over_a_relay_by_the_length_of_the_way) {
  for (const auto& [roundTrip, chunks] :
       {std::pair(std::chrono::milliseconds(1), 32),
        std::pair(std::chrono::milliseconds(320), 8)}) {
    ChannelConfig config = ChannelPair::defaults();
    config.chunkBytes = 512u << 10;
    ChannelPair pair(config);
    pair.up(1);
    pair.a.channel.setOverRelay(1);
    pair.a.channel.setCapacity(1, 8e6);
    Messages messages{pair};
    messages.post(100);
    pair.settle({1});
    pair.now += std::chrono::seconds(5); // that round trip is forgotten
    messages.post(100);
    const auto frame = pair.take(pair.a, 1);
    CHECK(frame.has_value());
    pair.now += roundTrip;
    CHECK(pair.give(pair.b, 1, *frame).ok());
    pair.settle({1});
    TestSend send(text(512u << 10));
    TestRecv recv(&pair.b.channel, send.bytes);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    CHECK_EQ(chunksUntilReceived(pair, recv), chunks);
    CHECK_EQ(recv.content, send.content);
  }
}

// Chunks wait at a relay while it serves others first. The wait is no silence
// and no part of the way, and by the end of the message it is over.
TEST(channel_does_not_count_the_wait_at_a_relay) {
  ChannelPair net;
  net.up(1);
  net.up(2);
  Messages messages{net};
  for (int i = 0; i < 20; ++i) { // the channel learns what its paths carry
    messages.post(400);
    net.settle({1, 2});
  }
  const double own = net.a.channel.pathStatistics(1).capacityBytesPerS();
  CHECK(own > 0);
  net.a.channel.setOverRelay(2);
  net.a.channel.setCapacity(2, own);
  const Nanos wait = 3 * fromSeconds(2000 / own);
  for (const auto& [path, took] :
       {std::pair(PathId(1), wait / 30), {PathId(2), wait}}) {
    net.now += std::chrono::seconds(5); // earlier round trips are forgotten
    messages.post(100);
    const auto frame = net.take(net.a, path);
    CHECK(frame.has_value());
    net.now += took;
    CHECK(net.give(net.b, path, *frame).ok());
    net.settle({path});
  }
  messages.post(2000);
  CHECK(net.take(net.a, 2).has_value());
  net.now += wait;
  CHECK(net.take(net.a, 2).has_value());
}

// At a declared limit, the connections have all of it beside a relay if they
// carry everything, however little they carried while datagrams did.
TEST(channel_gives_the_uplink_to_the_paths_that_suit_a_burst) {
  constexpr double kUplink = 1e6;
  ChannelPair net;
  for (const PathId path : {PathId(1), PathId(2), PathId(3)}) {
    net.up(path);
  }
  net.a.channel.expectCapacity(1, kUplink);
  net.a.channel.expectCapacity(2, kUplink / 1000);
  net.a.channel.setCapacity(3, kUplink);
  net.a.channel.setOverRelay(3);
  net.a.channel.setPaced(16384, kUplink);
  Messages messages{net};
  messages.post(1000);
  CHECK(!net.take(net.a, 2).has_value());
  net.a.channel.setBursts(1, BurstRange::none());
  CHECK(net.take(net.a, 2).has_value());
}

// A path that became slow without falling silent for good keeps the last chunk
// of a message; the other path has nothing to do.
TEST(channel_sends_a_late_tail_over_an_idle_path) {
  ChannelPair net;
  net.up(1);
  net.up(2);
  std::deque<TestSend> warm;
  std::deque<TestRecv> warmed;
  for (int i = 0; i < 20; ++i) { // the channel learns what its paths carry
    warm.emplace_back(text(400));
    warmed.emplace_back(&net.b.channel, 400);
    net.b.mailbox.post(&warmed.back());
    net.a.channel.send(&warm.back(), net.now);
    net.settle(
        i % 2 == 0 ? std::vector<PathId>{1, 2} : std::vector<PathId>{2, 1});
  }
  CHECK(net.a.channel.pathStatistics(2).capacityBytesPerS() > 0);
  TestSend send(text(200));
  TestRecv recv(&net.b.channel, 200);
  net.b.mailbox.post(&recv);
  net.a.channel.send(&send, net.now);
  const auto late = net.take(net.a, 1);
  CHECK(late.has_value());
  CHECK(net.move(net.a, 2).has_value()); // the other chunk
  net.move(net.b, 2); // and its acknowledgement
  CHECK(!net.take(net.a, 2).has_value()); // too early to tell
  const TimePoint due = net.a.channel.deadline();
  CHECK(due < net.now + std::chrono::seconds(1));
  net.now += std::chrono::seconds(1);
  net.a.channel.onTimer(net.now);
  const auto again = net.move(net.a, 2);
  CHECK(again.has_value());
  CHECK_EQ(again->offset, late->fields().offset);
  CHECK(!net.take(net.a, 2).has_value()); // once
  net.settle({2});
  CHECK_EQ(send.ends, 1);
  CHECK_EQ(recv.ends, 1);
  CHECK_EQ(recv.content, send.content);
  CHECK_EQ(net.give(net.b, 1, *late).toString(), "ok");
  CHECK_EQ(net.b.channel.counters().duplicateChunks, 1u);
  net.settle({1, 2});
  net.checkEmpty();
}

} // namespace
} // namespace resilient::test
