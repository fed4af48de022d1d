#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "transport/event_loop.h"
#include "transport/shared_path.h"
#include "wire/hello.h"

namespace resilient {

// How two processes of one host come to share memory. One of them listens at an
// abstract Unix socket and tells the other one, over their connection, which
// has proved the job's secret, the name of the socket and a one-time token. The
// other one creates the memory and passes it over that socket, since only Unix
// sockets pass descriptors; the kernel says whose process is at the other end.
//
// Thread: loop thread.
class SharedRendezvous final : private Handler {
 public:
  using Callback = std::function<void(const Uid& peer, SharedEnds ends)>;

  // Throws StatusError where the system has no such sockets.
  SharedRendezvous(EventLoop& loop, Callback onCame);
  ~SharedRendezvous() override;

  // The name of the socket (an abstract one: no file is left behind).
  const std::string& name() const {
    return name_;
  }
  // Accepts the caller that sends this token, once, as `peer`.
  void expect(const Uid& peer, const std::string& token);

 private:
  struct Caller;

  void onEvents(uint32_t events) override;
  void onCaller(std::list<std::unique_ptr<Caller>>::iterator which);
  void drop(std::list<std::unique_ptr<Caller>>::iterator which);

  EventLoop& loop_;
  Callback onCame_;
  std::string name_;
  FileDescriptor fd_;
  std::list<std::pair<std::string, Uid>> expected_;
  std::list<std::unique_ptr<Caller>> callers_;
  TimerId resume_ = 0;
};

// The other side: creates the memory and passes it on.
class SharedVisit final : private Handler {
 public:
  // Called once, not from within start(), unless destroyed before.
  using Callback = std::function<void(const Status& status, SharedEnds ends)>;

  static std::unique_ptr<SharedVisit> start(
      EventLoop& loop,
      const std::string& name,
      const std::string& token,
      size_t ringBytes,
      Callback onResult);
  ~SharedVisit() override;

 private:
  SharedVisit(EventLoop& loop, Callback onResult);
  Status
  visit(const std::string& name, const std::string& token, size_t ringBytes);
  void onEvents(uint32_t events) override;
  void end(const Status& status);

  EventLoop& loop_;
  Callback onResult_;
  SharedEnds ends_;
  bool watched_ = false;
  TimerId timer_ = 0;
};

} // namespace resilient
