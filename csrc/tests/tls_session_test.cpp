#include "transport/tls_session.h"

#include <dlfcn.h>
#include <malloc.h>

#include <algorithm>
#include <set>

#include "tests/tls_pair.h"
#include "wire/hello.h"

namespace resilient::test {
namespace {

const std::string kSecret = "the secret of the job";

TlsBytes content(size_t n, uint64_t seed = 1) {
  Prng prng(seed + n);
  TlsBytes bytes(n);
  for (std::byte& b : bytes) {
    b = static_cast<std::byte>(prng.next());
  }
  return bytes;
}

bool holds(const TlsBytes& all, const void* part, size_t bytes) {
  const auto* const p = static_cast<const std::byte*>(part);
  return std::search(all.begin(), all.end(), p, p + bytes) != all.end();
}

bool holds(const TlsBytes& all, std::string_view part) {
  return holds(all, part.data(), part.size());
}

TlsPair openPair() {
  TlsPair pair;
  pair.exchange();
  CHECK(pair.open());
  return pair;
}

// One flight of sealed data from the client, still to be delivered.
TlsBytes sealed(TlsSession& from, const TlsBytes& what) {
  const iovec part{const_cast<std::byte*>(what.data()), what.size()};
  CHECK_EQ(from.seal({&part, 1}), what.size());
  return takeOutput(from);
}

TEST(tls_carries_bytes_both_ways_whatever_the_pieces) {
  if (!tlsAvailable()) {
    return;
  }
  for (const size_t piece : {size_t(1), size_t(7), size_t(1460), SIZE_MAX}) {
    TlsPair pair;
    pair.exchange(piece);
    CHECK(pair.open());
    for (const size_t n : {1u, 5u, 96u, 16'383u, 16'384u, 16'385u, 100'000u}) {
      if (piece == 1 && n > 20'000) {
        continue;
      }
      for (const bool fromClient : {true, false}) {
        const TlsBytes what = content(n);
        pair.atClient.clear();
        pair.atServer.clear();
        pair.send(fromClient, what, piece);
        CHECK((fromClient ? pair.atServer : pair.atClient) == what);
      }
    }
    CHECK(pair.open());
  }
}

// Small parts share records; large ones need no copy, and both keep the order.
TEST(tls_seals_parts_in_order) {
  if (!tlsAvailable()) {
    return;
  }
  forSeeds(50, [](uint64_t seed) {
    Prng prng(seed);
    TlsPair pair = openPair();
    TlsBytes all;
    for (int round = 0; round < 10; ++round) {
      std::vector<TlsBytes> parts;
      std::vector<iovec> places;
      for (uint64_t i = 1 + prng.below(8); i > 0; --i) {
        parts.push_back(
            content(prng.chance(0.5) ? prng.below(200) : prng.below(40'000)));
      }
      for (TlsBytes& part : parts) {
        places.push_back({part.data(), part.size()});
      }
      const size_t taken = pair.client->seal(places);
      size_t left = taken;
      for (const TlsBytes& part : parts) {
        const size_t n = std::min(left, part.size());
        all.insert(
            all.end(), part.begin(), part.begin() + static_cast<ptrdiff_t>(n));
        left -= n;
      }
      CHECK_EQ(left, 0u);
      pair.exchange(1 + prng.below(3000));
    }
    CHECK(pair.atServer == all);
  });
}

TEST(tls_ends_with_different_secrets_name_the_cause) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair(kSecret, "the secret of another job");
  pair.exchange();
  for (const TlsSession* end : {pair.client.get(), pair.server.get()}) {
    CHECK(end->failed());
    CHECK(end->unknownSecret());
    CHECK(!end->namedSecret());
  }
  CHECK_CONTAINS(pair.client->status().message(), "does not know this job's");
  CHECK_CONTAINS(pair.server->status().message(), "belongs to another job");
}

// Who has recorded a name has no key to go with it.
TEST(tls_a_name_without_its_key_does_not_pass) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  pair.server = TlsSession::server([](std::span<const uint8_t>) {
    return std::optional(
        NamedKeys{TlsKeys::of("the secret of another job"), true});
  });
  pair.exchange();
  CHECK(pair.server->namedSecret());
  CHECK(pair.server->failed());
  CHECK(pair.client->failed());
}

TEST(tls_names_of_a_secret_tell_nothing_of_it) {
  const TlsKeys keys = TlsKeys::of(kSecret);
  std::set<TlsName> seen;
  for (int i = 0; i < 100; ++i) {
    const TlsName name = tlsNameOf(keys, freshTlsNonce());
    CHECK(isTlsNameOf(keys, name));
    CHECK(!isTlsNameOf(TlsKeys::of("the secret of the Job"), name));
    CHECK(seen.insert(name).second);
    for (size_t bit = 0; bit < 8 * name.size(); bit += 7) {
      TlsName other = name;
      other[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      CHECK(!isTlsNameOf(keys, other));
    }
    CHECK(!isTlsNameOf(keys, std::span(name).first(name.size() - 1)));
  }
  CHECK(keys.key != keys.naming);
}

// The settings that give forward secrecy, as they stand on the wire: no older
// version, no key exchange without X25519, and X25519 alone.
TEST(tls_offers_nothing_weaker) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  TlsBytes hello;
  pair.exchange(SIZE_MAX, [&](bool fromClient, TlsBytes& bytes) {
    if (fromClient && hello.empty()) {
      hello = bytes;
    }
  });
  CHECK(pair.open());
  using namespace std::string_view_literals;
  CHECK(holds(hello, "\x00\x2b\x00\x03\x02\x03\x04"sv)); // supported_versions
  CHECK(holds(hello, "\x00\x2d\x00\x02\x01\x01"sv)); // psk_dhe_ke
  CHECK(holds(hello, "\x00\x0a\x00\x04\x00\x02\x00\x1d"sv)); // x25519
  CHECK(!holds(hello, "\x00\x23\x00\x00"sv)); // session_ticket
  CHECK(!holds(hello, "\x00\x2a\x00\x00"sv)); // early_data
  CHECK(
      pair.client->cipher() == "TLS_AES_128_GCM_SHA256" ||
      pair.client->cipher() == "TLS_CHACHA20_POLY1305_SHA256");
  CHECK_EQ(pair.client->cipher(), pair.server->cipher());
}

TEST(tls_a_capture_shows_neither_content_nor_secret) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  pair.client = earlyClient(kSecret, tlsBytes("payload payload"));
  TlsBytes wire;
  const auto record = [&](bool, TlsBytes& bytes) {
    wire.insert(wire.end(), bytes.begin(), bytes.end());
  };
  pair.exchange(SIZE_MAX, record);
  const TlsBytes what = tlsBytes(std::string(3000, 'z') + "payload payload");
  for (TlsSession* end : {pair.client.get(), pair.server.get()}) {
    const iovec part{const_cast<std::byte*>(what.data()), what.size()};
    CHECK_EQ(end->seal({&part, 1}), what.size());
    pair.exchange(SIZE_MAX, record);
  }
  CHECK(pair.atClient == what);
  CHECK_EQ(pair.atServer.size(), what.size() + 15); // the early data
  CHECK(!holds(wire, "zzzzzzzzzzzzzzzz"));
  CHECK(!holds(wire, "payload payload"));
  const TlsKeys keys = TlsKeys::of(kSecret);
  CHECK(!holds(wire, kSecret));
  CHECK(!holds(wire, keys.key.data(), 8));
  CHECK(!holds(wire, keys.naming.data(), 8));
  const KeyId id = keyIdOf(kSecret);
  CHECK(!holds(wire, id.data(), id.size()));
}

TEST(tls_tells_an_end_from_a_cut) {
  if (!tlsAvailable()) {
    return;
  }
  for (const bool said : {true, false}) {
    TlsPair pair = openPair();
    pair.send(true, tlsBytes("last words"));
    if (said) {
      pair.client->close();
      pair.exchange();
    }
    pair.server->end();
    CHECK(pair.atServer == tlsBytes("last words"));
    CHECK_EQ(pair.server->ended(), said);
    CHECK_EQ(pair.server->failed(), !said);
    if (!said) {
      CHECK(pair.server->status().code() == StatusCode::kNetwork);
      CHECK_CONTAINS(pair.server->status().message(), "was cut");
    }
  }
  TlsPair early;
  early.server->end();
  CHECK(early.server->failed());
}

// Any bit of a record of data, its header included.
TEST(tls_notices_every_changed_bit) {
  if (!tlsAvailable()) {
    return;
  }
  constexpr size_t kBytes = 40;
  for (size_t bit = 0; bit < 8 * (kBytes + TlsSession::kRecordOverheadBytes);
       ++bit) {
    TlsPair pair = openPair();
    TlsBytes bytes = sealed(*pair.client, content(kBytes));
    CHECK_EQ(bytes.size(), kBytes + TlsSession::kRecordOverheadBytes);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    // Behind it, what a longer length would take for its end.
    bytes.resize(bytes.size() + 70'000);
    deliver(*pair.server, bytes, pair.atServer);
    CHECK(pair.server->failed());
    CHECK(pair.atServer.empty());
  }
}

// Nor is a record lost, repeated, moved or turned round unnoticed.
TEST(tls_notices_records_that_are_missing_repeated_or_moved) {
  if (!tlsAvailable()) {
    return;
  }
  for (const std::vector<int>& order :
       {std::vector{0, 0}, std::vector{1, 0}, std::vector{1}}) {
    TlsPair pair = openPair();
    const TlsBytes records[] = {
        sealed(*pair.client, content(100)), sealed(*pair.client, content(90))};
    for (const int which : order) {
      deliver(*pair.server, records[which], pair.atServer);
    }
    CHECK(pair.server->failed());
    CHECK_EQ(pair.atServer.size(), order[0] == 0 ? 100u : 0u);
  }
  TlsPair pair = openPair();
  deliver(*pair.client, sealed(*pair.client, content(100)), pair.atClient);
  CHECK(pair.client->failed());
  CHECK(pair.atClient.empty());
}

// A handshake in which one bit was changed fails. Only the version in the
// header of the first records is for nobody: receivers ignore it (RFC 8446,
// 5.1).
TEST(tls_a_changed_handshake_does_not_open) {
  if (!tlsAvailable()) {
    return;
  }
  size_t opened = 0, tries = 0;
  for (const bool ofClient : {true, false}) {
    for (size_t bit = 0;; bit += 3) {
      TlsPair pair;
      bool done = false, beyond = false;
      pair.exchange(SIZE_MAX, [&](bool fromClient, TlsBytes& bytes) {
        if (fromClient == ofClient && !done) {
          done = true;
          beyond = bit / 8 >= bytes.size();
          if (!beyond) {
            bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
          }
        }
      });
      if (beyond) {
        break;
      }
      ++tries;
      const size_t at = bit / 8;
      if (at == 1 || at == 2) {
        opened += pair.open();
        continue;
      }
      // A length that has grown makes its reader wait for more.
      CHECK(!pair.open());
    }
  }
  CHECK(tries > 1000);
  CHECK(opened <= 12);
}

// The server has the client's first words before it answers, and the client has
// the server's with its part of the handshake.
TEST(tls_early_data_saves_a_round_trip) {
  if (!tlsAvailable()) {
    return;
  }
  for (const size_t piece : {size_t(1), size_t(100), SIZE_MAX}) {
    const TlsBytes hello = content(96), answer = content(168);
    const TlsBytes more = content(50);
    const auto client = earlyClient(kSecret, hello);
    const auto server = TlsSession::server(keysOf(kSecret));
    TlsBytes atServer, atClient;
    const auto pass = [&](TlsSession& to, const TlsBytes& flight) {
      for (size_t at = 0; at < flight.size(); at += piece) {
        const size_t n = std::min(piece, flight.size() - at);
        deliver(
            to,
            std::span(flight).subspan(at, n),
            &to == server.get() ? atServer : atClient);
      }
    };
    CHECK(client->handshaking());
    pass(*server, takeOutput(*client));
    CHECK(server->isEarly());
    CHECK(atServer == hello);
    TlsBytes flight = takeOutput(*server);
    const TlsBytes early = sealed(*server, answer);
    flight.insert(flight.end(), early.begin(), early.end());
    pass(*client, flight);
    CHECK(atClient == answer);
    CHECK_EQ(client->takenEarly(), hello.size());
    CHECK_EQ(client->takenEarly(), 0u);
    // The client's part of the handshake, with data behind it.
    flight = takeOutput(*client);
    const TlsBytes data = sealed(*client, more);
    flight.insert(flight.end(), data.begin(), data.end());
    atServer.clear();
    pass(*server, flight);
    CHECK(!server->handshaking() && !server->failed() && !server->isEarly());
    CHECK(atServer == more);
    CHECK(server->exportKey("label", "") == client->exportKey("label", ""));
  }
}

// The handshake goes on, and the client sends it again.
void takesNoEarlyData(TlsPair& pair) {
  pair.exchange();
  CHECK(pair.open());
  CHECK(pair.atServer.empty());
  CHECK_EQ(pair.client->takenEarly(), 0u);
  pair.send(true, tlsBytes("again"));
  CHECK(pair.atServer == tlsBytes("again"));
}

// It could be a recording if a name may have been used before.
TEST(tls_early_data_needs_a_new_name) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  pair.client = earlyClient(kSecret, tlsBytes("early"));
  pair.server = TlsSession::server(keysOf(kSecret, /*isFirstUse=*/false));
  takesNoEarlyData(pair);
}

// A server without instructions for AES chooses ChaCha20, and early data was
// sealed with AES.
TEST(tls_early_data_needs_the_first_choice_of_suites) {
  if (!tlsAvailable()) {
    return;
  }
  const std::string aes = "TLS_AES_128_GCM_SHA256";
  const std::string chaCha = "TLS_CHACHA20_POLY1305_SHA256";
  const bool aesIsFirst = openPair().client->cipher() == aes;
  TlsPair pair;
  pair.client = earlyClient(kSecret, tlsBytes("early"));
  pair.server->setSuites((aesIsFirst ? chaCha : aes).c_str());
  takesNoEarlyData(pair);
  CHECK(pair.client->cipher() == (aesIsFirst ? chaCha : aes));
}

TEST(tls_notices_changed_early_data) {
  if (!tlsAvailable()) {
    return;
  }
  const TlsBytes early = content(96);
  const size_t record = early.size() + TlsSession::kRecordOverheadBytes;
  for (size_t bit = 0; bit < 8 * record; ++bit) {
    TlsPair pair;
    pair.client = earlyClient(kSecret, early);
    TlsBytes flight = takeOutput(*pair.client);
    const size_t at = flight.size() - record + bit / 8;
    flight[at] ^= static_cast<std::byte>(1 << bit % 8);
    deliver(*pair.server, flight, pair.atServer);
    CHECK(pair.atServer.empty());
    pair.exchange();
    CHECK(!pair.open());
  }
}

TEST(tls_takes_little_early_data) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  pair.client = earlyClient(kSecret, content(TlsSession::kEarlyBytes));
  pair.exchange();
  CHECK_EQ(pair.atServer.size(), TlsSession::kEarlyBytes);
  CHECK(pair.open());
}

// Both flights of a client, sent again to the same server: the server's part is
// another, and so is the proof that it wants.
TEST(tls_a_recorded_client_does_not_pass_again) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  TlsBytes client;
  pair.exchange(SIZE_MAX, [&](bool fromClient, TlsBytes& bytes) {
    if (fromClient) {
      client.insert(client.end(), bytes.begin(), bytes.end());
    }
  });
  CHECK(pair.open());
  const auto again = TlsSession::server(keysOf(kSecret));
  TlsBytes opened;
  deliver(*again, client, opened);
  CHECK(again->namedSecret());
  CHECK(again->failed());
}

