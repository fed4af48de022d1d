#include <algorithm>
#include <string>
#include <vector>

#include "base/random.h"
#include "channel/channel_state.h"
#include "tests/channel_pair.h"
#include "wire/control.h"

// Messages of which parts may be missing: how the sender learns which.

namespace resilient::test {
namespace {

using Ranges = std::vector<ByteRange>;

struct TolerantSend : TestSend {
  explicit TolerantSend(std::string_view content) : TestSend(content) {
    tolerance.maxLost = 0.5f;
  }
};

// As a path that loses packets: these parts of the payload are zero.
Status giveWithHoles(
    ChannelPair& pair,
    TestProcess& to,
    PathId path,
    ChannelPair::Frame frame,
    const Ranges& holes) {
  for (const ByteRange& r : holes) {
    std::memset(frame.payload.data() + r.offset, 0, r.bytes);
  }
  const Status s = pair.begin(to, path, frame);
  if (!s.ok()) {
    return s;
  }
  if (std::byte* const where = to.channel.destination(path)) {
    std::memcpy(where, frame.payload.data(), frame.payload.size());
  }
  return to.channel.onPayload(path, pair.now, holes);
}

Status giveResidual(
    ChannelPair& pair,
    uint64_t message,
    std::vector<std::byte> payload) {
  FrameHeader h;
  h.type = FrameType::kResidual;
  h.message = message;
  h.payloadBytes = static_cast<uint32_t>(payload.size());
  ChannelPair::Frame frame;
  encodeFrame(h, frame.header);
  frame.payload = std::move(payload);
  return pair.give(pair.a, 1, frame);
}

// All that is on the way from `from`, by type.
std::vector<ChannelPair::Frame>
takeAll(ChannelPair& pair, TestProcess& from, PathId path, FrameType type) {
  std::vector<ChannelPair::Frame> frames;
  while (auto f = pair.take(from, path)) {
    if (f->fields().type == type) {
      frames.push_back(*f);
    }
  }
  return frames;
}

TEST(residual_ends_a_tolerant_send) {
  for (const bool posted : {true, false}) {
    for (const size_t bytes : {size_t(0), size_t(50), size_t(250)}) {
      ChannelPair pair;
      pair.up(1);
      TolerantSend send(text(bytes));
      TestRecv recv(&pair.b.channel, bytes);
      if (posted) {
        pair.b.mailbox.post(&recv);
      }
      pair.a.channel.send(&send, pair.now);
      uint64_t chunks = 0;
      while (const auto h = pair.move(pair.a, 1)) {
        CHECK_EQ(h->flags & kFlagTolerant, kFlagTolerant);
        ++chunks;
      }
      // That all has arrived is not enough: it may have arrived with holes.
      FrameHeader ack;
      ack.type = FrameType::kAck;
      ack.ack = chunks;
      CHECK(pair.a.channel.onHeader(1, ack, pair.now).ok());
      CHECK(pair.a.channel.onPayload(1, pair.now).ok());
      pair.a.completions.drain();
      CHECK_EQ(send.ends, 0);
      bool told = false;
      while (const auto h = pair.move(pair.b, 1)) {
        told = told || h->type == FrameType::kResidual;
        pair.a.completions.drain();
        CHECK_EQ(send.ends, told ? 1 : 0);
      }
      CHECK(told);
      CHECK(send.status.ok());
      CHECK(send.zeroFilled.empty());
      if (!posted) {
        pair.b.mailbox.post(&recv);
      }
      pair.settle({1});
      CHECK_EQ(recv.ends, 1);
      CHECK_EQ(recv.content, text(bytes));
      CHECK_EQ(send.ends, 1);
      pair.checkEmpty();
    }
  }
}

TEST(residual_tells_what_was_missing) {
  ChannelPair pair;
  pair.up(1);
  TolerantSend send(text(250));
  TestRecv recv(&pair.b.channel, 250);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  std::vector<ChannelPair::Frame> chunks;
  while (auto f = pair.take(pair.a, 1)) {
    chunks.push_back(*f);
  }
  CHECK_EQ(chunks.size(), 3u);
  // In any order; of the message, not of the chunk.
  CHECK(giveWithHoles(pair, pair.b, 1, chunks[2], {{0, 50}}).ok());
  CHECK(giveWithHoles(pair, pair.b, 1, chunks[1], {{0, 10}, {50, 20}}).ok());
  CHECK(giveWithHoles(pair, pair.b, 1, chunks[0], {{90, 10}}).ok());
  pair.settle({1});
  CHECK_EQ(send.ends, 1);
  const Ranges expected = {{90, 10}, {100, 10}, {150, 20}, {200, 50}};
  CHECK(send.zeroFilled == expected);
  std::string content = text(250);
  for (const ByteRange& r : expected) {
    std::fill_n(content.begin() + static_cast<ptrdiff_t>(r.offset), r.bytes, 0);
  }
  CHECK_EQ(recv.ends, 1);
  CHECK(recv.content == content);
  pair.checkEmpty();
}

// More than one frame holds; they come in any order, and twice.
TEST(residual_of_many_parts_takes_several_frames) {
  forSeeds(10, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    ChannelConfig config = ChannelPair::defaults();
    config.chunkBytes = 100'000;
    ChannelPair pair(config);
    pair.up(1);
    const size_t bytes = 90'000;
    TolerantSend send(text(bytes));
    TestRecv recv(&pair.b.channel, bytes);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    const auto chunk = pair.take(pair.a, 1);
    Ranges holes;
    for (uint64_t at = 0; at < bytes; at += 10) {
      holes.push_back({at, 1 + at % 9});
    }
    CHECK(giveWithHoles(pair, pair.b, 1, *chunk, holes).ok());
    auto frames = takeAll(pair, pair.b, 1, FrameType::kResidual);
    CHECK_EQ(frames.size(), (holes.size() - 1) / Residual::kMax + 1);
    CHECK_EQ(frames.size(), 3u);
    // Repeats come over other paths, to which these acknowledgements mean
    // nothing.
    for (auto& f : frames) {
      FrameHeader h = f.fields();
      h.ack = 0;
      encodeFrame(h, f.header);
    }
    std::shuffle(frames.begin(), frames.end(), prng);
    frames.insert(frames.end() - 1, frames[0]);
    frames.insert(frames.end() - 1, frames[1]);
    pair.a.channel.addPath(2, pair.now);
    for (const auto& f : frames) {
      pair.a.completions.drain();
      CHECK_EQ(send.ends, 0);
      CHECK_EQ(pair.give(pair.a, 2, f).toString(), "ok");
    }
    pair.a.completions.drain();
    CHECK_EQ(send.ends, 1);
    CHECK(send.zeroFilled == holes);
    // One more, when nobody waits any more.
    CHECK(pair.give(pair.a, 2, frames[0]).ok());
    pair.a.completions.drain();
    CHECK_EQ(send.ends, 1);
    CHECK(send.zeroFilled == holes);
  });
}

TEST(residual_that_is_lost_with_its_path_comes_again) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TolerantSend send(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(giveWithHoles(pair, pair.b, 1, *pair.take(pair.a, 1), {{3, 4}}).ok());
  CHECK_EQ(takeAll(pair, pair.b, 1, FrameType::kResidual).size(), 1u);
  pair.down(1);
  pair.settle({2});
  CHECK_EQ(send.ends, 1);
  CHECK(send.zeroFilled == Ranges({{3, 4}}));
  CHECK_EQ(recv.ends, 1);
  pair.checkEmpty();
}

// The residual is faster than the acknowledgement: from then on the buffer
// belongs to its owner again.
TEST(residual_gives_the_buffer_back_for_good) {
  for (const size_t bytes : {size_t(100), size_t(200)}) {
    for (const bool suspect : {false, true}) {
      ChannelPair pair;
      pair.up(1);
      pair.up(2);
      TolerantSend send(text(bytes));
      TestRecv recv(&pair.b.channel, bytes);
      pair.b.mailbox.post(&recv);
      pair.a.channel.send(&send, pair.now);
      while (auto f = pair.take(pair.a, 1)) {
        CHECK(giveWithHoles(pair, pair.b, 1, *f, {{1, 2}}).ok());
      }
      if (suspect) {
        pair.a.channel.setSuspect(1, true); // takes the chunks back
      }
      while (pair.move(pair.b, 2)) {
      }
      pair.a.completions.drain();
      CHECK_EQ(send.ends, 1);
      CHECK_EQ(send.zeroFilled.size(), bytes / 100);
      send.content.assign(bytes, 'X');
      pair.down(1);
      while (const auto f = pair.take(pair.a, 2)) {
        CHECK(f->fields().type != FrameType::kData);
        CHECK(pair.give(pair.b, 2, *f).ok());
      }
      pair.settle({2});
      CHECK_EQ(recv.ends, 1);
      CHECK_EQ(pair.b.channel.counters().duplicateChunks, 0u);
      CHECK_EQ(pair.a.channel.counters().messagesSent, 1u);
      pair.checkEmpty();
    }
  }
}

// What is half written then ends with the bytes it began with.
TEST(residual_leaves_a_half_written_frame_as_it_is) {
  ChannelPair pair;
  pair.up(1);
  pair.up(2);
  TolerantSend send(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.a.channel.pull(1, pair.now) != nullptr);
  pair.a.channel.setSuspect(1, true);
  CHECK_EQ(pair.move(pair.a, 2)->type, FrameType::kData);
  while (pair.move(pair.b, 2)) {
  }
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 1);
  send.content.assign(100, 'X');
  const OutFrame& half = pair.a.channel.unwritten(1).front();
  CHECK_EQ(
      std::string(
          reinterpret_cast<const char*>(half.payload), half.payloadBytes),
      text(100));
}

