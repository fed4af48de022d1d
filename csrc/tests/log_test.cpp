#include "base/log.h"

#include <thread>
#include <vector>

#include "tests/check.h"

namespace resilient {

namespace {

// Collects lines for one test.
class Capture {
 public:
  Capture() {
    setLogSink([this](std::string_view line) { lines.emplace_back(line); });
  }
  ~Capture() {
    setLogSink({});
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  std::vector<std::string> lines;
};

} // namespace

TEST(log_line_has_rank_level_and_time) {
  Capture capture;
  setLogRank(3);
  logMessage(LogLevel::kWarning, "path 2 is down");
  CHECK_EQ(capture.lines.size(), 1);
  const std::string& line = capture.lines[0];
  CHECK_EQ(line.substr(0, 20), "[resilient rank 3 W ");
  CHECK_EQ(line.substr(32), "] path 2 is down");
  CHECK_EQ(line[22], ':');
  CHECK_EQ(line[28], '.');
}

TEST(log_drops_what_is_below_its_level) {
  Capture capture;
  logMessage(LogLevel::kInfo, "no");
  CHECK(!logEnabled(LogLevel::kInfo));
  setLogLevel(LogLevel::kDebug);
  logMessage(LogLevel::kDebug, "yes");
  setLogLevel(LogLevel::kError);
  logMessage(LogLevel::kWarning, "no");
  CHECK_EQ(capture.lines.size(), 1);
  CHECK_CONTAINS(capture.lines[0], "D ");
}

TEST(log_message_stays_on_one_line) {
  Capture capture;
  logMessage(LogLevel::kError, "a\nb\x1b[31mc");
  CHECK_CONTAINS(capture.lines.at(0), "] a b [31mc");
}

TEST(log_lines_of_threads_do_not_mix) {
  Capture capture;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int k = 0; k < 200; ++k) {
        logMessage(LogLevel::kError, "whole line");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(capture.lines.size(), 800);
  for (const std::string& line : capture.lines) {
    CHECK(line.ends_with("] whole line"));
  }
}

TEST(log_rate_limit_counts_what_it_drops) {
  LogRateLimit limit(2, std::chrono::seconds(1));
  const TimePoint start{};
  CHECK(limit.pass(start) == 0u);
  CHECK(limit.pass(start) == 0u);
  CHECK(!limit.pass(start));
  CHECK(!limit.pass(start + std::chrono::milliseconds(999)));
  const auto dropped = limit.pass(start + std::chrono::seconds(1));
  CHECK(dropped == 2u);
  CHECK_EQ(LogRateLimit::suffix(*dropped), " (2 similar messages left out)");
  CHECK_EQ(LogRateLimit::suffix(0), "");
  CHECK(limit.pass(start + std::chrono::seconds(1)) == 0u);
  CHECK(!limit.pass(start + std::chrono::seconds(1)));
}

} // namespace resilient
