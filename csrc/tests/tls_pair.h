#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"
#include "transport/tls_session.h"

namespace resilient::test {

// Tests that need libssl fail without it, unless the environment says that this
// is known: they must not pass in silence for want of a library.
inline bool tlsAvailable() {
  std::string why;
  if (TlsSession::available(why)) {
    return true;
  }
  const char* const known = std::getenv("RESILIENT_TEST_WITHOUT_LIBSSL");
  if (known == nullptr || *known == '\0') {
    throw Failure(
        why +
        ": install it (libssl3), or set RESILIENT_TEST_WITHOUT_LIBSSL=1 to "
        "skip what needs it");
  }
  std::printf("skipped: %s\n", why.c_str());
  return false;
}

using TlsBytes = std::vector<std::byte>;

inline TlsSession::FindKeys keysOf(
    const std::string& secret,
    bool isFirstUse = true) {
  return [named = NamedKeys{TlsKeys::of(secret), isFirstUse}](
             std::span<const uint8_t> name) {
    return isTlsNameOf(named.keys, name) ? std::optional(named) : std::nullopt;
  };
}

inline TlsNonce freshTlsNonce() {
  TlsNonce nonce;
  fillRandom(nonce.data(), nonce.size());
  return nonce;
}

// A client whose first flight takes these bytes along.
inline std::unique_ptr<TlsSession> earlyClient(
    const std::string& secret,
    const TlsBytes& early) {
  const auto* const p = reinterpret_cast<const uint8_t*>(early.data());
  return TlsSession::client(
      TlsKeys::of(secret), freshTlsNonce(), {p, early.size()});
}

inline TlsBytes tlsBytes(std::string_view text) {
  const auto* const p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

// Gives `to` the bytes, as far as it uses them; what it opens goes to `opened`.
inline void
deliver(TlsSession& to, std::span<const std::byte> bytes, TlsBytes& opened) {
  while (!bytes.empty() && !to.failed() && !to.ended()) {
    const std::span<std::byte> room = to.input();
    CHECK(!room.empty()); // all before was used
    const size_t n = std::min(room.size(), bytes.size());
    std::memcpy(room.data(), bytes.data(), n);
    bytes = bytes.subspan(n);
    to.received(n);
    to.proceed();
    TlsBytes piece(5000);
    while (const size_t got = to.open(piece.data(), piece.size())) {
      opened.insert(
          opened.end(),
          piece.begin(),
          piece.begin() + static_cast<ptrdiff_t>(got));
    }
  }
}

// The output, taken as if it had been sent.
inline TlsBytes takeOutput(TlsSession& from) {
  const auto out = from.output();
  TlsBytes bytes(out.begin(), out.end());
  from.sent(bytes.size());
  return bytes;
}

// Two ends in memory.
struct TlsPair {
  explicit TlsPair(
      const std::string& secret = "the secret of the job",
      const std::string& ofServer = "the secret of the job")
      : client(TlsSession::client(TlsKeys::of(secret), freshTlsNonce())),
        server(TlsSession::server(keysOf(ofServer))) {}

  // Moves all output, in pieces of at most `piece` bytes, until there is none.
  // `onWire` sees each and may change it.
  void exchange(
      size_t piece = SIZE_MAX,
      const std::function<void(bool fromClient, TlsBytes&)>& onWire = {}) {
    for (bool moved = true; moved;) {
      moved = false;
      for (const bool fromClient : {true, false}) {
        TlsSession& from = fromClient ? *client : *server;
        TlsSession& to = fromClient ? *server : *client;
        TlsBytes bytes = takeOutput(from);
        moved |= !bytes.empty();
        if (onWire && !bytes.empty()) {
          onWire(fromClient, bytes);
        }
        for (size_t at = 0; at < bytes.size(); at += piece) {
          const size_t n = std::min(piece, bytes.size() - at);
          deliver(
              to,
              std::span(bytes).subspan(at, n),
              fromClient ? atServer : atClient);
        }
      }
    }
  }
  bool open() const {
    return !client->handshaking() && !server->handshaking() &&
        !client->failed() && !server->failed();
  }
  // Seals all of it, and exchanges.
  void send(bool fromClient, const TlsBytes& what, size_t piece = SIZE_MAX) {
    TlsSession& from = fromClient ? *client : *server;
    for (size_t at = 0; at < what.size();) {
      const iovec part{
          const_cast<std::byte*>(what.data()) + at, what.size() - at};
      const size_t n = from.seal({&part, 1});
      CHECK(n != 0);
      at += n;
      exchange(piece);
    }
  }

  std::unique_ptr<TlsSession> client, server;
  TlsBytes atClient, atServer; // opened
};

} // namespace resilient::test
