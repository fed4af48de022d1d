#include "delegate/group_impl.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/random.h"
#include "delegate/authenticated_store.h"
#include "delegate/collective_run.h"
#include "delegate/diagnosis.h"
#include "delegate/member_list.h"
#include "delegate/point_to_point_run.h"
#include "delegate/resolver.h"
#include "delegate/site_inference.h"

namespace resilient {
namespace {

// Operations up to this size are started in the caller's thread if the loop is
// asleep: about 20 us of work, where waking the loop would take as long. What
// is larger goes to the loop thread, so that isend returns at once.
constexpr uint64_t kSmallBytes = 64u << 10;

// With a secret of the job's own, whoever else writes to the store changes
// nothing unnoticed. A secret that itself lies in the store could not do that.
std::shared_ptr<KeyValue> protectedStore(
    GroupConfig& config,
    const std::vector<std::string>& secrets) {
  if (secrets.empty()) {
    return std::move(config.store);
  }
  return std::make_shared<AuthenticatedStore>(
      std::move(config.store),
      std::make_shared<RecordSeal>(
          secrets, StoreContext{config.rank, config.size, config.globalRanks}));
}

} // namespace

// The engine is acquired first, and each acquire() needs one release(). Once
// the group exists, its destructor does that, also if join() throws.
std::shared_ptr<Group> joinGroup(GroupConfig config) {
  const int64_t global = config.globalRanks.empty()
      ? config.rank
      : static_cast<int64_t>(
            config.globalRanks[static_cast<size_t>(config.rank)]);
  auto engine = Engine::acquire(*config.store, static_cast<int32_t>(global));
  std::shared_ptr<GroupImpl> group;
  try {
    group = std::make_shared<GroupImpl>(std::move(config), engine);
    group->join();
  } catch (...) {
    if (!group) {
      Engine::release(engine, Nanos(0));
    }
    throw;
  }
  return group;
}

GroupImpl::GroupImpl(GroupConfig config, std::shared_ptr<Engine> engine)
    : name_(config.name),
      rank_(config.rank),
      engine_(std::move(engine)),
      eagerConnect_(config.eagerConnect || engine_->options().eager_connect),
      wholeJob_(config.globalRanks.empty()),
      store_(protectedStore(config, engine_->ownSecrets())),
      membership_(store_, name_, rank_, config.size),
      members_(static_cast<size_t>(config.size)) {
  for (size_t r = 0; r < members_.size(); ++r) {
    members_[r].globalRank = config.globalRanks.empty()
        ? static_cast<int64_t>(r)
        : static_cast<int64_t>(config.globalRanks[r]);
    globalRanks_.insert(members_[r].globalRank);
  }
}

GroupImpl::~GroupImpl() {
  if (!Engine::inForkedChild()) {
    shutdown(Nanos(0));
  }
}

// Does not wait for the other ranks. A member may connect and send as soon as
// it reads our address. So the secret is valid and the group is registered
// before publish() writes the address. Notices that came before are taken over
// in the same call. If this rank is the last to join, it has the list already
// and reads no key.
void GroupImpl::join() {
  const Membership::Terms terms =
      membership_.agree(engine_->self(), engine_->options());
  secret_ = terms.secret;
  engine_->addSecret(secret_);
  id_ = terms.group;
  const bool there = engine_->callInLoop([this] {
    engine_->registerGroup(id_, this);
    for (const auto& early : engine_->takeEarlyNotices(id_)) {
      onNotice(early.sender, early.notice);
    }
  });
  if (!there) {
    throw StatusError(
        Status(StatusCode::kAborted, "the engine is being shut down"));
  }
  const bool infer = engine_->options().site == kInferSite;
  const std::string list = membership_.publish(
      engine_->addressText(infer ? store_->roundTrip() : Nanos(0)));
  engine_->loop().post([weak = weak_from_this(), list] {
    if (auto self = weak.lock()) {
      if (list.empty()) {
        self->learn();
      } else {
        self->learned(list);
      }
    }
  });
}

// --- any thread

// The group's number is another one in each generation, and all members know it
// from a record that has a MAC.
std::shared_ptr<const RecordSeal> GroupImpl::recordSeal() const {
  if (engine_->ownSecrets().empty()) {
    return nullptr;
  }
  StoreContext context{rank_, size(), {}};
  for (const Member& member : members_) {
    context.globalRanks.push_back(static_cast<uint64_t>(member.globalRank));
  }
  return std::make_shared<RecordSeal>(
      engine_->ownSecrets(),
      std::move(context),
      " of group " + std::to_string(id_));
}

// The function is posted under the lock and the turn is taken without it: the
// turn may run anything, and no turn may wait for mutex_ (docs/threads.md).
// postQuietly() wakes no thread; runPosted() decides who takes the turn.
uint64_t GroupImpl::submit(CollectiveSpec spec) {
  auto shared = std::make_shared<CollectiveSpec>(std::move(spec));
  uint64_t sequence = 0;
  bool posted = false;
  const bool small = shared->bytes <= 2 * kSmallBytes; // it reads and writes
  {
    std::lock_guard lock(mutex_);
    sequence = ++sequence_;
    FlightRecorder::Entry entry;
    entry.group = name_;
    entry.signature = shared->signature;
    entry.sequence = sequence;
    entry.bytes = shared->signature.count * dtypeBytes(shared->signature.dtype);
    if (!closed_) {
      const uint64_t id = engine_->recorder().begin(std::move(entry));
      posted = engine_->loop().postQuietly(
          [self = shared_from_this(), shared, sequence, id] {
            self->start(
                std::make_shared<CollectiveRun>(
                    *self, sequence, std::move(*shared), id));
          });
    }
  }
  if (posted) {
    engine_->loop().runPosted(small);
  } else {
    shared->done(Status(
        StatusCode::kAborted,
        "group " + name_ +
            " was destroyed or aborted: no further "
            "operations on it"));
  }
  return sequence;
}

void GroupImpl::submit(std::shared_ptr<PointToPointSpec> spec) {
  bool posted = false;
  const bool small = spec->bytes <= kSmallBytes;
  {
    std::lock_guard lock(mutex_);
    FlightRecorder::Entry entry;
    entry.group = name_;
    entry.signature = spec->signature;
    entry.isSend = spec->isSend;
    entry.peer = spec->peer;
    entry.tag = spec->tag;
    entry.bytes = spec->bytes;
    if (!closed_) {
      const uint64_t id = engine_->recorder().begin(std::move(entry));
      posted =
          engine_->loop().postQuietly([self = shared_from_this(), spec, id] {
            self->start(
                std::make_shared<PointToPointRun>(
                    *self,
                    ++self->lastPointToPoint_,
                    spec,
                    id,
                    self->engine_->loop().now()));
          });
    }
  }
  if (posted) {
    engine_->loop().runPosted(small);
  } else {
    spec->done(
        Status(
            StatusCode::kAborted,
            "group " + name_ +
                " was destroyed or aborted: no further "
                "operations on it"),
        -1);
  }
}

uint64_t GroupImpl::sequence() const {
  std::lock_guard lock(mutex_);
  return sequence_;
}

void GroupImpl::setSequence(uint64_t sequence) {
  std::lock_guard lock(mutex_);
  sequence_ = sequence;
}

// The notice is queued before the operations fail. It usually arrives before
// the cancellations of single messages, and says more than they do.
void GroupImpl::abort(const std::string& reason) {
  engine_->callInLoop([&] {
    const Status status(
        StatusCode::kAborted,
        "rank " + std::to_string(rank_) + " aborted the group: " + reason);
    Notice notice;
    notice.group = id_;
    notice.sequence = Notice::kWholeGroup;
    notice.code = StatusCode::kAborted;
    notice.reporter = notice.origin = rank_;
    notice.culprit = rank_;
    notice.text = status.message();
    failure_ = status;
    tell(notice);
    failAll(status);
  });
}

// Order of the steps. closed_ keeps new operations out. Pending ones fail, and
// their peers learn it through the channels, which need time to drain. Only
// then is the group unregistered, since reports and notices need it until then.
// The second failAll() is for algorithms that catch an error and go on. The
// engine comes last: releasing it may stop it.
//
// No step waits without a limit: a peer that does not acknowledge costs
// `linger`.
void GroupImpl::shutdown(Nanos linger) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    closed_ = true;
  }
  const auto deadline = std::chrono::steady_clock::now() + linger;
  if (id_ != 0) { // else it never joined
    engine_->callInLoop([this] {
      failAll(Status(StatusCode::kAborted, "the group was destroyed"));
    });
    engine_->waitUntil(deadline, [this] { return drained(); });
    engine_->callInLoop([this] {
      failAll(Status(StatusCode::kAborted, "the group was destroyed"));
      engine_->unregisterGroup(id_);
      engine_->loop().cancel(watchdog_);
      engine_->loop().cancel(lookTimer_);
    });
    engine_->resolver().forget(store_);
  }
  Engine::release(
      engine_,
      std::max<Nanos>(deadline - std::chrono::steady_clock::now(), Nanos(0)));
}

