#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/time.h"
#include "delegate/group.h"

namespace resilient {

// Reads keys that other ranks will set: asks the store, with growing pauses,
// until they exist. A store may block, so this happens in a thread of its own,
// which exists only while there is something to do. The resolver also sets
// this rank's own keys, should its addresses change.
//
// It uses the connection to the store that the application has. If that is
// busy while an operation waits (another thread may block in the store for
// minutes), it opens one connection of its own for the process.
//
// Thread: any. Callbacks come from the resolver's threads.
//
// The threads are detached and share their state with the Resolver by reference
// count: a store that hangs delays neither stop() nor the end of the process.
class Resolver {
 public:
  Resolver();
  ~Resolver();

  // They run without any lock of the resolver, and must not block. One that has
  // begun may still run when forget() or stop() returns.
  struct Callbacks {
    // The value of the key. Called at most once, instead of `lost`.
    std::function<void(const std::string& value)> found;
    // Optional. Every request has failed for kLostAfter: the process that
    // serves the store has most likely ended. Called at most once; the key is
    // then no longer sought. Without it, it is sought until forget().
    std::function<void(const std::string& error)> lost;
  };
  // `ranks`: the members that may all ask for this key at the same time. The
  // more there are, the longer the pauses.
  void seek(
      std::shared_ptr<KeyValue> store,
      std::string key,
      int ranks,
      Callbacks callbacks);
  // Sets `key` in `store`, as soon as the store lets it; a later value for the
  // key replaces one that has not been set yet.
  void
  tell(std::shared_ptr<KeyValue> store, std::string key, std::string value);
  // An operation waits for what is sought: ask again at once, and over a
  // connection of our own if the store's has been busy for kBusyAfter. It costs
  // little if nothing is sought.
  void hurry();
  // Forgets everything, for good; does not wait for the store.
  void stop();
  // Forgets what is to be done in this store.
  void forget(const std::shared_ptr<KeyValue>& store);
  // Why what is wanted of this store could not be done so far, in one line;
  // empty if the store answers, or nothing is wanted of it.
  std::string trouble(const std::shared_ptr<KeyValue>& store) const;

  // A store that is gone stays gone: c10d's clients do not reconnect. But one
  // failure may be an accident of a store of another kind. With the pauses
  // between tries an operation fails within 3 s.
  static constexpr Nanos kLostAfter = std::chrono::milliseconds(1500);
  // Longer than a request over a slow link takes.
  static constexpr Nanos kBusyAfter = std::chrono::milliseconds(500);

 private:
  struct Wanted;
  struct Shared;
  void add(Wanted wanted);
  static void start(const std::shared_ptr<Shared>& shared, bool ownConnection);
  static void
  run(const std::shared_ptr<Shared>& shared, uint64_t turn, bool ownConnection);
  static void tryOnce(
      const std::shared_ptr<Shared>& shared,
      const Wanted& wanted,
      KeyValue& store);
  std::shared_ptr<Shared> shared_;
};

} // namespace resilient
