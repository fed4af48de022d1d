#include "backend/process_group.h"

#include <algorithm>
#include <mutex>

#include "backend/checks.h"
#include "backend/errors.h"
#include "backend/fork_check.h"
#include "backend/store_adapter.h"
#include "backend/traffic_choice.h"
#include "delegate/diagnosis.h"
#include "delegate/engine_control.h"

namespace resilient {

GroupOptions::GroupOptions() : GroupOptions(processEngineOptions(nullptr)) {}

GroupOptions::GroupOptions(const EngineOptions& engineOptions)
    : c10d::Backend::Options("resilient"), engine(engineOptions) {}

namespace {

struct ProcessOptions {
  std::mutex mutex;
  std::optional<EngineOptions> first;
};

ProcessOptions& processOptions() {
  static auto* options = new ProcessOptions(); // outlives static destruction
  return *options;
}

// Keys of the submit queue. Collectives of a group keep one order; messages
// keep one for each direction, peer and tag (and "any source").
// From the top: bit 63 marks a message, bit 62 its direction, 30 bits hold the
// peer plus one (0 for any source), 32 bits the tag. Receives copy nothing in
// and are always ready: receives with different keys are also posted in call
// order, which matching with any source needs.
constexpr uint64_t kCollectiveKey = 0;

uint64_t messageKey(bool isSend, int peer, int tag) {
  return (uint64_t{1} << 63) | (uint64_t{isSend} << 62) |
      (static_cast<uint64_t>(static_cast<uint32_t>(peer + 1) & 0x3fffffffU)
       << 32) |
      static_cast<uint32_t>(tag);
}

} // namespace

EngineOptions processEngineOptions(const GroupOptions* given) {
  auto& process = processOptions();
  std::lock_guard<std::mutex> lock(process.mutex);
  if (process.first && engineRunning()) {
    return *process.first;
  }
  return given != nullptr ? given->engine : EngineOptions::fromEnvironment();
}

namespace {

// Sets the options of the engine, if this group is the one that starts it.
void rememberEngineOptions(const EngineOptions& options) {
  auto& process = processOptions();
  std::lock_guard<std::mutex> lock(process.mutex);
  if (process.first && engineRunning()) {
    return;
  }
  process.first = options;
  setDefaultOptions(options);
}

} // namespace

// Options are checked before they become those of the process. joinGroup()
// starts the engine if there is none and publishes this rank's address, without
// waiting for the other ranks.
ProcessGroupResilient::ProcessGroupResilient(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<GroupOptions> options)
    : c10d::Backend(rank, size),
      store_(store),
      options_(std::move(options)),
      forkGeneration_(forkGeneration()),
      timeoutMs_(options_->timeout.count()),
      queue_(std::make_unique<SubmitQueue>()) {
  options_->engine.validate();
  rememberEngineOptions(options_->engine);
  GroupConfig config;
  config.name = options_->group_name;
  config.rank = rank;
  config.size = size;
  config.globalRanks = options_->global_ranks_in_group;
  config.store = makeStoreAdapter(store_);
  config.eagerConnect = options_->engine.eager_connect;
  group_ = joinGroup(std::move(config));
}

ProcessGroupResilient::~ProcessGroupResilient() {
  if (forkGeneration_ != forkGeneration()) {
    // The engine's threads stayed in the parent; its locks may be held for
    // ever. Leak what would touch them.
    new std::shared_ptr<Group>(std::move(group_));
    queue_.release();
    return;
  }
  try {
    shutdown();
  } catch (const std::exception& e) {
    TORCH_WARN("shutdown of a resilient group failed: ", e.what());
  }
}

void ProcessGroupResilient::checkUsable(const char* operation) const {
  if (forkGeneration_ != forkGeneration()) {
    C10_THROW_ERROR(
        DistBackendError,
        std::string("resilient ") + operation +
            ": this process group was created before fork(): the threads that "
            "carry it are in the parent process. Use the spawn start method, "
            "or fork before init_process_group()");
  }
}

Nanos ProcessGroupResilient::timeoutOr(
    std::chrono::milliseconds timeout) const {
  return std::min(
      kLongestTimeout,
      timeout == c10d::kUnsetTimeout
          ? std::chrono::milliseconds(
                timeoutMs_.load(std::memory_order_relaxed))
          : timeout);
}

void ProcessGroupResilient::setTimeout(std::chrono::milliseconds timeout) {
  timeoutMs_.store(timeout.count());
  options_->timeout = timeout;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupResilient::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  checkUsable("split");
  auto member = std::find(ranks.begin(), ranks.end(), rank_);
  if (member == ranks.end()) {
    return nullptr;
  }
  auto given = c10::dynamic_intrusive_pointer_cast<GroupOptions>(options);
  auto own =
      c10::make_intrusive<GroupOptions>(processEngineOptions(given.get()));
  if (options) {
    own->timeout = options->timeout;
    own->group_name = options->group_name;
    own->group_desc = options->group_desc;
  } else {
    own->timeout = options_->timeout;
  }
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size_) {
      throwInvalid("resilient split: no rank " + std::to_string(rank));
    }
    const auto& global = options_->global_ranks_in_group;
    own->global_ranks_in_group.push_back(
        global.empty() ? static_cast<uint64_t>(rank) : global.at(rank));
  }
  return c10::make_intrusive<ProcessGroupResilient>(
      store,
      static_cast<int>(member - ranks.begin()),
      static_cast<int>(ranks.size()),
      std::move(own));
}

