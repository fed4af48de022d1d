#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_input.h"
#include "wire/hello.h"

namespace resilient::test {

// Feeds bytes of a network to both ends of a handshake, decided by arbitrary
// bytes. Nothing may crash or grow without bound, and an end that says that it
// has met the other one has heard every byte as it was said.
//
// First byte, modulo 5: 0 or 1: the rest comes to a server or client that has
// said nothing yet, as it is. Else a program of steps: deliver a part, change,
// drop, repeat, insert; 3 is inside TLS, where no proof follows, and 4 in a
// channel.
class HelloFeed : private FuzzInput {
 public:
  explicit HelloFeed(std::span<const uint8_t> input)
      : FuzzInput("hello feed", input) {}

  void run() {
    const uint8_t mode = byte() % 5;
    ServerIdentity identity;
    identity.uid.fill(2);
    identity.eagerBudgetBytes = 1u << 20;
    identity.secretOf = [](const KeyId& id) {
      return id == keyIdOf(kSecret) ? std::optional<std::string>(kSecret)
                                    : std::nullopt;
    };
    identity.decide = [](const HelloInfo&, const CertifiedFor&) {
      return HelloCode::kOk;
    };
    HelloInfo info;
    info.initiator.fill(1);
    info.acceptor = identity.uid;
    info.nonce.fill(3);
    HelloNonce nonce;
    nonce.fill(4);
    ClientHandshake client(info, kSecret, /*insideTls=*/mode == 3);
    ServerHandshake server(identity, nonce, HelloEndpoint{});
    if (mode == 3) {
      server.setInsideTls();
    }
    if (mode == 4) {
      const std::array<std::byte, 32> channel{};
      client.bindTo(channel);
      server.bindTo(channel);
    }
    ends_ = {{{client, {}}, {server, {}}}};
    if (mode < 2) {
      End& end = ends_[1 - mode];
      end.wire.assign(input_.begin(), input_.end());
      deliver(end, SIZE_MAX);
      require(
          end.handshake.state() != Handshake::State::kDone,
          "a stranger has passed for a member");
    } else {
      while (!input_.empty()) {
        step();
      }
      take(0);
      take(1);
      deliver(ends_[0], SIZE_MAX);
      deliver(ends_[1], SIZE_MAX);
    }
    // Inside TLS the records answer for the bytes.
    if (client.state() == Handshake::State::kDone && mode != 3) {
      require(server.authenticated(), "the client is done before the server");
      require(client.accepted().signer == identity.uid, "another signer");
      require(
          client.accepted().eagerBudgetBytes == identity.eagerBudgetBytes,
          "the verdict has been changed");
    }
    if (server.authenticated() && mode != 3) {
      info.keyId = keyIdOf(kSecret);
      require(server.info() == info, "the hello has been changed");
    }
    done_ = client.state() == Handshake::State::kDone;
    failed_ = client.state() == Handshake::State::kFailed ||
        server.state() == Handshake::State::kFailed;
  }
  bool done() const {
    return done_;
  }
  bool failed() const {
    return failed_;
  }

 private:
  static constexpr const char* kSecret = "the secret of the feed";
  static constexpr size_t kMaxMessage = 4096;

  struct End {
    Handshake& handshake;
    std::vector<uint8_t> wire; // on its way to this end
  };

  void take(size_t from) {
    std::vector<uint8_t>& output = ends_[from].handshake.output();
    std::vector<uint8_t>& wire = ends_[1 - from].wire;
    wire.insert(wire.end(), output.begin(), output.end());
    output.clear();
  }

  // As a socket does: no more than is wanted, in pieces.
  void deliver(End& to, size_t bytes) {
    bytes = std::min(bytes, to.wire.size());
    size_t at = 0;
    while (at < bytes && to.handshake.wanted() != 0) {
      require(to.handshake.wanted() <= kMaxMessage, "it waits for too much");
      const size_t n =
          std::min({bytes - at, to.handshake.wanted(), size_t(1) + byte()});
      to.handshake.receive(to.wire.data() + at, n);
      at += n;
      require(
          to.handshake.output().size() <= kMaxMessage, "output without bound");
    }
    to.wire.erase(
        to.wire.begin(), to.wire.begin() + static_cast<ptrdiff_t>(at));
  }

  void step() {
    const uint8_t what = byte();
    const size_t side = what % 2;
    std::vector<uint8_t>& wire = ends_[side].wire;
    const auto at = [&] {
      return wire.begin() + static_cast<ptrdiff_t>(byte() % wire.size());
    };
    switch (what / 2 % 8) {
      case 0:
      case 1:
      case 2:
        take(1 - side);
        deliver(ends_[side], byte());
        break;
      case 3:
        take(1 - side);
        break;
      case 4:
        if (!wire.empty()) {
          *at() ^= static_cast<uint8_t>(1 + byte() % 255);
        }
        break;
      case 5: // dropped, from there to the end
        if (!wire.empty()) {
          wire.erase(at(), wire.end());
        }
        break;
      case 6: // repeated
        if (!wire.empty()) {
          const std::vector<uint8_t> copy(at(), wire.end());
          wire.insert(wire.end(), copy.begin(), copy.end());
        }
        break;
      case 7:
        wire.insert(wire.begin(), byte());
        break;
    }
    if (wire.size() > 4 * kMaxMessage) {
      wire.resize(kMaxMessage);
    }
  }

  std::vector<End> ends_; // client, server
  bool done_ = false, failed_ = false;
};

} // namespace resilient::test
