#include "delegate/flight_recorder.h"

#include <cstdio>
#include <ctime>

namespace resilient {

uint64_t FlightRecorder::begin(Entry entry) {
  if (entries_ == 0) {
    return 0;
  }
  entry.at = std::chrono::system_clock::now();
  std::lock_guard lock(mutex_);
  entry.id = ++lastId_;
  const size_t at = (entry.id - 1) % entries_;
  if (at < ring_.size()) {
    ring_[at] = std::move(entry);
  } else {
    ring_.push_back(std::move(entry));
  }
  return lastId_;
}

void FlightRecorder::end(uint64_t id, Nanos took, const std::string& error) {
  if (id == 0) {
    return;
  }
  std::lock_guard lock(mutex_);
  Entry& entry = ring_[(id - 1) % entries_];
  if (entry.id == id) { // else overwritten since
    entry.took = took;
    entry.error = error;
  }
}

std::string FlightRecorder::dump() const {
  std::lock_guard lock(mutex_);
  std::string out;
  const size_t n = ring_.size();
  for (size_t i = 0; i < n; ++i) {
    const Entry& e = ring_[(lastId_ - n + i) % entries_];
    const std::time_t second = std::chrono::system_clock::to_time_t(e.at);
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                        e.at.time_since_epoch())
                        .count() %
        1000;
    std::tm local{};
    localtime_r(&second, &local);
    char time[32];
    std::snprintf(
        time,
        sizeof(time),
        "%02d:%02d:%02d.%03d",
        local.tm_hour,
        local.tm_min,
        local.tm_sec,
        static_cast<int>(ms));
    out += '#' + std::to_string(e.id) + ' ' + time + " group " + e.group;
    if (e.signature.kind == OpKind::kSend) {
      out += (e.isSend ? " send to " : " recv from ") +
          (e.peer < 0 ? std::string("any") : std::to_string(e.peer)) + " tag " +
          std::to_string(e.tag) + ' ' + dtypeName(e.signature.dtype) + '[' +
          std::to_string(e.signature.count) + ']';
    } else {
      out += " collective " + std::to_string(e.sequence) + ' ' +
          e.signature.toString();
    }
    out += ' ' + std::to_string(e.bytes) + " bytes: ";
    if (e.took.count() < 0) {
      out += "pending";
    } else {
      char took[48];
      std::snprintf(took, sizeof(took), "%.6f s", toSeconds(e.took));
      out += (e.error.empty() ? "done in " : "failed after ");
      out += took;
    }
    if (!e.error.empty()) {
      out += ": " + e.error;
    }
    out += '\n';
  }
  return out;
}

} // namespace resilient
