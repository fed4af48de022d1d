#include "delegate/engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <set>
#include <sstream>

#include "base/file.h"
#include "base/log.h"
#include "base/random.h"
#include "base/syscall.h"
#include "delegate/engine_control.h"
#include "delegate/group_impl.h"
#include "delegate/resolver.h"
#include "path/congestion_choice.h"
#include "transport/gpu_way.h"
#include "transport/verbs_system.h"

namespace resilient {
namespace {

// State of the process about its engine, apart from the engine. Leaked
// on purpose: threads may outlive static destruction.
struct Process {
  std::mutex mutex;
  // Guarded by mutex.
  std::weak_ptr<Engine> engine;
  std::optional<EngineOptions> defaults;
  struct Fault {
    uint64_t id;
    std::string rule;
    uint64_t planId = 0; // in the running engine's plan
  };
  std::vector<Fault> faults;
  uint64_t lastFault = 0;
  int64_t faultStep = 0;
  std::atomic<bool> forkedChild{false};
};

Process& process() {
  static Process* p = [] {
    auto* made = new Process;
    // The child of a fork has none of our threads. It must not use their
    // connections either: the group says so when it is called there.
    pthread_atfork(nullptr, nullptr, [] {
      // The mutex is not taken: a thread that did not come along may have held
      // it at the fork, and would hold it for ever.
      if (auto engine = process().engine.lock()) {
        process().forkedChild = true;
        // Its descriptors are shared with the parent: as long as the child
        // holds them, peers would not notice the parent's death.
        engine->closeDescriptorsInChild();
        // Its destructor must not run here: it would wait for threads.
        new std::shared_ptr<Engine>(engine);
      }
    });
    return made;
  }();
  return *p;
}

constexpr size_t kSecretFileBytesMax = 4096;
// The present secret, and one that ranks may still use, or use already, while
// they are restarted one by one.
constexpr size_t kSecretFilesMax = 2;

// Processes of the job that no group here knows may be as many as the ranks of
// its largest group, all of which may have formed the next one before us, and
// a few that have come in place of others.
constexpr size_t kMoreUnknown = 16;

// Callers may take this part of the descriptors that the process may have: the
// program needs some itself.
constexpr size_t kDescriptorShare = 4;

// How long the end of the engine waits for RDMA devices to let go of memory.
constexpr Nanos kLetGo = std::chrono::seconds(1);

size_t maxPending(const EngineOptions& options) {
  const auto asked = static_cast<size_t>(options.max_pending_handshakes);
  rlimit files{};
  return ::getrlimit(RLIMIT_NOFILE, &files) != 0
      ? asked
      : std::min(asked, std::max<size_t>(1, files.rlim_cur / kDescriptorShare));
}

// A line end at the end does not belong to the secret: `openssl rand` prints
// one.
// Guarded by engineTakesASecretFromAFileThatOnlyItsUserReads.
std::string readSecretFile(const std::string& path) {
  const auto fail = [&](const std::string& why) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_SECRET_FILE=" + path + ": " + why));
  };
  std::string secret;
  if (const Status status =
          readFile(path, FileUse::kSecret, kSecretFileBytesMax, secret);
      !status.ok()) {
    fail(status.message());
  }
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) {
    secret.pop_back();
  }
  if (secret.size() < kSecretBytesMin) {
    fail(
        "expected a secret of at least " + std::to_string(kSecretBytesMin) +
        " characters, such as \"openssl rand -hex 32\" prints");
  }
  return secret;
}

// "new.secret, old.secret": what this process uses, then others that it takes.
std::vector<std::string> readSecretFiles(const std::string& paths) {
  std::vector<std::string> secrets;
  std::istringstream list(paths);
  for (std::string path; std::getline(list, path, ',');) {
    path.erase(0, path.find_first_not_of(' '));
    path.erase(path.find_last_not_of(' ') + 1);
    secrets.push_back(readSecretFile(path));
  }
  if (secrets.empty() || secrets.size() > kSecretFilesMax) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_SECRET_FILE=" + paths +
            ": expected one file, or two separated by a comma"));
  }
  return secrets;
}

// A file of ours to append to, for nobody else to read, new or from before. In
// a folder where others may write, its name may be a link to any file, or a
// pipe: that is refused. O_EXCL makes sure that a new file is ours. An existing
// one is examined through the descriptor, not by name, so it cannot be
// exchanged between check and write. A second hard link is refused because
// another user may have planted it, leading to a file of ours. Guarded by
// engineWritesDumpsToFilesOfItsOwnOnly.
FileDescriptor openOwnFile(const std::string& path) {
  constexpr int kFlags =
      O_WRONLY | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  FileDescriptor file(
      ::open(path.c_str(), kFlags | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  if (file || errno != EEXIST) {
    return file;
  }
  file.reset(::open(path.c_str(), kFlags));
  struct stat about{};
  if (file && ::fstat(file.get(), &about) == 0 &&
      (!S_ISREG(about.st_mode) || about.st_uid != ::geteuid() ||
       about.st_nlink != 1)) {
    file.reset();
    errno = EEXIST; // and is no file of ours alone
  }
  return file;
}

bool writeAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n =
        retryInterrupted([&] { return ::write(fd, text.data(), text.size()); });
    if (n < 0) {
      return false;
    }
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// "activation=eth0, gradient=eth1", of the NICs that have these addresses.
std::array<std::string, kTrafficClassCount> parseNicClasses(
    const std::string& text,
    const std::vector<NicAddress>& addresses) {
  const auto fail = [&](const std::string& why) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_NIC_CLASSES=\"" + text + "\": " + why));
  };
  std::array<std::string, kTrafficClassCount> result;
  std::stringstream in(text);
  std::string item;
  while (std::getline(in, item, ',')) {
    std::erase(item, ' ');
    const size_t equals = item.find('=');
    size_t c = 0;
    while (c < kTrafficClassCount &&
           item.substr(0, equals) !=
               trafficClassName(static_cast<TrafficClass>(c))) {
      ++c;
    }
    if (equals == std::string::npos || equals + 1 == item.size() ||
        c == kTrafficClassCount) {
      fail(
          "expected class=interface, separated by commas; classes are "
          "activation, activation_gradient, gradient and bulk");
    }
    if (!result[c].empty()) {
      fail(item.substr(0, equals) + " is there twice");
    }
    result[c] = item.substr(equals + 1);
    std::string have;
    for (const NicAddress& nic : addresses) {
      have += (have.empty() ? "" : ", ") + nic.nic;
    }
    if (std::none_of(
            addresses.begin(), addresses.end(), [&](const NicAddress& nic) {
              return nic.nic == result[c];
            })) {
      fail(
          "this rank does not use an interface " + result[c] + ", but " + have +
          " (TORCH_RESILIENT_INTERFACE)");
    }
  }
  return result;
}

} // namespace

