#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "transport/key_exchange.h"
#include "transport/packet_seal.h"
#include "wire/relay.h"

namespace resilient {

// One end of a relayed flow whose frames the relay can neither read nor change:
// it knows the job's secret, as every member does, but the keys also need what
// the two ends agree on. It could deceive both ends only by answering in the
// place of each from the first note on.
//
// The ends tell each other a RelayKey in the notes that open the flow. A frame
// is sealed together with the header of its message (wire/relay.h), except for
// the hop. One that comes twice is opened twice: the number in the header shows
// it, and where it has none, repetition does no harm (isReliable()).
//
// Thread: one at a time.
class RelaySeal {
 public:
  // Null, and `why` says so, where libcrypto is missing. `secret`: the one that
  // the opener names.
  static std::unique_ptr<RelaySeal> make(
      const RelayFlow& flow,
      bool opener,
      std::string secret,
      std::string& why);

  // For the far end.
  const RelayKey& ours() const {
    return ours_;
  }
  // Once with the key of the far end, before all that follows.
  Status agree(const RelayKey& theirs, TimePoint now);
  bool agreed() const {
    return sealer_ != nullptr;
  }

  // Writes the sealed frame to `out`, which has room for kSealOverheadBytes
  // more.
  void seal(
      const RelayHeader& header,
      std::span<const std::byte> frame,
      std::byte* out,
      TimePoint now);
  // The frame lies in this object until the next call. Nothing: it was not
  // sealed with this header for this end.
  std::optional<std::span<const std::byte>> open(
      const RelayHeader& header,
      std::span<const std::byte> sealed,
      TimePoint now);

 private:
  RelaySeal(const RelayFlow& flow, bool opener)
      : flow_(flow), opener_(opener) {}

  const RelayFlow flow_;
  const bool opener_;
  std::string secret_;
  RelayKey ours_;
  std::unique_ptr<KeyExchange> exchange_; // until agreed()
  std::unique_ptr<PacketSealer> sealer_;
  std::unique_ptr<PacketOpener> unsealer_;
  uint64_t sealed_ = 0;
  std::vector<std::byte> opened_;
};

} // namespace resilient
