#include "transport/relay_seal.h"

#include <array>
#include <bit>
#include <string_view>
#include <utility>

#include "base/sha256.h"
#include "wire/frame.h"
#include "wire/hello.h"

namespace resilient {
namespace {

template <typename T>
std::string_view bytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// All parts have one length each, so their borders are clear.
SealKey deriveKey(
    const std::string& secret,
    const std::string& agreed,
    const RelayFlow& flow,
    const RelayKey& opener,
    const RelayKey& other,
    bool ofOpener) {
  HmacSha256 mac(secret);
  mac.update(std::string_view("torch_resilient relayed flow"))
      .update(std::string_view(ofOpener ? "o" : "a"))
      .update(agreed)
      .update(bytesOf(opener.publicKey))
      .update(bytesOf(other.publicKey))
      .update(bytesOf(flow.opener))
      .update(bytesOf(flow.other))
      .update(bytesOf(flow.number));
  return std::bit_cast<SealKey>(mac.finish());
}

// The frame is sealed together with this. The relay changes the hop.
std::array<std::byte, kRelayHeaderBytes> contextOf(RelayHeader header) {
  header.hop = RelayHop::kToRelay;
  std::array<std::byte, kRelayHeaderBytes> bytes;
  encodeRelay(header, bytes);
  return bytes;
}

} // namespace

std::unique_ptr<RelaySeal> RelaySeal::make(
    const RelayFlow& flow,
    bool opener,
    std::string secret,
    std::string& why) {
  std::unique_ptr<RelaySeal> made(new RelaySeal(flow, opener));
  made->exchange_ = KeyExchange::make(why);
  if (!made->exchange_) {
    return nullptr;
  }
  made->ours_.secret = std::bit_cast<uint64_t>(keyIdOf(secret));
  made->ours_.publicKey = made->exchange_->ours();
  made->secret_ = std::move(secret);
  return made;
}

Status RelaySeal::agree(const RelayKey& theirs, TimePoint now) {
  const auto agreed = exchange_->agree(theirs.publicKey);
  if (!agreed || theirs.secret != ours_.secret) {
    return Status(
        StatusCode::kProtocol, "the far end of a relayed flow has a bad key");
  }
  const auto key = [&](bool ofOpener) {
    return deriveKey(
        secret_,
        *agreed,
        flow_,
        opener_ ? ours_ : theirs,
        opener_ ? theirs : ours_,
        ofOpener);
  };
  std::string why;
  sealer_ = PacketSealer::make(key(opener_), SealLimits(), now, why);
  unsealer_ = PacketOpener::make(key(!opener_), why);
  if (!sealer_ || !unsealer_) {
    sealer_.reset();
    return Status(StatusCode::kNetwork, why);
  }
  exchange_.reset();
  secret_.clear();
  return Status();
}

void RelaySeal::seal(
    const RelayHeader& header,
    std::span<const std::byte> frame,
    std::byte* out,
    TimePoint now) {
  sealer_->seal(++sealed_, frame, out, now, contextOf(header));
}

std::optional<std::span<const std::byte>> RelaySeal::open(
    const RelayHeader& header,
    std::span<const std::byte> sealed,
    TimePoint now) {
  opened_.resize(sealed.size());
  uint64_t number = 0;
  std::span<const std::byte> frame;
  const bool ours = unsealer_->open(
      sealed, number, opened_.data(), frame, now, contextOf(header));
  return ours && frame.size() >= kFrameHeaderBytes ? std::optional(frame)
                                                   : std::nullopt;
}

} // namespace resilient