std::shared_ptr<Engine> Engine::current() {
  std::lock_guard lock(process().mutex);
  return process().engine.lock();
}

bool Engine::inForkedChild() {
  return process().forkedChild;
}

// The process's mutex is held while an engine is made, so two groups that are
// joined at once share one. It is never held while waiting for a loop, since a
// turn of the loop may take it. For the same reason the fault rules that were
// given earlier enter the plan before the thread starts, without callInLoop().
std::shared_ptr<Engine> Engine::acquire(
    const KeyValue& store,
    int32_t globalRank) {
  Process& p = process();
  if (p.forkedChild) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "this process was forked from one with a \"resilient\" process "
        "group, whose threads did not come along: start it with the spawn "
        "method, or fork before init_process_group"));
  }
  std::lock_guard lock(p.mutex);
  if (auto engine = p.engine.lock()) {
    if (!engine->ended_) {
      ++engine->groupsOpen_;
      setLogRank(globalRank); // it may have changed with the new group
      return engine;
    }
  }
  std::shared_ptr<Engine> engine = make(
      p.defaults ? *p.defaults : EngineOptions::fromEnvironment(),
      store.serverHost(),
      globalRank);
  for (Process::Fault& f : p.faults) {
    f.planId = engine->faults_.add(f.rule, engine->startedAt_);
  }
  engine->faults_.setStep(p.faultStep);
  engine->startThread();
  p.engine = engine;
  return engine;
}

std::shared_ptr<Engine> Engine::start(
    EngineOptions options,
    const std::string& storeHost,
    int32_t globalRank) {
  auto engine = make(std::move(options), storeHost, globalRank);
  engine->startThread();
  return engine;
}

std::shared_ptr<Engine> Engine::make(
    EngineOptions options,
    const std::string& storeHost,
    int32_t globalRank) {
  std::vector<std::string> secrets;
  if (!options.secret.empty()) {
    secrets.push_back(options.secret);
  } else if (!options.secret_file.empty()) {
    secrets = readSecretFiles(options.secret_file);
    options.secret = secrets.front();
  }
  std::shared_ptr<Engine> engine(new Engine(
      std::move(options), std::move(secrets), storeHost, globalRank));
  engine->groupsOpen_ = 1;
  return engine;
}

void Engine::startThread() {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "resilient");
    loop_.run();
  });
}

// The engine leaves the process's state under the mutex and stops outside of
// it. In between, acquire() already makes another engine, so two may exist for
// a while.
void Engine::release(const std::shared_ptr<Engine>& engine, Nanos linger) {
  {
    Process& p = process();
    std::lock_guard lock(p.mutex);
    if (--engine->groupsOpen_ != 0) {
      return;
    }
    // The next caller gets a new engine.
    if (p.engine.lock() == engine) {
      p.engine.reset();
    }
  }
  engine->stop(linger);
}

// Options that turn out to be wrong throw here, in the thread of the caller and
// before any thread runs. The loop may be used directly, because it has no
// thread yet (see EventLoop). The listener comes before nicClasses_, which
// refers to the interfaces that were chosen for it.
Engine::Engine(
    EngineOptions options,
    std::vector<std::string> ownSecrets,
    const std::string& storeHost,
    int32_t globalRank)
    : options_(std::move(options)),
      ownSecrets_(std::move(ownSecrets)),
      globalRank_(globalRank),
      recorder_(static_cast<size_t>(options_.flight_recorder_entries)),
      mailbox_(completions_, *this),
      faults_(FaultPlan::parse(options_.faults)),
      startedAt_(std::chrono::steady_clock::now()),
      verbsChoice_(options_),
      resolver_(std::make_unique<Resolver>()) {
  if (const auto level = logLevelFromName(options_.log_level)) {
    setLogLevel(*level);
  }
  relays_ = std::make_unique<RelayService>(*this);
  setLogRank(globalRank);
  faults_.begin(startedAt_);
  staging_.setLimit(static_cast<uint64_t>(options_.staging_bytes));
  completions_.setWake([this] { scheduleTurn(); });
  fillRandom(self_.uid.data(), self_.uid.size());
  self_.hostId = hostIdentity();
  self_.hostName = hostName();
  self_.site = options_.declaredSite();
  self_.pid = ::getpid();
  bufferLimits_ = systemBufferLimits();
  const auto rates =
      SiteNumbers::parse(options_.wan_rate_limit, kMinRateLimit, kMaxRateLimit);
  const auto dscps = SiteNumbers::parse(options_.wan_dscp, 0, kMaxDscp);
  if (!rates || !dscps) {
    options_.validate(); // says what is wrong
  }
  rateLimits_ = *rates;
  dscps_ = *dscps;
  chooseCongestionControl();
  chooseEncryption();
  chooseDatagrams();
  startListening(storeHost);
  readCertificates();
  nicClasses_ = parseNicClasses(options_.nic_classes, self_.addresses);
  checkVerbs();
  linkWatch_ = std::make_unique<LinkWatch>(
      loop_,
      [this](const std::string& nic, bool usable) {
        eachLink([&](PeerLink& link) {
          link.connections().failover().onNic(nic, usable, loop_.now());
          link.verbs().onNic(nic, usable);
          link.datagrams().onNic(nic, usable);
        });
      },
      [this] { onAddresses(); });
  if (options_.dump_on_sigusr1) {
    signalDump_ =
        std::make_unique<SignalDump>(loop_, [this] { writeDump("SIGUSR1"); });
  }
}

// There is no fallback: what cannot be encrypted as asked for fails the start.
// Without a secret of the job's own, encryption would prove nothing to others
// than those who can read the store, so it is not on by itself.
void Engine::chooseEncryption() {
  const std::string& option = options_.encryption;
  const bool given = !ownSecrets_.empty();
  for (const std::string& secret : ownSecrets_) {
    addSecret(secret); // callers may come before the first group is there
  }
  if (option == "off") {
    return;
  }
  if (!given && option == "required") {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_ENCRYPTION=required needs a secret of the job's own, "
        "not the one that torch's store gives to every client: make a file "
        "with one (\"torch-resilient secret FILE\"), copy it to all hosts, and "
        "set TORCH_RESILIENT_SECRET_FILE on all ranks"));
  }
  if (!given) {
    logMessage(
        LogLevel::kInfo,
        "connections are not encrypted: the job's secret comes from the store, "
        "which gives it to every client. Set TORCH_RESILIENT_SECRET_FILE on "
        "all ranks to encrypt connections between hosts");
    return;
  }
  std::string why;
  if (!TlsSession::available(why)) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_ENCRYPTION=" + option + ": " + why +
            ", and with a secret of the job's own connections are encrypted by "
            "it. Install OpenSSL (libssl3), or set "
            "TORCH_RESILIENT_ENCRYPTION=off on all ranks"));
  }
  encryption_ =
      option == "required" ? Encryption::kAlways : Encryption::kBetweenHosts;
  logMessage(
      LogLevel::kInfo,
      std::string(
          encryption_ == Encryption::kAlways ? "all connections"
                                             : "connections between hosts") +
          " are encrypted: TLS 1.3 by " + TlsSession::library());
  if (encryption_ == Encryption::kAlways && options_.rdma == "auto" &&
      hasRdmaDevices()) {
    logMessage(
        LogLevel::kInfo,
        "RDMA is not used: encryption is required, and a device would send "
        "plaintext");
  }
}

