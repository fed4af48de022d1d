#include "shift/runtime.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "shift/data_path.h"
#include "shift/session.h"

namespace resilient::shift {
namespace {

constexpr const char* kStoreVariable = "TORCH_RESILIENT_SHIFT_STORE";
constexpr const char* kBackupVariable = "TORCH_RESILIENT_SHIFT_BACKUP";
constexpr const char* kSilenceVariable = "TORCH_RESILIENT_SHIFT_SILENCE_MS";
constexpr const char* kSpoilVariable = "TORCH_RESILIENT_SHIFT_SPOIL_FILE";

std::map<std::string, std::string> parsePairs(const std::string& text) {
  std::map<std::string, std::string> pairs;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string pair = text.substr(at, end - at);
    const size_t equal = pair.find('=');
    if (equal == std::string::npos || equal == 0 || equal + 1 == pair.size()) {
      say("%s: expected DEVICE=BACKUP,..., got '%s'",
          kBackupVariable,
          text.c_str());
      std::exit(2);
    }
    pairs[pair.substr(0, equal)] = pair.substr(equal + 1);
    at = end + 1;
  }
  return pairs;
}

// Each device has the next one as its backup.
std::map<std::string, std::string> defaultPairs() {
  std::map<std::string, std::string> pairs;
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  for (int i = 0; i < count && count > 1; ++i) {
    pairs[ibv_get_device_name(list[i])] =
        ibv_get_device_name(list[(i + 1) % count]);
  }
  if (list != nullptr) {
    ibv_free_device_list(list);
  }
  return pairs;
}

// A queue pair has at most one call under way. If so many are blocked, the
// devices are dead, and further ones wait until their sessions give up.
constexpr size_t kHelpersMax = 64;

// Signals are for the threads of the program: one that is interrupted or waits
// for a signal must get it. Returns whether there is a thread.
bool startThread(std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool isStarted = true;
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error&) {
    isStarted = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return isStarted;
}

bool isDefault(Qp& qp) {
  const std::lock_guard guard(qp.lock);
  const bool isQuiet = qp.protection == Protection::kOff ||
      (qp.protection == Protection::kOn && qp.core.active() == 0 &&
       qp.core.receivePath() == 0 && !qp.isSwitching);
  return isQuiet;
}

} // namespace

void say(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string text(1024, '\0');
  const int length =
      std::vsnprintf(text.data(), text.size(), format, arguments);
  va_end(arguments);
  text.resize(
      std::min(text.size() - 1, static_cast<size_t>(std::max(length, 0))));
  // One write, so that lines of several processes do not mix.
  text = "torch-resilient shift: " + text + "\n";
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, text.data(), text.size());
}

Runtime& runtime() {
  // Never destroyed: the control thread may outlive main().
  static Runtime* const one = new Runtime;
  return *one;
}

bool Runtime::start() {
  if (isStarted_) {
    return isUsable();
  }
  isStarted_ = true;
  const char* address = std::getenv(kStoreVariable);
  const std::string problem = address == nullptr ? std::string("it is not set")
                                                 : store.connect(address);
  if (!problem.empty()) {
    say("nothing is protected: %s: %s", kStoreVariable, problem.c_str());
    return false;
  }
  const char* pairs = std::getenv(kBackupVariable);
  pairs_ =
      pairs == nullptr || *pairs == '\0' ? defaultPairs() : parsePairs(pairs);
  if (const char* limit = std::getenv(kSilenceVariable); limit != nullptr) {
    silence = std::chrono::milliseconds(
        std::max(std::strtol(limit, nullptr, 10), 50L));
  }
  if (const char* file = std::getenv(kSpoilVariable); file != nullptr) {
    spoilFile_ = file;
  }
  wakeFd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (!startThread([this] { run(); })) {
    say("nothing is protected: no thread can be started");
    store.close();
  }
  return isUsable();
}

std::string Runtime::backupOf(const std::string& device) const {
  const auto found = pairs_.find(device);
  return found == pairs_.end() ? std::string() : found->second;
}

void Runtime::later(std::function<void()> job) {
  soon(std::move(job));
  wake();
}

void Runtime::soon(std::function<void()> job) {
  const std::lock_guard guard(jobsMutex_);
  jobs_.push_back(std::move(job));
}

void Runtime::catchUp() {
  std::vector<std::function<void()>> jobs;
  {
    const std::lock_guard guard(jobsMutex_);
    jobs.swap(jobs_);
  }
  for (const auto& job : jobs) {
    job();
  }
}

void Runtime::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wakeFd_, &one, sizeof one);
}

void Runtime::aside(
    std::function<void()> call,
    std::function<void()> done,
    bool isUrgent) {
  const std::lock_guard guard(callsMutex_);
  Call made{std::move(call), std::move(done)};
  isUrgent ? calls_.push_front(std::move(made))
           : calls_.push_back(std::move(made));
  // Without a thread, the session that waits for the call gives up in time.
  if (idleHelpers_ < calls_.size() && helpers_ < kHelpersMax &&
      startThread([this] { help(); })) {
    ++helpers_;
  }
  callWaits_.notify_one();
}

