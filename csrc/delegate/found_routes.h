#pragma once

#include <string>

namespace resilient {

// Knowledge about the way between two NICs, for the next link there, also one
// of a later engine of this process.
struct FoundRoute {
  int connections = 0; // 0: unknown
  bool lossy = false; // BBR is better
};

// `route` names the two NICs; any thread.
FoundRoute foundRoute(const std::string& route);
void rememberRoute(const std::string& route, const FoundRoute& found);

} // namespace resilient
