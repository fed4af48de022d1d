#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "wire/hello.h"

namespace resilient {

// What travels over a relay: a process hands frames for another one to a third,
// which passes them on. docs/wire_format.md has the same in prose.
//
// A flow is such a path between two processes, in both directions. Its number
// is unique among the flows of the process that has opened it. Its frames are
// messages of the channel to the relay, and then of the relay's own channel,
// in a group that is no group of ranks. Notes about it are control frames.

// FrameHeader.group of these messages. No group of ranks has this number.
inline constexpr uint64_t kRelayGroup = UINT64_MAX;

struct RelayFlow {
  Uid opener{}, other{};
  uint64_t number = 0;

  auto operator<=>(const RelayFlow&) const = default;
};

// The ends of a flow tell each other this so that they can seal its frames
// (transport/relay_seal.h): the secret of the job that they use, as keyIdOf(),
// and their halves of the exchange.
struct RelayKey {
  uint64_t secret = 0;
  std::array<std::byte, 32> publicKey{}; // zeros: frames are not sealed

  bool operator==(const RelayKey&) const = default;
};

// The way from one end to the other one has two parts. A relay passes on
// nothing that a relay has passed on.
enum class RelayHop : uint8_t { kToRelay = 1, kFromRelay = 2 };

// The beginning of each message; a frame follows, header and payload, or both
// of them sealed.
struct RelayHeader {
  RelayHop hop = RelayHop::kToRelay;
  bool fromOpener = true;
  RelayFlow flow;
  // Of a reliable frame, by direction, from 1; 0: any other frame.
  uint64_t number = 0;
  // The reliable frames of the other direction that have arrived, up to the
  // first that has not.
  uint64_t delivered = 0;
  // OutFrame::burstBytes of the frame at its sender. A relay sees only the part
  // of a burst that waits there. The wire has it in KiB, rounded up, at most
  // 4 TiB.
  uint64_t burstBytes = 0;

  const Uid& source() const {
    return fromOpener ? flow.opener : flow.other;
  }
  const Uid& target() const {
    return fromOpener ? flow.other : flow.opener;
  }
};

inline constexpr size_t kRelayHeaderBytes = 64;

void encodeRelay(
    const RelayHeader& header,
    std::span<std::byte, kRelayHeaderBytes> out);
// Checks what the bytes of one message alone can tell, but not the frame: it
// is in `frame`, a part of `message`. On error the results are unspecified.
Status decodeRelay(
    std::span<const std::byte> message,
    RelayHeader& header,
    std::span<const std::byte>& frame);

} // namespace resilient
