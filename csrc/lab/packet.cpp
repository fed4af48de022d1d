#include "lab/packet.h"

#include <algorithm>
#include <cstring>

namespace resilient::lab {
namespace {

constexpr uint8_t kNeedsChecksum = 1; // VIRTIO_NET_HDR_F_NEEDS_CSUM
constexpr uint8_t kGsoNone = 0;
constexpr uint8_t kGsoUdp = 5; // VIRTIO_NET_HDR_GSO_UDP_L4
constexpr uint8_t kGsoEcn = 0x80;
constexpr uint8_t kTcp = 6;
constexpr uint8_t kUdp = 17;
constexpr uint8_t kTcpFin = 0x01;
constexpr uint8_t kTcpPush = 0x08;
constexpr uint8_t kTcpCwr = 0x80;
constexpr uint16_t kTypeV4 = 0x0800; // ETH_P_IP
constexpr uint16_t kTypeV6 = 0x86dd; // ETH_P_IPV6

uint16_t load16(const uint8_t* p) {
  return static_cast<uint16_t>(p[0] << 8 | p[1]);
}

void store16(uint8_t* p, uint32_t value) {
  p[0] = static_cast<uint8_t>(value >> 8);
  p[1] = static_cast<uint8_t>(value);
}

uint32_t load32(const uint8_t* p) {
  return static_cast<uint32_t>(load16(p)) << 16 | load16(p + 2);
}

void store32(uint8_t* p, uint32_t value) {
  store16(p, value >> 16);
  store16(p + 2, value);
}

// The sum of RFC 1071, not yet folded.
uint64_t sum16(const uint8_t* p, size_t bytes) {
  uint64_t sum = 0;
  for (; bytes >= 2; p += 2, bytes -= 2) {
    sum += load16(p);
  }
  return bytes == 0 ? sum : sum + (static_cast<uint64_t>(*p) << 8);
}

uint16_t fold(uint64_t sum) {
  while (sum > 0xffff) {
    sum = (sum & 0xffff) + (sum >> 16);
  }
  return static_cast<uint16_t>(sum);
}

bool isV4(const uint8_t* ip) {
  return ip[0] >> 4 == 4;
}

// Whether an Ethernet frame holds IP.
bool holdsIp(const uint8_t* frame) {
  const uint16_t type = load16(frame + 2 * kMacBytes);
  return type == kTypeV4 || type == kTypeV6;
}

// Sum of the pseudo header: addresses, protocol and transport length.
uint64_t pseudoSum(const uint8_t* ip, uint8_t protocol, uint32_t length) {
  const uint64_t addresses = isV4(ip) ? sum16(ip + 12, 8) : sum16(ip + 8, 32);
  return addresses + protocol + (length >> 16) + (length & 0xffff);
}

} // namespace

Packet::Packet(std::span<const uint8_t> bytes, Link link)
    : data_(new uint8_t[bytes.size()]),
      size_(static_cast<uint32_t>(bytes.size())),
      linkBytes_(link == Link::kEthernet ? kEthernetBytes : 0) {
  std::memcpy(data_.get(), bytes.data(), bytes.size());
  parse();
}

// Finds the sizes from which everything else is computed. A header that
// contradicts the length leaves the packet invalid
// (lab_contradicting_headers_are_no_packet).
void Packet::parse() {
  if (linkBytes_ != 0 && size_ >= offset() &&
      !holdsIp(data_.get() + kOffloadBytes)) {
    wirePackets_ = 1;
    headerBytes_ = 0;
    segmentBytes_ = size_ - offset();
    return;
  }
  if (size_ < offset() + 20) {
    return;
  }
  OffloadHeader offload;
  std::memcpy(&offload, data_.get(), kOffloadBytes);
  const uint8_t* ip = data_.get() + offset();
  const uint32_t bytes = size_ - offset();
  if (!isV4(ip) && (ip[0] >> 4 != 6 || bytes < 40)) {
    return;
  }
  const uint8_t type = offload.gsoType & static_cast<uint8_t>(~kGsoEcn);
  // Counted from IP here, from the beginning of the frame in the header.
  const uint32_t start = offload.checksumStart - linkBytes_;
  if (type == kGsoNone) {
    if ((offload.flags & kNeedsChecksum) != 0 &&
        (offload.checksumStart < linkBytes_ ||
         start + offload.checksumOffset + 2u > bytes)) {
      return;
    }
    wirePackets_ = 1;
    headerBytes_ = 0;
    segmentBytes_ = bytes;
    return;
  }
  // A super-packet always leaves the checksum to the device, so checksumStart
  // is the beginning of the transport header.
  const bool udp = type == kGsoUdp;
  if ((offload.flags & kNeedsChecksum) == 0 ||
      offload.checksumStart < linkBytes_ + 20 ||
      start + (udp ? 8u : 20u) > bytes || offload.segmentBytes == 0) {
    return;
  }
  const uint32_t transport = udp ? 8u : (ip[start + 12] >> 4) * 4u;
  if (transport < (udp ? 8u : 20u) || start + transport >= bytes) {
    return;
  }
  const uint32_t header = start + transport;
  headerBytes_ = header;
  segmentBytes_ = offload.segmentBytes;
  wirePackets_ = (bytes - header + segmentBytes_ - 1) / segmentBytes_;
}

void Packet::destination(uint8_t (&address)[16]) const {
  if (linkBytes_ != 0) {
    std::memset(address, 0, 16 - kMacBytes);
    std::memcpy(address + 16 - kMacBytes, &data_[kOffloadBytes], kMacBytes);
    return;
  }
  const uint8_t* p = ip().data();
  if (isV4(p)) {
    std::memset(address, 0, 10);
    std::memset(address + 10, 0xff, 2);
    std::memcpy(address + 12, p + 16, 4);
  } else {
    std::memcpy(address, p + 24, 16);
  }
}

// IPv6 with extension headers counts as another protocol.
bool Packet::isUdp() const {
  if (linkBytes_ != 0 && !holdsIp(data_.get() + kOffloadBytes)) {
    return false;
  }
  const uint8_t* p = ip().data();
  return p[isV4(p) ? 9 : 6] == kUdp;
}

uint32_t Packet::wireBytesOf(uint32_t count) const {
  return count >= wirePackets_ ? wireBytes()
                               : count * (headerBytes_ + segmentBytes_);
}

// As a device with segmentation offload would cut it: each part repeats the
// headers with its own length, IP identification, checksum of the IPv4 header
// and TCP sequence number. FIN and PSH stay with the last part, CWR with the
// first. The transport checksum is left to the receiver, as in the original:
// only its pseudo header has changed.
Packet Packet::slice(uint32_t first, uint32_t count) const {
  if (first == 0 && count == wirePackets_) {
    return copy();
  }
  const uint8_t* whole = data_.get() + offset();
  const uint32_t payload = size_ - offset() - headerBytes_;
  const uint32_t begin = first * segmentBytes_;
  const uint32_t bytes = std::min(payload - begin, count * segmentBytes_);
  const bool last = first + count == wirePackets_;

  Packet part;
  part.linkBytes_ = linkBytes_;
  part.size_ = offset() + headerBytes_ + bytes;
  part.data_.reset(new uint8_t[part.size_]);
  uint8_t* ip = part.data_.get() + offset();
  std::memcpy(part.data_.get(), data_.get(), offset() + headerBytes_);
  std::memcpy(ip + headerBytes_, whole + headerBytes_ + begin, bytes);

  OffloadHeader offload;
  std::memcpy(&offload, data_.get(), kOffloadBytes);
  const uint32_t start = offload.checksumStart - linkBytes_;
  const uint32_t ipBytes = headerBytes_ + bytes;
  if (isV4(ip)) {
    store16(ip + 2, ipBytes);
    store16(ip + 4, load16(ip + 4) + first); // each wire packet has its number
    store16(ip + 10, 0);
    store16(ip + 10, ~fold(sum16(ip, (ip[0] & 0xf) * 4u)) & 0xffff);
  } else {
    store16(ip + 4, ipBytes - 40);
  }
  const bool udp = (offload.gsoType & ~kGsoEcn) == kGsoUdp;
  uint8_t* transport = ip + start;
  if (udp) {
    store16(transport + 4, 8 + bytes);
  } else {
    store32(transport + 4, load32(transport + 4) + begin);
    if (!last) {
      transport[13] &= static_cast<uint8_t>(~(kTcpFin | kTcpPush));
    }
    if (first != 0) {
      transport[13] &= static_cast<uint8_t>(~kTcpCwr);
      offload.gsoType &= static_cast<uint8_t>(~kGsoEcn);
    }
  }
  // The receiver's kernel takes the sum over the pseudo header as the
  // promise that the rest would be right.
  store16(
      transport + offload.checksumOffset,
      fold(pseudoSum(ip, udp ? kUdp : kTcp, ipBytes - start)));
  offload.headerBytes = static_cast<uint16_t>(linkBytes_ + headerBytes_);
  if (count == 1) {
    offload.gsoType = kGsoNone;
    offload.segmentBytes = 0;
  }
  std::memcpy(part.data_.get(), &offload, kOffloadBytes);
  part.parse();
  return part;
}

// The order matters. A packet from a local socket usually has no checksum yet,
// and a receiving kernel trusts such a packet. So the checksum is completed
// first, the mark that asks for it is cleared, and only then a bit is inverted.
// The bit is one behind the IP header, where the transport checksum finds it.
void Packet::corrupt(uint64_t bit) {
  OffloadHeader offload;
  std::memcpy(&offload, data_.get(), kOffloadBytes);
  uint8_t* ip = data_.get() + offset();
  const uint32_t bytes = size_ - offset();
  uint32_t start = isV4(ip) ? (ip[0] & 0xf) * 4u : 40u;
  if (linkBytes_ != 0 && !holdsIp(data_.get() + kOffloadBytes)) {
    start = 0;
  } else if ((offload.flags & kNeedsChecksum) != 0) {
    start = offload.checksumStart - linkBytes_;
    uint16_t sum =
        static_cast<uint16_t>(~fold(sum16(ip + start, bytes - start)));
    // UDP writes 0 as its complement, since 0 says "no checksum".
    if (sum == 0 && offload.checksumOffset == 6) {
      sum = 0xffff;
    }
    store16(ip + start + offload.checksumOffset, sum);
  }
  offload = OffloadHeader{};
  std::memcpy(data_.get(), &offload, kOffloadBytes);
  if (start < bytes) {
    const uint64_t at = bit % ((bytes - start) * 8ull);
    ip[start + at / 8] ^= static_cast<uint8_t>(1u << (at % 8));
  }
  parse();
}

} // namespace resilient::lab
