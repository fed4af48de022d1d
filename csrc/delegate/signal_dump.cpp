#include "delegate/signal_dump.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <utility>

namespace resilient {
namespace {

// Never closed: a signal may come at any time.
std::atomic<int> signalled{-1};
// A forked child has our handler and our descriptor, but is not meant.
std::atomic<pid_t> owner{-1};

// Calls only functions that POSIX allows in a signal handler. Everything else
// happens in onEvents(), in the loop.
void onSignal(int) {
  const int error = errno;
  const uint64_t one = 1;
  if (owner.load() == ::getpid()) {
    (void)!::write(signalled.load(), &one, sizeof(one));
  }
  errno = error;
}

bool takeSignal() {
  struct sigaction now{};
  if (::sigaction(SIGUSR1, nullptr, &now) != 0) {
    return false;
  }
  if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) {
    return now.sa_handler == &onSignal;
  }
  struct sigaction ours{};
  ours.sa_handler = &onSignal;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  return ::sigaction(SIGUSR1, &ours, nullptr) == 0;
}

} // namespace

SignalDump::SignalDump(EventLoop& loop, std::function<void()> call)
    : loop_(loop), call_(std::move(call)) {
  if (signalled.load() < 0 || owner.load() != ::getpid()) {
    signalled = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    owner = ::getpid();
  }
  if (signalled.load() >= 0 && takeSignal()) {
    loop_.add(signalled.load(), EPOLLIN, this);
  } else {
    call_ = nullptr;
  }
}

SignalDump::~SignalDump() {
  if (call_) {
    loop_.remove(signalled.load());
  }
}

void SignalDump::onEvents(uint32_t) {
  uint64_t count = 0;
  if (::read(signalled.load(), &count, sizeof(count)) > 0) {
    call_();
  }
}

} // namespace resilient
