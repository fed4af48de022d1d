#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "lab/packet.h"

// Packets for the lab's tests, made and read by other code than the lab's own.
namespace resilient::lab {

struct PacketShape {
  bool v6 = false;
  bool udp = false;
  uint32_t payloadBytes = 0;
  uint32_t segmentBytes = 0; // 0: no super-packet
  uint32_t transportHeaderBytes = 20; // of TCP
  uint32_t sequence = 1;
  uint8_t tcpFlags = 0x10;
  uint32_t patternStart = 0; // of payloadPattern
};

inline std::vector<uint8_t> payloadPattern(uint32_t begin, uint32_t end) {
  std::vector<uint8_t> bytes;
  for (uint32_t i = begin; i < end; ++i) {
    bytes.push_back(static_cast<uint8_t>((i * 2654435761u) >> 24));
  }
  return bytes;
}

inline void put16(std::vector<uint8_t>& bytes, uint32_t value) {
  bytes.push_back(static_cast<uint8_t>(value >> 8));
  bytes.push_back(static_cast<uint8_t>(value));
}

inline void put32(std::vector<uint8_t>& bytes, uint32_t value) {
  put16(bytes, value >> 16);
  put16(bytes, value & 0xffff);
}

inline uint32_t get16(const uint8_t* p) {
  return static_cast<uint32_t>(p[0] * 256 + p[1]);
}

inline uint32_t onesSum(const uint8_t* p, size_t bytes, uint32_t start = 0) {
  uint32_t sum = start;
  for (size_t i = 0; i < bytes; ++i) {
    sum += i % 2 == 0 ? static_cast<uint32_t>(p[i] << 8) : p[i];
    sum = (sum & 0xffff) + (sum >> 16);
  }
  return sum;
}

inline uint32_t
pseudoHeader(const uint8_t* ip, bool v6, uint8_t protocol, uint32_t length) {
  std::vector<uint8_t> header(ip + (v6 ? 8 : 12), ip + (v6 ? 40 : 20));
  put32(header, length);
  put32(header, protocol);
  return onesSum(header.data(), header.size());
}

// The same packet in an Ethernet frame for the MAC address 02:00:00:00:00:02.
inline Packet inFrame(const Packet& packet, uint16_t type = 0) {
  std::vector<uint8_t> bytes(packet.bytes().begin(), packet.bytes().end());
  OffloadHeader offload;
  std::memcpy(&offload, bytes.data(), kOffloadBytes);
  offload.headerBytes += kEthernetBytes;
  offload.checksumStart += kEthernetBytes;
  std::memcpy(bytes.data(), &offload, kOffloadBytes);
  std::vector<uint8_t> header = {2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1};
  const bool v4 = packet.ip()[0] >> 4 == 4;
  put16(header, type != 0 ? type : v4 ? 0x0800 : 0x86dd);
  bytes.insert(bytes.begin() + kOffloadBytes, header.begin(), header.end());
  return Packet(bytes, Link::kEthernet);
}

// The IP packet of a frame, as inFrame() got it.
inline Packet outOfFrame(const Packet& frame) {
  std::vector<uint8_t> bytes(frame.bytes().begin(), frame.bytes().end());
  OffloadHeader offload;
  std::memcpy(&offload, bytes.data(), kOffloadBytes);
  if (offload.headerBytes != 0) {
    offload.headerBytes -= kEthernetBytes;
  }
  if (offload.checksumStart != 0) {
    offload.checksumStart -= kEthernetBytes;
  }
  std::memcpy(bytes.data(), &offload, kOffloadBytes);
  bytes.erase(
      bytes.begin() + kOffloadBytes,
      bytes.begin() + kOffloadBytes + kEthernetBytes);
  return Packet(bytes);
}

// From 10.77.0.1 to 10.77.0.2, or fd77::1 to fd77::2.
inline Packet makePacket(const PacketShape& shape) {
  const uint32_t ipHeader = shape.v6 ? 40 : 20;
  const uint32_t transport = shape.udp ? 8 : shape.transportHeaderBytes;
  const uint32_t length = transport + shape.payloadBytes;
  OffloadHeader offload{};
  offload.flags = 1;
  if (shape.segmentBytes != 0) {
    offload.gsoType = shape.udp ? 5 : shape.v6 ? 4 : 1;
    offload.segmentBytes = static_cast<uint16_t>(shape.segmentBytes);
  }
  offload.headerBytes = static_cast<uint16_t>(ipHeader + transport);
  offload.checksumStart = static_cast<uint16_t>(ipHeader);
  offload.checksumOffset = shape.udp ? 6 : 16;
  std::vector<uint8_t> ip;
  if (shape.v6) {
    put32(ip, 0x60000000);
    put16(ip, length);
    ip.push_back(shape.udp ? 17 : 6);
    ip.push_back(64);
    for (const uint8_t last : {1, 2}) {
      put16(ip, 0xfd77);
      ip.insert(ip.end(), 13, 0);
      ip.push_back(last);
    }
  } else {
    put16(ip, 0x4500);
    put16(ip, ipHeader + length);
    put16(ip, 100); // number
    put16(ip, 0);
    ip.push_back(64);
    ip.push_back(shape.udp ? 17 : 6);
    put16(ip, 0); // checksum
    put32(ip, 0x0a4d0001);
    put32(ip, 0x0a4d0002);
    const uint32_t sum = onesSum(ip.data(), ip.size()) ^ 0xffff;
    ip[10] = static_cast<uint8_t>(sum >> 8);
    ip[11] = static_cast<uint8_t>(sum);
  }
  const uint32_t pseudo =
      pseudoHeader(ip.data(), shape.v6, shape.udp ? 17 : 6, length);
  put16(ip, 1234);
  put16(ip, 5678);
  if (shape.udp) {
    put16(ip, length);
    put16(ip, pseudo);
  } else {
    put32(ip, shape.sequence);
    put32(ip, 77);
    ip.push_back(static_cast<uint8_t>(transport / 4 << 4));
    ip.push_back(shape.tcpFlags);
    put16(ip, 65535);
    put16(ip, pseudo);
    put16(ip, 0);
    ip.insert(ip.end(), transport - 20, 1); // options: nothing
  }
  const std::vector<uint8_t> payload = payloadPattern(
      shape.patternStart, shape.patternStart + shape.payloadBytes);
  ip.insert(ip.end(), payload.begin(), payload.end());

  std::vector<uint8_t> all(kOffloadBytes);
  std::memcpy(all.data(), &offload, kOffloadBytes);
  all.insert(all.end(), ip.begin(), ip.end());
  return Packet(all);
}

struct Parsed {
  bool needsChecksum;
  bool gso;
  bool ipChecksumRight;
  bool lengthsRight;
  bool partialChecksumRight; // what a device would complete to a right one
  bool fullChecksumRight;
  uint32_t ipId;
  uint32_t sequence;
  uint8_t tcpFlags;
  std::vector<uint8_t> payload;
};

inline Parsed parse(const Packet& packet) {
  Parsed p{};
  OffloadHeader offload;
  std::memcpy(&offload, packet.bytes().data(), kOffloadBytes);
  const std::vector<uint8_t> ip(packet.ip().begin(), packet.ip().end());
  p.needsChecksum = offload.flags == 1;
  p.gso = offload.gsoType != 0;
  const bool v6 = ip[0] >> 4 == 6;
  const uint32_t ipHeader = v6 ? 40 : 20;
  const uint8_t protocol = ip[v6 ? 6 : 9];
  const bool udp = protocol == 17;
  const uint8_t* transport = ip.data() + ipHeader;
  const uint32_t length = static_cast<uint32_t>(ip.size()) - ipHeader;
  p.ipChecksumRight = v6 || onesSum(ip.data(), 20) == 0xffff;
  p.lengthsRight =
      (v6 ? get16(ip.data() + 4) : get16(ip.data() + 2) - 20) == length &&
      (!udp || get16(transport + 4) == length);
  const uint32_t pseudo = pseudoHeader(ip.data(), v6, protocol, length);
  const uint32_t stored = get16(transport + (udp ? 6 : 16));
  p.partialChecksumRight =
      p.needsChecksum && stored % 0xffff == pseudo % 0xffff;
  p.fullChecksumRight =
      !p.needsChecksum && onesSum(transport, length, pseudo) == 0xffff;
  p.ipId = get16(ip.data() + 4);
  if (!udp) {
    p.sequence = get16(transport + 4) << 16 | get16(transport + 6);
    p.tcpFlags = transport[13];
  }
  const uint32_t header = udp ? 8 : (transport[12] >> 4) * 4u;
  // The offset itself may be damaged.
  if (header <= length) {
    p.payload.assign(transport + header, transport + length);
  }
  return p;
}

} // namespace resilient::lab
