#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace resilient::shift {

// A client of the small key-value store that `torch-resilient shift` serves.
// Paper: SHIFT §4.2, out-of-band key-value transfer
//
// Lines of text over one TCP connection: "put KEY VALUE", "del KEY" and
// "get KEY", which the store answers with "val KEY VALUE" as soon as the key
// exists. Keys and values have no white space. The store drops the keys of a
// connection that ends. Not thread-safe.
class Store {
 public:
  using Answer = std::function<void(std::string_view value)>;

  Store() = default;
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // HOST:PORT; returns what went wrong, or an empty text.
  std::string connect(const std::string& address);
  int fd() const {
    return fd_;
  }
  // Lost for good: nothing is protected any more.
  bool isLost() const {
    return fd_ < 0;
  }
  void put(const std::string& key, const std::string& value);
  void remove(const std::string& key);
  // Calls `answer` once, from pump().
  void get(const std::string& key, Answer answer);
  // Takes what has arrived.
  void pump();
  void close();

 private:
  void send(const std::string& line);
  void take(std::string_view line);

  int fd_ = -1;
  std::string input_;
  std::multimap<std::string, Answer, std::less<>> waiting_;
};

} // namespace resilient::shift
