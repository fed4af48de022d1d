#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/signature.h"
#include "base/status.h"
#include "base/time.h"
#include "base/tolerance.h"
#include "base/traffic_class.h"
#include "operation/communicator.h"
#include "operation/staged_memory.h"
#include "operation/task.h"
#include "operation/topology.h"
#include "path/recent_samples.h"
#include "transport/gpu_driver.h"
#include "transport/path_stats.h"
#include "wire/control.h"
#include "wire/trust_fault.h"

namespace resilient {

class RecordSeal; // wire/record_seal.h

// The key-value store through which ranks find each other (c10d's Store, or a
// map in tests). Calls may block for a network round trip and for other users
// of the same connection, never for a key that is missing. Thread-safe. Every
// method may throw; the resolver then asks again, and joinGroup() fails.
class KeyValue {
 public:
  virtual ~KeyValue() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value, or false if there is none yet.
  //
  // If it returns false, `value` is unspecified.
  virtual bool tryGet(const std::string& key, std::string& value) = 0;
  // Returns the sum. Atomic, because ranks count each other with it; an absent
  // key counts as 0.
  virtual int64_t add(const std::string& key, int64_t delta) = 0;
  // Sets `desired` if the key does not exist; returns what is stored then.
  virtual std::string setIfAbsent(
      const std::string& key,
      const std::string& desired) = 0;
  // The values, of keys that all exist. They come in the order of `keys`.
  // Throws if one is missing.
  virtual std::vector<std::string> getAll(const std::vector<std::string>& keys);
  // The same store over a connection that the application does not use. All
  // clones in a process share it.
  virtual std::unique_ptr<KeyValue> clone() = 0;
  // The address of the machine that serves the store, or empty: the route to
  // it picks the interface to listen on.
  virtual std::string serverHost() const = 0;
  // The shortest one to that machine that has been measured; 0: unknown.
  virtual Nanos roundTrip() const {
    return Nanos(0);
  }
};

// The arguments of joinGroup(). No two ranks may be in one process. Keys in the
// store do not contain the name of the group, so groups with other members need
// stores of their own; c10d gives each a PrefixStore. `globalRanks` has `size`
// entries unless it is empty.
struct GroupConfig {
  std::string name;
  int rank = 0;
  int size = 1;
  // Rank in the default group of each member (for messages), or empty.
  std::vector<uint64_t> globalRanks;
  std::unique_ptr<KeyValue> store;
  bool eagerConnect = false;
};

// A collective as the backend hands it over. The memory that `body` refers to
// is lent to the engine until `done` is called.
struct CollectiveSpec {
  OpSignature signature;
  uint64_t bytes = 0; // that this rank reads and writes
  TrafficClass trafficClass = TrafficClass::kGradient;
  // From the start in the loop on, which may be a moment after submit().
  Nanos timeout{};
  // Makes the algorithm; called and run on the loop thread. Its captures live
  // until `done` has been called. It is called at most once: not at all if the
  // group is closed.
  std::function<Task(Communicator&)> body;
  // Null if the memory is complete from the start, and results stay in it.
  std::shared_ptr<StagedMemory> memory;
  // The large parts of that memory, for RDMA devices.
  std::vector<std::span<std::byte>> tensors;
  // Gives what owns that memory. Called at most once, just before `done`, if an
  // RDMA device does not let go of the memory: the engine keeps the result
  // until it does. Null: nothing has to be kept.
  std::function<std::shared_ptr<void>()> hold;
  // A large tensor in the memory of a GPU, if there is one.
  GpuAddress gpu;
  // Called exactly once on the loop thread (or on the caller's, if the group is
  // closed already): ok, or a Status whose message has the full context. It
  // must not block or throw.
  std::function<void(const Status&)> done;
};

// One point-to-point message. `tag` as in c10d. Both ends give the same dtype
// and bytes, or both fail with kMismatch.
struct PointToPointSpec {
  bool isSend = true;
  // Never this rank itself: the backend refuses that.
  int peer = 0; // group rank; -1 with isSend == false: from any source
  // Below kCollectiveBit (channel/mailbox.h).
  uint64_t tag = 0;
  OpSignature signature; // kind kSend, dtype and count of the tensor
  TrafficClass trafficClass = TrafficClass::kActivation;
  Nanos timeout{};
  // Lent until `done` is called. A send only reads it.
  void* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<StagedMemory> memory; // as above
  std::function<std::shared_ptr<void>()> hold; // as above
  GpuAddress gpu; // as above
  // As in SendOp: a send is not ok if its data is not there.
  Status failure;
  // Of a send. Unless it is exact, `zeroFilled` is called before `done`, if all
  // went well, with what the receiver had to fill with zeros.
  Tolerance tolerance;
  std::function<void(std::vector<ByteRange>)> zeroFilled;
  // Once, as above. sourceRank: the peer (resolved for any source), or -1.
  std::function<void(const Status&, int sourceRank)> done;
};

// One peer for stats(); docs/operations.md describes the fields.
struct PeerStats {
  int rank = -1; // in this group
  std::string host;
  std::string state; // "unconnected", "up", "suspect", "dead", "left"
  uint64_t messagesSent = 0, messagesReceived = 0;
  RecentSamples deliveriesS; // see Channel
  uint64_t bytesSent = 0, bytesReceived = 0;
  double lastHeardSecondsAgo = -1; // -1: never
  // The reason for which the link was closed; else that of the first
  // connection, by index, that has failed.
  std::string lastError;
  std::vector<PathStats> paths;
};
// Callers at the process's listening port. Those who did not come through are
// strangers, or ranks with other settings; the log names them.
struct ListenerCounters {
  uint64_t accepted = 0; // connections
  uint64_t admitted = 0; // proved that they belong to the job
  uint64_t refused = 0; // wrong proof, version or bytes, or not expected
  uint64_t timedOut = 0;
  uint64_t brokenOff = 0; // by the caller
  uint64_t dropped = 0; // too many at a time
  uint64_t pending = 0; // now
};

// Counts what this process passes on between other ranks.
struct RelayCounters {
  uint64_t flows = 0; // now
  uint64_t messages = 0, bytes = 0; // passed on
  uint64_t heldBytes = 0; // now, also of what comes for this rank
  uint64_t heldMaxBytes = 0; // the most so far
  uint64_t refused = 0; // messages, and flows
};

// How this process protects what it sends.
struct TrustStats {
  std::string encryption; // nameOf(Encryption)
  bool ownSecret = false; // else the store has made it, and tells everybody
  bool certificates = false; // they prove hosts, in TLS
  HandshakeCounters handshakes;
};

struct GroupStats {
  std::string group;
  int rank = 0, size = 1;
  uint64_t collectives = 0;
  uint64_t operationsPending = 0;
  std::vector<PeerStats> peers;
  ListenerCounters listener; // of the process, all groups
  RelayCounters relay; // likewise
  TrustStats trust; // likewise
};

// A group of ranks on the process's one engine. Thread-safe: every method may
// be called from any thread except the loop thread. submit(), sequence() and
// setSequence() do not block. abort(), stats() and setTopology() wait for a
// turn of the loop; shutdown() and topology() also wait for other ranks.
class Group {
 public:
  virtual ~Group() = default;
  // Collectives of a group get their sequence number here, in call order.
  // Returns that number. The ranks must call the same collectives in the same
  // order, since messages match by that number. A collective that a closed
  // group refuses is counted, too.
  //
  // A small operation may be started within the call, in a turn of the loop
  // that the caller takes. `done` may then be called before submit() returns.
  virtual uint64_t submit(CollectiveSpec spec) = 0;
  // `spec` belongs to the group from here on.
  virtual void submit(std::shared_ptr<PointToPointSpec> spec) = 0;
  virtual uint64_t sequence() const = 0; // of the last collective
  // The next collective gets `sequence` + 1. All ranks must set the same number
  // between the same two collectives.
  virtual void setSequence(uint64_t sequence) = 0;
  // Pending and later operations fail with kAborted; members are told. There is
  // no way back: a group that has failed as a whole stays so.
  virtual void abort(const std::string& reason) = 0;
  // Waits (at most `linger`) until peers have what was sent, then leaves.
  // Pending operations fail. Idempotent. The last group of a process also stops
  // the engine, within the same `linger`.
  virtual void shutdown(Nanos linger) = 0;
  virtual GroupStats stats() = 0;
  // For what the members themselves put into the store. Null without a secret
  // of the job's own: whoever can write to the store then knows the secret.
  // Does not wait for a turn.
  virtual std::shared_ptr<const RecordSeal> recordSeal() const = 0;
  // The topology of the members; waits until all have joined. Throws
  // StatusError if they have not after `timeout`, or cannot work together.
  // `meanwhile`, if any, is called now and then, and may throw (Ctrl-C). Later
  // calls return at once, after a turn of the loop.
  virtual std::shared_ptr<const Topology> topology(
      Nanos timeout,
      void (*meanwhile)()) = 0;
  // A topology that was measured later, for the collectives submitted from now
  // on. All members must do so between the same two collectives.
  virtual void setTopology(std::shared_ptr<const Topology> topology) = 0;
};

// Joins a group; starts the process's engine with the first one and stops it
// with the last. Publishes this rank's address in the store. Throws
// StatusError. Blocks for a few requests to the store (see membership.h) and
// not for other ranks. An error that concerns all ranks is left in the store
// before it is thrown, so the others fail as well.
std::shared_ptr<Group> joinGroup(GroupConfig config);

// Recent operations of this process as text, newest last (flight recorder).
//
// Empty without an engine. Any thread.
std::string dumpRecentOperations();

} // namespace resilient
