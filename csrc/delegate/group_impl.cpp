#include "delegate/group_impl.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>

#include "base/log.h"
#include "base/random.h"
#include "delegate/collective_run.h"
#include "delegate/diagnosis.h"
#include "delegate/point_to_point_run.h"
#include "delegate/resolver.h"
#include "delegate/topology_record.h"

namespace resilient {
namespace {

constexpr size_t kSecretBytes = 32;

// In place of the address of a rank that could not join, before the reason.
const std::string kJoinFailed = "failed: ";

// Operations up to this size are started in the caller's thread if the loop is
// asleep: about 20 us of work, where waking the loop would take as long. What
// is larger goes to the loop thread, so that isend returns at once.
constexpr uint64_t kSmallBytes = 64u << 10;

std::string toHex(const uint8_t* data, size_t n) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string s;
  for (size_t i = 0; i < n; ++i) {
    s += kDigits[data[i] >> 4];
    s += kDigits[data[i] & 15];
  }
  return s;
}

std::string randomHex(size_t bytes) {
  std::vector<uint8_t> raw(bytes);
  fillRandom(raw.data(), raw.size());
  return toHex(raw.data(), raw.size());
}

std::vector<std::string> wordsOf(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    words.push_back(std::move(word));
  }
  return words;
}

} // namespace

std::vector<std::string> KeyValue::getAll(
    const std::vector<std::string>& keys) {
  std::vector<std::string> values(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!tryGet(keys[i], values[i])) {
      throw StatusError(Status(
          StatusCode::kInternal, "the store has lost the key " + keys[i]));
    }
  }
  return values;
}

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
      store_(std::move(config.store)),
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

std::string GroupImpl::key(const char* what, int rank) const {
  return std::string("resilient/") + what + '/' + std::to_string(generation_) +
      '/' + std::to_string(rank);
}

// What the ranks tell each other through the store:
//   resilient/generation/<rank>   how often this rank has joined this group;
//                                 a group made again on the same store must
//                                 not read what the last one left
//   resilient/over/<generation>/0 a process of this generation has ended, and
//                                 another one has its rank: whoever has not
//                                 joined it belongs to a later one
//   resilient/job/<generation>/0  a number for the group, the algorithms it
//                                 uses, and the secret unless one is given by
//                                 option
//   resilient/at/<generation>/<rank>  PeerAddress
//   resilient/joined/<generation>/0   how many have written the latter
//   resilient/topology/<generation>/0 where all are (topology_record.h), from
//                                 the last of them
// Paper: SHIFT §4.2, what it takes to connect goes through a key-value store.
void GroupImpl::join() {
  countGeneration();
  const std::string& given = engine_->options().secret;
  const std::string& algorithm = engine_->options().collective_algorithm;
  std::string job = randomHex(8) + ' ' + algorithm;
  if (given.empty()) {
    job += ' ' + randomHex(kSecretBytes);
  }
  const std::vector<std::string> agreed =
      wordsOf(store_->setIfAbsent(key("job", 0), job));
  const bool numbered = !agreed.empty() && agreed[0].size() == 16 &&
      std::from_chars(agreed[0].data(), agreed[0].data() + 16, id_, 16).ptr ==
          agreed[0].data() + 16;
  if (!numbered || agreed.size() != (given.empty() ? 3 : 2) ||
      (given.empty() && agreed[2].size() != 2 * kSecretBytes)) {
    id_ = 0;
    refuseToJoin(Status(
        StatusCode::kInvalidArgument,
        "group " + name_ +
            ": the store holds a key of the group that this rank cannot use. "
            "Either all ranks are given TORCH_RESILIENT_SECRET (or "
            "_SECRET_FILE) or none, and all run the same version"));
  }
  if (agreed[1] != algorithm) {
    id_ = 0;
    refuseToJoin(Status(
        StatusCode::kInvalidArgument,
        "group " + name_ + ": collective_algorithm is \"" + algorithm +
            "\" on rank " + std::to_string(rank_) + " (host " +
            engine_->self().hostName + ") and \"" + agreed[1] +
            "\" on the rank that came first. Set "
            "TORCH_RESILIENT_COLLECTIVE_ALGORITHM alike on all ranks"));
  }
  secret_ = given.empty() ? agreed[2] : given;
  engine_->addSecret(secret_);
  resolverStore_ = store_->clone();
  std::weak_ptr<GroupImpl> weak = weak_from_this();
  const bool there = engine_->callInLoop([this] {
    engine_->registerGroup(id_, this);
    for (const Notice& n : engine_->takeEarlyNotices(id_)) {
      onNotice(n);
    }
  });
  if (!there) {
    throw StatusError(
        Status(StatusCode::kAborted, "the engine is being shut down"));
  }
  store_->set(key("at", rank_), engine_->record());
  if (size() == 1 || store_->add(key("joined", 0), 1) == size()) {
    publishTopology();
  }
  if (wholeJob_ && engine_->namesSites()) {
    engine_->loop().post([weak] {
      if (auto self = weak.lock()) {
        self->learn();
      }
    });
  }
  if (eagerConnect_) {
    engine_->loop().post([weak] {
      if (auto self = weak.lock()) {
        for (int r = 0; r < self->size(); ++r) {
          if (r != self->rank_) {
            self->seek(r);
          }
        }
      }
    });
  }
}