// Once the addresses are known that a certificate may have.
void Engine::readCertificates() {
  if (options_.tls_cert.empty()) {
    return;
  }
  std::vector<std::string> addresses;
  for (const NicAddress& nic : self_.addresses) {
    addresses.push_back(nic.address.ip());
  }
  certificates_ = std::make_unique<TlsCertificates>(
      TlsCertificates::Files{
          options_.tls_cert, options_.tls_key, options_.tls_ca},
      self_.hostName,
      addresses);
}

const TlsCertificates* Engine::certificates() {
  if (certificates_) {
    certificates_->refresh(loop_.now());
  }
  return certificates_.get();
}

void Engine::chooseDatagrams() {
  const auto sites = SiteNumbers::parseWords(options_.wan, kWanTransports);
  if (!sites) {
    options_.validate(); // says what is wrong
  }
  wanSites_ = *sites;
  const auto recovery = RecoveryTable::parse(
      options_.wan_recovery,
      options_.wan_parity == "xor" ? ParityKind::kXor
                                   : ParityKind::kReedSolomon);
  if (!recovery) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_WAN_RECOVERY=\"" + options_.wan_recovery +
            "\": expected semantic, selective_repeat or "
            "uniform_fec:data:parity "
            "(1 to 100 packets of data), or a list such as "
            "eu-west=selective_repeat,/gradient=semantic with each site and "
            "class once"));
  }
  recovery_ = *recovery;
  std::string why;
  if (wanSites_.has(static_cast<int64_t>(WanTransport::kUdp)) &&
      !PacketSeal::available(why)) {
    throw StatusError(Status(
        StatusCode::kInvalidArgument,
        "TORCH_RESILIENT_WAN=\"" + options_.wan + "\": " + why +
            "; datagrams are sealed with it. Install OpenSSL (libssl3), or use "
            "tcp"));
  }
  if (wanSites_.has(static_cast<int64_t>(WanTransport::kAuto)) &&
      !PacketSeal::available(why)) {
    logMessage(
        LogLevel::kInfo,
        "wan=auto uses connections only, since datagrams are sealed with "
        "OpenSSL (libssl3): " +
            why);
  }
}

// Whether the devices are there that options name, and whether others may
// expect RDMA of this process. Hosts without a device do not load the library.
void Engine::checkVerbs() {
  if (verbsChoice_.off()) {
    self_.rdma = RdmaUse::kOff;
    return;
  }
  self_.rdma = RdmaUse::kNone;
  if (!verbsChoice_.mustLook() && !hasRdmaDevices()) {
    return;
  }
  std::string why;
  std::vector<VerbsPort> ports;
  if (VerbsApi* const api = systemVerbs(why); api != nullptr) {
    why = api->ports(ports).message();
  }
  const std::string missing = verbsChoice_.missing(ports, why, self_.addresses);
  if (!missing.empty()) {
    throw StatusError(Status(StatusCode::kInvalidArgument, missing));
  }
  const std::vector<VerbsPort> here = verbsChoice_.here(ports, self_.addresses);
  if (here.empty()) {
    return;
  }
  self_.rdma = RdmaUse::kPossible;
  if (verbsChoice_.required()) {
    self_.rdma = RdmaUse::kRequired;
    if (const Status status = tryQueuePair(*systemVerbs(why), here);
        !status.ok()) {
      throw StatusError(Status(
          StatusCode::kInvalidArgument,
          "TORCH_RESILIENT_RDMA=required: " + status.message()));
    }
  }
}

void Engine::chooseCongestionControl() {
  const std::string& option = options_.wan_congestion_control;
  if (option == "auto") {
    mayChangeCongestionControl_ =
        mayUseCongestionControl(kLossyCongestionControl);
  } else if (option != "system") {
    if (!mayUseCongestionControl(option)) {
      throw StatusError(Status(
          StatusCode::kInvalidArgument,
          "TORCH_RESILIENT_WAN_CONGESTION_CONTROL=\"" + option +
              "\": this kernel does not have it, or does not let us use it "
              "(net.ipv4.tcp_allowed_congestion_control). Choose auto, system "
              "or one of: " +
              availableCongestionControls()));
    }
    congestionControl_ = option;
  }
}

// A limited link is pumped again when its bucket has tokens.
Uplink* Engine::uplink(const std::string& site) {
  const auto bytesPerS = rateLimits_.beyond(self_.site, site);
  const bool shares =
      options_.relay == "auto" && !self_.site.empty() && site != self_.site;
  if (!bytesPerS && !shares) {
    return nullptr;
  }
  std::optional<double> declared;
  if (bytesPerS) {
    declared = static_cast<double>(*bytesPerS);
  }
  const auto at = uplinks_.try_emplace(
      site, declared, static_cast<uint64_t>(options_.starvation_bytes));
  return &at.first->second.uplink;
}

// Invariant: a site has one timer at most, and one user at most has the turn.
// The timer gives the turn to the most urgent user in the queue and pumps its
// link. PeerLink::pump() takes a frame or gives the turn back, and calls this
// function again for the next user. A user without a link would keep the turn
// for ever; therefore PeerLink::close() leaves the queue.
void Engine::waitForTurn(const std::string& site) {
  SharedUplink& shared = uplinks_.at(site);
  RateLimit* const limit = shared.uplink.limit();
  if (limit == nullptr || shared.timer != 0 || !limit->idleTurn()) {
    return;
  }
  shared.timer = loop_.at(limit->readyAt(), [this, limit, &shared] {
    shared.timer = 0;
    if (!limit->idleTurn()) {
      return;
    }
    // Positions in streams tell something only about pipelines in step.
    const bool inOrder = shared.uplink.contended(loop_.now());
    const RateLimit::User next = limit->nextTurn([&](RateLimit::User user) {
      const auto waits =
          byChannel_[user - 1]->channel().mostUrgent(globalRank_);
      const Urgency urgency = waits.value_or(Urgency());
      return inOrder ? urgency : Urgency{urgency.cls};
    });
    markDirty(*byChannel_[next - 1]);
  });
}

