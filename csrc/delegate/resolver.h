#pragma once

#include <functional>
#include <memory>
#include <string>

#include "delegate/group.h"

namespace resilient {

// Finds out where other ranks are: asks the store for their addresses, over
// and over with growing pauses until they appear, in a thread of its own,
// since a store may block. The thread exists only while somebody is sought.
// It also tells where this rank is, should that change.
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
  // Sets `key` in `store`, as soon as the store lets it; a later value for the
  // key replaces one that has not been set yet.
  void
  tell(std::shared_ptr<KeyValue> store, std::string key, std::string value);
  // Forgets everything, for good; does not wait for the store.
  void stop();
  // Forgets what is to be done in this store.
  void forget(const std::shared_ptr<KeyValue>& store);
  // Why what is wanted of this store could not be done the last time, in one
  // line; empty if the store answers, or nothing is wanted of it.
  std::string trouble(const std::shared_ptr<KeyValue>& store) const;

 private:
  struct Wanted;
  struct Shared;
  void add(Wanted wanted);
  static bool
  tryOnce(const Wanted& wanted, std::string& value, std::string& error);
  static void run(const std::shared_ptr<Shared>& shared);
  std::shared_ptr<Shared> shared_;
};

} // namespace resilient
