#include "lab/packet.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/lab_packets.h"

namespace resilient::lab {
namespace {

TEST(lab_one_packet_is_one_wire_packet) {
  const Packet packet = makePacket({.payloadBytes = 1000});
  CHECK(packet.valid());
  CHECK_EQ(packet.wirePackets(), 1);
  CHECK_EQ(packet.wireBytes(), 1040);
  CHECK_EQ(packet.wireBytesOf(1), 1040);
}

TEST(lab_a_super_packet_counts_as_what_it_becomes) {
  // 3 x 1448 + 100 bytes under a TCP header with options.
  const Packet packet = makePacket(
      {.payloadBytes = 3 * 1448 + 100,
       .segmentBytes = 1448,
       .transportHeaderBytes = 32});
  CHECK_EQ(packet.wirePackets(), 4);
  CHECK_EQ(packet.wireBytes(), 3 * 1500 + 152);
  CHECK_EQ(packet.wireBytesOf(2), 3000);
  CHECK_EQ(packet.wireBytesOf(4), 3 * 1500 + 152);
}

// Every way to cut a super-packet in two: numbers, lengths, flags, payload,
// and checksums that a device would complete to right ones.
TEST(lab_slices_are_right_packets) {
  for (const bool v6 : {false, true}) {
    for (const bool udp : {false, true}) {
      const uint32_t count = 5;
      const uint32_t segment = 1000;
      const uint32_t payload = 4 * segment + 7;
      const Packet whole = makePacket(
          {.v6 = v6,
           .udp = udp,
           .payloadBytes = payload,
           .segmentBytes = segment,
           .sequence = 0xfffffff0,
           .tcpFlags = 0x80 | 0x10 | 0x08 | 0x01}); // CWR ACK PSH FIN
      CHECK_EQ(whole.wirePackets(), count);
      for (uint32_t first = 0; first < count; ++first) {
        for (uint32_t n = 1; first + n <= count; ++n) {
          const Packet part = whole.slice(first, n);
          const Parsed p = parse(part);
          CHECK_EQ(part.wirePackets(), n);
          CHECK_EQ(
              part.wireBytes(),
              whole.wireBytesOf(first + n) - whole.wireBytesOf(first));
          const uint32_t begin = first * segment;
          const uint32_t end = std::min(payload, (first + n) * segment);
          CHECK(p.payload == payloadPattern(begin, end));
          CHECK(p.ipChecksumRight);
          CHECK(p.lengthsRight);
          CHECK(p.partialChecksumRight);
          CHECK_EQ(p.gso, n > 1);
          if (!v6) {
            CHECK_EQ(p.ipId, 100 + first);
          }
          if (!udp) {
            const bool last = first + n == count;
            CHECK_EQ(p.sequence, 0xfffffff0u + begin);
            CHECK_EQ((p.tcpFlags & 0x09) != 0, last);
            CHECK_EQ((p.tcpFlags & 0x80) != 0, first == 0);
            CHECK_EQ(p.tcpFlags & 0x10, 0x10);
          }
        }
      }
    }
  }
}

TEST(lab_a_slice_of_a_slice_is_the_slice) {
  const Packet whole = makePacket({.payloadBytes = 9500, .segmentBytes = 1000});
  const Packet twice = whole.slice(2, 6).slice(1, 3);
  const Packet once = whole.slice(3, 3);
  CHECK_EQ(twice.bytes().size(), once.bytes().size());
  CHECK(
      std::memcmp(
          twice.bytes().data(), once.bytes().data(), once.bytes().size()) == 0);
}

TEST(lab_corruption_shows_in_the_checksum) {
  for (const bool v6 : {false, true}) {
    for (const bool udp : {false, true}) {
      for (uint64_t bit = 0; bit < 400; ++bit) {
        const Packet whole = makePacket(
            {.v6 = v6, .udp = udp, .payloadBytes = 1500, .segmentBytes = 1000});
        Packet one = whole.slice(0, 1);
        one.corrupt(bit * 7919);
        const Parsed p = parse(one);
        CHECK(one.valid());
        CHECK(!p.needsChecksum);
        CHECK(p.ipChecksumRight); // the damage is behind the IP header
        CHECK(!p.fullChecksumRight);
      }
    }
  }
}

TEST(lab_contradicting_headers_are_no_packet) {
  const Packet good = makePacket({.payloadBytes = 5000, .segmentBytes = 1000});
  std::vector<uint8_t> bytes(good.bytes().begin(), good.bytes().end());
  const auto with = [&](size_t at, uint16_t value) {
    std::vector<uint8_t> changed = bytes;
    std::memcpy(changed.data() + at, &value, 2);
    return Packet(changed).valid();
  };
  CHECK(Packet(bytes).valid());
  CHECK(!with(offsetof(OffloadHeader, segmentBytes), 0));
  CHECK(!with(offsetof(OffloadHeader, checksumStart), 60000));
  CHECK(!with(kOffloadBytes, 0)); // neither IPv4 nor IPv6
  CHECK(!with(kOffloadBytes + 20 + 12, 0)); // a TCP header of no bytes
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::span<const uint8_t> part(bytes.data(), size);
    const Packet torn(part); // any answer, but in bounds
    if (torn.valid()) {
      (void)torn.slice(0, 1);
    }
  }
}

TEST(lab_destinations_of_both_families) {
  uint8_t address[16];
  makePacket({.payloadBytes = 1}).destination(address);
  const uint8_t v4[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 77, 0, 2};
  CHECK(std::memcmp(address, v4, 16) == 0);
  makePacket({.v6 = true, .payloadBytes = 1}).destination(address);
  CHECK_EQ(address[0], 0xfd);
  CHECK_EQ(address[15], 2);
}

std::vector<uint8_t> bytesOf(const Packet& packet) {
  return {packet.bytes().begin(), packet.bytes().end()};
}

// In a frame, everything is done to the IP packet as without one.
TEST(lab_frames_are_treated_as_their_packets) {
  for (const bool v6 : {false, true}) {
    for (const bool udp : {false, true}) {
      const Packet plain = makePacket(
          {.v6 = v6, .udp = udp, .payloadBytes = 4500, .segmentBytes = 1000});
      const Packet frame = inFrame(plain);
      CHECK(frame.valid());
      CHECK(bytesOf(frame.copy()) == bytesOf(frame));
      CHECK_EQ(frame.wirePackets(), plain.wirePackets());
      CHECK_EQ(frame.wireBytes(), plain.wireBytes());
      CHECK_EQ(frame.wireBytesOf(2), plain.wireBytesOf(2));
      for (uint32_t first = 0; first < 5; ++first) {
        Packet part = frame.slice(first, 1);
        Packet plainPart = plain.slice(first, 1);
        CHECK(bytesOf(outOfFrame(part)) == bytesOf(plainPart));
        part.corrupt(first * 7919);
        plainPart.corrupt(first * 7919);
        CHECK(bytesOf(outOfFrame(part)) == bytesOf(plainPart));
      }
    }
  }
}

TEST(lab_frames_have_mac_addresses) {
  const Packet frame = inFrame(makePacket({.payloadBytes = 1}));
  uint8_t address[16];
  frame.destination(address);
  const uint8_t mac[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2};
  CHECK(std::memcmp(address, mac, 16) == 0);
  CHECK(!frame.isForGroup());
  CHECK(!makePacket({.payloadBytes = 1}).isForGroup());
  std::vector<uint8_t> bytes = bytesOf(frame);
  bytes[kOffloadBytes] = 0xff;
  CHECK(Packet(bytes, Link::kEthernet).isForGroup());
}

TEST(lab_frames_that_are_not_ip) {
  Packet arp = inFrame(makePacket({.payloadBytes = 8}), 0x0806);
  CHECK(arp.valid());
  CHECK_EQ(arp.wirePackets(), 1);
  CHECK_EQ(arp.wireBytes(), arp.ip().size());
  const std::vector<uint8_t> before = bytesOf(arp);
  arp.corrupt(3);
  const std::vector<uint8_t> after = bytesOf(arp);
  // The damage is in the payload, so the frame still arrives.
  const size_t payload = kOffloadBytes + kEthernetBytes;
  CHECK(!std::equal(
      before.begin() + payload, before.end(), after.begin() + payload));
  CHECK(
      std::equal(
          before.begin() + kOffloadBytes,
          before.begin() + payload,
          after.begin() + kOffloadBytes));
  for (const Packet& packet :
       {makePacket({.payloadBytes = 5000, .segmentBytes = 1000}),
        makePacket({.payloadBytes = 10})}) {
    const std::vector<uint8_t> whole = bytesOf(inFrame(packet));
    for (size_t size = 0; size < whole.size(); ++size) {
      const std::span<const uint8_t> part(whole.data(), size);
      const Packet torn(part, Link::kEthernet); // any answer, but in bounds
      if (torn.valid()) {
        (void)torn.slice(0, 1);
        (void)torn.isForGroup();
      }
    }
  }
}

} // namespace
} // namespace resilient::lab