// When a job is restarted, not all ranks may have come as far before.
void GroupImpl::countGeneration() {
  const std::string count = "resilient/generation/" + std::to_string(rank_);
  const PeerAddress& self = engine_->self();
  generation_ = store_->add(count, 1) - 1;
  std::string last, over;
  PeerAddress before;
  if (generation_ > 0 && store_->tryGet(key("at", rank_), last) &&
      PeerAddress::parse(last, before).ok() &&
      (before.hostId != self.hostId || before.pid != self.pid)) {
    store_->set(key("over", 0), "1");
  }
  ++generation_;
  while (store_->tryGet(key("over", 0), over)) {
    generation_ = store_->add(count, 1);
  }
}

// Tells the others, so that they need not wait for their time-outs.
void GroupImpl::refuseToJoin(const Status& status) {
  const std::string text = kJoinFailed + status.message();
  store_->set(key("at", rank_), text);
  store_->set(key("topology", 0), text);
  throw StatusError(status);
}

// By the last rank to join: all the addresses are there.
void GroupImpl::publishTopology() {
  std::vector<std::string> keys;
  for (int r = 0; r < size(); ++r) {
    keys.push_back(key("at", r));
  }
  std::vector<PeerAddress> members(keys.size());
  size_t r = 0;
  for (const std::string& text : store_->getAll(keys)) {
    const Status status = PeerAddress::parse(text, members[r++]);
    if (!status.ok()) {
      refuseToJoin(status);
    }
  }
  std::string text;
  const Status status = topologyText(members, text);
  if (!status.ok()) {
    refuseToJoin(status);
  }
  store_->set(key("topology", 0), text);
}

// --- any thread

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

void GroupImpl::submit(PointToPointSpec spec) {
  auto shared = std::make_shared<PointToPointSpec>(std::move(spec));
  bool posted = false;
  const bool small = shared->bytes <= kSmallBytes;
  {
    std::lock_guard lock(mutex_);
    FlightRecorder::Entry entry;
    entry.group = name_;
    entry.signature = shared->signature;
    entry.isSend = shared->isSend;
    entry.peer = shared->peer;
    entry.tag = shared->tag;
    entry.bytes = shared->bytes;
    if (!closed_) {
      const uint64_t id = engine_->recorder().begin(std::move(entry));
      posted =
          engine_->loop().postQuietly([self = shared_from_this(), shared, id] {
            self->start(
                std::make_shared<PointToPointRun>(
                    *self,
                    ++self->lastPointToPoint_,
                    std::move(*shared),
                    id,
                    self->engine_->loop().now()));
          });
    }
  }
  if (posted) {
    engine_->loop().runPosted(small);
  } else {
    shared->done(
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

void GroupImpl::abort(const std::string& reason) {
  engine_->callInLoop([&] {
    const Status status(
        StatusCode::kAborted,
        "rank " + std::to_string(rank_) + " aborted the group: " + reason);
    Notice notice;
    notice.group = id_;
    notice.sequence = Notice::kWholeGroup;
    notice.code = StatusCode::kAborted;
    notice.reporter = rank_;
    notice.culprit = rank_;
    notice.text = status.message();
    failure_ = status;
    tell(notice);
    failAll(status);
  });
}

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
    });
    engine_->resolver().forget(resolverStore_);
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
      }
    }
    stats.listener = engine_->listenerCounters();
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

