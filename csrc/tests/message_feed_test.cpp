#include "tests/fuzz/message_feed.h"

#include "base/random.h"
#include "tests/check.h"
#include "wire/frame.h"

// The fuzzer's target on genuine messages that were spoiled. A failure of the
// feed aborts; sanitizers see more.

namespace resilient::test {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes inputOf(uint8_t kind, std::span<const std::byte> message) {
  Bytes input = {kind};
  for (const std::byte b : message) {
    input.push_back(static_cast<uint8_t>(b));
  }
  return input;
}

Bytes inputOf(uint8_t kind, const std::string& text) {
  return inputOf(kind, std::as_bytes(std::span(text)));
}

// One of each kind that is understood.
std::vector<Bytes> golden() {
  RelayNote open;
  open.flow.opener.fill(1);
  open.flow.other.fill(2);
  RelayHeader relayed;
  relayed.flow = open.flow;
  std::vector<std::byte> frame(kRelayHeaderBytes + kFrameHeaderBytes);
  encodeRelay(relayed, std::span(frame).first<kRelayHeaderBytes>());
  Residual residual;
  residual.ranges = {{0, 10}, {30, 5}};
  residual.parts = 1;
  PeerAddress address;
  address.uid.fill(7);
  address.hostId = std::string(32, 'a');
  address.hostName = "name";
  address.pid = 12;
  address.addresses.push_back(
      {"eth0", *SocketAddress::parse("10.0.0.7", 5), 24});
  return {
      inputOf(0, encode(Query{1, 2})),
      inputOf(1, encode(Notice{})),
      inputOf(2, encode(Query{1, 2})),
      inputOf(3, encode(Report{})),
      inputOf(4, encode(PathsLost{"its NIC went down", {1, 2}})),
      inputOf(5, encode(SharedOffer{"name", "token"})),
      inputOf(6, encode(Addresses{address.toString()})),
      inputOf(
          7,
          encode(
              DatagramOffer{
                  0,
                  false,
                  1,
                  2,
                  std::string(DatagramOffer::kNonceBytes, 'n')})),
      inputOf(8, encode(VerbsOffer{})),
      inputOf(9, encode(open)),
      inputOf(10, encodeResidual(residual.parts, residual.ranges)),
      inputOf(10, frame),
      inputOf(11, address.toString()),
      inputOf(13, std::string("\1") + "1"),
      inputOf(14, encode(Arrivals{true, 1, {{0, 2}}}))};
}

TEST(message_feed_understands_genuine_messages) {
  for (const Bytes& input : golden()) {
    MessageFeed feed(input);
    feed.run();
    if (!feed.understood()) {
      CHECK_EQ(int(input[0]), -1); // which one
    }
  }
}

TEST(message_feed_spoiled_messages) {
  const std::vector<Bytes> all = golden();
  forSeeds(20'000, [&](uint64_t seed) {
    Prng prng(mixBits(seed));
    Bytes input = all[prng.below(all.size())];
    for (uint64_t i = 1 + prng.below(3); i > 0 && input.size() > 1; --i) {
      const auto at = input.begin() +
          static_cast<ptrdiff_t>(1 + prng.below(input.size() - 1));
      switch (prng.below(4)) {
        case 0:
          *at = static_cast<uint8_t>(prng.next());
          break;
        case 1:
          input.erase(at, prng.chance(0.5) ? input.end() : at + 1);
          break;
        case 2:
          input.insert(at, static_cast<uint8_t>(prng.next()));
          break;
        case 3:
          *at ^= static_cast<uint8_t>(1 << prng.below(8));
          break;
      }
    }
    MessageFeed(input).run();
  });
}

TEST(message_feed_random_records_and_options) {
  forSeeds(20'000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    Bytes input(1 + prng.below(40));
    for (uint8_t& b : input) {
      static constexpr std::string_view kLikely = "0123456789.,=-:/ KMGTautoe";
      b = prng.chance(0.7)
          ? static_cast<uint8_t>(kLikely[prng.below(kLikely.size())])
          : static_cast<uint8_t>(prng.next());
    }
    input[0] = static_cast<uint8_t>(10 + seed % 4);
    MessageFeed(input).run();
  });
}

} // namespace
} // namespace resilient::test
