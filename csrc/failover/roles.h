#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/traffic_class.h"

namespace resilient {

// How the NICs of a process share its traffic, as the options say.
struct RolePolicy {
  // One route at a time carries a class: the first that works. Else all do.
  bool standby = false;
  std::vector<std::string> nics; // ours, by route; empty: the system chooses
  // By traffic class, the NIC that it keeps to while that works; or empty.
  std::array<std::string, kTrafficClassCount> preferred;
};

// One connection, as far as its role depends on it.
struct RoleFacts {
  size_t route = 0;
  bool good = false; // nothing is known against it, and it is not on probation
  bool wanted = true; // not one too many of its route
};

// A path of another kind on a route, such as datagrams or RDMA.
enum class RoutePathUse : uint8_t {
  kNone, // not usable
  kAlone, // in place of the connections of its route
  kBeside, // along with them: each message goes over what suits it
};

// The facts about all paths to one peer.
struct RoleInput {
  size_t routes = 1;
  std::vector<RoleFacts> connections;
  std::vector<RoutePathUse> routePaths; // by route; may be shorter
  bool sharedMemory = false; // usable
  bool relays = false; // a path over another rank is usable
};

// Which traffic classes each path carries, a bit each (1 << class); 0: it is in
// reserve.
struct Roles {
  std::vector<uint8_t> connections;
  std::vector<uint8_t> routePaths; // by route
  uint8_t sharedMemory = 0;
  uint8_t relays = 0; // each path over another rank
};

inline constexpr uint8_t kAllClasses = (1u << kTrafficClassCount) - 1;

// Shared memory carries everything while it is usable, and a route path
// everything of its route, alone or beside the connections. Connections in
// excess, and those of NICs on standby, are in reserve, and a class that keeps
// to a NIC takes no other, not even if its own is on standby. Paths over other
// ranks stand by for everything else. Nothing is in reserve while what it
// stands by for does not work.
//
// Pure. roles_test.cpp compares it with a second version of these rules.
Roles assignRoles(const RoleInput& input, const RolePolicy& policy);

} // namespace resilient