std::string GroupImpl::pathSummary(int rank) const {
  const Member& m = members_[static_cast<size_t>(rank)];
  return "rank " + std::to_string(rank) + ": " +
      (m.link == nullptr ? "address unknown" : m.link->pathSummary());
}

void GroupImpl::onOurAddresses() {
  engine_->resolver().tell(resolverStore_, key("at", rank_), engine_->record());
}

void GroupImpl::seek(int rank) {
  Member& m = members_[static_cast<size_t>(rank)];
  if (m.seeking || m.link != nullptr) {
    return;
  }
  m.seeking = true;
  std::weak_ptr<GroupImpl> weak = weak_from_this();
  // The loop, not the group, must outlive the seeking.
  std::shared_ptr<Engine> engine = engine_;
  engine_->resolver().seek(
      resolverStore_,
      key("at", rank),
      [weak, engine, rank](const std::string& text) {
        engine->loop().post([weak, rank, text] {
          if (auto self = weak.lock()) {
            self->resolved(rank, text);
          }
        });
      });
}

void GroupImpl::resolved(int rank, const std::string& text) {
  Member& m = members_[static_cast<size_t>(rank)];
  if (text.starts_with(kJoinFailed)) {
    failWhole(Status(
        StatusCode::kInvalidArgument,
        "rank " + std::to_string(rank) +
            " could not join: " + text.substr(kJoinFailed.size())));
    return;
  }
  PeerAddress address;
  const Status status = PeerAddress::parse(text, address);
  if (!status.ok() || address.uid == engine_->self().uid) {
    logMessage(
        LogLevel::kError,
        "group " + name_ + ": the store gives no usable address for rank " +
            std::to_string(rank) + ": " + status.message());
    return; // operations with it end by their time-outs
  }
  m.link = &engine_->link(address.uid);
  m.link->setAddress(address, secret_, static_cast<int32_t>(m.globalRank));
  if (eagerConnect_ && !m.eager) {
    m.eager = true;
    m.link->addInterest();
  }
  if (m.queryWaiting) {
    ask(m);
  }
  const std::vector<Record*> waiting = std::move(m.waiting);
  m.waiting.clear();
  for (Record* record : waiting) {
    record->post(*m.link);
  }
}

void GroupImpl::failWhole(const Status& status) {
  if (failure_.ok()) {
    failure_ = status;
    failAll(failure_);
  }
}

void GroupImpl::learn() {
  if (learning_ || topology_) {
    return;
  }
  learning_ = true;
  std::weak_ptr<GroupImpl> weak = weak_from_this();
  std::shared_ptr<Engine> engine = engine_; // as in seek()
  engine_->resolver().seek(
      resolverStore_, key("topology", 0), [weak, engine](const auto& text) {
        engine->loop().post([weak, text] {
          if (auto self = weak.lock()) {
            self->learned(text);
          }
        });
      });
}

