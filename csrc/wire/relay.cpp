#include "wire/relay.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "wire/frame.h"

namespace resilient {
namespace {

// Offsets. Numbers are little-endian, as in frame.cpp.
constexpr size_t kHopAt = 0;
constexpr size_t kFromOpenerAt = 1;
constexpr size_t kReservedAt = 2; // 2 bytes of 0
constexpr size_t kBurstAt = 4; // 4 bytes
constexpr size_t kFlowAt = 8;
constexpr size_t kNumberAt = 16;
constexpr size_t kDeliveredAt = 24;
constexpr size_t kOpenerAt = 32;
constexpr size_t kOtherAt = 48;

constexpr uint64_t kBurstUnit = 1u << 10; // bytes

Status malformed(const char* what, uint64_t value) {
  return Status(
      StatusCode::kProtocol,
      std::string("malformed message over a relay: ") + what + ' ' +
          std::to_string(value));
}

} // namespace

void encodeRelay(
    const RelayHeader& header,
    std::span<std::byte, kRelayHeaderBytes> out) {
  std::memset(out.data(), 0, out.size());
  out[kHopAt] = static_cast<std::byte>(header.hop);
  out[kFromOpenerAt] = static_cast<std::byte>(header.fromOpener);
  const uint32_t burst = static_cast<uint32_t>(std::min<uint64_t>(
      header.burstBytes / kBurstUnit + (header.burstBytes % kBurstUnit != 0),
      UINT32_MAX));
  std::memcpy(&out[kBurstAt], &burst, sizeof(burst));
  const RelayFlow& flow = header.flow;
  std::memcpy(&out[kFlowAt], &flow.number, sizeof(flow.number));
  std::memcpy(&out[kNumberAt], &header.number, sizeof(header.number));
  std::memcpy(&out[kDeliveredAt], &header.delivered, sizeof(header.delivered));
  std::memcpy(&out[kOpenerAt], flow.opener.data(), flow.opener.size());
  std::memcpy(&out[kOtherAt], flow.other.data(), flow.other.size());
}

Status decodeRelay(
    std::span<const std::byte> message,
    RelayHeader& header,
    std::span<const std::byte>& frame) {
  if (message.size() < kRelayHeaderBytes + kFrameHeaderBytes) {
    return malformed("bytes", message.size());
  }
  const auto byteAt = [&](size_t at) {
    return std::to_integer<uint8_t>(message[at]);
  };
  if (byteAt(kHopAt) < 1 || byteAt(kHopAt) > 2) {
    return malformed("hop", byteAt(kHopAt));
  }
  header.hop = static_cast<RelayHop>(byteAt(kHopAt));
  if (byteAt(kFromOpenerAt) > 1) {
    return malformed("direction", byteAt(kFromOpenerAt));
  }
  header.fromOpener = byteAt(kFromOpenerAt) == 1;
  for (size_t at = kReservedAt; at < kBurstAt; ++at) {
    if (byteAt(at) != 0) {
      return malformed("reserved byte", byteAt(at));
    }
  }
  uint32_t burst = 0;
  std::memcpy(&burst, &message[kBurstAt], sizeof(burst));
  header.burstBytes = burst * kBurstUnit;
  RelayFlow& flow = header.flow;
  std::memcpy(&flow.number, &message[kFlowAt], sizeof(flow.number));
  std::memcpy(&header.number, &message[kNumberAt], sizeof(header.number));
  std::memcpy(
      &header.delivered, &message[kDeliveredAt], sizeof(header.delivered));
  std::memcpy(flow.opener.data(), &message[kOpenerAt], flow.opener.size());
  std::memcpy(flow.other.data(), &message[kOtherAt], flow.other.size());
  if (flow.opener == flow.other) {
    return malformed("flow to itself", flow.number);
  }
  frame = message.subspan(kRelayHeaderBytes);
  return Status();
}

} // namespace resilient
