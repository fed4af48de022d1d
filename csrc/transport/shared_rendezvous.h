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
//
// Steps: expect() a token and send the offer; the visitor connects, passes the
// memory and two eventfds in one message; the token is checked and used up; one
// byte says yes. Any other message ends in a closed socket. A visitor has 5 s.
//
// The kernel's word on the user at the other end comes first, on both sides:
// abstract sockets have no file permissions, so any user of the host can
// connect.
class SharedRendezvous final : private Handler {
 public:
  // Called in the loop; must not destroy the rendezvous.
  using Callback = std::function<void(const Uid& peer, SharedEnds ends)>;

  // Throws StatusError where the system has no such sockets.
  SharedRendezvous(EventLoop& loop, Callback onCame);
  ~SharedRendezvous() override;

  // The name of the socket (an abstract one: no file is left behind).
  const std::string& name() const {
    return name_;
  }
  // Accepts the caller that sends this token, once, as `peer`. A token that is
  // never used stays. It has 1 to 64 bytes.
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

  // An error that occurs at once reaches the callback in the next turn, too.
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
