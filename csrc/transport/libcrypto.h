#pragma once

#include <string>

namespace resilient {

// OpenSSL's libcrypto, looked for at run time: only what seals and agrees on
// keys needs it. The functions that callers name are the same since 1.1.1.
//
// Thread: any.
class Libcrypto {
 public:
  // Loads it; the first time for the whole process.
  Libcrypto();

  // Sets `function` to the one of that name, or missing().
  template <typename Function>
  void find(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(symbol(name));
  }
  // Why it cannot be used: no library, or the first function that it lacks;
  // empty if nothing is missing.
  const std::string& missing() const {
    return missing_;
  }

 private:
  void* symbol(const char* name);

  void* library_ = nullptr;
  std::string missing_;
};

} // namespace resilient
