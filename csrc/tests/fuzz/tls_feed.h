#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_input.h"
#include "transport/tls_session.h"

namespace resilient::test {

// Feeds bytes of a network to both ends of an encrypted connection, decided by
// arbitrary bytes. Nothing may crash or grow without bound, and what an end
// opens is what the other one has sealed, from the beginning and without a gap,
// whatever happens to the records on their way.
//
// First byte, modulo 4: 0 or 1: the rest comes to a server or client that has
// said nothing yet, as it is. Else a program of steps on a connection: seal,
// deliver a part, change, drop, repeat, ask for new keys, end.
class TlsFeed : private FuzzInput {
 public:
  // TlsSession must be available().
  explicit TlsFeed(std::span<const uint8_t> input)
      : FuzzInput("TLS feed", input) {}

  void run() {
    const uint8_t mode = byte() % 4;
    const TlsKeys keys = TlsKeys::of("the secret of the two ends of the feed");
    ends_[0].session = TlsSession::client(keys, TlsNonce{});
    ends_[1].session =
        TlsSession::server([keys](std::span<const uint8_t> name) {
          return isTlsNameOf(keys, name)
              ? std::optional(NamedKeys{keys, /*isFirstUse=*/true})
              : std::nullopt;
        });
    if (mode < 2) {
      raw(ends_[mode]);
      return;
    }
    for (int i = 0; i < 4; ++i) { // the handshake, undisturbed
      for (size_t side = 0; side < 2; ++side) {
        take(side);
        deliver(side, ends_[side].wire.size());
      }
    }
    for (const End& end : ends_) {
      require(!end.session->handshaking(), "the handshake does not end");
    }
    while (!input_.empty()) {
      step();
    }
  }
  // Of both ends.
  size_t opened() const {
    return ends_[0].opened + ends_[1].opened;
  }
  bool failed() const {
    return ends_[0].session->failed() || ends_[1].session->failed();
  }

 private:
  struct End {
    std::unique_ptr<TlsSession> session;
    std::vector<std::byte> wire; // sent by it, and not delivered
    size_t sealed = 0, opened = 0, acknowledged = 0;
  };

  // The plaintext of either direction, at a position.
  static std::byte contentAt(size_t side, size_t at) {
    return static_cast<std::byte>((at * 131 + (at >> 8) * 7 + side) & 0xff);
  }

  void raw(End& end) {
    while (!input_.empty() && !end.session->failed() && !end.session->ended()) {
      const std::span<std::byte> room = end.session->input(1 + byte());
      require(!room.empty(), "there is no room for input");
      const size_t n = std::min(room.size(), input_.size());
      std::memcpy(room.data(), input_.data(), n);
      input_ = input_.subspan(n);
      end.session->received(n);
      end.session->proceed();
      require(
          end.session->handshaking() || end.session->failed(),
          "a stranger has ended the handshake");
    }
    end.session->end();
  }

  void take(size_t side) {
    End& end = ends_[side];
    const auto out = end.session->output();
    end.wire.insert(end.wire.end(), out.begin(), out.end());
    end.acknowledged += end.session->sent(out.size());
    require(end.acknowledged <= end.sealed, "more is sent than was sealed");
  }

  // The first bytes of the wire from `side` come to the other end.
  void deliver(size_t side, size_t bytes) {
    End& from = ends_[side];
    End& to = ends_[1 - side];
    bytes = std::min(bytes, from.wire.size());
    std::span<const std::byte> left(from.wire.data(), bytes);
    while (!left.empty() && !to.session->failed() && !to.session->ended()) {
      const std::span<std::byte> room = to.session->input(1 + byte() * 64u);
      require(!room.empty(), "there is no room for input");
      const size_t n = std::min(room.size(), left.size());
      std::memcpy(room.data(), left.data(), n);
      left = left.subspan(n);
      to.session->received(n);
      to.session->proceed();
      open(side);
      require(
          to.session->output().size() <= 256u << 10, "output without bound");
    }
    from.wire.erase(
        from.wire.begin(), from.wire.begin() + static_cast<ptrdiff_t>(bytes));
  }

  void open(size_t side) {
    End& to = ends_[1 - side];
    std::array<std::byte, 3000> piece;
    while (const size_t n = to.session->open(
               piece.data(), 1 + byte() * piece.size() / 256)) {
      for (size_t i = 0; i < n; ++i) {
        require(
            piece[i] == contentAt(side, to.opened + i),
            "other bytes are opened than were sealed");
      }
      to.opened += n;
      require(
          to.opened <= ends_[side].sealed, "more is opened than was sealed");
    }
  }

  void seal(size_t side) {
    End& end = ends_[side];
    const size_t bytes = size_t(byte()) * byte();
    std::vector<std::byte> content(bytes);
    for (size_t i = 0; i < bytes; ++i) {
      content[i] = contentAt(side, end.sealed + i);
    }
    // In parts, as the frames of a path.
    std::vector<iovec> parts;
    for (size_t at = 0; at < bytes;) {
      const size_t n = std::min<size_t>(1 + byte() * 90u, bytes - at);
      parts.push_back({content.data() + at, n});
      at += n;
    }
    end.sealed += end.session->seal(parts);
  }

  void step() {
    const uint8_t what = byte();
    const size_t side = what % 2;
    End& end = ends_[side];
    const auto at = [&] { return (byte() * 256u + byte()) % end.wire.size(); };
    switch (what / 2 % 10) {
      case 0:
      case 1:
        seal(side);
        break;
      case 2:
      case 3:
        take(side);
        deliver(side, byte() * 300u);
        break;
      case 4:
        take(side);
        break;
      case 5:
        if (!end.wire.empty()) {
          end.wire[at()] ^= std::byte{uint8_t(1 + byte() % 255)};
        }
        break;
      case 6: // dropped, from there to the end
        if (!end.wire.empty()) {
          end.wire.resize(at());
        }
        break;
      case 7: // repeated
        if (!end.wire.empty()) {
          const size_t from = at();
          const std::vector<std::byte> copy(
              end.wire.begin() + static_cast<ptrdiff_t>(from), end.wire.end());
          end.wire.insert(end.wire.end(), copy.begin(), copy.end());
        }
        break;
      case 8:
        if (!end.session->failed() && !end.session->ended()) {
          end.session->requestKeyUpdate();
        }
        break;
      case 9:
        byte() % 4 == 0 ? end.session->end() : end.session->close();
        break;
    }
  }

  std::array<End, 2> ends_;
};

} // namespace resilient::test
