#include "transport/libcrypto.h"

#include <dlfcn.h>

namespace resilient {

Libcrypto::Libcrypto() {
  for (const char* name :
       {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
    library_ = library_ != nullptr ? library_ : ::dlopen(name, RTLD_NOW);
  }
  if (library_ == nullptr) {
    missing_ = "OpenSSL's libcrypto was not found";
  }
}

void* Libcrypto::symbol(const char* name) {
  if (!missing_.empty()) {
    return nullptr;
  }
  void* const found = ::dlsym(library_, name);
  if (found == nullptr) {
    missing_ = std::string("libcrypto has no ") + name;
  }
  return found;
}

} // namespace resilient
