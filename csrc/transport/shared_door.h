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

// How two processes of one host come to have memory in common. One of them
// says over their connection, which has proved the job's secret, where its
// door is and what to say there (a token). The other one makes the memory and
// hands it over at the door, a socket of the host's own: only there can
// descriptors be passed on, and the kernel tells whose process it is.
//
// Thread: loop thread.
class SharedDoor final : private Handler {
 public:
  using Callback = std::function<void(const Uid& peer, SharedEnds ends)>;

  // Throws StatusError where the system has no such sockets.
  SharedDoor(EventLoop& loop, Callback onCame);
  ~SharedDoor() override;

  // The name of the socket (an abstract one: no file is left behind).
  const std::string& name() const {
    return name_;
  }
  // Lets in whoever says this token, once, as `peer`.
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

// The other side: makes the memory and knocks.
class SharedKnock final : private Handler {
 public:
  // Called once, not from within start(), unless destroyed before.
  using Callback = std::function<void(const Status& status, SharedEnds ends)>;

  static std::unique_ptr<SharedKnock> start(
      EventLoop& loop,
      const std::string& name,
      const std::string& token,
      size_t ringBytes,
      Callback onResult);
  ~SharedKnock() override;

 private:
  SharedKnock(EventLoop& loop, Callback onResult);
  Status
  knock(const std::string& name, const std::string& token, size_t ringBytes);
  void onEvents(uint32_t events) override;
  void end(const Status& status);

  EventLoop& loop_;
  Callback onResult_;
  SharedEnds ends_;
  bool watched_ = false;
  TimerId timer_ = 0;
};

} // namespace resilient