SocketOptions Engine::socketOptions(const std::string* site) const {
  SocketOptions options;
  options.dscp = site != nullptr ? dscpOf(*site) : 0;
  options.sendBufferBytes = static_cast<int>(options_.socket_buffer_bytes);
  options.receiveBufferBytes = options.sendBufferBytes;
  return options;
}

// Without the option for interfaces, the address that leads to the store comes
// first, see chooseAddresses(). A caller passes through three callbacks:
// decide() keeps a place for it, then either onPeer hands over its connection
// or onPeerLost gives the place back.
void Engine::startListening(const std::string& storeHost) {
  std::vector<InterfaceAddress> interfaces;
  const Status listed = enumerateInterfaces(interfaces);
  if (!listed.ok()) {
    throw StatusError(listed);
  }
  const AddressChoice choice = chooseAddresses(
      interfaces,
      options_.interface,
      storeHost.empty() ? std::nullopt : localAddressTowards(storeHost));
  ListenerConfig config;
  // Interfaces asked for by option are also the only ones that are open.
  if (!options_.interface.empty()) {
    for (const InterfaceAddress& a : choice.addresses) {
      config.bindIps.push_back(a.address.ip());
    }
  }
  config.port = static_cast<uint16_t>(options_.listen_port);
  config.handshakeTimeout = fromSeconds(options_.handshake_timeout_s);
  config.maxPendingHandshakes = maxPending(options_);
  unknown_ = std::make_unique<UnknownCallers>(
      loop_, config.maxPendingHandshakes, 2 * config.handshakeTimeout);
  const std::string anySite; // what it is marked as becomes right once known
  config.options = socketOptions(&anySite);
  config.identity.uid = self_.uid;
  config.identity.eagerBudgetBytes =
      static_cast<uint64_t>(options_.eager_bytes);
  config.identity.secretOf = [this](const KeyId& id) { return secretOf(id); };
  config.identity.decide =
      [this](const HelloInfo& hello, const CertifiedFor& certifiedFor) {
        return decide(hello, certifiedFor);
      };
  config.nonce = [] {
    HelloNonce nonce;
    fillRandom(nonce.data(), nonce.size());
    return nonce;
  };
  config.isMembers = [this](const SocketAddress& at) { return isMembers(at); };
  config.identity.keysOf = [this](std::span<const uint8_t> name) {
    return keysOf(name);
  };
  config.encryption = encryption_;
  config.certificates = [this] { return certificates(); };
  config.counters = &handshakes_;
  config.onPeer = [this](HelloInfo hello, StreamSocket socket, SocketAddress) {
    onCaller(hello, std::move(socket));
  };
  config.onPeerLost = [this](const HelloInfo& hello) {
    if (PeerLink* known = knownLink(hello.initiator)) {
      known->connections().onIncomingLost(hello);
    } else {
      unknown_->forget(hello);
    }
  };
  listener_ = std::make_unique<Listener>(loop_, std::move(config));
  std::string where;
  for (const InterfaceAddress& a : choice.addresses) {
    SocketAddress at = a.address;
    at.setPort(listener_->port());
    self_.addresses.push_back({a.interface, at, a.prefixBits});
    where +=
        (where.empty() ? "" : ", ") + at.toString() + " (" + a.interface + ')';
  }
  logMessage(LogLevel::kInfo, "listening at " + where + ": " + choice.reason);
}

std::string Engine::addressText(Nanos storeRoundTrip) const {
  std::unique_lock lock(addressesMutex_);
  PeerAddress self = self_;
  lock.unlock();
  self.storeRoundTrip = storeRoundTrip;
  return self.toString();
}

// Paper: SHIFT §4.3.3 takes it for granted that a NIC returns as it was.
void Engine::onAddresses() {
  std::vector<InterfaceAddress> interfaces;
  const Status listed = enumerateInterfaces(interfaces);
  if (!listed.ok()) { // no descriptor left, most likely
    if (lookAgainTimer_ == 0) {
      logMessage(
          LogLevel::kWarning,
          listed.message() +
              ": whether our addresses have changed is looked at again "
              "every second");
    }
    loop_.cancel(lookAgainTimer_);
    lookAgainTimer_ =
        loop_.after(std::chrono::seconds(1), [this] { onAddresses(); });
    return;
  }
  loop_.cancel(std::exchange(lookAgainTimer_, 0));
  std::vector<NicAddress> now = self_.addresses;
  if (!followAddresses(interfaces, now)) {
    return;
  }
  {
    std::lock_guard lock(addressesMutex_);
    self_.addresses = std::move(now);
  }
  logMessage(LogLevel::kInfo, "our addresses have changed: " + addressText());
  std::vector<std::string> ips;
  for (const NicAddress& nic : self_.addresses) {
    ips.push_back(nic.address.ip());
  }
  const Status moved = listener_->moveTo(ips);
  if (!moved.ok()) {
    logMessage(
        LogLevel::kWarning,
        moved.message() +
            ": until it can (it goes on trying), no rank can connect to this "
            "one there");
  }
  eachLink([](PeerLink& link) { link.connections().onOurAddresses(); });
  for (auto& [id, group] : groups_) {
    group->onOurAddresses(); // for those that have not sought us yet
  }
}

Engine::~Engine() {
  stop(Nanos(0));
}

// A caller has proved the secret and waits for the verdict. It may be this
// process itself (an address that several hosts have leads back to us), a
// member of a group, or a process that no group knows. For members the
// connector decides, since both ends may connect at once. The number of unknown
// ones is limited, see kMoreUnknown.
HelloCode Engine::decide(
    const HelloInfo& hello,
    const CertifiedFor& certifiedFor) {
  if (hello.initiator == self_.uid) {
    return HelloCode::kWrongPeer;
  }
  if (PeerLink* known = knownLink(hello.initiator)) {
    return known->connections().decide(hello, certifiedFor);
  }
  int ranks = 0;
  for (const auto& [id, group] : groups_) {
    ranks = std::max(ranks, group->size());
  }
  return unknown_->admits(hello, static_cast<size_t>(ranks) + kMoreUnknown)
      ? HelloCode::kOk
      : HelloCode::kBusy;
}

// A group may have learned of the caller since decide(). Then letIn() has moved
// its place to the link.
void Engine::onCaller(const HelloInfo& hello, StreamSocket socket) {
  if (PeerLink* known = knownLink(hello.initiator)) {
    known->onIncoming(hello, std::move(socket));
    return;
  }
  unknown_->add(hello, std::move(socket));
  seek(hello);
}

// Only the store says which process a rank is.
void Engine::seek(const HelloInfo& unknown) {
  for (const auto& [id, group] : groups_) {
    group->lookUp(unknown.initiatorRank);
  }
}