GroupStats GroupImpl::stats() {
  GroupStats stats;
  stats.group = name_;
  stats.rank = rank_;
  stats.size = size();
  stats.collectives = sequence();
  engine_->callInLoop([&] {
    stats.operationsPending = collectives_.size() + pointToPoints_.size();
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) {
        continue;
      }
      PeerStats& p = stats.peers.emplace_back();
      p.rank = r;
      p.state = "unconnected";
      if (const PeerLink* link = members_[static_cast<size_t>(r)].link) {
        link->fillStats(p);
        if (!link->usable()) {
          p.lastError = closedText(r);
        }
      }
    }
    stats.listener = engine_->listenerCounters();
    stats.relay = engine_->relayCounters();
    stats.trust = engine_->trustStats();
  });
  return stats;
}

// --- members

std::string GroupImpl::groupText() const {
  return name_.empty() ? std::string() : " of group " + name_;
}

std::string GroupImpl::describe(int rank) const {
  const Member& m = members_[static_cast<size_t>(rank)];
  std::string s = "rank " + std::to_string(rank);
  if (m.link != nullptr && m.link->address()) {
    const PeerAddress& a = *m.link->address();
    s += " (host " + a.hostName + ", pid " + std::to_string(a.pid);
    if (!a.addresses.empty()) {
      s += ", " + a.addresses.front().address.toString();
    }
    s += m.globalRank != rank
        ? ", global rank " + std::to_string(m.globalRank) + ')'
        : ")";
  }
  return s;
}