TEST(tls_exports_one_key_to_both_ends) {
  if (!tlsAvailable()) {
    return;
  }
  const TlsPair pair = openPair(), other = openPair();
  const auto key = pair.client->exportKey("label", "context");
  CHECK(key == pair.server->exportKey("label", "context"));
  CHECK(key != pair.client->exportKey("label", "another"));
  CHECK(key != pair.client->exportKey("another", "context"));
  CHECK(key != other.client->exportKey("label", "context"));
  const auto early = TlsSession::server(keysOf(kSecret));
  CHECK_THROWS(StatusError, "derive", early->exportKey("label", ""));
}

// A key update is a record of its own of 27 bytes.
TEST(tls_changes_its_key_after_so_many_records) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair = openPair();
  pair.client->setRecordsPerKey(3);
  pair.server->setRecordsPerKey(5);
  for (const bool fromClient : {true, false}) {
    size_t updates = 0;
    TlsBytes all;
    for (size_t i = 0; i < 30; ++i) {
      const TlsBytes what = content(100, i);
      all.insert(all.end(), what.begin(), what.end());
      const iovec part{const_cast<std::byte*>(what.data()), what.size()};
      CHECK_EQ((fromClient ? pair.client : pair.server)->seal({&part, 1}), 100);
      pair.exchange(SIZE_MAX, [&](bool, TlsBytes& bytes) {
        updates += bytes.size() == 122 + 27;
        CHECK(bytes.size() == 122 || bytes.size() == 122 + 27);
      });
    }
    CHECK_EQ(updates, fromClient ? 9u : 5u);
    CHECK((fromClient ? pair.atServer : pair.atClient) == all);
  }
}

