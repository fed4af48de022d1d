#include "failover/roles.h"

#include <string>
#include <vector>

#include "base/random.h"
#include "tests/check.h"

namespace resilient::test {
namespace {

constexpr uint8_t bit(TrafficClass c) {
  return static_cast<uint8_t>(1u << static_cast<unsigned>(c));
}

// Two connections on each of `routes` routes, numbered as Failover does: the
// route is the number modulo the routes.
RoleInput connectionsOn(size_t routes) {
  RoleInput input;
  input.routes = routes;
  for (size_t i = 0; i < 2 * routes; ++i) {
    input.connections.push_back({i % routes, true, true});
  }
  return input;
}

void setGood(RoleInput& input, size_t route, bool good) {
  for (RoleFacts& c : input.connections) {
    c.good = c.route == route ? good : c.good;
  }
}

using Classes = std::vector<uint8_t>;
constexpr uint8_t kAll = kAllClasses;

TEST(roles_let_all_routes_carry) {
  CHECK_EQ(
      assignRoles(connectionsOn(2), {}).connections,
      Classes({kAll, kAll, kAll, kAll}));
}

TEST(roles_standby_takes_over_and_gives_back) {
  RolePolicy standby;
  standby.standby = true;
  RoleInput input = connectionsOn(2);
  CHECK_EQ(
      assignRoles(input, standby).connections, Classes({kAll, 0, kAll, 0}));
  input.connections[0].good = false; // its neighbour still carries
  CHECK_EQ(
      assignRoles(input, standby).connections, Classes({kAll, 0, kAll, 0}));
  input.connections[2].good = false;
  CHECK_EQ(
      assignRoles(input, standby).connections, Classes({0, kAll, 0, kAll}));
  input.connections[2].good = true;
  CHECK_EQ(
      assignRoles(input, standby).connections, Classes({kAll, 0, kAll, 0}));
}

TEST(roles_keep_a_class_to_its_nic_while_that_works) {
  RolePolicy policy;
  policy.nics = {"eth0", "eth1"};
  const auto activation = static_cast<size_t>(TrafficClass::kActivation);
  policy.preferred[activation] = "eth1";
  const uint8_t others = kAll & ~bit(TrafficClass::kActivation);
  RoleInput input = connectionsOn(2);
  CHECK_EQ(
      assignRoles(input, policy).connections,
      Classes({others, kAll, others, kAll}));
  setGood(input, 1, false);
  CHECK_EQ(
      assignRoles(input, policy).connections,
      Classes({kAll, kAll, kAll, kAll}));
  // Datagrams are enough for the NIC to work.
  input.routePaths = {RoutePathUse::kNone, RoutePathUse::kAlone};
  const Roles roles = assignRoles(input, policy);
  CHECK_EQ(roles.connections, Classes({others, 0, others, 0}));
  CHECK_EQ(roles.routePaths, Classes({0, kAll}));
  // No route has the NIC that it prefers.
  policy.preferred[activation] = "eth7";
  CHECK_EQ(
      assignRoles(connectionsOn(2), policy).connections,
      Classes({kAll, kAll, kAll, kAll}));
}

// It has been given a NIC of its own, which need not be the one that carries
// the rest.
TEST(roles_keep_a_class_to_its_nic_on_standby) {
  RolePolicy policy;
  policy.standby = true;
  policy.nics = {"eth0", "eth1"};
  policy.preferred[static_cast<size_t>(TrafficClass::kBulk)] = "eth1";
  const uint8_t bulk = bit(TrafficClass::kBulk);
  const uint8_t others = kAll & ~bulk;
  RoleInput input = connectionsOn(2);
  CHECK_EQ(
      assignRoles(input, policy).connections,
      Classes({others, bulk, others, bulk}));
  setGood(input, 1, false);
  CHECK_EQ(assignRoles(input, policy).connections, Classes({kAll, 0, kAll, 0}));
  setGood(input, 1, true);
  setGood(input, 0, false);
  CHECK_EQ(assignRoles(input, policy).connections, Classes({0, kAll, 0, kAll}));
}

TEST(roles_hold_connections_in_excess_in_reserve) {
  RoleInput input = connectionsOn(2);
  input.connections[2].wanted = input.connections[3].wanted = false;
  CHECK_EQ(assignRoles(input, {}).connections, Classes({kAll, kAll, 0, 0}));
  // The one that route 0 wants does not work: the reserve steps in.
  input.connections[0].good = false;
  CHECK_EQ(assignRoles(input, {}).connections, Classes({kAll, kAll, kAll, 0}));
}

TEST(roles_datagrams_relieve_their_route_only) {
  RoleInput input = connectionsOn(2);
  input.routePaths = {RoutePathUse::kAlone};
  const Roles roles = assignRoles(input, {});
  CHECK_EQ(roles.connections, Classes({0, kAll, 0, kAll}));
  CHECK_EQ(roles.routePaths, Classes({kAll}));

  RolePolicy standby;
  standby.standby = true;
  input.routePaths = {RoutePathUse::kNone, RoutePathUse::kAlone};
  const Roles second = assignRoles(input, standby);
  CHECK_EQ(second.connections, Classes({kAll, 0, kAll, 0}));
  CHECK_EQ(second.routePaths, Classes({0, 0}));
  setGood(input, 0, false);
  const Roles taken = assignRoles(input, standby);
  CHECK_EQ(taken.connections, Classes({0, 0, 0, 0}));
  CHECK_EQ(taken.routePaths, Classes({0, kAll}));
}

TEST(roles_datagrams_beside_connections_relieve_none) {
  RoleInput input = connectionsOn(2);
  input.routePaths = {RoutePathUse::kBeside};
  Roles roles = assignRoles(input, {});
  CHECK_EQ(roles.connections, Classes({kAll, kAll, kAll, kAll}));
  CHECK_EQ(roles.routePaths, Classes({kAll}));
  // They are enough for the route to work.
  for (size_t i = 0; i < input.connections.size(); ++i) {
    input.connections[i].good = false;
  }
  roles = assignRoles(input, {});
  CHECK_EQ(roles.routePaths, Classes({kAll}));
}

TEST(roles_shared_memory_relieves_everything) {
  RoleInput input = connectionsOn(2);
  input.routePaths = {RoutePathUse::kAlone, RoutePathUse::kAlone};
  input.sharedMemory = true;
  const Roles roles = assignRoles(input, {});
  CHECK_EQ(roles.sharedMemory, kAll);
  CHECK_EQ(roles.connections, Classes({0, 0, 0, 0}));
  CHECK_EQ(roles.routePaths, Classes({0, 0}));
}

TEST(roles_let_all_carry_when_nothing_works) {
  RolePolicy policy;
  policy.standby = true;
  policy.nics = {"eth0", "eth1"};
  policy.preferred.fill("eth0");
  RoleInput input = connectionsOn(2);
  setGood(input, 0, false);
  setGood(input, 1, false);
  input.connections[3].wanted = false;
  CHECK_EQ(
      assignRoles(input, policy).connections,
      Classes({kAll, kAll, kAll, kAll}));
}

// --- against a second opinion

// The rules once more, path by path and class by class, from the comments in
// roles.h and with no care for speed.
class Reference {
 public:
  Reference(const RoleInput& input, const RolePolicy& policy)
      : input_(input), policy_(policy) {}