std::string GroupImpl::closedText(int rank) const {
  return describe(rank) + ' ' +
      members_[static_cast<size_t>(rank)].link->closedBecause().message();
}

std::string GroupImpl::pathSummary(int rank) const {
  const Member& m = members_[static_cast<size_t>(rank)];
  return "rank " + std::to_string(rank) + ": " +
      (m.link == nullptr ? "address unknown" : m.link->pathSummary());
}

// For members that have not connected to us yet: see onLook().
void GroupImpl::onOurAddresses() {
  engine_->resolver().tell(
      store_, membership_.addressKey(rank_), engine_->addressText());
}

// Some operation waits for this rank. Idempotent. Either the address is known
// and the link is made now, or the list of members is read; the timer then
// looks for the rank's own key as well, see onLook().
void GroupImpl::need(int rank) {
  Member& m = members_[static_cast<size_t>(rank)];
  m.needed = true;
  if (m.address) {
    const auto address = std::move(m.address);
    reach(rank, *address);
  }
  if (m.link == nullptr) {
    learn();
    engine_->resolver().hurry();
  }
  if (lookTimer_ == 0) {
    lookIn(kFirstLook);
  }
}

void GroupImpl::eachMember(
    const std::function<void(const PeerAddress&, int64_t globalRank)>& call)
    const {
  for (const Member& m : members_) {
    if (m.address) {
      call(*m.address, m.globalRank);
    } else if (m.link != nullptr && m.link->address() && m.link->usable()) {
      call(*m.link->address(), m.globalRank);
    }
  }
}

bool GroupImpl::meet(const Uid& process) {
  for (int r = 0; r < size(); ++r) {
    Member& m = members_[static_cast<size_t>(r)];
    if (m.address && m.address->uid == process) {
      const auto address = std::move(m.address);
      reach(r, *address);
      return true;
    }
  }
  return false;
}

// The caller's claim decides only which keys are read. It is let in if the
// store names its uid.
void GroupImpl::lookUp(int64_t globalRank) {
  if (membersKnown_) {
    return;
  }
  learn();
  for (int r = 0; r < size(); ++r) {
    const Member& m = members_[static_cast<size_t>(r)];
    if (r != rank_ && m.globalRank == globalRank && m.link == nullptr) {
      askForAddress(r);
    }
  }
}

void GroupImpl::addMemberIps(std::set<std::string>& ips) const {
  for (const Member& m : members_) {
    if (m.address) {
      for (const NicAddress& nic : m.address->addresses) {
        ips.insert(nic.address.ip());
      }
    }
  }
}

// The only place that sets Member::link. Notices are heard before records are
// posted: a notice may fail an operation, which then withdraws its records from
// `waiting`. post() calls nothing back at once, because results go through the
// CompletionQueue; so the list that is being walked stays valid.
void GroupImpl::reach(int rank, const PeerAddress& address) {
  Member& m = members_[static_cast<size_t>(rank)];
  m.link = &engine_->link(address.uid);
  m.link->setAddress(address, secret_, static_cast<int32_t>(m.globalRank));
  if (eagerConnect_ && !m.eager) {
    m.eager = true;
    m.link->addInterest();
  }
  if (m.queryWaiting) {
    ask(m);
  }
  for (const auto& heard : std::exchange(m.unproven, {})) {
    hear(heard);
  }
  for (Record* record : std::exchange(m.waiting, {})) {
    record->post(*m.link);
  }
}

void GroupImpl::lookIn(Nanos pause) {
  lookPause_ = pause;
  // Weak: news of the members may come while the group ends, and then sets a
  // timer that shutdown() no longer cancels.
  lookTimer_ = engine_->loop().after(pause, [weak = weak_from_this()] {
    if (auto self = weak.lock()) {
      self->lookTimer_ = 0;
      self->onLook();
    }
  });
}

// Operations have waited for ranks that are not connected. Either not all
// members have joined: then a message between two that have may still pass,
// and the store can tell who is missing. Or our address of the rank is no
// longer right: then it has set its own key anew.
void GroupImpl::onLook() {
  if (collectives_.empty() && pointToPoints_.empty()) {
    return;
  }
  bool any = false;
  for (int r = 0; r < size(); ++r) {
    const Member& m = members_[static_cast<size_t>(r)];
    const bool missing = m.link == nullptr || m.link->cut();
    if (m.needed && missing) {
      any = true;
      askForAddress(r);
    }
  }
  if (any) {
    engine_->resolver().hurry();
    lookIn(std::min(2 * lookPause_, kMaxLook));
  }
}

