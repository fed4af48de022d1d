#include "base/log.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <utility>

#include "base/text.h"

namespace resilient {

namespace {

constexpr std::array<std::string_view, 4> kLevelNames = {
    "debug",
    "info",
    "warning",
    "error"};
constexpr std::string_view kLevelLetters = "DIWE";

struct Log {
  std::atomic<LogLevel> level{LogLevel::kWarning};
  std::atomic<int> rank{-1};
  std::mutex mutex; // orders the lines and guards the sink
  std::function<void(std::string_view)> sink;
};

Log& log() {
  // Never destroyed: threads may log while the process exits.
  static Log* instance = new Log;
  return *instance;
}

std::string timeOfDay() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(
                          now - std::chrono::system_clock::from_time_t(seconds))
                          .count();
  std::tm local{};
  localtime_r(&seconds, &local);
  std::array<char, 40> text;
  std::snprintf(
      text.data(),
      text.size(),
      "%02d:%02d:%02d.%03d",
      local.tm_hour,
      local.tm_min,
      local.tm_sec,
      static_cast<int>(millis));
  return text.data();
}

} // namespace

std::optional<LogLevel> logLevelFromName(std::string_view name) {
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (kLevelNames[i] == name) {
      return static_cast<LogLevel>(i);
    }
  }
  return std::nullopt;
}

void setLogLevel(LogLevel level) {
  log().level = level;
}

void setLogRank(int rank) {
  log().rank = rank;
}

bool logEnabled(LogLevel level) {
  return level >= log().level.load(std::memory_order_relaxed);
}

void logMessage(LogLevel level, std::string_view text) {
  if (!logEnabled(level)) {
    return;
  }
  std::string line = "[resilient";
  const int rank = log().rank;
  if (rank >= 0) {
    line += " rank " + std::to_string(rank);
  }
  line += ' ';
  line += kLevelLetters[static_cast<size_t>(level)];
  line += ' ';
  line += timeOfDay();
  line += "] ";
  line += withoutControls(text); // a peer's may be in it
  std::lock_guard lock(log().mutex);
  if (log().sink) {
    log().sink(line);
    return;
  }
  line += '\n';
  // One write for each line: lines of several processes on one terminal must
  // not mix either. Standard error is unbuffered.
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void setLogSink(std::function<void(std::string_view line)> sink) {
  std::lock_guard lock(log().mutex);
  log().sink = std::move(sink);
}

// The period begins with a message, not with the clock: a lone message always
// passes.
std::optional<uint64_t> LogRateLimit::pass(TimePoint now) {
  std::lock_guard lock(mutex_);
  if (!start_ || now - *start_ >= period_) {
    start_ = now;
    passed_ = 0;
  }
  if (passed_ == burst_) {
    ++dropped_;
    return std::nullopt;
  }
  ++passed_;
  return std::exchange(dropped_, 0);
}

std::string LogRateLimit::suffix(uint64_t dropped) {
  return dropped == 0
      ? ""
      : " (" + std::to_string(dropped) + " similar messages left out)";
}

} // namespace resilient
