#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

// IP packets as a TUN device with IFF_VNET_HDR hands them over: a
// virtio_net_hdr, then one packet or a super-packet, which is up to 64 KiB of
// TCP or UDP payload under one header. A device would cut it into wire
// packets; here that happens only where they are treated one by one. A packet
// socket with PACKET_VNET_HDR hands over the same as Ethernet frames: a header
// in front of IP, and frames that are not IP (ARP).
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

// The bytes between the OffloadHeader and IP.
enum class Link : uint8_t { kNone, kEthernet };
inline constexpr size_t kEthernetBytes = 14;
inline constexpr size_t kMacBytes = 6;

// A virtio_net_hdr and the largest IP packet, with an Ethernet header.
inline constexpr size_t kPacketBytesMax = kOffloadBytes + 65536 + 64;

// One packet or super-packet with its OffloadHeader. Move only. If it is not
// valid(), only valid() and bytes() may be called.
class Packet {
 public:
  Packet() = default;
  // Copies `bytes`, which begin with the OffloadHeader.
  explicit Packet(std::span<const uint8_t> bytes, Link link = Link::kNone);

  // False if its headers contradict its length, or if it is neither IP nor an
  // Ethernet frame.
  bool valid() const {
    return wirePackets_ != 0;
  }
  std::span<const uint8_t> bytes() const {
    return {data_.get(), size_};
  }
  // The IP packet alone, or the payload of an Ethernet frame of another kind.
  std::span<const uint8_t> ip() const {
    return bytes().subspan(kOffloadBytes + linkBytes_);
  }
  // 16 bytes. An IPv4 address is mapped (::ffff:a.b.c.d). On Ethernet it is the
  // MAC address behind ten bytes of 0.
  void destination(uint8_t (&address)[16]) const;
  // Whether an Ethernet frame is for all NICs or for a group of them.
  bool isForGroup() const {
    return linkBytes_ != 0 && (data_[kOffloadBytes] & 1) != 0;
  }

  bool isUdp() const;

  uint32_t wirePackets() const {
    return wirePackets_;
  }
  // IP bytes of all wire packets, each with its own header.
  uint32_t wireBytes() const {
    return size_ - offset() + (wirePackets_ - 1) * headerBytes_;
  }
  // IP bytes of the wire packets before number `count`.
  uint32_t wireBytesOf(uint32_t count) const;

  // The wire packets [first, first + count) as a packet of their own. Copies
  // them. Needs first + count <= wirePackets() and count > 0. A slice of a
  // slice is the same as the slice of the whole.
  Packet slice(uint32_t first, uint32_t count) const;
  Packet copy() const {
    return Packet(bytes(), linkBytes_ == 0 ? Link::kNone : Link::kEthernet);
  }
  // Writes the checksum, then inverts one bit behind the IP header: the
  // receiver's kernel finds the damage. Only for a single wire packet. `bit`:
  // any number.
  void corrupt(uint64_t bit);

 private:
  void parse();
  // Where IP begins.
  uint32_t offset() const {
    return static_cast<uint32_t>(kOffloadBytes) + linkBytes_;
  }

  std::unique_ptr<uint8_t[]> data_;
  uint32_t size_ = 0; // with the OffloadHeader
  uint32_t linkBytes_ = 0;
  uint32_t wirePackets_ = 0;
  // The headers of IP and transport, as each wire packet of a super-packet
  // repeats them.
  uint32_t headerBytes_ = 0;
  uint32_t segmentBytes_ = 0; // payload of each wire packet but the last
};

} // namespace resilient::lab