TEST(residual_holes_in_an_exact_message_are_refused) {
  ChannelPair pair;
  pair.up(1);
  TestSend send(text(100));
  TestRecv recv(&pair.b.channel, 100);
  pair.b.mailbox.post(&recv);
  pair.a.channel.send(&send, pair.now);
  const Status status =
      giveWithHoles(pair, pair.b, 1, *pair.take(pair.a, 1), {{3, 4}});
  CHECK_EQ(status.code(), StatusCode::kProtocol);
  CHECK_CONTAINS(status.message(), "exact");
  pair.b.completions.drain();
  CHECK_EQ(recv.ends, 0);
  pair.b.mailbox.cancel(&recv, "over");
}

TEST(residual_claims_are_checked) {
  const auto refused = [](const char* what, uint64_t parts, Ranges ranges) {
    ChannelPair pair;
    pair.up(1);
    TolerantSend send(text(250));
    pair.a.channel.send(&send, pair.now);
    while (pair.take(pair.a, 1)) {
    }
    const Status status =
        giveResidual(pair, send.message, encodeResidual(parts, ranges));
    CHECK_EQ(status.code(), StatusCode::kProtocol);
    CHECK_CONTAINS(status.message(), what);
    pair.a.completions.drain();
    CHECK_EQ(send.ends, 0);
    CHECK(send.zeroFilled.empty());
    pair.a.channel.cancelSend(&send, "over", pair.now);
  };
  refused("beyond its end", 1, {{250, 1}});
  refused("beyond its end", 1, {{249, 2}});
  refused("beyond its end", 1, {{0, 251}});
  refused("beyond its end", 1, {{10, 0}});
  refused("beyond its end", 1, {{10, UINT64_MAX}});
  refused("beyond its end", 1, {{UINT64_MAX, 2}});
  refused("beyond its end", 2, {{0, 10}, {250, 1}});
  refused("twice", 2, {{0, 10}, {9, 10}});
  refused("twice", 3, {{100, 50}, {0, 250}, {20, 1}});

  // Bytes that are no list, and a message that is said to be whole early.
  ChannelPair pair;
  pair.up(1);
  TolerantSend send(text(250));
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.take(pair.a, 1).has_value());
  for (const size_t n : {0u, 7u, 9u, 16u, 23u}) {
    CHECK_EQ(
        giveResidual(pair, send.message, std::vector<std::byte>(n)).code(),
        StatusCode::kProtocol);
  }
  const Status early = giveResidual(pair, send.message, encodeResidual(0, {}));
  CHECK_EQ(early.code(), StatusCode::kProtocol);
  CHECK_CONTAINS(early.message(), "not been sent whole");
  pair.a.completions.drain();
  CHECK_EQ(send.ends, 0);
  // Of a message that is over, or that tolerates nothing, it is nobody's news.
  CHECK(giveResidual(pair, 99, encodeResidual(0, {})).ok());
  TestSend exact(text(10), 5);
  pair.a.channel.send(&exact, pair.now);
  CHECK(giveResidual(pair, exact.message, encodeResidual(0, {})).ok());
  pair.a.completions.drain();
  CHECK_EQ(exact.ends, 0);
  pair.a.channel.cancelSend(&send, "over", pair.now);
  pair.a.channel.cancelSend(&exact, "over", pair.now);
}