void ProcessGroupResilient::abort() {
  checkUsable("abort");
  ended_.store(true);
  group_->abort("abort() was called on this rank");
  queue_->close();
}

// The queue drains first, while the engine still takes operations. Operations
// that are left afterwards fail when the queue is closed: their copies may
// never end.
void ProcessGroupResilient::shutdown() {
  checkUsable("shutdown");
  const TimePoint until =
      std::chrono::steady_clock::now() + fromSeconds(options_->engine.linger_s);
  if (!ended_.exchange(true)) {
    // Messages sent from a device are to arrive as well.
    queue_->drain(until - std::chrono::steady_clock::now());
  }
  group_->shutdown(
      std::max<Nanos>(until - std::chrono::steady_clock::now(), Nanos(0)));
  queue_->close();
}

c10d::ErrorType ProcessGroupResilient::getError() {
  return c10d::ErrorType::SUCCESS; // errors are in the Works
}

uint64_t ProcessGroupResilient::getSequenceNumberForGroup() {
  checkUsable("getSequenceNumberForGroup");
  return group_->sequence() + queue_->waiting(kCollectiveKey);
}

GroupStats ProcessGroupResilient::stats() {
  checkUsable("stats");
  return group_->stats();
}

std::shared_ptr<const RecordSeal> ProcessGroupResilient::recordSeal() {
  checkUsable("record_seal");
  return group_->recordSeal();
}

std::shared_ptr<const Topology> ProcessGroupResilient::topology() {
  checkUsable("topology");
  return group_->topology(
      timeoutOr(c10d::kUnsetTimeout), currentInterruptHook());
}

void ProcessGroupResilient::setTopology(
    std::vector<std::string> sites,
    AlgorithmChoice choice) {
  const auto known = topology();
  if (sites.size() != static_cast<size_t>(size_)) {
    throwInvalid(
        "set_topology: got " + std::to_string(sites.size()) +
        " sites, the group has " + std::to_string(size_) + " ranks");
  }
  for (const std::string& site : sites) {
    if (!site.empty() && !isSiteName(site)) {
      throwInvalid("set_topology: \"" + site + "\" is not the name of a site");
    }
  }
  group_->setTopology(
      std::make_shared<Topology>(std::move(sites), known->hosts(), choice));
}

// A block that was left by an exception has no end; the next one begins anew.
void ProcessGroupResilient::startCoalescing() {
  checkUsable("startCoalescing");
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  coalesced_.clear();
  coalescingThread_.store(std::this_thread::get_id());
}

ProcessGroupResilient::WorkPtr ProcessGroupResilient::endCoalescing() {
  constexpr const char* kName = "endCoalescing";
  checkUsable(kName);
  std::vector<c10::intrusive_ptr<WorkResilient>> works;
  {
    std::lock_guard<std::mutex> lock(coalescingMutex_);
    if (coalescingThread_.load() != std::this_thread::get_id()) {
      rejectCall(kName, "this thread has not called startCoalescing");
    }
    coalescingThread_.store({});
    works.swap(coalesced_);
  }
  return WorkResilient::all(rank_, std::move(works));
}

