#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/options.h"
#include "tests/fuzz/fuzz_input.h"
#include "transport/address.h"
#include "wire/control.h"
#include "wire/record_seal.h"

namespace resilient::test {

// Gives arbitrary bytes to everything that parses a whole message or text:
// control messages, the headers of relayed frames, addresses, records of the
// store, options. Nothing may crash, and what is understood says the same when
// it is written and read again.
//
// First byte: which of them. The rest is the message.
class MessageFeed : private FuzzInput {
 public:
  static constexpr uint8_t kKinds = 15;

  explicit MessageFeed(std::span<const uint8_t> input)
      : FuzzInput("message feed", input) {}

  void run() {
    const uint8_t kind = byte() % kKinds;
    const auto bytes = std::as_bytes(input_);
    switch (kind) {
      case 0:
        understood_ = controlKind(bytes).has_value();
        break;
      case 1:
        again(decodeNotice);
        break;
      case 2:
        again(decodeQuery);
        break;
      case 3:
        again(decodeReport);
        break;
      case 4:
        again(decodePathsLost);
        break;
      case 5:
        again(decodeSharedOffer);
        break;
      case 6:
        again(decodeAddresses);
        break;
      case 7:
        again(decodeDatagramOffer);
        break;
      case 8:
        again(decodeVerbsOffer);
        break;
      case 9:
        again(decodeRelayNote);
        break;
      case 10:
        reasons(bytes);
        break;
      case 11:
        address();
        break;
      case 12:
        record();
        break;
      case 13:
        option();
        break;
      case 14:
        again(decodeArrivals);
        break;
    }
  }
  bool understood() const {
    return understood_;
  }

 private:
  std::string text() const {
    return {reinterpret_cast<const char*>(input_.data()), input_.size()};
  }

  template <class Decode>
  void again(Decode decode) {
    const auto first = decode(std::as_bytes(input_));
    if (!first) {
      return;
    }
    understood_ = true;
    const std::vector<std::byte> written = encode(*first);
    const auto second = decode(written);
    require(second.has_value(), "our own message is not understood");
    require(encode(*second) == written, "a message changes when read again");
  }

  void reasons(std::span<const std::byte> bytes) {
    (void)decodeReason(bytes);
    Residual residual;
    if (decodeResidual(bytes, residual).ok()) {
      understood_ = true;
      Residual second;
      require(
          decodeResidual(
              encodeResidual(residual.parts, residual.ranges), second)
                  .ok() &&
              second.ranges == residual.ranges &&
              second.parts == residual.parts,
          "a residual changes when read again");
    }
    if (const auto ended = decodeBye(bytes)) {
      understood_ = true;
      require(
          decodeBye(encodeBye(*ended)) == ended,
          "a goodbye changes when read again");
    }
    RelayHeader header;
    std::span<const std::byte> frame;
    if (decodeRelay(bytes, header, frame).ok()) {
      understood_ = true;
      std::vector<std::byte> written(bytes.begin(), bytes.end());
      encodeRelay(header, std::span(written).first<kRelayHeaderBytes>());
      RelayHeader second;
      require(
          decodeRelay(written, second, frame).ok() &&
              second.hop == header.hop &&
              second.fromOpener == header.fromOpener &&
              second.flow == header.flow && second.number == header.number &&
              second.delivered == header.delivered,
          "a relay's header changes when read again");
    }
  }

  void address() {
    PeerAddress first;
    if (!PeerAddress::parse(text(), first).ok()) {
      return;
    }
    understood_ = true;
    PeerAddress second;
    require(
        PeerAddress::parse(first.toString(), second).ok(),
        "our own address is not understood");
    require(
        second.toString() == first.toString(),
        "an address changes when read again");
  }

  // No record is genuine but the one that was written.
  void record() {
    static const RecordSeal seal({"the secret of the feed"}, {0, 1, {0}});
    static const std::string genuine = seal.protect("key", "value");
    std::string value;
    const std::string forged = text();
    if (seal.open("key", forged, value).ok()) {
      understood_ = true;
      require(forged == genuine && value == "value", "a record is forged");
    }
    // The genuine one with some bytes changed is nearly right.
    std::string near = genuine;
    for (size_t i = 0; i + 1 < input_.size(); i += 2) {
      near[input_[i] % near.size()] ^= static_cast<char>(input_[i + 1]);
    }
    require(
        seal.open("key", near, value).ok() == (near == genuine),
        "a changed record is taken for genuine");
  }

  void option() {
    const std::vector<OptionInfo>& table = optionTable();
    const OptionInfo& option = table[byte() % table.size()];
    EngineOptions first;
    try {
      first.setFromString(option.name, text());
    } catch (const StatusError&) {
      return;
    }
    understood_ = true;
    if (option.kind == OptionKind::Secret) {
      return; // is never shown
    }
    const std::string shown = first.getAsString(option.name);
    EngineOptions second;
    second.setFromString(option.name, shown);
    require(
        second.getAsString(option.name) == shown,
        "an option changes when read again");
    try {
      first.validate();
    } catch (const StatusError&) {
    }
  }

  bool understood_ = false;
};

} // namespace resilient::test
