#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/time.h"

namespace resilient {

// Messages for people, one line each, on standard error:
//
//   [resilient rank 3 W 12:34:56.789] path 2 to rank 1 is down: ...
//
// Thread-safe: lines never mix. Never pass a secret.
//
// The lock of the log is held while a line is written. A terminal or a pipe
// that blocks therefore holds up every thread that logs, the loop too: messages
// that a peer can cause must go through a LogRateLimit.
enum class LogLevel : uint8_t {
  kDebug = 0,
  kInfo = 1,
  kWarning = 2,
  kError = 3,
};

// "debug", "info", "warning", "error"; anything else gives nothing.
std::optional<LogLevel> logLevelFromName(std::string_view name);

// Messages below `level` are dropped. At first: kWarning. The level and the
// rank belong to the process, and may change at any time.
void setLogLevel(LogLevel level);

// The rank shown in each line; negative (at first): none is shown.
void setLogRank(int rank);

// For messages that are costly to build.
bool logEnabled(LogLevel level);

// Control characters in `text` become spaces, so a peer's text cannot forge a
// line.
void logMessage(LogLevel level, std::string_view text);

// Sends finished lines (without newline) elsewhere; an empty function
// restores standard error. Called under the log's lock, so it must not log.
// After it returns, the old sink is not called any more.
void setLogSink(std::function<void(std::string_view line)> sink);

// Lets at most `burst` messages pass in each `period`, and counts the rest: a
// flapping link must not flood the terminal.
//
//   if (auto dropped = limit.pass(now)) {
//     logMessage(LogLevel::kWarning, "..." + LogRateLimit::suffix(*dropped));
//   }
//
// The dropped messages are reported only with the next one that passes.
class LogRateLimit {
 public:
  LogRateLimit(uint64_t burst, Nanos period) : burst_(burst), period_(period) {}

  // Nothing if this message is to be dropped, else how many have been dropped
  // since the last one that passed. Thread-safe.
  std::optional<uint64_t> pass(TimePoint now);

  // "" or " (12 similar messages left out)"
  static std::string suffix(uint64_t dropped);

 private:
  const uint64_t burst_;
  const Nanos period_;
  std::mutex mutex_;
  std::optional<TimePoint> start_; // of the current period
  uint64_t passed_ = 0; // in this period
  uint64_t dropped_ = 0; // since the last one that passed
};

} // namespace resilient