// knownLink() makes a link for a member that waits here; setAddress() of the
// link then calls letIn(). waiting() returns copies, so the table may change
// meanwhile.
void Engine::membersKnown() {
  membersMoved();
  for (const HelloInfo& hello : unknown_->waiting()) {
    (void)knownLink(hello.initiator); // and lets it in
  }
}

// A caller without a socket has not got its verdict yet. decide() reserves
// its index in the link all the same; onCaller() finds the link later. The link
// looks at certificates itself.
void Engine::letIn(PeerLink& link) {
  for (UnknownCallers::Caller& caller : unknown_->take(link.uid())) {
    if (link.connections().decide(caller.hello, {}) == HelloCode::kOk &&
        caller.socket) {
      link.onIncoming(caller.hello, std::move(caller.socket));
    }
  }
}

// The listener asks for every caller, so the set is kept until addresses
// change. It only decides which callers outlast a flood; it admits none.
bool Engine::isMembers(const SocketAddress& address) {
  if (!memberIps_) {
    memberIps_.emplace();
    for (const auto& [uid, link] : links_) {
      if (link->usable() && link->address()) {
        for (const NicAddress& nic : link->address()->addresses) {
          memberIps_->insert(nic.address.ip());
        }
      }
    }
    for (const auto& [id, group] : groups_) {
      group->addMemberIps(*memberIps_);
    }
  }
  return memberIps_->contains(address.ip());
}

// Only processes that a group has found in its store get a link. A link costs
// buffers and up to eager_bytes of data, and any process that knows the secret
// could make up uids without end
// (test_members_that_no_group_knows_cost_no_memory).
PeerLink* Engine::knownLink(const Uid& uid) {
  const auto found = links_.find(uid);
  if (found != links_.end()) {
    return found->second.get();
  }
  const bool known = std::ranges::any_of(
      groups_, [&](const auto& group) { return group.second->meet(uid); });
  return known ? &link(uid) : nullptr;
}

PeerLink& Engine::link(const Uid& uid) {
  auto& link = links_[uid];
  if (!link) {
    link = std::make_unique<PeerLink>(*this, uid, ++lastChannelId_);
    byChannel_.push_back(link.get());
  }
  return *link;
}

PeerLink* Engine::linkOf(const Channel& channel) {
  return byChannel_[channel.id() - 1];
}

// One for each host, the one at our own place among the ranks of its host: then
// the ranks of a host choose different ones. The list begins with the host
// behind ours, so that hosts choose different ones, too.
std::vector<Uid> Engine::relaysTo(const Link& peer) const {
  using Ranks = std::map<int64_t, Uid>;
  std::map<std::string, Ranks> hosts; // of our site
  for (const auto& [id, group] : groups_) {
    group->eachMember([&](const PeerAddress& member, int64_t globalRank) {
      if (member.site == self_.site && member.uid != peer.uid() &&
          member.hostId != peer.address()->hostId) {
        hosts[member.hostId][globalRank] = member.uid;
      }
    });
  }
  Ranks& ours = hosts[self_.hostId];
  ours[globalRank_] = self_.uid;
  const auto place =
      static_cast<size_t>(std::distance(ours.begin(), ours.find(globalRank_)));
  std::map<int64_t, Uid> behind, before; // ours, by the host's first rank
  for (const auto& [hostId, ranks] : hosts) {
    if (hostId != self_.hostId) {
      const auto at = std::next(
          ranks.begin(), static_cast<ptrdiff_t>(place % ranks.size()));
      const int64_t first = ranks.begin()->first;
      (first > ours.begin()->first ? behind : before)[first] = at->second;
    }
  }
  std::vector<Uid> relays;
  for (const auto* part : {&behind, &before}) {
    for (const auto& [rank, uid] : *part) {
      relays.push_back(uid);
    }
  }
  return relays;
}

// Decides whether a signed refusal counts as evidence that the peer is dead. A
// proxy that leads to another member, or back to this process, proves nothing
// (engineTakesNoProxiedRefusalForADeath). In doubt the answer is true.
bool Engine::mayBeAt(const Uid& process, const SocketAddress& at) const {
  if (process == self_.uid) {
    return false;
  }
  const auto found = links_.find(process);
  if (found == links_.end() || !found->second->usable() ||
      !found->second->address()) {
    return true;
  }
  const auto& known = found->second->address()->addresses;
  return std::ranges::any_of(known, [&](const NicAddress& nic) {
    return nic.address.toString() == at.toString();
  });
}

SharedRendezvous* Engine::sharedRendezvous() {
  if (!sharedRendezvous_ && !noRendezvous_) {
    try {
      sharedRendezvous_ = std::make_unique<SharedRendezvous>(
          loop_, [this](const Uid& peer, SharedEnds ends) {
            link(peer).sharedMemory().onEnds(std::move(ends));
          });
    } catch (const StatusError& e) {
      noRendezvous_ = true;
      noSharedMemory(e.what());
    }
  }
  return sharedRendezvous_.get();
}

void Engine::noSharedMemory(const std::string& why) {
  if (!saidNoSharedMemory_) {
    saidNoSharedMemory_ = true;
    logMessage(
        LogLevel::kWarning,
        "ranks on this host cannot share memory, and use connections: " + why);
  }
}

std::optional<std::string> Engine::secretOf(const KeyId& id) {
  std::lock_guard lock(secretsMutex_);
  for (const Secret& secret : secrets_) {
    if (secret.id == id) {
      return secret.text;
    }
  }
  return std::nullopt;
}

std::optional<NamedKeys> Engine::keysOf(std::span<const uint8_t> name) {
  std::lock_guard lock(secretsMutex_);
  for (const Secret& secret : secrets_) {
    if (isTlsNameOf(secret.keys, name)) {
      if (!usedNames_.use(name)) {
        return std::nullopt;
      }
      return NamedKeys{secret.keys, usedNames_.knowsAll()};
    }
  }
  return std::nullopt;
}

void Engine::addSecret(const std::string& secret) {
  const KeyId id = keyIdOf(secret);
  std::lock_guard lock(secretsMutex_);
  for (const Secret& known : secrets_) {
    if (known.id == id) {
      return;
    }
  }
  secrets_.push_back({id, secret, TlsKeys::of(secret)});
}

bool Engine::namesSites() const {
  return !checkedSites_ &&
      !(rateLimits_.sites().empty() && dscps_.sites().empty() &&
        wanSites_.sites().empty());
}