// The callbacks run in a thread of the resolver, and may still come after
// forget(): they only post.
void GroupImpl::askForAddress(int rank) {
  Member& m = members_[static_cast<size_t>(rank)];
  if (m.asking) {
    return;
  }
  m.asking = true;
  std::weak_ptr<GroupImpl> weak = weak_from_this();
  // The loop, not the group, must outlive the seeking.
  std::shared_ptr<Engine> engine = engine_;
  const auto post = [weak, engine](auto call) {
    engine->loop().post([weak, call] {
      if (auto self = weak.lock()) {
        call(*self);
      }
    });
  };
  Resolver::Callbacks callbacks;
  callbacks.found = [post, rank](const std::string& text) {
    post([rank, text](GroupImpl& self) { self.onAddressText(rank, text); });
  };
  callbacks.lost = [post, rank](const std::string&) {
    post([rank](GroupImpl& self) {
      self.members_[static_cast<size_t>(rank)].asking = false;
    });
  };
  // Only those that wait for this rank ask for it.
  engine_->resolver().seek(
      store_, membership_.addressKey(rank), 1, std::move(callbacks));
}

// The text comes from the store, which any process of the job can write: a
// reason for which the rank could not join, an address, or nonsense. A rank
// whose uid is ours would be reached through ourselves; two ranks in one
// process cannot work.
void GroupImpl::onAddressText(int rank, const std::string& text) {
  Member& m = members_[static_cast<size_t>(rank)];
  m.asking = false;
  if (const auto why = Membership::refusal(text)) {
    failWhole(Membership::couldNotJoin(rank, *why));
    return;
  }
  PeerAddress address;
  const Status status = PeerAddress::parse(text, address);
  if (!status.ok()) {
    logMessage(
        LogLevel::kError,
        "group " + name_ + ": the store gives no usable address for rank " +
            std::to_string(rank) + ": " + status.message());
    return; // operations with it end by their timeouts
  }
  if (address.uid == engine_->self().uid) {
    failWhole(inOneProcess(rank_, rank, address));
    return;
  }
  if (m.link == nullptr) {
    reach(rank, address);
  } else if (m.link->cut()) {
    m.link->onStoredAddresses(text);
  }
}

void GroupImpl::failWhole(const Status& status) {
  if (failure_.ok()) {
    failure_ = status;
    failAll(failure_);
  }
}

void GroupImpl::learn() {
  if (learning_ || membersKnown_) {
    return;
  }
  learning_ = true;
  std::weak_ptr<GroupImpl> weak = weak_from_this();
  std::shared_ptr<Engine> engine = engine_; // as in askForAddress()
  Resolver::Callbacks callbacks;
  callbacks.found = [weak, engine](const std::string& list) {
    engine->loop().post([weak, list] {
      if (auto self = weak.lock()) {
        self->learned(list);
      }
    });
  };
  callbacks.lost = [weak, engine](const std::string& error) {
    engine->loop().post([weak, error] {
      if (auto self = weak.lock()) {
        self->onStoreLost(error);
      }
    });
  };
  engine_->resolver().seek(
      store_, membership_.listKey(), size(), std::move(callbacks));
}

// How it works. The whole group fails if a rank has refused or if the list
// cannot be read. Otherwise: the topology first, since runs read it; then
// addresses, links for members that are needed, notices that can now be proved,
// and the records of collectives; then callers that wait unread at the engine;
// last the collectives that wait for the topology, which may end in that call
// and start others.
//
// The list may come twice, from the store and as the result of publish(): only
// the first one counts. A topology that setTopology() has set is kept.
void GroupImpl::learned(const std::string& list) {
  learning_ = false;
  if (membersKnown_) {
    return;
  }
  if (const auto why = Membership::refusal(list)) {
    failWhole(
        Status(StatusCode::kInvalidArgument, "a rank could not join: " + *why));
    return;
  }
  std::vector<PeerAddress> members;
  const Status status = parseMemberList(list, size(), members);
  if (!status.ok()) {
    failWhole(status);
    return;
  }
  membersKnown_ = true;
  const std::vector<std::string> sites = sitesOf(members);
  if (wholeJob_) {
    engine_->checkSites(sites);
    if (const auto inferred = inferSites(members);
        rank_ == 0 && !inferred.empty()) {
      logMessage(LogLevel::kWarning, describeSites(inferred));
    }
  }
  if (!topology_) {
    topology_ = std::make_shared<Topology>(
        sites,
        hostsOf(members),
        algorithmChoiceFrom(engine_->options().collective_algorithm),
        siteRoundTripS(members));
  }
  for (int r = 0; r < size(); ++r) {
    Member& m = members_[static_cast<size_t>(r)];
    if (r != rank_ && m.link == nullptr) {
      m.address = std::make_unique<PeerAddress>(
          std::move(members[static_cast<size_t>(r)]));
      if (m.needed || eagerConnect_) {
        need(r);
      }
    }
    for (const auto& heard : std::exchange(m.unproven, {})) {
      hear(heard);
    }
    for (Record* record : std::exchange(m.waitingForAll, {})) {
      record->post(*m.link);
    }
  }
  engine_->membersKnown();
  const auto runs = collectives_; // they may end, and others begin
  for (const auto& [sequence, run] : runs) {
    run->onTopology();
  }
}