  uint8_t ofConnection(const RoleFacts& c) const {
    if (input_.sharedMemory ||
        (datagramsOn(c.route) &&
         input_.routePaths[c.route] == RoutePathUse::kAlone)) {
      return 0;
    }
    return classesIf(c.route, [&] {
      return c.wanted || (!policy_.standby && !routeWorks(c.route));
    }());
  }
  uint8_t ofDatagrams(size_t route) const {
    if (input_.sharedMemory || !datagramsOn(route)) {
      return 0;
    }
    return classesIf(route, true);
  }

 private:
  bool datagramsOn(size_t route) const {
    return route < input_.routePaths.size() &&
        input_.routePaths[route] != RoutePathUse::kNone;
  }
  bool routeWorks(size_t route) const {
    bool works = datagramsOn(route);
    for (const RoleFacts& c : input_.connections) {
      works |= c.route == route && c.good && c.wanted;
    }
    return works;
  }
  bool anyRouteWorks() const {
    for (size_t r = 0; r < input_.routes; ++r) {
      if (routeWorks(r)) {
        return true;
      }
    }
    return false;
  }
  // A route before this one carries the class, so this one stands by.
  bool standsBy(size_t route, size_t cls) const {
    for (size_t r = 0; policy_.standby && r < route; ++r) {
      if (routeWorks(r) && mayCarry(r, cls)) {
        return true;
      }
    }
    return policy_.standby && !routeWorks(route);
  }
  // The class prefers this NIC.
  bool isHome(size_t route, size_t cls) const {
    return route < policy_.nics.size() &&
        policy_.nics[route] == policy_.preferred[cls];
  }
  bool mayCarry(size_t route, size_t cls) const {
    if (policy_.preferred[cls].empty() || isHome(route, cls)) {
      return true;
    }
    for (size_t r = 0; r < input_.routes; ++r) {
      if (isHome(r, cls) && routeWorks(r)) {
        return false;
      }
    }
    return true;
  }
  uint8_t classesIf(size_t route, bool carries) const {
    uint8_t classes = 0;
    for (size_t cls = 0; cls < kTrafficClassCount; ++cls) {
      // If nothing works, everything is tried.
      if (!anyRouteWorks() ||
          (carries && mayCarry(route, cls) && !standsBy(route, cls))) {
        classes = static_cast<uint8_t>(classes | (1u << cls));
      }
    }
    return classes;
  }

