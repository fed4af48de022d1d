#include "tests/fuzz/message_feed.h"

// libFuzzer's entry: `make -C csrc fuzz VARIANT=fuzz CXX=clang++`.
// tests/message_feed_test.cpp runs the same on every test run, without clang.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  resilient::test::MessageFeed({data, bytes}).run();
  return 0;
}
