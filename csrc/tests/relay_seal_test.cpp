#include "transport/relay_seal.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "tests/check.h"
#include "wire/frame.h"

namespace resilient::test {
namespace {

const std::string kSecret = "the secret of the job";

RelayFlow flowOf(uint64_t number) {
  RelayFlow flow;
  flow.opener.back() = 1;
  flow.other.back() = 2;
  flow.number = number;
  return flow;
}

std::unique_ptr<RelaySeal>
end(bool opener, uint64_t flow = 7, const std::string& secret = kSecret) {
  std::string why;
  auto made = RelaySeal::make(flowOf(flow), opener, secret, why);
  CHECK(made != nullptr);
  return made;
}

// Both ends of a flow, agreed.
struct Ends {
  std::unique_ptr<RelaySeal> opener = end(true), other = end(false);

  Ends() {
    CHECK(other->agree(opener->ours(), TimePoint()).ok());
    CHECK(opener->agree(other->ours(), TimePoint()).ok());
  }
};

RelayHeader headerOf(uint64_t number) {
  RelayHeader header;
  header.flow = flowOf(7);
  header.number = number;
  header.delivered = 3;
  return header;
}

std::vector<std::byte> frameOf(std::string_view payload) {
  std::vector<std::byte> frame(kFrameHeaderBytes + payload.size());
  std::memcpy(frame.data() + kFrameHeaderBytes, payload.data(), payload.size());
  return frame;
}

std::vector<std::byte>
sealed(RelaySeal& by, const RelayHeader& h, std::span<const std::byte> frame) {
  std::vector<std::byte> out(frame.size() + kSealOverheadBytes);
  by.seal(h, frame, out.data(), TimePoint());
  return out;
}

bool opens(
    RelaySeal& by,
    const RelayHeader& h,
    std::span<const std::byte> message,
    std::span<const std::byte> frame) {
  const auto opened = by.open(h, message, TimePoint());
  return opened && std::ranges::equal(*opened, frame);
}

TEST(relay_seal_opens_at_the_far_end_only) {
  Ends ends;
  const auto frame = frameOf("weights and biases");
  RelayHeader header = headerOf(1);
  const auto there = sealed(*ends.opener, header, frame);
  const auto back = sealed(*ends.other, header, frame);
  header.hop = RelayHop::kFromRelay; // the relay has changed it
  CHECK(opens(*ends.other, header, there, frame));
  CHECK(opens(*ends.opener, header, back, frame));
  // Neither direction is taken for the other.
  CHECK(!opens(*ends.opener, header, there, frame));
  CHECK(!opens(*ends.other, header, back, frame));
  // Not even empty frames show their content.
  const std::string_view text = "weights and biases";
  const std::string_view wire{
      reinterpret_cast<const char*>(there.data()), there.size()};
  CHECK(wire.find(text) == wire.npos);
  CHECK(wire.find(std::string(16, '\0')) == wire.npos);
}

TEST(relay_seal_shows_any_change) {
  Ends ends;
  const auto frame = frameOf("x");
  const RelayHeader header = headerOf(1);
  const auto message = sealed(*ends.opener, header, frame);
  for (size_t at = 0; at < message.size(); ++at) {
    auto changed = message;
    changed[at] ^= std::byte{1};
    CHECK(!ends.other->open(header, changed, TimePoint()));
    CHECK(!ends.other->open(header, std::span(message).first(at), TimePoint()));
  }
  RelayHeader renumbered = header, acknowledged = header, moved = header;
  renumbered.number = 2;
  acknowledged.delivered = 4;
  moved.flow.number = 8;
  for (const RelayHeader& h : {renumbered, acknowledged, moved}) {
    CHECK(!ends.other->open(h, message, TimePoint()));
  }
  CHECK(opens(*ends.other, header, message, frame));
}

// An impostor who knows the secret later has the notes as well.
TEST(relay_seal_keys_need_more_than_the_secret_and_the_notes) {
  Ends ends;
  const auto frame = frameOf("x");
  const auto message = sealed(*ends.opener, headerOf(1), frame);
  const auto impostor = end(false);
  CHECK(impostor->agree(ends.opener->ours(), TimePoint()).ok());
  CHECK(!impostor->open(headerOf(1), message, TimePoint()));
}

TEST(relay_seal_needs_the_secret_and_the_flow) {
  auto opener = end(true);
  auto stranger = end(false, 7, "another secret of another job");
  CHECK_EQ(
      stranger->agree(opener->ours(), TimePoint()).code(),
      StatusCode::kProtocol);
  RelayKey claims = opener->ours();
  claims.secret = stranger->ours().secret; // a lie about the secret
  CHECK(stranger->agree(claims, TimePoint()).ok());
  RelayKey answer = stranger->ours();
  answer.secret = opener->ours().secret;
  CHECK(opener->agree(answer, TimePoint()).ok());
  const auto frame = frameOf("x");
  CHECK(!stranger->open(
      headerOf(1), sealed(*opener, headerOf(1), frame), TimePoint()));

  auto here = end(true), there = end(false, 8);
  CHECK(there->agree(here->ours(), TimePoint()).ok());
  CHECK(here->agree(there->ours(), TimePoint()).ok());
  CHECK(!there->open(
      headerOf(1), sealed(*here, headerOf(1), frame), TimePoint()));
}

TEST(relay_seal_refuses_keys_that_everybody_knows) {
  RelayKey none = end(false)->ours();
  none.publicKey = {};
  CHECK_EQ(end(true)->agree(none, TimePoint()).code(), StatusCode::kProtocol);
  none.publicKey[0] = std::byte{1}; // of order 1 (RFC 7748, 7)
  CHECK_EQ(end(true)->agree(none, TimePoint()).code(), StatusCode::kProtocol);
}

// A key of RFC 7748 (6.1) cannot be set from outside, so two fresh pairs show
// that both ends get the same.
TEST(key_exchange_gives_both_ends_the_same) {
  std::string why;
  const auto a = KeyExchange::make(why), b = KeyExchange::make(why);
  const auto c = KeyExchange::make(why);
  const auto agreed = a->agree(b->ours());
  CHECK(agreed.has_value());
  CHECK_EQ(agreed->size(), 32u);
  CHECK(agreed == b->agree(a->ours()));
  CHECK(agreed != c->agree(a->ours()));
  CHECK(a->ours() != b->ours());
}

} // namespace
} // namespace resilient::test
