#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/check.h"
#include "transport/verbs_system.h"

namespace resilient {
namespace {

// The Makefile builds this library beside this program if libibverbs-dev is
// here.
std::string ownLibrary() {
  return verbsLibraryBeside(
      std::filesystem::read_symlink("/proc/self/exe").string());
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Changes the first `from` in the file to `to`, of the same length.
std::string changedCopy(
    const std::string& path,
    const std::string& from,
    const std::string& to) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  const size_t at = bytes.find(from);
  CHECK(at != std::string::npos);
  bytes.replace(at, from.size(), to);
  // The loader knows a library by its name, even if the file is another one.
  const std::string copy =
      "/tmp/resilient-verbs-" + std::to_string(::getpid()) + "-" + to + ".so";
  std::ofstream(copy, std::ios::binary) << bytes;
  return copy;
}

TEST(verbs_library_lies_beside_the_module) {
  CHECK_EQ(verbsLibraryBeside("/a.b/core_tests"), "/a.b/_verbs.so");
  CHECK_EQ(
      verbsLibraryBeside("/a/_C.cpython-311-x86_64-linux-gnu.so"),
      "/a/_verbs.cpython-311-x86_64-linux-gnu.so");
  CHECK_EQ(verbsLibraryBeside("_C.so"), "_verbs.so");
}

TEST(verbs_of_the_system_load_where_they_are_built) {
  std::string why = "?";
  VerbsApi* const api = systemVerbs(why);
  if (!std::filesystem::exists(ownLibrary())) {
    CHECK(api == nullptr);
    CHECK(contains(why, "built without them"));
    CHECK(contains(why, "libibverbs-dev"));
    return;
  }
  CHECK_EQ(why, "");
  CHECK(api != nullptr);
  CHECK(systemVerbs(why) == api);
  std::vector<VerbsPort> ports;
  const Status status = api->ports(ports);
  if (!hasRdmaDevices()) {
    CHECK_EQ(status.message(), "");
    CHECK(ports.empty());
  }
  std::shared_ptr<VerbsDevice> device;
  const Status missing = api->open("no_such_device", device);
  CHECK(!missing.ok());
  CHECK(contains(missing.message(), "no_such_device: open it"));
  CHECK(device == nullptr);
}

TEST(verbs_library_that_cannot_be_opened_is_explained) {
  std::string why;
  CHECK(openVerbsLibrary("/nowhere/_verbs.so", why) == nullptr);
  CHECK(contains(why, "there is no /nowhere/_verbs.so"));
  CHECK(contains(why, "libibverbs-dev"));
  CHECK(openVerbsLibrary("/proc/self/exe", why) == nullptr);
  CHECK(contains(why, "open /proc/self/exe: "));
  CHECK(!contains(why, "install"));
}

TEST(verbs_library_of_another_build_is_refused) {
  if (!std::filesystem::exists(ownLibrary())) {
    return;
  }
  void* const library = ::dlopen(ownLibrary().c_str(), RTLD_NOW);
  CHECK(library != nullptr);
  auto* const open =
      reinterpret_cast<VerbsOpen*>(::dlsym(library, kVerbsOpenName));
  CHECK(open != nullptr);
  CHECK(open(kVerbsApiVersion) != nullptr);
  CHECK(open(kVerbsApiVersion + 1) == nullptr);
  // One that has no such function.
  std::string other = kVerbsOpenName;
  other.back() = 'm';
  const std::string copy = changedCopy(ownLibrary(), kVerbsOpenName, other);
  std::string why;
  CHECK(openVerbsLibrary(copy, why) == nullptr);
  CHECK(contains(why, "is of another build of torch_resilient"));
  std::filesystem::remove(copy);
}

TEST(verbs_library_without_libibverbs_names_the_package) {
  if (!std::filesystem::exists(ownLibrary())) {
    return;
  }
  // A name that the loader cannot find; the message is about the usual one.
  const std::string needed = "libibverbs.so.1";
  std::string missing = needed;
  missing.back() = '0';
  const std::string copy = changedCopy(ownLibrary(), needed, missing);
  std::string why;
  CHECK(openVerbsLibrary(copy, why) == nullptr);
  CHECK(contains(why, missing + ": "));
  CHECK(contains(why, "install libibverbs.so.1"));
  CHECK(contains(why, "libibverbs1 and ibverbs-providers"));
  std::filesystem::remove(copy);
}

} // namespace
} // namespace resilient
