#include "delegate/unknown_callers.h"

#include <utility>

namespace resilient {

UnknownCallers::UnknownCallers(
    EventLoop& loop,
    size_t maxConnections,
    Nanos patience)
    : loop_(loop), maxConnections_(maxConnections), patience_(patience) {}

UnknownCallers::~UnknownCallers() {
  for (const auto& [uid, process] : processes_) {
    loop_.cancel(process.timer);
  }
}

bool UnknownCallers::admits(const HelloInfo& hello, size_t maxProcesses) {
  const auto found = processes_.find(hello.initiator);
  const bool known = found != processes_.end();
  if (known && found->second.callers.contains(hello.connectionIndex)) {
    return true; // it comes again
  }
  if (connections_ >= maxConnections_ ||
      (!known && processes_.size() >= maxProcesses)) {
    return false;
  }
  Process& process = processes_[hello.initiator];
  if (!known) {
    process.timer =
        loop_.after(patience_, [this, uid = hello.initiator] { drop(uid); });
  }
  process.callers[hello.connectionIndex].hello = hello;
  ++connections_;
  return true;
}

void UnknownCallers::add(const HelloInfo& hello, StreamSocket socket) {
  const auto process = processes_.find(hello.initiator);
  if (process == processes_.end()) {
    return; // its time was over in between
  }
  const auto caller = process->second.callers.find(hello.connectionIndex);
  if (caller != process->second.callers.end()) {
    caller->second = {hello, std::move(socket)};
  }
}

void UnknownCallers::forget(const HelloInfo& hello) {
  const auto process = processes_.find(hello.initiator);
  if (process == processes_.end()) {
    return;
  }
  auto& callers = process->second.callers;
  const auto caller = callers.find(hello.connectionIndex);
  if (caller == callers.end() || caller->second.socket) {
    return; // an earlier one of that index waits
  }
  callers.erase(caller);
  --connections_;
  if (callers.empty()) {
    drop(hello.initiator);
  }
}

std::vector<UnknownCallers::Caller> UnknownCallers::take(const Uid& uid) {
  std::vector<Caller> taken;
  if (const auto process = processes_.find(uid); process != processes_.end()) {
    for (auto& [index, caller] : process->second.callers) {
      taken.push_back(std::move(caller));
    }
    drop(uid);
  }
  return taken;
}

std::vector<HelloInfo> UnknownCallers::waiting() const {
  std::vector<HelloInfo> hellos;
  for (const auto& [uid, process] : processes_) {
    hellos.push_back(process.callers.begin()->second.hello);
  }
  return hellos;
}

void UnknownCallers::drop(const Uid& uid) {
  const auto process = processes_.find(uid);
  loop_.cancel(process->second.timer);
  connections_ -= process->second.callers.size();
  processes_.erase(process);
}

} // namespace resilient
