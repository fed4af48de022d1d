#include "transport/shared_rendezvous.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/random.h"

namespace resilient {
namespace {

constexpr size_t kDescriptors = 3; // memory, eventfd of side 0, of side 1
constexpr size_t kMaxToken = 64;
constexpr char kAccepted = '+';
// Both ends are awake and on one host.
constexpr Nanos kPatience = std::chrono::seconds(5);
// Time until the next accept, if the system has no descriptor left: the caller
// keeps the socket readable. Shorter only costs wake-ups.
constexpr Nanos kPause = std::chrono::milliseconds(100);

FileDescriptor makeSocket() {
  return FileDescriptor(
      ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// An abstract address: it begins with a zero byte, and has no file.
socklen_t abstractAddress(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), n);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
}

// The process at the other end belongs to our user.
bool isOurs(int fd) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
      peer.uid == ::geteuid();
}

// Takes the same time wherever the texts differ, so a process cannot find a
// token byte by byte.
bool sameText(const std::string& a, const std::string& b) {
  unsigned char differs = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    differs = static_cast<unsigned char>(differs | (a[i] ^ b[i]));
  }
  return differs == 0;
}

Status sendDescriptors(
    int fd,
    const std::string& token,
    const std::array<int, kDescriptors>& descriptors) {
  iovec text{const_cast<char*>(token.data()), token.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * kDescriptors);
  std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof(descriptors));
  return ::sendmsg(fd, &message, MSG_NOSIGNAL) < 0
      ? errnoStatus(StatusCode::kNetwork, "pass on descriptors", errno)
      : Status();
}

// Empty if what came is not one message with exactly those descriptors. Every
// descriptor that arrives is owned at once, those beyond the expected number
// too: a caller could fill our table with descriptors otherwise.
std::string receiveDescriptors(
    int fd,
    std::array<FileDescriptor, kDescriptors>& descriptors) {
  char token[kMaxToken];
  iovec text{token, sizeof(token)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kDescriptors)];
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  size_t count = 0;
  for (cmsghdr* h = n > 0 ? CMSG_FIRSTHDR(&message) : nullptr; h != nullptr;
       h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t here = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < here; ++i) {
      int got = -1;
      std::memcpy(&got, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      FileDescriptor owned(got);
      if (count < kDescriptors) {
        descriptors[count] = std::move(owned);
      }
      ++count;
    }
  }
  return count == kDescriptors &&
          (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0
      ? std::string(token, static_cast<size_t>(n))
      : std::string();
}

} // namespace

// --- the rendezvous

struct SharedRendezvous::Caller final : Handler {
  Caller(SharedRendezvous& d, FileDescriptor f)
      : rendezvous(d), fd(std::move(f)) {}
  void onEvents(uint32_t) override {
    rendezvous.onCaller(self);
  }
  SharedRendezvous& rendezvous;
  FileDescriptor fd;
  TimerId timer = 0;
  std::list<std::unique_ptr<Caller>>::iterator self;
};

SharedRendezvous::SharedRendezvous(EventLoop& loop, Callback onCame)
    : loop_(loop), onCame_(std::move(onCame)), fd_(makeSocket()) {
  checkSyscall("make a local socket", fd_.get());
  std::array<uint64_t, 2> random;
  fillRandom(random.data(), sizeof(random));
  name_ = "torch_resilient-" + std::to_string(random[0]) + "-" +
      std::to_string(random[1]);
  sockaddr_un address;
  const socklen_t bytes = abstractAddress(name_, address);
  checkSyscall(
      "bind a local socket",
      ::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), bytes));
  checkSyscall("listen at a local socket", ::listen(fd_.get(), SOMAXCONN));
  loop_.add(fd_.get(), EPOLLIN, this);
}

SharedRendezvous::~SharedRendezvous() {
  loop_.cancel(resume_);
  for (const auto& caller : callers_) {
    loop_.cancel(caller->timer);
    loop_.remove(caller->fd.get());
  }
  loop_.remove(fd_.get());
}

void SharedRendezvous::expect(const Uid& peer, const std::string& token) {
  expected_.emplace_back(token, peer);
}

void SharedRendezvous::onEvents(uint32_t) {
  FileDescriptor fd(
      ::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
        errno == ENOMEM) {
      loop_.modify(fd_.get(), 0);
      resume_ = loop_.after(kPause, [this] {
        resume_ = 0;
        loop_.modify(fd_.get(), EPOLLIN);
      });
    }
    return;
  }
  if (!isOurs(fd.get())) {
    return;
  }
  const auto caller = callers_.insert(
      callers_.end(), std::make_unique<Caller>(*this, std::move(fd)));
  (*caller)->self = caller;
  (*caller)->timer = loop_.after(kPatience, [this, caller] { drop(caller); });
  loop_.add((*caller)->fd.get(), EPOLLIN, caller->get());
}

