#include "delegate/found_routes.h"

#include <map>
#include <mutex>

namespace resilient {
namespace {

struct Memory {
  std::mutex mutex;
  std::map<std::string, FoundRoute> routes; // by mutex
};

// Never destroyed: an engine may outlive the static objects.
Memory& memory() {
  static Memory* const all = new Memory;
  return *all;
}

} // namespace

FoundRoute foundRoute(const std::string& route) {
  std::lock_guard lock(memory().mutex);
  const auto at = memory().routes.find(route);
  return at == memory().routes.end() ? FoundRoute() : at->second;
}

void rememberRoute(const std::string& route, const FoundRoute& found) {
  std::lock_guard lock(memory().mutex);
  memory().routes[route] = found;
}

} // namespace resilient
