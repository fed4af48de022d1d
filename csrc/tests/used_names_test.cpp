#include "transport/used_names.h"

#include "tests/check.h"
#include "wire/tls_keys.h"

namespace resilient::test {
namespace {

TEST(used_names_know_the_last_ones) {
  const TlsKeys keys = TlsKeys::of("the secret of the job");
  const auto name = [&](size_t i) {
    TlsNonce nonce{};
    nonce[0] = static_cast<uint8_t>(i);
    nonce[1] = static_cast<uint8_t>(i >> 8);
    nonce[2] = static_cast<uint8_t>(i >> 16);
    return tlsNameOf(keys, nonce);
  };
  UsedNames used;
  for (size_t i = 0; i < UsedNames::kMax; ++i) {
    CHECK(used.use(name(i)));
  }
  CHECK(!used.use(name(0)));
  CHECK(!used.use(name(UsedNames::kMax - 1)));
  CHECK(used.knowsAll());
  CHECK(used.use(name(UsedNames::kMax)));
  CHECK(!used.knowsAll());
  CHECK(!used.use(name(1)));
  CHECK(used.use(name(0))); // forgotten by now
}

} // namespace
} // namespace resilient::test