TEST(residual_after_a_cancel_changes_nothing) {
  for (const bool whole : {true, false}) {
    ChannelPair pair;
    pair.up(1);
    TolerantSend send(text(200));
    TestRecv recv(&pair.b.channel, 200);
    pair.b.mailbox.post(&recv);
    pair.a.channel.send(&send, pair.now);
    CHECK(giveWithHoles(pair, pair.b, 1, *pair.take(pair.a, 1), {{0, 7}}).ok());
    if (whole) {
      CHECK(pair.move(pair.a, 1).has_value());
    }
    pair.a.channel.cancelSend(&send, "changed my mind", pair.now);
    pair.settle({1});
    CHECK_EQ(send.ends, 0);
    CHECK(send.zeroFilled.empty());
    CHECK_EQ(recv.ends, 1);
    CHECK_EQ(recv.status.ok(), whole);
    pair.checkEmpty();
  }
}

// It was counted as acknowledged already: not once more when it is given up.
TEST(residual_cancel_after_the_acknowledgement_counts_once) {
  ChannelPair pair;
  pair.up(1);
  TolerantSend send(text(50));
  pair.a.channel.send(&send, pair.now);
  CHECK(pair.move(pair.a, 1).has_value());
  FrameHeader ack;
  ack.type = FrameType::kAck;
  ack.ack = 1;
  CHECK(pair.a.channel.onHeader(1, ack, pair.now).ok());
  CHECK(pair.a.channel.onPayload(1, pair.now).ok());
  pair.a.channel.cancelSend(&send, "over", pair.now);
  pair.settle({1});
  CHECK(pair.a.channel.drained());
}