// The relaxed load keeps calls outside of blocks off the mutex. A thread that
// has called startCoalescing() sees its own id there in any case.
ProcessGroupResilient::WorkPtr ProcessGroupResilient::started(
    c10::intrusive_ptr<WorkResilient> work,
    bool wanted) {
  const auto thisThread = std::this_thread::get_id();
  if (coalescingThread_.load(std::memory_order_relaxed) != thisThread) {
    return work;
  }
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_.load() != thisThread) {
    return work; // another thread has begun anew
  }
  coalesced_.push_back(work);
  return wanted ? work : nullptr;
}

c10::intrusive_ptr<WorkResilient> ProcessGroupResilient::makeWork(
    c10d::OpType type,
    const char* title,
    const Tensors& inputs,
    Tensors outputs) {
  return c10::make_intrusive<WorkResilient>(
      rank_, type, title, inputs, std::move(outputs));
}

ProcessGroupResilient::Body ProcessGroupResilient::combine(
    std::vector<Body> parts) {
  if (parts.size() == 1) {
    return std::move(parts[0]);
  }
  return [parts = std::move(parts)](Communicator& comm) {
    return coalesced(comm, parts);
  };
}

namespace {

// Why an operation did not even reach the engine.
const Status& notCopied() {
  static const auto* status = new Status(
      StatusCode::kAborted,
      "the group was aborted or shut down before the operation's tensors had "
      "been copied from the device");
  return *status;
}

// The function for SubmitQueue::push(): empty for operations without device
// tensors, which are ready at once. It must not throw, so a device's error
// counts as ready and fails the operation later.
std::function<bool()> readiness(const c10::intrusive_ptr<WorkResilient>& work) {
  if (work->tensors().devices().empty()) {
    return {};
  }
  return [work] {
    try {
      return work->tensors().inputsReady();
    } catch (...) {
      return true; // the device reports an error: see copyFailure
    }
  };
}

// A collective that exchanges nothing and fails with `status`. co_return makes
// the function a coroutine.
Task failWith(Status status) {
  throw StatusError(std::move(status));
  co_return;
}

using Handover = SubmitQueue::Handover;

// When an operation that began now gives up its wait for a device.
TimePoint copyDeadline(TimePoint called, Nanos timeout) {
  return called + timeout - lateCopyAhead(timeout);
}

Status lateCopy(WorkResilient& work, Nanos timeout) {
  return Status(
      StatusCode::kTimeout,
      timedOutText(timeout) + lateCopyText(work.tensors().waitsFor()));
}

// The rest of a time-out, at least enough for an operation that fails at once.
// Without device tensors it is the whole time-out: such an operation is handed
// over at the call.
Nanos left(WorkResilient& work, TimePoint called, Nanos timeout) {
  if (work.tensors().devices().empty()) {
    return timeout;
  }
  return std::max<Nanos>(
      called + timeout - std::chrono::steady_clock::now(),
      std::chrono::milliseconds(100));
}

// Why an operation cannot begin when it is handed over, if it cannot.
std::optional<Status> copyFailure(WorkResilient& work, Nanos timeout) {
  try {
    if (work.tensors().inputsReady()) {
      return std::nullopt;
    }
    return lateCopy(work, timeout);
  } catch (const std::exception& e) {
    return copyFailed(e);
  }
}

} // namespace