// Called with the sites of the whole job only: a smaller group may lack a site
// that the options name rightly. If this rank has declared no site, no rank has
// (checkMembers()), and no name in an option is right.
void Engine::checkSites(const std::vector<std::string>& sites) {
  if (!namesSites()) {
    return;
  }
  checkedSites_ = true;
  std::set<std::string> declared{""}; // options cannot name inferred sites
  if (!self_.site.empty()) {
    declared = {sites.begin(), sites.end()};
  }
  std::string known;
  for (const std::string& site : declared) {
    known += (known.empty() ? "" : ", ") + (site.empty() ? "none" : site);
  }
  const std::pair<const char*, const SiteNumbers&> named[] = {
      {"WAN_RATE_LIMIT", rateLimits_},
      {"WAN_DSCP", dscps_},
      {"WAN", wanSites_}};
  for (const auto& [option, numbers] : named) {
    for (const std::string& site : numbers.sites()) {
      if (!declared.contains(site)) {
        logMessage(
            LogLevel::kWarning,
            std::string("TORCH_RESILIENT_") + option + " names the site \"" +
                site + "\", where no rank is; TORCH_RESILIENT_SITE of the " +
                "ranks: " + known);
      }
    }
  }
}

// Members of the group may have called before it existed here: it looks them
// up.
void Engine::registerGroup(uint64_t id, GroupImpl* group) {
  groups_[id] = group;
  for (const HelloInfo& hello : unknown_->waiting()) {
    seek(hello);
  }
}

void Engine::unregisterGroup(uint64_t id) {
  groups_.erase(id);
  mailbox_.closeGroup(id);
}

bool Engine::callInLoop(const std::function<void()>& call) {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
  const bool posted = loop_.post([&] {
    call();
    std::lock_guard lock(mutex);
    finished = true;
    done.notify_all();
  });
  if (!posted) {
    return false;
  }
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return finished; });
  return true;
}

// How it works:
// 1. Ask those that this process relays for to use other ways, and wait until
//    the peers have acknowledged everything, for three quarters of `linger`. A
//    goodbye is only correct after that.
// 2. Say goodbye on every link, and wait for its acknowledgement.
// 3. In one call in the loop, fail the operations that are left, close the
//    links, drain the completions, and stop everything that could bring new
//    events. Each operation has then ended once.
// 4. End the loop and join its thread.
// 5. Destroy the graveyard before the links, which its objects refer to. A
//    caller that was helping may still end a turn, so afterEnd() is needed
//    (engineStopsWhileCallersComeToHelp).
//
// The lock is held throughout, so a second caller returns when all of this is
// done. In a forked child nothing happens: the threads to wait for do not
// exist.
void Engine::stop(Nanos linger) {
  std::lock_guard lock(stopMutex_);
  if (stopped_ || process().forkedChild) {
    return;
  }
  stopped_ = true;
  ended_ = true;
  if (!thread_.joinable()) {
    return; // never started
  }
  const auto deadline = std::chrono::steady_clock::now() + linger;
  const auto drained = [this] {
    for (auto& [uid, link] : links_) {
      if (link->usable() && !link->channel().drained()) {
        return false;
      }
    }
    return true;
  };
  callInLoop([this] {
    relays_->leave();
    for (auto& [uid, link] : links_) {
      link->connections().endArrivals();
    }
  });
  // A goodbye says that nothing follows: what was sent must have arrived.
  waitUntil(deadline - linger / 4, drained);
  callInLoop([this] {
    for (auto& [uid, link] : links_) {
      link->leave();
    }
  });
  waitUntil(deadline, drained);
  callInLoop([this] {
    // Groups that are still there: the process ends without destroying them.
    for (auto& [id, group] : groups_) {
      group->failAll(Status(StatusCode::kAborted, "the process is ending"));
    }
    for (auto& [uid, link] : links_) {
      link->close(
          Link::State::kLeft,
          StatusCode::kAborted,
          "is left: the process group was destroyed");
    }
    completions_.drain();
    relays_->close();
    listener_.reset();
    linkWatch_.reset();
    verbsWatch_.reset();
    loop_.cancel(lookAgainTimer_);
    sharedRendezvous_.reset();
    signalDump_.reset();
  });
  // Operations that have failed wait for their memory.
  if (!waitUntil(std::chrono::steady_clock::now() + kLetGo, [this] {
        return !loans_ || loans_->settled();
      })) {
    callInLoop([this] { loans_->giveUp(); });
  }
  loop_.stop();
  thread_.join();
  loop_.afterEnd([this] {
    graveyard_.clear();
    links_.clear();
    loans_.reset();
    unknown_.reset();
  });
  // Not destroyed: a group may still call it. But what it seeks holds us.
  resolver_->stop();
}

// Asks on the loop thread until it is so, with pauses; true if it is.
bool Engine::waitUntil(
    TimePoint deadline,
    const std::function<bool()>& condition,
    void (*meanwhile)()) {
  Nanos pause = std::chrono::microseconds(200);
  for (;;) {
    bool met = false;
    if (!callInLoop([&] { met = condition(); }) || met) {
      return met;
    }
    const TimePoint now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      return false;
    }
    if (meanwhile != nullptr) {
      meanwhile();
    }
    std::this_thread::sleep_for(std::min<Nanos>(pause, deadline - now));
    pause = std::min<Nanos>(pause * 2, std::chrono::milliseconds(10));
  }
}

void Engine::closeDescriptorsInChild() {
  // Only system calls on copies of the numbers: other threads may have held
  // any lock when the process was forked.
  loop_.closeInForkedChild();
}

// Most hosts have no device, so the log says it at level debug only. One that
// comes later is used as well: see onVerbs().
VerbsApi* Engine::verbs() {
  if (std::exchange(lookedForVerbs_, true) || verbsChoice_.off()) {
    return verbs_;
  }
  std::string why;
  std::vector<VerbsPort> ports;
  VerbsApi* const api = systemVerbs(why);
  if (api != nullptr) {
    why = api->ports(ports).message();
    ports = verbsChoice_.of(ports);
    std::set<std::string> devices;
    for (const VerbsPort& port : ports) {
      devices.insert(port.device);
    }
    verbsWatch_ = std::make_unique<VerbsWatch>(
        loop_,
        *api,
        devices,
        [this](const std::string& name) { return verbsChoice_.allows(name); },
        [this, api](
            const std::string& name,
            const VerbsDevice& device,
            const VerbsEvent& event) { onVerbs(*api, name, device, event); });
  }
  if (ports.empty()) {
    logMessage(
        LogLevel::kDebug,
        "no RDMA: " + (why.empty() ? "this host has no device" : why));
  } else {
    useVerbs(*api);
  }
  return verbs_;
}

// This process has a device.
void Engine::useVerbs(VerbsApi& api) {
  verbs_ = &api;
  if (options_.rdma_registered_bytes != 0) {
    VerbsLoans::Limits limits;
    limits.fromBytes = options_.rdma_zero_copy_from_bytes;
    limits.totalBytes = options_.rdma_registered_bytes;
    loans_ = std::make_unique<VerbsLoans>(
        loop_, limits, [](VerbsDevice& device, const GpuAddress& where) {
          return tryGpuWay(gpuSystem(), device, where);
        });
  }
}