// Not at once: its code may be on the stack.
void SharedRendezvous::drop(
    std::list<std::unique_ptr<Caller>>::iterator which) {
  std::shared_ptr<Caller> caller = std::move(*which);
  callers_.erase(which);
  loop_.remove(caller->fd.get());
  loop_.cancel(caller->timer);
  caller->fd.reset();
  loop_.post([caller] {});
}

// The answer is sent before the caller's place is given up: if the send fails,
// the visitor is gone and the token is still good.
void SharedRendezvous::onCaller(
    std::list<std::unique_ptr<Caller>>::iterator which) {
  Caller& caller = **which;
  std::array<FileDescriptor, kDescriptors> got;
  const std::string token = receiveDescriptors(caller.fd.get(), got);
  const auto known =
      std::find_if(expected_.begin(), expected_.end(), [&](const auto& e) {
        return sameText(e.first, token);
      });
  SharedEnds ends;
  if (token.empty() || known == expected_.end() ||
      !SharedMemory::map(got[0].get(), ends.memory).ok() ||
      ::send(caller.fd.get(), &kAccepted, 1, MSG_NOSIGNAL) != 1) {
    drop(which);
    return;
  }
  const Uid peer = known->second;
  expected_.erase(known);
  ends.side = 1;
  ends.wakeTheirs = std::move(got[1]);
  ends.wakeMine = std::move(got[2]);
  loop_.remove(caller.fd.get());
  ends.socket = std::move(caller.fd);
  std::shared_ptr<Caller> done = std::move(*which);
  callers_.erase(which);
  loop_.cancel(done->timer);
  loop_.post([done] {});
  onCame_(peer, std::move(ends));
}

// --- the visitor

SharedVisit::SharedVisit(EventLoop& loop, Callback onResult)
    : loop_(loop), onResult_(std::move(onResult)) {}

SharedVisit::~SharedVisit() {
  loop_.cancel(timer_);
  if (watched_) {
    loop_.remove(ends_.socket.get());
  }
}

std::unique_ptr<SharedVisit> SharedVisit::start(
    EventLoop& loop,
    const std::string& name,
    const std::string& token,
    size_t ringBytes,
    Callback onResult) {
  std::unique_ptr<SharedVisit> k(new SharedVisit(loop, std::move(onResult)));
  const Status status = k->visit(name, token, ringBytes);
  k->timer_ =
      loop.after(status.ok() ? kPatience : Nanos(0), [k = k.get(), status] {
        k->timer_ = 0;
        k->end(
            status.ok()
                ? Status(
                      StatusCode::kTimeout, "the other process does not answer")
                : status);
      });
  return k;
}

Status SharedVisit::visit(
    const std::string& name,
    const std::string& token,
    size_t ringBytes) {
  FileDescriptor memory;
  Status status = SharedMemory::make(ringBytes, ends_.memory, memory);
  if (!status.ok()) {
    return status;
  }
  ends_.wakeMine.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ends_.wakeTheirs.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  ends_.socket = makeSocket();
  sockaddr_un address;
  const socklen_t bytes = abstractAddress(name, address);
  if (!ends_.wakeMine || !ends_.wakeTheirs || !ends_.socket ||
      ::connect(
          ends_.socket.get(), reinterpret_cast<sockaddr*>(&address), bytes) !=
          0) {
    return errnoStatus(
        StatusCode::kNetwork, "connect to a process on this host", errno);
  }
  if (!isOurs(ends_.socket.get())) {
    return Status(
        StatusCode::kNetwork, "the other process belongs to another user");
  }
  status = sendDescriptors(
      ends_.socket.get(),
      token,
      {memory.get(), ends_.wakeMine.get(), ends_.wakeTheirs.get()});
  if (status.ok()) {
    loop_.add(ends_.socket.get(), EPOLLIN | EPOLLRDHUP, this);
    watched_ = true;
  }
  return status;
}

void SharedVisit::onEvents(uint32_t) {
  char answer = 0;
  const ssize_t n = ::recv(ends_.socket.get(), &answer, 1, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  end(n == 1 && answer == kAccepted
          ? Status()
          : Status(StatusCode::kNetwork, "the other process refused"));
}

void SharedVisit::end(const Status& status) {
  loop_.cancel(timer_);
  timer_ = 0;
  if (watched_) {
    watched_ = false;
    loop_.remove(ends_.socket.get());
  }
  // The callback may destroy us.
  const Callback call = std::move(onResult_);
  SharedEnds ends = std::move(ends_);
  call(status, std::move(ends));
}

} // namespace resilient
