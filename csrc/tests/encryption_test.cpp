#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "tests/check.h"
#include "tests/engine_ranks.h"
#include "tests/tls_pair.h"

// Several engines in one process with a secret of their own: encrypted
// connections.

namespace resilient::test {
namespace {

const std::string kOwn(32, 's');

EngineOptions encrypted() {
  EngineOptions options;
  options.secret = kOwn;
  options.encryption = "required";
  options.shared_memory = false;
  return options;
}

std::string startError(const EngineOptions& options) {
  try {
    Engine::release(Engine::start(options, "127.0.0.1", 0), Nanos(0));
  } catch (const StatusError& error) {
    CHECK(error.status().code() == StatusCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

// Small chunks, several connections and cuts: records end anywhere.
TEST(encryption_carries_a_job_through_cuts_of_its_paths) {
  if (!tlsAvailable()) {
    return;
  }
  EngineOptions options = encrypted();
  options.paths_same_host = 3;
  options.chunk_bytes = 16 << 10;
  options.faults =
      "cut rank=0 after_bytes=500000; "
      "cut rank=1 path=1 after_bytes=90000; seed=3";
  std::vector<Rank> ranks = startRanks(2, options);
  onEach(ranks, [&](int r) {
    for (int i = 0; i < 10; ++i) {
      std::vector<float> data(200'000);
      for (size_t k = 0; k < data.size(); ++k) {
        data[k] = static_cast<float>((k * 7 + static_cast<size_t>(r)) % 1000);
      }
      CHECK_EQ(
          ranks[static_cast<size_t>(r)].allReduce(data, kLong).message(), "");
      for (size_t k = 0; k < data.size(); ++k) {
        const auto want =
            static_cast<float>((k * 7) % 1000 + (k * 7 + 1) % 1000);
        CHECK_EQ(data[k], want);
      }
    }
  });
  uint64_t reconnects = 0;
  for (const Rank& rank : ranks) {
    const GroupStats stats = rank.group->stats();
    for (const PathStats& p : stats.peers[0].paths) {
      reconnects += p.reconnects;
      CHECK(p.encrypted || p.localAddress.empty()); // or it is down
    }
  }
  CHECK(reconnects > 0);
  leave(ranks);
}

TEST(encryption_of_auto_needs_a_secret_and_another_host) {
  if (!tlsAvailable()) {
    return;
  }
  struct Case {
    std::string secret, option;
    Encryption expected;
  };
  for (const Case& c :
       {Case{"", "auto", Encryption::kOff},
        Case{kOwn, "auto", Encryption::kBetweenHosts},
        Case{kOwn, "off", Encryption::kOff},
        Case{kOwn, "required", Encryption::kAlways}}) {
    EngineOptions options;
    options.secret = c.secret;
    options.encryption = c.option;
    const auto engine = Engine::start(options, "127.0.0.1", 0);
    CHECK(engine->encryption() == c.expected);
    Engine::release(engine, Nanos(0));
  }
}

TEST(encryption_that_is_required_and_cannot_be_fails_the_start) {
  EngineOptions options;
  options.encryption = "required";
  const std::string error = startError(options);
  CHECK_CONTAINS(error, "TORCH_RESILIENT_ENCRYPTION=required needs a secret");
  CHECK_CONTAINS(error, "TORCH_RESILIENT_SECRET_FILE");
}

} // namespace
} // namespace resilient::test
