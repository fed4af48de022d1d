#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "delegate/authenticated_store.h"
#include "delegate/membership.h"
#include "tests/check.h"
#include "tests/engine_ranks.h"
#include "tests/tls_pair.h"

// Several engines in one process with a secret of their own: encrypted
// connections, and a store that others may write to.

namespace resilient::test {
namespace {

const std::string kOwn(32, 's'), kOther(32, 't');

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

// --- the store

std::unique_ptr<AuthenticatedStore> storeOf(
    const std::shared_ptr<MapStore>& map,
    std::vector<std::string> secrets = {kOwn},
    StoreContext context = {0, 2, {}}) {
  auto values = std::make_unique<MapKeyValue>(map, context.rank);
  return std::make_unique<AuthenticatedStore>(
      std::move(values),
      std::make_shared<RecordSeal>(secrets, std::move(context)));
}

std::string read(KeyValue& store, const std::string& key) {
  std::string value;
  CHECK(store.tryGet(key, value));
  return value;
}

bool refuses(KeyValue& store, const std::string& key) {
  const auto why = Membership::refusal(read(store, key));
  if (why) {
    CHECK_CONTAINS(*why, "the record " + key + " in the store");
    CHECK_CONTAINS(*why, "is not authentic");
    CHECK_THROWS(StatusError, key, store.getAll({key}));
    CHECK_THROWS(StatusError, key, store.setIfAbsent(key, "mine"));
  }
  return why.has_value();
}

TEST(store_records_are_read_by_those_who_have_the_secret) {
  const auto map = std::make_shared<MapStore>();
  const auto writer = storeOf(map), reader = storeOf(map, {kOwn}, {1, 2, {}});
  for (const std::string& value :
       {std::string("a value"), std::string(), std::string("two\nlines ")}) {
    writer->set("key", value);
    CHECK_EQ(read(*reader, "key"), value);
    CHECK_EQ(read(*reader->clone(), "key"), value);
    CHECK_EQ(reader->setIfAbsent("key", "another"), value);
    CHECK(reader->getAll({"key"}) == std::vector{value});
  }
  CHECK_EQ(reader->setIfAbsent("new", "first"), "first");
  CHECK_EQ(writer->setIfAbsent("new", "second"), "first");
  CHECK_EQ(writer->add("count", 2), 2);
  CHECK_EQ(reader->add("count", 1), 3);
  std::string none;
  CHECK(!reader->tryGet("absent", none));
}

TEST(store_records_of_others_are_refused) {
  const auto map = std::make_shared<MapStore>();
  const auto store = storeOf(map);
  store->set("resilient/at/1/0", "here");
  CHECK(!refuses(*store, "resilient/at/1/0"));
  const std::string good = map->values["resilient/at/1/0"];
  // Any change, of any byte.
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    map->values["resilient/at/1/0"] = bad;
    CHECK(refuses(*store, "resilient/at/1/0"));
    map->values["resilient/at/1/0"] = good.substr(0, at);
    CHECK(refuses(*store, "resilient/at/1/0"));
  }
  // At another key, of another generation.
  for (const char* key : {"resilient/at/1/1", "resilient/at/2/0"}) {
    map->values[key] = good;
    CHECK(refuses(*store, key));
  }
  // Of another group, and with another secret.
  map->values["resilient/at/1/0"] = good;
  for (const StoreContext& context :
       {StoreContext{0, 3, {}},
        StoreContext{0, 2, {0, 1}},
        StoreContext{0, 2, {1, 0}}}) {
    CHECK(refuses(*storeOf(map, {kOwn}, context), "resilient/at/1/0"));
  }
  CHECK(!refuses(*storeOf(map, {kOwn}, {7, 2, {}}), "resilient/at/1/0"));
  CHECK(refuses(*storeOf(map, {kOther}), "resilient/at/1/0"));
  storeOf(map, {kOther}, {1, 2, {}})->set("resilient/at/1/1", "there");
  CHECK(refuses(*store, "resilient/at/1/1"));
  CHECK_CONTAINS(read(*store, "resilient/at/1/1"), "of rank 1");
}

TEST(store_records_of_the_program_hold_in_their_scope) {
  const std::vector<std::string> secrets{kOwn};
  const StoreContext writer{0, 2, {}}, reader{1, 2, {}};
  const std::string record =
      RecordSeal(secrets, writer, " of group 1").protect("plan", "a value");
  std::string value;
  CHECK_EQ(
      RecordSeal(secrets, reader, " of group 1")
          .open("plan", record, value)
          .message(),
      "");
  CHECK_EQ(value, "a value");
  for (const std::string scope : {"", " of group 2"}) {
    const Status status =
        RecordSeal(secrets, reader, scope).open("plan", record, value);
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK_CONTAINS(
        status.message(), "the record plan" + scope + " in the store");
    CHECK_CONTAINS(status.message(), "by its own words of rank 0");
  }
}

// Ranks are restarted one by one: first those that take the new secret, too,
// then those that use it, then those that know no other.
TEST(store_records_outlive_a_change_of_the_secret) {
  const std::vector<std::string> steps[] = {
      {kOther}, {kOther, kOwn}, {kOwn, kOther}, {kOwn}};
  for (size_t i = 0; i + 1 < std::size(steps); ++i) {
    const auto map = std::make_shared<MapStore>();
    const auto before = storeOf(map, steps[i]),
               after = storeOf(map, steps[i + 1], {1, 2, {}});
    before->set("before", "b");
    after->set("after", "a");
    CHECK_EQ(read(*after, "before"), "b");
    CHECK_EQ(read(*before, "after"), "a");
  }
  const auto map = std::make_shared<MapStore>();
  storeOf(map, {kOther})->set("key", "value");
  CHECK(refuses(*storeOf(map, {kOwn}), "key"));
}

// Who writes to the store moves a rank to an address of his own: an operation
// with that rank fails, and says why, and no connection is made there.
TEST(store_writers_cannot_redirect_a_rank) {
  const auto map = std::make_shared<MapStore>();
  EngineOptions options;
  options.secret = kOwn;
  options.encryption = "off"; // the record alone has to do it
  options.interface = "lo";
  // The first rank alone, which then looks for the other one.
  std::vector<Rank> ranks = startRanks(2, options, map, 1);
  const auto other = storeOf(map, {kOwn}, {1, 2, {}});
  PeerAddress elsewhere = ranks[0].engine->self();
  elsewhere.uid.fill(7);
  other->set("resilient/at/1/1", elsewhere.toString());
  map->moved = elsewhere.addresses.front().toString();
  map->to = "lo@127.0.0.1/8:1";
  std::vector<float> data(10);
  const Status status = ranks[0].message(false, 1, 5, data, kLong);
  CHECK_CONTAINS(status.message(), "resilient/at/1/1");
  CHECK_CONTAINS(status.message(), "is not authentic");
  leave(ranks);
}

// All ranks learn which one has another secret.
TEST(ranks_with_different_secrets_say_which_record_shows_it) {
  const auto map = std::make_shared<MapStore>();
  for (int r = 0; r < 2; ++r) {
    const auto store = storeOf(map, {r == 0 ? kOwn : kOther}, {r, 2, {}});
    Membership member(std::shared_ptr<KeyValue>(store->clone()), "group", r, 2);
    EngineOptions options;
    options.secret = r == 0 ? kOwn : kOther;
    PeerAddress self;
    self.hostName = "node";
    if (r == 0) {
      member.agree(self, options);
      (void)member.publish("address");
    } else {
      CHECK_THROWS(
          StatusError,
          "resilient/job/1/0 in the store, by its own words of rank 0,",
          member.agree(self, options));
    }
  }
  // Also to one without any.
  MapKeyValue plain(map, 0);
  const auto ours = storeOf(map);
  for (KeyValue* store :
       {static_cast<KeyValue*>(ours.get()), static_cast<KeyValue*>(&plain)}) {
    const auto why = Membership::refusal(read(*store, "resilient/members/1/0"));
    CHECK(why.has_value());
    CHECK_CONTAINS(*why, "under the secret of rank 1:");
  }
}

} // namespace
} // namespace resilient::test