void Runtime::inTurn(std::function<void()> call, std::function<void()> done) {
  turns_.push_back({std::move(call), std::move(done)});
  if (!isTurnUnderWay_) {
    nextTurn();
  }
}

void Runtime::nextTurn() {
  isTurnUnderWay_ = !turns_.empty();
  if (!isTurnUnderWay_) {
    return;
  }
  Call next = std::move(turns_.front());
  turns_.pop_front();
  aside(
      std::move(next.call),
      [this, done = std::move(next.done)] {
        done();
        nextTurn();
      },
      false);
}

void Runtime::help() {
  pthread_setname_np(pthread_self(), "shift-call");
  for (;;) {
    Call next;
    {
      std::unique_lock guard(callsMutex_);
      ++idleHelpers_;
      callWaits_.wait(guard, [this] { return !calls_.empty(); });
      --idleHelpers_;
      next = std::move(calls_.front());
      calls_.pop_front();
    }
    next.call();
    const std::lock_guard guard(mutex);
    next.done();
    next = {};
    callDone_.notify_all();
    wake();
  }
}

bool Runtime::waitForCalls(
    std::unique_lock<std::recursive_mutex>& held,
    std::chrono::milliseconds limit,
    const std::function<bool()>& condition) {
  return callDone_.wait_for(held, limit, condition);
}

void Runtime::run() {
  pthread_setname_np(pthread_self(), "shift");
  bool isBusy = false;
  for (;;) {
    const Ready ready = wait(isBusy ? 1 : static_cast<int>(kIdle.count()));
    const std::lock_guard guard(mutex);
    uint64_t ignored = 0;
    while (ready.contains(wakeFd_) &&
           read(wakeFd_, &ignored, sizeof ignored) > 0) {
    }
    catchUp();
    for (const auto& [context, device] : devices) {
      if (ready.contains(device->monitor->async_fd)) {
        takeEvents(*device, device->monitor, 0);
      }
      if (ready.contains(device->backup->async_fd)) {
        takeEvents(*device, device->backup, 1);
      }
    }
    if (ready.contains(store.fd())) {
      store.pump();
      if (store.isLost()) {
        say("the store is lost: nothing is protected any more");
      }
    }
    spoilIfAsked();
    isBusy = tick();
  }
}

void Runtime::spoilIfAsked() {
  if (spoilFile_.empty() || unlink(spoilFile_.c_str()) != 0) {
    return;
  }
  for (const auto& [handle, qp] : qps) {
    const std::lock_guard guard(qp->lock);
    qp->spoilsNext = qp->core.active() == 0;
  }
}

Runtime::Ready Runtime::wait(int limitMs) {
  std::vector<pollfd> fds{{wakeFd_, POLLIN, 0}};
  {
    const std::lock_guard guard(mutex);
    if (store.fd() >= 0) {
      fds.push_back({store.fd(), POLLIN, 0});
    }
    for (const auto& [context, device] : devices) {
      fds.push_back({device->monitor->async_fd, POLLIN, 0});
      fds.push_back({device->backup->async_fd, POLLIN, 0});
    }
  }
  Ready ready;
  if (poll(fds.data(), fds.size(), limitMs) > 0) {
    for (const pollfd& each : fds) {
      if (each.revents != 0) {
        ready.insert(each.fd);
      }
    }
  }
  return ready;
}

bool Runtime::takeEvents(Device& device, ibv_context* context, int path) {
  ibv_async_event event{};
  bool isDown = false;
  while (ibv_get_async_event(context, &event) == 0) {
    isDown |= event.event_type == IBV_EVENT_PORT_ERR ||
        event.event_type == IBV_EVENT_DEVICE_FATAL;
    ibv_ack_async_event(&event);
  }
  if (isDown) {
    portDown(device, path);
  }
  return isDown;
}

void Runtime::portDown(Device& device, int path) {
  for (const auto& [handle, qp] : qps) {
    if (qp->device == &device && qp->session) {
      qp->session->portDown(path);
    }
  }
}

bool Runtime::tick() {
  bool isBusy = false;
  const auto now = Clock::now();
  for (const auto& [handle, qp] : qps) {
    if (qp->session) {
      isBusy |= qp->session->tick(now);
    }
  }
  for (const auto& [handle, cq] : cqs) {
    if (!cq->isSlow) {
      continue;
    }
    bool isQuiet = true;
    for (const auto& [qpHandle, qp] : qps) {
      isQuiet &= (qp->sendCq != cq.get() && qp->receiveCq != cq.get()) ||
          isDefault(*qp);
    }
    const std::lock_guard guard(cq->lock);
    if (isQuiet && cq->ready.empty()) {
      cq->isSlow = false;
    }
  }
  return isBusy;
}

} // namespace resilient::shift
