#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/fuzz/tls_feed.h"

// libFuzzer's entry: `make -C csrc fuzz VARIANT=fuzz CXX=clang++`.
// tests/tls_feed_test.cpp runs the same on every test run, without clang.
// OpenSSL itself is not instrumented: the target is what is around it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  std::string why;
  if (!resilient::TlsSession::available(why)) {
    std::fprintf(stderr, "TLS feed: %s\n", why.c_str());
    std::exit(1);
  }
  resilient::test::TlsFeed({data, bytes}).run();
  return 0;
}