  const RoleInput& input_;
  const RolePolicy& policy_;
};

RoleInput randomInput(Prng& prng) {
  RoleInput input;
  input.routes = 1 + prng.below(4);
  input.sharedMemory = prng.chance(0.1);
  const double good = prng.uniform(), wanted = prng.uniform();
  for (uint64_t count = prng.below(9); count > 0; --count) {
    input.connections.push_back(
        {prng.below(input.routes), prng.chance(good), prng.chance(wanted)});
  }
  const double usable = prng.chance(0.5) ? 0 : prng.uniform();
  for (uint64_t count = prng.below(input.routes + 1); count > 0; --count) {
    input.routePaths.push_back(
        !prng.chance(usable)   ? RoutePathUse::kNone
            : prng.chance(0.5) ? RoutePathUse::kBeside
                               : RoutePathUse::kAlone);
  }
  return input;
}

// Several routes may have the same NIC, and the peer's differ.
RolePolicy randomPolicy(Prng& prng, size_t routes) {
  RolePolicy policy;
  policy.standby = prng.chance(0.5);
  const auto nic = [&] { return "eth" + std::to_string(prng.below(4)); };
  if (prng.chance(0.8)) {
    for (size_t r = 0; r < routes; ++r) {
      policy.nics.push_back(nic());
    }
  }
  for (std::string& preferred : policy.preferred) {
    preferred = prng.chance(0.5) ? nic() : "";
  }
  return policy;
}

TEST(roles_are_those_of_the_reference) {
  forSeeds(5000, [](uint64_t seed) {
    Prng prng(mixBits(seed));
    const RoleInput input = randomInput(prng);
    const RolePolicy policy = randomPolicy(prng, input.routes);
    const Roles roles = assignRoles(input, policy);
    const Reference reference(input, policy);
    CHECK_EQ(roles.sharedMemory, input.sharedMemory ? kAll : 0);
    CHECK_EQ(roles.connections.size(), input.connections.size());
    CHECK_EQ(roles.routePaths.size(), input.routePaths.size());
    for (size_t i = 0; i < input.connections.size(); ++i) {
      CHECK_EQ(
          roles.connections[i], reference.ofConnection(input.connections[i]));
    }
    for (size_t r = 0; r < input.routePaths.size(); ++r) {
      CHECK_EQ(roles.routePaths[r], reference.ofDatagrams(r));
    }
  });
}

// Whatever the policy: while some path could carry, every class has one that
// works.
TEST(roles_leave_no_class_without_a_path) {
  forSeeds(5000, [](uint64_t seed) {
    Prng prng(mixBits(~seed));
    const RoleInput input = randomInput(prng);
    const Roles roles = assignRoles(input, randomPolicy(prng, input.routes));
    uint8_t carried = roles.sharedMemory, byGood = roles.sharedMemory;
    bool anyGood = input.sharedMemory;
    for (size_t i = 0; i < input.connections.size(); ++i) {
      const RoleFacts& c = input.connections[i];
      carried |= roles.connections[i];
      byGood |= c.good ? roles.connections[i] : 0;
      anyGood = anyGood || (c.good && c.wanted);
    }
    for (size_t r = 0; r < input.routePaths.size(); ++r) {
      carried |= roles.routePaths[r];
      byGood |= roles.routePaths[r];
      anyGood = anyGood || input.routePaths[r] != RoutePathUse::kNone;
    }
    CHECK_EQ(carried, input.connections.empty() && !anyGood ? 0 : kAll);
    CHECK(!anyGood || byGood == kAll);
  });
}

} // namespace
} // namespace resilient::test
