#pragma once

#include <functional>
#include <memory>
#include <string>

#include "delegate/group.h"

namespace resilient {

// Finds out where other ranks are: asks the store for their addresses, over
// and over with growing pauses until they appear, in a thread of its own,
// since a store may block. The thread exists only while somebody is sought.
//
// Thread: any. Callbacks come from the resolver's thread.
class Resolver {
 public:
  Resolver();
  ~Resolver();

  // `found` is called once with the value of `key` as soon as it exists.
  // `store` is used by the resolver's thread only, for as long as it seeks.
  void seek(
      std::shared_ptr<KeyValue> store,
      std::string key,
      std::function<void(const std::string& value)> found);
  // Forgets everything, for good; does not wait for the store.
  void stop();
  // Forgets what is sought in this store.
  void forget(const std::shared_ptr<KeyValue>& store);

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);
  std::shared_ptr<Shared> shared_;
};

} // namespace resilient