// The far end can read a record only when all of it has left, and may
// acknowledge nothing that it cannot have read.
TEST(tls_counts_what_has_left_by_whole_records) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair = openPair();
  const TlsBytes what = content(3 * TlsSession::kRecordBytes);
  const iovec part{const_cast<std::byte*>(what.data()), what.size()};
  CHECK_EQ(pair.client->seal({&part, 1}), what.size());
  CHECK_EQ(pair.client->seal({&part, 1}), 0u); // only into empty output
  const size_t whole =
      TlsSession::kRecordBytes + TlsSession::kRecordOverheadBytes;
  CHECK_EQ(pair.client->output().size(), 3 * whole);
  CHECK_EQ(pair.client->sent(1), 0u);
  CHECK_EQ(pair.client->sent(whole - 2), 0u);
  CHECK_EQ(pair.client->sent(1), TlsSession::kRecordBytes);
  CHECK_EQ(pair.client->sent(2 * whole), 2 * TlsSession::kRecordBytes);
  CHECK(pair.client->output().empty());
}

// Hundreds of connections may stand at a time, and few of them have something
// to send.
TEST(tls_an_idle_session_takes_little_memory) {
  if (!tlsAvailable()) {
    return;
  }
  const auto used = [] {
    const auto all = ::mallinfo2();
    return all.uordblks + all.hblkhd;
  };
  std::vector<std::unique_ptr<TlsPair>> pairs;
  const TlsBytes data(1u << 20);
  const auto add = [&] {
    pairs.push_back(std::make_unique<TlsPair>());
    TlsPair& pair = *pairs.back();
    pair.exchange();
    pair.send(true, data);
    pair.send(false, data);
    pair.atClient = TlsBytes();
    pair.atServer = TlsBytes();
  };
  add(); // and what all have in common
  constexpr size_t kPairs = 20;
  pairs.reserve(1 + kPairs);
  const size_t before = used();
  for (size_t i = 0; i < kPairs; ++i) {
    add();
  }
  // Sanitizers have an allocator of their own, which does not tell.
  CHECK(used() - before < kPairs * 2 * (80u << 10));
}