// The links first: none of their paths uses the device any more when its memory
// is deregistered.
void Engine::onVerbs(
    VerbsApi& api,
    const std::string& name,
    const VerbsDevice& device,
    const VerbsEvent& event) {
  if (verbs_ == nullptr && event.kind == VerbsEvent::Kind::kDeviceBack) {
    useVerbs(api);
  }
  verbsPortsAt_ = TimePoint(); // the list may be out of date
  eachLink([&](PeerLink& link) { link.verbs().onEvent(name, event); });
  if (loans_ != nullptr && event.kind == VerbsEvent::Kind::kDeviceFailed) {
    loans_->drop(device);
  }
}

// Many links ask when a job starts, for each route. The answer may be a little
// old: a port that has gone down since makes an attempt fail.
const std::vector<VerbsPort>& Engine::verbsPorts() {
  constexpr Nanos kFresh = std::chrono::milliseconds(500);
  if (verbs() != nullptr &&
      (verbsPorts_.empty() || loop_.now() - verbsPortsAt_ > kFresh)) {
    verbsPorts_.clear();
    (void)verbs()->ports(verbsPorts_);
    verbsPorts_ = verbsChoice_.of(verbsPorts_);
    std::erase_if(verbsPorts_, [this](const VerbsPort& port) {
      return verbsWatch_ != nullptr && verbsWatch_->isFailed(port.device);
    });
    verbsPortsAt_ = loop_.now();
  }
  return verbsPorts_;
}

// --- turns

void Engine::markDirty(PeerLink& link) {
  if (!link.dirty) {
    link.dirty = true;
    dirty_.push_back(&link);
    scheduleTurn();
  }
}

void Engine::scheduleTurn() {
  if (!turnScheduled_) {
    turnScheduled_ = true;
    loop_.atEndOfTurn([this] { turn(); });
  }
}

// Ends one turn of the loop: tell the owners of what has ended,
// then write what there is to write, until neither causes more of the other.
// Mismatches come first: a later collective of the group may have got its
// messages in the same turn, and must not end well.
//
// The flag of a link is cleared before its pump, which may mark the link again.
// turnScheduled_ stays true meanwhile, because the loop below sees such marks.
// It is false again when the graveyard is emptied: a destructor that leaves
// work then schedules another turn.
void Engine::turn() {
  while (!mismatches_.empty() || !completions_.empty() || !dirty_.empty()) {
    tellMismatches();
    completions_.drain();
    pumping_.swap(dirty_);
    for (PeerLink* link : pumping_) {
      link->dirty = false;
      link->pump();
    }
    pumping_.clear();
  }
  turnScheduled_ = false;
  // Only this function is on the stack now. What dies may leave more to do.
  while (!graveyard_.empty()) {
    dying_.swap(graveyard_);
    dying_.clear();
  }
}

void Engine::destroyLater(std::shared_ptr<void> object) {
  graveyard_.push_back(std::move(object));
  scheduleTurn();
}

void Engine::faultsChanged() {
  for (auto& [uid, link] : links_) {
    link->faultsChanged();
  }
}

// Dumps are appended, so one for a signal does not erase the one for the first
// failure.
void Engine::writeDump(const std::string& reason) {
  const std::string text = "=== resilient: recent operations of rank " +
      std::to_string(globalRank_) + ", pid " + std::to_string(::getpid()) +
      " (" + reason + ")\n" + recorder_.dump();
  if (options_.dump_dir.empty()) {
    // In one call, so that ranks on one terminal do not mix.
    std::fwrite(text.data(), 1, text.size(), stderr);
    return;
  }
  ::mkdir(options_.dump_dir.c_str(), 0777); // it mostly exists
  const std::string path =
      options_.dump_dir + "/rank" + std::to_string(globalRank_) + ".txt";
  const FileDescriptor out = openOwnFile(path);
  if (out && writeAll(out.get(), text)) {
    logMessage(LogLevel::kInfo, "recent operations written to " + path);
    return;
  }
  const std::string why = errno == EEXIST
      ? "something that is no plain file of this user alone has the name"
      : errnoText(errno);
  logMessage(
      LogLevel::kWarning,
      "cannot write the recent operations (check TORCH_RESILIENT_DUMP_DIR) "
      "to " +
          path + ": " + why);
}

void Engine::onFirstFailure(const Status& status) {
  // Operations aborted by our own shutdown do not count as failures.
  if (!failureDumped_ && !options_.dump_dir.empty() &&
      status.code() != StatusCode::kAborted) {
    failureDumped_ = true;
    writeDump("an operation failed: " + status.message());
  }
}

// --- from links and the mailbox to groups

// Control frames come from the peer's engine. A frame that cannot be read, or
// of a kind that a newer version has added, is logged and ignored.
void Engine::onControl(PeerLink& link, std::span<const std::byte> payload) {
  // Hands a message that could be read to `use`; false if it could not.
  const auto with = [](const auto& message, const auto& use) {
    if (message) {
      use(*message);
    }
    return message.has_value();
  };
  const auto readAs = [&](ControlKind kind) {
    switch (kind) {
      case ControlKind::kNotice:
        return with(decodeNotice(payload), [&](const Notice& notice) {
          onNotice(link, notice);
        });
      case ControlKind::kQuery:
        return with(decodeQuery(payload), [&](const Query& query) {
          if (auto g = groups_.find(query.group); g != groups_.end()) {
            link.channel().sendControl(encode(g->second->report()));
          }
        });
      case ControlKind::kReport:
        return with(decodeReport(payload), [&](const Report& report) {
          if (auto g = groups_.find(report.group); g != groups_.end()) {
            g->second->onReport(link, report);
          }
        });
      case ControlKind::kPathsLost:
        return with(decodePathsLost(payload), [&](const PathsLost& lost) {
          // Not now: the path that brought it may be among them.
          loop_.post([this, uid = link.uid(), lost] {
            PeerLink& from = this->link(uid);
            from.connections().onPathsLost(lost);
            from.datagrams().onPathsLost(lost);
          });
        });
      case ControlKind::kSharedOffer:
        return with(decodeSharedOffer(payload), [&](const SharedOffer& offer) {
          link.sharedMemory().onOffer(offer);
        });
      case ControlKind::kAddresses:
        return with(decodeAddresses(payload), [&](const Addresses& addresses) {
          link.onPeerAddresses(addresses.text);
        });
      case ControlKind::kDatagramOffer:
        return with(
            decodeDatagramOffer(payload), [&](const DatagramOffer& offer) {
              link.datagrams().onOffer(offer);
            });
      case ControlKind::kArrivals:
        return with(decodeArrivals(payload), [&](const Arrivals& arrivals) {
          link.connections().onArrivals(arrivals);
        });
      case ControlKind::kRelayNote:
        return with(decodeRelayNote(payload), [&](const RelayNote& note) {
          relays_->onNote(link, note);
        });
      case ControlKind::kVerbsOffer:
        return with(decodeVerbsOffer(payload), [&](const VerbsOffer& offer) {
          // Not now, either: an answer may close the path that brought it.
          loop_.post([this, uid = link.uid(), offer] {
            this->link(uid).verbs().onOffer(offer);
          });
        });
    }
    return false;
  };
  const std::optional<ControlKind> kind = controlKind(payload);
  if (!kind || !readAs(*kind)) {
    link.say(
        LogLevel::kWarning,
        "control frame from " + link.describe() +
            " ignored: " + std::to_string(payload.size()) + " bytes" +
            (payload.empty() ? std::string()
                             : " of kind " +
                     std::to_string(std::to_integer<int>(payload.front()))) +
            ", which this version cannot read");
  }
}

