#include "wire/frame.h"

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"
#include "wire/control.h"

namespace resilient::test {
namespace {

std::string hex(const FrameBytes& bytes) {
  std::string s;
  char two[3];
  for (std::byte b : bytes) {
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(b));
    s += two;
  }
  return s;
}

FrameHeader example(FrameType type) {
  FrameHeader h;
  h.type = type;
  h.trafficClass = TrafficClass::kGradient;
  h.sourceRank = 3;
  h.ack = 0x1122334455667788;
  h.message = 42;
  h.group = 0x0102030405060708;
  h.stream = (uint64_t(1) << 63) | 9;
  h.order = 5;
  h.signature.kind = OpKind::kAllReduce;
  h.signature.dtype = DType::kFloat32;
  h.signature.reduceOp = ReduceOp::kSum;
  h.signature.tensors = 2;
  h.signature.root = 1;
  h.signature.count = 1024;
  switch (type) {
    case FrameType::kData:
      h.flags = kFlagAckNow;
      h.chunkBytes = 1000;
      h.totalBytes = 2500;
      h.offset = 2000;
      h.payloadBytes = 500;
      break;
    case FrameType::kGrant:
      h.payloadBytes = 16;
      break;
    case FrameType::kReject:
    case FrameType::kCancel:
    case FrameType::kControl:
      h.payloadBytes = 77;
      break;
    case FrameType::kResidual:
      h.payloadBytes = 24;
      break;
    default:
      break;
  }
  return h;
}

// The fields between the first 16 bytes and the checksum, in all examples.
const std::string kTail =
    "8877665544332211" // ack
    "2a00000000000000" // message
    "TTTTTTTTTTTTTTTT" // total bytes
    "OOOOOOOOOOOOOOOO" // offset
    "0807060504030201" // group
    "0900000000000080" // stream
    "0500000000000000" // order
    "02080002" // operation, dtype, reduction, tensors
    "01000000" // root
    "0004000000000000" // count
    "03000000"; // source rank

struct Golden {
  FrameType type;
  const char* head; // magic, type, class, flags, payload and chunk bytes
  const char* checksum;
};

const Golden kGolden[] = {
    {FrameType::kData,
     "54524631"
     "01"
     "02"
     "0200"
     "f4010000"
     "e8030000",
     "1ad6eabf"},
    {FrameType::kGrant,
     "54524631"
     "02"
     "02"
     "0000"
     "10000000"
     "00000000",
     "43a367d7"},
    {FrameType::kReject,
     "54524631"
     "03"
     "02"
     "0000"
     "4d000000"
     "00000000",
     "402d497e"},
    {FrameType::kCancel,
     "54524631"
     "04"
     "02"
     "0000"
     "4d000000"
     "00000000",
     "ecad9ceb"},
    {FrameType::kControl,
     "54524631"
     "05"
     "02"
     "0000"
     "4d000000"
     "00000000",
     "fc602860"},
    {FrameType::kBye,
     "54524631"
     "06"
     "02"
     "0000"
     "00000000"
     "00000000",
     "96ae4436"},
    {FrameType::kAck,
     "54524631"
     "07"
     "02"
     "0000"
     "00000000"
     "00000000",
     "6d2483b8"},
    {FrameType::kPing,
     "54524631"
     "08"
     "02"
     "0000"
     "00000000"
     "00000000",
     "fac6da5b"},
    {FrameType::kPong,
     "54524631"
     "09"
     "02"
     "0000"
     "00000000"
     "00000000",
     "1cd04a4c"},
    {FrameType::kResidual,
     "54524631"
     "0a"
     "02"
     "0000"
     "18000000"
     "00000000",
     "fc045bb2"},
};

std::string expected(const Golden& g) {
  std::string tail = kTail;
  const bool data = g.type == FrameType::kData;
  tail.replace(32, 16, data ? "c409000000000000" : "0000000000000000");
  tail.replace(48, 16, data ? "d007000000000000" : "0000000000000000");
  return g.head + tail + g.checksum;
}

bool same(const FrameHeader& a, const FrameHeader& b) {
  FrameBytes x, y;
  encodeFrame(a, x);
  encodeFrame(b, y);
  return x == y;
}

Status decode(const FrameHeader& h) {
  FrameBytes bytes;
  encodeFrame(h, bytes);
  FrameHeader back;
  return decodeFrame(bytes, back);
}

TEST(frame_bytes_are_what_the_document_says) {
  for (const Golden& g : kGolden) {
    FrameBytes bytes;
    encodeFrame(example(g.type), bytes);
    CHECK_EQ(hex(bytes), expected(g));
    FrameHeader back;
    CHECK(decodeFrame(bytes, back).ok());
    CHECK(same(back, example(g.type)));
  }
}

TEST(frame_round_trip_of_random_headers) {
  Prng prng(7);
  for (int i = 0; i < 20'000; ++i) {
    FrameHeader h;
    h.type = static_cast<FrameType>(1 + prng.below(10));
    h.trafficClass = static_cast<TrafficClass>(prng.below(4));
    h.flags = static_cast<uint16_t>(prng.below(8));
    h.sourceRank = static_cast<int32_t>(prng.next());
    h.ack = prng.next();
    h.message = prng.next();
    h.group = prng.next();
    h.stream = prng.next();
    h.order = prng.next();
    h.signature.kind = static_cast<OpKind>(prng.below(12));
    h.signature.dtype = static_cast<DType>(prng.below(25));
    h.signature.reduceOp = static_cast<ReduceOp>(prng.below(10));
    h.signature.tensors = static_cast<uint8_t>(prng.next());
    h.signature.root = static_cast<int32_t>(prng.next());
    h.signature.count = prng.next();
    if (h.type == FrameType::kData) {
      h.chunkBytes = static_cast<uint32_t>(64 + prng.below(100'000));
      h.totalBytes = prng.below(10'000'000);
      const uint64_t chunks =
          h.totalBytes == 0 ? 1 : (h.totalBytes - 1) / h.chunkBytes + 1;
      h.offset = prng.below(chunks) * h.chunkBytes;
      if ((h.flags & kFlagOffer) == 0) {
        h.payloadBytes = static_cast<uint32_t>(
            std::min<uint64_t>(h.chunkBytes, h.totalBytes - h.offset));
      }
    } else if (h.type == FrameType::kGrant) {
      h.payloadBytes = static_cast<uint32_t>(8 * prng.below(8193));
    } else if (
        h.type <= FrameType::kControl || h.type == FrameType::kResidual) {
      h.payloadBytes = static_cast<uint32_t>(prng.below(65537));
    }
    FrameBytes bytes;
    encodeFrame(h, bytes);
    FrameHeader back;
    const Status status = decodeFrame(bytes, back);
    CHECK_EQ(status.toString(), "ok");
    CHECK(same(h, back));
  }
}

// The header has no bit that means nothing: whatever flips is found.
TEST(frame_with_flipped_bits_is_refused) {
  for (const Golden& g : kGolden) {
    FrameBytes bytes;
    encodeFrame(example(g.type), bytes);
    for (size_t bit = 0; bit < 8 * kFrameHeaderBytes; ++bit) {
      FrameBytes bad = bytes;
      bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      FrameHeader back;
      const Status status = decodeFrame(bad, back);
      CHECK_EQ(status.code(), StatusCode::kProtocol);
      for (size_t other = bit + 1; other < bit + 24 && other < 768; ++other) {
        FrameBytes worse = bad;
        worse[other / 8] ^= static_cast<std::byte>(1 << (other % 8));
        CHECK(!decodeFrame(worse, back).ok());
      }
    }
  }
}

// A stream that has lost its place: any other offset is no frame.
TEST(frame_out_of_step_is_refused) {
  FrameBytes bytes;
  encodeFrame(example(FrameType::kData), bytes);
  std::vector<std::byte> stream(bytes.begin(), bytes.end());
  stream.insert(stream.end(), bytes.begin(), bytes.end());
  for (size_t at = 1; at < kFrameHeaderBytes; ++at) {
    FrameHeader back;
    CHECK(!decodeFrame(
               std::span<const std::byte, kFrameHeaderBytes>(
                   stream.data() + at, kFrameHeaderBytes),
               back)
               .ok());
  }
}

// A peer may send a right checksum with anything; each claim is checked.
TEST(frame_claims_are_checked) {
  const auto refused = [](const char* what, auto change) {
    FrameHeader h = example(FrameType::kData);
    CHECK_EQ(decode(h).toString(), "ok");
    change(h);
    const Status status = decode(h);
    CHECK_EQ(status.code(), StatusCode::kProtocol);
    CHECK_CONTAINS(status.message(), what);
  };
  refused("type", [](FrameHeader& h) { h.type = FrameType(0); });
  refused("type", [](FrameHeader& h) { h.type = FrameType(11); });
  refused("traffic class", [](FrameHeader& h) {
    h.trafficClass = TrafficClass(4);
  });
  refused("operation", [](FrameHeader& h) { h.signature.kind = OpKind(12); });
  refused("operation", [](FrameHeader& h) { h.signature.dtype = DType(25); });
  refused(
      "operation", [](FrameHeader& h) { h.signature.reduceOp = ReduceOp(10); });
  refused("chunk bytes", [](FrameHeader& h) { h.chunkBytes = 0; });
  refused(
      "chunk bytes", [](FrameHeader& h) { h.chunkBytes = kMaxChunkBytes + 1; });
  refused("message bytes", [](FrameHeader& h) {
    h.totalBytes = kMaxMessageBytes + 1;
  });
  refused("too many chunks", [](FrameHeader& h) {
    h.chunkBytes = 64;
    h.totalBytes = 64 * kMaxChunksPerMessage;
  });
  refused("small chunks", [](FrameHeader& h) { h.chunkBytes = 50; });
  refused("offset", [](FrameHeader& h) { h.offset = 1999; });
  refused("offset", [](FrameHeader& h) { h.offset = 3000; });
  refused("offset", [](FrameHeader& h) { h.offset = UINT64_MAX; });
  refused("payload bytes", [](FrameHeader& h) { h.payloadBytes = 501; });
  refused("payload bytes", [](FrameHeader& h) { h.payloadBytes = 499; });
  refused("payload bytes", [](FrameHeader& h) { h.flags |= kFlagOffer; });

  const auto refusedControl = [](FrameType type, auto change) {
    FrameHeader h = example(type);
    CHECK_EQ(decode(h).toString(), "ok");
    change(h);
    CHECK_EQ(decode(h).code(), StatusCode::kProtocol);
  };
  refusedControl(FrameType::kControl, [](FrameHeader& h) {
    h.payloadBytes = kMaxControlBytes + 1;
  });
  refusedControl(
      FrameType::kGrant, [](FrameHeader& h) { h.payloadBytes = 12; });
  refusedControl(FrameType::kBye, [](FrameHeader& h) {
    h.payloadBytes = kMaxControlBytes + 1;
  });
  for (FrameType type : {FrameType::kAck, FrameType::kPing}) {
    refusedControl(type, [](FrameHeader& h) { h.payloadBytes = 1; });
  }
  // Such a kCancel once made the receiver divide by its chunk size of zero.
  for (FrameType type : {FrameType::kCancel, FrameType::kAck}) {
    refusedControl(type, [](FrameHeader& h) { h.totalBytes = 5; });
    refusedControl(type, [](FrameHeader& h) { h.chunkBytes = 5; });
    refusedControl(type, [](FrameHeader& h) { h.offset = 5; });
  }
}

TEST(frame_at_the_limits_is_taken) {
  FrameHeader h = example(FrameType::kData);
  h.chunkBytes = kMaxChunkBytes;
  h.totalBytes = kMaxMessageBytes;
  h.offset = kMaxMessageBytes - kMaxChunkBytes;
  h.payloadBytes = kMaxChunkBytes;
  CHECK_EQ(decode(h).toString(), "ok");
  h.chunkBytes = 1; // one chunk may be as small as it likes
  h.totalBytes = 1;
  h.offset = 0;
  h.payloadBytes = 1;
  CHECK_EQ(decode(h).toString(), "ok");
  h.totalBytes = 0;
  h.payloadBytes = 0;
  CHECK_EQ(decode(h).toString(), "ok");
}

TEST(frame_datagram_offer_survives_the_wire) {
  DatagramOffer offer;
  offer.connection = 0x0102;
  offer.answer = true;
  offer.port = 4711;
  offer.key = 0x0807060504030201;
  offer.nonce = "0123456789abcdef";
  const auto payload = encode(offer);
  std::string bytes;
  for (const std::byte b : payload) {
    bytes += static_cast<char>(b);
  }
  CHECK_EQ(
      bytes,
      std::string(
          "\x07\x02\x01\x01\x67\x12\x01\x02\x03\x04\x05\x06\x07\x08\x10\0\0\0",
          18) +
          offer.nonce);
  const auto back = decodeDatagramOffer(payload);
  CHECK(back.has_value());
  CHECK_EQ(back->connection, offer.connection);
  CHECK(back->answer);
  CHECK_EQ(back->port, offer.port);
  CHECK_EQ(back->key, offer.key);
  CHECK_EQ(back->nonce, offer.nonce);
  for (size_t n = 0; n < payload.size(); ++n) {
    CHECK(!decodeDatagramOffer(std::span(payload).first(n)).has_value());
  }
  auto bad = payload;
  bad.push_back(std::byte(0));
  CHECK(!decodeDatagramOffer(bad).has_value());
  bad = payload;
  bad[3] = std::byte(2); // neither an offer nor an answer
  CHECK(!decodeDatagramOffer(bad).has_value());
  bad = payload;
  bad[0] = std::byte(6);
  CHECK(!decodeDatagramOffer(bad).has_value());
  offer.nonce.pop_back(); // a border that could be elsewhere
  CHECK(!decodeDatagramOffer(encode(offer)).has_value());
}

TEST(frame_verbs_offer_survives_the_wire) {
  VerbsOffer offer;
  offer.connection = 0x0102;
  offer.number = 0x0807060504030201;
  for (size_t i = 0; i < offer.gid.size(); ++i) {
    offer.gid[i] = static_cast<std::byte>(0x10 + i);
  }
  offer.queuePair = 0x112233;
  offer.firstPacket = 0x445566;
  offer.mtuBytes = 4096;
  offer.lid = 0x0a0b;
  offer.reads = 0x0010;
  offer.text = "mlx5_0";
  const auto payload = encode(offer);
  std::string bytes;
  for (const std::byte b : payload) {
    bytes += static_cast<char>(b);
  }
  CHECK_EQ(
      bytes,
      std::string("\x08\x02\x01\0\x01\x02\x03\x04\x05\x06\x07\x08", 12) +
          "\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f" +
          std::string("\x33\x22\x11\0\x66\x55\x44\0\0\x10\0\0", 12) +
          std::string("\x0b\x0a\x10\0\x06\0\0\0", 8) + offer.text);
  const auto back = decodeVerbsOffer(payload);
  CHECK(back.has_value());
  CHECK_EQ(back->connection, offer.connection);
  CHECK(!back->answer);
  CHECK_EQ(back->number, offer.number);
  CHECK(back->gid == offer.gid);
  CHECK_EQ(back->queuePair, offer.queuePair);
  CHECK_EQ(back->firstPacket, offer.firstPacket);
  CHECK_EQ(back->mtuBytes, offer.mtuBytes);
  CHECK_EQ(back->lid, offer.lid);
  CHECK_EQ(back->reads, offer.reads);
  CHECK_EQ(back->text, offer.text);
  for (size_t n = 0; n < payload.size(); ++n) {
    CHECK(!decodeVerbsOffer(std::span(payload).first(n)).has_value());
  }
  auto bad = payload;
  bad.push_back(std::byte(0));
  CHECK(!decodeVerbsOffer(bad).has_value());
  bad = payload;
  bad[3] = std::byte(2); // neither an offer nor an answer
  CHECK(!decodeVerbsOffer(bad).has_value());
  VerbsOffer wrong = offer;
  wrong.queuePair = 0x1000000;
  CHECK(!decodeVerbsOffer(encode(wrong)).has_value());
  offer.queuePair = 0; // asks for an offer
  CHECK(decodeVerbsOffer(encode(offer)).has_value());
  offer.answer = true; // no
  CHECK(decodeVerbsOffer(encode(offer)).has_value());
}

TEST(frame_arrivals_survive_the_wire) {
  Arrivals arrivals;
  arrivals.answer = true;
  arrivals.clockNanos = 0x1122334455667788;
  arrivals.connections = {{0, 5}, {0x0102, 0x0807060504030201}};
  const auto payload = encode(arrivals);
  CHECK_EQ(
      std::string(
          reinterpret_cast<const char*>(payload.data()), payload.size()),
      std::string("\x0a\x01\x88\x77\x66\x55\x44\x33\x22\x11\x02\0", 12) +
          std::string("\0\0\x05\0\0\0\0\0\0\0", 10) +
          "\x02\x01\x01\x02\x03\x04\x05\x06\x07\x08");
  const auto back = decodeArrivals(payload);
  CHECK(back.has_value());
  CHECK(back->answer);
  CHECK_EQ(back->clockNanos, arrivals.clockNanos);
  CHECK(back->connections == arrivals.connections);
  for (size_t n = 0; n < payload.size(); ++n) {
    CHECK(!decodeArrivals(std::span(payload).first(n)).has_value());
  }
  auto bad = payload;
  bad.push_back(std::byte(0));
  CHECK(!decodeArrivals(bad).has_value());
  bad = payload;
  bad[1] = std::byte(2); // neither a question nor an answer
  CHECK(!decodeArrivals(bad).has_value());
  // As many as are sent at most, and no more are believed.
  arrivals.connections.resize(Arrivals::kMax + 1);
  CHECK_EQ(
      decodeArrivals(encode(arrivals))->connections.size(), Arrivals::kMax);
  CHECK(encode(arrivals).size() <= kMaxControlBytes);
}

TEST(frame_reason_survives_the_wire) {
  const auto payload = encodeReason(StatusCode::kTimeout, "too slow");
  CHECK_EQ(payload.size(), 9u);
  const Status back = decodeReason(payload);
  CHECK_EQ(back.code(), StatusCode::kTimeout);
  CHECK_EQ(back.message(), "too slow");
  const auto cut =
      encodeReason(StatusCode::kAborted, std::string(1 << 20, 'x'));
  CHECK(cut.size() > 1000 && cut.size() <= kMaxControlBytes);
  // What is no reason is a protocol error, never ok.
  for (int first : {-1, 0, 10, 255}) {
    std::vector<std::byte> bad;
    if (first >= 0) {
      bad.push_back(static_cast<std::byte>(first));
    }
    CHECK_EQ(decodeReason(bad).code(), StatusCode::kProtocol);
  }
}

} // namespace
} // namespace resilient::test