// Operations that need an address that is still unknown can never go on.
void GroupImpl::onStoreLost(const std::string& error) {
  learning_ = false; // a later operation tries again
  const auto unknown = [&](const std::string& what) {
    return Status(
        StatusCode::kNetwork,
        what + " not known, since the store fails (" + error +
            "): the process that serves it, usually that of rank 0, has most "
            "likely ended. It must stay until all ranks have met; a barrier "
            "before its end sees to that");
  };
  const auto collectives = collectives_; // fail() removes
  for (const auto& [sequence, run] : collectives) {
    run->fail(
        unknown("the addresses of the other ranks are"), /*tellOthers=*/true);
  }
  const auto pointToPoints = pointToPoints_;
  for (const auto& [id, run] : pointToPoints) {
    const int peer = run->spec().peer;
    if (peer >= 0 && members_[static_cast<size_t>(peer)].link == nullptr) {
      run->fail(unknown("the address of rank " + std::to_string(peer) + " is"));
    }
  }
}

std::shared_ptr<const Topology> GroupImpl::topology(
    Nanos timeout,
    void (*meanwhile)()) {
  std::shared_ptr<const Topology> found;
  Status failure;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto known = [&] {
    learn();
    found = topology_;
    failure = failure_;
    return found != nullptr || !failure.ok();
  };
  const bool over = engine_->waitUntil(deadline, known, meanwhile);
  if (!failure.ok()) {
    throw StatusError(failure);
  }
  if (!over) {
    throw StatusError(Status(
        StatusCode::kTimeout,
        timedOutText(timeout) + "group " + name_ + ": not all of its " +
            std::to_string(size()) + " ranks have joined: were all started?"));
  }
  return found;
}

void GroupImpl::setTopology(std::shared_ptr<const Topology> topology) {
  engine_->callInLoop([&] { topology_ = std::move(topology); });
}

// A collective waits for all members even if the peer's link exists, see the
// header. need() is called for a link that is not connected, which starts the
// timer that looks for a new address.
void GroupImpl::postWhenKnown(Record& record, bool collective) {
  Member& m = members_[static_cast<size_t>(record.peer())];
  if (m.link == nullptr || m.link->cut()) {
    need(record.peer());
  }
  if (collective && !membersKnown_) {
    learn();
    m.waitingForAll.push_back(&record);
  } else if (m.link == nullptr) {
    m.waiting.push_back(&record);
  } else {
    record.post(*m.link);
  }
}

void GroupImpl::forgetWaiting(Record& record) {
  if (record.peer() >= 0) {
    Member& m = members_[static_cast<size_t>(record.peer())];
    std::erase(m.waiting, &record);
    std::erase(m.waitingForAll, &record);
  }
}

bool GroupImpl::drained() const {
  return std::all_of(
      members_.begin(), members_.end(), [group = id_](const Member& m) {
        return m.link == nullptr || !m.link->usable() ||
            m.link->channel().drained(group);
      });
}

bool GroupImpl::allOthersGone() const {
  for (int r = 0; r < size(); ++r) {
    const PeerLink* link = members_[static_cast<size_t>(r)].link;
    if (r != rank_ && (link == nullptr || link->usable())) {
      return false;
    }
  }
  return size() > 1;
}

// Operations that wait for one rank fail with its channel. Receives from any
// rank fail when there is none left.
void GroupImpl::onLinkClosed(const PeerLink& link) {
  const auto member = std::ranges::find(
      members_, &link, [](const Member& m) { return m.link; });
  if (member == members_.end() || !allOthersGone()) {
    return;
  }
  const Status why(
      link.closedBecause().code(),
      "no rank is left to send: " +
          closedText(static_cast<int>(member - members_.begin())));
  const auto runs = pointToPoints_; // fail() removes
  for (const auto& [id, run] : runs) {
    if (run->waitsForAnyRank()) {
      run->fail(why);
    }
  }
}

// --- operations

// The run is registered before it starts, since it may end within start(), for
// example alone in the group.
void GroupImpl::start(std::shared_ptr<CollectiveRun> run) {
  lastStarted_ = std::max(lastStarted_, run->sequence());
  lastSignature_ = run->spec().signature;
  collectives_.emplace(run->sequence(), run);
  if (VerbsLoans* const loans = engine_->loans()) {
    loans->meetGpu(run->spec().gpu);
    run->setLoan(loans->lend(run->spec().tensors));
  }
  run->start();
}

