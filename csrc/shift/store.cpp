#include "shift/store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace resilient::shift {
namespace {

// No line of the store is longer; what is, comes from something else.
constexpr size_t kLineMax = 4096;

// Tries all addresses; -1 with errno if none answers.
int connectTo(const addrinfo* list) {
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      continue;
    }
    const timeval limit{2, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, each->ai_addr, each->ai_addrlen) == 0) {
      const int one = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      return fd;
    }
    const int error = errno;
    close(fd);
    errno = error;
  }
  return -1;
}

} // namespace

Store::~Store() {
  close();
}

std::string Store::connect(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return "expected HOST:PORT, got '" + address + "'";
  }
  const std::string host = address.substr(0, colon);
  const std::string port = address.substr(colon + 1);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
      error != 0) {
    return address + ": " + gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(
      found, &freeaddrinfo);
  fd_ = connectTo(found);
  return fd_ < 0 ? address + ": " + std::strerror(errno) : std::string();
}

void Store::put(const std::string& key, const std::string& value) {
  send("put " + key + " " + value + "\n");
}

void Store::remove(const std::string& key) {
  send("del " + key + "\n");
}

void Store::get(const std::string& key, Answer answer) {
  waiting_.emplace(key, std::move(answer));
  send("get " + key + "\n");
}

void Store::send(const std::string& line) {
  std::string_view left = line;
  while (fd_ >= 0 && !left.empty()) {
    const ssize_t sent = ::send(fd_, left.data(), left.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      left.remove_prefix(static_cast<size_t>(sent));
    } else if (errno != EINTR) {
      close();
    }
  }
}

void Store::pump() {
  std::array<char, 4096> part;
  while (fd_ >= 0) {
    const ssize_t got = recv(fd_, part.data(), part.size(), MSG_DONTWAIT);
    if (got > 0) {
      input_.append(part.data(), static_cast<size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && errno == EAGAIN) {
      break;
    } else {
      close();
    }
  }
  size_t end = 0;
  while ((end = input_.find('\n')) != std::string::npos) {
    const std::string line = input_.substr(0, end);
    input_.erase(0, end + 1);
    take(line);
  }
  if (input_.size() > kLineMax) {
    close();
  }
}

void Store::take(std::string_view line) {
  const size_t value = line.find(' ', 4);
  if (!line.starts_with("val ") || value == std::string_view::npos) {
    close();
    return;
  }
  const auto found = waiting_.find(line.substr(4, value - 4));
  if (found != waiting_.end()) {
    const Answer answer = std::move(found->second);
    waiting_.erase(found);
    answer(line.substr(value + 1));
  }
}

void Store::close() {
  if (fd_ >= 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

} // namespace resilient::shift