TEST(tls_says_that_the_far_end_answers_in_plaintext) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair;
  TlsBytes opened;
  deliver(*pair.client, tlsBytes("RSLC...."), opened);
  CHECK(pair.client->failed());
  CHECK_CONTAINS(pair.client->status().message(), "encryption is off");
}

// Random bytes, alone or in place of some of a real conversation: an end fails
// or waits for more, and opens nothing that was not sealed for it.
TEST(tls_survives_random_bytes) {
  if (!tlsAvailable()) {
    return;
  }
  forSeeds(500, [](uint64_t seed) {
    Prng prng(seed);
    TlsPair pair;
    if (prng.chance(0.5)) {
      pair.exchange();
      CHECK(pair.open());
    }
    const bool toClient = prng.chance(0.5);
    TlsSession& victim = toClient ? *pair.client : *pair.server;
    for (uint64_t i = 1 + prng.below(5); i > 0; --i) {
      TlsBytes bytes = content(1 + prng.below(3000), seed + i);
      bytes[0] = static_cast<std::byte>(20 + prng.below(4));
      if (bytes.size() > 5) {
        bytes[1] = std::byte(3);
        bytes[2] = std::byte(3);
        bytes[3] = static_cast<std::byte>(prng.below(2));
      }
      deliver(victim, bytes, toClient ? pair.atClient : pair.atServer);
    }
    CHECK(pair.atClient.empty() && pair.atServer.empty());
    CHECK(!pair.open() || !victim.failed());
  });
}