// The check for a receive from any source comes after the start: if its message
// is there already, it ends with that, although the sender has left
// (test_a_receive_from_any_source_gets_what_the_gone_have_sent).
void GroupImpl::start(std::shared_ptr<PointToPointRun> run) {
  pointToPoints_.emplace(run->id(), run);
  if (VerbsLoans* const loans = engine_->loans()) {
    const std::span<std::byte> memory(
        static_cast<std::byte*>(run->spec().data), run->spec().bytes);
    loans->meetGpu(run->spec().gpu);
    run->setLoan(loans->lend({&memory, 1}));
  }
  run->start();
  if (!failure_.ok()) {
    run->fail(failure_);
  } else if (run->waitsForAnyRank() && allOthersGone()) {
    run->fail(Status(StatusCode::kPeerDied, "no rank is left to send"));
  }
}

std::optional<Status> GroupImpl::earlyFailure(uint64_t sequence) {
  if (!failure_.ok()) {
    return failure_;
  }
  auto found = earlyFailures_.find(sequence);
  if (found == earlyFailures_.end()) {
    return std::nullopt;
  }
  Status status = found->second;
  earlyFailures_.erase(found);
  return status;
}

// The mailbox learns the outcome first, and refuses stragglers with it. The run
// leaves the table before the others are told and before `done`, which may free
// what the operation had borrowed. The run itself goes to the graveyard,
// because its coroutine is on the stack.
void GroupImpl::finished(
    CollectiveRun& run,
    const Status& status,
    int culprit,
    bool tellOthers) {
  engine_->mailbox().end(id_, run.sequence(), status);
  engine_->recorder().end(
      run.recordId(),
      engine_->loop().now() - run.startedAt(),
      status.message());
  if (!status.ok()) {
    engine_->onFirstFailure(status);
    failedHere_.insert(run.sequence());
    if (failedHere_.size() > kToldMax) {
      failedHere_.erase(failedHere_.begin());
    }
  }
  std::shared_ptr<CollectiveRun> ended;
  auto found = collectives_.find(run.sequence());
  if (found != collectives_.end()) {
    ended = std::move(found->second);
    engine_->destroyLater(ended);
    collectives_.erase(found);
  }
  if (!status.ok() && tellOthers) {
    Notice notice;
    notice.group = id_;
    notice.sequence = run.sequence();
    notice.code = status.code();
    notice.reporter = notice.origin = rank_;
    notice.culprit = culprit;
    // The others add the operation and what they know of it themselves.
    notice.text = run.failure().message();
    tell(notice);
  }
  auto done = std::move(run.spec().done);
  if (run.loan() == 0) {
    done(status);
    return;
  }
  takeBack(
      run.loan(),
      status,
      // Keeps what the operation has borrowed.
      [ended = std::move(ended), done = std::move(done)](const Status& s) {
        done(s);
      },
      std::move(run.spec().hold));
}

void GroupImpl::finished(
    PointToPointRun& run,
    const Status& status,
    int sourceRank) {
  engine_->recorder().end(
      run.recordId(),
      engine_->loop().now() - run.startedAt(),
      status.message());
  if (!status.ok()) {
    engine_->onFirstFailure(status);
  }
  auto done = std::move(run.spec().done);
  auto hold = std::move(run.spec().hold);
  const VerbsLoans::Loan loan = run.loan();
  std::shared_ptr<PointToPointRun> ended;
  auto found = pointToPoints_.find(run.id());
  if (found != pointToPoints_.end()) {
    ended = std::move(found->second);
    engine_->destroyLater(ended);
    pointToPoints_.erase(found);
  }
  if (loan == 0) {
    done(status, sourceRank);
    return;
  }
  takeBack(
      loan,
      status,
      [ended = std::move(ended), done = std::move(done), sourceRank](
          const Status& s) { done(s, sourceRank); },
      std::move(hold));
}

// The memory of an operation that has failed is its owner's again when no RDMA
// device can access it.
void GroupImpl::takeBack(
    VerbsLoans::Loan loan,
    const Status& status,
    std::function<void(const Status&)> done,
    std::function<std::shared_ptr<void>()> hold) {
  VerbsLoans* const loans = engine_->loans();
  if (status.ok()) {
    loans->end(loan);
    done(status);
  } else {
    loans->revoke(
        loan,
        [self = shared_from_this(), status, done = std::move(done)](
            const Status& held) {
          done(
              held.ok() ? status
                        : Status(
                              status.code(),
                              status.message() + "; " + held.message()));
        },
        std::move(hold));
  }
}

// One timer for the deadlines of all operations. It is set when an operation
// has an earlier one, and left alone when operations end: so the many
// operations of a healthy job cost one timer per time-out, not each its own.
void GroupImpl::watch(TimePoint at) {
  if (at >= watchdogAt_) {
    return;
  }
  EventLoop& loop = engine_->loop();
  loop.cancel(watchdog_);
  watchdogAt_ = at;
  watchdog_ = loop.at(at, [this] { onWatchdog(); });
}

