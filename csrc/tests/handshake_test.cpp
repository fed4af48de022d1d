#include "transport/handshake.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "tests/check.h"
#include "tests/test_authority.h"
#include "tests/tls_pair.h"
#include "transport/libssl.h"
#include "transport/listener.h"
#include "transport/used_names.h"

namespace resilient {
namespace {

using namespace std::chrono_literals;

// Far beyond what any step takes; a test that reaches it has failed.
constexpr Nanos kPatience = 60s;

HelloNonce nextNonce() {
  static uint8_t count = 0;
  HelloNonce nonce{};
  nonce[0] = ++count;
  return nonce;
}

// Counts the lines that would go to the terminal and keeps it clean.
struct LogCounter {
  std::vector<std::string> lines;
  LogCounter() {
    setLogSink([this](std::string_view line) { lines.emplace_back(line); });
  }
  ~LogCounter() {
    setLogSink({});
  }
};

// A loop with one listener, driven by the test's own thread.
struct World {
  LogCounter log;
  EventLoop loop;
  ListenerConfig config;
  std::unique_ptr<Listener> listener;
  HelloCode decision = HelloCode::kOk;
  std::vector<HelloInfo> peers;
  std::vector<StreamSocket> connections;
  HelloInfo hello;

  World() {
    config.identity.uid.fill(0x22);
    config.identity.eagerBudgetBytes = 4321;
    config.identity.secretOf =
        [](const KeyId& id) -> std::optional<std::string> {
      if (id == keyIdOf("secret")) {
        return "secret";
      }
      return std::nullopt;
    };
    config.identity.keysOf = test::keysOf("secret");
    config.identity.decide = [this](const HelloInfo&, const CertifiedFor&) {
      return decision;
    };
    config.nonce = nextNonce;
    config.onPeer = [this](HelloInfo info, StreamSocket peer, SocketAddress) {
      peers.push_back(info);
      // At once, so that these bytes follow the verdict in one segment.
      if (peer.tls) {
        iovec part{const_cast<char*>("after"), 5};
        CHECK_EQ(peer.tls->seal({&part, 1}), 5u);
        const auto out = peer.tls->output();
        CHECK_EQ(::write(peer.get(), out.data(), out.size()), out.size());
        peer.tls->sent(out.size());
      } else {
        CHECK_EQ(::write(peer.get(), "after", 5), 5);
      }
      connections.push_back(std::move(peer));
      if (awaitsPeer) {
        loop.stop();
      }
    };
    config.onPeerLost = [](HelloInfo) {};
    hello.initiator.fill(0x11);
    hello.acceptor = config.identity.uid;
    hello.connectionIndex = 5;
    hello.initiatorRank = 9;
  }

  void listen() {
    listener = std::make_unique<Listener>(loop, config);
  }

  SocketAddress address(const char* ip = "127.0.0.1") {
    return *SocketAddress::parse(ip, listener->port());
  }

  OutgoingSpec spec(std::vector<SocketAddress> candidates) {
    OutgoingSpec s;
    s.candidates = std::move(candidates);
    s.hello = hello;
    s.nonce = nextNonce;
    s.secret = "secret";
    s.encryption = config.encryption;
    s.attemptTimeout = 20s;
    return s;
  }