TEST(residual_survives_the_wire) {
  Prng prng(3);
  for (int i = 0; i < 2000; ++i) {
    Ranges ranges(prng.below(50));
    for (ByteRange& r : ranges) {
      r = {prng.next(), prng.next()};
    }
    const uint64_t parts = prng.next();
    Residual back;
    CHECK(decodeResidual(encodeResidual(parts, ranges), back).ok());
    CHECK_EQ(back.parts, parts);
    CHECK(back.ranges == ranges);
  }
  const Ranges max(Residual::kMax);
  CHECK(encodeResidual(0, max).size() <= kMaxControlBytes);
  forSeeds(2000, [](uint64_t seed) {
    Prng random(mixBits(seed));
    std::vector<std::byte> bytes(random.below(200));
    for (auto& b : bytes) {
      b = static_cast<std::byte>(random.next());
    }
    Residual back;
    const bool right = bytes.size() >= 8 && (bytes.size() - 8) % 16 == 0;
    CHECK_EQ(decodeResidual(bytes, back).ok(), right);
    if (right) {
      CHECK_EQ(back.ranges.size(), (bytes.size() - 8) / 16);
      CHECK(encodeResidual(back.parts, back.ranges) == bytes);
    }
  });
}

} // namespace
} // namespace resilient::test
