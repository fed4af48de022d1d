#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

// IP packets as a TUN device with IFF_VNET_HDR hands them over: a
// virtio_net_hdr, then one packet or a super-packet, which is up to 64 KiB of
// TCP or UDP payload under one header. A device would cut it into wire
// packets; here that happens only where they are treated one by one.
namespace resilient::lab {

// The virtio_net_hdr of Linux without `num_buffers`, in the machine's order.
struct OffloadHeader {
  uint8_t flags;
  uint8_t gsoType;
  uint16_t headerBytes;
  uint16_t segmentBytes;
  uint16_t checksumStart;
  uint16_t checksumOffset;
};
inline constexpr size_t kOffloadBytes = 10;
static_assert(sizeof(OffloadHeader) == kOffloadBytes);

// A virtio_net_hdr and the largest IP packet.
inline constexpr size_t kPacketBytesMax = kOffloadBytes + 65536 + 64;

// One packet or super-packet with its OffloadHeader. Move only. If it is not
// valid(), only valid() and bytes() may be called.
class Packet {
 public:
  Packet() = default;
  // Copies `bytes`, which begin with the OffloadHeader.
  explicit Packet(std::span<const uint8_t> bytes);

  // False if it is no IP packet, or its headers contradict its length.
  bool valid() const {
    return wirePackets_ != 0;
  }
  std::span<const uint8_t> bytes() const {
    return {data_.get(), size_};
  }
  // The IP packet alone.
  std::span<const uint8_t> ip() const {
    return bytes().subspan(kOffloadBytes);
  }
  // 16 bytes; an IPv4 address is mapped (::ffff:a.b.c.d).
  void destination(uint8_t (&address)[16]) const;

  uint32_t wirePackets() const {
    return wirePackets_;
  }
  // IP bytes of all wire packets, each with its own header.
  uint32_t wireBytes() const {
    return static_cast<uint32_t>(size_ - kOffloadBytes) +
        (wirePackets_ - 1) * headerBytes_;
  }
  // IP bytes of the wire packets before number `count`.
  uint32_t wireBytesOf(uint32_t count) const;

  // The wire packets [first, first + count) as a packet of their own. Copies
  // them. Needs first + count <= wirePackets() and count > 0. A slice of a
  // slice is the same as the slice of the whole.
  Packet slice(uint32_t first, uint32_t count) const;
  Packet copy() const {
    return Packet(bytes());
  }
  // Writes the checksum, then inverts one bit behind the IP header: the
  // receiver's kernel finds the damage. Only for a single wire packet. `bit`:
  // any number.
  void corrupt(uint64_t bit);

 private:
  void parse();

  std::unique_ptr<uint8_t[]> data_;
  uint32_t size_ = 0; // with the OffloadHeader
  uint32_t wirePackets_ = 0;
  // The headers of IP and transport, as each wire packet of a super-packet
  // repeats them.
  uint32_t headerBytes_ = 0;
  uint32_t segmentBytes_ = 0; // payload of each wire packet but the last
};

} // namespace resilient::lab
