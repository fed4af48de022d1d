#include "tests/shift/store_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace resilient::shift::fake {
namespace {

class Server {
 public:
  Server() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    socklen_t length = sizeof address;
    if (bind(listener_, generic, length) == 0 && listen(listener_, 1) == 0 &&
        getsockname(listener_, generic, &length) == 0) {
      port_ = ntohs(address.sin_port);
    }
    std::thread([this] { serve(); }).detach();
  }

  int port() const {
    return port_;
  }
  size_t keys() {
    const std::lock_guard guard(mutex_);
    return values_.size();
  }

 private:
  void serve() {
    fd_ = accept(listener_, nullptr, nullptr);
    std::string input;
    std::array<char, 4096> part;
    for (;;) {
      const ssize_t got = read(fd_, part.data(), part.size());
      if (got <= 0) {
        return;
      }
      input.append(part.data(), static_cast<size_t>(got));
      const std::lock_guard guard(mutex_);
      for (size_t end = 0; (end = input.find('\n')) != std::string::npos;) {
        obey(input.substr(0, end));
        input.erase(0, end + 1);
      }
    }
  }

  void obey(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    std::string key;
    std::string value;
    words >> verb >> key >> value;
    if (verb == "put") {
      values_[key] = value;
      for (size_t left = waiting_.erase(key); left != 0; --left) {
        tell(key);
      }
    } else if (verb == "del") {
      values_.erase(key);
    } else if (values_.contains(key)) {
      tell(key);
    } else {
      waiting_.insert(key);
    }
  }

  void tell(const std::string& key) {
    const std::string line = "val " + key + " " + values_[key] + "\n";
    [[maybe_unused]] const ssize_t written =
        write(fd_, line.data(), line.size());
  }

  int listener_;
  int port_ = 0;
  int fd_ = -1;
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::multiset<std::string> waiting_;
};

Server& server() {
  static Server* const one = new Server;
  return *one;
}

} // namespace

int storePort() {
  return server().port();
}

size_t storedKeys() {
  return server().keys();
}

} // namespace resilient::shift::fake
