#pragma once

#include <map>
#include <vector>

#include "base/time.h"
#include "transport/event_loop.h"
#include "transport/stream_socket.h"
#include "wire/hello.h"

namespace resilient {

// Connections of processes that know the job's secret and that no group here
// knows. Each rank forms a group at its own pace, so a member may call before
// this process has heard of it; but its uid may also be made up. Until a group
// knows the caller, nothing is read from its connections: it costs descriptors
// and what the kernel and TLS buffer.
//
// Nothing is lost: we acknowledge only bytes that we have read, and the peer
// keeps the others.
// When its time is over the connections are closed, the peer takes back what it
// had sent, connects again and sends it again.
//
// Thread: loop thread.
class UnknownCallers {
 public:
  struct Caller {
    HelloInfo hello;
    StreamSocket socket; // empty while it has still to hear that it is let in
  };

  // `patience`: how long a process waits, from its first connection on.
  UnknownCallers(EventLoop& loop, size_t maxConnections, Nanos patience);
  ~UnknownCallers();

  // Whether this caller may wait, where so many processes may do so. If it may,
  // its place is kept. Limits count kept places, too: many callers may wait for
  // their verdicts at once.
  bool admits(const HelloInfo& hello, size_t maxProcesses);
  // It has come, to the place that was kept for it; a connection of that index
  // that was there before is closed. And: it has broken away before.
  void add(const HelloInfo& hello, StreamSocket socket);
  void forget(const HelloInfo& hello);
  // A group knows the process now: all that has come, and places kept. A caller
  // without a descriptor arrives later; its place is gone then.
  std::vector<Caller> take(const Uid& process);
  std::vector<HelloInfo> waiting() const; // one for each process

 private:
  struct Process {
    TimerId timer = 0;
    std::map<uint16_t, Caller> callers; // by connection index; not empty
  };

  void drop(const Uid& process);

  EventLoop& loop_;
  const size_t maxConnections_;
  const Nanos patience_;
  std::map<Uid, Process> processes_;
  size_t connections_ = 0;
};

} // namespace resilient