// A peer that wants a new key with every record, and reads no answer.
TEST(tls_gives_up_a_peer_that_makes_it_answer_without_end) {
  if (!tlsAvailable()) {
    return;
  }
  TlsPair pair = openPair();
  size_t most = 0;
  for (int i = 0; i < 20'000 && !pair.server->failed(); ++i) {
    pair.client->requestKeyUpdate();
    const iovec part{const_cast<char*>("x"), 1};
    CHECK_EQ(pair.client->seal({&part, 1}), 1u);
    deliver(*pair.server, takeOutput(*pair.client), pair.atServer);
    most = std::max(most, pair.server->output().size());
  }
  CHECK(pair.server->failed());
  CHECK(most < 200'000);
}

// --- servers of somebody else

// A TLS server with a certificate that it has made itself, by OpenSSL's own
// defaults.
class Stranger {
 public:
  explicit Stranger(long maxVersion) {
    for (const char* name : {"libssl.so.3", "libssl.so.1.1", "libssl.so"}) {
      library_ = library_ != nullptr ? library_ : ::dlopen(name, RTLD_NOW);
    }
    CHECK(library_ != nullptr);
    void* const context =
        call<void*>("SSL_CTX_new", call<const void*>("TLS_server_method"));
    constexpr int kCtrlMaxVersion = 124, kEd25519 = 1087;
    call<long>(
        "SSL_CTX_ctrl", context, kCtrlMaxVersion, maxVersion, (void*)nullptr);
    const unsigned char seed[32] = {1, 2, 3};
    void* const key = call<void*>(
        "EVP_PKEY_new_raw_private_key",
        kEd25519,
        (void*)nullptr,
        (const unsigned char*)seed,
        sizeof(seed));
    void* const certificate = call<void*>("X509_new");
    call<int>("X509_set_version", certificate, 2L);
    for (const char* name : {"X509_getm_notBefore", "X509_getm_notAfter"}) {
      const bool after = std::strstr(name, "After") != nullptr;
      call<void*>(
          "X509_gmtime_adj",
          call<void*>(name, certificate),
          after ? 86'400L : -86'400L);
    }
    CHECK_EQ(call<int>("X509_set_pubkey", certificate, key), 1);
    CHECK(call<int>("X509_sign", certificate, key, (const void*)nullptr) > 0);
    CHECK_EQ(call<int>("SSL_CTX_use_certificate", context, certificate), 1);
    CHECK_EQ(call<int>("SSL_CTX_use_PrivateKey", context, key), 1);
    ssl_ = call<void*>("SSL_new", context);
    in_ = call<void*>("BIO_new", call<const void*>("BIO_s_mem"));
    out_ = call<void*>("BIO_new", call<const void*>("BIO_s_mem"));
    call<void>("SSL_set_bio", ssl_, in_, out_);
    call<void>("X509_free", certificate);
    call<void>("EVP_PKEY_free", key);
    call<void>("SSL_CTX_free", context);
  }
  ~Stranger() {
    call<void>("SSL_free", ssl_);
    call<void>("ERR_clear_error");
  }
  // Its answer.
  TlsBytes take(const TlsBytes& bytes) {
    call<int>(
        "BIO_write",
        in_,
        (const void*)bytes.data(),
        static_cast<int>(bytes.size()));
    call<int>("SSL_accept", ssl_);
    TlsBytes answer(10'000);
    const int n = call<int>(
        "BIO_read",
        out_,
        (void*)answer.data(),
        static_cast<int>(answer.size()));
    answer.resize(static_cast<size_t>(std::max(n, 0)));
    return answer;
  }

 private:
  template <typename Result, typename... Arguments>
  Result call(const char* name, Arguments... arguments) {
    auto* const f =
        reinterpret_cast<Result (*)(Arguments...)>(::dlsym(library_, name));
    CHECK(f != nullptr);
    return f(arguments...);
  }

  void* library_ = nullptr;
  void *ssl_ = nullptr, *in_ = nullptr, *out_ = nullptr;
};

// A certificate is no proof: only the job's secret is.
TEST(tls_a_client_takes_no_certificate_in_place_of_the_secret) {
  if (!tlsAvailable()) {
    return;
  }
  Stranger stranger(0x0304);
  TlsPair pair;
  const TlsBytes answer = stranger.take(takeOutput(*pair.client));
  CHECK(answer.size() > 300); // its certificate is there
  deliver(*pair.client, answer, pair.atClient);
  CHECK(pair.client->failed());
  CHECK_CONTAINS(pair.client->status().message(), "certificate verify failed");
}

TEST(tls_a_client_takes_no_older_version) {
  if (!tlsAvailable()) {
    return;
  }
  Stranger stranger(0x0303);
  TlsPair pair;
  deliver(*pair.client, stranger.take(takeOutput(*pair.client)), pair.atClient);
  CHECK(pair.client->failed());
}

} // namespace
} // namespace resilient::test