// A collective takes its sequence number when the queue submits it. The other
// ranks do the same for theirs, so every call that has passed the checks must
// submit exactly one operation, in call order, even if this rank already knows
// that it fails. Three cases therefore submit a body that only throws: an
// output that cannot be written, a callback's collective whose order is not
// certain (call_order.h), and a copy from the device that failed. All reach the
// other ranks as a failure of the same operation.
//
// Closing the queue while a copy is pending is the only exception. The group
// has ended then, and no operation with a later number can succeed.
ProcessGroupResilient::WorkPtr ProcessGroupResilient::launch(
    c10::intrusive_ptr<WorkResilient> work,
    const OpSignature& signature,
    const CallOptions& opts,
    Body body) {
  std::string refusal = work->tensors().refusal();
  if (refusal.empty()) {
    work->tensors().copyIn();
  }
  CollectiveSpec spec;
  spec.signature = signature;
  spec.bytes = work->tensors().bytes();
  spec.trafficClass = chosenTrafficClass.value_or(TrafficClass::kGradient);
  spec.timeout = timeoutOr(opts.timeout);
  spec.body = std::move(body);
  spec.memory = WorkResilient::stagedMemory(work);
  spec.tensors = work->tensors().memory();
  spec.hold = [work = work.get()] { return work->holdMemory(); };
  spec.gpu = work->tensors().gpu();
  auto shared = std::make_shared<CollectiveSpec>(std::move(spec));
  const TimePoint called = std::chrono::steady_clock::now();
  std::optional<CallOrder::Call> call(std::in_place, *order_, work->title());
  work->setPlace(call->place());
  if (refusal.empty()) {
    refusal = call->refusal();
  }
  if (!refusal.empty()) {
    shared->body = [refusal](Communicator&) {
      return failWith(Status(StatusCode::kInvalidArgument, refusal));
    };
  }
  queue_->push(
      kCollectiveKey,
      readiness(work),
      copyDeadline(called, shared->timeout),
      [group = group_, work, shared, called](Handover how) {
        if (how == Handover::kClosed) {
          WorkResilient::end(work, notCopied());
          return;
        }
        const Nanos timeout = shared->timeout;
        shared->timeout = left(*work, called, timeout);
        if (const auto error = copyFailure(*work, timeout)) {
          // The other ranks wait for this operation: it takes its number and
          // fails there too.
          shared->body = [error = *error](Communicator&) {
            return failWith(error);
          };
        }
        shared->done = [work](const Status& status) mutable {
          WorkResilient::end(std::move(work), status);
        };
        work->setSequence(group->submit(std::move(*shared)));
        WorkResilient::followPieces(work);
      });
  call.reset();
  if (!refusal.empty()) {
    // The other ranks wait for this operation, so it has failed for them too.
    throwCallError(std::string(work->title()) + ": " + refusal);
  }
  return started(std::move(work), opts.asyncOp);
}

// A message has no sequence number, so one that cannot be received is refused
// here only: the peer's message matches the next receive. `zeroFilled` and
// `hold` refer to the Work without holding it, since `done`, which is called
// later, holds it.
ProcessGroupResilient::WorkPtr ProcessGroupResilient::launch(
    c10::intrusive_ptr<WorkResilient> work,
    int peer,
    int tag,
    bool isSend,
    const at::Tensor& tensor) {
  auto spec = std::make_shared<PointToPointSpec>();
  spec->isSend = isSend;
  spec->peer = peer;
  spec->tag = static_cast<uint64_t>(tag);
  spec->signature.dtype = dtypeOf(tensor);
  spec->signature.count = static_cast<uint64_t>(tensor.numel());
  spec->trafficClass = chosenTrafficClass.value_or(TrafficClass::kActivation);
  if (isSend && !chosenTolerance.exact()) {
    spec->tolerance = chosenTolerance;
    spec->zeroFilled = [work = work.get(), width = tensor.element_size()](
                           const std::vector<ByteRange>& ranges) {
      work->setZeroFilled(ranges, width);
    };
  }
  spec->timeout = timeoutOr(c10d::kUnsetTimeout);
  spec->data = work->tensors().add(tensor, isSend ? Use::kInput : Use::kOutput);
  spec->bytes = tensor.nbytes();
  if (!work->tensors().refusal().empty()) {
    throwCallError(
        std::string(work->title()) + ": " + work->tensors().refusal());
  }
  work->tensors().copyIn();
  spec->memory = WorkResilient::stagedMemory(work);
  spec->hold = [work = work.get()] { return work->holdMemory(); };
  spec->gpu = work->tensors().gpu();
  work->setPlace(CallOrder::message(work->title()));
  const TimePoint called = std::chrono::steady_clock::now();
  queue_->push(
      messageKey(isSend, peer, tag),
      readiness(work),
      copyDeadline(called, spec->timeout),
      [group = group_, work, spec, called](Handover how) {
        if (how == Handover::kClosed) {
          WorkResilient::end(work, notCopied());
          return;
        }
        const Nanos timeout = spec->timeout;
        spec->timeout = left(*work, called, timeout);
        if (auto error = copyFailure(*work, timeout)) {
          spec->failure = *error;
        }
        spec->done = [work](const Status& status, int sourceRank) mutable {
          WorkResilient::end(std::move(work), status, sourceRank);
        };
        group->submit(spec);
        WorkResilient::followPieces(work);
      });
  return started(std::move(work), /*wanted=*/false);
}

} // namespace resilient
