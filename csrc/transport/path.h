#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "channel/channel.h"
#include "failover/health.h"
#include "transport/path_stats.h"

namespace resilient {

class Path;

// The owner of a path. All calls come on the loop thread. The owner may close a
// path from within any of these calls; it must not destroy it there
// (closes_from_within_on_path_ready, closes_from_within_on_path_use).
class PathOwner {
 public:
  virtual ~PathOwner() = default;
  // The path is over. It does nothing more and waits to be destroyed, but not
  // from within this call. The channel still knows it until the call returns.
  virtual void onPathClosed(Path& path, const Status& why) = 0;
  // The path takes frames again, or wants flush() to be called.
  virtual void onPathReady(Path& path) = 0;
  // usable() has changed. Called only for kinds that can become unusable while
  // they are open.
  virtual void onPathUse(Path& path) = 0;
};

// One way to a peer: it carries frames between a channel and the network, and
// decides nothing. The channel knows it by its id from construction until it
// is closed or destroyed.
//
// How it works. The owner asks hasRoom() and lets the path pull a frame from
// the channel with takeFrame(), as long as both have something; flush() then
// hands to the transport what it takes. Arriving bytes go to the channel by
// itself. The channel keeps every frame until the peer has acknowledged it, so
// a path may end at any moment: nothing is lost with it.
//
// Every kind of path passes the contract in tests/path_contract.h.
//
// Thread: loop thread. Lifetime: owned by its PeerLink; the loop and the
// channel outlive it.
//
// A path never waits and never calls back into its owner from its constructor.
class Path {
 public:
  Path(PathKind kind, PathId id, Channel& channel, PathOwner& owner)
      : channel_(channel), owner_(owner), kind_(kind), id_(id) {}
  virtual ~Path() = default;
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  PathKind kind() const {
    return kind_;
  }
  // Unique in the process, and never used again: the channel may not take a new
  // path for an old one.
  PathId id() const {
    return id_;
  }
  bool closed() const {
    return closed_;
  }
  // Whether it can carry messages now, as far as the path itself can tell.
  virtual bool usable() const {
    return !closed_;
  }
  // Whether it would take another frame now. False once it is closed. Asked
  // before each frame, so it must be cheap.
  virtual bool hasRoom() const = 0;
  // Pulls one frame from the channel and returns its bytes; 0 if the channel
  // has none for this path. With `chunks` false, takes none that carries a part
  // of a message. Call it only if hasRoom(). The bytes include the header of
  // the frame.
  virtual size_t takeFrame(bool chunks = true) = 0;
  // Writes what it has taken, as far as the transport accepts it. True if that
  // made room of which onPathReady() will not tell. Nothing after closing. It
  // may end the path: a write can fail, and an injected cut acts here.
  virtual bool flush() = 0;
  // Bytes that have left since the last call beyond those that takeFrame()
  // returned, such as parity and repeats: a cap on the rate counts them, too.
  virtual uint64_t takeUnpaid() {
    return 0;
  }
  // Ends the path; the transport may still deliver what it has accepted. The
  // first call leads to onPathClosed(), later ones do nothing.
  virtual void close(const Status& why) = 0;
  // As close(), but drops what the transport has accepted, where it can.
  virtual void reset(const Status& why) {
    close(why);
  }

  // When the peer last showed life on this path; when it was made, at first.
  // Any bytes that arrive count, so it says nothing about the outgoing
  // direction.
  virtual TimePoint heardAt() const = 0;
  // The transport's evidence of the path's health. Paths whose transport alone
  // judges it (shared memory, RDMA) never owe anything.
  virtual PathEvidence evidence() const {
    return {};
  }
  // The rules of injected faults have changed; `concerned`: some rule applies
  // to this peer. A rule stands for the network below connections, so the other
  // kinds carry no messages then.
  virtual void faultsChanged(bool concerned) = 0;
  // Fills in the addresses and what was measured.
  virtual void fill(PathStats& stats) const;

 protected:
  Channel& channel_;
  PathOwner& owner_;
  bool closed_ = false;

 private:
  const PathKind kind_;
  const PathId id_;
};

} // namespace resilient