void GroupImpl::learned(const std::string& text) {
  if (text.starts_with(kJoinFailed)) {
    failWhole(Status(
        StatusCode::kInvalidArgument,
        "a rank could not join: " + text.substr(kJoinFailed.size())));
    return;
  }
  std::vector<std::string> sites;
  std::vector<int> hosts;
  const Status status = parseTopology(text, size(), sites, hosts);
  if (!status.ok()) {
    failWhole(status);
    return;
  }
  if (wholeJob_) {
    engine_->checkSites(sites);
  }
  if (!topology_) {
    topology_ = std::make_shared<Topology>(
        std::move(sites),
        std::move(hosts),
        algorithmChoiceFrom(engine_->options().collective_algorithm));
  }
  const auto runs = collectives_; // they may end, and others begin
  for (const auto& [sequence, run] : runs) {
    run->onTopology();
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

void GroupImpl::postWhenKnown(Record& record) {
  Member& m = members_[static_cast<size_t>(record.peer())];
  if (m.link != nullptr) {
    record.post(*m.link);
    return;
  }
  m.waiting.push_back(&record);
  seek(record.peer());
}

void GroupImpl::forgetWaiting(Record& record) {
  if (record.peer() >= 0) {
    std::erase(members_[static_cast<size_t>(record.peer())].waiting, &record);
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

// What waits for one rank fails with its channel. What waits for any rank
// fails when there is none left.
void GroupImpl::onLinkClosed(const Status& why) {
  if (!allOthersGone()) {
    return;
  }
  const auto runs = pointToPoints_; // fail() removes
  for (const auto& [id, run] : runs) {
    if (run->waitsForAnyRank()) {
      run->fail(
          Status(why.code(), "no rank is left to send: " + why.message()));
    }
  }
}

// --- operations

void GroupImpl::start(std::shared_ptr<CollectiveRun> run) {
  lastStarted_ = std::max(lastStarted_, run->sequence());
  lastSignature_ = run->spec().signature;
  collectives_.emplace(run->sequence(), run);
  run->start();
}

void GroupImpl::start(std::shared_ptr<PointToPointRun> run) {
  pointToPoints_.emplace(run->id(), run);
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
  auto found = collectives_.find(run.sequence());
  if (found != collectives_.end()) {
    engine_->destroyLater(std::move(found->second));
    collectives_.erase(found);
  }
  if (!status.ok() && tellOthers) {
    Notice notice;
    notice.group = id_;
    notice.sequence = run.sequence();
    notice.code = status.code();
    notice.reporter = rank_;
    notice.culprit = culprit;
    notice.text = status.message();
    tell(notice);
  }
  const auto done = std::move(run.spec().done);
  done(status);
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
  const auto done = std::move(run.spec().done);
  auto found = pointToPoints_.find(run.id());
  if (found != pointToPoints_.end()) {
    engine_->destroyLater(std::move(found->second));
    pointToPoints_.erase(found);
  }
  done(status, sourceRank);
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

void GroupImpl::onWatchdog() {
  watchdog_ = 0;
  watchdogAt_ = kNever;
  // What came in this turn has ended its operations, even if the turn is late:
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

void GroupImpl::onNotice(const Notice& notice) {
  // A path is in the middle of reading: act from the top of the loop.
  engine_->loop().post([weak = weak_from_this(), notice] {
    if (auto self = weak.lock()) {
      self->act(notice);
    }
  });
}

void GroupImpl::act(const Notice& notice) {
  tell(notice);
  const Status status(
      notice.code,
      "rank " + std::to_string(notice.reporter) + " reports: " + notice.text);
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
  endByMismatch(
      sequence,
      "collective #" + std::to_string(sequence) + ": " + status.message());
}

// Unless it has failed here as well, the results of one side are wrong.
void GroupImpl::endByMismatch(uint64_t sequence, const std::string& why) {
  if (!failure_.ok() || failedHere_.contains(sequence)) {
    return;
  }
  logMessage(LogLevel::kError, "group " + name_ + ": " + why);
  Notice notice;
  notice.group = id_;
  notice.sequence = Notice::kWholeGroup;
  notice.code = StatusCode::kMismatch;
  notice.reporter = rank_;
  notice.text = why;
  tell(notice);
  failure_ = Status(StatusCode::kMismatch, why);
  failAll(failure_);
}

void GroupImpl::query(int rank) {
  for (int r = 0; r < size(); ++r) {
    if (r == rank_ || (rank >= 0 && r != rank)) {
      continue;
    }
    Member& m = members_[static_cast<size_t>(r)];
    if (m.link == nullptr) {
      m.queryWaiting = true;
      seek(r);
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

void GroupImpl::onReport(const Report& report) {
  if (report.reporter < 0 || report.reporter >= size()) {
    return;
  }
  Member& m = members_[static_cast<size_t>(report.reporter)];
  m.report = report;
  m.reportAt = engine_->loop().now();
}

} // namespace resilient
