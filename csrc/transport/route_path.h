#pragma once

#include <cstddef>
#include <string>

#include "transport/path.h"

namespace resilient {

// A path beside the connections of a route, which are in reserve as long as it
// works. It must first show that it works, and then judges its own health;
// Failover may doubt one earlier, by what it knows of the others.
class RoutePath : public Path {
 public:
  using Path::Path;
  virtual size_t route() const = 0;
  // Something has come through.
  virtual bool proven() const = 0;
  // It has been heard before, and is not now.
  virtual bool silent() const = 0;
  // "10.0.0.1:4000 -> 10.0.0.2:4000", for messages.
  virtual std::string where() const = 0;
  // The same with what else is worth a line of the log when it begins to work.
  virtual std::string about() const {
    return where();
  }
};

} // namespace resilient