// Due runs are collected before the first onCheck(), which ends runs and
// changes the tables. The timer is set again first, so a run that arms an
// earlier deadline can move it.
void GroupImpl::onWatchdog() {
  watchdog_ = 0;
  watchdogAt_ = kNever;
  // Frames of this turn have ended their operations, even if the turn is late:
  // the process was stopped, or got no processor.
  engine_->completions().drain();
  const TimePoint now = engine_->loop().now();
  std::vector<std::shared_ptr<CollectiveRun>> collectives;
  std::vector<std::shared_ptr<PointToPointRun>> pointToPoints;
  TimePoint next = kNever;
  for (const auto& [sequence, run] : collectives_) {
    if (run->checkAt() <= now) {
      collectives.push_back(run);
    } else {
      next = std::min(next, run->checkAt());
    }
  }
  for (const auto& [id, run] : pointToPoints_) {
    if (run->checkAt() <= now) {
      pointToPoints.push_back(run);
    } else {
      next = std::min(next, run->checkAt());
    }
  }
  if (next != kNever) {
    watch(next);
  }
  for (const auto& run : collectives) {
    run->onCheck();
  }
  for (const auto& run : pointToPoints) {
    run->onCheck();
  }
}

void GroupImpl::failAll(const Status& status) {
  while (!collectives_.empty()) {
    const std::shared_ptr<CollectiveRun> run = collectives_.begin()->second;
    run->fail(status, /*tellOthers=*/false);
    if (collectives_.contains(run->sequence())) {
      break; // it catches errors and goes on; it ends in its own time
    }
  }
  while (!pointToPoints_.empty()) {
    const std::shared_ptr<PointToPointRun> run = pointToPoints_.begin()->second;
    run->fail(status);
  }
}

// --- news from and for the others

// Ranks need not be connected to each other, so each passes on what it hears:
// the news take every connection once, in both directions, and reach whoever
// waits for a rank that waits for one that knows.
void GroupImpl::tell(const Notice& notice) {
  if (notice.sequence <= toldUpTo_ ||
      !told_.emplace(notice.sequence, notice).second) {
    return;
  }
  if (told_.size() > kToldMax) {
    toldUpTo_ = told_.begin()->first;
    told_.erase(told_.begin());
  }
  engine_->eachLink([&](PeerLink& link) { tell(notice, link); });
}

void GroupImpl::tell(const Notice& notice, PeerLink& link) {
  // Not by members_ alone: it may have connected to us before we looked for it.
  // Nor by rank alone: another group may count ranks in its own way, and the
  // link knows that of one group. The culprit, too: it may be alive, and wait
  // for us.
  const bool member = globalRanks_.contains(link.globalRank()) ||
      std::ranges::any_of(members_,
                          [&](const Member& m) { return m.link == &link; });
  if (member && link.usable()) {
    link.channel().sendControl(encode(notice));
  }
}

void GroupImpl::onLinkUp(PeerLink& link) {
  for (const auto& [sequence, notice] : told_) {
    tell(notice, link);
  }
}

// If the addresses of both ends have changed, only the store can tell them.
void GroupImpl::onLinkCut(const PeerLink& link) {
  const auto member = std::ranges::find(
      members_, &link, [](const Member& m) { return m.link; });
  if (member != members_.end() &&
      !(collectives_.empty() && pointToPoints_.empty())) {
    need(static_cast<int>(member - members_.begin()));
  }
}

void GroupImpl::onNotice(const Uid& sender, const Notice& notice) {
  const auto isMember = [&](int32_t rank) {
    return rank >= 0 && rank < size();
  };
  if (!isMember(notice.reporter) || !isMember(notice.origin) ||
      notice.reporter == rank_) {
    return;
  }
  // A path is in the middle of reading: act from the top of the loop.
  engine_->loop().post([weak = weak_from_this(), sender, notice] {
    if (auto self = weak.lock()) {
      self->hear({sender, notice});
    }
  });
}

// Every process with the secret can call itself any rank; only the store says
// which process a rank is.
void GroupImpl::hear(const Engine::EarlyNotice& heard) {
  Member& m = members_[static_cast<size_t>(heard.notice.reporter)];
  const Uid* uid = m.link != nullptr ? &m.link->uid()
      : m.address                    ? &m.address->uid
                                     : nullptr;
  if (uid == nullptr) {
    m.unproven.push_back(heard);
    if (m.unproven.size() > kUnprovenMax) {
      m.unproven.pop_front();
    }
    learn();
  } else if (*uid == heard.sender) {
    act(heard.notice);
  } else {
    logMessage(
        LogLevel::kDebug,
        "group " + name_ + ": a process that is not rank " +
            std::to_string(heard.notice.reporter) +
            " reports a failure in its name: ignored");
  }
}

