#include "failover/roles.h"

#include <algorithm>
#include <utility>

#include "base/planted_bugs.h"

namespace resilient {
namespace {

// By route, whether anything on it can carry.
std::vector<bool> worksByRoute(const RoleInput& input) {
  std::vector<bool> works(input.routes, false);
  for (const RoleFacts& c : input.connections) {
    if (c.good && c.wanted) {
      works[c.route] = true;
    }
  }
  for (size_t r = 0; r < input.routePaths.size(); ++r) {
    works[r] = works[r] || input.routePaths[r] != RoutePathUse::kNone;
  }
  return works;
}

// The classes that each route may carry, apart from whether it is in reserve: a
// class whose NIC works on some route stays away from the other NICs.
std::vector<uint8_t> classesByNic(
    const RolePolicy& policy,
    const std::vector<bool>& works) {
  const auto isOn = [&](size_t route, size_t cls) {
    return route < policy.nics.size() &&
        policy.nics[route] == policy.preferred[cls];
  };
  std::vector<uint8_t> classes(works.size(), kAllClasses);
  for (size_t cls = 0; cls < kTrafficClassCount; ++cls) {
    bool kept = false;
    for (size_t r = 0; r < works.size() && !policy.preferred[cls].empty();
         ++r) {
      kept = kept || (works[r] && isOn(r, cls));
    }
    if (RESILIENT_PLANTED(keepClassOnDeadNic)) {
      kept = !policy.preferred[cls].empty();
    }
    for (size_t r = 0; kept && r < works.size(); ++r) {
      if (!isOn(r, cls)) {
        classes[r] = static_cast<uint8_t>(classes[r] & ~(1u << cls));
      }
    }
  }
  return classes;
}

// With "standby": of the classes that each route may carry, those for which it
// is the first that works. A class that keeps to a NIC on standby uses it.
std::vector<uint8_t> firstThatWork(
    std::vector<uint8_t> classes,
    const std::vector<bool>& works) {
  uint8_t taken = 0;
  for (size_t r = 0; r < works.size(); ++r) {
    const bool mayCarry =
        works[r] && (r == 0 || !RESILIENT_PLANTED(standbyFirstRouteOnly));
    classes[r] = static_cast<uint8_t>(mayCarry ? classes[r] & ~taken : 0);
    taken = static_cast<uint8_t>(taken | classes[r]);
  }
  return classes;
}

} // namespace

Roles assignRoles(const RoleInput& input, const RolePolicy& policy) {
  Roles roles;
  roles.connections.assign(input.connections.size(), 0);
  roles.routePaths.assign(input.routePaths.size(), 0);
  if (input.sharedMemory) {
    roles.sharedMemory = kAllClasses;
    return roles;
  }
  const std::vector<bool> works = worksByRoute(input);
  const bool anyWorks =
      std::find(works.begin(), works.end(), true) != works.end() ||
      RESILIENT_PLANTED(reserveWhenNothingWorks);
  roles.relays = input.relays && !anyWorks ? kAllClasses : uint8_t{0};
  const bool standby = policy.standby && anyWorks;
  std::vector<uint8_t> classes = classesByNic(policy, works);
  if (standby) {
    classes = firstThatWork(std::move(classes), works);
  }
  // `needed`: it is not one too many.
  const auto carries = [&](size_t route, bool needed) {
    return !anyWorks || needed || (!works[route] && !standby);
  };
  for (size_t r = 0; r < input.routePaths.size(); ++r) {
    if (input.routePaths[r] != RoutePathUse::kNone && carries(r, true)) {
      roles.routePaths[r] = classes[r];
    }
  }
  for (size_t i = 0; i < input.connections.size(); ++i) {
    const RoleFacts& c = input.connections[i];
    const bool relieved = c.route < input.routePaths.size() &&
        input.routePaths[c.route] == RoutePathUse::kAlone;
    if (!relieved && carries(c.route, c.wanted)) {
      roles.connections[i] = classes[c.route];
    }
  }
  return roles;
}

} // namespace resilient
