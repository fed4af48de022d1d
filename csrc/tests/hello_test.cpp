#include "wire/hello.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient {
namespace {

using Bytes = std::vector<uint8_t>;
using State = Handshake::State;

std::string hex(const Bytes& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (uint8_t b : bytes) {
    text += digits[b >> 4];
    text += digits[b & 15];
  }
  return text;
}

// Bytes first, first + 1, ...
template <size_t n>
std::array<uint8_t, n> counting(uint8_t first) {
  std::array<uint8_t, n> a;
  for (size_t i = 0; i < n; ++i) {
    a[i] = static_cast<uint8_t>(first + i);
  }
  return a;
}

const char* const kSecret = "correct horse battery staple";

struct World {
  int decisions = 0;
  HelloCode decision = HelloCode::kOk;
  ServerIdentity identity;
  HelloInfo info;

  World() {
    identity.uid = counting<16>(0x40);
    identity.eagerBudgetBytes = 0x1122334455667788;
    identity.secretOf = [](const KeyId& id) -> std::optional<std::string> {
      if (id == keyIdOf(kSecret)) {
        return kSecret;
      }
      return std::nullopt;
    };
    identity.decide = [this](const HelloInfo&, const CertifiedFor&) {
      ++decisions;
      return decision;
    };
    info.initiator = counting<16>(0x20);
    info.acceptor = identity.uid;
    info.connectionIndex = 3;
    info.pathsWanted = 4;
    info.initiatorRank = 7;
    info.eagerBudgetBytes = 0x0102030405060708;
    info.nonce = counting<32>(0x60);
  }
  ClientHandshake client(const std::string& secret = kSecret) const {
    return ClientHandshake(info, secret);
  }
  ServerHandshake server(uint8_t nonce = 0xa0) const {
    return ServerHandshake(
        identity, counting<32>(nonce), {counting<16>(0xc0), 0x7348});
  }
};

Bytes take(Handshake& from) {
  return std::exchange(from.output(), {});
}

// Hands over what `from` wants to say; returns it.
Bytes pass(Handshake& from, Handshake& to) {
  Bytes message = take(from);
  to.receive(message.data(), message.size());
  return message;
}

struct Exchange {
  Bytes hello, challenge, proof, accept;
};

Exchange talk(ClientHandshake& client, ServerHandshake& server) {
  Exchange e;
  e.hello = pass(client, server);
  e.challenge = pass(server, client);
  e.proof = pass(client, server);
  e.accept = pass(server, client);
  return e;
}

TEST(a_handshake_ends_with_both_sides_knowing_the_other) {
  World world;
  auto client = world.client();
  auto server = world.server();
  Exchange e = talk(client, server);
  CHECK(client.state() == State::kDone);
  CHECK(server.state() == State::kDone);
  CHECK(server.authenticated());
  CHECK_EQ(world.decisions, 1);
  HelloInfo expected = world.info;
  expected.keyId = keyIdOf(kSecret);
  CHECK(server.info() == expected);
  CHECK(client.accepted().code == HelloCode::kOk);
  CHECK_EQ(client.accepted().eagerBudgetBytes, world.identity.eagerBudgetBytes);
  CHECK(client.accepted().signer == world.identity.uid);
  CHECK(
      client.accepted().reachedAt == HelloEndpoint{counting<16>(0xc0), 0x7348});
  CHECK_EQ(e.hello.size(), kHelloBytes);
  CHECK_EQ(e.challenge.size(), kChallengeBytes);
  CHECK_EQ(e.proof.size(), kProofBytes);
  CHECK_EQ(e.accept.size(), kAcceptBytes);
}

// Inside TLS one round trip is enough: both ends are proved already.
TEST(inside_tls_the_verdict_follows_the_challenge) {
  for (const HelloCode code : {HelloCode::kOk, HelloCode::kBusy}) {
    World world;
    world.decision = code;
    ClientHandshake client(world.info, kSecret, /*insideTls=*/true);
    auto server = world.server();
    server.setInsideTls();
    CHECK_EQ(pass(client, server).size(), kHelloBytes);
    CHECK_EQ(pass(server, client).size(), kChallengeBytes + kAcceptBytes);
    CHECK(take(client).empty());
    CHECK(server.authenticated());
    CHECK_EQ(world.decisions, 1);
    CHECK(client.accepted().code == code);
    CHECK(client.accepted().signer == world.identity.uid);
    CHECK_EQ(
        client.accepted().eagerBudgetBytes, world.identity.eagerBudgetBytes);
    const State expected =
        code == HelloCode::kOk ? State::kDone : State::kFailed;
    CHECK(client.state() == expected);
    CHECK(server.state() == expected);
  }
}

// Who skips its proof without TLS does not get in.
TEST(only_tls_takes_the_place_of_a_proof) {
  World world;
  ClientHandshake client(world.info, kSecret, /*insideTls=*/true);
  auto server = world.server();
  pass(client, server);
  CHECK_EQ(pass(server, client).size(), kChallengeBytes);
  CHECK(take(client).empty());
  CHECK(server.state() == State::kRunning);
  CHECK(!server.authenticated());
  CHECK_EQ(world.decisions, 0);
}

// A man in the middle who has a channel to each end and passes on what they
// say. The channel takes the place of a challenge: one round trip is enough.
TEST(proofs_hold_for_one_channel_only) {
  const auto ours = counting<32>(0x10), other = counting<32>(0x90);
  for (const bool isSame : {true, false}) {
    World world;
    auto client = world.client();
    auto server = world.server();
    client.bindTo(std::as_bytes(std::span(ours)));
    server.bindTo(std::as_bytes(std::span(isSame ? ours : other)));
    CHECK_EQ(pass(client, server).size(), kHelloBytes + kProofBytes);
    CHECK(server.authenticated() == isSame);
    CHECK_EQ(world.decisions, isSame ? 1 : 0);
    const Bytes answers = pass(server, client);
    if (isSame) {
      CHECK_EQ(answers.size(), kChallengeBytes + kAcceptBytes);
      CHECK(client.state() == State::kDone);
      CHECK(server.state() == State::kDone);
    } else {
      CHECK(answers.empty());
      CHECK(server.fault() == TrustFault::kWrongSecret);
    }
  }
}

// The end of the channel that was called may be the one without the secret.
TEST(in_a_channel_the_server_proves_itself_too) {
  const auto channel = counting<32>(0x10);
  for (const size_t changed :
       {size_t{0}, kChallengeBytes - 1, kChallengeBytes + kAcceptBytes - 1}) {
    World world;
    auto client = world.client();
    auto server = world.server();
    client.bindTo(std::as_bytes(std::span(channel)));
    server.bindTo(std::as_bytes(std::span(channel)));
    pass(client, server);
    Bytes answers = take(server);
    answers.at(changed) ^= 1;
    client.receive(answers.data(), answers.size());
    CHECK(client.state() == State::kFailed);
  }
}

TEST(plaintext_is_refused_where_it_is_not_enough) {
  World world;
  auto client = world.client();
  auto server = world.server();
  server.refusePlaintext();
  pass(client, server);
  pass(server, client);
  CHECK(client.state() == State::kFailed);
  CHECK(client.accepted().code == HelloCode::kEncryption);
  CHECK_CONTAINS(client.status().message(), "encrypted connections only");
  CHECK(server.state() == State::kFailed);
  CHECK_CONTAINS(server.status().message(), "TORCH_RESILIENT_ENCRYPTION");
  CHECK(!server.authenticated());
  CHECK_EQ(world.decisions, 0);
  // A stranger does not even learn that.
  auto stranger = world.client("another secret of somebody");
  auto again = world.server();
  again.refusePlaintext();
  pass(stranger, again);
  pass(again, stranger);
  CHECK(stranger.accepted().code == HelloCode::kUnknownKey);
}

// docs/wire_handshake.md holds the same bytes. The proofs in it were also
// computed with another implementation of HMAC (Python's hmac).
TEST(the_bytes_on_the_wire_are_the_documented_ones) {
  World world;
  auto client = world.client();
  auto server = world.server();
  Exchange e = talk(client, server);
  CHECK_EQ(
      hex(e.hello),
      std::string(
          "52534c480100600061ddb3b79b97ff37202122232425262728292a2b2c2d2e2f"
          "404142434445464748494a4b4c4d4e4f03000400070000000807060504030201"
          "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"));
  CHECK_EQ(
      hex(e.challenge),
      std::string(
          "52534c430100580000000000000000008877665544332211a0a1a2a3a4a5a6a7"
          "a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfa723690524b6787b"
          "e9c564ffd61d7b051f363396e3f4beb4eea29a8d3f82209a"));
  CHECK_EQ(
      hex(e.proof),
      std::string(
          "52534c50010028007847e267a8ef71412b7e6bcd14b66a8c3e263bddca74ecf4"
          "484a60fe51828444"));
  CHECK_EQ(
      hex(e.accept),
      std::string(
          "52534c41010050000000487300000000404142434445464748494a4b4c4d4e4f"
          "c0c1c2c3c4c5c6c7c8c9cacbcccdcecf3fe8d21c06c17e29697e7b72ba925911"
          "9a9c8da73e3c388ec27939588cd7b554"));
}

TEST(torn_input_makes_no_difference) {
  World world;
  auto client = world.client();
  auto server = world.server();
  Handshake* from = &client;
  Handshake* to = &server;
  size_t moved = 0;
  while (client.state() == State::kRunning) {
    Bytes message = take(*from);
    CHECK(!message.empty());
    for (uint8_t b : message) {
      CHECK(to->wanted() > 0);
      to->receive(&b, 1);
      ++moved;
    }
    std::swap(from, to);
  }
  CHECK(client.state() == State::kDone);
  CHECK(server.state() == State::kDone);
  CHECK_EQ(moved, kHelloBytes + kChallengeBytes + kProofBytes + kAcceptBytes);
}

TEST(wanted_never_reaches_past_the_handshake) {
  World world;
  auto client = world.client();
  auto server = world.server();
  pass(client, server);
  pass(server, client);
  CHECK_EQ(client.wanted(), kAcceptBytes);
  pass(client, server);
  pass(server, client);
  CHECK_EQ(client.wanted(), 0);
  CHECK_EQ(server.wanted(), 0);
  uint8_t extra = 0;
  client.receive(&extra, 1);
  CHECK(client.state() == State::kFailed);
  CHECK(client.status().code() == StatusCode::kInternal);
}

// Every bit of every message: nobody may end up connected by changed bytes.
TEST(a_flipped_bit_anywhere_is_noticed) {
  size_t sizes[] = {kHelloBytes, kChallengeBytes, kProofBytes, kAcceptBytes};
  for (size_t which = 0; which < 4; ++which) {
    for (size_t bit = 0; bit < 8 * sizes[which]; ++bit) {
      World world;
      auto client = world.client();
      auto server = world.server();
      Handshake* from = &client;
      Handshake* to = &server;
      for (size_t step = 0; step < 4; ++step) {
        Bytes message = take(*from);
        if (step == which) {
          CHECK_EQ(message.size(), sizes[which]);
          message[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        }
        to->receive(message.data(), message.size());
        std::swap(from, to);
      }
      CHECK(client.state() != State::kDone);
      if (which < 3) {
        // The server took nobody in; a changed verdict is the client's loss.
        CHECK(server.state() != State::kDone);
        CHECK_EQ(world.decisions, 0);
        CHECK(!server.authenticated());
      }
    }
  }
}

TEST(a_recorded_client_replayed_against_a_new_nonce_fails) {
  World world;
  auto client = world.client();
  auto server = world.server(0xa0);
  Exchange e = talk(client, server);
  CHECK_EQ(world.decisions, 1);
  auto again = world.server(0xa1);
  again.receive(e.hello.data(), e.hello.size());
  CHECK(again.state() == State::kRunning);
  again.receive(e.proof.data(), e.proof.size());
  CHECK(again.state() == State::kFailed);
  CHECK(again.status().code() == StatusCode::kProtocol);
  CHECK(!again.authenticated());
  CHECK_EQ(world.decisions, 1); // it was never asked
}

TEST(a_recorded_server_replayed_to_a_new_client_fails) {
  World world;
  auto client = world.client();
  auto server = world.server();
  Exchange e = talk(client, server);
  world.info.nonce = counting<32>(0x61);
  auto fresh = world.client();
  fresh.receive(e.challenge.data(), e.challenge.size());
  CHECK(fresh.state() == State::kFailed);
}

TEST(a_proof_sent_back_as_the_other_sides_fails) {
  World world;
  auto client = world.client();
  auto server = world.server();
  pass(client, server);
  Bytes challenge = take(server);
  // The server's own proof in a message of the client's form.
  Bytes reflected(kProofBytes);
  const uint8_t header[8] = {'R', 'S', 'L', 'P', 1, 0, kProofBytes, 0};
  std::copy_n(header, 8, reflected.begin());
  std::copy_n(challenge.end() - 32, 32, reflected.begin() + 8);
  server.receive(reflected.data(), reflected.size());
  CHECK(server.state() == State::kFailed);
  CHECK_EQ(world.decisions, 0);
}

TEST(a_stranger_with_another_secret_learns_only_a_code) {
  World world;
  auto client = world.client("another secret");
  auto server = world.server();
  pass(client, server);
  CHECK(server.state() == State::kFailed);
  Bytes answer = server.output();
  CHECK_EQ(answer.size(), kChallengeBytes);
  CHECK_EQ(answer[8], static_cast<int>(HelloCode::kUnknownKey));
  for (size_t i = 9; i < answer.size(); ++i) {
    CHECK_EQ(answer[i], 0);
  }
  pass(server, client);
  CHECK(client.state() == State::kFailed);
  CHECK(client.accepted().code == HelloCode::kUnknownKey);
  CHECK_EQ(world.decisions, 0);
}

// An id that matches by chance, or a liar that copied it.
TEST(the_right_key_id_without_the_secret_gets_nowhere) {
  World world;
  auto client = world.client();
  world.identity.secretOf = [](const KeyId&) -> std::optional<std::string> {
    return "wrong";
  };
  auto server = world.server();
  pass(client, server);
  pass(server, client);
  CHECK(client.state() == State::kFailed);
  CHECK(client.status().code() == StatusCode::kProtocol);
  CHECK(client.output().empty()); // and it has not shown its own proof
}

TEST(every_verdict_reaches_the_client) {
  for (HelloCode code : {HelloCode::kDuplicateConnection, HelloCode::kBusy}) {
    World world;
    world.decision = code;
    auto client = world.client();
    auto server = world.server();
    talk(client, server);
    CHECK(client.state() == State::kFailed);
    CHECK(server.state() == State::kFailed);
    CHECK(client.accepted().code == code);
    CHECK(server.verdict() == code);
    CHECK(client.status().code() == StatusCode::kNetwork);
    CHECK_CONTAINS(client.status().message(), helloCodeText(code));
  }
  World world;
  world.info.acceptor = counting<16>(0x41); // somebody else
  auto client = world.client();
  auto server = world.server();
  talk(client, server);
  CHECK(client.accepted().code == HelloCode::kWrongPeer);
  CHECK(client.status().code() == StatusCode::kNetwork);
  CHECK(client.accepted().signer == world.identity.uid);
  CHECK_EQ(client.accepted().reachedAt.port, 0x7348);
  CHECK_EQ(world.decisions, 0);
}

// Only an ACCEPT is signed.
TEST(a_challenge_says_nothing_about_processes) {
  for (HelloCode code :
       {HelloCode::kDuplicateConnection,
        HelloCode::kWrongPeer,
        HelloCode::kBusy}) {
    World world;
    auto client = world.client();
    auto server = world.server();
    pass(client, server);
    Bytes challenge = take(server);
    challenge[8] = static_cast<uint8_t>(code);
    client.receive(challenge.data(), challenge.size());
    CHECK(client.state() == State::kFailed);
    CHECK(client.status().code() == StatusCode::kProtocol);
    CHECK(client.accepted().code == HelloCode::kOk);
  }
}

// A member that answers in the name of another has the job's secret, too.
TEST(only_the_process_that_was_asked_for_can_accept) {
  World world, other;
  other.identity.uid = counting<16>(0x41);
  auto client = world.client();
  auto server = world.server();
  Bytes hello = pass(client, server);
  Bytes challenge = pass(server, client);
  Bytes proof = pass(client, server);
  Bytes accept = take(server);
  accept.resize(kAcceptBytes - sizeof(Digest));
  std::copy_n(other.identity.uid.begin(), 16, accept.begin() + 16);
  const Digest signature = HmacSha256(kSecret)
                               .update(std::string_view("resilient accept"))
                               .update(hello.data(), hello.size())
                               .update(challenge.data(), challenge.size())
                               .update(proof.data(), proof.size())
                               .update(accept.data(), accept.size())
                               .finish();
  accept.insert(accept.end(), signature.begin(), signature.end());
  client.receive(accept.data(), accept.size());
  CHECK(client.state() == State::kFailed);
  CHECK(client.status().code() == StatusCode::kProtocol);
  CHECK_CONTAINS(client.status().message(), "was not asked for");
}

TEST(another_version_is_named_on_both_sides) {
  World world;
  auto client = world.client();
  auto server = world.server();
  Bytes hello = take(client);
  hello[4] = 9;
  hello[6] = 200; // versions may have lengths of their own
  server.receive(hello.data(), 8);
  CHECK(server.state() == State::kFailed);
  CHECK_CONTAINS(server.status().message(), "version 9");
  CHECK_CONTAINS(server.status().message(), "version 1");
  Bytes answer = take(server);
  CHECK_EQ(answer.size(), kChallengeBytes);
  answer[4] = 9; // as that other version would have said it
  client.receive(answer.data(), answer.size());
  CHECK(client.state() == State::kFailed);
  CHECK(client.accepted().code == HelloCode::kVersion);
  CHECK_CONTAINS(client.status().message(), "version 9");
}

TEST(what_is_no_hello_gets_no_answer) {
  for (const char* text :
       {"GET / HTTP/1.1\r\n", "SSH-2.0-OpenSSH", "RSLC...."}) {
    World world;
    auto server = world.server();
    server.receive(text, strlen(text));
    CHECK(server.state() == State::kFailed);
    CHECK(server.output().empty());
  }
}

TEST(wrong_lengths_are_refused) {
  for (int length : {0, 8, 95, 97, 0xffff}) {
    World world;
    auto client = world.client();
    auto server = world.server();
    Bytes hello = take(client);
    hello[6] = static_cast<uint8_t>(length);
    hello[7] = static_cast<uint8_t>(length >> 8);
    server.receive(hello.data(), hello.size());
    CHECK(server.state() == State::kFailed);
    CHECK(server.output().empty());
  }
}

TEST(noise_never_gets_in) {
  test::forSeeds(2000, [](uint64_t seed) {
    Prng random(seed);
    World world;
    auto client = world.client();
    auto server = world.server();
    Bytes hello = take(client);
    Bytes noise(random.below(300));
    for (uint8_t& b : noise) {
      b = static_cast<uint8_t>(random.next());
    }
    // Noise alone, or after a good beginning.
    size_t keep = random.below(hello.size() + 1);
    server.receive(hello.data(), keep);
    for (size_t at = 0; at < noise.size();) {
      size_t n = std::min<size_t>(noise.size() - at, 1 + random.below(40));
      server.receive(noise.data() + at, n);
      client.receive(noise.data() + at, n);
      at += n;
    }
    CHECK(server.state() != State::kDone);
    CHECK(client.state() != State::kDone);
    CHECK_EQ(world.decisions, 0);
  });
}

} // namespace
} // namespace resilient
