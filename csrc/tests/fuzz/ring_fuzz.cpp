#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/ring_feed.h"

// libFuzzer's entry: `make -C csrc fuzz VARIANT=fuzz CXX=clang++`.
// tests/ring_feed_test.cpp runs the same on every test run, without clang.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static resilient::SharedMemory memory = [] {
    resilient::SharedMemory made;
    resilient::FileDescriptor descriptor;
    const resilient::Status status =
        resilient::SharedMemory::make(0, made, descriptor);
    if (!status.ok()) {
      std::fprintf(stderr, "ring feed: %s\n", status.message().c_str());
      std::exit(1);
    }
    return made;
  }();
  resilient::test::RingFeed({data, bytes}, memory).run();
  return 0;
}