  // Until both ends are done. With encryption the caller is first.
  OutgoingResult connect(OutgoingSpec s);
  bool awaitsPeer = false;
  bool bothEnds = true; // else until the caller is
};

// A loop runs only once: each test starts its scenario, calls this, and ends
// it with loop.stop().
void runUntilStopped(EventLoop& loop) {
  bool late = false;
  loop.after(kPatience, [&] {
    late = true;
    loop.stop();
  });
  loop.run();
  CHECK(!late);
}

OutgoingResult World::connect(OutgoingSpec s) {
  OutgoingResult result;
  int calls = 0;
  auto handshake =
      OutgoingHandshake::start(loop, std::move(s), [&](OutgoingResult r) {
        ++calls;
        result = std::move(r);
        awaitsPeer = result.status.ok() && bothEnds && peers.empty();
        if (!awaitsPeer) {
          loop.stop();
        }
      });
  CHECK_EQ(calls, 0);
  runUntilStopped(loop);
  CHECK_EQ(calls, 1);
  return result;
}

SocketAddress closedPort() {
  FileDescriptor fd(
      checkSyscall("socket", ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  auto at = *SocketAddress::parse("127.0.0.1", 0);
  checkSyscall("bind", ::bind(fd.get(), at.raw(), at.rawBytes()));
  return localAddress(fd.get());
}

// Takes connections into the kernel's queue and never says a word.
FileDescriptor silentServer(SocketAddress& at) {
  FileDescriptor fd(
      checkSyscall("socket", ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  at = *SocketAddress::parse("127.0.0.1", 0);
  checkSyscall("bind", ::bind(fd.get(), at.raw(), at.rawBytes()));
  checkSyscall("listen", ::listen(fd.get(), 16));
  at = localAddress(fd.get());
  return fd;
}

FileDescriptor rawConnection(
    const SocketAddress& to,
    const std::string& from = "") {
  FileDescriptor fd(checkSyscall(
      "socket", ::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)));
  if (!from.empty()) {
    const auto at = *SocketAddress::parse(from, 0);
    checkSyscall("bind", ::bind(fd.get(), at.raw(), at.rawBytes()));
  }
  checkSyscall("connect", ::connect(fd.get(), to.raw(), to.rawBytes()));
  return fd;
}

// In plaintext, and with TLS where there is a libssl.
std::vector<Encryption> encryptions() {
  std::vector<Encryption> all{Encryption::kOff};
  if (test::tlsAvailable()) {
    all.push_back(Encryption::kAlways);
  }
  return all;
}

void connectsOver(const char* ip, Encryption encryption) {
  World world;
  world.config.encryption = encryption;
  world.listen();
  if (std::strchr(ip, ':') != nullptr && !world.listener->dualStack()) {
    return; // a machine without IPv6
  }
  OutgoingResult result = world.connect(world.spec({world.address(ip)}));
  CHECK(result.status.ok());
  CHECK_EQ(result.accept.eagerBudgetBytes, 4321);
  CHECK_EQ(result.remote.toString(), world.address(ip).toString());
  CHECK_EQ(world.peers.size(), 1);
  CHECK(world.peers[0].initiator == world.hello.initiator);
  CHECK_EQ(world.peers[0].connectionIndex, 5);
  CHECK_EQ(world.peers[0].initiatorRank, 9);
  // What the peer wrote right after the verdict is still to be read.
  char buffer[16];
  if (encryption == Encryption::kOff) {
    CHECK(!result.socket.tls && !world.connections[0].tls);
    ssize_t n = ::recv(result.socket.get(), buffer, sizeof(buffer), 0);
    CHECK_EQ(n, 5);
  } else {
    TlsSession& tls = *result.socket.tls;
    CHECK(world.connections[0].tls != nullptr);
    // It may have been read together with the verdict.
    auto* const to = reinterpret_cast<std::byte*>(buffer);
    size_t n = tls.open(to, sizeof(buffer));
    if (n == 0) {
      const auto room = tls.input();
      const ssize_t got =
          ::recv(result.socket.get(), room.data(), room.size(), 0);
      CHECK(got > 5);
      tls.received(static_cast<size_t>(got));
      n = tls.open(to, sizeof(buffer));
    }
    CHECK_EQ(n, 5u);
  }
  CHECK_EQ(std::string(buffer, 5), std::string("after"));
  // The accepting side has its options, too.
  int noDelay = 0;
  socklen_t bytes = sizeof(noDelay);
  CHECK_EQ(
      ::getsockopt(
          world.connections[0].get(),
          IPPROTO_TCP,
          TCP_NODELAY,
          &noDelay,
          &bytes),
      0);
  CHECK(noDelay != 0);
  ListenerStats stats = world.listener->stats();
  CHECK_EQ(stats.admitted, 1);
  CHECK_EQ(stats.pending, 0);
  CHECK(world.log.lines.empty());
}

TEST(a_peer_connects_over_either_family) {
  for (const Encryption encryption : encryptions()) {
    for (const char* ip : {"127.0.0.1", "::1"}) {
      connectsOver(ip, encryption);
    }
  }
}

// The first end that has something to read, or is closed.
int readable(const FileDescriptor (&fds)[2]) {
  pollfd polled[2] = {{fds[0].get(), POLLIN, 0}, {fds[1].get(), POLLIN, 0}};
  (void)::poll(polled, 2, -1);
  return polled[0].revents != 0 ? 0 : 1;
}

// Passes on what a caller says until it has been answered so often, and every
// answer.
void passFlights(
    const FileDescriptor& listening,
    const SocketAddress& to,
    int answers) {
  const FileDescriptor fds[2] = {
      FileDescriptor(::accept(listening.get(), nullptr, nullptr)),
      rawConnection(to)};
  bool isAsked = false;
  for (;;) {
    const int i = readable(fds);
    char buffer[4096];
    const ssize_t n = ::recv(fds[i].get(), buffer, sizeof(buffer), 0);
    if (n <= 0) {
      return;
    }
    answers -= i == 1 && isAsked;
    isAsked = i == 0;
    if (i == 1 || answers > 0) {
      (void)!::send(
          fds[1 - i].get(), buffer, static_cast<size_t>(n), MSG_NOSIGNAL);
    }
  }
}

// With that of TCP, the caller waits for two round trips. The end that accepts
// takes nobody for a peer who has not answered.
TEST(with_encryption_a_caller_waits_for_one_answer) {
  if (!test::tlsAvailable()) {
    return;
  }
  World world;
  world.config.encryption = Encryption::kAlways;
  world.listen();
  SocketAddress at;
  const FileDescriptor listening = silentServer(at);
  world.bothEnds = false;
  std::thread between([&] { passFlights(listening, world.address(), 1); });
  OutgoingResult result = world.connect(world.spec({at}));
  result.socket = {}; // ends what stands between
  between.join();
  CHECK(result.status.ok());
  CHECK(result.accept.signer == world.config.identity.uid);
  CHECK(world.peers.empty());
}

// Early data is refused, and said again.
TEST(a_caller_whose_name_may_be_old_connects_all_the_same) {
  if (!test::tlsAvailable()) {
    return;
  }
  World world;
  world.config.encryption = Encryption::kAlways;
  world.config.identity.keysOf = test::keysOf("secret", /*isFirstUse=*/false);
  world.listen();
  const OutgoingResult result = world.connect(world.spec({world.address()}));
  CHECK(result.status.ok());
  CHECK_EQ(world.peers.size(), 1);
}

// --- certificates

// A job with certificates: the listener has that of "there".
struct CertifiedWorld : World {
  test::TestAuthority authority;
  TlsCertificates here{authority.issue("here"), "here", {}};
  TlsCertificates there{authority.issue("there"), "there", {}};
  HandshakeCounters counters;
  std::string caller = "here"; // expected
  int decisions = 0;

  CertifiedWorld() {
    config.encryption = Encryption::kAlways;
    config.certificates = [this] { return &there; };
    config.identity.decide =
        [this](const HelloInfo&, const CertifiedFor& certifiedFor) {
          ++decisions;
          return certifiedFor(caller) ? decision : HelloCode::kCertificate;
        };
    listen();
  }
  OutgoingSpec call(const SocketAddress& at, const std::string& hostName) {
    OutgoingSpec s = spec({at});
    s.certificates = &here;
    s.hostName = hostName;
    s.counters = &counters;
    return s;
  }
};

TEST(with_certificates_the_dialled_end_must_be_the_host_that_is_meant) {
  if (!test::tlsAvailable()) {
    return;
  }
  {
    CertifiedWorld world;
    const auto result = world.connect(world.call(world.address(), "there"));
    CHECK(result.status.ok());
    CHECK(result.socket.tls->isCertified());
    CHECK_EQ(world.decisions, 1);
    CHECK_EQ(world.counters.encrypted, 1u);
  }
  CertifiedWorld world;
  const auto result = world.connect(world.call(world.address(), "another"));
  CHECK_CONTAINS(result.status.message(), "is not for 127.0.0.1 or another");
  CHECK_EQ(world.decisions, 0);
  CHECK_EQ(world.counters.of(TrustFault::kCertificate), 1u);
}

// One more than with the secret alone, as many as in plaintext.
TEST(with_certificates_a_caller_waits_for_two_answers) {
  if (!test::tlsAvailable()) {
    return;
  }
  CertifiedWorld world;
  SocketAddress at;
  const FileDescriptor listening = silentServer(at);
  std::thread between([&] { passFlights(listening, world.address(), 2); });
  OutgoingResult result = world.connect(world.call(at, "there"));
  result.socket = {}; // ends what stands between
  world.connections.clear();
  between.join();
  CHECK(result.status.ok());
}

TEST(a_caller_with_the_certificate_of_another_host_is_refused) {
  if (!test::tlsAvailable()) {
    return;
  }
  CertifiedWorld world;
  world.caller = "elsewhere";
  HandshakeCounters listeners;
  world.config.counters = &listeners;
  world.listen();
  const auto result = world.connect(world.call(world.address(), "there"));
  CHECK(result.failure.verdict == HelloCode::kCertificate);
  CHECK(!result.failure.refusedEverywhere);
  const char* const why = "the caller's certificate is for another host";
  CHECK_CONTAINS(result.status.message(), why);
  CHECK_EQ(world.counters.of(TrustFault::kCertificate), 1u);
  CHECK_EQ(listeners.of(TrustFault::kCertificate), 1u);
  CHECK_EQ(world.log.lines.size(), 1u);
  CHECK_CONTAINS(world.log.lines[0], why);
}

TEST(with_certificates_the_secret_is_needed_too) {
  if (!test::tlsAvailable()) {
    return;
  }
  CertifiedWorld world;
  OutgoingSpec spec = world.call(world.address(), "there");
  spec.secret = "another secret";
  CHECK(!world.connect(std::move(spec)).status.ok());
  CHECK_EQ(world.decisions, 0);
  CHECK_EQ(world.counters.of(TrustFault::kWrongSecret), 1u);
}

TEST(a_caller_without_a_certificate_is_refused) {
  if (!test::tlsAvailable()) {
    return;
  }
  const test::TestAuthority authority;
  const TlsCertificates there(authority.issue("there"), "there", {});
  void* const none = TlsSession::newContext(/*isClient=*/true);
  const auto keys = TlsKeys::of("secret");
  const auto client = TlsSession::client(none, keys, test::freshTlsNonce());
  const auto server = TlsSession::server(
      there.context(/*isClient=*/false), test::keysOf("secret"));
  for (int i = 0; i < 3; ++i) {
    for (auto* const from : {client.get(), server.get()}) {
      test::TlsBytes opened;
      test::deliver(
          from == client.get() ? *server : *client,
          test::takeOutput(*from),
          opened);
    }
  }
  libssl().SSL_CTX_free(none);
  CHECK(server->failed());
  CHECK(server->fault() == TrustFault::kCertificate);
}

// A signature costs as much as hundreds of HMACs, and strangers may call all
// the time.
TEST(with_certificates_a_caller_that_names_no_secret_costs_no_signature) {
  if (!test::tlsAvailable()) {
    return;
  }
  const test::TestAuthority authority;
  const TlsCertificates here(authority.issue("here"), "here", {});
  const auto flightOf = [&](const std::string& secret, bool isFirst) {
    const auto client = TlsSession::client(
        here.context(/*isClient=*/true),
        TlsKeys::of(secret),
        test::freshTlsNonce());
    UsedNames used;
    const auto find = [&](std::span<const uint8_t> name) {
      const bool isNew = used.use(name);
      return isNew ? test::keysOf("secret")(name) : std::nullopt;
    };
    const test::TlsBytes hello = test::takeOutput(*client);
    std::unique_ptr<TlsSession> server;
    for (int i = 0; i < (isFirst ? 1 : 2); ++i) {
      server = TlsSession::server(here.context(/*isClient=*/false), find);
      test::TlsBytes opened;
      test::deliver(*server, hello, opened);
    }
    const test::TlsBytes flight = test::takeOutput(*server);
    test::TlsBytes opened;
    test::deliver(*client, flight, opened);
    CHECK_EQ(client->unknownSecret(), server->unknownSecret());
    CHECK_EQ(server->namedSecret(), !server->unknownSecret());
    return flight.size();
  };
  CHECK(flightOf("secret", true) > 500);
  CHECK(flightOf("another", true) < 10); // an alert
  CHECK(flightOf("secret", false) < 10); // a recording
}

// Ends TLS on both sides with a certificate of its own and copies what is
// inside, until one of the two hangs up.
void standBetween(
    const FileDescriptor& listening,
    const SocketAddress& to,
    const TlsCertificates& own) {
  const FileDescriptor fds[2] = {
      FileDescriptor(::accept(listening.get(), nullptr, nullptr)),
      rawConnection(to)};
  // In truth he would use the caller's name of the secret.
  const std::unique_ptr<TlsSession> sessions[2] = {
      TlsSession::server(
          own.context(/*isClient=*/false), test::keysOf("secret")),
      TlsSession::client(
          own.context(/*isClient=*/true),
          TlsKeys::of("secret"),
          test::freshTlsNonce())};
  std::vector<std::byte> held[2]; // for the other side
  const auto flush = [&](int i) {
    const test::TlsBytes out = test::takeOutput(*sessions[i]);
    (void)!::send(fds[i].get(), out.data(), out.size(), MSG_NOSIGNAL);
  };
  for (;;) {
    for (const int i : {0, 1}) {
      flush(i);
      if (!sessions[i]->handshaking() && !held[1 - i].empty()) {
        const iovec part{held[1 - i].data(), held[1 - i].size()};
        CHECK_EQ(sessions[i]->seal({&part, 1}), held[1 - i].size());
        held[1 - i].clear();
        flush(i);
      }
    }
    const int i = readable(fds);
    const auto room = sessions[i]->input();
    const ssize_t n = ::recv(fds[i].get(), room.data(), room.size(), 0);
    if (n <= 0) {
      return;
    }
    sessions[i]->received(static_cast<size_t>(n));
    sessions[i]->proceed();
    std::byte buffer[512];
    while (const size_t got = sessions[i]->open(buffer, sizeof(buffer))) {
      held[i].insert(held[i].end(), buffer, buffer + got);
    }
  }
}

// It has a certificate that both ends accept, and not the secret.
TEST(nobody_with_a_certificate_alone_stands_between_two_others) {
  if (!test::tlsAvailable()) {
    return;
  }
  CertifiedWorld world;
  const TlsCertificates between(
      world.authority.issue("between"), "between", {});
  SocketAddress at;
  const FileDescriptor listening = silentServer(at);
  std::thread man([&] { standBetween(listening, world.address(), between); });
  auto result = world.connect(world.call(at, "between"));
  result.socket = {}; // ends what stands between
  world.connections.clear();
  man.join();
  CHECK(!result.status.ok());
  CHECK_EQ(world.decisions, 0);
  CHECK_EQ(world.log.lines.size(), 1u);
  CHECK_CONTAINS(world.log.lines[0], "the caller's proof is wrong");
}

// Where a connection must be encrypted, no other one is let in, and no other
// one is made.
TEST(there_is_no_way_back_to_plaintext) {
  if (!test::tlsAvailable()) {
    return;
  }
  for (const bool ofListener : {true, false}) {
    World world;
    world.config.encryption =
        ofListener ? Encryption::kAlways : Encryption::kOff;
    world.listen();
    OutgoingSpec spec = world.spec({world.address()});
    spec.encryption = ofListener ? Encryption::kOff : Encryption::kAlways;
    const OutgoingResult result = world.connect(std::move(spec));
    CHECK(!result.status.ok());
    CHECK(!result.failure.refusedEverywhere);
    CHECK(world.peers.empty());
    CHECK_EQ(world.listener->stats().refused, 1);
    if (ofListener) {
      CHECK(result.failure.verdict == HelloCode::kEncryption);
      CHECK_CONTAINS(result.status.message(), "encrypted connections only");
      CHECK_CONTAINS(world.log.lines.at(0), "TORCH_RESILIENT_ENCRYPTION");
    } else {
      CHECK_CONTAINS(result.status.message(), "closed the connection");
    }
  }
}

// Both ends count the failure by its reason.
TEST(failed_handshakes_are_counted_by_reason) {
  struct Case {
    const char* secret; // of the caller; the listener has "secret"
    Encryption listener, caller;
    // At the listener; at the caller.
    std::optional<TrustFault> there, here;
  };
  constexpr auto kOff = Encryption::kOff, kAlways = Encryption::kAlways;
  constexpr auto kWrong = TrustFault::kWrongSecret;
  std::vector<Case> cases{
      {"secret", kOff, kOff, {}, {}}, {"other", kOff, kOff, kWrong, kWrong}};
  if (test::tlsAvailable()) {
    cases.insert(
        cases.end(),
        {{"secret", kAlways, kAlways, {}, {}},
         {"other", kAlways, kAlways, kWrong, kWrong},
         {"secret",
          kAlways,
          kOff,
          TrustFault::kPlaintext,
          TrustFault::kPlaintext},
         {"secret", kOff, kAlways, TrustFault::kMalformed, {}}});
  }
  for (const Case& c : cases) {
    World world;
    HandshakeCounters there, here;
    world.config.encryption = c.listener;
    world.config.counters = &there;
    world.listen();
    OutgoingSpec spec = world.spec({world.address()});
    spec.secret = c.secret;
    spec.encryption = c.caller;
    spec.counters = &here;
    const OutgoingResult result = world.connect(std::move(spec));
    CHECK_EQ(result.status.ok(), !c.there);
    const auto check = [](const HandshakeCounters& counters,
                          std::optional<TrustFault> fault,
                          bool encrypted,
                          bool done) {
      CHECK_EQ(counters.encrypted, uint64_t(done && encrypted));
      CHECK_EQ(counters.plaintext, uint64_t(done && !encrypted));
      for (size_t i = 0; i < kTrustFaults; ++i) {
        const bool expected = fault && static_cast<size_t>(*fault) == i;
        CHECK_EQ(counters.faults[i], uint64_t(expected));
      }
    };
    const bool encrypted = c.caller == kAlways;
    check(there, c.there, encrypted, !c.there);
    check(here, c.here, encrypted, !c.there);
  }
}

TEST(silent_ends_of_a_handshake_are_counted) {
  World world;
  HandshakeCounters there, here;
  world.config.handshakeTimeout = 50ms;
  world.config.counters = &there;
  world.listen();
  // One that connects and says the beginning of a hello.
  const FileDescriptor caller = rawConnection(world.address());
  CHECK_EQ(::write(caller.get(), "R", 1), 1);
  SocketAddress silent;
  const FileDescriptor server = silentServer(silent);
  OutgoingSpec spec = world.spec({silent, closedPort()});
  spec.attemptTimeout = 500ms;
  spec.counters = &here;
  const OutgoingResult result = world.connect(std::move(spec));
  CHECK(!result.status.ok());
  CHECK_EQ(here.of(TrustFault::kTimeout), 1u);
  CHECK_EQ(there.of(TrustFault::kTimeout), 1u);
}

// A connection that stays on this host needs no encryption, and may have it.
TEST(encryption_between_hosts_leaves_connections_of_one_host_alone) {
  if (!test::tlsAvailable()) {
    return;
  }
  struct Case {
    const char* from;
    Encryption ofCaller;
    bool encrypted;
  };
  for (const Case c :
       {Case{"127.0.0.1", Encryption::kBetweenHosts, false},
        Case{"127.0.0.3", Encryption::kBetweenHosts, true},
        Case{"127.0.0.1", Encryption::kAlways, true}}) {
    World world;
    world.config.encryption = Encryption::kBetweenHosts;
    world.listen();
    OutgoingSpec spec = world.spec({world.address()});
    spec.source = SocketAddress::parse(c.from, 0);
    spec.encryption = c.ofCaller;
    const OutgoingResult result = world.connect(std::move(spec));
    CHECK(result.status.ok());
    CHECK_EQ(result.socket.tls != nullptr, c.encrypted);
    CHECK_EQ(world.connections.at(0).tls != nullptr, c.encrypted);
  }
}

TEST(the_source_address_is_used) {
  World world;
  world.listen();
  OutgoingSpec spec = world.spec({world.address()});
  spec.source = SocketAddress::parse("127.0.0.3", 0);
  OutgoingResult result = world.connect(std::move(spec));
  CHECK(result.status.ok());
  CHECK_EQ(result.local.ip(), std::string("127.0.0.3"));
}

TEST(a_gone_process_is_told_from_a_broken_way) {
  World world;
  OutgoingResult result =
      world.connect(world.spec({closedPort(), closedPort()}));
  CHECK(result.failure.refusedEverywhere);
  CHECK(result.status.code() == StatusCode::kPeerDied);
  CHECK_CONTAINS(result.status.message(), "Connection refused");
  CHECK_CONTAINS(result.status.message(), "; 127.0.0.1:");
}

TEST(no_address_at_all_is_an_error_of_its_own) {
  World world;
  OutgoingResult result = world.connect(world.spec({}));
  CHECK(result.status.code() == StatusCode::kInvalidArgument);
  CHECK(!result.failure.refusedEverywhere);
}

TEST(the_next_address_is_tried_after_a_refused_or_silent_one) {
  World world;
  world.listen();
  SocketAddress silentAt;
  FileDescriptor silent = silentServer(silentAt);
  OutgoingSpec spec = world.spec({closedPort(), silentAt, world.address()});
  spec.attemptTimeout = 1s;
  OutgoingResult result = world.connect(std::move(spec));
  CHECK(result.status.ok());
  CHECK_EQ(result.remote.toString(), world.address().toString());
}

TEST(a_silent_address_is_not_a_dead_peer) {
  World world;
  SocketAddress silentAt;
  FileDescriptor silent = silentServer(silentAt);
  OutgoingSpec spec = world.spec({silentAt, closedPort()});
  spec.attemptTimeout = 50ms;
  OutgoingResult result = world.connect(std::move(spec));
  CHECK(!result.failure.refusedEverywhere);
  CHECK(!result.status.ok());
  CHECK_CONTAINS(result.status.message(), "no end of the handshake in 50 ms");
}

// A server whose queue is full: the kernel drops further SYNs.
TEST(a_lost_syn_fails_the_attempt_early) {
  World world;
  FileDescriptor server(
      checkSyscall("socket", ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  auto at = *SocketAddress::parse("127.0.0.1", 0);
  checkSyscall("bind", ::bind(server.get(), at.raw(), at.rawBytes()));
  checkSyscall("listen", ::listen(server.get(), 0));
  at = localAddress(server.get());
  FileDescriptor first = rawConnection(at);
  OutgoingSpec spec = world.spec({at});
  spec.synTimeout = 20ms;
  OutgoingResult result = world.connect(std::move(spec));
  CHECK(!result.failure.refusedEverywhere);
  CHECK_CONTAINS(result.status.message(), "no answer in 20 ms");
}

// Once it is answered, the handshake has its own time.
TEST(the_timeout_of_the_syn_does_not_limit_the_handshake) {
  World world;
  SocketAddress at;
  FileDescriptor silent = silentServer(at);
  OutgoingSpec spec = world.spec({at});
  spec.synTimeout = 20ms;
  spec.attemptTimeout = 60ms;
  OutgoingResult result = world.connect(std::move(spec));
  CHECK_CONTAINS(result.status.message(), "no end of the handshake in 60 ms");
}

TEST(a_connection_closed_in_the_midst_is_not_a_dead_peer) {
  World world;
  SocketAddress at;
  FileDescriptor server = silentServer(at);
  struct Closer : Handler {
    int listener;
    void onEvents(uint32_t) override {
      FileDescriptor fd;
      SocketAddress remote;
      CHECK_EQ(acceptConnection(listener, fd, remote), 0);
    } // and closes it
  } closer;
  closer.listener = server.get();
  world.loop.add(server.get(), EPOLLIN, &closer);
  OutgoingResult result = world.connect(world.spec({at}));
  CHECK(result.status.code() == StatusCode::kNetwork);
  CHECK(!result.failure.refusedEverywhere);
  CHECK_CONTAINS(
      result.status.message(),
      "the connection stood, then the handshake failed");
}

void refusalsNameTheirReason(Encryption encryption) {
  struct Case {
    HelloCode code;
    StatusCode status;
  };
  for (Case c :
       {Case{HelloCode::kUnknownKey, StatusCode::kNetwork},
        Case{HelloCode::kWrongPeer, StatusCode::kPeerDied},
        Case{HelloCode::kDuplicateConnection, StatusCode::kNetwork},
        Case{HelloCode::kBusy, StatusCode::kNetwork}}) {
    World world;
    world.config.encryption = encryption;
    world.listen();
    OutgoingSpec spec = world.spec({world.address()});
    if (c.code == HelloCode::kUnknownKey) {
      spec.secret = "another";
    } else if (c.code == HelloCode::kWrongPeer) {
      spec.hello.acceptor.fill(0x33);
    } else {
      world.decision = c.code;
    }
    OutgoingResult result = world.connect(std::move(spec));
    // With TLS, the far end can only say that it does not know the secret.
    const bool alert =
        encryption != Encryption::kOff && c.code == HelloCode::kUnknownKey;
    CHECK(result.status.code() == (alert ? StatusCode::kProtocol : c.status));
    CHECK(result.failure.verdict == c.code);
    CHECK_CONTAINS(
        result.status.message(),
        alert ? "does not know this job's secret" : helloCodeText(c.code));
    CHECK(!result.socket);
    CHECK_EQ(result.failure.refusedEverywhere, c.code == HelloCode::kWrongPeer);
    CHECK(world.peers.empty());
    CHECK_EQ(world.listener->stats().refused, 1);
    // A warning for strangers only: members are told to go elsewhere all day.
    CHECK_EQ(
        world.log.lines.size(), c.code == HelloCode::kUnknownKey ? 1u : 0u);
  }
}

TEST(refusals_name_their_reason) {
  for (const Encryption encryption : encryptions()) {
    refusalsNameTheirReason(encryption);
  }
}

// A process that is known to live elsewhere was reached by way of a proxy.
TEST(another_process_proves_a_death_only_where_it_may_be) {
  for (bool mayBeThere : {false, true}) {
    World world;
    world.listen();
    OutgoingSpec spec = world.spec({world.address()});
    spec.hello.acceptor.fill(0x33);
    int asked = 0;
    spec.mayBeAt = [&](const Uid& process, const SocketAddress& at) {
      ++asked;
      CHECK(process == world.config.identity.uid);
      CHECK_EQ(at.toString(), world.address().toString());
      return mayBeThere;
    };
    OutgoingResult result = world.connect(std::move(spec));
    CHECK_EQ(asked, 1);
    CHECK(result.failure.verdict == HelloCode::kWrongPeer);
    CHECK_EQ(result.failure.refusedEverywhere, mayBeThere);
    CHECK(
        result.status.code() ==
        (mayBeThere ? StatusCode::kPeerDied : StatusCode::kNetwork));
  }
}

TEST(giving_up_early_calls_nobody) {
  World world;
  world.listen();
  auto handshake = OutgoingHandshake::start(
      world.loop, world.spec({world.address()}), [](OutgoingResult) {
        std::abort();
      });
  world.loop.post([&] { handshake.reset(); });
  world.loop.after(10ms, [&] { world.loop.stop(); });
  runUntilStopped(world.loop);
  CHECK(world.peers.empty());
}

TEST(the_callback_may_destroy_the_handshake) {
  World world;
  world.listen();
  std::unique_ptr<OutgoingHandshake> handshake;
  bool ok = false;
  handshake = OutgoingHandshake::start(
      world.loop, world.spec({world.address()}), [&](OutgoingResult r) {
        ok = r.status.ok();
        handshake.reset();
        world.loop.stop();
      });
  runUntilStopped(world.loop);
  CHECK(ok);
}

TEST(a_silent_caller_is_dropped_in_time) {
  World world;
  world.config.handshakeTimeout = 20ms;
  world.listen();
  FileDescriptor caller = rawConnection(world.address());
  std::function<void()> poll = [&] {
    if (world.listener->stats().timedOut == 1) {
      world.loop.stop();
    } else {
      world.loop.after(1ms, poll);
    }
  };
  poll();
  runUntilStopped(world.loop);
  char byte;
  CHECK_EQ(::recv(caller.get(), &byte, 1, 0), 0); // closed, without a word
  CHECK_EQ(world.log.lines.size(), 1);
  CHECK_CONTAINS(world.log.lines[0], "no end of the handshake in 20 ms");
}

TEST(a_caller_of_another_protocol_gets_no_answer) {
  World world;
  world.listen();
  FileDescriptor caller = rawConnection(world.address());
  std::string text = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
  CHECK_EQ(::write(caller.get(), text.data(), text.size()), text.size());
  std::function<void()> poll = [&] {
    if (world.listener->stats().refused == 1) {
      world.loop.stop();
    } else {
      world.loop.after(1ms, poll);
    }
  };
  poll();
  runUntilStopped(world.loop);
  char byte;
  CHECK_EQ(::recv(caller.get(), &byte, 1, 0), 0);
}

// Descriptors for both ends of the flood live in this process.
struct RaisedLimit {
  rlimit before{};
  RaisedLimit() {
    checkSyscall("getrlimit", ::getrlimit(RLIMIT_NOFILE, &before));
    rlimit raised = before;
    raised.rlim_cur = std::max<rlim_t>(
        before.rlim_cur, std::min<rlim_t>(before.rlim_max, 4096));
    set(raised.rlim_cur);
  }
  void set(rlim_t limit) {
    rlimit value = before;
    value.rlim_cur = limit;
    checkSyscall("setrlimit", ::setrlimit(RLIMIT_NOFILE, &value));
  }
  ~RaisedLimit() {
    (void)::setrlimit(RLIMIT_NOFILE, &before);
  }
};

TEST(a_thousand_silent_strangers_do_not_keep_a_peer_out) {
  RaisedLimit limit;
  World world;
  world.config.maxPendingHandshakes = 64;
  world.config.handshakeTimeout = 300s; // not what saves us here
  world.listen();
  std::vector<FileDescriptor> strangers;
  OutgoingResult result;
  std::unique_ptr<OutgoingHandshake> handshake;
  // They keep coming, before the peer calls and while it does; the loop runs
  // between them, as it would.
  std::function<void()> flood = [&] {
    for (int i = 0; i < 10 && strangers.size() < 1000; ++i) {
      FileDescriptor fd;
      bool connected;
      CHECK(startConnect(world.address(), {}, SocketOptions(), fd, connected)
                .ok());
      strangers.push_back(std::move(fd));
    }
    if (strangers.size() >= 500 && !handshake) {
      handshake = OutgoingHandshake::start(
          world.loop, world.spec({world.address()}), [&](OutgoingResult r) {
            result = std::move(r);
          });
    }
    CHECK(world.listener->stats().pending <= 64);
    if (world.listener->stats().accepted < 1001) {
      world.loop.after(1ms, flood);
    } else if (world.peers.size() == 1 && result.socket) {
      world.loop.stop();
    } else {
      world.loop.after(1ms, flood);
    }
  };
  flood();
  runUntilStopped(world.loop);
  CHECK(result.status.ok());
  CHECK_EQ(strangers.size(), 1000);
  ListenerStats stats = world.listener->stats();
  // Several at a time.
  CHECK(stats.dropped >= 1000 - 64 && stats.dropped < 1000);
  CHECK(world.log.lines.size() < 50); // each of them would be written
}

// A peer so far away that a thousand strangers come between its first words and
// its proof. A stranger may know the name of the secret, but not the secret.
struct Flood {
  const char* name;
  size_t words; // of a hello, in bytes
  bool manySources;
  bool publishedPeer; // we know the peer's address
};

void peerGetsInThrough(const Flood& flood) {
  constexpr size_t kStrangers = 1000;
  RaisedLimit limit;
  World world;
  world.config.maxPendingHandshakes = 128;
  world.config.handshakeTimeout = 300s; // not what saves us here
  world.config.isMembers = [&](const SocketAddress& at) {
    return flood.publishedPeer && at.ip() == "127.0.0.2";
  };
  world.listen();
  FileDescriptor peer = rawConnection(world.address(), "127.0.0.2");
  ClientHandshake handshake(world.hello, "secret");
  const auto say = [&] {
    std::vector<uint8_t>& out = handshake.output();
    CHECK_EQ(
        ::send(peer.get(), out.data(), out.size(), MSG_NOSIGNAL), out.size());
    out.clear();
  };
  HelloInfo theirs = world.hello;
  theirs.nonce = nextNonce();
  const std::vector<uint8_t> hello = ClientHandshake(theirs, "secret").output();
  say();
  std::vector<FileDescriptor> strangers;
  std::function<void()> step = [&] {
    const ListenerStats stats = world.listener->stats();
    CHECK(stats.pending <= 128);
    if (stats.accepted > strangers.size()) { // the peer was the first
      for (int i = 0; i < 20 && strangers.size() < kStrangers; ++i) {
        const size_t n = strangers.size();
        strangers.push_back(rawConnection(
            world.address(),
            flood.manySources ? "127.1." + std::to_string(n / 250) + "." +
                    std::to_string(1 + n % 250)
                              : "127.0.0.1"));
        CHECK_EQ(
            ::write(strangers.back().get(), hello.data(), flood.words),
            flood.words);
      }
    }
    if (stats.accepted == 1 + kStrangers) {
      uint8_t answer[128];
      const ssize_t n = ::recv(
          peer.get(),
          answer,
          std::min(sizeof(answer), handshake.wanted()),
          MSG_DONTWAIT);
      CHECK(n > 0 || (n < 0 && errno == EAGAIN)); // else it was dropped
      if (n > 0) {
        handshake.receive(answer, static_cast<size_t>(n));
        say();
      }
    }
    if (!world.peers.empty()) {
      world.loop.stop();
    } else {
      world.loop.after(1ms, step);
    }
  };
  step();
  runUntilStopped(world.loop);
  CHECK_EQ(world.listener->stats().admitted, 1);
  CHECK(world.listener->stats().dropped >= kStrangers - 128);
}

TEST(a_peer_far_away_gets_in_through_a_flood) {
  for (const Flood& flood :
       {Flood{"half hellos", 48, false, false},
        Flood{"half hellos from everywhere", 48, true, false},
        Flood{"whole hellos from one place", kHelloBytes, false, false},
        Flood{"whole hellos from everywhere", kHelloBytes, true, true}}) {
    std::cout << flood.name << '\n';
    peerGetsInThrough(flood);
  }
}

TEST(running_out_of_descriptors_neither_spins_nor_lasts) {
  RaisedLimit limit;
  World world;
  world.listen();
  std::vector<FileDescriptor> strangers, fillers;
  uint64_t turnsBefore = 0;
  OutgoingResult first, second;
  std::unique_ptr<OutgoingHandshake> handshake;
  auto begin = [&](OutgoingResult& result, std::function<void()> then) {
    handshake = OutgoingHandshake::start(
        world.loop,
        world.spec({world.address()}),
        [&result, then](OutgoingResult r) {
          result = std::move(r);
          then();
        });
  };
  auto recover = [&] {
    // Paused for 100 ms after each caller: a few turns, not one for each.
    CHECK(world.loop.turns() - turnsBefore < 50);
    CHECK(world.listener->stats().outOfDescriptors >= 1);
    fillers.clear();
    limit.set(limit.before.rlim_cur);
    begin(second, [&] { world.loop.stop(); });
  };
  // A peer first: the undefined behaviour sanitizer opens a pipe to check each
  // type it sees for the first time, and calls it invalid if it cannot.
  begin(first, [&] {
    for (int i = 0; i < 200; ++i) {
      strangers.push_back(rawConnection(world.address()));
      CHECK_EQ(::write(strangers.back().get(), "R", 1), 1);
    }
    // No descriptor number is free from here on.
    FileDescriptor probe(checkSyscall("dup", ::dup(0)));
    limit.set(static_cast<rlim_t>(probe.get()));
    probe.reset();
    for (int fd; (fd = ::dup(0)) >= 0;) {
      fillers.emplace_back(fd);
    }
    turnsBefore = world.loop.turns();
    world.loop.after(300ms, recover);
  });
  runUntilStopped(world.loop);
  CHECK(first.status.ok());
  CHECK(second.status.ok());
}

TEST(a_listener_moves_when_it_can) {
  World world;
  world.config.bindIps = {"127.0.0.1"};
  world.listen();
  const uint16_t port = world.listener->port();
  const SocketAddress there = *SocketAddress::parse("127.0.0.2", port);
  ListenerConfig config = world.config;
  config.bindIps = {"127.0.0.2"};
  config.port = port;
  auto occupant = std::make_unique<Listener>(world.loop, config);
  const Status refused = world.listener->moveTo({"127.0.0.2"});
  CHECK_CONTAINS(refused.message(), "Address already in use");
  occupant.reset();
  CHECK_EQ(world.listener->port(), port);
  std::function<void()> look = [&] {
    FileDescriptor fd(::socket(AF_INET, SOCK_STREAM, 0));
    if (::connect(fd.get(), there.raw(), there.rawBytes()) == 0) {
      world.loop.stop();
    } else {
      world.loop.after(20ms, look);
    }
  };
  look();
  runUntilStopped(world.loop);
}

// Not at all others as well.
TEST(a_listener_of_several_addresses_has_one_port_at_these_only) {
  World world;
  world.config.bindIps = {"127.0.0.2", "127.0.0.3"};
  world.listen();
  const auto connects = [&](const char* ip) {
    const SocketAddress at = world.address(ip);
    FileDescriptor fd(::socket(AF_INET, SOCK_STREAM, 0));
    return ::connect(fd.get(), at.raw(), at.rawBytes()) == 0;
  };
  CHECK(connects("127.0.0.2") && connects("127.0.0.3"));
  CHECK(!connects("127.0.0.1") && !connects("127.0.0.4"));
  OutgoingResult result = world.connect(
      world.spec({world.address("127.0.0.4"), world.address("127.0.0.3")}));
  CHECK(result.status.ok());
  // The second interface has got another address.
  CHECK(world.listener->moveTo({"127.0.0.2", "127.0.0.4"}).ok());
  CHECK(connects("127.0.0.2") && connects("127.0.0.4"));
  CHECK(!connects("127.0.0.3"));
}

TEST(a_busy_port_is_named_with_a_remedy) {
  World world;
  world.listen();
  ListenerConfig second = world.config;
  second.port = world.listener->port();
  try {
    Listener listener(world.loop, second);
    CHECK(false);
  } catch (const StatusError& e) {
    CHECK_CONTAINS(e.what(), "listen on port " + std::to_string(second.port));
    CHECK_CONTAINS(e.what(), "Address already in use");
    CHECK_CONTAINS(e.what(), "another process has that port");
  }
  second.port = 0;
  second.bindIps = {"192.0.2.1"}; // reserved for documentation
  CHECK_THROWS(
      StatusError, "no interface of this host", Listener(world.loop, second));
  second.bindIps = {"nonsense"};
  CHECK_THROWS(StatusError, "not an IP address", Listener(world.loop, second));
}

} // namespace
} // namespace resilient