// A notice of a group that does not exist here yet is kept for it. A peer may
// invent groups, so at most kEarlyNoticesMax notices are kept, the latest ones:
// a real one is soon taken by its group, an invented one never.
void Engine::onNotice(PeerLink& link, const Notice& notice) {
  if (auto g = groups_.find(notice.group); g != groups_.end()) {
    g->second->onNotice(link.uid(), notice);
    return;
  }
  earlyNotices_.push_back({link.uid(), notice});
  if (earlyNotices_.size() > kEarlyNoticesMax) {
    earlyNotices_.pop_front();
  }
}

std::vector<Engine::EarlyNotice> Engine::takeEarlyNotices(uint64_t group) {
  std::vector<EarlyNotice> notices;
  std::erase_if(earlyNotices_, [&](const EarlyNotice& early) {
    const bool ofGroup = early.notice.group == group;
    if (ofGroup) {
      notices.push_back(early);
    }
    return ofGroup;
  });
  return notices;
}

void Engine::onLinkUp(PeerLink& link) {
  for (auto& [id, group] : groups_) {
    group->onLinkUp(link);
  }
}

void Engine::onLinkCut(PeerLink& link) {
  for (auto& [id, group] : groups_) {
    group->onLinkCut(link);
  }
}

ListenerCounters Engine::listenerCounters() const {
  if (!listener_) {
    return {}; // stopping
  }
  const ListenerStats s = listener_->stats();
  return {
      s.accepted,
      s.admitted,
      s.refused,
      s.timedOut,
      s.brokenOff,
      s.dropped,
      s.pending};
}

TrustStats Engine::trustStats() const {
  TrustStats stats;
  stats.encryption = nameOf(encryption_);
  stats.ownSecret = !ownSecrets_.empty();
  stats.certificates = certificates_ != nullptr;
  stats.handshakes = handshakes_;
  return stats;
}

void Engine::eachLink(const std::function<void(PeerLink&)>& call) {
  for (auto& [uid, link] : links_) {
    call(*link);
  }
}

void Engine::onLinkClosed(PeerLink& link, const Status& why) {
  logMessage(
      link.state() == Link::State::kDead ? LogLevel::kWarning : LogLevel::kInfo,
      why.message());
  relays_->onLinkClosed(link);
  eachLink([&](PeerLink& other) {
    other.relays().onRelayClosed(link.uid(), why.message());
  });
  for (auto& [id, group] : groups_) {
    group->onLinkClosed(link);
  }
}

void Engine::onCollectiveMismatch(
    uint64_t group,
    uint64_t sequence,
    const OpSignature& local,
    const FrameHeader& remote,
    Channel&) {
  // Not now: the mailbox is in the middle of something.
  mismatches_.push_back({group, sequence, local, remote});
  scheduleTurn();
}

void Engine::tellMismatches() {
  const std::vector<Mismatch> told = std::exchange(mismatches_, {});
  for (const Mismatch& each : told) {
    if (auto g = groups_.find(each.group); g != groups_.end()) {
      g->second->onMismatch(each.sequence, each.local, each.remote);
    }
  }
}

// --- engine_control.h

void setDefaultOptions(const EngineOptions& options) {
  std::lock_guard lock(process().mutex);
  process().defaults = options;
}

bool engineRunning() {
  return Engine::current() != nullptr;
}

// The rule is kept for later engines under the mutex, and handed to the running
// one without it, since the loop may need the mutex. The number that the caller
// gets is ours; each engine's plan has numbers of its own.
uint64_t addFault(const std::string& rule) {
  FaultPlan().add(rule, TimePoint()); // throws here, not on the loop thread
  Process& p = process();
  std::shared_ptr<Engine> engine;
  uint64_t id = 0;
  {
    std::lock_guard lock(p.mutex);
    id = ++p.lastFault;
    p.faults.push_back({id, rule});
    engine = p.engine.lock();
  }
  if (engine) {
    uint64_t planId = 0;
    engine->callInLoop([&] {
      planId = engine->faults().add(rule, engine->loop().now());
      engine->faultsChanged();
    });
    std::lock_guard lock(p.mutex);
    for (Process::Fault& f : p.faults) {
      if (f.id == id) {
        f.planId = planId;
      }
    }
  }
  return id;
}

void removeFault(uint64_t id) {
  Process& p = process();
  std::shared_ptr<Engine> engine;
  uint64_t planId = 0;
  {
    std::lock_guard lock(p.mutex);
    for (const Process::Fault& f : p.faults) {
      if (f.id == id) {
        planId = f.planId;
      }
    }
    std::erase_if(
        p.faults, [&](const Process::Fault& f) { return f.id == id; });
    engine = p.engine.lock();
  }
  if (engine && planId != 0) {
    engine->callInLoop([&] {
      engine->faults().remove(planId);
      engine->faultsChanged();
    });
  }
}

void setFaultStep(int64_t step) {
  Process& p = process();
  std::shared_ptr<Engine> engine;
  {
    std::lock_guard lock(p.mutex);
    p.faultStep = step;
    engine = p.engine.lock();
  }
  if (engine) {
    engine->callInLoop([&] {
      engine->faults().setStep(step);
      engine->faultsChanged();
    });
  }
}

bool helpEngine(const std::function<bool()>& done, TimePoint until) {
  const auto engine = Engine::current();
  return engine && !process().forkedChild && engine->loop().help(done, until);
}

void wakeEngineHelper() {
  if (const auto engine = Engine::current()) {
    engine->loop().wakeHelper();
  }
}

void shutdownEngineAtExit(Nanos limit) {
  if (process().forkedChild) {
    return;
  }
  if (auto engine = Engine::current()) {
    engine->stop(limit);
  }
}

std::string dumpRecentOperations() {
  const auto engine = Engine::current();
  return engine ? engine->recorder().dump() : std::string();
}

} // namespace resilient
