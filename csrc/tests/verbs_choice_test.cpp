#include "transport/verbs_choice.h"

#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/verbs_fake.h"

namespace resilient {
namespace {

std::vector<NicAddress> addresses() {
  return {
      {"eth0", *SocketAddress::parse("10.0.0.1", 1), 24},
      {"eth1", *SocketAddress::parse("10.0.1.1", 1), 24}};
}

// "mlx5_0" on eth1, and "mlx5_1" on an interface that this process does not
// use.
std::vector<VerbsPort> ports() {
  VerbsPort used;
  used.device = "mlx5_0";
  used.gidIndex = 3;
  used.gid = gidOf(addresses()[1].address);
  used.active = true;
  VerbsPort other = used;
  other.device = "mlx5_1";
  other.gidIndex = 1;
  other.gid = gidOf(*SocketAddress::parse("fd00::7", 1));
  return {used, other};
}

struct Set {
  const char* name;
  const char* value;
};

VerbsChoice choice(const std::vector<Set>& options) {
  EngineOptions set;
  for (const Set& each : options) {
    set.setFromString(each.name, each.value);
  }
  set.validate();
  return VerbsChoice(set);
}

std::string missing(
    const std::vector<Set>& options,
    const std::vector<VerbsPort>& there = ports(),
    const std::string& why = "") {
  return choice(options).missing(there, why, addresses());
}

// A device sends plaintext.
TEST(verbs_choice_is_off_where_encryption_is_required) {
  CHECK(choice({{"encryption", "required"}}).off());
  CHECK(!choice({{"encryption", "auto"}}).off());
  CHECK_THROWS(
      StatusError,
      "an RDMA device sends plaintext",
      choice({{"encryption", "required"}, {"rdma", "required"}}));
}

TEST(verbs_choice_takes_all_by_default) {
  const VerbsChoice all = choice({});
  CHECK(!all.off());
  CHECK(!all.mustLook());
  CHECK(!all.byInterface());
  CHECK_EQ(all.of(ports()).size(), 2u);
  CHECK_EQ(missing({}, {}, "nothing is there"), "");
  CHECK(choice({{"rdma", "off"}, {"rdma_devices", "x"}}).off());
  CHECK_EQ(missing({{"rdma", "off"}, {"rdma_devices", "x"}}), "");
}

TEST(verbs_choice_takes_the_devices_and_the_index_of_the_options) {
  const auto one = choice({{"rdma_devices", " mlx5_1 ,"}}).of(ports());
  CHECK_EQ(one.size(), 1u);
  CHECK_EQ(one[0].device, "mlx5_1");
  const VerbsChoice third = choice({{"rdma_gid_index", "3"}});
  CHECK(third.byInterface());
  CHECK_EQ(third.of(ports()).size(), 1u);
  CHECK_EQ(third.of(ports())[0].device, "mlx5_0");
}

TEST(verbs_choice_knows_the_ports_of_this_process) {
  std::vector<VerbsPort> here = choice({}).here(ports(), addresses());
  CHECK_EQ(here.size(), 1u);
  CHECK_EQ(here[0].device, "mlx5_0");
  CHECK(
      choice({{"rdma_devices", "mlx5_1"}}).here(ports(), addresses()).empty());
  CHECK(choice({{"rdma", "required"}}).required());
  CHECK(!choice({}).required());
}

TEST(verbs_are_tried_with_the_memory_of_one_queue_pair) {
  test::VerbsFake fake;
  std::vector<VerbsPort> both;
  CHECK(fake.ports(both).ok());
  CHECK(tryQueuePair(fake, both).ok());
  CHECK_EQ(fake.queuePairs(), 0u);
  CHECK_EQ(fake.memories(), 0u);
  fake.setMemoryLimit(64u << 10); // as containers have it
  CHECK_EQ(
      tryQueuePair(fake, both).message(),
      "fake0: register 5242880 bytes: Cannot allocate memory");
  // One device that works is enough.
  fake.setMemoryLimit(UINT64_MAX);
  VerbsPort gone = both[0];
  gone.device = "fake7";
  CHECK(tryQueuePair(fake, {gone, both[1]}).ok());
  CHECK_EQ(tryQueuePair(fake, {gone}).message(), "no device fake7");
}

TEST(verbs_choice_says_what_is_missing) {
  CHECK_EQ(missing({{"rdma", "required"}}), "");
  CHECK_EQ(
      missing({{"rdma_devices", "mlx5_0, mlx5_7"}}),
      "TORCH_RESILIENT_RDMA_DEVICES=\"mlx5_0, mlx5_7\": there is no RDMA "
      "device "
      "mlx5_7 with RoCE v2, but mlx5_0, mlx5_1");
  CHECK_EQ(
      missing({{"rdma_devices", "mlx5_0"}}, {}, "no library"),
      "TORCH_RESILIENT_RDMA_DEVICES=\"mlx5_0\": there is no RDMA device mlx5_0 "
      "with RoCE v2: no library");
  CHECK_EQ(
      missing({{"rdma_gid_index", "9"}}),
      "TORCH_RESILIENT_RDMA_GID_INDEX=9: no RDMA device has a RoCE v2 address "
      "with this index, but with 1, 3");
  CHECK_EQ(
      missing({{"rdma", "required"}}, {}, "no library"),
      "TORCH_RESILIENT_RDMA=required: no library");
  CHECK_CONTAINS(
      missing({{"rdma", "required"}}, {}), "this host has no RDMA device");
  CHECK_EQ(
      missing({{"rdma", "required"}, {"rdma_devices", "mlx5_1"}}),
      "TORCH_RESILIENT_RDMA=required: no RDMA device has an address of eth0, "
      "eth1 (TORCH_RESILIENT_INTERFACE), but there is mlx5_1");
  std::vector<VerbsPort> down = ports();
  down[0].active = false;
  CHECK_EQ(
      missing({{"rdma", "required"}}, down),
      "TORCH_RESILIENT_RDMA=required: the port of mlx5_0 is down");
}

} // namespace
} // namespace resilient
