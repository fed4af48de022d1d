#include "transport/verbs_system.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <system_error>

namespace resilient {
namespace {

constexpr const char* kNeededLibrary = "libibverbs.so.1";

std::atomic<VerbsApi*> replacement{nullptr};

// The file with this code: the Python module, or a program of the tests.
std::string ownFile() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&ownFile), &info) == 0 ||
      info.dli_fname == nullptr) {
    return "";
  }
  std::string name = info.dli_fname;
  if (name.find('/') != std::string::npos) {
    return name;
  }
  // The name of a program that the shell has found in PATH.
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

std::string openError() {
  const char* const text = ::dlerror();
  return text != nullptr ? text : "unknown error";
}

} // namespace

bool hasRdmaDevices() {
  std::error_code error;
  const bool isEmpty =
      std::filesystem::is_empty("/sys/class/infiniband", error);
  return !error && !isEmpty;
}

std::string verbsLibraryBeside(const std::string& module) {
  const size_t name = module.rfind('/') + 1; // 0 if there is no slash
  const size_t dot = module.find('.', name);
  const std::string ending =
      dot != std::string::npos ? module.substr(dot) : ".so";
  return module.substr(0, name) + "_verbs" + ending;
}

VerbsApi* openVerbsLibrary(const std::string& path, std::string& why) {
  if (::access(path.c_str(), F_OK) != 0) {
    why = "RDMA verbs: torch_resilient was built without them (there is no " +
        path +
        "): install libibverbs with its headers (Debian: libibverbs-dev) and "
        "build torch_resilient again";
    return nullptr;
  }
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string error = openError();
    // Otherwise the error is about a library that this one needs: it is missing
    // or too old.
    const bool isAboutItself = error.starts_with(path);
    why = "RDMA verbs: open " + path + ": " + error;
    if (!isAboutItself) {
      why += std::string(": install ") + kNeededLibrary +
          " as new as where torch_resilient was built (Debian: libibverbs1 and "
          "ibverbs-providers)";
    }
    return nullptr;
  }
  auto* const open =
      reinterpret_cast<VerbsOpen*>(::dlsym(library, kVerbsOpenName));
  VerbsApi* const api = open != nullptr ? open(kVerbsApiVersion) : nullptr;
  why = api != nullptr
      ? ""
      : "RDMA verbs: " + path + " is of another build of torch_resilient: " +
          "build and install torch_resilient again";
  return api;
}

void replaceSystemVerbs(VerbsApi* api) {
  replacement.store(api);
}

VerbsApi* systemVerbs(std::string& why) {
  if (VerbsApi* const api = replacement.load(); api != nullptr) {
    why.clear();
    return api;
  }
  struct Answer {
    VerbsApi* api = nullptr;
    std::string why;
    Answer() {
      // The library of `torch-resilient shift` would move queue pairs that
      // this backend moves, too.
      if (::dlsym(RTLD_DEFAULT, "torch_resilient_shift") != nullptr) {
        why =
            "RDMA verbs: off, because `torch-resilient shift` protects the "
            "RDMA devices of this process: start the job without it";
        return;
      }
      api = openVerbsLibrary(verbsLibraryBeside(ownFile()), why);
    }
  };
  static const Answer answer;
  why = answer.why;
  return answer.api;
}

} // namespace resilient