// Four cases: the group as a whole; a collective that runs here; one that has
// not begun here, which then fails when it begins; and one that has ended here.
// The last matters for a mismatch only: any other failure elsewhere does not
// make our result wrong.
void GroupImpl::act(const Notice& notice) {
  Notice ours = notice;
  ours.reporter = rank_; // for us it has failed, too
  tell(ours);
  const Status status(
      notice.code,
      "rank " + std::to_string(notice.origin) + " reports: " + notice.text);
  if (notice.sequence == Notice::kWholeGroup) {
    if (failure_.ok()) {
      failure_ = status;
      failAll(status);
    }
    return;
  }
  auto found = collectives_.find(notice.sequence);
  if (found != collectives_.end()) {
    const std::shared_ptr<CollectiveRun> run = found->second;
    run->fail(status, /*tellOthers=*/false);
  } else if (notice.sequence > lastStarted_) {
    earlyFailures_.emplace(notice.sequence, status);
    // Collectives that far apart are not waited for by anyone.
    if (earlyFailures_.size() > kEarlyFailuresMax) {
      earlyFailures_.erase(earlyFailures_.begin());
    }
  } else if (notice.code == StatusCode::kMismatch) {
    // Our part may have ended well (the root of a small broadcast waits for
    // nobody), but it was another operation than theirs: whatever comes next
    // would mix data up.
    endByMismatch(notice.sequence, status.message());
  }
}

void GroupImpl::onMismatch(
    uint64_t sequence,
    const OpSignature& local,
    const FrameHeader& remote) {
  const Status status(
      StatusCode::kMismatch,
      "rank " + std::to_string(remote.sourceRank) + " called " +
          remote.signature.toString() + " where rank " + std::to_string(rank_) +
          " called " + local.toString() +
          ". All ranks must call the same operations in the same order with "
          "the same shapes and types");
  auto found = collectives_.find(sequence);
  if (found != collectives_.end()) {
    const std::shared_ptr<CollectiveRun> run = found->second;
    run->fail(status, /*tellOthers=*/true);
    return;
  }
  endByMismatch(sequence, status.message());
}

// Unless it has failed here as well, the results of one side are wrong.
void GroupImpl::endByMismatch(uint64_t sequence, const std::string& cause) {
  if (!failure_.ok() || failedHere_.contains(sequence)) {
    return;
  }
  const std::string why =
      "collective #" + std::to_string(sequence) + ": " + cause;
  logMessage(LogLevel::kError, "group " + name_ + ": " + why);
  Notice notice;
  notice.group = id_;
  notice.sequence = Notice::kWholeGroup;
  notice.code = StatusCode::kMismatch;
  notice.reporter = notice.origin = rank_;
  notice.text = why;
  tell(notice);
  failure_ = Status(StatusCode::kMismatch, why);
  failAll(failure_);
}

// Reports of earlier queries stay until they are replaced; kFreshReport tells
// old ones apart.
void GroupImpl::query(int rank) {
  for (int r = 0; r < size(); ++r) {
    if (r == rank_ || (rank >= 0 && r != rank)) {
      continue;
    }
    Member& m = members_[static_cast<size_t>(r)];
    if (m.link == nullptr) {
      m.queryWaiting = true;
      need(r);
    } else {
      ask(m);
    }
  }
}

void GroupImpl::ask(Member& member) {
  member.queryWaiting = false;
  PeerLink& link = *member.link;
  if (!link.usable()) {
    return;
  }
  member.askedAt = engine_->loop().now();
  Query query;
  query.group = id_;
  query.asker = rank_;
  link.channel().sendControl(encode(query));
  if (link.state() == PeerLink::State::kUnconnected) {
    // Connects, and so finds out whether it is there.
    link.addInterest();
    link.dropInterest();
  }
}

Report GroupImpl::report() const {
  Report r;
  r.group = id_;
  r.reporter = rank_;
  r.lastSequence = lastStarted_;
  r.signature = lastSignature_;
  if (!collectives_.empty()) {
    const CollectiveRun& run = *collectives_.begin()->second;
    r.running = true;
    r.runningSequence = run.sequence();
    r.signature = run.spec().signature;
    r.waitingFor = run.waitingFor();
    r.silentNanos = -1;
    if (r.waitingFor >= 0) {
      const PeerLink* link = members_[static_cast<size_t>(r.waitingFor)].link;
      if (const auto heard = link ? link->heardAt() : std::nullopt) {
        r.silentNanos = (engine_->loop().now() - *heard).count();
      }
    }
  }
  size_t listed = 0;
  for (const auto& [id, run] : pointToPoints_) {
    if (listed++ == kListedInReport) {
      r.pending += " and " +
          std::to_string(pointToPoints_.size() - kListedInReport) + " more";
      break;
    }
    r.pending += (listed == 1 ? "" : "; ") + run->describe();
  }
  return r;
}

// Only a member's own process may report in its name.
void GroupImpl::onReport(const PeerLink& sender, const Report& report) {
  if (report.reporter < 0 || report.reporter >= size()) {
    return;
  }
  Member& m = members_[static_cast<size_t>(report.reporter)];
  if (m.link != &sender) {
    return; // it was not asked
  }
  m.report = report;
  m.reportAt = engine_->loop().now();
}

} // namespace resilient
